"""`Audit`, the report of an audit: a table as text, or a page."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence

from planner.audits.findings import Site, calls_text, figure_texts, instead_of, source_of_figures, why_predicted
from planner.audits.page import page_of_sites, part_of_sites
from planner.inspect.text import table_lines
from planner.language.resolve import shorten


@dataclasses.dataclass
class Audit:
    """The sites of a program, those first that cost the most time. `print` shows a table.

    Example:
        >>> import jax.numpy as jnp
        >>> import planner
        >>> print(planner.audit(lambda x, w: x @ w, jnp.ones((3, 4)), jnp.ones((4, 5))))  # doctest: +ELLIPSIS
        1 site, 1 call; planner would change 0
        ...

    Attributes:
        sites: the sites.
        unread: calls that planner refuses, by the reason.
    """

    sites: tuple[Site, ...] = ()
    unread: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def waste(self) -> tuple[Site, ...]:
        """The sites that planner would make faster or leaner."""
        return tuple(site for site in self.sites if site.wasteful)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, number: int) -> Site:
        return self.sites[number]

    def __str__(self) -> str:
        return audit_text(self)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Return a page with the table, the code to write, and the plans of the wasteful sites.

        Args:
            path: the file to write the page to; None to return the page.

        Raises:
            PlannerError: the file cannot be written.
        """
        return page_of_sites(self.sites, self.unread, path)

    def _repr_html_(self) -> str:
        return part_of_sites(self.sites, self.unread)


def audit_text(audit: Audit) -> str:
    """Return the text that `print(audit)` shows."""
    calls = sum(site.calls for site in audit)
    waste = audit.waste
    counts = f"{len(audit)} site{'s' * (len(audit) != 1)}, {calls} call{'s' * (calls != 1)}"
    head = f"{counts}; planner would change {len(waste)}"
    rows: list[Sequence[str]] = [["", "site", "calls", "time", "peak", "copied", "retained"]]
    for site in audit:
        name = f"{site.place} {site.function}{', backward' * site.backward}"
        row = ["!" if site.wasteful else "", name, calls_text(site)]
        rows.append(row + figure_texts(site.today, audit.sites))
        if site.wasteful or site.planned.measured:
            label = "  with planner" + f": {site.verdict}" * site.wasteful
            rows.append(["", label, "", *figure_texts(site.planned, audit.sites)])
    lines = [head, *((*table_lines(rows, (0, 1)), source_of_figures(audit.sites)) if audit.sites else ())]
    lines += why_predicted(audit.sites)
    for site in waste:
        lines += ["", f"{site.place}: {shorten(site.place.code, 100)}", f"  {instead_of(site, audit.sites)}"]
    lines += [
        f"not read, {count} call{'s' * (count != 1)}: {shorten(reason)}" for reason, count in audit.unread.items()
    ]
    return "\n".join(lines)
