"""Rewrites what the examples of a page print: each block of Python is run, and its output becomes the block below.

Usage: ``python docs/build.py [PAGE ...]``, by default the pages whose figures are measured. A block is run in a process
of its own, as a reader would paste it; one that fails ends the build, and its page is left as it was.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "cost-model.md",)
EXAMPLE = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


def printed(code: str) -> str:
    """Return what a block prints when it is run by itself."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    run = subprocess.run(
        [sys.executable, "-"],
        input=code,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment,
        check=False,
    )
    if run.returncode:
        raise SystemExit(f"an example fails:\n{code}\n{run.stderr}")
    return run.stdout


def build(page: Path) -> int:
    """Rewrite the outputs in a page and return how many there are."""
    text, count = EXAMPLE.subn(
        lambda found: f"```python\n{found[1]}```\n\n```text\n{printed(found[1])}```", page.read_text(encoding="utf-8")
    )
    page.write_text(text, encoding="utf-8")
    return count


def main(pages: Sequence[str]) -> None:
    """Build some pages, or all."""
    for page in [Path(name) for name in pages] or PAGES:
        print(f"{page.name}: {build(page)} examples")


if __name__ == "__main__":
    main(sys.argv[1:])
