"""The rows that every backend's table starts with: the stock evaluation, by kind of step, and its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from planner.backends.common.elementwise import scattered_read_seconds, short_run_seconds
from planner.backends.common.run import prepare_loop
from planner.backends.common.stock import SMALL_MATRIX, ArrayOps, count_views, evaluation, is_swapped
from planner.backends.common.stock_layout import matrix_copies, product_copies, scattered_vectors, stock_layout
from planner.cost.device import CACHED_SHARE, Device
from planner.cost.figures import StepCost, Work
from planner.cost.layout import Layout, flattens, in_memory, neighbours
from planner.language.cached import cached_by_step
from planner.language.dtypes import HALF_TYPES, itemsize
from planner.language.spec import Spec, Term, indexed_dims, plain_axes, row_axes, term_axes, term_gathers
from planner.program.calls import PreparedRun, Run
from planner.program.forms import ProductForm, known_product, product_form, product_of_rows
from planner.program.guards import dropping_bytes
from planner.program.implementations import LOOP, MASK, Implementation
from planner.program.loops import loop_cost
from planner.program.ops import Cast, JointGradient, Op, joint_elements

# Torch multiplies the elements of small matrices of a batch in a loop of its own, without a call for each matrix:
# 0.6 to 1.0 ns for 3 x 3 by 3 to 16 x 16 by 16, whether 64 matrices or 16,384, and for 8 x 3 by 3 x 16, where the
# smallest matrices that it calls for take 0.1 us (AMD EPYC, torch 2.13, 2026-11-27).
_SMALL_SECONDS = 0.9e-9
# Of small matrices times vectors each term takes so long, and so much is added for each sum: of rows that lie as rows,
# and as columns. 2 x 2 to 19 x 20 took 0.5 to 2.5 ns a term as rows, and 1.2 to 3.1 as columns (AMD EPYC 7003,
# torch 2.13, 2026-11-29).
_AS_ROWS, _AS_COLUMNS = (0.45e-9, 2.7e-9), (1.1e-9, 3.6e-9)
# MKL multiplies many rows by at most so many columns slowly if the rows lie as columns in memory. From 128 rows on it
# takes so many seconds more for each of their elements whenever the rows double: 0.5 ns for 512 rows, 1.2 for 2,048.
# Where the columns lie as rows, too, it does so for every four columns and each column that is left (one core of an AMD
# EPYC, torch 2.13, 2026-11-28). From 4,096 rows on that does not grow. Sums of fewer than 16 terms take no longer.
MOST_FEW, TRANSPOSED_DTYPES = 15, ("float32", "float64")
_ROWS_SECONDS, _MOST_DOUBLED, _LEAST_TERMS = 0.3e-9, 5.0, 16
# Without classes the rate is that of few columns; few rows, and vectors, are so many times as fast.
_TIMES_AS_FAST = 3
# Seconds for each element of a take along another dimension than the first: 2.0 were measured for `oe[bt] -> bto`, and
# 1.4 for `bhir[ij] -> bhij` (AMD EPYC, torch 2.13, 2026-11-25).
_STRIDED_SECONDS = 2e-9
# How many operators, as to their time, a view takes in torch; a product by element that is not contiguous, which
# allocates its result first, takes besides; and so do a take and a segment sum of rows: 1.4, 1.3, 3.5 and 6.5 us if a
# product of contiguous operands takes 1.8 to 2.4 (AMD EPYC, torch 2.13, 2026-11-25).
VIEW_LAUNCHES, SCATTERED_LAUNCHES, TAKE_LAUNCHES, ADD_LAUNCHES = 0.8, 0.7, 1.5, 2.8
# How many operators, as to their time, it takes torch to make one flat index for several dimensions: 6 us were measured
# for `nikq[n] -> nik`, which takes 2 us more. AMD EPYC, torch 2.13, 2026-11-25.
_FLAT_LAUNCHES = 2.5


@cached_by_step
def stock_kind(op: Op) -> str:
    """Name the stock row that runs an op."""
    spec = op.spec
    if isinstance(op, JointGradient):
        return "none"
    if isinstance(op, Cast):
        return "fused cast" if op.fused else "cast"
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
    if not set(term) <= set(out):
        return "sum"
    return "view" if set(out) == set(term) else "broadcast"


KINDS = ("view", "cast", "fused cast", "sum", "broadcast", "diagonal", "take", "segment sum", "take, segment sum",
         "matmul", "multiply", "multiply, sum", "take, multiply, add")  # fmt: skip


def _count_rows(spec: Spec) -> tuple[int, int]:
    """Return how many rows a step takes, and how many it adds up. Adding rows of one element is like taking them."""
    taken = added = 0
    for number, term in enumerate(spec.terms):
        if gathers := term_gathers(term):
            rows = term_axes(gathers)
            count = math.prod(spec.shape(rows))
            width = math.prod(spec.shape(tuple(axis for axis in plain_axes(term) if axis not in rows)))
            if number == len(spec.inputs) and width > 1:
                added = count
            else:
                taken += count
    return taken, added


def flat_index_bytes(spec: Spec) -> int:
    """Return the bytes of the flat index that a term needs if it addresses several dimensions at once.

    The flat index is built dimension by dimension: the index so far is multiplied by the dimension's size, and the
    dimension's index is added. At most three arrays exist at once. An axis needs an array of its positions.
    """
    sizes, most = spec.by_axis, 0
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


def flat_stock_work(op: Op, device: Device) -> list[Work]:
    """Return what the stock evaluation does in torch, which takes by one flat index and copies what is not flat."""
    parts, kind, spec = stock_work(op, device), stock_kind(op), op.spec
    if kind == "broadcast":  # a view; a step that needs it in memory pays
        return [Work(launches=1)]
    if kind == "matmul" and op.dtype == "bool" and device.kind != "cuda":  # multiplied as int32
        return [*parts, Work(scratch=4 * sum(spec.elements))]
    if kind in ("matmul", "multiply") and device.kind == "cpu":
        form, layouts = known_product(spec), op.layouts or (None, None)
        batch, m, n, k = form.sizes
        if kind == "matmul":
            parts[-1:] = _sides_work(parts[-1], form, op, device)
        vectors, number = has_small_vectors(form), int(m == 1)  # the number of the matrices, if they have vectors
        if kind == "matmul" and vectors and not device.products:
            parts[-1] = parts[-1]._replace(matrices=0)
            term, layout = spec.inputs[number], layouts[number]
            lie_as_rows = neighbours(term, layout, spec) in form.contracted
            lie_as_rows = lie_as_rows or not flattens(term, layout, form.matrices[number], spec)  # a copy makes rows
            for_term, for_sum = _AS_ROWS if lie_as_rows else _AS_COLUMNS
            parts.append(Work(seconds=batch * m * n * (k * for_term + for_sum)))
        elif kind == "matmul":
            parts.append(Work(seconds=small_matrix_seconds(form, device)))
        if launches := _view_launches(form, spec, layouts):
            parts.append(Work(launches=launches))
        if kind == "matmul" and any(apart := scattered_vectors(form, spec, layouts)):
            # `product_copies` already counts a part of these copies: only the rest is added.
            counted = product_copies(form, spec, layouts)
            rest = sum(max(0, n - copied) for n, copied in zip(apart, counted, strict=True))
            parts.append(Work.of_copies(rest * itemsize(op.dtype)))
        if kind == "matmul":
            copies = [copy_loops_seconds(each, form, op, device, vectors and each == number) for each in (0, 1)]
            parts.append(Work(seconds=sum(copies)))
    layouts = op.layouts or ()
    if kind == "multiply" and device.kind == "cpu":
        alike = len({*spec.inputs}) == 1 and not any(layouts)  # the result lies as both operands do
        order = term_axes(spec.inputs[0] if alike else spec.output)
        parts.append(Work(seconds=short_run_seconds(order, spec.inputs, spec, device, layouts)))
    if kind == "sum" and device.kind == "cpu":
        # The loop follows the memory order of the operand.
        term = in_memory(spec.inputs[0], layouts[0] if layouts else None)
        parts.append(Work(launches=1, seconds=short_run_seconds(term_axes(term), [spec.output], spec, device)))
    if kind in ("matmul", "multiply"):
        return parts
    if kind in ("segment sum", "take, segment sum") and device.kind == "cpu" and parts[-1].moved <= device.cache_bytes:
        parts[-1] = parts[-1]._replace(added=CACHED_SHARE * parts[-1].added)
    if kind == "take, multiply, add" and device.kind == "cpu":
        parts[-1] = parts[-1]._replace(rate=_rate_of_rows(op, device))
    flat = sum(len(indexed_dims(term)) > 1 for term in spec.terms)
    more = _row_launches(spec) if device.kind == "cpu" else 0.0
    inner = any(indexed_dims(term) not in ((), tuple(range(len(indexed_dims(term))))) for term in spec.inputs)
    scattered = joint_elements(spec) * _STRIDED_SECONDS if inner and device.kind == "cpu" else 0.0
    parts.append(Work(launches=_FLAT_LAUNCHES * flat + more, seconds=scattered))
    scratch = flat_index_bytes(spec)
    if op.dtype in HALF_TYPES and kind in ("segment sum", "take, segment sum", "take, multiply, add"):
        # Half types are added up in float32: the terms and the sums need memory.
        scratch += 4 * (joint_elements(spec) + math.prod(spec.output_shape))
    return [*parts, Work.of_copies(stock_layout(op)[0] * itemsize(op.dtype), scratch)]


def copy_loops_seconds(number: int, form: ProductForm, op: Op, device: Device, in_order: bool = False) -> float:
    """Return what the copy of a product's operand takes beyond moving it: for short runs, and for strided ones.

    The copy ends with the `inner_group`. With `in_order` the groups go in the order of the matrix.
    """
    spec = op.spec
    term, layout = spec.inputs[number], (op.layouts or (None, None))[number]
    if not (elements := spec.elements[number]) or matrix_copies(term, layout, form.matrices[number], spec) < elements:
        return 0.0
    batch, *groups = form.matrices[number]
    if not in_order:
        inner = inner_group((batch, *groups), term, layout, spec)
        groups.sort(key=lambda group: group == inner)
    order = [axis for group in (batch, *groups) for axis in group]
    seconds = short_run_seconds(order, [term], spec, device, [layout])
    return seconds + scattered_read_seconds(order, term, layout, spec, itemsize(op.dtype), device)


def inner_group(groups: Sequence[Term], term: Term, layout: Layout | None, spec: Spec) -> Term:
    """Return the group of a matrix's axes that a copy of it should have innermost: rows or columns.

    Its last axis lies further inside in memory than that of the other group. So the copy reads in the shortest strides.
    Of 64 x 32 x 16 floats the copy in the order (2, 0, 1) took 21 us, and 67 in the order (1, 2, 0) (one core of an AMD
    EPYC with AVX-512, torch 2.13, 2026-11-30).

    Args:
        groups: the batch, the rows and the columns.
        term: the axes of the array.
        layout: how they lie in memory.
        spec: the sizes.
    """
    lies = in_memory(term, layout)

    def place(group: Term) -> int:
        return max([lies.index(axis) for axis in group if axis in spec.wide and axis in lies][-1:], default=-1)

    return max(groups[1:], key=place)


def has_small_vectors(form: ProductForm) -> bool:
    """Whether a product is a batch of small matrices times vectors, which are faster if rows lie as rows."""
    batch, m, n, k = form.sizes
    return batch > 1 and 1 in (m, n) and m * n * k < SMALL_MATRIX


def row_operand(form: ProductForm, spec: Spec) -> int:
    """Return the number of the operand that is the first factor of `matmul_product`: its rows are the product's."""
    return int(is_swapped(form, spec))


def has_few_columns(rows: int, columns: int) -> bool:
    """Whether a product has few columns, and many rows."""
    return 0 < columns <= MOST_FEW and rows >= 4 * columns


def _sides_work(work: Work, form: ProductForm, op: Op, device: Device) -> list[Work]:
    """Return what a product takes, from what it takes by the rate of its sides, if it has few columns.

    The transpose of the product takes what the rate of few rows says. If the rows lie as columns in memory, and no
    classes of products were measured, the two rates are equal; then the product counts twice as long.
    """
    batch, rows, columns, terms = form.sizes
    number = row_operand(form, op.spec)
    if number == 1:
        rows, columns = columns, rows
    if rows * columns * terms < SMALL_MATRIX or not has_few_columns(rows, columns):
        return [work]
    rate_of_transpose = device.product_rate(columns, rows, terms, op.dtype, batch)
    if columns == 1:  # batches of vectors are the first factors
        return [work._replace(rate=rate_of_transpose)] if batch > 1 else [work]
    if op.dtype not in TRANSPOSED_DTYPES:
        return [work]
    layouts = op.layouts or (None, None)
    innermost = [neighbours(term, layout, op.spec) for term, layout in zip(op.spec.inputs, layouts, strict=True)]
    if innermost[number] not in (form.left, form.right)[number]:
        dots = terms >= _LEAST_TERMS and all(entry in form.contracted for entry in innermost)
        return [work._replace(rate=max(work.rate, rate_of_transpose))] if dots else [work]
    seconds = 0.0 if device.products else work.flops / work.rate
    if terms >= _LEAST_TERMS and rows > 128:
        turns = columns // 4 + columns % 4 if innermost[1 - number] in form.contracted else 1
        doubled = min(_MOST_DOUBLED, math.log2(rows / 128))
        seconds = max(seconds, batch * rows * terms * turns * doubled * _ROWS_SECONDS)
    return [work, Work(seconds=seconds)]


def _rate_of_rows(op: Op, device: Device) -> float:
    """Return the FLOP/s of the product within a product with rows."""
    inner = product_of_rows(op.spec)
    form = known_product(inner)
    batch, rows, columns, terms = form.sizes
    if is_swapped(form, inner):
        rows, columns = columns, rows
    if not form.contracted:
        return device.flop_rate
    if device.products or 1 < columns < rows:
        return device.product_rate(rows, columns, terms, op.dtype, batch)
    # `skinny_rate` is that of few columns. Few rows, and vectors, which are the first factors, are faster.
    return min(device.flop_rate, _TIMES_AS_FAST * device.product_rate(rows, columns, terms, op.dtype, batch))


def small_matrix_seconds(form: ProductForm, device: Device) -> float:
    """Return what torch's loop over the elements of small matrices takes beyond `matrix_seconds` for each matrix."""
    batch, m, n, k = form.sizes
    if batch == 1 or m * n * k >= SMALL_MATRIX or device.products:
        return 0.0
    return batch * max(0.0, m * n * k * _SMALL_SECONDS - device.matrix_seconds)


def _row_launches(spec: Spec) -> float:
    """Return how many operators more, as to their time, torch takes to read and write rows through index arrays."""
    launches = 0.0
    for number, term in enumerate(spec.terms):
        if term_gathers(term):
            indexed = indexed_dims(term)
            views = 2 * (len(row_axes(term)) > 1) + (indexed != tuple(range(len(indexed))))
            launches += (ADD_LAUNCHES if number == len(spec.inputs) else TAKE_LAUNCHES) + VIEW_LAUNCHES * views
    return launches + 2 * VIEW_LAUNCHES * (launches > 0 and len(spec.inputs) == 2)


def _view_launches(form: ProductForm, spec: Spec, layouts: tuple[Layout | None, ...]) -> float:
    """Return how many operators, as to their time, torch's views and copies of the operands of a product take."""
    views = count_views(form, spec)
    if not form.contracted:
        return VIEW_LAUNCHES * views + SCATTERED_LAUNCHES * (views > 0)
    if not form.batch and len(form.left) == len(form.right) == len(form.contracted) == 1:  # two matrices
        return 0.0
    return VIEW_LAUNCHES * views + sum([copied > 0 for copied in product_copies(form, spec, layouts)])


def stock_work(op: Op, device: Device) -> list[Work]:
    """Return what the stock evaluation of an op does."""
    spec, size, kind = op.spec, itemsize(op.dtype), stock_kind(op)
    if kind == "view":
        return [Work(launches=1)]
    if kind == "fused cast":
        return [Work()]
    result, touched = op.result_bytes(), op.bytes_touched()
    work = Work(moved=touched, fresh=(result,), launches=1)
    if kind in ("cast", "broadcast", "diagonal"):
        return [work._replace(copied=result if kind == "cast" else 0)]
    if kind == "take" and joint_elements(spec) * size == result:
        return [work._replace(taken=_count_rows(spec)[0])]
    if kind == "matmul":
        form = known_product(spec)
        batch, m, n, k = form.sizes
        rows, columns = (n, m) if is_swapped(form, spec) else (m, n)
        rate = device.product_rate(rows, columns, k, op.dtype, batch)
        matrices = device.matrices(batch)
        moving = device.packing_seconds(touched) if device.outer_cache_bytes else None
        product = Work(op.flops(), rate, touched, fresh=(result,), launches=1, matrices=matrices, seconds=moving)
        copied = sum(product_copies(form, spec, op.layouts or (None, None)))
        # Copies are made before the product begins, so the times add up.
        return [Work.of_copies(size * copied), product] if copied else [product]
    work = work._replace(flops=op.flops())
    if kind in ("sum", "multiply"):
        return [work]
    taken, added = _count_rows(spec)
    work = work._replace(taken=taken, added=added)
    if kind in ("take", "segment sum", "take, segment sum"):
        wide = joint_elements(spec) * size
        scratch = wide if kind != "segment sum" else 0
        return [work._replace(moved=touched + 2 * wide, scratch=scratch, fresh=(result, scratch))]
    axes_of = [set(term_axes(term)) for term in spec.inputs]
    batch = math.prod(spec.shape(tuple(axis for axis in term_axes(spec.output) if all(axis in s for s in axes_of))))
    return [_multiply_rows(op, device)._replace(matrices=batch, taken=taken, added=added)]


def _multiply_rows(op: Op, device: Device) -> Work:
    """Return what a product with brackets does, but for what each row and each matrix takes.

    Both operands are taken, then multiplied, then added up by segment; each intermediate result is in memory.
    """
    shapes = [op.spec.shape(term_axes(term)) for term in op.spec.terms if term_gathers(term)]
    scratch = itemsize(op.dtype) * sum(map(math.prod, shapes))
    moved, fresh = op.bytes_touched() + 2 * scratch, (op.result_bytes(), scratch)
    return Work(op.flops(), device.flop_rate, moved, scratch=scratch, fresh=fresh, launches=4)


def _least_of_rows(op: Op, device: Device) -> StepCost:
    """Return a cost that no product with brackets is below."""
    return device.price(_multiply_rows(op, device)) if op.gathers and len(op.spec.inputs) == 2 else StepCost()


def stock_rows(
    ops: ArrayOps,
    cast: Callable[[Any, str], Any],
    guard: Callable[..., tuple[Any, ...]],
    views: bool = True,
    work: Callable[[Op, Device], list[Work]] = stock_work,
    layouts: Callable[[Op], tuple[Layout | None, ...]] | None = None,
    empty: Callable[[tuple[int, ...], str, Any], Any] | None = None,
) -> list[Implementation]:
    """Return the rows that every backend starts from; between them they run every op.

    Args:
        ops: the framework's array functions.
        cast: converts an array to a dtype.
        guard: runs a `Guard`.
        views: whether permuted arrays and diagonals share storage with their input.
        work: what a step does.
        layouts: the layouts of a step's results in memory; None if arrays have no strides.
        empty: returns an array of a shape and a dtype on the device of another, for loops to write into; None if the
            backend runs loops in a way of its own.
    """

    def prepare(op: Op) -> Run:
        if isinstance(op, Cast):
            return lambda inputs, index: (cast(inputs[0], op.dtype),)
        compute = evaluation(ops, op.spec)
        if not op.spec.gathers:
            return lambda inputs, index: (compute(inputs, index, False),)
        return lambda inputs, index: (compute(inputs, index, getattr(index, "may_drop", True)),)

    def cost(op: Op, device: Device) -> StepCost:
        return device.price(*work(op, device))

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
        refusal = f"the step is not a {kind}"
        return lambda op: None if find_kind(op) == kind else refusal

    def unmoved(op: Op) -> tuple[Layout | None, ...]:
        return op.layouts or (None,)

    run = PreparedRun(prepare, any_sizes=True)
    rows = [
        Implementation(
            kind,
            support(kind),
            cost,
            run,
            is_view=(views and kind in ("view", "broadcast")) or kind == "fused cast",
            stock=True,
            layouts=layouts,
            bounded=True,
            inputs=2 if kind in ("matmul", "multiply", "multiply, sum", "take, multiply, add") else 1,
            guarded_scratch=lambda op, drops: dropping_bytes(op) if drops else 0,
            least=_least_of_rows if kind == "take, multiply, add" else None,
        )
        for kind in KINDS
    ]
    # A guard returns its input, but for NaN and dropped indices: so no bytes and no time are predicted for it.
    free, no_guard = StepCost(), "the step is not a guard"
    guards = Implementation(
        MASK,
        lambda op: no_guard,
        lambda op, device: free,
        PreparedRun(lambda op: partial(guard, op), any_sizes=True),
        is_view=True,
        stock=True,
        layouts=layouts and unmoved,
        bounded=True,
    )
    no_loop, run_slices = "the step is not a loop", PreparedRun(partial(prepare_loop, cast=cast, empty=empty))
    loops = Implementation(LOOP, lambda op: no_loop, loop_cost, run_slices, stock=True, bounded=True)
    return [*rows, guards, loops]
