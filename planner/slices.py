"""The slices of a plan's loop as independent pieces of work, which any executor can run: `Plan.slices`.

A piece is a function of this module and its arguments: the plan of one slice as JSON, and slices of the arrays. These
travel as NumPy arrays, of which only the slice is pickled. (A tensor that torch sends to another process is moved into
shared memory in place, the whole of its storage.)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from planner.language.cached import cached_until_cleared
from planner.language.dtypes import accumulator
from planner.language.errors import PlannerError, ShapeError
from planner.language.options import MODES
from planner.language.spec import Term
from planner.program.frameworks import Backend, load_backend
from planner.program.loops import Part, covers, parts, slice_counts, slice_of
from planner.program.plan import Loop, PlanRecord
from planner.program.program import Step
from planner.program.serial import plan_from_json, plan_to_json
from planner.run import check_call, run_plan
from planner.search.slicing import can_be_cut


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """A piece of work that can be pickled and run anywhere, as ``function(*arguments)`` or by a call of the piece.

    Attributes:
        function: `run_slice`.
        arguments: its arguments.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self) -> Any:
        """Run the piece in this process."""
        return self.function(*self.arguments)


def run_slice(text: str, dtype: str, device: str, operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
    """Run one slice. Arrays are what `Backend.to_numpy` returns, and so is the result.

    Args:
        text: the plan of the slice as JSON. Each process reads it once.
        dtype: what the result is cast to.
        device: the name of the operands' device.
        operands: slices of the operands.
        indices: slices of the index arrays, by letter.

    Raises:
        PlannerError: this process lacks the framework, or an implementation that the plan uses.
    """
    plan = _read(text)
    backend = load_backend(plan.backend)
    pairs = zip(operands, plan.operands, strict=True)
    arrays = [backend.from_numpy(x, operand.dtype, device) for x, operand in pairs]
    index_arrays = {name: backend.from_numpy(q, q.dtype.name, device) for name, q in indices.items()}
    return backend.to_numpy(run_plan(plan, arrays, index_arrays), dtype)


@cached_until_cleared(64)
def _read(text: str) -> PlanRecord:
    return plan_from_json(text)


class Slices:
    """The pieces of one call of a plan. Iterate over them, run each, and `combine` the results; see `Plan.slices`."""

    def __init__(self, plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> None:
        self._plan, self._backend = plan, _check(plan, operands, indices)
        self._device = str(getattr(operands[0], "device", ""))
        self._cut = cut = _cut(plan)
        self._loop = loop = cut.loop
        self._parts, spec = list(parts(loop.axes, loop.spec)), loop.spec
        self._stepwise = self._backend.stepwise(plan, operands, indices)
        self._values = dict(self._stepwise.values)
        self._run(cut.before, self._values)
        self._inputs = [
            self._backend.to_numpy(self._values[v], operand.dtype).reshape(spec.shape(term))
            for v, operand, term in zip(cut.inputs, loop.body.operands, spec.inputs, strict=True)
        ]
        self._brackets = {gather.array: gather.axes for gather in spec.gathers}
        self._indices = {}
        for name, axes in self._brackets.items():
            values = indices[name].values if hasattr(indices[name], "prepared_framework") else indices[name]
            dtype = self._backend.operand(values).dtype
            self._indices[name] = self._backend.to_numpy(values, dtype).reshape(spec.shape(axes))
        counts = slice_counts(loop.axes, spec)
        self._texts = {
            tuple(sizes.items()): plan_to_json(body) for (sizes, _), body in zip(counts, loop.bodies, strict=True)
        }
        self._disjoint = covers(loop.axes, spec.output)

    def __repr__(self) -> str:
        return f"<Slices: {len(self)} of {self._plan!r}>"

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Slice]:
        loop = self._loop
        dtype = loop.dtype if self._disjoint else accumulator(loop.dtype)
        for part in self._parts:
            operands = [_view(x, part, term) for x, term in zip(self._inputs, loop.spec.inputs, strict=True)]
            indices = {name: _view(self._indices[name], part, axes) for name, axes in self._brackets.items()}
            text = self._texts[tuple(part.sizes.items())]
            yield Slice(run_slice, (text, dtype, self._device, operands, indices))

    def combine(self, results: Iterable[Any]) -> Any:
        """Return the result of the whole call, from the results of the pieces in the order of the pieces.

        It takes one result after the other, and adds each up or writes it into its place before it takes the next. Then
        it runs the steps of the plan that come after the loop.

        Args:
            results: what the pieces returned: a list, or an iterator such as that of `Executor.map`.

        Returns:
            What a call of the plan returns.

        Raises:
            PlannerError: there are more or fewer results than pieces.
            ShapeError: a result has not the shape of its piece, as when they come in another order.
        """
        spec, output = self._loop.spec, None
        for number, (part, result) in enumerate(itertools.zip_longest(self._parts, results)):
            if part is None or result is None:
                raise PlannerError(f"there are {len(self)} slices: pass one result for each, in their order")
            if output is None:
                output = np.zeros(spec.output_shape, result.dtype)
            into = _view(output, part, spec.output)
            if result.shape != into.shape:
                raise ShapeError(
                    f"result {number} has shape {result.shape}, but slice {number} makes {into.shape}: "
                    "pass the results in the order of the slices"
                )
            if self._disjoint:
                into[...] = result
            else:
                into += result
        values = dict(self._values)
        values[self._cut.output] = self._backend.from_numpy(output, self._loop.dtype, self._device)
        self._run(self._cut.after, values)
        return values[self._plan.programs.result]

    def _run(self, steps: Sequence[Step], values: dict[int, Any]) -> None:
        for step in steps:
            results = self._stepwise.bind(step, [values[v] for v in step.inputs])()
            values.update(zip(step.outputs, results, strict=True))


def _view(x: Any, part: Part, term: Term) -> Any:
    """Return a part of a NumPy array, as a view and never as a number."""
    return x[(*part.of(term), ...)]


def _check(plan: PlanRecord, operands: Sequence[Any], indices: Mapping[str, Any]) -> Backend:
    """Return a plan's backend, after checking that its slices can be run for such arrays."""
    backend = check_call(plan, operands, indices)
    backend.refuse_dataless(operands, indices)
    for number, x in enumerate(operands):
        if backend.operand(x).requires_grad:
            raise PlannerError(
                f"operand {number} needs a gradient, but slices compute values only: detach it, or make the slices "
                "under torch.no_grad()"
            )
    for gather in plan.resolved.spec.gathers:
        backend.in_range(indices[gather.array], gather, plan.index_mode)  # torch's steps would refuse it later
    return backend


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    """The loop of a plan: the variables that it reads, the one that it computes, and the steps before and after it."""

    loop: Loop
    inputs: tuple[int, ...]
    output: int
    before: Sequence[Step] = ()
    after: Sequence[Step] = ()


def _cut(plan: PlanRecord) -> _Cut:
    """Return the first loop of a plan. Where there is none that can be cut, the whole plan is a loop over no axes.

    What dropped indices do to infinities is known where the whole plan runs, and not where steps run one by one.
    """
    spec, programs = plan.resolved.spec, plan.programs
    steps = programs.forward.steps
    drops = bool(spec.gathers) and MODES[plan.index_mode].bad == "drop"
    for number, step in enumerate(steps):
        loop = step.op
        if isinstance(loop, Loop) and all(can_be_cut(loop.spec, axis) for axis, _ in loop.axes):
            if drops and len(steps) > 1:
                break
            return _Cut(loop, step.inputs, step.outputs[0], steps[:number], steps[number + 1 :])
    whole = PlanRecord.of_contraction(
        slice_of(plan.contraction, {}),
        tree=plan.tree,
        programs=programs,
        known_naive_cost=plan.cost,  # nobody asks for it, and to find it takes a search
        proven=plan.proven,
        origin=plan.origin,
    )
    loop = Loop(spec, plan.dtype, axes=(), bodies=(whole,))
    return _Cut(loop, tuple(range(len(plan.operands))), programs.result)
