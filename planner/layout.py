"""How an array lies in memory, as far as a cost depends on it: which dimensions can be viewed as one, and how they go.

A layout is a tuple of runs of dimensions, in the order of memory. Dimensions of one run can be viewed as one: a step
along the former is as long as all of the latter. An empty run at the end says that no dimension has neighbours in
memory. Dimensions of size 1 are left out. None is row-major: one run of all dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.spec import Gather, Operand, Spec, Term

__all__ = ["Layout", "flattens", "layout_of", "neighbours", "permuted", "row_major", "scattered", "strides_in",
           "without"]  # fmt: skip

Layout = tuple[tuple[int, ...], ...]


def strides_in(operand: Operand, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of an operand seen in a shape that may lack dimensions of size 1; None for row-major."""
    if operand.strides is None:
        return None
    wide = iter([stride for n, stride in zip(operand.shape, operand.strides, strict=True) if n != 1])
    return tuple(1 if n == 1 else next(wide) for n in shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of an array without gaps, the last dimension innermost."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def layout_of(shape: Sequence[int], strides: Sequence[int] | None) -> Layout | None:
    """Return the layout of an array.

    Example:
        >>> layout_of((2, 3, 4), (12, 4, 1)) is None
        True
        >>> layout_of((2, 3, 4), (1, 8, 2))  # the last two dimensions are flat, and lie outside of the first
        ((1, 2, 0),)
        >>> layout_of((2, 3, 4), (24, 8, 2))  # every second element
        ((0, 1, 2), ())

    Args:
        shape: sizes of the dimensions.
        strides: elements between neighbours along each dimension; None for row-major.
    """
    if strides is None or 0 in shape:
        return None
    # Dimensions that repeat the same elements come first, as those outside of all others.
    order = sorted((d for d, n in enumerate(shape) if n != 1), key=lambda d: (strides[d] != 0, -strides[d]))
    runs: list[tuple[int, ...]] = []
    for before, d in zip([None, *order], order, strict=False):
        if before is not None and strides[before] == strides[d] * shape[d]:
            runs[-1] = (*runs[-1], d)
        else:
            runs.append((d,))
    if order and strides[order[-1]] != 1:
        runs.append(())
    return _plain(runs)


def permuted(layout: Layout | None, order: Sequence[int], shape: Sequence[int]) -> Layout | None:
    """Return the layout of a view whose dimension d is dimension ``order[d]`` of an array.

    Args:
        layout: the array's.
        order: numbers of its dimensions.
        shape: the view's sizes.
    """
    if 0 in shape:
        return None
    runs = (tuple(sorted(order)),) if layout is None else layout
    place = {old: new for new, old in enumerate(order) if shape[new] != 1}
    return _plain([tuple(place[d] for d in run if d in place) for run in runs])


def without(layout: Layout | None, dim: int, shape: Sequence[int]) -> Layout | None:
    """Return the layout of a slice of one element along a dimension, which is then gone.

    Args:
        layout: the array's.
        dim: number of the dimension.
        shape: the array's sizes.
    """
    runs: list[tuple[int, ...]] = []
    for run in (tuple(range(len(shape))),) if layout is None else layout:
        wide = [d for d in run if shape[d] != 1]
        at = wide.index(dim) if dim in wide else len(wide)
        before, after = wide[:at], wide[at + 1 :]
        # Neighbours on both sides are parted; what lies outside of the last dimension has no neighbours.
        runs += [tuple(before)] * bool(before)
        runs += [tuple(after)] * bool(after or (at < len(wide) or not run))
    renumbered = [tuple(d - (d > dim) for d in run) for run in runs]
    return _plain(renumbered) if renumbered else None


def scattered(shape: Sequence[int]) -> Layout | None:
    """Return a layout of which nothing is known: no two dimensions can be viewed as one, none has neighbours."""
    wide = [d for d, n in enumerate(shape) if n != 1]
    return (*((d,) for d in wide), ()) if wide else None


def flattens(term: Term, layout: Layout | None, groups: Sequence[Sequence[str | Gather]], spec: Spec) -> bool:
    """Whether an array with this term can be viewed with each group of its entries as one dimension."""
    runs = (tuple(range(len(term))),) if layout is None else layout
    place = {}
    for number, run in enumerate(runs):
        wide = [d for d in run if spec.size(term[d]) != 1]
        place.update({term[d]: (number, at) for at, d in enumerate(wide)})
    for group in groups:
        found = [place[e] for e in group if spec.size(e) != 1]
        if any((run, at + 1) != after for (run, at), after in zip(found, found[1:], strict=False)):
            return False
    return True


def neighbours(term: Term, layout: Layout | None, spec: Spec) -> str | Gather | None:
    """Return the entry along which elements are neighbours in memory, if there is one."""
    last = range(len(term)) if layout is None else layout[-1] if layout else ()
    return next((term[d] for d in reversed(last) if spec.size(term[d]) != 1), None)


def _plain(runs: Sequence[tuple[int, ...]]) -> Layout | None:
    """A layout, None where it is row-major."""
    filled = [run for run in runs if run]
    if not filled:
        return None
    if runs[-1]:
        row_major = len(filled) == 1 and list(filled[0]) == sorted(filled[0])
        return None if row_major else tuple(filled)
    return (*filled, ())
