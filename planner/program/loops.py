"""Slicing: a contraction as a loop over slices of one or more axes, priced as two programs of one step each.

One slice of a contraction is the same spec with some axes shorter (`sliced`), so it has a plan of its
own, the loop's body. Where a cut axis is in the result, the body's results are its parts; elsewhere they are added up.
The backward program is a loop too: each slice computes its values again from the operands, and gradients are parts of,
or are added to, the operands' gradients. So nothing is retained, and the peak is the results and one slice's peak.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from planner.cost.device import Device
from planner.cost.figures import Cost, PlanCost, StepCost
from planner.cost.layout import Layout, row_major, strides_in
from planner.cost.objective import step_key
from planner.language.derive import slice_spec
from planner.language.dtypes import itemsize
from planner.language.resolve import Resolved
from planner.language.spec import Gather, Operand, Spec, Term
from planner.program.build import Lowerer, build, given_variables
from planner.program.frameworks import load_backend
from planner.program.ops import Einsum, JointGradient, Op, PricedImplementation
from planner.program.plan import PlanRecord
from planner.program.program import Program, Programs, Step, Variable
from planner.program.tree import Leaf, Tree

__all__ = ["Part", "accumulator", "body_of", "covers", "device_in_loop", "loop_programs", "parts", "resize_tree",
           "slice_counts", "slice_of"]  # fmt: skip

Axes = Sequence[tuple[str, int]]
# Seconds for each element of a slice that XLA cuts across an array's innermost axis: chain-ijkl cut along l by 1 took
# 3.8 s with gradients, where slices along j took 0.3; 2 cores of an Intel Xeon at 2.8 GHz, JAX 0.10.2, 2026-11-22.
_ACROSS_SECONDS = 4e-8
# Bytes/s that the steps of such a loop move: XLA runs what is no product there on one core. In slices of the clique
# and of chain-ijkl broadcast products moved 5.5 (innermost 3 x 3) to 12 GB/s, products of matrices with vectors 17.
_LOOP_BANDWIDTH = 8e9
# Where Python runs the loop: what each slice takes, and each step of it, beside the operators. 1,000 slices of 4 x 4
# matrices, 1 to 11 steps: 40 us and 17 to 22 for a step; the same machine, torch 2.13.
_SLICE_SECONDS, _STEP_SECONDS = 4e-5, 2e-5
# And what each stretch of neighbours takes that a slice is made of, where it is read and where it is written: in slices
# of chain-ijkl along i (4,800 stretches of 36 bytes in each of two operands) 47 ns, along j (1,166, pages apart) 290.
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
        """Return the slices that cut it out of an array with this term, or with a bracket's axes."""
        spans = {axis: slice(start, stop) for axis, start, stop in self.spans}
        return tuple(spans.get(e, slice(None)) if isinstance(e, str) else slice(None) for e in term)


def parts(axes: Axes, spec: Spec) -> Iterator[Part]:
    """Yield every slice of a loop, the outermost axis slowest."""
    spans = [
        [(axis, start, min(start + size, spec.size(axis))) for start in range(0, spec.size(axis), size)]
        for axis, size in axes
    ]
    for chosen in itertools.product(*spans):
        yield Part(chosen)


def slice_counts(axes: Axes, spec: Spec) -> list[tuple[dict[str, int], int]]:
    """Return the sizes that slices have, and how many slices have them; the largest first."""
    kinds = []
    for axis, size in axes:
        whole, rest = divmod(spec.size(axis), size)
        kinds.append([(axis, size, whole)] * (whole > 0) + [(axis, rest, 1)] * (rest > 0))
    return [
        ({axis: size for axis, size, _ in chosen}, math.prod(count for _, _, count in chosen))
        for chosen in itertools.product(*kinds)
    ]


def covers(axes: Axes, term: Term) -> bool:
    """Whether the slices of an array with this term are disjoint and fill it: it has every cut axis, once."""
    return all(term.count(axis) == 1 for axis, _ in axes)


def accumulator(dtype: str) -> str:
    """The dtype that slices are added up in: float32 for the half types."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def device_in_loop(device: Device, backend: str) -> Device:
    """Return the rates by which the steps of a loop's body run."""
    if device.kind != "cpu" or not load_backend(backend).compiles:
        return device
    slow = {name: min(getattr(device, name), _LOOP_BANDWIDTH) for name in ("bandwidth", "cache_bandwidth")}
    return dataclasses.replace(device, name=f"{device.name}, one core", **slow)


def resize_tree(tree: Tree, sizes: Mapping[str, int]) -> Tree:
    """The same tree for other sizes of some axes."""
    if isinstance(tree, Leaf):
        return tree
    op = dataclasses.replace(tree.op, spec=slice_spec(tree.op.spec, sizes))
    return dataclasses.replace(tree, op=op, children=tuple(resize_tree(child, sizes) for child in tree.children))


def body_of(plan: PlanRecord, sizes: Mapping[str, int]) -> PlanRecord:
    """Return the plan of a slice: the loop's body, or the same steps for a shorter slice."""
    assert plan.loop is not None
    body = plan.loop.body
    resolved, operands = slice_of(plan.resolved, plan.operands, sizes)
    if resolved == body.resolved:
        return body
    table, key = load_backend(plan.backend).table, step_key(body.options.minimize)
    tree = resize_tree(body.tree, sizes)
    programs = build(
        tree,
        given_variables(resolved, operands, plan.backend),
        [o.requires_grad for o in operands],
        Lowerer(lambda op: table.choices(op, body.device), key),
        body.dtype,
        body.gradient_strides,
    )
    return dataclasses.replace(
        body, resolved=resolved, index_shapes=resolved.index_shapes, operands=operands, tree=tree, programs=programs
    )


def slice_of(
    resolved: Resolved, operands: Sequence[Operand], sizes: Mapping[str, int]
) -> tuple[Resolved, tuple[Operand, ...]]:
    """Return the resolved problem of one slice, and stand-ins for its operands, which are views of the whole's."""
    spec = slice_spec(resolved.spec, sizes)
    lengths = dict(spec.sizes)
    arrays = {g.array: tuple(lengths[axis] for axis in g.axes) for g in spec.gathers}
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
        bodies: what a slice runs and how many slices run that, for each of `slice_counts`.
        operands: the operands as variables.
        requires: which of them need a gradient.
        dtype: dtype of the computation.
        device: rates.
        backend: name of the framework that runs it.
    """
    framework = load_backend(backend)
    name = "loop over " + ", ".join(f"{axis} by {size}" for axis, size in axes)
    count = len(operands)
    result = Variable(spec.output_shape, dtype, count)
    gradients = tuple(count + 2 + i if need else None for i, need in enumerate(requires))
    variables = (
        *operands, result, Variable(spec.output_shape, dtype, count + 1),
        *(Variable(x.shape, x.dtype, count + 2 + i) for i, x in enumerate(operands)),
    )  # fmt: skip
    largest = dict(axes)
    # A loop that XLA compiles has arrays for slices. Elsewhere slices are views, not flat where the cut axis is not the
    # first: where operands have strides, the body's steps say what of them is copied; without strides, and of index
    # arrays and output gradients, such a slice counts as a copy.
    slice_bytes = partial(_slice_bytes, spec=spec, largest=largest, views=not framework.compiles)
    copied = 0
    if not framework.strided:
        copied = sum(slice_bytes(term, x.dtype) for term, x in zip(spec.inputs, operands, strict=True))
    copied += sum(slice_bytes(gather.axes, "int64") for gather in spec.gathers)
    across, inside = 0.0, device_in_loop(device, backend)
    if framework.compiles and device.kind == "cpu":
        across = _ACROSS_SECONDS * sum(
            slice_bytes(term, "int8") for term in spec.inputs if _innermost(term, spec) in largest
        )

    # In XLA slices are gathered into arrays; elsewhere they are read where they lie.
    free = framework.compiles or device.kind != "cpu"
    layouts = [*(x.layout for x in operands), None]
    stretches = [0 if free else _stretches(t, at, spec, largest) for t, at in zip(spec.terms, layouts, strict=True)]

    def step(
        op: Op, runs: Sequence[tuple[Program, Cost, int]], outputs: Sequence[tuple[int, Term]], copied: int
    ) -> Step:
        scratch = copied
        made = sum(variables[v].bytes for v, _ in outputs)
        flops, moved, seconds = 0, 0, 0.0
        for ran, cost, times in runs:
            flops += times * cost.flops
            moved += times * cost.bytes_moved
            # Each operand is cut anew in every slice.
            seconds += times * (cost.seconds + count * device.launch_seconds)
            if not framework.compiles:
                seconds += times * (_SLICE_SECONDS + len(ran.steps) * _STEP_SECONDS)
        slices = math.prod(-(-spec.size(axis) // size) for axis, size in axes)
        for v, term in outputs:
            elements = math.prod(min(largest.get(e, spec.size(e)), spec.size(e)) if isinstance(e, str) else
                                 spec.size(e) for e in term)  # fmt: skip
            written = (2 if covers(axes, term) else 3) * elements * itemsize(accumulator(variables[v].dtype))
            moved += slices * written
            flops += 0 if covers(axes, term) else slices * elements
            seconds += slices * inside.seconds(0, written, 0, 1) + device.fresh_seconds(variables[v].bytes)
            seconds += slices * stretches[spec.terms.index(term)] * _STRETCH_SECONDS
            if not covers(axes, term) and accumulator(variables[v].dtype) != variables[v].dtype:
                scratch += math.prod(variables[v].shape) * 4
        seconds += (
            slices * sum(stretches[: len(spec.terms) if isinstance(op, JointGradient) else count]) * _STRETCH_SECONDS
        )
        if framework.compiles:
            moved += slices * 2 * copied
            # Backward, what is read across an axis has a gradient that is written so.
            seconds += slices * (inside.moving_seconds(2 * copied) + across * op.products)
        scratch += max((cost.peak_bytes for _, cost, _ in runs), default=0)
        chosen = PricedImplementation(name, StepCost(flops, moved, 0, scratch, round(seconds * 1e12)))
        given = tuple(range(count)) if not isinstance(op, JointGradient) else (count + 1, *range(count))
        return Step(op, chosen, given, tuple(v for v, _ in outputs), (), made + scratch)

    def program(only: Step, given: tuple[int, ...], results: tuple[int, ...]) -> tuple[Program, Cost]:
        cost = only.choice.cost
        whole = Cost(cost.flops, cost.bytes_moved, 0, only.live_bytes, 0, cost.picoseconds / 1e12)
        return Program((only,), given, results, only.live_bytes), whole

    there = tuple(range(count))
    runs = [(body.forward, body.cost.forward, n) for body, n in bodies]
    ahead = step(Einsum(spec, dtype), runs, [(count, spec.output)], copied)
    forward, cost = program(ahead, there, (count,))
    backward, back_cost = None, None
    if any(requires):
        outputs = [(v, spec.inputs[i]) for i, v in enumerate(gradients) if v is not None]
        runs = [(b.backward, b.cost.backward, n) for b, n in bodies if b.backward is not None and b.cost.backward]
        copied += slice_bytes(spec.output, dtype)
        back = step(Einsum(spec, dtype).joint_gradient(), runs, outputs, copied)
        backward, back_cost = program(back, (*there, count + 1), tuple(v for v, _ in outputs))
    return Programs(
        variables, forward, backward, count, (), count + 1, gradients, PlanCost.of(cost, back_cost)
    )  # fmt: skip


def _innermost(term: Term, spec: Spec) -> str | Gather | None:
    """The last entry of a term that is no single one: along it neighbours in memory lie."""
    return next((e for e in reversed(term) if spec.size(e) != 1), None)


def _stretches(term: Term, layout: Layout | None, spec: Spec, largest: Mapping[str, int]) -> int:
    """How many stretches of neighbours a slice of an array is made of; none count where it is one, or is not cut."""
    memory = term if layout is None else tuple(term[d] for run in layout.runs for d in run)
    cut = [d for d, e in enumerate(memory) if e in largest]
    before = memory[: max(cut)] if cut else ()
    count = math.prod(largest.get(e, spec.size(e)) if isinstance(e, str) else spec.size(e) for e in before)
    return count if count > 1 else 0


def _slice_bytes(term: Term, dtype: str, spec: Spec, largest: Mapping[str, int], views: bool) -> int:
    """Bytes of a slice, if it is copied: any but of a whole array; of views where a longer axis precedes a cut one."""
    cut = [d for d, e in enumerate(term) if e in largest]
    if not cut or views and all(spec.size(e) == 1 for e in term[: max(cut)] if e not in largest) and len(cut) == 1:
        return 0
    return math.prod(largest.get(e, spec.size(e)) if isinstance(e, str) else spec.size(e) for e in term) * itemsize(
        dtype
    )
