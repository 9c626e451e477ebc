"""The rows of the torch backend's table that run Triton kernels on CUDA cards, and their costs.

Besides grouped products and pooled dots there are two more kinds: products of operands that cannot be viewed as
matrices, which torch would copy, and segment sums, which torch computes by atomics and so adds in any order.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from planner.backends.common.kernel_rows import (
    POOL_FUNCTIONS,
    Kernels,
    PoolKernels,
    flattened_bytes,
    is_chosen,
    kernel_rows,
    pool_function,
)
from planner.backends.torch.ops import OPS
from planner.backends.torch.products import copied_form
from planner.cost.device import Device
from planner.cost.figures import Work
from planner.cost.layout import flattens
from planner.kernels.grouped_matmul import torch_grouped_mm
from planner.kernels.grouping import torch_grouping
from planner.kernels.tiled_product.triton_tiles import PAIR_TERMS, TILINGS, covers_pair, multiplies_by_parts, tiles_of
from planner.language.dtypes import itemsize
from planner.language.spec import Gather, Term, term_gathers
from planner.program.forms import GroupedForm, PooledForm, ProductForm, grouped_form, pooled_form, product_form
from planner.program.implementations import Implementation, form_row
from planner.program.ops import Einsum, JointGradient, Op

__all__ = ["DTYPES", "LAUNCHES", "TABLES", "cuda_kernels", "cuda_rows", "grouped_mm_kernels"]

DTYPES = ("float16", "bfloat16", "float32", "float64")
# The launches of a call besides the kernel: for the tiles of each group and, unless the index is prepared, its order.
LAUNCHES = 12
# The kernel's time for the same product beside cuBLAS's: an estimate, as all of this is until it ran on a card.
_SLOWER = 1.5
# Products of bfloat16 for one of float32, see `planner.kernels.tiled_product.triton_arithmetic`.
_PARTS = 6
# Bytes of tables for each group: where it begins, its pieces and their slots, and intermediate arrays for these.
TABLES = 8 * 7
# The number of terms after which the sum of a group is split, as in `planner.kernels.tiled_product.triton_tiles`.
_CUT = 4096


def _kernel(module: str, name: str, **options: Any) -> Callable[..., Any]:
    """Return a kernel as a function that imports its module, and Triton with it, only when it is called."""

    def call(*arguments: Any) -> Any:
        return operator.attrgetter(name)(importlib.import_module(f"planner.kernels.{module}"))(*arguments, **options)

    return call


def _rate(device: Device, sides: tuple[int, int, int], dtype: str) -> float:
    """Return the FLOP/s of the kernel for a product of these rows, columns and terms."""
    rate = device.product_rate(*sides, dtype=dtype)
    if dtype == "float32" and multiplies_by_parts(sides[2], device.capability):
        rate = max(rate, device.product_rate(*sides, dtype="bfloat16") / _PARTS)  # unless a setting refuses it
    return rate / _SLOWER


def _grouped_work(op: Op, form: GroupedForm, device: Device) -> list[Work]:
    (n, i, g, j, k), size = form.sizes, itemsize(op.dtype)
    copied, pair = flattened_bytes(op, form), isinstance(op, JointGradient)
    rows, _, _ = form.sides
    # The sums of a row's products have j terms, and k in its gradient; those of a matrix have a term for each row.
    rate = _rate(device, (j, k, rows) if form.outer else (rows, j, k) if pair else (rows, k, j), op.dtype)
    if is_chosen(form) and not pair:
        return [Work(op.flops(), rate, op.bytes_touched() + 2 * copied, copied, copied + 8 * n * form.maps)]
    # Bytes of the order and the starts of groups, of the sort's keys and sorted keys, and of four tables of tiles.
    tables = 24 * n + TABLES * (g + 2) + 8 * n * form.maps
    if form.targets is not None:
        # The products of rows are added up in the order of their targets, which needs a second sort.
        tables += n * i * k * max(4, size) + 40 * n + math.prod(op.output_shapes[0]) * (4 if size < 4 else 0)
    # A setting may refuse products by parts; then one walk makes both gradients, and needs more memory.
    cut = PAIR_TERMS if pair and covers_pair(j, k) else _CUT
    fused = cut == PAIR_TERMS and not (op.dtype == "float32" and multiplies_by_parts(k, device.capability))
    parts = 2 * (n * i // cut) * j * k * max(4, size) if form.outer or pair else 0
    moved = op.bytes_touched() + 2 * copied + 16 * n
    if pair and not fused:
        moved += n * i * k * size  # the output's gradient is read twice
    return [
        Work(
            op.flops(),
            rate,
            moved,
            copied,
            copied + tables + parts,
            launches=LAUNCHES * (op.products - fused),
            sorted=n,
        )
    ]


def _pooled_work(op: Op, form: PooledForm, device: Device) -> list[Work]:
    (b, q, m, d, k), size = form.sizes, itemsize(op.dtype)
    chosen, copied, function = b * q * k, flattened_bytes(op, form), pool_function(op, form)
    sorts = function in ("pool_gradient", "gradients")
    # The rows that keys name; where queries begin; the sort of the keys; the query of each key.
    scratch = 8 * chosen + TABLES * (b * q + 2)
    scratch += 8 * 5 * chosen + TABLES * (b * m + 2) if sorts else 0
    scratch += 2 * (chosen // _CUT) * d * max(4, size) if function != "scores" else 0
    return [
        Work(
            op.flops(),
            device.product_rate(d, d, d, op.dtype),
            op.bytes_touched() + 2 * copied + op.products * chosen * d * size + 8 * chosen,
            copied,
            scratch + copied,
            launches=LAUNCHES * op.products,
            sorted=sorts * chosen,
        )
    ]


def _other_dtype(op: Op) -> str | None:
    return None if op.dtype in DTYPES else f"the kernels do not multiply {op.dtype}"


def cuda_kernels(tiling: str = "") -> Kernels:
    """Return the kernels for CUDA in a tiling of `triton_tiles`; they need Triton when they run."""
    label, tiled = f", Triton{', ' * bool(tiling)}{tiling}", {"tiling": tiling}

    def outer(a: Any, b: Any, groups: Any, size: int, source_a: Any, source_b: Any) -> Any:
        return _kernel("grouped_matmul.triton_grouped", "grouped_outer", **tiled)(a, b, groups, source_a, source_b)

    functions = {name: _kernel("gathered_dot.triton_pooled", name, **tiled) for name in POOL_FUNCTIONS}
    pool = PoolKernels(**functions, work=_pooled_work, launches=LAUNCHES)
    return Kernels(
        OPS,
        torch_grouping.group_rows,
        _kernel("grouped_matmul.triton_grouped", "grouped_matmul", **tiled),
        outer,
        _kernel("grouped_matmul.triton_grouped", "grouped_gradients", **tiled),
        _grouped_work,
        {f"gathered dot{label}": pool},
        kinds=("cuda",),
        refuses=_other_dtype,
        label=label,
        launches=1,
        chosen=_kernel("grouped_matmul.triton_grouped", "chosen_matmul", **tiled),
    )


def _find_strided(op: Op) -> ProductForm | str:
    return copied_form(op) or "torch multiplies the operands as they lie"


def _strided_work(op: Op, form: ProductForm, device: Device) -> list[Work]:
    terms = zip(op.spec.terms, form.matrices, (*(op.layouts or (None, None)), None), strict=True)
    # A group that has no single stride needs a table of positions, which is computed from two more tables.
    tables = sum(
        24 * math.prod(map(op.spec.size, group))
        for term, groups, layout in terms
        for group in groups
        if not flattens(term, layout, [group], op.spec)
    )
    moved, rate = op.bytes_touched() + 2 * tables, _rate(device, form.sizes[1:], op.dtype)
    # Each table is made in a few launches.
    return [Work(op.flops(), rate, moved, scratch=tables, fresh=(op.result_bytes(),), launches=1 + 6 * bool(tables))]


def _run_strided(tiling: str, op: Op, form: ProductForm, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    out = inputs[0].new_empty(op.spec.output_shape)
    dims: list[list[list[int]]] = []  # of each array, by group of axes
    for term, groups in zip(op.spec.terms, form.matrices, strict=True):
        dims_of_groups = []
        for group in groups:
            dims_of_groups.append([term.index(axis) for axis in group])
        dims.append(dims_of_groups)
    _kernel("grouped_matmul.triton_grouped", "batched_matmul", tiling=tiling)(*inputs, out, dims)
    return (out,)


def _find_summed(op: Op) -> Gather | str:
    """Return the bracket of a step that only adds rows up by one index array, or why a step is none."""
    refusal = "the step does not add rows up by one index array"
    (*inputs,), out = op.spec.inputs, op.spec.output
    gathers = term_gathers(out)
    if not isinstance(op, Einsum) or len(inputs) != 1 or len(gathers) != 1 or term_gathers(inputs[0]):
        return refusal
    (gather,) = gathers
    axes = [*gather.axes, *(e for e in out if e != gather)]
    once = len(set(axes)) == len(axes) == len(inputs[0]) and set(axes) == set(inputs[0])
    return gather if once and gather.axes else refusal


def _summed_work(op: Op, gather: Gather, device: Device) -> list[Work]:
    n, size = math.prod(op.spec.shape(gather.axes)), itemsize(op.dtype)
    columns = math.prod(op.spec.shape(op.spec.inputs[0])) // max(1, n)
    tables = 24 * n + TABLES * ((gather.size or 0) + 2) + 2 * (n // _CUT) * columns * max(4, size)
    moved = op.bytes_touched() + 16 * n
    return [Work(op.flops(), moved=moved, scratch=tables, launches=LAUNCHES, sorted=n)]


def _run_summed(kernels: Kernels, op: Op, gather: Gather, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    (x,), (term,) = inputs, op.spec.inputs
    out, rest = x.new_empty(op.spec.output_shape), [str(e) for e in op.spec.output if e != gather]
    rows = _kernel("segment_sum.triton_sum", "Rows.of")
    source = rows(x, [term.index(e) for e in gather.axes], [term.index(e) for e in rest])
    target = rows(out, [op.spec.output.index(gather)], [op.spec.output.index(e) for e in rest])
    columns = math.prod(op.spec.shape(tuple(rest)))
    _kernel("segment_sum.triton_sum", "sum_rows")(source, target, columns, kernels.groups(gather, op.spec, index))
    return (out,)


def _products(op: Op) -> list[tuple[str, int, int, int]]:
    """Return the products of a step as arguments of `planner.kernels.tiled_product.triton_tiles.tiles_of`."""
    grouped, pooled = grouped_form(op.spec), pooled_form(op.spec)
    if isinstance(grouped, GroupedForm):
        n, i, g, j, k = grouped.sizes
        each = max(1, n * i // max(1, g))
        terms = ("terms", j, k, each)
        if isinstance(op, JointGradient):
            return [*([("pair", j, k, each)] if covers_pair(j, k) else []), ("rows", each, j, k), terms]
        rows = ("plain", i, k, j) if is_chosen(grouped) else ("rows", each, k, j)
        return [terms if grouped.outer else rows]
    if isinstance(pooled, PooledForm):
        _, q, m, d, k = pooled.sizes
        each = max(1, q * k // max(1, m))
        return [("rows", k, 1, d), ("terms", 1, d, k), ("terms", 1, d, each)]
    form = product_form(op.spec)
    return [] if form is None else [("plain", *form.sizes[1:])]


def _same_tiles(tiling: str, op: Op) -> str | None:
    """Return why a tiling is not tried: its tiles are the default's. None if they differ."""
    size = itemsize(op.dtype)
    precisions = ("ieee", "tf32", "bf16x6") if op.dtype == "float32" else ("ieee",)
    for product, precision, tables in itertools.product(_products(op), precisions, (False, True)):
        if (product[0], precision) == ("pair", "bf16x6"):
            continue  # the kernel of both gradients does not multiply by parts
        if tiles_of(*product, size, precision, tables, tiling) != tiles_of(*product, size, precision, tables):
            return None
    return "its tiles are the default's"


def cuda_rows() -> list[Implementation]:
    """Return the rows for CUDA cards, in the default tiling and in the others."""
    kernels = cuda_kernels()

    def row(name: str, find: Callable[[Op], Any], work: Callable[..., list[Work]], run: Any) -> Implementation:
        return form_row(name, find, work, run, lambda op, form: (None,), kernels.refuses, kinds=kernels.kinds)

    def tiled(tiling: str = "") -> list[Implementation]:
        rows = kernel_rows(cuda_kernels(tiling), strided=True)
        name = f"matmul without copies, Triton{', ' * bool(tiling)}{tiling}"
        return [*rows, row(name, _find_strided, _strided_work, partial(_run_strided, tiling))]

    def refuses(default: Implementation, tiling: str, op: Op) -> str | None:
        return default.supports(op) or _same_tiles(tiling, op)

    rows, variants = tiled(), []
    for tiling in TILINGS:
        for default, variant in zip(rows, tiled(tiling), strict=True):
            supports = partial(refuses, default, tiling)
            variants.append(dataclasses.replace(variant, variant_of=default.name, supports=supports))
    summed = row("segment sum, Triton", _find_summed, _summed_work, partial(_run_summed, kernels))
    return [*rows, dataclasses.replace(summed, brackets=True, launches=LAUNCHES), *variants]


def _refuse_grouped_mm(op: Op) -> str | None:
    """Return why torch's `grouped_mm` cannot run a step: it needs strides in multiples of 16 bytes, and few groups."""
    form = grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    n, i, g, j, k = form.sizes
    if op.dtype != "bfloat16":
        return f"torch's grouped_mm does not multiply {op.dtype} without looking at the groups' sizes"
    if not 0 < g < 1024:
        return "torch's grouped_mm takes 1 to 1,023 groups"
    if not 0 < n * i < 2**31:
        return "torch's grouped_mm takes 1 to 2^31 - 1 rows"
    if not j * k or j % 8 or k % 8:
        return "torch's grouped_mm takes matrices whose sides are multiples of 8"
    if form.maps:
        return "rows are shared or summed"
    if not form.outer and not _lie_in_order(op, form):
        return "torch's grouped_mm takes matrices that lie one after the other"
    return None


def _lie_in_order(op: Op, form: GroupedForm) -> bool:
    """Return whether the matrices follow one another in memory without gaps, each row-major or column-major."""
    term, layout = op.spec.inputs[form.matrix], (op.layouts or (None,) * 3)[form.matrix + op.first_operand]
    if layout is not None and (layout.repeated or not layout.unit or len(layout.runs) > 1):
        return False
    dims = range(len(term)) if layout is None else layout.runs[0]
    order = [term[d] for d in dims if op.spec.size(term[d]) != 1]
    orders: list[Term] = [(form.gather, *form.left, *form.right), (form.gather, *form.right, *form.left)]
    return any([e for e in wanted if op.spec.size(e) != 1] == order for wanted in orders)


def _grouped_mm_work(op: Op, form: GroupedForm, device: Device) -> list[Work]:
    (n, i, g, j, k), size = form.sizes, itemsize(op.dtype)
    # Rows of two arrays are taken in the order of their groups; a joint gradient takes rows of three.
    rows = n * i * (j + k) * size
    taken = rows + (n * i * j * size if isinstance(op, JointGradient) else 0)
    tables = 24 * n + TABLES * (g + 2) + 9 * n * i
    copied, rate = flattened_bytes(op, form), device.product_rate(*form.sides, dtype=op.dtype)
    return [
        Work(moved=16 * n, sorted=n, seconds=0.0),
        Work(moved=2 * taken, scratch=rows),
        Work(op.flops(), rate, op.bytes_touched(), copied, copied + tables, launches=LAUNCHES * op.products),
    ]


def grouped_mm_kernels() -> Kernels:
    """Return torch's own grouped products of matrices."""

    def matmul(a: Any, c: Any, groups: Any, source: Any, target: Any, targets: Any) -> Any:
        return torch_grouped_mm.grouped_matmul(a, c, groups)

    def outer(a: Any, b: Any, groups: Any, size: int, source_a: Any, source_b: Any) -> Any:
        return torch_grouped_mm.grouped_outer(a, b, groups)

    return dataclasses.replace(
        cuda_kernels(),
        matmul=matmul,
        outer=outer,
        gradients=torch_grouped_mm.grouped_gradients,
        grouped_work=_grouped_mm_work,
        pools={},
        chosen=None,
        launches=LAUNCHES,
        refuses=_refuse_grouped_mm,
        capabilities=(90, 100),
        label=", grouped_mm",
    )
