"""Run the steps of a plan one by one, each in every implementation that supports it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import assume

from planner.cost.device import Device
from planner.inspect import memory as measure
from planner.language.errors import PlannerError
from planner.language.options import MODES
from planner.language.spec import Spec, indexed_dims, row_axes
from planner.plan import Plan
from planner.program.calls import Stepwise
from planner.program.frameworks import load_backend
from planner.program.implementations import Table
from planner.program.ops import Cast, Gradients, Guard, Op
from planner.program.program import Step
from planner.testing import scripts
from planner.testing.engines import Engine, engine_of
from planner.testing.judgement import Broken, Subject, allowed, differs, raising, steps_of, terms_of
from planner.testing.problem import Array, Problem
from planner.testing.reference import absolute, exact_bound, exact_range, reference, reference_gradients

__all__ = ["lowerings", "run_step"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a plan with its inputs.

    Attributes:
        plan: the plan.
        number: the step's place in `plan.steps`.
        step: the step.
        inputs: arrays of the plan's framework. Those of a guard hold NaN in the rows that no index names.
        given: the backend's object that binds a step to its inputs.
    """

    plan: Plan
    number: int
    step: Step
    inputs: Sequence[Any]
    given: Stepwise

    def run(self, lowering: str) -> tuple[Any, ...]:
        """Run the step in a named implementation."""
        choice = dataclasses.replace(self.step.choice, lowering=lowering)
        return tuple(self.given.bind(dataclasses.replace(self.step, choice=choice), self.inputs)())

    def expected(
        self, engine: Engine, indices: Mapping[str, Any]
    ) -> tuple[list[Array], list[Callable[[], Array] | None]]:
        """Return the oracle's results of the step, and how much rounding may change each; None if not at all."""
        op = self.step.op
        # In JAX, values may have dimensions of size 1 that the step's spec lacks: a step removes them when it reads.
        arrays = [engine.described(x)[0].reshape(n) for x, n in zip(self.inputs, op.input_shapes, strict=True)]
        spec = op.spec
        if isinstance(op, Guard):
            if (unread := _unread_rows(engine, self.plan, op, indices)) is not None:
                arrays[0] = np.where(unread, np.zeros((), arrays[0].dtype), arrays[0])
            # An entry at the place of a dropped index is multiplied by a row that is taken, of zeros.
            arrays += [np.ones(gather.size or 0, arrays[0].dtype) for gather in op.dropped]
            spec = dataclasses.replace(spec, inputs=(*spec.inputs, *((gather,) for gather in op.dropped)))
        text, arguments = str(spec), _arguments(engine, self.plan, spec, indices)

        def evaluate(arrays: Sequence[Array]) -> list[Array]:
            if isinstance(op, Gradients):
                gradients = reference_gradients(text, *arrays, **arguments)
                return [gradients[number] for number in op.served]
            return [reference(text, *arrays, **arguments)]

        def room(place: int) -> Array:
            size, term = evaluate([*map(absolute, arrays)])[place], op.output_terms[place]
            return allowed(op.dtype, steps_of(spec), terms_of(spec, term), size)

        gout, operands = (arrays[0], arrays[1:]) if op.first_operand else (None, arrays)
        exact = exact_bound(text, *operands, gout=gout, **arguments) <= exact_range(op.dtype)
        places = range(len(op.output_terms))
        return evaluate(arrays), [None if exact else functools.partial(room, place) for place in places]


def _arguments(engine: Engine, plan: Plan, spec: Spec, indices: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the oracle is given beside the operands of a step's spec."""
    shapes = dict(plan.resolved.index_shapes)
    raw = {name: engine.described(indices[name])[0].reshape(shapes[name]) for name in spec.arrays}
    mode = MODES[plan.index_mode].unmarked or plan.index_mode
    return {"sizes": spec.output_shape, "index_mode": mode, **raw}


def _unread_rows(engine: Engine, plan: Plan, op: Guard, indices: Mapping[str, Any]) -> Array | None:
    """Return a mask of the rows of a guard's input that no index names; it broadcasts to the input.

    The oracle counts how often each row is read: as often as an index adds one to it.
    """
    if op.rows is None:
        return None
    rows, addressed = row_axes(op.rows), tuple(op.rows[dim] for dim in indexed_dims(op.rows))
    spec = Spec((rows,), addressed, op.spec.sizes)
    reads = reference(str(spec), np.ones(spec.shape(rows)), **_arguments(engine, plan, spec, indices))
    shape = [op.spec.size(entry) if entry in addressed else 1 for entry in op.rows]
    return np.asarray(reads == 0).reshape(shape)


def _inputs(engine: Engine, plan: Plan, op: Op, arrays: Sequence[Any], indices: Mapping[str, Any]) -> Sequence[Any]:
    """Return the inputs of a step. A guard gets NaN in the rows that no index names, and must zero these rows."""
    unread = _unread_rows(engine, plan, op, indices) if isinstance(op, Guard) else None
    if unread is None or not unread.any():
        return arrays
    values, dtype = engine.described(arrays[0])
    poisoned = values.copy(order="K")
    poisoned[np.broadcast_to(unread, op.input_shapes[0]).reshape(values.shape)] = np.nan
    return [engine.array(poisoned, dtype)]


def stages(
    engine: Engine, plan: Plan, operands: Sequence[Any], indices: Mapping[str, Any], gradient: Any
) -> Iterator[Stage]:
    """Run a plan's forward program step by step; then the backward program too, if there is an output gradient."""
    backend, programs = load_backend(plan.backend), plan.programs
    stepwise = backend.stepwise(plan, operands, indices)
    values, number = dict(stepwise.values), 0
    for program in (programs.forward, programs.backward):
        if program is None or (program is programs.backward and gradient is None):
            return
        if program is programs.backward:
            stepwise = backend.stepwise(plan, operands, indices, gradient, {v: values[v] for v in programs.kept})
            values = dict(stepwise.values)
        for step in program.steps:
            inputs = _inputs(engine, plan, step.op, [values[v] for v in step.inputs], indices)
            stage = Stage(plan, number, step, inputs, stepwise)
            yield stage
            values.update(zip(step.outputs, stage.run(step.choice.lowering), strict=True))
            number += 1


def run_step(
    plan: Plan,
    operands: Sequence[Any],
    indices: Mapping[str, Any],
    number: int,
    lowering: str = "",
    *,
    gradient: Any = None,
) -> tuple[list[Array], list[Array]]:
    """Run one step of a plan in a named implementation; return its results and the oracle's for the same inputs.

    Example:
        >>> import numpy as np
        >>> import planner
        >>> a, b = np.ones((2, 3)), np.ones((3, 2))
        >>> plan = planner.plan("ij, jk -> ik", a, b)
        >>> found, expected = run_step(plan, [a, b], {}, 0, "matmul")
        >>> bool((found[0] == expected[0]).all())
        True

    Args:
        plan: the plan.
        operands: the operands of the call.
        indices: index arrays by letter.
        number: the step's place in ``plan.steps``; the steps before it run as planned.
        lowering: the implementation, a row of the backend's table; "" for the planned one.
        gradient: the output's gradient; needed for steps of the backward program.

    Returns:
        The step's results, and the oracle's, as NumPy arrays.

    Raises:
        PlannerError: there is no such step or implementation.
    """
    engine, rows = engine_of(plan.backend), load_backend(plan.backend).table.rows
    for stage in stages(engine, plan, operands, indices, gradient):
        if stage.number == number:
            name = lowering or stage.step.choice.lowering
            if name not in rows:
                raise PlannerError(f"{plan.backend} has no implementation {name!r}: take from {', '.join(rows)}")
            return [engine.described(x)[0] for x in stage.run(name)], stage.expected(engine, indices)[0]
    count = len(plan.steps) if gradient is not None else len(plan.programs.forward.steps)
    raise PlannerError(
        f"there is no step {number!r} to run: the steps are 0 to {count - 1}; those of the backward program need "
        "gradient="
    )


def lowerings(engine: Engine, subject: Subject, problem: Problem) -> None:
    """Every implementation that supports a step computes what the step means; or a user's kernel does."""
    with engine.context(problem):
        operands, indices = engine.operands(problem), engine.indices(problem)
        # On small problems the fastest plans take rows and multiply in two steps. Other objectives do both in one step.
        plans = [engine.plan(problem, operands, indices, minimize=least) for least in ("time", "flops", "bytes")]
        gradient = None
        if plans[0].programs.backward is not None:
            gradient = engine.array(problem.output_gradient(), plans[0].dtype)
        table, seen, ran = load_backend(engine.name).table, set(), 0
        own = {} if subject.kernel is None else {f"{subject.kernel.name} #{next(_NUMBERS)}": subject.kernel}
        # As a variant the row is chosen by no plan.
        rows = {name: dataclasses.replace(row, name=name, variant_of=row.name) for name, row in own.items()}
        with mock.patch.dict(table.rows, rows):
            for stage in (stage for plan in plans for stage in stages(engine, plan, operands, indices, gradient)):
                op = stage.step.op
                if isinstance(op, Cast) or op in seen:
                    continue
                seen.add(op)
                for name in rows or _names(table, op, stage.plan.device):
                    if table.rows[name].refusal(op, stage.plan.device) is None:
                        _check_step(engine, subject, problem, stage, name, indices)
                        ran += 1
        assume(ran or subject.kernel is None)  # a user's kernel may support none of a problem's steps


def _names(table: Table, op: Op, device: Device) -> list[str]:
    """Return the names of all implementations that run an op, and of their variants with other tilings."""
    names = [choice.lowering for choice in table.choices(op, device)]
    return names + [choice.lowering for name in names for choice in table.variants(name, op, device)]


def _check_step(
    engine: Engine, subject: Subject, problem: Problem, stage: Stage, name: str, indices: Mapping[str, Any]
) -> None:
    """Raise `Broken` if an implementation's results are wrong, or if a user's kernel breaks its other promises."""
    expected, rooms = stage.expected(engine, indices)
    before = [engine.described(x)[0].copy() for x in stage.inputs]
    op = stage.step.op
    shown = subject.kernel.name if subject.kernel is not None else name
    own = subject.kernel is not None
    script = functools.partial(scripts.of_step, engine.name, problem, stage.number, shown, stage.plan, own=own)
    with raising(problem, script):
        results = stage.run(name)
    for result, exactly, room in zip(results, expected, rooms, strict=True):
        array, dtype = engine.described(result)
        if wrong := differs((array, dtype), exactly, op.dtype, room):
            what = f"step {stage.number}, {op.spec}, as {shown!r} {wrong}"
            raise Broken(problem, what, repr(array), repr(exactly.astype(array.dtype)), script())
    if subject.kernel is None:
        return
    after = [engine.described(x)[0] for x in stage.inputs]
    if any((x != y).any() for x, y in zip(before, after, strict=True)):
        raise Broken(problem, f"{shown!r} changes its inputs", "", "", script())
    if engine.name == "torch":
        scratch = subject.kernel.cost(op, stage.plan.device).scratch_bytes
        most = scratch + sum(x.untyped_storage().nbytes() for x in results)
        taken = measure.torch_memory(lambda: stage.run(name))[1].peak_bytes
        if taken > most:
            what = f"{shown!r} allocates more than its results and the scratch that its cost states"
            raise Broken(problem, what, f"{taken} bytes", f"{most} bytes", script())


# Each check of a user's row gives it a name of its own: steps are compiled and remembered by the names of rows.
_NUMBERS = itertools.count()
