"""Runs calls that belong to a family, with the bound plan that its members share.

`bind_member` finds the family of a call by the classes of its sizes, without resolving the spec. The first call of its
kind shows where in the shapes of the arrays each size stands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from planner.cost.objective import step_key
from planner.language.cached import enter, enter_held
from planner.language.derive import resize_spec
from planner.language.options import MODES
from planner.language.spec import Spec
from planner.program.calls import Member, RunPlan, SizeReader
from planner.program.contraction import Contraction
from planner.program.forms import known_product, order_depends_on_sizes, product_of_rows
from planner.program.frameworks import Backend
from planner.program.ops import Op
from planner.program.plan import PlanRecord, bound_bytes
from planner.search.family import EXACT, MOST_FAMILIES, PARTS, WIDE, class_of, families_of, first_long, make_family_plan
from planner.search.family import wide_axes as axes_of_wide_classes

# How many plans are kept for members of one family whose steps have other rows or orders than those of its plan.
MOST_OTHERS = 16


class _Sizes:
    """Reads the sizes of calls of one spec, whose arrays have the same dimensions of size 1.

    Args:
        reader: tells the dimensions of arrays apart.
        given: the axes and gathers whose sizes the calls give.
        contraction: one of the calls.
    """

    def __init__(self, reader: SizeReader, given: Sequence[Any], contraction: Contraction) -> None:
        places = reader.places(given)
        self.first = list(dict.fromkeys([first for first, *_ in places.values()]))
        self.equal = [(*first, *other) for first, *others in places.values() for other in others]
        self.number_of = {entry: self.first.index(first) for entry, (first, *_) in places.items()}
        self.wide = [self.number_of[axis] for axis in axes_of_wide_classes(contraction) if axis in self.number_of]

    def read(self, arrays: Sequence[Sequence[int]]) -> list[int] | None:
        """Return the sizes in the shapes of arrays, and those that are given; None if they do not fit each other."""
        for a, d, b, e in self.equal:
            if arrays[a][d] != arrays[b][e]:
                return None
        return [arrays[a][d] for a, d in self.first]

    def keys(self, sizes: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        """Yield the key of the family for each entry of `PARTS`, which is its second entry."""
        wide = first_long(self.wide, sizes)
        for parts in PARTS:
            if parts != WIDE:
                yield (self, parts, *[class_of(n, parts) for n in sizes])
            elif wide is not None:
                classes = [1 << (n - 1).bit_length() if n > EXACT else n for n in sizes]
                classes[wide] = class_of(sizes[wide], WIDE)
                yield (self, parts, *classes)


class _Family:
    """Makes the functions that run the members of a family, which share the steps of one bound plan.

    Args:
        backend: the backend that runs them.
        plan: the plan of one of them.
        bind: what `Backend.bind_family` made of the plan.
        alike: ops of the plan's steps, and what the same ops of members must agree on with each, see `Table.alike`.
        contraction: one of the calls.
        call: the names of the index arrays of the calls, and the sizes that these give.
        sizes: reads the sizes of the calls.
    """

    def __init__(
        self,
        backend: Backend,
        plan: PlanRecord,
        bind: Callable[[Member], RunPlan],
        alike: Sequence[tuple[Op, Callable[[Op], Any]]],
        contraction: Contraction,
        call: tuple[Sequence[str], Any],
        sizes: _Sizes,
    ) -> None:
        names, given = call
        self.table, self.device, self.bind, self.alike = backend.table, plan.device, bind, alike
        self.names = self.table.names_for(plan)
        self.reader = SizeReader(plan.resolved.spec, contraction, names)
        places = self.reader.places(self.reader.given(given))
        specs = dict.fromkeys(product_of_rows(step.op.spec) for step in plan.steps)
        self.ordered = [spec for spec in specs if order_depends_on_sizes(spec)]
        self.numbers = [(entry, sizes.first.index(first)) for entry, (first, *_) in places.items()]
        self.facts = self._facts_at(None)
        # By the facts of members that run otherwise: what runs these.
        self.others: dict[Any, _Family | None] = {}

    @classmethod
    def of_plan(cls, backend: Backend, plan: PlanRecord, **others: Any) -> _Family | None:
        """Return what runs members as a plan says; None if a step runs at its own sizes only."""
        alike = backend.table.alike(plan.steps)
        bind = None if alike is None else backend.bind_family(plan)
        return None if alike is None or bind is None else cls(backend, plan, bind, alike, **others)

    def member(
        self, sizes: Sequence[int], shapes: Sequence[tuple[int, ...]], make: Callable[[], _Family | None] | None = None
    ) -> RunPlan | None:
        """Return the function that runs a member; None if there is none.

        Args:
            sizes: what `_Sizes.read` returned.
            shapes: the shapes of operands and index arrays.
            make: makes what runs a member that sums axes in another order, cuts other axes or has another row.
        """
        member = self.reader.member_of({entry: sizes[number] for entry, number in self.numbers}, shapes)
        facts = self._facts_at(member.sizes)
        if facts == self.facts:
            return self.bind(member)
        if make is not None and facts not in self.others:
            enter(self.others, facts, make(), MOST_OTHERS)
        other = self.others.get(facts)
        return None if other is None else other.member(sizes, shapes)

    def _facts_at(self, sizes: Mapping[Any, int] | None) -> tuple[Any, ...]:
        """Return what members of such sizes have in common if the same functions run them; None: the plan's sizes."""

        def at_sizes(spec: Spec) -> Spec:
            return spec if sizes is None else resize_spec(spec, sizes)

        facts: list[Any] = [known_product(at_sizes(spec)).matrices for spec in self.ordered]
        for op, asked in self.alike:
            resized = dataclasses.replace(op, spec=at_sizes(op.spec))
            if (answer := asked(resized)) is None:  # the row refuses the op, so another runs it
                key = step_key("time")
                # There are none if no step computes both gradients.
                choices = self.table.choices(resized, self.device, key, self.names)
                answer = min(choices, key=lambda choice: key(choice.cost)).lowering if choices else ""
            facts.append(answer)
        return tuple(facts)


# What reads the sizes of calls, by request, facts of the arrays, and the dimensions of size 1.
READERS: dict[Any, _Sizes] = {}
# The makers of functions for the members of families, by the reader of their sizes and the classes of these. None
# stands for a family that is not settled, and for one whose members are bound by themselves.
BOUND: dict[Any, _Family | None] = {}
# The bytes that they hold, and how many they may hold.
HELD: dict[Any, int] = {}
MOST_BYTES = 12_000_000
_UNKNOWN: Any = object()


def bind_member(backend: Backend, asked: Sequence[Any], operands: Any, indices: Any) -> RunPlan | None:
    """Return the function that runs a call of a family that was met before, or None.

    Args:
        backend: the backend of the operands.
        asked: the options of the call, as in `planner.language.options.Request`.
        operands: the operands.
        indices: the index arrays.
    """
    call = _kind_of(backend, asked, operands, indices)
    reader = None if call is None else READERS.get(call[0])
    if call is None or reader is None:
        return None
    _, shapes, numbers = call
    sizes = reader.read((*shapes, numbers))
    if sizes is None:
        return None
    for key in reader.keys(sizes):
        family = BOUND.get(key, _UNKNOWN)
        if isinstance(family, _Family):
            return family.member(sizes, shapes)
        if family is _UNKNOWN:
            return None
    return None


def bind_first_member(
    backend: Backend, asked: Sequence[Any], operands: Any, indices: Any, contraction: Contraction
) -> tuple[RunPlan | None, bool]:
    """Return the function that runs the first call of a family, and whether Ctrl-C ended the search for its plan.

    The function is None if the call belongs to no family: then it is planned by itself. The arguments are those of
    `bind_member`, and the contraction of the call.
    """
    call = _kind_of(backend, asked, operands, indices)
    if call is None or MODES[contraction.index_mode].bad == "drop" or contraction.device.kind != "cpu":
        return None, False
    families = families_of(contraction)
    if not families:
        return None, False
    kind, shapes, numbers = call
    names, given = tuple(indices), asked[1]
    sizes = READERS.get(kind)
    found = None if sizes is None else sizes.read((*shapes, numbers))
    if sizes is None or found is None:
        own = SizeReader(contraction.resolved.spec, contraction, names)
        sizes = _Sizes(own, own.given(given), contraction)
        found = sizes.read((*shapes, numbers))
        enter(READERS, kind, sizes, MOST_FAMILIES)
    assert found is not None
    make = partial(_Family.of_plan, backend, contraction=contraction, call=(names, given), sizes=sizes)
    for key in sizes.keys(found):
        maker, family = None, families.get(key[1])
        if family is None and key[1] != WIDE:
            return None, False
        if family is not None and family.settled and not family.searches_loops:
            maker = BOUND.get(key) or make(family.plan)
        if family is None or not family.interrupted:
            held = 0 if family is None or maker is None else bound_bytes(family.plan)
            enter_held(BOUND, HELD, key, maker, MOST_FAMILIES, held, MOST_BYTES)
        if maker is not None:
            run = maker.member(found, shapes, lambda: make(make_family_plan(contraction, families)))
            return run, family is not None and family.interrupted
    return None, False


def _kind_of(
    backend: Backend, asked: Sequence[Any], operands: Any, indices: Any
) -> tuple[Any, list[tuple[int, ...]], tuple[int, ...]] | None:
    """Return what calls have in common whose sizes stand in the same places, the shapes, and the sizes given."""
    # A resolved spec has sizes of its own, and a row that was added later may be better.
    signed = None
    if isinstance(asked[0], str) and not backend.table.has_changed:
        signed = backend.family_signature(operands, indices)
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
    for n in numbers:
        if type(n) is not int:
            return None
    # Dimensions of size 1 are broadcast.
    ones = [len(shape) if 1 not in shape else tuple([n == 1 for n in shape]) for shape in (*shapes, numbers)]
    return (asked[0], *asked[2:], letters, facts, *ones), shapes, numbers
