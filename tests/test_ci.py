"""CI runs the checks, the peers' tests and ours side by side, and fails if any of them does."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
MAKE = """#!/bin/sh
for target; do :; done
echo "output of $target"
if [ "$target" = "$FAILS" ]; then echo "error in $target" >&2; exit 2; fi
if [ "$target" = test ]; then sleep 0.2; echo "7 passed in 3 s"; fi
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
@pytest.mark.parametrize("fails", ["nothing", "venv", "check", "peers", "test"])
def test_ci_prints_each_output_and_fails_if_one_part_does(fails, tmp_path):
    make = tmp_path / "make"
    make.write_text(MAKE)
    make.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FAILS": fails}
    done = subprocess.run([ROOT / ".ci" / "run"], capture_output=True, text=True, env=environment, check=False)
    said = done.stdout.splitlines()
    assert (done.returncode == 0) == (fails == "nothing")
    if fails == "venv":
        assert "output of test" not in said
        return
    assert [line for line in said if line.startswith("output")] == [
        f"output of {x}" for x in ("venv", "check", "peers", "test")
    ]
    assert said[-1] == ("7 passed in 3 s" if fails == "nothing" else f"failed: {fails}")
    assert fails == "nothing" or f"error in {fails}" in said
