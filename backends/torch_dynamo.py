"""What Dynamo finds in place of calls that it cannot read: of `planner.contract` one that it records whole.

Loaded when it first meets one, since to load Dynamo takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._dynamo import disable, nonstrict_trace
from torch.utils._pytree import register_pytree_node

from planner import dispatch
from planner.api import Request, plan_and_run
from planner.backends.torch_index import TorchIndex

__all__ = ["contract", "run_plan"]

# A plan is no argument that Dynamo takes.
run_plan = disable(dispatch.run_plan, reason="call planner.contract, which plans while it is recorded")

register_pytree_node(TorchIndex, TorchIndex.parts, TorchIndex.joined, serialized_type_name="planner.TorchIndex")


def contract(asked: Sequence[Any], operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
    """Contract as `planner.contract` does; `asked` are its arguments in the order of `planner.api.Request`."""
    # Dynamo records tensors, numbers and strings.
    given = {name: x for name, x in zip(Request._fields, asked, strict=True) if x is not None}
    if isinstance(given.get("dtype"), torch.dtype):
        given["dtype"] = str(given["dtype"])
    return _contract(given, operands, indices)


@nonstrict_trace
def _contract(given: Mapping[str, Any], operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
    return plan_and_run(Request(**{**dict.fromkeys(Request._fields), **given}), operands, indices)
