"""Plans under compilers and other tracers of torch: each program is one operator of torch's library.

A compiler traces a call with tensors that have no values, and runs what it recorded later, on other tensors. So it
records one operator for a plan's forward program and one for its backward program. The plan is an argument of the
operator, as JSON. A rule gives the compiler the shapes and strides of the results.

What was recorded also runs on tensors of other sizes. Then the operator resizes its plan, see `_Bound`. Its last
argument is None, or the shape of the result, with -1 for each size that arrays show.

Inside of the Functions of `planner.backends.torch.autograd` operators need no derivatives. Exported graphs and those of
`torch.jit.trace` hold operators alone, so the same module gives them derivatives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.backends.common.masks import widen_operands
from planner.backends.torch.contexts.flops import register_flops
from planner.backends.torch.contexts.modes import (
    as_planned,
    autocasts,
    bare_operators,
    checkpoints,
    compiles,
    differ,
    fixed,
    in_functorch,
    scripts,
    unscripted,
    usual,
    watched,
)
from planner.backends.torch.cuda.indexed import TAKE
from planner.backends.torch.eager import MOST_SMALL_SECONDS
from planner.backends.torch.executable import Executable
from planner.backends.torch.index import TorchIndex
from planner.backends.torch.ops import OPS, finite, is_recorded, occurs, torch_dtype
from planner.backends.torch.products.transposed import calls_torch
from planner.cost.layout import dense_strides
from planner.language.cached import enter
from planner.language.derive import transpose
from planner.language.errors import ShapeError
from planner.language.options import MODES
from planner.language.resolve import Resolved
from planner.language.spec import Term
from planner.program.calls import Member, RangedIndices, SizeReader
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.loops import resize_plan
from planner.program.serial import plan_from_json


def opaque(executable: Executable, x: Tensor) -> bool:
    """Return whether a plan that is not native runs as operators: a tracer records, or a mode is active.

    A mode may count FLOPs, or save the results of operators. It must not see what kernels do inside: they pad, and
    write in place. But an operator returns no views, so a plan of views runs as it is. And a selective checkpoint sees
    steps of torch's own operators, so that it can save the results of `mm` and `bmm`.
    """
    if usual(x):
        return False
    recorded = is_recorded(x)
    if recorded and _fuses(executable):
        return False
    if not watched() or in_functorch():
        return recorded
    register_flops()
    return recorded or not (executable.only_views or (executable.only_stock and checkpoints()))


def _fuses(executable: Executable) -> bool:
    """Return whether a compiler records the steps of both programs, torch's own operators, and fuses them.

    That is so for small plans with index arrays that keep operands only: an operator in Python takes longer than these.
    """
    plan = executable.plan
    small = executable.gathers and not executable.kept and plan.cost.seconds <= MOST_SMALL_SECONDS
    if not small or plan.options.limited or executable.drops or not compiles() or bare_operators():
        return False
    steps = [step for step in executable.programs.steps if step.choice.lowering != TAKE]
    return plan.loop is None and calls_torch(executable.table, steps)


def run_forward(
    executable: Executable, operands: Sequence[Tensor], indices: Mapping[str, Any]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the result and the kept values.

    If tensors have no values, a tracer records, or a mode looks at operators, this calls the operator.
    """
    if not opaque(executable, operands[0]):
        return executable.forward(operands, executable.prepare(indices))
    plan, names, arrays, sizes = operator_arguments(executable, indices)
    result, *kept = forward_operator(plan, names, arrays, executable.planned_views(operands), sizes)
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
        index = executable.prepare(indices)
        if is_recorded(gradient):
            # What is made of index arrays depends on the gradient, so the compiler does not make and keep it before.
            nothing = gradient.reshape(-1)[:1].isnan().any().bitwise_and(False)
            index.update({gather: index[gather] + nothing for gather in executable.gathers})
        return executable.backward(gradient, operands, index, kept)
    plan, names, arrays, sizes = operator_arguments(executable, indices)
    given, wanted = executable.planned_views(operands), executable.programs.gradients
    gradients = iter(backward_operator(plan, names, arrays, gradient, given, list(kept), sizes))
    return [None if v is None else next(gradients).reshape(x.shape) for v, x in zip(wanted, operands, strict=True)]


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


def _alone() -> AbstractContextManager[object]:
    """Return a context in which neither autograd, nor autocast, nor a tracer sees what an operator does."""
    if not (torch.is_grad_enabled() or autocasts() or scripts() is not None):  # as a rule
        return _NOTHING
    stack = contextlib.ExitStack()
    for context in (torch.no_grad(), as_planned(), unscripted()):
        stack.enter_context(context)
    return stack


_NOTHING = contextlib.nullcontext()


def _forward(
    plan: str, names: str, arrays: Sequence[Tensor], operands: Sequence[Tensor], sizes: Sequence[int] | None = None
) -> list[Tensor]:
    with _alone():
        indices = join_indices(names, arrays)
        executable, promises, _ = _bound(plan).at(operands, indices, sizes)
        index = executable.prepare(indices)
        if _is_zero(executable):
            return [promise.standin(operands[0]).zero_() for promise in promises]
        wide = wide_result(executable, operands, indices, index)
        if wide is not None:
            index = executable.prepare(indices)
        result, kept = executable.forward(operands, index)
        return _fulfil([result if wide is None else wide, *kept], promises, [*operands, *arrays])


def _forward_rule(
    plan: str, names: str, arrays: Sequence[Tensor], operands: Sequence[Tensor], sizes: Sequence[int] | None = None
) -> list[Tensor]:
    _, promises, _ = _bound(plan).promised(operands, join_indices(names, arrays), sizes)
    return [promise.standin(operands[0]) for promise in promises]


def _backward(
    plan: str,
    names: str,
    arrays: Sequence[Tensor],
    gradient: Tensor,
    operands: Sequence[Tensor],
    kept: Sequence[Tensor],
    sizes: Sequence[int] | None = None,
) -> list[Tensor]:
    with _alone():
        indices = join_indices(names, arrays)
        executable, _, promises = _bound(plan).at(operands, indices, sizes)
        index = executable.prepare(indices)
        if _is_zero(executable):
            return [promise.standin(gradient).zero_() for promise in promises]
        if wide_result(executable, operands, indices, index) is None:
            gradients = executable.backward(gradient, operands, index, kept)
        else:
            gradients = separate_gradients(executable, gradient, operands, indices)
        results = [g for g in gradients if g is not None]
        return _fulfil(results, promises, [gradient, *operands, *arrays, *kept])


def _backward_rule(
    plan: str,
    names: str,
    arrays: Sequence[Tensor],
    gradient: Tensor,
    operands: Sequence[Tensor],
    kept: Sequence[Tensor],
    sizes: Sequence[int] | None = None,
) -> list[Tensor]:
    _, _, promises = _bound(plan).promised(operands, join_indices(names, arrays), sizes)
    return [promise.standin(gradient) for promise in promises]


_FORWARD = "(str plan, str names, Tensor[] arrays, Tensor[] operands, SymInt[]? sizes=None) -> Tensor[]"
_BACKWARD = (
    "(str plan, str names, Tensor[] arrays, Tensor gradient, Tensor[] operands, Tensor[] kept, SymInt[]? sizes=None)"
    " -> Tensor[]"
)
# `torch.library.custom_op` would wrap these functions in ways that take longer than a small product.
_library = torch.library.Library("planner", "FRAGMENT")
for _name, _schema, _run, _rule in (
    ("forward", _FORWARD, _forward, _forward_rule),
    ("backward", _BACKWARD, _backward, _backward_rule),
):
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"planner::{_name}", _rule, lib=_library)
forward_operator: Any = torch.ops.planner.forward.default
backward_operator: Any = torch.ops.planner.backward.default


def separate_gradients(
    executable: Executable, gradient: Tensor, operands: Sequence[Tensor], indices: Mapping[str, Any]
) -> list[Tensor | None]:
    """Return each gradient as a contraction of its own, which masks NaN and infinities for itself."""
    return [
        None if variable is None else contract_gradient(executable, number, gradient, operands, indices)
        for number, variable in enumerate(executable.programs.gradients)
    ]


def contract_gradient(
    executable: Executable, number: int, gradient: Tensor, operands: Sequence[Tensor], indices: Mapping[str, Any]
) -> Tensor:
    """Return the gradient of one operand as a contraction of its own, by a transposed spec."""
    others = [x.conj() for x in executable.views(operands)]
    others[number] = gradient
    return executable.contract(transpose(executable.spec, number), others, executable.index_views(indices))


# -- the arguments ---------------------------------------------------------------------------------------


def operator_arguments(
    executable: Executable, indices: Mapping[str, Any]
) -> tuple[str, str, list[Tensor], Sequence[int] | None]:
    """Return a plan as JSON, the names of index arrays, the arrays, and the result's shape as far as it is given."""
    given = list(map(fixed, executable.given))
    shown = all(type(n) is int and n == -1 for n in given)
    return executable.text, *_split(indices), None if shown else given


def _split(indices: Mapping[str, Any]) -> tuple[str, list[Tensor]]:
    """Return index arrays as a list of tensors, with their names and facts as JSON."""
    names: list[Any] = []
    arrays: list[Tensor] = []
    for name, q in indices.items():
        tensors, facts = q.parts() if isinstance(q, TorchIndex) else ([q], None)
        names.append((name, facts))
        arrays += tensors
    return json.dumps(names), arrays


def join_indices(names: str, arrays: Sequence[Tensor]) -> dict[str, Any]:
    """Return the index arrays by name: the inverse of `_split`."""
    tensors = iter(arrays)
    indices: dict[str, Any] = {}
    for name, facts in _read_names(names):
        indices[name] = next(tensors) if facts is None else TorchIndex.join([next(tensors) for _ in range(3)], facts)
    return indices


_read_names = lru_cache(maxsize=256)(json.loads)


class _Bound:
    """A plan that the operators run, at the sizes that it was made for and at others.

    If all steps run at any sizes, other sizes share them. Otherwise the plan is resized without a search: its steps
    keep their implementations where these support the sizes.
    """

    def __init__(self, text: str) -> None:
        self.executable = Executable(plan_from_json(text), load_backend("torch").table)
        programs, self.spec = self.executable.programs, self.executable.spec
        self.reader = SizeReader(self.spec, self.executable.plan, self.executable.arrays)
        self.terms: dict[int, Term] = dict(enumerate(self.spec.inputs))
        for step in programs.forward.steps:
            self.terms.update(zip(step.outputs, step.op.output_terms, strict=True))
        self.terms[programs.result] = self.spec.output
        self.met: dict[Any, tuple[Executable, list[Promise], list[Promise]]] = {}

    def at(
        self, operands: Sequence[Tensor], indices: Mapping[str, Any], sizes: Sequence[int] | None
    ) -> tuple[Executable, list[Promise], list[Promise]]:
        """Return the executable for these arrays, and what the operators promise: results, then gradients."""
        key = (*[x.shape for x in operands], *[q.shape for q in indices.values()], *(sizes or ()))
        try:
            found = self.met.get(key)
        except TypeError:  # symbols are no keys
            member, results, gradients = self.promised(operands, indices, sizes)
            return self.executable.with_symbols(member, sizes or ()), results, gradients
        if found is None:
            member, results, gradients = self.promised(operands, indices, sizes)
            found = self._executable(member, operands), results, gradients
            enter(self.met, key, found, 256)
        return found

    def promised(
        self, operands: Sequence[Tensor], indices: Mapping[str, Any], sizes: Sequence[int] | None
    ) -> tuple[Member, list[Promise], list[Promise]]:
        """Return the sizes of these arrays, which may be symbols, and what the operators promise."""
        shapes = [*(x.shape for x in operands), *(indices[name].shape for name in self.executable.arrays)]
        pairs = zip(self.spec.output, sizes or (), strict=False)
        known = [(e, n) for e, n in pairs if type(n) is not int or n != -1] or self.reader.assumed
        member = self.reader.member(shapes, known, differ)
        if member is None:
            raise ShapeError(f"arrays of the shapes {[list(shape) for shape in shapes]} do not fit '{self.spec}'")
        programs = self.executable.programs
        results = [self._promise(v, member) for v in (programs.result, *self.executable.kept)]
        gradients = []
        for number, variable in enumerate(programs.gradients):
            if variable is not None:
                dims, operand = self.reader.dims[number], self.executable.plan.operands[number]
                promise = self._promise(variable, member, self.spec.inputs[number])
                promise = promise._replace(dtype=torch_dtype(operand.dtype))
                gradients.append(promise if dims is None else promise.with_dims(operands[number].dim(), dims))
        return member, results, gradients

    def _promise(self, variable: int, member: Member, term: Term | None = None) -> Promise:
        """Return the promise for a variable of the plan. Its strides are in the plan's order, without gaps."""
        described = self.executable.programs.variables[variable]
        entries = self.terms[variable] if term is None else term
        shape = tuple(member.sizes[e] for e in entries)
        return Promise(shape, dense_strides(described.layout, shape), torch_dtype(described.dtype))

    def _executable(self, member: Member, operands: Sequence[Tensor]) -> Executable:
        executable, plan, sizes = self.executable, self.executable.plan, member.sizes
        planned = self.spec.by_entry
        if all(sizes[e] == size for e, size in planned.items()):
            return executable
        resized = executable.resized(member)
        resized.empty = 0 in sizes.values()
        if resized.empty:
            return resized
        shares = MODES[plan.index_mode].bad != "drop" and all((sizes[e] == 1) == (n == 1) for e, n in planned.items())
        if shares and executable.table.runs_sizes(plan.steps, sizes):
            return resized
        return Executable(resize_plan(plan, _contraction_of(resized, operands), sizes), executable.table)


def _contraction_of(executable: Executable, operands: Sequence[Tensor]) -> Contraction:
    """Return the contraction of these operands, at the sizes of an executable."""
    plan, resolved = executable.plan, Resolved.of(executable.spec)
    described = [
        dataclasses.replace(o, shape=tuple(map(int, x.shape)), strides=tuple(map(int, x.stride())))
        for o, x in zip(plan.operands, operands, strict=True)
    ]
    return dataclasses.replace(
        plan.contraction,
        text=str(resolved.spec),
        resolved=resolved,
        index_shapes=resolved.index_shapes,
        operands=tuple(described),
    )


@lru_cache(maxsize=256)
def _bound(plan: str) -> _Bound:
    return _Bound(plan)


def executable_for(
    plan: str, operands: Sequence[Tensor], indices: Mapping[str, Any], sizes: Sequence[int] | None
) -> Executable:
    """Return what an operator runs for these arguments."""
    return _bound(plan).at(operands, indices, sizes)[0]


def _is_zero(executable: Executable) -> bool:
    """Return whether nothing is added up because a size is 0. Only other sizes than the plan's are looked at."""
    return executable.empty and executable.sizes is not None


# -- the results -----------------------------------------------------------------------------------------


class Promise(NamedTuple):
    """The shape, strides and dtype of a result, as the plan says. It has no gaps, and shares no memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def with_dims(self, count: int, dims: Sequence[int]) -> Promise:
        """Return the promise for a view of so many dimensions: `dims` are its own, and the others have size 1."""
        shape, strides = [1] * count, [1] * count
        for d, n, stride in zip(dims, self.shape, self.strides, strict=True):
            shape[d], strides[d] = n, stride
        return Promise(tuple(shape), tuple(strides), self.dtype)

    def standin(self, like: Tensor) -> Tensor:
        """Return an uninitialised tensor on the device of `like`."""
        return like.new_empty_strided(self.shape, self.strides, dtype=self.dtype)

    def fulfil(self, x: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return a result as promised. It is copied if it is laid out otherwise, or if it shares memory with others."""
        if x.shape != self.shape:
            x = x.reshape(self.shape)
        if x.dtype != self.dtype and x.is_complex() and not self.dtype.is_complex:
            x = x.real
        same = x.dtype == self.dtype and not (x.is_neg() or x.is_conj())
        if same and x.stride() != self.strides:
            places = zip(self.shape, x.stride(), self.strides, strict=True)
            same = all(n <= 1 or stride == wanted for n, stride, wanted in places)
        if same and not any(_shares(x, other) for other in others):
            return x
        return self.standin(x).copy_(x)


_shares: Callable[[Tensor, Tensor], bool] = getattr(torch._C, "_is_alias_of")  # noqa: B009 -- mypy does not know it


def _fulfil(results: Sequence[Tensor], promises: Sequence[Promise], arguments: Sequence[Tensor]) -> list[Tensor]:
    """Return results as promised, none of which shares memory with an argument or another result."""
    fulfilled: list[Tensor] = []
    for x, promise in zip(results, promises, strict=True):
        fulfilled.append(promise.fulfil(x, (*arguments, *fulfilled)))
    return fulfilled
