"""Registers the operators of exported graphs with torch. They are defined in `planner.backends.torch.traced`."""

from planner.backends.torch.traced import run_backward, run_forward, wide_result

__all__ = ["run_backward", "run_forward", "wide_result"]
