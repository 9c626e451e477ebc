"""NaN for bad indices under `jit`, where an index out of range cannot raise: results that depend on it become NaN."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from planner.backends.common.stock import evaluate
from planner.backends.jax.index import any_bad, is_bad
from planner.backends.jax.ops import OPS
from planner.language.spec import Gather, Spec, Term, largest

__all__ = ["poison"]

# The most bytes of a result that is written anew with NaN at bad indices, without a branch. XLA takes 50 ms to compile
# a branch, as long as it takes for a small contraction.
SMALL = 1 << 19


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
            x = OPS.select(~_bad_mask(gather, values, term, spec), x, math.nan)
        return x

    most = largest(math.prod(x.shape) * x.dtype.itemsize)
    if most is not None and most <= SMALL:
        return put_nan(x)
    bad = [any_bad(values, gather) for gather, values in given.items()]
    # Usually no index is bad: then only the index arrays are read, and the result is not copied.
    return lax.cond(functools.reduce(operator.or_, bad), put_nan, lambda x: x, x) if bad else x


def _bad_mask(gather: Gather, values: Any, term: Term, spec: Spec) -> Any:
    """Return a mask of the entries of a result that depend on bad indices; it broadcasts to the result."""
    # Along an axis that the term repeats, an index decides the diagonal only.
    along = tuple(entry for entry in term if entry in gather.axes)
    if not along or len(set(gather.axes)) < len(gather.axes):
        return any_bad(values, gather)
    bad = is_bad(values, gather)
    mask = evaluate(OPS, Spec((gather.axes,), along, spec.sizes), [bad], {}, may_drop=False)
    return mask.reshape([spec.size(entry) if entry in along else 1 for entry in term])
