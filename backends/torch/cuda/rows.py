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
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from planner.backends.common.kernel_rows import (
    POOL_FUNCTIONS,
    Kernels,
    PoolKernels,
    flattened_bytes,
    is_chosen,
    kernel_rows,
    pool_function,
)
from planner.backends.torch.ops import OPS, torch_dtype
from planner.backends.torch.products.einsum import copied_form
from planner.cost.device import PARTS_SHARE, Device
from planner.cost.figures import Work
from planner.cost.layout import flattens
from planner.kernels.grouped_matmul import torch_grouped_mm
from planner.kernels.grouping import torch_grouping
from planner.kernels.segment_sum import WINDOW
from planner.kernels.tiled_product.triton_tiles import PAIR_TERMS, TILINGS, covers_pair, float32_precision, tiles_of
from planner.language.dtypes import itemsize
from planner.language.errors import PlannerError
from planner.language.spec import Term
from planner.program.forms import GroupedForm, PooledForm, ProductForm, grouped_form, product_form
from planner.program.implementations import Implementation, form_row
from planner.program.ops import JointGradient, Op

DTYPES = ("float16", "bfloat16", "float32", "float64")
# The launches of a call with a prepared index. `Device.group_seconds` is what sorting an index takes.
LAUNCHES = 1
# The kernels' share of the rate of torch's large products, by bytes of an element. On an H200 it is 0.55 to 0.76 in
# bfloat16 and 0.8 in float32. That of float64 is an estimate.
_SHARES = {2: 0.6, 4: 0.8, 8: 0.5}
# float32 on the tensor cores of float64: the share of long sums, and the most FLOP/s. An H200 did 59 TFLOP/s, and 51 in
# torch's product. Short sums reach less, because a program waits for its first tiles: as long as it takes to add up so
# many terms. That was fitted to seven products of 64 to 2,048 terms.
_FLOAT64_SHARE, _FLOAT64_RATE, _LOADING = 1.15, 5.9e13, 50
# Bytes a second that one program loads: where few programs walk along many terms, a card is not filled. On an H200 128
# programs loaded 1.07 GB in 1.34 ms.
_PROGRAM_BANDWIDTH = 6.3e9
# Sides of a tile, at least and at most. Rows: on average half of a group's last tile is padding.
_LEAST_SIDE, _TILE_ROWS = 16, 64
# Operators around torch's grouped product: a take, the groups' ends, a mask in two steps, a fill, and a copy back.
_AROUND = 6
# Bytes of tables for each group: where it begins, its pieces and their slots, and intermediate arrays for these.
TABLES = 8 * 7
# The number of terms after which the sum of a group is split, as in `planner.kernels.tiled_product.triton_tiles`.
CUT = 4096


def kernel_function(module: str, name: str, **options: Any) -> Callable[..., Any]:
    """Return a kernel as a function that imports its module, and Triton with it, only when it is called."""

    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return get(_module(path))(*arguments, **options, **named)
        except (ImportError, RuntimeError, ValueError) as error:  # Triton has many words for it
            if isinstance(error, PlannerError) or not _on_cpu(arguments):
                raise
            raise PlannerError(
                "the plan runs Triton kernels, and the arrays are on a CPU: it was made for a card, by device= or for "
                f"arrays there; make a new plan for these arrays ({error!s:.80})"
            ) from error

    get, path = operator.attrgetter(name), f"planner.kernels.{module}"
    return call


def _on_cpu(arguments: Sequence[Any]) -> bool:
    """Whether a kernel was given tensors on a CPU, where only Triton's interpreter could run it."""
    interprets = find_spec("triton") is not None and importlib.import_module("triton").knobs.runtime.interpret
    return not interprets and any(isinstance(x, Tensor) and x.is_cpu for x in arguments)


_module = lru_cache(importlib.import_module)


def product_rate(device: Device, sides: tuple[int, int, int], dtype: str, grouped: bool = True) -> float:
    """Return the FLOP/s of the kernel for a product of these rows, columns and terms, by group or not.

    A tile has 16 elements a side or more: the product of a matrix and a vector takes 16 times its FLOPs.

    >>> import planner
    >>> h200 = planner.Device.preset("h200")
    >>> product_rate(h200, (64, 64, 64), "bfloat16") / product_rate(h200, (64, 1, 64), "bfloat16")
    16.0
    """
    rate, how = device.product_rate(*sides, dtype=dtype), _precision(dtype, sides[2], device, grouped)
    if how == "float64":
        rate = min(rate * _FLOAT64_SHARE, _FLOAT64_RATE) * max(1, sides[2]) / (sides[2] + _LOADING)
    elif how == "bf16x6":  # unless a setting refuses it
        rate = max(rate * _SHARES[4], device.product_rate(*sides, dtype="bfloat16") * PARTS_SHARE)
    else:
        rate *= _SHARES[itemsize(dtype)]
    # Bounds of the searches assume that no product is faster.
    return min(rate, device.most_product_rate(min(sides), dtype)) / math.prod(map(_padded, sides))


def _precision(dtype: str, terms: int, device: Device, grouped: bool) -> str:
    """Return how the kernels form sums of so many products, see `planner.kernels.tiled_product.triton_arithmetic`."""
    return float32_precision(terms, device.capability, device.name, grouped) if dtype == "float32" else "ieee"


def _padded(side: int) -> float:
    """Return how many elements tiles hold for each element of a side."""
    tile = max(_LEAST_SIDE, min(_TILE_ROWS, 1 << max(0, side - 1).bit_length()))
    return -(-side // tile) * tile / side if side else 1.0


def _padding(rows: int, groups: int) -> float:
    """Return how many rows tiles hold for each real row: each group fills its last tile up."""
    filled = max(1, min(rows, groups))
    tile = max(_LEAST_SIDE, min(_TILE_ROWS, rows // filled))
    return (max(1, rows) + filled * tile / 2) / max(1, rows)


def _grouped_work(op: Op, form: GroupedForm, device: Device) -> list[Work]:
    (n, i, g, j, k), size = form.sizes, itemsize(op.dtype)
    copied, pair = flattened_bytes(op, form), isinstance(op, JointGradient)
    rows, _, _ = form.sides
    rows = i if is_chosen(form) and not pair else rows
    # The sums of a row's products have j terms, and k in its gradient; those of a matrix have a term for each row.
    sides = (j, k, rows) if form.outer else (rows, j, k) if pair else (rows, k, j)
    rate = product_rate(device, sides, op.dtype, pair or not is_chosen(form))
    # Rows that several rows of the product share are read once for each of them.
    shared = n * i * j * size if form.rows_a != form.gather.axes else 0
    shared += n * i * k * size if form.outer and form.rows_b != form.gather.axes else 0
    if is_chosen(form) and not pair:
        moved, scratch = op.bytes_touched() + shared + 2 * copied, copied + 8 * n * form.maps
        return [Work(op.flops(), rate, moved, copied, scratch, launches=1, kernels=1)]
    # Bytes of the order and the starts of groups, of the sort's keys and sorted keys, and of four tables of tiles.
    tables = 24 * n + TABLES * (g + 2) + 8 * n * form.maps
    if form.targets is not None:
        # The products of rows are in memory, of half types in float32, and so are their sums.
        tables += n * i * k * max(4, size) + math.prod(op.output_shapes[0]) * (4 if size < 4 else 0)
    fused = pair and covers_pair(j, k, size, _precision(op.dtype, k, device, True))
    # A card that multiplies float32 in float64 may be planned for under another name.
    may_fuse = pair and op.dtype == "float32" and device.capability in (0, 90) and covers_pair(j, k, size, "float64")
    cut = PAIR_TERMS if fused or may_fuse else CUT
    parts = 2 * (n * i // cut) * j * k * max(4, size) if form.outer or pair else 0
    moved = op.bytes_touched() + shared + 2 * copied + 16 * n
    if pair and not fused:
        moved += n * i * k * size  # the output's gradient is read twice
    if form.targets is not None:
        moved += 2 * n * i * k * max(4, size)  # products of rows are written, and read where they are added up
    kernels = op.products - fused + (form.outer or pair)
    sums = (1 + (size < 4)) * (form.targets is not None)  # by an operator of torch, and a cast
    return [
        Work(
            op.flops(),
            rate / _padding(n * i, g),
            moved,
            copied,
            copied + tables + parts,
            launches=kernels + sums,
            kernels=kernels,
            sorted=n,
        )
    ]


def _pooled_work(op: Op, form: PooledForm, device: Device) -> list[Work]:
    (b, q, m, d, k), size = form.sizes, itemsize(op.dtype)
    chosen, copied, function = b * q * k, flattened_bytes(op, form), pool_function(op, form)
    dots = Work(
        op.flops(),
        device.flop_rate,  # products are summed without tensor cores
        op.bytes_touched() + 2 * copied + op.products * chosen * d * size,
        copied,
        copied,
        launches=op.products + bool(copied),
        kernels=op.products,
    )
    if function == "scores":
        return [dots]
    # Windows of long sums are summed before. The gradient of the pool sorts the keys.
    windows = (function != "pool_gradient" and k >= WINDOW) + (function != "query_gradient" and chosen >= WINDOW)
    scratch = (chosen // WINDOW) * d * max(4, size) * (windows > 0)
    sums = Work(scratch=scratch, launches=windows, kernels=windows, seconds=0.0)
    if function == "query_gradient":
        return [dots, sums]
    return [dots, sums, Work(moved=16 * chosen, scratch=order_bytes(chosen, m), sorted=chosen, seconds=0.0)]


def order_bytes(rows: int, groups: int) -> int:
    """Return the bytes that sorting rows by group takes on a card, the order and the starts of groups included."""
    return 40 * rows + 24 * (groups + 1) + 1024


def _other_dtype(op: Op) -> str | None:
    return None if op.dtype in DTYPES else f"the kernels do not multiply {op.dtype}"


def cuda_kernels(tiling: str = "") -> Kernels:
    """Return the kernels for CUDA in a tiling of `triton_tiles`; they need Triton when they run."""
    label, tiled = f", Triton{', ' * bool(tiling)}{tiling}", {"tiling": tiling}

    def outer(a: Any, b: Any, groups: Any, size: int, source_a: Any, source_b: Any) -> Any:
        return kernel_function("grouped_matmul.triton_grouped", "grouped_outer", **tiled)(
            a, b, groups, source_a, source_b
        )

    functions = {name: kernel_function("gathered_dot.triton_pooled", name) for name in POOL_FUNCTIONS}
    pool = PoolKernels(**functions, work=_pooled_work, launches=1, sorts=True, marks=False)
    return Kernels(
        OPS,
        torch_grouping.group_rows,
        kernel_function("grouped_matmul.triton_grouped", "grouped_matmul", **tiled),
        outer,
        kernel_function("grouped_matmul.triton_grouped", "grouped_gradients", **tiled),
        _grouped_work,
        {} if tiling else {"gathered dot, Triton": pool},
        kinds=("cuda",),
        refuses=_other_dtype,
        label=label,
        launches=LAUNCHES,
        chosen=kernel_function("grouped_matmul.triton_grouped", "chosen_matmul", **tiled),
        add=_add,
        keep=keep,
    )


def _add(products: Tensor, dims: Sequence[int], dtype: str) -> Tensor:
    """Add products up along some dimensions, in their own dtype."""
    sums, wanted = OPS.sum(products, dims), torch_dtype(dtype)
    return sums if sums.dtype == wanted else sums.to(wanted)


def keep(order: torch_grouping.Groups | None, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return what a prepared index array keeps from an earlier call with an equal key, or make it."""
    return make() if order is None else order.kept(key, make)


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
    moved, rate = op.bytes_touched() + 2 * tables, product_rate(device, form.sizes[1:], op.dtype, False)
    batch, m, n, k = form.sizes
    tiles = tiles_of("plain", m, n, k, itemsize(op.dtype), _precision(op.dtype, k, device, False))
    loaded = _PROGRAM_BANDWIDTH * batch * -(-m // tiles.m) * -(-n // tiles.n)
    # Each table is made in a few launches.
    return [
        Work(
            op.flops(),
            rate,
            moved,
            scratch=tables,
            fresh=(op.result_bytes(),),
            launches=1 + 6 * bool(tables),
            kernels=1,
            seconds=max(device.moving_seconds(moved), moved / max(1.0, loaded)),
        )
    ]


def _run_strided(tiling: str, op: Op, form: ProductForm, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    out = inputs[0].new_empty(op.spec.output_shape)
    dims: list[list[list[int]]] = []  # of each array, by group of axes
    for term, groups in zip(op.spec.terms, form.matrices, strict=True):
        dims_of_groups = []
        for group in groups:
            dims_of_groups.append([term.index(axis) for axis in group])
        dims.append(dims_of_groups)
    kernel_function("grouped_matmul.triton_grouped", "batched_matmul", tiling=tiling)(*inputs, out, dims)
    return (out,)


def _products(op: Op, precision: str) -> list[tuple[str, int, int, int]]:
    """Return the products of a step as arguments of `planner.kernels.tiled_product.triton_tiles.tiles_of`."""
    grouped = grouped_form(op.spec)
    if isinstance(grouped, GroupedForm):
        n, i, g, j, k = grouped.sizes
        each = max(1, n * i // max(1, g))
        terms = ("terms", j, k, each)
        if isinstance(op, JointGradient):
            one_walk = covers_pair(j, k, itemsize(op.dtype), precision)
            return [("pair", j, k, each)] if one_walk else [("rows", each, j, k), terms]
        rows = ("plain", i, k, j) if is_chosen(grouped) else ("rows", each, k, j)
        return [terms if grouped.outer else rows]
    form = product_form(op.spec)
    return [] if form is None else [("plain", *form.sizes[1:])]


def _same_tiles(tiling: str, op: Op) -> str | None:
    """Return why a tiling is not tried: its tiles are the default's. None if they differ."""
    size = itemsize(op.dtype)
    precisions = ("ieee", "tf32", "bf16x6", "float64") if op.dtype == "float32" else ("ieee",)
    for precision, tables in itertools.product(precisions, (False, True)):
        for product in _products(op, precision):
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
    by_name = {row.name: row for row in rows}
    for tiling in TILINGS:
        for variant in tiled(tiling):
            default = by_name[variant.name.removesuffix(f", {tiling}")]
            supports = partial(refuses, default, tiling)
            variants.append(dataclasses.replace(variant, variant_of=default.name, supports=supports))
    return [*rows, *variants]


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
    # Rows of two arrays are taken in the order of their groups; a joint gradient takes rows of three. The product of
    # rows is put back. Rows that are dropped, and matrices of no rows, are filled with zeros: all are read and written.
    rows = n * i * (j + k) * size
    taken = rows + (n * i * j * size if isinstance(op, JointGradient) else 0)
    pair = isinstance(op, JointGradient)
    filled = size * ((g * j * k if form.outer or pair else 0) + (0 if form.outer else n * i * (j if pair else k)))
    tables = 24 * n + TABLES * (g + 2) + 9 * n * i
    copied, rate = flattened_bytes(op, form), device.product_rate(*form.sides, dtype=op.dtype)
    return [
        Work(moved=16 * n, sorted=n, seconds=0.0),
        Work(moved=2 * (taken + filled), scratch=rows, launches=_AROUND * op.products),
        Work(op.flops(), rate, op.bytes_touched(), copied, copied + tables, launches=op.products),
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
