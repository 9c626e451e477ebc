"""The frameworks as the tests of laws ask them: `planner.testing.engines`, and what tests need beyond those.

A law asks a framework to run functions of arrays. NumPy and torch run one at a time. JAX compiles what it is asked of
sixteen problems as one program, which takes half the time of sixteen programs; it also runs one problem in eight
without `jit`.
"""

from __future__ import annotations

import gc
import importlib.util
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from planner.inspect import memory as measure
from planner.inspect.meter import of_some
from planner.testing.engines import Engine, JaxEngine, TorchEngine
from planner.workloads import Workload


class Ask(NamedTuple):
    """A function to run, its arrays, and what comes out: for each result its name, its values and its dtype."""

    run: Callable[..., Any]
    arrays: tuple[Any, ...]
    expected: list[tuple[str, np.ndarray, str]]
    jitted: bool = False


def saved_tensor_bytes(call, operands=()) -> int:
    """Count the storages that torch's autograd saves, by its own hooks: a second count of retained bytes.

    The count leaves out the storages of the operands, which include index arrays, those of the result, and tensors that
    were saved and dropped again before the call returned. The hooks do not see tensors that an `autograd.Function`
    keeps as attributes of its context, nor Python numbers, which ``2 * x`` keeps in 8 bytes. `torch_memory` sees both.
    """
    import torch

    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor):
        holder = _Saved(tensor)
        saved.add(holder)
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        result = call()
    gc.collect(0)
    not_counted = measure.torch_storages(result) | measure.torch_storages(list(operands))
    sizes = measure.torch_storages([holder.tensor for holder in saved])
    return sum(n for pointer, n in sizes.items() if pointer not in not_counted)


class _Saved:
    """Holds one saved tensor, and can be weakly referenced."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # a saved output with its grad_fn would keep itself alive


class Numpy(Engine):
    """NumPy computes no derivatives: of what is asked it gives the result alone."""

    batch = 1
    alternatives: tuple[int, ...] = ()  # how many of a plan's alternatives are tried; all
    smaller: dict[str, int] = {}  # what keeps problems small where each is compiled

    def ways(self, problem) -> tuple[bool, ...]:
        """In which ways a problem is run: without `jit`, with it, or both."""
        return (False,)

    def answers(self, asks) -> list[Any]:
        return [ask.run(*ask.arrays) for ask in asks]

    def pulled(self, call, operands, indices, gout, wanted) -> list[Any]:
        """The result, and the gradients of the wanted operands."""
        return [call(operands, indices)]

    def functional(self, function, operands, gout) -> list[Any]:
        """The result and all gradients, by a functional transform."""
        return [function(*operands)]

    def held(self, call, operands, indices, wanted) -> list[int]:
        """The bytes that a call holds for its gradients, as counted in each way that the framework has."""
        return [measure.numpy_memory(lambda: call(operands, indices))[1].retained_bytes]

    def leaves(self, arrays) -> list[Any]:
        """Operands of these values, which all need gradients."""
        return [self.array(x) for x in arrays]

    def of_workload(self, workload: Workload) -> list[Any]:
        """A named workload's operands, some of which may be views of one array; all need gradients."""
        return workload.operands(self.name)

    def jit(self, function):
        return function


class Torch(TorchEngine, Numpy):
    """Autograd and `torch.func`."""

    def pulled(self, call, operands, indices, gout, wanted):
        import torch

        result = call(operands, indices)
        assert result.requires_grad == bool(wanted)
        leaves = [operands[number] for number in wanted]
        return [result, *(torch.autograd.grad(result, leaves, gout.to(result.dtype)) if wanted else ())]

    def functional(self, function, operands, gout):
        import torch

        count = tuple(range(len(operands)))
        return [function(*operands), *torch.func.grad(lambda *xs: (function(*xs) * gout).sum(), count)(*operands)]

    def tangents(self, function, operands, tangents):
        """The result and its directional derivative, by each kind of forward mode."""
        import torch
        from torch.autograd import forward_ad

        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(operands, tangents, strict=True)]
            value, tangent = forward_ad.unpack_dual(function(*duals))
        both = [value, torch.zeros_like(value) if tangent is None else tangent]
        return [*both, *self.jvp(function, operands, tangents)]

    def jvp(self, function, operands, tangents):
        import torch

        return torch.func.jvp(function, tuple(operands), tuple(tangents))

    def held(self, call, operands, indices, wanted):
        """By torch's allocator, and by autograd's hooks."""
        measured = measure.torch_memory(lambda: call(operands, indices))[1]
        saved = saved_tensor_bytes(lambda: call(operands, indices), [*operands, *indices.values()])
        return [measured.retained_bytes, saved]

    def leaves(self, arrays):
        return [self.array(x).requires_grad_() for x in arrays]

    def of_workload(self, workload):
        return workload.operands(self.name, requires_grad=True)

    def vmap(self, function, dims):
        import torch

        return torch.func.vmap(function, dims)

    def seconds(self, function, operands, gout, given):
        """What `given`, for the gradients of `gout`, gives back to the operands and to `gout`: once."""
        import torch

        gout = gout.requires_grad_()
        first = torch.autograd.grad(function(*operands), operands, gout, create_graph=True)
        return [torch.autograd.grad(first, [*operands, gout], given, materialize_grads=True)]


class Jax(JaxEngine, Numpy):
    """JAX, without `jit` and with it."""

    batch = 16
    alternatives = (3,)
    smaller = {"max_size": 3, "max_axes": 4}

    def __init__(self, in_a_hurry: bool = True) -> None:
        self.in_a_hurry = in_a_hurry

    def ways(self, problem):
        return (True, False) if problem.seed % 8 == 0 else (True,)

    def jit(self, function):
        import jax_fast

        return jax_fast.jit(function, jax_fast.FAST if self.in_a_hurry else jax_fast.AS_USERS)

    def answers(self, asks):
        import jax_fast

        together = [ask for ask in asks if ask.jitted]
        run = self.jit(lambda arrays: [ask.run(*own) for ask, own in zip(together, arrays, strict=True)])
        with jax_fast.compiled_once():
            jitted = iter(run([ask.arrays for ask in together]) if together else ())
        return [next(jitted) if ask.jitted else ask.run(*ask.arrays) for ask in asks]

    def pulled(self, call, operands, indices, gout, wanted):
        if not wanted:
            return [call(operands, indices)]
        return self.functional(of_some(call, operands, indices, wanted), [operands[n] for n in wanted], gout)

    def functional(self, function, operands, gout):
        import jax

        result, pull = jax.vjp(function, *operands)
        return [result, *pull(gout.astype(result.dtype))]

    def tangents(self, function, operands, tangents):
        return list(self.jvp(function, operands, tangents))

    def jvp(self, function, operands, tangents):
        import jax

        return jax.jvp(function, tuple(operands), tuple(tangents))

    def held(self, call, operands, indices, wanted):
        """By the buffers of the pullback."""
        chosen = [operands[number] for number in wanted]
        return [measure.jax_retained(of_some(call, operands, indices, wanted), *chosen, held=(operands, indices))]

    def vmap(self, function, dims):
        import jax

        return jax.vmap(function, dims)

    def seconds(self, function, operands, gout, given):
        """By reverse mode over reverse, forward over reverse, reverse over forward, and forward over forward."""
        import jax

        operands, given = tuple(operands), tuple(given)

        def first(operands, gout):
            return jax.vjp(function, *operands)[1](gout)

        def along(operands, given):
            return jax.jvp(function, operands, given)[1]

        _, ahead = jax.jvp(lambda operands: first(operands, gout), (operands,), (given,))
        back, gradients = jax.vjp(along, operands, given)[1](gout)
        _, twice = jax.jvp(lambda operands: along(operands, given), (operands,), (given,))
        to_operands, to_gout = jax.vjp(first, operands, gout)[1](given)
        return [[*to_operands, to_gout], [*ahead, to_gout], [*back, to_gout], [*gradients], [twice]]


ENGINES = {"numpy": Numpy, "torch": Torch, "jax": Jax}


def in_each(*names: str, **samples: Any):
    """Parametrize a test by `engine`, or by `engine` and `sample`: by name, a sample or a list of samples.

    What is not installed is skipped.
    """
    rows = [(name, name) for name in names]
    for name, given in samples.items():
        if isinstance(given, list):
            rows += [(name, f"{name}-{place}", sample) for place, sample in enumerate(given)]
        else:
            rows.append((name, name, given))
    cases = []
    for name, label, *sample in rows:
        absent = pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
        cases.append(pytest.param(ENGINES[name](), *sample, marks=absent, id=label))
    return pytest.mark.parametrize("engine" if names else ("engine", "sample"), cases)
