"""The README's examples run as a reader would paste them, and print what the README says."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", TEXT, re.DOTALL)


def test_the_readme_has_its_examples():
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize(("code", "printed"), EXAMPLES, ids=["torch", "jax", "plan"])
def test_example_prints_what_the_readme_shows(code, printed):
    for framework in ("torch", "jax"):
        if f"import {framework}" in code and importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    run = subprocess.run(
        [sys.executable, "-"], input=code, capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == printed


def test_the_check_of_a_spec_runs_and_prints_what_the_readme_shows(tmp_path):
    """A test of at most six lines; the command prints the table, whose numbers differ from run to run."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    (code,) = re.findall(r"```python\n(from planner.testing import check.*?)```", TEXT, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 6
    (tmp_path / "test_mine.py").write_text(code.replace('"torch"))', '"torch"), max_examples=4)'))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True, text=True, env=environment, cwd=tmp_path, check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout

    (command,) = re.findall(r"`python -m planner (check .*?)`", TEXT)
    (table,) = re.findall(r"```text\n(nij, q\[n\]jk -> nik: 11 laws.*?)```", TEXT, re.DOTALL)
    run = subprocess.run(
        [sys.executable, "-m", "planner", *shlex.split(command), "--max-examples", "4"],
        capture_output=True, text=True, env=environment, cwd=tmp_path, check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert _without_numbers(run.stdout) == _without_numbers(table)


def _without_numbers(table):
    return re.sub(r" +\d+", " #", table.replace("11 laws", "laws"))
