"""A contraction with all arguments of a call: spec, shapes, sizes, index arrays, dtypes, strides, gradient flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from planner.language.resolve import resolve, resolve_shapes
from planner.language.spec import Spec
from planner.testing.reference import exact_bound, exact_range, output_shape, reference, reference_gradients

Array: TypeAlias = npt.NDArray[Any]

FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
DTYPES = (*FLOATS, "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_GAP = 99  # fills the memory between the elements of a strided operand


@dataclass(frozen=True, eq=False)
class Problem:
    """A spec with all arguments of a call.

    Example:
        >>> import planner
        >>> problem = Problem("ij, j -> i", ((2, 3), (3,)))
        >>> result = planner.contract(problem.spec, *problem.operands(), **problem.arguments())
        >>> problem.is_exact(), (result == problem.expected()).all()
        (True, np.True_)
        >>> problem.output_shape(), problem.output_gradient().shape, [g.shape for g in problem.expected_gradients()]
        ((2,), (2,), [(2, 3), (3,)])
        >>> str(problem.resolved()), problem.resolved_indices(), problem.exact_bound()
        ('ij, j -> i', (), 162.0)

    Attributes:
        spec: the spec string.
        shapes: one shape per operand.
        sizes: the argument ``sizes=``: sizes by letter, the whole output shape, or None.
        indices: the index arrays by letter.
        index_mode: "raise", "drop", "clip" or "nan".
        dtypes: one dtype name per operand.
        requires_grad: which operands need a gradient.
        seed: seed of the operands' values.
        max_value: operands hold integers from -max_value to max_value.
        strided: whether operands are views that are not row-major: transposed, sliced with steps, offset.
    """

    spec: str
    shapes: tuple[tuple[int, ...], ...]
    sizes: dict[str, int] | tuple[int, ...] | None = None
    indices: Mapping[str, Array] = field(default_factory=dict)
    index_mode: str = "raise"
    dtypes: tuple[str, ...] = ()
    requires_grad: tuple[bool, ...] = ()
    seed: int = 0
    max_value: int = 3
    strided: bool = False

    def __post_init__(self) -> None:
        """By default every operand is float32, and every float operand needs a gradient."""
        if not self.dtypes:
            object.__setattr__(self, "dtypes", ("float32",) * len(self.shapes))
        if not self.requires_grad:
            object.__setattr__(self, "requires_grad", tuple(d in FLOATS for d in self.dtypes))

    @property
    def wanted(self) -> tuple[int, ...]:
        """The numbers of the operands that need a gradient."""
        return tuple(number for number, need in enumerate(self.requires_grad) if need)

    def operands(self) -> list[Array]:
        """Draw small integers in each operand's dtype; for bfloat16, which NumPy lacks, the arrays are float32."""
        random, other = np.random.default_rng(self.seed), np.random.default_rng([self.seed, 1])
        kinds = zip(self.shapes, self.dtypes, strict=True)
        operands = [small_integers(random, shape, dtype, self.max_value) for shape, dtype in kinds]
        return [strided_view(other, x) for x in operands] if self.strided else operands

    def output_gradient(self) -> Array:
        """Draw small integers in the output's shape and the operands' common dtype."""
        random = np.random.default_rng([self.seed, 2])
        dtype = np.result_type(*self.operands())
        return small_integers(random, self.output_shape(), dtype.name, self.max_value)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the call: sizes, index_mode and the index arrays."""
        return {"sizes": self.sizes, "index_mode": self.index_mode, **self.indices}

    def resolved(self) -> Spec:
        """Return the resolved spec."""
        return resolve(self.spec, *self.shapes, sizes=self.sizes, **self.indices)

    def resolved_indices(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the shapes of the index arrays by letter, without dimensions that broadcast."""
        shapes = {name: q.shape for name, q in self.indices.items()}
        return resolve_shapes(self.spec, self.shapes, shapes, self.sizes).index_shapes

    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of the result."""
        return output_shape(self.spec, *self.operands(), **self.arguments())

    def expected(self) -> Array:
        """Return the oracle's result, in higher precision."""
        return reference(self.spec, *self.operands(), **self.arguments())

    def expected_gradients(self) -> list[Array]:
        """Return the oracle's gradient of every operand for `output_gradient`."""
        gout = self.output_gradient()
        return reference_gradients(self.spec, gout, *self.operands(), **self.arguments())

    def exact_bound(self) -> float:
        """Return a bound on every number that a plan can compute, forward or backward (`reference.exact_bound`)."""
        gout = self.output_gradient()
        return exact_bound(self.spec, *self.operands(), gout=gout, **self.arguments())

    def is_exact(self, slack: int = 1) -> bool:
        """Whether every number that a plan can compute is exact in each operand's dtype.

        `slack` leaves room for sums of that many results, which second and directional derivatives form.
        """
        return slack * self.exact_bound() <= min(map(exact_range, self.dtypes))

    def __repr__(self) -> str:
        """Return an expression that makes the problem, except that it notes the dtypes of index arrays separately."""
        indices = {name: q.tolist() if q.size else np.zeros(q.shape, int) for name, q in self.indices.items()}
        kinds = {name: q.dtype.name for name, q in self.indices.items()}
        return (
            f"Problem({self.spec!r}, {self.shapes}, sizes={self.sizes}, indices={indices} of {kinds}, "
            f"index_mode={self.index_mode!r}, dtypes={self.dtypes}, requires_grad={self.requires_grad}, "
            f"seed={self.seed}, max_value={self.max_value}, strided={self.strided})"
        )


def small_integers(random: np.random.Generator, shape: tuple[int, ...], dtype: str, limit: int) -> Array:
    """Draw integers from -limit to limit in a dtype; for unsigned dtypes, their absolute values."""
    values = random.integers(-limit, limit + 1, shape)
    if dtype.startswith("complex"):
        return np.asarray(values + 1j * random.integers(-limit, limit + 1, shape), dtype)
    if dtype.startswith("uint"):
        values = np.abs(values)
    return np.asarray(values, "float32" if dtype == "bfloat16" else dtype)


def strided_view(random: np.random.Generator, x: Array) -> Array:
    """Return equal values in a view of a larger, permuted buffer; steps are positive, as torch requires."""
    order = random.permutation(x.ndim)
    steps = [int(n) for n in random.integers(1, 4, x.ndim)]
    offsets = [int(n) for n in random.integers(0, 3, x.ndim)]
    stops = [offset + step * n for offset, step, n in zip(offsets, steps, x.shape, strict=True)]
    buffer = np.full([2, *(stops[d] + 1 for d in order)], _GAP, x.dtype)
    slices = [slice(offsets[d], stops[d], steps[d]) for d in order]
    view = buffer[1][tuple(slices)].transpose(np.argsort(order)) if x.ndim else buffer[1:].reshape(())
    view[...] = x
    return view
