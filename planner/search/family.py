"""Families: contractions that differ in sizes only, and take the tree and the implementations of one search.

Real batches differ in size at every step, and a search takes longer than many a call. So sizes go by classes. Sizes up
to 16 are classes of their own; a larger size is rounded up to a power of two. The contraction of the rounded sizes is
the *representative* of all those that round to it, and the search runs for it alone. So a plan depends on its problem
only, and not on what was planned before.

A *member* takes the representative's tree. Each of its steps takes the implementation that the representative has
there, unless it refuses the member's own sizes: then the step takes the best of the others. Layouts and peaks are the
member's own. It is searched for loops over slices only where a loop is the best for the representative.

Implementations change places as sizes grow. So the representative's plan is also priced at the smallest sizes of the
classes, where a second search decides whether a plan could be better by more than `WON`. If so, the classes are too
wide: they are split in two, then in four. Classes split in four may be worse by `CLOSE` instead. In the end the member
is searched for itself.

Of one or two operands few trees compete. If no kernel competes with the stock implementations, their first long axis,
which as a rule is the batch, has wider classes on a CPU at first: 17 to 512, 513 to 16,384 and so on. The time of a
tree is nearly linear in one size. So what is within `WON` of the best at both ends of a class is so in between. With
gradients, contractions with index arrays or complex numbers have no such classes: autograd runs short steps, and
planner's own Function long ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from planner.cost.layout import layout_of, strides_in, strides_of
from planner.language.cached import enter_held
from planner.language.derive import resize_spec
from planner.language.errors import SearchLimitError
from planner.language.resolve import Resolved
from planner.language.spec import Gather, Operand, term_axes
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.loops import resize_nodes, resize_ops, resize_steps
from planner.program.ops import Einsum, Op, PricedImplementation
from planner.program.plan import PlanRecord, record_bytes
from planner.program.tree import merge_takes
from planner.search.choose import check_interrupt, make_plan
from planner.search.naive import is_as_lean_as_einsum
from planner.search.refine import call_seconds, prefer_autograd
from planner.search.slicing import CLOSE, LARGE_BYTES
from planner.search.space import AUTO, Candidate, SearchSpace, marked_interrupted

# Sizes up to this are classes of their own.
EXACT = 16
# Into how many classes the sizes between two powers of two are split, one try after the other. `WIDE` stands for
# classes of `OCTAVES` powers of two for one axis of contractions with at most `MOST_OPERANDS` operands.
WIDE, OCTAVES, MOST_OPERANDS = 0, 5, 2
PARTS = (WIDE, 1, 2, 4)
# A plan counts as good if its predicted time is at most this times that of the plan that a search of its own finds. In
# the narrowest classes that is `CLOSE`: a search would cost more time than many calls save.
WON = 1.1
# How many families are remembered, and how many bytes their plans may hold.
MOST_FAMILIES, MOST_BYTES = 512, 6_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """The contractions that round to the same sizes.

    Attributes:
        plan: the plan of the representative, without a loop over slices.
        settled: whether all members take the plan: at the smallest sizes it is as lean as einsum, and takes at most
            `WON`, or `CLOSE`, times as long as the best tree that a search of its own finds, or not all trees can be
            searched. Except in the narrowest classes, autograd runs the largest member if it is best for the smallest.
        loops: whether the best plan at an end of the classes is a loop over slices, which is faster than `plan`. Then
            narrower classes are not tried.
        searches_loops: whether members are searched for loops over slices: whether a loop is the best with the tree at
            the largest sizes. Smaller members have less memory and time to save, as a rule.
    """

    plan: PlanRecord
    settled: bool
    loops: bool = False
    searches_loops: bool = False

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the search for the plan, or what decides on the family. Then it is not remembered."""
        return self.plan.interrupted


T = TypeVar("T")
Sizes = Mapping[str | Gather, int]
# Steps at other sizes, see `resize_steps`.
Steps = Iterable[tuple[Op, PricedImplementation | None]]

# By the representative, and by the entry of `PARTS`.
FAMILIES: dict[tuple[Contraction, int], Family] = {}
# The bytes that they hold.
HELD: dict[tuple[Contraction, int], int] = {}


def make_family_plan(contraction: Contraction, families: Mapping[int, Family] | None = None) -> PlanRecord:
    """Return the plan of a contraction: that of its family, or one that is searched for.

    Args:
        contraction: the contraction.
        families: what `families_of` returns, if that is known.

    Raises: as `planner.search.choose.make_plan`.
    """
    if contraction.symbols:
        return make_plan(contraction, partial(_with_takes_merged, make_plan(contraction, loops=False)))
    family = _settled(families_of(contraction) if families is None else families)
    if family is None:
        return make_plan(contraction)
    return make_plan(contraction, partial(_at_sizes_of, family.plan), family.searches_loops)


def family_of(contraction: Contraction) -> Family | None:
    """Return the family whose plan a contraction takes; None if it must be searched for itself."""
    return _settled(families_of(contraction))


def _settled(families: Mapping[int, Family]) -> Family | None:
    """Return the family of which all members take the plan."""
    return next((family for family in families.values() if family.settled), None)


def _with_takes_merged(plan: PlanRecord, space: SearchSpace) -> Candidate:
    """Return a plan at symbolic sizes whose products take rows themselves, so that no gradient keeps what is taken."""
    tree, lower = merge_takes(plan.tree), space.lowerer(plan.options.objective)
    return Candidate(space.programs(tree, lower), tree, lower, plan.proven and tree == plan.tree, plan.origin)


def is_small(plan: PlanRecord) -> bool:
    """Whether the plan of the largest member, and so that of each member, is too small for a loop over slices."""
    return plan.cost.peak_bytes < LARGE_BYTES


def families_of(contraction: Contraction) -> dict[int, Family]:
    """Return the families of a contraction by the entry of `PARTS`, as far as the first that is settled.

    After Ctrl-C no further search begins. The last family then has the best plan so far, and is not remembered.
    """
    options, tried = contraction.options, dict[int, Family]()
    limits = (options.memory_limit, options.retain_limit)
    asked = (options.optimize, options.minimize, options.deadline, *limits, contraction.mesh)
    if asked != ("auto", "time", None, None, None, None):
        return tried
    spec = contraction.resolved.spec
    if max([*spec.by_axis.values(), *[gather.size or 0 for gather in spec.gathers]], default=0) <= EXACT:
        return tried  # all sizes are classes of their own
    if load_backend(contraction.backend).table.has_changed:  # what its searches found may be out of date
        return tried
    wide, plans = first_long(wide_axes(contraction), spec.by_axis), dict[Contraction, PlanRecord]()
    for parts in PARTS:
        if parts == WIDE and (wide is None or _has_kernels(contraction)):
            continue
        top = _resize(contraction, _Classes(contraction.device.kind, parts, "top", wide))
        if top is None or top.resolved.spec == spec:
            return tried
        family = FAMILIES.get((top, parts))
        if family is None:
            low = _resize(contraction, _Classes(contraction.device.kind, parts, "low", wide))
            if low is None:
                return tried
            if top not in plans:
                plans[top] = make_plan(top, loops=False)
            try:
                check_interrupt(plans[top])
                family = _decide_on_loops(_judged(plans[top], low, parts))
                size = record_bytes(family.plan)
                enter_held(FAMILIES, HELD, (top, parts), family, MOST_FAMILIES, size, MOST_BYTES)
            except KeyboardInterrupt:
                family = Family(marked_interrupted(plans[top]), settled=True)
        tried[parts] = family
        if family.settled or family.loops:
            break
    return tried


def wide_axes(contraction: Contraction) -> list[str]:
    """Return the axes of which the first that is longer than `EXACT` has wide classes."""
    spec = contraction.resolved.spec
    if contraction.device.kind != "cpu" or len(spec.inputs) > MOST_OPERANDS:
        return []
    if any(contraction.requires_grad) and (spec.gathers or contraction.dtype.startswith("complex")):
        return []
    return list(dict.fromkeys(axis for term in spec.inputs for axis in term_axes(term)))


def _has_kernels(contraction: Contraction) -> bool:
    """Whether a kernel of CPUs runs the contraction in one step, at any sizes.

    Whether it is the fastest changes with the sizes.
    """
    op, rows = Einsum(contraction.resolved.spec, contraction.dtype), load_backend(contraction.backend).table.rows
    kernels = [row for row in rows.values() if row.brackets] if op.gathers else []
    return any(row.refusal(op, contraction.device) is None for row in kernels)


def first_long(axes: Iterable[T], sizes: Any) -> T | None:
    """Return the first of some axes that is longer than `EXACT`; `sizes` has the size of each at its place."""
    for axis in axes:
        if sizes[axis] > EXACT:
            return axis
    return None


def class_of(size: int, parts: int) -> int:
    """Return the greatest size of the class of a size; `parts` is an entry of `PARTS`."""
    if size <= EXACT:
        return size
    bits = (size - 1).bit_length()
    if parts == 1:
        return 1 << bits
    if parts == WIDE:
        exact = EXACT.bit_length() - 1
        return 1 << exact - (exact - bits) // OCTAVES * OCTAVES
    width = (1 << bits) // (2 * parts)
    return -(-size // width) * width


@dataclasses.dataclass(frozen=True, slots=True)
class _Classes:
    """Rounds the size of an axis or gather to an end of its class.

    Attributes:
        kind: the kind of device. On a card implementations ask what a size is divisible by, so a class has the sizes
            with the same greatest common divisor with 16.
        parts: an entry of `PARTS`. With `WIDE` axes that are not wide have one class between two powers of two.
        end: "top" for the greatest size of the class, "low" for the least.
        wide: the axis whose classes may be wide.
    """

    kind: str
    parts: int
    end: str
    wide: str | None

    def __call__(self, entry: str | Gather, size: int) -> int:
        """Return the size at the end of the class of a size."""
        if size <= EXACT:
            return size
        parts = self.parts if self.parts != WIDE or entry == self.wide else 1
        top = class_of(size, parts)
        width = (1 << (size - 1).bit_length()) // (2 * parts) if parts else top - (top >> OCTAVES)
        sizes = range(top, top - width, -1) if self.end == "top" else range(top - width + 1, top + 1)
        if self.kind == "cpu":
            return sizes[0]
        return next(n for n in sizes if math.gcd(n, EXACT) == math.gcd(size, EXACT))


def _judged(plan: PlanRecord, low: Contraction, parts: int) -> Family:
    """Find out whether the largest member's plan is as lean as einsum, and fast, for the smallest member too.

    Args:
        plan: the plan.
        low: the smallest member.
        parts: the entry of `PARTS`.

    Raises:
        KeyboardInterrupt: Ctrl-C ended a search.
    """
    space, wide, narrow = SearchSpace(low), parts == WIDE, parts == PARTS[-1]
    won = CLOSE if narrow else WON  # how many times as long as its best plan it may take
    # Where not all trees can be searched, a second search would take long.
    if not space.may_be_exact("time", AUTO):
        return Family(plan, not wide)
    if wide and not is_small(plan):
        return Family(plan, False)
    sizes, lower = _sizes_of(plan, space), space.lowerer("time")
    only_tree = len(space.operands) <= 2 and not space.network.gathers

    def price(op: Op, lowering: str) -> PricedImplementation | None:
        """Return a step in an implementation. If there is one tree, the best are needed, which often are the same."""
        if only_tree and space.choices(op) and (best := lower(op)).lowering == lowering:
            return best
        return space.table.price(lowering, op, space.device)

    steps = [(op, price(op, lowering)) for op, lowering in resize_ops(plan, sizes)]
    if any(choice is None and not space.choices(op) for op, choice in steps):
        return Family(plan, False)  # here no step computes both gradients
    if only_tree and not any(space.requires) and all(lower(op) is choice for op, choice in steps):
        return Family(plan, True)
    smallest = _with_steps(plan, space, sizes, steps, _runs_by_autograd(plan))
    native = prefer_autograd(space, smallest)
    if native is not smallest and not (narrow and call_seconds(low, smallest) <= won * call_seconds(low, native)):
        return Family(plan, False)
    if not narrow and not _runs_by_autograd(plan) and any(step.choice.cost.copied_bytes for step in plan.steps):
        alone = _with_steps(plan, space, sizes, steps, records=None)
        if alone.programs.copies is not None:  # autograd would keep copies, which a Function makes twice
            return Family(plan, False)
    taken = sum((choice or lower(op)).cost.picoseconds for op, choice in steps)
    wanted = math.ceil(taken / won)
    if only_tree and sum(lower(op).cost.picoseconds for op, _ in steps) >= wanted:
        return Family(plan, True)
    member = PlanRecord.of_contraction(
        low, tree=smallest.tree, programs=smallest.programs, proven=False, origin=smallest.origin
    )
    if not is_as_lean_as_einsum(member):
        return Family(plan, False)
    try:
        if not only_tree and not space.has_quicker(wanted, AUTO):
            return Family(plan, True)
    except SearchLimitError:
        return Family(plan, not wide)
    # The quicker tree may need more memory than einsum, or copies that its search does not see. But a loop over slices
    # may be as quick, and lean.
    for ours, end in ((member, low), (plan, plan.contraction)):
        best = check_interrupt(make_plan(end))
        if call_seconds(end, ours) > won * call_seconds(end, best):
            return Family(plan, False, best.loop is not None)
    return Family(plan, True)


def _decide_on_loops(family: Family) -> Family:
    """Return a family with the decision whether its members are searched for loops over slices.

    Raises:
        KeyboardInterrupt: Ctrl-C ended a search.
    """
    if not family.settled or is_small(family.plan):
        return family
    largest = check_interrupt(make_plan(family.plan.contraction, partial(_at_sizes_of, family.plan)))
    return dataclasses.replace(family, searches_loops=largest.loop is not None)


def _resize(contraction: Contraction, size_of: Callable[[str | Gather, int], int]) -> Contraction | None:
    """Return a contraction at other sizes, with the layouts and all else that it has; None if there is none.

    Its operands are stand-ins that lack the dimensions of size 1 which are broadcast.

    Args:
        contraction: the contraction.
        size_of: from an axis or gather, and its size, to the size in its place.
    """
    old = contraction.resolved.spec
    if 0 in old.by_entry.values():
        return None
    spec = resize_spec(old, {entry: size_of(entry, size) for entry, size in old.by_entry.items()})
    if len(spec.gathers) < len(old.gathers):  # two dimensions of different sizes would become one
        return None
    resolved, operands = Resolved.of(spec), []
    for operand, before, after in zip(contraction.operands, contraction.resolved.shapes, resolved.shapes, strict=True):
        strides = strides_in(operand, before)
        if strides is not None and (strides := strides_of(layout_of(before, strides), after)) is None:
            return None
        operands.append(Operand(after, operand.dtype, strides, operand.requires_grad))
    gradient_strides = contraction.gradient_strides
    if gradient_strides is not None:
        gradient_strides = strides_of(layout_of(old.output_shape, gradient_strides), spec.output_shape)
        if gradient_strides is None:
            return None
    return dataclasses.replace(
        contraction,
        text=str(spec),
        resolved=resolved,
        index_shapes=resolved.index_shapes,
        operands=tuple(operands),
        gradient_strides=gradient_strides,
    )


def _at_sizes_of(representative: PlanRecord, space: SearchSpace) -> Candidate:
    """Return the representative's plan at the sizes of a member."""
    sizes = _sizes_of(representative, space)
    steps, records = resize_steps(representative, sizes, space.table), _runs_by_autograd(representative)
    return _with_steps(representative, space, sizes, steps, records)


def _with_steps(
    representative: PlanRecord, space: SearchSpace, sizes: Sizes, steps: Steps, records: bool | None
) -> Candidate:
    """Return the representative's plan at the sizes of a member, from its steps at these sizes; see `Lowerer`."""
    fixed = {op: choice for op, choice in steps if choice is not None}
    lower = space.lowerer("time", fixed, records)
    tree = resize_nodes(representative.tree, sizes)
    origin = _origin(representative, space.contraction)
    return Candidate(space.programs(tree, lower), tree, lower, False, origin)


def _runs_by_autograd(plan: PlanRecord) -> bool:
    """Whether autograd runs a plan's steps, and holds what it holds."""
    return plan.programs.by_autograd or plan.programs.copies is not None


def _sizes_of(representative: PlanRecord, space: SearchSpace) -> Sizes:
    """Return the sizes of a member by the axes and gathers of its representative's steps."""
    gathers = zip(representative.resolved.spec.gathers, space.resolved.spec.gathers, strict=True)
    # The letters of gathered dimensions are the same for all members.
    sizes: dict[str | Gather, int] = {gather: own.size or 0 for gather, own in gathers}
    sizes.update(space.network.sizes)
    return sizes


def _origin(representative: PlanRecord, member: Contraction) -> str:
    """Return where a member's tree is from, as text."""
    changed = []
    pairs = zip(representative.resolved.spec.sizes, member.resolved.spec.sizes, strict=True)
    gathers = zip(representative.resolved.spec.gathers, member.resolved.spec.gathers, strict=True)
    for (axis, size), (_, own) in pairs:
        if size != own:
            changed.append(f"{axis}={size}")
    for gather, own_gather in gathers:
        if gather.size != own_gather.size:
            changed.append(f"{gather}={gather.size}")
    return f"{representative.origin}, for the family of {', '.join(changed)}"
