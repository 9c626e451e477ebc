"""torch against the oracle: values, gradients, transforms and kernels, on integers that make every sum exact."""

import itertools
import weakref
from functools import partial
from unittest import mock

import numpy as np
import pytest
from conftest import examples
from engines import Torch, saved_tensor_bytes
from hypothesis import given, settings
from laws import MODES, exact_problems, judge, problem_of, tiny, values_and_gradients

import planner
from planner.cost.device import H200
from planner.inspect.memory import torch_counts
from planner.language.dtypes import ITEMSIZES
from planner.program.ops import Einsum
from planner.testing import Problem, problems
from planner.workloads import WORKLOADS

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from planner.backends.torch import runner  # noqa: E402
from planner.backends.torch.backend import backend  # noqa: E402
from planner.backends.torch.contexts.flops import product_flops  # noqa: E402
from planner.backends.torch.executable import Executable  # noqa: E402
from planner.backends.torch.ops import promote  # noqa: E402

ENGINE = Torch()


def test_promotion_is_that_of_torch():
    """All pairs of dtypes: planning does not ask torch, so that nothing sees it ask."""
    for first, second in itertools.product(ITEMSIZES, repeat=2):
        try:
            expected = ENGINE.result_dtype([first, second])
        except RuntimeError:
            expected = None
        assert promote(first, second) == expected, (first, second)


def test_a_gradient_that_repeats_costs_little():
    """Of a sum's gradient no grouped product is made: rows are summed and taken."""
    workload = WORKLOADS["seed-gathered-matmul"].resized(n=8192, q=1024)
    operands, indices = workload.operands("torch", requires_grad=True), workload.indices("torch")
    result = planner.contract(workload.spec, *operands, **indices)
    seen = {}
    for name, gout in (("ones", torch.ones(result.shape)), ("sum", torch.ones(()).expand(result.shape))):
        counted = torch_counts(lambda g=gout: torch.autograd.grad(result, operands, g, retain_graph=True))
        seen[name] = counted.flops, torch.autograd.grad(result, operands, gout, retain_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(seen["ones"][1], seen["sum"][1], strict=True))
    assert 0 < 50 * seen["sum"][0] < seen["ones"][0], "no matrices are multiplied"


def test_a_half_gradient_that_repeats_is_not_summed_first():
    """The sum of the other operand's rows is beyond float16."""
    a, b = (torch.full(shape, 100.0, dtype=torch.float16, requires_grad=True) for shape in ((4, 4), (4, 2048)))
    out = planner.contract("ij, jk -> ik", a, b, memory_limit=10**8)
    (got,) = torch.autograd.grad(out, a, torch.tensor(2.0**-12, dtype=torch.float16).expand(out.shape))
    assert (got == 50).all()


def test_no_mask_is_made_again_for_what_the_backward_pass_views():
    operands = torch.ones(3, 3, requires_grad=True), torch.ones(4, 2, requires_grad=True)
    plan = planner.plan("nn, q[n]d -> d", *operands, q=torch.tensor([0, 9, 2]), index_mode="drop")
    assert any(step.choice.lowering == "mask" for step in plan.programs.forward.steps)
    assert [step.choice.lowering for step in Executable(plan, backend.table).operand_views] == ["view"]


def test_every_lowering_agrees():
    """Each row of the table that supports a step gives what the others give, for gradient steps and pairs too.

    Rows for a card are interpreted here, on the CPU's tensors.
    """
    # Variants and what takes bfloat16 or integers alone are run by tests/kernels.
    alone = ("grouped_mm", "multiply integers, sum")
    apart = {name for name, row in backend.table.rows.items() if row.variant_of or name.endswith(alone)}
    unseen = set(backend.table.rows) - {"cast", "fused cast", "mask", "loop", *apart}

    def agree(problem):
        operands, indices = ENGINE.operands(problem), ENGINE.indices(problem)
        plan, random = ENGINE.plan(problem, operands, indices), np.random.default_rng(problem.seed)
        spec, prepared = plan.resolved.spec, Executable(plan, backend.table).prepare(indices)

        def run(op, inputs, devices):
            names = dict.fromkeys(choice.lowering for x in devices for choice in backend.table.choices(op, x))
            unseen.difference_update(names)
            return [backend.table.run(name, op, inputs, prepared) for name in names]

        whole = Einsum(spec, "float32")
        singles = [Einsum(planner.transpose(spec, child), "float32") for child in range(len(spec.inputs))]
        for op in (whole, *singles, *[whole.joint_gradient()] * (len(singles) == 2)):
            inputs = [torch.from_numpy(random.integers(-2, 3, n).astype(np.float32)) for n in op.input_shapes]
            outcomes = run(op, inputs, (plan.device, H200))
            if len(op.output_terms) == 2 and outcomes:
                gout, a, b = inputs
                pairs = zip(singles, ((gout, b), (a, gout)), strict=True)
                outcomes.append([run(one, pair, [plan.device])[0][0] for one, pair in pairs])
            for results in outcomes[1:]:
                assert all(torch.equal(x, y) for x, y in zip(results, outcomes[0], strict=True)), str(op)

    law = given(exact_problems(max_operands=2, without=("scalar", "size one")))(agree)
    settings(max_examples=examples(150, 3_000))(law)()
    agree(Problem("ab -> aba", ((3, 2),)))
    agree(Problem("zkb, zkn -> zbn", ((2, 64, 128), (2, 64, 3))))  # transposed
    agree(Problem("bhid, jhd -> bhij", ((2, 3, 4, 5), (6, 3, 5))))  # the output's gradient is copied for both gradients
    agree(Problem("ijk, k -> ij", ((4, 80, 4096), (4096,))))  # summed slice by slice
    agree(Problem("ui, vi -> iuv", ((4, 2), (5, 2))))  # both are copied
    agree(Problem("ac, cba -> ab", ((3, 4), (4, 5, 3))))  # einsum copies one matrix at a time
    agree(Problem("u, zik -> kuzi", ((4,), (2, 3, 4))))  # in the order of the second
    q = np.array([[3, 0], [1, 1], [5, 0]])
    agree(Problem("abcd -> dq[ca]b", ((2, 3, 3, 2),), {"q": 5}, {"q": q}, "drop"))
    for problem in (problem_of(tiny(workload)) for workload in WORKLOADS.values()):
        if len(problem.shapes) <= 2:
            agree(problem)
    assert not unseen, "never ran"


# -- higher derivatives --------------------------------------------------------------------------


def test_second_derivatives_of_complex_operands():
    """Of the gradients of real and complex operands by real and complex ones: each conjugate is seen."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, dtype=torch.complex128, requires_grad=True)
    y = torch.randn(4, 3, 2, dtype=torch.complex128, requires_grad=True)
    z = torch.randn(2, dtype=torch.float64, requires_grad=True)
    q = torch.tensor([3, 1])

    def product(x, y, z):
        return planner.contract("nj, q[n]jk, k -> nk", x, y, z, q=q)

    assert torch.autograd.gradgradcheck(product, (x, y, z))
    # There each gradient is derived alone; here an operand's is the sum over those of all others.
    found = []
    for value in (product(x, y, z), torch.einsum("nj, njk, k -> nk", x, y[q], z.to(x.dtype))):
        first = torch.autograd.grad(value.abs().pow(3).sum(), (x, y, z), create_graph=True)
        found.append(torch.autograd.grad(sum(g.abs().pow(2).sum() for g in first), (x, y, z)))
    assert all(map(torch.allclose, *found))


@pytest.mark.parametrize("spec", ["ij->ij", "ij->ji", "ij->i", "ij,jk->ik"])
@pytest.mark.parametrize("limit", [None, "1MB"])
def test_gradients_that_are_lazily_conjugated_stay_the_callers(spec, limit):
    """torch conjugates only when the values are read; gradients are conjugated in memory of their own."""
    shapes = [(2, 1), (1, 3)][: spec.count(",") + 1]
    operands = [torch.randn(shape, dtype=torch.complex64, requires_grad=True) for shape in shapes]
    result = planner.contract(spec, *operands, memory_limit=limit)
    gradient = torch.randn(result.shape, dtype=torch.complex64)
    before = gradient.clone()
    found = torch.autograd.grad(result, operands, gradient.conj())
    expected = torch.autograd.grad(torch.einsum(spec, *operands), operands, before.conj())
    assert torch.equal(gradient, before)
    assert all(map(torch.allclose, found, expected))


# -- index modes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "shapes", "sizes"),
    [
        ("bqd, b i[bqk] d -> bqk", ((1, 2, 4), (1, 0, 4)), None),
        ("bqd, b i[bqk] d -> bqk", ((1, 2, 0), (1, 5, 0)), None),
        ("b i[bqk] d -> bqkd", ((1, 5, 0),), None),
        ("bqkd -> b i[bqk] d", ((1, 2, 3, 0),), {"i": 5}),
    ],
)
@pytest.mark.parametrize("needs", [False, True])
def test_an_index_that_nothing_is_read_through_is_checked_all_the_same(spec, shapes, sizes, needs):
    operands = [torch.ones(shape, requires_grad=needs) for shape in shapes]
    i = torch.tensor([[[0, 99, 1], [0, 0, 0]]])
    with pytest.raises(planner.IndexRangeError, match="'i'"):
        planner.contract(spec, *operands, sizes=sizes, i=i)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_what_is_not_finite_stays_with_what_asked_for_it(dtype):
    spec = "bqd, b i[bqk] d -> bqk"
    query, pool = (torch.randint(-2, 3, (1, n, 32)).to(dtype) for n in (400, 100))
    i = torch.randint(0, 98, (1, 400, 60))
    i[0, 5, 7] = 99
    pool[0, 98:], query[0, 9] = torch.nan, torch.inf  # row 98 is not asked for, row 99 by query 5
    query.requires_grad_(), pool.requires_grad_()
    got = planner.contract(spec, query, pool, i=i)
    to_query, to_pool = torch.autograd.grad(got, (query, pool), torch.ones_like(got))
    asked = torch.zeros(100, dtype=torch.bool)
    asked[i[0, 9]] = True
    assert to_query[0].isfinite().all(1).logical_not().nonzero().tolist() == [[5]]
    assert torch.equal(to_pool[0].isfinite().all(1), ~asked)


@pytest.mark.parametrize("needs", [False, True])
def test_scores_of_a_whole_pool_check_each_index(needs):
    i = np.random.default_rng(0).integers(-50, 50, (3, 200, 40))
    far = np.where(i % 7, i, 3 * i)
    for mode in MODES:
        problem = Problem(
            "bqd, b i[bqk] d -> bqk", ((3, 200, 32), (3, 50, 32)), indices={"i": i if mode == "raise" else far},
            index_mode=mode, requires_grad=(needs, needs),
        )  # fmt: skip
        operands, indices = ENGINE.operands(problem), ENGINE.indices(problem)
        plan = ENGINE.plan(problem, operands, indices)
        assert [step.choice.lowering for step in plan.programs.forward.steps][:1] == ["whole pool, then take"]
        judge(ENGINE, values_and_gradients, [problem])
        for value in (50, -51, 2**40) if mode == "raise" else ():
            indices["i"][2, 57, 3] = value
            with pytest.raises(planner.IndexRangeError, match=rf"'i'\[2, 57, 3\] is {value},"):
                plan(*operands, **indices)


# -- the kernels run -----------------------------------------------------------------------------


def test_gradients_read_no_tensor_of_a_transform_that_has_ended(monkeypatch):
    """What `vjp` saved is wrapped; kernels that take addresses must not see the wrappers."""
    seen = []

    def backward(self, gradient, operands, index, kept):
        seen.extend([gradient, *operands, *kept])
        return inner(self, gradient, operands, index, kept)

    inner = Executable.backward
    monkeypatch.setattr(Executable, "backward", backward)
    q = torch.tensor([1, 0, 1])
    a, c = torch.ones(3, 2, 4), torch.ones(2, 4, 5)
    result, pull = torch.func.vjp(
        lambda a, c: planner.contract("nij, q[n]jk -> nik", a, c, q=q, memory_limit="1 GB"), a, c
    )
    with torch.no_grad():
        found = pull(torch.ones_like(result))
    assert [x.shape for x in found] == [a.shape, c.shape]
    assert len(seen) >= 3
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in seen)


@pytest.mark.parametrize(
    ("spec", "shapes", "sizes"),
    [
        ("ij,i->ji", [(3, 2), (3,)], None),
        ("nij, q[n]jk -> nik", [(4000, 1, 16), (50, 16, 16)], None),
        ("ijk,ikl->jl", [(8, 256, 64), (8, 64, 32)], None),
        ("nj->q[n]j", [(4000, 3)], (50, 3)),
    ],
)
def test_gradients_that_autograd_batches_are_those_one_by_one(spec, shapes, sizes):
    indices = {"q": np.random.default_rng(0).integers(0, 50, 4000)} if "q" in spec else {}
    problem = Problem(spec, tuple(shapes), sizes, indices)
    operands = ENGINE.operands(problem)
    result = planner.contract(spec, *operands, sizes=sizes, **ENGINE.indices(problem))
    several = torch.randint(-3, 4, (3, *result.shape)).float()
    together = torch.autograd.grad(result, operands, several, is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(result, operands, one, retain_graph=True) for one in several]
    for batch, *each in zip(together, *apart, strict=True):
        assert torch.equal(batch, torch.stack(each))


@pytest.mark.parametrize(
    ("spec", "shapes"), [("ij, jk -> ik", [(3, 4), (4, 5)]), ("bij, bjk -> bik", [(2, 3, 4), (2, 4, 5)])]
)
def test_lone_products_are_differentiated_by_torch(spec, shapes):
    a, b = (torch.ones(shape, requires_grad=True) for shape in shapes)
    assert "mm" in planner.contract(spec, a, b).grad_fn.name().lower()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_small_products_run_as_torchs_own_under_grad(transform):
    """Where autograd would keep copies: a Function takes ten times as long there. A limit asks for the plan itself."""
    a, b = (torch.randint(-3, 4, (2, 8, 4, 16)).float().transpose(1, 2) for _ in range(2))
    ran = []
    for options in ({}, {"retain_limit": 0}):
        with mock.patch.object(runner, "record", wraps=runner.record) as record:
            call = partial(planner.contract, "bhid, bhjd -> bhij", **options)
            found = transform(lambda a, call=call: call(a, b).square().sum())(a)
        assert torch.equal(found, torch.func.grad(lambda a: (a @ b.mT).square().sum())(a))
        ran.append(record.called)
    assert ran == [False, True]


# The spec, the shapes, the size of the dimension that is indexed, options.
INDEXED = {
    "take": ("q[n]j -> nj", [(5, 3)], 5, {}),
    "segment sum": ("nj -> q[n]j", [(7, 3)], 5, {"sizes": {"q": 5}}),
    "take, then multiply": ("n, q[n] -> n", [(7,), (5,)], 5, {}),
    "take, then product": ("nj, q[n]jk -> nk", [(7, 4), (64, 4, 5)], 64, {}),
    "take between products": ("nj, ja, q[n]a -> na", [(7, 3), (3, 5), (5, 5)], 5, {}),
    "segment sum, then multiply": ("nj, q[n]j -> q[n]j", [(7, 3), (5, 3)], 5, {}),
}
# What is done to the index array, by the size; and whether torch differentiates the steps itself then.
CHANGES = {
    "as it is": (lambda rows, size: rows, True),
    "prepared": (planner.group, True),
    "negative": (lambda rows, size: rows - size, False),
    "another dtype": (lambda rows, size: rows.int(), False),
    "with gaps": (lambda rows, size: rows.repeat_interleave(2)[::2], False),
}


def of_function(node):
    """Whether an `autograd.Function` of ours is among a node and those that follow it."""
    return node is not None and ("Contract" in node.name() or any(of_function(n) for n, _ in node.next_functions))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", INDEXED)
def test_small_gathers_are_differentiated_by_torch(name, change):
    """If they may save the index array as it is, and save nothing that is computed but what the plan keeps."""
    (spec, shapes, size, options), (changed, is_native) = INDEXED[name], CHANGES[change]
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randint(-3, 4, shape, generator=generator).float().requires_grad_() for shape in shapes]
    rows = torch.tensor([1, 3, 0, 1, 4, 3, 1])
    q = changed(rows, size)
    result = planner.contract(spec, *operands, q=q, **options)
    assert of_function(result.grad_fn) != is_native
    call = partial(planner.contract, spec, *operands, q=q, **options)
    tensors = [*operands, *(q.buffers() if change == "prepared" else [q])]
    assert saved_tensor_bytes(call, tensors) == planner.plan(spec, *operands, q=q, **options).cost.retained_bytes
    limited = planner.contract(spec, *operands, q=rows, memory_limit="1 GB", **options)
    assert torch.equal(result, limited)
    cotangent = torch.randint(-3, 4, result.shape, generator=generator).float()
    for got, wanted in zip(*(torch.autograd.grad(x, operands, cotangent) for x in (result, limited)), strict=True):
        assert torch.equal(got, wanted)


def assert_keeps_what_the_plan_keeps(spec, operands, indices, **options):
    """By torch's hooks. A counter of FLOPs counts the plan's product steps."""
    call = partial(planner.contract, spec, *operands, **indices, **options)
    plan = planner.plan(spec, *operands, **indices, **options)
    assert saved_tensor_bytes(call, [*operands, *indices.values()]) == plan.cost.retained_bytes
    with FlopCounterMode(display=False) as counter:
        result = call()
    assert counter.get_total_flops() == product_flops(plan, plan.programs.forward)
    with FlopCounterMode(display=False) as counter:
        if result.requires_grad:
            result.backward(torch.ones_like(result))
    assert counter.get_total_flops() == product_flops(plan, plan.programs.backward)


@settings(max_examples=examples(30, 2_000))
@given(problems(strided=None))
def test_gathers_of_good_indices_keep_what_the_plan_keeps(problem):
    """Of index arrays that torch can save as they are, so that some plans run as native calls."""
    operands, sizes = ENGINE.operands(problem), {}
    for gather in ENGINE.plan(problem, operands, ENGINE.indices(problem)).resolved.spec.gathers:
        sizes[gather.array] = min(gather.size, sizes.get(gather.array, gather.size))
    if all(sizes.values()):
        indices = {name: torch.as_tensor(q).long() % sizes[name] for name, q in problem.indices.items()}
        assert_keeps_what_the_plan_keeps(problem.spec, operands, indices, sizes=problem.sizes)


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [("nij -> q[n]j", [(7, 2, 3)]), ("jn -> q[n]j", [(3, 7)]), ("nj, q[n]j -> r[n]j", [(7, 3), (5, 3)])],
)
def test_no_segment_sum_keeps_what_it_adds_up(spec, shapes):
    """Torch's `index_add` saves it, here the sums over i, or the products."""
    operands, rows = [torch.ones(shape, requires_grad=True) for shape in shapes], torch.tensor([1, 3, 0, 1, 4, 3, 1])
    indices = {name: rows for name in "qr" if name in spec}
    assert_keeps_what_the_plan_keeps(spec, operands, indices, sizes={"r" if "r" in spec else "q": 5})


@pytest.mark.parametrize("needs", [False, True])
def test_a_small_gather_masks_what_no_index_names(needs):
    """A product with the whole pool would carry NaN of row 2 into gradients."""
    x, pool, rows = torch.ones(600, 16), torch.ones(4, 16, 16), torch.tensor([0, 1, 3]).repeat(200)
    pool[2] = torch.nan
    x, pool = x.requires_grad_(needs), pool.requires_grad_(needs)
    plan = planner.plan("nj, q[n]jk -> nk", x, pool, q=rows)
    assert plan.programs.forward.steps[0].choice.lowering == "matmul"
    result = planner.contract("nj, q[n]jk -> nk", x, pool, q=rows)
    assert torch.equal(result, torch.full((600, 16), 16.0))
    if needs:
        of_x, of_pool = torch.autograd.grad(result, (x, pool), torch.ones(600, 16))
        assert torch.equal(of_x, torch.full((600, 16), 16.0))
        assert torch.equal(of_pool, torch.tensor([200.0, 200, 0, 200])[:, None, None].expand(4, 16, 16))


@pytest.mark.parametrize("needs", [False, True])
def test_products_before_a_take_mask_unread_rows_for_gradients_only(needs):
    """Until rows of the pool are taken, each product keeps its rows apart: NaN of row 2 is in no row that is read."""
    x, pool, rows = torch.ones(1024, 16), torch.ones(8, 8), torch.tensor([0, 1, 3, 7]).repeat(256)
    pool[2] = torch.nan
    operands = [x, pool.requires_grad_(needs), torch.ones(16, 8, 16), torch.ones(256, 16)]
    spec = "ni, r[n]j, ijk, ek -> ne"
    plan = planner.plan(spec, *operands, r=rows)
    steps = [step.choice.lowering for step in plan.programs.forward.steps]
    assert steps.index("take") > steps.index("matmul") + 1
    assert ("mask" in steps) == needs
    result = planner.contract(spec, *operands, r=rows)
    assert torch.equal(result, torch.full((1024, 256), 16.0 * 16 * 8))


@pytest.mark.parametrize("spec", ["r[n]j, jk -> nk", "r[n]j, ji, ik -> nk"])
@pytest.mark.parametrize("way", ["backward", "func.grad"])
def test_a_plan_without_gradients_gives_right_ones_or_refuses(spec, way):
    """Products multiply the whole pool: a gradient that torch makes of them would read NaN of row 2."""
    pool, rows = torch.ones(8, 8), torch.tensor([0, 1, 3, 7]).repeat(25_000)
    others = [torch.ones(8, 16), torch.ones(16, 32)][: spec.count(",")]
    plan = planner.plan(spec, pool, *others, r=rows, minimize="flops")
    assert plan.steps[-1].choice.lowering == "take"

    def gradient():
        if way == "func.grad":
            return torch.func.grad(lambda w: plan(pool, w, *others[1:], r=rows).sum())(others[0])
        leaf = others[0].clone().requires_grad_()
        plan(pool, leaf, *others[1:], r=rows).sum().backward()
        return leaf.grad

    assert torch.equal(gradient(), torch.full((8, 16), 100_000.0 * (32 if len(others) == 2 else 1)))
    pool[2] = torch.nan
    assert plan(pool, *others, r=rows).isfinite().all()
    with pytest.raises(planner.PlannerError, match="without the gradient"):
        gradient()


@pytest.mark.parametrize("bad", [-6, 5])
def test_a_small_gather_refuses_what_is_out_of_range(bad):
    rows = torch.tensor([0, bad, 1])
    with pytest.raises(planner.IndexRangeError, match=f"q.*{bad}"):
        planner.contract("nj, q[n]j -> n", torch.ones(3, 3), torch.ones(5, 3, requires_grad=True), q=rows)


ROWS = torch.tensor([1, 3, 0, 1, 4, 3, 1])


def small_gather(name):
    """A function of operands and `q=`, and operands."""
    spec, shapes, _, options = INDEXED[name]
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randint(-3, 4, shape, generator=generator).float().requires_grad_() for shape in shapes]
    return partial(planner.contract, spec, **options), operands


@pytest.mark.parametrize("index_mode", ["raise", "drop", "clip", "nan"])
@pytest.mark.parametrize("name", INDEXED)
def test_an_index_array_that_changes_in_place_is_looked_at_again(name, index_mode):
    """By warm calls and plans too."""
    call, operands = small_gather(name)
    call, size = partial(call, index_mode=index_mode), INDEXED[name][2]
    q = ROWS.clone()
    plan = planner.plan(*call.args, *operands, q=q, **call.keywords)
    for run in (call, call, plan):
        for value in (2, -1, size, -size - 1, 10**12, 0):
            q[2] = value
            if index_mode == "raise" and not -size <= value < size:
                with pytest.raises(planner.IndexRangeError, match=f"q.*{value}"):
                    run(*operands, q=q)
                continue
            expected = call(*operands, q=q, memory_limit="1 GB")
            for got, wanted in zip(*(values_of(x, operands) for x in (run(*operands, q=q), expected)), strict=True):
                assert torch.equal(got.nan_to_num(77), wanted.nan_to_num(77))


def values_of(result, operands):
    return [result.detach(), *torch.autograd.grad(result, operands, torch.ones_like(result))]


# The operands that gradients read. Of what is taken they read the taken rows, or nothing.
READ = {
    "take": [],
    "segment sum": [],
    "take, then multiply": [0],
    "take, then product": [0],
    "take between products": [0, 1],
    "segment sum, then multiply": [1],
}


@pytest.mark.parametrize("prepare", [False, True])
@pytest.mark.parametrize("name", INDEXED)
def test_what_changes_before_the_backward_pass_changes_no_gradient_unseen(name, prepare):
    """If a gradient reads it, torch raises its error. A prepared index array is a copy."""
    call, operands = small_gather(name)
    expected = values_of(call(*operands, q=ROWS), operands)
    refused = []
    for number in range(len(operands) + 1):
        call, operands = small_gather(name)
        q = ROWS.clone()
        result = call(*operands, q=planner.group(q, INDEXED[name][2]) if prepare else q)
        with torch.no_grad():
            [*operands, q][number].mul_(0)
        try:
            assert all(map(torch.equal, values_of(result, operands), expected))
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017 -- it may succeed
            refused.append(number)
    assert refused == (READ[name] if prepare else [*READ[name], len(operands)])


@pytest.mark.parametrize("name", INDEXED)
def test_a_small_gather_keeps_nothing_alive(name):
    """Reference counts alone free operands, index array and result, after a backward pass or without one."""
    for goes_back in (False, True):
        call, operands = small_gather(name)
        q = ROWS.clone()
        result = call(*operands, q=q)
        if goes_back:
            result.sum().backward()
        references = [weakref.ref(x) for x in (*operands, q, result)]
        del operands, q, result
        assert not any(reference() is not None for reference in references)
