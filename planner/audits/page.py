"""The page of an audit: a table of the sites, the code to write, and both plans of each wasteful site."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from xml.etree.ElementTree import Element

from planner.audits.findings import Site, calls_text, figure_texts, instead_of, source_of_figures, why_predicted
from planner.inspect.files import save
from planner.pages.markup import document, fragment, scrolling, tag
from planner.pages.plan_page import comparison_sections
from planner.version import __version__

MOST_PLANS = 20


def page_of_sites(sites: Sequence[Site], unread: Mapping[str, int], path: str | os.PathLike[str] | None) -> str | None:
    """Return the page of an audit, or write it to a file if a path is given."""
    return save(document("Audit of a program", *_sections(sites, unread)), path)


def part_of_sites(sites: Sequence[Site], unread: Mapping[str, int]) -> str:
    """Return the page of an audit as a part of another page."""
    return fragment(*_sections(sites, unread))


def _sections(sites: Sequence[Site], unread: Mapping[str, int]) -> Iterator[Element]:
    waste = [site for site in sites if site.wasteful]
    counts = (len(sites), "site"), (sum(site.calls for site in sites), "call")
    said = ", ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in counts)
    said += f"; planner would change {len(waste)}. {source_of_figures(sites) if sites else ''}"
    yield tag("header", tag("h1", "Audit"), tag("p", said, class_="lead"))
    reasons = [tag("p", reason) for reason in why_predicted(sites)]
    yield tag("section", tag("h2", "Sites"), scrolling(_table(sites), "Sites"), *reasons)
    for site in waste[:MOST_PLANS]:
        yield tag(
            "section",
            tag("h2", f"{site.place}"),
            tag("p", "Today: ", tag("code", site.place.code or site.spec)),
            tag("p", "Instead: ", tag("code", site.code) if site.code else instead_of(site, sites)),
            tag("p", f"With planner: {site.verdict}."),
            tag("details", tag("summary", "Both plans"), *comparison_sections([site.naive, site.plan])),
        )
    if unread:
        rows = [tag("li", f"{count}: {reason}") for reason, count in unread.items()]
        yield tag("section", tag("h2", "Calls that were not read"), tag("ul", *rows))
    yield tag("footer", tag("p", f"contraction-planner {__version__}."))


def _table(sites: Sequence[Site]) -> Element:
    titles = ("site", "contraction", "calls", "time", "peak", "copied", "retained")
    head = [tag("th", title, scope="col", class_="text" if title in titles[:2] else None) for title in titles]
    rows = []
    for site in sites:
        pairs = zip(figure_texts(site.today, sites), figure_texts(site.planned, sites), strict=True)
        both, good = site.wasteful or site.planned.measured, "good" if site.wasteful else None
        cells = [tag("td", old, tag("div", new, class_=good) if both else None) for old, new in pairs]
        name = f"{site.place} {site.function}{', backward' * site.backward}"
        said = f"with planner{f': {site.verdict}' * site.wasteful}"
        rows.append(
            tag("tr", tag("th", name, tag("div", said, class_=good) if both else None, scope="row", class_="text"),
                tag("td", site.spec, class_="text wide"), tag("td", calls_text(site)), *cells,
                data_site=str(site.place), data_wasteful=str(site.wasteful).lower())
        )  # fmt: skip
    return tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows))
