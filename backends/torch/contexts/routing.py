"""A mode in which calls of `torch.einsum`, or of all functions, run on something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["RoutingMode"]


class RoutingMode(TorchFunctionMode):
    """Routes every call of `torch.einsum`, or of `every` function, in this thread, whatever name it was called by.

    torch leaves the mode while it handles a call, so what a route calls is not routed again.
    """

    def __init__(self, route: Callable[..., Any], every: bool) -> None:
        super().__init__()
        self.route, self.every = route, every

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Handle a call of any function of torch."""
        if self.every and torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        if self.every or func is torch.functional.einsum:
            return self.route(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
