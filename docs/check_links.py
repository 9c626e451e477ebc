"""Checks the links of the built site: each file that a page links to exists, and so does each anchor.

`make site` runs it on the folder that Sphinx wrote. Links to other sites are not followed.
"""

import html.parser
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What holds the address of something else, by the name of the element.
REFERENCES = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "src"}


class _Page(html.parser.HTMLParser):
    """The links of a page, and the names of its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attributes if value}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if REFERENCES.get(tag) in given:
            self.links.append(given[REFERENCES[tag]])


def dead_links(folder: Path) -> list[str]:
    """Return the links within a site that lead nowhere, as 'page: link'."""
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    dead = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            known = pages[target].names if target in pages else ()
            if not target.is_file() or (anchor and anchor not in known):
                dead.append(f"{path.relative_to(folder.resolve())}: {link}")
    return dead


def main(folder: str) -> int:
    """Print the dead links of a site; return 1 if there are any."""
    dead = dead_links(Path(folder))
    for link in dead:
        print(f"dead link: {link}", file=sys.stderr)
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
