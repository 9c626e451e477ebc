"""What `jnp.einsum` takes: its keywords, its dtypes, and what makes an operand."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from opt_einsum import contract_path

from planner.api import check_names, contract, plan
from planner.dropin.torch_rules import search_of
from planner.language.dtypes import ITEMSIZES, is_inexact
from planner.language.errors import PlannerError, PlannerTypeError
from planner.language.options import PRECISIONS
from planner.language.parse import parse
from planner.language.resolve import resolve_shapes, shape_of
from planner.language.spec import Operand, Spec, Term, stand_in, term_axes, term_gathers
from planner.program.frameworks import operands_framework

# Below so many FLOPs, as opt_einsum counts them, no path can win more than a search costs.
_SMALL = 100_000
# The options of `contract`. Other keywords are index arrays.
_OPTIONS = frozenset(
    name for name in inspect.signature(contract).parameters if name not in ("spec", "operands", "indices")
)


def jax_einsum(spec: str | Spec, operands: Sequence[Any], options: dict[str, Any]) -> Any:
    """Contract as `jnp.einsum` does: anything that makes an array is an operand."""
    import jax
    import jax.numpy as jnp

    options = dict(options)
    if options.pop("out", None) is not None:
        raise PlannerTypeError("out= is not an option: arrays of JAX never change, take the result")
    options["optimize"] = search_of(options.pop("optimize", "auto"))
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in operands]
    # The options of products that no plan knows.
    theirs = {
        name: given
        for name, default in (("_dot_general", jax.lax.dot_general), ("out_sharding", None))
        if (given := options.pop(name, default)) is not default
    }
    precision = options.pop("precision", None)
    if isinstance(precision, (list, tuple)) and len(set(precision)) == 1:
        precision = precision[0]
    known = precision is None or str(getattr(precision, "name", precision)).lower() in PRECISIONS
    (options if known else theirs)["precision"] = precision
    wanted = options.pop("preferred_element_type", None)
    wanted = None if wanted is None else jax.dtypes.canonicalize_dtype(wanted)
    dtypes = [x.dtype for x in arrays] if wanted is None else [*(x.dtype for x in arrays), wanted]
    unknown = [x.name for x in dtypes if jnp.issubdtype(x, jnp.number) and x.name not in ITEMSIZES]
    if theirs or unknown:
        why = ", ".join([*(f"{name}=" for name in theirs), *dict.fromkeys(unknown)])
        return _products(spec, arrays, options, {**theirs, "preferred_element_type": wanted}, why)
    chosen_here = options["optimize"] == "auto" and options.keys() <= {"optimize", "precision"}
    numbers = isinstance(spec, str) and all(x.dtype.name in ITEMSIZES for x in arrays)
    if chosen_here and numbers and len(arrays) > 2 and any(map(_is_traced, arrays)):
        path = _their_path(spec, tuple((tuple(map(stand_in, x.shape)), x.dtype.name) for x in arrays))
        if path is not None:
            return _products(spec, arrays, {**options, "optimize": path}, {"preferred_element_type": wanted}, "")
    if wanted is None or not arrays:
        return contract(spec, *arrays, **options)
    with jax.numpy_dtype_promotion("standard"):  # told what to prefer, `jnp.einsum` promotes under every setting
        natural = jnp.result_type(*arrays)
        widens = jnp.promote_types(natural, wanted) == wanted
    if wanted.itemsize < natural.itemsize:  # most of these JAX refuses
        return _products(spec, arrays, options, {"preferred_element_type": wanted}, f"{wanted.name} of {natural.name}")
    # A wider type is what sums are formed in.
    options.setdefault("dtype", wanted if widens else natural)
    return contract(spec, *arrays, **options).astype(wanted)


def _is_traced(x: Any) -> bool:
    """Return whether an operand is part of a program that JAX traces. Eager differentiation traces none."""
    import jax

    while type(x).__name__ in ("JVPTracer", "LinearizeTracer"):
        x = x.primal
    return isinstance(x, jax.core.Tracer)


@lru_cache(maxsize=1024)
def _their_path(spec: str, described: tuple[tuple[tuple[int, ...], str], ...]) -> Any:
    """Return the path of `jnp.einsum`; None if a plan is predicted to be a tenth faster, and to keep no more.

    Along its own path `jnp.einsum` computes the call, so that XLA gets the same program. Under `vmap` only JAX knows
    which operands have the mapped axis, so another path may be worse.
    """
    if "[" in spec:
        return None
    try:
        path, info = contract_path(spec, *(shape for shape, _ in described), shapes=True, optimize="auto")
    except (ValueError, TypeError, KeyError):
        return None  # the spec is wrong, or wider than theirs
    if info.opt_cost < _SMALL:
        return path
    for trains in (False, True):  # gradients take longer to plan, and often need not be
        operands = [Operand(shape, dtype, None, trains and is_inexact(dtype)) for shape, dtype in described]
        best = plan(spec, *operands, backend="jax")
        if best.loop is None and [tuple(sorted(pair)) for pair in best.path] == path:
            return path
        ours, theirs = best.cost, plan(spec, *operands, optimize=path, backend="jax").cost
        if ours.seconds >= 0.9 * theirs.seconds or ours.retained_bytes > theirs.retained_bytes:
            return path
    return None


def _products(
    spec: str | Spec, arrays: Sequence[Any], options: dict[str, Any], theirs: dict[str, Any], why: str
) -> Any:
    """Contract by the products of `jnp.einsum`, along a given path or that of a plan.

    Args:
        spec: the spec.
        arrays: the operands.
        options: the options of `contract`.
        theirs: the options of `jnp.einsum`.
        why: which of them, or which dtypes, no plan knows.

    Raises:
        PlannerError: options ask for more than a path.
    """
    import jax.numpy as jnp

    text = str(parse(spec) if isinstance(spec, str) else spec).replace(" ", "")
    if "[" in text:
        return _products_of_rows(spec, arrays, options, theirs, why)
    search, precision = options.pop("optimize"), options.pop("precision", None)
    if more := [name for name, value in options.items() if value is not None]:
        raise PlannerError(
            f"only jnp.einsum multiplies with {why}, and it takes no {', '.join(f'{name}=' for name in more)}: leave "
            "one of them out, or convert the operands"
        )
    path = search if len(arrays) > 2 else "auto"
    if isinstance(path, str) and len(arrays) > 2:
        path = list(plan(text, *(tuple(x.shape) for x in arrays), optimize=search, backend="jax").path)
    return jnp.einsum(text, *arrays, optimize=path, **{"precision": precision, **theirs})


def _products_of_rows(
    spec: str | Spec, arrays: Sequence[Any], options: dict[str, Any], theirs: dict[str, Any], why: str
) -> Any:
    """Contract with index arrays by the products of `jnp.einsum`: take the rows first, and add up the result's last.

    The arguments are those of `_products`.
    """
    import jax

    options = dict(options)
    indices = {name: options.pop(name) for name in list(options) if name not in _OPTIONS}
    check_names(contract, indices)
    operands_framework(arrays, indices)
    sizes, index_mode = options.pop("sizes", None), options.pop("index_mode", "raise")
    shapes = [tuple(x.shape) for x in arrays], {name: shape_of(q) for name, q in indices.items()}
    resolved = resolve_shapes(spec, *shapes, sizes)
    whole, views = resolved.spec, dict(resolved.index_shapes)
    indices = {name: q if shapes[1][name] == views[name] else q.reshape(views[name]) for name, q in indices.items()}

    def step(term: Term, output: Term, x: Any) -> Any:
        """Take rows of an array, or add it up in rows. Narrow dtypes go by a wider one, which has all their values."""
        part = Spec((term,), output)
        part = Spec((term,), output, tuple((axis, whole.size(axis)) for axis in sorted(part.axes)))
        arrays = {name: indices[name] for name in part.arrays}
        return contract(part, x.astype(_wide(x.dtype)), index_mode=index_mode, **arrays).astype(x.dtype)

    taken = [x.reshape(shape) for x, shape in zip(arrays, resolved.shapes, strict=True)]
    terms = [term_axes(term) for term in whole.inputs]
    taken = [
        step(term, axes, x) if term_gathers(term) else x
        for x, term, axes in zip(taken, whole.inputs, terms, strict=True)
    ]
    # Axes that no operand has are added last, by repeating the result.
    output = tuple(axis for axis in term_axes(whole.output) if any(axis in axes for axes in terms))
    is_last = output == whole.output
    sharding = None if is_last else theirs.pop("out_sharding", None)
    inner = [axes if term_gathers(term) else term for term, axes in zip(whole.inputs, terms, strict=True)]
    text = str(Spec(tuple(inner), output)).replace(" ", "")
    result = _products(text, taken, options, theirs, why)
    if is_last:
        return result
    result = step(output, whole.output, result)
    if sharding is not None:
        result = jax.sharding.reshard(result, sharding)  # type: ignore[no-untyped-call]
    return result


def _wide(dtype: Any) -> Any:
    """Return a dtype of planner's that has all values of a dtype."""
    import jax.numpy as jnp

    if dtype.name in ITEMSIZES:
        return dtype
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype("int8" if jnp.issubdtype(dtype, jnp.signedinteger) else "uint8")
    if not np.isnan(np.asarray(np.nan, dtype).astype("float32")):
        raise PlannerTypeError(f"{dtype.name} has no NaN to mark a bad index with: convert the operand")
    return jnp.dtype("bfloat16")
