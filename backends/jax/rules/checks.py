"""Checks of `jax.experimental.checkify`: a bad index under `jit`, and NaN in the result of a step, are reported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

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
        operand_shape: tuple[int, ...]  # the shape of the index array

        def __str__(self) -> str:
            value, place, _ = np.asarray(self._payload).tolist()
            position = tuple(map(int, np.unravel_index(place, self.operand_shape)))
            return str(range_error(self.prim, position, value))

    def _check_index(
        context: tuple[Any, ...], error: Any, enabled: Any, raw: Any, *, gather: Gather
    ) -> tuple[Any, list[Any]]:
        if OOBError not in enabled or raw.size == 0:
            return error, check_p.bind(raw, gather=gather)
        bad = is_bad(raw, gather).ravel()
        place = jnp.argmax(bad)
        payload = jnp.stack([jnp.asarray(x, jnp.int32) for x in (raw.ravel()[place], place, gather.size)])
        found = _BadIndex(get_traceback(), gather, raw.shape, payload)
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
