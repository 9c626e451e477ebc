"""A contraction planner for PyTorch, JAX and NumPy: einsum with gather indices, planned and run.

Example:
    >>> import numpy as np
    >>> import planner
    >>> planner.contract("ij, jk -> ik", np.eye(2), np.ones((2, 3))).shape
    (2, 3)
"""

from planner.api import contract, plan
from planner.cost.device import Device
from planner.cost.figures import Cost, PlanCost
from planner.groups import group
from planner.language.derive import batched, transpose
from planner.language.errors import (
    IndexRangeError,
    PlannerError,
    PlannerLimitError,
    PlannerTypeError,
    SearchLimitError,
    ShapeError,
    SpecError,
)
from planner.language.resolve import resolve
from planner.language.spec import Gather, Operand, Spec
from planner.program.plan import Plan
from planner.tradeoff import Tradeoff, tradeoff

__version__ = "0.1.0"

__all__ = [
    "Cost",
    "Device",
    "Gather",
    "IndexRangeError",
    "Operand",
    "Plan",
    "PlanCost",
    "PlannerError",
    "PlannerLimitError",
    "PlannerTypeError",
    "SearchLimitError",
    "ShapeError",
    "Spec",
    "SpecError",
    "Tradeoff",
    "batched",
    "contract",
    "group",
    "plan",
    "resolve",
    "tradeoff",
    "transpose",
]
