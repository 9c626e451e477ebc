"""`planner.shard`, which needs no devices. `dtensor_cases.py` and `sharded_cases.py` do what it proposes."""

from __future__ import annotations

import itertools
import math

import pytest
from conftest import installed_frameworks

import planner

ROWS = "nij, q[n]jk -> nik", ((64, 2, 8), (16, 8, 16)), {"q": (64,)}
MANY = "nij, q[n]jk -> nik", ((4096, 2, 8), (16, 8, 16)), {"q": (4096,)}
CHAIN = "ij, jk, kl -> il", ((16, 24), (24, 32), (32, 8)), {}
ONE_SIZE = "...j, jk", ((1, 8), (8, 40)), {}
POOL = "q[n]j -> j", ((640, 8),), {"q": (4,)}
CASES = {"rows": ROWS, "chain": CHAIN, "one size": ONE_SIZE, "pool": POOL}
MESHES = [{"x": 4}, {"x": 2, "y": 4}]


def propose(case, mesh, grad=True, **options):
    spec, shapes, indices = case
    operands = [planner.Operand(shape, requires_grad=grad) for shape in shapes]
    return planner.shard(spec, *operands, mesh=mesh, **indices, **options)


@pytest.mark.parametrize("backend", installed_frameworks())
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_nothing_that_splits_over_every_axis_exchanges_less(name, grad, mesh, backend):
    """All splits are tried that the plan foretells the sums of."""
    found = propose(CASES[name], mesh, grad, backend=backend)
    spec = found.plan.resolved.spec
    letters = {letter: spec.size(letter) for letter in spec.axes} | {g.array: g.size for g in spec.gathers}
    least = math.inf
    for ways in itertools.product(letters, repeat=len(mesh)):
        parts = {x: math.prod(n for n, y in zip(mesh.values(), ways, strict=True) if x == y) for x in ways}
        if all(parts[x] <= letters[x] for x in ways):
            rounds = {x: ways.count(x) if backend == "torch" else 1 for x in ways}
            sums = found.plan.collectives(parts)
            least = min(least, sum(c.bytes * max(rounds[x] for x in c.over) for c in sums))
    assert found.split.exchanged_bytes == least
    assert all(other.exchanged_bytes >= least for other in found.others)


def test_of_equal_sums_the_fewest_bytes_on_a_device_decide():
    """Either factor of an outer product can be split for nothing: the longer one is."""
    found = planner.shard("a, b -> ab", (4096,), (64,), mesh=(4,), backend="numpy")
    assert (found.split.letters, found.split.exchanged_bytes) == (("a",), 0)
    assert found.split.device_bytes == 4 * (1024 + 64 + 1024 * 64)


def test_the_batch_is_split_where_weights_are_small_and_weights_where_they_are_large():
    for rows, letter in ((65_536, "b"), (32, "h")):
        operands = [planner.Operand(shape, requires_grad=True) for shape in ((rows, 512), (512, 2048))]
        found = planner.shard("bd, dh -> bh", *operands, mesh={"x": 8}, backend="numpy")
        assert found.split.letters == (letter,)


def test_a_limit_of_memory():
    """Without a limit the pool is on every device: nothing is exchanged then."""
    dots = "nj, q[n]j -> n", ((64, 8), (4096, 8)), {"q": (64,)}
    free = propose(dots, {"x": 4}, grad=False, backend="numpy")
    assert (free.split.letters, free.split.exchanged_bytes, free.operands[1]) == (("n",), 0, ((), ()))
    tight = propose(dots, {"x": 4}, grad=False, backend="numpy", memory_limit="100 kB")
    assert tight.split.letters == ("j",)
    assert tight.split.exchanged_bytes == 64 * 4
    least = min(split.device_bytes for split in (free.split, *free.others))
    with pytest.raises(planner.PlannerLimitError, match=f"memory_limit={least} succeeds"):
        propose(dots, {"x": 4}, grad=False, backend="numpy", memory_limit=least - 1)


def test_placements_of_torch(torch):
    from torch.distributed.tensor import Partial, Replicate, Shard

    found = planner.shard("bj, jk -> bk", (64, 4096), (4096, 64), mesh=(1, 4), memory_limit="0.6 MB", backend="torch")
    assert found.split.letters == (None, "j")
    assert found.operands == ((Replicate(), Shard(1)), (Replicate(), Shard(0)))
    assert found.result == (Replicate(), Partial())


def test_placements_of_jax(jax):
    P = jax.sharding.PartitionSpec
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    found = propose(MANY, mesh)
    assert found.plan.backend == "jax"
    assert found.split.letters == ("n", "n")
    assert found.operands == (P(("x", "y"), None, None), P(None, None, None))
    assert found.indices == {"q": P(("x", "y"))}
    assert found.result == P(("x", "y"), None, None)


def test_what_cannot_be_split_is_not():
    """One axis of the mesh cannot split both pools that an index array reads."""
    found = planner.shard("q[n]i, q[n]ij -> j", (8, 1), (4, 1, 1), q=(2,), mesh=(4,), backend="numpy")
    assert found.split.letters == (None,)
    assert found.operands == (((), ()), ((), (), ()))
    assert "nothing" in str(found)


def test_what_repeats_is_split_along_one_dimension():
    found = planner.shard("ii, ij -> i", (8, 8), (8, 1), mesh=(4,), backend="numpy")
    assert (found.split.letters, found.split.exchanged_bytes) == (("i",), 0)
    assert found.split.device_bytes == 4 * (2 * 8 + 2 + 2)
    assert found.operands == ((("0",), ()), (("0",), ()))


def test_a_proposal_prints_what_was_considered(torch):
    text = str(propose(MANY, {"x": 4}, backend="torch"))
    assert text.splitlines()[0] == "nij, q[n]jk -> nik on x=4: n over x"
    assert "all-reduce over n of 8.19 kB" in text
    assert "q over x" in text


@pytest.mark.parametrize("mesh", [3, None, {}, (), (0,), {"x": 2.5}, "x", {3: 8}, {"x": True}], ids=str)
def test_what_is_no_mesh_is_refused(mesh):
    with pytest.raises(planner.PlannerError, match="is no mesh"):
        propose(CHAIN, mesh, backend="numpy")
