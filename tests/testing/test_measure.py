"""The measuring tools against allocations that are known."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from planner.inspect.memory import (
    Measured,
    jax_retained,
    jax_temp_bytes,
    numpy_memory,
    saved_tensor_bytes,
    torch_backward_memory,
    torch_memory,
)


def test_import_loads_no_framework() -> None:
    code = "import sys, planner.inspect.memory\nassert not {'torch', 'jax', 'hypothesis'} & set(sys.modules)\n"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- torch --------------------------------------------------------------------------------------


def test_torch_result_alone(torch: Any) -> None:
    result, measured = torch_memory(lambda: torch.ones(1001))
    assert result.shape == (1001,)
    assert measured == Measured(4004, 0)  # asked for, not rounded up to 64


def test_torch_temporaries_count_at_their_peak(torch: Any) -> None:
    def call() -> Any:
        first = torch.ones(1000)
        del first
        second, third = torch.ones(700), torch.ones(600)
        return (second[:600] + third).sum()

    assert torch_memory(call)[1] == Measured(4 * (700 + 600 + 600 + 1), 0)


def test_torch_sees_temporaries_inside_an_operator(torch: Any) -> None:
    x, y = torch.ones(16, 32, 8)[:, :16], torch.ones(16, 8, 4)
    measured = torch_memory(lambda: torch.einsum("ijk,ikl->jl", x, y))[1]
    assert measured.peak_bytes >= 4 * (x.numel() + 16 * 4)  # einsum flattens x into a copy
    assert measured.retained_bytes == 0


def test_torch_views_of_operands_are_free(torch: Any) -> None:
    x = torch.ones(100)
    assert torch_memory(lambda: x[::2])[1] == Measured(0, 0)


def test_torch_a_view_result_owns_its_whole_storage(torch: Any) -> None:
    assert torch_memory(lambda: torch.ones(100)[:3])[1] == Measured(400, 0)


def test_torch_frees_of_older_tensors_do_not_count(torch: Any) -> None:
    kept, _ = torch_memory(lambda: [torch.ones(5000)])  # allocated under the profiler

    def call() -> Any:
        kept.clear()
        return torch.ones(10), torch.ones(20)

    assert torch_memory(call)[1] == Measured(120, 0)


def test_torch_side_effects_and_cycles(torch: Any) -> None:
    kept: list[Any] = []
    assert torch_memory(lambda: kept.append(torch.ones(50)))[1] == Measured(200, 200)

    def cycle() -> Any:
        loop: list[Any] = [torch.ones(50)]
        loop.append(loop)
        return torch.ones(1)

    assert torch_memory(cycle)[1] == Measured(204, 0)


def test_torch_retained_equals_what_the_hooks_see(torch: Any) -> None:
    a = torch.ones(5, 2, 3, requires_grad=True)
    c = torch.ones(4, 3, 2, requires_grad=True)
    q = torch.tensor([3, 0, 0, 1, 2])
    taken = 4 * 5 * 3 * 2

    def call() -> Any:
        return torch.matmul(a, c[q])

    _, measured = torch_memory(call)
    assert measured.retained_bytes == taken
    assert saved_tensor_bytes(call, (a, c, q)) == taken
    c.requires_grad_(False)
    assert torch_memory(call)[1].retained_bytes == taken
    c.requires_grad_(True)
    a.requires_grad_(False)
    assert torch_memory(call)[1].retained_bytes == saved_tensor_bytes(call, (a, c, q)) == 0


def test_torch_storages_saved_twice_or_by_the_result_count_once(torch: Any) -> None:
    x = torch.ones(30, requires_grad=True)

    def call() -> Any:
        y = x + x
        return (y * y.sin()).exp()  # saves y twice, sin y, and the result

    assert torch_memory(call)[1].retained_bytes == saved_tensor_bytes(call, (x,)) == 2 * 120


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


def test_torch_saved_and_dropped_does_not_count(torch: Any) -> None:
    x = torch.ones(30, requires_grad=True)

    def call() -> Any:
        (x + x).exp().sin()  # a graph that dies at once, a saved output in it
        return x + x

    assert torch_memory(call)[1].retained_bytes == saved_tensor_bytes(call, (x,)) == 0


def test_torch_python_numbers_are_retained_but_not_hooked(torch: Any) -> None:
    x = torch.ones(30, requires_grad=True)
    assert torch_memory(lambda: 2 * x)[1].retained_bytes == 8
    assert saved_tensor_bytes(lambda: 2 * x, (x,)) == 0


def test_torch_backward(torch: Any) -> None:
    x = torch.ones(30, requires_grad=True)
    gradients, measured = torch_backward_memory(lambda: x.exp().sin(), (x,), torch.ones(30))
    assert torch.allclose(gradients[0], torch.cos(torch.e * torch.ones(30)) * torch.e)
    # exp x is retained until the end; beside it live cos exp x and its product with gout.
    assert measured == Measured(3 * 120, 0)
    # The result's own storage does not count, retained or not.
    assert torch_backward_memory(lambda: x.exp(), (x,))[1] == Measured(120, 0)


# --- jax ----------------------------------------------------------------------------------------


def test_jax_retained() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    jnp = jax.numpy
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

    assert jax_retained(with_index, jnp.ones(30)) - jax_retained(with_index, jnp.ones(30), held=index) in (
        0,
        120,
    )


def test_jax_temporaries() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    x = jax.numpy.ones((64, 64))
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
