"""torch against the oracle: values, gradients, transforms and kernels, on integers that make every sum exact."""

import dataclasses
import itertools

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from laws import (
    assert_equal,
    exact_problems,
)

import planner
from planner.cost.device import H200
from planner.inspect.memory import torch_counts
from planner.language.dtypes import ITEMSIZES
from planner.program.ops import Einsum, JointGradient
from planner.testing.reference import reference_gradients
from planner.workloads import WORKLOADS

torch = pytest.importorskip("torch", reason="torch is not installed")

from planner.backends.torch.executable import Executable  # noqa: E402
from planner.backends.torch.ops import promote  # noqa: E402


def to_torch(array, dtype=None):
    """A tensor over the same memory and strides; bfloat16, which numpy lacks, in a copy laid out alike."""
    tensor = torch.from_numpy(np.asarray(array))
    if dtype is None or tensor.dtype == getattr(torch, dtype):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=getattr(torch, dtype)).copy_(tensor)


def tensors(problem, strided=False):
    arrays = problem.strided_operands() if strided else problem.operands()
    return [to_torch(x, dtype) for x, dtype in zip(arrays, problem.dtypes, strict=True)]


def arguments(problem):
    return {**problem.arguments(), **{name: to_torch(q) for name, q in problem.indices.items()}}


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def described(x):
    x = x.detach().resolve_conj()
    name = name_of(x.dtype)
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy(), name


def test_promotion_is_that_of_torch():
    """All pairs of dtypes: planning does not ask torch, so that nothing sees it ask."""
    for first, second in itertools.product(ITEMSIZES, repeat=2):
        try:
            expected = name_of(torch.promote_types(getattr(torch, first), getattr(torch, second)))
        except RuntimeError:
            expected = None
        assert promote(first, second) == expected, (first, second)


def test_a_gradient_that_repeats_costs_little():
    """Of a sum's gradient no grouped product is made: rows are summed and taken."""
    workload = WORKLOADS["seed-gathered-matmul"].resized(n=512, q=16)
    operands, indices = workload.operands("torch", requires_grad=True), workload.indices("torch")
    result = planner.contract(workload.spec, *operands, **indices)
    seen = {}
    for name, gout in (("ones", torch.ones(result.shape)), ("sum", torch.ones(()).expand(result.shape))):
        counted = torch_counts(lambda g=gout: torch.autograd.grad(result, operands, g, retain_graph=True))
        seen[name] = counted.flops, torch.autograd.grad(result, operands, gout, retain_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(seen["ones"][1], seen["sum"][1], strict=True))
    assert seen["ones"][0] > 0
    assert seen["sum"][0] is None, "no matrices are multiplied"


def test_a_half_gradient_that_repeats_is_not_summed_first():
    """The sum of the other operand's rows is beyond float16."""
    a, b = (torch.full(shape, 100.0, dtype=torch.float16, requires_grad=True) for shape in ((4, 4), (4, 2048)))
    out = planner.contract("ij, jk -> ik", a, b, memory_limit=10**8)
    (got,) = torch.autograd.grad(out, a, torch.tensor(2.0**-12, dtype=torch.float16).expand(out.shape))
    assert (got == 50).all()


def test_every_lowering_agrees():
    """Each row of the table that supports a step gives what the others give, for gradient steps and pairs too.

    Rows for a card are interpreted here, on the CPU's tensors.
    """
    from planner.backends.torch.backend import backend
    from planner.backends.torch.executable import Executable

    # Variants and what takes bfloat16 alone are run by tests/kernels.
    apart = {name for name, row in backend.table.rows.items() if row.variant_of or name.endswith("grouped_mm")}
    ran = {row: 0 for row in backend.table.rows if row not in {"cast", *apart}}

    def agree(text, operands, options, seed):
        plan = planner.plan(text, *operands, **options)
        bound, spec = Executable(plan, backend.table), plan.resolved.spec
        indices = {name: q for name, q in options.items() if isinstance(q, torch.Tensor)}
        random = np.random.default_rng(seed)

        def run(lowering, op, inputs):
            ran[lowering] += 1
            return backend.table.run(lowering, op, inputs, bound.prepare(indices))

        singles = [Einsum(planner.transpose(spec, child), "float32") for child in range(len(spec.inputs))]
        for op in (
            Einsum(spec, "float32"),
            *singles,
            *[Einsum(spec, "float32").joint_gradient()] * (len(singles) == 2),
        ):
            inputs = [to_torch(random.integers(-2, 3, shape).astype(np.float32)) for shape in op.input_shapes]
            choices = [c for device in (plan.device, H200) for c in backend.table.choices(op, device)]
            outcomes = [run(lowering, op, inputs) for lowering in dict.fromkeys(c.lowering for c in choices)]
            if isinstance(op, JointGradient) and outcomes:
                gout, a, b = inputs
                apart = [
                    run(backend.table.choices(one, plan.device)[0].lowering, one, pair)[0]
                    for one, pair in zip(singles, ((gout, b), (a, gout)), strict=True)
                ]
                outcomes.append(tuple(apart))
            for results in outcomes[1:]:
                assert all(torch.equal(x, y) for x, y in zip(results, outcomes[0], strict=True)), str(op)

    @settings(max_examples=examples(300, 3_000))
    @given(exact_problems(max_operands=2, without=("scalar", "size one")))
    def law(problem):
        agree(problem.spec, tensors(problem), arguments(problem), problem.seed)

    law()
    agree("ab -> aba", [torch.zeros(3, 2)], {}, 0)
    indices = torch.tensor([[3, 0], [1, 1], [5, 0]])
    agree("abcd -> dq[ca]b", [torch.zeros(2, 3, 3, 2)], {"q": indices, "sizes": {"q": 5}, "index_mode": "drop"}, 0)
    for workload in WORKLOADS.values():
        tiny = workload.tiny()
        if len(tiny.shapes) <= 2:
            agree(tiny.spec, tiny.operands("torch"), {**tiny.options, **tiny.indices("torch")}, 0)
    assert all(ran.values()), f"never ran: {[name for name, count in ran.items() if not count]}"


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
    query, pool = (torch.randint(-2, 3, (1, n, 32)).to(dtype) for n in (200, 100))
    i = torch.randint(0, 98, (1, 200, 60))
    i[0, 5, 7] = 99
    pool[0, 98:], query[0, 9] = torch.nan, torch.inf  # row 98 is not asked for, row 99 by query 5
    query.requires_grad_(), pool.requires_grad_()
    got = planner.contract(spec, query, pool, i=i)
    to_query, to_pool = torch.autograd.grad(got, (query, pool), torch.ones_like(got))
    asked = torch.zeros(100, dtype=torch.bool)
    asked[i[0, 9]] = True
    assert to_query[0].isfinite().all(1).logical_not().nonzero().tolist() == [[5]]
    assert torch.equal(to_pool[0].isfinite().all(1), ~asked)


@pytest.mark.parametrize("size", [4, 500])
def test_kernels_stay_on_the_cpu_whatever_the_default_device(size):
    a, c = torch.ones(size, 1, 8, requires_grad=True), torch.ones(4, 8, 8, requires_grad=True)
    query, pool = torch.ones(3, size, 8, requires_grad=True), torch.ones(3, 40, 8, requires_grad=True)
    q, i = torch.arange(size) % 4, torch.arange(3 * size * 20).view(3, size, 20) % 40
    with torch.device("meta"):
        grouped = planner.contract("nij, q[n]jk -> nik", a, c, q=q)
        pooled = planner.contract("bqd, b i[bqk] d -> bqk", query, pool, i=i)
        gradients = torch.autograd.grad((grouped.sum(), pooled.sum()), (a, c, query, pool))
    assert (grouped == 8).all()
    assert (pooled == 8).all()
    assert [x.sum() for x in gradients] == [64 * size, 64 * size, 480 * size, 480 * size]


@pytest.mark.parametrize("needs", [False, True])
def test_scores_of_a_whole_pool_check_each_index(needs):
    spec, pool = "bqd, b i[bqk] d -> bqk", 50
    query = torch.randint(-3, 4, (3, 60, 32)).float().requires_grad_(needs)
    keys = torch.randint(-3, 4, (3, pool, 32)).float().requires_grad_(needs)
    i = torch.randint(-pool, pool, (3, 60, 40))
    plan = planner.plan(spec, query, keys, i=i)
    lowered = {step.choice.lowering for step in plan.programs.forward.steps}
    assert lowered == {"whole pool, then take"}
    expected = torch.einsum("bqd,bqkd->bqk", query, keys[torch.arange(3)[:, None, None], i])
    got = plan(query, keys, i=i)
    assert torch.equal(got, expected)
    if needs:
        for x, y in zip(*(torch.autograd.grad(z.sum(), (query, keys)) for z in (got, expected)), strict=True):
            assert torch.equal(x, y)
    for value in (pool, -pool - 1, 2**40):
        i[2, 57, 3] = value
        with pytest.raises(planner.IndexRangeError, match=rf"'i'\[2, 57, 3\] is {value},"):
            plan(query, keys, i=i)
        clipped = planner.contract(spec, query, keys, i=i, index_mode="clip")
        assert torch.equal(clipped, planner.contract(spec, query, keys, i=i.clamp(0, pool - 1)))
        dropped = planner.contract(spec, query, keys, i=i, index_mode="drop")
        assert torch.equal(dropped, torch.where((i >= 0) & (i < pool), clipped, 0))


# -- autocast, in-place, tensors without data or strides, and what surrounds a call ----------------

# Specs, operand shapes and options that between them take each way through the backend.
CALLS = {
    "matmul": ("ij, jk -> ik", [(3, 4), (4, 5)], {}),
    "batched, permuted": ("bij, bjk -> bki", [(2, 3, 4), (2, 4, 5)], {}),
    "chain": ("ij, jk, kl -> il", [(3, 4), (4, 5), (5, 6)], {}),
    "kept inputs": ("ij, jk, kl -> il", [(3, 4), (4, 5), (5, 6)], {"minimize": "retained"}),
    "outer": ("i, j -> ij", [(3,), (4,)], {}),
    "diagonal put": ("i -> ii", [(3,)], {}),
    "take": ("q[n]c -> nc", [(3, 2)], {"q": torch.tensor([2, 0, 0, -1])}),
    "gather": ("nij, q[n]jk -> kni", [(4, 2, 3), (3, 3, 2)], {"q": torch.tensor([2, 0, 0, 1])}),
    "scatter": ("nc -> cq[n]", [(4, 3)], {"q": torch.tensor([2, 0, 0, 1]), "sizes": {"q": 5}}),
    "drop": ("nc, q[n]c -> n", [(4, 3), (3, 3)], {"q": torch.tensor([2, 0, 9, 1]), "index_mode": "drop"}),
}  # fmt: skip
each_call = pytest.mark.parametrize(("spec", "shapes", "options"), CALLS.values(), ids=CALLS)


def integers(*shapes, bound=300):
    """Operands of integers that bfloat16 does not hold; float32 holds their products and sums."""
    random = np.random.default_rng(5)
    return [torch.from_numpy(random.integers(-bound, bound, s).astype(np.float32)).requires_grad_() for s in shapes]


def gradients_of(got, operands, **options):
    return torch.autograd.grad((got * torch.arange(got.numel()).reshape(got.shape)).sum(), operands, **options)


def assert_same(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(x, y)


@each_call
def test_autocast_changes_no_dtype(spec, shapes, options):
    # Three factors below 40 leave room in float32; 257 and its like are not in bfloat16.
    operands = integers(*shapes, bound=300 if len(shapes) < 3 else 40)
    expected = planner.contract(spec, *operands, **options)
    plan = planner.plan(spec, *operands, **options)
    indices = {n: q for n, q in options.items() if isinstance(q, torch.Tensor)}
    wanted = gradients_of(expected, operands, create_graph=True)
    seconds = torch.autograd.grad(sum(g.sum() for g in wanted), operands, allow_unused=True, materialize_grads=True)
    for call in (lambda: planner.contract(spec, *operands, **options), lambda: plan(*operands, **indices)):
        for inside in (True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = call()
                if inside:
                    found = gradients_of(got, operands, create_graph=True)
                    again = torch.autograd.grad(
                        sum(g.sum() for g in found), operands, allow_unused=True, materialize_grads=True
                    )
            if not inside:
                found, again = gradients_of(got, operands), seconds
            assert_same((got, *found, *again), (expected, *wanted, *seconds))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert_same([planner.contract(spec, *operands, **options)], [expected])


@pytest.mark.parametrize("name", ["matmul", "gather"])
def test_autocast_around_a_network(name):
    spec, shapes, options = CALLS[name]
    operands = integers(*shapes, bound=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = planner.contract(spec, *operands, **options)
        (got.reshape(-1, 1) @ torch.ones(1, 2)).sum().backward()
        half = planner.contract(spec, *operands, dtype=torch.bfloat16, **options)
        half.sum().backward()
    assert half.dtype == torch.bfloat16
    assert [x.grad.dtype for x in operands] == [torch.float32] * len(operands)
    (expected,) = torch.autograd.grad(planner.contract(spec, *operands, **options).sum(), operands[:1])
    assert torch.equal(operands[0].grad, 3 * expected)


def test_a_call_made_outside_of_autocast_may_go_backward_inside():
    spec, shapes, options = CALLS["gather"]
    operands = integers(*shapes)
    expected = gradients_of(planner.contract(spec, *operands, **options), operands)
    got = planner.contract(spec, *operands, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients_of(got, operands)
    assert_same(found, expected)


@each_call
def test_results_take_in_place_operations(spec, shapes, options):
    operands = [x.double().detach().requires_grad_() for x in integers(*shapes, bound=4)]

    def in_place(*operands):
        out = planner.contract(spec, *operands, **options)
        out += 2
        return out.mul_(3).square()

    def out_of_place(*operands):
        return ((planner.contract(spec, *operands, **options) + 2) * 3).square()

    assert_same([in_place(*operands)], [out_of_place(*operands)])
    firsts = [gradients_of(f(*operands), operands, create_graph=True) for f in (in_place, out_of_place)]
    assert_same(*firsts)
    assert_same(*(torch.autograd.grad(sum(g.square().sum() for g in first), operands) for first in firsts))
    assert torch.autograd.gradgradcheck(in_place, operands)
    tangents = [torch.ones_like(x) for x in operands]
    assert_same(*(torch.func.jvp(f, tuple(operands), tuple(tangents)) for f in (in_place, out_of_place)))
    chosen = tuple(range(len(operands)))
    assert_same(*(torch.func.grad(lambda *xs, f=f: f(*xs).sum(), chosen)(*operands) for f in (in_place, out_of_place)))
    stacked = [torch.stack([x, x + 1]).detach() for x in operands]
    assert_same(*([torch.func.vmap(f)(*stacked)] for f in (in_place, out_of_place)))


@pytest.mark.parametrize("name", ["gather", "take", "drop"])
def test_gradients_take_in_place_operations(name):
    spec, shapes, options = CALLS[name]
    operands = [x.double().detach().requires_grad_() for x in integers(*shapes, bound=4)]

    def seconds(step):
        got = planner.contract(spec, *operands, **options)
        firsts = [step(g) for g in torch.autograd.grad(got.square().sum(), operands, create_graph=True)]
        return torch.autograd.grad(sum(g.square().sum() for g in firsts), operands)

    assert_same(seconds(lambda g: g.mul_(2)), seconds(lambda g: g * 2))


@pytest.mark.parametrize("name", ["matmul", "chain", "kept inputs", "outer", "gather", "drop"])
def test_an_operand_that_changed_before_the_backward_is_an_error(name):
    spec, shapes, options = CALLS[name]
    operands = integers(*shapes)
    got = planner.contract(spec, *operands, **options)
    with torch.no_grad():
        operands[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        got.sum().backward()


@each_call
def test_meta_tensors_have_shapes_and_dtypes(spec, shapes, options):
    operands = integers(*shapes)
    expected = planner.contract(spec, *operands, **options)
    metas = [x.detach().to("meta").requires_grad_() for x in operands]
    indices = {n: q.to("meta") for n, q in options.items() if isinstance(q, torch.Tensor)}
    got = planner.contract(spec, *metas, **{**options, **indices})
    assert (got.device.type, got.shape, got.dtype) == ("meta", expected.shape, expected.dtype)
    got.sum().backward()
    assert [x.grad.shape for x in metas] == [x.shape for x in operands]
    with torch.no_grad():
        assert planner.contract(spec, *metas, **{**options, **indices}).shape == expected.shape
    if indices:
        with pytest.raises(planner.PlannerError, match="'q' is on cpu, but operand 0 on meta"):
            planner.contract(spec, *metas, **options)
        with pytest.raises(planner.PlannerError, match="meta.*no values"):
            planner.group(indices["q"], 3)


@each_call
def test_fake_tensors_have_shapes_and_dtypes(spec, shapes, options):
    from torch._subclasses.fake_tensor import FakeTensorMode

    expected = planner.contract(spec, *integers(*shapes), **options)
    with FakeTensorMode() as mode:
        arrays = {n: mode.from_tensor(q) if isinstance(q, torch.Tensor) else q for n, q in options.items()}
        got = planner.contract(spec, *(torch.empty(shape, requires_grad=True) for shape in shapes), **arrays)
        assert (got.device.type, got.shape, got.dtype) == ("cpu", expected.shape, expected.dtype)


def laid_out(kind):
    """A 3 by 4 tensor that is not strided, and what the error advises."""
    x = torch.ones(3, 4)
    if kind == "quantized":
        return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), r"\.dequantize\(\)"
    if kind in ("nested", "jagged"):
        layout = torch.jagged if kind == "jagged" else torch.strided
        return torch.nested.nested_tensor([x, x[:2]], layout=layout), "to_padded_tensor"
    return {"coo": x.to_sparse, "csr": x.to_sparse_csr, "csc": x.to_sparse_csc}[kind](), r"\.to_dense\(\)"


@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "quantized", "nested", "jagged"])
@pytest.mark.filterwarnings("ignore")  # torch warns that these are prototypes, or that they will go
def test_layouts_that_are_not_strided_are_refused(kind):
    x, advice = laid_out(kind)
    dense = torch.ones(4, 3)
    for _ in range(2):  # a dense call of the same shapes must not lend its plan
        for number, operands in ((0, (x, dense)), (1, (dense, x))):
            with pytest.raises(planner.PlannerError, match=f"operand {number}.*{advice}") as caught:
                planner.contract("ij, jk -> ik", *operands)
            assert caught.value.__suppress_context__ or caught.value.__context__ is None
            with pytest.raises(planner.PlannerError, match=f"operand {number}.*{advice}"):
                planner.plan("ij, jk -> ik", *operands)
        planner.contract("ij, jk -> ik", torch.ones(3, 4), dense)
        planner.contract("ij, jk -> ik", dense, torch.ones(3, 4))


def test_index_arrays_that_are_not_strided_are_refused():
    q = torch.tensor([0, 2])
    for _ in range(2):
        with pytest.raises(planner.PlannerError, match=r"index array 'q'.*to_dense\(\)"):
            planner.contract("q[n]c -> nc", torch.ones(3, 4), q=q.to_sparse())
        planner.contract("q[n]c -> nc", torch.ones(3, 4), q=q)
    with pytest.raises(planner.PlannerError, match=r"index array 'q'.*to_dense\(\)"):
        planner.group(q.to_sparse(), 3)


class Labelled(torch.Tensor):
    """A subclass of the plainest kind."""


@each_call
@pytest.mark.parametrize("kind", ["parameter", "subclass"])
def test_subclasses(spec, shapes, options, kind):
    operands = integers(*shapes)
    expected = planner.contract(spec, *operands, **options)
    wrap = torch.nn.Parameter if kind == "parameter" else lambda x: x.as_subclass(Labelled)
    wrapped = [wrap(x.detach()).requires_grad_() for x in operands]
    for some in (wrapped, [*operands[:-1], wrapped[-1]], [wrapped[0], *operands[1:]]):
        got = planner.contract(spec, *some, **options)
        assert (got.as_subclass(torch.Tensor) == expected).all()
        found = gradients_of(got, some)
        assert_same([g.as_subclass(torch.Tensor) for g in found], gradients_of(expected, operands, retain_graph=True))


@each_call
def test_inference_mode_and_no_grad(spec, shapes, options):
    operands = integers(*shapes)
    expected = planner.contract(spec, *operands, **options).detach()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for some in (operands, [x.clone() for x in operands]):
                got = planner.contract(spec, *some, **options)
                assert not got.requires_grad
                assert_same([got], [expected])
    with torch.inference_mode():
        inferred = [x.clone() for x in operands]
        arrays = {n: q.clone() if isinstance(q, torch.Tensor) else q for n, q in options.items()}
    assert_same([planner.contract(spec, *inferred, **arrays)], [expected])
    with torch.inference_mode(), torch.inference_mode(False):
        got = planner.contract(spec, *operands, **options)
        assert_same(gradients_of(got, operands), gradients_of(planner.contract(spec, *operands, **options), operands))


@each_call
def test_checkpoint_and_saved_tensor_hooks(spec, shapes, options):
    operands = integers(*shapes)

    def call(*operands):
        return planner.contract(spec, *operands, **options).square()

    expected = call(*operands)
    wanted = gradients_of(expected, operands)
    for _ in range(2):
        got = torch.utils.checkpoint.checkpoint(call, *operands, use_reentrant=False)
        assert_same((got, *gradients_of(got, operands)), (expected, *wanted))
        with torch.autograd.graph.save_on_cpu():
            got = call(*operands)
        assert_same((got, *gradients_of(got, operands)), (expected, *wanted))


# -- the kernels run -----------------------------------------------------------------------------


def test_the_grouped_kernels_run(monkeypatch):
    from planner.backends.torch.backend import backend
    from planner.inspect.memory import torch_memory

    calls = []
    for name in ("grouped matmul", "both grouped gradients"):
        row = backend.table.rows[name]

        def counted(*args, row=row):
            calls.append(row.name)
            return row.run(*args)

        monkeypatch.setitem(backend.table.rows, name, dataclasses.replace(row, run=counted))
    workload = WORKLOADS["seed-gathered-matmul"].resized(n=4096, q=64)
    a, c = workload.operands("torch", requires_grad=True)
    q = workload.indices("torch")["q"]
    plan = planner.plan(workload.spec, a, c, q=q)
    assert [step.choice.lowering for step in plan.steps] == ["grouped matmul", "both grouped gradients"]
    gout = workload.cotangent("torch")

    def run():
        return torch.autograd.grad(planner.contract(workload.spec, a, c, q=q), (a, c), gout)

    run()
    calls.clear()
    (ga, gc), measured = torch_memory(run)
    assert calls == ["grouped matmul", "both grouped gradients"]
    gathered = 4 * q.numel() * c.shape[1] * c.shape[2]
    assert measured.peak_bytes < gathered / 4
    arrays = {"q": q.numpy()}
    expected = reference_gradients(workload.spec, gout.numpy(), *(x.detach().numpy() for x in (a, c)), **arrays)
    assert_equal(described(ga), expected[0], "float32")
    assert_equal(described(gc), expected[1], "float32")


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
    result, pull = torch.func.vjp(lambda a, c: planner.contract("nij, q[n]jk -> nik", a, c, q=q), a, c)
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
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randint(-3, 4, shape, generator=generator).double()

    operands = [numbers(*shape).requires_grad_() for shape in shapes]
    index = {"q": torch.randint(0, 50, (4000,), generator=generator)} if "q" in spec else {}
    result = planner.contract(spec, *operands, sizes=sizes, **index)
    several = numbers(3, *result.shape)
    together = torch.autograd.grad(result, operands, several, is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(result, operands, one, retain_graph=True) for one in several]
    for batch, *each in zip(together, *apart, strict=True):
        assert torch.equal(batch, torch.stack(each))


@pytest.mark.parametrize("spec", ["ij, jk -> ik", "bij, bjk -> bik"])
def test_lone_products_are_differentiated_by_torch(spec):
    shapes = [[{"b": 2, "i": 3, "j": 4, "k": 5}[x] for x in term.strip()] for term in spec.split("->")[0].split(",")]
    a, b = (torch.ones(shape, requires_grad=True) for shape in shapes)
    assert "mm" in planner.contract(spec, a, b).grad_fn.name().lower()
