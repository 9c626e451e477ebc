"""The public names for rows of your own. They are defined in `planner.program` and `planner.cost`."""

from planner.cost.figures import StepCost, Work
from planner.program.calls import Stepwise
from planner.program.frameworks import Backend
from planner.program.implementations import Implementation, Lowering, Table
from planner.program.ops import Cast, Einsum, JointGradient, Op

__all__ = [
    "Backend",
    "Cast",
    "Einsum",
    "Implementation",
    "JointGradient",
    "Lowering",
    "Op",
    "StepCost",
    "Stepwise",
    "Table",
    "Work",
]
