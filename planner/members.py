"""Runs calls that belong to a family, with the bound plan that its members share.

`bind_member` finds the family of a call by the classes of its sizes, without resolving the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from planner.language.cached import enter
from planner.language.options import MODES
from planner.program.calls import Member, SizeReader
from planner.program.contraction import Contraction
from planner.program.implementations import Backend, RunPlan
from planner.search.family import MOST_FAMILIES, PARTS, Family, class_of, families_of, is_small

__all__ = ["BOUND", "bind_first_member", "bind_member"]


class _Family:
    """Makes the functions that run the members of a family, which share the steps of one bound plan.

    Args:
        family: the family.
        contraction: one of its members, by which the dimensions of arrays are told apart.
        names: the letters of the index arrays, in the order in which the caller passes them.
        bind: what `Backend.bind_family` made of the family's plan.
    """

    def __init__(
        self, family: Family, contraction: Contraction, names: Sequence[str], bind: Callable[[Member], RunPlan]
    ) -> None:
        self.bind, self.reader = bind, SizeReader(family.plan.resolved.spec, contraction, names)

    def member(self, shapes: Sequence[tuple[int, ...]], given: Any) -> RunPlan | None:
        """Return the function that runs a member; None if its sizes do not fit each other, or a check is needed.

        Args:
            shapes: the shapes of operands and index arrays.
            given: `sizes=` of the call.
        """
        member = self.reader.member(shapes, self.reader.entries(given))
        return None if member is None else self.bind(member)


# The makers of functions for the members of families, by request, facts of the arrays, and classes of sizes. None
# stands for a family that is not settled, and for one whose members are bound by themselves.
BOUND: dict[Any, _Family | None] = {}
_UNKNOWN: Any = object()


def bind_member(backend: Backend, asked: Sequence[Any], operands: Any, indices: Any) -> RunPlan | None:
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
        family = BOUND.get(key, _UNKNOWN)
        if isinstance(family, _Family):
            return family.member(shapes, asked[1])
        if family is _UNKNOWN:
            return None
    return None


def bind_first_member(
    backend: Backend, asked: Sequence[Any], operands: Any, indices: Any, contraction: Contraction
) -> RunPlan | None:
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
            maker = bind and _Family(family, contraction, tuple(indices), bind)
        enter(BOUND, key, maker, MOST_FAMILIES)
        if maker is not None:
            return maker.member(shapes, asked[1])
    return None


def _family_keys(
    backend: Backend, asked: Sequence[Any], operands: Any, indices: Any
) -> tuple[list[tuple[int, ...]], Iterator[Any]] | None:
    """Return the shapes of the arrays of a call, and the key of its family for each entry of `PARTS`."""
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
    if not all(type(n) is int for n in numbers):
        return None
    ask = (asked[0], *asked[2:], letters, facts)

    def key(parts: int) -> Any:
        return (ask, parts, *[tuple([class_of(n, parts) for n in shape]) for shape in (*shapes, numbers)])

    return shapes, map(key, PARTS)
