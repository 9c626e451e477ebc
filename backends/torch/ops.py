"""The array functions, dtypes and casts of torch that the stock evaluation needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from planner.backends.common import stock
from planner.backends.common.masks import find_read_rows, guard_run
from planner.backends.common.stock import Product, make_index_reader, matmul_product
from planner.backends.torch.contexts.modes import (
    below_transforms,
    carries_tangents,
    compiles,
    in_functorch,
    records,
    transformed,
    usual,
    watched,
    whole,
)
from planner.backends.torch.products.batches import may_be_turned, multiply_batch
from planner.backends.torch.products.few_columns import multiply_few, runs_few
from planner.backends.torch.products.few_rows import runs_few_rows
from planner.kernels.gathered_dot import torch_pooled
from planner.kernels.grouping.torch_grouping import accumulator
from planner.language.dtypes import itemsize
from planner.language.spec import Spec, Term, indexed_dims, row_axes, term_axes
from planner.program.calls import RangedIndices, size_in
from planner.program.forms import ProductForm

# How many products of elements are in memory at once where torch has no product of matrices.
MOST_MULTIPLIED = 2**24


@lru_cache(maxsize=64)
def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def promote(first: str, second: str) -> str | None:
    """Return the dtype that torch promotes two dtypes to, or None where it refuses.

    It does not call `torch.promote_types`, which is an operator: a mode around the call would see it.
    """
    if first == second:
        return first
    if first in _WIDE_UNSIGNED or second in _WIDE_UNSIGNED:
        other = second if first in _WIDE_UNSIGNED else first
        return other if _kind(other) == 2 else None
    if {first, second} == {"int8", "uint8"}:
        return "int16"
    if {first, second} == {"float16", "bfloat16"}:
        return "float32"
    if {first, second} == {"float64", "complex64"}:
        return "complex128"
    return max(first, second, key=lambda dtype: (_kind(dtype), itemsize(dtype)))


# Torch promotes these dtypes only with floats.
_WIDE_UNSIGNED = ("uint16", "uint32", "uint64")


def _kind(dtype: str) -> int:
    """Return the rank of a dtype's category: booleans, integers, floats, complex numbers."""
    if dtype == "bool":
        return 0
    return 3 if dtype.startswith("complex") else 2 if "float" in dtype else 1


def unit_strided(x: Tensor) -> Tensor:
    """Return a batch of matrices with a stride of 1, copied if need be: torch copies others one by one.

    So it does with vectors: 55 us for 32 matrices of 128 x 16, which take 11 with a copy of the vectors (one core of an
    AMD EPYC, torch 2.13, 2026-11-28).
    """
    if x.is_contiguous() or is_unit_strided(x.shape, x.stride()) or math.prod(x.shape[:-2]) == 1:
        return x
    return x.contiguous()


def is_unit_strided(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a batch of matrices or vectors has a stride of 1 along a dimension that is longer than 1."""
    (m, n), (down, right) = shape[-2:], strides[-2:]
    return (right == 1 and n != 1) or (down == 1 and m != 1) or m == n == 1


def matrix_product(form: ProductForm, spec: Spec) -> Product | None:
    """Return the function that multiplies matrices and vectors, of any dtype but bool; None if there are other axes."""
    if form.batch or len(form.contracted) != 1 or len(form.left) > 1 or len(form.right) > 1:
        return None
    letters = [term_axes(term) for term in spec.inputs]
    # At most three transposes, and none for the result.
    swapped = bool(form.left and form.right) and term_axes(spec.output) == (form.right[0], form.left[0])
    flip_a = bool(form.left) and letters[swapped][1] != form.contracted[0]
    flip_b = bool(form.right) and letters[not swapped][0] != form.contracted[0]
    mm = multiply_few if runs_few(form) or runs_few_rows(form) else torch.mm
    if not form.left:
        column = (lambda b: b.t() if flip_b else b) if form.right else (lambda b: b.unsqueeze(1))
        back = 0 if form.right else (0, 1)
        return lambda a, b: mm(a.unsqueeze(0), column(b)).squeeze(back)
    if not form.right:
        return lambda a, b: mm(a.t() if flip_a else a, b.unsqueeze(1)).squeeze(1)
    if swapped:
        return lambda a, b: mm(b.t() if flip_a else b, a.t() if flip_b else a)
    if not (flip_a or flip_b):
        return mm
    return lambda a, b: mm(a.t() if flip_a else a, b.t() if flip_b else b)


def multiply_and_sum(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices, or batches of them, element by element, and sum: some terms of all elements at a time."""
    terms, rows = a.shape[-1], math.prod(a.shape[:-1])
    most = terms if is_recorded(a) else max(1, MOST_MULTIPLIED // max(1, rows * b.shape[-1]))
    total: Tensor | None = None
    for start in range(0, max(terms, 1), max(most, 1)):
        part = a[..., start : start + most, None] * b[..., None, start : start + most, :]
        part = part.sum(-2, dtype=a.dtype)
        total = part if total is None else total + part
    assert total is not None
    return total.contiguous()


def viewing(order: Sequence[int], lengths: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return the function that permutes a tensor and joins dimensions; arguments are the last ones of `stock.viewing`.

    It calls what takes torch the least time: on one core of an AMD EPYC 0.7 us for `transpose` and 1.1 for `permute`,
    0.7 for `flatten`, 0.6 for `unsqueeze` and 1.2 to 1.6 for `reshape`; torch 2.13, 2026-11-27.
    """
    moved = [d for d, old in enumerate(order) if d != old]
    joined = [place for place, length in enumerate(lengths) if length > 1]
    new = [place for place, length in enumerate(lengths) if length == 0]
    if sum(lengths) != len(order) or len(joined) + len(new) > 1:
        return stock.viewing(OPS.permute, order, lengths)
    shape: Callable[[Tensor], Tensor] | None = None
    if joined:
        shape = _flattening(joined[0], joined[0] + lengths[joined[0]] - 1)
    elif new:
        shape = _unsqueezing(new[0])
    if len(moved) != 2:
        arrange = stock.viewing(OPS.permute, order, (1,) * len(order))
        if shape is None or not moved:
            return shape or arrange
        return lambda x: shape(arrange(x))
    i, j = moved
    if shape is None:
        return lambda x: x.transpose(i, j)
    return lambda x: shape(x.transpose(i, j))


def _flattening(start: int, stop: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.flatten(start, stop)


def _unsqueezing(place: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.unsqueeze(place)


class TorchOps:
    """`ArrayOps` in torch: every function is differentiable and out of place."""

    skips = False

    def permute(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        return x.permute(tuple(dims))

    def diagonal(self, x: Tensor, first: int, second: int) -> Tensor:
        return x.diagonal(0, first, second)

    def expand(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x.expand(tuple(shape))

    def sum(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        return x.sum(tuple(dims), dtype=x.dtype)

    def has_matmul(self, x: Tensor) -> bool:
        """Return whether torch multiplies matrices of such tensors: not of booleans, and on a card not of integers."""
        dtype = x.dtype
        return dtype.is_floating_point or dtype.is_complex or not (dtype == torch.bool or x.is_cuda)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        if not self.has_matmul(a):
            return multiply_and_sum(a, b) if a.is_cuda else torch.matmul(a.int(), b.int()).bool()
        if a.dim() == 2:
            return multiply_few(a, b)
        # Of several batch axes `torch.matmul` makes one, in a fraction of the time that reshapes in Python take.
        multiply = torch.matmul if a.dim() > 3 else multiply_batch if a.shape[1] == 1 else multiply_few
        return multiply(unit_strided(a), unit_strided(b))

    def product(self, form: ProductForm, spec: Spec) -> Product:
        # A row times a batch of matrices takes as long as matrices times a column, or down to a thirtieth: 33 us for
        # 1029 with 8 matrices of 1024 x 64 (one core of an AMD EPYC, torch 2.13, 2026-11-27).
        product = matmul_product(self.matmul, multiply, viewing, form, spec, stacks=True, vectors_first=True)
        direct = matrix_product(form, spec)
        if direct is None:
            return product
        return lambda a, b: direct(a, b) if self.has_matmul(a) else product(a, b)

    def product_of_views(self, form: ProductForm, spec: Spec, recorded: bool) -> Product:
        """Return the function that computes a product, of any dtype but bool, if no matrix needs to be copied.

        Of a product that autograd has `recorded` it computes the gradient of the first factor row-major, and that of
        the second one transposed. So matrices come first there, as they are larger than vectors.
        """
        several = (len(form.left), len(form.right), len(form.contracted)) == (1, 1, 1) and len(form.batch) > 1
        batched = multiply_batch if may_be_turned(form) and not recorded else torch.bmm
        matmul = torch.matmul if several else batched if form.batch else torch.mm
        if (runs_few(form) or runs_few_rows(form)) and not several and not (form.batch and recorded):
            matmul = multiply_few
        return matmul_product(matmul, multiply, viewing, form, spec, stacks=True, vectors_first=not recorded)

    def iota(self, size: int, like: Tensor) -> Tensor:
        return torch.arange(size, device=like.device)

    def take(self, x: Tensor, index: Sequence[Tensor]) -> Tensor:
        # `index_select` by one flat index is several times faster than indexing by several arrays.
        count = len(index)
        flat, rows = _flat_index(index, x.shape[:count])
        if count > 1:
            x = x.reshape([math.prod(x.shape[:count]), *x.shape[count:]])
        taken = x.index_select(0, flat)
        return taken if len(rows) == 1 else taken.reshape([*rows, *x.shape[1:]])

    def add_at(self, shape: Sequence[int], index: Sequence[Tensor], values: Tensor) -> Tensor:
        # By one flat index these add in order. On a CPU, `index_put_` with `accumulate` adds in any order. Under a
        # transform they must be out of place, which copies the zeros once more; and a mode may have saved them.
        count = len(index)
        flat, rows = _flat_index(index, shape[:count])
        dtype = values.dtype
        wide = accumulator(dtype)
        if wide != dtype:
            values = values.to(wide)
        if len(rows) != 1:
            values = values.reshape(flat.shape[0], *shape[count:])
        out = values.new_zeros((math.prod(shape[:count]), *shape[count:]))
        if transformed() or (torch.is_grad_enabled() and values.requires_grad):
            # For gradients torch saves what `index_add` adds; of `scatter_add` it saves the index array alone.
            add = out.scatter_add if transformed() or watched() else out.scatter_add_
            out = add(0, flat.long().reshape(flat.shape + (1,) * (values.dim() - 1)).expand(values.shape), values)
        else:
            out = (out.index_add if watched() else out.index_add_)(0, flat, values)
        if count > 1:
            out = out.reshape(tuple(shape))
        return out if wide == dtype else out.to(dtype)

    def select(self, mask: Tensor, x: Tensor, otherwise: float) -> Tensor:
        return torch.where(mask, x, torch.full((), otherwise, dtype=x.dtype, device=x.device))

    def zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return like.new_zeros(tuple(shape))

    def empty_sum(self, shape: Sequence[int], of: Tensor) -> Tensor:
        zeros = self.zeros(shape, of)
        if not ((torch.is_grad_enabled() and of.requires_grad) or carries_tangents(of)):
            return zeros
        return zeros + (of if of.dim() else of.reshape(1))[:0].sum()


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply tensors of equally many dimensions; the result is row-major, unless autograd records it.

    By itself torch gives the result strides that follow those of the operands.
    """
    if a.is_contiguous() and b.is_contiguous():
        product = a * b
        if product.is_contiguous():  # always, except for odd strides of dimensions of size 1
            return product
        del product
    if transformed() or (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)):
        return a * b
    # A mode may have saved what `mul` would write into; a compiler makes `out=` functional, and mistakes its strides.
    if watched() or compiles():
        return (a * b).contiguous()
    shape = [n if m == 1 else m for m, n in zip(a.shape, b.shape, strict=True)]
    return torch.mul(a, b, out=a.new_empty(shape, dtype=torch.promote_types(a.dtype, b.dtype)))


def _flat_index(index: Sequence[Tensor], shape: Sequence[int]) -> tuple[Tensor, torch.Size]:
    """Return one flat index into the flattened leading dimensions, and the shape of the rows that it addresses."""
    flat = index[0] if len(index) == 1 else index[0].long()
    for size, more in zip(shape[1:], index[1:], strict=True):
        flat = flat * size + more
    return flat if flat.dim() == 1 else flat.reshape(-1), flat.shape


OPS = TorchOps()


def cast(x: Tensor, dtype: str) -> Tensor:
    """Convert to a dtype. From complex to real it takes the real part, as the gradient of a real operand needs."""
    wanted = torch_dtype(dtype)
    if x.is_complex() and not wanted.is_complex:
        x = x.real
    return x.to(wanted)


def empty(shape: tuple[int, ...], dtype: str, like: Tensor) -> Tensor:
    """Return an uninitialised tensor on the device of another."""
    return like.new_empty(shape, dtype=torch_dtype(dtype))


def not_dense(x: Tensor) -> str | None:
    """Return why a tensor cannot be contracted and what to do about it, or None if it is dense."""
    if x.is_nested:
        return "is a nested tensor, whose rows have no one shape: pad it, as torch.nested.to_padded_tensor(x, 0.0) does"
    if x.is_quantized:
        return "is a quantized tensor, and contractions take dense ones: pass it as .dequantize()"
    if x.layout != torch.strided:
        return f"is a tensor of layout {x.layout}, and contractions take dense ones: pass it as .to_dense()"
    return None


def dataless(x: Tensor) -> bool:
    """Return whether a tensor has a shape and a dtype but no values."""
    if type(x) in (Tensor, torch.nn.Parameter) and not in_functorch():  # the usual case, in a fifth of the time
        return x.is_meta
    return x.is_meta or is_fake(x)


def are_derived(operands: Sequence[Tensor]) -> bool:
    """Return whether autograd, or `torch.func.grad`, records what runs on some operands."""
    return torch.is_grad_enabled() and any([x.requires_grad for x in operands])


def is_recorded(x: Tensor) -> bool:
    """Return whether a tracer records what runs on a tensor, which may have no values."""
    return not usual(x) and (dataless(x) or records())


def dispatches(x: Tensor) -> bool:
    """Return whether a tensor is of a class that runs operators in its own way, by `__torch_dispatch__`."""
    kind = type(x)
    if kind in (Tensor, torch.nn.Parameter):
        return False
    return getattr(kind, "__torch_dispatch__", None) not in (None, Tensor.__torch_dispatch__) and not dataless(x)


def captured(x: Tensor) -> bool:
    """Return whether a CUDA graph is being captured. Then values cannot be read, and differ when the graph runs."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def unseen(x: Tensor) -> bool:
    """Return whether values cannot be looked at: a CUDA graph is being captured, or `vmap` holds many arrays as one."""
    functorch = torch._C._functorch
    while in_functorch() and functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return captured(x)


def occurs(x: Tensor) -> bool:
    """Return whether any entry is true, or may be: neither a capture nor a tracer that records can read values."""
    if in_functorch() and not records():  # under `vmap` a look at all arrays of a batch tells of each
        with below_transforms():
            x = whole(x)
            return captured(x) or bool(x.any())
    return captured(x) or records() or bool(x.any())


def finite(x: Tensor) -> bool:
    """Return whether all numbers are finite, or cannot be seen; the check is cheaper if their sum does not overflow."""
    return is_recorded(x) or (not captured(x) and is_finite(x))


def is_finite(x: Tensor) -> bool:
    """Return whether all numbers of a tensor with values are finite."""
    if in_functorch():  # as in `occurs`
        with below_transforms():
            return torch_pooled.sum_is_finite(whole(x).detach())
    return torch_pooled.sum_is_finite(x.detach() if x.requires_grad else x)


def _is_clean(x: Tensor) -> bool:
    """Return whether a guard may leave values as they are. On a card a look would wait; a tracer records the mask."""
    return not (x.is_cuda or is_recorded(x)) and finite(x)


def _read_rows(ops: stock.ArrayOps, x: Tensor, term: Term, spec: Spec, index: RangedIndices) -> Tensor:
    """Return a mask of the rows that some index names. On a card it is written: to count them takes atomic operations.

    The arguments are those of `find_read_rows`.
    """
    if not x.is_cuda or transformed() or watched():
        return find_read_rows(ops, x, term, spec, index)
    rows, addressed = row_axes(term), [term[d] for d in indexed_dims(term)]
    arrays, in_range = make_index_reader(ops, addressed, rows, spec)(index, x, index.may_drop)
    shape = [size_in(index, spec, e) for e in addressed]
    flat, places = _flat_index(arrays, shape)
    if in_range is not None:
        flat = torch.where(in_range, flat.reshape(places), math.prod(shape)).reshape(-1)
    marks = torch.zeros(math.prod(shape) + 1, dtype=torch.bool, device=x.device).index_fill_(0, flat.long(), True)
    return marks[:-1].reshape([size_in(index, spec, e) if e in addressed else 1 for e in term])


# Runs a `Guard`.
GUARD = guard_run(OPS, _is_clean, _read_rows)


def conjugate(x: Tensor) -> Tensor:
    """Return the conjugate of a tensor that nothing else reads: in place, unless elements of it share memory."""
    shares = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.conj().resolve_conj() if shares else x.conj_physical_()


def as_output(result: Tensor, arrays: Sequence[Tensor | None]) -> Tensor:
    """Return a result as a Function may return it: no argument itself, and no view of what the Function allocated.

    Torch refuses in-place operations on views that a Function returns. For a view of an argument that is right, since a
    write would change the argument unseen. For a view of a fresh tensor it would be a needless refusal.
    """
    if any([result is x for x in arrays]):
        return result.view_as(result)
    base = result._base
    if base is None or any(base is x or base is x._base for x in arrays if x is not None):
        return result
    return result.detach()
