"""Steps that run piece by piece: the row of products of taken rows on a card, and costs of grouped products in tiles.

Grouped products move rows into tiles, in Pallas kernels, or in XLA's own operations on a card.

On a card only one problem was timed (docs/benchmarks/h200.md), and nothing has run on a TPU, so times are estimates.
Memory on a TPU is bounded by what XLA's compiler for a v5e allocates; it keeps arrays of a few megabytes in vector
memory instead. Memory of Pallas kernels on a GPU is the sum of the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from planner.backends.common.stock import evaluate
from planner.backends.common.stock_rows import stock_kind, stock_work
from planner.backends.jax.ops import OPS
from planner.cost.device import GPU, Device
from planner.cost.figures import Work
from planner.kernels.grouped_matmul import jax_grouped, jax_tilings
from planner.kernels.grouped_matmul.pallas_tiles import TPU, Shape
from planner.kernels.grouping import jax_grouping
from planner.kernels.grouping.jax_grouping import most_tiles
from planner.language.dtypes import accumulator, itemsize
from planner.language.spec import Gather, Spec, Term, plain_axes, term_gathers
from planner.program.calls import RangedIndices
from planner.program.forms import GroupedForm
from planner.program.implementations import Implementation, form_row
from planner.program.ops import Einsum, JointGradient, Op

# Kernels that sort rows and cut tiles, kernels of a step of the loop, and what XLA takes to start a kernel within a
# program, as a part of the time of an operator (estimates).
_TABLE_KERNELS, _STEP_KERNELS, _LAUNCH_PART = 20, 8, 0.3
# Bytes of all arrays of a piece of rows, and its kernels: two takes, a product, a sum by index, and slices.
_PIECE_BYTES, _PIECE_KERNELS = 2 * jax_tilings.CARD_STEP_BYTES, 5
# Bytes that a radix sort moves for each key of 32 bits: four passes, each of which reads twice and writes once.
_SORTED_BYTES = 48


def _function(op: Op, form: GroupedForm) -> str:
    """Return which function of `planner.kernels.grouped_matmul` computes a step, without "grouped_"."""
    return "gradients" if isinstance(op, JointGradient) else "outer" if form.outer else "matmul"


def loop_scratch(op: Op, form: GroupedForm, tiling_of: jax_tilings.TilingOf) -> int:
    """Return the bytes that a step in a loop over tiles holds besides its results."""
    n, _, g, _, _ = form.sizes
    loop = jax_grouped.scratch_bytes(_function(op, form), form.sizes, op.dtype, form.targets, tiling_of)
    # Besides the sorted order: a map of rows for each operand or result that has only some of the row axes.
    return 4 * (n + g + 1) + 8 * n * form.maps + max(jax_grouping.scratch_bytes(n, g), loop)


def card_work(op: Op, form: GroupedForm, device: Device, copied: int) -> list[Work]:
    """Return the work of a step in `jax_grouped.CARD`: what is sorted, and what the steps of its loop move and compute.

    Args:
        op: the step.
        form: its axes by group, as the kernels see them.
        device: the rates of the card.
        copied: bytes that are copied before and after the loop.
    """
    (n, i, _, j, k), size, pair = form.sizes, itemsize(op.dtype), isinstance(op, JointGradient)
    exact = max(size, 4)
    tile = jax_tilings.card_tiling(form.sizes, size)
    tiles = (tile.steps or 0) * tile.tiles
    lanes = tiles * tile.rows * i
    # Rows and matrices are taken, then read; the products are written in the type of the sums, then read.
    rows_in, rows_out, matrices = lanes * j, lanes * k, tiles * j * k
    if pair:
        moved = 2 * size * (rows_in + rows_out + matrices) + 2 * exact * (rows_in + matrices) + size * rows_out
    elif form.outer:
        moved = 2 * size * (rows_in + rows_out) + 3 * exact * matrices
    else:
        moved = 2 * size * (rows_in + matrices) + 2 * exact * rows_out
    rate = device.product_rate(tile.rows * i, j, k, op.dtype)
    flops = op.products * 2 * lanes * j * k
    padded = max(1.0, flops / max(1, op.flops()))
    launches = _LAUNCH_PART * (_TABLE_KERNELS + _STEP_KERNELS * (tile.steps or 0) * (1.5 if pair else 1))
    scratch = loop_scratch(op, form, jax_tilings.card_tiling)
    return [
        # In JAX the sort is part of the program, whether the caller prepared the index array or not.
        Work(op.flops(), rate / padded, op.bytes_touched() + moved + _SORTED_BYTES * n, 0, scratch, launches=launches),
        Work(moved=2 * copied, copied=copied, scratch=copied),
    ]


def tiled_work(
    op: Op, form: GroupedForm, shape: Shape, device: Device, copied: int, turned: bool = False
) -> list[Work]:
    """Return the work of a step that a platform's kernels run.

    Args:
        op: the step.
        form: its axes by group, as the kernels see them.
        shape: the shape of the platform's tiles.
        device: the rates of the device.
        copied: bytes that are copied before and after the kernels.
        turned: whether the columns of the matrices come before their rows.
    """
    (n, i, g, j, k), size, pair = form.sizes, itemsize(op.dtype), isinstance(op, JointGradient)
    sums = pair or form.outer
    each = shape.rows(n, i, g, size)
    tiles = most_tiles(n, each, g, sums and shape.empty)
    if sums:
        what = "pair" if pair else "outer"
    elif form.targets is not None:
        what = "summed"
    else:
        what = "product" if form.maps or not shape.is_tile(n, i, size) else "direct"
    if shape is TPU:
        held = _tpu_bytes(what, form, tiles * each, size)
    else:
        held = _gpu_bytes(what, form, tiles * each, size, turned)
        if turned and not sums:
            copied += g * j * k * size
    sort = max(jax_grouping.scratch_bytes(n, g), 16 * tiles * each + 4 * n)
    tables = 4 * (n + g + 1) + 8 * n * form.maps + sort + _padded_bytes(1, tiles, each, 4)
    moved = op.bytes_touched() + 2 * copied
    if what != "direct":
        moved += 2 * tiles * each * i * (j + k + (op.products - 1) * j) * size
    rate = device.product_rate(*form.sides, dtype=op.dtype)
    return [Work(op.flops(), rate, moved, copied, tables + held + copied, launches=20, sorted=n)]


def _tpu_bytes(what: str, form: GroupedForm, slots: int, size: int) -> int:
    """Return the bytes that a TPU's kernels hold at once, besides their tables.

    Outside of kernels arrays have no padding. An array that a kernel needs padded to whole registers is copied before
    the kernel, or after it. Rows are taken and then masked with zeros, in a second array; so are results.
    """
    n, i, g, j, k = form.sizes
    shapes = (n, i, j), (n, i, k), (g, j, k)
    a, b, c = (_padded_bytes(*x, size) for x in shapes)
    copy_a, copy_b, copy_c = (
        whole if whole > math.prod(x) * size else 0 for whole, x in zip((a, b, c), shapes, strict=True)
    )
    tiles_a = _padded_bytes(slots, i, j, size)
    tiles_b = _padded_bytes(slots, i, k, 4 if what == "summed" else size)
    if what == "pair":
        return max(2 * (tiles_a + tiles_b) + copy_a + copy_b, 3 * tiles_a + tiles_b + a + copy_a) + copy_c
    if what == "outer":
        return 2 * (tiles_a + tiles_b) + max(copy_a + copy_b, copy_c)
    if what == "direct":
        return copy_a + copy_b + copy_c
    last = 2 * _padded_bytes(form.targets or 0, i, k, 4) if what == "summed" else b + copy_b
    return max(copy_a + 2 * tiles_a, tiles_a + tiles_b + copy_c, 2 * tiles_b + last)


def _padded_bytes(rows: int, inner: int, columns: int, size: int) -> int:
    """Return the bytes of `(rows, inner, columns)` padded for a TPU's registers.

    A register is 128 columns wide, and has 8 rows of 4 bytes, or as many rows as the next power of 2 if that is fewer.
    """
    high = min(32 // size, 1 << (inner - 1).bit_length())
    return rows * (-(-inner // high) * high) * (-(-columns // 128) * 128) * size


def _gpu_bytes(what: str, form: GroupedForm, slots: int, size: int, turned: bool) -> int:
    """Return the bytes that a GPU's kernels hold at once, besides their tables and a copy of turned matrices.

    Columns, and the rows of matrices, are padded with zeros to multiples of 64, in a copy if they are not multiples
    already. Gradients transpose the matrices, unless they are turned, and sums transpose their first factor: the rows,
    or the results if the matrices are turned. Tiles are counted twice: once as taken, and once as padded.
    """
    n, i, g, j, k = form.sizes
    wide_j, wide_k = (-(-x // 64) * 64 for x in (j, k))
    matrices = g * wide_j * wide_k * size
    copy_c = matrices if what == "pair" or (wide_j, wide_k) != (j, k) else 0
    if what == "direct":
        return n * i * (wide_j + wide_k) * size + copy_c
    tiles_a, tiles_b = slots * i * wide_j * size, slots * i * wide_k * (4 if what == "summed" else size)
    transposed = tiles_b if turned else tiles_a
    if what == "pair":
        return 3 * tiles_a + 2 * tiles_b + transposed + copy_c + matrices
    if what == "outer":
        return 2 * tiles_a + 2 * tiles_b + transposed + matrices
    return max(2 * tiles_a, tiles_a + tiles_b + copy_c, 2 * tiles_b) + 4 * (form.targets or 0) * i * k


class Pieces(NamedTuple):
    """A product of rows that index arrays take, in pieces along an axis that is in all of their brackets.

    Attributes:
        axis: the axis.
        steps: number of pieces, besides a shorter one at the end.
        target: the bracket of the output, in which all pieces are added up; None if they are written side by side.
    """

    axis: str
    steps: int
    target: Gather | None


def in_pieces() -> Implementation:
    """Return the row of such products on a card: stock steps hold all rows in memory, and this one those of a piece."""
    name = "take, multiply, add in pieces"
    return form_row(name, _find_pieces, _pieces_work, _run_pieces, kinds=("cuda",), brackets=3)


def _find_pieces(op: Op) -> Pieces | str:
    if not isinstance(op, Einsum) or stock_kind(op) != "take, multiply, add" or op.dtype == "bool":
        return "the step takes no rows that it multiplies"
    spec, plain = op.spec, plain_axes(op.spec.output)
    brackets = [gather for term in spec.terms for gather in term_gathers(term)]
    target = next(iter(term_gathers(spec.output)), None)
    for place in (*spec.terms, *(gather.axes for gather in brackets)):
        if len(set(place)) < len(place) or len(term_gathers(place)) > 1:
            return "an axis stands twice in a term or in a bracket, or a term has two brackets"
    # Pieces along an axis of the output are written. Others are added up, by an index that has no axis of the output.
    adds = target is not None and not set(target.axes) & set(plain)
    axes = [e for e in brackets[0].axes if all(e in gather.axes for gather in brackets) and (adds or e in plain)]
    if not axes:
        return "no axis is in all brackets"
    axis = max(axes, key=spec.size)
    touched, rows = op.bytes_touched(), _row_bytes(op)
    steps = min(spec.size(axis), -(-rows // max(_PIECE_BYTES, touched // jax_tilings.CARD_STEP_PART)))
    return Pieces(axis, steps, target if adds else None) if steps > 1 else "all rows fit into one piece"


def _row_bytes(op: Op) -> int:
    """Return the bytes of all rows that are taken, and of those that are added up."""
    return sum(part.scratch for part in stock_work(op, GPU))


def on_card(part: Work, device: Device) -> Work:
    """Return some work as XLA does it on a card. The device's rates of rows and small matrices are torch's.

    Estimates: XLA takes a row by one more sector of 32 bytes, and reads and writes one to add a row.
    """
    if not (part.taken or part.added or part.matrices):
        return part
    moving = device.moving_seconds(part.moved + 32 * part.taken + 64 * part.added)
    return part._replace(taken=0, added=0, matrices=0, seconds=moving)


def _pieces_work(op: Op, form: Pieces, device: Device) -> list[Work]:
    (stock,), rows = stock_work(op, device), _row_bytes(op)
    sums = op.result_bytes() * (accumulator(op.dtype) != op.dtype)
    # A piece that was just written is read from the card's cache of 40 MB or more.
    pieces = stock._replace(
        moved=op.bytes_touched() + rows + 2 * sums,
        scratch=-(-rows // form.steps) + sums,
        fresh=(),
        launches=_LAUNCH_PART * _PIECE_KERNELS * form.steps,
    )
    return [on_card(pieces, device)]


def _run_pieces(op: Op, form: Pieces, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    spec, (axis, steps, target) = op.spec, form
    width, rest = divmod(spec.size(axis), steps)
    out_term: Term = spec.output
    if target is not None:  # its rows come first here
        out_term = (target, *plain_axes(spec.output))
    arrays = {gather: index[gather] for gather in op.gathers}

    def add_piece(start: Any, width: int, out: Any) -> Any:
        def cut(x: Any, term: Term) -> Any:
            return lax.dynamic_slice_in_dim(x, start, width, term.index(axis)) if axis in term else x

        sizes = tuple((name, width if name == axis else size) for name, size in spec.sizes)
        rows = RangedIndices(index.may_drop, {gather: cut(q, gather.axes) for gather, q in arrays.items()})
        written = (*target.axes, *out_term[1:]) if target is not None else out_term
        piece = evaluate(
            OPS, Spec(spec.inputs, written, sizes), list(map(cut, inputs, spec.inputs)), rows, index.may_drop
        )
        piece = piece.astype(out.dtype)
        if target is None:
            return lax.dynamic_update_slice_in_dim(out, piece, start, out_term.index(axis))
        return out.at[rows[target]].add(piece, mode="drop", wrap_negative_indices=False)

    dtype = op.dtype if target is None else accumulator(op.dtype)
    out = jnp.zeros(spec.shape(out_term), dtype)
    out = lax.fori_loop(0, steps, lambda number, out: add_piece(jnp.int32(number) * width, width, out), out)
    if rest:
        out = add_piece(jnp.int32(steps * width), rest, out)
    order = [out_term.index(entry) for entry in spec.output]
    return (out.transpose(order).astype(op.dtype),)
