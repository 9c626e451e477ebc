"""Sparse arrays (`jax.experimental.sparse.sparsify`). A step of sparse operands is `jnp.einsum` of what it reads.

Rows of operands are taken before it, and rows of a dense result are added up after it. JAX takes rows of a sparse array
if all indices are in range, and cannot add up rows of one. It refuses that, and so do these rules.

The module of sparse arrays takes a quarter of a second to import. So the rules are added when the caller has imported
it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from planner.backends.common.stock import evaluation
from planner.backends.jax.evaluation import Mode, input_count, run_plain, split_row
from planner.backends.jax.guards import Guards
from planner.backends.jax.index import bring_into_range
from planner.backends.jax.ops import OPS
from planner.backends.jax.step import SINGLE_GRADIENT_INPUTS, TANGENT_STEPS, bind_step, gradient_op, step_p, tangent_p
from planner.language.spec import Spec, Term, term_axes, term_gathers
from planner.program.ops import Einsum, Guard, JointGradient, Op

# Makes a function of dense arrays one that takes sparse ones too.
Sparsify = Callable[[Callable[..., Any]], Callable[..., Any]]


def add_rules() -> None:
    """Let `sparsify` know steps, if the caller has imported it."""
    transform: Any = sys.modules.get("jax.experimental.sparse.transform")
    if transform is None or step_p in transform.sparse_rules_bcoo:
        return

    def rule_of(function: Callable[..., list[Any]]) -> Callable[..., Any]:
        """Return the rule of a primitive: what its function makes of arrays, of which some are sparse."""

        def rule(env: Any, *values: Any, **parameters: Any) -> Any:
            arrays = transform.spvalues_to_arrays(env, values)
            return transform.arrays_to_spvalues(env, function(transform.sparsify, *arrays, **parameters))

        return rule

    transform.sparse_rules_bcoo[step_p] = rule_of(_step)
    transform.sparse_rules_bcoo[tangent_p] = rule_of(_tangent)


def _step(
    sparsify: Sparsify, *arguments: Any, op: Op, lowering: str, mode: Mode, views: Any, guards: Guards, **_: Any
) -> list[Any]:
    """Compute a step."""
    count = input_count(op)
    inputs, indices = arguments[:count], arguments[count:]
    if isinstance(op, JointGradient):
        results = []
        for child, places in enumerate(SINGLE_GRADIENT_INPUTS):
            chosen, single = [inputs[place] for place in places], gradient_op(op, child)
            results.append(_einsum(sparsify, single, chosen, indices, mode, views[child], guards.transposed(child)))
        return results
    row = None if guards.arrays else split_row(op, lowering)
    if row is not None:
        return [sparsify(lambda *arrays: run_plain(op, arrays, row, mode.precision))(*inputs)]
    return [_einsum(sparsify, op, inputs, indices, mode, views[0], guards)]


def _tangent(sparsify: Sparsify, *arguments: Any, op: Op, mode: Mode, views: Any, guards: Guards, **_: Any) -> Any:
    """Compute the tangent of a step in both operands."""
    parts = [
        _einsum(sparsify, op, [arguments[place] for place in places], arguments[4:], mode, views[0], guards)
        for places in TANGENT_STEPS
    ]
    return [sparsify(jnp.add)(*parts)]


def _einsum(
    sparsify: Sparsify,
    op: Op,
    inputs: Sequence[Any],
    indices: Sequence[Any],
    mode: Mode,
    view: tuple[int, ...],
    guards: Guards,
) -> Any:
    """Compute an einsum as `jnp.einsum` of the rows of its inputs.

    Args:
        sparsify: makes a function one of sparse arrays.
        op: the step.
        inputs: its inputs.
        indices: the index arrays of `guards`.
        mode: as the primitive has it.
        view: the shape of the result.
        guards: the guards of the inputs and of the result.

    Raises:
        NotImplementedError: rows of a sparse input would be masked, an index of them may be out of range, or a sparse
            product would be added into rows.
    """
    spec, raw = op.spec, dict(zip(guards.arrays, indices, strict=True))

    def refuse(what: str) -> NotImplementedError:
        return NotImplementedError(
            f"sparse rule for planner's step {str(spec)!r} is not implemented: {what} make the array dense with "
            ".todense()"
        )

    if isinstance(op, Guard):
        raise refuse("rows of a sparse array would be masked;")

    def dense_step(x: Any, term: Term, out: Term, shape: tuple[int, ...], before: Any = None, after: Any = None) -> Any:
        """Return what a step of one dense input makes of it, with its guards."""
        step = Einsum(Spec((term,), out, spec.sizes), op.dtype)
        own = Guards.of(step, (before,), after)
        (result,) = bind_step(step, (x, *(raw[name] for name in own.arrays)), mode, (shape,), own)
        return result

    def sparse_rows(x: Any, term: Term, rows: Term, name: str) -> Any:
        """Return the rows of a sparse input."""
        taken = {gather: raw[gather.array].reshape(spec.shape(gather.axes)) for gather in term_gathers(term)}
        if taken and mode.index_mode not in ("checked", "clip"):
            read = " and ".join(map(str, taken))
            raise refuse(f"{name} is sparse, and an index of {read} may be out of range; pass index_mode='clip', or")
        take, index = evaluation(OPS, Spec((term,), rows, spec.sizes)), bring_into_range(taken, mode.index_mode)
        return sparsify(lambda x: take([x.reshape(spec.shape(term))], index, False))(x)

    factors, terms = [], [term_axes(term) for term in spec.inputs]
    for number, (x, term, rows) in enumerate(zip(inputs, spec.inputs, terms, strict=True)):
        guard, is_sparse = guards.inputs[number], not isinstance(x, jax.Array)
        is_masked = guard is not None and not guard.only_gradients
        if is_sparse and is_masked:
            raise refuse(f"input {number} is sparse, and rows of it would be masked;")
        if is_sparse and rows != term:
            x = sparse_rows(x, term, rows, f"input {number}")
        elif rows != term or is_masked:
            x = dense_step(x, term, rows, spec.shape(rows), before=guard)
        factors.append(x)
    numbers = {axis: number for number, axis in enumerate(dict.fromkeys(axis for rows in terms for axis in rows))}
    out = tuple(axis for axis in term_axes(spec.output) if axis in numbers)

    def product(*arrays: Any) -> Any:
        shaped = [x.reshape(spec.shape(rows)) if x.shape != spec.shape(rows) else x
                  for x, rows in zip(arrays, terms, strict=True)]  # fmt: skip
        listed = [part for x, rows in zip(shaped, terms, strict=True) for part in (x, [numbers[axis] for axis in rows])]
        how: dict[str, Any] = {"precision": mode.precision, "preferred_element_type": jnp.dtype(op.dtype)}
        result = jnp.einsum(*listed, [numbers[axis] for axis in out], **how)
        return result if out != spec.output or result.shape == view else result.reshape(view)

    result = sparsify(product)(*factors)
    if out == spec.output and guards.output is None:
        return result
    if not isinstance(result, jax.Array):
        raise refuse("the product is sparse, and would be added into rows;")
    return dense_step(result, out, spec.output, view, after=guards.output)
