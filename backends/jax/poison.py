"""NaN where a bad index had a say: what a result shows of an index that is out of range and could not be refused."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from planner.backends.jax.index import is_bad
from planner.backends.jax.rows import OPS
from planner.language.spec import Gather, Spec, Term

__all__ = ["poisoned"]


def poisoned(x: Any, term: Term, spec: Spec, given: Mapping[Gather, Any]) -> Any:
    """Put NaN where a bad index had a say: its own rows, or every target that it could have meant.

    Args:
        x: a result.
        term: of the result.
        spec: the spec that it was computed by.
        given: index arrays, before they are brought into range.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x

    def poison(x: Any) -> Any:
        for gather, values in given.items():  # brought into range here, so that no such copy waits
            x = OPS.select(~_bad_mask(gather, is_bad(values, gather), term, spec), x, math.nan)
        return x

    bad = [is_bad(values, gather).any() for gather, values in given.items()]
    # The usual case reads the index arrays, and leaves the result where it is.
    return lax.cond(functools.reduce(operator.or_, bad), poison, lambda x: x, x) if bad else x


def _bad_mask(gather: Gather, bad: Any, term: Term, spec: Spec) -> Any:
    """Where bad entries of an index array have a say in a result, broadcastable to its term."""
    plain = [e for e in term if isinstance(e, str)]
    axes = list(gather.axes)
    if len(axes) > len(set(axes)) or not set(axes) & set(plain):
        return bad.any()
    bad = bad.any(axis=tuple(d for d, axis in enumerate(axes) if axis not in plain))
    axes = [axis for axis in axes if axis in plain]
    sizes = dict(spec.sizes)
    distinct = tuple(dict.fromkeys(plain))
    mask = jnp.transpose(bad, [axes.index(e) for e in distinct if e in axes])
    first = {e: term.index(e) for e in distinct}
    mask = mask.reshape([sizes[str(e)] if e in axes and first[str(e)] == d else 1 for d, e in enumerate(term)])
    for dim, e in enumerate(term):
        if e in axes and dim != first[str(e)]:  # a repeated axis: only the diagonal is the index's
            one, other = ([sizes[str(e)] if d == at else 1 for d in range(len(term))] for at in (first[str(e)], dim))
            mask = mask & (jnp.arange(sizes[str(e)]).reshape(one) == jnp.arange(sizes[str(e)]).reshape(other))
    return mask
