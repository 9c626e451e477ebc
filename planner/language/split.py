"""A step on several devices: what each computes of it, and what must be added up between them.

Devices stand in a mesh with named axes. An *entry* of a spec (an axis, or what a gather reads or adds into) that is
split over axes of the mesh is shorter on each device, and so is every dimension that has it: the step there is the same
einsum of shorter operands. Of a split pool each device holds a slice, and rows whose index lies outside of it are
dropped. Where a result lacks a split entry, what a device computes is its part of a sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from planner.language.spec import Gather, Spec, Term, term_axes

__all__ = [
    "Entry",
    "Placement",
    "Split",
    "choose_splits",
    "splittable",
    "letter_of",
    "local_gather",
    "local_spec",
    "local_term",
    "axes_to_add_over",
]

Entry = str | Gather
# For each dimension of an array the axes of the mesh that it is split over, the major one first.
Placement = tuple[tuple[str, ...], ...]
# For each entry that is split the axes of the mesh.
Split = Mapping[Entry, tuple[str, ...]]


def splittable(spec: Spec) -> tuple[Entry, ...]:
    """Return the entries that can be split: of two or more elements, and but once in every term and bracket.

    Nor a pool that one index array reads in the same brackets as a pool of another size, for the two could get one
    name; nor the axes of an index array that is read in two brackets.
    """
    entries = dict.fromkeys(e for term in spec.terms for e in (*term, *term_axes(term)))
    brackets = [gather.axes for gather in spec.gathers]
    names = [(gather.array, gather.axes) for gather in spec.gathers]
    unlike = {axis for array, axes in names for axis in axes if any(array == a and axes != b for a, b in names)}

    def once(entry: Entry) -> bool:
        if entry in unlike or (isinstance(entry, Gather) and names.count((entry.array, entry.axes)) > 1):
            return False
        return all(places.count(entry) <= 1 for places in (*spec.terms, *brackets))

    return tuple(entry for entry in entries if spec.size(entry) > 1 and once(entry))


def choose_splits(
    spec: Spec, arrays: Sequence[tuple[Term, Placement]], before: Split = MappingProxyType({})
) -> dict[Entry, tuple[str, ...]]:
    """Return what a step splits over which axes of the mesh: what its arrays are split over, the largest array's first.

    An axis of the mesh splits one entry only, so of arrays that disagree the smaller one moves.

    Args:
        spec: the step's.
        arrays: terms, or brackets, of its operands and index arrays, or of its results, and how these are placed.
        before: what is split already.
    """
    allowed, split = set(splittable(spec)), dict(before)
    used = {name for names in split.values() for name in names}
    for term, placement in sorted(arrays, key=lambda array: -math.prod(spec.shape(array[0]))):
        for entry, names in zip(term, placement, strict=True):
            if entry in allowed and entry not in split and names and used.isdisjoint(names):
                split[entry] = names
                used.update(names)
    return split


def local_gather(gather: Gather, parts: Mapping[Entry, int]) -> Gather:
    """Return a gather of one device's slice of the pool."""
    assert gather.size is not None
    return dataclasses.replace(gather, size=-(-gather.size // parts.get(gather, 1)))


def local_term(term: Term, parts: Mapping[Entry, int]) -> Term:
    """Return a term with gathers of one device's slices."""
    return tuple(local_gather(e, parts) if isinstance(e, Gather) else e for e in term)


def local_spec(spec: Spec, parts: Mapping[Entry, int]) -> Spec:
    """Return what one device computes, of slices rounded up where an entry is not a multiple of its parts.

    Example:
        >>> import planner
        >>> spec = planner.resolve("nij, q[n]jk -> nik", (10, 1, 2), (3, 2, 4), q=(10,))
        >>> local_spec(spec, {"n": 4}).output_shape
        (3, 1, 4)

    Args:
        spec: a resolved spec.
        parts: into how many parts entries are split.
    """
    sizes = tuple((axis, -(-size // parts.get(axis, 1))) for axis, size in spec.sizes)
    return Spec(tuple(local_term(term, parts) for term in spec.inputs), local_term(spec.output, parts), sizes)


def axes_to_add_over(term: Term, split: Split) -> tuple[str, ...]:
    """Return the axes of the mesh over which parts of a result with this term are to be added up."""
    return tuple(name for entry, names in split.items() if entry not in term for name in names)


def letter_of(entry: Entry) -> str:
    """Return the letter by which users name an entry: of a pool that of its index array."""
    return entry.array if isinstance(entry, Gather) else entry
