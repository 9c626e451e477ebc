"""NaN for bad indices under `jit`, where an index out of range cannot raise: results that depend on it become NaN."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from planner.backends.jax.index import is_bad
from planner.backends.jax.ops import OPS
from planner.language.spec import Gather, Spec, Term, plain_axes

__all__ = ["poison"]


def poison(x: Any, term: Term, spec: Spec, given: Mapping[Gather, Any]) -> Any:
    """Put NaN into the entries of a result that depend on a bad index.

    If the result has axes of the index array, these are the entries at the place of the bad index. Otherwise, as in a
    segment sum, the index could have meant any entry, so all of them become NaN.

    Args:
        x: a result.
        term: its term.
        spec: the spec by which it was computed.
        given: the index arrays, before they are brought into range.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x

    def put_nan(x: Any) -> Any:
        for gather, values in given.items():  # the check is inside the branch, so that no copy is held for it
            x = OPS.select(~_bad_mask(gather, is_bad(values, gather), term, spec), x, math.nan)
        return x

    bad = [is_bad(values, gather).any() for gather, values in given.items()]
    # Usually no index is bad: then only the index arrays are read, and the result is not copied.
    return lax.cond(functools.reduce(operator.or_, bad), put_nan, lambda x: x, x) if bad else x


def _bad_mask(gather: Gather, bad: Any, term: Term, spec: Spec) -> Any:
    """Return a mask of the entries of a result that depend on bad indices; it broadcasts to the result."""
    plain = plain_axes(term)
    axes = list(gather.axes)
    if len(axes) > len(set(axes)) or not set(axes) & set(plain):
        return bad.any()
    bad = bad.any(axis=tuple(d for d, axis in enumerate(axes) if axis not in plain))
    axes = [axis for axis in axes if axis in plain]
    sizes = dict(spec.sizes)
    distinct = tuple(dict.fromkeys(plain))
    mask = jnp.transpose(bad, [axes.index(e) for e in distinct if e in axes])
    first = {e: term.index(e) for e in distinct}
    shape = [1] * len(term)
    for dim, e in enumerate(term):
        if e in axes and dim == first[str(e)]:
            shape[dim] = sizes[str(e)]
    mask = mask.reshape(shape)
    for dim, e in enumerate(term):
        if e in axes and dim != first[str(e)]:  # along a repeated axis the index decides the diagonal only
            positions = jnp.arange(sizes[str(e)])
            is_diagonal = _along(positions, first[str(e)], len(term)) == _along(positions, dim, len(term))
            mask = mask & is_diagonal
    return mask


def _along(vector: Any, dim: int, ndim: int) -> Any:
    """Return a vector with `ndim` dimensions, of which all but one have size 1."""
    shape = [1] * ndim
    shape[dim] = -1
    return vector.reshape(shape)
