"""The site: `make site` builds it from these pages, and runs their examples while it does.

Pages are plain Markdown, as they are read on any forge. An example is a block of Python and the block of text below it
that shows what it prints; the site shows what it printed when the site was built. On the pages of `guide/` every block
of Python is a cell of one notebook, and its last line may be a value with a picture. An example that fails ends the
build.
"""

import os
import re
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))

from planner.version import __version__  # noqa: E402

project = "contraction-planner"
author = "The contraction-planner authors"
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "site"]
root_doc = "index"
html_theme = "furo"
html_title = "contraction-planner"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
napoleon_use_ivar = True
napoleon_use_rtype = False

GUIDE = ("guide/", "index")
HEADER = """---
file_format: mystnb
kernelspec:
  name: python3
---

"""
CELL = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n.*?^```\n)?", re.DOTALL | re.MULTILINE)
BUILD = runpy.run_path(str(HERE / "build.py"))
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s#]+)(#[^)\s]*)?\)")
# A cell that begins with this comment shows its output only, until it is opened.
HIDDEN = "# hidden\n"


def run_examples(app, docname, source):
    """Put what the examples of a page print, when the site is built, into the page."""
    folder = (HERE / docname).parent

    def linked(link):
        """Return a link; outside of the pages, where the site has nothing, the name of the file."""
        inside = (folder / link[2]).resolve().is_relative_to(HERE)
        return link[0] if inside else f"{link[1]} (`{link[2].lstrip('./')}`)"

    def cell(block):
        """Return a block of Python as a cell."""
        code = block[1]
        tags = ":tags: [hide-input]\n\n" * code.startswith(HIDDEN)
        return f"```{{code-cell}} python3\n{tags}{code.removeprefix(HIDDEN)}```\n"

    text = LINK.sub(linked, source[0])
    if docname.startswith(GUIDE):
        text, count = CELL.subn(cell, text)
        text = (HEADER if count else "") + text
    else:
        text = BUILD["with_outputs"](text)[0]
    source[0] = text


def setup(app):
    """Connect to Sphinx."""
    app.connect("source-read", run_examples)
