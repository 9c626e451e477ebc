"""Registers the operators of exported graphs with torch; they are defined in `planner.backends.torch.traced`."""

from planner.backends.torch.traced import *  # noqa: F403
