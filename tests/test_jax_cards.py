"""Plans for graphics cards in JAX, lowered by `jax.export` for cards that are not here: what their programs hold.

Values are compared on the CPU, which runs the rows of a card's table if a test puts that in the place of its own.
"""

import dataclasses
import functools
import math
import re

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

from jax.interpreters import mlir  # noqa: E402
from jax_fast import SIZES_ALONE  # noqa: E402
from jaxlib.mlir import ir  # noqa: E402

import planner  # noqa: E402
from planner.backends.common.kernel_rows import WHOLE_POOL  # noqa: E402
from planner.backends.jax import evaluation as jax_evaluation  # noqa: E402
from planner.backends.jax import step as jax_step  # noqa: E402
from planner.backends.jax import tiled as jax_tiled  # noqa: E402
from planner.backends.jax.rows import make_table  # noqa: E402
from planner.kernels.grouped_matmul import jax_grouped, jax_tilings  # noqa: E402
from planner.language.parse import parse  # noqa: E402
from planner.language.spec import term_gathers  # noqa: E402
from planner.program.calls import RangedIndices  # noqa: E402
from planner.program.ops import Einsum  # noqa: E402
from planner.workloads import WORKLOADS  # noqa: E402

H200, A100 = map(planner.Device.preset, ("h200", "a100"))
# A B200 by its published rates: 8 TB/s, 2.25 PFLOP/s in bfloat16.
B200 = dataclasses.replace(H200, name="b200", bandwidth=8e12, half_rate=2.25e15, capability=100)
CARDS = {"h200": H200, "a100": A100, "b200": B200}
SEED = WORKLOADS["seed-gathered-matmul"]
SMALL = SEED.resized(n=300, q=7, i=2, j=5, k=6)


def xla_temporaries(run, *arrays):
    """The bytes that XLA's program of a call holds besides its operands and results."""
    return jax.jit(run).lower(*arrays).compile(SIZES_ALONE).memory_analysis().temp_size_in_bytes


# -- programs --------------------------------------------------------------------------------------------


def planned(workload, card, gradients, dtype="float32", **options):
    """A plan, and the function that computes its result, and the gradients if they are wanted, from all arrays."""
    wanted = [gradients and each for each in workload.takes_gradient]
    pairs = zip(workload.shapes, wanted, strict=True)
    operands = [planner.Operand(shape, dtype, requires_grad=each) for shape, each in pairs]
    given = workload.index_shapes | workload.options | options
    plan = planner.plan(workload.spec, *operands, **given, backend="jax", device=card)

    def run(operands, indices, cotangent):
        result, pull = jax.vjp(lambda *operands: plan(*operands, **indices), *operands)
        return [result, *(x for x, each in zip(pull(cotangent), wanted, strict=True) if each)]

    return plan, run


def stand_ins(workload, dtype="float32"):
    """Operands, index arrays and the result's gradient."""
    indices = {name: jax.ShapeDtypeStruct(shape, "int32") for name, shape in workload.index_shapes.items()}
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in workload.shapes]
    return operands, indices, jax.ShapeDtypeStruct(workload.output_shape, dtype)


@functools.cache
def lowered(name, card, gradients, dtype="float32"):
    """The text of a workload's program for CUDA."""
    _, run = planned(WORKLOADS[name], CARDS[card], gradients, dtype)
    return jax.export.export(jax.jit(run), platforms=["cuda"])(*stand_ins(WORKLOADS[name], dtype)).mlir_module()


def array_sizes(text):
    """The numbers of elements of all arrays in a program."""
    return {math.prod(map(int, dims[:-1].split("x"))) for dims in re.findall(r"tensor<((?:\d+x)+)", text)}


# What XLA computes inside of the operation that reads it, and what it writes in place of an operand.
FREE = {"stablehlo.constant", "stablehlo.iota", "stablehlo.broadcast_in_dim"}
COPIES = {"stablehlo.dot_general", "stablehlo.gather", "stablehlo.sort", "func.call"}


def byte_count(value):
    kind = ir.RankedTensorType(value.type)
    bits = kind.element_type.width if hasattr(kind.element_type, "width") else 64
    return math.prod(kind.shape) * -(-bits // 8)


def last_uses(block):
    return {x: number for number, op in enumerate(block.operations) for x in op.operands}


def written_in_place(block, returned):
    """From each value to the operand in whose place it is written; and all that is written in place of the results.

    An operation without a product or a take writes in place of an operand that is read for the last time.
    """
    last, place, results = last_uses(block), {}, set(returned)
    fused = {x for op in block.operations if op.operation.name in FREE for x in op.results}
    for number, op in reversed(list(enumerate(list(block.operations)[:-1]))):
        name = op.operation.name
        if name == "stablehlo.case":  # a branch may return an array of the block around it
            for branch in (region.blocks[0] for region in op.regions):
                for x, result in zip(list(branch.operations)[-1].operands, op.results, strict=True):
                    results |= written_in_place(branch, [x])[1] if result in results else set()
        elif name not in FREE | COPIES:
            spare = [x for x in op.operands if last[x] == number and x not in fused]
            for turn, result in enumerate(op.results):
                of_turn = spare if name != "stablehlo.while" else {op.operands[turn]} & set(spare)
                found = next((x for x in of_turn if byte_count(x) == byte_count(result)), None)
                if found is not None:
                    spare.remove(found)
                    place[result] = found
                    results |= {found} if result in results else set()
    return place, results


def peak_bytes(block, functions):
    """An estimate of the most bytes that a program holds at a time, besides its arguments and results."""
    operations, last = list(block.operations), last_uses(block)
    place, free = written_in_place(block, operations[-1].operands)
    free |= set(block.arguments)
    held, most = {}, 0
    for number, op in enumerate(operations[:-1]):
        name, inner = op.operation.name, 0
        if name in ("stablehlo.while", "stablehlo.case"):
            inner = max(peak_bytes(region.blocks[0], functions) for region in op.regions)
        elif name == "func.call":
            inner = peak_bytes(functions[str(op.operation.attributes["callee"]).strip("@")], functions)
        for x in op.results:
            own = 0 if name in FREE or x in free else byte_count(x)
            held[x] = held.pop(place[x], 0) if x in place else own
        most = max(most, sum(held.values()) + inner)
        held = {x: size for x, size in held.items() if last.get(x, 0) > number}
    return most


def temporaries(text):
    """An estimate of the bytes that a lowered program holds besides its arguments and results."""
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        functions = {
            str(each.operation.attributes["sym_name"]).strip('"'): each.regions[0].blocks[0]
            for each in module.body.operations
        }
        return peak_bytes(functions["main"], functions)


def test_temporaries_are_estimated_from_a_program():
    """Of three products of 40 kB two are there at a time, and a loop adds to one of them in place."""

    def function(x):
        y = x @ x
        z = jax.lax.fori_loop(0, 3, lambda _, z: z + 1, y @ y)
        return z @ z

    x = jax.ShapeDtypeStruct((100, 100), "float32")
    text = jax.export.export(jax.jit(function), platforms=["cuda"])(x).mlir_module()
    assert 80_000 <= temporaries(text) <= 81_000


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("card", CARDS)
def test_the_seed_fits_into_sixty_megabytes(card, gradients):
    """The gathered matrices would take 2 GB."""
    text = lowered("seed-gathered-matmul", card, gradients)
    assert 4 * max(array_sizes(text)) < 2**26
    assert 0 < temporaries(text) <= 6e7


def test_the_seed_in_half_types_holds_no_gathered_matrices():
    for card in CARDS:
        assert max(array_sizes(lowered("seed-gathered-matmul", card, True, "bfloat16"))) <= 131_072 * 64


def test_programs_for_amd_run_the_same_tiles():
    _, run = planned(SEED, A100, True)
    module = jax.export.export(jax.jit(run), platforms=["cuda", "rocm"])(*stand_ins(SEED)).mlir_module()
    tiles = jax_tilings.card_tiling((131_072, 1, 2048, 64, 64)).tiles
    assert module.count("stablehlo.dot_general") == 6  # for each platform one product, and two for gradients
    assert module.count(f"tensor<{tiles}x64x64xf32>) -> tensor<{tiles}x64x64xf32>") >= 6


# Of other workloads XLA on a card computes the taken rows inside of the operation that adds them up or multiplies them.
@pytest.mark.parametrize("name", [
    "gathered-heads", "experts", "experts/8", "lora", "seed-gathered-keys", "seed-gathered-keys/k1000",
])  # fmt: skip
def test_no_workload_holds_its_gathered_operand(name):
    workload = WORKLOADS[name]
    gathered = []
    for term in workload.parsed.inputs:
        axes = {axis for gather in term_gathers(term) for axis in gather.axes}
        if axes:
            axes |= {entry for entry in term if isinstance(entry, str)}
            gathered.append(math.prod(workload.sizes[axis] for axis in axes))
    for card, gradients in (("h200", True), ("a100", False), ("b200", False)):
        assert max(array_sizes(lowered(name, card, gradients))) < min(gathered)


# -- values ----------------------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_card(monkeypatch):
    """Programs for this machine run what they would run on a card."""

    def forget():
        jax.clear_caches()
        jax_step.compile_step.cache_clear()

    monkeypatch.setattr(jax_evaluation, "TABLE", make_table(jax_grouped.CARD))
    forget()
    yield
    forget()


def by_numpy(a, c, q, cotangent):
    """The seed's result and both gradients, group by group; rows of no group are dropped."""
    result, to_a, to_c = np.zeros_like(cotangent), np.zeros_like(a), np.zeros_like(c)
    order = np.argsort(q, kind="stable")
    for group, rows in enumerate(np.split(order, np.searchsorted(q[order], np.arange(1, len(c) + 1)))[: len(c)]):
        result[rows], to_a[rows] = a[rows] @ c[group], cotangent[rows] @ c[group].T
        to_c[group] = np.tensordot(a[rows], cotangent[rows], ((0, 1), (0, 1)))
    return [result, to_a, to_c]


def arrays(workload, dtype="float32", seed=0, skew="uniform"):
    """Operands, index arrays and the result's gradient, of small integers."""
    operands = [np.asarray(x) for x in workload.operands("numpy", seed)]
    return operands, workload.indices("numpy", seed, skew=skew), workload.cotangent("numpy", seed)


@pytest.mark.parametrize(("index_mode", "skew"), [("raise", "uniform"), ("drop", "half"), ("drop", "one")])
def test_plans_for_a_card_compute_values_and_gradients(as_on_a_card, monkeypatch, index_mode, skew):
    monkeypatch.setattr(jax_tilings, "CARD_STEP_BYTES", 4000)
    monkeypatch.setattr(jax_tilings, "CARD_STEP_PART", 50)
    (a, c), indices, cotangent = arrays(SMALL, skew=skew)
    plan, run = planned(SMALL, H200, True, index_mode=index_mode, minimize="peak")
    ran = [step.choice.lowering for step in plan.steps if step.choice.lowering != "mask"]
    assert ran == ["grouped matmul", "grouped matmul", "grouped outer"]
    assert jax_tilings.card_tiling((300, 2, 7, 5, 6)).steps > 1
    expected_a = a
    if index_mode == "drop":
        indices["q"][::7] = 7
        a = a.copy()
        a[::7] = np.nan  # dropped rows do not matter
    found = jax.jit(run)([a, c], indices, cotangent)
    for x, y in zip(found, by_numpy(expected_a, c, indices["q"], cotangent), strict=True):
        assert np.array_equal(x, y)


def test_the_seed_itself_has_its_values_within_sixty_megabytes(as_on_a_card):
    (a, c), indices, cotangent = arrays(SEED)
    _, run = planned(SEED, H200, True)
    program = jax.jit(run).lower([a, c], indices, cotangent).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 6e7
    for x, y in zip(program([a, c], indices, cotangent), by_numpy(a, c, indices["q"], cotangent), strict=True):
        assert np.array_equal(x, y)


def test_a_forward_pass_alone_fits_too(as_on_a_card):
    plan, _ = planned(SEED, H200, False)
    (a, c), indices, _ = stand_ins(SEED)
    assert 10e6 < xla_temporaries(lambda a, c, q: plan(a, c, q=q), a, c, indices["q"]) <= 6e7


PIECES = {
    "s[e]c, e -> d[e]c": {"s": 9, "d": 8, "e": 23, "c": 3},
    "s[e]c, d[e]c -> e": {"s": 9, "d": 8, "e": 23, "c": 3},
    "ec, e -> cd[e]": {"d": 8, "e": 23, "c": 3},
    "x[pi]c, w[p]cm -> o[pi]m": {"x": 9, "w": 4, "o": 8, "p": 11, "i": 2, "c": 3, "m": 5},
    "x[pi]c, o[pi]m -> w[p]cm": {"x": 9, "w": 4, "o": 8, "p": 11, "i": 2, "c": 3, "m": 5},
    "bqd, bi[bqk]d -> bqk": {"i": 6, "b": 7, "q": 5, "k": 13, "d": 5},
    "bqd, bqk -> bi[bqk]d": {"i": 6, "b": 7, "q": 5, "k": 13, "d": 5},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", PIECES)
def test_products_of_taken_rows_in_pieces(monkeypatch, spec, dtype):
    """As NumPy computes them, with a shorter piece at the end, and with dropped rows."""
    random, sizes, parsed = np.random.default_rng(0), PIECES[spec], parse(spec)
    shapes = [[sizes[e if isinstance(e, str) else e.array] for e in term] for term in parsed.terms]
    operands = [random.integers(-3, 4, shape).astype("f4") for shape in shapes[:-1]]
    brackets = {gather.array: gather.axes for gather in parsed.gathers}
    indices = {name: random.integers(0, sizes[name] + 1, [sizes[e] for e in axes]) for name, axes in brackets.items()}
    wanted = planner.contract(spec, *operands, sizes=shapes[-1], index_mode="drop", **indices)
    given = {name: planner.Operand(q.shape, "int32") for name, q in indices.items()}
    resolved = planner.resolve(spec, *map(planner.Operand, shapes[:-1]), sizes=shapes[-1], **given)
    op = Einsum(resolved, dtype)
    monkeypatch.setattr(jax_tiled, "_PIECE_BYTES", jax_tiled._row_bytes(op) // 4 + 1)
    monkeypatch.setattr(jax_tilings, "CARD_STEP_PART", 50)
    form = jax_tiled._find_pieces(op)
    assert form.steps == 4
    assert resolved.size(form.axis) % 4

    def run(arrays, indices):
        index = RangedIndices(True, {gather: indices[gather.array] for gather in op.gathers})
        return jax_tiled._run_pieces(op, form, arrays, index)

    (found,) = jax.jit(run)([jax.numpy.asarray(x, dtype) for x in operands], indices)
    assert found.dtype == dtype
    assert np.array_equal(found.astype("f4"), wanted)


@pytest.mark.parametrize(("name", "most"), [("message-passing", 80e6), ("sparse-convolution", 330e6)])
def test_rows_are_taken_in_pieces(name, most):
    """Forward and backward: whole, the rows of messages take 260 MB, and those of the convolution 450."""
    for gradients in (False, True):
        assert temporaries(lowered(name, "h200", gradients)) <= most


def test_a_plan_in_pieces_has_its_values_and_marks_a_bad_index(monkeypatch):
    """Under `jit` the index shows as NaN in all sums."""
    monkeypatch.setattr(jax_tiled, "_PIECE_BYTES", 400_000)
    workload, free = WORKLOADS["message-passing"].resized(e=5000, c=32, s=400, d=400), {"launch_seconds": 0.0}
    plan, run = planned(workload, dataclasses.replace(H200, **free), True)
    assert "take, multiply, add in pieces" in {step.choice.lowering for step in plan.steps}
    operands, indices, cotangent = arrays(workload)
    found = jax.jit(run)(operands, indices, cotangent)
    _, at_once = planned(workload, "cpu", True)
    for x, y in zip(found, jax.jit(at_once)(operands, indices, cotangent), strict=True):
        assert np.array_equal(x, y)
    indices["s"][7] = 400
    assert np.isnan(jax.jit(run)(operands, indices, cotangent)[0]).all()


# -- prices ----------------------------------------------------------------------------------------------


def test_a_card_is_priced_by_its_own_rates():
    """Whatever machine plans: twice the rates take half of the time."""
    twice = dataclasses.replace(
        A100, flop_rate=2 * A100.flop_rate, bandwidth=2 * A100.bandwidth, launch_seconds=A100.launch_seconds / 2
    )
    slow, fast = (planned(SEED, card, True)[0].cost.seconds for card in (A100, twice))
    assert math.isclose(slow, 2 * fast, rel_tol=1e-6)


@pytest.mark.parametrize("sizes", [(32_768, 1, 512, 32, 32), (4_529, 128, 27, 64, 64), (50, 5, 1, 16, 130)])
def test_scratch_is_what_is_foretold(sizes):
    """By XLA's count for a CPU; the loop over tiles there has the arrays that it has on a card."""
    n, i, g, j, k = sizes
    a, c, out = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((n, i, j), (g, j, k), (n, i, k)))
    index = jax.ShapeDtypeStruct((n,), "int32")
    groups = jax.eval_shape(functools.partial(jax_grouped.CARD.group_rows, size=g), index)
    for what, arrays in (("matmul", (a, c, groups)), ("gradients", (out, a, c, groups))):
        foretold = jax_grouped.scratch_bytes(what, sizes, "float32", None, jax_tilings.card_tiling)
        run = getattr(jax_grouped.CARD, f"grouped_{what}")
        assert 0.9 * foretold < xla_temporaries(run, *arrays) <= foretold


def test_scratch_of_half_types_is_within_what_is_foretold():
    plan, _ = planned(SEED, A100, True, "bfloat16")
    foretold = max(step.choice.cost.scratch_bytes for step in plan.steps)
    assert 0.7 * foretold < temporaries(lowered("seed-gathered-matmul", "a100", True, "bfloat16")) <= foretold


def test_pooled_dots_are_priced_by_the_rates_of_a_card():
    """The loop over the batch launches its kernels for each entry: a CPU's nanoseconds say nothing of that."""
    operands = [planner.Operand(shape) for shape in ((8, 100, 32), (8, 100, 32))]
    spec = planner.resolve("bqd, bi[bqk]d -> bqk", *operands, i=planner.Operand((8, 100, 10), "int32"))
    op, twice = Einsum(spec, "float32"), dataclasses.replace(A100, launch_seconds=2 * A100.launch_seconds)
    for name, least in ((WHOLE_POOL, 80), ("take, then dot", 10)):
        prices = [jax_evaluation.TABLE.price(name, op, card).cost.picoseconds / 1e12 for card in (A100, twice)]
        assert math.isclose(prices[1] - prices[0], least * A100.launch_seconds, rel_tol=1e-6)


# -- ragged_dot ------------------------------------------------------------------------------------------


def ragged_op(dtype="bfloat16"):
    plan, _ = planned(SEED, A100, False, dtype)
    (step,) = plan.steps
    assert step.choice.lowering == "grouped matmul"
    return step.op


def test_ragged_dot_is_offered_to_measurements_from_jax_0_11_on(monkeypatch):
    """Before, it multiplies by all matrices. Nothing but a measurement chooses it."""
    table = make_table(jax_grouped.CARD)
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert table.variants("grouped matmul", ragged_op(), A100) == ()
    assert "0.11" in table.rows["grouped matmul, ragged_dot"].refusal(ragged_op(), A100)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    assert [x.lowering for x in table.variants("grouped matmul", ragged_op(), A100)] == ["grouped matmul, ragged_dot"]
    assert table.variants("grouped matmul", ragged_op("float32"), A100) == ()
    assert table.variants("grouped matmul", ragged_op(), planner.Device.preset("cpu")) == ()
    assert "grouped matmul, ragged_dot" not in {x.lowering for x in table.choices(ragged_op(), A100)}


@pytest.mark.parametrize("inner", [1, 3])
def test_ragged_dot_drops_rows_that_have_no_group(inner):
    (a, c), indices, cotangent = arrays(SMALL.resized(i=inner))
    indices["q"][::7] = 7
    groups = jax_grouped.CARD.group_rows(jax.numpy.asarray(indices["q"]), 7)
    wanted = by_numpy(a, c, indices["q"], cotangent)[0]
    a[::7] = np.nan
    assert np.array_equal(jax.jit(jax_grouped.ragged_matmul)(a, c, groups), wanted)
