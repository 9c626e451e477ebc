"""Plans for whoever traces torch: two operators of its library, which run a plan's programs and show nothing inside.

A compiler traces with tensors that have no values, and what it records is run later on others. So it gets an operator
for each program, the plan as text among the arguments, and a rule for what comes out: the shapes and strides that the
plan says. Autograd sees the operators from within `planner.backends.torch.autograd`, so they need no derivatives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.backends.common.common import RangedIndices, widen_operands
from planner.backends.torch.executable import Executable, executable_of
from planner.backends.torch.index import TorchIndex
from planner.backends.torch.modes import as_planned
from planner.backends.torch.ops import OPS, dataless, finite, occurs, torch_dtype
from planner.cost.layout import row_major, view_strides, without_gaps
from planner.language.derive import transpose
from planner.language.spec import Operand
from planner.program.frameworks import load_backend
from planner.program.program import Variable
from planner.program.serial import plan_from_json, plan_to_json

__all__ = ["run_backward", "run_forward", "wide_result"]


def run_forward(
    bound: Executable, operands: Sequence[Tensor], indices: Mapping[str, Any]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run the forward program, or record that it is to be run: the result and the kept values."""
    if not dataless(operands[0]):
        return bound.forward(operands, bound.prepare(indices))
    result, *kept = _forward(plan_to_json(bound.plan), *_split(indices), list(operands))
    return result, tuple(kept)


def run_backward(
    bound: Executable, gradient: Tensor, operands: Sequence[Tensor], indices: Mapping[str, Any], kept: Sequence[Tensor]
) -> list[Tensor | None]:
    """Run the backward program, or record that it is to be run: a gradient for each operand that needs one."""
    if not dataless(gradient):
        return bound.backward(gradient, operands, bound.prepare(indices), kept)
    found = iter(_backward(plan_to_json(bound.plan), *_split(indices), gradient, list(operands), list(kept)))
    return [None if v is None else next(found) for v in bound.programs.gradients]


def wide_result(
    bound: Executable, operands: Sequence[Tensor], indices: Mapping[str, Any], index: RangedIndices
) -> Tensor | None:
    """The result where dropped indices meet what is not finite; None where the plan itself serves.

    `index` is what the plan prepared of `indices`.
    """
    if bound.plan.index_mode != "drop":
        return None
    wide = widen_operands(OPS, bound.views(operands), bound.spec, index, finite, occurs)
    return None if wide is None else bound.contract(*wide, bound.index_views(indices))


@torch.library.custom_op("planner::forward", mutates_args=())
def _forward(plan: str, names: str, arrays: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    bound, indices = _bound(plan), _joined(names, arrays)
    with torch.no_grad(), as_planned():
        index = bound.prepare(indices)
        wide = wide_result(bound, operands, indices, index)
        result, kept = bound.forward(operands, index)
    return _kept([result if wide is None else wide, *kept], _results(plan), [*operands, *arrays])


@_forward.register_fake
def _(plan: str, names: str, arrays: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    return [promise.standin(operands[0]) for promise in _results(plan)]


@torch.library.custom_op("planner::backward", mutates_args=())
def _backward(
    plan: str, names: str, arrays: Sequence[Tensor], gradient: Tensor, operands: Sequence[Tensor],
    kept: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    bound, indices = _bound(plan), _joined(names, arrays)
    with torch.no_grad(), as_planned():
        index = bound.prepare(indices)
        if wide_result(bound, operands, indices, index) is None:
            found = bound.backward(gradient, operands, index, kept)
        else:
            found = _wide_gradients(bound, gradient, operands, indices)
    made = [g for g in found if g is not None]
    return _kept(made, _gradients(plan), [gradient, *operands, *arrays, *kept])


@_backward.register_fake
def _(
    plan: str, names: str, arrays: Sequence[Tensor], gradient: Tensor, operands: Sequence[Tensor],
    kept: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    return [promise.standin(gradient) for promise in _gradients(plan)]


def _wide_gradients(
    bound: Executable, gradient: Tensor, operands: Sequence[Tensor], indices: Mapping[str, Any]
) -> list[Tensor | None]:
    """Gradients as contractions of their own, each of which looks at what its operands hold."""
    views, found = [x.conj() for x in bound.views(operands)], list[Tensor | None]()
    for number, variable in enumerate(bound.programs.gradients):
        others = [*views[:number], gradient, *views[number + 1 :]]
        spec = transpose(bound.spec, number)
        found.append(None if variable is None else bound.contract(spec, others, bound.index_views(indices)))
    return found


# -- the arguments ---------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _bound(plan: str) -> Executable:
    return executable_of(plan_from_json(plan), load_backend("torch").table)


def _split(indices: Mapping[str, Any]) -> tuple[str, list[Tensor]]:
    """Index arrays as tensors and text."""
    names: list[Any] = []
    arrays: list[Tensor] = []
    for name, q in indices.items():
        tensors, facts = q.parts() if isinstance(q, TorchIndex) else ([q], None)
        names.append((name, facts))
        arrays += tensors
    return json.dumps(names), arrays


def _joined(names: str, arrays: Sequence[Tensor]) -> dict[str, Any]:
    """The inverse of `_split`."""
    given = iter(arrays)
    return {
        name: next(given) if facts is None else TorchIndex.joined([next(given) for _ in range(3)], facts)
        for name, facts in json.loads(names)
    }


# -- the results -----------------------------------------------------------------------------------------


class Promise(NamedTuple):
    """What a result is, as the plan says: without gaps, in memory of its own."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, variable: Variable, operand: Operand | None = None) -> Promise:
        """Of a variable of the plan; as its operand, if it is a gradient."""
        layout, strides, step = without_gaps(variable.layout), list(row_major(variable.shape)), 1
        for d in reversed([d for run in layout.runs for d in run] if layout else []):
            strides[d] = step
            step *= variable.shape[d]
        if operand is None:
            return cls(variable.shape, tuple(strides), torch_dtype(variable.dtype))
        shaped = view_strides(variable.shape, strides, operand.shape)
        assert shaped is not None  # they differ by dimensions of size 1
        return cls(operand.shape, shaped, torch_dtype(operand.dtype))

    def standin(self, like: Tensor) -> Tensor:
        """A tensor without values, on another's device."""
        return like.new_empty_strided(self.shape, self.strides, dtype=self.dtype)

    def kept(self, x: Tensor, taken: set[int]) -> Tensor:
        """A result as promised, copied if it is not, or shares storage with one of those taken."""
        x = x.reshape(self.shape)
        x = x.real if x.is_complex() and not self.dtype.is_complex else x
        same = (x.stride(), x.dtype, x.is_neg(), x.is_conj()) == (self.strides, self.dtype, False, False)
        if not same or x.untyped_storage()._cdata in taken:
            x = self.standin(x).copy_(x)
        taken.add(x.untyped_storage()._cdata)
        return x


@lru_cache(maxsize=256)
def _results(plan: str) -> list[Promise]:
    """The result and the kept values."""
    bound = _bound(plan)
    return [Promise.of(bound.programs.variables[v]) for v in (bound.programs.result, *bound.kept)]


@lru_cache(maxsize=256)
def _gradients(plan: str) -> list[Promise]:
    bound = _bound(plan)
    given = zip(bound.plan.operands, bound.programs.gradients, strict=True)
    return [Promise.of(bound.programs.variables[v], operand) for operand, v in given if v is not None]


def _kept(found: Sequence[Tensor], promises: Sequence[Promise], given: Sequence[Tensor]) -> list[Tensor]:
    taken = {x.untyped_storage()._cdata for x in given}
    return [promise.kept(x, taken) for x, promise in zip(found, promises, strict=True)]
