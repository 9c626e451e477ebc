"""Steps on eight simulated devices: values of one device, and no more between the devices than plans foretell."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import planner
from planner.language.derive import transpose
from planner.language.spec import Gather
from planner.language.split import axes_to_add_over, choose_splits, local_spec, splittable

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from sharded_cases import cases

HERE = pathlib.Path(__file__).parent
CASES = cases()


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """What the cases gave in one process: JAX takes the number of devices when it starts."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / "sharded_cases.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_device(name, reports):
    """Results of small integers are equal, NaN where a bad index had a say included."""
    assert reports[name]["equal"] == [True] * (1 + len(CASES[name].shapes))
    assert reports[name]["marked"] == (CASES[name].bad and CASES[name].mode == "raise")


@pytest.mark.parametrize("name", CASES)
def test_devices_exchange_what_the_plan_foretells(name, reports):
    """All collectives of the compiled program, both gradients included: their kinds and bytes."""
    assert reports[name]["exchanged"] == reports[name]["foretold"]


def test_cases_are_what_they_claim(reports):
    """Grouped kernels ran, in both directions; split results stay split; something is exchanged, and nothing."""
    assert reports["grouped n"]["lowerings"] == ["grouped matmul", "both grouped gradients"]
    assert reports["keys i"]["lowerings"] == ["whole pool, then take"] * 2
    assert reports["rows n"]["split"] == [True, True, False]
    assert reports["rows k"]["split"] == [True, False, True]
    assert reports["explicit n x, k y"]["split"] == [True, True, True]
    counts = {len(reports[name]["exchanged"]) for name in CASES}
    assert counts >= {0, 1, 2}
    assert ("all-reduce", 8) in map(tuple, reports["taken last n"]["exchanged"])  # the mask of a pool of 8 rows


# Equal to the values of one device, and what is exchanged, where that is asked for.
OTHERS = {
    "vmap": [True, []],
    "jvp": [True, []],
    "shard_map": [True, []],
    "gradients in shard_map": [True] * 4,
    # XLA cannot partition kernels: they run where a program is of one device, elsewhere stock operators do.
    "kernels": {
        "one device": True, "exported for several": False, "shard_map": True, "shard_map, unchecked": True,
        "shard_map over one axis of two": False,
    },
    "reshaped": True,  # dimensions share an axis of the mesh, as a reshape leaves them
    "locations": [True, True],  # hidden in partitioned calls, over which XLA's compiler may not end; told again later
    "two brackets": True,  # an index array in two brackets is not split
    "precision": True,  # the context says how exact products are
    "loop, split": True,
    # The result's type says how it is split.
    "type": "float32[16@x,2,4]",
    "type under vmap": "float32[8@x,16,2,4]",
}  # fmt: skip
# What is refused or told, by a part of what is said.
SAID = {
    "analyzed": "on one device",
    "loop": "loop over n",
    "loop foretold": "loop over n",
    "conflict": "operand 1 has 'j' split over x, but that splits 'n'",
    "repeated": "operand 0 has 'i' split over x, but it repeats",
    "outside of jit": "jax.jit(jax.grad(...))",
}


@pytest.mark.parametrize("name", [*OTHERS, *SAID, "bool", "int32"])
def test_other_calls(name, reports):
    """Transforms, kernels, loops and types, and what none of them can have, refused by name."""
    found = reports["others"][name]
    if name in SAID:
        assert SAID[name] in found
    elif name in OTHERS:
        assert found == OTHERS[name]
    else:  # sums of other dtypes
        equal, ((kind, _),) = found
        assert (equal, kind) == (True, "all-reduce")


def test_one_device_has_no_partitioned_call():
    import jax
    import jax.numpy as jnp

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


def test_what_cannot_be_split():
    assert splittable(planner.resolve("iij -> j", (4, 4, 3))) == ("j",)
    two = planner.resolve("q[n]i, q[n]ij -> nj", (8, 3), (16, 3, 4), q=(5,))
    assert not [entry for entry in splittable(two) if isinstance(entry, Gather)]
    assert "i" not in splittable(SPEC)  # of size 1


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
