"""Installs the wheel with each extra into new environments, one for each Python that is there, and runs an example.

Usage: ``python tests/clean_installs.py FOLDER PYTHON ...``. FOLDER holds the wheel. Packages are pinned.
EXTRAS in the environment names the extras to try, with commas between; by default all. For some Pythons torch's pin is
there with CUDA only, which is gigabytes.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# For each extra, a program that needs it.
EXTRAS = {
    "": "import planner, numpy; print(planner.contract('ij, jk -> ik', numpy.eye(2), numpy.ones((2, 3))).shape)",
    "torch": "import planner, torch; print(planner.contract('ij -> j', torch.ones(3, 2)).shape)",
    "jax": "import planner, jax.numpy as jnp; print(planner.contract('ij -> j', jnp.ones((3, 2))).shape)",
    "testing": "from planner.testing import check; print(check('ij -> j', backends=('numpy',), max_examples=2).passed)",
    "viz": "import planner; print(planner.plan('ij -> j', (3, 2), backend='numpy').plot() is not None)",
    "large": "import cotengrust, planner; print(planner.plan('ij, jk -> ik', (2, 3), (3, 4), backend='numpy').path)",
    "shell": "from planner.cli import main; main(['--print-completion', 'bash'])",
}  # fmt: skip


def run(*command, folder):
    """Run a command in a folder of its own, so that nothing of the checkout is imported."""
    return subprocess.run(
        [str(part) for part in command], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def try_extra(python, wheel, extra):
    """Install the wheel with one extra, and run its example and the console script."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", "venv", folder=folder)
        bin_folder = pathlib.Path(folder) / "venv" / "bin"
        name = f"{wheel}[{extra}]" if extra else str(wheel)
        run(bin_folder / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", name,
            folder=folder)  # fmt: skip
        shown = run(bin_folder / "python", "-c", EXTRAS[extra], folder=folder)
        explained = run(bin_folder / "contraction-planner", "explain", "ij, jk -> ik", "2x3", "3x4", folder=folder)
        assert explained.startswith("ij, jk -> ik")
        return shown.strip().splitlines()[0]


def main(folder, pythons):
    """Try every extra with every Python; say which Pythons are not there."""
    (wheel,) = pathlib.Path(folder).resolve().glob("*.whl")
    tried = 0
    for python in pythons:
        if shutil.which(python) is None:
            print(f"{python}: not installed here, not tried")
            continue
        for extra in os.environ.get("EXTRAS", ",".join(EXTRAS)).split(","):
            print(f"{python} [{extra}]: {try_extra(python, wheel, extra)}", flush=True)
            tried += 1
    return 0 if tried else "no Python was found: name one"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
