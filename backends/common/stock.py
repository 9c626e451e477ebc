"""Any step, from a framework's ordinary array functions: take, multiply, sum, add at.

This is what every backend falls back on, and the NumPy backend's only way. It builds gathered operands; the special
rows of a table exist to avoid that. A spec is worked out once, into functions that only touch arrays: a step inside of
a loop is run thousands of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from planner.language.spec import Gather, Spec, Term, term_axes
from planner.program.forms import ProductForm, inner_product, product_form

__all__ = ["ArrayOps", "Product", "diagonals", "evaluate", "evaluation", "matmul_product", "viewing"]

# What a spec is worked out into, once: functions of arrays.
Product = Callable[..., Any]
# Of the inputs, the index arrays, and whether these may say "no row".
Evaluation = Callable[[Sequence[Any], Mapping[Gather, Any], bool], Any]
# The same for one array, read or written through its term.
Access = Callable[[Any, Mapping[Gather, Any], bool], Any]


class ArrayOps(Hashable, Protocol):
    """The array functions that the stock evaluation is written in."""

    def permute(self, x: Any, dims: Sequence[int]) -> Any:
        """Reorder dimensions; a view."""

    def diagonal(self, x: Any, first: int, second: int) -> Any:
        """Diagonal of two dimensions, moved to the end; a view where the framework has views."""

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        """Broadcast to a shape."""

    def sum(self, x: Any, dims: Sequence[int]) -> Any:
        """Sum over dimensions, in the dtype of x, half types accumulated in float32."""

    def product(self, form: ProductForm, spec: Spec) -> Product:
        """What does a binary step without gathers; `matmul_product` makes it of `permute` and products of matrices."""

    def iota(self, size: int, like: Any) -> Any:
        """0, 1, ..., size - 1 as indices on the device of `like`."""

    def take(self, x: Any, index: Sequence[Any]) -> Any:
        """x[index] over the leading dimensions; the index arrays broadcast with each other."""

    def add_at(self, shape: Sequence[int], index: Sequence[Any], values: Any) -> Any:
        """Zeros of a shape with `values` added at leading indices, duplicates added up in order."""

    def select(self, mask: Any, x: Any, otherwise: float) -> Any:
        """X where the mask holds, which broadcasts to it, else a constant."""

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        """Zeros of the dtype and device of `like`."""


@lru_cache(maxsize=16384)
def evaluation(ops: ArrayOps, spec: Spec) -> Evaluation:
    """Return what computes a unary or binary spec: take, sum what is private, multiply, put."""
    readings, kept = zip(*(_reading(ops, number, spec) for number in range(len(spec.inputs))), strict=True)
    product, axes = _product(ops, kept, spec)
    # A lone input goes through a view at least: no result is an input itself.
    put = None if len(kept) == 2 and axes == spec.output else _writing(ops, axes, spec)
    if put is None and not any(readings):
        return lambda inputs, index, may_drop: product(*inputs)

    def run(inputs: Sequence[Any], index: Mapping[Gather, Any], may_drop: bool) -> Any:
        pairs = zip(readings, inputs, strict=True)
        x = product(*[x if read is None else read(x, index, may_drop) for read, x in pairs])
        return x if put is None else put(x, index, may_drop)

    return run


def evaluate(
    ops: ArrayOps, spec: Spec, inputs: Sequence[Any], index: Mapping[Gather, Any], may_drop: bool = True
) -> Any:
    """Compute a unary or binary spec."""
    return evaluation(ops, spec)(inputs, index, may_drop)


def _as_it_is(x: Any) -> Any:
    return x


def _product(ops: ArrayOps, kept: Sequence[tuple[str, ...]], spec: Spec) -> tuple[Product, tuple[str, ...]]:
    """What multiplies the inputs by their axes that are left, and the axes of the product."""
    if len(kept) == 1:
        return _as_it_is, kept[0]
    # In the order of the output as far as that has them: then nothing is permuted afterwards.
    inner = inner_product(spec, kept)
    form = product_form(inner)
    assert form is not None
    return ops.product(form, inner), term_axes(inner.output)


def _reading(ops: ArrayOps, number: int, spec: Spec) -> tuple[Access | None, tuple[str, ...]]:
    """What reads an input through its term and sums the axes that nothing else has; and the axes that are left.

    None where the input is read as it is.
    """
    take, axes = _taking(ops, spec.inputs[number], spec)
    others = {axis for place, term in enumerate(spec.terms) if place != number for axis in term_axes(term)}
    private = tuple(dim for dim, axis in enumerate(axes) if axis not in others)
    if not private:
        return take, axes
    left = tuple(axis for axis in axes if axis in others)
    if take is None:
        return lambda x, index, may_drop: ops.sum(x, private), left
    return lambda x, index, may_drop: ops.sum(take(x, index, may_drop), private), left


def diagonals(ops: ArrayOps, term: Term) -> tuple[Callable[[Any], Any], Term]:
    """Return what takes the diagonals of a term's repeated axes, and the term then: each diagonal is at its end."""
    pairs, entries = [], list(term)
    while repeated := [e for e in entries if isinstance(e, str) and entries.count(e) > 1]:
        i, j = [d for d, e in enumerate(entries) if e == repeated[0]][:2]
        pairs.append((i, j))
        entries = [e for d, e in enumerate(entries) if d not in (i, j)] + [repeated[0]]

    def take(x: Any) -> Any:
        for i, j in pairs:
            x = ops.diagonal(x, i, j)
        return x

    return take if pairs else _as_it_is, tuple(entries)


def _taking(ops: ArrayOps, term: Term, spec: Spec) -> tuple[Access | None, tuple[str, ...]]:
    """What takes gathers and the diagonals of repeated axes, if there are any; and the distinct axes that it gives."""
    diagonal, entries = diagonals(ops, term)
    gathers = tuple(e for e in entries if isinstance(e, Gather))
    if not gathers:
        return None if entries == term else lambda x, index, may_drop: diagonal(x), term_axes(entries)
    rows = term_axes(gathers)
    indexed = [d for d, e in enumerate(entries) if isinstance(e, Gather) or e in rows]
    rest = [d for d in range(len(entries)) if d not in indexed]
    axes = (*rows, *(str(entries[d]) for d in rest))
    shape = spec.shape(axes)
    if 0 in (*shape, *spec.shape(entries)):
        return lambda x, index, may_drop: ops.zeros(shape, x), axes
    indices = _indices(ops, [entries[d] for d in indexed], rows, spec)

    def take(x: Any, index: Mapping[Gather, Any], may_drop: bool) -> Any:
        x = ops.permute(diagonal(x), [*indexed, *rest])
        arrays, valid = indices(index, x, may_drop)
        x = ops.take(x, arrays)
        return ops.select(valid.reshape([*valid.shape, *[1] * len(rest)]), x, 0) if may_drop else x

    return take, axes


def _indices(
    ops: ArrayOps, entries: Sequence[str | Gather], rows: Sequence[str], spec: Spec
) -> Callable[[Mapping[Gather, Any], Any, bool], tuple[list[Any], Any]]:
    """What gives the index arrays of some dimensions, shaped over the row axes, and where all of them are in range."""
    shaped = [(entry, _shaped_index(ops, entry, rows, spec)) for entry in entries]

    def indices(index: Mapping[Gather, Any], like: Any, may_drop: bool) -> tuple[list[Any], Any]:
        arrays, valid = [], None
        for entry, shape in shaped:
            q = shape(index, like)
            if may_drop and isinstance(entry, Gather):  # a value equal to the size means: no row
                here = q < entry.size
                q = ops.select(here, q, 0)
                valid = here if valid is None else valid & here
            arrays.append(q)
        return arrays, valid

    return indices


def _shaped_index(
    ops: ArrayOps, entry: str | Gather, rows: Sequence[str], spec: Spec
) -> Callable[[Mapping[Gather, Any], Any], Any]:
    """What gives the index array of a dimension, shaped over the row axes: that of a bracket, or an axis' own."""
    sizes = dict(spec.sizes)
    diagonal, own = diagonals(ops, entry.axes if isinstance(entry, Gather) else (entry,))
    order = [own.index(axis) for axis in rows if axis in own]
    shape = [sizes[axis] if axis in own else 1 for axis in rows]
    if isinstance(entry, str):
        return lambda index, like: ops.iota(sizes[entry], like).reshape(shape)
    return lambda index, like: ops.permute(diagonal(index[entry]), order).reshape(shape)


def _writing(ops: ArrayOps, axes: tuple[str, ...], spec: Spec) -> Access:
    """What writes a value with distinct axes into the result: scatters add, repeated axes go on the diagonal."""
    term, sizes = spec.output, dict(spec.sizes)
    plain = [e for e in term if isinstance(e, str)]
    rows_all = term_axes(tuple(e for e in term if isinstance(e, Gather)))
    missing = tuple(axis for axis in dict.fromkeys((*rows_all, *plain)) if axis not in axes)
    added, axes = [sizes[axis] for axis in missing], (*missing, *axes)
    repeated = {e for e in plain if plain.count(e) > 1}
    indexed = [d for d, e in enumerate(term) if isinstance(e, Gather) or e in repeated or e in rows_all]
    rest = [d for d in range(len(term)) if d not in indexed]
    rows = tuple(dict.fromkeys([*rows_all, *(e for e in plain if e in repeated)]))
    order = [axes.index(str(e)) for e in (*rows, *(term[d] for d in rest))]

    def arrange(x: Any) -> Any:
        return ops.permute(ops.expand(x, [*added, *x.shape]) if missing else x, order)

    if not indexed:
        return lambda x, index, may_drop: arrange(x)
    back = [(*indexed, *rest).index(d) for d in range(len(term))]
    shape = spec.shape(tuple(term[d] for d in (*indexed, *rest)))
    if 0 in (*shape, *(sizes[axis] for axis in axes)):
        return lambda x, index, may_drop: ops.permute(ops.zeros(shape, x), back)
    indices = _indices(ops, [term[d] for d in indexed], rows, spec)

    def put(x: Any, index: Mapping[Gather, Any], may_drop: bool) -> Any:
        x = arrange(x)
        arrays, valid = indices(index, x, may_drop)
        if valid is not None:
            x = ops.select(valid.reshape([*valid.shape, *[1] * len(rest)]), x, 0)
        return ops.permute(ops.add_at(shape, arrays, x), back)

    return put


def viewing(
    permute: Callable[[Any, Sequence[int]], Any], order: Sequence[int], before: Sequence[int], after: Sequence[int]
) -> Callable[[Any], Any]:
    """Return what views an array of one shape, its dimensions reordered, in another; copied where strides need that."""
    dims, shape = tuple(order), tuple(after)
    reshaped = tuple(before[dim] for dim in dims) != shape
    if dims == tuple(range(len(dims))):
        return (lambda x: x.reshape(shape)) if reshaped else _as_it_is
    return (lambda x: permute(x, dims).reshape(shape)) if reshaped else lambda x: permute(x, dims)


def matmul_product(
    matmul: Product, multiply: Product, permute: Callable[[Any, Sequence[int]], Any], form: ProductForm, spec: Spec
) -> Product:
    """Return what multiplies two arrays as matrices, in a batch if there is one, or by element where nothing is summed.

    The result is row-major where the output has the batch first and one operand's axes before the other's.

    Args:
        matmul: [m, k] times [k, n], or all with a batch in front; half types accumulated in float32.
        multiply: product of arrays of as many dimensions that broadcast, row-major.
        permute: reorders dimensions.
        form: the groups of axes.
        spec: the step's spec.
    """
    sizes = dict(spec.sizes)
    terms, out = [term_axes(term) for term in spec.inputs], term_axes(spec.output)

    def view(term: tuple[str, ...], order: Sequence[str], shape: Sequence[int]) -> Callable[[Any], Any]:
        return viewing(permute, [term.index(e) for e in order], [sizes[e] for e in term], shape)

    if not form.contracted:
        # The order of the output, with size 1 for the axes that an operand lacks and none for summed ones of size 1.
        first, second = (
            view(t, [*(e for e in out if e in t), *(e for e in t if e not in out)],
                 [sizes[e] if e in t else 1 for e in out])
            for t in terms
        )  # fmt: skip
        return lambda a, b: multiply(first(a), second(b))
    left, right = form.left, form.right
    swapped = out != (*form.batch, *left, *right) and out == (*form.batch, *right, *left)
    if swapped:
        terms, left, right = terms[::-1], right, left
    batch, m, n, k = (math.prod(sizes[axis] for axis in g) for g in (form.batch, left, right, form.contracted))
    lead = (batch,) if form.batch else ()
    first = view(terms[0], (*form.batch, *left, *form.contracted), (*lead, m, k))
    second = view(terms[1], (*form.batch, *form.contracted, *right), (*lead, k, n))
    order = (*form.batch, *left, *right)
    shape = tuple(sizes[axis] for axis in order)
    parted = viewing(permute, range(len(lead) + 2), (*lead, m, n), shape)
    back = viewing(permute, [order.index(e) for e in out], shape, spec.output_shape)

    def product(a: Any, b: Any) -> Any:
        return back(parted(matmul(first(a), second(b))))

    return (lambda a, b: product(b, a)) if swapped else product
