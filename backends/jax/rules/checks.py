"""Checks of `jax.experimental.checkify`: a bad index under `jit`, and NaN in the result of a step, are reported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from planner.backends.common.indices import range_error
from planner.backends.jax.evaluation import Mode, input_count
from planner.backends.jax.guards import Guards
from planner.backends.jax.index import check_p, is_bad
from planner.backends.jax.step import step_p, tangent_p
from planner.language.spec import Gather
from planner.program.ops import Op

# JAX has no public way to register a check. A version without these names reports nothing.
with contextlib.suppress(ImportError):
    from jax._src import checkify
    from jax._src.checkify import OOBError, error_checks, get_traceback

    assert_func: Any = checkify.assert_func
    check_nans: Any = checkify.check_nans

    # From JAX 0.11 on a rule is given a context before the error, and hands it on.
    HAS_CONTEXT = hasattr(checkify, "CheckifyContext")

    def _register(primitive: Any, rule: Callable[..., Any]) -> None:
        """Register a rule that takes the context as a tuple, which is empty in versions without one."""

        def check(*arguments: Any, **parameters: Any) -> Any:
            return rule(arguments[:HAS_CONTEXT], *arguments[HAS_CONTEXT:], **parameters)

        error_checks[primitive] = check

    class _BadIndex(OOBError):
        """An index out of range, in the words of the error that is raised where values can be seen."""

        prim: Gather  # in JAX's own errors the name of a primitive
        operand_shape: jax.ShapeDtypeStruct  # that of the index array

        def __str__(self) -> str:
            # JAX's own errors have three numbers of 32 bits. Here the place is between both halves of the index.
            low, place, high = np.asarray(self._payload).tolist()
            array = self.operand_shape
            value = high << 32 | low % 2**32
            value += 2**64 if value < 0 and jnp.issubdtype(array.dtype, jnp.unsignedinteger) else 0
            return str(range_error(self.prim, tuple(map(int, np.unravel_index(place, array.shape))), value))

    def _halves(number: Any) -> tuple[Any, Any]:
        """Return the low and the high 32 bits of a whole number. Types of 64 bits need not be enabled."""
        if number.dtype.itemsize == 8:
            low, high = lax.bitcast_convert_type(number, jnp.int32)
            return low, high
        return number.astype(jnp.int32), jnp.where(number < 0, jnp.int32(-1), jnp.int32(0))

    def _check_index(
        context: tuple[Any, ...], error: Any, enabled: Any, raw: Any, *, gather: Gather
    ) -> tuple[Any, list[Any]]:
        if OOBError not in enabled or raw.size == 0:
            return error, check_p.bind(raw, gather=gather)
        bad = is_bad(raw, gather).ravel()
        place = jnp.argmax(bad)
        low, high = _halves(raw.ravel()[place])
        payload = jnp.stack([low, place.astype(jnp.int32), high])
        found = _BadIndex(get_traceback(), gather, jax.ShapeDtypeStruct(raw.shape, raw.dtype), payload)
        return assert_func(*context, error, bad.any(), found), []

    def _check_indices(
        context: tuple[Any, ...], error: Any, enabled: Any, raw: Sequence[Any], op: Op, mode: Mode, guards: Guards
    ) -> Any:
        """Look at the index arrays of a step: derivatives hold steps, and drop what `check_p` looks at before them."""
        if mode.index_mode == "raise" and OOBError in enabled:
            by_letter = dict(zip(guards.arrays, raw, strict=True))
            for gather in op.gathers:
                error, _ = _check_index(context, error, enabled, by_letter[gather.array], gather=gather)
        return error

    def _check_step(
        context: tuple[Any, ...],
        error: Any,
        enabled: Any,
        *arguments: Any,
        op: Op,
        mode: Mode,
        guards: Guards,
        **parameters: Any,
    ) -> tuple[Any, Any]:
        """Look for NaN in the results, unless they may hold rows of a pool that no index names: nobody sees those."""
        error = _check_indices(context, error, enabled, arguments[input_count(op) :], op, mode, guards)
        results = step_p.bind(*arguments, op=op, mode=mode, guards=guards, **parameters)
        unread = any(guard is not None and guard.rows is not None for guard in (*guards.inputs, guards.output))
        return (error if unread else check_nans(step_p, *context, error, enabled, results)), results

    def _check_tangent(
        context: tuple[Any, ...],
        error: Any,
        enabled: Any,
        *arguments: Any,
        op: Op,
        mode: Mode,
        guards: Guards,
        **parameters: Any,
    ) -> tuple[Any, Any]:
        error = _check_indices(context, error, enabled, arguments[4:], op, mode, guards)
        result = tangent_p.bind(*arguments, op=op, mode=mode, guards=guards, **parameters)
        return check_nans(tangent_p, *context, error, enabled, result), result

    _register(check_p, _check_index)
    _register(step_p, _check_step)
    _register(tangent_p, _check_tangent)
