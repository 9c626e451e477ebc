"""Guards in JAX, see `planner.program.guards`, and NaN for bad indices. A step guards what it reads and computes.

JAX keeps for the backward pass what a step reads. If guards were steps of their own, JAX would keep guarded copies. So
a step takes the guards of its inputs and its result as a parameter, and so do the steps that JAX derives from it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from planner.backends.common.kernel_rows import WHOLE_POOL
from planner.backends.common.masks import find_read_rows, zero_dropped
from planner.backends.common.stock import evaluate
from planner.backends.jax.index import FEW, any_bad, is_bad
from planner.backends.jax.ops import OPS
from planner.kernels.grouping.keys import IndexArray
from planner.language.derive import batched
from planner.language.dtypes import is_inexact
from planner.language.spec import Gather, Spec, Term, indexed_dims, largest, row_axes, stand_in, term_gathers
from planner.program.calls import RangedIndices
from planner.program.forms import PooledForm, pooled_form
from planner.program.ops import Guard, JointGradient, Op

Given = Mapping[Gather, IndexArray]

# The most bytes of a result that is written anew with NaN at bad indices, without a branch. XLA takes 50 ms to compile
# a branch, as long as it takes for a small contraction.
SMALL = 1 << 19
# The most pairs of an index and a row that are compared. XLA compares as many in 30 us on a CPU.
FEW_PAIRS = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class Guards:
    """The guards of a step, and the index arrays that the step and its guards read.

    Attributes:
        arrays: the letters of the index arrays among the step's arguments.
        inputs: for each input of the op's spec its guard, or None.
        output: the guard of the spec's output, or None.
    """

    arrays: tuple[str, ...]
    inputs: tuple[Guard | None, ...]
    output: Guard | None = None

    @classmethod
    def of(cls, op: Op, inputs: tuple[Guard | None, ...] | None = None, output: Guard | None = None) -> Guards:
        """Return the guards of a step; without `inputs` there are none."""
        inputs = inputs or (None,) * len(op.spec.inputs)
        read = {name for guard in (*inputs, output) if guard is not None for name in guard.arrays}
        return cls(tuple(sorted({*op.arrays, *read})), inputs, output)

    def of_gradients(self) -> Guards:
        """Return them for the step that computes both gradients."""
        always = [guard and dataclasses.replace(guard, only_gradients=False) for guard in self.inputs]
        return Guards(self.arrays, tuple(always), self.output)

    def transposed(self, child: int) -> Guards:
        """Return them for the gradient of one input: the guards of this input and of the output change places."""
        inputs = list(self.of_gradients().inputs)
        guard, inputs[child] = inputs[child], self.output
        return Guards(self.arrays, tuple(inputs), guard)

    def of_op(self, op: Op) -> tuple[tuple[Guard | None, ...], tuple[Guard | None, ...]]:
        """Return the guards of an op's inputs and of its results, in order."""
        if isinstance(op, JointGradient):
            return (self.output, *self.inputs), self.inputs
        return self.inputs, (self.output,)

    def batched(self, size: int, operands: Sequence[int], arrays: Sequence[str], output: bool) -> Guards:
        """Return them with a leading axis on some inputs and some index arrays, and on the output if asked."""
        inputs = [guard and batch_guard(guard, size, i in operands, arrays) for i, guard in enumerate(self.inputs)]
        return Guards(self.arrays, tuple(inputs), self.output and batch_guard(self.output, size, output, arrays))

    def to_repeat(self, op: Op, operands: Sequence[int], arrays: Sequence[str]) -> set[int]:
        """Return the inputs that must be repeated along a new axis of some index arrays, because these drop entries.

        If the result lacks the axis, and its guard drops entries, the last input is repeated.

        Args:
            op: the step.
            operands: the inputs that have the axis.
            arrays: the index arrays that have the axis.
        """

        def drops(guard: Op | None) -> bool:
            return isinstance(guard, Guard) and any(gather.array in arrays for gather in guard.dropped)

        found = {i for i, guard in enumerate(self.inputs) if drops(guard)} - set(operands)
        lacks_axis = not (found or operands or set(arrays) & set(op.spec.arrays))
        return {len(self.inputs) - 1} if lacks_axis and (drops(self.output) or drops(op)) else found


def batch_guard(guard: Guard, size: int, operand: bool, arrays: Sequence[str]) -> Guard:
    """Return a guard with a leading axis on the value, if asked, and on some index arrays."""
    (term,) = guard.spec.inputs
    # A spec that holds all of the guard's terms, so that all get the axis alike.
    all_terms = Spec((term, guard.rows or ()), guard.dropped, guard.spec.sizes)
    wide = batched(all_terms, size, [0, 1] * operand, [name for name in arrays if name in all_terms.arrays])
    (term, rows), dropped = wide.inputs, term_gathers(wide.output)
    kept_rows = None if guard.rows is None else rows
    return dataclasses.replace(guard, spec=Spec((term,), term, wide.sizes), dropped=dropped, rows=kept_rows)


def run_guard(op: Guard, inputs: Sequence[Any], index: RangedIndices) -> tuple[Any, ...]:
    """Run a guard, as `Implementation.run`."""
    (x,), (term,) = inputs, op.spec.inputs
    if index.may_drop:
        x = zero_dropped(OPS, x, term, op.dropped, op.spec, index)
    return (x if op.rows is None else zero_unread_rows(x, op.rows, op.spec, index),)


def is_left_out(guard: Guard, op: Op, lowering: str) -> bool:
    """Return whether a step leaves out by itself what a guard of its input would zero.

    A segment sum does not add what has no row. To zero it before takes a copy of the input.
    """
    sums = lowering in ("segment sum", "take, segment sum") and len(op.spec.inputs) == 1
    return sums and guard.rows is None and set(guard.dropped) <= set(term_gathers(op.spec.output))


def unread_pool(op: Op, lowering: str) -> int | None:
    """Return the pool's position among the inputs if this implementation could carry its unread rows into the result.

    Only the implementation that multiplies the whole pool can; for others the answer is None.
    """
    if lowering != WHOLE_POOL or not is_inexact(op.dtype):
        return None
    form = pooled_form(op.spec)
    assert isinstance(form, PooledForm)
    is_gradient = isinstance(op, JointGradient) or form.scores != 2
    return form.place + op.first_operand if form.place != 2 and is_gradient else None


def zero_unread_rows(x: Any, term: Term, spec: Spec, index: RangedIndices) -> Any:
    """Zero the rows of an array that no index names, if the array holds NaN or infinity; see `read_mask`."""
    return OPS.select(read_mask(x, term, spec, index), x, 0)


def read_mask(x: Any, term: Term, spec: Spec, index: RangedIndices, given: Given | None = None) -> Any:
    """Return a mask of the rows of an array that some index names.

    Zero times NaN is NaN, so a row that is multiplied by zeros only must not hold NaN. If there are many indices, the
    mask is computed in a branch of a `cond`, and is true everywhere if the array is finite. The step itself is not in
    the branch: XLA would copy the inputs and results. XLA also reserves the memory of a branch that is not taken. To
    need little, the branch goes through one index axis position by position. XLA takes 100 ms to compile that.

    Args:
        x: the array.
        term: the term by which its rows are taken.
        spec: the spec, for the sizes of the axes.
        index: index arrays in range.
        given: index arrays with values as the caller gave them, in which to look for bad indices; those of `index` by
            default. If one marks results with NaN, all rows count as read, so that no mark is zeroed.
    """
    sizes = spec.by_axis
    arrays = given or {gather: index.given[gather] for gather in Spec((term,), ()).gathers}
    if compares_rows(term, spec):
        (gather,), (array,) = term_gathers(term), arrays.values()
        values = index[gather][..., None]
        named = values == lax.iota(values.dtype, gather.size or 0)
        if array.bad is not None:
            named |= array.bad(array.values)[..., None]
        mask = named.any(tuple(range(named.ndim - 1)))
        return mask.reshape([n if entry == gather else 1 for entry, n in zip(term, x.shape, strict=True)])
    rows, indexed = row_axes(term), indexed_dims(term)
    shape = [n if d in indexed else 1 for d, n in enumerate(x.shape)]
    slow = max(
        (axis for axis in rows if axis not in term and sizes[axis]),
        key=lambda axis: stand_in(sizes[axis]),
        default=None,
    )
    narrow = dataclasses.replace(spec, sizes=tuple((a, 1 if a == slow else size) for a, size in spec.sizes))

    def is_any_bad() -> Any:
        marks = [array.bad(array.values).any() for array in arrays.values() if array.bad is not None]
        return functools.reduce(jnp.logical_or, marks, jnp.zeros((), bool))

    count = largest(math.prod(sizes[axis] for axis in rows))
    if count is not None and count <= FEW:
        return is_any_bad() | find_read_rows(OPS, x, term, spec, index)

    def find_read() -> Any:
        def add_position(position: Any, mask: Any) -> Any:
            part = RangedIndices(index.may_drop)
            for gather in Spec((term,), ()).gathers:
                array = index.given[gather]
                values = array.values
                for dim, axis in enumerate(gather.axes):
                    if axis == slow:
                        values = lax.dynamic_slice_in_dim(values, position, 1, dim)
                part[gather] = array.part(values)
            return mask | find_read_rows(OPS, x, term, narrow, part)

        return lax.fori_loop(0, sizes[slow] if slow else 1, add_position, jnp.broadcast_to(is_any_bad(), shape))

    return lax.cond(_finite(x), lambda: jnp.ones(shape, bool), find_read)


def compares_rows(term: Term, spec: Spec) -> bool:
    """Return whether the rows that a term reads are found by comparing each index with each row.

    That is one loop of XLA, which it splits over devices by itself. A sum into rows takes much longer to compile.
    """
    gathers = term_gathers(term)
    if len(gathers) != 1 or term.count(gathers[0]) > 1 or set(row_axes(term)) & set(term):
        return False
    if len(set(gathers[0].axes)) < len(gathers[0].axes):  # only the diagonal of the index array is read
        return False
    count = largest(math.prod(spec.shape(gathers[0].axes)) * (gathers[0].size or 0))
    return count is not None and count <= FEW_PAIRS


def _finite(x: Any) -> Any:
    """Return whether all numbers are finite, on CPUs in a half to a quarter of the time of `isfinite(x).all()`."""
    return jnp.abs(x).max(initial=0) < jnp.inf


def poison(x: Any, term: Term, spec: Spec, given: Mapping[Gather, Any]) -> Any:
    """Put NaN into the entries of a result that depend on a bad index.

    If the result has axes of the index array, these are the entries at the place of the bad index. Otherwise, as in a
    segment sum, the index could have meant any entry, so all of them become NaN.

    Args:
        x: a result.
        term: its term.
        spec: the spec by which it was computed.
        given: the index arrays, before they are brought into range.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x

    def put_nan(x: Any) -> Any:
        for gather, values in given.items():  # the check is inside the branch, so that no copy is held for it
            x = OPS.select(~_bad_mask(gather, values, term, spec), x, math.nan)
        return x

    most = largest(math.prod(x.shape) * x.dtype.itemsize)
    if most is not None and most <= SMALL:
        return put_nan(x)
    bad = [any_bad(values, gather) for gather, values in given.items()]
    # Usually no index is bad: then only the index arrays are read, and the result is not copied.
    return lax.cond(functools.reduce(operator.or_, bad), put_nan, lambda x: x, x) if bad else x


def _bad_mask(gather: Gather, values: Any, term: Term, spec: Spec) -> Any:
    """Return a mask of the entries of a result that depend on bad indices; it broadcasts to the result."""
    # Along an axis that the term repeats, an index decides the diagonal only.
    along = tuple(entry for entry in term if entry in gather.axes)
    if not along or len(set(gather.axes)) < len(gather.axes):
        return any_bad(values, gather)
    bad = is_bad(values, gather)
    mask = evaluate(OPS, Spec((gather.axes,), along, spec.sizes), [bad], {}, may_drop=False)
    return mask.reshape([spec.size(entry) if entry in along else 1 for entry in term])
