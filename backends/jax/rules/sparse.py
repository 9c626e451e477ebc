"""Sparse arrays (`jax.experimental.sparse.sparsify`). Steps that do what an operation of JAX does are that operation.

The module of sparse arrays takes a quarter of a second to import. So the rule is added when the caller has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

from planner.backends.jax.evaluation import Mode, run_plain, split_row
from planner.backends.jax.guards import Guards
from planner.backends.jax.step import step_p
from planner.program.ops import Op


def add_rule() -> None:
    """Let `sparsify` know steps, if the caller has imported it."""
    transform: Any = sys.modules.get("jax.experimental.sparse.transform")
    if transform is None or step_p in transform.sparse_rules_bcoo:
        return

    def rule(env: Any, *values: Any, op: Op, mode: Mode, lowering: str, guards: Guards, **_: Any) -> Any:
        row = None if guards.arrays else split_row(op, lowering)
        if row is None:
            raise NotImplementedError(
                f"sparse rule for planner's step {str(op.spec)!r} ({lowering}) is not implemented"
            )

        def product(*arrays: Any) -> Any:
            return run_plain(op, arrays, row, mode.precision)

        result = transform.sparsify(product)(*transform.spvalues_to_arrays(env, values))
        return transform.arrays_to_spvalues(env, [result])

    transform.sparse_rules_bcoo[step_p] = rule
