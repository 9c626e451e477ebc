"""Registers the operators of exported graphs with torch: see `planner.backends.torch.contexts.traced`."""

from planner.backends.torch.autograd import record
from planner.backends.torch.contexts.traced import run_backward, run_forward, wide_result

__all__ = ["record", "run_backward", "run_forward", "wide_result"]
