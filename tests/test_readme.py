"""The README's examples run as a reader would paste them, and print what the README says."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


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
