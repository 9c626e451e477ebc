"""A step on several devices: the part that each device computes, and the sums between devices.

Devices form a mesh with named axes. An *entry* of a spec is an axis, or the pool that a gather reads or adds into. If
an entry is split over axes of the mesh, it is shorter on each device, and so are all dimensions with this entry. So
each device computes the same einsum of shorter operands. If a pool is split, each device holds a slice of it, and
drops rows whose index lies outside of its slice. If a result lacks a split entry, each device computes one part of a
sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from planner.language.spec import Gather, Spec, Term, replace_gathers, term_axes

__all__ = [
    "Entry",
    "Placement",
    "Split",
    "choose_splits",
    "dims_of_entries",
    "splittable",
    "letter_of",
    "local_gather",
    "local_spec",
    "local_term",
    "axes_to_add_over",
    "with_sizes",
]

Entry = str | Gather
# For each dimension of an array, the axes of the mesh that it is split over, the major one first.
Placement = tuple[tuple[str, ...], ...]
# For each entry that is split, the axes of the mesh that it is split over.
Split = Mapping[Entry, tuple[str, ...]]


def splittable(spec: Spec) -> tuple[Entry, ...]:
    """Return the entries that can be split.

    Such an entry has at least two elements and appears at most once in each term and bracket. Two more cases cannot be
    split: the axes of an index array that is used with two different brackets; and a pool whose index array reads a
    pool of another size with the same bracket, because splitting could make the two sizes equal.
    """
    entries: dict[Entry, None] = {}
    for term in spec.terms:
        entries.update(dict.fromkeys((*term, *term_axes(term))))
    brackets = [gather.axes for gather in spec.gathers]
    uses = [(gather.array, gather.axes) for gather in spec.gathers]
    in_unlike_brackets: set[Entry] = set()
    for array, axes in uses:
        if any(array == other and axes != other_axes for other, other_axes in uses):
            in_unlike_brackets.update(axes)

    def can_be_split(entry: Entry) -> bool:
        if spec.size(entry) <= 1 or entry in in_unlike_brackets:
            return False
        if isinstance(entry, Gather) and uses.count((entry.array, entry.axes)) > 1:
            return False
        return all(places.count(entry) <= 1 for places in (*spec.terms, *brackets))

    return tuple(entry for entry in entries if can_be_split(entry))


def choose_splits(
    spec: Spec, arrays: Sequence[tuple[Term, Placement]], before: Split = MappingProxyType({})
) -> dict[Entry, tuple[str, ...]]:
    """Return the entries that a step splits, each with its axes of the mesh.

    A step splits the entries that its arrays are split over; the largest array decides first. An axis of the mesh
    splits only one entry. So if two arrays disagree, the smaller one moves.

    Args:
        spec: the step's spec.
        arrays: the terms or brackets of the step's operands and index arrays, or of its results, each with the
            placement of the array.
        before: the entries that are split already.
    """
    allowed, split = set(splittable(spec)), dict(before)
    used = {name for names in split.values() for name in names}
    for term, placement in sorted(arrays, key=lambda array: -math.prod(spec.shape(array[0]))):
        for entry, names in zip(term, placement, strict=True):
            if entry in allowed and entry not in split and names and used.isdisjoint(names):
                split[entry] = names
                used.update(names)
    return split


def dims_of_entries(spec: Spec, term: Term, shape: Sequence[int]) -> dict[Entry, int]:
    """Return the dimension of each entry of a term in an array as its caller has it.

    Dimensions of size 1 are left out: they may be broadcast, and then the term lacks them. They are never split.
    """
    long = [d for d, size in enumerate(shape) if size != 1]
    return dict(zip([entry for entry in term if spec.size(entry) != 1], long, strict=True))


def local_gather(gather: Gather, parts: Mapping[Entry, int]) -> Gather:
    """Return the gather from one device's slice of the pool."""
    assert gather.size is not None
    return dataclasses.replace(gather, size=-(-gather.size // parts.get(gather, 1)))


def local_term(term: Term, parts: Mapping[Entry, int]) -> Term:
    """Return a term whose gathers read one device's slices."""
    return replace_gathers(term, lambda gather: local_gather(gather, parts))


def local_spec(spec: Spec, parts: Mapping[Entry, int]) -> Spec:
    """Return the spec that one device computes. If a size is not a multiple of the number of parts, it is rounded up.

    Example:
        >>> import planner
        >>> spec = planner.resolve("nij, q[n]jk -> nik", (10, 1, 2), (3, 2, 4), q=(10,))
        >>> local_spec(spec, {"n": 4}).output_shape
        (3, 1, 4)

    Args:
        spec: a resolved spec.
        parts: for each entry that is split, the number of parts.
    """
    sizes = {axis: -(-size // parts.get(axis, 1)) for axis, size in spec.sizes}
    return with_sizes(spec, sizes, {gather: local_gather(gather, parts) for gather in spec.gathers})


def with_sizes(spec: Spec, sizes: Mapping[str, int], gathers: Mapping[Gather, Gather]) -> Spec:
    """Return the spec with other sizes for some axes, and with other gathers in place of some."""
    terms = [replace_gathers(term, lambda gather: gathers.get(gather, gather)) for term in spec.terms]
    return Spec(tuple(terms[:-1]), terms[-1], tuple((axis, sizes.get(axis, size)) for axis, size in spec.sizes))


def axes_to_add_over(term: Term, split: Split) -> tuple[str, ...]:
    """Return the axes of the mesh over which the parts of a result with this term must be added up."""
    return tuple(name for entry, names in split.items() if entry not in term for name in names)


def letter_of(entry: Entry) -> str:
    """Return the letter that users name an entry by. A pool is named by its index array."""
    return entry.array if isinstance(entry, Gather) else entry
