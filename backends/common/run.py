"""How NumPy and torch run a program: step by step, and a loop over slices slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planner.language.dtypes import accumulator
from planner.language.spec import Term
from planner.program.calls import RangedIndices, Run
from planner.program.frameworks import load_backend
from planner.program.implementations import Table
from planner.program.loops import Part, covers, parts, slice_counts
from planner.program.plan import Loop
from planner.program.program import Program, Step

# Runs a program. Its arguments are the program's inputs by variable, and the index arrays in range. It adds the results
# of steps to the inputs, and removes variables after their last use: at the end it leaves the kept values there. It
# returns the program's results.
RunProgram = Callable[[dict[int, Any], RangedIndices], tuple[Any, ...]]


def prepare_program(
    table: Table, program: Program, around: Callable[[Step, Run], Run] = lambda step, run: run
) -> RunProgram:
    """Return the function that runs a program with the implementations of a table; `around` changes how a step runs."""
    steps = [
        (around(step, table.rows[step.choice.lowering].prepared(step.op)), step.inputs, step.outputs, step.releases)
        for step in program.steps
    ]
    wanted = program.results

    def run(values: dict[int, Any], index: RangedIndices) -> tuple[Any, ...]:
        for run_step, inputs, outputs, releases in steps:
            results = run_step([values[v] for v in inputs], index)
            values.update(zip(outputs, results, strict=True))
            del results
            for variable in releases:
                values.pop(variable, None)
        return tuple([values[v] for v in wanted])

    return run


def prepare_loop(
    op: Loop, *, cast: Callable[[Any, str], Any], empty: Callable[[tuple[int, ...], str, Any], Any] | None
) -> Run:
    """Return the function that runs a loop slice by slice, as `PreparedRun.prepare`.

    Args:
        op: the loop, or its gradient.
        cast: converts an array to a dtype.
        empty: returns an array of a shape and a dtype on the device of another.
    """
    assert empty is not None, "the backend runs loops in a way of its own"
    table, counts = load_backend(op.body.backend).table, slice_counts(op.axes, op.spec)
    programs = {tuple(sizes.items()): op.program(body) for (sizes, _), body in zip(counts, op.bodies, strict=True)}
    prepared = {sizes: prepare_program(table, program) for sizes, program in programs.items()}
    # Slices of results are parts of them, or are added up.
    are_parts = [covers(op.axes, term) for term in op.output_terms]

    def run(inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
        outputs, targets = [], []
        described = zip(op.output_terms, op.output_shapes, op.output_dtypes, are_parts, strict=True)
        for term, shape, dtype, is_part in described:
            outputs.append(empty(shape, dtype if is_part else accumulator(dtype), inputs[0]))
            if not is_part:
                outputs[-1][...] = 0
            targets.append(_slicer(outputs[-1], term, op.axes))
        # A program is given its operands, then the output gradient.
        given = [*zip(op.input_terms, inputs, strict=True)]
        views = [_slicer(x, term, op.axes) for term, x in (*given[op.first_operand :], *given[: op.first_operand])]
        # Index arrays are brought into range once, not for each slice.
        index_views = [(gather, _slicer(index[gather], gather.axes, op.axes)) for gather in op.spec.gathers]
        for part in parts(op.axes, op.spec):
            sizes = tuple(part.sizes.items())
            part_index = RangedIndices(index.may_drop, ((gather, view(part)) for gather, view in index_views))
            values = {variable: view(part) for variable, view in zip(programs[sizes].given, views, strict=True)}
            results = prepared[sizes](values, part_index)
            for result, view, is_part in zip(results, targets, are_parts, strict=True):
                into = view(part)
                if is_part:
                    into[...] = result
                else:
                    into += result
            del results, result, values  # free the memory before the next slice begins
        return tuple(cast(x, dtype) for x, dtype in zip(outputs, op.output_dtypes, strict=True))

    return run


def _slicer(x: Any, term: Term, axes: Sequence[tuple[str, int]]) -> Callable[[Part], Any]:
    """Return a function that views a slice of an array. An array without any of the loop's axes is viewed whole."""
    if any(axis in term for axis, _ in axes):
        return lambda part: x[part.of(term)]
    return lambda part: x
