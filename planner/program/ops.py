"""What one step is, and what an implementation of it costs.

An `Op` is a unary or binary einsum with gathers, both gradients of one, a cast, or a guard; or a loop over slices, see
`planner.program.plan`. A backend's table offers implementations for it: the rows of
`planner.program.implementations.Table`. `planner.program.forms` recognises the
special shapes of specs that rows of several frameworks know.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Self

from planner.cost.figures import StepCost
from planner.cost.layout import Layout
from planner.language.dtypes import itemsize
from planner.language.spec import Gather, Spec, Term, plain_axes, term_axes, term_gathers


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One step to be lowered: an `Einsum`, the `JointGradient` of one, a `Cast`, a `Guard` or a `Loop`.

    Attributes:
        spec: a resolved spec of one or two inputs; of any number in a loop.
        dtype: dtype of the inputs and of the result.
        layouts: how the inputs lie in memory; empty if all are row-major or layouts make no difference.
    """

    spec: Spec
    dtype: str
    layouts: tuple[Layout | None, ...] = ()

    @property
    def pair(self) -> bool:
        """True for a `JointGradient`. Users' own rows may read it."""
        return isinstance(self, JointGradient)

    @property
    def source_dtype(self) -> str | None:
        """The dtype that a `Cast` reads; None for other ops. Users' own rows may read it."""
        return None

    @property
    def products(self) -> int:
        """How many products the op computes: two for a joint gradient, else one."""
        return 1

    @property
    def first_operand(self) -> int:
        """Which input is the spec's first operand. In a joint gradient the output gradient comes before it."""
        return 0

    @property
    def gradient_reads_all(self) -> bool:
        """Whether one step computes the gradients of all inputs, from all of them."""
        return False

    def with_layouts(self, layouts: Iterable[Layout | None]) -> Self:
        """Return the op with inputs of these layouts."""
        wanted = tuple(layouts)
        if not any(wanted):
            wanted = ()
        return self if wanted == self.layouts else dataclasses.replace(self, layouts=wanted)

    def joint_gradient(self, layout: Layout | None = None) -> JointGradient:
        """Return the op that computes both gradients of a binary einsum, from an output gradient of that layout."""
        layouts = (layout, *(self.layouts or (None,) * len(self.spec.inputs)))
        return JointGradient(self.spec, self.dtype, layouts if any(layouts) else ())

    @property
    def repeats(self) -> bool:
        """Whether the result repeats elements along an axis that no input has."""
        return not set(plain_axes(self.spec.output)) <= {axis for term in self.spec.inputs for axis in term_axes(term)}

    @property
    def input_terms(self) -> tuple[Term, ...]:
        """Terms of the inputs, in order."""
        return self.spec.inputs

    @property
    def output_terms(self) -> tuple[Term, ...]:
        """Terms of the results, in order."""
        return (self.spec.output,)

    @property
    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the inputs, in order."""
        return tuple(self.spec.shape(term) for term in self.input_terms)

    @property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the results, in order."""
        return tuple(self.spec.shape(term) for term in self.output_terms)

    @property
    def output_dtypes(self) -> tuple[str, ...]:
        """Dtypes of the results, in order."""
        return (self.dtype,) * len(self.output_terms)

    @property
    def gathers(self) -> tuple[Gather, ...]:
        """The brackets whose index arrays the step reads."""
        return self.spec.gathers

    @property
    def arrays(self) -> tuple[str, ...]:
        """Letters of the index arrays that the step reads, sorted: transposing changes their order of appearance."""
        return tuple(sorted({gather.array for gather in self.gathers}))

    def flops(self) -> int:
        """Return the FLOPs of computing what the spec says.

        For each joint element a product multiplies once, and a step that sums or scatters axes adds once.
        """
        adds = not set(plain_axes(self.spec.output)).issuperset(self.spec.axes)
        return joint_elements(self.spec) * (len(self.spec.inputs) - 1 + adds) * self.products

    def result_bytes(self) -> int:
        """Return the bytes of all results."""
        return self.spec.elements[-1] * itemsize(self.dtype)

    def bytes_touched(self) -> int:
        """Return the bytes of index arrays, results, and what is read of all inputs: the least that the step moves."""
        index = sum([math.prod(self.spec.shape(gather.axes)) for gather in self.spec.gathers])
        return (sum(self.spec.elements_read) + self.spec.elements[-1]) * itemsize(self.dtype) + 8 * index


@dataclasses.dataclass(frozen=True, slots=True)
class Einsum(Op):
    """A unary or binary einsum with gathers: it computes the spec."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gradients(Op):
    """Several gradients of `spec` in one step. Its inputs are the output gradient and the operands."""

    @property
    def served(self) -> tuple[int, ...]:
        """The operands whose gradients it computes."""
        return tuple(range(len(self.spec.inputs)))

    @property
    def products(self) -> int:
        """Two, as the gradients of a binary einsum."""
        return 2

    @property
    def first_operand(self) -> int:
        """The input after the output gradient."""
        return 1

    @property
    def input_terms(self) -> tuple[Term, ...]:
        """Terms of the output gradient and the operands."""
        return (self.spec.output, *self.spec.inputs)

    @property
    def output_terms(self) -> tuple[Term, ...]:
        """Terms of the gradients."""
        return tuple(self.spec.inputs[number] for number in self.served)

    def result_bytes(self) -> int:
        """Return the bytes of all gradients."""
        pairs = zip(self.served, self.output_dtypes, strict=True)
        return sum([self.spec.elements[number] * itemsize(dtype) for number, dtype in pairs])

    def bytes_touched(self) -> int:
        """Return the bytes of all inputs, index arrays and gradients."""
        gradients = sum([self.spec.elements[number] for number in self.served])
        return Op.bytes_touched(self) + gradients * itemsize(self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class JointGradient(Gradients):
    """Both gradients of a binary einsum in one step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cast(Op):
    """A change of dtype, from `source_dtype` to `dtype`. The spec is an identity.

    Attributes:
        fused: whether the step that reads the value casts it. Then the value is never in memory.
    """

    source_dtype: str = dataclasses.field(kw_only=True)
    fused: bool = dataclasses.field(default=False, kw_only=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Guard(Op):
    """Zeroes entries that must not count, whatever they hold: 0 times NaN is NaN. The spec is an identity.

    A guard equals its own transpose, so the gradient of a guarded value is guarded in the same way.

    Attributes:
        dropped: brackets. An entry at the place of a dropped index in one of them is zeroed.
        rows: the value's term with the brackets by which the contraction takes its rows later. Rows that no index names
            are zeroed if the value holds NaN or infinity. None if there are no such rows.
        only_gradients: True if the entries can show in gradients only. Then the forward program goes without.
    """

    dropped: tuple[Gather, ...] = ()
    rows: Term | None = None
    only_gradients: bool = False

    @property
    def gathers(self) -> tuple[Gather, ...]:
        """The brackets of both kinds of entries."""
        return tuple(dict.fromkeys((*self.dropped, *term_gathers(self.rows or ()))))


@dataclasses.dataclass(frozen=True, slots=True)
class PricedImplementation:
    """An implementation of an op and what it would cost.

    Attributes:
        lowering: the implementation's name.
        cost: its cost.
        view: whether the result is a view of the input.
        layouts: how the results lie in memory; empty if all are row-major or layouts make no difference.
    """

    lowering: str
    cost: StepCost
    view: bool = False
    layouts: tuple[Layout | None, ...] = ()


def joint_elements(spec: Spec) -> int:
    """Return the product of the sizes of all axes of a spec, those in brackets too: the size of its iteration space."""
    return math.prod([spec.by_axis[axis] for axis in spec.axes])
