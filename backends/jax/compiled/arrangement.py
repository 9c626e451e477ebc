"""How a product is given to XLA, and what XLA does for it besides multiplying, by its rules for CPUs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from planner.language.cached import cached_by_step
from planner.language.derive import swap_with_output
from planner.language.spec import Spec, Term, term_axes
from planner.program.forms import known_product

# If more elements than this stay neighbours in a copy into another order, the copy of one element takes less time than
# a copy one by one, by their number divided by this.
_TOGETHER = 64
# XLA copies an array in runs along the innermost axis of the order that it copies into. All times are here by that of
# an element of a run whose elements lay scattered before, 0.25 ns. An element of a run that lay together takes 0.4 of
# it, and each such run 5 more: runs of 2 to 5 take longer than scattered elements, which was measured. Each scattered
# run takes 0.5 more, and its elements 0.2 more if the array is reordered beyond blocks of so many elements, which fit
# the cache (2,076 arrangements of 1,852 products, one core of an AMD EPYC with AVX-512, JAX 0.10.2, 2026-11-30).
_RUN_ELEMENT, _RUN, _SCATTERED_RUN, _BLOCK, _BEYOND_BLOCK = 0.4, 5.0, 0.5, 4096, 0.2
# XLA joins the axes of rows, of columns and of terms into one each, also where they are neighbours. If the innermost of
# these three was several axes, a copy into it divides the index of each element by the size of the last axis. With 3 by
# 5 elements that takes 5 ns, as long as 7 scattered elements (592 copies, one core of an AMD EPYC 7003, JAX 0.10.2,
# 2026-11-30). If 2, 4 or 8 divides the size, so many elements share a division; a power of two needs none.
_DIVIDED = 8
# XLA multiplies matrices by YNNPACK or by Eigen. Eigen takes longer: one copied element for each `_FOLDED`
# multiplications (each `_TURNED`, if the result is turned). Where it gathers the larger matrix element by element, each
# of these takes as long as `_GATHERED` copied ones. If the smaller matrix has more than `_NARROW` rows or columns, that
# time is multiplied by `_NARROW` / their number. A product of 256 by 512 by 3 took 200 us, and 15 to 24 us with rows
# and columns in each other's place (Intel Xeon, JAX 0.10.2, 2026-11-28).
_FOLDED, _TURNED, _GATHERED, _NARROW = 24, 20, 3, 24
# Eigen takes 0.4 us more for each matrix of a batch (see `_RUN_ELEMENT` for the machine). XLA does not call it for sums
# of at most two terms.
_BY_MATRIX, _CALLED = 1500, 3
# If the number of terms is no multiple of the one, YNNPACK takes longer for each row of the first factor, by so many
# copied elements.
_EVEN, _UNEVEN = 4, 15
# YNNPACK computes so many columns at once. A multiplication for a column that is not there takes this part of the time
# of a copied element (1,660 products in 3,933 arrangements, see `_DIVIDED` for the machine).
_LANES, _IDLE = 8, 0.1
# If the terms of the second factor stand behind its columns, YNNPACK turns it, which takes this part of the time of a
# copy for each element: 0.2 to 0.7 ns, with 256 and 2,048 matrices of 128 by 16 (same machine).
_PACKED = 0.5
# XLA sums each row of a matrix times a vector by itself, which takes as long as so many copied elements (the products
# of `_IDLE`).
_ROW_SUM = 4
# Elements that XLA computes at once: an innermost axis of at least so many stays innermost in a product with a vector.
_VECTOR = 16
# An arrangement other than that of `jnp.einsum` saves copies of this part of all elements. At 0.1 of them 65 of 1,108
# products took more than 1.05 times einsum's time, at 0.4 of them 43; their times by einsum's had means of 0.908 and
# 0.913. It may need more memory for copies only up to so many elements: a program that replaces einsum must not run out
# of memory.
_WORTH_DIFFERING, _SLACK = 0.4, 2**14
# To permute a result must save the copies of so many times its elements and of this part of all elements, and of at
# least so many elements: they take 10 us, as long as a step that is no operation of JAX may take more than one that is.
# When 1.0 times the result's elements and 0.25 of all were enough, 7 of 94 permuted products took 1.2 to 3.3 times as
# long as einsum's. Now 51 are permuted, of which one took 1.0 to 1.2 times as long (the products of `_IDLE`).
_PERMUTED, _WORTH_PERMUTING, _LEAST_SAVED = 1.5, 0.5, 2**15
# Gradients are steps of ours, and JAX does not derive them, if that saves copies of so many elements, or the time of so
# many copied elements and of this part of all elements of the product. With gradients, 68 plans of the corpus at the
# cache scale then take 0.70 of the time before in the geometric mean, and 1.06 at most; 35 at the overhead scale 0.89
# and 1.06 (jitted, one core of an AMD EPYC 7003, JAX 0.10.2, 2026-12-01).
_LEAST_COPIES, _LEAST_TIME, _WORTH_DERIVING = 2**12, 2**13, 0.35


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
    """
    form = known_product(spec)
    terms, free = [term_axes(term) for term in spec.terms], free_axes(spec)

    def orders(group: tuple[str, ...], places: tuple[int, ...]) -> list[tuple[str, ...]]:
        return [tuple(axis for axis in terms[place] if axis in group) for place in places]

    def arrange(first: int, batch: tuple[str, ...], contracted: tuple[str, ...]) -> _Arrangement:
        copied = _copied_places(spec, first, batch, free[first], free[1 - first], contracted)
        return _Arrangement(first, 1 - first, batch, contracted, copied)

    batches = orders(form.batch, (2, 0, 1))
    straight = terms[2] == (*batches[0], *free[0], *free[1])
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
    form, groups, excess = known_product(spec), _groups(spec, arrangement), 0.0
    batch, first, second, terms = form.sizes[0], *(form.sizes[1 + each] for each in arrangement[:2]), form.sizes[3]
    for place in arrangement.copied:
        given, wanted = wide_axes(spec.terms[place], spec), tuple(itertools.chain(*groups[place]))
        if place == 2:
            excess += _copy_time(wanted, given, spec.by_axis)
        else:
            excess += _copy_time(given, wanted, spec.by_axis)
    excess += _divisions(spec, arrangement)
    if _is_folded(spec, arrangement):
        excess += _GATHERED * _gathered(spec, arrangement)
        if terms >= _CALLED and batch > 1:
            excess += batch * _BY_MATRIX
        return excess + math.prod(form.sizes) / (_TURNED if _is_turned(spec, arrangement) else _FOLDED)
    if min(first, second) > 1:
        uneven = batch * first if terms > 1 and terms % _EVEN != 0 else 0
        idle = batch * first * terms * (-second % _LANES)
        place, (shared, summed, columns) = arrangement.second, groups[arrangement.second]
        turned = place not in arrangement.copied and wide_axes(spec.inputs[place], spec) != (*shared, *summed, *columns)
        return excess + uneven * _UNEVEN + idle * _IDLE + turned * batch * terms * second * _PACKED
    if first > 1:
        excess += batch * first * _ROW_SUM
    # Without a copy einsum's own arrangement is as fast or faster on some processors.
    if not arrangement.copied or max(first, second) == 1 or _sums_well(spec, arrangement):
        return excess
    return excess + max(math.prod(spec.shape(term)) for term in spec.inputs) / 2


def _divisions(spec: Spec, arrangement: _Arrangement) -> float:
    """Return how long the divisions take for the copies of a product's operands, in copied elements."""
    groups = _groups(spec, arrangement)
    pairs = [(place, wide_axes(spec.terms[place], spec)) for place in arrangement.copied if place != 2]
    return sum(_division_time(given, groups[place], spec.by_axis) for place, given in pairs)


def _is_folded(spec: Spec, arrangement: _Arrangement) -> bool:
    """Return whether XLA multiplies two matrices whose first one has its rows last. Then it takes Eigen, not YNNPACK.

    XLA turns a product round whose result is turned. Then the second factor comes first, whose terms it wrote before
    its columns, unless they stand behind them as they are.
    """
    first, second, _, contracted, _ = arrangement
    free, wide = free_axes(spec), [wide_axes(term, spec) for term in spec.terms]
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
    first, second, batch, _, _ = arrangement
    shared, rows, columns = (
        wide_axes(group, spec) for group in (batch, *(free_axes(spec)[i] for i in (first, second)))
    )
    return len(rows) == len(columns) == 1 and wide_axes(spec.output, spec) == (*shared, *columns, *rows)


def _gathered(spec: Spec, arrangement: _Arrangement) -> float:
    """Return how many elements Eigen gathers one by one for a product of two matrices, those of few columns weighed.

    It is fast if the second factor has its columns last, and at least as many as the first one has rows. Of two terms
    XLA adds the products itself.
    """
    if known_product(spec).sizes[3] < _CALLED:
        return 0
    form, (first, second, batch, contracted, _) = known_product(spec), arrangement
    if _is_turned(spec, arrangement):
        first, second = second, first
    rows, columns = form.sizes[1 + first], form.sizes[1 + second]
    shared, own, summed = (wide_axes(group, spec) for group in (batch, free_axes(spec)[second], contracted))
    in_order = wide_axes(spec.inputs[second], spec) == (*shared, *summed, *own)
    copied = second == arrangement.second and second in arrangement.copied  # into this order
    if rows <= columns and (in_order or copied):
        return 0
    larger = max(rows, columns) * form.sizes[0] * form.sizes[3]
    return larger * min(1, _NARROW / max(1, min(rows, columns)))


def _sums_well(spec: Spec, arrangement: _Arrangement) -> bool:
    """Return whether the innermost axis of the matrix suits a product with a vector.

    A matrix that is the first factor is summed along its innermost axis. XLA is fast if that axis is innermost as it
    is; if the matrix is copied and that axis is short, it should be the longer one.
    """
    form, (first, second, _, contracted, _) = known_product(spec), arrangement
    free = free_axes(spec)
    matrix = first if form.sizes[1 + first] > 1 else second
    inner = wide_axes(spec.inputs[matrix], spec)[-1]
    if inner not in form.batch and (spec.size(inner) >= _VECTOR or matrix not in arrangement.copied):
        along = inner in contracted
    else:
        along = math.prod(spec.shape(contracted)) >= math.prod(spec.shape(free[matrix]))
    return along == (matrix == first)


def _copy_time(order: Sequence[str], other: Sequence[str], sizes: Mapping[str, int]) -> float:
    """Return how long a copy from one order of axes into another takes, in copied elements that lie scattered."""
    elements, together = math.prod(sizes[axis] for axis in order), _together(order, other, sizes)
    if not elements:
        return 0.0
    if together > 1:
        return elements * (_RUN_ELEMENT + _RUN / together)
    before = dict(itertools.pairwise(reversed(order)))  # by an axis the one outside of it
    run, axes = sizes[other[-1]], itertools.pairwise(reversed(other))
    for _, outer in itertools.takewhile(lambda pair: before.get(pair[0]) == pair[1], axes):
        run *= sizes[outer]
    kept = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(order, other, strict=True))))
    beyond = math.prod(sizes[axis] for axis in order[kept:]) > _BLOCK
    return elements * (1 + beyond * _BEYOND_BLOCK + _SCATTERED_RUN / run)


def _division_time(order: Sequence[str], groups: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> float:
    """Return how long the divisions of a copy into groups of axes take, in copied elements: see `_DIVIDED`.

    XLA divides nothing if the axis that lay innermost is not joined with another. But it divides if the axes that it
    joins were neighbours in this order, and the size of the outer one is a power of two.
    """
    joined = [group for group in groups[1:] if group]  # XLA joins no axes of the batch
    inner = joined[-1] if joined else ()
    if len(inner) < 2 or [*order] == [*itertools.chain(*groups)]:
        return 0.0
    reads_apart = order[-1] not in inner and len(joined) > 1 and len(joined[0]) == 1
    are_beside, outer = {*itertools.pairwise(inner)} <= {*itertools.pairwise(order)}, sizes[inner[0]]
    if reads_apart and not (are_beside and outer & -outer == outer):
        return 0.0
    size = sizes[inner[-1]]
    power = size & -size  # the greatest power of two that divides it
    return 0.0 if power == size else _DIVIDED / power * math.prod(sizes[axis] for axis in order)


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
def is_derived_slowly(spec: Spec, operands: tuple[int, ...]) -> bool:
    """Return whether XLA computes gradients of a product clearly faster as steps of ours than where JAX derives them.

    The steps copy far fewer elements, or no more and take much less time. If nothing is copied for JAX's gradients, XLA
    multiplies in the same way in both cases.

    Args:
        spec: the product.
        operands: the numbers of the operands whose gradients are computed.
    """
    derived = [_burden(spec, operand, _derived(spec, operand)) for operand in operands]
    own = [_burden(spec, operand, arranged(swap_with_output(spec, operand))) for operand in operands]
    copies, time, divisions = (sum(each[i] for each in derived) - sum(each[i] for each in own) for i in range(3))
    # XLA saves some divisions, so the time must be less without them, too.
    if not any(copied for copied, *_ in derived) or copies < 0 or min(time, time - divisions) <= 0:
        return False
    elements = sum(math.prod(spec.shape(term)) for term in spec.terms)
    return copies >= _LEAST_COPIES or time >= max(_LEAST_TIME, _WORTH_DERIVING * elements)


def _burden(spec: Spec, operand: int, arrangement: _Arrangement) -> tuple[int, float, float]:
    """Return how many elements XLA copies for an operand's gradient, what it takes besides multiplying, and to divide.

    Times are those of `_excess`. A copy that the product itself needs is made once, and takes no time here.
    """
    product = swap_with_output(spec, operand)
    time = _excess(product, arrangement) - _shared_time(spec, product, 1 - operand, arrangement)
    return sum(_copies(product, arrangement).values()), time, _divisions(product, arrangement)


def _shared_time(spec: Spec, product: Spec, place: int, arrangement: _Arrangement) -> float:
    """Return how long a copy of an operand takes that a product and a gradient of it need, in copied elements."""
    before = arranged(spec)
    if place not in before.copied or place not in arrangement.copied:
        return 0.0
    groups, wanted = _groups(product, arrangement)[place], tuple(itertools.chain(*_groups(spec, before)[place]))
    if wanted != tuple(itertools.chain(*groups)):
        return 0.0
    given = wide_axes(spec.inputs[place], spec)
    return _copy_time(given, wanted, spec.by_axis) + _division_time(given, groups, spec.by_axis)


def _derived(spec: Spec, operand: int) -> _Arrangement:
    """Return the arrangement in which JAX derives the gradient of a product's operand.

    JAX multiplies the result's gradient, with its axes in the order in which the product was computed, as the first
    factor, and sums axes in the order in which they stand there.
    """
    free, (first, second, batch, _, _), product = free_axes(spec), arranged(spec), swap_with_output(spec, operand)
    order, other = (*batch, *free[first], *free[second]), term_axes(spec.inputs[1 - operand])
    kept = {axis for axis in product.output if axis not in batch}
    rows, columns = (tuple(axis for axis in each if axis in kept) for each in (order, other))
    contracted = tuple(axis for axis in order if axis not in product.output)
    copied = _copied_places(product, operand, batch, rows, columns, contracted)
    return _Arrangement(operand, 1 - operand, batch, contracted, copied)


@cached_by_step
def permuted(spec: Spec) -> Spec | None:
    """Return a product with its result's axes in an order in which XLA multiplies clearly faster; None if none is.

    The axes of an operand stay in their order, and the result has one operand's axes before the other's.
    """
    form, (left, right) = known_product(spec), free_axes(spec)
    batch = [axis for axis in term_axes(spec.output) if axis in form.batch]
    others = [dataclasses.replace(spec, output=(*batch, *one, *other)) for one, other in ((left, right), (right, left))]
    excess, best = min([(_excess(each, arranged(each)), each) for each in others], key=lambda pair: pair[0])
    elements = [math.prod(spec.shape(term)) for term in spec.terms]
    worth = max(_PERMUTED * elements[2] + _WORTH_PERMUTING * sum(elements), _LEAST_SAVED)
    return best if _excess(spec, arranged(spec)) - excess > worth else None


def free_axes(spec: Spec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes that only one operand of a product has, in the order of each operand: so the product has them."""
    first, second = map(term_axes, spec.inputs)
    form = known_product(spec)
    return tuple(e for e in first if e in form.left), tuple(e for e in second if e in form.right)


def wide_axes(term: Term, spec: Spec) -> tuple[str, ...]:
    """Return the axes of a term that are longer than 1."""
    return tuple(str(e) for e in term if spec.size(e) != 1)


class ProductCopies(NamedTuple):
    """What XLA copies for a product, in elements.

    Attributes:
        elements: copied elements of operands and result.
        apart: how many of them are copied one by one or few at a time, which is slow.
        divided: how many copied elements take as long as the divisions for them, see `_DIVIDED`.
        reused: how many are copied into the memory of the result, which is written last.
    """

    elements: int
    apart: float
    divided: float
    reused: int


def _groups(spec: Spec, arrangement: _Arrangement) -> dict[int, tuple[tuple[str, ...], ...]]:
    """Return by the place of each term of a product the batch and its two other groups of axes, as XLA multiplies them.

    Axes of size 1 are left out.
    """
    first, second, batch, contracted, _ = arrangement
    rows, columns = (free_axes(spec)[i] for i in (first, second))
    groups = {first: (batch, rows, contracted), second: (batch, contracted, columns), 2: (batch, rows, columns)}
    return {place: tuple(wide_axes(group, spec) for group in each) for place, each in groups.items()}


@cached_by_step
def is_folded(spec: Spec, lean: bool = False) -> bool:
    """Return whether XLA multiplies the matrices of a product by Eigen, see `_is_folded`."""
    return _is_folded(spec, arranged(spec, lean))


@cached_by_step
def count_gathered(spec: Spec, lean: bool = False) -> float:
    """Return how many elements of a product's operands XLA gathers one by one, see `_gathered`."""
    arrangement = arranged(spec, lean)
    return _gathered(spec, arrangement) if _is_folded(spec, arrangement) else 0.0


@cached_by_step
def count_reordered(spec: Spec, lean: bool = False) -> ProductCopies:
    """Return what XLA copies for a product, see `_copied_places`."""
    arrangement = arranged(spec, lean)
    groups, copied, apart = _groups(spec, arrangement), _copies(spec, arrangement), 0.0
    for place, elements in copied.items():
        given, wanted = wide_axes(spec.terms[place], spec), tuple(itertools.chain(*groups[place]))
        apart += elements * min(1.0, _TOGETHER / max(1, _together(given, wanted, spec.by_axis)))
    total = sum(copied.values())
    return ProductCopies(total, apart, _divisions(spec, arrangement), total - _copied_apart(copied))


def _together(order: Sequence[str], other: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Return how many elements stay neighbours when axes are reordered: those of the last axes that agree."""
    together = 1
    for axis, same in zip(reversed(order), reversed(other), strict=True):
        if axis != same:
            break
        together *= sizes[axis]
    return together


def count_copies_of(spec: Spec, places: Collection[int]) -> int:
    """Return how many elements XLA copies, for a product, of the terms at some places; see `_copied_apart`."""
    return _copied_apart({place: n for place, n in _copies(spec, arranged(spec)).items() if place in places})
