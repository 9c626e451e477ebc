"""The shapes of steps that kernels know: a product, a grouped product, a gathered dot, sums and dots of rows."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from planner.language.cached import cached_by_step
from planner.language.spec import Gather, Spec, entry_axes, indexed_dims, plain_axes, term_axes, term_gathers

# An operand is copied so that the axes of a product are in the order of the result, if that is so many times as large:
# the gradient of `bn,djn->jdb` then needs no copy, which takes 577 us in place of 1,041 (Intel Xeon, 2026-11-29).
_MUCH_LARGER = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ProductForm:
    """A binary step without gathers, seen as a batched matrix product.

    a: [batch, left, contracted]    b: [batch, contracted, right]    result: [batch, left, right]

    Attributes:
        batch, left, right, contracted: the axes of each group.
        sizes: the number of elements of each group, in this order.
    """

    batch: tuple[str, ...]
    left: tuple[str, ...]
    right: tuple[str, ...]
    contracted: tuple[str, ...]
    sizes: tuple[int, int, int, int]

    @property
    def matrices(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """The groups of a, b and the result as matrices in a batch."""
        return (
            (self.batch, self.left, self.contracted),
            (self.batch, self.contracted, self.right),
            (self.batch, self.left, self.right),
        )


def _counts_of_terms(spec: Spec) -> tuple[int, int, int]:
    """Return the number of elements of the operands and of the result of a product.

    Sizes that are symbols cannot be compared: then the first operand counts as the largest, and the result as none.
    """
    shapes = tuple(map(spec.shape, spec.terms))
    if not all(isinstance(n, int) for shape in shapes for n in shape):
        return 2, 1, 0
    first, second, result = map(math.prod, shapes)
    return first, second, result


def order_depends_on_sizes(spec: Spec) -> bool:
    """Return whether a step without gathers is a product whose axes are viewed in an order that depends on sizes.

    Its operands have shared axes in different orders, or the result has those of an operand in another order.
    """
    form = product_form(spec)
    if form is None:
        return False
    a, b, out = map(plain_axes, spec.terms)
    pairs = (a, b, form.batch), (a, b, form.contracted), (a, out, form.left), (b, out, form.right)
    return any([e for e in one if e in group] != [e for e in other if e in group] for one, other, group in pairs)


@cached_by_step
def product_form(spec: Spec) -> ProductForm | None:
    """Return a step as a batched product; None if it has gathers, repeated axes, or axes that are summed alone.

    Shared axes are in the order of the larger operand, so that it is the smaller one that is copied where the orders
    differ. If the larger one is copied in any case, they are in the order of the smaller one. The left and right axes
    are in the order of their operand, unless this operand is copied in any case and is smaller than the result, or is
    much smaller: then they are in the order of the result, whose gradient needs no copy. Operands are taken to be
    row-major. If all contracted axes have size 1, the form has none: the step multiplies element by element.
    """
    if len(spec.inputs) != 2 or spec.gathers:
        return None
    a, b, out = map(plain_axes, spec.terms)
    set_a, set_b, set_out = set(a), set(b), set(out)
    if len(set_a) < len(a) or len(set_b) < len(b) or len(set_out) < len(out):
        return None
    if not (set_a ^ set_b) <= set_out <= (set_a | set_b):
        return None
    is_copied = [not _is_batch_of_matrices(term, spec) for term in (a, b)]
    counts = _counts_of_terms(spec)
    larger = 0 if counts[0] >= counts[1] else 1
    shared = (a, b)[1 - larger if is_copied[larger] and not is_copied[1 - larger] else larger]
    left, right = (
        out if counts[2] > count * (1 if copied else _MUCH_LARGER) else own
        for own, count, copied in zip((a, b), counts[:2], is_copied, strict=True)
    )
    groups = (
        tuple([axis for axis in shared if axis in set_a and axis in set_b and axis in set_out]),
        tuple([axis for axis in left if axis in set_a and axis not in set_b]),
        tuple([axis for axis in right if axis in set_b and axis not in set_a]),
        tuple([axis for axis in shared if axis in set_a and axis in set_b and axis not in set_out]),
    )
    batches, m, n, k = _counts(spec, *groups)
    if k == 1:
        groups = (*groups[:3], ())
    return ProductForm(*groups, sizes=(batches, m, n, k))


def _is_batch_of_matrices(term: Sequence[str], spec: Spec) -> bool:
    """Return whether an operand of a product is a batch of matrices as it is, in the order of its own axes."""
    terms = [set(plain_axes(other)) for other in spec.terms]
    kinds = [tuple([axis in other for other in terms]) for axis in term if spec.size(axis) != 1]
    return len(list(itertools.groupby(kinds))) == len(set(kinds))


def known_product(spec: Spec) -> ProductForm:
    """Return the form of a step that is known to be a product."""
    form = product_form(spec)
    assert form is not None
    return form


def _counts(spec: Spec, *groups: Sequence[str]) -> tuple[int, ...]:
    """Return the number of elements of each group of axes."""
    sizes = spec.by_axis
    return tuple([math.prod([sizes[axis] for axis in group]) for group in groups])


def inner_product(spec: Spec, kept: Sequence[tuple[str, ...]]) -> Spec:
    """Return the plain product within a binary step, without its gathers, private sums and scatters.

    Its output has the axes in the order in which the step's output is written as far as possible: the rows of brackets
    come first.

    Args:
        spec: the step's spec.
        kept: the axes of each input after gathers are taken and private axes are summed.
    """
    a, b = kept
    wanted = term_axes(spec.output)
    order = dict.fromkeys((*term_axes(term_gathers(spec.output)), *plain_axes(spec.output), *a, *b))
    output = tuple(axis for axis in order if axis in wanted and (axis in a or axis in b))
    return Spec((a, b), output, spec.sizes)


def product_of_rows(spec: Spec) -> Spec:
    """Return the plain product within a product with gathers, see `inner_product`; of other steps their own spec."""
    if len(spec.inputs) != 2 or not spec.gathers:
        return spec
    read = []
    for term in spec.inputs:
        rows, indexed = term_axes(term_gathers(term)), indexed_dims(term)
        read.append(tuple(dict.fromkeys((*rows, *[str(e) for d, e in enumerate(term) if d not in indexed]))))
    out = term_axes(spec.output)
    a, b = (tuple([axis for axis in axes if axis in other or axis in out]) for axes, other in (read, read[::-1]))
    return inner_product(spec, (a, b))


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedForm:
    """A product in which each row chooses its matrix by index: out[r] = a[source r] @ c[q[r]], or its outer form.

    With `outer` False, the operand `matrix` holds the gathered dimension, and the step is a grouped matmul:

        a: [row_axes_a, inner, contracted]    c: [group, contracted, right]    out: [row_axes_b, inner, right]

    With `outer` True, the output holds the gathered dimension, and the step is a grouped outer product:

        a: [row_axes_a, inner, left]    b: [row_axes_b, inner, right]    out: [group, left, right]

    Attributes:
        gather: the index array, its row axes and the number of groups.
        outer: whether the output holds the gathered dimension.
        matrix: number of the input that holds the matrices; 0 in the outer form.
        rows_a: the row axes of the operand with rows, in row order.
        rows_b: the same for the second array with rows: the other operand of the outer form, else the output.
        targets: the number of rows of a grouped matmul's output if products are added up in it or repeated, else None.
        inner, left, right: the axes of the groups I, J and K.
        sizes: how many rows there are, elements of I, matrices, elements of J, and elements of K.
    """

    gather: Gather
    outer: bool
    matrix: int
    rows_a: tuple[str, ...]
    rows_b: tuple[str, ...]
    targets: int | None
    inner: tuple[str, ...]
    left: tuple[str, ...]
    right: tuple[str, ...]
    sizes: tuple[int, int, int, int, int]

    @property
    def sides(self) -> tuple[int, int, int]:
        """The rows, columns and terms of the product with one matrix, if all matrices are named equally often."""
        n, i, g, j, k = self.sizes
        return max(1, n * i // max(1, min(g, n))), j, k

    @property
    def maps(self) -> int:
        """How many arrays with rows have only some of the row axes, so that a map of their rows is needed."""
        return sum(rows != self.gather.axes for rows in (self.rows_a, self.rows_b))


def _single_gather(spec: Spec) -> tuple[Gather, int] | None:
    """Return the only gather of a binary step, and the number of its term (2 is the output); else None."""
    if len(spec.inputs) != 2:
        return None
    places = [(e, i) for i, term in enumerate(spec.terms) for e in term_gathers(term)]
    return places[0] if len(places) == 1 else None


def _pick(axes: Iterable[str], *inside: set[str], outside: Iterable[str] = ()) -> tuple[str, ...]:
    excluded = set(outside)
    return tuple(a for a in axes if a not in excluded and all(a in group for group in inside))


@cached_by_step
def grouped_form(spec: Spec) -> GroupedForm | str:
    """Return a step as a grouped product, or the reason why it is none."""
    single = _single_gather(spec)
    if single is None:
        return "needs two operands and exactly one gather"
    gather, place = single
    rows = gather.axes
    plain = [plain_axes(term) for term in spec.terms]
    if any(len(set(axes)) < len(axes) for axes in plain):
        return "an axis repeats within a term"
    holder = set(plain[place])
    if holder & set(rows):
        return f"the operand indexed through {gather} has row axes of its own"
    first, second = (plain[i] for i in range(3) if i != place)
    sets = (set(first), set(second), holder)
    every = set().union(*sets)
    if set.intersection(*sets):
        return "an axis is in both operands and the result (batch)"
    if any(sum(axis in s for s in sets) != 2 for axis in every - set(rows)):
        return "an axis is summed or broadcast alone"
    if any(axis not in sets[0] | sets[1] for axis in rows):
        return "a row axis is in the bracket only"
    inner = _pick(first, sets[1], outside=rows)
    rows_first, rows_second = _pick(rows, sets[0]), _pick(rows, sets[1])
    # `second` is the output in a grouped matmul, `first` the rows' operand.
    if place != 2 and rows and not rows_first:
        return "the rows' operand has no row axis"
    left, right = _pick(first, holder), _pick(second, holder)
    n, i, j, k, targets = _counts(spec, rows, inner, left, right, rows_second)
    return GroupedForm(
        gather,
        outer=place == 2,
        matrix=0 if place == 2 else place,
        rows_a=rows_first,
        rows_b=rows_second,
        targets=None if place == 2 or rows_second == rows else targets,
        inner=inner,
        left=left,
        right=right,
        sizes=(n, i, gather.size or 0, j, k),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class PooledForm:
    """Dot products of queries with members of a pool chosen by index (seed 003).

        query: [batch, queries, depth]   pool: [batch, member, depth]   index, scores: [batch, queries, chosen]

    Attributes:
        gather: the index array; its axes are batch, queries and chosen in any order.
        place: which term holds the pool: 0, 1 (an input) or 2 (the result).
        scores: which term holds the scores; the remaining one is the query.
        batch, queries, chosen, depth: the axes of each group.
        sizes: the number of elements of batch and queries, of members, and of elements of depth and chosen.
    """

    gather: Gather
    place: int
    scores: int
    batch: tuple[str, ...]
    queries: tuple[str, ...]
    chosen: tuple[str, ...]
    depth: tuple[str, ...]
    sizes: tuple[int, int, int, int, int]

    @property
    def function(self) -> Literal["scores", "query_gradient", "pool_gradient"]:
        """What the step computes, as the kernels name it."""
        return "scores" if self.scores == 2 else "pool_gradient" if self.place == 2 else "query_gradient"

    @property
    def keys_in_order(self) -> bool:
        """Whether the index array has its axes in the order of batch, queries and chosen."""
        return self.gather.axes == (*self.batch, *self.queries, *self.chosen)


@cached_by_step
def pooled_form(spec: Spec) -> PooledForm | str:
    """Return a step as a pooled dot or one of its two gradients, or the reason why it is none."""
    single = _single_gather(spec)
    if single is None:
        return "needs two operands and exactly one gather"
    gather, place = single
    rows = set(gather.axes)
    plain = [plain_axes(term) for term in spec.terms]
    if any(len(set(axes)) < len(axes) for axes in plain) or len(rows) < len(gather.axes):
        return "an axis repeats within a term"
    others = [i for i in range(3) if i != place]
    scores = next((i for i in others if set(plain[i]) == rows), None)
    if scores is None:
        return "no term has just the axes of the bracket"
    query = next(i for i in others if i != scores)
    pool_axes, query_axes = set(plain[place]), set(plain[query])
    batch = _pick(gather.axes, pool_axes)
    depth = _pick(plain[place], outside=rows)
    queries = _pick(gather.axes, query_axes, outside=batch)
    chosen = _pick(gather.axes, outside=(*batch, *queries))
    if not depth or query_axes != {*batch, *queries, *depth}:
        return "the query must have the batch, the query axes and the depth of the pool"
    b, q, k, d = _counts(spec, batch, queries, chosen, depth)
    return PooledForm(gather, place, scores, batch, queries, chosen, depth, (b, q, gather.size or 0, d, k))


@dataclasses.dataclass(frozen=True, slots=True)
class RowsForm:
    """Rows that are multiplied column by column, each read as it lies or through an index, and summed.

        sums: out[o(r), c] = sum over the rows r with one o(r) of x[s(r), c] y[t(r), c]; y may be missing
        dots: out[r] = sum over c of x[s(r), c] y[t(r), c]

    Attributes:
        rows: the axes of each index array, in its order. A term without an index has these axes itself.
        columns: the axes of c; an input may lack some.
        gathers: for each term, the bracket through which its rows are read or added into; None if they lie in order.
        sizes: number of rows, and of columns.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    gathers: tuple[Gather | None, ...]
    sizes: tuple[int, int]

    @property
    def target(self) -> Gather | None:
        """The bracket that rows are added into; None for dots."""
        return self.gathers[-1]


@cached_by_step
def rows_form(spec: Spec) -> RowsForm | str:
    """Return a step as sums or dots of rows, or the reason why it is none."""
    brackets = [term_gathers(term) for term in spec.terms]
    gathers = tuple(found[0] if found else None for found in brackets)
    rows = next((gather.axes for gather in gathers if gather), ())
    if not rows or len(set(rows)) < len(rows) or any(len(found) > 1 for found in brackets):
        return "no rows are read or added up through one index array each"
    columns: list[tuple[str, ...]] = []
    for term, gather in zip(spec.terms, gathers, strict=True):
        axes = plain_axes(term)
        own = {axis for axis in axes if axis in rows}
        lies = len(own) == len(rows) if gather is None else gather.axes == rows and not own
        if len(set(axes)) < len(axes) or not lies:
            return "index arrays and rows have different axes"
        columns.append(_pick(axes, outside=rows))
    *given, out = columns
    if gathers[-1] is None:
        if out or len(given) != 2 or None in gathers[:-1] or set(given[0]) != set(given[1]):
            return "rows are neither added up nor multiplied with each other"
        out = given[0]
    elif set(out) != set().union(*given):
        return "a column is summed or broadcast alone"
    n, c = _counts(spec, rows, out)
    return RowsForm(rows, out, gathers, (n, c))


@dataclasses.dataclass(frozen=True, slots=True)
class TakenForm:
    """A grouped product whose rows are taken through index arrays of their own, as in `x[n]j, q[n]jk -> nk`.

    Attributes:
        product: the grouped product of the rows.
        sources: for each input, the bracket through which its rows are taken; None if they lie in order.
    """

    product: GroupedForm
    sources: tuple[Gather | None, ...]


@cached_by_step
def taken_form(spec: Spec) -> TakenForm | str:
    """Return a step as a grouped product that takes its rows, or the reason why it is none."""
    form = _product_of_rows(spec)
    if form is None or not any(form.sources):
        return "needs two operands, rows that are taken, and another index array for matrices"
    return form


def _product_of_rows(spec: Spec) -> TakenForm | None:
    """Return a step as a grouped product whose rows lie in order, or are taken through index arrays of their own."""
    if len(spec.inputs) != 2 or any(len(term_gathers(term)) > 1 for term in spec.terms):
        return None
    # Of the brackets one names matrices. The others are taken away, as if their rows lay in order.
    gathers = [next(iter(term_gathers(term)), None) for term in spec.terms]
    for place, matrices in enumerate(gathers):
        sources = tuple(None if number == place else gather for number, gather in enumerate(gathers[:2]))
        if matrices is None or (place != 2 and gathers[2]):
            continue
        terms = []
        for term, gather in zip(spec.inputs, sources, strict=True):
            terms.append(tuple(a for e in term for a in (gather.axes if gather and e == gather else (e,))))
        form = grouped_form(Spec(tuple(terms), spec.output, spec.sizes))
        if not isinstance(form, GroupedForm) or form.maps or not (form.left and form.right):
            continue
        if all(gather is None or gather.axes == (*form.rows_a, *form.inner) for gather in sources):
            return TakenForm(form, sources)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class SummedForm:
    """A grouped product whose rows are added up through an index array, as in `x[n]j, q[n]jk -> d[n]k`.

    Attributes:
        taken: the product of the rows, which lie in order or are taken.
        product: its spec, such as `x[n]j, q[n]jk -> nk`.
        sums: the spec of the sums, such as `nk -> d[n]k`.
        rows: the form of the sums.
    """

    taken: TakenForm
    product: Spec
    sums: Spec
    rows: RowsForm


@cached_by_step
def summed_form(spec: Spec) -> SummedForm | str:
    """Return a step as a grouped product whose rows are added up, or the reason why it is none."""
    targets = term_gathers(spec.output)
    axes = [axis for entry in spec.output for axis in entry_axes(entry)]
    if len(targets) == 1 and len(spec.inputs) == 2:
        form = _product_of_rows(Spec(spec.inputs, tuple(axes), spec.sizes))
        if form is not None and targets[0].axes == (*form.product.rows_a, *form.product.inner):
            rows = *targets[0].axes, *form.product.right
            product, sums = Spec(spec.inputs, rows, spec.sizes), Spec((rows,), spec.output, spec.sizes)
            found = rows_form(sums)
            return found if isinstance(found, str) else SummedForm(form, product, sums, found)
    return "needs rows, each with a matrix, that are added up"
