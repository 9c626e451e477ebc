"""Steps on eight simulated devices, by a pytest of its own; and what plans say of splits, on any machine."""

from __future__ import annotations

import os
import pathlib
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import run

import planner
from planner.language.derive import transpose
from planner.language.spec import Gather
from planner.language.split import axes_to_add_over, choose_splits, local_spec


def test_eight_simulated_devices(jax):
    """JAX takes the number of devices when it starts."""
    file = pathlib.Path(__file__).with_name("sharded_cases.py")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file)
    assert " passed" in run(*command, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)


def test_two_processes_of_four_devices_each(jax):
    """They compile the same programs, and exchange by gloo: results, gradients, masks of rows, padding, bad indices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = pathlib.Path(__file__).with_name("gloo_process.py")
    chosen = "eager or not proposal and (taken and not (q or j) or uneven and raise)"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    with ThreadPoolExecutor() as pool:
        how = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "timeout": 60}
        calls = [pool.submit(run, sys.executable, file, number, port, chosen, **how) for number in (0, 1)]
        assert all(" passed" in call.result() for call in calls)


def test_one_device_has_no_partitioned_call(jax, jnp):
    f = jax.jit(lambda a, c, q: planner.contract("nij, q[n]jk -> nik", a, c, q=q))
    text = f.lower(jnp.ones((6, 1, 2)), jnp.ones((3, 2, 4)), jnp.zeros(6, int)).as_text()
    assert "custom_call" not in text


SPEC = planner.resolve("nij, q[n]jk -> nik", (6, 1, 2), (3, 2, 4), q=(6,))
POOL = Gather("q", ("n",), 3)


def test_a_local_step_is_shorter_by_its_parts():
    local = local_spec(SPEC, {"n": 3, POOL: 2})
    assert local.shape(local.inputs[0]) == (2, 1, 2)
    assert local.shape(local.inputs[1]) == (2, 2, 4)
    assert local.output_shape == (2, 1, 4)
    assert local_spec(transpose(SPEC, 1), {POOL: 2}).output_shape == (2, 2, 4)


def test_parts_are_added_up_where_the_result_lacks_what_is_split():
    split = {"n": ("x",), "j": ("y",), POOL: ("z",)}
    assert axes_to_add_over(SPEC.output, split) == ("y", "z")
    assert axes_to_add_over(SPEC.inputs[1], split) == ("x",)


def test_of_arrays_that_disagree_the_smaller_one_moves():
    rows, pool = (("x",), (), ()), (("x",), (), ())
    assert choose_splits(SPEC, [(SPEC.inputs[0], rows), (SPEC.inputs[1], pool)]) == {POOL: ("x",)}
    longer = planner.resolve("nij, q[n]jk -> nik", (60, 1, 2), (3, 2, 4), q=(60,))
    assert choose_splits(longer, [(longer.inputs[0], rows), (longer.inputs[1], pool)]) == {"n": ("x",)}
    assert choose_splits(SPEC, [(SPEC.output, (("x",), (), ("y",)))], {"j": ("x",)}) == {"j": ("x",), "k": ("y",)}


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"z": 2}, "no axis"),
        ({"n": 0}, "positive"),
        ({"n": 2.5}, "positive"),
        ({"n": True}, "positive"),
        ({"i": 2}, "cannot be split"),
        (None, "not a mapping"),
        ("n8", "not a mapping"),
    ],
)
def test_collectives_refuses(splits, words):
    plan = planner.plan("nij, q[n]jk -> nik", (6, 1, 2), (3, 2, 4), q=(6,), backend="numpy")
    with pytest.raises(planner.PlannerError, match=words):
        plan.collectives(splits)


def test_collectives_print():
    plan = planner.plan("ij, jk -> ik", (64, 512), (512, 32), backend="numpy")
    assert list(map(str, plan.collectives({"j": 8}))) == ["ij, jk -> ik: all-reduce over j of 8.19 kB"]
    assert plan.collectives({"j": 1}) == ()
    assert plan.collectives({"j": np.int64(8)}) == plan.collectives({"j": 8})
    operands = planner.Operand((8, 40)), planner.Operand((40, 40), requires_grad=True)
    gather = planner.plan("q[n]j, jk -> nk", *operands, q=(256,), backend="jax")
    assert "rows that are read" in "".join(map(str, gather.collectives({"n": 8})))
