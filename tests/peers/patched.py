"""A plugin for pytest: each test starts from the same random state, and runs within `planner.patch()` if so asked."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import planner

TOTAL = planner.Patched()


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    context: Any = planner.patch() if os.environ.get("PATCHED") else contextlib.nullcontext(planner.Patched())
    with context as report:
        yield
    TOTAL.routed += report.routed
    TOTAL.passed_on.update(report.passed_on)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"PATCHED: {TOTAL}")
