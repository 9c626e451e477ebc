"""Finds the framework of an array, and loads the backend for it. It never imports a framework that is not in use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from planner.language.errors import PlannerError, PlannerTypeError
from planner.program.implementations import Backend

BACKENDS = ("torch", "jax", "numpy")
# Errors about a list among the operands say this.
HOW_GIVEN = "give the operands one by one, or all of them in one list or tuple"


@lru_cache(maxsize=8)
def load_backend(name: str) -> Backend:
    """Import a backend by name.

    Raises:
        PlannerError: there is no such backend, or its framework is not installed.
    """
    if name not in BACKENDS:
        raise PlannerError(f"backend {name!r:.80} is unknown: take one of {', '.join(BACKENDS)}")
    if importlib.util.find_spec(name) is None:
        raise PlannerError(f"{name} is not installed: pip install 'contraction-planner[{name}]'")
    backend: Backend = importlib.import_module(f"planner.backends.{name}.backend").backend
    return backend


_FRAMEWORKS: dict[type, str | None] = {}


def framework_of(array: Any) -> str | None:
    """Return the name of an array's framework: "torch", "jax" or "numpy"; None for anything else."""
    kind, torch = type(array), sys.modules.get("torch")
    if torch is not None and torch.compiler.is_dynamo_compiling():  # it would guard the whole dictionary
        return _find_framework(array)
    if kind not in _FRAMEWORKS:
        _FRAMEWORKS[kind] = _find_framework(array)
    return _FRAMEWORKS[kind]


def _find_framework(array: Any) -> str | None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(array, (jax.Array, jax.core.Tracer)):
        return "jax"
    numpy = sys.modules["numpy"]
    if isinstance(array, (numpy.ndarray, numpy.generic)):
        return "numpy"
    prepared = getattr(type(array), "prepared_framework", None)
    return prepared if prepared in BACKENDS else None


def is_stand_in(x: Any) -> bool:
    """Return whether something is a `jax.ShapeDtypeStruct`, which describes an array of JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.ShapeDtypeStruct)


def beside_jax(operands: Sequence[Any], indices: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arrays of a call. NumPy arrays beside an array of JAX become JAX arrays, as in `jax.numpy`."""
    found = {"jax" if is_stand_in(x) else framework_of(x) for x in (*operands, *indices.values())}
    if len(found) == 1 or "jax" not in found:
        return tuple(operands), dict(indices)
    numpy, jax = sys.modules["numpy"], sys.modules["jax"]

    def converts(x: Any) -> bool:
        if not isinstance(x, (numpy.ndarray, numpy.generic)):
            return False
        return x.dtype.isnative and bool(x.dtype == bool or jax.numpy.issubdtype(x.dtype, jax.numpy.number))

    def index(q: Any) -> Any:
        prepared = getattr(type(q), "prepared_framework", None) == "numpy"
        if not prepared and not converts(q):
            return q
        wide = jax.config.jax_enable_x64
        if not prepared and q.dtype.kind in "iu" and q.dtype.itemsize == 8 and q.size:
            # In narrower integers an index out of range could become one in range, and errors show it as it is.
            limits = numpy.iinfo("int32" if q.dtype.kind == "i" else "uint32")
            wide = wide or q.min() < limits.min or q.max() > limits.max
        with jax.ensure_compile_time_eval(), jax.enable_x64(bool(wide)):  # so that it can be checked under `jit`
            if prepared:
                return load_backend("jax").group(jax.numpy.asarray(q.values), q.size, q.mode)
            return jax.numpy.asarray(q)

    converted = tuple(jax.numpy.asarray(x) if converts(x) else x for x in operands)
    return converted, {name: index(q) for name, q in indices.items()}


def labelled(operands: Sequence[Any], indices: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the arrays of a call, each with its name in error messages."""
    named = [(f"operand {number}", operand) for number, operand in enumerate(operands)]
    return named + [(f"index array {name!r}", index) for name, index in indices.items()]


def operands_framework(operands: Sequence[Any], indices: Mapping[str, Any]) -> str:
    """Return the one framework of all operands and index arrays.

    Raises:
        PlannerError: an argument is not an array, or frameworks are mixed. The message names the argument.
    """
    if not operands:
        raise PlannerError("no operands were given")
    first: str | None = None
    for label, array in labelled(operands, indices):
        framework = framework_of(array)
        if framework is None:
            hint = f"; {HOW_GIVEN}" if isinstance(array, (list, tuple)) else ""
            raise PlannerTypeError(
                f"{label} is a {type(array).__name__}, not an array of torch, jax or numpy: convert it first{hint}"
            )
        if first is not None and framework != first:
            raise PlannerError(f"{label} is a {framework} array, but operand 0 is of {first}: convert one of them")
        first = first or framework
    assert first is not None
    return first
