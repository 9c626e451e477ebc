"""Steps on eight simulated devices: values of one device, and no more between the devices than plans foretell.

JAX takes the number of devices when it starts: `test_sharding_jax.py` runs this file by a pytest of its own, and
`gloo_process.py` in two processes with four of the devices each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import re
import types
from collections.abc import Mapping

import hypothesis
import jax
import jax.numpy as jnp
import jax_fast
import numpy as np
import pytest
from conftest import examples
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.multihost_utils import process_allgather
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from laws import MODES

import planner
from planner.backends.jax import partition as jax_partition
from planner.backends.jax.rules import names
from planner.language.split import letter_of, place_index, place_term
from planner.testing import problems, reference, reference_gradients

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
BYTES = {"pred": 1, "f32": 4, "s32": 4, "u32": 4, "bf16": 2}


@dataclasses.dataclass(frozen=True)
class Case:
    """One contraction.

    Attributes:
        spec, shapes, indices: the contraction; of each index array its shape and the size of what it indexes.
        mode: the index mode.
        bad: whether some indices are out of range.
        sizes: as of `planner.contract`.
        explicit: whether the axes of the mesh are in the types of arrays.
        nan: whether a row that no index names holds NaN.
        uneven: whether sizes are not multiples of the parts: then arrays are split inside of the program.
        minimize: as of `planner.contract`.
    """

    spec: str
    shapes: tuple[tuple[int, ...], ...]
    indices: Mapping[str, tuple[tuple[int, ...], int]] = dataclasses.field(default_factory=dict)
    mode: str = "raise"
    bad: bool = False
    sizes: Mapping[str, int] | None = None
    explicit: bool = False
    nan: bool = False
    uneven: bool = False
    minimize: str = "time"


ROWS = Case("nij, q[n]jk -> nik", ((64, 2, 8), (8, 8, 16)), {"q": ((64,), 8)})
GROUPED = Case("nij, q[n]jk -> nik", ((512, 1, 64), (16, 64, 64)), {"q": ((512,), 16)})
UNEVEN = Case("nij, q[n]jk -> nik", ((13, 2, 5), (7, 5, 9)), {"q": ((13,), 7)}, uneven=True)
KEYS = Case("bqhd, bhi[bhqk]d -> bhqk", ((8, 64, 2, 32), (8, 2, 40, 32)), {"i": ((8, 2, 64, 32), 40)})
JOINED = Case("ijkl, mip -> jklmp", ((64, 64, 8, 8), (8, 64, 16)), minimize="peak")
FEW_TERMS = Case("brhp, rhp -> bhp", ((64, 3, 8, 64), (3, 8, 64)))
CHAIN = Case("ij, jk, kl -> il", ((16, 24), (24, 32), (32, 8)))
TAKEN_LAST = Case("q[n]j, jk -> nk", ((8, 40), (40, 40)), {"q": ((256,), 8)}, nan=True)
SUMMED = Case("q[n]j -> j", ((7, 9),), {"q": ((13,), 7)}, uneven=True)
BATCH = Case("bnij, bq[bn]jk -> bnik", ((8, 6, 2, 4), (8, 5, 4, 3)), {"q": ((8, 6), 5)})
SCATTER = Case("nj, nk -> q[n]jk", ((32, 8), (32, 8)), {"q": ((32,), 16)}, sizes={"q": 16})
# An axis, or a pool, that repeats in a term; an index array for two pools, in two brackets, with an axis twice in one.
DIAGONAL = Case("iij, jk -> ik", ((16, 16, 8), (8, 8)))
DIAGONAL_UNEVEN = Case("iij, jk -> kii", ((13, 13, 4), (4, 5)), uneven=True)
POOLS = Case("q[n]q[n]j, nk -> njk", ((8, 8, 2), (16, 3)), {"q": ((16,), 8)}, mode="drop", bad=True)
TWO_SIZES = Case("q[n]i, q[n]ij -> nj", ((8, 8), (16, 8, 3)), {"q": ((32,), 8)})
TWO_BRACKETS = Case("q[n]j, q[m]j -> nm", ((8, 3), (8, 3)), {"q": ((16,), 8)})
ONE_BRACKET = Case("q[nn]j, nk -> jk", ((8, 3), (16, 2)), {"q": ((16, 16), 8)})
# Letters and the axes of the mesh that they are split over: x of 2 and y of 4 or, if only x occurs, x of 8.
SPLITS = [
    ("rows", ROWS, ["n x", "j x", "k x", "q x", "n x, k y", "n x, q y", "q x, j y", "n xy"]),
    ("uneven", UNEVEN, ["n x", "j x", "k x", "q xy"]),
    ("uneven, summed", SUMMED, ["n x"]),
    ("grouped", GROUPED, ["n x", "q x"]),
    ("batch", BATCH, ["b x"]),
    ("keys", KEYS, ["b x", "i x"]),
    ("chain", CHAIN, ["i x", "j x", "k x"]),
    ("joined", JOINED, ["i x", "j x", "k x, m y"]),
    ("few terms", FEW_TERMS, ["b x", "p x"]),
    ("taken last", TAKEN_LAST, ["n x", "q x", "j x"]),
    ("scatter", SCATTER, ["n x"]),
    *((mode, dataclasses.replace(ROWS, mode=mode, bad=True), ["n x", "q x"]) for mode in MODES),
    ("uneven raise", dataclasses.replace(UNEVEN, bad=True), ["q x, n y"]),
    ("diagonal", DIAGONAL, ["i x", "j x", "i x, k y"]),
    ("diagonal, uneven", DIAGONAL_UNEVEN, ["i x", "i xy"]),
    ("pools", POOLS, ["q x", "n x, q y"]),
    ("two sizes", TWO_SIZES, ["n x", "i x"]),
    ("two brackets", TWO_BRACKETS, ["n x", "n x, m y"]),
    ("one bracket", ONE_BRACKET, ["n x"]),
    ("explicit diagonal", dataclasses.replace(DIAGONAL, explicit=True), ["i x"]),
    ("explicit", dataclasses.replace(ROWS, explicit=True), ["q x", "n x, k y"]),
    ("nan", dataclasses.replace(ROWS, mode="nan", bad=True), ["n x, q y"]),
]
CASES = {f"{name} {split}": (case, split) for name, case, splits in SPLITS for split in splits}


def exchanged(text: str, numbers: bool = True) -> list[tuple[str, int]]:
    """The kind and the bytes of each result of the collectives in a compiled program; of single numbers if asked."""
    found = []
    for results, kind in re.findall(rf"= (.+?) ({KINDS})(?:-start)?\(", text):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", results):
            if dims or numbers:
                found.append((kind, BYTES[dtype] * math.prod(map(int, filter(None, dims.split(","))))))
    return sorted(found)


@functools.cache
def run(case_name: str) -> types.SimpleNamespace:
    """What a case gives with all gradients, on one device and on eight, and what the plan and the program say."""
    case, splits = CASES[case_name]
    split = {letter: tuple(axes) for letter, axes in map(str.split, splits.split(", "))}
    shape, axes = ((2, 4), ("x", "y")) if "y" in splits else ((8,), ("x",))
    kind = AxisType.Explicit if case.explicit else AxisType.Auto
    mesh = jax.make_mesh(shape, axes, axis_types=(kind,) * len(shape))
    rng = np.random.default_rng(0)
    xs = [rng.integers(-2, 3, shape).astype("float32") for shape in case.shapes]
    qs = {name: rng.integers(0, size, shape).astype("int32") for name, (shape, size) in case.indices.items()}
    for name, (_, size) in case.indices.items() if case.bad or case.nan else ():
        if case.nan:
            qs[name][qs[name] == 5], xs[0][5] = 2, math.nan
        else:
            qs[name].flat[[3, 7, qs[name].size - 1]] = size + 2, -1, -3 * size
    stand_ins = [planner.Operand(x.shape, requires_grad=True) for x in xs]
    options = {"sizes": case.sizes, "index_mode": case.mode, "minimize": case.minimize}
    options |= {name: q.shape for name, q in qs.items()}
    plan = planner.plan(case.spec, *stand_ins, backend="jax", **options)
    spec = plan.resolved.spec
    gradient = rng.integers(-2, 3, spec.output_shape).astype("float32")

    entries = {entry: split[letter_of(entry)] for entry in (*spec.axes, *spec.gathers) if letter_of(entry) in split}
    terms = *spec.inputs, spec.output
    *of_operands, of_result = (place_term(term, entries) for term in terms)
    placements = *of_operands, *(place_index(spec, name, entries) for name in qs), of_result
    places = [NamedSharding(mesh, PartitionSpec(*(names or None for names in dims))) for dims in placements]
    arrays = [*xs, *qs.values(), gradient]

    def whole(*arrays):
        operands, indices = arrays[: len(xs)], dict(zip(qs, arrays[len(xs) : -1], strict=True))
        result, back = jax.vjp(lambda *operands: plan(*operands, **indices), *operands)
        return result, *back(arrays[-1])

    def padded(x, place):
        """An array of 50 more, split; what it is filled up with is NaN, or a bad index, not XLA's zero."""
        split = jax.lax.with_sharding_constraint(x, place)
        return split * (split / split) - 50 if x.dtype == jnp.float32 else split - 50

    def uneven(*arrays):
        return whole(*map(padded, arrays, places))

    def compiled(function):
        on_all = NamedSharding(mesh, PartitionSpec())
        given = [(x + 50, on_all) if case.uneven else (x, place) for x, place in zip(arrays, places, strict=True)]
        # `device_put` would compare the values of processes, and NaN is not NaN.
        given = [jax.make_array_from_callback(x.shape, place, x.__getitem__) for x, place in given]
        program = jax.jit(function).lower(*given).compile(jax_fast.FAST)
        return program(*given), program.as_text()

    results, text = compiled(uneven if case.uneven else whole)
    if case.uneven:  # a result of another size is gathered when it leaves the program
        _, text = compiled(lambda *arrays: [x.sum() for x in uneven(*arrays)])
    parts = {letter: math.prod(mesh.shape[axis] for axis in axes) for letter, axes in split.items()}
    return types.SimpleNamespace(
        lowerings=[step.choice.lowering for step in plan.steps],
        wanted=jax_fast.jit(whole)(*map(jnp.asarray, arrays)),
        results=results,
        split=[not x.sharding.is_fully_replicated for x in results],
        exchanged=exchanged(text, numbers=not case.uneven),  # the sums above are added up too
        foretold=sorted((c.kind, c.bytes) for c in plan.collectives(parts)),
    )


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_device(name):
    """Results of small integers are equal, NaN where a bad index had a say included."""
    ran, (case, _) = run(name), CASES[name]
    for x, wanted in zip(ran.results, ran.wanted, strict=True):
        np.testing.assert_array_equal(process_allgather(x, tiled=True), wanted)
    assert jnp.isnan(ran.wanted[0]).any() == (case.bad and case.mode in ("raise", "nan"))


@pytest.mark.parametrize("name", CASES)
def test_devices_exchange_what_the_plan_foretells(name):
    """All collectives of the compiled program, both gradients included: their kinds and bytes."""
    assert run(name).exchanged == run(name).foretold


def test_cases_are_what_they_claim():
    """Grouped kernels ran, in both directions; split results stay split; something is exchanged, and nothing."""
    assert run("grouped n x").lowerings == ["grouped matmul", "both grouped gradients"]
    assert run("keys i x").lowerings == ["whole pool, then take"] * 2
    assert run("joined i x").lowerings[:2] == ["flat matmul"] * 2
    assert run("few terms b x").lowerings[0] == "multiply and add"
    assert run("rows n x").split == [True, True, False]
    assert run("rows k x").split == [True, False, True]
    assert run("explicit n x, k y").split == [True, True, True]
    assert {len(run(name).exchanged) for name in CASES} >= {0, 1, 2}
    assert ("all-reduce", 8) in run("taken last n x").exchanged  # the mask of a pool of 8 rows


@pytest.mark.parametrize("case", [ROWS, GROUPED, BATCH, CHAIN], ids=str)
@pytest.mark.parametrize("mesh", [{"x": 8}, {"x": 2, "y": 4}], ids=str)
def test_devices_exchange_what_a_proposal_says(case, mesh):
    """Arrays, the gradient of the result and gradients lie as `planner.shard` proposes."""
    mesh = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
    stand_ins = [planner.Operand(shape, requires_grad=True) for shape in case.shapes]
    found = planner.shard(
        case.spec, *stand_ins, mesh=mesh, **{name: shape for name, (shape, _) in case.indices.items()}
    )

    def whole(operands, indices, gradient):
        result, back = jax.vjp(lambda *operands: found.plan(*operands, **indices), *operands)
        return result, back(gradient)

    def place(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    operands = [place(shape, "float32", spec) for shape, spec in zip(case.shapes, found.operands, strict=True)]
    indices = {name: place(shape, "int32", found.indices[name]) for name, (shape, _) in case.indices.items()}
    gradient = place(found.plan.resolved.spec.output_shape, "float32", found.result)
    text = jax.jit(whole).lower(operands, indices, gradient).compile(jax_fast.FAST).as_text()
    assert sorted(exchanged(text)) == sorted((c.kind, c.bytes) for c in found.collectives)


# -- what is not a case: transforms, loops, dtypes, and what types say and refuse ------------------------

RNG = np.random.default_rng(0)
MESH = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
TWO_AXES = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
SPLIT, WHOLE = PartitionSpec("x"), PartitionSpec()
# JAX writes every program to the disk.
CACHE = {"jax_compilation_cache_dir": None, "jax_enable_compilation_cache": True,
         "jax_persistent_cache_min_entry_size_bytes": -1, "jax_persistent_cache_min_compile_time_secs": 0}  # fmt: skip


def small(*shape, low=-2, dtype="float32"):
    return jnp.asarray(RNG.integers(low, low + 5, shape).astype(dtype))


def put(x, *names, on=MESH):
    return jax.device_put(x, NamedSharding(on, PartitionSpec(*names)))


def rows(a, c, q):
    return planner.contract("nij, q[n]jk -> nik", a, c, q=q, index_mode="drop")


A, C, Q = small(16, 2, 8), small(8, 8, 4), small(16, low=0, dtype="int32")
SHORT = small(8, low=0, dtype="int32")
MANY = small(8, 16, 2, 8), small(8, 8, 8, 4), small(8, 16, low=0, dtype="int32")
LONG, MATRIX = small(64, 8), small(8, 4)
TYPED = put(A, "x", on=EXPLICIT), put(C, on=EXPLICIT), put(Q, "x", on=EXPLICIT)
LOOPED = small(64, 8, 16), small(8, 16, 16), small(64, 16), small(64, low=0, dtype="int32")
# A loop over n in slices of one row from each device, and one whose slices are too short to be shared.
SHARED = planner.plan("nij, q[n]jk, nk -> ni", *(x.shape for x in LOOPED[:3]), q=(64,), backend="jax",
                      memory_limit=30_000)  # fmt: skip
LIMITED = planner.plan("nij, q[n]jk, nk -> ni", *(x.shape for x in LOOPED[:3]), q=(64,), backend="jax",
                       memory_limit=12_000)  # fmt: skip


def ahead(a, c, q):
    return jax.jvp(lambda a, c: rows(a, c, q), (a, c), (2 * a, 3 * c))


def twice(x, q):
    return planner.contract("q[n]j, q[m]j -> nm", x, x, q=q)


def two_sizes(x, y, q):
    return planner.contract("q[n]i, q[n]ij -> nj", x, y, q=q)


def loop_gradients(a, c, b, q):
    """The gradient of c alone is a sum over devices, in each slice."""
    return jax.grad(lambda a, c, b: (SHARED(a, c, b, q=q) ** 2).sum(), argnums=(0, 1, 2))(a, c, b)


def diagonal(x):
    return planner.contract("ii -> i", x)


def reshaped(x, y):
    return planner.contract("nmj, jk -> nmk", x.reshape(4, 16, 8), y)


# The places of operands; and where it is asked for what is exchanged, or the kinds of it.
@pytest.mark.parametrize(
    ("function", "arrays", "places", "kinds"),
    [
        pytest.param(jax.vmap(rows), MANY, ["x", "x", "x"], [], id="vmap"),
        pytest.param(ahead, (A, C, Q), ["x", "", "x"], [], id="jvp"),
        pytest.param(rows, (A != 0, C != 0, Q), ["  x", " x", ""], ["all-reduce"], id="bool"),
        pytest.param(rows, (A.astype(int), C.astype(int), Q), ["  x", " x", ""], ["all-reduce"], id="int32"),
        # Of an index array in two brackets one is whole.
        pytest.param(twice, (small(5, 4), SHORT), ["", "x"], ["all-gather"], id="two brackets"),
        pytest.param(two_sizes, (small(8, 4), small(16, 4, 4), SHORT), [" ", "x", ""], ["all-reduce"], id="one pool"),
        pytest.param(two_sizes, (small(8, 4), small(16, 4, 4), SHORT), ["x", " ", ""], ["all-reduce"], id="the other"),
        pytest.param(diagonal, (small(8, 8),), ["x"], [], id="first dimension"),
        # The result, of 32 bytes, and not the matrix: Shardy's rule ties it to the first dimension.
        pytest.param(diagonal, (small(8, 8),), [" x"], [("all-gather", 32)], id="second dimension"),
        # Dimensions share an axis of the mesh, as a reshape leaves them.
        pytest.param(reshaped, (LONG, MATRIX), ["x", ""], None, id="reshaped"),
        pytest.param(lambda *xs: LIMITED(*xs[:3], q=xs[3]), LOOPED, ["x", "", "x", "x"], None, id="loop"),
        pytest.param(lambda *xs: SHARED(*xs[:3], q=xs[3]), LOOPED, ["x", "", "x", "x"], [], id="shared loop"),
        pytest.param(loop_gradients, LOOPED, ["x", "", "x", "x"], ["all-reduce"], id="gradients of a loop"),
    ],
)
def test_split_arrays_give_what_whole_ones_do(function, arrays, places, kinds):
    names = ([name.strip() or None for name in place] for place in places)
    split = [put(x, *named) if named else x for x, named in zip(arrays, names, strict=True)]
    program = jax.jit(function).lower(*split).compile(jax_fast.FAST)
    jax.tree.map(np.testing.assert_array_equal, program(*split), jax_fast.jit(function)(*arrays))
    found = exchanged(program.as_text())
    assert kinds in (None, found, sorted({kind for kind, _ in found}))


def test_a_plan_that_knows_the_mesh_exchanges_less():
    """One device multiplies the last two first; on the mesh their product would be added up, which is large."""
    spec, shapes = "ij, jk, kl -> il", ((64, 4096), (4096, 512), (512, 8))
    arrays = put(small(*shapes[0])), put(small(*shapes[1]), None, "x"), put(small(*shapes[2]), "x")
    alone = planner.plan(spec, *arrays)
    together = planner.plan(spec, *arrays, mesh=MESH)
    stand_ins = planner.plan(spec, *shapes, mesh={"x": 8}, placements={1: (None, "x"), 2: ("x",)}, backend="jax")
    assert (together.path, stand_ins.cost) == (((0, 1), (0, 1)), together.cost)
    found = []
    for plan in alone, together:
        program = jax.jit(plan.__call__).lower(*arrays).compile(jax_fast.FAST)
        found.append(exchanged(program.as_text()))
        np.testing.assert_array_equal(program(*arrays), planner.contract(spec, *map(np.asarray, arrays)))
    assert found == [[("all-reduce", 4096 * 8 * 4)], [("all-reduce", 64 * 8 * 4)]]
    assert [(c.kind, c.bytes) for c in together.collectives()] == found[1]


def test_faster_products_are_those_of_xla_on_several_devices():
    """So a program may have two meshes, and its export for a mesh has derivatives."""
    other = Mesh(np.array(jax.devices()).reshape(2, 4), ("p", "q"))
    a, b = small(512, 256), small(512, 4)

    def call(a, b):
        return planner.contract("ki, ko -> io", a, b)

    assert planner.plan("ki, ko -> io", a, b).steps[0].choice.lowering == "matmul, then permute"
    pairs = [
        tuple(jax.device_put(x, NamedSharding(mesh, PartitionSpec(name))) for x in (a, b))
        for mesh, name in ((MESH, "x"), (other, "p"))
    ]
    for found in jax.jit(lambda one, two: (call(*one), call(*two)))(*pairs):
        np.testing.assert_array_equal(found, np.asarray(a).T @ np.asarray(b))
    exported = jax.export.export(jax.jit(call))(*pairs[0])
    assert [x.shape for x in exported.vjp().out_avals] == [a.shape, b.shape]


def test_what_moves_is_foretold():
    """The smaller of two operands that are split along different axes is gathered, in either direction."""
    x, y = put(small(64, 16), "x"), put(small(16, 8), None, "x")
    plan = planner.plan("ij, jk -> ik", x, y, mesh=MESH)
    program = jax.jit(plan.__call__).lower(x, y).compile(jax_fast.FAST)
    assert exchanged(program.as_text()) == [(c.kind, c.bytes) for c in plan.collectives()] == [("all-gather", 512)]


def test_eager_calls():
    """Where one process does not see all indices, NaN marks a bad one, as under `jit`."""

    def call(q):
        a, c, q = (put(np.asarray(x), *names) for x, names in ((A, "x"), (C, ""), (q, "x")))
        return planner.contract("nij, q[n]jk -> nik", a, c, q=q)

    np.testing.assert_array_equal(process_allgather(call(Q), tiled=True), rows(A, C, Q))
    bad = Q.at[3].set(9)
    if jax.process_count() == 1:
        with pytest.raises(planner.IndexRangeError, match="is 9"):
            call(bad)
    else:
        marked = np.isnan(process_allgather(call(bad), tiled=True))
        assert (marked.any((1, 2)) == (np.arange(16) == 3)).all()
        assert marked[3].all()


def drawn(count):
    """Random problems with index arrays."""
    found = []

    @hypothesis.settings(max_examples=4 * count, phases=[hypothesis.Phase.generate])
    @hypothesis.given(problems(dtypes=["float32"], index_modes=["raise", "drop", "clip"], max_axes=5, max_size=7))
    def draw(problem):
        if problem.indices and problem.is_exact(slack=2):
            found.append(problem)

    draw()
    return found[:count]


DRAWN = drawn(examples(4, 200))


@pytest.mark.parametrize("problem", DRAWN, ids=str)
def test_random_specs_in_random_places(problem):
    """Values and gradients, whatever dimensions of whatever size are split."""
    rng, mesh = random.Random(str(problem)), jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    operands, names = problem.operands(), list(problem.indices)
    arrays = [*map(np.asarray, operands), *map(np.asarray, problem.indices.values())]

    def placed(x):
        dims = [[] for _ in x.shape]
        for name in rng.sample("xy", rng.randint(0, 2)) if dims else ():
            rng.choice(dims).append(name)
        return NamedSharding(mesh, PartitionSpec(*(tuple(names) or None for names in dims)))

    places = list(map(placed, arrays))

    def whole(*arrays):
        options = {"sizes": problem.sizes, "index_mode": problem.index_mode}
        options |= dict(zip(names, arrays[len(operands) :], strict=True))
        run = functools.partial(planner.contract, problem.spec, **options)
        result, back = jax.vjp(run, *arrays[: len(operands)])
        return result, *back(jnp.ones_like(result))

    def split(*arrays):
        return whole(*map(jax.lax.with_sharding_constraint, arrays, places))

    everywhere = [jax.device_put(x, NamedSharding(mesh, WHOLE)) for x in arrays]
    found, wanted = jax_fast.jit(split)(*everywhere), jax_fast.jit(whole)(*arrays)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def oracle(problem, arrays, gradient):
    """What the oracle says of operands and index arrays, and of a gradient of the result: the result and gradients."""
    count, options = len(problem.shapes), {"sizes": problem.sizes, "index_mode": problem.index_mode}
    options |= dict(zip(problem.indices, arrays[count:], strict=True))
    result = reference(problem.spec, *arrays[:count], **options)
    return result, *reference_gradients(problem.spec, gradient, *arrays[:count], **options)


def pulled(problem, arrays, gradient):
    """The same by planner. `gradient` is a function of the result."""
    count, options = len(problem.shapes), {"sizes": problem.sizes, "index_mode": problem.index_mode}
    options |= dict(zip(problem.indices, arrays[count:], strict=True))
    result, back = jax.vjp(functools.partial(planner.contract, problem.spec, **options), *arrays[:count])
    return result, *back(gradient(result))


def pair(kind):
    return jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("problem", DRAWN, ids=str)
def test_random_specs_inside_of_shard_map(problem, checked):
    """Each of two devices has a problem of its own. Some operands and index arrays are the same on both."""
    indices = {name: np.roll(q, 1) for name, q in problem.indices.items()}
    both = problem, dataclasses.replace(problem, seed=problem.seed + 1, indices=indices)
    given = [[*each.operands(), *each.indices.values()] for each in both]
    rng, count = random.Random(str(problem)), len(problem.shapes)
    split = [True, *(rng.random() < 0.6 for _ in given[0][1:])]
    given[1] = [b if s else a for a, b, s in zip(*given, split, strict=True)]
    gradients = [each.output_gradient() for each in both]
    results, *found = zip(*map(oracle, both, given, gradients), strict=True)
    wanted = [np.stack(results), *(np.stack(g) if s else sum(g) for g, s in zip(found, split, strict=False))]

    def local(gradient, *arrays):
        arrays = [x[0] if s else x for x, s in zip(arrays, split, strict=True)]
        result, *found = pulled(problem, arrays, lambda _: gradient[0])
        added = found if checked else [g if s else jax.lax.psum(g, "x") for g, s in zip(found, split, strict=False)]
        return result[None], *(g[None] if s else g for g, s in zip(added, split, strict=False))

    places = [SPLIT if s else WHOLE for s in split]
    options = {"in_specs": (SPLIT, *places), "out_specs": (SPLIT, *places[:count]), "check_vma": checked}
    arrays = [np.stack(x) if s else x[0] for x, s in zip(zip(*given, strict=True), split, strict=True)]
    run = jax_fast.jit(jax.shard_map(local, mesh=pair(AxisType.Auto), **options))
    jax.tree.map(np.testing.assert_array_equal, list(run(np.stack(gradients), *arrays)), wanted)


@pytest.mark.parametrize("problem", DRAWN, ids=str)
def test_random_specs_on_explicit_axes(problem):
    """One axis or pool is split in all arrays that have it, if there is one of an even size."""
    spec, mesh = problem.resolved(), pair(AxisType.Explicit)
    resolved = planner.plan(problem.spec, *problem.operands(), backend="numpy", **problem.arguments()).resolved
    even = [entry for entry in (*spec.axes, *spec.gathers) if spec.size(entry) % 2 == 0]
    entries = {random.Random(str(problem)).choice(even): ("x",)} if even else {}
    seen = *resolved.shapes, *dict(resolved.index_shapes).values()
    dims = *(place_term(term, entries) for term in spec.inputs), *(place_index(spec, q, entries) for q in spec.arrays)
    by_name = dict(zip(spec.arrays, range(len(spec.inputs), len(dims)), strict=True))
    order = *range(len(spec.inputs)), *(by_name[name] for name in problem.indices)
    arrays = [*problem.operands(), *problem.indices.values()]
    placed = []
    for x, number in zip(arrays, order, strict=True):
        fits = x.shape == tuple(seen[number])  # else a dimension is broadcast, and it lies whole on each device
        names = [axes or None for axes in dims[number]] if fits else []
        placed.append(jax.device_put(np.asarray(x), NamedSharding(mesh, PartitionSpec(*names))))

    def whole(gradient, *arrays):
        return pulled(problem, arrays, lambda result: jax.reshard(gradient, jax.typeof(result).sharding))

    gradient = problem.output_gradient()
    found = jax_fast.jit(whole)(jax.device_put(gradient, NamedSharding(mesh, WHOLE)), *placed)
    jax.tree.map(np.testing.assert_array_equal, found, oracle(problem, arrays, gradient))


@pytest.mark.parametrize(
    ("spec", "first", "second"),
    [("abc, acb -> ", "x y", " yx"), ("abc, abc -> ", "yx ", "y x"), ("abc, abc -> ", "x y", "xy ")],
)
def test_products_to_a_number(spec, first, second):
    """XLA's own product is wrong in some of these places, and so is `jnp.einsum` (jaxlib 0.10.2)."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    a, b = small(8, 8, 8), small(8, 8, 8)
    split = [put(x, *(name.strip() or None for name in names), on=mesh) for x, names in ((a, first), (b, second))]
    assert jax.jit(functools.partial(planner.contract, spec))(*split) == planner.contract(spec, a, b)


@pytest.mark.xfail(strict=True, reason="XLA adds up wrong parts (jaxlib 0.10.2): docs/limits.md")
@pytest.mark.parametrize("product", [planner.contract, jnp.einsum])
def test_products_that_sum_three_axes(product):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    a, b = small(8, 8, 8), small(8, 8, 8, 8)
    split = put(a, "x", "y", on=mesh), put(b, None, "x", None, "y", on=mesh)
    found = jax.jit(functools.partial(product, "abc, dabc -> d"))(*split)
    np.testing.assert_array_equal(found, np.einsum("abc, dabc -> d", a, b))


def test_shard_map_exchanges_nothing():
    local = jax.jit(jax.shard_map(rows, mesh=MESH, in_specs=(SPLIT, WHOLE, SPLIT), out_specs=SPLIT))
    assert (local(A, C, Q) == rows(A, C, Q)).all()
    assert exchanged(local.lower(A, C, Q).compile(jax_fast.FAST).as_text()) == []


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("options", [{}, {"axis_names": {"x"}}], ids=["all axes", "one axis of two"])
def test_gradients_inside_of_shard_map(options, checked):
    def gradients(a, c, q):
        return jax.grad(lambda a, c: (rows(a, c, q) ** 2).sum(), argnums=(0, 1))(a, c)

    def local(a, c, q):
        to_a, to_c = gradients(a, c, q)
        return to_a, to_c if checked else jax.lax.psum(to_c, "x")  # checked, JAX adds up what is not split

    arrays, places = (A[:, :1], C[:3], Q % 3), {"in_specs": (SPLIT, WHOLE, SPLIT), "out_specs": (SPLIT, WHOLE)}
    run = jax.jit(jax.shard_map(local, mesh=TWO_AXES, check_vma=checked, **places, **options))
    jax.tree.map(np.testing.assert_array_equal, run(*arrays), gradients(*arrays))


# XLA cannot partition kernels: they run where a program is of one device, elsewhere stock operators do.
@pytest.mark.parametrize(
    ("mapped", "options", "held"),
    [
        pytest.param(False, {}, True, id="one device"),
        pytest.param(False, {"in_shardings": (SPLIT, WHOLE, SPLIT)}, False, id="exported for several"),
        pytest.param(True, {}, True, id="shard_map"),
        pytest.param(True, {"check_vma": False}, True, id="shard_map, unchecked"),
        pytest.param(True, {"axis_names": {"x"}}, False, id="shard_map over one axis of two"),
    ],
)
def test_programs_for_tpus_hold_our_kernels_if_they_are_of_one_device(mapped, options, held):
    shapes = ((65_536, 1, 64), "float32"), ((512, 64, 64), "float32"), ((65_536,), "int32")

    def function(a, c, q):
        return planner.contract("nij, q[n]jk -> nik", a, c, q=q)

    if mapped:
        places = {"in_specs": (SPLIT, WHOLE, SPLIT), "out_specs": SPLIT}
        program = jax.jit(jax.shard_map(function, mesh=TWO_AXES, **places, **options))
    else:
        program = jax.jit(function, **jax.tree.map(lambda spec: NamedSharding(TWO_AXES, spec), options))
    exported = jax.export.export(program, platforms=["tpu"])(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert ("planner_grouped_matmul" in exported.mlir_module()) == held


@pytest.mark.parametrize(
    ("case", "moved"),
    [
        # XLA partitions a product, and takes and sums of rows, as planner's own steps are. It gathers index arrays of
        # few entries to check them. It knows no split of a sort: it gathers the index array of a grouped product, and
        # adds up whole results.
        pytest.param(CHAIN, [], id="chain"),
        pytest.param(ROWS, ["all-gather"], id="rows"),
        pytest.param(GROUPED, ["all-gather"], id="grouped"),
    ],
)
def test_exported_programs_for_several_devices(case, moved):
    """Values and gradients are those of one device. What is exchanged besides single flags is told in the docs."""
    arrays = [np.asarray(small(*shape)) for shape in case.shapes]
    arrays += [RNG.integers(0, size, shape).astype("int32") for shape, size in case.indices.values()]

    def whole(*arrays):
        operands, indices = arrays[: len(case.shapes)], dict(zip(case.indices, arrays[len(case.shapes) :], strict=True))
        result, back = jax.vjp(lambda *operands: planner.contract(case.spec, *operands, **indices), *operands)
        return result, *back(result)

    split = [put(x, *["x"] * (number in (0, len(case.shapes)))) for number, x in enumerate(arrays)]
    exported = jax.export.export(jax.jit(whole))(*split)
    assert exported.nr_devices == 8
    program = jax.jit(exported.call).lower(*split).compile(jax_fast.FAST)
    jax.tree.map(np.testing.assert_array_equal, program(*split), jax_fast.jit(whole)(*arrays))
    found, own = ({k for k, size in exchanged(text, numbers=False)} for text in (
        program.as_text(), jax.jit(whole).lower(*split).compile(jax_fast.FAST).as_text()
    ))  # fmt: skip
    assert sorted(found - own) == moved


def test_locations_are_hidden_in_partitioned_calls_alone(monkeypatch):
    """XLA's compiler may not end over them there; they are told again later."""
    limits, real, before = [], jax_partition._Part.cut, jax.config.jax_traceback_in_locations_limit

    def cut(*given):
        limits.append(jax.config.jax_traceback_in_locations_limit)
        return real(*given)

    monkeypatch.setattr(jax_partition._Part, "cut", cut)
    names._PROGRAMS.clear()
    jax.jit(rows).lower(put(A, "x"), C, put(Q, "x")).compile()
    assert set(limits) == {0}
    assert jax.config.jax_traceback_in_locations_limit == before > 0


def test_the_context_says_how_exact_products_are():
    with jax.default_matmul_precision("highest"):
        text = jax.jit(rows).lower(put(A, "x"), C, put(Q, "x")).compile().as_text()
    assert "operand_precision={highest,highest}" in text


def test_the_types_of_results_say_how_they_are_split():
    assert str(jax.typeof(rows(*TYPED))) == "float32[16@x,2,4]"
    many = (put(x, "x", on=EXPLICIT) for x in MANY)
    assert str(jax.typeof(jax.jit(jax.vmap(rows))(*many))) == "float32[8@x,16,2,4]"


@pytest.mark.parametrize("mode", ["raise", "drop", "clip", "nan"])
def test_index_modes_on_explicit_axes(mode):
    """Also where the mesh of the program is set, so that every array in it is of the mesh."""
    bad = Q.at[3].set(9) if mode != "raise" else Q

    def gradients(a, c, q):
        run = functools.partial(planner.contract, "nij, q[n]jk -> nik", q=q, index_mode=mode)
        result, back = jax.vjp(run, a, c)
        return result, *back(jnp.ones_like(result))

    wanted = gradients(A, C, bad)
    with jax.set_mesh(EXPLICIT):
        arrays = *TYPED[:2], put(bad, "x", on=EXPLICIT)
        for found in gradients(*arrays), jax.jit(gradients)(*arrays):
            jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("function", [rows, lambda a, c, q: planner.contract("nij, jk -> nik", a, c[0])])
def test_gradients_on_explicit_axes_outside_of_jit(function):
    def run(a, c, q):
        result, back = jax.vjp(lambda a, c: function(a, c, q) ** 2, a, c)
        return result, *back(result)

    for found, wanted in zip(run(*TYPED), jax.jit(run)(*TYPED), strict=True):
        assert jax.typeof(found) == jax.typeof(wanted)
        np.testing.assert_array_equal(found, wanted)
    with jax.set_mesh(EXPLICIT):
        first = jax.grad(lambda a: (function(a, *TYPED[1:]) ** 2).sum())
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.jvp(first, TYPED[:1], TYPED[:1]),
            jax.jit(lambda a: jax.jvp(first, (a,), (a,)))(TYPED[0]),
        )
        second = jax.grad(lambda a: (first(a) ** 2).sum())
        np.testing.assert_array_equal(second(TYPED[0]), jax.jit(second)(TYPED[0]))


SHORT = (
    put(small(8, 2), "x", on=EXPLICIT),
    put(small(3, 2, 2), on=EXPLICIT),
    put(small(8, low=0, dtype="int32") % 3, "x", on=EXPLICIT),
)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, c, q: planner.contract("nj, jk, lk -> nl", a, c[0], c[1]),
        lambda a, c, q: planner.contract("nj, q[n]jk -> nk", a, c, q=q),
        lambda a, c, q: planner.contract("nj, jk -> q[n]k", a, c[0], q=q, sizes=(3, 2)),
    ],
    ids=["chain", "gather", "scatter"],
)
def test_derivatives_of_every_order_on_explicit_axes_outside_of_jit(function):
    """With respect to either operand, by nested gradients and by maps over them: the values under `jit`."""
    x, pool, q = SHORT

    def loss(a, c):
        return (function(a, c, q) ** 3).sum()

    def norm(f, *numbers):
        """The squared gradients of a function, summed: a function to take further gradients of."""
        return lambda *xs: sum((g**2).sum() for g in jax.grad(f, numbers)(*xs))

    orders = [
        jax.grad(norm(loss, 0), (0, 1)),
        jax.grad(norm(norm(loss, 0), 1), 0),
        lambda a, c: jax.linearize(jax.grad(loss), a, c)[1](a, c),
        lambda a, c: jax.jit(jax.vjp(jax.grad(loss, 1), a, c)[1])(c),
        jax.jacrev(jax.jacrev(loss)),
    ]
    with jax.set_mesh(EXPLICIT):
        for order in orders:
            found, wanted = order(x, pool), jax.jit(order)(x, pool)
            jax.tree.map(np.testing.assert_array_equal, found, wanted)
            assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, wanted)


def test_gradients_on_explicit_axes_are_compiled_once(caplog):
    gradient = jax.grad(lambda a, c: rows(a, c, TYPED[2]).sum(), (0, 1))
    with jax.set_mesh(EXPLICIT):
        gradient(*TYPED[:2])
        with jax.log_compiles():
            gradient(*TYPED[:2])
    assert "ompil" not in caplog.text


@pytest.mark.parametrize(
    "within",
    [jax.jit, jax.checkpoint, lambda f: lambda *xs: jax.lax.cond(jnp.sum(xs[2]) > 0, f, lambda *xs: 2 * f(*xs), *xs)],
    ids=["jit", "checkpoint", "cond"],
)
def test_gradients_outside_of_functions_that_jax_traces(within):
    """The call within sees no gradient, and the gradient comes from explicit axes."""

    def gradients(f):
        return jax.grad(lambda a, c: (f(a, c, TYPED[2]) ** 2).sum(), (0, 1))

    with jax.set_mesh(EXPLICIT):
        found, wanted = gradients(within(rows))(*TYPED[:2]), jax.jit(gradients(rows))(*TYPED[:2])
        inner = jax.jit(gradients(within(rows)))(*TYPED[:2])
    for each in (found, inner):
        jax.tree.map(np.testing.assert_array_equal, each, wanted)
        assert list(map(jax.typeof, each)) == list(map(jax.typeof, wanted))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: planner.plan("nj, jk -> nk", LONG, MATRIX).analyze(put(LONG, "x"), MATRIX), "is on several devices"),
        (lambda: LIMITED.collectives({"n": 8}), "the plan is a loop over"),
        (
            lambda: rows(TYPED[0], put(C, None, "x", on=EXPLICIT), TYPED[2]),
            "operand 1 has 'j' split over x, but that splits 'n'",
        ),
        (
            lambda: planner.plan("q[n]j, q[m]j -> nm", (8, 3), (8, 3), q=(5,)).collectives({"q": 2}),
            "'q' of 'q[n]j, q[m]j -> nm' stands for 2 pools",
        ),
    ],
    ids=["analyzed", "loop foretold", "conflict", "two pools"],
)
def test_what_is_refused_is_told(call, said):
    with pytest.raises(planner.PlannerError, match=re.escape(said)):
        call()


# -- plain steps: JAX's own products, which XLA partitions ------------------------------------------------


def layers(product, x, *weights):
    for w in weights:
        x = jnp.tanh(product("bi, ij -> bj", x, w))
    return x


def grown(product):
    """Sums of gradients of layers that are split by rows, columns and batch."""
    return jax.jit(jax.grad(lambda *xs: layers(product, *xs).sum(), (0, 1)))


def test_plain_layers_compile_to_what_einsum_does():
    xs = put(small(16, 32), "x", None), *(put(small(32, 32), None, "x") for _ in range(4))
    texts = [grown(product).lower(*xs).as_text() for product in (planner.contract, jnp.einsum)]
    assert "custom_call" not in texts[0].replace("@Sharding", "")
    compiled = [grown(product).lower(*xs).compile().as_text() for product in (planner.contract, jnp.einsum)]
    assert exchanged(compiled[0]) == exchanged(compiled[1])


def gathered():
    """Gradients of gathered layers, and rows that no index names are masked."""

    def loss(x, weights, q):
        for w in weights:
            x = jnp.tanh(planner.contract("nj, q[n]jk -> nk", x, w, q=q))
        return planner.contract("nj, q[n]j -> n", x, weights[0][:, 0], q=q).sum()

    return jax.jit(jax.grad(loss, (0, 1)))


GATHERED = put(small(16, 8), "x"), [put(small(4, 8, 8)) for _ in range(3)], put(Q % 4, "x")
PRODUCTS = put(small(16, 32), "x", None), put(small(32, 32), None, "x")


@pytest.mark.parametrize(
    ("function", "arrays"), [(functools.partial(grown, planner.contract), PRODUCTS), (gathered, GATHERED)]
)
def test_sharded_programs_are_read_from_the_compilation_cache(function, arrays, tmp_path):
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    before = {name: getattr(jax.config, name) for name in CACHE}
    try:
        for name, value in {**CACHE, "jax_compilation_cache_dir": str(tmp_path)}.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        found = []
        for _ in range(2):
            hits.clear()
            jax.clear_caches()
            found.append(function()(*arrays))
        assert "/jax/compilation_cache/cache_hits" in hits
        assert "/jax/compilation_cache/cache_misses" not in hits
        jax.tree.map(np.testing.assert_array_equal, *found)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_sharded_programs_can_be_stored():
    program = gathered().lower(*GATHERED).compile()
    loaded = deserialize_and_load(*serialize(program))
    jax.tree.map(np.testing.assert_array_equal, loaded(*GATHERED), program(*GATHERED))


def test_layers_that_are_alike_share_the_program_of_a_device():
    names._PROGRAMS.clear()
    text = gathered().lower(*GATHERED).as_text()
    jax.jit(lambda x, weights, q: [rows(x[:, None], w, q) for w in weights]).lower(*GATHERED).compile()
    assert len(names._PROGRAMS) == 1  # a take; the product is split by XLA
    jax.clear_caches()
    assert gathered().lower(*GATHERED).as_text() == text


def test_layers_of_grouped_products_hold_no_loops():
    """XLA compiles a loop, and each scatter in it, anew for each layer: the one scatter here sorts rows for all."""
    x, q = put(small(4096, 16), "x"), put(jnp.arange(4096, dtype="int32") % 9, "x")
    weights = [put(small(8, 16, 16)) for _ in range(3)]

    def layers(x, weights, q):
        for w in weights:
            x = planner.contract("nj, q[n]jk -> nk", x, w, q=q, index_mode="drop") % 7
        return x

    program = jax.jit(layers).lower(x, weights, q).compile()
    text = program.as_text()
    # Without its generator of fused loops XLA makes a loop of a scatter.
    assert (text.count(" sort("), text.count(" while(") + text.count(" scatter(")) == (1, 1)
    np.testing.assert_array_equal(program(x, weights, q), jax_fast.jit(layers)(x, weights, q))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
def test_an_axis_without_elements_is_split(kind):
    """The type of the result says so, as that of einsum does."""
    mesh, w, q = pair(kind), small(4, 3, 2), jnp.zeros(0, int)
    x, q = (put(x, "x", on=mesh) for x in (small(0, 3), q))
    with jax.set_mesh(mesh):
        wanted = jax.jit(functools.partial(jnp.einsum, "nj, jk -> nk"))(x, w[0])
        for found in (
            jax.jit(functools.partial(planner.contract, "nj, jk -> nk"))(x, w[0]),
            jax.jit(functools.partial(planner.contract, "nj, q[n]jk -> nk"))(x, w, q=q),
        ):
            assert str(jax.typeof(found)) == str(jax.typeof(wanted))
            assert found.shape == (0, 2)


@pytest.mark.parametrize("by_type", [False, True], ids=["ShapeDtypeStruct", "typeof"])
@pytest.mark.parametrize("case", [ROWS, GROUPED, CHAIN, SCATTER], ids=["rows", "grouped", "chain", "scatter"])
def test_stand_ins_say_how_arrays_lie(case, by_type):
    """Their shardings are what `placements=` would say, and the plan foretells what devices then exchange."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit if by_type else AxisType.Auto,))
    shapes = [*case.shapes, *(shape for shape, _ in case.indices.values())]
    specs = [SPLIT, *(WHOLE for _ in case.shapes[1:]), *(SPLIT for _ in case.indices)]
    kinds = ["float32"] * len(case.shapes) + ["int32"] * len(case.indices)

    def describe(shape, kind, spec):
        if by_type:
            return jax.typeof(put(jnp.zeros(shape, kind), *spec, on=mesh))
        return jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, spec))

    described = list(map(describe, shapes, kinds, specs))
    count, keys = len(case.shapes), [*range(len(case.shapes)), *case.indices]
    bare = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in described]
    plans = [
        planner.plan(case.spec, *xs[:count], mesh=mesh, placements=placements, sizes=case.sizes,
                     **dict(zip(case.indices, xs[count:], strict=True)))
        for xs, placements in ((described, None), (bare, dict(zip(keys, specs, strict=True))))
    ]  # fmt: skip
    assert plans[0] == plans[1]
    assert plans[0].mesh is not None

    def run(*arrays):
        return plans[0](*arrays[:count], **dict(zip(case.indices, arrays[count:], strict=True)))

    rng = np.random.default_rng(0)
    ranges = [(-2, 3)] * count + [(0, size) for _, size in case.indices.values()]
    arrays = [
        rng.integers(*bounds, shape).astype(kind) for bounds, shape, kind in zip(ranges, shapes, kinds, strict=True)
    ]
    placed = [put(x, *spec, on=mesh) for x, spec in zip(arrays, specs, strict=True)]
    program = jax.jit(run).lower(*placed).compile(jax_fast.FAST)
    np.testing.assert_array_equal(program(*placed), run(*map(jnp.asarray, arrays)))
    assert exchanged(program.as_text()) == sorted((c.kind, c.bytes) for c in plans[0].collectives())


def test_a_program_is_lowered_for_devices_that_are_not_there():
    mesh = AbstractMesh((8,), ("x",))
    x, w = (
        jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, spec))
        for shape, spec in (((16, 8), SPLIT), ((8, 4), WHOLE))
    )
    lowered = jax.jit(functools.partial(planner.contract, "ij, jk -> ik")).trace(x, w)
    assert "dot_general" in lowered.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("gathers", [ROWS, GROUPED, SCATTER], ids=lambda case: case.spec)
def test_steps_with_index_arrays_are_lowered_for_devices_that_are_not_there(gathers):
    """Stock operators are, as for an exported program: XLA splits them."""
    mesh = AbstractMesh((8,), ("x",))
    shapes = [*gathers.shapes, *(shape for shape, _ in gathers.indices.values())]
    split = [SPLIT if shape[0] == shapes[-1][0] else WHOLE for shape in shapes]
    kinds = ["float32"] * len(gathers.shapes) + ["int32"] * len(gathers.indices)
    arrays = [
        jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, spec))
        for shape, kind, spec in zip(shapes, kinds, split, strict=True)
    ]

    def gradients(*arrays):
        *operands, q = arrays
        return jax.grad(lambda xs: planner.contract(gathers.spec, *xs, q=q, sizes=gathers.sizes).sum())(operands)

    lowered = jax.jit(gradients).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert names.TARGET not in lowered
    exported = jax.export.export(jax.jit(gradients), platforms=["cpu"])(*arrays)
    assert exported.nr_devices == 8
    xs = [
        put(small(*shape) if kind == "float32" else RNG.integers(0, 4, shape).astype("int32"), *spec)
        for shape, kind, spec in zip(shapes, kinds, split, strict=True)
    ]
    jax.tree.map(np.testing.assert_array_equal, jax.jit(exported.call)(*xs), gradients(*xs))
    # Its gradient can be exported too, which JAX refuses if the program was traced for devices.
    assert exported.vjp().nr_devices == 8


@pytest.mark.parametrize("shape", [(4, 5), (1, 4, 5)], ids=str)
def test_a_gradient_may_be_added_up_later(shape):
    """The types say so: one device holds the gradient's part of its own rows."""
    spec = "bij, bjk -> bik" if len(shape) == 3 else "bij, jk -> bik"
    x, reduced = put(small(8, 3, 4), "x", on=EXPLICIT), PartitionSpec(*[None] * len(shape), reduced={"x"})
    w = jax.device_put(small(*shape), NamedSharding(EXPLICIT, reduced))
    found = []
    for product in (planner.contract, jnp.einsum):
        with jax.set_mesh(EXPLICIT):
            loss = jax.jit(jax.grad(lambda x, w, f=product: (f(spec, x, w) ** 2).sum(), (0, 1)))
            found.append([(str(jax.typeof(g)), np.asarray(jax.reshard(g, WHOLE))) for g in loss(x, w)])
    for (kind, got), (wanted_kind, wanted) in zip(*found, strict=True):
        assert kind == wanted_kind
        np.testing.assert_array_equal(got, wanted)
    assert "{U:x}" in found[0][1][0]
    own = "kl"[: len(shape) - 1]
    gather = functools.partial(planner.contract, f"bij, q[b]{own} -> bij{own}", q=jnp.zeros(8, int))
    with jax.set_mesh(EXPLICIT), pytest.raises(planner.PlannerError, match="operand 1 or its gradient is added up"):
        jax.jit(gather)(x, w)


def test_an_exported_product_is_split_as_it_was():
    places = [NamedSharding(MESH, SPLIT), NamedSharding(MESH, WHOLE)]
    call = jax.jit(functools.partial(planner.contract, "nj, jk -> kn"), in_shardings=places)
    exported = jax.export.export(call)(LONG, MATRIX)
    assert exported.nr_devices == 8
    xs = put(LONG, "x"), put(MATRIX)
    assert (jax.jit(exported.call)(*xs) == call(*xs)).all()
    assert not exchanged(jax.jit(exported.call, in_shardings=places).lower(*xs).compile().as_text())
