"""`make peers`: the einsum tests that installed packages ship, with `planner` in the place of what they test.

Arguments go to pytest: ``python tests/peers -k views -x``. Nothing of theirs is copied; what does not pass, and why,
stands in expected.toml.
"""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# The profiles, the empty cache folder and Triton's interpreter, as for our own tests.
sys.path[:0] = [str(ROOT), str(HERE.parent)]


def main() -> int:
    import conftest  # noqa: F401
    from rewritten import REDIRECTED
    from strict import Strict

    os.chdir(ROOT)
    ours = [str(HERE / name) for name in ("torch_samples.py", "jax_harnesses.py", "jax_einsum.py")]
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-o", "addopts=--strict-markers -q"]
    arguments = [*settings, "-p", "no:cacheprovider", "--pyargs", *REDIRECTED, *ours, *sys.argv[1:]]
    return int(pytest.main(arguments, plugins=[Strict(HERE / "expected.toml")]))


if __name__ == "__main__":
    sys.exit(main())
