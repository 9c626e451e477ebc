"""Running a loop over slices, the same in numpy and torch: views in, parts of results out or added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planner.backends.common import Prepared
from planner.loops import Part, covers, parts
from planner.plan import Loop
from planner.spec import Spec, Term

__all__ = ["run_loop"]


def run_loop(
    loop: Loop,
    spec: Spec,
    arrays: Sequence[tuple[Term, Any]],
    index: Prepared,
    run: Callable[[Part, Sequence[Any], Prepared], Sequence[Any]],
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
    for part in parts(loop.axes, spec):
        here = Prepared(index.guarded)
        for gather, values in index.items():
            here[gather] = values[part.of(gather.axes)]
        found = list(run(part, [x[part.of(term)] for term, x in arrays], here))
        for number, (wanted, into) in enumerate(zip(results, outputs, strict=True)):
            if wanted is not None:
                term, _ = wanted
                if covers(loop.axes, term):
                    into[part.of(term)] = found[number]
                else:
                    into[part.of(term)] += found[number]
            found[number] = None  # gone before the next slice begins
    return outputs
