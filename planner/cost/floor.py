"""Lower bounds on the cost of a step, from the sizes of its terms alone.

The search finds good trees by these bounds, and prices only the steps that can still win. A bound holds for every
implementation of our tables, whatever the order of axes and the layouts. `tests/test_floor.py` compares it with the
prices of all of them.

Here J is the number of joint elements of a product, and E(t) the number of elements of a term. The product has J / E(t)
rows, columns or terms of its sums, for t the second operand, the first operand and the result. It is a batch of
E(a) E(b) E(out) / J^2 matrices. Its two gradients are products of the same three terms, so all of this holds for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.cost.device import Device
from planner.language.dtypes import HALF_TYPES, itemsize

__all__ = ["FUSED_TERMS", "gathered_floor", "product_floor", "unary_floor"]

# A product may be elementwise products that are added up, if it has a side of at most so many elements.
FUSED_TERMS = 8
# Prices are rounded to whole picoseconds, and a bound is computed in floats: it is lowered by this much.
_ROUNDING, _RELATIVE = 3.0, 1e-9

Array = Any  # of float64


def product_floor(
    objective: str,
    device: Device,
    dtype: str,
    joint: Array,
    terms: tuple[Array, Array, Array],
    wanted: Sequence[Array | bool] = (False, False),
) -> Array:
    """Return the least that products without gathers, and their gradients, add to the score.

    Args:
        objective: "time" (in picoseconds), "flops" or "bytes".
        device: the rates.
        dtype: the dtype of the computation.
        joint: the number of joint elements of each product; not 0.
        terms: the numbers of elements of the two operands and the result.
        wanted: whether the gradients of the operands are needed.
    """
    a, b, out = terms
    of_a, of_b = wanted
    steps = 1.0 + np.add(of_a, of_b, dtype=float)
    if objective == "flops":
        return _count(joint * (steps + (joint > out) + of_a * (joint > a) + of_b * (joint > b)))
    touched = itemsize(dtype) * (a + b + out)
    if objective == "bytes":
        return _count(touched * steps)
    rows, columns, summed = joint / b, joint / a, joint / out
    least = np.minimum(np.minimum(rows, columns), summed)
    seconds = _moving_seconds(device, touched)
    most = device.half_rate if device.half_rate and dtype in HALF_TYPES else device.flop_rate
    rate = np.minimum(most, device.skinny_rate * np.maximum(1.0, least / 4))
    batch = a * (b / joint) * (out / joint)
    multiplied = np.maximum(seconds, 2 * joint / rate) + (batch > 1.5) * batch * device.matrix_seconds
    seconds = np.where(least > FUSED_TERMS + 0.5, multiplied, seconds) + device.launch_seconds
    size = itemsize(dtype)
    fresh = [_fresh_seconds(device, size * term) for term in (out, a, b)]
    return _picoseconds(steps * seconds + fresh[0] + of_a * fresh[1] + of_b * fresh[2])


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
        elements: the number of elements of all three terms.
        copies: the number of elements of those terms that are indexed, with their rows in the place of the pool.
        rows: the numbers of rows that are taken, and of those that are added up.
        launches: how many operators a kernel launches at least; infinite if there is none.
        wanted: whether the gradients of the operands are needed.
    """
    of_a, of_b = wanted
    gradients = np.add(of_a, of_b, dtype=float)
    steps = 1.0 + np.minimum(gradients, 1.0)
    if objective == "flops":
        return _count(joint * share * (1.0 + gradients))
    size = itemsize(dtype)
    if objective == "bytes":
        return _count(size * elements * steps)
    moving = _least_moving_seconds(device, size * (elements + 2 * copies))
    seconds = 4 * device.launch_seconds + np.maximum(moving, joint / device.flop_rate)
    stock, back = (seconds + each for each in _row_seconds(device, rows))
    product = joint * share / (device.half_rate if device.half_rate and dtype in HALF_TYPES else device.flop_rate)
    busy = np.maximum(product, _least_moving_seconds(device, size * elements) if device.kind == "cuda" else 0.0)
    has_kernels = np.isfinite(launches)
    kernel = np.where(has_kernels, np.where(has_kernels, launches, 0) * device.launch_seconds + busy, np.inf)
    both = np.where(gradients > 1.5, kernel + product, np.inf)
    return _picoseconds(np.minimum(stock, kernel) + np.minimum(gradients * np.minimum(back, kernel), both))


def unary_floor(
    objective: str, device: Device, wanted: Array | bool, moved: Array = 0.0, rows: tuple[Array, Array] = (0.0, 0.0)
) -> Array:
    """Return the same for steps on one value.

    Args:
        objective: as for products, and so are the device and the rows.
        device: the rates.
        wanted: whether the gradient is needed.
        moved: the bytes that the step reads and writes; 0 if it may be a view.
        rows: the numbers of rows that are taken, and of those that are added up.
    """
    wanted = np.asarray(wanted, dtype=float)
    steps = 1.0 + wanted
    if objective == "flops":
        return np.zeros_like(steps)
    if objective == "bytes":
        return _count(moved * steps)
    forward, back = _row_seconds(device, rows)
    return _picoseconds(
        steps * (device.launch_seconds + _least_moving_seconds(device, moved)) + forward + wanted * back
    )


def _row_seconds(device: Device, rows: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the least that rows take in a step and in a gradient of it, where some that were taken are added up."""
    if device.kind == "cuda":  # a kernel sorts the rows first
        return 0.0, 0.0
    (taken, added), take, add = rows, device.take_row_seconds, device.add_row_seconds
    return taken * take + added * add, (taken + added) * min(take, add)


def _count(number: Array) -> Array:
    """Return a whole number no greater than this one, which is rounded if it is large."""
    return np.where(number < 2.0**53, np.floor(number), number * (1 - _RELATIVE))


def _picoseconds(seconds: Array) -> Array:
    return np.maximum(0.0, np.floor(seconds * (1e12 * (1 - _RELATIVE)) - _ROUNDING))


def _moving_seconds(device: Device, moved: Array) -> Array:
    """Return `Device.moving_seconds` of each of many."""
    return moved / np.where(moved <= device.cache_bytes, device.cache_bandwidth, device.bandwidth)


def _least_moving_seconds(device: Device, moved: Array) -> Array:
    """Return the seconds that moving as many bytes or more takes."""
    fastest = max(device.cache_bandwidth, device.bandwidth)
    return moved / np.where(moved <= device.cache_bytes, fastest, device.bandwidth)


def _fresh_seconds(device: Device, size: Array) -> Array:
    """Return `Device.fresh_seconds` of each of many."""
    rate = np.where(size >= device.fresh_bytes, device.fresh_bandwidth, device.reused_bandwidth)
    return np.where(size <= device.cache_bytes, 0.0, size / rate)
