"""Lower bounds on the cost of a step, from the sizes of its terms alone.

The search finds good trees by these bounds, and prices only the steps that can still win. A bound holds for every
implementation of our tables, whatever the order of axes and the layouts. `tests/test_floor.py` compares it with the
prices of all of them.

Here J is the number of joint elements of a product, and E(t) the number of elements of a term. The product has J / E(t)
rows, columns or terms of its sums, for t the second operand, the first operand and the result. It is a batch of
E(a) E(b) E(out) / J^2 matrices. Its two gradients are products of the same three terms, so all of this holds for them.

Sizes are arrays, of many steps at once, or numbers. The last argument of a bound says which: `numpy`, or `NUMBERS`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import reduce
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from planner.cost.device import CACHED_SHARE, Device
from planner.language.dtypes import itemsize

# Prices are rounded to whole picoseconds, and a bound is computed in floats: it is lowered by this much.
_ROUNDING, _RELATIVE = 3.0, 1e-9

Array = Any  # of float64, or a number
Bits = Any  # an integer, or an array of integers
# The functions of numpy that bounds use, for numbers: a few of them take less time than an array of a few.
NUMBERS = SimpleNamespace(
    floor=math.floor,
    isfinite=math.isfinite,
    maximum=max,
    minimum=min,
    where=lambda condition, x, y: x if condition else y,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Launches:
    """How many operators, as to their time, what all implementations of a backend do besides a step takes at least.

    Attributes:
        view: a view of an operand or result of a product.
        scattered: an elementwise product of operands that were viewed, besides.
        slice: a product of a slice.
        take, add: reading, or adding up, the rows of a term through index arrays, without kernels.
        cut, term: a product of a batch that is added up term by term, and each term; see `product_floor`. Infinite if
            no implementation computes products so.
        follows: whether a product by element may have its result in the order of an operand, which then needs no view.
    """

    view: float = 0.0
    scattered: float = 0.0
    slice: float = 0.0
    take: float = 0.0
    add: float = 0.0
    cut: float = math.inf
    term: float = math.inf
    follows: bool = False


def product_floor(
    objective: str,
    device: Device,
    dtype: str,
    joint: Array,
    terms: tuple[Array, Array, Array],
    wanted: Sequence[Array | bool] = (False, False),
    fused: int = 1,
    launches: tuple[Array, Array, Array] = (0.0, 0.0, 0.0),
    xp: Any = np,
    by_terms: Launches | None = None,
) -> Array:
    """Return the least that products without gathers, and their gradients, add to the score.

    Args:
        objective: "time" (in picoseconds), "flops" or "bytes".
        device: the rates.
        dtype: the dtype of the computation.
        joint: the number of joint elements of each product; not 0.
        terms: the numbers of elements of the two operands and the result.
        wanted: whether the gradients of the operands are needed.
        fused: a product with a side of at most so many elements may be elementwise products that are added up.
        launches: how many operators more than one the product and both gradients launch; see
            `view_launches`.
        xp: what the sizes are, see above.
        by_terms: what an implementation launches that adds up the terms of a batch of products; None if there is none.
    """
    a, b, out = terms
    of_a, of_b = wanted
    steps = 1.0 + of_a + of_b
    if objective == "flops":
        return _count(xp, joint * (steps + (joint > out) + of_a * (joint > a) + of_b * (joint > b)))
    touched = itemsize(dtype) * (a + b + out)
    if objective == "bytes":
        return _count(xp, touched * steps)
    rows, columns, summed = joint / b, joint / a, joint / out
    least = xp.minimum(xp.minimum(rows, columns), summed)
    seconds = _moving_seconds(xp, device, touched)
    batch = a * (b / joint) * (out / joint)
    # On a card `matrix_seconds` is what torch takes; XLA does not pay it.
    each = 0.0 if device.products or device.kind == "cuda" else device.matrix_seconds
    multiplied = xp.maximum(seconds, 2 * joint / device.most_product_rate(least, dtype)) + (batch > 1.5) * batch * each
    seconds = xp.where(least > fused + 0.5, multiplied, seconds) + device.launch_seconds
    size = itemsize(dtype)
    fresh = [_fresh_seconds(xp, device, size * term) for term in (out, a, b)]
    each_step = [seconds + more * device.launch_seconds for more in launches]
    if by_terms is not None and by_terms.cut < math.inf:
        for number, result in enumerate((out, a, b)):
            count = joint / result
            moved = count * _moving_seconds(xp, device, 2 * size * result)
            added = moved + (by_terms.cut + count * by_terms.term) * device.launch_seconds
            each_step[number] = xp.where(batch > 1.5, xp.minimum(each_step[number], added), each_step[number])
    first, second, third = each_step
    return _picoseconds(xp, first + of_a * second + of_b * third + fresh[0] + of_a * fresh[1] + of_b * fresh[2])


def gathered_floor(
    objective: str,
    device: Device,
    dtype: str,
    joint: Array,
    share: Array,
    elements: Array,
    copies: Array,
    rows: tuple[Array, Array],
    launches: Array,
    wanted: Sequence[Array | bool],
    stock_launches: Array = 0.0,
    xp: Any = np,
) -> Array:
    """Return the same for products with gathers.

    The stock implementation takes both operands, multiplies and adds up, with each result in memory. Kernels may
    compute both gradients in one step. On a card they move all terms; on a CPU nothing is said about the bytes.

    Args:
        objective: as for products without gathers, and so are the next two.
        device: the rates.
        dtype: the dtype of the computation.
        joint: the number of joint elements.
        share: which share of them must be multiplied: less than 1 if the product with the whole pool has fewer.
        elements: the number of elements of all three terms that are read or written at least.
        copies: the number of elements of those terms that are indexed, with their rows in the place of the pool.
        rows: the numbers of rows that are taken, and of those that are added up.
        launches: how many operators a kernel launches at least; infinite if there is none.
        wanted: whether the gradients of the operands are needed.
        stock_launches: how many operators the stock implementation launches more than four, to take and add up rows.
        xp: what the sizes are, see above.
    """
    of_a, of_b = wanted
    gradients = 0.0 + of_a + of_b
    steps = 1.0 + xp.minimum(gradients, 1.0)
    if objective == "flops":
        return _count(xp, joint * share * (1.0 + gradients))
    size = itemsize(dtype)
    if objective == "bytes":
        return _count(xp, size * elements * steps)
    moving = _least_moving_seconds(xp, device, size * (elements + 2 * copies))
    rate = max(device.fastest_rate(dtype), device.flop_rate)
    seconds = (4 + stock_launches) * device.launch_seconds + xp.maximum(moving, joint / rate)
    stock, back = (seconds + each for each in _row_seconds(device, rows))
    # Some kernels add products up without tensor cores, half types too.
    product = joint * share / rate
    busy = xp.maximum(product, _least_moving_seconds(xp, device, size * elements) if device.kind == "cuda" else 0.0)
    has_kernels = xp.isfinite(launches)
    kernel = xp.where(has_kernels, xp.where(has_kernels, launches, 0) * device.launch_seconds + busy, np.inf)
    both = xp.where(gradients > 1.5, kernel + product, np.inf)
    return _picoseconds(xp, xp.minimum(stock, kernel) + xp.minimum(gradients * xp.minimum(back, kernel), both))


def unary_floor(
    objective: str,
    device: Device,
    wanted: Array | bool,
    moved: Array = 0.0,
    rows: tuple[Array, Array] = (0.0, 0.0),
    launches: Array = 0.0,
    xp: Any = np,
) -> Array:
    """Return the same for steps on one value.

    Args:
        objective: as for products, and so are the device and the rows.
        device: the rates.
        wanted: whether the gradient is needed.
        moved: the bytes that the step reads and writes; 0 if it may be a view.
        rows: the numbers of rows that are taken, and of those that are added up.
        launches: how many operators more than one it launches.
        xp: what the sizes are, see above.
    """
    steps = 1.0 + wanted
    if objective == "flops":
        return 0.0 * steps
    if objective == "bytes":
        return _count(xp, moved * steps)
    forward, back = _row_seconds(device, rows)
    each = (1 + launches) * device.launch_seconds + _least_moving_seconds(xp, device, moved)
    return _picoseconds(xp, steps * each + forward + wanted * back)


def value_floor(objective: str, device: Device, dtype: str, elements: Array, wanted: Array, steps: int) -> Array:
    """Return the least score of a tree of products without gathers that computes a value, and reads it again.

    Args:
        objective: as for products.
        device: the rates.
        dtype: the dtype of the computation.
        elements: the number of elements of each value.
        wanted: whether its gradient is needed: then that is computed and read too.
        steps: how many steps the tree has at least.
    """
    if objective == "flops":
        return _count(np, 2 * elements)
    moved = itemsize(dtype) * elements
    if objective == "bytes":
        return _count(np, 2 * moved)
    seconds = 2 * _least_moving_seconds(np, device, moved) + _fresh_seconds(np, device, moved)
    return _picoseconds(np, (1 + wanted) * seconds + steps * (device.launch_seconds - 1e-12))


def _row_seconds(device: Device, rows: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the least that rows take in a step and in a gradient of it, where some that were taken are added up."""
    if device.kind == "cuda":  # a kernel sorts the rows first
        return 0.0, 0.0
    (taken, added), take, add = rows, device.take_row_seconds, CACHED_SHARE * device.add_row_seconds
    return taken * take + added * add, (taken + added) * min(take, add)


def _count(xp: Any, number: Array) -> Array:
    """Return a whole number no greater than this one, which is rounded if it is large."""
    return xp.where(number < 2.0**53, xp.floor(number), number * (1 - _RELATIVE))


def _picoseconds(xp: Any, seconds: Array) -> Array:
    return xp.maximum(0.0, xp.floor(seconds * (1e12 * (1 - _RELATIVE)) - _ROUNDING))


def _moving_seconds(xp: Any, device: Device, moved: Array) -> Array:
    """Return `Device.moving_seconds` of each of many."""
    beyond = device.bandwidth
    if device.outer_cache_bytes:
        beyond = xp.where(moved <= device.outer_cache_bytes, device.outer_cache_bandwidth, beyond)
    return moved / xp.where(moved <= device.cache_bytes, device.cache_bandwidth, beyond)


def _least_moving_seconds(xp: Any, device: Device, moved: Array) -> Array:
    """Return the seconds that moving as many bytes or more takes."""
    beyond, fastest = device.bandwidth, device.fastest_bandwidth
    if device.outer_cache_bytes:
        beyond = xp.where(moved <= device.outer_cache_bytes, max(device.outer_cache_bandwidth, beyond), beyond)
    return moved / xp.where(moved <= device.cache_bytes, fastest, beyond)


def _fresh_seconds(xp: Any, device: Device, size: Array) -> Array:
    """Return `Device.fresh_seconds` of each of many."""
    rate = xp.where(size >= device.fresh_bytes, device.fresh_bandwidth, device.reused_bandwidth)
    return xp.where(size <= device.warm_bytes, 0.0, size / rate)


class Order(NamedTuple):
    """How the axes of a value lie in memory, or those of many values.

    A value has its axes in the network's order, which all values have but operands, or in an order of its own. In its
    own order the bit of each axis is its place.

    Attributes:
        known: whether the order is known.
        own: whether it is not the network's, or not known.
        place: from a set of axes to the set of their places.
        descents: the places of axes that come after one which the network has after them.
    """

    known: Bits = True
    own: Bits = False
    place: Callable[[Bits], Bits] = lambda axes: axes
    descents: Bits = 0

    def turns(self, placed: Bits) -> Any:
        """Whether some neighbours of a set of places are in another order than the network's."""
        return placed & (placed << 1) & self.descents != 0


def view_launches(
    launches: Launches, terms: tuple[Bits, ...], orders: tuple[Order, ...], wide: int, xp: Any, copies: bool
) -> Any:
    """Return how many operators more than one a product launches at least, as to their time.

    torch's `matmul` takes matrices, or a batch of them. So a group of several axes, or of none, takes a view to be one
    dimension, and so do groups in another order. Small products take most of their time for this. Axes are the bits of
    integers, in the network's order.

    Args:
        launches: what the framework's operators take.
        terms: the axes of the two operands and of the result.
        orders: the order in which each of them lies.
        wide: the axes whose size is not 1.
        xp: what the terms are, `numpy` or `NUMBERS`.
        copies: whether to look for operands that are copied too, which takes longer.
    """
    a, b, out = terms
    of_a, of_b, of_out = orders
    shared, kept = a & b, a ^ b
    batch, summed, left, right = shared & out, shared & ~out, a & kept, b & kept
    # Each group of axes is one dimension.
    one_left, one_right, one_summed = _is_one(left), _is_one(right), _is_one(summed)
    some, outer = batch != 0, one_left & one_right
    matrices = outer & one_summed
    flat = (batch & (batch - 1) == 0) | matrices  # a batch of one axis, or one that is not made flat
    viewed = 3 - 1 * (one_left & one_summed & flat) - (one_right & one_summed & flat) - (outer & flat)
    # They lie in this order, or in that of the product with its operands swapped.
    groups = ((batch, left, summed), (batch, summed, right), (batch, left, right))
    placed: Any = groups  # as in the network's order
    if xp is np or of_a.own or of_b.own or of_out.own:
        placed = [[order.place(group) for group in three] for order, three in zip(orders, groups, strict=True)]
    (batch_a, left_a, summed_a), (batch_b, summed_b, right_b), (batch_out, left_out, right_out) = placed
    # Axes that both operands have are in the order of one of them, and so is the batch of the result.
    turned: Any = False
    of_free: tuple[Any, Any] = (False, False)
    of_batch: tuple[Any, Any] = (False, False)
    looks = copies and (xp is np or any([order.descents for order in orders]))
    if looks:
        turned = _differs((of_a, batch_a), (of_b, batch_b)) | _differs((of_a, summed_a), (of_b, summed_b))
        of_free = _differs((of_a, left_a), (of_out, left_out)), _differs((of_b, right_b), (of_out, right_out))
        of_batch = _differs((of_a, batch_a), (of_out, batch_out)), _differs((of_b, batch_b), (of_out, batch_out))
    plain = (
        _moved(batch_a, left_a, summed_a),
        _moved(batch_b, summed_b, right_b),
        _moved(batch_out, left_out, right_out),
    )
    swapped = (
        _moved(batch_a, summed_a, left_a),
        _moved(batch_b, right_b, summed_b),
        _moved(batch_out, right_out, left_out),
    )
    moved = []
    for x, y, z in (plain, swapped):
        for in_order_of_b in (False, True):
            moved_a = x & of_a.known | in_order_of_b & turned
            moved_b = y & of_b.known | (not in_order_of_b) & turned
            # An operand that is moved in any case gets the result's order.
            differs = of_free[0] & (moved_a == 0) | of_free[1] & (moved_b == 0)
            differs = differs | of_batch[in_order_of_b] & ((moved_b if in_order_of_b else moved_a) == 0)
            moved.append(1 * moved_a + moved_b + (z & of_out.known | differs))
    # Two matrices take no views, however they lie.
    product = launches.view * ((viewed + reduce(xp.minimum, moved)) * (some | (matrices == 0)))
    lies_flat: Any = False
    if copies:
        wide_a, wide_b = (order.place(axes & wide) for order, axes in ((of_a, a), (of_b, b)))
        copied_a = of_a.known & _is_copied(wide_a, *(wide_a & group for group in placed[0]))
        copied_b = of_b.known & _is_copied(wide_b, *(wide_b & group for group in placed[1]))
        if looks:  # one of them is copied
            differs = _differs((of_a, batch_a & wide_a), (of_b, batch_b & wide_b))
            differs = differs | _differs((of_a, summed_a & wide_a), (of_b, summed_b & wide_b))
            copied_b = copied_b | differs & (copied_a == 0)
        product = product + 1 * copied_a + copied_b
        lies_flat = (of_a.own | of_b.own | copied_a | copied_b) == 0
    # What would be copied may be multiplied in a batch and summed, or slice by slice.
    batched = 1 + launches.view * (4 - 1 * one_left - one_right - outer)
    turns = xp.where(a & ~wide | b & ~wide == 0, 2 * launches.slice, launches.slice) - 1
    product = xp.minimum(product, xp.where(one_summed | lies_flat, product, batched))
    product = xp.minimum(product, xp.where(some | lies_flat, product, turns))
    # Vectors may be multiplied element by element, and summed.
    lacks = 1 * (right != 0) + (left != 0)
    by_element = 1 + launches.view * lacks + launches.scattered * (kept != 0)
    product = xp.where((left & wide == 0) | (right & wide == 0), xp.minimum(product, by_element), product)
    # An elementwise product: an operand that lacks axes of the result, or has them in another order, is viewed.
    lacks = 1 * (a != out) + (b != out)
    if looks and not launches.follows:
        for order, axes in ((of_a, a & out), (of_b, b & out)):
            lacks = lacks + 1 * order.turns(order.place(axes)) * (of_out.own == 0)
    multiplied = launches.view * lacks + launches.scattered * (lacks > 0)
    return xp.where(summed & wide == 0, multiplied, product)


def _moved(first: Bits, second: Bits, third: Bits) -> Any:
    """Whether the axes of three groups are not in this order."""
    # The bits from the lowest one of a group on.
    from_third = third | -third
    return first & (second | -second | from_third) | second & from_third != 0


def _differs(first: tuple[Order, Bits], second: tuple[Order, Bits]) -> Any:
    """Whether two values have a group of axes in different orders, as far as that is known.

    Args:
        first: the order of a value, and the places of the group.
        second: likewise.
    """
    (one, placed), (other, others) = first, second
    return (other.own == 0) & one.turns(placed) | (one.own == 0) & other.turns(others)


def _is_copied(axes: Bits, *groups: Bits) -> Any:
    """Whether an operand is copied to be a batch of matrices.

    It is if axes of a group are not neighbours, or if the innermost axis is one of the batch.

    Args:
        axes: the places of its axes.
        groups: those of its groups, the batch among them.
    """
    batch, *matrix = groups
    copied = (matrix[0] | matrix[1] != 0) & (axes & ~batch < batch)
    for group in (batch, *matrix):
        others = axes & (group | -group) & ~group
        copied = copied | (group & (others | -others) != 0)
    return copied


def _is_one(axes: Bits) -> Any:
    """Whether a set has one axis."""
    return (axes != 0) & (axes & (axes - 1) == 0)
