"""Calls on DTensors, by four processes; and what plans foretell of them, in one."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
from conftest import run

import planner


def test_four_processes(torch):
    """See `dtensor_cases.py`: random and chosen specs and placements, index modes, derivatives, modules, refusals."""
    if not torch.distributed.is_available():
        pytest.skip("this torch was built without torch.distributed")
    file = pathlib.Path(__file__).with_name("dtensor_cases.py")
    said = run(sys.executable, "-W", "ignore", file, OMP_NUM_THREADS="1")
    wrong = json.loads(said.strip().splitlines()[-1])
    assert len(wrong) > 60
    assert {name: text for name, text in wrong.items() if text} == {}


def test_sums_are_of_the_result_and_of_gradients(torch):
    """A chain of three is one contraction on each device: no value in between is added up."""
    operands = [planner.Operand(shape, requires_grad=True) for shape in ((16, 8), (8, 32), (32, 4))]
    plan = planner.plan("ij, jk, kl -> il", *operands, backend="torch")
    assert [(c.over, c.bytes) for c in plan.collectives({"j": 4})] == [(("j",), 256), (("j",), 512)]
    assert [(c.over, c.bytes) for c in plan.collectives({"i": 4})] == [(("i",), 1024), (("i",), 512)]
    assert [c.bytes for c in plan.collectives({"i": 2, "j": 2})] == [128, 512, 512, 512]
