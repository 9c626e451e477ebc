"""Rows that index arrays name, `x[q(n)] -> out[n]`: the Triton kernel. Other takes are in the backends.

The contract: `x` is any tensor of any dtype, and `out` is row-major. Each axis of `out` walks `x` and the index arrays
with a stride of each, which may be 0; an index array walks `x` with a stride of its own. So axes may be permuted,
repeated or taken from diagonals, and several index arrays may name a place together. Index arrays are of any integer
dtype and in any strides, with values in `[0, size]`. The value `size` stands for no row and gives zeros, and nothing is
read for it. A single index array may come unchecked where floats are taken: then the kernel brings it into range. Bits
are copied as they are, so equal calls give equal bits.
"""

from __future__ import annotations

from typing import NamedTuple

# The most axes of a result, one less for complex128; and the most index arrays.
MOST_AXES, MOST_INDICES = 5, 3


class Read(NamedTuple):
    """How a result is read from a tensor and index arrays, in numbers of dimensions.

    For `sa[e]cb[ef] -> ecf` there are three axes: `x` is `((), (1,), ())`, and the index arrays are
    `((0,), ((0,), (), ()))` and `((2,), ((0,), (), (1,)))`.

    Attributes:
        x: for each axis of the result, the dimensions of the tensor that it walks along.
        indices: for each index array the dimensions of the tensor that it indexes; and for each axis of the result, the
            dimensions of the index array that it walks along.
    """

    x: tuple[tuple[int, ...], ...]
    indices: tuple[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]], ...]
