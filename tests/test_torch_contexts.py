"""Calls in torch are the same whatever is around them: checkpoints, hooks, modes, transforms, devices, autocast.

The first call with new shapes is planned: it is cold. Planning runs no operator of torch, so nothing that watches
operators, or what autograd saves, can tell a cold call from a warm one.
"""

import contextlib
import itertools
import pathlib
from functools import partial

import pytest
from conftest import run_python

import planner

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from planner.backends.torch import executable  # noqa: E402

# Spec, shapes with None for the size that makes a call new, shapes and sizes of index arrays, options.
CALLS = {
    "product": ("ij, jk -> ik", [(None, 3), (3, 4)], {}, {}),
    "layer": ("bnd, de -> bne", [(2, None, 4), (4, 5)], {}, {}),
    "transposed product": ("bhid, bhjd -> bhij", [(2, 3, None, 5), (2, 3, 6, 5)], {}, {}),
    "product of copies": ("ijk, jlk -> il", [(None, 3, 4), (3, 16, 4)], {}, {}),
    "few columns": ("bji, bjk -> bik", [(2, 16, None), (2, 16, 3)], {}, {}),
    "few columns, nothing kept": ("ji, jk, kl -> il", [(64, None), (64, 4), (4, 3)], {}, {"minimize": "retained"}),
    "batched, permuted": ("bij, bjk -> bki", [(2, None, 4), (2, 4, 5)], {}, {}),
    "elements": ("ik, kj -> ikj", [(None, 4), (4, 3)], {}, {}),
    "outer": ("i, j -> ij", [(None,), (4,)], {}, {}),
    "chain": ("ab, bc, cd, de -> ae", [(None, 3), (3, 4), (4, 5), (5, 6)], {}, {}),
    "nothing kept": ("ab, bc, cd -> ad", [(None, 3), (3, 4), (4, 5)], {}, {"minimize": "retained"}),
    "limited": ("ab, bc, cd -> ad", [(None, 3), (3, 4), (4, 5)], {}, {"memory_limit": "1 MB"}),
    "sum": ("ij -> j", [(None, 3)], {}, {}),
    "view": ("ij -> ji", [(None, 3)], {}, {}),
    "broadcast": ("i -> ij", [(None,)], {}, {"sizes": {"j": 3}}),
    "diagonal": ("iij -> ij", [(3, 3, None)], {}, {}),
    "diagonal put": ("i -> ii", [(None,)], {}, {}),
    "gather": ("q[n]j -> nj", [(3, None)], {"q": ((6,), 3)}, {}),
    "gathered product": ("nij, q[n]jk -> nik", [(6, 1, None), (3, None, 5)], {"q": ((6,), 3)}, {}),
    "grouped product": ("nij, q[n]jk -> kni", [(500, 2, 128), (4, 128, None)], {"q": ((500,), 4)}, {}),
    "scores": ("bqd, b i[bqk] d -> bqk", [(3, 300, 32), (3, 40, 32)], {"i": ((3, 300, None), 40)}, {}),
    "loop": (
        "bij, bjk, bik -> bi", [(None, 20, 2), (None, 2, 20), (None, 20, 20)], {}, {"memory_limit": lambda n: 2020 * n},
    ),
    "dropped rows": ("nj, q[n]jk -> nk", [(6, None), (3, None, 5)], {"q": ((6,), 4)}, {"index_mode": "drop"}),
    "scatter": ("ni -> q[n]i", [(6, None)], {"q": ((6,), 3)}, {"sizes": {"q": 3}}),
    "message passing": (
        "s[e]i, ij -> t[e]j", [(4, None), (None, 3)], {"s": ((9,), 4), "t": ((9,), 4)}, {"sizes": {"t": 4}},
    ),
    "mixed dtypes": ("ij, jk -> ik", [(None, 3), (3, 4)], {}, {"dtypes": (torch.float64, torch.float32)}),
    "measured chain": ("ab, bc, cd -> ad", [(None, 3), (3, 4), (4, 5)], {}, {"optimize": "measure"}),
    "measured gather": ("nij, q[n]jk -> nik", [(6, 1, None), (3, None, 5)], {"q": ((6,), 3)}, {"optimize": "measure"}),
    "half result": ("ij, jk -> ik", [(None, 3), (3, 4)], {}, {"dtype": torch.bfloat16}),
}  # fmt: skip
SIZES = itertools.count(43)  # sizes that no other test uses

each_call = pytest.mark.parametrize("name", CALLS)


# The result lies otherwise if no gradient is asked for.
TURNED = "few columns"


def cold_call(name, large=False):
    """A call that was never made before: a function of its operands, and these; of integers that are exact."""
    spec, shapes, indices, options = CALLS[name]
    fresh = next(SIZES)
    options = {key: option(fresh) if callable(option) else option for key, option in options.items()}
    dtypes = options.pop("dtypes", (torch.float32,) * len(shapes))
    generator = torch.Generator().manual_seed(fresh)
    bound = {1: 300, 2: 300, 3: 40, 4: 9}[len(shapes)] if large else 3

    def drawn(low, high, shape):
        return torch.randint(low, high, [fresh if n is None else n for n in shape], generator=generator)

    operands = [drawn(-bound, bound + 1, shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    arrays = {n: drawn(0, most, shape) for n, (shape, most) in indices.items()}
    if options.get("index_mode") == "drop":  # without an entry to drop torch's own operators run
        for n, (_, most) in indices.items():
            arrays[n][0] = most - 1
    return partial(planner.contract, spec, **options, **arrays), [x.requires_grad_() for x in operands]


def with_indices(call, change):
    """The call with its index arrays changed."""
    arrays = {name: change(x) for name, x in call.keywords.items() if isinstance(x, torch.Tensor)}
    return partial(call, **arrays), arrays


def planned(call, operands):
    """The same call through a plan."""
    plan = planner.plan(*call.args, *operands, **call.keywords)
    return partial(plan, **with_indices(call, lambda q: q)[1])


def assert_same(found, expected, strides=True):
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
        # A dimension of size 1 may have any stride.
        lies = [[step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1] for x in (got, wanted)]
        assert lies[0] == lies[1] or not strides


@pytest.mark.parametrize(
    ("name", "shown"),
    [("grouped product", "grouped matmul"), ("scores", "whole pool, then take"), ("loop", "loop over b")],
)
def test_the_table_holds_what_its_names_say(name, shown):
    call, operands = cold_call(name)
    assert shown in str(planner.plan(*call.args, *operands, **call.keywords))


# -- what is asked of a call ---------------------------------------------------------------------


def without_gradients(operands):
    return tuple(x.detach() for x in operands)


def result(call, operands):
    return [call(*operands)]


def result_alone(call, operands):
    return [call(*without_gradients(operands))]


def like(result):
    """A gradient of a result, of small numbers."""
    return torch.ones_like(result).flatten().cumsum(0).remainder(5).reshape(result.shape)


def gradients(call, operands):
    """The result, and the gradients of all operands."""
    found = call(*operands)
    return [found, *torch.autograd.grad(found, operands, like(found))]


def gradients_of_sum(call, operands):
    """The output's gradient repeats along axes, which is planned for."""
    return torch.autograd.grad(call(*operands).sum(), operands)


def second_derivatives(call, operands):
    """By the operands and by the output's gradient; the gradients too."""
    found = call(*operands)
    gout = like(found).requires_grad_()
    firsts = torch.autograd.grad(found, operands, gout, create_graph=True)
    return [*firsts, *torch.autograd.grad(firsts, [*operands, gout], [*map(like, firsts)], materialize_grads=True)]


def functional(call, operands):
    return torch.func.grad(lambda *xs: call(*xs).square().sum(), tuple(range(len(operands))))(*operands)


def forward_mode(call, operands):
    operands = without_gradients(operands)
    return torch.func.jvp(call, operands, tuple(map(torch.ones_like, operands)))


def mapped(call, operands):
    several = [torch.stack([x, 2 * x]) for x in without_gradients(operands)]
    return torch.func.vmap(lambda *xs: (call(*xs), *functional(call, xs)))(*several)


WAYS = [result, result_alone, gradients, gradients_of_sum, second_derivatives, functional, forward_mode, mapped]


def recorded(function, *arguments):
    """What a function gives, and the functions and operators of torch that it calls.

    The functions leave out those that only read a tensor's properties.
    """
    functions, operators = [], []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            functions.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operators.append(str(func))
            return func(*args, **(kwargs or {}))

    with Functions(), Operators():
        found = function(*arguments)
    return found, [name for name in functions if name not in ("__get__", "stride", "dim")], operators


# -- what runs -----------------------------------------------------------------------------------


@each_call
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_cold_call_runs_the_operators_of_a_warm_one(name, way):
    call, operands = cold_call(name)
    cold, warm = (recorded(way, call, operands) for _ in range(2))
    assert_same(cold[0], warm[0])
    assert cold[1:] == warm[1:]


@each_call
@pytest.mark.parametrize("device", [None, "h100"])
def test_to_plan_runs_nothing(name, device):
    call, operands = cold_call(name)
    assert recorded(lambda: planner.plan(*call.args, *operands, device=device, **call.keywords))[1:] == ([], [])


def test_the_first_call_of_a_process_runs_the_operators_of_the_second():
    """Loading the backend runs none either."""
    program = """
import torch, test_torch_contexts as contexts
call, operands = contexts.cold_call("layer")
first, second = (contexts.recorded(contexts.gradients, call, operands) for _ in range(2))
assert first[1:] == second[1:], (first, second)
assert len(second[2]) > 3, second
"""
    run_python(program, cwd=pathlib.Path(__file__).parent)


# -- what surrounds a call -----------------------------------------------------------------------


def within(context, function):
    """The function, called in a context."""

    def run(*arguments):
        with context():
            return function(*arguments)

    return run


def plain(function):
    return function


def checkpointed(call, **options):
    """The call in a checkpoint, which refuses a second run that saves other tensors than the first."""
    return lambda *xs: checkpoint(call, *xs, use_reentrant=False, **options)


def reading(x):
    """A hook that looks at the values of what is saved: a tensor without values makes it fail."""
    x.sum().item()
    return x


autocast = partial(within, partial(torch.autocast, "cpu", torch.bfloat16))
no_autocast = partial(within, partial(torch.autocast, "cpu", enabled=False))
unwatched = partial(within, _disable_current_modes)
counting = partial(within, lambda: FlopCounterMode(display=False))
# What is around the call alone, and what is around the call and its derivatives.
CONTEXTS = {
    "checkpoint": (checkpointed, plain),
    "nested checkpoints": (lambda call: checkpointed(checkpointed(call)), plain),
    "mode, forward": (lambda call: counting(checkpointed(call)), plain),  # the checkpoint runs the call without it
    "mode, backward": (lambda call: unwatched(checkpointed(checkpointed(call))), counting),
    "saved on the CPU": (plain, partial(within, torch.autograd.graph.save_on_cpu)),
    "hooks refused": (plain, partial(within, lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks"))),
    "hooks that read": (plain, partial(within, lambda: torch.autograd.graph.saved_tensors_hooks(reading, reading))),
    "default device": (plain, partial(within, lambda: torch.device("meta"))),
    "autocast": (plain, autocast),
    "autocast, forward": (autocast, plain),
    "autocast, backward": (no_autocast, autocast),
}


# Torch itself goes backward through these products, as through its own: in autocast it rounds.
NATIVE = ("product", "layer", "transposed product", "batched, permuted", "product of copies", "few columns", "chain",
          "measured chain", "gathered product", "measured gather")  # fmt: skip
ROUNDED = [(name, "autocast, backward") for name in (*NATIVE, "message passing")]


def by_torch(plan, indices):
    """The function that runs the steps of a plan by `torch.einsum` and indexing."""

    def run(*operands):
        values = dict(enumerate(operands))
        for step in plan.programs.forward.steps:
            text, xs = str(step.op.spec), [values[v] for v in step.inputs]
            if "q[n]" in text:
                text, xs = text.replace("q[n]", "n"), [xs[0][indices["q"]]]
            values[step.outputs[0]] = torch.einsum(text, *xs)
        return values[plan.programs.result]

    return run


# The clock decides whether a measured plan is one of native calls.
@pytest.mark.parametrize("name", [name for name in NATIVE if "measured" not in name])
@pytest.mark.parametrize("way", [gradients, second_derivatives])
def test_autocast_around_the_backward_alone_rounds_as_it_rounds_torch(name, way):
    call, operands = cold_call(name, large=True)
    plan = planner.plan(*call.args, *operands, **call.keywords)
    around_call, around_all = CONTEXTS["autocast, backward"]
    expected = around_all(way)(around_call(by_torch(plan, with_indices(call, lambda q: q)[1])), operands)
    for run in (call, call, planned(call, operands)):
        assert_same(around_all(way)(around_call(run), operands), expected, strides=False)
    assert not all(map(torch.equal, expected, way(call, operands)))


@pytest.mark.parametrize(
    ("name", "context"), [case for case in itertools.product(CALLS, CONTEXTS) if case not in ROUNDED]
)
def test_calls_are_the_same_in_a_context(name, context):
    """Of integers that bfloat16 does not hold, or whose products it does not hold.

    In autocast, if they are asked for a dtype.
    """
    around_call, around_all = CONTEXTS[context]
    for way in (gradients, second_derivatives):
        call, operands = cold_call(name, large=True)
        if "autocast" in context:
            call = partial(call, dtype=call(*operands).dtype)
        for run in (call, call, planned(call, operands)):
            got, expected = around_all(way)(around_call(run), operands), way(call, operands)
            # In a mode operators run, which return no views.
            assert_same(got, expected, strides="autocast" not in context and "mode" not in context)


@pytest.mark.parametrize("name", ["transposed product", "gathered product", "scores", "chain"])
def test_a_checkpoint_may_run_once_inside_of_forward_mode_and_once_outside(name):
    """If no operand is dual. With tangents torch's own operators save other tensors too."""
    call, operands = cold_call(name)
    leaves = [x.detach().requires_grad_() for x in operands]
    expected = torch.autograd.grad(call(*leaves).sum(), leaves)
    for first, second in ((dual_level, contextlib.nullcontext), (contextlib.nullcontext, dual_level)):
        with first():
            total = checkpoint(call, *leaves, use_reentrant=False).sum()
        with second():
            gradients = torch.autograd.grad(total, leaves)
        assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("minimize", ["time", "peak"])
@pytest.mark.parametrize("name", [name for name in CALLS if not {"minimize", "optimize"} & CALLS[name][3].keys()])
def test_a_call_that_was_first_met_in_forward_mode_runs_as_any_other_after_it(name, minimize):
    """Under it steps run out of place. What runs the call must not be made for that, since calls outside share it."""
    call, operands = cold_call(name)
    leaves, made = [x.detach().requires_grad_() for x in operands], []
    for context in (contextlib.nullcontext, dual_level):
        planner.caches().clear()
        with context():
            call(*leaves, minimize=minimize)
        made.append(call(*leaves, minimize=minimize))
    assert type(made[0].grad_fn) is type(made[1].grad_fn)
    assert made[0].stride() == made[1].stride()


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_may_be_dual_where_no_operand_was(create_graph):
    """As that of a layer whose weights have no tangents, below one whose weights have some."""
    a, b, w = (torch.randint(-3, 4, s).float().requires_grad_() for s in ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 5, 6)))
    a, tangents = a.transpose(1, 2).detach().requires_grad_(), []
    b = b.transpose(1, 2).detach().requires_grad_()
    for product in (planner.contract, torch.einsum):
        with dual_level():
            dual = make_dual(w, torch.ones_like(w))
            total = (product("bihd,bjhd->bhij", a, b) * dual).sum()
            gradients = torch.autograd.grad(total, (a, b), create_graph=create_graph)
            tangents.append([unpack_dual(g).tangent for g in gradients])
    assert all(map(torch.equal, *tangents))


def test_strides_of_gradients_are_remembered(monkeypatch):
    """Which backward program suits them is found out once."""
    # Without the limit the product would run as torch's own, and keep the copies that torch makes.
    a, b = (torch.randint(-3, 4, s).float().requires_grad_() for s in ((4, 200, 8, 32), (4, 200, 8, 32)))
    asked, found = [], executable.Executable._suited
    monkeypatch.setattr(executable.Executable, "_suited", lambda *xs: asked.append(xs) or found(*xs))
    for _ in range(3):
        ours, theirs = (
            torch.autograd.grad(product("bihd,bjhd->bhij", a, b).sum(), (a, b))
            for product in (partial(planner.contract, retain_limit=0), torch.einsum)
        )
        assert all(map(torch.equal, ours, theirs))
    assert len(asked) == 1


@each_call
def test_inference_mode_and_no_grad(name):
    call, operands = cold_call(name)
    expected = [call(*operands).detach()]
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            for some in (operands, [x.clone() for x in operands]):
                got = call(*some)
                assert not got.requires_grad or got._is_view()
                assert_same([got], expected, strides=name != TURNED)
    with torch.inference_mode():
        inferred, other = [x.clone() for x in operands], with_indices(call, torch.clone)[0]
    assert_same([other(*inferred)], expected, strides=name != TURNED)
    with torch.inference_mode(), torch.inference_mode(False):
        assert_same(gradients(call, operands), gradients(call, operands))


# -- what is done to operands, results and gradients -----------------------------------------------


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("view", "broadcast", "diagonal")])
def test_results_take_in_place_operations(name):
    """But for views of operands."""
    call, operands = cold_call(name)

    def in_place(*operands):
        out = call(*operands)
        out += 2
        return out.mul_(3)

    for way in (gradients, second_derivatives, functional, forward_mode, mapped):
        # Autograd computes the gradient of a permuted view that changed in place row-major.
        strides = way is not second_derivatives
        assert_same(way(in_place, operands), way(lambda *xs: (call(*xs) + 2) * 3, operands), strides)


@pytest.mark.parametrize("name", ["gather", "gathered product", "dropped rows"])
def test_gradients_take_in_place_operations(name):
    call, operands = cold_call(name)

    def seconds(change):
        firsts = torch.autograd.grad(call(*operands).square().sum(), operands, create_graph=True)
        return torch.autograd.grad(sum(change(g).square().sum() for g in firsts), operands)

    assert_same(seconds(lambda g: g.mul_(2)), seconds(lambda g: g * 2))


@pytest.mark.parametrize("name", ["product", "chain", "nothing kept", "outer", "gathered product", "dropped rows"])
def test_an_operand_that_changed_before_the_backward_is_an_error(name):
    call, operands = cold_call(name)
    got = call(*operands)
    with torch.no_grad():
        operands[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        got.sum().backward()


# -- kinds of tensors ----------------------------------------------------------------------------


@each_call
def test_meta_tensors_have_shapes_and_dtypes(name):
    call, operands = cold_call(name)
    expected = call(*operands)
    metas = [x.detach().to("meta").requires_grad_() for x in operands]
    on_meta, indices = with_indices(call, lambda q: q.to("meta"))
    got = on_meta(*metas)
    assert (got.device.type, got.shape, got.dtype) == ("meta", expected.shape, expected.dtype)
    got.sum().backward()
    assert [x.grad.shape for x in metas] == [x.shape for x in operands]
    with torch.no_grad():
        assert on_meta(*metas).shape == expected.shape
    for letter, q in indices.items():
        with pytest.raises(planner.PlannerError, match=f"'{letter}' is on cpu, but operand 0 on meta"):
            partial(on_meta, **{letter: call.keywords[letter]})(*metas)
        with pytest.raises(planner.PlannerError, match="meta.*no values"):
            planner.group(q, 3)


@each_call
def test_fake_tensors_have_shapes_and_dtypes(name):
    call, operands = cold_call(name)
    expected = call(*operands)
    with FakeTensorMode() as mode:
        got = with_indices(call, mode.from_tensor)[0](*map(mode.from_tensor, operands))
        assert (got.device.type, got.shape, got.dtype) == ("cpu", expected.shape, expected.dtype)


class Labelled(torch.Tensor):
    """A subclass of the plainest kind."""


@each_call
@pytest.mark.parametrize("wrap", [torch.nn.Parameter, lambda x: x.as_subclass(Labelled)], ids=["parameter", "subclass"])
def test_subclasses(name, wrap):
    call, operands = cold_call(name)
    wrapped = [wrap(x.detach()).requires_grad_() for x in operands]
    for some in (wrapped, [*operands[:-1], wrapped[-1]], [wrapped[0], *operands[1:]]):
        assert_same([x.as_subclass(torch.Tensor) for x in gradients(call, some)], gradients(call, operands))


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (torch.Tensor.to_sparse, "to_dense"),
        (torch.Tensor.to_sparse_csr, "to_dense"),
        (torch.Tensor.to_sparse_csc, "to_dense"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), "dequantize"),
        (lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.strided), "to_padded_tensor"),
        (lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged), "to_padded_tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch warns that these are prototypes, or that they will go
def test_layouts_that_are_not_strided_are_refused(change, advice):
    dense = torch.ones(3, 4), torch.ones(4, 3)
    for _ in range(2):  # a dense call of the same shapes must not lend its plan
        for number, x in enumerate(dense):
            operands = [*dense[:number], change(x), *dense[number + 1 :]]
            for call in (planner.contract, planner.plan):
                with pytest.raises(planner.PlannerError, match=f"operand {number}.*{advice}") as caught:
                    call("ij, jk -> ik", *operands)
                assert caught.value.__suppress_context__ or caught.value.__context__ is None
        planner.contract("ij, jk -> ik", *dense)


def test_index_arrays_without_values_are_not_grouped():
    q = torch.tensor([0, 2])
    with pytest.raises(planner.PlannerError, match="group it before"):
        planner.group(q.to("meta"), 3)
    with pytest.raises(planner.PlannerError, match="group it before"):
        torch.func.vmap(lambda q: planner.group(q, 3).values)(q[None])
    assert planner.group(q, 3).to("meta").values.is_meta


def test_index_arrays_that_are_not_strided_are_refused():
    q = torch.tensor([0, 2])
    for _ in range(2):
        with pytest.raises(planner.PlannerError, match=r"index array 'q'.*to_dense\(\)"):
            planner.contract("q[n]c -> nc", torch.ones(3, 4), q=q.to_sparse())
        planner.contract("q[n]c -> nc", torch.ones(3, 4), q=q)
    with pytest.raises(planner.PlannerError, match=r"index array 'q'.*to_dense\(\)"):
        planner.group(q.to_sparse(), 3)
