"""The functions of the planner that backends call.

Running a plan can need a new plan: for an output gradient with other strides, for the derivative of a derivative, or
for a call that torch's compiler records. But backends must not import the modules that make plans. So `planner` enters
its functions here when it is imported, and backends find them here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from planner.program.contraction import Contraction


@dataclasses.dataclass(frozen=True, slots=True)
class Callbacks:
    """The functions that backends may call.

    Attributes:
        contract: `planner.contract`.
        make_plan: chooses the plan of a contraction, a `planner.program.plan.PlanRecord`.
        naive_plan: returns the naive plan of a contraction, a `PlanRecord` too.
        lower_bound: returns what no plan of a contraction costs less than, as its objective measures it. It is also
            told whether the plan has a loop over slices.
        plan_and_run: plans and runs the first call of its kind; takes a `Request`, operands and index arrays.
        run_plan: runs a plan on operands and index arrays.
        group: `planner.group`.
        load_plan: `planner.Plan.from_json` as a function, which pickles name.
    """

    contract: Callable[..., Any]
    make_plan: Callable[[Contraction], Any]
    naive_plan: Callable[[Contraction], Any]
    lower_bound: Callable[[Contraction, bool], float | None]
    plan_and_run: Callable[..., Any]
    run_plan: Callable[..., Any]
    group: Callable[..., Any]
    load_plan: Callable[..., Any]


_ENTERED: list[Callbacks] = []


def enter(functions: Callbacks) -> None:
    """Enter the functions that backends call."""
    _ENTERED[:] = [functions]


def callbacks() -> Callbacks:
    """Return the functions that backends may call."""
    return _ENTERED[0]
