"""What a plan predicts of memory against what is measured: retained bytes exactly, peaks within 10% at the median."""

import dataclasses
import importlib
import math

import numpy as np
import pytest
from conftest import examples
from engines import Jax, Torch, in_each
from hypothesis import assume, given, settings
from laws import Floors, exact_problems, pick, problem_of, tiny

import planner
from planner.inspect import memory as measure
from planner.inspect import meter
from planner.language.parse import parse
from planner.language.spec import Gather
from planner.program import build
from planner.program.program import live_bytes
from planner.testing import Problem
from planner.testing.judgement import Subject
from planner.workloads import WORKLOADS

# Sizes of workloads, and of their variants, at which the arrays hold megabytes: the few hundred bytes that a framework
# adds do not count.
MODERATE = {
    "seed-gathered-matmul": {"n": 8192, "q": 128},
    "seed-sliced-einsum": {"i": 4, "j": 512, "k": 256, "l": 128},
    "seed-two-by-matrices": {},
    "seed-layout": {"i": 32, "l": 32, "p": 16},
    "seed-outer-and-matmul": {"i": 500},
    "seed-outer-and-matmul/outer": {"i": 100},
    "seed-outer-and-matmul/large": {"i": 5000},
    "seed-outer-and-matmul/outer-large": {"i": 200},
    "seed-separate-keys": {"b": 4, "q": 200},
    "seed-gathered-keys": {"b": 4, "q": 400, "i": 400},
    "seed-gathered-keys/k10": {"b": 4, "i": 400},
    "seed-gathered-keys/k30": {"b": 4, "i": 400},
    "seed-shared-keys": {},
    "seed-shared-keys/all": {"b": 2},
    "three-way-batch": {"b": 8, "k": 512},
    "gathered-heads": {"b": 2048},
    "sparse-convolution": {"p": 400, "i": 27, "x": 8000, "o": 8000},
    "experts": {"t": 256, "i": 64, "o": 64, "e": 16},
    "experts/8": {"t": 256, "i": 64, "o": 64},
    "lora": {"t": 512, "i": 256, "o": 256, "q": 16},
    "message-passing": {"e": 20000, "s": 2000, "d": 2000},
    "equivariant": {"n": 64},
}


def moderate(name):
    """A workload at megabytes; those that are not listed at sizes of some tens."""
    workload = WORKLOADS[name]
    listed = MODERATE.get(name, MODERATE.get(name.partition("/")[0]))
    if listed is None:
        listed = {axis: min(size, 24) for axis, size in workload.sizes.items()}
        listed |= {array: min(size, 24) for array, size in workload.pools.items()}
    return workload.resized(**listed)


KEEPING = ("time", "flops", "bytes", "peak")  # objectives that may keep intermediates
PLAIN = ("size one", "size zero", "ellipsis", "implicit", "sizes tuple", "scalar")


def scaled(problem, largest=48):
    """A larger call of a drawn spec: shapes, index shapes, pools and sizes, with axes of some tens."""
    spec = parse(problem.spec)
    random = np.random.default_rng([problem.seed, 3])
    letters = sorted({a for term in spec.terms for e in term for a in (e.axes if isinstance(e, Gather) else e)})
    sizes = {axis: int(random.integers(8, largest)) for axis in letters}
    # Brackets of one index array may differ in their letters, not in their sizes: one size for all of them.
    rows = int(random.integers(8, largest))
    sizes |= {axis: rows for gather in spec.gathers for axis in gather.axes}
    pools = {array: int(random.integers(8, 4 * largest)) for array in spec.arrays}

    def shape(term):
        return tuple(pools[e.array] if isinstance(e, Gather) else sizes[e] for e in term)

    while max(math.prod(shape(term)) for term in spec.terms) > 10**7:
        sizes = {axis: max(n // 2, 2) for axis, n in sizes.items()}
        pools = {array: max(n // 2, 2) for array, n in pools.items()}
    given = {name: pools.get(name, sizes.get(name)) for name in problem.sizes or ()}
    given |= {e.array: pools[e.array] for e in spec.output if isinstance(e, Gather)}
    indices = {g.array: random.integers(0, pools[g.array], tuple(sizes[a] for a in g.axes)) for g in spec.gathers}
    operands = [random.integers(-2, 3, shape(term)).astype(np.float32) for term in spec.inputs]
    return operands, {"sizes": given or None, **indices}


@pytest.fixture
def no_guards(monkeypatch):
    """Peaks without what guards and index arrays need if they are bad, as here none is: see `tests/test_limits.py`."""
    monkeypatch.setattr(build, "index_bytes", lambda spec: 0)
    monkeypatch.setattr(build, "live_bytes", lambda *given: live_bytes(*given[:5]))


@pytest.fixture
def steps_alone(monkeypatch, xla_sizes):
    """JAX's programs step by step: neither calls nor programs as wholes are compiled."""
    pytest.importorskip("jax", reason="jax is not installed")

    def total(self, steps):
        return [("", meter.Figures(0.0, *meter._sums(steps), max(step.live_bytes for step in steps)))]

    for program in ("forward", "backward"):
        monkeypatch.setattr(meter.JaxMeter, program, total)


# -- retained ------------------------------------------------------------------------------------


def retained(engine, problem, operands, minimize):
    """The plan of a call, which holds for its gradients just what the plan says: by each way to count it."""
    call, indices = Subject().call(problem, minimize=minimize), engine.indices(problem)
    call(operands, indices)  # plans and caches
    plan = engine.plan(problem, operands, indices, minimize=minimize)
    predicted = plan.cost.retained_bytes
    for found in engine.held(call, operands, indices, problem.wanted):
        assert found == predicted, f"{found} B retained, {predicted} B predicted\n{plan}"
    assert predicted == 0 or minimize != "retained"
    return plan


@in_each(torch=["time", "flops", "retained"], jax=["time", "retained"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_retain_what_the_plan_says(engine, sample, name, jax_in_a_hurry):
    workload = tiny(WORKLOADS[name])
    retained(engine, problem_of(workload), engine.of_workload(workload), sample)


def test_torch_retains_no_copy_of_matrices_with_gaps(torch):
    """Products in a batch copy them; native calls would keep the copy for the backward pass."""
    operands = [torch.randn(4, 32, 32, 2)[..., 0].requires_grad_() for _ in range(2)]
    plan = retained(Torch(), Problem("bij, bjk -> bik", ((4, 32, 32),) * 2), operands, "flops")
    assert [step.choice.lowering for step in plan.programs.forward.steps] == ["matmul"]
    assert plan.cost.copied_bytes > 0


RETAINED_ONCE = [
    # The diagonal's positions were kept by native operators.
    Problem(
        "...a, aa..., a, a... -> aa", ((4,), (4, 4, 1), (4,), (4, 2)), index_mode="drop",
        requires_grad=(True, False, True, True), seed=212,
    ),
    # A kept view of an operand, whose dropped rows are zero in a copy, kept that copy alive.
    Problem(
        "...p[a]q[...a]q[...a]ab, p[a]ab -> ", ((2, 2, 2, 2, 2, 3), (3, 2, 3)),
        indices={"q": np.zeros((2, 2), np.int64), "p": np.array([0, 2])}, index_mode="drop",
    ),
    # Masks of dropped indices, and masked copies of operands, were kept.
    Problem(
        "p[ba] b, ab, p[ba] ab -> q[ba]  p[ba] ba", ((2, 3), (2, 3), (2, 2, 3)), {"q": 2},
        {"q": np.array([[-1, -2], [-2, 3], [2, 2]]), "p": np.array([[2, 3], [0, 3], [2, 1]])}, "drop",
        requires_grad=(False, False, True), seed=731,
    ),
]  # fmt: skip
SMALL = {"max_operands": examples(3, 4), "max_axes": 4, "max_size": 3}


@in_each(torch=({}, ("retained",)), jax=(SMALL, ()))
def test_random_specs_retain_what_the_plan_says(engine, sample, jax_in_a_hurry):
    small, objectives = sample
    floors = Floors()

    def law(problem):
        assume(problem.wanted)
        problem = dataclasses.replace(problem, strided=engine.strided and problem.seed % 2 == 1)
        for minimize in (*objectives, pick(problem, KEEPING)):
            plan = retained(engine, problem, engine.operands(problem), minimize)
        floors.note(nonzero=plan.cost.retained_bytes, gather=bool(problem.indices))

    for problem in RETAINED_ONCE:
        law(problem)
    drawn = exact_problems(min_operands=3, without=("size zero", "scalar"), **small)
    settings(max_examples=examples(80, 2_000))(given(drawn)(law))()
    floors.at_least(examples(80, 2_000), nonzero=0.5, gather=0.5)


# -- peaks ---------------------------------------------------------------------------------------


def hold_ratios(title, found, part, most=0.25):
    """Hold the median of measured over predicted to 10%, and a part of all predictions to a larger error.

    Of drawn specs that resemble each other one counts. What is printed, of all and of where one lowering takes part,
    is shown by ``pytest -rP``, and of a failure.
    """
    ratios = {"all": [ratio for _, ratio in found]}
    for (_, lowerings), ratio in found:
        for lowering in set(lowerings):
            ratios.setdefault(lowering, []).append(ratio)
    print(f"{title}: measured peak over predicted; number, and quantiles at 0, 10, 50, 90 and 100%")
    for name, some in ratios.items():
        print(f"  {name:28} {len(some):3}", *(f"{x:.2f}" for x in np.quantile(some, [0, 0.1, 0.5, 0.9, 1])))
    print(*sorted(found, key=lambda pair: -abs(np.log(pair[1])))[:12], sep="\n")
    assert abs(np.median(ratios["all"]) - 1) <= 0.1
    assert np.quantile([abs(ratio - 1) for ratio in dict(reversed(found)).values()], part) <= most


def numpy_peaks(spec, operands, options):
    """Measured and predicted bytes of each program, forward and backward, and the program."""
    plan = planner.plan(spec, *operands, **options)
    planner.contract(spec, *operands, **options)
    measured = measure.numpy_memory(lambda: planner.contract(spec, *operands, **options))[1]
    assert measured.retained_bytes == 0
    return [(measured.peak_bytes, plan.cost.peak_bytes, plan.programs.forward)]


def torch_peaks(spec, operands, options):
    plan = planner.plan(spec, *operands, **options)

    def call():
        return planner.contract(spec, *operands, **options)

    wanted = list({id(x): x for x in operands if x.requires_grad}.values())
    result = call()
    if wanted:
        result.sum().backward()
    del result
    found = [(measure.torch_memory(call)[1].peak_bytes, plan.cost.forward.peak_bytes, plan.programs.forward)]
    if wanted:
        backward = measure.torch_backward_memory(call, wanted)[1]
        found.append((backward.peak_bytes, plan.cost.backward.peak_bytes, plan.programs.backward))
    return found


def jax_peaks(spec, operands, options):
    """What XLA takes for the steps, each compiled by itself, and what is predicted of steps that run one by one."""
    stand_ins = [planner.Operand(x.shape, x.dtype.name, requires_grad=True) for x in operands]
    plan = planner.plan(spec, *stand_ins, backend="jax", **options)
    indices = {name: x for name, x in options.items() if name not in ("sizes", "index_mode", "optimize")}
    found = plan.analyze(*operands, rounds=1, **indices)
    measured = [found.total(program).measured.live_bytes for program in ("forward", "backward")]
    predicted = [max(step.live_bytes for step in p.steps) for p in (plan.programs.forward, plan.programs.backward)]
    return [(one, other, plan.programs.forward) for one, other in zip(measured, predicted, strict=True)]


PEAKS = {"numpy": numpy_peaks, "torch": torch_peaks, "jax": jax_peaks}


def label(name, program):
    return name, tuple(step.choice.lowering for step in program.steps)


def peaks_of_workload(engine, name):
    workload = moderate(name)
    # A plan of its own search: which implementations are measured does not depend on the workload's family.
    options = {"optimize": "optimal", **workload.options, **workload.indices(engine.name)}
    return PEAKS[engine.name](workload.spec, engine.of_workload(workload), options)


def peaks_of_random_problems(engine, found, problems, count, fits):
    """Add those of drawn problems, at sizes of which the peaks say something; there are at least so many that do."""
    floors = Floors()

    @settings(max_examples=count)
    @given(problems)
    def law(problem):
        for largest in (96, 48, 24, 12):
            arrays, options = scaled(problem, largest)
            cost = planner.plan(problem.spec, *arrays, **options, backend="numpy").cost
            if cost.flops < 3 * 10**8 and cost.peak_bytes < 3 * 10**7:
                break
        large = cost.peak_bytes > 2 * 10**4 and cost.flops < 10**9
        floors.note(fits=large)
        if not large:
            return
        operands = [engine.array(x) for x in arrays]
        if engine.name == "torch":
            operands = [x.requires_grad_(need) for x, need in zip(operands, problem.requires_grad, strict=True)]
        options = {n: engine.array(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
        peaks = PEAKS[engine.name](problem.spec, operands, options)
        for into, (measured, predicted, program) in zip(found, peaks, strict=False):
            # How a view of the output's gradient lies the plan does not know, and counts a copy where one may be
            # needed. There, too much is not a fault.
            careful = engine.name == "torch" and {"broadcast", "view"} & {s.choice.lowering for s in program.steps}
            if predicted > 10**4:
                ratio = measured / predicted
                into.append((label(problem.spec, program), max(1.0, ratio) if careful else ratio))

    law()
    floors.at_least(count * 4 // 5, fits=fits)


DRAWN = {"min_operands": 2, "max_axes": 4, "without": PLAIN}


# The part of the predictions that is within an error. Of some seventy problems three or four would decide the 95th
# percentile, and of 25 one; of these 4 were seen to fit. In JAX the known rules of XLA leave 28% and more there.
@in_each(
    numpy=None,
    torch=[None, (exact_problems(**DRAWN), examples(35, 1_200), 0.2, examples(0.9, 0.95), 0.25)],
    jax=[
        None,
        (exact_problems(**DRAWN, max_operands=4), examples(12, 400), 0.08, examples(0.5, 0.95), examples(0.25, 0.5)),
    ],
)
def test_peaks(engine, sample, request):
    """Of the named workloads, or of drawn problems; in JAX of calls that are not jitted."""
    request.getfixturevalue("steps_alone" if engine.name == "jax" else "no_guards")
    found, part, most = ([], []), (0.95 if engine.differentiates else 0.5), 0.25
    if sample:
        *drawn, part, most = sample
        peaks_of_random_problems(engine, found, *drawn)
    else:
        for name in WORKLOADS:
            for ratios, (measured, predicted, program) in zip(found, peaks_of_workload(engine, name), strict=False):
                if predicted:
                    ratios.append((label(name, program), measured / predicted))
        assert [len(ratios) for ratios in found] == [len(WORKLOADS), len(WORKLOADS) * engine.differentiates]
    for program, ratios in zip(("forward", "backward"), found, strict=True):
        if ratios:
            hold_ratios(f"{engine.name} {program}", ratios, part, most)


@pytest.mark.parametrize("minimize", ["time", "peak"])
@pytest.mark.parametrize(("spec", "shapes"), [("ik,kj->ikj", ((40, 50), (50, 60))), ("ij,i->ij", ((500, 60), (500,)))])
def test_torch_gradients_of_a_broadcast_product_are_those_of_the_plan(spec, shapes, minimize, torch):
    """Torch's own multiply would make the whole product of each gradient before it sums it."""
    operands = [torch.ones(shape, requires_grad=True) for shape in shapes]
    (_, (measured, predicted, _)) = torch_peaks(spec, operands, {"minimize": minimize})
    assert measured <= 1.01 * predicted + 64
    if minimize == "peak":  # of the gradient of `k` the vectors are copied, which are another operand's
        assert predicted < 1.5 * sum(x.nbytes for x in operands)


def test_torch_counts_what_is_repeated_once(torch):
    """A value that is only repeated along new axes is a view. But a gradient of an operand is written in full."""
    a, b = torch.ones(50, 60, requires_grad=True), torch.ones(60, 70)
    spec, options = "ij, jk -> ikl", {"sizes": {"l": 100}, "optimize": "optimal"}
    plan = planner.plan(spec, a, b, **options)
    assert [step.choice.lowering for step in plan.programs.forward.steps] == ["matmul", "broadcast"]
    (forward, predicted, _), _ = torch_peaks(spec, [a, b], options)
    assert forward == predicted == 4 * 50 * 70
    assert planner.contract(spec, a, b, **options).stride()[2] == 0
    (_, (backward, predicted, _)) = torch_peaks("ij -> i", [a], {})
    assert backward == predicted == 4 * 50 * 60


@pytest.mark.parametrize("shapes", [((2000, 2000), (2000,)), ((50_000, 64), (64,))])
def test_torch_sums_columns_without_a_product_for_each(shapes, torch):
    """Torch's batched product of vectors that lie across the batch takes 5 to 75 ns an element."""
    plan = planner.plan("ij,j->ij", *(planner.Operand(s, requires_grad=True) for s in shapes), backend="torch")
    assert "matmul" not in [step.choice.lowering for step in plan.programs.backward.steps]


@pytest.fixture
def whole_programs(jax, xla_sizes, monkeypatch):
    """A function of a plan that compiles it: the bytes that XLA takes and those predicted, of each of its programs."""
    module, measured = importlib.import_module("planner.backends.jax.backend"), []
    of_program = module._peak_bytes
    monkeypatch.setattr(module, "_peak_bytes", lambda *given: measured.append(of_program(*given)) or measured[-1])

    def peaks(plan):
        measured.clear()
        module.backend.compiled_bytes(plan)
        programs = zip((0, plan.cost.retained_bytes), (plan.cost.forward, plan.cost.backward), strict=True)
        predicted = [(kept, cost.peak_bytes) for kept, cost in programs if cost is not None]
        return [(x + kept, peak) for x, (kept, peak) in zip(measured, predicted, strict=True)]

    return peaks


# A spec, shapes and index arrays for each rule at the head of `planner.backends.jax.compiled.peak`.
XLA = {
    "a product by element joins the sum that reads it": ("ij,ij,i->i", ((30, 30), (30, 30), (30,)), {}),
    "many elements are summed from memory": ("ij,ij,ij->i", ((90, 90),) * 3, {}),
    "long rows are summed from memory": ("ij,ij->i", ((40, 60),) * 2, {}),
    "a product of matrices is in memory": ("ij,jk,kl->il", ((50, 60), (60, 40), (40, 45)), {}),
    "factors are copied into the order of the product": ("bca,dbc->adb", ((30, 20, 10), (12, 30, 20)), {}),
    "factors in other orders are copied to be summed": ("abc,cba->b", ((20, 21, 22), (22, 21, 20)), {}),
    "a product by element has an order of its own": ("a,bac->bac", ((21,), (22, 21, 23)), {}),
    "all axes of one factor stay in its order": ("ac,abc->abc", ((21, 23), (21, 22, 23)), {}),
    "rows come first": ("q[a]bcc,bc,ba->bc", ((69, 22, 23, 23), (22, 23), (22, 21)), {"q": (21,)}),
    "a diagonal comes first": ("abb,ab->ab", ((40, 41, 41), (40, 41)), {}),
    "rows that two steps read are in memory": ("q[a]bc,ba->abc", ((69, 22, 23), (22, 21)), {"q": (21,)}),
    "guards look at a value before it is repeated": (
        "acbq[b],adq[b]->b", ((15, 11, 12, 36), (15, 19, 36)), {"q": (12,)}
    ),
    "guards look for the largest number": ("bcq[a]d,d->", ((8, 21, 48, 10), (10,)), {"q": (19,)}),
    "axes of size 1 come first": ("bhqd,bhkd->bhqk", ((8, 1, 90, 32), (8, 1, 50, 32)), {}),
    "guards share a mask of few indices": ("q[a]a,q[a]a->", ((80, 30), (80, 30)), {"q": (30,)}),
    "a guard is written over what it guards": (
        "q[a]acbp[a],b->b", ((34, 10, 11, 11, 18), (11,)), {"q": (10,), "p": (10,)}
    ),
    "diagonals are taken before rows": ("ccq[ba],ba->c", ((23, 23, 64), (14, 14)), {"q": (14, 14)}),
    "a diagonal is a result as it is": ("cacb,ccab->", ((23, 16, 23, 22), (23, 23, 16, 22)), {}),
    "rows that an operation reads are marked in memory": (
        "bq[c]ac,q[c]c,cba->c", ((13, 61, 23, 16), (61, 16), (16, 13, 23)), {"q": (16,)}
    ),
    "a product that joins axes reads another array": (
        "q[d]cba,cb,a->", ((36, 23, 22, 16), (23, 22), (16,)), {"q": (19,)}
    ),
    "a product keeps the order of one factor only": ("d,acd,acd->dc", ((14,), (11, 18, 14), (11, 18, 14)), {}),
    "a product by element is not turned round": ("ab,acb->ac", ((15, 40), (15, 21, 40)), {}),
    "JAX permutes the gradient of a product before rows": (
        "d,p[a]c->dcq[b]", ((21,), (36, 23)), {"sizes": {"q": 59}, "p": (19,), "q": (19,)}
    ),
    "sums of places are marked afterwards": ("bq[ba]c,ab->ac", ((12, 90, 12), (12, 12)), {"q": (12, 12)}),
    "a take of several dimensions computes places in its loop": (
        "abq[abc]d,abc->abd", ((2, 3, 90, 8), (2, 3, 40)), {"q": (2, 3, 40)}
    ),
    "gradients that JAX would derive slowly are steps of ours": ("bnd,de->bne", ((8, 64, 64), (64, 256)), {}),
    "a matrix by a vector keeps the axes of the matrix in order": ("cba,c->ab", ((40, 110, 60), (40,)), {}),
    "such gradients of a value are, too": ("bnd,nd,de->bne", ((8, 64, 64), (64, 64), (64, 256)), {}),
    "sums copy the zeros that they share": (
        "b,q[a]ba,b,q[a]ba->", ((16,), (90, 16, 19), (16,), (90, 16, 19)), {"q": (19,)}
    ),
}  # fmt: skip


# So many bytes the rules say too little: of values that XLA does not compute where they are read.
KNOWN_MISSES = [
    (1680, "cad,bdc,d->q[cd]", ((20, 21, 20), (11, 20, 20), (20,)), {"q": (20, 20), "sizes": {"q": 70}}),
    (608, "q[ba]ab,bq[ba]a,ab->a", ((90, 12, 12), (12, 90, 12), (12, 12)), {"q": (12, 12)}),
]


@pytest.mark.parametrize(("missed", "spec", "shapes", "indices"), KNOWN_MISSES)
def test_known_misses_of_the_rules_for_xla(missed, spec, shapes, indices, whole_programs):
    operands = [planner.Operand(shape, requires_grad=True) for shape in shapes]
    for measured, predicted in whole_programs(planner.plan(spec, *operands, backend="jax", **indices)):
        assert abs(measured - predicted) <= missed + 0.04 * predicted + 64


@pytest.mark.parametrize(("spec", "shapes", "indices"), XLA.values(), ids=XLA)
def test_xla_takes_what_its_rules_say(spec, shapes, indices, whole_programs):
    operands = [planner.Operand(shape, requires_grad=True) for shape in shapes]
    for measured, predicted in whole_programs(planner.plan(spec, *operands, backend="jax", **indices)):
        assert abs(measured - predicted) <= 0.04 * predicted + 64  # a few single numbers


def test_marks_of_bad_rows_copy_no_array(jax):
    """A row of NaN stands behind an array in the loop that takes its rows, also where two steps take some."""
    x, q = jax.numpy.ones((64, 32)), jax.numpy.arange(96) % 64
    call = jax.jit(lambda x, q, p, y: planner.contract("q[n]c, nc, p[n]c -> nc", x, y, x, q=q, p=p))
    arguments = x, q, q[::-1].at[5].set(64), jax.numpy.ones((96, 32))
    memory = call.lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < x.nbytes
    assert jax.numpy.isnan(call(*arguments)).all(1).nonzero()[0].tolist() == [5]
    assert jax.numpy.isnan(call(*arguments)).sum() == 32


def test_equal_takes_of_an_array_copy_it_once_at_most(jax):
    """XLA makes one array with the row of NaN for both. It has at most twice the elements that a take takes."""
    x, q = jax.numpy.ones((128, 32)), jax.numpy.arange(64)
    call = jax.jit(lambda x, q, p: [planner.contract("q[n]c -> nc", x, q=each) for each in (q, p)])
    assert call.lower(x, q, q).compile().memory_analysis().temp_size_in_bytes <= x.nbytes + 256
    large = jax.numpy.ones((129, 32))
    assert call.lower(large, q, q).compile().memory_analysis().temp_size_in_bytes < 256


@pytest.mark.parametrize("narrow", ["float16", "int8"])
@pytest.mark.parametrize(
    "spec", ["ab,bc->ac", "ab,ab->ab", "ab,bc->abc", "ab,ab,bc->ac", "ab,b->ba", "aab,b->ab", "hb,dab,hae,b->dbah"]
)
def test_xla_casts_narrow_operands_again_for_each_step_that_reads_them(spec, narrow, whole_programs):
    """What reads the cast has its own dtype. Nothing keeps the cast, and a product of matrices writes it to memory."""
    sizes = {"a": 20, "b": 30, "c": 40, "d": 22, "e": 30, "h": 1}
    terms = spec.split("->")[0].split(",")
    for shift in (0, 1):
        dtypes = [(narrow, "float32")[(number + shift) % 2] for number in range(len(terms))]
        shapes = [tuple(sizes[axis] for axis in term) for term in terms]
        operands = [planner.Operand(x, d, requires_grad=d != "int8") for x, d in zip(shapes, dtypes, strict=True)]
        for measured, predicted in whole_programs(planner.plan(spec, *operands, backend="jax")):
            # Here XLA copies the output's gradient for each product; the rules say that the two share a copy.
            missed = 20 * 30 * 40 * 4 if (spec, narrow) == ("ab,bc->abc", "float16") else 0
            assert abs(measured - predicted) <= 0.15 * predicted + missed + 64, dtypes


@pytest.mark.parametrize("spec", ["ij,jk,ik->ik", "ij,jk,i->ik"])
def test_xla_writes_a_product_by_element_over_a_factor(spec, whole_programs):
    shapes = [tuple({"i": 90, "j": 40, "k": 80}[axis] for axis in term) for term in spec.split("->")[0].split(",")]
    plan = planner.plan(spec, *shapes, optimize=[(0, 1), (0, 1)], backend="jax")
    assert whole_programs(plan) == [(90 * 80 * 4, 90 * 80 * 4)]


def test_xla_takes_what_is_predicted_of_whole_programs(whole_programs):
    """Of twenty programs one is off by more than 40%, and half of them are off by less than 2%."""
    ratios = {}

    @settings(max_examples=examples(25, 400))
    @given(exact_problems(**DRAWN, max_operands=4))
    def law(problem):
        arrays, options = scaled(problem, 24)
        operands = [planner.Operand(x.shape, x.dtype.name, requires_grad=True) for x in arrays]
        given = {n: x.shape if isinstance(x, np.ndarray) else x for n, x in options.items()}
        plan = planner.plan(problem.spec, *operands, backend="jax", **given)
        if 10**4 < plan.cost.peak_bytes < 10**7:
            for program, (measured, predicted) in enumerate(whole_programs(plan)):
                if predicted > 10**4:
                    ratios[problem.spec, program] = measured / predicted

    law()
    errors = [abs(ratio - 1) for ratio in ratios.values()]
    print("compiled over predicted peaks, quantiles at 5, 10, 50, 90 and 95%")
    print(len(ratios), *(f"{x:.2f}" for x in np.quantile(list(ratios.values()), [0.05, 0.1, 0.5, 0.9, 0.95])))
    assert len(ratios) >= examples(5, 80)
    assert np.quantile(errors, 0.5) <= 0.02
    assert np.quantile(errors, 0.95) <= 0.4


@pytest.mark.parametrize("name", ["seed-gathered-matmul", "seed-shared-keys", "gathered-heads"])
def test_jax_peaks_of_what_xla_reshapes(name, steps_alone):
    """Buffers of grouped products, and copies of results that have dimensions of size 1 or lose them."""
    for measured, predicted, program in peaks_of_workload(Jax(), name):
        assert 0.8 < measured / predicted < 1.2, str(program)


@pytest.mark.parametrize(
    ("spec", "shapes", "q"),
    [
        ("cijg, gq[]ci -> jcg", ((30, 20, 30, 20), (20, 5, 30, 20)), ()),  # both factors are copied
        ("cijg, q[g]ci -> jcg", ((30, 20, 30, 20), (9, 30, 20)), (20,)),
        ("nij, q[n]jk -> nik", ((90, 20, 30), (40, 30, 20)), (90,)),  # none is
    ],
)
def test_numpy_copies_the_factors_of_a_product_with_rows(spec, shapes, q):
    """As matrices of a batch: those copies are in the predicted peak, too."""
    operands = [np.ones(shape, "float32") for shape in shapes]
    options = {"q": np.zeros(q, int), "optimize": [(0, 1)], "minimize": "flops"}
    ((measured, predicted, program),) = numpy_peaks(spec, operands, options)
    assert [step.choice.lowering for step in program.steps] == ["take, multiply, add"]
    assert 0.9 * measured <= predicted <= 1.1 * measured + 4096


@pytest.mark.parametrize("objective", ["time", "peak"])
def test_a_vector_times_matrices_with_the_batch_innermost(objective, torch):
    """Whichever row runs, its copy or its product is in the predicted peak."""
    x, y = torch.ones(64, 32, 64), torch.ones(32, 64)
    plan = planner.plan("ijk, jk -> ik", x, y, minimize=objective)
    plan(x, y)
    got, measured = measure.torch_memory(lambda: plan(x, y))
    assert torch.equal(got, torch.full((64, 64), 32.0))
    assert measured.peak_bytes <= plan.cost.peak_bytes + 1024
