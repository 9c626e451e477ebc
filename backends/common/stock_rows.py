"""The rows that every backend's table starts with: the stock evaluation, by kind of step, and its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from planner.backends.common.run import run_loop
from planner.backends.common.stock import ArrayOps, evaluate
from planner.backends.common.stock_layout import product_copies, scattered_vectors, stock_layout
from planner.cost.device import Device
from planner.cost.figures import StepCost
from planner.cost.layout import Layout
from planner.language.dtypes import HALF_TYPES, itemsize
from planner.language.spec import Spec, Term, indexed_dims, plain_axes, row_axes, term_axes, term_gathers
from planner.program.forms import product_form
from planner.program.implementations import LOOP, MASK, Implementation
from planner.program.loops import loop_cost
from planner.program.ops import Cast, JointGradient, Op, joint_elements, spec_flops

__all__ = ["flat_stock_cost", "picoseconds", "runs_of", "short_run_seconds", "stock_cost", "stock_kind", "stock_rows"]

# Seconds that torch's elementwise loops take besides moving memory. A loop takes the two innermost runs of neighbours
# at a time, whether of 3 x 3 or of 16 x 16 elements. It goes through short runs element by element, and through longer
# ones as vectors. Each sum of neighbours takes the same time, whatever their number. 2 cores of an Intel Xeon at 2.8
# GHz, torch 2.13, 2026-11-22.
_BLOCK_SECONDS, _ELEMENT_SECONDS, _VECTORS_SECONDS, _SUM_SECONDS = 30e-9, 1.3e-9, 2e-9, 10e-9
_SHORT_RUN = 8
# Seconds for each element of a batch of vectors with a stride other than 1: 4 to 75 ns were measured, more for longer
# vectors.
_SCATTERED_SECONDS = 20e-9


@lru_cache(maxsize=65536)
def stock_kind(op: Op) -> str:
    """Name the stock row that runs an op."""
    spec = op.spec
    if isinstance(op, JointGradient):
        return "none"
    if isinstance(op, Cast):
        return "cast"
    reads, writes = any(map(term_gathers, spec.inputs)), any(term_gathers(spec.output))
    if len(spec.inputs) == 2:
        form = product_form(spec)
        if form is None:
            return "take, multiply, add" if reads or writes else "multiply, sum"
        return "matmul" if form.contracted else "multiply"
    if reads or writes:
        return "take, segment sum" if reads and writes else "take" if reads else "segment sum"
    (term,), out = spec.inputs, spec.output
    if len(set(out)) < len(out):
        return "diagonal"
    if not set(out) <= set(term):
        return "broadcast"
    return "view" if set(out) == set(term) else "sum"


KINDS = ("view", "cast", "sum", "broadcast", "diagonal", "take", "segment sum", "take, segment sum", "matmul",
         "multiply", "multiply, sum", "take, multiply, add")  # fmt: skip


def picoseconds(seconds: float) -> int:
    """Round to the unit in which the search adds times up."""
    return round(seconds * 1e12)


def _row_seconds(spec: Spec, device: Device) -> float:
    """Return the seconds for addressing the rows of takes and segment sums, besides moving their bytes."""
    sizes = dict(spec.sizes)
    seconds = 0.0
    for number, term in enumerate(spec.terms):
        if gathers := term_gathers(term):
            rows = term_axes(gathers)
            count = math.prod(sizes[axis] for axis in rows)
            width = math.prod(sizes[axis] for axis in plain_axes(term) if axis not in rows)
            adds = number == len(spec.inputs) and width > 1
            seconds += count * (device.add_row_seconds if adds else device.take_row_seconds)
    return seconds


def _flat_index_bytes(spec: Spec) -> int:
    """Return the bytes of the flat index that a term needs if it addresses several dimensions at once.

    The flat index is built dimension by dimension: the index so far is multiplied by the dimension's size, and the
    dimension's index is added. At most three arrays exist at once. An axis needs an array of its positions.
    """
    sizes, most = dict(spec.sizes), 0
    for term in spec.terms:
        gathers, rows, addressed = term_gathers(term), row_axes(term), len(indexed_dims(term))
        if any(len(set(gather.axes)) < len(gather.axes) for gather in gathers):
            # A diagonal of an index array is copied.
            most = max(most, 8 * math.prod(sizes[axis] for axis in term_axes(gathers)))
        if addressed > 1:
            flat = 8 * math.prod(sizes[axis] for axis in rows)
            positions = sum(sizes[axis] for axis in set(rows) & set(term))
            most = max(most, min(addressed, 3) * flat + 8 * positions + 8)
    return most


def runs_of(order: Sequence[str], terms: Sequence[Term], spec: Spec) -> tuple[list[int], bool]:
    """Return the lengths of the runs of an elementwise loop, and whether some term has the innermost run.

    A run is a sequence of axes that can be viewed as one: the same terms have all of them.

    Args:
        order: axes of the loop, the innermost last.
        terms: the inputs of a product, or the result of a sum.
        spec: the spec, for the sizes of the axes.
    """
    wide = [axis for axis in order if spec.size(axis) != 1]
    runs = [spec.size(axis) for axis in wide]
    held = [tuple(axis in term for term in terms) for axis in wide]
    for place in range(len(runs) - 1, 0, -1):
        if held[place - 1] == held[place]:
            runs[place - 1] *= runs.pop(place)
            held.pop(place)
    return runs, not held or any(held[-1])


def short_run_seconds(order: Sequence[str], terms: Sequence[Term], spec: Spec) -> float:
    """Return the seconds that an elementwise loop takes for short runs, as in a million products of (3, 1) by (1, 3).

    Args are those of `runs_of`.
    """
    runs, in_a_term = runs_of(order, terms, spec)
    if len(runs) < 2:
        return 0.0
    rows, run = math.prod(runs[:-1]), runs[-1]
    if not in_a_term:
        return rows * _SUM_SECONDS
    return math.prod(runs[:-2]) * _BLOCK_SECONDS + rows * (
        run * _ELEMENT_SECONDS if run <= _SHORT_RUN else _VECTORS_SECONDS
    )


def flat_stock_cost(op: Op, device: Device) -> StepCost:
    """Return the cost of the stock evaluation in torch, which takes by one flat index and copies what is not flat."""
    cost = stock_cost(op, device)
    kind, elements = stock_kind(op), joint_elements(op.spec)
    if kind == "matmul" and op.dtype == "bool":  # multiplied as int32
        wide = 4 * sum(math.prod(shape) for shape in (*op.input_shapes, *op.output_shapes))
        return cost._replace(scratch_bytes=cost.scratch_bytes + wide)
    if kind == "matmul" and device.kind == "cpu":
        form = product_form(op.spec)
        assert form is not None
        scattered = scattered_vectors(form, op.spec, op.layouts or (None, None))
        return cost._replace(picoseconds=cost.picoseconds + picoseconds(scattered * _SCATTERED_SECONDS))
    if kind in ("multiply", "sum") and device.kind == "cpu":
        order, terms = (op.spec.output, op.spec.inputs) if kind == "multiply" else (op.spec.inputs[0], [op.spec.output])
        if kind == "sum" and op.layouts and op.layouts[0]:  # the loop follows the memory order of the operand
            order = tuple(order[d] for run in op.layouts[0].runs for d in run)
        runs = short_run_seconds(term_axes(order), terms, op.spec)
        cost = cost._replace(picoseconds=cost.picoseconds + picoseconds(runs))
    if kind == "broadcast" and spec_flops(op.spec) == 0:  # a view; a step that needs it in memory pays
        return cost._replace(bytes_moved=0, picoseconds=picoseconds(device.launch_seconds))
    if isinstance(op, JointGradient) or kind in ("matmul", "multiply"):
        return cost
    if op.dtype in HALF_TYPES and kind in ("segment sum", "take, segment sum", "take, multiply, add"):
        # Half types are added up in float32: the terms and the sums need memory.
        cost = cost._replace(scratch_bytes=cost.scratch_bytes + 4 * (elements + math.prod(op.spec.output_shape)))
    copied = stock_layout(op)[0] * itemsize(op.dtype)
    seconds = device.moving_seconds(2 * copied) + device.fresh_seconds(copied)
    return cost._replace(
        bytes_moved=cost.bytes_moved + 2 * copied,
        copied_bytes=cost.copied_bytes + copied,
        scratch_bytes=cost.scratch_bytes + copied + _flat_index_bytes(op.spec),
        picoseconds=cost.picoseconds + (picoseconds(seconds) if copied else 0),
    )


def stock_cost(op: Op, device: Device) -> StepCost:
    """Return the cost of the stock evaluation of an op."""
    spec, size = op.spec, itemsize(op.dtype)
    kind = stock_kind(op)
    result = math.prod(spec.output_shape) * size
    touched = op.bytes_touched()
    if kind == "view":
        return StepCost(picoseconds=picoseconds(device.launch_seconds))
    if kind == "cast":
        return StepCost(0, touched, result, 0, picoseconds(device.seconds(0, touched, result, 1)))
    if kind in ("sum", "broadcast", "diagonal"):
        flops = spec_flops(spec) if kind == "sum" else 0
        return StepCost(flops, touched, 0, 0, picoseconds(device.seconds(0, touched, result, 1)))
    rows = _row_seconds(spec, device)
    if kind in ("take", "segment sum", "take, segment sum"):
        wide = joint_elements(spec) * size
        plain = wide == result and kind == "take"
        scratch = 0 if plain else wide if kind != "segment sum" else 0
        moved = touched if plain else touched + 2 * wide
        seconds = device.seconds(0, moved, result, 1) + device.fresh_seconds(scratch) + rows
        return StepCost(0 if plain else spec_flops(spec), moved, 0, scratch, picoseconds(seconds))
    if kind in ("matmul", "multiply"):
        return _product_cost(op, device, spec, result)
    # Both operands are taken, then multiplied, then added up by segment; each intermediate result is in memory.
    sizes = dict(spec.sizes)
    taken, axes_of = 0, []
    for term in spec.inputs:
        axes_of.append(term_axes(term))
        if term_gathers(term):
            taken += math.prod(sizes[axis] for axis in axes_of[-1]) * size
    needed = term_axes(spec.output)
    before = math.prod(sizes[axis] for axis in needed) * size
    scatter = before if term_gathers(spec.output) else 0
    flops, moved, scratch = spec_flops(spec), touched + 2 * taken + 2 * scatter, taken + scatter
    seconds = device.seconds(flops, moved, result, 4) + device.fresh_seconds(scratch) + rows
    batch = math.prod(sizes[a] for a in needed if all(a in axes for axes in axes_of))
    return StepCost(flops, moved, 0, scratch, picoseconds(seconds + batch * device.matrix_seconds))


def _product_cost(op: Op, device: Device, spec: Spec, result: int) -> StepCost:
    form = product_form(spec)
    assert form is not None
    size = itemsize(op.dtype)
    batch, m, n, k = form.sizes
    flops, moved = spec_flops(spec), op.bytes_touched()
    if not form.contracted:
        return StepCost(flops, moved, 0, 0, picoseconds(device.seconds(0, moved, result, 1)))
    copied = size * product_copies(form, spec, op.layouts or (None, None))
    # Copies are made before the product begins, so the times add up.
    seconds = (
        max(flops / device.product_rate(m, n, k, op.dtype), device.moving_seconds(moved))
        + device.moving_seconds(2 * copied)
        + device.fresh_seconds(copied)
        + device.fresh_seconds(result)
    )
    seconds += device.launch_seconds + (batch * device.matrix_seconds if batch > 1 else 0)
    return StepCost(flops, moved + 2 * copied, copied, copied, picoseconds(seconds))


def stock_rows(
    ops: ArrayOps,
    cast: Callable[[Any, str], Any],
    guard: Callable[..., tuple[Any, ...]],
    views: bool = True,
    skip: Sequence[str] = (),
    cost: Callable[[Op, Device], StepCost] = stock_cost,
    layouts: Callable[[Op], tuple[Layout | None, ...]] | None = None,
    empty: Callable[[tuple[int, ...], str, Any], Any] | None = None,
) -> list[Implementation]:
    """Return the rows that every backend starts from; between them they run every op.

    Args:
        ops: the framework's array functions.
        cast: converts an array to a dtype.
        guard: runs a `Guard`.
        views: whether permuted arrays and diagonals share storage with their input.
        skip: kinds for which the backend has other rows.
        cost: the cost of a step.
        layouts: the layouts of a step's results in memory; None if arrays have no strides.
        empty: returns an array of a shape and a dtype on the device of another, for loops to write into; None if the
            backend runs loops in a way of its own.
    """

    def run(op: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
        if isinstance(op, Cast):
            return (cast(inputs[0], op.dtype),)
        return (evaluate(ops, op.spec, inputs, index, getattr(index, "may_drop", True)),)

    asked: tuple[Op | None, str] = (None, "")

    def find_kind(op: Op) -> str:
        """Return the kind of an op. A table asks one row after the other about the same op: it is found once."""
        nonlocal asked
        last, kind = asked
        if op is not last:
            kind = stock_kind(op)
            asked = (op, kind)
        return kind

    def support(kind: str) -> Callable[[Op], str | None]:
        return lambda op: None if find_kind(op) == kind else f"the step is not a {kind}"

    def unmoved(op: Op) -> tuple[Layout | None, ...]:
        return op.layouts or (None,)

    rows = [
        Implementation(kind, support(kind), cost, run, is_view=views and kind == "view", stock=True, layouts=layouts)
        for kind in KINDS
        if kind not in skip
    ]
    # A guard returns its input, but for NaN and dropped indices: so no bytes and no time are predicted for it.
    free, no_guard = StepCost(), "the step is not a guard"
    guards = Implementation(
        MASK, lambda op: no_guard, lambda op, device: free, guard, is_view=True, stock=True, layouts=layouts and unmoved
    )
    no_loop, run_slices = "the step is not a loop", partial(run_loop, cast=cast, empty=empty)
    loops = Implementation(LOOP, lambda op: no_loop, loop_cost, run_slices, stock=True)
    return [*rows, guards, loops]
