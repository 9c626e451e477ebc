"""The frameworks behind one interface for `planner.testing.laws`: arrays, gradients, and what calls allocate."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from planner.api import plan
from planner.inspect import memory as measure
from planner.inspect.meter import Call, of_some
from planner.language.errors import PlannerError, PlannerLimitError
from planner.language.spec import Operand
from planner.plan import Plan
from planner.testing.problem import Array, Problem

# Plans do not count copies of index arrays: in range, flattened, broadcast. If index arrays are long and the other
# arrays are small, these copies are most of what is allocated.
_INDEX_COPIES = 6
# Bytes that plans do not count: Python's own objects, which NumPy's measurement includes, and XLA's padding.
_OWN_BYTES = 2**15


class Engine:
    """One framework. This base class is NumPy, which computes no gradients; the others override what differs.

    Attributes:
        name: the backend's name.
        differentiates: whether it computes gradients.
        strided: whether arrays have strides.
        conjugates: whether gradients conjugate the other operands.
    """

    name = "numpy"
    differentiates = False
    strided = True
    conjugates = False

    def context(self, problem: Problem) -> contextlib.AbstractContextManager[Any]:
        """Return a context with the settings that the problem's dtypes need."""
        return contextlib.nullcontext()

    def wait(self) -> None:
        """Raise the error for a bad index that arrives after its call. Here none does."""

    def refuses(self, dtype: str) -> str:
        """Return why operands of a dtype cannot be run; "" if they can."""
        return "NumPy has no bfloat16" if dtype == "bfloat16" else ""

    def array(self, x: Array, dtype: str = "") -> Any:
        """Return an array of the framework with the same values, and the same strides if it has strides."""
        return x

    def described(self, x: Any) -> tuple[Array, str]:
        """Return the values as a NumPy array, and the dtype's name; bfloat16 values are returned as float32."""
        return np.asarray(x), np.asarray(x).dtype.name

    def result_dtype(self, dtypes: Sequence[str]) -> str:
        """Return the dtype of a result."""
        return np.result_type(*map(np.dtype, dtypes)).name

    def operands(self, problem: Problem) -> list[Any]:
        """Return the problem's operands."""
        return [self.array(x, dtype) for x, dtype in zip(problem.operands(), problem.dtypes, strict=True)]

    def indices(self, problem: Problem) -> dict[str, Any]:
        """Return the problem's index arrays."""
        return {name: self.array(q) for name, q in problem.indices.items()}

    def plan(self, problem: Problem, operands: Sequence[Any], indices: Mapping[str, Any], **options: Any) -> Plan:
        """Plan a problem, with the gradients that it needs."""
        return plan(problem.spec, *operands, **{**problem.arguments(), **indices}, backend=self.name, **options)

    def gradients(
        self, function: Callable[..., Any], leaves: Sequence[Any], gout: Any, along: Sequence[Any] | None = None
    ) -> list[Any]:
        """Return the gradients of a function of some operands, for the output gradient `gout`.

        With `along`, return second derivatives: the gradients of these gradients, for the cotangents `along`.
        """
        raise AssertionError(f"{self.name} computes no gradients")

    def retained(self, problem: Problem, call: Call) -> tuple[int, int]:
        """Return the bytes that the call keeps alive: predicted by the plan, and measured."""
        operands, indices = self.operands(problem), self.indices(problem)
        call(operands, indices)  # plans, and fills caches
        predicted = self.plan(problem, operands, indices).cost.retained_bytes
        return predicted, self.memory(lambda: call(operands, indices)).retained_bytes

    def memory(self, call: Callable[[], Any]) -> measure.Measured:
        """Return the bytes that a call allocates."""
        return measure.numpy_memory(call)[1]

    def peaks(
        self, problem: Problem, operands: Sequence[Any], indices: Mapping[str, Any]
    ) -> Iterator[tuple[str, int, int]]:
        """Yield what would be wrong, the measured peak in bytes, and the most bytes that are allowed."""
        analysis = self.plan(problem, operands, indices).analyze(*operands, rounds=1, **indices)
        copies = _INDEX_COPIES * sum(8 * q.size for q in problem.indices.values())
        for total in analysis.totals:
            predicted, measured = total.predicted.live_bytes, total.measured.live_bytes
            if total.lowering == "" and predicted is not None and measured is not None:
                yield (
                    f"the {total.program} program is over twice what the plan says",
                    measured,
                    2 * predicted + copies + _OWN_BYTES,
                )


class TorchEngine(Engine):
    """PyTorch.

    Attributes:
        place: the name of torch's device.
    """

    name, place = "torch", "cpu"
    differentiates = True
    conjugates = True

    def refuses(self, dtype: str) -> str:
        """Refuse the wider unsigned dtypes, which torch cannot sum."""
        return f"torch has no sums of {dtype}" if dtype in ("uint16", "uint32", "uint64") else ""

    def array(self, x: Array, dtype: str = "") -> Any:
        """Return a tensor over the same memory; in another dtype, a copy with the same strides."""
        import torch

        tensor = torch.from_numpy(np.asarray(x))
        wanted = getattr(torch, dtype) if dtype else tensor.dtype
        if tensor.dtype == wanted and self.place == "cpu":
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device=self.place).copy_(tensor)

    def described(self, x: Any) -> tuple[Array, str]:
        """The values as NumPy has them, and the dtype's name."""
        import torch

        x = x.detach().resolve_conj()
        name = str(x.dtype).removeprefix("torch.")
        return (x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy(), name

    def result_dtype(self, dtypes: Sequence[str]) -> str:
        """Return the dtype that torch promotes tensors to."""
        import torch

        result = getattr(torch, dtypes[0])
        for dtype in dtypes[1:]:
            result = torch.promote_types(result, getattr(torch, dtype))
        return str(result).removeprefix("torch.")

    def operands(self, problem: Problem) -> list[Any]:
        """Return the problem's operands, with `requires_grad` set where the problem needs a gradient."""
        operands = super().operands(problem)
        return [x.requires_grad_(need) for x, need in zip(operands, problem.requires_grad, strict=True)]

    def gradients(
        self, function: Callable[..., Any], leaves: Sequence[Any], gout: Any, along: Sequence[Any] | None = None
    ) -> list[Any]:
        """Compute gradients by autograd; second derivatives by autograd, applied twice."""
        import torch

        result, twice = function(*leaves), along is not None
        first = torch.autograd.grad(result, leaves, gout.to(result.dtype), create_graph=twice, materialize_grads=True)
        if along is None:
            return list(first)
        pairs = [(g, v) for g, v in zip(first, along, strict=True) if g.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in leaves]
        outputs, vectors = zip(*pairs, strict=True)
        return list(torch.autograd.grad(outputs, leaves, vectors, materialize_grads=True))

    def memory(self, call: Callable[[], Any]) -> measure.Measured:
        """Ask torch's allocator."""
        return measure.torch_memory(call)[1]

    def peaks(
        self, problem: Problem, operands: Sequence[Any], indices: Mapping[str, Any]
    ) -> Iterator[tuple[str, int, int]]:
        """Measure a plan whose memory limit is what the unlimited plan needs, with torch's allocator."""
        import torch

        limit = self.plan(problem, operands, indices).cost.peak_bytes
        try:
            plan = self.plan(problem, operands, indices, memory_limit=limit)
        except PlannerLimitError as error:  # under a limit, scratch memory counts too
            limit = error.memory_limit or limit
            plan = self.plan(problem, operands, indices, memory_limit=limit)
        wanted = [x for x in operands if x.requires_grad]
        if not plan.steps:  # the result is the operand itself
            return

        def call() -> Any:
            return plan(*operands, **indices)

        result = call()
        if wanted:
            torch.autograd.grad(result, wanted, torch.ones_like(result), materialize_grads=True)
        del result
        # Programs also hold a few single numbers, which the limit does not count.
        limit += 256
        yield "the forward program is over the limit", self.memory(call).peak_bytes, limit
        if wanted:
            measured = measure.torch_backward_memory(call, wanted)[1].peak_bytes
            yield "the backward program is over the limit", measured, limit


class JaxEngine(Engine):
    """JAX, on its default device."""

    name = "jax"
    differentiates = True
    strided = False

    def context(self, problem: Problem) -> contextlib.AbstractContextManager[Any]:
        """Enable 64-bit types if the problem has any: they are off by default."""
        import jax

        wide = any(d in ("float64", "int64", "uint64", "complex128") for d in problem.dtypes)
        return jax.enable_x64(True) if wide else contextlib.nullcontext()

    def refuses(self, dtype: str) -> str:
        """Refuse nothing: JAX computes in all dtypes."""
        return ""

    def array(self, x: Array, dtype: str = "") -> Any:
        """Return an array of JAX."""
        import jax.numpy as jnp

        return jnp.asarray(x, dtype or None)

    def described(self, x: Any) -> tuple[Array, str]:
        """The values as NumPy has them, and the dtype's name."""
        name = x.dtype.name
        return np.asarray(x.astype("float32") if name == "bfloat16" else x), name

    def result_dtype(self, dtypes: Sequence[str]) -> str:
        """Return the dtype that JAX promotes arrays to."""
        import jax.numpy as jnp

        return str(jnp.result_type(*map(jnp.dtype, dtypes)).name)

    def plan(self, problem: Problem, operands: Sequence[Any], indices: Mapping[str, Any], **options: Any) -> Plan:
        """Plan with stand-ins for the operands, because JAX arrays do not say whether they need a gradient."""
        stand_ins = [
            Operand(tuple(x.shape), x.dtype.name, requires_grad=need)
            for x, need in zip(operands, problem.requires_grad, strict=True)
        ]
        return super().plan(problem, stand_ins, indices, **options)

    def gradients(
        self, function: Callable[..., Any], leaves: Sequence[Any], gout: Any, along: Sequence[Any] | None = None
    ) -> list[Any]:
        """Compute gradients by `jax.vjp`; second derivatives by `jax.vjp` of `jax.vjp`."""
        import jax

        def first(*chosen: Any) -> Any:
            result, pullback = jax.vjp(function, *chosen)
            return pullback(gout.astype(result.dtype))

        return list(first(*leaves) if along is None else jax.vjp(first, *leaves)[1](tuple(along)))

    def retained(self, problem: Problem, call: Call) -> tuple[int, int]:
        """Measure the buffers that the pullback's leaves hold."""
        operands, indices = self.operands(problem), self.indices(problem)
        predicted = self.plan(problem, operands, indices).cost.retained_bytes
        some = of_some(call, operands, indices, problem.wanted)
        chosen = [operands[number] for number in problem.wanted]
        return predicted, measure.jax_retained(some, *chosen, held=(operands, indices))


_ENGINES: dict[str, type[Engine]] = {"numpy": Engine, "torch": TorchEngine, "jax": JaxEngine}


def installed() -> tuple[str, ...]:
    """Return the names of the installed frameworks, without importing them."""
    return tuple(name for name in _ENGINES if importlib.util.find_spec(name) is not None)


def engine_of(name: Any) -> Engine:
    """Return the engine of a framework.

    Raises:
        PlannerError: the name is unknown, or the framework is not installed.
    """
    if name not in _ENGINES:
        raise PlannerError(f"backend {name!r:.80} is unknown: take from {', '.join(_ENGINES)}")
    if name not in installed():
        raise PlannerError(f"{name} is not installed: pip install 'contraction-planner[{name}]'")
    return _ENGINES[name]()
