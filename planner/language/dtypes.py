"""The dtypes that contractions compute in: their names and sizes, and in which of them sums are formed."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from planner.language.errors import PlannerTypeError

HALF_TYPES = ("float16", "bfloat16")

_DTYPES_BY_SIZE = {
    1: ("bool", "int8", "uint8"),
    2: ("int16", "uint16", "float16", "bfloat16"),
    4: ("int32", "uint32", "float32"),
    8: ("int64", "uint64", "float64", "complex64"),
    16: ("complex128",),
}
ITEMSIZES = {name: size for size, names in _DTYPES_BY_SIZE.items() for name in names}


def itemsize(dtype: str) -> int:
    """Return the bytes of one element.

    Raises:
        PlannerTypeError: contractions cannot compute in this dtype.
    """
    try:
        return ITEMSIZES[dtype]
    except KeyError:
        known = ", ".join(ITEMSIZES)
        raise PlannerTypeError(f"dtype {dtype!r:.80} is not supported; supported are {known}") from None


def accumulator(dtype: str) -> str:
    """Return the dtype in which sums of a dtype are formed: float32 for the half types."""
    return "float32" if dtype in HALF_TYPES else dtype


def is_inexact(dtype: str) -> bool:
    """Return whether a dtype has NaN: whether it is a float or complex type."""
    return "float" in dtype or "complex" in dtype


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype given as a name or as a framework's dtype object.

    Raises:
        PlannerTypeError: contractions cannot compute in this dtype.
    """
    if isinstance(dtype, str) or str(dtype).startswith("torch."):
        name = str(dtype).removeprefix("torch.")
    else:
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = {"float": "float64", "double": "float64", "half": "float16", "complex": "complex128", "int": "int64"}.get(
        name, name
    )
    if name not in ITEMSIZES:
        with contextlib.suppress(TypeError, ValueError, SyntaxError):
            if name.isprintable() and "," not in name:
                name = np.dtype(name).name  # NumPy's codes: "f8", "?"
    itemsize(name)
    return name


def asked_dtype(dtype: Any) -> str:
    """Return the name of a dtype that was passed as `dtype=`. An error says so."""
    try:
        return dtype_name(dtype)
    except PlannerTypeError as error:
        raise PlannerTypeError(f"dtype={dtype!r:.80}: {error}") from None
