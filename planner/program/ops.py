"""What one step is, and which shapes of it the special implementations know.

An `Op` is a unary or binary indirect einsum. A backend's table offers implementations for it (`Lowering` rows
in `planner.program.implementations`); the functions here recognise, from the spec alone, the forms that such rows
share between frameworks: a plain product, a grouped matmul, a grouped outer, a pooled dot.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from planner.cost.figures import StepCost
from planner.cost.layout import Layout
from planner.language.dtypes import itemsize
from planner.language.spec import Spec, Term, term_axes

__all__ = ["Choice", "Op", "joint_elements"]


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One step to be lowered.

    Attributes:
        spec: a resolved spec of one or two inputs.
        dtype: dtype of the inputs and of the result.
        source_dtype: dtype of the input where the step is a cast; then the spec is an identity.
        pair: the step computes both gradients of the binary `spec`; its inputs are the output gradient and
            the two operands.
        layouts: how the inputs lie in memory; none where all are row-major, or where that makes no difference.
    """

    spec: Spec
    dtype: str
    source_dtype: str | None = None
    pair: bool = False
    layouts: tuple[Layout | None, ...] = ()

    def laid(self, layouts: Iterable[Layout | None]) -> Op:
        """Return the op with inputs of these layouts."""
        found = tuple(layouts)
        found = found if any(found) else ()
        return self if found == self.layouts else dataclasses.replace(self, layouts=found)

    def paired(self, layout: Layout | None = None) -> Op:
        """Return the op that computes both gradients of this one, from an output gradient of that layout."""
        layouts = self.layouts or (None,) * len(self.spec.inputs)
        return dataclasses.replace(self, pair=True).laid((layout, *layouts))

    @property
    def input_terms(self) -> tuple[Term, ...]:
        """Terms of the inputs, in order."""
        return (self.spec.output, *self.spec.inputs) if self.pair else self.spec.inputs

    @property
    def output_terms(self) -> tuple[Term, ...]:
        """Terms of the results, in order."""
        return self.spec.inputs if self.pair else (self.spec.output,)

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the inputs, in order."""
        return tuple(self.spec.shape(term) for term in self.input_terms)

    @property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the results, in order."""
        return tuple(self.spec.shape(term) for term in self.output_terms)

    @property
    def arrays(self) -> tuple[str, ...]:
        """Letters of the index arrays that the step reads, sorted: transposing changes their order of appearance."""
        return tuple(sorted(self.spec.arrays))

    def bytes_touched(self) -> int:
        """Bytes of all inputs, index arrays and results: what the step moves at least."""
        elements = sum(math.prod(shape) for shape in (*self.input_shapes, *self.output_shapes))
        sizes = dict(self.spec.sizes)
        index = sum(math.prod(sizes[a] for a in gather.axes) for gather in self.spec.gathers)
        return elements * itemsize(self.dtype) + 8 * index


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """An implementation of an op and what it would cost.

    Attributes:
        lowering: its name.
        cost: what it costs.
        view: whether it allocates nothing.
        layouts: how the results lie in memory; none where all are row-major, or where that makes no difference.
    """

    lowering: str
    cost: StepCost
    view: bool = False
    layouts: tuple[Layout | None, ...] = ()


def joint_elements(spec: Spec) -> int:
    """Product of the sizes of all axes of a spec, brackets included: the size of its iteration space."""
    sizes = dict(spec.sizes)
    return math.prod(sizes[axis] for axis in _axes(spec))


def _axes(spec: Spec) -> tuple[str, ...]:
    return tuple(dict.fromkeys(axis for term in spec.terms for axis in term_axes(term)))


def spec_flops(spec: Spec) -> int:
    """FLOPs of a step: a multiply per joint element of a product, an add where axes are summed or scattered."""
    axes = _axes(spec)
    plain = {e for e in spec.output if isinstance(e, str)}
    adds = any(axis not in plain for axis in axes)
    return joint_elements(spec) * (len(spec.inputs) - 1 + adds)
