"""`compare`: plans side by side."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from planner.inspect.text import comparison_text
from planner.language.errors import PlannerTypeError
from planner.language.resolve import shorten
from planner.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Plans side by side. `print` shows a table; `to_html` writes a page.

    Example:
        >>> import planner
        >>> p = planner.plan("ij, jk -> ik", (2, 3), (3, 4), backend="numpy")
        >>> planner.compare(p, p.naive)
        <Comparison 'ij, jk -> ik' 2 plans>

    Attributes:
        plans: the plans. The first is the one that the others are compared with.
    """

    plans: tuple[Plan, ...]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, number: int) -> Plan:
        return self.plans[number]

    def __str__(self) -> str:
        return comparison_text(self.plans)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{shorten(self.plans[0].text, 80)}' {len(self)} plans>"

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Return a page with the figures of all plans, and with the tree, the memory and the times of each.

        Args:
            path: the file to write the page to; None to return the page.

        Raises:
            PlannerError: the file cannot be written.
        """
        from planner.pages.pages import page_of_comparison

        return page_of_comparison(self.plans, path)

    def _repr_html_(self) -> str:
        from planner.pages.pages import part_of_comparison

        return part_of_comparison(self.plans)


def compare(plan: Plan, *others: Plan) -> Comparison:
    """Set plans side by side: for other limits, objectives, devices, backends, sizes, or written in another way.

    Example:
        >>> import planner
        >>> shapes = (64, 8), (8, 64), (64, 64)
        >>> fast = planner.plan("ij, jk, kl -> il", *shapes, backend="numpy")
        >>> lean = planner.plan("ij, jk, kl -> il", *shapes, backend="numpy", minimize="peak")
        >>> len(planner.compare(fast, lean, fast.naive))
        3

    Args:
        plan: the plan that the others are compared with.
        *others: the other plans; the naive plan if there are none, and `plan` is not naive itself.

    Returns:
        The comparison. Print it, or write it with `to_html`.

    Raises:
        PlannerTypeError: one of them is no plan.
    """
    for number, each in enumerate((plan, *others)):
        if not isinstance(each, Plan):
            raise PlannerTypeError(f"argument {number} is a {type(each).__name__}: give plans of planner.plan")
    naive = plan.naive
    return Comparison((plan, *(others or ((naive,) if plan.origin != naive.origin else ()))))
