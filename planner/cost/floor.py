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

__all__ = ["gathered_floor", "product_floor", "unary_floor"]

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
        return joint * (steps + (joint > out) + of_a * (joint > a) + of_b * (joint > b))
    touched = itemsize(dtype) * (a + b + out)
    if objective == "bytes":
        return touched * steps
    rows, columns, summed = joint / b, joint / a, joint / out
    least = np.minimum(np.minimum(rows, columns), summed)
    seconds = _moving_seconds(device, touched)
    # With a side of 1 the product may be an elementwise product and a sum.
    most = device.half_rate if device.half_rate and dtype in HALF_TYPES else device.flop_rate
    rate = np.minimum(most, device.skinny_rate * np.maximum(1.0, least / 4))
    batch = a * (b / joint) * (out / joint)
    multiplied = np.maximum(seconds, 2 * joint / rate) + (batch > 1.5) * batch * device.matrix_seconds
    seconds = np.where(least > 1.5, multiplied, seconds) + device.launch_seconds
    size = itemsize(dtype)
    fresh = [_fresh_seconds(device, size * term) for term in (out, a, b)]
    return _picoseconds(steps * seconds + fresh[0] + of_a * fresh[1] + of_b * fresh[2])


def gathered_floor(
    objective: str, device: Device, dtype: str, joint: Array, elements: Array, wanted: Sequence[Array | bool]
) -> Array:
    """Return the same for products with gathers.

    Implementations read what they need of a pool, and may compute both gradients in one step. So nothing is said here
    about the time that moving bytes takes.

    Args:
        objective: as for products without gathers, and so are the next two.
        device: the rates.
        dtype: the dtype of the computation.
        joint: the number of elements that must be multiplied: joint elements, or those of the product with the whole
            pool if they are fewer.
        elements: the number of elements of all three terms.
        wanted: whether the gradients of the operands are needed.
    """
    of_a, of_b = wanted
    products = 1.0 + np.add(of_a, of_b, dtype=float)
    steps = np.minimum(products, 2.0)
    if objective == "flops":
        return joint * products
    if objective == "bytes":
        return itemsize(dtype) * elements * steps
    return _picoseconds(steps * device.launch_seconds + products * joint / max(device.flop_rate, device.half_rate))


def unary_floor(objective: str, device: Device, wanted: Array | bool) -> Array:
    """Return the same for steps on one value: any of them may be a view."""
    if objective != "time":
        return np.zeros_like(wanted, dtype=float)
    return _picoseconds((1.0 + np.asarray(wanted, dtype=float)) * device.launch_seconds)


def _picoseconds(seconds: Array) -> Array:
    return np.maximum(0.0, np.floor(seconds * (1e12 * (1 - _RELATIVE)) - _ROUNDING))


def _moving_seconds(device: Device, moved: Array) -> Array:
    """Return `Device.moving_seconds` of each of many."""
    return moved / np.where(moved <= device.cache_bytes, device.cache_bandwidth, device.bandwidth)


def _fresh_seconds(device: Device, size: Array) -> Array:
    """Return `Device.fresh_seconds` of each of many."""
    rate = np.where(size >= device.fresh_bytes, device.fresh_bandwidth, device.reused_bandwidth)
    return np.where(size <= device.cache_bytes, 0.0, size / rate)
