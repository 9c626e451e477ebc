"""Derivatives of eager calls on explicit axes of a mesh, of every order.

Such a call computes on automatic axes, because XLA chooses there how steps are split. JAX would keep values on these
axes for a backward pass, and outside of `jit` they would come back as arrays on explicit axes: no program holds both.
So a call is one primitive here, and each of its derivatives is one again. JAX then keeps nothing but their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from planner.language.cached import BACKEND_CACHES, enter

# From arrays to a tuple of arrays.
Function = Callable[..., tuple[Any, ...]]

# Its arguments are arrays. Its parameter `function` says what is computed of them.
whole_p = Primitive("planner_whole")
whole_p.multiple_results = True

# Derived functions, and with them their compiled programs, by what makes them and of what.
_DERIVED: dict[Any, Any] = {}
_MOST_DERIVED = 2048
BACKEND_CACHES.append(_DERIVED)
_Maker = TypeVar("_Maker", bound=Callable[..., Any])


def _remembered(make: _Maker) -> _Maker:
    @wraps(make)
    def found(*given: Any) -> Any:
        key = (make, *given)
        if (made := _DERIVED.get(key)) is None:
            enter(_DERIVED, key, made := make(*given), _MOST_DERIVED)
        return made

    return found  # type: ignore[return-value]


def run_whole(function: Function, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return the function of some arrays. It keeps for gradients what it is given, and computes the rest again."""
    return tuple(whole_p.bind(*arguments, function=function))


@_remembered
def _compiled(function: Function) -> Any:
    return jax.jit(function)


def _of_some(function: Function, places: Sequence[int], arguments: Sequence[Any]) -> Function:
    """Return a function of the arguments at some places, with these in the other places."""

    def of(*wanted: Any) -> tuple[Any, ...]:
        given = dict(zip(places, wanted, strict=True))
        return function(*(given.get(place, x) for place, x in enumerate(arguments)))

    return of


@_remembered
def _tangent(function: Function, count: int, active: tuple[int, ...]) -> Function:
    """Return the derivative as a function of `count` primals and of the tangents of those that are active."""

    def planner_tangent(*arguments: Any) -> tuple[Any, ...]:
        primals, tangents = list(arguments[:count]), arguments[count:]

        of = _of_some(function, active, primals)
        return tuple(jax.jvp(of, tuple(primals[place] for place in active), tangents)[1])

    return planner_tangent


@_remembered
def _transposed(function: Function, types: tuple[Any, ...]) -> Function:
    """Return the transpose of a function that is linear in the arguments that have a type here; others have None.

    It is a function of the other arguments and of the gradients of the results.
    """
    linear = [place for place, aval in enumerate(types) if aval is not None]

    def planner_transpose(*arguments: Any) -> tuple[Any, ...]:
        known = iter(arguments)
        primals = [next(known) if aval is None else None for aval in types]
        of = _of_some(function, linear, primals)
        # Where a linear function is differentiated makes no difference.
        _, back = jax.vjp(of, *(ad.instantiate_zeros(ad.Zero(types[place])) for place in linear))
        return tuple(back(tuple(known)))

    return planner_transpose


@_remembered
def _batched(function: Function, dims: tuple[int | None, ...]) -> Function:
    return jax.vmap(function, in_axes=dims)


@whole_p.def_impl
def _impl(*arguments: Any, function: Function) -> list[Any]:
    return list(_compiled(function)(*arguments))


@whole_p.def_abstract_eval
def _abstract(*avals: Any, function: Function) -> list[Any]:
    return list(jax.make_jaxpr(_compiled(function))(*avals).out_avals)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, function: Function) -> Any:
    results = whole_p.bind(*primals, function=function)
    active = tuple(place for place, x in enumerate(tangents) if not isinstance(x, ad.Zero))
    tangent = _tangent(function, len(primals), active)
    return results, whole_p.bind(*primals, *(tangents[place] for place in active), function=tangent)


def _transpose(cotangents: Sequence[Any], *arguments: Any, function: Function) -> list[Any]:
    linear = [ad.is_undefined_primal(x) for x in arguments]
    if all(isinstance(x, ad.Zero) for x in cotangents):
        return [ad.Zero(x.aval) if wanted else None for x, wanted in zip(arguments, linear, strict=True)]
    types = tuple(x.aval if wanted else None for x, wanted in zip(arguments, linear, strict=True))
    known = [x for x, wanted in zip(arguments, linear, strict=True) if not wanted]
    gradients = [ad.instantiate_zeros(x) for x in cotangents]
    results = iter(whole_p.bind(*known, *gradients, function=_transposed(function, types)))
    return [next(results) if wanted else None for wanted in linear]


def _batch(arguments: Sequence[Any], dims: Sequence[Any], *, function: Function) -> Any:
    results = whole_p.bind(*arguments, function=_batched(function, tuple(dims)))
    return results, [0] * len(results)


ad.primitive_jvps[whole_p] = _jvp
ad.primitive_transposes[whole_p] = _transpose
batching.primitive_batchers[whole_p] = _batch
mlir.register_lowering(whole_p, mlir.lower_fun(lambda *xs, function: function(*xs), multiple_results=True))
