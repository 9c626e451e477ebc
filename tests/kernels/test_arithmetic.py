"""Products of float32 by tensor cores are no less accurate than float32's own, one multiply-add after the other.

NumPy emulates both. A tensor core adds exact products and the sum so far: it cuts each of these numbers off at a bit of
the largest, and their sum at the 24th bit of its own (Fasi and others, "Numerical behavior of NVIDIA tensor cores",
2021; Khattak and Mikaitis, "Accurate models of NVIDIA tensor cores", 2025). So sums are rounded towards zero.
"""

import math
from functools import partial
from unittest import mock

import numpy as np
import pytest
from conftest import examples

from planner.kernels.tiled_product.triton_tiles import float32_precision

ROWS, COLUMNS = 12, 12


def exact(a, b):
    """Each sum of products, rounded once to float64."""
    products = a[:, :, None].astype(float) * b.astype(float)
    return np.array([[math.fsum(products[i, :, j]) for j in range(b.shape[1])] for i in range(len(a))])


def sequential(a, b):
    """One multiply-add after the other, each rounded to float32."""
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        total = (total + np.outer(a[:, k], b[k])).astype(np.float32)
    return total


def cut(x, bits, largest):
    """Cut numbers off at a bit, counted from the first bit of `largest`."""
    unit = np.ldexp(1.0, np.frexp(largest)[1] - bits)
    return np.where(largest > 0, np.trunc(x / unit) * unit, 0.0)


def tensor_core(a, b, total, card):
    """Add the product of two matrices of parts to `total`, as a tensor core does."""
    terms, bits = CARDS[card]
    for k in range(0, a.shape[1], terms):
        addends = np.concatenate([a[:, k : k + terms, None] * b[None, k : k + terms], total[:, None]], axis=1)
        largest = np.abs(addends).max(1, keepdims=True)
        summed = cut(addends, bits, largest).sum(1)
        total = cut(summed, 24, np.abs(summed)).astype(np.float32).astype(float)
    return total


def rounded(x, bits):
    """Round float32 numbers to their first bits: 8 for bfloat16, 11 for tf32; to the nearest number."""
    drop = 24 - bits
    word = x.astype(np.float32).view(np.uint32)
    word = word + ((1 << (drop - 1)) - 1) + ((word >> drop) & 1)
    return (word >> drop << drop).view(np.float32)


def parts(x, bits, scale):
    """Split numbers into three parts, each `scale` times as large as it counts."""
    first = rounded(x, bits)
    rest = ((x - first) * np.float32(scale)).astype(np.float32)
    second = rounded(rest, bits)
    third = rounded((rest - second) * np.float32(scale), bits)
    return first.astype(float), second.astype(float), third.astype(float)


def by_parts(a, b, bits, pairs, card, scale=128.0):
    """Multiply by parts as the kernel does, 32 terms at a time; `pairs` lists pairs of parts, the smallest first."""
    total = np.zeros((len(a), b.shape[1]), np.float32)
    low = np.zeros(total.shape)
    x, y = parts(a, bits, scale), parts(b, bits, scale)

    def add(pair, at, to):
        (i, j), terms = pair, slice(at, at + 32)
        return tensor_core(x[i][:, terms], y[j][terms], to, card)

    for at in range(0, a.shape[1], 32):
        least = np.zeros(total.shape)
        for pair in pairs:
            if sum(pair) == 2:
                least = add(pair, at, least)
            elif sum(pair) == 1:
                low = add(pair, at, low)
        low = (low + least / scale).astype(np.float32).astype(float)
        total = total + add((0, 0), at, np.zeros(total.shape)).astype(np.float32)
    return total + (low / scale).astype(np.float32)


SIX = (1, 1), (2, 0), (0, 2), (1, 0), (0, 1), (0, 0)
THREE = (1, 0), (0, 1), (0, 0)
# Terms that a tensor core adds at once, and bits that it keeps of the largest.
CARDS = {"A100": (8, 25), "H100": (16, 26)}


def ten_to(random, low, high, *shape):
    return random.choice([-1.0, 1.0], shape) * 10.0 ** random.uniform(low, high, shape)


def cancelling(random, k):
    a = random.standard_normal((ROWS, k))
    b = random.standard_normal((k, COLUMNS))
    a[:, k // 2 :], b[k // 2 :] = a[:, : k // 2], -b[: k // 2]
    a[:, -1] += 1e-4
    return a, b


def far_apart(random, k):
    """Numbers from 1e-30 to 1e30; factors of opposite exponents have products from 1e-8 to 1e8."""
    exponent = random.uniform(-30, 30, k)
    return ten_to(random, -4, 4, ROWS, k) * 10**exponent, ten_to(random, -4, 4, k, COLUMNS) / 10 ** exponent[:, None]


def all_bits(random, k):
    """Numbers whose parts are as large as they can be."""
    word = 1 + 2.0**-8 - 2.0**-17 + 2.0**-22
    return random.choice([-word, word], (ROWS, k)), random.choice([-word, word], (k, COLUMNS))


DATA = {
    "normal": lambda random, k: (random.standard_normal((ROWS, k)), random.standard_normal((k, COLUMNS))),
    "positive": lambda random, k: (random.random((ROWS, k)), random.random((k, COLUMNS))),
    "cancelling": cancelling,
    "far apart": far_apart,
    "large and small": lambda random, k: (ten_to(random, -30, 30, ROWS, k), ten_to(random, -7, 7, k, COLUMNS)),
    "tiny": lambda random, k: (ten_to(random, -38, -36, ROWS, k), ten_to(random, 35, 37, k, COLUMNS)),
    "all bits": all_bits,
}


def errors(data, k, ways, seeds=range(4)):
    """The root mean square of the errors of each way, relative to the sums of absolute values."""
    found = []
    for seed in seeds:
        a, b = (x.astype(np.float32) for x in DATA[data](np.random.default_rng(seed), k))
        right, scale = exact(a, b), exact(np.abs(a), np.abs(b))
        found.append([(way(a, b) - right) / scale for way in ways])
    return np.sqrt((np.array(found) ** 2).mean((0, 2, 3)))


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("data", DATA)
def test_products_by_parts_are_as_accurate_as_float32(data, card):
    """From 256 terms on, the fewest that they are used for; also where float32 has no exponents to spare."""
    for k in (256, *((512, 1024) if examples(0, 1) else ())):
        way, offered = partial(by_parts, bits=8, pairs=SIX, card=card), float32_precision(k, 80, "", True)
        theirs, ours = errors(data, k, (sequential, way))
        assert offered == "bf16x6"
        assert ours <= theirs


def test_other_ways_are_less_accurate():
    """So they are not offered: three products of two parts, in bfloat16 or tf32, and sums of few terms."""
    six, three, tf32 = (
        partial(by_parts, bits=bits, pairs=pairs, card="A100", scale=scale)
        for bits, pairs, scale in ((8, SIX, 128.0), (8, THREE, 128.0), (11, THREE, 1.0))
    )
    for data, way, k in (("positive", three, 64), ("large and small", tf32, 64), ("tiny", tf32, 64)):
        theirs, found = errors(data, k, (sequential, way))
        assert found > 1.5 * theirs
    theirs, found = errors("large and small", 64, (sequential, six))
    assert found > theirs
    assert float32_precision(64, 80, "", True) == "ieee"


# -- the kernel under Triton's interpreter -----------------------------------------------------------------


def kernel(a, b, how="bf16x6"):
    """The kernel's product, by parts or in float64."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    from planner.kernels.grouped_matmul import triton_grouped

    out = torch.full((1, len(a), b.shape[1]), torch.nan)
    operands = (triton_grouped.Matrices.of(x) for x in (torch.from_numpy(a)[None], torch.from_numpy(b)[None], out))
    with mock.patch.object(triton_grouped, "precision", return_value=how):
        triton_grouped.plain_product(*operands, (1, len(a), b.shape[1], len(b)))
    return out[0].numpy()


@pytest.mark.parametrize("data", DATA)
def test_the_kernel_is_as_accurate_as_float32(data):
    theirs, ours = errors(data, 272, (sequential, kernel))
    assert 0 < ours <= theirs


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("terms", [3, 64, 272])
def test_sums_in_float64_are_rounded_once(data, terms):
    a, b = (x.astype(np.float32) for x in DATA[data](np.random.default_rng(terms), terms))
    right = exact(a, b)
    slack = 2.0**-52 * terms * exact(np.abs(a), np.abs(b)) + np.finfo(np.float32).smallest_subnormal
    assert (np.abs(kernel(a, b, "float64") - right) <= 2.0**-24 * np.abs(right) + slack).all()


@pytest.mark.parametrize("how", ["bf16x6", "float64"])
def test_infinity_and_nan_are_as_in_float32(how):
    """In operands, and in results too large for float32; so are zeros, and the largest numbers."""
    most = np.finfo(np.float32).max
    odd = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, most, -most, 3.0, -1.0, 2e38, 5e-38], np.float32)
    random = np.random.default_rng(0)
    b = np.array([1.0, -1.0, 0.0, 2.0, 0.5, 3e38, np.inf, np.nan, -1.0078125], np.float32)[None]
    for terms in (1, 20):  # the other terms are zero, or small
        a, c = np.zeros((len(odd), terms), np.float32), np.zeros((terms, b.shape[1]), np.float32)
        a[:, 0], c[0] = odd, b
        a[:, 1:], c[1:] = random.integers(-2, 3, a[:, 1:].shape), random.integers(-2, 3, c[1:].shape)
        with np.errstate(invalid="ignore", over="ignore"):
            wanted, found = sequential(a, c), kernel(a, c, how)
        assert np.array_equal(np.isnan(found), np.isnan(wanted))
        assert np.allclose(found, wanted, rtol=2e-7, atol=0, equal_nan=True)
