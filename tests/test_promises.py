"""The pages of promises and of contexts in PyTorch name tests: each of them exists."""

import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"`([^`\n]+)`", PAGE)
FILES = sorted((ROOT / "tests").rglob("*.py"))
FUNCTIONS = {name for path in FILES for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)}


def missing(quoted):
    """Names of tests, files and targets that are not there; a star stands for anything."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    found = []
    for name in quoted:
        if name.startswith("make "):
            there = name.removeprefix("make ") in targets
        elif "/" in name:
            there = (ROOT / name).exists()
        elif name.endswith(".py"):
            there = any(path.name == name for path in FILES)
        elif name.startswith("test_"):
            there = bool(fnmatch.filter(FUNCTIONS, name))
        else:
            continue
        found += [] if there else [name]
    return found


def test_every_promise_names_tests_that_exist():
    assert not missing(QUOTED)
    for page in ("jax.md", "pytorch.md"):
        assert not missing(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / page).read_text(encoding="utf-8"))), page
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) > 20
    for row in rows:
        _, _, holder, *_ = row.split("|")
        assert re.search(r"test|make|Limits", holder), f"nothing holds it: {row}"


@pytest.mark.parametrize("name", ["test_nothing_of_the_kind", "tests/nothing.py", "make nothing", "nothing.py"])
def test_what_is_missing_is_found(name):
    assert missing([name]) == [name]
