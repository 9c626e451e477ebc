"""A contraction planner for PyTorch, JAX and NumPy: einsum with gather indices, planned and run.

The rooms of the library have an order, from `language` to `cli`; `docs/map.md` shows it.

Example:
    >>> import numpy as np
    >>> import planner
    >>> planner.contract("ij, jk -> ik", np.eye(2), np.ones((2, 3))).shape
    (2, 3)
"""

import sys as _sys

from planner.api import contract, plan
from planner.api import plan_and_run as _plan_and_run
from planner.audits.entry import audit
from planner.caches import Caches, caches
from planner.compare import Comparison, compare
from planner.cost.device import Device
from planner.cost.figures import Cost, PlanCost
from planner.dropin.einsum import einsum
from planner.dropin.expression import ContractExpression, contract_expression, contract_path
from planner.dropin.patch import Patched, patch
from planner.groups import group, synchronize
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
from planner.plan import Plan
from planner.plan import load_plan as _load_plan
from planner.program import callbacks as _callbacks
from planner.run import run_plan as _run_plan
from planner.search.choose import find_bound as _find_bound
from planner.search.family import make_family_plan as _make_plan
from planner.search.naive import naive_plan as _naive_plan
from planner.sharding import Sharding, shard
from planner.tradeoff import Tradeoff, tradeoff
from planner.version import __version__ as __version__

__all__ = [
    "Caches",
    "Comparison",
    "ContractExpression",
    "Cost",
    "Device",
    "Gather",
    "IndexRangeError",
    "Operand",
    "Patched",
    "Plan",
    "PlanCost",
    "PlannerError",
    "PlannerLimitError",
    "PlannerTypeError",
    "SearchLimitError",
    "ShapeError",
    "Sharding",
    "Spec",
    "SpecError",
    "Tradeoff",
    "audit",
    "batched",
    "caches",
    "compare",
    "contract",
    "contract_expression",
    "contract_path",
    "einsum",
    "group",
    "patch",
    "plan",
    "resolve",
    "shard",
    "synchronize",
    "tradeoff",
    "transpose",
]

_callbacks.enter(
    _callbacks.Callbacks(contract, _make_plan, _naive_plan, _find_bound, _plan_and_run, _run_plan, group, _load_plan)
)
if "torch" in _sys.modules:  # else torch's backend does this when it is loaded
    # So that `torch.load` takes plans and prepared index arrays, of which pickles name these functions.
    _sys.modules["torch"].serialization.add_safe_globals([group, _load_plan])
