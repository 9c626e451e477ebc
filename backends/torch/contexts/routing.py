"""Runs calls of `torch.einsum`, or of all functions of torch, on something else.

The code of `torch.einsum` itself is replaced: a mode would take a microsecond for each call of any function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, has_torch_function

from planner.backends.common.routing import Routing


def _serves() -> bool:
    """Whether autograd runs a backward pass in a thread of its own, as on cards. A checkpoint computes again there.

    Nothing tells who called the backward pass.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() < 0:
        return False
    return isinstance(threading.current_thread(), threading._DummyThread)  # Python did not start it


# Modes and objects that override functions see a call first, as they see one of torch's own einsum.
EINSUM = Routing("torch", lambda: torch.functional.einsum, has_torch_function, _serves)


class RoutingMode(TorchFunctionMode):
    """Routes every call of any function of torch in this thread.

    torch leaves the mode while it handles a call, so what a route calls is not routed again.
    """

    def __init__(self, route: Callable[..., Any]) -> None:
        super().__init__()
        self.route = route

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Handle a call of any function of torch."""
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        return self.route(func, args, kwargs or {})
