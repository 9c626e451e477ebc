"""The examples in README and docs run as a reader would paste them, and print what the pages show; links exist."""

import importlib.util
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from conftest import run

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The pages whose outputs are the same on every machine. The figures of the cost model are measured.
EXECUTED = {
    "README.md": 4,
    "follow-a-call.md": 8,
    "frameworks.md": 3,
    "glossary.md": 1,
    "jax.md": 5,
    "pytorch.md": 2,
    "slices.md": 3,
}
BUILD = runpy.run_path(str(ROOT / "docs" / "build.py"))
SESSIONS = [
    pytest.param(session, id=f"{page.name}-{number}")
    for page in PAGES
    if page.name in EXECUTED
    for number, session in enumerate(BUILD["sessions"](page.read_text(encoding="utf-8")))
]


def test_the_pages_have_their_examples():
    for page in PAGES:
        if page.name in EXECUTED:
            assert page.read_text(encoding="utf-8").count("```\n\n```text\n") == EXECUTED[page.name], page.name
    assert sum(len(parameter.values[0]) for parameter in SESSIONS) == sum(EXECUTED.values())


@pytest.mark.parametrize("session", SESSIONS)
def test_examples_print_what_the_page_shows(session):
    code = "\n".join(block for block, _ in session)
    for package in ("torch", "jax", "distributed", "ray"):
        if re.search(rf"(import|from) {package}|\"{package}\"", code) and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    assert BUILD["printed"]([block for block, _ in session]) == [shown for _, shown in session]


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "guide").glob("*.md")), ids=lambda page: page.stem)
def test_the_pages_of_the_guide_run(page):
    """Each is one notebook on the site. Here its cells run one after the other."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    cells = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert cells
    program = "\n".join(["import os", f"os.chdir({str(page.parent)!r})", *cells])
    run(sys.executable, "-c", program, MPLBACKEND="Agg")


def _anchors(page):
    """The names by which links find the headings of a page: lower case, a hyphen for each space."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link
    if page.name != "CHANGELOG.md" and page.parent.name != "benchmarks":
        for path in re.findall(r"`((?:planner|backends|kernels|tests|docs)/[\w/.-]*)`", text):
            assert (ROOT / path).exists(), path


def test_a_dead_link_of_the_site_is_found(tmp_path):
    """`make site` runs this check on what Sphinx wrote."""
    check = runpy.run_path(str(ROOT / "docs" / "check_links.py"))["dead_links"]
    (tmp_path / "guide").mkdir()
    (tmp_path / "picture.png").touch()
    (tmp_path / "index.html").write_text('<a href="guide/a.html#here">a</a> <a href="https://x.org/#y">x</a>')
    page = '<h2 id="here">A</h2> <a href="#here"></a> <a href="../index.html?q=1"></a> <img src="../picture.png">'
    (tmp_path / "guide" / "a.html").write_text(page)
    assert check(tmp_path) == []
    wrong = ["#there", "b.html", "../index.html#here", "../guide"]
    (tmp_path / "guide" / "a.html").write_text(page + "".join(f'<a href="{link}"></a>' for link in wrong))
    assert check(tmp_path) == [f"guide/a.html: {link}" for link in wrong]


def test_the_check_of_a_spec_runs_and_prints_what_the_readme_shows(tmp_path):
    """A test of at most six lines; the command prints the table, whose numbers differ from run to run."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    (code,) = re.findall(r"```python\n(from planner.testing import check.*?)```", TEXT, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 6
    (tmp_path / "test_mine.py").write_text(code.replace('"torch"))', '"torch"), max_examples=4)'))
    python = sys.executable, "-m"
    assert "1 passed" in run(*python, "pytest", "-q", "-p", "no:cacheprovider", tmp_path, cwd=tmp_path)

    (command,) = re.findall(r"`python -m planner (check .*?)`", TEXT)
    (table,) = re.findall(r"```text\n(nij, q\[n\]jk -> nik: 11 laws.*?)```", TEXT, re.DOTALL)
    printed = run(*python, "planner", *shlex.split(command), "--max-examples", "4", cwd=tmp_path)
    assert _without_numbers(printed) == _without_numbers(table)


def _without_numbers(table):
    return re.sub(r" +\d+", " #", table.replace("11 laws", "laws"))
