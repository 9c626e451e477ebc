"""What the elementwise loops of torch and NumPy take beside moving memory: for short runs, and for strided ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from planner.cost.device import Device
from planner.cost.layout import Layout, flattens, in_memory, neighbours
from planner.language.spec import Spec, Term

# What torch's elementwise loops take besides moving memory, in parts of `Device.loop_seconds`. A loop takes the two
# innermost runs of neighbours at a time, whether of 3 x 3 or of 16 x 16 elements, in one part. It goes through short
# runs element by element, and through longer ones as vectors. Each sum of neighbours takes the same time, whatever
# their number. Longer runs that are strided in an operand cost `_STRIDED_LOOPS` for each element. These are the parts
# on 2 cores of an Intel Xeon at 2.8 GHz, torch 2.13, 2026-11-22 (of strided runs 2026-11-28); one took 30 ns.
_ELEMENT_LOOPS, _VECTORS_LOOPS, _SUM_LOOPS, _STRIDED_LOOPS = 1.3 / 30, 2 / 30, 10 / 30, 0.5 / 30
_SHORT_RUN = 8
# Lines of the cache that are multiples of 4 KiB apart displace each other, so a product by element reads an operand in
# such strides slowly: 64 x 16 x 64 floats took 115 us, and 20 in strides of 4,032 bytes (one core of an AMD EPYC 9005,
# torch 2.13, 2026-11-30). These are the floats in 4 KiB, the length of a run up to which it takes no longer, and how
# many times as long the longest runs take. Copies go in blocks.
_FAR_ELEMENTS, _FAR_RUN, _MOST_FAR = 1024, 16, 4.0
# A sum over the innermost run and another one takes so much more for each element of its result: 37 to 48 ns, with 2 to
# 8 runs of 4 to 128 neighbours, where a loop took 30 ns (one core of an AMD EPYC 7003, torch 2.13, 2026-12-01).
_ADDED_LOOPS = 37 / 30
# Sums over two runs of which neither is innermost go element by element: the first for each element, the second for
# each run of the inner one. One core of an AMD EPYC 7003, where a loop took 30 ns too, torch 2.13, 2026-11-29.
_TWICE_LOOPS, _AGAIN_LOOPS, _RUNS_SUMMED_ONCE = 0.6 / 30, 7 / 30, 3
# What it takes to read a line again from beyond the nearest part of the cache, and how large that part is; the same
# EPYC.
_LINE_LOOPS, _NEAR_CACHE = 2.5 / 30, 1 / 16
# The bytes of a line of the cache.
LINE_BYTES = 64


def runs_of(
    order: Sequence[str],
    terms: Sequence[Term],
    spec: Spec,
    layouts: Sequence[Layout | None] = (),
    follows: bool = False,
) -> tuple[list[int], bool]:
    """Return the lengths of the runs of an elementwise loop, and whether some term has the innermost run.

    A run is a sequence of axes that can be viewed as one: the same terms have all of them, one behind the other.

    Args:
        order: axes of the loop, the innermost last.
        terms: the inputs of a product, or the result of a sum.
        spec: the spec, for the sizes of the axes.
        layouts: how the arrays of the terms lie; empty if all are row-major.
        follows: whether the loop may take another order, that in which the arrays lie.
    """
    arrays = list(zip(terms, layouts or (None,) * len(terms), strict=True))
    axes = [axis for axis in order if spec.size(axis) != 1]
    runs = [spec.size(axis) for axis in axes]
    held = [tuple(axis in term for term in terms) for axis in axes]
    for place in range(len(runs) - 1, 0, -1):
        pair = axes[place - 1 : place + 1]
        if held[place - 1] == held[place] and (
            follows or all(flattens(term, layout, [pair], spec) for term, layout in arrays if pair[0] in term)
        ):
            runs[place - 1] *= runs.pop(place)
            held.pop(place)
    return runs, not held or any(held[-1])


def short_run_seconds(
    order: Sequence[str],
    terms: Sequence[Term],
    spec: Spec,
    device: Device,
    layouts: Sequence[Layout | None] = (),
    follows: bool = False,
) -> float:
    """Return the seconds that an elementwise loop takes for short runs, as in a million products of (3, 1) by (1, 3).

    Args are those of `runs_of`, and the rates.
    """
    runs, in_a_term = runs_of(order, terms, spec, layouts, follows)
    if len(runs) < 2:
        return 0.0
    rows, run = math.prod(runs[:-1]), runs[-1]
    if not in_a_term:
        results = math.prod(spec.size(axis) for axis in order if any(axis in term for term in terms))
        added = results * _ADDED_LOOPS if results < rows else 0.0
        return (rows * _SUM_LOOPS + added) * device.loop_seconds
    if run <= _SHORT_RUN:
        turns = rows * run * _ELEMENT_LOOPS
    else:
        innermost = next(axis for axis in reversed(order) if spec.size(axis) != 1)
        strided = 0.0 if follows else _strided_loops(terms, layouts, spec, innermost, run)
        turns = rows * (_VECTORS_LOOPS + run * strided)
    if len(runs) > _RUNS_SUMMED_ONCE and not all(any(axis in term for term in terms) for axis in order):
        turns = max(turns, rows * run * (_TWICE_LOOPS + _AGAIN_LOOPS / max(1, runs[-2])))
    return (math.prod(runs[:-2]) + turns) * device.loop_seconds


def scattered_read_seconds(
    order: Sequence[str], term: Term, layout: Layout | None, spec: Spec, size: int, device: Device
) -> float:
    """Return the seconds that a copy takes because it reads lines of the cache several times.

    It does so if the elements of a line are copied far apart: what is copied in between fills the nearest cache. Torch
    copies a transposed matrix in blocks, and reads each line once.

    Args:
        order: the axes of the copy, the innermost last.
        term: the term of the array.
        layout: how it lies.
        spec: the spec, for the sizes of the axes.
        size: the bytes of an element.
        device: the rates.
    """
    axes: list[Any] = [axis for axis in order if spec.size(axis) != 1]
    if len(axes) <= 2:  # a matrix
        return 0.0
    elements, times = math.prod(map(spec.size, axes)), 1  # and how many times each line is read
    line = left = max(1, LINE_BYTES // size)
    for axis in reversed(in_memory(term, layout)):
        if left > 1 and spec.size(axis) != 1:
            here, left = min(left, spec.size(axis)), left // spec.size(axis)
            inside = math.prod(map(spec.size, axes[axes.index(axis) + 1 :]))
            times *= here if inside * LINE_BYTES > device.cache_bytes * _NEAR_CACHE else 1
    return elements * (times - 1) / line * _LINE_LOOPS * device.loop_seconds


def _strided_loops(
    terms: Sequence[Term], layouts: Sequence[Layout | None], spec: Spec, innermost: str, run: int
) -> float:
    """Return what each element of a loop takes if some array is strided along the innermost axis, in loops; else 0.

    Args:
        terms: the terms of the arrays.
        layouts: how they lie; empty if all are row-major.
        spec: the spec, for the sizes of the axes.
        innermost: the innermost axis of the loop.
        run: how many elements it has, with axes that it can be viewed as one with.
    """
    loops = 0.0
    for term, layout in zip(terms, layouts or (None,) * len(terms), strict=True):
        if innermost in term and neighbours(term, layout, spec) != innermost:
            lies = in_memory(term, layout)
            stride = math.prod(map(spec.size, lies[lies.index(innermost) + 1 :]))
            far = len(terms) > 1 and stride % _FAR_ELEMENTS == 0
            loops = max(loops, _STRIDED_LOOPS * (min(_MOST_FAR, max(1.0, run / _FAR_RUN)) if far else 1.0))
    return loops
