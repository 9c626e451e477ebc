"""The measuring tools against allocations that are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import run_python
from engines import saved_tensor_bytes

from planner.inspect.memory import (
    Measured,
    jax_retained,
    jax_temp_bytes,
    numpy_memory,
    torch_backward_memory,
    torch_memory,
)


def test_import_loads_no_framework() -> None:
    run_python("import sys, planner.inspect.memory\nassert not {'torch', 'jax', 'hypothesis'} & set(sys.modules)\n")


# --- torch --------------------------------------------------------------------------------------


def temporaries(torch: Any) -> Any:
    first = torch.ones(1000)
    del first
    second, third = torch.ones(700), torch.ones(600)
    return (second[:600] + third).sum()


def cycle(torch: Any) -> Any:
    loop: list[Any] = [torch.ones(50)]
    loop.append(loop)
    return torch.ones(1)


OPERAND: list[Any] = []  # outlives the calls
KEPT: list[Any] = []


@pytest.mark.parametrize(
    ("call", "peak", "retained"),
    [
        (lambda torch: torch.ones(1001), 4004, 0),  # asked for, not rounded up to 64
        (temporaries, 4 * (700 + 600 + 600 + 1), 0),
        (lambda torch: OPERAND[0][::2], 0, 0),
        (lambda torch: torch.ones(100)[:3], 400, 0),  # a view owns its whole storage
        (lambda torch: (OPERAND.clear(), torch.ones(10), torch.ones(20)), 120, 0),  # what is freed is older
        (lambda torch: KEPT.append(torch.ones(50)), 200, 200),
        (cycle, 204, 0),
    ],
)
def test_torch_memory(torch: Any, call: Any, peak: int, retained: int) -> None:
    OPERAND[:] = torch_memory(lambda: [torch.ones(5000)])[0]  # allocated under the profiler
    assert torch_memory(lambda: call(torch))[1] == Measured(peak, retained)


def test_torch_sees_temporaries_inside_an_operator(torch: Any) -> None:
    x, y = torch.ones(16, 32, 8)[:, :16], torch.ones(16, 8, 4)
    measured = torch_memory(lambda: torch.einsum("ijk,ikl->jl", x, y))[1]
    assert measured.peak_bytes >= 4 * (x.numel() + 16 * 4)  # einsum flattens x into a copy
    assert measured.retained_bytes == 0


@pytest.mark.parametrize(("needs", "taken"), [((True, True), 120), ((True, False), 120), ((False, True), 0)])
def test_torch_retains_what_the_hooks_see(torch: Any, needs: tuple[bool, bool], taken: int) -> None:
    a = torch.ones(5, 2, 3, requires_grad=needs[0])
    c = torch.ones(4, 3, 2, requires_grad=needs[1])
    q = torch.tensor([3, 0, 0, 1, 2])

    def call() -> Any:
        return torch.matmul(a, c[q])

    assert torch_memory(call)[1].retained_bytes == saved_tensor_bytes(call, (a, c, q)) == taken


def test_torch_own_functions_are_counted(torch: Any) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            twice = 2 * x
            ctx.save_for_backward(twice)
            ctx.attribute = x + 1
            return x * x

        @staticmethod
        def backward(ctx: Any, gout: Any) -> Any:
            return gout * ctx.saved_tensors[0]

    x = torch.ones(25, requires_grad=True)
    assert torch_memory(lambda: Square.apply(x))[1] == Measured(300, 200)
    assert saved_tensor_bytes(lambda: Square.apply(x), (x,)) == 100  # hooks do not see the attribute


def dropped(x: Any) -> Any:
    (x + x).exp().sin()  # a graph that dies at once, a saved output in it
    return x + x


@pytest.mark.parametrize(
    ("call", "retained", "hooked"),
    [
        (lambda x: ((y := x + x) * y.sin()).exp(), 240, 240),  # saves y twice, sin y, and the result
        (dropped, 0, 0),
        (lambda x: 2 * x, 8, 0),  # hooks see no Python numbers
    ],
)
def test_torch_retained(torch: Any, call: Any, retained: int, hooked: int) -> None:
    x = torch.ones(30, requires_grad=True)
    assert torch_memory(lambda: call(x))[1].retained_bytes == retained
    assert saved_tensor_bytes(lambda: call(x), (x,)) == hooked


def test_torch_backward(torch: Any) -> None:
    x = torch.ones(30, requires_grad=True)
    gradients, measured = torch_backward_memory(lambda: x.exp().sin(), (x,), torch.ones(30))
    assert torch.allclose(gradients[0], torch.cos(torch.e * torch.ones(30)) * torch.e)
    # exp x is retained until the end; beside it live cos exp x and its product with gout.
    assert measured == Measured(3 * 120, 0)
    # The result's own storage does not count, retained or not.
    assert torch_backward_memory(lambda: x.exp(), (x,))[1] == Measured(120, 0)
    y = torch.ones(3, 4, requires_grad=True)  # a gradient that is a view of the output's, and one that repeats it
    assert torch_backward_memory(lambda: y.t(), (y,))[1] == Measured(0, 0)
    assert torch_backward_memory(lambda: y.sum(1), (y,))[1] == Measured(48, 0)


# --- jax ----------------------------------------------------------------------------------------


def test_jax_retained(jnp: Any) -> None:
    a, c, q = jnp.ones((5, 2, 3)), jnp.ones((4, 3, 2)), jnp.array([3, 0, 0, 1, 2], jnp.uint32)
    index = jnp.arange(30)
    assert jax_retained(lambda a, b: a @ b, jnp.ones((3, 4)), jnp.ones((4, 5))) == 0
    assert jax_retained(jnp.exp, jnp.ones(30)) == 0  # keeps its result
    assert jax_retained(jnp.sin, jnp.ones(30)) == 120  # keeps the cosine
    assert jax_retained(lambda tree: jnp.sin(tree["x"]), {"x": jnp.ones(30)}) == 120

    def gathered(a: Any, c: Any) -> Any:
        return jnp.matmul(a, jnp.take(c, q, axis=0, mode="clip"))

    taken = 4 * 5 * 3 * 2
    assert taken <= jax_retained(gathered, a, c, held=q) <= taken + 2 * q.nbytes

    def with_index(x: Any) -> Any:
        return x.at[index].get(mode="promise_in_bounds", unique_indices=True) * 1.0

    more = jax_retained(with_index, jnp.ones(30)) - jax_retained(with_index, jnp.ones(30), held=index)
    assert more in (0, 120)


def test_jax_temporaries(jnp: Any, xla_sizes: None) -> None:
    x = jnp.ones((64, 64))
    assert jax_temp_bytes(lambda x: x + 1, x) == 0
    assert jax_temp_bytes(lambda x: (x @ x) @ x, x) >= x.nbytes


# --- numpy --------------------------------------------------------------------------------------


def test_numpy() -> None:
    operand, kept = np.ones(5000), []
    _, measured = numpy_memory(lambda: np.ones(10_000).sum())
    assert 80_000 <= measured.peak_bytes < 90_000
    assert measured.retained_bytes == 0
    assert numpy_memory(lambda: np.ones(10_000)[::2])[1].retained_bytes == 0
    assert numpy_memory(lambda: (operand[::2], operand + 1))[1].retained_bytes == 0
    assert numpy_memory(lambda: kept.append(np.zeros(300)))[1].retained_bytes == 2400
