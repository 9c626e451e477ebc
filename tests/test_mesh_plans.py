"""Plans that know the mesh. What they foretell is counted in compiled programs in `sharded_cases.py`."""

from __future__ import annotations

import itertools
import math

import hypothesis
import pytest
from conftest import assert_on_file, examples, installed_frameworks

import planner
from planner.search.devices.collectives import whole_plan
from planner.testing import problems

CHAIN = "ij, jk, kl -> il", ((64, 4096), (4096, 512), (512, 8)), {}
SPLIT_K = {1: (None, "x"), 2: ("x",)}
ROWS = "nij, q[n]jk, kl -> nil", ((64, 2, 8), (16, 8, 16), (16, 4)), {"q": (64,)}
FOUR = "ab, bc, cd, de -> ae", ((8, 64), (64, 16), (16, 64), (64, 8)), {}
TWO_SIZES = "q[n]i, q[n]ij -> nj", ((8, 4), (16, 4, 4)), {"q": (32,)}


def make(case, grad=False, **options):
    spec, shapes, indices = case
    operands = [planner.Operand(shape, requires_grad=grad) for shape in shapes]
    return planner.plan(spec, *operands, **{"backend": "numpy", "device": "cpu", **indices, **options})


@hypothesis.settings(max_examples=examples(15, 1_000))
@hypothesis.given(problems())
def test_a_mesh_of_one_device_changes_nothing(problem):
    operands = [planner.Operand(x.shape, str(x.dtype), requires_grad=True) for x in problem.operands()]
    given = {name: q.shape for name, q in problem.indices.items()}
    options = {"sizes": problem.sizes, "backend": "numpy", "index_mode": problem.index_mode}
    alone = planner.plan(problem.spec, *operands, **options, **given)
    assert planner.plan(problem.spec, *operands, mesh={"x": 1, "y": 1}, **options, **given) == alone


@hypothesis.settings(max_examples=examples(15, 1_000))
@hypothesis.given(problems(index_modes=["raise", "drop"]), hypothesis.strategies.randoms(use_true_random=False))
def test_any_contraction_has_a_plan_for_any_mesh(problem, random):
    """Its parts are those of a device, its whole is the contraction, and JSON gives it back."""
    operands = [planner.Operand(x.shape, str(x.dtype), requires_grad=True) for x in problem.operands()]
    given = {name: q.shape for name, q in problem.indices.items()}
    axes = {"x": random.choice([2, 3]), "y": 2}
    shapes = {**{number: x.shape for number, x in enumerate(operands)}, **given}
    placements = {}
    for key, shape in shapes.items():
        dims = [d for d, size in enumerate(shape) if size >= math.prod(axes.values())]
        if dims:
            names = random.choice([("x",), ("y",), ("x", "y")])
            chosen = random.choice(dims)
            placements[key] = tuple(names if d == chosen else None for d in range(len(shape)))
    options = {"sizes": problem.sizes, "index_mode": problem.index_mode, **given}
    for backend in installed_frameworks():
        plan = planner.plan(
            problem.spec, *operands, mesh=axes, placements=placements, backend=backend, device="h100", **options
        )
        assert whole_plan(plan).resolved.spec.output_shape == problem.output_shape()
        assert len(whole_plan(plan).steps) == len(plan.steps)
        assert planner.Plan.from_json(plan.to_json()) == plan
        assert str(plan)
        steps = sum(step.choice.cost.picoseconds for step in plan.steps) / 1e12
        assert plan.cost.seconds == pytest.approx(steps + sum(c.seconds for c in plan.collectives()), rel=1e-9)


def test_a_part_of_one_element_lies_otherwise_than_the_whole():
    """A dimension of size 1 stands in no layout, so that the choices of a part cannot be those of the whole."""
    shapes = [(2, 2, 2), (2, 2, 2, 2, 4), (2,), (2, 4, 2)]
    operands = [planner.Operand(shape, requires_grad=True) for shape in shapes]
    for split in itertools.product(["x", None], repeat=2):
        placements = {1: (None, None, None, None, split[0]), 3: (None, split[1], None)}
        plan = planner.plan(
            "abc, ...abf, a, afb -> b", *operands, mesh={"x": 4}, placements=placements, backend="torch", device="h100"
        )
        assert len(whole_plan(plan).steps) == len(plan.steps)


def test_the_best_tree_on_the_mesh_is_another(jax):
    alone, together = make(CHAIN, backend="jax"), make(CHAIN, backend="jax", mesh={"x": 8}, placements=SPLIT_K)
    assert (alone.path, together.path) == (((1, 2), (0, 1)), ((0, 1), (0, 1)))
    assert [c.bytes for c in together.collectives()] == [64 * 8 * 4]
    assert [c.bytes for c in alone.collectives({"k": 8})] == [4096 * 8 * 4]
    assert [operand.shape for operand in together.operands] == [(64, 4096), (4096, 64), (64, 8)]


def all_paths(count):
    """Every path that contracts pairs."""
    if count == 1:
        yield ()
    for pair in itertools.combinations(range(count), 2):
        for rest in all_paths(count - 1):
            yield pair, *rest


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("letters", ["b", "c", "e", "bd", "ab", "ce"])
def test_no_path_takes_less_time(letters, grad):
    """The search for the whole mesh finds the best of all trees."""
    spec, shapes, _ = FOUR
    over = dict(zip(letters, "xy", strict=False))
    terms = spec.split(" -> ")[0].split(", ")
    placements = {number: [over.get(axis) for axis in term] for number, term in enumerate(terms)}
    options = {"mesh": {"x": 4, "y": 2}, "placements": placements, "device": "h100", "grad": grad}
    best = make(FOUR, optimize="optimal", **options)
    least = min(make(FOUR, optimize=list(path), **options).cost.seconds for path in set(all_paths(len(shapes))))
    assert best.cost.seconds == pytest.approx(least, rel=1e-9)
    assert best.proven


@pytest.mark.parametrize("backend", installed_frameworks())
def test_a_proposal_is_placements(backend):
    """What `planner.shard` proposes is read as it is, and so are its own placements by name."""
    operands = [planner.Operand(shape, requires_grad=True) for shape in ROWS[1]]
    found = planner.shard(ROWS[0], *operands, mesh={"x": 4}, backend=backend, **ROWS[2])
    plan = make(ROWS, grad=True, placements=found, backend=backend)
    named = {**dict(enumerate(found.operands)), **found.indices}
    again = make(ROWS, grad=True, mesh={"x": 4}, placements=named, backend=backend)
    assert (plan.mesh.split, plan.cost) == (again.mesh.split, again.cost)
    if backend == "torch":  # whatever the tree
        assert sum(c.bytes for c in plan.collectives()) == found.split.exchanged_bytes


def test_pools_of_two_sizes():
    """One is split, and the other is whole; slices of equal sizes stay two pools."""
    plan = make(TWO_SIZES, mesh={"x": 2}, placements={1: ("x",)})
    assert len(plan.resolved.spec.gathers) == 2
    assert [c.kind for c in plan.collectives()] == ["all-reduce"]
    assert whole_plan(plan).resolved.spec.gathers == planner.resolve(TWO_SIZES[0], *TWO_SIZES[1], q=(32,)).gathers


def test_arrays_of_a_plan_are_whole(jax, jnp):
    """A plan for a mesh runs on whole arrays, wherever they lie."""
    spec, shapes, indices = ROWS
    plan = make(ROWS, mesh={"x": 4}, placements={0: ("x",), "q": ("x",)}, backend="jax")
    arrays = [jnp.arange(math.prod(shape), dtype="float32").reshape(shape) % 3 for shape in shapes]
    q = jnp.arange(64) % 16
    assert (plan(*arrays, q=q) == planner.contract(spec, *arrays, q=q)).all()
    assert (planner.Plan.from_json(plan.to_json())(*arrays, q=q) == plan(*arrays, q=q)).all()
    with pytest.raises(planner.ShapeError, match=r"the plan was made for float32\[64, 2, 8\]"):
        plan(arrays[0][:16], *arrays[1:], q=q)
    with pytest.raises(planner.PlannerError, match="made for a mesh"):
        plan.analyze(*arrays, q=q)


def test_a_plan_for_a_mesh_prints():
    options = {"mesh": {"x": 4, "y": 2}, "placements": {0: ("x",), "q": ("x",), 2: ("y", None)}, "backend": "jax"}
    assert_on_file(str(make(ROWS, grad=True, device="h100", **options)) + "\n", "mesh_plan.txt")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"placements": {0: ("x",)}}, "placements= needs mesh="),
        ({"placements": {0: ("y",)}}, "operand 0 cannot be placed as ('y',): the mesh has no axis 'y', but x"),
        ({"placements": {0: ("x", "x")}}, "an axis of the mesh splits one dimension"),
        ({"placements": {0: (None, None, "x")}}, "it is no placement of an array with 2 dimensions"),
        ({"placements": {0: 3}}, "it is no placement of an array with 2 dimensions"),
        ({"placements": {5: ("x",)}}, "placements= names 5: take one of 0, 1, 2, 'result'"),
        ({"placements": {True: ("x",)}}, "placements= names True: take one of 0, 1, 2, 'result'"),
        ({"placements": [("x", None), None]}, "is not a mapping: pass one from the number of an operand"),
        ({"placements": {2: (None, "x")}}, "dimension 1 has size 8, which is fewer than the parts"),
        ({"optimize": "measure"}, "times plans on one device"),
    ],
    ids=str,
)
def test_what_is_refused(options, said):
    mesh = None if "needs mesh=" in said else {"x": 16}
    with pytest.raises(planner.PlannerError) as error:
        make(CHAIN, mesh=mesh, **options)
    assert said in str(error.value)
