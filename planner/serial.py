"""Plans as JSON: dataclasses by name, tuples as lists; nothing but data is ever read back."""

from __future__ import annotations

import dataclasses
from typing import Any

from planner.cost import Cost, PlanCost, StepCost
from planner.device import Device
from planner.errors import PlannerError
from planner.lower import Choice, Op
from planner.plan import Options, Plan
from planner.program import Leaf, Node, Program, Programs, Step, Variable
from planner.resolve import Resolved
from planner.spec import Gather, Operand, Spec

__all__ = ["decode", "encode"]

VERSION = 1

_CLASSES = {
    kind.__name__: kind
    for kind in (Choice, Cost, Device, Gather, Leaf, Node, Op, Operand, Options, Plan, PlanCost, Program, Programs,
                 Resolved, Spec, Step, StepCost, Variable)
}  # fmt: skip


def encode(value: Any) -> Any:
    """Turn a plan, or a part of one, into JSON's own types."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        if isinstance(value, StepCost):
            return {"type": name, **value._asdict()}
        fields = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": name, "version": VERSION, **fields} if isinstance(value, Plan) else {"type": name, **fields}
    if isinstance(value, (tuple, list)):
        return [encode(entry) for entry in value]
    if callable(value):
        return f"<{getattr(value, '__name__', type(value).__name__)}>"
    raise PlannerError(f"a {name} cannot be written as JSON")


def decode(value: Any) -> Any:
    """Turn what `encode` made back into objects."""
    if isinstance(value, list):
        return tuple(decode(entry) for entry in value)
    if not isinstance(value, dict):
        return value
    fields = dict(value)
    name = fields.pop("type")
    if name == "Plan" and fields.pop("version") != VERSION:
        raise PlannerError(f"this plan was written by another version: only {VERSION} can be read")
    return _CLASSES[name](**{key: decode(entry) for key, entry in fields.items()})
