"""What backends ask of the rooms above them.

Running a plan can need a new plan: for an output gradient with other strides, for the derivative of a derivative, for a
call that torch's compiler records. Backends do not import what plans. `planner` enters its functions here when it is
imported, and backends find them here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from planner.program.contraction import Contraction
from planner.program.plan import PlanRecord

__all__ = ["Callbacks", "callbacks", "enter"]


@dataclasses.dataclass(frozen=True, slots=True)
class Callbacks:
    """The functions that backends may call.

    Attributes:
        contract: `planner.contract`.
        make_plan: chooses the plan of a contraction.
        plan_and_run: the first call of its kind: it takes a `Request`, operands and index arrays.
        run_plan: runs a plan on operands and index arrays.
        group: `planner.group`.
    """

    contract: Callable[..., Any]
    make_plan: Callable[[Contraction], PlanRecord]
    plan_and_run: Callable[..., Any]
    run_plan: Callable[..., Any]
    group: Callable[..., Any]


_ENTERED: list[Callbacks] = []


def enter(given: Callbacks) -> None:
    """Make these the functions that backends call."""
    _ENTERED[:] = [given]


def callbacks() -> Callbacks:
    """Return the functions that backends may call."""
    return _ENTERED[0]
