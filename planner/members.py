"""Runs calls that belong to a family, with the bound plan that its members share.

`bind_member` finds the family of a call by the classes of its sizes, without resolving the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from planner.language.cached import enter
from planner.language.options import MODES
from planner.language.spec import Gather, Term, term_gathers
from planner.program.calls import Member
from planner.program.contraction import Contraction
from planner.program.implementations import Backend
from planner.run import Run
from planner.search.exact.network import pool_letters
from planner.search.family import MOST_FAMILIES, PARTS, Family, class_of, families_of, is_small

__all__ = ["BOUND", "bind_first_member", "bind_member"]


class _Family:
    """Makes the functions that run the members of a family, which share the steps of one bound plan.

    Args:
        family: the family.
        contraction: one of its members, by which the dimensions of arrays are told apart.
        shapes: the shapes of its operands and index arrays as the caller passes them.
        names: the letters of the index arrays, in the order in which the caller passes them.
        bind: what `Backend.bind_family` made of the family's plan.
    """

    def __init__(
        self,
        family: Family,
        contraction: Contraction,
        shapes: Sequence[tuple[int, ...]],
        names: Sequence[str],
        bind: Callable[[Member], Run],
    ) -> None:
        self.bind, spec, resolved = bind, family.plan.resolved.spec, contraction.resolved
        self.names = tuple(names)
        self.count = len(spec.inputs)
        index_shapes = dict(resolved.index_shapes)
        fitted = [*resolved.shapes, *(index_shapes[name] for name in self.names)]
        # For each array the dimensions that are not broadcast; None if that is all.
        self.dims = [
            None if len(shape) == len(kept) else _kept_dims(shape, kept)
            for shape, kept in zip(shapes, fitted, strict=True)
        ]
        # The arrays by number, and what their dimensions are. An index array may stand in several brackets.
        self.terms: list[tuple[int, Term]] = [
            *enumerate(spec.inputs),
            *((self.count + self.names.index(gather.array), gather.axes) for gather in spec.gathers),
        ]
        self.output = spec.output
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
        kept = [
            shape if dims is None else tuple([shape[d] for d in dims])
            for shape, dims in zip(shapes, self.dims, strict=True)
        ]
        for number, term in self.terms:
            for entry, size in zip(term, kept[number], strict=True):
                if sizes.setdefault(entry, size) != size:
                    return None
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
        reshape = [None if dims is None else shape for shape, dims in zip(kept, self.dims, strict=True)]
        index_shapes = dict(zip(self.names, kept[self.count :], strict=True))
        return self.bind(Member(sizes, reshape[: self.count], index_shapes))


def _kept_dims(shape: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Return the dimensions of a shape without those of size 1 that are broadcast."""
    dims: list[int] = []
    for d, size in enumerate(shape):
        if len(dims) < len(kept) and size == kept[len(dims)]:
            dims.append(d)
    return dims


# The makers of functions for the members of families, by request, facts of the arrays, and classes of sizes. None
# stands for a family that is not settled, and for one whose members are bound by themselves.
BOUND: dict[Any, _Family | None] = {}
_UNKNOWN: Any = object()


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
        family = BOUND.get(key, _UNKNOWN)
        if isinstance(family, _Family):
            return family.member(shapes, asked[1])
        if family is _UNKNOWN:
            return None
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
            maker = bind and _Family(family, contraction, shapes, tuple(indices), bind)
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
