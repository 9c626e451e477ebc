"""What steps cost in `jax.experimental.roofline`: the FLOPs and bytes that the plan counts for them."""

from __future__ import annotations

import contextlib
from typing import Any

from planner.backends.jax.evaluation import Mode
from planner.backends.jax.step import step_p, tangent_p
from planner.program.ops import Op

# It imports absl, which JAX does not install.
with contextlib.suppress(ImportError):
    from jax.experimental import roofline

    def _figures(op: Op, mode: Mode, steps: int) -> roofline.RooflineResult:
        assert mode.lower is not None
        cost = mode.lower(op).cost
        flops, moved = steps * cost.flops, steps * cost.bytes_moved
        return roofline.RooflineResult(flops=flops, unfused_flops=flops, hbm_bytes=moved, unfused_hbm_bytes=moved)

    @roofline.register_roofline(step_p)
    def _step_figures(context: Any, *shapes: Any, op: Op, mode: Mode, **_: Any) -> roofline.RooflineResult:
        return _figures(op, mode, 1)

    @roofline.register_roofline(tangent_p)
    def _tangent_figures(context: Any, *shapes: Any, op: Op, mode: Mode, **_: Any) -> roofline.RooflineResult:
        """A joint tangent is two steps."""
        return _figures(op, mode, 2)
