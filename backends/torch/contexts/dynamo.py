"""What `torch.compile` records for calls of planner: Dynamo records `planner.contract` whole, and skips the others.

This module is loaded when Dynamo first meets such a call, because loading Dynamo takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._dynamo import allow_in_graph, disable
from torch.utils._pytree import register_pytree_node

from planner.backends.torch.contexts.autocast import in_region
from planner.backends.torch.index import TorchIndex
from planner.language.dtypes import asked_dtype
from planner.language.options import Request
from planner.language.parse import unpack_operands
from planner.program.callbacks import callbacks

# Dynamo takes no plan as an argument, and preparing an index array looks at its values. So these calls run outside of
# the compiled program.
run_plan = disable(callbacks().run_plan, reason="call planner.contract, which plans while it is recorded")
group = disable(callbacks().group, reason="call planner.group outside, and pass what it returns")
_contract_apart = disable(callbacks().plan_and_run, reason="planner.contract is recorded with tensors only")


register_pytree_node(TorchIndex, TorchIndex.parts, TorchIndex.join, serialized_type_name="planner.TorchIndex")


def contract(asked: Sequence[Any], operands: Sequence[Any], indices: Mapping[str, Any]) -> Any:
    """Contract as `planner.contract` does; `asked` holds its arguments in the order of `Request`."""
    operands = unpack_operands(asked[0], operands)
    # Dynamo records tensors, numbers and strings.
    if not any(isinstance(x, torch.Tensor) for x in (asked[0], *operands)):
        return _contract_apart(Request(*asked), operands, indices)
    given = {name: x for name, x in zip(Request._fields, asked, strict=True) if x is not None}
    if "dtype" in given:
        given["dtype"] = asked_dtype(given["dtype"])
    prepared: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name, q in indices.items():
        if isinstance(q, TorchIndex):
            prepared[name] = q.parts()
        else:
            arrays[name] = q
    # Dynamo knows the region that it traces; what traces its graph may not enter it.
    device = next(x for x in (asked[0], *operands) if isinstance(x, torch.Tensor)).device.type
    half = str(torch.get_autocast_dtype(device))[6:] if torch.is_autocast_enabled(device) else None
    return _contract(given, list(operands), arrays, prepared, device, half)


# Dynamo puts a call of this function into its graph. What reads the graph, a compiler or `torch.export`, traces it.
@allow_in_graph
def _contract(
    given: Mapping[str, Any],
    operands: Sequence[Any],
    arrays: Mapping[str, Any],
    prepared: Mapping[str, Any],
    device: str,
    half: str | None,
) -> Any:
    indices = {**arrays, **{name: TorchIndex.join(*parts) for name, parts in prepared.items()}}
    with in_region(device, half):
        return callbacks().plan_and_run(Request(**{**dict.fromkeys(Request._fields), **given}), operands, indices)
