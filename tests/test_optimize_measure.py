"""`optimize="measure"`: right values, one decision a signature, a memory that no other process or damage can spoil."""

from __future__ import annotations

import dataclasses
import json
import os
from functools import partial

import numpy as np
import pytest
from conftest import Clock, examples
from hypothesis import given, settings
from laws import assert_equal, exact_problems
from looped import make_loop
from test_signatures import deterministic

import planner
from planner.cost import store as remember
from planner.cost.objective import plan_key
from planner.program import implementations as protocol
from planner.program.serial import encode
from planner.tune import autotune as measure
from planner.tune.tiles import tune_tiles

# Three paths and two implementations of the take differ: there is something to time.
SPEC, SHAPES = "ab,bc,cd->ad", ((30, 4), (4, 30), (30, 3))
OPERANDS = [np.arange(float(np.prod(shape))).reshape(shape) % 4 for shape in SHAPES]
EXPECTED = np.linalg.multi_dot(OPERANDS)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder of its own for each test, and short measurements."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PLANNER_CACHE", str(folder))
    monkeypatch.setenv("PLANNER_DISK", "on")
    monkeypatch.setattr(measure, "MOST_ROUNDS", 2)
    monkeypatch.setattr(measure, "SLOWEST", float("inf"))
    monkeypatch.setattr(remember, "_WARNED", set())
    return folder


def measured(**options):
    return planner.plan(SPEC, *OPERANDS, optimize="measure", **options)


def entry(cache):
    (path,) = cache.rglob("*.json")
    return path


def test_the_winner_is_timed_once_and_remembered(cache, monkeypatch):
    first = measured()
    assert first.origin.startswith("measured: best of ")
    assert ", next " in first.origin
    assert not first.proven
    monkeypatch.setattr(measure, "time_programs", None)  # nothing more is timed
    again = measured()
    assert again == dataclasses.replace(first, origin=first.origin.replace("measured", "remembered"))
    for plan in (first, again):
        np.testing.assert_array_equal(plan(*OPERANDS), EXPECTED)
        assert plan.origin in str(plan)
        assert planner.Plan.from_json(plan.to_json()) == plan
    assert entry(cache)


def test_the_fastest_by_the_clock_wins(monkeypatch):
    plain = planner.plan(SPEC, *OPERANDS)
    others = measure.candidates(dataclasses.replace(plain, options=measured().options))
    assert others

    def timings(programs):
        return measure.Timings(tuple((1.0, 2.0 - 0.1 * number, 9.0) for number in range(len(programs))))

    monkeypatch.setattr(measure, "time_programs", timings)
    monkeypatch.setenv("PLANNER_CACHE", os.environ["PLANNER_CACHE"] + "-other")
    plan = measured()
    assert plan.programs == others[-1].programs
    count = len(others) + 1
    assert plan.origin == f"measured: best of {count}, {2.1 - 0.1 * count:.3g} s, next {2.2 - 0.1 * count:.3g} s"


def test_contract_measures_once_a_signature(monkeypatch):
    calls = []
    plain = measure.time_programs
    monkeypatch.setattr(measure, "time_programs", lambda programs: calls.append(1) or plain(programs))
    spec = "ab,bc,cd -> ad"  # written so nowhere else: runners stay for the life of a process
    for _ in range(3):
        np.testing.assert_array_equal(planner.contract(spec, *OPERANDS, optimize="measure"), EXPECTED)
    assert len(calls) == 1


@pytest.mark.parametrize("objective", ["flops", "peak", "bytes", lambda cost: cost.flops])
def test_objectives_that_are_known_exactly_stay_minimal(objective):
    plan = measured(minimize=objective)
    key = plan_key(objective)
    assert key(plan.cost)[0] == key(planner.plan(SPEC, *OPERANDS, minimize=objective).cost)[0]


def test_limits_hold_for_what_is_timed():
    limit = planner.plan(SPEC, *OPERANDS, minimize="peak").cost.peak_bytes
    plan = measured(memory_limit=limit)
    assert plan.cost.peak_bytes <= limit


def test_functions_are_not_remembered(cache):
    assert "measured: " in measured(minimize=lambda cost: cost.seconds).origin
    assert not list(cache.rglob("*.json"))


def test_shapes_take_what_is_remembered_or_say_that_nothing_was_measured():
    shapes = [planner.Operand(x.shape, "float64") for x in OPERANDS]

    def planned():
        return planner.plan(SPEC, *shapes, optimize="measure", backend="numpy")

    plain = planner.plan(SPEC, *shapes, backend="numpy", optimize="optimal")
    assert planned().origin == f"not measured, no values to time: {plain.origin}"
    assert planned().programs == plain.programs
    winner = measured()
    assert planned().origin.startswith("remembered: best of")
    assert planned().programs == winner.programs


def test_a_single_candidate_is_not_timed(monkeypatch):
    monkeypatch.setattr(measure, "SLOWEST", 0.0)
    assert measured().origin.startswith("measured: no other plan comes near; exact")


@settings(max_examples=examples(12, 300))
@given(exact_problems(max_operands=3))
def test_values_are_right_measured_and_remembered(case):
    operands = case.operands()
    for _ in range(2):
        plan = planner.plan(case.spec, *operands, optimize="measure", **case.arguments())
        assert "measured" in plan.origin or "remembered" in plan.origin
        got = plan(*operands, **case.indices)
        assert_equal((got, got.dtype.name), case.expected(), np.result_type(*operands).name)


# -- what a decision depends on --------------------------------------------------------------------------


def key(spec=SPEC, operands=OPERANDS, **options):
    return key_of(planner.plan(spec, *operands, **options), operands)


def key_of(plan, operands):
    """The key that measuring this plan would have."""
    asked = dataclasses.replace(plan.options, optimize="measure")
    return measure.key_of(dataclasses.replace(plan, options=asked), operands)


def test_another_problem_has_another_key(monkeypatch):
    keys = [
        key(),
        key(spec="ab,bc,cd->da"),
        key(operands=[np.ones((31, 4)), *OPERANDS[1:]]),
        key(operands=[x.astype("float32") for x in OPERANDS]),
        key(dtype="float32"),
        key(index_mode="clip"),
        key(minimize="flops"),
        key(memory_limit=10**6),
        key(retain_limit=10**6),
        key(device=planner.Device("mine", flop_rate=1e12, bandwidth=1e11)),
    ]
    others = (
        (measure, "__version__", "9"),
        (np, "__version__", "9"),
        (measure, "cpu_name", lambda: "another, 3 threads"),
    )
    for change in others:
        with monkeypatch.context() as patched:
            patched.setattr(*change)
            keys.append(key())
    assert len({json.dumps(k, sort_keys=True) for k in keys}) == len(keys)
    assert key() == keys[0]


def test_strides_and_gradients_and_index_shapes_are_in_the_key(torch):
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    q = torch.tensor([0, 1])

    def of(*operands, spec="q[n]j, jk -> nk", **options):
        options = {"q": q, **options}
        return json.dumps(key_of(planner.plan(spec, *operands, **options), operands), sort_keys=True)

    keys = [of(a, b), of(a.T, b), of(a.clone().requires_grad_(), b), of(a, b, q=q[:1]), of(a.double(), b.double())]
    assert len(set(keys)) == len(keys)
    # A stand-in without strides is row-major, as this tensor is.
    assert of(planner.Operand((4, 4)), b) == of(a, b)


# -- damage ----------------------------------------------------------------------------------------------


DAMAGES = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "no last brace": lambda text: text[:-1],
    "no object": lambda text: "[1, 2]",
    "number": lambda text: "1",
    "null": lambda text: "null",
    "NaN": lambda text: text.replace(str(json.loads(text)["format"]), "NaN", 1),
    "no key": lambda text: json.dumps({"format": json.loads(text)["format"]}),
    "value": lambda text: text.replace('"peak_bytes": ', '"peak_bytes": 1', 1),
    "nested": lambda text: "[" * 100_000,
    "bytes": lambda text: "\udcff\udcfe\0",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_once_and_replaced(cache, damage):
    measured()
    path = entry(cache)
    path.write_bytes(DAMAGES[damage](path.read_text()).encode(errors="surrogateescape"))
    with pytest.warns(UserWarning, match="damaged") as caught:
        plan = measured()
    assert [str(path) in str(w.message) for w in caught] == [True]
    assert plan.origin.startswith("measured")
    np.testing.assert_array_equal(plan(*OPERANDS), EXPECTED)
    # It is said once: any other warning would be an error.
    assert measured().origin.startswith("remembered")
    path.write_text("")
    assert measured().origin.startswith("measured")


@pytest.mark.parametrize(
    "value",
    [
        1, [], {}, {"result": 1}, {"result": "x", "keep": "all", "tree": {"type": "os"}, "programs": 1},
        {"result": "x", "keep": "all", "tree": {"type": "Leaf", "operand": 0}, "programs": {"type": "Leaf"}},
    ],
)  # fmt: skip
def test_a_whole_entry_that_holds_no_plan_is_damaged_too(value):
    remember.remember("measured", key(), value)
    with pytest.warns(UserWarning, match="damaged"):
        assert measured().origin.startswith("measured")


def test_other_keys_formats_and_offers_are_no_entries(cache, monkeypatch):
    measured()
    path = entry(cache)
    text = path.read_text()
    for field, other in (("format", 0), ("key", {"planner": "0"})):
        path.write_text(json.dumps({**json.loads(text), field: other}))
        assert remember.recall("measured", key()) is None
        assert measured().origin.startswith("measured")
    # An implementation that is not offered any more, or has another price.
    plan, asked = planner.plan(SPEC, *OPERANDS), key()
    assert measure._recall_plan(plan, asked) is not None
    with monkeypatch.context() as patched:
        patched.setattr(protocol.Table, "offers", lambda *_: False)
        assert measure._recall_plan(plan, asked) is None


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("PLANNER_CACHE", str(blocked))
    with pytest.warns(UserWarning, match="PLANNER_CACHE names another folder"):
        assert measured().origin.startswith("measured")
    measured()  # warns of nothing more


# -- timing ----------------------------------------------------------------------------------------------


def test_rounds_are_interleaved_and_end_with_the_budget(monkeypatch):
    monkeypatch.setattr(measure, "MOST_ROUNDS", 50)
    clock, log = Clock(), []
    programs = [partial(clock.run, 0.2, log, "a"), partial(clock.run, 0.1, log, "b")]
    timings = measure.time_programs(programs, budget_seconds=1.0, clock=clock)
    assert log == ["a", "b", *["a", "a", "b", "b"] * (len(timings.seconds[0]))]
    assert timings.median(0) == pytest.approx(0.2)
    assert timings.median(1) == pytest.approx(0.1)
    assert len(timings.seconds[0]) == 2
    # However slow, one round is made.
    slow = measure.time_programs([partial(clock.run, 100, log, "c")], budget_seconds=1.0, clock=clock)
    assert len(slow.seconds[0]) == 1


def test_quick_programs_run_in_blocks():
    clock, log = Clock(), []
    timings = measure.time_programs([partial(clock.run, 1e-4, log, "a")], budget_seconds=0, clock=clock)
    assert 11 <= len(log) <= 13
    assert timings.median(0) == pytest.approx(1e-4)
    assert measure.time_programs([lambda: None], budget_seconds=0, clock=Clock()).median(0) == 0


def test_what_runs_out_of_memory_is_left_out_unless_it_is_the_first():
    clock, log = Clock(), []
    good = partial(clock.run, 0.1, log, "a")
    for error in (MemoryError(), RuntimeError("out of memory")):
        bad = partial(clock.run, 0.1, log, "b", error)
        timings = measure.time_programs([good, bad], 0.1, clock)
        assert timings.median(1) == float("inf")
        assert timings.median(0) == pytest.approx(0.1)
        with pytest.raises(type(error)):
            measure.time_programs([bad, good], 0.1, clock)
    with pytest.raises(planner.IndexRangeError):
        planner.contract("q[n]j->nj", np.ones((2, 3)), q=np.array([5]), optimize="measure")


@pytest.mark.parametrize("at", range(1, 12))
def test_ctrl_c_gives_the_best_so_far(cache, monkeypatch, at):
    plain, clock, runs = measure.time_programs, Clock(), []

    def counted(program):
        runs.append(1)
        if len(runs) == at:
            raise KeyboardInterrupt
        program()
        clock.sleep(0.1)

    monkeypatch.setattr(
        measure, "time_programs", lambda programs: plain([partial(counted, p) for p in programs], 0.0, clock)
    )
    plan = measured()
    np.testing.assert_array_equal(plan(*OPERANDS), EXPECTED)
    if len(runs) < at:
        assert plan.origin.startswith("measured: ")
        return
    assert plan.origin.startswith("interrupted")
    assert not plan.proven
    assert not list(cache.rglob("*.json"))  # half a measurement is not remembered
    count = plan.origin.partition("best of ")[2][:1]
    assert ("not measured" in plan.origin) == (not count)


# -- frameworks ------------------------------------------------------------------------------------------


def test_torch_times_forward_and_backward_and_touches_no_gradient(torch):
    a = torch.arange(24.0).reshape(8, 3).requires_grad_()
    c = torch.ones(4, 3, 5, requires_grad=True)
    q = torch.tensor([0, 1, 3, 3, 1, 2, 0, 1])
    out = planner.contract("nj, q[n]jk -> nk", a, c, q=q, optimize="measure")
    assert a.grad is None
    assert torch.equal(out, torch.einsum("nj,njk->nk", a, c[q]))
    out.sum().backward()
    assert torch.equal(a.grad, torch.full((8, 3), 5.0))
    plan = planner.plan("nj, q[n]jk -> nk", a, c, q=q, optimize="measure")
    assert plan.origin.startswith("remembered: best of")
    assert plan.programs.backward is not None


@pytest.fixture
def on_card(torch):
    """A grouped product with gradients as it is planned for a card; its kernels are interpreted here."""
    pytest.importorskip("triton", reason="Triton is not installed")
    # Tiles of less than 32 rows cannot be halved.
    a, c = torch.ones(100, 1, 70, requires_grad=True), torch.ones(2, 70, 70, requires_grad=True)
    q = torch.arange(100) % 2

    def planned(**options):
        return planner.plan(
            "nij, q[n]jk -> nik", a, c, q=q, device="H200", minimize="peak", optimize="measure", **options
        )

    return planned, (a, c), q


def let_half_tiles_be_faster(monkeypatch):
    """Let programs tell the plan that they run, and take the less the more of its steps have half tiles."""
    program = measure._Clock.program

    def told(clock, plan):
        found = program(clock, plan)
        found.plan = plan
        return found

    def timings(programs):
        named = ["".join(step.choice.lowering for step in program.plan.steps) for program in programs]
        return measure.Timings(tuple((1.0 - 0.1 * name.count(", half tiles"),) for name in named))

    monkeypatch.setattr(measure._Clock, "program", told)
    monkeypatch.setattr(measure, "time_programs", timings)


def test_tiles_are_timed_step_by_step_and_remembered(monkeypatch, on_card, torch):
    planned, operands, q = on_card
    let_half_tiles_be_faster(monkeypatch)
    plan, timings = planned(), measure.time_programs
    tiled = [step for step in plan.steps if "Triton" in step.choice.lowering]
    assert tiled
    assert all(step.choice.lowering.endswith(", half tiles") for step in tiled)
    assert plan.origin.endswith(f"other tiles in {len(tiled)} of {len(tiled)} kernels")
    assert planner.Plan.from_json(plan.to_json()) == plan
    assert [way.chosen for ways in plan.implementations() for way in ways].count(True) == len(plan.steps)
    monkeypatch.setattr(measure, "time_programs", None)
    again = planned()
    assert again.programs == plan.programs
    assert again.origin == plan.origin.replace("measured", "remembered")
    result, gradients = plan(*operands, q=q), torch.ones(100, 1, 70)
    assert torch.equal(result, torch.full((100, 1, 70), 70.0))
    found = torch.autograd.grad(result, operands, gradients)
    assert torch.equal(found[0], torch.full((100, 1, 70), 70.0))
    assert torch.equal(found[1], torch.full((2, 70, 70), 50.0))
    # Pinned tiles are those of every call without measuring.
    monkeypatch.setattr(measure, "time_programs", timings)
    with deterministic(torch):
        pinned = planned()
    assert not [step for step in pinned.steps if step.choice.lowering.endswith("tiles")]


def test_tiles_are_tuned_in_whole_slices_of_a_loop(on_card, torch):
    pytest.importorskip("triton", reason="Triton is not installed")
    _, operands, q = on_card
    plan = planner.plan("nij, q[n]jk -> nik", *operands, q=q, device="H200", minimize="peak")
    loop = make_loop(plan, {"n": 64})

    def timings(plans):
        named = ["".join(step.choice.lowering for _, step in plan.inner_steps()) for plan in plans]
        return [1.0 - 0.1 * name.count(", half tiles") for name in named]

    tuned, timed, changed = tune_tiles(loop, timings)
    kernels = [step for _, step in tuned.inner_steps() if "Triton" in step.choice.lowering]
    assert kernels
    assert all(step.choice.lowering.endswith(", half tiles") for step in kernels)
    assert timed == changed == len({(step.op, step.choice) for step in kernels})
    assert {step.op.bodies for step in tuned.steps} == {tuned.tree.op.bodies}
    assert [body.resolved.spec.size("n") for body in tuned.loop.bodies] == [64, 36]
    assert tuned.loop.bodies[1] == loop.loop.bodies[1]
    assert tuned.cost == loop.cost
    result = tuned(*operands, q=q)
    assert torch.equal(result, torch.full((100, 1, 70), 70.0))
    found = torch.autograd.grad(result, operands, torch.ones(100, 1, 70))
    assert torch.equal(found[1], torch.full((2, 70, 70), 50.0))


def test_a_tiling_that_fails_is_left_out(monkeypatch, on_card):
    """One that takes more of a card than there is, say."""
    planned, *_ = on_card
    rows = planner.program.frameworks.load_backend("torch").table.rows

    def fails(*_):
        raise Exception("out of resources: shared memory")  # noqa: TRY002  # Triton's errors are not RuntimeErrors

    for name, row in rows.items():
        if row.variant_of:
            monkeypatch.setitem(rows, name, dataclasses.replace(row, run=fails))
    monkeypatch.setattr(measure, "block_seconds", lambda *_: 1.0)
    plan = planned()
    assert plan.origin.startswith("measured: ")
    assert not [step for step in plan.steps if rows[step.choice.lowering].variant_of]


@pytest.mark.parametrize(("seconds", "interrupted"), [((), True), ((0.98,), False)], ids=["interrupt", "no gain"])
def test_no_other_tiles_are_taken(monkeypatch, on_card, seconds, interrupted):
    """After an interrupt, or where they are hardly faster."""
    planned, *_ = on_card

    def timings(programs):
        return measure.Timings(((1.0,) * len(seconds), *(seconds for _ in programs[1:])), interrupted)

    monkeypatch.setattr(measure, "time_programs", timings)
    plan = planned()
    assert ("other tiles in 0 of" in plan.origin) == (not interrupted)
    assert not [step for step in plan.steps if step.choice.lowering.endswith(("tiles", "stages"))]


def test_torch_transforms_and_dataless_tensors_are_not_timed(torch):
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    c = torch.ones(5, 2)

    def call(a):
        origins.append(planner.plan("ij, jk, kl -> il", a, b, c, optimize="measure").origin)
        return planner.contract("ij, jk, kl -> il", a, b, c, optimize="measure")

    origins: list[str] = []
    assert torch.equal(torch.func.vmap(call)(a[None])[0], a @ b @ c)
    torch.func.jvp(call, (a,), (a,))
    torch.func.grad(lambda a: call(a).sum())(a)
    meta = planner.plan("ij, jk, kl -> il", *(x.to("meta") for x in (a, b, c)), optimize="measure")
    assert all(o.startswith("not measured") for o in [*origins, meta.origin])


def test_jax_times_eagerly_and_traces_take_what_is_remembered(jax):
    jnp = jax.numpy
    a, c = jnp.arange(24.0).reshape(8, 3), jnp.ones((4, 3, 5))
    q = jnp.array([0, 1, 3, 3, 1, 2, 0, 1])
    origins = []

    def f(a, c):
        origins.append(planner.plan("nj, q[n]jk -> nk", a, c, q=q, optimize="measure").origin.split(":")[0])
        return planner.contract("nj, q[n]jk -> nk", a, c, q=q, optimize="measure").sum()

    expected = float(jnp.einsum("nj,njk->nk", a, c[q]).sum())
    assert float(jax.jit(f)(a, c)) == expected
    assert float(f(a, c)) == expected
    assert float(jax.jit(f)(a, c + 0)) == expected
    assert float(jax.jit(lambda a, c: f(a, c))(a, c)) == expected
    assert origins == ["not measured, no values to time", "measured", "remembered"]
    # Differentiation outside of jit shows its arrays: forward and backward are timed.
    origins.clear()
    for _ in range(2):
        np.testing.assert_array_equal(jax.grad(f, argnums=(0, 1))(a, c)[0], np.full((8, 3), 5.0))
    assert origins == ["measured", "remembered"]
    f(jnp.ones((8, 3), int), jnp.ones((4, 3, 5), int))
    assert origins[-1] == "measured"


def test_a_loop_in_jax_is_recalled(jax):
    """The steps of its body are priced by what a loop's steps cost."""
    operands = [jax.numpy.ones(shape) for shape in ((64, 32), (32, 48))]
    plan = planner.plan("ij, jk -> ik", *operands)
    loop = make_loop(plan, {"i": 16})
    assert loop.loop.body.device != plan.device
    asked = measure.key_of(plan, operands)
    parts = {name: encode(getattr(loop, name)) for name in measure._PARTS}
    remember.remember("measured", asked, {"result": "best of 2", "compiled_bytes": None, **parts})
    found = measure._recall_plan(plan, asked)
    assert found.loop == loop.loop
    assert (found(*operands) == 32).all()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_jax_does_not_compile_is_left_out(monkeypatch, error, jax):
    """And Ctrl-C while it compiles gives the best so far."""
    shapes = (64, 48), (48, 56), (56, 40), (40, 8)
    operands = [jax.numpy.ones(shape) for shape in shapes]
    compiled, compile_ = [], jax.stages.Lowered.compile

    def second_fails(lowered, *args, **kwargs):
        compiled.append(lowered)
        if len(compiled) == 2:
            raise error
        return compile_(lowered, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", second_fails)
    plan = planner.plan("ab,bc,cd,de->ae", *operands, optimize="measure")
    assert len(compiled) >= 2
    assert (plan(*operands) == 48 * 56 * 40).all()


def test_what_needs_much_more_memory_is_not_timed(monkeypatch):
    """Unless it is predicted to be faster."""
    monkeypatch.setattr(measure, "ROOM_BYTES", 0)
    monkeypatch.setattr(measure, "SLOWEST", float("inf"))
    plan = planner.plan("ab,bc,cd,de->ae", (20, 3), (3, 30), (30, 4), (4, 9), backend="numpy")
    others = [other.plan.cost for other in plan.alternatives(100)]
    assert all(cost.seconds >= plan.cost.seconds for cost in others)
    for factor in (1, 2, 100):
        monkeypatch.setattr(measure, "ROOM_FACTOR", factor)
        wanted = [cost for cost in others if cost.peak_bytes <= factor * plan.cost.peak_bytes]
        assert [candidate.cost for candidate in measure.candidates(plan)] == wanted
    assert wanted
