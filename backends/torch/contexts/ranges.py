"""What a profiler shows of a plan: a range for each program, with the spec, and in it one for each step.

Without a profiler no range is made. These ranges are no operators, so no mode sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.backends.common.run import RunProgram, prepare_program
from planner.language.spec import Spec
from planner.program.calls import RangedIndices, Run
from planner.program.implementations import Table
from planner.program.ops import Op
from planner.program.program import Program, Step

# `profiler._is_profiler_enabled` says whether a profiler is on.
profiler: Any = torch.autograd.profiler
Range = torch._C._profiler._RecordFunctionFast


def _name(op: Op, implementation: str) -> str:
    return f"planner step {op.spec}: {implementation}"


def named_program(table: Table, program: Program, name: str) -> RunProgram:
    """Return the function that runs a program within a range of that name, and its steps within theirs."""

    def named(step: Step, run_step: Run) -> Run:
        label = _name(step.op, step.choice.lowering)

        def run(inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
            with Range(label):
                return run_step(inputs, index)

        return run

    run_steps = prepare_program(table, program, named)

    def run(values: dict[int, Any], index: RangedIndices) -> tuple[Any, ...]:
        with Range(name):
            return run_steps(values, index)

    return run


def named_native(rows: Mapping[Spec, str], op: Op, run_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function that runs a step of native calls within a range, and what autograd records of it too.

    Args:
        rows: the implementation of each step, by the step's spec.
        op: the step.
        run_step: the function that runs it.
    """
    label = _name(op, rows[op.spec])

    def run(*inputs: Any) -> Tensor:
        with Range(label):
            result = run_step(*inputs)
        _name_backward(result, inputs, label)
        return result

    return run


def _name_backward(result: Tensor, inputs: Sequence[Any], label: str) -> None:
    """Give a range to each node between a step's result and its inputs, for when autograd runs it."""
    open_ranges: list[Any] = []

    def enter(gradients: Any) -> None:
        open_ranges.append(Range(label))
        open_ranges[-1].__enter__()

    def leave(gradients: Any, output_gradients: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    nodes, met = [result.grad_fn], {None, *(x.grad_fn for x in inputs if isinstance(x, Tensor))}
    while nodes:
        node = nodes.pop()
        if node is None or node in met or hasattr(node, "variable"):  # a leaf keeps its node, and hooks on it
            continue
        met.add(node)
        node.register_prehook(enter)
        node.register_hook(leave)
        nodes += [following for following, _ in node.next_functions]
