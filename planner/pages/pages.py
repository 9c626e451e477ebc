"""Whole pages, and the parts of pages that notebooks show."""

from __future__ import annotations

import os
from collections.abc import Sequence

from planner.inspect.analysis import Analysis
from planner.inspect.files import save
from planner.language.resolve import shorten
from planner.pages.markup import document, fragment
from planner.pages.plan_page import comparison_sections, plan_sections, title_of
from planner.program.plan import PlanRecord

Path = str | os.PathLike[str] | None


def page_of_plan(plan: PlanRecord, path: Path = None, analysis: Analysis | None = None) -> str | None:
    """Return the page of a plan, or write it to a file if a path is given; see `planner.plan.Plan.to_html`."""
    return save(document(title_of(plan), *plan_sections(plan, analysis)), path)


def page_of_comparison(plans: Sequence[PlanRecord], path: Path = None) -> str | None:
    """Return a page that sets plans side by side, or write it to a file if a path is given."""
    title = f"{shorten(plans[0].text, 80)}: {len(plans)} plans"
    return save(document(title, *comparison_sections(plans)), path)


def part_of_comparison(plans: Sequence[PlanRecord]) -> str:
    """Return that page as a part of another page."""
    return fragment(*comparison_sections(plans))


def part_of_page(plan: PlanRecord) -> str:
    """Return the page of a plan as a part of another page."""
    return fragment(*plan_sections(plan))
