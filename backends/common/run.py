"""How NumPy and torch run a program: step by step, and a loop over slices slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planner.language.dtypes import accumulator
from planner.language.spec import Term
from planner.program.frameworks import load_backend
from planner.program.implementations import RangedIndices, Table
from planner.program.loops import Part, covers, parts, slice_counts
from planner.program.plan import Loop
from planner.program.program import Program

__all__ = ["run_loop", "run_program"]


def run_program(table: Table, program: Program, values: dict[int, Any], index: RangedIndices) -> tuple[Any, ...]:
    """Run a program's steps, and drop each variable after its last use.

    Args:
        table: the implementations.
        program: the program.
        values: the program's inputs by variable. Results of steps are added, and variables are removed after their
            last use: at the end it holds the kept values.
        index: index arrays in range.

    Returns:
        The program's results.
    """
    for step in program.steps:
        results = table.run(step.choice.lowering, step.op, [values[v] for v in step.inputs], index)
        values.update(zip(step.outputs, results, strict=True))
        del results
        for variable in step.releases:
            values.pop(variable, None)
    return tuple(values[v] for v in program.results)


def run_loop(op: Loop, inputs: Sequence[Any], index: RangedIndices, *, cast: Any, empty: Any) -> tuple[Any, ...]:
    """Run a loop slice by slice, as `Implementation.run`.

    Args:
        op: the loop, or its gradient.
        inputs: its inputs.
        index: index arrays in range.
        cast: converts an array to a dtype.
        empty: returns an array of a shape and a dtype on the device of another.
    """
    table, outputs = load_backend(op.body.backend).table, []
    # For each result the function that views a slice of it, and whether slices are parts of it.
    targets: list[tuple[Callable[[Part], Any], bool]] = []
    for term, shape, dtype in zip(op.output_terms, op.output_shapes, op.output_dtypes, strict=True):
        is_part = covers(op.axes, term)
        outputs.append(empty(shape, dtype if is_part else accumulator(dtype), inputs[0]))
        if not is_part:
            outputs[-1][...] = 0
        targets.append((_slicer(outputs[-1], term, op.axes), is_part))
    # A program is given its operands, then the output gradient.
    given = [*zip(op.input_terms, inputs, strict=True)]
    views = [_slicer(x, term, op.axes) for term, x in (*given[op.first_operand :], *given[: op.first_operand])]
    # Index arrays are brought into range once, not for each slice.
    index_views = [(gather, _slicer(index[gather], gather.axes, op.axes)) for gather in op.spec.gathers]
    counts = slice_counts(op.axes, op.spec)
    programs = {tuple(sizes.items()): op.program(body) for (sizes, _), body in zip(counts, op.bodies, strict=True)}
    for part in parts(op.axes, op.spec):
        part_index = RangedIndices(index.may_drop, ((gather, view(part)) for gather, view in index_views))
        program = programs[tuple(part.sizes.items())]
        values = {variable: view(part) for variable, view in zip(program.given, views, strict=True)}
        results = run_program(table, program, values, part_index)
        for result, (view, is_part) in zip(results, targets, strict=True):
            into = view(part)
            if is_part:
                into[...] = result
            else:
                into += result
        del results, result, values  # free the memory before the next slice begins
    return tuple(cast(x, dtype) for x, dtype in zip(outputs, op.output_dtypes, strict=True))


def _slicer(x: Any, term: Term, axes: Sequence[tuple[str, int]]) -> Callable[[Part], Any]:
    """Return a function that views a slice of an array. An array without any of the loop's axes is viewed whole."""
    if any(axis in term for axis, _ in axes):
        return lambda part: x[part.of(term)]
    return lambda part: x
