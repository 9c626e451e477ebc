"""The stock evaluation: any step, computed by a framework's ordinary array functions (take, multiply, sum, add at).

Every backend falls back on it, and the NumPy backend has nothing else. It builds gathered operands in memory; the other
rows of a table exist to avoid that. Each spec is compiled once into functions that only touch arrays, because a step
inside a loop runs thousands of times. The functions also take arrays of other sizes, as long as sizes of 0 and 1 stay
what they are: they ask the arrays for their shapes, and `RangedIndices.sizes` for what no array shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

from planner.language.cached import cached_by_step
from planner.language.spec import Gather, Spec, Term, gather_of, indexed_dims, plain_axes, term_axes, term_gathers
from planner.program.calls import shape_in, size_in
from planner.program.forms import ProductForm, inner_product, known_product

# Torch multiplies matrices of a batch in a loop of its own, however they lie, up to so many multiplications each.
SMALL_MATRIX = 400
# A function of arrays that computes a product.
Product = Callable[..., Any]
# A function that computes a step, from its inputs, the index arrays, and whether indices may mean "no row".
Evaluation = Callable[[Sequence[Any], Mapping[Gather, Any], bool], Any]
# The same for one array, which is read or written through its term.
Access = Callable[[Any, Mapping[Gather, Any], bool], Any]
# A function that gives the index arrays of some dimensions, and a mask of the places where all of them are in range.
# Its arguments are the index arrays of the call, an array on the same device, and whether indices may mean "no row".
IndexReader = Callable[[Mapping[Gather, Any], Any, bool], tuple[list[Any], Any]]


class ArrayOps(Hashable, Protocol):
    """The array functions that the stock evaluation needs of a framework."""

    @property
    def skips(self) -> bool:
        """Whether `add_at` leaves out values whose index is out of range. If not, no such index is given to it."""

    def permute(self, x: Any, dims: Sequence[int]) -> Any:
        """Reorder dimensions; a view."""

    def diagonal(self, x: Any, first: int, second: int) -> Any:
        """Return the diagonal of two dimensions, as the last dimension; a view if the framework has views."""

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        """Broadcast to a shape."""

    def sum(self, x: Any, dims: Sequence[int]) -> Any:
        """Sum over dimensions. The result has the dtype of x; half types are accumulated in float32."""

    def product(self, form: ProductForm, spec: Spec) -> Product:
        """Return the function that computes a binary step without gathers; see `matmul_product`."""

    def iota(self, size: int, like: Any) -> Any:
        """Return 0, 1, ..., size - 1 as indices on the device of `like`."""

    def take(self, x: Any, index: Sequence[Any]) -> Any:
        """Return x[index] over the leading dimensions; the index arrays broadcast with each other."""

    def add_at(self, shape: Sequence[int], index: Sequence[Any], values: Any) -> Any:
        """Add `values` into zeros of a shape at leading indices; values of equal indices are added in order."""

    def select(self, mask: Any, x: Any, otherwise: float) -> Any:
        """Return x where the mask is true, else a constant; the mask broadcasts to x."""

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        """Return zeros of the dtype and device of `like`."""

    def empty_sum(self, shape: Sequence[int], of: Any) -> Any:
        """Return zeros that are sums of no elements of an array, with the derivatives of such sums."""


@cached_by_step
def evaluation(ops: ArrayOps, spec: Spec) -> Evaluation:
    """Return the function that computes a unary or binary spec.

    It takes rows, sums the axes that only one input has, multiplies, and puts the product into the result.
    """
    readers, axes_left = zip(*(_make_reader(ops, number, spec) for number in range(len(spec.inputs))), strict=True)
    product, axes = _make_product(ops, axes_left, spec)
    # A single input goes through a view at least, so that no result is the input itself.
    is_new = len(axes_left) == 2 or readers[0] is not None
    write = None if is_new and axes == spec.output else _make_writer(ops, axes, spec)
    if write is None and not any(readers):
        return lambda inputs, index, may_drop: product(*inputs)

    def run(inputs: Sequence[Any], index: Mapping[Gather, Any], may_drop: bool) -> Any:
        pairs = zip(readers, inputs, strict=True)
        x = product(*[x if read is None else read(x, index, may_drop) for read, x in pairs])
        return x if write is None else write(x, index, may_drop)

    return run


def evaluate(
    ops: ArrayOps, spec: Spec, inputs: Sequence[Any], index: Mapping[Gather, Any], may_drop: bool = True
) -> Any:
    """Compute a unary or binary spec."""
    return evaluation(ops, spec)(inputs, index, may_drop)


def _unchanged(x: Any) -> Any:
    return x


def _make_product(ops: ArrayOps, axes_left: Sequence[tuple[str, ...]], spec: Spec) -> tuple[Product, tuple[str, ...]]:
    """Return the function that multiplies the inputs after they are read, and the axes of the product."""
    if len(axes_left) == 1:
        return _unchanged, axes_left[0]
    # The product has its axes in the order of the output where it can, so that nothing is permuted afterwards.
    inner = inner_product(spec, axes_left)
    form = known_product(inner)
    return ops.product(form, inner), term_axes(inner.output)


def _make_reader(ops: ArrayOps, number: int, spec: Spec) -> tuple[Access | None, tuple[str, ...]]:
    """Return the function that reads an input, and the axes of what it returns.

    It takes the input's rows and sums the axes that no other term has. It is None if the input needs neither.
    """
    take, axes = _make_taker(ops, spec.inputs[number], spec)
    others = {axis for place, term in enumerate(spec.terms) if place != number for axis in term_axes(term)}
    private = tuple(dim for dim, axis in enumerate(axes) if axis not in others)
    if not private:
        return take, axes
    left = tuple(axis for axis in axes if axis in others)
    if take is None:
        return lambda x, index, may_drop: ops.sum(x, private), left
    return lambda x, index, may_drop: ops.sum(take(x, index, may_drop), private), left


def diagonals(ops: ArrayOps, term: Term) -> tuple[Callable[[Any], Any], Term]:
    """Return the function that takes the diagonals of repeated axes, and the term afterwards.

    Each diagonal becomes the last dimension. For the term `iji` the function takes the diagonal of dimensions 0 and 2,
    and the term is `ji` afterwards.
    """
    pairs, entries = [], list(term)
    while repeated := [axis for axis in plain_axes(tuple(entries)) if entries.count(axis) > 1]:
        i, j = [d for d, e in enumerate(entries) if e == repeated[0]][:2]
        pairs.append((i, j))
        entries = [e for d, e in enumerate(entries) if d not in (i, j)] + [repeated[0]]

    def take(x: Any) -> Any:
        for i, j in pairs:
            x = ops.diagonal(x, i, j)
        return x

    return take if pairs else _unchanged, tuple(entries)


def _make_taker(ops: ArrayOps, term: Term, spec: Spec) -> tuple[Access | None, tuple[str, ...]]:
    """Return the function that reads an array through its term, and the axes of what it returns.

    It takes the diagonals of repeated axes and the rows that brackets name; it is None if there are neither. What it
    returns has the axes of the brackets first, then the other axes of the term, each once. In `n q[nk] d` the axis `n`
    is in a bracket too, so row (n, k) reads `x[n, q[n, k]]`, and the result has the axes `nkd`.
    """
    take_diagonals, entries = diagonals(ops, term)
    gathers = term_gathers(entries)
    if not gathers:
        return None if entries == term else lambda x, index, may_drop: take_diagonals(x), term_axes(entries)
    in_brackets, indexed = term_axes(gathers), indexed_dims(entries)
    other_dims = [d for d in range(len(entries)) if d not in indexed]
    axes = (*in_brackets, *(str(entries[d]) for d in other_dims))
    shape, before, order = spec.shape(axes), spec.shape(entries), [*indexed, *other_dims]
    if 0 in (*shape, *before):
        return lambda x, index, may_drop: ops.empty_sum(shape_in(index, spec, axes), x), axes
    read_indices = make_index_reader(ops, [entries[d] for d in indexed], in_brackets, spec)
    arrange = _permuting(ops, order)

    def take(x: Any, index: Mapping[Gather, Any], may_drop: bool) -> Any:
        x = arrange(take_diagonals(x))
        arrays, in_range = read_indices(index, x, may_drop)
        rows = ops.take(x, arrays)
        return ops.select(_with_dims(in_range, len(other_dims)), rows, 0) if may_drop else rows

    return take, axes


def make_index_reader(
    ops: ArrayOps, entries: Sequence[str | Gather], row_axes: Sequence[str], spec: Spec, skips: bool = False
) -> IndexReader:
    """Return the function that gives the index arrays of some dimensions, each shaped over the row axes.

    If what uses them `skips` indices out of range, these stay as they are, and there is no mask.
    """
    shaped = [(gather_of(entry), _make_shaped_index(ops, entry, row_axes, spec)) for entry in entries]

    def read_indices(index: Mapping[Gather, Any], like: Any, may_drop: bool) -> tuple[list[Any], Any]:
        arrays, all_in_range = [], None
        for gather, shape_index in shaped:
            q = shape_index(index, like)
            if may_drop and gather is not None and not skips:  # a value equal to the size means "no row"
                in_range = q < size_in(index, spec, gather)
                q = ops.select(in_range, q, 0)
                all_in_range = in_range if all_in_range is None else all_in_range & in_range
            arrays.append(q)
        return arrays, all_in_range

    return read_indices


def _make_shaped_index(
    ops: ArrayOps, entry: str | Gather, row_axes: Sequence[str], spec: Spec
) -> Callable[[Mapping[Gather, Any], Any], Any]:
    """Return the function that gives the index array of one dimension, shaped to broadcast over the row axes.

    A bracket has an index array; an axis is indexed by 0, 1, ..., size - 1.
    """
    gather = gather_of(entry)
    if gather is None:
        alone = len(row_axes) == 1

        def positions(index: Mapping[Gather, Any], like: Any) -> Any:
            size = size_in(index, spec, entry)
            numbers = ops.iota(size, like)
            return numbers if alone else numbers.reshape([size if axis == entry else 1 for axis in row_axes])

        return positions
    take_diagonals, axes = diagonals(ops, gather.axes)
    order = [axes.index(axis) for axis in row_axes if axis in axes]
    arrange = viewing(ops.permute, order, [int(axis in axes) for axis in row_axes])
    return lambda index, like: arrange(take_diagonals(index[gather]))


def _with_dims(mask: Any, count: int) -> Any:
    """Append dimensions of size 1 to a mask."""
    return mask.reshape([*mask.shape, *[1] * count])


def _make_writer(ops: ArrayOps, axes: tuple[str, ...], spec: Spec) -> Access:
    """Return the function that writes an array with these axes, each once, into the result.

    Rows that a bracket sends to the same place are added up. An axis that the output has twice is written on the
    diagonal. Along an output axis that the array lacks, it is repeated.

    For example, an array with axes `jn` is written into `q[n]kjj`, where q, k and j have sizes 4, 2 and 3:

        missing = (k,)               the array is repeated along k, and then has the axes (k, j, n)
        indexed = (0, 2, 3)          the result's dimensions that are written at positions: q[n], j, j
        other_dims = [1]             its other dimensions: k
        rows = (n, j)                the axes along which the positions differ
        order = [2, 1, 0]            permutes (k, j, n) to the rows, then the other axes: (n, j, k)
        written_dims = (0, 2, 3, 1)  the result's dimensions in the order in which they are written: q[n], j, j, k
        written = (q[n], j, j, k)    their entries, with sizes (4, 3, 3, 2)
        back = [0, 3, 1, 2]          permutes them to the order of the result: q[n], k, j, j
    """
    term, sizes = spec.output, spec.by_axis
    plain, in_brackets, indexed = plain_axes(term), term_axes(term_gathers(term)), indexed_dims(term)
    missing = tuple(axis for axis in dict.fromkeys((*in_brackets, *plain)) if axis not in axes)
    axes = (*missing, *axes)
    other_dims = [d for d in range(len(term)) if d not in indexed]
    rows = tuple(dict.fromkeys([*in_brackets, *(axis for axis in plain if plain.count(axis) > 1)]))
    order = [axes.index(str(e)) for e in (*rows, *(term[d] for d in other_dims))]

    def repeat(x: Any, index: Mapping[Gather, Any]) -> Any:
        return ops.expand(x, [*shape_in(index, spec, missing), *x.shape]) if missing else x

    if not indexed:
        return lambda x, index, may_drop: ops.permute(repeat(x, index), order)
    written_dims = (*indexed, *other_dims)
    back = _permuting(ops, [written_dims.index(d) for d in range(len(term))])
    written = tuple(term[d] for d in written_dims)
    if 0 in (*spec.shape(written), *(sizes[axis] for axis in axes)):
        return lambda x, index, may_drop: back(ops.empty_sum(shape_in(index, spec, written), x))
    read_indices = make_index_reader(ops, [term[d] for d in indexed], rows, spec, ops.skips)

    arrange = _permuting(ops, order)

    def write(x: Any, index: Mapping[Gather, Any], may_drop: bool) -> Any:
        x = arrange(repeat(x, index))
        arrays, in_range = read_indices(index, x, may_drop)
        if in_range is not None:
            x = ops.select(_with_dims(in_range, len(other_dims)), x, 0)
        return back(ops.add_at(shape_in(index, spec, written), arrays, x))

    return write


def _permuting(ops: ArrayOps, order: Sequence[int]) -> Callable[[Any], Any]:
    """Return the function that reorders dimensions. It returns an array whose order is right as it is."""
    return viewing(ops.permute, order, (1,) * len(order))


def viewing(
    permute: Callable[[Any, Sequence[int]], Any], order: Sequence[int], lengths: Sequence[int]
) -> Callable[[Any], Any]:
    """Return the function that permutes an array and joins dimensions. It makes a view where the strides allow one.

    Args:
        permute: reorders dimensions.
        order: the permutation.
        lengths: for each dimension to return, of how many permuted dimensions it is made, in order; 0 for a new one of
            size 1. Those that are left in the end have size 1, and are dropped.
    """
    dims, spans, stop = tuple(order), [], 0
    for length in lengths:
        spans.append((stop, stop + length))
        stop += length
    ordered = dims == tuple(range(len(dims)))
    if len(dims) == len(spans) and set(lengths) <= {1}:
        return _unchanged if ordered else lambda x: permute(x, dims)

    def view(x: Any) -> Any:
        if not ordered:
            x = permute(x, dims)
        shape = x.shape
        return x.reshape([1 if i == j else shape[i] if j == i + 1 else math.prod(shape[i:j]) for i, j in spans])

    return view


def matmul_product(
    matmul: Product,
    multiply: Product,
    viewing: Callable[[Sequence[int], Sequence[int]], Callable[[Any], Any]],
    form: ProductForm,
    spec: Spec,
    stacks: bool = False,
    vectors_first: bool = False,
    turned: tuple[bool, bool] = (False, False),
) -> Product:
    """Return the function that multiplies two arrays as matrices, or by element where nothing is summed.

    The result is row-major if the output has the batch first, and all axes of one operand before those of the other.

    Args:
        matmul: multiplies [m, k] by [k, n], or both with a batch in front. It accumulates half types in float32.
        multiply: multiplies arrays of equally many dimensions by element, with broadcasting. Its result is row-major.
        viewing: returns a function that permutes an array and joins dimensions, from the last arguments of `viewing`.
        form: the groups of axes.
        spec: the step's spec.
        stacks: whether `matmul` takes more than one batch axis.
        vectors_first: see `is_swapped`.
        turned: which operands are viewed as the transposes of their matrices first: a copy then has their order.
    """
    terms, out = [term_axes(term) for term in spec.inputs], term_axes(spec.output)

    def view(term: tuple[str, ...], order: Sequence[str], lengths: Sequence[int]) -> Callable[[Any], Any]:
        return viewing([term.index(e) for e in order], lengths)

    if not form.contracted:
        # Both operands get the axes of the output, of size 1 where an operand lacks one. Summed axes have size 1 here,
        # and are dropped.
        def view_as_output(term: tuple[str, ...]) -> Callable[[Any], Any]:
            order = [*(e for e in out if e in term), *(e for e in term if e not in out)]
            return view(term, order, [int(e in term) for e in out])

        first, second = map(view_as_output, terms)
        return lambda a, b: multiply(first(a), second(b))
    swapped, (first_view, second_view, result_view) = _matrix_views(form, spec, stacks, vectors_first)
    if swapped:
        terms, turned = terms[::-1], (turned[1], turned[0])
    views = [view(*each) for each in ((terms[0], *first_view), (terms[1], *second_view))]
    for number, (order, lengths) in enumerate((first_view, second_view)):
        if turned[number]:
            views[number] = _turned(view(terms[number], *_turn(order, lengths)))
    first, second = views
    order, lengths = result_view
    back = viewing([order.index(e) for e in out], (1,) * len(out))
    # Where the size of each axis is found: the operand and its dimension.
    places = [(0, terms[0].index(e)) if e in terms[0] else (1, terms[1].index(e)) for e in order]
    parts = any(length != 1 for length in lengths)
    if not parts and all(each is _unchanged for each in (first, second, back)):
        return (lambda a, b: matmul(b, a)) if swapped else matmul

    def product(a: Any, b: Any) -> Any:
        x = matmul(first(a), second(b))
        if parts:
            shapes = (a.shape, b.shape)
            x = x.reshape([shapes[i][d] for i, d in places])
        return back(x)

    return (lambda a, b: product(b, a)) if swapped else product


def _turn(order: Sequence[str], lengths: Sequence[int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the order of axes, and of how many each dimension is made, of matrices that are transposed."""
    rows, columns = lengths[-2:]
    start = len(order) - columns
    return (*order[: start - rows], *order[start:], *order[start - rows : start]), (*lengths[:-2], columns, rows)


def _turned(view: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: view(x).swapaxes(-1, -2)


def is_swapped(form: ProductForm, spec: Spec, vectors_first: bool = False) -> bool:
    """Return whether the second operand is the first factor of `matmul_product`: in the output its axes come first.

    With `vectors_first`, batches of vectors are the first factor, whichever operand they are, but of small matrices.
    """
    if vectors_first and form.batch and not form.right and math.prod(form.sizes[1:]) >= SMALL_MATRIX:
        return bool(form.left)
    free = tuple([axis for axis in term_axes(spec.output) if axis not in form.batch])
    return (*form.left, *form.right) != free == (*form.right, *form.left)


def _matrix_views(
    form: ProductForm, spec: Spec, stacks: bool, vectors_first: bool = False
) -> tuple[bool, tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]]:
    """Return how `matmul_product` views two operands and the result as matrices.

    Returns:
        whether the second operand is the first factor; for the factors and the result, the order of their axes, and of
        how many axes each dimension of their matrices is made.
    """
    left, right, swapped = form.left, form.right, is_swapped(form, spec, vectors_first)
    if swapped:
        left, right = right, left
    m, n, k = len(left), len(right), len(form.contracted)
    lead: tuple[int, ...] = (len(form.batch),) if form.batch else ()
    if stacks and (m, n, k) == (1, 1, 1):
        lead = (1,) * len(form.batch)
    first = (*form.batch, *left, *form.contracted), (*lead, m, k)
    second = (*form.batch, *form.contracted, *right), (*lead, k, n)
    return swapped, (first, second, ((*form.batch, *left, *right), (*lead, m, n)))


def count_views(form: ProductForm, spec: Spec) -> int:
    """Return how many views `matmul_product` makes of its operands and its result, where batches are stacked."""
    terms, out = [term_axes(term) for term in spec.inputs], term_axes(spec.output)
    if not form.contracted:
        orders = [[*(e for e in out if e in term), *(e for e in term if e not in out)] for term in terms]
        return sum((order != [*term]) + (set(term) != set(out)) for order, term in zip(orders, terms, strict=True))
    swapped, views = _matrix_views(form, spec, stacks=True)
    terms = [*(terms[::-1] if swapped else terms), out]
    return sum(
        [
            (order != term) + (lengths.count(1) < len(lengths))
            for (order, lengths), term in zip(views, terms, strict=True)
        ]
    )
