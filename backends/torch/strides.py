"""Stand-ins for tensors, with a shape and strides only, and torch's functions on them in plain Python.

A plan runs as native torch calls only if autograd then keeps what the plan says, and if results have the strides that
the plan says. To find out, the calls are tried on these stand-ins (see `eager`). They cannot be tried on tensors, not
even on meta tensors: a call is often planned inside of something that watches operators, such as
`torch.utils.checkpoint`, hooks on saved tensors or a `TorchDispatchMode`, which would see operators that the user never
called.

Each rule below is torch's own, dimensions of size 1 included. The tests compare them with what torch does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

from planner.backends.common.stock import Product, matmul_product, viewing
from planner.backends.torch.ops import is_unit_strided
from planner.cost.layout import row_major, view_strides
from planner.language.spec import Spec, Term
from planner.program.contraction import Contraction
from planner.program.forms import ProductForm


class Strided(NamedTuple):
    """A stand-in for a tensor.

    Attributes:
        shape: sizes of the dimensions.
        strides: elements between neighbours along each dimension.
        requires_grad: whether autograd records what is computed from it.
        copied: whether it, or a tensor that it is computed from, was copied for another shape or for unit strides.
            Under autograd such a copy is kept for the backward pass.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    copied: bool = False

    @classmethod
    def new(cls, shape: Sequence[int], requires_grad: bool = False, copied: bool = False) -> Strided:
        """Return the stand-in of a new tensor, which is row-major."""
        return cls(tuple(shape), row_major(shape), requires_grad, copied)

    @property
    def is_contiguous(self) -> bool:
        """Whether it is row-major, as torch sees it."""
        return 0 in self.shape or self.has_no_gaps(reversed(range(len(self.shape))))

    def has_no_gaps(self, order: Iterable[int]) -> bool:
        """Whether elements lie side by side, each once, with the dimensions in this order, innermost first."""
        stride = 1
        for d in order:
            if self.shape[d] != 1:
                if self.strides[d] != stride:
                    return False
                stride *= self.shape[d]
        return True

    def view(self, shape: Sequence[int], strides: Sequence[int]) -> Strided:
        """Return a view of it."""
        return self._replace(shape=tuple(shape), strides=tuple(strides))

    def reshape(self, shape: Sequence[int]) -> Strided:
        """Return it in another shape: a view where there is one, else a copy."""
        strides = view_strides(self.shape, self.strides, shape)
        if strides is None:
            return self.view(shape, row_major(shape))._replace(copied=True)
        return self.view(shape, strides)


@dataclasses.dataclass(frozen=True)
class StrideOps:
    """`ArrayOps` of stand-ins.

    Attributes:
        transformed: whether the calls stand under a transform of `torch.func`, or in forward mode.
    """

    transformed: bool = False
    skips: ClassVar[bool] = False

    def permute(self, x: Strided, dims: Sequence[int]) -> Strided:
        return x.view([x.shape[d] for d in dims], [x.strides[d] for d in dims])

    def diagonal(self, x: Strided, first: int, second: int) -> Strided:
        rest = [d for d in range(len(x.shape)) if d not in (first, second)]
        size, stride = min(x.shape[first], x.shape[second]), x.strides[first] + x.strides[second]
        return x.view([*(x.shape[d] for d in rest), size], [*(x.strides[d] for d in rest), stride])

    def expand(self, x: Strided, shape: Sequence[int]) -> Strided:
        strides: list[int] = []
        missing = len(shape) - len(x.shape)
        for d in reversed(range(len(shape))):
            size = x.shape[d - missing] if d >= missing else 1
            if size != shape[d] or not x.shape:
                stride = 0
            else:
                stride = x.strides[d - missing] if d >= missing else shape[d + 1] * strides[0]
            strides.insert(0, stride)
        return x.view(shape, strides)

    def sum(self, x: Strided, dims: Sequence[int]) -> Strided:
        return _computed([n for d, n in enumerate(x.shape) if d not in dims], x)

    def product(self, form: ProductForm, spec: Spec) -> Product:
        return matmul_product(self.matmul, self.multiply, partial(viewing, self.permute), form, spec)

    def matmul(self, a: Strided, b: Strided) -> Strided:
        if len(a.shape) == 3:
            a, b = _unit_strided(a), _unit_strided(b)
        return _computed((*a.shape[:-1], b.shape[-1]), a, b)

    def multiply(self, a: Strided, b: Strided) -> Strided:
        """As `ops.multiply`: the result is row-major unless autograd records it."""
        product = _pointwise(a, b)
        recorded = self.transformed or product.requires_grad
        if recorded or (a.is_contiguous and b.is_contiguous and product.is_contiguous):
            return product
        return _computed(product.shape, a, b)

    def iota(self, size: int, like: Strided) -> Strided:
        return Strided((size,), (1,))

    def take(self, x: Strided, index: Sequence[Strided]) -> Strided:
        flat = index[0] if len(index) == 1 else _pointwise(*index)
        return _computed((*flat.shape, *x.shape[len(index) :]), x)

    def take_by(self, x: Strided, index: Sequence[Strided]) -> Strided:
        """Return what torch's `x[index]` gives for several index arrays, of as many dimensions each."""
        rows, rest = len(index[0].shape), x.shape[len(index) :]
        source = Strided((1,) * rows + rest, (0,) * rows + x.strides[len(index) :])
        wide = [q.view(q.shape + (1,) * len(rest), q.strides + (0,) * len(rest)) for q in index]
        return _pointwise(source, *wide)._replace(requires_grad=x.requires_grad, copied=x.copied)

    def add_at(self, shape: Sequence[int], index: Sequence[Strided], values: Strided) -> Strided:
        return _computed(shape, values)

    def select(self, mask: Strided, x: Strided, otherwise: float) -> Strided:
        return _pointwise(mask, x, Strided((), ()))

    def zeros(self, shape: Sequence[int], like: Strided) -> Strided:
        return Strided.new(shape)

    def empty_sum(self, shape: Sequence[int], of: Strided) -> Strided:
        return Strided.new(shape, of.requires_grad)


# Two instances for all calls, so that the cache of compiled specs finds them again.
STRIDE_OPS, TRANSFORMED_STRIDE_OPS = StrideOps(), StrideOps(transformed=True)


def standins_of(contraction: Contraction) -> list[Strided]:
    """Return stand-ins of the operands without their broadcast dimensions."""
    operands = contraction.operands
    lie = [Strided(o.shape, row_major(o.shape) if o.strides is None else o.strides, o.requires_grad) for o in operands]
    return [x if s == x.shape else x.reshape(s) for x, s in zip(lie, contraction.resolved.shapes, strict=True)]


def _computed(shape: Sequence[int], *inputs: Strided, strides: Sequence[int] | None = None) -> Strided:
    """Return a new tensor, row-major unless strides are given."""
    return Strided(
        tuple(shape),
        row_major(shape) if strides is None else tuple(strides),
        any(x.requires_grad for x in inputs),
        any(x.copied for x in inputs),
    )


def _unit_strided(x: Strided) -> Strided:
    """As `ops.unit_strided`."""
    if x.is_contiguous or math.prod(x.shape[:-2]) == 1 or is_unit_strided(x.shape, x.strides):
        return x
    return x.view(x.shape, row_major(x.shape))._replace(copied=True)


def copies_of(x: Strided, term: Term, groups: Sequence[Sequence[str]]) -> tuple[bool, bool]:
    """Return whether an operand is copied to be viewed as a batch of matrices, and then for unit strides."""
    x = STRIDE_OPS.permute(x._replace(copied=False), [term.index(axis) for group in groups for axis in group])
    sizes = iter(x.shape)
    matrices = x.reshape([math.prod(next(sizes) for _ in group) for group in groups])
    return matrices.copied, bool(groups[0]) and _unit_strided(matrices) is not matrices


def _pointwise(*inputs: Strided) -> Strided:
    """Return the result of an elementwise function with the strides that torch's TensorIterator allocates.

    If all inputs have the same strides and no gaps, so has the result. Otherwise it has no gaps, and the order of two
    of its dimensions in memory is that of the first input in which their strides differ.
    """
    ndim = max(len(x.shape) for x in inputs)
    padded = [(1,) * (ndim - len(x.shape)) + x.shape for x in inputs]
    shape = tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))
    if all(x.shape == shape for x in inputs):
        if all(x.is_contiguous for x in inputs):
            return _computed(shape, *inputs)
        if all(_channels_last(x) for x in inputs):
            _, c, h, w = shape
            return _computed(shape, *inputs, strides=(c * w * h, 1, c * w, c))
        if all(_dense(x) and x.strides == inputs[0].strides for x in inputs):
            return _computed(shape, *inputs, strides=inputs[0].strides)
    steps = [_steps(x, shape) for x in inputs]
    order = _innermost_first(shape, steps)
    if order == list(reversed(range(ndim))):
        return _computed(shape, *inputs)
    strides, stride = [0] * ndim, 1
    for d in order:
        strides[d] = stride
        stride *= shape[d]
    return _computed(shape, *inputs, strides=strides)


def _steps(x: Strided, shape: Sequence[int]) -> list[int]:
    """Return the strides of an input along the dimensions of a result, 0 where the input is broadcast."""
    missing = len(shape) - len(x.shape)
    return [0 if d < missing or x.shape[d - missing] != shape[d] else x.strides[d - missing] for d in range(len(shape))]


def _innermost_first(shape: Sequence[int], steps: Sequence[Sequence[int]]) -> list[int]:
    """Return the dimensions of a result, innermost first, by torch's insertion sort; some pairs do not compare."""
    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        at = start
        for before in reversed(range(start)):
            comparison = _compare(order[before], order[at], shape, steps)
            if comparison > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif comparison < 0:
                break
    return order


def _compare(first: int, second: int, shape: Sequence[int], steps: Sequence[Sequence[int]]) -> int:
    """Return 1 if the second dimension is the inner one, -1 if the first is, 0 if no input decides."""
    for along in steps:
        if along[first] == 0 or along[second] == 0:  # broadcast
            continue
        if along[first] != along[second]:
            return 1 if along[first] > along[second] else -1
        if shape[first] > shape[second]:
            return 1
    return 0


def _channels_last(x: Strided) -> bool:
    """Return whether torch takes a tensor for images in its channels-last format."""
    return len(x.shape) == 4 and x.has_no_gaps((1, 3, 2, 0))


def _dense(x: Strided) -> bool:
    """Return whether a tensor has neither gaps nor repeated elements, in any order of its dimensions."""
    return x.has_no_gaps(sorted(range(len(x.shape)), key=x.strides.__getitem__))
