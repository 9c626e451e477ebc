"""Hypothesis strategies for the arrays of a call: operands and index arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from planner.language.options import INDEX_MODES
from planner.testing.problem import DTYPES, Array, small_integers, strided_view
from planner.testing.reference import exact_range
from planner.testing.strategy_tools import check_flag, check_names, check_range, check_shape, sampled

INDEX_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")

# For longer index arrays a seed is drawn instead of each element.
_MOST_DRAWN = 64


@st.composite
def operands(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    dtype: str = "float32",
    *,
    max_value: int = 3,
    strided: bool | None = None,
) -> Array:
    """Draw operands: arrays of small integers, so that sums of products are exact.

    Example:
        >>> from hypothesis import find
        >>> find(operands((2, 3), "float64"), lambda x: True).shape
        (2, 3)

    Args:
        draw: given by Hypothesis.
        shape: the array's shape.
        dtype: a dtype name; for bfloat16, which NumPy lacks, the array is float32.
        max_value: values are integers from -max_value to max_value; from 0 to max_value for unsigned dtypes.
        strided: True for a view that is not row-major (permuted, with steps and an offset), False for a row-major
            array, None to draw either.

    Returns:
        A strategy for arrays of that shape and dtype.

    Raises:
        InvalidArgument: an argument is not as described.
    """
    check_shape(shape)
    check_names("dtype", (dtype,), DTYPES)
    check_range("value", 0, max_value, 0, exact_range(dtype))
    check_flag("strided", strided)
    seed = draw(st.integers(0, 999))
    values = small_integers(np.random.default_rng(seed), tuple(shape), dtype, max_value)
    strides = draw(st.booleans()) if strided is None else strided
    return strided_view(np.random.default_rng([seed, 1]), values) if strides else values


@st.composite
def indices(
    draw: st.DrawFn,
    size: int,
    shape: tuple[int, ...],
    *,
    index_mode: str = "raise",
    negative: bool = True,
    dtypes: Sequence[str] = ("int64",),
    max_size: int | None = None,
) -> Array:
    """Draw index arrays for a dimension of `size`; duplicates are common.

    Example:
        >>> from hypothesis import find
        >>> find(indices(3, (4,)), lambda q: q[0] < 0)
        array([-1,  0,  0,  0])

    Args:
        draw: given by Hypothesis.
        size: size of the indexed dimension; the smallest size if the array indexes several.
        shape: the array's shape.
        index_mode: with "raise" indices are in range; with other modes they go beyond it on both sides.
        negative: whether negative indices, which count from the end, are drawn with "raise".
        dtypes: integer dtypes to choose from; values fit the chosen one.
        max_size: the largest size if the array indexes several dimensions; None for `size`.

    Returns:
        A strategy for index arrays.

    Raises:
        InvalidArgument: an argument is not as described, or no index is in range.
    """
    check_shape(shape)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InvalidArgument(f"size={size!r} is not a size")
    check_range("size", size, size if max_size is None else max_size, 0)
    check_flag("negative", negative, open_too=False)
    check_names("index_mode", (index_mode,), INDEX_MODES)
    check_names("dtypes", dtypes, INDEX_DTYPES)
    low, high = -size if negative else 0, size - 1
    if index_mode != "raise":
        largest = size if max_size is None else max_size
        low, high = -2 - largest * (index_mode == "nan"), largest + 1
    shape = tuple(map(int, shape))
    count = math.prod(shape)
    if count and high < low:
        raise InvalidArgument(f"no index is in range for size {size}")
    dtype = draw(sampled(*dtypes))
    limits = np.iinfo(dtype)
    low, high = max(low, int(limits.min)), min(high, int(limits.max))
    if index_mode == "raise" and size == 0:
        return np.zeros(shape, dtype)
    if count > _MOST_DRAWN:
        random = np.random.default_rng(draw(st.integers(0, 999)))
        return random.integers(low, high, shape, dtype, endpoint=True)
    element = st.integers(0, high) if low >= 0 else st.one_of(st.integers(0, high), st.integers(low, high))
    values = draw(st.lists(element, min_size=count, max_size=count))
    return np.array(values, dtype).reshape(shape)
