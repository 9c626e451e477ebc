"""HTML and SVG as trees of elements: what a text holds can never become markup."""

from __future__ import annotations

import pathlib
from typing import Any
from xml.etree.ElementTree import Element, tostring


def tag(name: str, /, *children: Element | str | None, **attributes: Any) -> Element:
    """Return an element with children, elements and texts in any order; None is left out.

    Attributes are named as in HTML, with ``_`` for ``-`` and ``class_`` for ``class``. None leaves one out.
    """
    named = {key.rstrip("_").replace("_", "-"): _printable(str(v)) for key, v in attributes.items() if v is not None}
    element = Element(name, named)
    last: Element | None = None
    for child in children:
        if isinstance(child, Element):
            element.append(child)
            last = child
        elif child is not None:
            text = _printable(child)
            if last is None:
                element.text = (element.text or "") + text
            else:
                last.tail = (last.tail or "") + text
    return element


def svg(width: float, height: float, label: str, *children: Element | None, **attributes: Any) -> Element:
    """Return a drawing of a size in pixels. `label` says what it shows to readers who do not see it."""
    box = f"0 0 {width:g} {height:g}"
    return tag(
        "svg", *children, viewBox=box, width=f"{width:g}", height=f"{height:g}", role="img", aria_label=label,
        **attributes,
    )  # fmt: skip


def scrolling(child: Element, label: str) -> Element:
    """Return an element that scrolls if it is wider than the page, by touch, mouse or arrow keys."""
    return tag("div", child, class_="scrolling", tabindex="0", role="region", aria_label=label)


def _as_html(element: Element) -> str:
    """Return an element as text."""
    return tostring(element, encoding="unicode", method="html")


def document(title: str, *sections: Element) -> str:
    """Return a whole page that needs no other file."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        _style(),
    )
    body = tag("body", tag("main", *sections, class_="plan-page"))
    return f"<!doctype html>\n{_as_html(tag('html', head, body, lang='en'))}\n"


def fragment(*sections: Element) -> str:
    """Return a part of a page, for notebooks. It brings its own style, which holds for nothing else."""
    return _as_html(tag("div", _style(), *sections, class_="plan-page"))


def _style() -> Element:
    style = Element("style")
    style.text = pathlib.Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return style


def _printable(text: str) -> str:
    """Return a text with escapes for what no page can show: an axis may be any character."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
