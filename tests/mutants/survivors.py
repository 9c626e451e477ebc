"""Why the mutants that survived change no result: by the name that `make mutants` prints.

An explanation of a mutant that is killed, or drawn no more, is an error.
"""

from __future__ import annotations

_STRICT = "equivalent: both have as many entries by construction, so that a strict zip never raises"

SURVIVORS: dict[str, str] = {
    "backends/jax/products.py:count_copied:NumberReplacer:016832b0": (
        "an effort only: a cache of one entry more or less"
    ),
    "backends/jax/rows.py:_pooled_cost:ReplaceComparisonOperator_Eq_LtE:00343ab0": (
        "a price only, of steps that have no query and no key: there is nothing to compute"
    ),
    "backends/jax/rows.py:_run_summed:NumberReplacer:01842fc9": (
        "equivalent: all inputs of a step have one dtype, the first and the last"
    ),
    "backends/torch/autograd.py:_batched_contract:ReplaceTrueWithFalse:011be731": _STRICT,
    "backends/torch/index.py:in_range:ReplaceBinaryOperator_BitAnd_Mul:01b4fcb4": (
        "equivalent: the product of two booleans is their conjunction"
    ),
    "kernels/grouped_matmul/pallas_tiles.py:cut:NumberReplacer:00c2c793": (
        "equivalent: the order of rows has one dimension, its first and its last"
    ),
    "kernels/grouped_matmul/torch_grouped.py:module:NumberReplacer:00e0c2f4": (
        "a price only: one FLOP a second less of 9e10, by which no rows are cut otherwise"
    ),
    "kernels/grouped_matmul/torch_grouped_mm.py:_takes:ReplaceComparisonOperator_Gt_NotEq:00d3e5f7": (
        "equivalent: strides in torch are never negative, so that x > 0 is x != 0"
    ),
    "kernels/tiled_product/triton_product.py:group_of:ReplaceBinaryOperator_Mul_BitAnd:00b4d19f": (
        "equivalent: tile * 0 and tile & 0 are both a zero of the tile's type"
    ),
    "planner/bench/ahead_of_time.py:Built:ReplaceTrueWithFalse:00cd0eee": (
        "equivalent: of the fields of what was compiled none is assigned, nor is it hashed"
    ),
    "planner/calibrate/command.py:_calibrate:ReplaceTrueWithFalse:00cc7e86": _STRICT,
    "planner/calibrate/predictions.py:module:NumberReplacer:000303bb": (
        "an effort only: which workloads are too large to be timed by the check; none lies near the bound"
    ),
    "planner/search/space.py:module:NumberReplacer:011008a4": (
        "an effort only: 8,001 steps for 8,000 until the search of what a given path keeps takes shorter fronts"
    ),
    "planner/search/dynamic.py:Search.insert:ReplaceComparisonOperator_NotEq_Gt:018704d1": (
        "an effort only: a way that another beats stays in the front, where it never wins"
    ),
    "planner/search/paths.py:joined_by:ReplaceComparisonOperator_Gt_NotEq:00063a07": (
        "equivalent: a path with a step of no operands is refused before"
    ),
    "planner/inspect/memory.py:numpy_memory:ReplaceBinaryOperator_Sub_RShift:008b5211": (
        "a gap that no NumPy plan shows: none retains anything, and 0 is measured either way"
    ),
    "backends/jax/step.py:_step_batch:ReplaceTrueWithFalse:00f87438": (
        "equivalent: the same two are zipped strictly in the next line"
    ),
    "backends/jax/tiled.py:tiled_cost:ReplaceBinaryOperator_FloorDiv_LShift:0063bd25": (
        "equivalent on every device that runs these kernels: their rates are the same whatever the rows"
    ),
    "kernels/grouped_matmul/pallas_gpu.py:matrices_product.body:NumberReplacer:01ab2fa0": (
        "an effort only: a block's memory is handed back a step later, of which the interpreter knows nothing"
    ),
    "planner/bench/ahead_of_time.py:cases:ReplaceComparisonOperator_LtE_Is:0027642d": (
        "equivalent: of no case is a tile longer than the terms, and small numbers are one object each"
    ),
    "planner/language/split.py:_exposed:NumberReplacer:00ff00f4": (
        "equivalent in what is found: only pairs of gradients have two results; what reads gradients is not asked"
    ),
    "planner/search/dynamic.py:Search.products:ReplaceBinaryOperator_BitOr_RShift:00198903": (
        "an effort only but for rare sizes: the bound by which products are left out is weaker"
    ),
    "planner/testing/scripts.py:_program:ReplaceBinaryOperator_Mul_Div:01a6c32c": (
        "equivalent: each call names the two, and passes the others by position"
    ),
    "kernels/grouped_matmul/pallas_tpu.py:matrices_product.tile:NumberReplacer:00667ad2": (
        "a gap that no interpreter shows: for a tile that is not there a block is fetched from before the first, unread"
    ),
    "planner/testing/laws.py:_compare_gradients.room:ReplaceBinaryOperator_Mul_BitOr:00c0ce84": (
        "an allowance only: what rounding made of sums of gradients was far below either"
    ),
}
