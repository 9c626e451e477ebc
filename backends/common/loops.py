"""Running a loop over slices, the same in numpy and torch: views in, parts of results out or added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planner.backends.common.common import RangedIndices
from planner.language.spec import Spec, Term
from planner.program.loops import Part, covers, parts
from planner.program.plan import Loop

__all__ = ["run_loop"]


def run_loop(
    loop: Loop,
    spec: Spec,
    arrays: Sequence[tuple[Term, Any]],
    index: RangedIndices,
    run: Callable[[Part, Sequence[Any], RangedIndices], Sequence[Any]],
    results: Sequence[tuple[Term, Callable[[bool], Any]] | None],
) -> list[Any]:
    """Run a program slice by slice.

    Args:
        loop: the loop.
        spec: the resolved spec of the whole contraction.
        arrays: the program's inputs, each with its term.
        index: prepared index arrays.
        run: runs the body's program on a slice's inputs.
        results: for each result its term and a function that allocates it, zeroed if asked; None where there is none.

    Returns:
        The results.
    """
    outputs: list[Any] = [None if r is None else r[1](not covers(loop.axes, r[0])) for r in results]
    inputs = [_cut(x, term, loop.axes) for term, x in arrays]
    rows = [(gather, _cut(values, gather.axes, loop.axes)) for gather, values in index.items()]
    targets = [
        (number, _cut(outputs[number], wanted[0], loop.axes), covers(loop.axes, wanted[0]))
        for number, wanted in enumerate(results)
        if wanted is not None
    ]
    for part in parts(loop.axes, spec):
        here = RangedIndices(index.may_drop)
        here.update((gather, cut(part)) for gather, cut in rows)
        found = run(part, [cut(part) for cut in inputs], here)
        for number, cut, covered in targets:
            into = cut(part)
            if covered:
                into[...] = found[number]
            else:
                into += found[number]
        del found  # gone before the next slice begins
    return outputs


def _cut(x: Any, term: Term, axes: Sequence[tuple[str, int]]) -> Callable[[Part], Any]:
    """Return what cuts a slice out of an array; one without any of the axes is taken whole."""
    if any(axis in term for axis, _ in axes):
        return lambda part: x[part.of(term)]
    return lambda part: x
