"""A step on several devices: the part that each device computes, and the sums between devices.

Devices form a mesh with named axes. An *entry* of a spec is an axis, or the pool that a gather reads or adds into. If
an entry is split over axes of the mesh, it is shorter on each device, and so are all dimensions with this entry. So
each device computes the same einsum of shorter operands. If a pool is split, each device holds a slice of it, and
drops rows whose index lies outside of its slice. If a result lacks a split entry, each device computes one part of a
sum.

If an entry repeats in a term, only the diagonal of the array counts. The array is split along one of these dimensions,
and each device cuts its part out of the others. An index array that is used in several brackets is read once for each
of them, and so is one that reads pools of several sizes. So it may be split in one place and whole in another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from planner.language.spec import Gather, Spec, Term, replace_gathers, term_axes, unused_letters

Entry = str | Gather
# For each dimension of an array, the axes of the mesh that it is split over, the major one first.
Placement = tuple[tuple[str, ...], ...]
# For each entry that is split, the axes of the mesh that it is split over.
Split = Mapping[Entry, tuple[str, ...]]


def splittable(spec: Spec) -> tuple[Entry, ...]:
    """Return the entries that can be split: all but those of one element, which may be broadcast."""
    entries: dict[Entry, None] = {}
    for term in spec.terms:
        entries.update(dict.fromkeys((*term, *term_axes(term))))
    return tuple(entry for entry in entries if spec.size(entry) != 1)


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


def place_term(term: Term, split: Split, wanted: Placement = ()) -> Placement:
    """Return the placement of an array: each split entry of its term splits one dimension.

    If the entry repeats in the term, that is a dimension which is split so in the wanted placement, or else the first.

    Example:
        >>> place_term(("i", "i", "j"), {"i": ("x",)})
        (('x',), (), ())
        >>> place_term(("i", "i", "j"), {"i": ("x",)}, ((), ("x",), ()))
        ((), ('x',), ())
    """
    dims: dict[Entry, int] = {}
    for dim, entry in enumerate(term):
        fits = wanted and wanted[dim] == split.get(entry)
        if entry not in dims or (fits and wanted[dims[entry]] != split.get(entry)):
            dims[entry] = dim
    return tuple(split.get(entry, ()) if dims[entry] == dim else () for dim, entry in enumerate(term))


def place_index(spec: Spec, array: str, split: Split) -> Placement:
    """Return the placement of an index array; a dimension is whole where the brackets of the array disagree."""
    placements = [place_term(gather.axes, split) for gather in spec.gathers if gather.array == array]
    return tuple(names[0] if len(set(names)) == 1 else () for names in zip(*placements, strict=True))


def part_shape(shape: Sequence[int], placement: Placement, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the largest part of an array on a device.

    Args:
        shape: the shape of the array.
        placement: its placement.
        sizes: sizes of the mesh by the name of its axis.
    """
    pairs = zip(shape, placement, strict=True)
    return tuple(-(-size // math.prod(sizes[name] for name in names)) for size, names in pairs)


def view_placement(placement: Placement, shape: Sequence[int], other: Sequence[int]) -> Placement:
    """Return the placement of an array in another shape. Only dimensions of size 1 differ, which are never split."""
    longer = iter([names for names, size in zip(placement, shape, strict=True) if size != 1])
    return tuple(() if size == 1 else next(longer) for size in other)


def dims_of_term(spec: Spec, term: Term, shape: Sequence[int]) -> tuple[int | None, ...]:
    """Return, for each entry of a term, its dimension in an array as its caller has it.

    None stands for dimensions of size 1: they may be broadcast, and then the term lacks them. They are never split.
    """
    longer = iter([d for d, size in enumerate(shape) if size != 1])
    return tuple(None if spec.size(entry) == 1 else next(longer) for entry in term)


def local_gathers(spec: Spec, parts: Mapping[Entry, int]) -> dict[Gather, Gather]:
    """Return, for each gather of a spec, the gather from one device's slice of the pool.

    Slices of pools of two sizes may have one size. Then they are still two pools, in which an index means two rows. So
    the index array of the second gets another letter.
    """
    local: dict[Gather, Gather] = {}
    letters = iter(unused_letters((*spec.axes, *spec.arrays), len(spec.gathers)))
    for gather in spec.gathers:
        assert gather.size is not None
        own = dataclasses.replace(gather, size=-(-gather.size // parts.get(gather, 1)))
        local[gather] = dataclasses.replace(own, array=next(letters)) if own in local.values() else own
    return local


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
    return with_sizes(spec, sizes, local_gathers(spec, parts))


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
