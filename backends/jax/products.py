"""Products as JAX's own operation, and how many elements XLA copies for products and sums."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from planner.backends.common.stock import Product
from planner.kernels.grouping.jax_grouping import accumulator
from planner.language.cached import cached_by_step
from planner.language.spec import Spec, Term, indexed_dims, plain_axes, stand_in, term_axes, term_gathers
from planner.program.forms import inner_product, known_product, product_form

# If more elements than this stay neighbours in a copy into another order, the copy of one element takes less time than
# a copy one by one, by their number divided by this.
_TOGETHER = 64
# Elements of a block that a copy reorders within the cache.
_BLOCK = 4096
# A product by Eigen takes longer than one by YNNPACK by a copied element for so many multiplications. With fewer
# columns than this, or rows or columns of a turned product, it takes even longer, by the square of their number.
_FOLDED, _TURNED = 24, 20
# If the number of terms is no multiple of the one, YNNPACK takes longer for each row of the first factor, by so many
# copied elements.
_EVEN, _UNEVEN = 4, 15
# Elements that XLA computes at once: an innermost axis of at least so many stays innermost in a product with a vector.
_VECTOR = 16
# An arrangement other than that of `jnp.einsum` saves copies of this part of all elements. It may need more memory for
# copies only up to so many elements: a program that replaces einsum must not run out of memory.
_WORTH_DIFFERING, _SLACK = 0.05, 2**14


class _Arrangement(NamedTuple):
    """How a product is given to `lax.dot_general`.

    Attributes:
        first, second: the numbers of the spec's operands that are the factors, in order.
        batch, contracted: the axes of these groups, in order.
        copied: the places of the terms that XLA copies into another order; 2 is the result.
    """

    first: int
    second: int
    batch: tuple[str, ...]
    contracted: tuple[str, ...]
    copied: tuple[int, ...]


@cached_by_step
def arranged(spec: Spec, lean: bool = False) -> _Arrangement:
    """Return the arrangement of a product: that of `jnp.einsum`, unless another is estimated to be clearly faster.

    Such another needs no more memory for copies, or little. If it shall be lean, it is one for which XLA copies the
    fewest elements.

    On 370 products, of model code and drawn at random, it took 0.93 times the time of that of `jnp.einsum`, and more
    than 1.05 times for 9, at most 1.8 times (2 cores of a busy AMD EPYC, JAX 0.10.2, 2026-11-27).
    """
    form = known_product(spec)
    terms, free = [term_axes(term) for term in spec.terms], (form.left, form.right)

    def orders(group: tuple[str, ...], places: tuple[int, ...]) -> list[tuple[str, ...]]:
        return [tuple(axis for axis in terms[place] if axis in group) for place in places]

    def arrange(first: int, batch: tuple[str, ...], contracted: tuple[str, ...]) -> _Arrangement:
        copied = _copied_places(spec, first, batch, free[first], free[1 - first], contracted)
        return _Arrangement(first, 1 - first, batch, contracted, copied)

    batches = orders(form.batch, (2, 0, 1))
    straight = terms[2] == (*batches[0], *form.left, *form.right)
    einsum = arrange(0 if straight else 1, batches[0], tuple(sorted(form.contracted)))
    choices = itertools.product((0, 1), dict.fromkeys(batches), dict.fromkeys(orders(form.contracted, (0, 1))))
    arrangements = [*itertools.starmap(arrange, choices)]
    if lean:
        return min(arrangements, key=lambda each: (sum(_copies(spec, each).values()), _excess(spec, each)))
    most = max(_SLACK, _copied_apart(_copies(spec, einsum)))
    small = [each for each in arrangements if _copied_apart(_copies(spec, each)) <= most]
    best = min([einsum, *small], key=lambda each: _excess(spec, each))
    saved = _excess(spec, einsum) - _excess(spec, best)
    return best if saved > _WORTH_DIFFERING * sum(math.prod(spec.shape(term)) for term in spec.terms) else einsum


def _copies(spec: Spec, arrangement: _Arrangement) -> dict[int, int]:
    """Return the number of elements of each term that XLA copies, by its place."""
    return {place: math.prod(spec.shape(spec.terms[place])) for place in arrangement.copied}


def _copied_apart(copies: Mapping[int, int]) -> int:
    """Return how many copied elements need memory of their own: one operand's fit the result's, which comes last."""
    reused = max((n for place, n in copies.items() if place != 2 and n <= copies.get(2, 0)), default=0)
    return sum(copies.values()) - reused


def _excess(spec: Spec, arrangement: _Arrangement) -> float:
    """Return what XLA does for an arrangement besides multiplying, in copied elements that take as long."""
    form, orders, excess = known_product(spec), _orders(spec, arrangement), 0.0
    for place in arrangement.copied:
        term = wide_axes(spec.terms[place], spec)
        excess += math.prod(spec.shape(term)) * _copy_weight(term, orders[place], spec.by_axis)
    if _is_folded(spec, arrangement):
        turned = _is_turned(spec, arrangement)
        most, side = (_TURNED, min(form.sizes[1:3])) if turned else (_FOLDED, form.sizes[1 + arrangement.second])
        return excess + math.prod(form.sizes) / min(most, max(side, 1) ** 2 / _FOLDED)
    if min(form.sizes[1:3]) > 1:
        uneven = form.sizes[3] > 1 and form.sizes[3] % _EVEN != 0
        return excess + uneven * form.sizes[0] * form.sizes[1 + arrangement.first] * _UNEVEN
    wrong = min(form.sizes[1:3]) == 1 < max(form.sizes[1:3]) and not _sums_well(spec, arrangement)
    return excess + wrong * max(math.prod(spec.shape(term)) for term in spec.inputs) / 2


def _is_folded(spec: Spec, arrangement: _Arrangement) -> bool:
    """Return whether XLA multiplies two matrices whose first one has its rows last. Then it takes Eigen, not YNNPACK.

    XLA turns a product round whose result is turned. Then the second factor comes first, whose terms it wrote before
    its columns, unless they stand behind them as they are.
    """
    form, (first, second, _, contracted, _) = known_product(spec), arrangement
    free, wide = (form.left, form.right), [wide_axes(term, spec) for term in spec.terms]
    shared, rows, columns, summed = (
        wide_axes(group, spec) for group in (arrangement.batch, free[first], free[second], contracted)
    )
    if not rows or not columns:
        return False
    if _is_turned(spec, arrangement):
        return len(summed) > 1 or wide[second] != (*shared, *columns, *summed)
    return len(rows) == len(summed) == 1 and wide[first] == (*shared, *summed, *rows)


def _is_turned(spec: Spec, arrangement: _Arrangement) -> bool:
    """Return whether the result has the one axis of the second factor before the one axis of the first."""
    form, (first, second, batch, _, _) = known_product(spec), arrangement
    shared, rows, columns = (
        wide_axes(group, spec) for group in (batch, *((form.left, form.right)[i] for i in (first, second)))
    )
    return len(rows) == len(columns) == 1 and wide_axes(spec.output, spec) == (*shared, *columns, *rows)


def _sums_well(spec: Spec, arrangement: _Arrangement) -> bool:
    """Return whether the innermost axis of the matrix suits a product with a vector.

    A matrix that is the first factor is summed along its innermost axis. XLA is fast if that axis is innermost as it
    is; if the matrix is copied and that axis is short, it should be the longer one.
    """
    form, (first, second, _, contracted, _) = known_product(spec), arrangement
    free = (form.left, form.right)
    matrix = first if form.sizes[1 + first] > 1 else second
    inner = wide_axes(spec.inputs[matrix], spec)[-1]
    if inner not in form.batch and (spec.size(inner) >= _VECTOR or matrix not in arrangement.copied):
        along = inner in contracted
    else:
        along = math.prod(spec.shape(contracted)) >= math.prod(spec.shape(free[matrix]))
    return along == (matrix == first)


def _copy_weight(order: Sequence[str], other: Sequence[str], sizes: Mapping[str, int]) -> float:
    """Return how long the copy of one element into another order takes, in parts of what it takes at most.

    It takes less if long runs of elements stay neighbours, or if all of them stay within blocks that fit the cache.
    """
    if _together(order, other, sizes) >= _TOGETHER:
        return 0.3
    kept = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(order, other, strict=True))))
    return 0.4 if math.prod(sizes[axis] for axis in order[kept:]) <= _BLOCK else 1.0


def factors(spec: Spec, lean: bool = False) -> tuple[int, int]:
    """Return the numbers of the operands that are the first and the second factor of a product."""
    return arranged(spec, lean)[:2]


def _copied_places(spec: Spec, first: int, batch: Term, rows: Term, columns: Term, contracted: Term) -> tuple[int, ...]:
    """Return the places of the terms that XLA copies for an arrangement of a product, whose first factor is `first`.

    XLA multiplies matrices: the first factor has the batch, then its own axes, then those that are summed; the second
    has the batch, those that are summed, and its own; the result the batch, the first factor's own and the second's. It
    copies an array with another order, but for one in which two single axes change places. It also copies a vector of
    several axes, and a result that has a dimension of size 1 behind a larger one. If neither factor has axes of its
    own, XLA multiplies and sums in one loop. Then it copies only factors of different orders, if several axes are
    summed.
    """
    batch, rows, columns, contracted = (wide_axes(group, spec) for group in (batch, rows, columns, contracted))
    wide = [wide_axes(term, spec) for term in spec.terms]
    if not rows and not columns:
        different = len(contracted) > 1 and wide[0] != wide[1]
        return tuple(place for place in (0, 1) if different and wide[place] != (*batch, *contracted))
    copied = []
    for place, one, other in ((first, rows, contracted), (1 - first, contracted, columns), (2, rows, columns)):
        narrow = [spec.size(e) == 1 for e in spec.terms[place]]
        inside = place == 2 and narrow != sorted(narrow, reverse=True)
        single = len(one) <= 1 and len(other) <= 1 and wide[place] == (*batch, *other, *one)
        vector = not (one and other) and len((*one, *other)) > 1
        if inside or vector or (wide[place] != (*batch, *one, *other) and not single):
            copied.append(place)
    return tuple(copied)


@cached_by_step
def as_dot(spec: Spec, lean: bool = False) -> Product:
    """Return the function that multiplies two operands as one `lax.dot_general`, and permutes nothing but the result.

    The operands may have more dimensions of size 1 than the spec, such as those that were broadcast. These and axes of
    size 1 that are summed are left free, so that JAX keeps the operands themselves for gradients. So are operands of
    narrower dtypes than that of the result.
    """
    # An arrangement is one of axes. Symbolic sizes cannot be compared, so numbers stand for them.
    planned = dataclasses.replace(spec, sizes=tuple((axis, stand_in(size)) for axis, size in spec.sizes))
    first, second, batch, contracted, _ = arranged(planned, lean)
    terms, out = [term_axes(spec.inputs[number]) for number in (first, second)], term_axes(spec.output)

    def product(*operands: Any, precision: Any = None, dtype: Any = None) -> Any:
        factors = (operands[first], operands[second])
        dims = [_dims_of(x.shape, term, spec) for x, term in zip(factors, terms, strict=True)]
        summed, shared = ([tuple(map(each.index, group)) for each in dims] for group in (contracted, batch))
        numbers = ((summed[0], summed[1]), (shared[0], shared[1]))
        result = lax.dot_general(*factors, numbers, precision=precision, preferred_element_type=dtype)
        axes = [*batch, *(axis for each in dims for axis in each if axis not in (*contracted, *batch))]
        result = lax.squeeze(result, [dim for dim, axis in enumerate(axes) if axis not in out])
        axes = [axis for axis in axes if axis in out]
        return result if axes == [*out] else lax.transpose(result, [axes.index(axis) for axis in out])

    return product


@cached_by_step
def multiply_and_add(spec: Spec) -> Product:
    """Return the function that multiplies two operands for one term of the sums after the other, and adds the products.

    XLA computes all of it in one loop over the elements of the result, without a copy of an operand. It is a call that
    XLA does not inline: a loop that reads the result would compute each element as often as it reads it.
    """
    terms, out = [term_axes(term) for term in spec.inputs], term_axes(spec.output)
    summed = [axis for axis in terms[0] if axis not in out]

    def part(x: Any, term: Term, at: Mapping[str, int]) -> Any:
        """Return one term of the sums of an operand, with an axis for each axis of the result."""
        kept, left = [axis for axis in out if axis in term], [axis for axis in term if axis not in at]
        for axis in at:
            x = lax.slice_in_dim(x, at[axis], at[axis] + 1, axis=term.index(axis))
        x = lax.transpose(lax.squeeze(x, [term.index(axis) for axis in at]), [left.index(axis) for axis in kept])
        return lax.broadcast_in_dim(x, spec.output_shape, [out.index(axis) for axis in kept])

    def product(a: Any, b: Any) -> Any:
        total, dtype = None, accumulator(a.dtype)
        a, b = (x if x.dtype == dtype else lax.convert_element_type(x, dtype) for x in (a, b))
        for numbers in itertools.product(*(range(spec.size(axis)) for axis in summed)):
            at = dict(zip(summed, numbers, strict=True))
            one = part(a, terms[0], at) * part(b, terms[1], at)
            total = one if total is None else total + one
        return total

    compiled = jax.jit(product)

    def call(a: Any, b: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return compiled(a, b)

    return call


def inner_strides(spec: Spec) -> list[int]:
    """Return how far apart neighbours along a product's innermost axis lie in each operand; 0 if it lacks the axis."""
    (*terms, out), sizes = [wide_axes(term, spec) for term in spec.terms], spec.by_axis
    return [math.prod(sizes[e] for e in term[term.index(out[-1]) + 1 :]) if out[-1] in term else 0 for term in terms]


@cached_by_step
def join_axes(spec: Spec) -> Spec:
    """Return the spec of a product in which axes that stand side by side in each term that has one are one axis.

    It is the same product of reshaped operands, which need no copy. Axes of size 1 stay apart: XLA would copy a result
    that lacks one behind a larger axis.
    """
    terms, sizes = [term_axes(term) for term in spec.terms], dict(spec.by_axis)

    def are_beside(one: str, other: str) -> bool:
        return all((one, other) in itertools.pairwise(term) for term in terms if one in term or other in term)

    wide = [pair for term in terms for pair in itertools.pairwise(term) if min(map(spec.size, pair)) > 1]
    before = {other: one for one, other in dict.fromkeys(wide) if are_beside(one, other)}
    for axis in before:
        first = axis
        while first in before:
            first = before[first]
        sizes[first] *= sizes.pop(axis)
    *inputs, output = (tuple(axis for axis in term if axis not in before) for term in terms)
    return Spec(tuple(inputs), output, tuple(sorted(sizes.items())))


def multiply_flat(spec: Spec, joined: Spec, *operands: Any) -> Any:
    """Multiply two operands by a product whose axes are joined, see `join_axes`."""
    views = [x.reshape(joined.shape(term)) for x, term in zip(operands, joined.inputs, strict=True)]
    return as_dot(joined, True)(*views).reshape(spec.output_shape)


def wide_axes(term: Term, spec: Spec) -> tuple[str, ...]:
    """Return the axes of a term that are longer than 1."""
    return tuple(str(e) for e in term if spec.size(e) != 1)


def _dims_of(shape: Sequence[Any], term: tuple[str, ...], spec: Spec) -> list[str]:
    """Return the axis of each dimension of an operand, and "" for a dimension of size 1 that the term lacks."""
    if len(shape) == len(term):
        return list(term)
    left, dims = list(term), []
    for size in shape:
        named = bool(left) and (size != 1 or spec.size(left[0]) == 1)
        dims.append(left.pop(0) if named else "")
    return dims


class ProductCopies(NamedTuple):
    """What XLA copies for a product, in elements.

    Attributes:
        elements: copied elements of operands and result.
        apart: how many of them are copied one by one or few at a time, which is slow.
        reused: how many are copied into the memory of the result, which is written last.
    """

    elements: int
    apart: float
    reused: int


def _orders(spec: Spec, arrangement: _Arrangement) -> dict[int, tuple[str, ...]]:
    """Return the order in which XLA multiplies the axes of each term of a product, those of size 1 left out."""
    form, (first, second, batch, contracted, _) = known_product(spec), arrangement
    free = (form.left, form.right)
    groups = {first: (free[first], contracted), second: (contracted, free[second]), 2: (free[first], free[second])}
    return {place: wide_axes((*batch, *one, *other), spec) for place, (one, other) in groups.items()}


@cached_by_step
def is_folded(spec: Spec, lean: bool = False) -> bool:
    """Return whether XLA multiplies the matrices of a product by Eigen, see `_is_folded`."""
    return _is_folded(spec, arranged(spec, lean))


@cached_by_step
def count_reordered(spec: Spec, lean: bool = False) -> ProductCopies:
    """Return what XLA copies for a product, see `_copied_places`."""
    arrangement = arranged(spec, lean)
    orders, copied, apart = _orders(spec, arrangement), _copies(spec, arrangement), 0.0
    for place, elements in copied.items():
        order = wide_axes(spec.terms[place], spec)
        apart += elements * min(1.0, _TOGETHER / max(1, _together(order, orders[place], spec.by_axis)))
    total = sum(copied.values())
    return ProductCopies(total, apart, total - _copied_apart(copied))


@cached_by_step
def count_copied(spec: Spec) -> int:
    """Return how many elements XLA copies for a sum, a segment sum, a diagonal or a product of what is taken."""
    before = _of_product(spec) if len(spec.inputs) == 2 else _of_operand(spec)
    out = spec.output
    indexed = tuple(out[d] for d in indexed_dims(out))
    if indexed:  # written row by row, each a slice of the remaining axes
        first = (*indexed, *(e for e in out if e not in indexed))
        copied = not _same_order(first, out, spec)
    else:
        term = spec.inputs[0]
        summed = len(spec.inputs) == 1 and not set(term) <= set(out) and not term_gathers(term)
        copied = summed and not _same_order(
            tuple(e for e in term if e in out), tuple(e for e in out if e in term), spec
        )
    return before + copied * math.prod(spec.output_shape)


def _of_operand(spec: Spec) -> int:
    """Return how many elements are copied of a single operand: diagonals that are summed, or rows that are added up."""
    (term,), out = spec.inputs, spec.output
    if term_gathers(term):
        return 0
    if len(set(term)) < len(term):
        return 0 if set(term) <= set(out) else math.prod(spec.shape(tuple(dict.fromkeys(term))))
    gathers = term_gathers(out)
    if not gathers:
        return 0
    wanted = dict.fromkeys((*term_axes(gathers), *plain_axes(out)))
    if any(e not in term and spec.size(e) != 1 for e in wanted):  # repeated along an axis that it lacks
        return math.prod(spec.shape(tuple(wanted)))
    order = tuple(e for e in wanted if e in term)
    return 0 if _same_order(tuple(e for e in term if e in order), order, spec) else math.prod(spec.shape(term))


def _of_product(spec: Spec) -> int:
    """Return how many elements are copied for a product with a take before it or a segment sum after it."""
    if not spec.gathers:
        return 0
    inner = _inner(spec)
    form = product_form(inner)
    if form is None or not form.contracted:
        return 0
    # A take writes its result in the order that the product needs, and a product in the order of the segment sum.
    plain = [not term_gathers(term) for term in spec.terms]
    return _copied_apart({place: n for place, n in _copies(inner, arranged(inner)).items() if plain[place]})


def fused_takes(spec: Spec) -> int:
    """Return how many of the elements that a product takes are never in memory.

    XLA takes elements and sums axes that only one operand has in one loop. A product without a sum joins that loop.
    """
    fused = 0
    inner = _inner(spec)
    form = product_form(inner)
    for term, kept in zip(spec.inputs, inner.inputs, strict=True):
        if term_gathers(term):
            taken, left = (math.prod(spec.shape(axes)) for axes in (term_axes(term), kept))
            whole = left == taken and form is not None and not form.contracted
            fused += taken if whole else taken - left
    return fused


def _inner(spec: Spec) -> Spec:
    """Return the spec of the product that is left after takes, and after sums over axes that only one input has."""
    kept = []
    for number, term in enumerate(spec.inputs):
        others = {axis for place, other in enumerate(spec.terms) if place != number for axis in term_axes(other)}
        kept.append(tuple(axis for axis in term_axes(term) if axis in others))
    return inner_product(spec, kept)


def _same_order(one: Term, other: Term, spec: Spec) -> bool:
    return [e for e in one if spec.size(e) != 1] == [e for e in other if spec.size(e) != 1]


def _together(order: Sequence[str], other: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Return how many elements stay neighbours when axes are reordered: those of the last axes that agree."""
    together = 1
    for axis, same in zip(reversed(order), reversed(other), strict=True):
        if axis != same:
            break
        together *= sizes[axis]
    return together
