"""Why the mutants that survived change no result: by the name that `make mutants` prints.

An explanation of a mutant that is killed, or drawn no more, is an error.
"""

from __future__ import annotations

_STRICT = "equivalent: both have as many entries by construction, so that a strict zip never raises"

SURVIVORS: dict[str, str] = {
    "backends/jax/products.py:count_copied:NumberReplacer:2c8481bd": (
        "an effort only: a cache of one entry more or less"
    ),
    "backends/jax/rows.py:_pooled_cost:ReplaceComparisonOperator_Eq_LtE:e8d1fdd3": (
        "a price only, of steps that have no query and no key: there is nothing to compute"
    ),
    "backends/jax/rows.py:_run_summed:NumberReplacer:df0e4402": (
        "equivalent: all inputs of a step have one dtype, the first and the last"
    ),
    "backends/jax/step.py:_step_batch:ReplaceTrueWithFalse:a73447f1": (
        "equivalent: the same two are zipped strictly in the next line"
    ),
    "backends/jax/tiled.py:tiled_cost:ReplaceBinaryOperator_FloorDiv_LShift:07df2df2": (
        "equivalent on every device that runs these kernels: their rates are the same whatever the rows"
    ),
    "backends/torch/autograd.py:_batched_contract:ReplaceTrueWithFalse:c6cfe0d0": _STRICT,
    "backends/torch/index.py:in_range:ReplaceBinaryOperator_BitAnd_Mul:3789feca": (
        "equivalent: the product of two booleans is their conjunction"
    ),
    "kernels/grouped_matmul/pallas_gpu.py:matrices_product.body:NumberReplacer:da43c471": (
        "an effort only: a block's memory is handed back a step later, of which the interpreter knows nothing"
    ),
    "kernels/grouped_matmul/pallas_tiles.py:cut:NumberReplacer:41b4203b": (
        "equivalent: the order of rows has one dimension, its first and its last"
    ),
    "kernels/grouped_matmul/torch_grouped.py:module:NumberReplacer:ee171729": (
        "a price only: one FLOP a second less of 9e10, by which no rows are cut otherwise"
    ),
    "kernels/grouped_matmul/torch_grouped_mm.py:_takes:ReplaceComparisonOperator_Gt_NotEq:f4f0d77b": (
        "equivalent: strides in torch are never negative, so that x > 0 is x != 0"
    ),
    "kernels/tiled_product/triton_product.py:group_of:ReplaceBinaryOperator_Mul_BitAnd:79caab41": (
        "equivalent: tile * 0 and tile & 0 are both a zero of the tile's type"
    ),
    "planner/calibrate/predictions.py:module:NumberReplacer:90fe66e0": (
        "an effort only: which workloads are too large to be timed by the check; none lies near the bound"
    ),
    "planner/inspect/collectives.py:_exposed:NumberReplacer:a217e677": (
        "equivalent in what is found: only pairs of gradients have two results; what reads gradients is not asked"
    ),
    "planner/inspect/memory.py:numpy_memory:ReplaceBinaryOperator_Sub_RShift:44281c68": (
        "a gap that no NumPy plan shows: none retains anything, and 0 is measured either way"
    ),
    "planner/search/dynamic.py:Search.insert:ReplaceComparisonOperator_NotEq_Gt:101204d1": (
        "an effort only: a way that another beats stays in the front, where it never wins"
    ),
    "planner/search/paths.py:joined_by:ReplaceComparisonOperator_Gt_NotEq:00063a07": (
        "equivalent: a path with a step of no operands is refused before"
    ),
    "planner/search/space.py:module:NumberReplacer:8d644802": (
        "an effort only: 8,001 steps for 8,000 until the search of what a given path keeps takes shorter fronts"
    ),
    "planner/testing/laws.py:_compare_gradients.room:ReplaceBinaryOperator_Mul_BitOr:00c0ce84": (
        "an allowance only: what rounding made of sums of gradients was far below either"
    ),
}
