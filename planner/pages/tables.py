"""Pages of tables: what commands print of checks and measurements."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from planner.inspect.files import save
from planner.pages.markup import document, scrolling, svg, tag
from planner.version import __version__

_BAR_WIDTH, _BAR_HEIGHT = 160, 12


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A section of a page: a title, words, and a table.

    Attributes:
        title: the title.
        said: paragraphs above the table.
        head: the titles of the columns.
        rows: the cells; the first of each row names it.
        text: columns of words, which align left.
        bars: the title of a further column, and the length of a bar in it for each row, NaN for none.
        programs: listings below the table.
    """

    title: str
    said: Sequence[str]
    head: Sequence[str]
    rows: Sequence[Sequence[Element | str]]
    text: Sequence[str] = ()
    bars: tuple[str, Sequence[float]] | None = None
    programs: Sequence[str] = ()


def page_of_tables(
    title: str, lead: str, tables: Sequence[Table], path: str | os.PathLike[str] | None = None
) -> str | None:
    """Return a page of tables, or write it to a file if a path is given.

    Raises:
        PlannerError: the file cannot be written.
    """
    header = tag("header", tag("h1", title), tag("p", lead, class_="lead"))
    footer = tag("footer", tag("p", f"contraction-planner {__version__}."))
    return save(document(title, header, *map(_section, tables), footer), path)


def _section(table: Table) -> Element:
    parts = [tag("h2", table.title), *(tag("p", text) for text in table.said if text)]
    if table.rows:
        parts.append(scrolling(_table(table), table.title))
    parts += [scrolling(tag("pre", text), f"A listing of {table.title}") for text in table.programs]
    return tag("section", *parts)


def _table(table: Table) -> Element:
    titles = [*table.head, table.bars[0]] if table.bars else table.head
    names = ["text" if title in table.text or not number else None for number, title in enumerate(titles)]
    bars = list(_bars(table.bars[1])) if table.bars else []
    rows = []
    for number, (name, *cells) in enumerate(table.rows):
        cells += bars[number : number + 1]
        columns = zip(cells, names[1:], strict=True)
        rows.append(tag("tr", tag("th", name, scope="row", class_="text"),
                        *(tag("td", cell, class_=kind) for cell, kind in columns)))  # fmt: skip
    head = [tag("th", title, scope="col", class_=kind) for title, kind in zip(titles, names, strict=True)]
    return tag("table", tag("thead", tag("tr", *head)), tag("tbody", *rows))


def _bars(values: Sequence[float]) -> Iterator[Element | str]:
    most = max((value for value in values if value == value), default=0.0) or 1.0
    for value in values:
        if math.isnan(value):
            yield "-"
            continue
        width = max(1.0, _BAR_WIDTH * value / most)
        bar = tag("rect", x="0", y="2", width=f"{width:.1f}", height=str(_BAR_HEIGHT - 2), rx="2", class_="bar compute")
        yield svg(_BAR_WIDTH, _BAR_HEIGHT, f"{100 * value / most:.0f}% of the longest", bar)
