"""Slicing: a contraction as a loop over slices of one or more axes, priced as two programs of one step each.

One slice of a contraction is the same spec with some axes shorter (`slice_spec`). It has a plan of its own, the loop's
body. If the result has a cut axis, each slice computes a part of the result; otherwise the slices' results are added
up. The backward program is a loop too. Each slice computes its values again from the operands, and its gradients are
parts of the operands' gradients or are added to them. So nothing is retained, and the peak is the size of the results
plus the peak of one slice.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from planner.cost.device import Device
from planner.cost.figures import Cost, PlanCost, StepCost
from planner.cost.layout import Layout, row_major, strides_in
from planner.cost.objective import step_key
from planner.language.derive import slice_spec
from planner.language.dtypes import accumulator, itemsize
from planner.language.resolve import Resolved
from planner.language.spec import Gather, Operand, Spec, Term
from planner.program.build import Lowerer, build, given_variables
from planner.program.frameworks import load_backend
from planner.program.implementations import Backend
from planner.program.ops import Einsum, Op, PricedImplementation
from planner.program.plan import PlanRecord
from planner.program.program import Program, Programs, Step, Variable
from planner.program.tree import Leaf, Tree

__all__ = [
    "Part",
    "body_of",
    "covers",
    "device_in_loop",
    "loop_programs",
    "parts",
    "resize_tree",
    "slice_counts",
    "slice_of",
]

Axes = Sequence[tuple[str, int]]
# Seconds that XLA takes for each element of a slice that is cut along an array's innermost axis. Chain-ijkl cut along l
# by 1 took 3.8 s with gradients, cut along j 0.3 s. Measured on 2 cores of an Intel Xeon at 2.8 GHz with JAX 0.10.2,
# 2026-11-22.
_ACROSS_SECONDS = 4e-8
# Bytes/s that the steps of a loop move in XLA on a CPU: everything but products runs on one core there. In slices of
# the clique and of chain-ijkl broadcast products moved 5.5 (innermost 3 x 3) to 12 GB/s, products of matrices with
# vectors 17 GB/s.
_LOOP_BANDWIDTH = 8e9
# Where Python runs the loop: the seconds that each slice takes, and each step of a slice, besides the operators.
# 1,000 slices of 4 x 4 matrices with 1 to 11 steps took 40 us each, and 17 to 22 us for each step; the same machine,
# torch 2.13.
_SLICE_SECONDS, _STEP_SECONDS = 4e-5, 2e-5
# Seconds to read or write each contiguous stretch of memory in a slice. Slices of chain-ijkl along i have 4,800
# stretches of 36 bytes in each of two operands: 47 ns each. Slices along j have 1,166, pages apart: 290 ns each.
_STRETCH_SECONDS = 1.2e-7


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One slice: where it starts and ends along each axis that is cut."""

    spans: tuple[tuple[str, int, int], ...]

    @property
    def sizes(self) -> dict[str, int]:
        """The slice's size of each axis that is cut."""
        return {axis: stop - start for axis, start, stop in self.spans}

    def of(self, term: Sequence[str | Gather]) -> tuple[slice, ...]:
        """Return the slices that cut this part out of an array with a term, or with the axes of a bracket."""
        spans: dict[str | Gather, slice] = {axis: slice(start, stop) for axis, start, stop in self.spans}
        return tuple(spans.get(entry, slice(None)) for entry in term)


def parts(axes: Axes, spec: Spec) -> Iterator[Part]:
    """Yield every slice of a loop, the outermost axis slowest."""
    spans = [
        [(axis, start, min(start + size, spec.size(axis))) for start in range(0, spec.size(axis), size)]
        for axis, size in axes
    ]
    for chosen in itertools.product(*spans):
        yield Part(chosen)


def slice_counts(axes: Axes, spec: Spec) -> list[tuple[dict[str, int], int]]:
    """Return each combination of slice sizes that occurs and how many slices have it, the largest first."""
    lengths = []
    for axis, size in axes:
        whole, rest = divmod(spec.size(axis), size)
        lengths.append([(axis, size, whole)] * (whole > 0) + [(axis, rest, 1)] * (rest > 0))
    counts = []
    for combination in itertools.product(*lengths):
        sizes = {axis: size for axis, size, _ in combination}
        counts.append((sizes, math.prod(count for _, _, count in combination)))
    return counts


def covers(axes: Axes, term: Term) -> bool:
    """Whether the slices of an array with this term are disjoint and fill it: if it has every cut axis exactly once."""
    return all(term.count(axis) == 1 for axis, _ in axes)


def device_in_loop(device: Device, backend: str) -> Device:
    """Return the rates at which the steps of a loop's body run."""
    if device.kind != "cpu" or not load_backend(backend).compiles:
        return device
    slow = {name: min(getattr(device, name), _LOOP_BANDWIDTH) for name in ("bandwidth", "cache_bandwidth")}
    return dataclasses.replace(device, name=f"{device.name}, one core", **slow)


def resize_tree(tree: Tree, sizes: Mapping[str, int]) -> Tree:
    """Return the same tree for other sizes of some axes."""
    if isinstance(tree, Leaf):
        return tree
    op = dataclasses.replace(tree.op, spec=slice_spec(tree.op.spec, sizes))
    return dataclasses.replace(tree, op=op, children=tuple(resize_tree(child, sizes) for child in tree.children))


def body_of(plan: PlanRecord, sizes: Mapping[str, int]) -> PlanRecord:
    """Return the plan of a slice: the loop's body, or the same tree for a shorter slice."""
    assert plan.loop is not None
    body = plan.loop.body
    resolved, operands = slice_of(plan.resolved, plan.operands, sizes)
    if resolved == body.resolved:
        return body
    table, key = load_backend(plan.backend).table, step_key(body.options.minimize)
    tree = resize_tree(body.tree, sizes)
    part = dataclasses.replace(body, resolved=resolved, index_shapes=resolved.index_shapes, operands=operands)
    lower = Lowerer(lambda op: table.choices(op, body.device), key)
    return dataclasses.replace(part, tree=tree, programs=build(tree, part, given_variables(part), lower))


def slice_of(
    resolved: Resolved, operands: Sequence[Operand], sizes: Mapping[str, int]
) -> tuple[Resolved, tuple[Operand, ...]]:
    """Return the resolved problem of one slice, and stand-ins for its operands: views of the whole operands."""
    spec = slice_spec(resolved.spec, sizes)
    arrays = {gather.array: spec.shape(gather.axes) for gather in spec.gathers}
    shapes = tuple(spec.shape(term) for term in spec.inputs)
    views = tuple(
        Operand(shape, o.dtype, strides_in(o, whole) or row_major(whole), o.requires_grad)
        for shape, whole, o in zip(shapes, resolved.shapes, operands, strict=True)
    )
    return Resolved(spec, shapes, tuple((name, arrays[name]) for name, _ in resolved.index_shapes)), views


def loop_programs(
    spec: Spec,
    axes: Axes,
    bodies: Sequence[tuple[Programs, int]],
    operands: Sequence[Variable],
    requires: Sequence[bool],
    dtype: str,
    device: Device,
    backend: str,
) -> Programs:
    """Return both programs of a loop, each a single step.

    Args:
        spec: the resolved spec of the whole contraction.
        axes: the axes that are cut and their slices' sizes.
        bodies: for each of `slice_counts`, the programs of such a slice and the number of such slices.
        operands: the operands as variables.
        requires: which operands need a gradient.
        dtype: dtype of the computation.
        device: the rates of the machine.
        backend: name of the framework that runs the loop.
    """
    count = len(operands)
    result = Variable(spec.output_shape, dtype, count)
    output_gradient = Variable(spec.output_shape, dtype, count + 1)
    gradients = [Variable(x.shape, x.dtype, count + 2 + i) for i, x in enumerate(operands)]
    loop = _Loop(spec, tuple(axes), tuple(operands), device, device_in_loop(device, backend), load_backend(backend))
    inputs = tuple(range(count))
    copied = loop.copied_operand_bytes()

    runs = [(body.forward, body.cost.forward, times) for body, times in bodies]
    step = loop.step(Einsum(spec, dtype), inputs, [(result, spec.output)], runs, copied)
    forward, cost = _single_step_program(step)
    backward, backward_cost = None, None
    if any(requires):
        outputs = [(gradients[i], spec.inputs[i]) for i, need in enumerate(requires) if need]
        runs = [(b.backward, b.cost.backward, times) for b, times in bodies if b.backward and b.cost.backward]
        copied += loop.copied_bytes(spec.output, dtype)
        op = Einsum(spec, dtype).joint_gradient()
        step = loop.step(op, (output_gradient.base, *inputs), outputs, runs, copied)
        backward, backward_cost = _single_step_program(step, (*inputs, output_gradient.base))
    return Programs(
        variables=(*operands, result, output_gradient, *gradients),
        forward=forward,
        backward=backward,
        result=result.base,
        kept=(),
        output_gradient=output_gradient.base,
        gradients=tuple(v.base if need else None for v, need in zip(gradients, requires, strict=True)),
        cost=PlanCost.of(cost, backward_cost),
    )


def _single_step_program(step: Step, given: tuple[int, ...] | None = None) -> tuple[Program, Cost]:
    """Return the program of one step, and its cost. It is given the step's inputs, unless in another order."""
    cost = step.choice.cost
    whole = Cost(cost.flops, cost.bytes_moved, 0, step.live_bytes, 0, cost.picoseconds / 1e12)
    return Program((step,), step.inputs if given is None else given, step.outputs, step.live_bytes), whole


@dataclasses.dataclass(frozen=True, slots=True)
class _Loop:
    """A loop over slices, and what its price depends on besides the price of its body.

    Attributes:
        spec: the resolved spec of the whole contraction.
        axes: the axes that are cut and their slices' sizes.
        operands: the operands as variables.
        device: the rates of the machine.
        body_device: the rates at which the steps of a slice run.
        framework: the backend that runs the loop.
    """

    spec: Spec
    axes: tuple[tuple[str, int], ...]
    operands: tuple[Variable, ...]
    device: Device
    body_device: Device
    framework: Backend

    def length(self, entry: str | Gather) -> int:
        """Return the size of a dimension within a slice."""
        size = self.spec.size(entry)
        sizes: dict[str | Gather, int] = dict(self.axes)
        return min(sizes.get(entry, size), size)

    def elements(self, term: Term) -> int:
        """Return the number of elements in a slice of an array with this term."""
        return math.prod(self.length(entry) for entry in term)

    def cut_dims(self, term: Term) -> list[int]:
        """Return the dimensions of a term that are cut."""
        cut = dict(self.axes)
        return [d for d, entry in enumerate(term) if entry in cut]

    def copied_bytes(self, term: Term, dtype: str) -> int:
        """Return the bytes of a slice if the loop copies it, else 0.

        XLA copies every slice that is not the whole array. Elsewhere slices are views. A view along one axis stays
        flat if no longer axis precedes the cut one; any other view counts as a copy.
        """
        cut = self.cut_dims(term)
        if not cut:
            return 0
        is_view = not self.framework.compiles and len(cut) == 1
        if is_view and all(self.spec.size(entry) == 1 for entry in term[: cut[0]]):
            return 0
        return self.elements(term) * itemsize(dtype)

    def copied_operand_bytes(self) -> int:
        """Return the bytes of a slice's operands and index arrays that the loop copies.

        If arrays have strides, the steps of the body count what they copy of the operands themselves.
        """
        copied = 0
        if not self.framework.strided:
            pairs = zip(self.spec.inputs, self.operands, strict=True)
            copied = sum(self.copied_bytes(term, operand.dtype) for term, operand in pairs)
        return copied + sum(self.copied_bytes(gather.axes, "int64") for gather in self.spec.gathers)

    def across_seconds(self) -> float:
        """Return what XLA takes longer on a CPU for a slice's operands that are cut along their innermost axis."""
        if not self.framework.compiles or self.device.kind != "cpu":
            return 0.0
        cut = dict(self.axes)
        across = [term for term in self.spec.inputs if _innermost(term, self.spec) in cut]
        return _ACROSS_SECONDS * sum(self.elements(term) for term in across)

    def stretches(self) -> list[int]:
        """Return, for each term, how many stretches of memory a slice of its array has; 0 if just one."""
        if self.framework.compiles or self.device.kind != "cpu":
            return [0] * len(self.spec.terms)  # XLA gathers slices into arrays; on a card stretches cost nothing
        layouts = [*(operand.layout for operand in self.operands), None]
        return [self._stretches(term, layout) for term, layout in zip(self.spec.terms, layouts, strict=True)]

    def _stretches(self, term: Term, layout: Layout | None) -> int:
        in_memory = term if layout is None else tuple(term[d] for run in layout.runs for d in run)
        cut = self.cut_dims(in_memory)
        count = self.elements(in_memory[: max(cut)]) if cut else 1
        return count if count > 1 else 0

    def step(
        self,
        op: Op,
        inputs: tuple[int, ...],
        outputs: Sequence[tuple[Variable, Term]],
        runs: Sequence[tuple[Program, Cost, int]],
        copied: int,
    ) -> Step:
        """Return the loop as one step.

        Args:
            op: what all slices compute together.
            inputs: numbers of the variables that the loop reads.
            outputs: the variables that the loop computes, and their terms.
            runs: the program of a slice, its cost and how often it runs, for each kind of slice.
            copied: the bytes that the loop copies for each slice.
        """
        flops, moved, seconds = 0, 0, 0.0
        for program, cost, times in runs:
            flops += times * cost.flops
            moved += times * cost.bytes_moved
            # Each operand is cut anew in every slice.
            seconds += times * (cost.seconds + len(self.operands) * self.device.launch_seconds)
            if not self.framework.compiles:
                seconds += times * (_SLICE_SECONDS + len(program.computing) * _STEP_SECONDS)
        scratch = copied
        slices = math.prod(-(-self.spec.size(axis) // size) for axis, size in self.axes)
        stretches = self.stretches()
        for variable, term in outputs:
            disjoint, elements, sum_dtype = covers(self.axes, term), self.elements(term), accumulator(variable.dtype)
            written = (2 if disjoint else 3) * elements * itemsize(sum_dtype)
            moved += slices * written
            seconds += slices * self.body_device.seconds(0, written, 0, 1) + self.device.fresh_seconds(variable.bytes)
            seconds += slices * stretches[self.spec.terms.index(term)] * _STRETCH_SECONDS
            if not disjoint:
                flops += slices * elements
                if sum_dtype != variable.dtype:
                    scratch += math.prod(variable.shape) * itemsize(sum_dtype)
        # A joint gradient reads slices of the output gradient too.
        seconds += slices * sum(stretches[: len(op.input_terms)]) * _STRETCH_SECONDS
        if self.framework.compiles:
            moved += slices * 2 * copied
            # The gradient of a slice that is read along the innermost axis is written along it too.
            seconds += slices * (self.body_device.moving_seconds(2 * copied) + self.across_seconds() * op.products)
        scratch += max((cost.peak_bytes for _, cost, _ in runs), default=0)
        name = "loop over " + ", ".join(f"{axis} by {size}" for axis, size in self.axes)
        choice = PricedImplementation(name, StepCost(flops, moved, 0, scratch, round(seconds * 1e12)))
        live = sum(variable.bytes for variable, _ in outputs) + scratch
        return Step(op, choice, inputs, tuple(variable.base for variable, _ in outputs), (), live)


def _innermost(term: Term, spec: Spec) -> str | Gather | None:
    """Return the last entry of a term whose size is not 1: neighbours along it are neighbours in memory."""
    return next((entry for entry in reversed(term) if spec.size(entry) != 1), None)
