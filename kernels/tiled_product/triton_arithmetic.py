"""How the Triton kernels multiply float32: as float32 does it, in float64 or in parts on tensor cores, or as tf32.

    "ieee"      one multiply-add after the other, without tensor cores
    "float64"   tensor cores multiply and add in float64, and the sum is rounded to float32; in
                grouped products on an H100 or H200, where that is faster than float32's own sums, but for the gradient
                of small matrices alone
    "bf16x6"    each number is the sum of three bfloat16 parts; tensor cores form six products of parts
    "tf32"      tensor cores round each number to 11 bits; only if torch is set to it

In float64 products are exact, and errors of sums are some 2^-53 of them: what counts is that the sum is rounded to
float32 in the end, and that of each piece if the rows of a group are cut into pieces.

The parts of x are first = bf16(x), second = bf16(2^7 (x - first)) and third = bf16(2^7 (2^7 (x - first) - second)), so
x = first + second / 2^7 + third / 2^14. Without these powers of two, the parts of numbers below 1e-31 would be too
small for bfloat16. The products second x third and third x third are left out: they are at most 2^-24 of a product.

Tensor cores round sums towards zero. So products of first parts are added up 32 at a time, and these sums in float32;
the other products are small, and are added up apart, in `low`. `tests/kernels/test_arithmetic.py` measures the errors:
from 256 terms on they are below those of float32's own sums. Below 5e-38 numbers are less accurate. Infinity and NaN
are as in float32, with two exceptions: infinity times a number below 2^-134 is NaN, and a result within 1% of the
largest float32 may be infinite.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from planner.kernels.tiled_product.triton_tiles import float32_precision

# bfloat16's largest number: larger float32 numbers would be rounded to infinity.
_LARGEST = tl.constexpr(3.3895313892515355e38)
# Triton's interpreter multiplies the bits of bfloat16, and cuts bits off where it should round. There, parts are
# float32 numbers that bfloat16 can hold.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Whether the environment refuses tensor cores.
_IEEE = os.environ.get("PLANNER_FLOAT32") == "ieee"
# AMD's chips for which Triton compiles tf32.
_AMD_TF32 = ("gfx940", "gfx941", "gfx942")


def precision(x: torch.Tensor, terms: int, grouped: bool = True) -> str:
    """Return how sums of so many products of a tensor's elements are formed, by group or not; see the module.

    `PLANNER_FLOAT32=ieee` in the environment, when this module is loaded, refuses tensor cores. Products by parts are
    refused by torch's own setting "ieee" too, which `torch.set_float32_matmul_precision("highest")` sets.
    """
    if x.dtype != torch.float32:
        return "ieee"
    (capability, rounds, card), asked = _tensor_cores(x.device), torch.backends.cuda.matmul.fp32_precision
    if asked == "tf32":
        return "tf32" if rounds else "ieee"
    best = float32_precision(terms, capability, card, grouped)
    return "ieee" if _IEEE or (asked == "ieee" and best == "bf16x6") else best


def capability_of(x: torch.Tensor) -> int:
    """Return the compute capability of a tensor's card, times ten; 0 on AMD and in Triton's interpreter."""
    return _tensor_cores(x.device)[0]


@functools.cache
def _tensor_cores(device: torch.device) -> tuple[int, bool, str]:
    """Return the compute capability of an NVIDIA card, times ten, or 0; whether a device rounds to tf32; its name."""
    if triton.knobs.runtime.interpret:
        return 0, True, ""
    with torch.cuda.device(device if device.type == "cuda" else -1):
        target = driver.active.get_current_target()
    if target.backend != "cuda":
        return 0, target.arch in _AMD_TF32, ""
    return target.arch, target.arch >= 80, card_name(device)


def card_name(device: torch.device) -> str:
    """Return the name of a card, such as "NVIDIA H200"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@triton.jit
def to_bfloat16(x):  # type: ignore[no-untyped-def]
    """Round to the nearest number of bfloat16, to an even one if there are two."""
    if _INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def split(x):  # type: ignore[no-untyped-def]
    """Return the three parts of each number."""
    finite = tl.abs(x) < float("inf")
    first = to_bfloat16(tl.where(finite, tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST), x))
    rest = tl.where(finite, (x - first.to(tl.float32)) * 128.0, 0.0)
    second = to_bfloat16(rest)
    third = to_bfloat16((rest - second.to(tl.float32)) * 128.0)
    return first, second, third


@triton.jit
def add_product(x, y, total, low, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the product of two tiles to a sum that is kept as `total + low / 2^7`; by parts, tiles have 32 terms."""
    if PRECISION == "bf16x6":
        x1, x2, x3 = split(x)
        y1, y2, y3 = split(y)
        least = tl.dot(x2, y2)
        least = tl.dot(x3, y1, least)
        least = tl.dot(x1, y3, least)
        low = tl.dot(x2, y1, low)
        low = tl.dot(x1, y2, low) + least * 0.0078125
        return total + tl.dot(x1, y1), low
    elif PRECISION == "float64":
        return tl.dot(x.to(tl.float64), y.to(tl.float64), total, out_dtype=tl.float64), low
    else:
        return tl.dot(x, y, total, input_precision=PRECISION, out_dtype=total.dtype), low


@triton.jit
def joined(total, low, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `total + low / 2^7`. If `total` is infinite, `low` is NaN and does not count."""
    if PRECISION == "bf16x6":
        return tl.where(tl.abs(low) < float("inf"), total + low * 0.0078125, total)
    else:
        return total
