"""How many bytes XLA takes for a program that it compiles as a whole, by its rules for CPUs.

1. Takes, diagonals, repeats, casts and products without a sum are loops. A loop joins the loops that read its value.
   The value is in memory only for steps of other kinds, and as a result. Rows and diagonals that two steps read are in
   memory besides.
2. Matrix products and segment sums read memory. So do sums, but for those of few elements in short runs.
3. Each value is computed in an order of its axes, and a loop can write it in any other. A matrix product reads its
   factors in the order in which it multiplies them. A result has the order of its axes. Where orders differ, XLA
   copies. To it, a product whose axes of size 1 are not the first is in another order.
4. What needs nothing runs first, then what needs only that, and so on. So copies of operands, and the zeros to which a
   segment sum adds, are in memory from the beginning.
5. Results have memory of their own. Other values that fit lie in it before the result is written. A product by element
   is written over a factor of its size and order that nothing reads later.

`tests/test_memory.py` compares the outcome with what XLA says of random programs.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from planner.backends.common.stock_rows import KINDS
from planner.backends.jax.products import arranged, wide_axes
from planner.backends.jax.rows import PLAIN
from planner.language.cached import cached_by_step
from planner.language.derive import swap_with_output
from planner.language.dtypes import itemsize
from planner.language.spec import Spec, Term, indexed_dims, plain_axes, row_axes, term_axes
from planner.program.forms import inner_product, product_form
from planner.program.ops import Cast, Guard
from planner.program.program import Step, Variable

__all__ = ["compiled_peak"]

Axes = tuple[str, ...]
Order = tuple[int, ...]

# A function of XLA's library adds up so many elements or more. Below, a loop does, if it adds no more than `_RUN` along
# an axis; along longer ones it adds up parts, which it writes to memory.
_LIBRARY, _RUN = 4096, 32


@dataclasses.dataclass(eq=False, slots=True)
class _Buffer:
    """Memory.

    Attributes:
        size: its bytes.
        reads: the buffers that are read to fill it.
        over: those of them that it may be written over, if nothing reads them later.
        is_result: whether it holds a result of the program.
    """

    size: int
    reads: tuple[_Buffer, ...]
    over: tuple[_Buffer, ...] = ()
    is_result: bool = False


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
        written: its memory in other orders.
    """

    shape: tuple[int, ...]
    order: Order
    itemsize: int
    reads: tuple[_Buffer, ...] = ()
    narrow_first: bool = False
    in_memory: bool = False
    buffer: _Buffer | None = None
    distinct: int = 0
    over: tuple[_Buffer, ...] = ()
    written: dict[Order, _Buffer] = dataclasses.field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def axes(self, term: Term) -> Axes:
        """Return the axes in the order in which they are computed; `term` names them."""
        return tuple(str(term[dim]) for dim in self.order)


def compiled_peak(
    steps: Sequence[Step],
    variables: Sequence[Variable],
    given: Sequence[int],
    held: Sequence[int],
    gradient: int | None = None,
) -> int:
    """Return the bytes of results and temporaries of a program that XLA compiles as a whole.

    Args:
        steps: the program.
        variables: the table of variables.
        given: the variables that the caller owns.
        held: the variables that outlive the program.
        gradient: the variable of the output's gradient in a backward program, else None.
    """
    program = _Compiled(steps, variables, given, held, gradient)
    for step in steps:
        program.add(step)
    return _peak(program.buffers)


def _peak(buffers: Sequence[_Buffer]) -> int:
    """Return the bytes of results and of the other buffers that are alive at once and fit into no result."""
    users: dict[_Buffer, list[_Buffer]] = {buffer: [] for buffer in buffers}
    missing = {buffer: len(buffer.reads) for buffer in buffers}
    for buffer in buffers:
        for read in buffer.reads:
            users[read].append(buffer)
    queue = [buffer for buffer in buffers if not buffer.reads]
    for buffer in queue:  # it grows
        for user in users[buffer]:
            missing[user] -= 1
            if not missing[user]:
                queue.append(user)
    start = {buffer: number for number, buffer in enumerate(queue)}
    end = {buffer: max((start[user] for user in users[buffer]), default=start[buffer]) for buffer in buffers}
    for buffer in queue:
        below = next((each for each in buffer.over if end[each] == start[buffer] and not each.is_result), None)
        if below is not None:
            end[below] -= 1
    results = [(buffer.size, [(start[buffer], len(queue))]) for buffer in buffers if buffer.is_result]
    alive = [0] * len(queue)
    for buffer in sorted(buffers, key=lambda buffer: -buffer.size):
        if buffer.is_result:
            continue
        first, last = start[buffer], end[buffer]
        for size, times in results:
            if buffer.size <= size and all(last < begin or stop < first for begin, stop in times):
                times.append((first, last))
                break
        else:
            for number in range(first, last + 1):
                alive[number] += buffer.size
    return sum(size for size, _ in results) + max(alive, default=0)


class _Compiled:
    """A program as buffers, in the order of its steps.

    Attributes:
        buffers: all buffers.
        values: the variables' values, by number.
        results: the variables that outlive the program.
        uses: how often each variable is read; a result is read once more.
        gradients: the variables that are gradients.
        own: the variables of guards, and the gradients that steps read which are no operations of JAX.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        variables: Sequence[Variable],
        given: Sequence[int],
        held: Sequence[int],
        gradient: int | None,
    ) -> None:
        self.buffers: list[_Buffer] = []
        self.values: dict[int, _Value] = {}
        for number in given:
            shape = variables[number].shape
            self.values[number] = _Value(shape, _row_major(shape), itemsize(variables[number].dtype), in_memory=True)
        self.results = set(held) - set(given)
        self.uses = collections.Counter((*itertools.chain(*(step.inputs for step in steps)), *self.results))
        backward = [] if gradient is None else [step for step in steps if not step.recomputed]
        self.gradients: set[int | None] = {gradient, *(number for step in backward for number in step.outputs)}
        self.own: set[int | None] = set()
        for step in steps:
            if isinstance(step.op, Guard):
                self.own.update(step.inputs, step.outputs)
            elif step.choice.lowering not in PLAIN:
                self.own.update(self.gradients & {*step.inputs})

    def add(self, step: Step) -> None:
        """Add the buffers of a step."""
        op, inputs = step.op, [self.values[number] for number in step.inputs]
        if isinstance(op, Guard):
            results = [self._guarded(op, inputs[0])]
        elif isinstance(op, Cast):
            (x,) = inputs
            loop = _Value(x.shape, x.order, itemsize(op.dtype), x.reads, distinct=x.distinct)
            results = [x if op.fused else loop]
        elif step.choice.lowering in KINDS:
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

    def _new(self, size: int, reads: Iterable[_Buffer] = (), over: tuple[_Buffer, ...] = ()) -> _Buffer:
        """Return a new buffer."""
        self.buffers.append(_Buffer(size, tuple(dict.fromkeys(reads)), over))
        return self.buffers[-1]

    def _stored(self, shape: tuple[int, ...], order: Order, size: int, reads: Iterable[_Buffer]) -> _Value:
        """Return a value in memory."""
        buffer = self._new(math.prod(shape) * size, reads)
        return _Value(shape, order, size, (buffer,), in_memory=True, buffer=buffer)

    def _memory(self, value: _Value, order: Order | None = None) -> tuple[_Buffer, ...]:
        """Return what a step reads that needs a value in memory: in an order, or in its own."""
        order = value.order if order is None else order
        if value.in_memory and order == value.order:
            return value.reads
        if order not in value.written:
            value.written[order] = self._new(value.bytes, value.reads, value.over if order == value.order else ())
        return (value.written[order],)

    def _hold(self, value: _Value) -> None:
        """Make a value a result. If a program has one result only, a loop writes it in its order."""
        is_turned = value.narrow_first or value.order != _row_major(value.shape)
        if value.buffer is not None and not is_turned:
            value.buffer.is_result = True
            return
        buffer = self._new(value.bytes, value.reads, () if is_turned else value.over)
        if not is_turned:
            value.written[value.order] = buffer
        elif not value.in_memory and len(self.results) > 1:
            buffer = self._new(value.bytes, (buffer,))
        buffer.is_result = True

    def _guarded(self, op: Guard, x: _Value) -> _Value:
        """Return a guarded value: a loop, which also reads which rows are read, and the largest number."""
        reads = list(x.reads)
        if op.rows is not None:
            elements = x.distinct or math.prod(x.shape)
            if not _joins_loop(elements, x.shape) and not (x.in_memory and elements >= _LIBRARY):
                reads.append(self._new(elements * x.itemsize, x.reads))  # the absolute values
            indexed = indexed_dims(op.rows)
            rows = math.prod(size for dim, size in enumerate(x.shape) if dim in indexed)
            reads = [
                *x.reads,
                self._new(x.itemsize, reads),
                self._new(x.itemsize * rows, self._index(op.spec, op.rows)),
            ]
        return _Value(x.shape, x.order, x.itemsize, tuple(reads), distinct=x.distinct)

    def _index(self, spec: Spec, term: Term) -> list[_Buffer]:
        """Return the index array, of 32 bits, that addresses several dimensions at once."""
        count = len(indexed_dims(term))
        return [self._new(4 * count * math.prod(spec.shape(row_axes(term))))] if count > 1 else []

    def _einsum(self, step: Step, spec: Spec, inputs: Sequence[_Value]) -> _Value:
        """Return the result of a stock step: it reads its inputs, multiplies them, and writes the product."""
        alone = len(inputs) == 1
        shared = alone and self.uses[step.outputs[0]] > 1
        x, axes = self._read(spec, 0, inputs[0], shared)
        if not alone:
            y, others = self._read(spec, 1, inputs[1])
            inner = inner_product(spec, (axes, others))
            x, axes = self._product(inner, x, y, self._own_gradient(step)), term_axes(inner.output)
        return self._write(spec, x, axes)

    def _read(self, spec: Spec, number: int, x: _Value, shared: bool = False) -> tuple[_Value, Axes]:
        """Return an input after it is read, and its axes: rows are taken, and axes summed that no other term has."""
        term = spec.inputs[number]
        axes = tuple(dict.fromkeys((*row_axes(term), *sorted(plain_axes(term), key=lambda axis: -term.count(axis)))))
        if term == tuple(plain_axes(term)) and len(axes) == len(term):
            axes = term_axes(term)
        else:  # rows, or a diagonal
            shape = spec.shape(axes)
            x = _Value(shape, _row_major(shape), x.itemsize, (*x.reads, *self._index(spec, term)))
        others = {axis for place, other in enumerate(spec.terms) if place != number for axis in term_axes(other)}
        left = tuple(axis for axis in axes if axis in others)
        if len(left) < len(axes):
            joins = _joins_loop(math.prod(x.shape), [spec.size(axis) for axis in axes if axis not in others])
            order = tuple(left.index(axis) for axis in x.axes(axes) if axis in others)
            x = self._stored(spec.shape(left), order, x.itemsize, x.reads if joins else self._memory(x))
        elif shared and not x.in_memory and term != axes:
            x.reads = (self._new(x.bytes, x.reads),)
        return x, left

    def _own_gradient(self, step: Step) -> int | None:
        """Return which input is a gradient, if JAX's own rule derives the step from a product; else None."""
        if step.recomputed or self.own & {*step.inputs, *step.outputs}:
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
            axes = [axis for axis in orders.result if spec.size(axis) != 1]
            whole = [value for value, term in zip((x, y), terms, strict=True) if list(value.axes(term)) == axes]
            over = tuple(itertools.chain(*((v.buffer,) if v.buffer is not None else v.over for v in whole)))
            return _Value(shape, order, x.itemsize, (*x.reads, *y.reads), narrow_first=narrow_first, over=over)
        elements, run = math.prod(x.shape), math.prod(summed)
        if not orders.elementwise or elements >= _LIBRARY:
            reads: list[_Buffer] = []
            for value, term, wanted in zip((x, y), terms, orders.factors, strict=True):
                reads += self._memory(value, None if wanted is None else tuple(map(term.index, wanted)))
        else:
            reads = [*x.reads, *y.reads]
            if run > _RUN:
                reads = [self._new(elements * x.itemsize, reads)]
        value = self._stored(shape, order, x.itemsize, reads)
        value.narrow_first = narrow_first
        return value

    def _write(self, spec: Spec, x: _Value, axes: Axes) -> _Value:
        """Return a value with these axes as the result of a step."""
        out, shape = spec.output, spec.output_shape
        indexed = indexed_dims(out)
        if not indexed and set(axes) == set(out):
            order = tuple(out.index(axis) for axis in x.axes(axes))
            return dataclasses.replace(x, shape=shape, order=order, written={})
        if not indexed:  # repeated along new axes
            distinct = x.distinct or math.prod(x.shape)
            return _Value(shape, _row_major(shape), x.itemsize, x.reads, distinct=distinct)
        rows = (*row_axes(out), *(axis for axis in plain_axes(out) if out.count(axis) > 1))
        added = tuple(dict.fromkeys((*rows, *plain_axes(out))))
        if set(added) <= set(axes):
            updates = self._memory(x, tuple(axes.index(axis) for axis in added if spec.size(axis) != 1))
        else:
            updates = (self._new(math.prod(spec.shape(added)) * x.itemsize, x.reads),)
        zeros = self._new(math.prod(shape) * x.itemsize)
        done = self._new(0, (zeros, *updates, *self._index(spec, out)))
        order = tuple(dim for dim in (*indexed, *range(len(out))) if shape[dim] != 1)
        return _Value(shape, tuple(dict.fromkeys(order)), x.itemsize, (zeros, done), in_memory=True, buffer=zeros)


def _joins_loop(elements: int, summed: Iterable[int]) -> bool:
    """Return whether a sum joins the loop that computes what it adds up."""
    return elements < _LIBRARY and max(summed, default=1) <= _RUN


def _row_major(shape: Sequence[int]) -> Order:
    return tuple(dim for dim, size in enumerate(shape) if size != 1)


class DotOrders(NamedTuple):
    """In which order XLA multiplies the axes of a product, those of size 1 left out.

    Attributes:
        result: the axes of the result.
        factors: the axes of each factor; None if XLA multiplies it as it lies in memory.
        elementwise: whether neither factor has rows or columns of its own.
    """

    result: tuple[str, ...]
    factors: tuple[tuple[str, ...] | None, tuple[str, ...] | None]
    elementwise: bool


@cached_by_step
def dot_orders(spec: Spec, gradient: int | None, memory: tuple[tuple[str, ...], ...]) -> DotOrders:
    """Return the orders of a product.

    JAX derives a product in an arrangement of its own. It permutes the gradient to the order in which the product was
    computed, and multiplies it as the first factor.

    Args:
        spec: the product.
        gradient: the input that is the gradient, if JAX derives the product; else None.
        memory: the axes of each factor as they lie in memory, or are computed.
    """
    terms = [wide_axes(term, spec) for term in spec.inputs]
    derived = spec if gradient is None else swap_with_output(spec, gradient)
    form, (first, second, batch, contracted, _) = product_form(derived), arranged(derived)
    assert form is not None
    free = [wide_axes(group, spec) for group in (form.left, form.right)]
    batch, contracted, out = wide_axes(batch, spec), wide_axes(contracted, spec), wide_axes(spec.output, spec)
    if gradient is not None:
        if form.contracted or len((*free[0], *free[1])) != 1:  # else XLA drops the permutation
            terms[gradient] = (*batch, *free[first], *free[second])
        first, second = gradient, 1 - gradient
        free = [tuple(axis for axis in term if axis in out and axis not in batch) for term in terms]
        contracted = tuple(axis for axis in terms[first] if axis not in out)
    rows, columns = free[first], free[second]
    if not rows and not columns:
        alike = terms[0] == terms[1] and memory[0] == memory[1]
        wanted = None if alike else (*batch, *contracted)
        # It is a loop over both, in their order.
        result = batch if not alike else tuple(axis for axis in memory[0] if axis in batch)
        if not contracted and terms[0] == terms[1]:
            result = terms[0]
        return DotOrders(result, (wanted, wanted), True)
    factors: list[tuple[str, ...] | None] = [None, None]
    for place, one, other in ((first, rows, contracted), (second, contracted, columns)):
        single, turned = len(one) <= 1 and len(other) <= 1, (*batch, *other, *one)
        if not (single and memory[place] == turned):
            permuted = single and place == gradient and terms[place] == turned
            factors[place] = turned if permuted else (*batch, *one, *other)
    result = (*batch, *rows, *columns)
    if len(rows) <= 1 and len(columns) <= 1 and out == (*batch, *columns, *rows):
        result = out
    if not contracted and len((*rows, *columns)) == 1:
        result = terms[first if rows else second]  # one factor has all axes: it is multiplied as it is
    return DotOrders(result, (factors[0], factors[1]), False)
