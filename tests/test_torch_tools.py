"""Tools of torch that look at programs, or keep what they save: counters, profilers, checkpoints, hooks."""

import contextlib
import itertools
from functools import partial

import pytest
from conftest import examples, run_python
from engines import Torch, saved_tensor_bytes
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from laws import OBJECTIVES, exact_problems
from test_torch_contexts import (
    CALLS,
    TURNED,
    assert_same,
    checkpointed,
    cold_call,
    gradients,
    like,
    planned,
    second_derivatives,
    with_indices,
)

import planner
from planner.testing import problems

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode, flop_registry  # noqa: E402

import planner.backends.torch_operators  # noqa: E402
from planner.backends.torch.contexts.flops import product_flops  # noqa: E402

each_call = pytest.mark.parametrize("name", CALLS)
forward = torch.ops.planner.forward.default


# -- FLOPs -----------------------------------------------------------------------------------------


def counted(function, *arguments):
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


def both(call, operands):
    """What the forward and the backward pass count; a result of integers has none."""
    found = []
    forward = counted(lambda: found.append(call(*operands)))
    return forward, counted(lambda: torch.autograd.grad(found[0], operands, torch.ones_like(found[0])))


# The FLOPs of the forward pass, by the size that makes a call new. The backward pass takes twice as many.
PRODUCTS = {
    "product": lambda n: 2 * n * 3 * 4,
    "layer": lambda n: 2 * 2 * n * 4 * 5,
    "transposed product": lambda n: 2 * 2 * 3 * n * 6 * 5,
    "product of copies": lambda n: 2 * n * 16 * 12,
    "few columns": lambda n: 2 * 2 * n * 16 * 3,
    "elements": lambda n: 0,
    "sum": lambda n: 0,
    "gather": lambda n: 0,
    "scatter": lambda n: 0,
    "grouped product": lambda n: 2 * 500 * 2 * 128 * n,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_of_a_product(name):
    for _ in "cold", "warm":
        call, operands = cold_call(name)
        number, d = next((i, d) for i, shape in enumerate(CALLS[name][1]) for d, n in enumerate(shape) if n is None)
        n = operands[number].shape[d]
        assert both(call, operands) == (PRODUCTS[name](n), 2 * PRODUCTS[name](n))


@pytest.mark.parametrize("name", [name for name in CALLS if "measured" not in name])  # the clock decides those plans
def test_flops_are_those_of_the_plan(name):
    """On tensors with values, on meta tensors and on fake ones, cold and warm."""
    call, operands = cold_call(name)
    fake = FakeTensorMode().from_tensor
    for change in (lambda x: x, lambda x: x.detach().to("meta").requires_grad_(x.requires_grad), fake):
        changed, xs = with_indices(call, change)[0], [change(x) for x in operands]
        cold, warm = both(changed, xs), both(changed, xs)
        plan = planner.plan(*call.args, *xs, **changed.keywords)
        expected = product_flops(plan, plan.programs.forward), product_flops(plan, plan.programs.backward)
        assert cold == warm == expected


@pytest.mark.parametrize("rows", [4, 64])
def test_gradients_of_sums_count_on_fake_tensors_what_they_count_on_others(rows):
    """The gradient of a sum repeats one number, and the backward pass sums before it multiplies."""

    def count(change):
        x, c = (change(torch.ones(*shape)).requires_grad_() for shape in ((300, 2, 64), (rows, 64, 48)))
        q = change(torch.zeros(300, dtype=torch.long))
        return counted(lambda: planner.contract("nij, q[n]jk -> nik", x, c, q=q).sum().backward())

    assert count(lambda x: x) == count(FakeTensorMode().from_tensor)


@settings(max_examples=examples(20, 2_000))
@given(problems(gathers=False, without=("scatter",), strided=None))
def test_flops_of_native_calls_are_those_of_the_plan(problem):
    """Torch counts its own products where a plan runs as native calls, and goes backward through them itself."""
    engine = Torch()
    operands = engine.operands(problem)
    plan = planner.plan(problem.spec, *operands, sizes=problem.sizes)
    call = partial(planner.contract, problem.spec, sizes=problem.sizes)
    expected = [product_flops(plan, plan.programs.forward), product_flops(plan, plan.programs.backward)]
    found = []
    assert counted(lambda: found.append(call(*operands))) == expected[0]
    wanted = [operands[number] for number in problem.wanted]
    if wanted:
        backward = counted(lambda: torch.autograd.grad(found[0], wanted, torch.ones_like(found[0])))
        assert backward == expected[1]


def test_a_counter_that_is_made_before_planner_is_loaded():
    """It copies the formulas that it knows when it is made. Without counters, planner does not load their module."""
    program = """
import sys, torch
a, c = torch.ones(500, 2, 128, requires_grad=True), torch.ones(4, 128, 60, requires_grad=True)

def run():
    import planner
    planner.contract("nij, q[n]jk -> nik", a, c, q=torch.zeros(500, dtype=torch.int64)).sum().backward()

if sys.argv[1:]:
    run()
    assert "torch.utils.flop_counter" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    run()
assert counter.get_total_flops() >= 2 * 500 * 2 * 128 * 60, counter.get_total_flops()
"""
    run_python(program)
    run_python(program, "warm")


def test_operators_are_registered_as_torch_wants_them():
    """All checks of `opcheck`, and the registry of FLOPs."""
    call, operands = cold_call("grouped product")
    operands, q = [x.detach() for x in operands], call.keywords["q"]
    needing = [planner.Operand(tuple(x.shape), requires_grad=True) for x in operands]
    text = planner.plan(*call.args, *needing, q=tuple(q.shape), backend="torch").to_json()
    ours = torch.ops.planner
    result, *kept = ours.forward(text, '[["q", null]]', [q], operands)
    torch.library.opcheck(forward, (text, '[["q", null]]', [q], operands))
    torch.library.opcheck(ours.backward.default, (text, '[["q", null]]', [q], result, operands, kept))
    torch.library.opcheck(ours.in_range.default, (torch.tensor([0, 3, -1]), "q", "n", 4, "raise"))
    torch.library.opcheck(ours.refuse.default, (torch.tensor(False), torch.tensor([0, 3, -1]), "q", "n", 4))
    counted(call, *operands)
    assert {ours.forward, ours.backward} <= set(flop_registry)


def test_flops_of_a_traced_call():
    call, operands = cold_call("grouped product")
    operands = [x.detach() for x in operands]
    graph = make_fx(lambda *xs: call(*xs))(*operands)
    assert counted(graph, *operands) == counted(call, *operands) > 0
    assert_same([graph(*[2 * x for x in operands])], [4 * call(*operands)])


# -- checkpoints -----------------------------------------------------------------------------------

MATRIX_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]


def always(policy):
    return lambda ctx, op, *args, **kwargs: policy


POLICIES = {
    "save all": always(CheckpointPolicy.MUST_SAVE),
    "save none": always(CheckpointPolicy.PREFER_RECOMPUTE),
    "save products": MATRIX_PRODUCTS,
    "save ours": [*MATRIX_PRODUCTS, forward],
}


def selectively(policy, call):
    return checkpointed(call, context_fn=partial(create_selective_checkpoint_contexts, policy))


def amid(call):
    """The call amid operators of torch, which read its result and make its operands."""
    return lambda *xs: call(*[x * 2 for x in xs]).abs()  # squares would be rounded


def apart(call):
    """The call on operands without gradients."""
    return lambda *xs: call(*[x.detach() for x in xs]) * xs[0].sum() + sum(x.sum() for x in xs)


@each_call
@pytest.mark.parametrize(
    ("policy", "change"),
    [("save all", amid), ("save all", apart), ("save none", lambda call: call), ("save products", amid),
     ("save ours", amid)],
)  # fmt: skip
def test_selective_checkpoints(name, policy, change):
    call, operands = cold_call(name)
    for run in (call, call, planned(call, operands)):
        got = gradients(selectively(POLICIES[policy], change(run)), operands)
        assert_same(got, gradients(change(call), operands), strides=name != TURNED)


@pytest.mark.parametrize("mode", ["raise", "clip", "drop", "nan"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_selective_checkpoints_of_bad_indices(mode, dtype):
    """Index arrays are brought into range."""
    q = torch.tensor({"raise": [0, -1, 3], "nan": [0, -1, 9]}.get(mode, [0, -9, 9]), dtype=dtype)
    a, c = torch.ones(3, 5, requires_grad=True), torch.ones(4, 5, 6, requires_grad=True)
    for run in (
        lambda a, c: planner.contract("nj, q[n]jk -> nk", a, c, q=q, index_mode=mode).nan_to_num(7),
        lambda a, c: planner.contract("nj -> q[n]j", a, sizes={"q": 4}, q=q, index_mode=mode).nan_to_num(7) + c.sum(),
    ):
        assert_same(gradients(selectively(POLICIES["save all"], run), (a, c)), gradients(run, (a, c)))


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("product", "save products"),
        ("chain", "save products"),
        ("nothing kept", "save products"),
        ("few columns, nothing kept", "save products"),
        ("message passing", "save products"),
        ("grouped product", "save ours"),
        ("scores", "save ours"),
    ],
)
def test_what_a_policy_saves_is_not_computed_again(name, policy):
    call, operands = cold_call(name)
    found = amid(call)(*operands)
    alone = counted(lambda: torch.autograd.grad(found, operands, torch.ones_like(found)))
    for saved, again in ((policy, 0), ("save none", counted(call, *operands))):
        got = selectively(POLICIES[saved], amid(call))(*operands)
        assert counted(lambda got=got: torch.autograd.grad(got, operands, torch.ones_like(got))) == alone + again


# -- profilers -------------------------------------------------------------------------------------


def around(event):
    """The names of the ranges around one, the innermost first."""
    names = []
    while (event := event.cpu_parent) is not None:
        names.append(event.name)
    return names


def ranges(function, *arguments):
    """The ranges that a profiler shows, in order, each with ours that are around it."""
    with torch.profiler.profile() as profiler:
        function(*arguments)
    events = sorted(profiler.events(), key=lambda event: (event.time_range.start, -event.time_range.end))
    return [(event.name, [name for name in around(event) if name.startswith("planner")]) for event in events]


def steps_of(program):
    return [f"planner step {step.op.spec}: {step.choice.lowering}" for step in program.steps]


def test_a_profiler_shows_the_spec_and_the_steps():
    call, operands = cold_call("grouped product")
    plan = planner.plan(*call.args, *operands, **call.keywords)
    whole = "nij, q[n]jk -> kni"
    for _ in "cold", "warm":
        found = ranges(gradients, call, operands)
        ours = [(name, outer) for name, outer in found if name.startswith("planner")]
        assert [name for name, outer in ours if not outer] == [f"planner {whole}", f"planner backward {whole}"]
        programs = {"planner": plan.programs.forward, "planner backward": plan.programs.backward}
        for name, program in programs.items():
            assert [step for step, outer in ours if outer == [f"{name} {whole}"]] == steps_of(program)
        products = [outer for name, outer in found if name in ("aten::mm", "aten::bmm")]
        assert products
        assert all("grouped" in outer[0] for outer in products)


def test_a_profiler_shows_native_steps():
    call, operands = cold_call("chain")
    plan = planner.plan(*call.args, *operands, **call.keywords)
    found = ranges(gradients, call, operands)
    products = [outer for name, outer in found if name in ("aten::mm", "aten::bmm")]
    forward = [[step, "planner ab, bc, cd, de -> ae"] for step in steps_of(plan.programs.forward)]
    assert products[: len(forward)] == forward
    # Each product has two gradients. Torch runs them in the order of its graph.
    assert sorted(products[len(forward) :]) == sorted([[step] for step, _ in forward] * 2)


@each_call
def test_calls_are_the_same_under_a_profiler(name):
    call, operands = cold_call(name)
    for way in (gradients, second_derivatives):
        with torch.profiler.profile():
            found = way(call, operands)
        assert_same(found, way(call, operands))
        assert_same(way(call, operands), found)


def test_a_graph_of_a_profiled_call_is_used_after_the_profiler():
    call, operands = cold_call("chain")
    with torch.profiler.profile():
        found = call(*operands)
    for _ in range(2):
        assert_same(torch.autograd.grad(found, operands, like(found), retain_graph=True), gradients(call, operands)[1:])


def test_without_a_profiler_there_are_no_ranges(monkeypatch):
    monkeypatch.setattr("planner.backends.torch.contexts.ranges.Range", None)
    monkeypatch.setattr("planner.backends.torch.runner.Range", None)
    monkeypatch.setattr("planner.backends.torch.executable.Range", None)
    for name in ("product", "grouped product"):
        call, operands = cold_call(name)
        gradients(call, operands)
        with torch.profiler.profile(), pytest.raises(TypeError, match="'NoneType' object is not callable"):
            call(*operands)


def test_a_profiler_with_stacks_shows_the_line_of_the_caller():
    """Of the result's memory too: an operator that allocates it has the caller's function around it."""
    with torch.profiler.profile(with_stack=True) as profiler:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    if not any(around(event) for event in profiler.events() if event.name == "aten::mm"):
        assert torch.__version__.startswith("2.11."), "torch's profiler shows no functions of Python"
        pytest.skip("torch 2.11's profiler shows no functions of Python 3.12, not even around torch.mm")
    for name in ("product", "grouped product"):
        call, operands = cold_call(name)

        def the_caller(call=call, operands=operands):
            return call(*operands)

        with torch.profiler.profile(with_stack=True, profile_memory=True) as profiler:
            out = the_caller()
        events = [event for event in profiler.events() if event.name.startswith("aten::")]
        allocating = [event for event in events if event.cpu_memory_usage >= out.nbytes]
        assert allocating
        for event in allocating:
            assert any(name.endswith(": the_caller") for name in around(event)), event


# -- hooks on saved tensors ------------------------------------------------------------------------


@settings(max_examples=examples(35, 4_000))
@given(
    st.sampled_from([("float32",), ("float64", "bfloat16", "int32", "complex64")]).flatmap(
        lambda dtypes: problems(index_modes=("raise", "drop", "clip"), strided=None, dtypes=dtypes, mixed_dtypes=True)
    ),
    st.sampled_from(OBJECTIVES),
)
def test_retained_bytes_are_those_that_hooks_see(problem, minimize):
    """Those of storages that are neither an operand's nor the result's. A hook may move them, as `save_on_cpu` does.

    Of operands that are cast these are the copies that gradients read.
    """
    engine = Torch()
    operands, indices = engine.operands(problem), engine.indices(problem)
    options = {"sizes": problem.sizes, "index_mode": problem.index_mode, "minimize": minimize, **indices}
    plan = planner.plan(problem.spec, *operands, **options)
    planner.caches().clear()
    for _ in "cold", "warm":
        seen = saved_tensor_bytes(
            lambda: planner.contract(problem.spec, *operands, **options), [*operands, *indices.values()]
        )
        assert seen == plan.cost.retained_bytes


# -- checkpoints of both kinds ---------------------------------------------------------------------


def by_backward(call, operands):
    """The result and the gradients, by `backward`: a reentrant checkpoint takes no `torch.autograd.grad`."""
    leaves = [x.detach().requires_grad_() for x in operands]
    result = call(*leaves)
    result.backward(like(result))
    return [result, *(x.grad for x in leaves)]


def reentrant(call):
    return lambda *xs: checkpoint(call, *xs, use_reentrant=True)


@each_call
@pytest.mark.parametrize(
    "around",
    [reentrant, lambda call: reentrant(reentrant(call)),
     lambda call: selectively(MATRIX_PRODUCTS, checkpointed(call)),
     lambda call: checkpointed(selectively(MATRIX_PRODUCTS, call))],
    ids=["reentrant", "twice", "in a selective one", "around a selective one"],
)  # fmt: skip
def test_checkpoints_of_both_kinds(name, around):
    call, operands = cold_call(name)
    with torch.autograd.graph.save_on_cpu():
        for run in (call, call, planned(call, operands)):
            got = by_backward(around(amid(run)), operands)
            assert_same(got, by_backward(amid(call), operands), strides=name != TURNED)


AROUND = {
    "reentrant": reentrant,
    "not reentrant": checkpointed,
    "nested": lambda call: checkpointed(checkpointed(call)),
    "nested, one reentrant": lambda call: checkpointed(reentrant(call)),
    **{name: partial(selectively, policy) for name, policy in POLICIES.items()},
    "none": lambda call: call,
}


@settings(max_examples=examples(30, 400))
@given(exact_problems(gathers=True, slack=16), st.sampled_from(list(AROUND)), st.booleans())
def test_random_specs_with_gathers_in_checkpoints_and_saved_elsewhere(problem, around, elsewhere):
    """Values and gradients are those without a checkpoint; cold, and warm."""
    assume(any(problem.requires_grad))
    engine = Torch()
    operands, options = engine.operands(problem), {**problem.arguments(), **engine.indices(problem)}
    wanted = [x for x in operands if x.requires_grad]

    def call(*xs):
        given = iter(xs)
        return planner.contract(problem.spec, *[next(given) if x.requires_grad else x for x in operands], **options)

    expected = by_backward(amid(call), wanted)
    planner.caches().clear()
    with torch.autograd.graph.save_on_cpu() if elsewhere else contextlib.nullcontext():
        for _ in "cold", "warm":
            assert_same(by_backward(AROUND[around](amid(call)), wanted), expected, strides=False)


PARALLEL = """
import torch, torch.distributed as dist, planner
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(30.0).reshape(5, 6) % 3)
        self.pool = torch.nn.Parameter(torch.arange(120.0).reshape(4, 6, 5) % 3)

    def forward(self, x, q):
        hidden = planner.contract("bnd, de -> bne", x, self.w)
        return planner.contract("bne, q[n]ed -> bnd", hidden, self.pool, q=q)

def run(model):
    x = torch.arange(2.0 * 7 * 5).reshape(2, 7, 5) % 3
    loss = model(model(x, q), q).sum()
    loss.backward()
    return [loss.detach(), *(getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters())]

q = torch.tensor([0, 3, 1, 1, 2, 0, 3])
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
made = {
    "ddp": lambda: DistributedDataParallel(checkpoint_wrapper(Layer())),
    "fsdp2": lambda: fully_shard(checkpoint_wrapper(Layer()), mesh=mesh),
    "plain": Layer,
}
found = {name: run(make()) for name, make in made.items()}  # the first is cold
for name in ("ddp", "fsdp2"):
    assert all(map(torch.equal, found[name], found["plain"])), name
dist.destroy_process_group()
"""


def test_checkpoints_in_parallel_modules():
    run_python(PARALLEL)


@pytest.mark.parametrize("spec", ["nij, q[n]jk, kl -> nil", "nj, q[n]jk, q[n]kl -> nl"])
def test_a_counter_around_the_backward_pass_alone(spec):
    """Members of a family share a plan, and no gradient reads the operand that alone needs one."""
    for n in (20, 24):
        shapes = {"nij": (n, 3, 16), "nj": (n, 16), "q[n]jk": (16, 16, 16), "q[n]kl": (16, 16, 16), "kl": (16, 16)}
        x, *others = (torch.randint(-3, 4, shapes[term.strip()]).double() for term in spec.split("->")[0].split(","))
        q, gradients = torch.randint(0, 16, (n,)), []
        for watch in (contextlib.nullcontext(), FlopCounterMode(display=False)):
            leaf = x.clone().requires_grad_()
            result = planner.contract(spec, leaf, *others, q=q)
            with watch:
                result.backward(torch.ones_like(result))
            gradients.append(leaf.grad)
        assert torch.equal(*gradients)


def test_flops_of_axes_that_no_array_shows():
    a, q = torch.ones(4, 6), torch.tensor([0, 2, 1, 3])
    for size in (40, 64):
        with FlopCounterMode(display=False) as counter:
            result = planner.contract("nj, kj -> q[n] km", a, torch.ones(5, 6), q=q, sizes={"q": 7, "m": size})
        assert result.shape == (7, 5, size)
        assert counter.get_total_flops() == 2 * 4 * 6 * 5


@pytest.mark.parametrize("index_mode", ["drop", "nan"])
@pytest.mark.parametrize(
    ("spec", "shapes"), [("j, q[n]jk -> nk", [(4,), (3, 4, 5)]), ("i, nj -> q[n]ij", [(3,), (6, 4)])]
)
def test_a_checkpoint_whose_dropped_rows_meet_nan_in_a_mode(spec, shapes, index_mode):
    """The operand is repeated along the rows, so that the mask can tell them apart, in a mode or not."""
    x, y = (torch.arange(float(torch.Size(shape).numel())).reshape(shape) for shape in shapes)
    x[0] = torch.nan
    call = partial(planner.contract, spec, q=torch.tensor([0, 2, 9, 1, 0, 2]), index_mode=index_mode)
    call = partial(call, sizes={"q": 3})
    operands = [x.requires_grad_(), y.requires_grad_()]
    expected = gradients(call, operands)

    def mode():
        return FlopCounterMode(display=False)

    for first, second in itertools.product((contextlib.nullcontext, mode), repeat=2):
        with first():
            result = checkpointed(call)(*operands)
        with second():
            found = torch.autograd.grad(result, operands, like(expected[0]))
        for got, wanted in zip([result, *found], expected, strict=True):
            assert torch.equal(got.nan_to_num(77), wanted.nan_to_num(77))


def test_batched_gradients_of_a_checkpoint():
    """A checkpoint computes again what it saved, though autograd batches the gradient."""
    a, c, q = torch.ones(6, 4, requires_grad=True), torch.ones(3, 4, 5), torch.arange(6) % 3
    result = checkpoint(lambda a: planner.contract("nj, q[n]jk -> nk", a, c, q=q), a, use_reentrant=False)
    (found,) = torch.autograd.grad(result, a, torch.ones(2, 6, 5), is_grads_batched=True)
    assert torch.equal(found, torch.full((2, 6, 4), 5.0))
