"""Checkpoint policies: a step with two operands is asked about as the `dot_general` that JAX would have in its place.

`jax.checkpoint` asks its policy about each primitive, and policies that save products compare it with
`lax.dot_general_p`. So these are asked twice about such a step: as it is, then as the `dot_general` of its operands
after `c[q]`, and before anything is added into rows of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import partial_eval

from planner.backends.jax.step import step_p
from planner.language.spec import term_axes
from planner.program.ops import Einsum, Op

# What policies return besides booleans has no public names.
_RECOMPUTE = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=(), names_which_can_be_offloaded=(), offload_src="device", offload_dst="pinned_host"
)(None)


def _ask(policy: Callable[..., Any], avals: Sequence[Any], parameters: dict[str, Any]) -> Any:
    """Return what a policy says about a step."""
    answer = policy(step_p, *avals, **parameters)
    op = parameters["op"]
    if answer not in (False, _RECOMPUTE) or not isinstance(op, Einsum) or len(op.spec.inputs) != 2:
        return answer
    arguments, dot = _as_dot(op)
    return policy(dot_general_p, *arguments, **dot)


def _as_dot(op: Op) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments and the parameters of the `dot_general` that stands for a product."""
    spec, output = op.spec, term_axes(op.spec.output)
    axes = [term_axes(term) for term in spec.inputs]
    # Axes that only one operand has are summed before.
    a, b = ([e for e in axes[i] if e in axes[1 - i] or e in output] for i in (0, 1))
    groups = [[e for e in a if e in b and (e in output) == kept] for kept in (False, True)]
    dtype = jnp.dtype(op.dtype)
    avals = [jax.ShapeDtypeStruct(spec.shape(tuple(axes)), dtype) for axes in (a, b)]
    numbers = tuple(tuple(tuple(axes.index(e) for e in group) for axes in (a, b)) for group in groups)
    return avals, {"dimension_numbers": numbers, "precision": None, "preferred_element_type": dtype}


def _partial_eval(
    policy: Callable[..., Any], unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Decide where a step runs: forward, backward, or both; as JAX does for primitives without a rule of their own."""
    count = len(eqn.outvars)
    missing = [x for x, there in zip(eqn.invars, instantiated, strict=True) if not there and not isinstance(x, Literal)]
    if any(unknown):
        return None, eqn, [True] * count, [True] * count, missing
    answer = _ask(policy, [x.aval for x in eqn.invars], eqn.params)
    if answer in (False, _RECOMPUTE):
        return eqn, eqn, [False] * count, [True] * count, missing
    if not hasattr(answer, "dst"):
        return eqn, None, [False] * count, [False] * count, []
    return _offload(eqn, answer)


def _offload(eqn: Any, spaces: Any) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Let a step also store its results in the host's memory, and the backward pass load them from there."""

    def store(*arguments: Any) -> list[Any]:
        results = step_p.bind(*arguments, **eqn.params)
        return [*results, *jax.device_put(results, _space(spaces.dst))]

    def load(*stored: Any) -> Any:
        return jax.device_put(stored, _space(spaces.src))

    count = len(eqn.outvars)
    (storing,) = jax.make_jaxpr(jax.jit(store))(*(x.aval for x in eqn.invars)).eqns
    stored = storing.outvars[count:]
    (loading,) = jax.make_jaxpr(jax.jit(load))(*(x.aval for x in stored)).eqns
    forward = storing.replace(invars=eqn.invars, outvars=[*eqn.outvars, *stored])
    backward = loading.replace(invars=stored, outvars=eqn.outvars)
    return forward, backward, [False] * count, [True] * count, stored


def _space(kind: str) -> Any:
    """Return the memory that JAX's policies call by this name."""
    return jax.memory.Space.Host if kind == "pinned_host" else jax.memory.Space.Device


partial_eval.partial_eval_jaxpr_custom_rules[step_p] = _partial_eval
