"""How arrays with strides lie in memory, as far as costs depend on it: which dimensions can be viewed as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from planner.language.spec import Gather, Operand, Spec, Term


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How an array lies in memory. For row-major arrays None stands in its place. Dimensions of size 1 are left out.

    Attributes:
        runs: the dimensions in the order of memory, in runs. The dimensions of a run can be viewed as one: a step along
            each is as long as the whole of the next.
        unit: whether elements along the last dimension are neighbours in memory.
        repeated: the dimensions whose stride is shorter than what lies inside of them, as in expanded arrays. No
            library multiplies matrices with such a dimension.
    """

    runs: tuple[tuple[int, ...], ...]
    unit: bool = True
    repeated: tuple[int, ...] = ()

    @property
    def unknown(self) -> bool:
        """Whether nothing is known about the layout; see `scattered`."""
        return not self.unit and len(self.repeated) == len(self.runs)


def strides_in(operand: Operand, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return an operand's strides in a shape that may lack dimensions of size 1; None if it is row-major."""
    if operand.strides is None or operand.shape == shape:
        return operand.strides
    wide = iter([stride for n, stride in zip(operand.shape, operand.strides, strict=True) if n != 1])
    return tuple(1 if n == 1 else next(wide) for n in shape)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of an array without gaps, the last dimension innermost."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def view_strides(shape: Sequence[int], strides: Sequence[int], into: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of an array's view in another shape, or None if only a copy can have that shape.

    Example:
        >>> view_strides((2, 3, 4), (12, 4, 1), (6, 4))
        (4, 1)
        >>> view_strides((3, 2, 4), (4, 12, 1), (6, 4)) is None
        True

    Args:
        shape: the array's sizes.
        strides: the array's strides.
        into: the view's sizes, for the same number of elements.

    Source:
        `computeStride` of torch, which gives dimensions of size 1 these strides too.
    """
    if 0 in shape:
        return tuple(strides) if tuple(shape) == tuple(into) else row_major(into)
    if not shape:
        return (1,) * len(into)
    new_strides: list[int] = []
    left = list(into)
    # Go from the innermost dimension outwards. Split each flat run of the array into dimensions of the view.
    step, flat = strides[-1], 1
    for d in reversed(range(len(shape))):
        flat *= shape[d]
        if d > 0 and (shape[d - 1] == 1 or strides[d - 1] == flat * step):
            continue
        seen = 1
        while left and (seen < flat or left[-1] == 1):
            new_strides.append(seen * step)
            seen *= left.pop()
        if seen != flat:
            return None
        step, flat = strides[d - 1], 1
    return None if left else tuple(reversed(new_strides))


def layout_of(shape: Sequence[int], strides: Sequence[int] | None) -> Layout | None:
    """Return the layout of an array.

    Example:
        >>> layout_of((2, 3, 4), (12, 4, 1)) is None
        True
        >>> layout_of((2, 3, 4), (1, 8, 2))  # the last two dimensions are flat, and lie outside of the first
        Layout(runs=((1, 2, 0),), unit=True, repeated=())
        >>> layout_of((2, 3, 4), (24, 8, 2))  # every second element
        Layout(runs=((0, 1, 2),), unit=False, repeated=())

    Args:
        shape: sizes of the dimensions.
        strides: elements between neighbours along each dimension; None for row-major.
    """
    if strides is None or 0 in shape:
        return None
    # Dimensions that repeat the same elements count as outermost.
    order = sorted((d for d, n in enumerate(shape) if n != 1), key=lambda d: (strides[d] != 0, -strides[d]))
    runs: list[tuple[int, ...]] = []
    for before, d in zip([None, *order], order, strict=False):
        if before is not None and strides[before] == strides[d] * shape[d]:
            runs[-1] = (*runs[-1], d)
        else:
            runs.append((d,))
    extent, repeated = 1, []
    for d in reversed(order):
        if strides[d] < extent:
            repeated.append(d)
        extent = max(extent, strides[d] * (shape[d] - 1) + extent)
    return _plain(runs, not order or strides[order[-1]] == 1, repeated)


def strides_of(layout: Layout | None, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return strides with which an array of a shape has a layout; None if its elements repeat."""
    if layout is not None and layout.repeated:
        return None
    runs = (tuple(range(len(shape))),) if layout is None else layout.runs
    step, strides = 1 if layout is None or layout.unit else 2, [1] * len(shape)
    for run in reversed(runs):
        for d in reversed(run):
            strides[d] = step
            step *= shape[d]
        step *= 2  # a gap, so that the runs stay apart
    return tuple(strides) if layout_of(shape, strides) == layout else None


def permuted(layout: Layout | None, order: Sequence[int], shape: Sequence[int]) -> Layout | None:
    """Return the layout of a view whose dimension d is the array's dimension ``order[d]``.

    Args:
        layout: the array's layout.
        order: numbers of the array's dimensions.
        shape: the view's sizes.
    """
    if 0 in shape:
        return None
    known = layout or Layout((tuple(sorted(order)),))
    place = {old: new for new, old in enumerate(order) if shape[new] != 1}
    runs = [tuple(place[d] for d in run if d in place) for run in known.runs]
    return _plain(runs, known.unit, [place[d] for d in known.repeated])


def reordered(order: Sequence[str | Gather], term: Term, spec: Spec) -> Layout | None:
    """Return the layout of an array whose entries are row-major in one order, seen in the order of a term."""
    return permuted(None, [order.index(entry) for entry in term], spec.shape(term))


def without(layout: Layout | None, dim: int, shape: Sequence[int]) -> Layout | None:
    """Return the layout of a slice of one element along a dimension, without that dimension.

    Args:
        layout: the array's layout.
        dim: number of the dimension.
        shape: the array's sizes.
    """
    known = layout or Layout((tuple(range(len(shape))),))
    wide = [[d for d in run if shape[d] != 1] for run in known.runs]
    last = next((run[-1] for run in reversed(wide) if run), None)
    runs: list[tuple[int, ...]] = []
    for run in wide:  # the dimensions on both sides are no longer neighbours
        at = run.index(dim) if dim in run else len(run)
        runs += [tuple(run[:at]), tuple(run[at + 1 :])]

    def renumber(dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(d - (d > dim) for d in dims)

    kept = renumber([d for d in known.repeated if d != dim])
    return _plain([renumber(run) for run in runs], known.unit and last != dim, kept)


def without_gaps(layout: Layout | None) -> Layout | None:
    """Return the layout of a new array with the same order of memory, without gaps.

    If elements repeat, their order is not known, and the new array is row-major.
    """
    if layout is None or layout.repeated:
        return None
    return _plain([tuple(d for run in layout.runs for d in run)], True, ())


def dense_strides(layout: Layout | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new array with the same order of memory, without gaps; see `without_gaps`."""
    layout, strides, step = without_gaps(layout), [1] * len(shape), 1
    inner = [d for run in layout.runs for d in run] if layout else list(range(len(shape)))
    outer = [d for d in range(len(shape)) if d not in inner]  # they have size 1 where the layout was made
    for d in reversed((*outer, *inner)):
        strides[d] = step
        step *= shape[d]
    return tuple(strides)


def scattered(shape: Sequence[int]) -> Layout | None:
    """Return a layout about which nothing is known. No dimensions can be viewed as one or multiplied without a copy."""
    wide = tuple(d for d, n in enumerate(shape) if n != 1)
    return Layout(tuple((d,) for d in wide), False, wide) if wide else None


def flattens(term: Term, layout: Layout | None, groups: Sequence[Sequence[str | Gather]], spec: Spec) -> bool:
    """Whether an array with this term can be viewed so that each group of entries is one dimension."""
    wide, before = spec.wide, dict[str | Gather, str | Gather | None]()  # the searches ask thousands of times
    for run in ((*range(len(term)),),) if layout is None else layout.runs:
        last = None
        for d in run:
            if (entry := term[d]) in wide:
                before[entry], last = last, entry
    for group in groups:
        last = None
        for entry in group:
            if entry in wide:
                if last is not None and before[entry] != last:
                    return False
                last = entry
    return True


def neighbours(term: Term, layout: Layout | None, spec: Spec) -> str | Gather | None:
    """Return the entry along which elements are neighbours in memory, or None."""
    if layout is not None and not layout.unit:
        return None
    order = range(len(term)) if layout is None else layout.runs[-1]
    for d in reversed(order):
        if term[d] in spec.wide:
            return term[d]
    return None


def in_memory(term: Term, layout: Layout | None) -> Term:
    """Return the axes of an array from the outermost to the innermost in memory, without repeated ones."""
    return term if layout is None else tuple([term[d] for run in layout.runs for d in run])


def _plain(runs: Sequence[tuple[int, ...]], unit: bool, repeated: Sequence[int]) -> Layout | None:
    """Return a layout, or None if it is row-major."""
    filled = tuple(run for run in runs if run)
    if not filled or (unit and not repeated and len(filled) == 1 and list(filled[0]) == sorted(filled[0])):
        return None
    return Layout(filled, unit, tuple(sorted(repeated)))
