"""The torch backend's table: stock rows, and the rows that run the grouped and pooled kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from planner.backends.common import WHOLE_POOL
from planner.backends.kernel_rows import (
    POOL_FUNCTIONS,
    Kernels,
    PoolKernels,
    flattened_bytes,
    group_sizes,
    kernel_rows,
)
from planner.backends.protocol import Lowering, Table
from planner.backends.stock import Product, matmul_product, viewing
from planner.backends.stock_layout import product_copies, stock_layout
from planner.backends.stock_rows import flat_stock_cost, picoseconds, stock_rows
from planner.backends.torch_modes import transformed
from planner.cost import StepCost, itemsize
from planner.device import Device
from planner.kernels import torch_grouped, torch_grouping, torch_pooled
from planner.layout import Layout, permuted, without
from planner.lower import (
    GroupedForm,
    Op,
    PooledForm,
    ProductForm,
    grouped_form,
    joint_elements,
    pooled_form,
    product_form,
    spec_flops,
)
from planner.spec import Spec, term_axes

__all__ = ["OPS", "TorchOps", "make_table", "torch_dtype"]


@lru_cache(maxsize=64)
def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _is_half(x: Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)


def unit_strided(x: Tensor) -> Tensor:
    """Matrices one of whose strides is 1, copied if need be: torch multiplies others one by one, each copied."""
    if x.is_contiguous() or 1 in x.stride()[-2:] or 1 in x.shape[-2:] or x.shape[0] == 1:
        return x
    return x.contiguous()


class TorchOps:
    """`ArrayOps` in torch: every function is differentiable and out of place."""

    def permute(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        return x.permute(tuple(dims))

    def diagonal(self, x: Tensor, first: int, second: int) -> Tensor:
        return x.diagonal(0, first, second)

    def expand(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x.expand(tuple(shape))

    def sum(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        return x.sum(tuple(dims), dtype=x.dtype)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        if a.dtype == torch.bool:
            return torch.bmm(a.int(), b.int()).bool()
        return torch.bmm(unit_strided(a), unit_strided(b))

    def product(self, form: ProductForm, spec: Spec) -> Product:
        return matmul_product(self.matmul, _multiply, self.permute, form, spec)

    def iota(self, size: int, like: Tensor) -> Tensor:
        return torch.arange(size, device=like.device)

    def take(self, x: Tensor, index: Sequence[Tensor]) -> Tensor:
        # index_select over one flat index is several times faster than indexing by several arrays.
        count = len(index)
        flat, rows = _flat_index(index, x.shape[:count])
        taken = x.reshape([math.prod(x.shape[:count]), *x.shape[count:]]).index_select(0, flat)
        return taken.reshape([*rows, *x.shape[count:]])

    def add_at(self, shape: Sequence[int], index: Sequence[Tensor], values: Tensor) -> Tensor:
        # index_add_ over one flat index: index_put_ with accumulate adds in any order on a CPU.
        count = len(index)
        flat, _ = _flat_index(index, shape[:count])
        wide = values.float() if _is_half(values) else values
        out = wide.new_zeros((math.prod(shape[:count]), *shape[count:]))
        # Out of place where a transform must see it: that copies the zeros once more.
        add = out.index_add if transformed() else out.index_add_
        out = add(0, flat, wide.reshape(flat.shape[0], *shape[count:]))
        return out.reshape(tuple(shape)).to(values.dtype)

    def select(self, mask: Tensor, x: Tensor, otherwise: float) -> Tensor:
        return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))

    def zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return like.new_zeros(tuple(shape))


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Product of tensors of as many dimensions, row-major unless derivatives are recorded: torch follows strides."""
    if a.is_contiguous() and b.is_contiguous():
        product = a * b
        if product.is_contiguous():  # but for odd strides of dimensions of size 1 it is
            return product
        del product
    if transformed() or (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)):
        return a * b
    shape = [n if m == 1 else m for m, n in zip(a.shape, b.shape, strict=True)]
    return torch.mul(a, b, out=a.new_empty(shape, dtype=torch.promote_types(a.dtype, b.dtype)))


def _flat_index(index: Sequence[Tensor], shape: Sequence[int]) -> tuple[Tensor, torch.Size]:
    """One index over flattened leading dimensions, and the shape of the rows that it addresses."""
    flat = index[0] if len(index) == 1 else index[0].long()
    for size, more in zip(shape[1:], index[1:], strict=True):
        flat = flat * size + more
    return flat.reshape(-1), flat.shape


OPS = TorchOps()


def cast(x: Tensor, dtype: str) -> Tensor:
    """Convert; from complex to real by the real part, which is the gradient's rule."""
    wanted = torch_dtype(dtype)
    if x.is_complex() and not wanted.is_complex:
        x = x.real
    return x.to(wanted)


# -- kernels: what they cost, and the table ------------------------------------------------------------


# Buffers of a share of their usual bytes, what the rows that use them are called, and how much longer they take:
# measured on seed 000, on two cores of an AMD EPYC 7003 and of an Intel Xeon.
_SHARES = {1: "", 2: ", half buffers", 16: ", small buffers"}
_SHARE_TIMES = {2: 1.25, 16: 1.8}


def _grouped_cost(share: int, op: Op, device: Device) -> StepCost:
    form = grouped_form(op.spec)
    assert isinstance(form, GroupedForm)
    n, i, j, k = group_sizes(op.spec, form.gather.axes, form.inner, form.left, form.right)
    g = form.gather.size or 0
    size = itemsize(op.dtype)
    dtype = torch_dtype(op.dtype)
    mapped = (form.rows_a, form.rows_b if form.outer else form.rows_out)
    maps = sum(8 * n for rows in mapped if rows != form.gather.axes)
    scratch_of = (
        torch_grouped.gradients_scratch_bytes
        if op.pair
        else torch_grouped.outer_scratch_bytes
        if form.outer
        else torch_grouped.matmul_scratch_bytes
    )
    flops = spec_flops(op.spec) * (2 if op.pair else 1)
    moved = op.bytes_touched()
    results = sum(math.prod(shape) for shape in op.output_shapes) * size
    # Sorting is over before the results are made; the order stays for the call.
    kernel = scratch_of(n, i, g, j, k, dtype, form.rows_a != form.gather.axes, share)
    copied = flattened_bytes(op, form)
    scratch = copied + max(8 * (n + g + 1) + maps + kernel, torch_grouping.group_bytes(n, g) + maps - results)
    rows = n * i * (j + k) * size
    # Rows are gathered, multiplied and put one after the other: the times add up.
    seconds = (
        flops / device.product_rate(max(1, n * i // max(1, min(g, n))), j, k)
        + device.moving_seconds(moved + 2 * copied + (3 if op.pair else 2) * rows)
        + device.fresh_seconds(results)
        + device.fresh_seconds(copied)
        + n * (device.take_row_seconds * (4 if op.pair else 3) + device.sort_row_seconds)
        + min(g, n) * 2 * device.matrix_seconds
        + 40 * device.launch_seconds
    )
    if share > 1:
        seconds = _SHARE_TIMES[share] * seconds + 10 * device.launch_seconds
    return StepCost(flops, moved + 2 * copied + 16 * n, copied, scratch, picoseconds(seconds))


def _pooled_cost(dense: bool, op: Op, device: Device) -> StepCost:
    form = pooled_form(op.spec)
    assert isinstance(form, PooledForm)
    size, dtype = itemsize(op.dtype), torch_dtype(op.dtype)
    b, q, k, d = group_sizes(op.spec, form.batch, form.queries, form.chosen, form.depth)
    m = form.gather.size or 0
    products = 2 if op.pair else 1
    kind = "both" if op.pair else "scores" if form.scores == 2 else "pool" if form.place == 2 else "query"
    scratch_of = torch_pooled.pooled_scratch_bytes if dense else torch_pooled.gathered_scratch_bytes
    scratch = scratch_of(b, q, m, d, k, dtype)
    results = sum(math.prod(shape) for shape in op.output_shapes) * size
    moved = op.bytes_touched()
    chosen = b * q * k
    if dense:
        # Measured: 6.4 ms for 0.5 GFLOP of depth 32; half a nanosecond for each score taken, one for each added.
        flops = products * 2 * b * q * m * d + (0 if kind == "scores" else chosen)
        seconds = flops / (0.85 * device.flop_rate) + chosen * (0.5e-9 if kind == "scores" else 1e-9)
    else:
        # Measured per element of the taken rows, buffers reused.
        flops = products * 2 * chosen * d
        moved += chosen * d * size
        seconds = chosen * d * {"scores": 0.5e-9, "query": 0.5e-9, "pool": 0.75e-9, "both": 1.25e-9}[kind] + 2e-4
    copied = flattened_bytes(op, form)
    seconds += device.moving_seconds(2 * copied) + device.fresh_seconds(copied)
    seconds += device.fresh_seconds(results) + (10 + b) * device.launch_seconds
    return StepCost(flops, moved + 2 * copied, copied, scratch + copied, picoseconds(seconds))


def _sliced(op: Op) -> tuple[str, ProductForm] | None:
    """The axis over which a product can go slice by slice without copying an operand, and a slice's product.

    Slices over a summed axis are accumulated, those over a row or column axis are parts of the result.
    """
    if op.pair or op.source_dtype is not None:
        return None
    form, sizes = product_form(op.spec), dict(op.spec.sizes)
    layouts = op.layouts or (None, None)
    if form is None or form.batch or not form.contracted or not product_copies(form, op.spec, layouts):
        return None
    for axis in sorted((*form.contracted, *form.left, *form.right), key=lambda axis: (sizes[axis], axis)):
        left, right, summed = (tuple(e for e in g if e != axis) for g in (form.left, form.right, form.contracted))
        m, n, k = (math.prod(sizes[e] for e in g) for g in (left, right, summed))
        part = ProductForm((), left, right, summed, (1, m, n, k))
        inner = Spec(tuple(tuple(e for e in term if e != axis) for term in op.spec.inputs), (), op.spec.sizes)
        sliced = [
            without(layout, term.index(axis), op.spec.shape(term)) if axis in term else layout
            for term, layout in zip(op.spec.inputs, layouts, strict=True)
        ]
        if part.contracted and not product_copies(part, inner, sliced):
            return axis, part
    return None


def _not_sliced(op: Op) -> str | None:
    if op.dtype in ("float16", "bfloat16", "bool"):
        return f"{op.dtype} would be rounded between the slices"
    return "no one axis parts operands that cannot be viewed flat" if _sliced(op) is None else None


def _sliced_cost(op: Op, device: Device) -> StepCost:
    found = _sliced(op)
    assert found is not None
    axis, part = found
    slices = dict(op.spec.sizes)[axis]
    _, m, n, k = part.sizes
    flops, result = spec_flops(op.spec), math.prod(op.spec.output_shape) * itemsize(op.dtype)
    moved = op.bytes_touched()
    if axis not in op.spec.output:
        moved += 2 * slices * result
    seconds = max(flops / device.product_rate(m, n, k), device.moving_seconds(moved)) + device.fresh_seconds(result)
    return StepCost(flops, moved, 0, 0, picoseconds(seconds + slices * device.launch_seconds))


def _run_sliced(op: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    found = _sliced(op)
    assert found is not None
    axis, part = found
    sizes, (_, m, n, k) = dict(op.spec.sizes), part.sizes
    slices = []
    groups_of = ((part.left, part.contracted), (part.contracted, part.right))
    for x, term, groups, shape in zip(inputs, op.spec.inputs, groups_of, ((m, k), (k, n)), strict=True):
        rest = [e for e in term if e != axis]
        views = x.movedim(term.index(axis), 0).unbind(0) if axis in term else [x] * sizes[axis]
        dims = [rest.index(e) for group in groups for e in group]
        slices.append([view.permute(dims).reshape(shape) for view in views])
    if axis in op.spec.output:
        out = inputs[0].new_empty((sizes[axis], m, n))
        for into, a, b in zip(out, *slices, strict=True):
            torch.mm(a, b, out=into)
        order = (axis, *part.left, *part.right)
    else:
        out = inputs[0].new_zeros((m, n))
        for a, b in zip(*slices, strict=True):
            out.addmm_(a, b)
        order = (*part.left, *part.right)
    shaped = out.view([sizes[e] for e in order])
    return (shaped.permute([order.index(str(e)) for e in op.spec.output]),)


def _sliced_layouts(op: Op) -> tuple[Layout | None, ...]:
    found = _sliced(op)
    assert found is not None
    axis, part = found
    order = (*((axis,) if axis in op.spec.output else ()), *part.left, *part.right)
    return (permuted(None, [order.index(str(e)) for e in op.spec.output], op.spec.output_shape),)


def _vectors(op: Op) -> ProductForm | None:
    """The form of a product in which one operand has no rows or columns of its own."""
    form = None if op.pair or op.source_dtype is not None else product_form(op.spec)
    return form if form is not None and form.contracted and 1 in form.sizes[1:3] else None


def _not_summed(op: Op) -> str | None:
    if op.dtype in ("float16", "bfloat16", "bool"):
        return f"{op.dtype} would be rounded before it is summed"
    return "both operands have rows or columns of their own" if _vectors(op) is None else None


def _summed_cost(op: Op, device: Device) -> StepCost:
    spec, size = op.spec, itemsize(op.dtype)
    wide, result = joint_elements(spec) * size, math.prod(spec.output_shape) * size
    read = op.bytes_touched() - result
    seconds = device.seconds(0, read + wide, wide, 1) + device.seconds(0, wide + result, result, 1)
    return StepCost(spec_flops(spec), read + 2 * wide + result, 0, wide, picoseconds(seconds))


def _run_summed(op: Op, inputs: Sequence[Any], index: Any) -> tuple[Any, ...]:
    return (_summed_product(op.spec)(*inputs),)


def _summed_layouts(op: Op) -> tuple[Layout | None, ...]:
    out = term_axes(op.spec.output)
    kept = [e for e in _summed_order(op.spec) if e in out]
    return (permuted(None, [kept.index(e) for e in out], op.spec.output_shape),)


def _summed_order(spec: Spec) -> tuple[str, ...]:
    """The axes of the product before its sum: as the larger operand has them where that gives a row-major result."""
    sizes = dict(spec.sizes)
    *terms, out = (term_axes(term) for term in spec.terms)
    widest = max(terms, key=lambda term: math.prod(sizes[e] for e in term))
    order = (*(e for term in terms for e in term if e not in widest), *widest)  # the first ones are of size 1
    if [e for e in order if e in out and sizes[e] != 1] != [e for e in out if sizes[e] != 1]:
        order = (*out, *(e for e in widest if e not in out))
    return order


@lru_cache(maxsize=16384)
def _summed_product(spec: Spec) -> Product:
    """What multiplies two operands and sums."""
    sizes, order = dict(spec.sizes), _summed_order(spec)
    *terms, out = (term_axes(term) for term in spec.terms)
    first, second = (
        viewing(
            OPS.permute,
            [t.index(e) for e in order if e in t],
            [sizes[e] for e in t],
            [sizes[e] if e in t else 1 for e in order],
        )
        for t in terms
    )
    summed = tuple(dim for dim, e in enumerate(order) if e not in out)
    kept = [e for e in order if e in out]
    back = viewing(OPS.permute, [kept.index(e) for e in out], [sizes[e] for e in kept], [sizes[e] for e in out])

    def product(a: Tensor, b: Tensor) -> Tensor:
        wide = _multiply(first(a), second(b))
        return back(wide.sum(summed, dtype=wide.dtype))

    return product


def _pool(dense: bool) -> PoolKernels:
    names = "pooled" if dense else "gathered"
    functions = {what: getattr(torch_pooled, f"{names}_{what}") for what in POOL_FUNCTIONS}
    return PoolKernels(**functions, cost=partial(_pooled_cost, dense))


def _kernels(share: int) -> Kernels:
    """The kernels with buffers of a share of their usual bytes."""

    def outer(a: Tensor, b: Tensor, groups: Any, size: int, source_a: Tensor | None, source_b: Tensor | None) -> Tensor:
        return torch_grouped.grouped_outer(a, b, groups, source_a, source_b, share)

    return Kernels(
        OPS,
        torch_grouping.group_rows,
        partial(torch_grouped.grouped_matmul, share=share),
        outer,
        partial(torch_grouped.grouped_gradients, share=share),
        partial(_grouped_cost, share),
        {} if share > 1 else {WHOLE_POOL: _pool(True), "take in chunks": _pool(False)},
        # The gradient kernels conjugate, but the programs hand over operands that are conjugated already.
        hand_over=torch.conj,
        kinds=("cpu",),  # loops over host offsets and reused host buffers
        label=_SHARES[share],
    )


def make_table() -> Table:
    """Return the table of the torch backend."""
    sliced = Lowering("matmul by slices", _not_sliced, _sliced_cost, _run_sliced, layouts=_sliced_layouts)
    summed = Lowering("multiply, then sum", _not_summed, _summed_cost, _run_summed, layouts=_summed_layouts)
    grouped = [row for share in _SHARES for row in kernel_rows(_kernels(share), strided=True)]
    stock = stock_rows(OPS, cast, cost=flat_stock_cost, layouts=lambda op: (stock_layout(op)[1],))
    return Table([*stock, sliced, summed, *grouped])
