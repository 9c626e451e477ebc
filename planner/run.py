"""Runs a plan: checks the arrays, and keeps the function that runs the plan for further calls."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from planner.cost.layout import layout_of
from planner.language.cached import BACKEND_CACHES, cached_until_cleared, enter
from planner.language.errors import PlannerError, ShapeError
from planner.language.options import MODES, Request
from planner.language.resolve import resolve_shapes
from planner.language.spec import Gather, Spec, Term, row_axes, term_gathers
from planner.program.callbacks import callbacks
from planner.program.calls import RunPlan
from planner.program.frameworks import Backend, beside_jax, load_backend, operands_framework
from planner.program.guards import is_marked
from planner.program.plan import PlanRecord
from planner.search.devices.collectives import whole_plan


def run_plan(plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
    """Run a plan on arrays, after checking that the plan was made for such arrays."""
    key = entry = None
    if plan.backend != "numpy":
        try:
            signature = load_backend(plan.backend).signature(operands, indices)
            key = None if signature is None else (id(plan), *map(type, operands), signature)
            entry = _CHECKED.get(key)
        except (AttributeError, IndexError, TypeError):  # something is no array, or its sizes are symbols
            key = None
    if entry is None:
        return _check_and_run(plan, operands, indices, key)
    return entry[1](operands, indices)


def _check_and_run(plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any], key: Any) -> Any:
    """Run a plan on arrays after checking them, and remember under the key, if there is one, that they were checked."""
    override = torch_override((*operands, *indices.values()))
    if override is not None:
        return override(run_plan, plan, operands, indices)
    if plan.backend == "jax":
        arrays, named = beside_jax(operands, indices)
        given = zip((*arrays, *named.values()), (*operands, *indices.values()), strict=True)
        if any([x is not before for x, before in given]):
            return run_plan(plan, arrays, named)
    run, serves_others = _checked_run(plan, operands, indices)
    if key is not None and serves_others:
        enter(_CHECKED, key, (plan, run), _MOST_CHECKED)
    return run(operands, indices)


# The functions that run plans on arrays that were checked. Arrays of equal classes and signatures are alike: those of
# JAX and torch hold all that is checked. A plan is known by its id, because comparing two can take longer than running
# one. An entry holds its plan, so that no other gets the id meanwhile.
_CHECKED: dict[Any, tuple[PlanRecord, RunPlan]] = {}
_MOST_CHECKED = 256
BACKEND_CACHES.append(_CHECKED)


def _checked_run(plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> tuple[RunPlan, bool]:
    """Return the function that runs a plan on some arrays, after checking that the plan was made for such arrays.

    Also return whether it runs the plan on other arrays of the same signature.
    """
    if plan.mesh is not None:
        plan = _whole(_Same(plan))
    backend, strides = _check(plan, operands, indices)
    divided = backend.divided(operands, indices)
    if divided is not None:
        return lambda *_: divided(_request_of(plan), lambda: plan), False
    if plan.symbols:
        return bind_plan(*(backend.bind_symbols(plan, operands, indices, plan.hidden_sizes) or (plan,))), False
    signature: Hashable = None
    # Under `torch.jit.trace` there is none, and those with symbols are no keys.
    with contextlib.suppress(AttributeError, TypeError):
        found = backend.signature(operands, indices)
        hash(found)
        signature = found
    return _bound(_Same(plan), signature, strides), True


def _request_of(plan: PlanRecord) -> Request:
    """Return what a plan was asked for."""
    asked, sizes = plan.options, plan.resolved.spec.output_shape
    return Request(plan.text, sizes, asked.optimize, asked.minimize, asked.memory_limit, asked.retain_limit,
                   plan.index_mode, plan.dtype, asked.precision, asked.deadline)  # fmt: skip


class _Same:
    """A plan as a key, equal to itself only. Comparing two plans can take longer than running one."""

    __slots__ = ("plan",)

    def __init__(self, plan: PlanRecord) -> None:
        self.plan = plan

    def __hash__(self) -> int:
        return id(self.plan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.plan is other.plan


@cached_until_cleared(256)
def _whole(same: _Same) -> PlanRecord:
    """Return the plan of the whole arrays, for a plan that was made for a mesh."""
    return whole_plan(same.plan)


@cached_until_cleared(256)
def _bound(same: _Same, signature: Hashable, strides: tuple[Any, ...]) -> RunPlan:
    """Return the function that runs a plan on operands of some strides.

    Calls with equal signatures share it, and what JAX compiled with it.
    """
    backend = load_backend(same.plan.backend)
    for _, step in same.plan.inner_steps(every=True):
        if step.choice.lowering not in backend.table.rows:
            raise PlannerError(
                f"the plan runs a step as {step.choice.lowering!r}, which {backend.name} does not have here: it was "
                "made by another version, or a row of your own is missing; make a new plan"
            )
    pairs = zip(same.plan.operands, strides, strict=True)
    return bind_plan(
        dataclasses.replace(same.plan, operands=tuple(dataclasses.replace(o, strides=s) for o, s in pairs))
    )


def bind_plan(plan: PlanRecord, run: RunPlan | None = None, sizes: Mapping[str | Gather, Any] | None = None) -> RunPlan:
    """Return the function that runs a plan on operands and index arrays.

    Args:
        plan: the plan.
        run: what the backend made of it, if it is at hand.
        sizes: the size of each axis and gather of its spec, if they are not the plan's.
    """
    spec = plan.resolved.spec
    run = load_backend(plan.backend).bind(plan) if run is None else run
    if not (MODES[plan.index_mode].unmarked and is_marked(spec)):
        return run
    sizes = spec.by_entry if sizes is None else sizes
    read = dict.fromkeys(gather for term in spec.inputs for gather in term_gathers(term))
    return partial(_run_and_mark, run, plan, sizes, [dataclasses.replace(g, size=sizes[g]) for g in read])


def _run_and_mark(
    run: RunPlan,
    plan: PlanRecord,
    sizes: Mapping[str | Gather, Any],
    read: Sequence[Gather],
    operands: Sequence[Any],
    indices: Mapping[str, Any],
) -> Any:
    """Run a plan. Then write NaN into each result that reads an operand at an index out of range.

    Zero or NaN is added to the result, so that gradients are those of the plan.

    Args:
        run: runs the plan.
        plan: the plan.
        sizes: the size of each axis and gather of its spec.
        read: the gathers of the operands, with these sizes.
        operands: the operands.
        indices: the index arrays.
    """
    backend, spec, mode = load_backend(plan.backend), plan.resolved.spec, plan.index_mode
    result = run(operands, indices)
    unsure = [gather for gather in read if not backend.is_in_range(indices[gather.array], gather, mode)]
    if not unsure:
        return result
    ops = backend.ops

    def shape_of(term: Term) -> tuple[int, ...]:
        return tuple([sizes[entry] for entry in term])

    shapes = {gather.array: shape_of(gather.axes) for gather in spec.gathers}
    for gather in unsure:
        values, may_miss = backend.in_range(indices[gather.array], gather, mode)
        if not may_miss:
            continue
        # How many bad entries add to each entry of the result, along the dimensions in which that can differ.
        along = {*gather.axes, *row_axes(spec.output)}
        dims = [d for d, e in enumerate(spec.output) if e in along or e in term_gathers(spec.output)]
        count = Spec((gather.axes,), tuple(spec.output[d] for d in dims), spec.sizes)
        bad = values.reshape(shapes[gather.array]) == gather.size
        ones = ops.select(bad, ops.zeros(bad.shape, result) + 1, 0)
        written = {name: indices[name] for name in count.arrays}
        written = {name: q.values if hasattr(q, "prepared_framework") else q for name, q in written.items()}
        arrays = {name: q.reshape(shapes[name]) for name, q in written.items()}
        given = shape_of(count.output)
        counts = callbacks().contract(count, ones, sizes=given, index_mode=MODES[mode].unmarked, **arrays)
        marks = ops.select(counts == 0, counts, math.nan)
        whole = shape_of(spec.output)
        shape = [n if d in dims else 1 for d, n in enumerate(whole)]
        # NumPy makes a number of a sum without dimensions.
        result = (result.reshape((1, *whole)) + marks.reshape((1, *shape))).reshape(whole)
    return result


def check_call(plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> Backend:
    """Return a plan's backend, after checking that the plan was made for such arrays.

    Raises:
        ShapeError: an operand or index array does not fit.
        PlannerError: an array is of another framework or on another device; an index array is missing, unknown or not
            of integers; the plan is within a memory limit for operands of other strides; or it was made for a mesh.
    """
    if plan.mesh is not None:
        raise PlannerError(
            "the plan was made for a mesh of devices, and this is done on one: make a plan without mesh="
        )
    return _check(plan, operands, indices)[0]


def _check(
    plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]
) -> tuple[Backend, tuple[tuple[int, ...] | None, ...]]:
    """Check the arrays of a call, as `check_call`, and return the strides of the operands too."""
    if len(operands) != len(plan.operands):
        raise ShapeError(f"the plan takes {len(plan.operands)} operands, but {len(operands)} were given")
    framework = operands_framework(operands, indices)
    if framework != plan.backend:
        raise PlannerError(f"the plan was made for {plan.backend}, but operand 0 is a {framework} array")
    backend = load_backend(framework)
    strides, limited = [], plan.options.memory_limit is not None
    for number, (array, wanted) in enumerate(zip(operands, plan.operands, strict=True)):
        operand = backend.operand(array)
        strides.append(operand.strides)
        if plan.as_planned(operand.shape) != wanted.shape or operand.dtype != wanted.dtype:
            raise ShapeError(
                f"operand {number} is {operand.dtype}{list(operand.shape)}, but the plan was made for "
                f"{wanted.dtype}{list(wanted.shape)}: make a new plan"
            )
        if limited and layout_of(operand.shape, operand.strides) != layout_of(wanted.shape, wanted.strides):
            raise PlannerError(
                f"operand {number} has strides {operand.strides}, but the plan is within its memory limit for "
                f"{wanted.strides or 'row-major operands'}: make a new plan"
            )
    wanted_shapes = dict(plan.index_shapes)
    for name in wanted_shapes:
        if name not in indices:
            raise PlannerError(f"the index array {name!r} is missing: pass it as the keyword {name}=...")
    for name, index in indices.items():
        if name not in wanted_shapes:
            raise PlannerError(f"unknown index array {name!r}: the plan has {', '.join(wanted_shapes) or 'none'}")
        backend.check_index(name, index)
    shapes = {name: plan.as_planned(backend.numbers(index.shape)) for name, index in indices.items()}
    _check_index_shapes(plan, shapes)
    backend.check_devices(operands, indices)
    return backend, tuple(strides)


def _check_index_shapes(plan: PlanRecord, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse index arrays whose shapes differ from the plan's, unless broadcasting makes the contraction the same."""
    different = {name: wanted for name, wanted in plan.index_shapes if shapes[name] != wanted}
    if not different:
        return
    with contextlib.suppress(PlannerError):
        operands = [operand.shape for operand in plan.operands]
        if resolve_shapes(plan.text, operands, shapes, plan.resolved.spec.output_shape) == plan.resolved:
            return
    name, wanted = next(iter(different.items()))
    raise ShapeError(
        f"index array {name!r} has shape {shapes[name]}, but the plan was made for {wanted}: make a new plan"
    )


def torch_compiles() -> bool:
    """Whether torch's compiler is tracing the caller."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_dynamo_compiling())


def torch_override(arrays: Sequence[Any]) -> Callable[..., Any] | None:
    """Return what calls a function in place of the caller if torch's functions are overridden, else None.

    They are by a `TorchFunctionMode`, and by arrays with a `__torch_function__` of their own, as fx's Proxies have.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.overrides.has_torch_function(arrays):
        return None
    own = [x for x in arrays if hasattr(type(x), "__torch_function__")]
    if not own:  # of another framework, under a mode
        return None
    return lambda function, *given, **named: torch.overrides.handle_torch_function(function, own, *given, **named)


def torch_traces() -> bool:
    """Whether torch's compiler, or `torch.jit.trace`, is tracing the caller."""
    return torch_compiles() or ("torch" in sys.modules and sys.modules["torch"].jit.is_tracing())


def for_dynamo() -> Any:
    """Return the module with the functions that torch's compiler traces in place of those that it cannot trace."""
    # This is an import statement because torch's compiler refuses calls of importlib.
    from planner.backends.torch.contexts import dynamo as torch_dynamo

    return torch_dynamo
