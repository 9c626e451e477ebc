"""The JAX backend's table: stock rows through XLA, and the rows that run the grouped and pooled kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from planner.backends.common.kernel_rows import (
    POOL_FUNCTIONS,
    WHOLE_POOL,
    Kernels,
    PoolKernels,
    flattened_bytes,
    is_turned,
    kernel_rows,
    pool_function,
    views_of,
)
from planner.backends.common.stock import Product
from planner.backends.common.stock_layout import matrix_copies
from planner.backends.common.stock_rows import stock_kind, stock_rows, stock_work
from planner.backends.jax.compiled.arrangement import (
    count_gathered,
    count_reordered,
    factors,
    is_folded,
    permuted,
)
from planner.backends.jax.guards import run_guard
from planner.backends.jax.ops import OPS
from planner.backends.jax.products import (
    MANY_MATRICES,
    as_dot,
    count_copied,
    count_short_outer,
    count_taken_apart,
    fused_takes,
    inner_strides,
    is_narrow,
    join_axes,
    multiplies_fast,
    multiply_and_add,
    multiply_flat,
    multiply_permuted,
    product_within,
    short_runs,
)
from planner.backends.jax.tiled import card_work, in_pieces, loop_scratch, on_card, tiled_work
from planner.cost.device import Device
from planner.cost.figures import Work
from planner.kernels.gathered_dot import jax_pooled
from planner.kernels.grouped_matmul import jax_grouped, jax_tilings, pallas_tiles
from planner.kernels.grouping import jax_grouping
from planner.language.dtypes import HALF_TYPES, is_inexact, itemsize
from planner.language.spec import Spec, term_gathers
from planner.program.forms import GroupedForm, PooledForm, ProductForm, grouped_form, known_product, product_form
from planner.program.implementations import Implementation, Table, form_row
from planner.program.ops import Einsum, JointGradient, Op, joint_elements

# Implementations that are JAX's own operations, of which JAX keeps for gradients what the plan says: the operands of
# products, and nothing of others.
PLAIN = ("matmul", "multiply", "sum", "view", "broadcast")
# Rows that take less time than JAX's own product.
PERMUTED = "matmul, then permute"
FASTER = (PERMUTED, "multiply and add")


# On a CPU XLA multiplies at about `flop_rate * s / (s + this)`, s being the least side: 16, 32, 64 and 128 rows by 1024
# terms and 512 columns ran at 28 to 39, 43 to 54, 58 to 79 and 70 to 129 GFLOP/s, by the preset 37, 55, 73 and 88
# (2 cores of an Intel Xeon at 2.8 GHz, JAX 0.10.2, 2026-11-22).
_HALF_RATE_SIDE = 32
# The same for a product by Eigen, as a part of its rate by YNNPACK: 0.12 to 0.8 (AMD EPYC, JAX 0.10.2, 2026-11-25). And
# seconds for each element that it gathers one by one, see `count_gathered`: 0.4 to 1.4 ns (Intel Xeon, 2026-11-28).
_EIGEN_RATE, _GATHERED_SECONDS = 0.5, 8e-10
# Seconds on a CPU for each element that XLA copies into another order, besides moving it: 1.8 to 2.3 ns (same machine).
_REORDERED = 2e-9
# The same for arrays that fit the cache: 0.2 to 0.4 ns.
_REORDERED_IN_CACHE = 3e-10
# Seconds for each run of neighbours that XLA takes besides one for each index: 0.5 to 0.9 ns (Intel Xeon, 2026-11-28).
_TAKEN_APART = 5e-10
# Bytes of copies for which a product is worth a step that is no operation of JAX.
_WORTH_JOINING = 2**20
# A permuted result is in memory twice. It may take so many bytes, or this part of an operand's.
_FEW_BYTES, _NARROW_RESULT = 2**16, 1 / 16
# A product that reads an outer product computes it itself. If the outer product's innermost axis is short, that takes
# 0.1 to 1.5 ns more for each element, where the result is multiplied by element after that (9 sizes, one core of an
# AMD EPYC 7003, JAX 0.10.2, 2026-11-30).
_SHORT_OUTER_SECONDS = 5e-10
# A sum over an innermost axis takes so long for each short run along it, see `short_runs`: 4.9 ns for runs of 4, 4.1
# for 16 and 0.9 for 64 (same machine and day).
_RUN_SECONDS = 5e-9
# XLA takes 2 to 8 ns for each element of a narrow product, see `is_narrow`. So much is counted, because products by
# element that plans would take in its place are priced too low as well.
_NARROW_SECONDS = 5e-10
# Multiplications of a product with few terms for which a loop by element is worth such a step.
_WORTH_ADDING = 2**13
# The part of a large product's rate that such a loop runs at: 0.03 to 0.15 ns were measured for each multiplication
# (AMD EPYC, JAX 0.10.2, 2026-11-25). With strides it takes 0.2 ns, and with more than 4 terms of a product of matrices
# 0.2 to 0.3 ns, which have one rate; with long strides, where each element is in another line of the cache, 0.3 ns, or
# 0.7 ns if both operands have one (two busy cores of the same, 2026-11-27).
_ADDING_RATE, _STRIDED_RATE, _LONG_STRIDE, _FAR_RATES = 0.25, 0.125, 16, (0.055, 0.026)
# The most terms of such a sum.
_MOST_ADDED = 8
# FLOP/s of a product with a vector, as a part of the rate of a large product (on the same machine).
_VECTOR_RATE = 0.33


def _stock_work(op: Op, device: Device, lean: bool = False) -> list[Work]:
    """Return the stock work, corrected for XLA's copies and its rate on products of few rows, columns or terms.

    Args:
        op: the step.
        device: the rates.
        lean: whether a product is arranged to copy little, rather than to be fast.
    """
    parts, kind, size = stock_work(op, device), stock_kind(op), itemsize(op.dtype)
    if device.kind != "cpu" or not isinstance(op, Einsum):
        return [on_card(part, device) if device.kind == "cuda" else part for part in parts]
    if kind != "matmul":
        copied = count_copied(op.spec) * size
        fused = fused_takes(op.spec) * size if kind == "take, multiply, add" else 0
        # A segment sum reads index arrays in range from memory. In a take XLA computes them element by element.
        index = 4 * sum(math.prod(op.spec.shape(gather.axes)) for gather in set(term_gathers(op.spec.output)))
        if kind == "segment sum" and op.result_bytes() <= device.cache_bytes:  # XLA adds rows to sums in the cache
            touched = op.bytes_touched()
            adding = (parts[0].moved - touched) / device.cache_bandwidth
            parts[0] = parts[0]._replace(seconds=device.moving_seconds(touched) + adding)
        inner = product_within(op.spec) if len(op.spec.inputs) == 2 else op.spec
        form, seconds = product_form(inner), 0.0
        if form is not None and form.contracted:
            parts = [part._replace(rate=min(part.rate, _product_rate(inner, op.dtype, device))) for part in parts]
            seconds = _GATHERED_SECONDS * count_gathered(inner)
        seconds += _TAKEN_APART * count_taken_apart(op.spec)
        seconds += copied / size * _reordered_seconds(op, device) + _RUN_SECONDS * short_runs(op.spec)
        return [*parts, Work(moved=2 * copied, copied=copied, scratch=copied + index - fused, seconds=seconds)]
    rate, slower = _product_rate(op.spec, op.dtype, device, lean), 0.0
    if device.products:
        parts[-1] = parts[-1]._replace(rate=rate)
    else:
        if 1 in known_product(op.spec).sizes[1:3]:  # XLA multiplies with vectors in one loop, without a call for each
            parts = [part._replace(matrices=0, rate=device.flop_rate) for part in parts]
        at_rate = Work(op.flops(), rate, fresh=(op.result_bytes(),), launches=1)
        slower = max(0.0, device.work_seconds(at_rate) - sum(map(device.work_seconds, parts)))
    copies = count_reordered(op.spec, lean)
    more = copies.elements * size - sum(part.copied for part in parts)
    seconds = slower + device.moving_seconds(2 * max(0, more)) + copies.apart * _reordered_seconds(op, device)
    seconds += copies.divided * _REORDERED_IN_CACHE + _GATHERED_SECONDS * count_gathered(op.spec, lean)
    seconds += _NARROW_SECONDS * math.prod(op.spec.output_shape) if is_narrow(op.spec) else 0.0
    return [*parts, Work(moved=2 * more, copied=more, scratch=more - copies.reused * size, seconds=seconds)]


def order_seconds(op: Op, reader: Op, device: Device) -> float:
    """Return how much longer a product on a CPU takes that reads a step's result, for the order of its axes.

    It computes an outer product again.
    """
    form = product_form(reader.spec) if device.kind == "cpu" and isinstance(op, Einsum) else None
    return _SHORT_OUTER_SECONDS * count_short_outer(op.spec) if form is not None and form.contracted else 0.0


def _product_rate(spec: Spec, dtype: str, device: Device, lean: bool = False) -> float:
    """Return the FLOP/s at which XLA multiplies on a CPU; `lean` is as in `_stock_work`."""
    batch, *sides = known_product(spec).sizes
    if device.products:
        rows, columns = sides[:2] if factors(spec, lean) == (0, 1) else sides[1::-1]
        rate = device.product_rate(rows, columns, sides[2], dtype, batch)
    elif 1 in sides[:2]:
        rate = _VECTOR_RATE * device.flop_rate
    else:
        rate = max(device.skinny_rate, device.flop_rate * min(sides) / (min(sides) + _HALF_RATE_SIDE))
    return rate * (_EIGEN_RATE if is_folded(spec, lean) else 1)


def _reordered_seconds(op: Op, device: Device) -> float:
    """Return the seconds for each element of a step that XLA copies into another order, besides moving it."""
    return _REORDERED if op.bytes_touched() > device.cache_bytes else _REORDERED_IN_CACHE


def _flat_matmul() -> Implementation:
    """Return the row that multiplies with neighbouring axes joined. JAX would keep reshaped operands for gradients.

    So it is a step of ours and no operation of JAX, and it is offered only where it saves copies of 1 MiB.
    """

    def refuses(op: Op) -> str | None:
        saved = count_reordered(op.spec).elements - count_reordered(join_axes(op.spec), True).elements
        few = saved * itemsize(op.dtype) < _WORTH_JOINING
        return "joining axes saves XLA no copies of 1 MiB" if few else None

    def work(op: Op, joined: Spec, device: Device) -> list[Work]:
        return _stock_work(dataclasses.replace(op, spec=joined, layouts=()), device, lean=True)

    return form_row(
        "flat matmul",
        lambda op: join_axes(op.spec) if stock_kind(op) == "matmul" else "the step is not a matmul",
        work,
        lambda op, joined, inputs, index: (multiply_flat(op.spec, joined, *inputs),),
        refuses=refuses,
        kinds=("cpu",),
    )


def _permuted_form(op: Op) -> Spec | str:
    """Return a product that XLA computes faster, but whose result's axes have another order; or why there is none."""
    if stock_kind(op) != "matmul":
        return "the step is not a matmul"
    if op.dtype not in ("float32", *HALF_TYPES):
        return "XLA multiplies few dtypes faster into another order"
    return permuted(op.spec) or "XLA multiplies about as fast into the result's order"


def _permuted_matmul() -> Implementation:
    """Return the row that multiplies into another order of the result's axes, and then permutes the result.

    XLA on CPUs has products of matrices with few columns that take ten times as long if the result's axes stand in one
    order as in the other. XLA would merge JAX's own transpose into the product again. So it is a step of ours.
    """

    def work(op: Op, other: Spec, device: Device) -> list[Work]:
        size = op.result_bytes()
        seconds = math.prod(op.spec.output_shape) * _reordered_seconds(op, device)
        parts = _stock_work(dataclasses.replace(op, spec=other), device)
        return [*parts, Work(moved=2 * size, copied=size, scratch=size, seconds=seconds)]

    def refuses(op: Op) -> str | None:
        *operands, result = (math.prod(op.spec.shape(term)) for term in op.spec.terms)
        fits = result * itemsize(op.dtype) <= max(_FEW_BYTES, _NARROW_RESULT * max(operands) * itemsize(op.dtype))
        return None if fits else "the result takes much memory, and would be there twice"

    return form_row(
        PERMUTED,
        _permuted_form,
        work,
        lambda op, other, inputs, index: (multiply_permuted(op.spec, other, *inputs),),
        refuses=refuses,
        kinds=("cpu",),
    )


def _multiply_and_add(multiply: Callable[[Spec], Product]) -> Implementation:
    """Return the row that multiplies and adds in one loop, for sums of few terms.

    XLA would copy the operands into matrices, and multiply each matrix by a call. As JAX's own operations the loop
    would keep what it multiplies for gradients. So it is a step of ours. In a program for another platform it is a
    product like any other.

    Args:
        multiply: makes the function of two operands.
    """

    def refuses(op: Op) -> str | None:
        if not is_inexact(op.dtype):
            return "sums of integers may be long"
        form = known_product(op.spec)
        batch, _, _, terms = form.sizes
        if not 1 < terms <= _MOST_ADDED:
            return f"sums have one term, or more than {_MOST_ADDED}"
        if joint_elements(op.spec) < _WORTH_ADDING:
            return "a small product is JAX's own"
        strided, narrow = max(inner_strides(op.spec)) > 1, is_narrow(op.spec)
        if not narrow and ((batch < MANY_MATRICES and strided) or multiplies_fast(op.spec, form)):
            return "XLA multiplies few matrices, and large ones, fast"
        apart = strided and terms > 4 and not narrow
        return "elements that are added up lie between those of the result" if apart else None

    def work(op: Op, form: ProductForm, device: Device) -> list[Work]:
        strides, (_, rows, columns, terms) = inner_strides(op.spec), form.sizes
        rate = _ADDING_RATE if max(strides) <= 1 else _STRIDED_RATE
        if min(rows, columns) > 1 and terms > _MOST_ADDED // 2:
            rate = _STRIDED_RATE
        if far := sum(stride >= _LONG_STRIDE for stride in strides):
            rate = _FAR_RATES[far - 1]
        rate *= device.flop_rate
        return [Work(op.flops(), rate, op.bytes_touched(), fresh=(op.result_bytes(),), launches=1)]

    return form_row(
        "multiply and add",
        lambda op: product_form(op.spec) if stock_kind(op) == "matmul" else "the step is not a matmul",
        work,
        lambda op, form, inputs, index: (lax.convert_element_type(multiply(op.spec)(*inputs), op.dtype),),
        refuses=refuses,
        kinds=("cpu",),
        fused=_MOST_ADDED,
    )


def _reshaped_bytes(op: Op, form: GroupedForm | PooledForm, flat: bool = False) -> int:
    """Return the bytes of the results that XLA copies to reshape them.

    It copies a result whose axes change their order, and one in which dimensions of size 1 behind others differ.

    Args:
        op: the step.
        form: its axes by group, as the kernel sees them.
        flat: whether the kernel makes a flat result, which takes any shape without a copy.
    """
    spec, copied = op.spec, 0
    for term, groups in views_of(op, form, is_turned(op, form))[1]:
        order = tuple(e for group in groups for e in group)
        kernel = tuple(math.prod(spec.shape(tuple(group))) for group in groups)
        if order != term or (not flat and kernel != spec.shape(order) and 1 in (*kernel[1:], *spec.shape(order)[1:])):
            copied += math.prod(spec.shape(term)) * itemsize(op.dtype)
    return copied


def _turned_bytes(op: Op, form: GroupedForm | PooledForm) -> int:
    """Return the bytes of the operands that XLA copies before a loop, and that `flattened_bytes` does not count."""
    spec, turned = op.spec, 0
    for term, groups in views_of(op, form, is_turned(op, form))[0]:
        order = [e for group in groups for e in group if e in spec.wide]
        if order != [e for e in term if e in spec.wide] and not matrix_copies(term, None, groups, spec):
            turned += math.prod(spec.shape(term)) * itemsize(op.dtype)
    return turned


def _grouped_work(op: Op, form: GroupedForm, device: Device) -> list[Work]:
    (n, i, _, j, k), pair = form.sizes, isinstance(op, JointGradient)
    copied = flattened_bytes(op, form) + _reshaped_bytes(op, form) + _turned_bytes(op, form)
    shape = pallas_tiles.TPU if device.kind == "tpu" else pallas_tiles.GPU if device.capability == 90 else None
    if shape is not None and shape.takes(*form.sizes, op.dtype, sums=pair or form.outer):
        return tiled_work(op, form, shape, device, copied, is_turned(op, form))
    if device.kind == "cuda":
        return card_work(op, form, device, copied)
    # Measured on seed 000: sorting and addressing a row, filling the result, products on padded lanes, moving lanes.
    lanes = 1.28 * n * i
    seconds = 70e-9 * n + 1.8e-9 * n * i * k + lanes * (2 * j * k / 46e9 + 0.8e-9 * (j + k))
    loops = 1.8 if pair else 1
    scratch = loop_scratch(op, form, jax_tilings.tiling)
    return [
        Work(
            op.flops(), device.flop_rate, op.bytes_touched(), 0, scratch, launches=20 * loops, seconds=loops * seconds
        ),
        Work(moved=2 * copied, copied=copied, scratch=copied),
    ]


def _pooled_work(names: str, op: Op, form: PooledForm, device: Device) -> list[Work]:
    (b, q, m, d, k), products, size = form.sizes, op.products, itemsize(op.dtype)
    what, chosen, moved = pool_function(op, form), b * q * k, op.bytes_touched()
    scores = what == "scores"
    copied = flattened_bytes(op, form)
    # A CPU's nanoseconds, measured on seed 003. Both operands' gradients were measured; half of it is taken for one.
    if names == "pooled":
        flops, dense = products * 2 * b * q * m * d, b * q * m * d / 32
        seconds = 0.8e-9 * dense + 1.4e-9 * chosen if scores else products * (0.55e-9 * dense + 0.7e-9 * chosen)
        seconds += b * (1e-6 if scores else 2.2e-6)
        scratch = jax_pooled.pooled_scratch_bytes(what, form.sizes, op.dtype)
        masked = what in ("gradients", "query_gradient")  # the pool may hold NaN, see `guards`
        copied += _reshaped_bytes(op, form, flat=scores) + _turned_bytes(op, form) + masked * b * m * d * size
    else:
        flops, taken = products * 2 * chosen * d, chosen * d
        moved += taken * size
        fits = (1 if scores else 2) * taken * size < device.fresh_bytes
        each = (0.55e-9 if fits else 3.2e-9) if scores else products * (0.6e-9 if fits else 1.4e-9)
        seconds = taken * each
        scratch = jax_pooled.gathered_scratch_bytes(what, form.sizes, op.dtype)
        fused = what == "query_gradient" and q == k == 1
        copied += 0 if fused else _reshaped_bytes(op, form)
    copies = Work(moved=2 * copied, copied=copied, scratch=copied)
    if device.kind == "cuda":  # estimates: the loop over the batch launches its kernels for each entry
        moved += 2 * b * q * m * size if names == "pooled" else chosen * d * size
        launches = 10 * (b if names == "pooled" else 1)
        return [Work(flops, device.flop_rate, moved, scratch=scratch, launches=launches), copies]
    return [Work(flops, device.flop_rate, moved, scratch=scratch, launches=10, seconds=seconds), copies]


def _pool(names: str) -> PoolKernels:
    functions = {what: getattr(jax_pooled, f"{names}_{what}") for what in POOL_FUNCTIONS}
    return PoolKernels(**functions, work=partial(_pooled_work, names), launches=10, marks=names == "gathered")


def _cast(x: Any, dtype: str) -> Any:
    return jax.lax.convert_element_type(x, jnp.dtype(dtype))


def _ragged_refusal(op: Op) -> str | None:
    if op.dtype not in HALF_TYPES:
        return "cuDNN multiplies half types only"
    form = grouped_form(op.spec)
    if isinstance(form, GroupedForm) and form.maps:
        return "rows are shared or summed"
    version = jax.__version_info__
    return None if version >= (0, 11) else "ragged_dot multiplies by all matrices on cards before JAX 0.11"


def _ragged_work(op: Op, form: GroupedForm, device: Device) -> list[Work]:
    (n, i, g, j, k), size = form.sizes, itemsize(op.dtype)
    # All sorted rows, and their products in float32 and rounded.
    scratch = 4 * (n + g + 1) + jax_grouping.scratch_bytes(n, g) + n * i * (size * (j + k) + 4 * k)
    first, *rest = _grouped_work(op, form, device)
    # On Hopper `_grouped_work` counts the copy of turned matrices.
    copied = g * j * k * size if is_turned(op, form) and device.capability != 90 else 0
    return [first._replace(scratch=scratch), *rest, Work.of_copies(copied)]


def _ragged_row(kernels: Kernels) -> Implementation:
    """Return the row that multiplies by `ragged_dot`, which may be cuDNN's. Nobody has measured it on a card yet.

    So plans hold it only if `optimize="measure"` found it to be the fastest.
    """
    by_ragged_dot = dataclasses.replace(
        kernels,
        matmul=jax_grouped.ragged_matmul,
        grouped_work=_ragged_work,
        label=", ragged_dot",
        refuses=_ragged_refusal,
        kinds=("cuda",),
    )
    return dataclasses.replace(kernel_rows(by_ragged_dot)[0], variant_of="grouped matmul")


def make_table(grouped: Any = jax_grouped.CPU) -> Table:
    """Return the table of the JAX backend; `grouped` has the functions of `jax_grouped.TiledKernels`."""
    kernels = Kernels(
        OPS,
        grouped.group_rows,
        grouped.grouped_matmul,
        grouped.grouped_outer,
        grouped.grouped_gradients,
        _grouped_work,
        {WHOLE_POOL: _pool("pooled"), "take, then dot": _pool("gathered")},
        launches=6,  # on a card: 20 kernels within a program
        turns=True,
    )
    stock = stock_rows(OPS, _cast, run_guard, views=False, work=_stock_work)
    own = (
        _flat_matmul(),
        _permuted_matmul(),
        _multiply_and_add(as_dot if grouped is jax_grouped.CARD else multiply_and_add),
    )
    return Table([*stock, in_pieces(), *own, *kernel_rows(kernels), _ragged_row(kernels)], PLAIN)
