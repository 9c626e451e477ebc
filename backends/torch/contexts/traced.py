"""Plans under compilers and other tracers of torch: each program is one operator of torch's library.

A compiler traces a call with tensors that have no values, and runs what it recorded later, on other tensors. So it
records one operator for a plan's forward program and one for its backward program. The plan is an argument of the
operator, as JSON. A rule gives the compiler the shapes and strides of the results, which the plan knows. The operators
need no derivatives, because `planner.backends.torch.autograd` calls them inside its Functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.backends.common.masks import widen_operands
from planner.backends.torch.contexts.flops import register_flops
from planner.backends.torch.contexts.modes import as_planned, checkpoints, in_functorch, watched
from planner.backends.torch.executable import Executable
from planner.backends.torch.index import TorchIndex
from planner.backends.torch.ops import OPS, dataless, finite, occurs, torch_dtype
from planner.cost.layout import dense_strides, view_strides
from planner.language.derive import transpose
from planner.language.options import MODES
from planner.language.spec import Operand
from planner.program.frameworks import load_backend
from planner.program.implementations import RangedIndices
from planner.program.program import Variable
from planner.program.serial import plan_from_json

__all__ = ["opaque", "run_backward", "run_forward", "wide_result"]


def opaque(executable: Executable, x: Tensor) -> bool:
    """Return whether a plan that is not native runs as operators: a tensor has no values, or a mode is active.

    A mode may count FLOPs, or save the results of operators. It must not see what kernels do inside: they pad, and
    write in place. But an operator returns no views, so a plan of views runs as it is. And a selective checkpoint sees
    steps of torch's own operators, so that it can save the results of `mm` and `bmm`.
    """
    if not watched() or in_functorch():
        return dataless(x)
    register_flops()
    return dataless(x) or not (executable.only_views or (executable.only_stock and checkpoints()))


def run_forward(
    executable: Executable, operands: Sequence[Tensor], indices: Mapping[str, Any]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the result and the kept values.

    If tensors have no values, or a mode looks at operators, this calls the operator, which tracers record.
    """
    if not opaque(executable, operands[0]):
        return executable.forward(operands, executable.prepare(indices))
    result, *kept = _forward(executable.text, *_split(indices), list(operands))
    return result, tuple(kept)


def run_backward(
    executable: Executable,
    gradient: Tensor,
    operands: Sequence[Tensor],
    indices: Mapping[str, Any],
    kept: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return a gradient for each operand that needs one; as in `run_forward`, a tracer records the operator."""
    if not opaque(executable, gradient):
        return executable.backward(gradient, operands, executable.prepare(indices), kept)
    if executable.sizes is not None:  # no mode was active in the forward pass
        executable = executable.by_itself(operands)
    gradients = iter(_backward(executable.text, *_split(indices), gradient, list(operands), list(kept)))
    return [None if v is None else next(gradients) for v in executable.programs.gradients]


def wide_result(
    executable: Executable, operands: Sequence[Tensor], indices: Mapping[str, Any], index: RangedIndices
) -> Tensor | None:
    """Return the result if dropped indices meet NaN or infinities that the plan cannot mask; None if it can.

    `index` holds the index arrays in range, as the executable prepared them from `indices`. If there is a result, it
    is emptied, so that the call does not hold two copies of them.
    """
    if MODES[executable.plan.index_mode].bad != "drop":
        return None
    wide = widen_operands(OPS, executable.views(operands), executable.spec, index, finite, occurs)
    if wide is None:
        return None
    index.clear()
    options = executable.plan.options
    limits = {"memory_limit": options.memory_limit, "retain_limit": options.retain_limit}
    return executable.contract(*wide, executable.index_views(indices), limits)


@torch.library.custom_op("planner::forward", mutates_args=())
def _forward(plan: str, names: str, arrays: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    executable, indices = _executable(plan), _joined(names, arrays)
    with torch.no_grad(), as_planned():
        index = executable.prepare(indices)
        wide = wide_result(executable, operands, indices, index)
        if wide is not None:
            index = executable.prepare(indices)
        result, kept = executable.forward(operands, index)
    return _fulfil([result if wide is None else wide, *kept], _results(plan), [*operands, *arrays])


@_forward.register_fake
def _(plan: str, names: str, arrays: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    return [promise.standin(operands[0]) for promise in _results(plan)]


@torch.library.custom_op("planner::backward", mutates_args=())
def _backward(
    plan: str,
    names: str,
    arrays: Sequence[Tensor],
    gradient: Tensor,
    operands: Sequence[Tensor],
    kept: Sequence[Tensor],
) -> list[Tensor]:
    executable, indices = _executable(plan), _joined(names, arrays)
    with torch.no_grad(), as_planned():
        index = executable.prepare(indices)
        if wide_result(executable, operands, indices, index) is None:
            gradients = executable.backward(gradient, operands, index, kept)
        else:
            gradients = _wide_gradients(executable, gradient, operands, indices)
    results = [g for g in gradients if g is not None]
    return _fulfil(results, _gradients(plan), [gradient, *operands, *arrays, *kept])


@_backward.register_fake
def _(
    plan: str,
    names: str,
    arrays: Sequence[Tensor],
    gradient: Tensor,
    operands: Sequence[Tensor],
    kept: Sequence[Tensor],
) -> list[Tensor]:
    return [promise.standin(gradient) for promise in _gradients(plan)]


def _wide_gradients(
    executable: Executable, gradient: Tensor, operands: Sequence[Tensor], indices: Mapping[str, Any]
) -> list[Tensor | None]:
    """Return each gradient as a contraction by a transposed spec, which masks NaN and infinities for itself."""
    views, gradients = [x.conj() for x in executable.views(operands)], list[Tensor | None]()
    for number, variable in enumerate(executable.programs.gradients):
        others = [*views[:number], gradient, *views[number + 1 :]]
        spec = transpose(executable.spec, number)
        if variable is None:
            gradients.append(None)
        else:
            gradients.append(executable.contract(spec, others, executable.index_views(indices)))
    return gradients


# -- the arguments ---------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _executable(plan: str) -> Executable:
    return Executable(plan_from_json(plan), load_backend("torch").table)


def _split(indices: Mapping[str, Any]) -> tuple[str, list[Tensor]]:
    """Return index arrays as a list of tensors, with their names and facts as JSON."""
    names: list[Any] = []
    arrays: list[Tensor] = []
    for name, q in indices.items():
        tensors, facts = q.parts() if isinstance(q, TorchIndex) else ([q], None)
        names.append((name, facts))
        arrays += tensors
    return json.dumps(names), arrays


def _joined(names: str, arrays: Sequence[Tensor]) -> dict[str, Any]:
    """Return the index arrays by name: the inverse of `_split`."""
    tensors = iter(arrays)
    indices: dict[str, Any] = {}
    for name, facts in json.loads(names):
        indices[name] = next(tensors) if facts is None else TorchIndex.join([next(tensors) for _ in range(3)], facts)
    return indices


# -- the results -----------------------------------------------------------------------------------------


class Promise(NamedTuple):
    """The shape, strides and dtype of a result, as the plan says. It has no gaps, and shares no memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, variable: Variable, operand: Operand | None = None) -> Promise:
        """Return the promise for a variable of the plan; a gradient is promised as its operand is."""
        strides = dense_strides(variable.layout, variable.shape)
        if operand is None:
            return cls(variable.shape, strides, torch_dtype(variable.dtype))
        shaped = view_strides(variable.shape, strides, operand.shape)
        assert shaped is not None  # the shapes differ by dimensions of size 1 only
        return cls(operand.shape, shaped, torch_dtype(operand.dtype))

    def standin(self, like: Tensor) -> Tensor:
        """Return an uninitialised tensor on the device of `like`."""
        return like.new_empty_strided(self.shape, self.strides, dtype=self.dtype)

    def fulfil(self, x: Tensor, taken: set[int]) -> Tensor:
        """Return a result as promised. It is copied if it is laid out otherwise, or if its storage is taken already."""
        x = x.reshape(self.shape)
        x = x.real if x.is_complex() and not self.dtype.is_complex else x
        same = (x.stride(), x.dtype, x.is_neg(), x.is_conj()) == (self.strides, self.dtype, False, False)
        if not same or x.untyped_storage()._cdata in taken:
            x = self.standin(x).copy_(x)
        taken.add(x.untyped_storage()._cdata)
        return x


@lru_cache(maxsize=256)
def _results(plan: str) -> list[Promise]:
    """Return the promises for the result and the kept values."""
    executable = _executable(plan)
    return [Promise.of(executable.programs.variables[v]) for v in (executable.programs.result, *executable.kept)]


@lru_cache(maxsize=256)
def _gradients(plan: str) -> list[Promise]:
    """Return the promises for the gradients."""
    executable = _executable(plan)
    pairs = zip(executable.plan.operands, executable.programs.gradients, strict=True)
    return [Promise.of(executable.programs.variables[v], operand) for operand, v in pairs if v is not None]


def _fulfil(results: Sequence[Tensor], promises: Sequence[Promise], arguments: Sequence[Tensor]) -> list[Tensor]:
    """Return results as promised, none of which shares storage with an argument or another result."""
    taken = {x.untyped_storage()._cdata for x in arguments}
    return [promise.fulfil(x, taken) for x, promise in zip(results, promises, strict=True)]
