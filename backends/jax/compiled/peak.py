"""How many bytes XLA takes for a program that it compiles as a whole, by its rules for CPUs.

1. Takes, diagonals, repeats, casts, guards and products without a sum are loops. A loop joins the loops that read its
   value. The value is in memory only for steps of other kinds, and as a result. A cast that the step which reads it
   makes is never a result.
2. Rows and diagonals that two steps read are in memory. Each of these steps marks bad rows itself. But where an
   operation reads them that no loop joins, they are marked in memory. Diagonals are taken before rows.
3. Matrix products and segment sums read memory. So do sums, but for those of few elements in short runs.
4. Each value is computed in an order of its axes, and a loop can write it in any other. A matrix product reads its
   factors in the order in which it multiplies them. A result has the order of its axes. Where orders differ, XLA
   copies. To it, a product whose axes of size 1 are not the first is in another order. Where a product joins several
   axes, it reads another array than the result is, and XLA computes both.
5. Segment sums that start from the same zeros each copy these. If sums belong to places of an index array, a loop marks
   the bad ones afterwards. A mask of the rows that are read is such a sum too, and guards of equal terms share it.
6. What needs operands only runs first, by the last operand that it reads; then what needs nothing, such as the zeros to
   which a segment sum adds; then what needs only that, and so on. A product that reads an array in other dimensions
   runs after those that read it as it is.
7. Results have memory of their own. Other values that fit lie in it while it is not needed, see `buffers`. Guards are
   written over what they guard, and a product by element over a factor of its axes, if nothing reads these later.

`tests/test_memory.py` compares the outcome with what XLA says of random programs.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

from planner.backends.common.stock_rows import KINDS
from planner.backends.jax.compiled.arrangement import permuted, wide_axes
from planner.backends.jax.compiled.buffers import Buffer, peak_bytes
from planner.backends.jax.compiled.orders import DotOrders, dot_orders, gradients_of_own_steps
from planner.backends.jax.guards import SMALL, compares_rows
from planner.backends.jax.index import FEW
from planner.backends.jax.ops import appends_nan
from planner.backends.jax.rows import PERMUTED, PLAIN
from planner.language.dtypes import itemsize
from planner.language.options import MODES
from planner.language.spec import Gather, Spec, Term, indexed_dims, plain_axes, row_axes, term_axes, term_gathers
from planner.program.forms import inner_product
from planner.program.ops import Cast, Guard
from planner.program.program import Step, Variable

Axes = tuple[str, ...]
Order = tuple[int, ...]

# A function of XLA's library adds up so many elements or more. Below, a loop does, if it adds no more than `_RUN` along
# an axis; along longer ones it adds up parts, which it writes to memory.
_LIBRARY, _RUN = 4096, 32


@dataclasses.dataclass(eq=False, slots=True)
class _Value:
    """A value.

    Attributes:
        shape: its shape.
        order: its dimensions in the order in which it is computed, those of size 1 left out.
        itemsize: bytes of an element.
        reads: the buffers that a step reads which reads it where it is, or computes it.
        narrow_first: whether XLA puts dimensions of size 1 first, where the value has them behind others.
        in_memory: whether it is in memory, in its order.
        buffer: its memory; None if it has none, or if the caller owns it.
        distinct: how many elements there are before they are repeated.
        over: the buffers that its memory may be written over.
        rows: the memory of the rows or the diagonal that it is, if several steps read them.
        is_final: whether it is a diagonal, or rows that a loop marks as it takes them: nothing is marked in it later.
        marked: the result that a loop marks the rows into; None if there is none.
        written: its memory elsewhere, by its order, and whether a product reads it in other dimensions.
    """

    shape: tuple[int, ...]
    order: Order
    itemsize: int
    reads: tuple[Buffer, ...] = ()
    narrow_first: bool = False
    in_memory: bool = False
    buffer: Buffer | None = None
    distinct: int = 0
    over: tuple[Buffer, ...] = ()
    rows: Buffer | None = None
    is_final: bool = False
    marked: Buffer | None = None
    written: dict[tuple[Order, bool], Buffer] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * self.itemsize

    def axes(self, term: Term) -> Axes:
        """Return the axes in the order in which they are computed; `term` names them."""
        return tuple(str(term[dim]) for dim in self.order)


def compiled_peak(
    steps: Sequence[Step],
    variables: Sequence[Variable],
    given: Sequence[int],
    held: Sequence[int],
    gradient: int | None,
    index_mode: str,
) -> int:
    """Return the bytes of results and temporaries of a program that XLA compiles as a whole.

    Args:
        steps: the program.
        variables: the table of variables.
        given: the variables that the caller owns.
        held: the variables that outlive the program.
        gradient: the variable of the output's gradient in a backward program, else None.
        index_mode: the index mode.
    """
    program = _Compiled(steps, variables, given, held, gradient, index_mode)
    for step in steps:
        program.add(step)
    return peak_bytes(program.buffers)


class _Compiled:
    """A program as buffers, in the order of its steps.

    Attributes:
        buffers: all buffers. Operands, index arrays and constants are buffers of no bytes, which come first.
        values: the variables' values, by number.
        results: the variables that outlive the program.
        uses: how often each variable is read; a result is read once more.
        gradients: the variables that are gradients.
        guarded: the variables of guards.
        own: the gradients of results that steps of ours compute: JAX derives none of the steps that read these.
        bad: what becomes of bad indices, see `IndexMode`.
        arrays: the index arrays, by name.
        constant: the constants.
        zeros: what sums are added to, by shape, size of an element, and what it is made of. If several start from the
            same, the first is what each copies.
        masks: the masks of rows that are read, by the term, its shape and the size of an element.
        indices: index arrays for several dimensions, by what they are made of.
        bounds: whether an index is bad, by the names of the index arrays.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        variables: Sequence[Variable],
        given: Sequence[int],
        held: Sequence[int],
        gradient: int | None,
        index_mode: str,
    ) -> None:
        self.buffers: list[Buffer] = []
        self.values: dict[int, _Value] = {}
        # JAX passes the output's gradient last, after the index arrays.
        for number in given:
            if number != gradient:
                self._give(number, variables)
        self.arrays = {array: self._new(0) for array in sorted({a for step in steps for a in step.op.arrays})}
        if gradient is not None:
            self._give(gradient, variables)
        self.constant = self._new(0)
        # What a step casts as it reads it is no result: the operand is kept, and cast again.
        self.results = {number for number in set(held) - set(given) if not _is_cast(variables, number)}
        self.uses = collections.Counter((*itertools.chain(*(step.inputs for step in steps)), *self.results))
        backward = [] if gradient is None else [step for step in steps if not step.recomputed]
        self.gradients: set[int | None] = {gradient, *(number for step in backward for number in step.outputs)}
        self.guarded: set[int] = set()
        self.own: set[int | None] = set()
        for step in steps:
            if isinstance(step.op, Guard):
                self.guarded.update(step.inputs, step.outputs)
            elif step.choice.lowering not in PLAIN:
                self.own.update(self.gradients & {*step.inputs})
        self.own.update(gradients_of_own_steps(backward, self.gradients))
        self.bad = MODES[index_mode].bad
        self.zeros: dict[tuple[tuple[int, ...], int, Buffer], list[Buffer]] = {}
        self.masks: dict[tuple[Term, tuple[int, ...], int], tuple[Buffer, ...]] = {}
        self.indices: dict[tuple[Term, tuple[int, ...], tuple[int, ...], bool], Buffer] = {}
        self.bounds: dict[tuple[str, ...], Buffer] = {}

    def _give(self, number: int, variables: Sequence[Variable]) -> None:
        """Add a variable that the caller owns."""
        shape, size = variables[number].shape, itemsize(variables[number].dtype)
        is_cast = _is_cast(variables, number)
        reads = self.values[variables[number].base].reads if is_cast else (self._new(0),)
        self.values[number] = _Value(shape, _row_major(shape), size, reads, in_memory=not is_cast)

    def add(self, step: Step) -> None:
        """Add the buffers of a step."""
        op, inputs = step.op, [self.values[number] for number in step.inputs]
        if isinstance(op, Guard):
            results = [self._guarded(op, inputs[0])]
        elif isinstance(op, Cast):
            (x,) = inputs
            results = [_Value(x.shape, x.order, itemsize(op.dtype), x.reads, distinct=x.distinct)]
        elif step.choice.lowering in (*KINDS, PERMUTED):
            results = [self._einsum(step, op.spec, inputs)]
        else:  # a kernel, or a loop over slices
            reads = [buffer for x in inputs for buffer in self._memory(x)]
            reads.append(self._new(step.choice.cost.scratch_bytes, reads))
            pairs = zip(op.output_shapes, op.output_dtypes, strict=True)
            results = [self._stored(shape, _row_major(shape), itemsize(dtype), reads) for shape, dtype in pairs]
        for number, value in zip(step.outputs, results, strict=True):
            self.values[number] = value
            if number in self.results:
                self._hold(value)

    def _new(self, size: int, reads: Iterable[Buffer] = (), over: tuple[Buffer, ...] = ()) -> Buffer:
        """Return a new buffer."""
        self.buffers.append(Buffer(size, tuple(dict.fromkeys(reads)), over))
        return self.buffers[-1]

    def _stored(self, shape: tuple[int, ...], order: Order, size: int, reads: Iterable[Buffer]) -> _Value:
        """Return a value in memory."""
        buffer = self._new(math.prod(shape) * size, reads)
        return _Value(shape, order, size, (buffer,), in_memory=True, buffer=buffer)

    def _memory(self, value: _Value, order: Order | None = None, reshaped: bool = False) -> tuple[Buffer, ...]:
        """Return what a step reads that needs a value in memory: in an order, or in its own; in other dimensions."""
        order = value.order if order is None else order
        is_own = order == value.order
        if value.in_memory and is_own:
            return value.reads
        if value.rows is not None and is_own and not reshaped:  # they are marked where they are
            if value.marked is not None:
                self.buffers.remove(value.marked)
                value.rows.is_result, value.marked = True, None
            return (value.rows,)
        key = order, reshaped and is_own
        if key not in value.written:
            value.written[key] = self._new(value.bytes, value.reads, value.over if is_own else ())
        return (value.written[key],)

    def _hold(self, value: _Value) -> None:
        """Make a value a result. If a program has one result only, a loop writes it in its order."""
        is_turned = value.narrow_first or value.order != _row_major(value.shape)
        marks = self.bad in ("refuse", "drop") and not value.is_final
        memory = value.buffer if value.rows is None or marks else value.rows
        if memory is not None and not is_turned:
            memory.is_result = True
            return
        buffer = self._new(value.bytes, value.reads, () if is_turned else value.over)
        if not is_turned and value.rows is not None:
            value.marked = buffer
        elif not is_turned:
            value.written[value.order, False] = buffer
        elif not value.in_memory and len(self.results) > 1:
            buffer = self._new(value.bytes, (buffer,))
        buffer.is_result = True

    def _guarded(self, op: Guard, x: _Value) -> _Value:
        """Return a guarded value: a loop, which also reads a mask of the rows that are read; see `read_mask`."""
        reads = list(x.reads)
        if op.rows is not None and not compares_rows(op.rows, op.spec):
            if math.prod(op.spec.shape(row_axes(op.rows))) > FEW:
                reads.append(self._new(x.itemsize, self._absolute(x)))  # the largest number
            reads += self._read_mask(op.rows, op.spec, x.itemsize)
        over = x.over if x.buffer is None else (x.buffer,)
        return _Value(x.shape, x.order, x.itemsize, tuple(reads), distinct=x.distinct, over=over)

    def _absolute(self, x: _Value) -> tuple[Buffer, ...]:
        """Return what is read to find the largest absolute value."""
        elements = x.distinct or math.prod(x.shape)
        if _joins_loop(elements, x.shape) or (x.in_memory and elements >= _LIBRARY):
            return x.reads
        return (*x.reads, self._new(elements * x.itemsize, x.reads))

    def _read_mask(self, rows: Term, spec: Spec, size: int) -> tuple[Buffer, ...]:
        """Return the mask of the rows that are read: a sum of ones."""
        key = rows, spec.shape(rows), size
        if key not in self.masks:
            shape = spec.shape(tuple(rows[dim] for dim in indexed_dims(rows)))
            self.masks[key] = self._sum(shape, size, self.constant, self._index(spec, rows, clamped=True))
        return self.masks[key]

    def _index(self, spec: Spec, term: Term, clamped: bool = False) -> list[Buffer]:
        """Return the index array that a term is read by: one of 32 bits, if it addresses several dimensions at once."""
        entries = tuple(term[dim] for dim in indexed_dims(term))
        arrays = [self.arrays[gather.array] for gather in term_gathers(term)]
        if len(entries) < 2:
            return arrays
        rows = spec.shape(row_axes(term))
        key = entries, spec.shape(entries), rows, clamped
        if key not in self.indices:
            self.indices[key] = self._new(4 * len(entries) * math.prod(rows), arrays)
        return [self.indices[key]]

    def _sum(self, shape: tuple[int, ...], size: int, start: Buffer, reads: Sequence[Buffer]) -> tuple[Buffer, ...]:
        """Return a segment sum: the memory that it starts from, and what says that all is added to it."""
        zeros = self._new(math.prod(shape) * size, (start,))
        same = self.zeros.setdefault((shape, size, start), [])
        if len(same) == 1:
            (first,) = same
            same.insert(0, Buffer(first.size, (start,)))
            self.buffers.insert(self.buffers.index(first), same[0])
            first.reads = (same[0],)
        same.append(zeros)
        if len(same) > 1:
            zeros.reads = (same[0],)
        return zeros, self._new(0, (zeros, *reads))

    def _einsum(self, step: Step, spec: Spec, inputs: Sequence[_Value]) -> _Value:
        """Return the result of a stock step: it reads its inputs, multiplies them, and writes the product."""
        alone = len(inputs) == 1
        shared = alone and self.uses[step.outputs[0]] > 1
        x, axes = self._read(spec, 0, inputs[0], shared)
        if not alone:
            y, others = self._read(spec, 1, inputs[1])
            inner = inner_product(spec, (axes, others))
            if step.choice.lowering == PERMUTED:  # a loop or product that reads it reads it in this order
                inner = permuted(inner) or inner
            x, axes = self._product(inner, x, y, self._own_gradient(step)), term_axes(inner.output)
        return self._write(spec, x, axes)

    def _read(self, spec: Spec, number: int, x: _Value, shared: bool = False) -> tuple[_Value, Axes]:
        """Return an input after it is read, and its axes: rows are taken, and axes summed that no other term has."""
        term = spec.inputs[number]
        axes = tuple(dict.fromkeys((*row_axes(term), *sorted(plain_axes(term), key=lambda axis: -term.count(axis)))))
        if term == tuple(plain_axes(term)) and len(axes) == len(term):
            axes = term_axes(term)
        else:  # rows, or a diagonal
            pool = x.size
            # A loop that takes rows computes their places from the index arrays.
            shape, index = spec.shape(axes), [self.arrays[gather.array] for gather in term_gathers(term)]
            twice = dict.fromkeys(axis for axis in plain_axes(term) if term.count(axis) > 1)
            index += [self._new(8 * spec.size(axis)) for axis in twice]
            x = _Value(shape, _row_major(shape), x.itemsize, (*x.reads, *index))
            rows, gathers = math.prod(spec.shape(row_axes(term))), term_gathers(term)
            appends = len(spec.inputs) == len(gathers) == 1 and self.bad == "refuse"
            x.is_final = not gathers or (appends and appends_nan(pool, rows, x.size, x.itemsize))
        others = {axis for place, other in enumerate(spec.terms) if place != number for axis in term_axes(other)}
        left = tuple(axis for axis in axes if axis in others)
        if len(left) < len(axes):
            joins = _joins_loop(math.prod(x.shape), [spec.size(axis) for axis in axes if axis not in others])
            order = tuple(left.index(axis) for axis in x.axes(axes) if axis in others)
            reads = x.reads if joins else self._memory(x)
            x = self._stored(spec.shape(left), order, x.itemsize, (*reads, self.constant) if x.in_memory else reads)
        elif shared and not x.in_memory and term != axes:
            x.rows = self._new(x.bytes, x.reads)
            x.reads = (x.rows,)
        return x, left

    def _own_gradient(self, step: Step) -> int | None:
        """Return which input is a gradient, if JAX's own rule derives the step from a product; else None."""
        if step.recomputed or self.guarded & {*step.inputs, *step.outputs} or self.own & {*step.inputs}:
            return None
        places = [place for place, number in enumerate(step.inputs) if number in self.gradients]
        return places[0] if len(places) == 1 else None

    def _product(self, spec: Spec, x: _Value, y: _Value, gradient: int | None) -> _Value:
        """Return the product of two values."""
        terms = spec.inputs
        orders = dot_orders(spec, gradient, (x.axes(terms[0]), y.axes(terms[1])))
        shape, order = spec.output_shape, tuple(spec.output.index(axis) for axis in orders.result)
        narrow = [size == 1 for size in shape]
        narrow_first = narrow != sorted(narrow, reverse=True)
        summed = [spec.size(axis) for axis in terms[0] if axis not in spec.output and axis in terms[1]]
        if math.prod(summed) == 1:
            axes = orders.multiplied
            straight = axes == wide_axes(spec.output, spec)
            pairs = zip((x, y), terms, strict=True)
            whole = [v for v, term in pairs if straight and v.axes(term) == axes == wide_axes(term, spec)]
            over = tuple(itertools.chain(*((v.buffer,) if v.buffer is not None else v.over for v in whole)))
            return _Value(shape, order, x.itemsize, (*x.reads, *y.reads), narrow_first=narrow_first, over=over)
        elements, run = math.prod(x.shape), math.prod(summed)
        if not orders.elementwise or elements >= _LIBRARY:
            reads = self._factors(spec, (x, y), orders)
        else:
            reads = [*x.reads, *y.reads]
            if run > _RUN:
                reads = [self._new(elements * x.itemsize, reads)]
        value = self._stored(shape, order, x.itemsize, reads)
        value.narrow_first = narrow_first
        return value

    def _factors(self, spec: Spec, values: tuple[_Value, _Value], orders: DotOrders) -> list[Buffer]:
        """Return what a product of two factors in memory reads.

        XLA multiplies matrices. It reads an array in other dimensions whose rows, or whose summed axes, are not one.
        """
        reads: list[Buffer] = []
        summed = [axis for axis in spec.inputs[0] if axis not in spec.output]
        for place, (value, term, wanted) in enumerate(zip(values, spec.inputs, orders.factors, strict=True)):
            order = None if wanted is None else tuple(map(term.index, wanted))
            if orders.elementwise:
                reads += self._memory(value, _row_major(value.shape) if order is None else order)
                continue
            rows = [axis for axis in term if axis not in spec.inputs[1 - place]]
            reshaped = len(rows) != 1 or len(summed) != 1
            reads += self._memory(value, order, reshaped)
            if reshaped and value.in_memory and order in (None, value.order):
                reads.append(self._new(0, reads[-1:]))
        return reads

    def _write(self, spec: Spec, x: _Value, axes: Axes) -> _Value:
        """Return a value with these axes as the result of a step."""
        out, shape = spec.output, spec.output_shape
        indexed = indexed_dims(out)
        if not indexed and set(axes) == set(out):
            order = tuple(out.index(axis) for axis in x.axes(axes))
            memory = x.rows if x.marked is None else None  # another view of a result is no result
            return dataclasses.replace(x, shape=shape, order=order, written={}, rows=memory, marked=None)
        if not indexed:  # repeated along new axes
            distinct = x.distinct or math.prod(x.shape)
            return _Value(shape, _row_major(shape), x.itemsize, x.reads, distinct=distinct)
        rows = (*row_axes(out), *(axis for axis in plain_axes(out) if out.count(axis) > 1))
        added = tuple(dict.fromkeys((*rows, *plain_axes(out))))
        if set(added) <= set(axes):
            updates = self._memory(x, tuple(axes.index(axis) for axis in added if spec.size(axis) != 1))
        else:
            updates = (self._new(math.prod(spec.shape(added)) * x.itemsize, x.reads),)
        dims = tuple(dict.fromkeys((*indexed, *range(len(out)))))  # in which order they are written
        order = tuple(dim for dim in dims if shape[dim] != 1)
        gathers = term_gathers(out)
        marks_places = self.bad == "refuse" and any(axis in out for gather in gathers for axis in gather.axes)
        start = self.constant if marks_places or self.bad != "refuse" or not gathers else self._bounds(gathers)
        reads = (*updates, *self._index(spec, out))
        done = self._sum(tuple(shape[dim] for dim in dims), x.itemsize, start, reads)
        if marks_places and math.prod(shape) * x.itemsize <= SMALL:
            return _Value(shape, order, x.itemsize, done, over=done[:1])
        return _Value(shape, order, x.itemsize, done, in_memory=True, buffer=done[0])

    def _bounds(self, gathers: Sequence[Gather]) -> Buffer:
        """Return whether an index is bad: two numbers, and what is made of them."""
        names = tuple(gather.array for gather in gathers)
        if names not in self.bounds:
            self.bounds[names] = self._new(0, (self._new(0, map(self.arrays.__getitem__, names)),))
        return self.bounds[names]


def _joins_loop(elements: int, summed: Iterable[int]) -> bool:
    """Return whether a sum joins the loop that computes what it adds up."""
    return elements < _LIBRARY and max(summed, default=1) <= _RUN


def _is_cast(variables: Sequence[Variable], number: int) -> bool:
    """Return whether a variable is what a step casts as it reads it: its memory is that of a narrower value."""
    return variables[number].dtype != variables[variables[number].base].dtype


def _row_major(shape: Sequence[int]) -> Order:
    return tuple(dim for dim, size in enumerate(shape) if size != 1)
