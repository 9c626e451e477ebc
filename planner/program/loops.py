"""Slicing: a contraction as a loop over slices of one or more axes, which is one step of a program.

One slice of a contraction is the same spec with some axes shorter (`slice_spec`). It has a plan of its own, the loop's
body. If the result has a cut axis, each slice computes a part of the result; otherwise the slices' results are added
up. The gradients are one step too. Each slice computes its values again from the loop's inputs, and its gradients are
parts of the inputs' gradients or are added to them. So nothing of a slice is retained, and the step needs its results
and the peak of one slice.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from planner.cost.device import Device
from planner.cost.figures import MOST_PICOSECONDS, StepCost
from planner.cost.layout import Layout, layout_of, row_major, strides_in
from planner.language.derive import resize_spec, slice_spec
from planner.language.dtypes import accumulator, itemsize
from planner.language.options import Options
from planner.language.resolve import Resolved
from planner.language.spec import Gather, Operand, Spec, Term
from planner.program.build import build, given_variables, lowerer_for
from planner.program.contraction import Contraction
from planner.program.frameworks import load_backend
from planner.program.implementations import Table
from planner.program.ops import Guard, Op, PricedImplementation
from planner.program.plan import Loop, PlanRecord, without_loops
from planner.program.program import Programs
from planner.program.tree import Leaf, Node, Tree, change_tree, keep_nothing, nodes_of

# The axes that a loop cuts and the sizes of their slices.
Axes = tuple[tuple[str, int], ...]
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
# Plans of slices are remembered for at most so many operands: those of more take much memory.
_MOST_KNOWN = 10


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
    if device.fastest_bandwidth <= _LOOP_BANDWIDTH:
        return device  # a loop in a loop
    names = ("bandwidth", "cache_bandwidth", "outer_cache_bandwidth")
    slow = {name: min(getattr(device, name), _LOOP_BANDWIDTH) for name in names}
    return dataclasses.replace(device, name=f"{device.name}, one core", **slow)


def resize_tree(tree: Tree, sizes: Mapping[str, int], gradient_strides: tuple[int, ...] | None = None) -> Tree:
    """Return the same tree for other sizes of some axes; a loop at its root gets a gradient of these strides."""

    def change(node: Node, children: tuple[Tree, ...]) -> Tree:
        if isinstance(node.op, Loop):
            op: Op = _resize_loop(node.op, sizes, children, gradient_strides if node is tree else None)
        else:
            op = dataclasses.replace(node.op, spec=slice_spec(node.op.spec, sizes))
        return dataclasses.replace(node, op=op, children=children)

    return change_tree(tree, change)


def _resize_loop(
    loop: Loop, sizes: Mapping[str, int], children: Sequence[Tree], gradient_strides: tuple[int, ...] | None = None
) -> Loop:
    """Return the same loop for other sizes of some axes; inputs that are computed lie row-major at these sizes too."""
    body, whole = loop.body, slice_spec(loop.spec, sizes)
    contraction = slice_of(body.contraction, dict(whole.sizes))
    pairs = zip(contraction.operands, children, strict=True)
    computed = (o if isinstance(child, Leaf) else dataclasses.replace(o, strides=None) for o, child in pairs)
    strides = contraction.gradient_strides
    if strides == row_major(loop.spec.output_shape):
        strides = row_major(whole.output_shape)
    contraction = dataclasses.replace(
        contraction, operands=tuple(computed), gradient_strides=gradient_strides or strides
    )
    axes = tuple((axis, min(size, whole.size(axis))) for axis, size in loop.axes)
    return loop_over(contraction, axes, body.tree, body.device, body.options.minimize)


def resize_plan(plan: PlanRecord, contraction: Contraction, sizes: Mapping[str | Gather, int]) -> PlanRecord:
    """Return a plan for a contraction that differs in sizes only.

    Each step takes the implementation that it has in the plan. If that refuses the step's new sizes, the step takes the
    best of the others. A loop cuts the same axes into slices of the same sizes; a loop that reads index arrays is
    undone.

    Args:
        plan: the plan.
        contraction: the contraction at the new sizes.
        sizes: the new size of each axis and gather of the plan's specs, with the letters of gathered dimensions.
    """
    table, tree = load_backend(plan.backend).table, plan.tree
    if any(isinstance(node.op, Loop) and node.op.spec.gathers for node in nodes_of(tree)):
        tree = without_loops(tree)
    fixed = {op: choice for op, choice in resize_steps(plan, sizes, table) if choice is not None}
    return plan_of_tree(plan, contraction, resize_nodes(tree, sizes), fixed, f"{plan.origin}, at other sizes")


def plan_of_tree(
    plan: PlanRecord, contraction: Contraction, tree: Tree, fixed: Mapping[Op, PricedImplementation], origin: str
) -> PlanRecord:
    """Return the plan that a contraction has with a tree, whose steps are chosen as those of another plan.

    Args:
        plan: the other plan.
        contraction: the contraction.
        tree: the tree.
        fixed: the steps whose implementations are known.
        origin: where the tree is from.
    """
    lower = lowerer_for(contraction, plan.options.objective, fixed)
    programs = build(tree, contraction, given_variables(contraction), lower)
    return PlanRecord.of_contraction(contraction, tree=tree, programs=programs, proven=False, origin=origin)


def resize_nodes(tree: Tree, sizes: Mapping[str | Gather, int]) -> Tree:
    """Return the same tree for other sizes; all axes and gathers of its specs have one."""
    return change_tree(
        tree,
        lambda node, children: dataclasses.replace(node, op=_resize_op(node.op, sizes, children), children=children),
    )


def resize_steps(
    plan: PlanRecord, sizes: Mapping[str | Gather, int], table: Table
) -> Iterator[tuple[Op, PricedImplementation | None]]:
    """Yield a plan's steps at other sizes, each in the implementation that it has there.

    None stands for one that refuses these sizes. Guards and loops are left out: there is one implementation of them.
    """
    for op, lowering in resize_ops(plan, sizes):
        yield op, table.price(lowering, op, plan.device)


def resize_ops(plan: PlanRecord, sizes: Mapping[str | Gather, int]) -> Iterator[tuple[Op, str]]:
    """Yield the ops of a plan's steps at other sizes, each with the name of its implementation, as `resize_steps`."""
    for step in plan.steps:
        if not isinstance(step.op, Guard | Loop):
            yield _resize_op(step.op, sizes), step.choice.lowering


def _resize_op(op: Op, sizes: Mapping[str | Gather, int], children: Sequence[Tree] = ()) -> Op:
    if isinstance(op, Loop):
        return _resize_loop(op, {axis: sizes[axis] for axis in op.spec.by_axis}, children)
    return dataclasses.replace(op, spec=resize_spec(op.spec, sizes))


def slice_of(contraction: Contraction, sizes: Mapping[str, int]) -> Contraction:
    """Return the contraction of one slice, with stand-ins for its operands: views of the whole operands."""
    resolved = Resolved.of(slice_spec(contraction.resolved.spec, sizes))
    views = tuple(
        Operand(shape, o.dtype, strides_in(o, whole) or row_major(whole), o.requires_grad)
        for shape, whole, o in zip(resolved.shapes, contraction.resolved.shapes, contraction.operands, strict=True)
    )
    return dataclasses.replace(
        contraction,
        text=str(resolved.spec),
        resolved=resolved,
        index_shapes=resolved.index_shapes,
        operands=views,
        # The gradient is a view too: of that of the whole result, which is row-major.
        gradient_strides=contraction.gradient_strides or row_major(contraction.resolved.spec.output_shape),
    )


def loop_over(
    contraction: Contraction,
    axes: Axes,
    tree: Tree,
    device: Device,
    objective: str,
) -> Loop:
    """Return a contraction as a loop over slices.

    Args:
        contraction: what all slices compute together.
        axes: the axes that are cut and their slices' sizes.
        tree: a tree of the contraction, for these or other sizes.
        device: the rates at which the steps of a slice run, see `device_in_loop`.
        objective: by which of a step's figures implementations are chosen.
    """
    options = Options(minimize=objective, precision=contraction.options.precision)
    tree, bodies = keep_nothing(tree), []
    for sizes, _ in slice_counts(axes, contraction.resolved.spec):
        part = dataclasses.replace(slice_of(contraction, sizes), device=device, options=options)
        known = len(part.operands) <= _MOST_KNOWN and not load_backend(part.backend).table.has_changed
        bodies.append((slice_plan if known else _make_slice_plan)(part, tree))
    return Loop(contraction.resolved.spec, contraction.dtype, axes=tuple(axes), bodies=tuple(bodies))


def _make_slice_plan(part: Contraction, tree: Tree) -> PlanRecord:
    """Return the plan of a slice, by a tree for any sizes."""
    lower = lowerer_for(part, part.options.objective)
    small = resize_tree(tree, part.resolved.spec.by_axis, part.gradient_strides)
    programs = build(small, part, given_variables(part), lower, in_loop=True)
    return PlanRecord.of_contraction(
        part, tree=small, programs=programs, known_naive_cost=programs.cost, proven=False, origin="slice"
    )


# Searches for loops, and searches under other limits, try the same slices again and again. The plan of a slice holds 10
# kB for a chain of three, and 51 for a random network of 16 operands (tracemalloc, CPython 3.11, 2026-11-29).
slice_plan = lru_cache(maxsize=512)(_make_slice_plan)


def loop_node(loop: Loop, children: Sequence[Tree] = ()) -> Node:
    """Return a loop as the node of a tree. Its children are the operands by default."""
    children = tuple(children) or tuple(map(Leaf, range(len(loop.spec.inputs))))
    order = tuple(range(len(children)))
    return Node(loop, children, order, order, kept=False)


def loop_layouts(loop: Loop) -> tuple[Layout | None, ...]:
    """Return the layouts of the output gradient and of the inputs that the slices of a loop were planned for."""
    spec, body = loop.spec, loop.body
    strides = [o.strides for o in body.operands] if load_backend(body.backend).strided else [None] * len(spec.inputs)
    arrays = zip((spec.output, *spec.inputs), (body.gradient_strides, *strides), strict=True)
    return tuple([layout_of(spec.shape(term), lies) for term, lies in arrays])


def lie_as_expected(programs: Programs) -> bool:
    """Whether what loops read, and loops in them, lies in memory as their slices were planned for."""
    for step in programs.steps:
        if isinstance(step.op, Loop):
            layouts = loop_layouts(step.op)
            expected = layouts if step.op.first_operand else layouts[1:]
            if step.op.layouts != (expected if any(expected) else ()):
                return False
            if not all(lie_as_expected(body.programs) for body in step.op.bodies):
                return False
    return True


def least_seconds(contraction: Contraction) -> float:
    """Return what a plan with a loop takes at least: two slices with a step each, where Python runs the loop."""
    if load_backend(contraction.backend).compiles:
        return 0.0
    programs = 2 if any(contraction.requires_grad) else 1
    return programs * 2 * (_SLICE_SECONDS + _STEP_SECONDS)


def loop_cost(op: Op, device: Device) -> StepCost:
    """Return the cost of a loop, forward or backward, as a step that runs on a device."""
    assert isinstance(op, Loop)
    return _Price(op, device).cost()


class _Price:
    """The price of a loop, which is more than that of its bodies: slices are cut, copied and added up.

    Args:
        loop: the loop.
        device: the rates of the machine.
    """

    def __init__(self, loop: Loop, device: Device) -> None:
        self.loop, self.device = loop, device
        self.spec, self.framework = loop.spec, load_backend(loop.body.backend)

    def elements(self, term: Term) -> int:
        """Return the number of elements in a slice of an array with this term."""
        return math.prod(self.loop.body.resolved.spec.shape(term))

    def cut_dims(self, term: Term) -> list[int]:
        """Return the dimensions of a term that are cut."""
        cut = dict(self.loop.axes)
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

    def copied_input_bytes(self) -> int:
        """Return the bytes of a slice's inputs and index arrays that the loop copies.

        If arrays have strides, the steps of the body count what they copy of the operands themselves.
        """
        copied = sum(self.copied_bytes(gather.axes, "int64") for gather in self.spec.gathers)
        if not self.framework.strided:
            pairs = zip(self.spec.inputs, self.loop.body.operands, strict=True)
            copied += sum(self.copied_bytes(term, operand.dtype) for term, operand in pairs)
        # A gradient reads slices of the output gradient too.
        return copied + self.loop.first_operand * self.copied_bytes(self.spec.output, self.loop.dtype)

    def across_seconds(self) -> float:
        """Return what XLA takes longer on a CPU for a slice's operands that are cut along their innermost axis."""
        if not self.framework.compiles or self.device.kind != "cpu":
            return 0.0
        cut = dict(self.loop.axes)
        across = [term for term in self.spec.inputs if _innermost(term, self.spec) in cut]
        return _ACROSS_SECONDS * sum(self.elements(term) for term in across)

    def stretches(self) -> list[int]:
        """Return, for each term, how many stretches of memory a slice of its array has; 0 if just one."""
        if self.framework.compiles or self.device.kind != "cpu":
            return [0] * len(self.spec.terms)  # XLA gathers slices into arrays; on a card stretches cost nothing
        first, count = self.loop.first_operand, len(self.spec.inputs)
        layouts = [*(self.loop.layouts or (None,) * (first + count))[first:], None]
        return [self._stretches(term, layout) for term, layout in zip(self.spec.terms, layouts, strict=True)]

    def _stretches(self, term: Term, layout: Layout | None) -> int:
        in_memory = term if layout is None else tuple(term[d] for run in layout.runs for d in run)
        cut = self.cut_dims(in_memory)
        count = self.elements(in_memory[: max(cut)]) if cut else 1
        return count if count > 1 else 0

    def cost(self) -> StepCost:
        """Return the cost of all slices."""
        loop, framework, copied = self.loop, self.framework, self.copied_input_bytes()
        body_device, first = loop.body.device, loop.first_operand
        flops, moved, peak, seconds = 0, 0, 0, 0.0
        for body, (_, times) in zip(loop.bodies, slice_counts(loop.axes, self.spec), strict=True):
            cost = body.cost.backward if first else body.cost.forward
            assert cost is not None
            flops += times * cost.flops
            moved += times * cost.bytes_moved
            peak = max(peak, cost.peak_bytes)
            # Each operand is cut anew in every slice.
            seconds += times * (cost.seconds + len(self.spec.inputs) * self.device.launch_seconds)
            if not framework.compiles:
                seconds += times * (_SLICE_SECONDS + len(loop.program(body).computing) * _STEP_SECONDS)
        scratch = copied
        slices = math.prod(-(-self.spec.size(axis) // size) for axis, size in loop.axes)
        stretches = self.stretches()
        for term, shape, dtype in zip(loop.output_terms, loop.output_shapes, loop.output_dtypes, strict=True):
            disjoint, elements, sum_dtype = covers(loop.axes, term), self.elements(term), accumulator(dtype)
            written, size = (2 if disjoint else 3) * elements * itemsize(sum_dtype), math.prod(shape)
            moved += slices * written
            fresh = self.device.fresh_seconds(size * itemsize(dtype))
            seconds += slices * body_device.seconds(0, written, 0, 1) + fresh
            seconds += slices * stretches[self.spec.terms.index(term)] * _STRETCH_SECONDS
            if not disjoint:
                flops += slices * elements
                if sum_dtype != dtype:
                    scratch += size * itemsize(sum_dtype)
        seconds += slices * sum(stretches[: len(loop.input_terms)]) * _STRETCH_SECONDS
        if framework.compiles:
            moved += slices * 2 * copied
            # The gradient of a slice that is read along the innermost axis is written along it too.
            seconds += slices * (body_device.moving_seconds(2 * copied) + self.across_seconds() * loop.products)
        return StepCost(flops, moved, 0, scratch + peak, min(MOST_PICOSECONDS, round(seconds * 1e12)))


def _innermost(term: Term, spec: Spec) -> str | Gather | None:
    """Return the last entry of a term whose size is not 1: neighbours along it are neighbours in memory."""
    return next((entry for entry in reversed(term) if spec.size(entry) != 1), None)
