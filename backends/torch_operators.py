"""Registers the operators of exported graphs with torch; they are defined in `planner.backends.torch.operators`."""

from planner.backends.torch.operators import *  # noqa: F403
