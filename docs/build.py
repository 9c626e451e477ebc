"""Rewrites what the examples of a page print: each block of Python is run, and its output becomes the block below it.

Usage: ``python docs/build.py [PAGE ...]``. Without a page it builds those whose figures are measured. Each block runs
in a process of its own, as if a reader had pasted it. On a page that holds the comment ``<!-- one session -->`` each
block goes on from the blocks above it. If an example fails, the build ends and the page stays as it was.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "cost-model.md",)
EXAMPLE = re.compile(r"```python\n((?:(?!```).)*)```\n\n```text\n(.*?)```", re.DOTALL)
ONE_SESSION = "<!-- one session -->"
NEXT = "--- the next example ---\n"


def sessions(text: str) -> list[list[tuple[str, str]]]:
    """Return the examples of a page, (code, what the page shows): one list for each process that runs them."""
    examples = EXAMPLE.findall(text)
    return [examples] if ONE_SESSION in text else [[example] for example in examples]


def printed(blocks: Sequence[str]) -> list[str]:
    """Return what each block prints when they run one after another in a new process, as a script."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "example.py"
        script.write_text(f"print({NEXT.rstrip()!r})\n".join(blocks), encoding="utf-8")
        run = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            encoding="utf-8",
            env=environment,
            check=False,
            timeout=300,
        )
    if run.returncode:
        raise SystemExit("\n".join(["an example fails:", *blocks, run.stderr]))
    return run.stdout.split(NEXT)


def with_outputs(text: str) -> tuple[str, int]:
    """Return the text of a page with what its examples print now, and how many there are.

    Examples that import a package which is not installed stay as they are.
    """
    outputs: list[str] = []
    for session in sessions(text):
        imported = {
            name for code, _ in session for name in re.findall(r"^\s*(?:import|from) (\w+)", code, re.MULTILINE)
        }
        absent = any(importlib.util.find_spec(name) is None for name in imported)
        outputs += [shown for _, shown in session] if absent else printed([code for code, _ in session])
    found = iter(outputs)
    return EXAMPLE.subn(lambda block: f"```python\n{block[1]}```\n\n```text\n{next(found)}```", text)


def build(page: Path) -> int:
    """Rewrite the outputs in a page and return how many there are."""
    text, count = with_outputs(page.read_text(encoding="utf-8"))
    page.write_text(text, encoding="utf-8")
    return count


def main(pages: Sequence[str]) -> None:
    """Build some pages, or all."""
    for page in [Path(name) for name in pages] or PAGES:
        print(f"{page.name}: {build(page)} examples")


if __name__ == "__main__":
    main(sys.argv[1:])
