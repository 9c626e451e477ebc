"""Runs a plan: checks the arrays, and keeps the function that runs the plan for further calls."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from planner.language.errors import PlannerError, ShapeError
from planner.language.options import MODES
from planner.language.resolve import resolve_shapes
from planner.language.spec import Gather, Spec, Term, row_axes, term_gathers
from planner.program.callbacks import callbacks
from planner.program.calls import Member
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend, operands_framework
from planner.program.implementations import Backend
from planner.program.plan import PlanRecord
from planner.search.exact.network import pool_letters
from planner.search.family import MOST_FAMILIES, PARTS, Family, class_of, families_of, is_small

__all__ = ["bind_first_member", "bind_member", "bind_plan", "check_call", "for_dynamo", "forget_families", "run_plan",
           "torch_compiles"]  # fmt: skip

# A function from operands and index arrays to the result.
Run = Callable[[Sequence[Any], Mapping[str, Any]], Any]


def run_plan(plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
    """Run a plan on arrays, after checking that the plan was made for such arrays."""
    signature = check_call(plan, operands, indices).signature(operands, indices)
    return _bound(_Same(plan), signature)(operands, indices)


class _Same:
    """A plan as a key, equal to itself only. Comparing two plans can take longer than running one."""

    __slots__ = ("plan",)

    def __init__(self, plan: PlanRecord) -> None:
        self.plan = plan

    def __hash__(self) -> int:
        return id(self.plan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.plan is other.plan


@lru_cache(maxsize=256)
def _bound(same: _Same, signature: Hashable) -> Run:
    """Return the function that runs a plan. Calls with equal signatures share it, and what JAX compiled with it."""
    backend = load_backend(same.plan.backend)
    for _, step in same.plan.inner_steps(every=True):
        if step.choice.lowering not in backend.table.rows:
            raise PlannerError(
                f"the plan runs a step as {step.choice.lowering!r}, which {backend.name} does not have here: it was "
                "made by another version, or a row of your own is missing; make a new plan"
            )
    return bind_plan(same.plan)


class _Family:
    """Makes the functions that run the members of a family, which share the steps of one bound plan.

    Args:
        family: the family.
        contraction: one of its members, by which the dimensions of arrays are told apart.
        shapes: the shapes of its operands and index arrays as the caller passes them.
        bind: what `Backend.bind_family` made of the family's plan.
    """

    def __init__(
        self,
        family: Family,
        contraction: Contraction,
        shapes: Sequence[tuple[int, ...]],
        bind: Callable[[Member], Run],
    ) -> None:
        self.bind, spec, resolved = bind, family.plan.resolved.spec, contraction.resolved
        arrays = {gather.array: gather.axes for gather in spec.gathers}
        self.names = tuple(name for name, _ in contraction.index_shapes)
        self.count = len(spec.inputs)
        terms: list[Term] = [*spec.inputs, *(arrays[name] for name in self.names)]
        index_shapes = dict(resolved.index_shapes)
        fitted = [*resolved.shapes, *(index_shapes[name] for name in self.names)]
        # The dimensions of each array that are not broadcast, and the axis or gather of each.
        self.dims = [_kept_dims(shape, kept) for shape, kept in zip(shapes, fitted, strict=True)]
        self.terms = terms
        self.whole = [len(shape) == len(kept) for shape, kept in zip(shapes, fitted, strict=True)]
        self.output, self.spec = spec.output, spec
        self.written = {e.array: e for e in spec.output if isinstance(e, Gather)}
        self.read = {gather.array: gather for term in spec.inputs for gather in term_gathers(term)}
        self.pools = {axis: gather for gather, axis in zip(spec.gathers, pool_letters(spec), strict=True)}

    def member(self, shapes: Sequence[tuple[int, ...]], given: Any) -> Run | None:
        """Return the function that runs a member; None if its sizes do not fit each other, or a check is needed.

        Args:
            shapes: the shapes of operands and index arrays.
            given: `sizes=` of the call.
        """
        sizes: dict[str | Gather, int] = {}
        fitted: list[tuple[int, ...] | None] = []
        for shape, dims, term, whole in zip(shapes, self.dims, self.terms, self.whole, strict=True):
            kept = shape if whole else tuple([shape[d] for d in dims])
            for entry, size in zip(term, kept, strict=True):
                if sizes.setdefault(entry, size) != size:
                    return None
            fitted.append(None if whole else kept)
        if given is not None:
            by_letter = given.items() if isinstance(given, Mapping) else zip(self.output, given, strict=True)
            for letter, size in by_letter:
                entry = letter
                if isinstance(letter, str):
                    entry = self.written.get(letter) or self.read.get(letter) or letter
                if sizes.setdefault(entry, size) != size:
                    return None
        for entry in self.written.values():
            if entry not in sizes:  # the size is that of what the same index array reads
                sizes[entry] = sizes[self.read[entry.array]]
        for letter, gather in self.pools.items():
            sizes[letter] = sizes[gather]
        index_shapes = {
            name: kept or shape
            for name, kept, shape in zip(self.names, fitted[self.count :], shapes[self.count :], strict=True)
        }
        return self.bind(Member(sizes, fitted[: self.count], index_shapes))


def _kept_dims(shape: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Return the dimensions of a shape without those of size 1 that are broadcast."""
    dims: list[int] = []
    for d, size in enumerate(shape):
        if len(dims) < len(kept) and size == kept[len(dims)]:
            dims.append(d)
    return dims


# The makers of functions for the members of families, by request, facts of the arrays, and classes of sizes. None
# stands for a family that is not settled, and for one whose members are bound by themselves.
_FAMILIES: dict[Any, _Family | None] = {}


def forget_families() -> None:
    """Forget the bound plans of families."""
    _FAMILIES.clear()


def bind_member(backend: Backend, asked: Sequence[Any], operands: Any, indices: Any) -> Run | None:
    """Return the function that runs a call of a family that was met before, or None.

    Args:
        backend: the backend of the operands.
        asked: the options of the call, as in `planner.language.options.Request`.
        operands: the operands.
        indices: the index arrays.
    """
    keys = _family_keys(backend, asked, operands, indices)
    if keys is None:
        return None
    shapes, by_parts = keys
    for key in by_parts:
        if key not in _FAMILIES:
            return None
        family = _FAMILIES[key]
        if family is not None:
            return family.member(shapes, asked[1])
    return None


def bind_first_member(
    backend: Backend, asked: Sequence[Any], operands: Any, indices: Any, contraction: Contraction
) -> Run | None:
    """Return the function that runs the first call of a family; None if the call must be planned by itself.

    The arguments are those of `bind_member`, and the contraction of the call.
    """
    keys = _family_keys(backend, asked, operands, indices)
    if keys is None or MODES[contraction.index_mode].bad == "drop" or contraction.device.kind != "cpu":
        return None
    shapes, by_parts = keys
    for key, family in zip(by_parts, families_of(contraction), strict=False):
        maker = None
        if family.settled and is_small(family.plan) and backend.table.runs_any_sizes(family.plan.steps):
            bind = backend.bind_family(family.plan)
            maker = bind and _Family(family, contraction, shapes, bind)
        while len(_FAMILIES) >= MOST_FAMILIES:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread changes it too
                _FAMILIES.pop(next(iter(_FAMILIES)), None)
        _FAMILIES[key] = maker
        if maker is not None:
            return maker.member(shapes, asked[1])
    return None


def _family_keys(
    backend: Backend, asked: Sequence[Any], operands: Any, indices: Any
) -> tuple[list[tuple[int, ...]], Iterator[Any]] | None:
    """Return the shapes of the arrays of a call, and the key of its family for each entry of `PARTS`."""
    # A resolved spec has sizes of its own.
    signed = backend.family_signature(operands, indices) if isinstance(asked[0], str) else None
    if signed is None:
        return None
    facts, shapes = signed
    given, letters = asked[1], None
    numbers: tuple[Any, ...] = ()
    if given is None:
        pass
    elif isinstance(given, Mapping):
        letters, numbers = tuple(given), tuple(given.values())
    else:
        numbers = tuple(given)
    if not all(type(n) is int for n in numbers):
        return None
    ask = (asked[0], *asked[2:], letters, facts)

    def key(parts: int) -> Any:
        return (ask, parts, *[tuple([class_of(n, parts) for n in shape]) for shape in (*shapes, numbers)])

    return shapes, map(key, PARTS)


def bind_plan(plan: PlanRecord) -> Run:
    """Return the function that runs a plan on operands and index arrays."""
    run, spec = load_backend(plan.backend).bind(plan), plan.resolved.spec
    reads = any(term_gathers(term) for term in spec.inputs) and 0 not in dict(spec.sizes).values()
    return partial(_run_and_mark, run, plan) if reads and MODES[plan.index_mode].unmarked else run


def _run_and_mark(run: Run, plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
    """Run a plan. Then write NaN into each result that reads an operand at an index out of range.

    Zero or NaN is added to the result, so that gradients are those of the plan.
    """
    backend, spec, mode = load_backend(plan.backend), plan.resolved.spec, plan.index_mode
    result, ops, shapes = run(operands, indices), backend.ops, dict(plan.resolved.index_shapes)
    for gather in dict.fromkeys(gather for term in spec.inputs for gather in term_gathers(term)):
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
        counts = callbacks().contract(count, ones, index_mode=MODES[mode].unmarked, **arrays)
        marks = ops.select(counts == 0, ops.zeros(counts.shape, result), math.nan)
        shape = [n if d in dims else 1 for d, n in enumerate(spec.output_shape)]
        # NumPy makes a number of a sum without dimensions.
        result = (result.reshape((1, *spec.output_shape)) + marks.reshape((1, *shape))).reshape(spec.output_shape)
    return result


def check_call(plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> Backend:
    """Return a plan's backend, after checking that the plan was made for such arrays.

    Raises:
        ShapeError: an operand or index array does not fit.
        PlannerError: an array is of another framework; or an index array is missing, unknown or not of integers.
    """
    if len(operands) != len(plan.operands):
        raise ShapeError(f"the plan takes {len(plan.operands)} operands, but {len(operands)} were given")
    framework = operands_framework(operands, indices)
    if framework != plan.backend:
        raise PlannerError(f"the plan was made for {plan.backend}, but operand 0 is a {framework} array")
    backend = load_backend(framework)
    for number, (array, wanted) in enumerate(zip(operands, plan.operands, strict=True)):
        operand = backend.operand(array)
        if operand.shape != wanted.shape or operand.dtype != wanted.dtype:
            raise ShapeError(
                f"operand {number} is {operand.dtype}{list(operand.shape)}, but the plan was made for "
                f"{wanted.dtype}{list(wanted.shape)}: make a new plan"
            )
    wanted_shapes = dict(plan.index_shapes)
    for name in wanted_shapes:
        if name not in indices:
            raise PlannerError(f"the index array {name!r} is missing: pass it as the keyword {name}=...")
    for name, index in indices.items():
        if name not in wanted_shapes:
            raise PlannerError(f"unknown index array {name!r}: the plan has {', '.join(wanted_shapes) or 'none'}")
        backend.check_index(name, index)
    _check_index_shapes(plan, {name: tuple(index.shape) for name, index in indices.items()})
    return backend


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


def for_dynamo() -> Any:
    """Return the module with the functions that torch's compiler traces in place of those that it cannot trace."""
    # This is an import statement because torch's compiler refuses calls of importlib.
    from planner.backends.torch import dynamo as torch_dynamo

    return torch_dynamo
