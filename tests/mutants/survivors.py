"""Why the mutants that survived change no result: by the name that `make mutants` prints.

An explanation of a mutant that is killed, or drawn no more, is an error.
"""

from __future__ import annotations

SURVIVORS: dict[str, str] = {
    "backends/torch_function.py:_batched_contract:ReplaceTrueWithFalse:011be731": (
        "equivalent: in_dims is cut to as many entries as there are operands, so that a strict zip never raises"
    ),
    "kernels/torch_grouped_mm.py:_takes:ReplaceComparisonOperator_Gt_NotEq:00d3e5f7": (
        "equivalent: strides in torch are never negative, so that x > 0 is x != 0"
    ),
    "kernels/triton_product.py:group_of:ReplaceBinaryOperator_Mul_BitAnd:00b4d19f": (
        "equivalent: tile * 0 and tile & 0 are both a zero of the tile's type"
    ),
    "planner/calibrate.py:_calibrate:ReplaceTrueWithFalse:00cc7e86": (
        "equivalent: the three lists have an entry for each lab, so that a strict zip never raises"
    ),
    "planner/predictions.py:module:NumberReplacer:000303bb": (
        "an effort only: which workloads are too large to be timed by `calibrate --check`; none lies near the bound"
    ),
    "planner/problem.py:module:NumberReplacer:011008a4": (
        "an effort only: how long the search of what a given path keeps goes on before it thins out; no bound is promised"
    ),
}
