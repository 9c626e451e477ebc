"""How NumPy and torch run a program: step by step, and a loop over slices slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planner.language.spec import Spec, Term
from planner.program.implementations import RangedIndices, Table
from planner.program.loops import Part, covers, parts
from planner.program.plan import Loop
from planner.program.program import Program

__all__ = ["RunProgram", "prepare_program", "run_loop"]


# Runs a program. Its arguments are the program's inputs by variable, and the index arrays in range. It adds the results
# of steps to the inputs, and removes variables after their last use: at the end it leaves the kept values there. It
# returns the program's results.
RunProgram = Callable[[dict[int, Any], RangedIndices], tuple[Any, ...]]


def prepare_program(table: Table, program: Program) -> RunProgram:
    """Return the function that runs a program with the implementations of a table."""
    steps = [
        (table.rows[step.choice.lowering].prepared(step.op), step.inputs, step.outputs, step.releases)
        for step in program.steps
    ]

    def run(values: dict[int, Any], index: RangedIndices) -> tuple[Any, ...]:
        for run_step, inputs, outputs, releases in steps:
            results = run_step([values[v] for v in inputs], index)
            for variable, result in zip(outputs, results, strict=True):
                values[variable] = result
            del results, result
            for variable in releases:
                values.pop(variable, None)
        return tuple(values[v] for v in program.results)

    return run


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
        index: index arrays in range.
        run: runs the body's program on the inputs of one slice.
        results: for each result its term and a function that allocates it, filled with zeros if asked; None for a
            result that is not wanted.

    Returns:
        The results.
    """
    outputs: list[Any] = [None] * len(results)
    # For each wanted result: its number, the function that views a slice of it, and whether slices are parts of it.
    targets: list[tuple[int, Callable[[Part], Any], bool]] = []
    for number, wanted in enumerate(results):
        if wanted is None:
            continue
        term, allocate = wanted
        is_part = covers(loop.axes, term)
        outputs[number] = allocate(not is_part)
        targets.append((number, _slicer(outputs[number], term, loop.axes), is_part))
    inputs = [_slicer(x, term, loop.axes) for term, x in arrays]
    index_slicers = [(gather, _slicer(values, gather.axes, loop.axes)) for gather, values in index.items()]
    for part in parts(loop.axes, spec):
        part_index = RangedIndices(index.may_drop, ((gather, view(part)) for gather, view in index_slicers))
        part_results = run(part, [view(part) for view in inputs], part_index)
        for number, view, is_part in targets:
            into = view(part)
            if is_part:
                into[...] = part_results[number]
            else:
                into += part_results[number]
        del part_results  # free the memory before the next slice begins
    return outputs


def _slicer(x: Any, term: Term, axes: Sequence[tuple[str, int]]) -> Callable[[Part], Any]:
    """Return a function that views a slice of an array. An array without any of the loop's axes is viewed whole."""
    if any(axis in term for axis, _ in axes):
        return lambda part: x[part.of(term)]
    return lambda part: x
