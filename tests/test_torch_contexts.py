"""A call's first time is as its later ones, whatever is around it: checkpointing, hooks, modes, transforms, devices.

The first call with new shapes is planned: it is cold. Planning runs no operator of torch, so nothing that watches
operators, or what autograd saves, can tell a cold call from a warm one.
"""

import collections
import itertools
import os
import pathlib
import subprocess
import sys
from functools import partial

import pytest

import planner

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# Spec, shapes with None for the size that makes a call new, sizes of what index arrays name, options.
CALLS = {
    "product": ("ij, jk -> ik", [(None, 3), (3, 4)], {}, {}),
    "layer": ("bnd, de -> bne", [(2, None, 4), (4, 5)], {}, {}),
    "transposed product": ("bhid, bhjd -> bhij", [(2, 3, None, 5), (2, 3, 6, 5)], {}, {}),
    "product of copies": ("ijk, jlk -> il", [(None, 3, 4), (3, 5, 4)], {}, {}),
    "elements": ("ik, kj -> ikj", [(None, 4), (4, 3)], {}, {}),
    "chain": ("ab, bc, cd, de -> ae", [(None, 3), (3, 4), (4, 5), (5, 6)], {}, {}),
    "nothing kept": ("ab, bc, cd -> ad", [(None, 3), (3, 4), (4, 5)], {}, {"minimize": "retained"}),
    "limited": ("ab, bc, cd -> ad", [(None, 3), (3, 4), (4, 5)], {}, {"memory_limit": "1 MB"}),
    "sum": ("ij -> j", [(None, 3)], {}, {}),
    "view": ("ij -> ji", [(None, 3)], {}, {}),
    "broadcast": ("i -> ij", [(None,)], {}, {"sizes": {"j": 3}}),
    "diagonal": ("iij -> ij", [(3, 3, None)], {}, {}),
    "gather": ("q[n]j -> nj", [(3, None)], {"q": (6, 3)}, {}),
    "gathered product": ("nij, q[n]jk -> nik", [(6, 1, None), (3, None, 5)], {"q": (6, 3)}, {}),
    "dropped rows": ("nj, q[n]jk -> nk", [(6, None), (3, None, 5)], {"q": (6, 4)}, {"index_mode": "drop"}),
    "scatter": ("ni -> q[n]i", [(6, None)], {"q": (6, 3)}, {"sizes": {"q": 3}}),
    "message passing": ("s[e]i, ij -> t[e]j", [(4, None), (None, 3)], {"s": (9, 4), "t": (9, 4)}, {"sizes": {"t": 4}}),
    "mixed dtypes": ("ij, jk -> ik", [(None, 3), (3, 4)], {}, {"dtypes": (torch.float64, torch.float32)}),
}
SIZES = itertools.count(23)  # sizes that no other test uses

each_call = pytest.mark.parametrize("name", CALLS)
each_product = pytest.mark.parametrize("name", ["layer", "elements", "chain", "nothing kept", "gathered product"])


def cold_call(name, requires_grad=True):
    """A call that was never made before: a function of its operands, and these."""
    spec, shapes, indices, options = CALLS[name]
    options, fresh = dict(options), next(SIZES)
    shapes = [[fresh if n is None else n for n in shape] for shape in shapes]
    dtypes = options.pop("dtypes", (torch.float32,) * len(shapes))
    generator = torch.Generator().manual_seed(fresh)
    operands = [
        torch.randint(-3, 4, shape, generator=generator).to(dtype).requires_grad_(requires_grad)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    arrays = {n: torch.randint(0, most, (count,), generator=generator) for n, (count, most) in indices.items()}
    return partial(planner.contract, spec, **options, **arrays), operands


def step(call, operands):
    """Call, and take the gradients of all operands that need one."""
    result = call(*operands)
    wanted = [x for x in operands if x.requires_grad]
    return [result, *(torch.autograd.grad(result.square().sum(), wanted) if wanted else ())]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)
        assert got.stride() == wanted.stride()


class Functions(TorchFunctionMode):
    """Lists the functions of torch that are called, but for what only reads a tensor's properties."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if name not in ("__get__", "stride", "dim"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Readers(TorchFunctionMode):
    """Looks at the values of all tensors that a function of torch is given."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            for x in args:
                assert not isinstance(x, torch.Tensor) or bool(x.detach().isfinite().all())
        return func(*args, **(kwargs or {}))


def recorded(function):
    """What a function gives, and the functions and operators of torch that it calls."""
    with Functions() as functions, Operators() as operators:
        found = function()
    return found, functions.seen, operators.seen


# -- what is called ------------------------------------------------------------------------------


@each_call
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_cold_call_runs_the_operators_of_a_warm_one(name, requires_grad):
    """Forward, and in the backward, where a gradient that repeats along axes is planned for."""
    call, operands = cold_call(name, requires_grad)
    cold = recorded(lambda: call(*operands))
    warm = recorded(lambda: call(*operands))
    assert torch.equal(cold[0], warm[0])
    assert cold[1:] == warm[1:]
    if requires_grad:
        cold, warm = (
            recorded(lambda result=result: torch.autograd.grad(result.sum(), operands)) for result in (cold[0], warm[0])
        )
        assert_same(cold[0], warm[0])
        assert cold[1:] == warm[1:]


@each_call
def test_a_cold_second_derivative_runs_the_operators_of_a_warm_one(name):
    call, operands = cold_call(name)

    def twice():
        gradients = torch.autograd.grad(call(*operands).square().sum(), operands, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), operands)

    cold, warm = recorded(twice), recorded(twice)
    assert_same(cold[0], warm[0])
    assert cold[1:] == warm[1:]


@each_call
@pytest.mark.parametrize("device", [None, "h100"])
def test_to_plan_runs_nothing(name, device):
    call, operands = cold_call(name)
    _, functions, operators = recorded(lambda: planner.plan(*call.args, *operands, device=device, **call.keywords))
    assert functions == []
    assert operators == []


def test_the_first_call_of_a_process_runs_the_operators_of_the_second():
    """Loading the backend runs none either."""
    program = """
import torch, test_torch_contexts as contexts
call, operands = contexts.cold_call("layer")
first, second = (contexts.recorded(lambda: contexts.step(call, operands)) for _ in range(2))
assert first[1:] == second[1:], (first, second)
assert len(second[2]) > 3, second
"""
    here = pathlib.Path(__file__).parent
    folders = os.pathsep.join([str(here.parent), str(here)])
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": folders})


# -- checkpointing and saved tensors ------------------------------------------------------------


@each_call
def test_checkpoint(name):
    call, operands = cold_call(name)
    got = step(lambda *xs: checkpoint(call, *xs, use_reentrant=False), operands)
    assert_same(got, step(call, operands))


@each_product
def test_nested_checkpoints(name):
    call, operands = cold_call(name)

    def inner(*xs):
        return checkpoint(call, *xs, use_reentrant=False).square()

    got = step(lambda *xs: checkpoint(inner, *xs, use_reentrant=False), operands)
    assert_same(got, step(lambda *xs: call(*xs).square(), operands))


@each_call
@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpoint(name, policy):
    # Scatters add in place to zeros. A policy that saves these zeros fails, in warm calls too.
    in_place = (torch.ops.aten.new_zeros.default, torch.ops.aten.view.default, torch.ops.aten.index_add_.default)
    left_out = in_place if name in ("scatter", "message passing") else ()
    call, operands = cold_call(name)

    def choose(ctx, op, *args, **kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE if op in left_out else policy

    contexts = partial(create_selective_checkpoint_contexts, choose)
    got = step(lambda *xs: checkpoint(call, *xs, use_reentrant=False, context_fn=contexts), operands)
    assert_same(got, step(call, operands))


@each_product
def test_second_derivatives_of_a_checkpoint(name):
    call, operands = cold_call(name)

    def twice(function):
        gradients = torch.autograd.grad(function(*operands).square().sum(), operands, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), operands)

    got = twice(lambda *xs: checkpoint(call, *xs, use_reentrant=False))
    assert_same(got, twice(call))


@each_call
def test_save_on_cpu(name):
    call, operands = cold_call(name)
    with torch.autograd.graph.save_on_cpu():
        got = step(call, operands)
    assert_same(got, step(call, operands))


@each_call
def test_hooks_that_read_what_is_saved(name):
    call, operands = cold_call(name)
    seen = []

    def pack(x):
        seen.append((tuple(x.shape), x.double().sum().item()))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        cold, first = step(call, operands), collections.Counter(seen)
        seen.clear()
        assert_same(step(call, operands), cold)
    assert first == collections.Counter(seen)
    # Where hooks are refused, nothing that planning does needs them.
    call, operands = cold_call(name)
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        got = step(call, operands)
    assert_same(got, step(call, operands))


# -- modes and transforms ------------------------------------------------------------------------


@each_call
def test_a_mode_that_looks_at_values(name):
    call, operands = cold_call(name)
    with Readers():
        got = step(call, operands)
    assert_same(got, step(call, operands))


@each_call
def test_a_default_device(name):
    call, operands = cold_call(name)
    with torch.device("meta"):
        got = step(call, operands)
    assert_same(got, step(call, operands))


@each_call
def test_autocast(name):
    call, operands = cold_call(name)
    with torch.autocast("cpu", torch.bfloat16):
        got = step(call, operands)
        assert_same(got, step(call, operands))


@each_product
def test_vmap_of_grad(name):
    call, operands = cold_call(name, requires_grad=False)
    stacked = [torch.stack([x, 2 * x]) for x in operands]

    def function():
        return torch.func.vmap(torch.func.grad(lambda *xs: call(*xs).square().sum()))(*stacked)

    cold, warm = recorded(function), recorded(function)
    assert torch.equal(cold[0], warm[0])
    assert cold[1:] == warm[1:]
    for number, got in enumerate(cold[0]):
        one = [x[number].requires_grad_() for x in stacked]
        assert torch.equal(got, torch.autograd.grad(call(*one).square().sum(), one[0])[0])


@each_product
def test_forward_mode(name):
    call, operands = cold_call(name, requires_grad=False)
    tangents = [torch.ones_like(x) for x in operands]
    cold, warm = (recorded(lambda: torch.func.jvp(call, tuple(operands), tuple(tangents))) for _ in range(2))
    assert_same(cold[0], warm[0])
    assert cold[1:] == warm[1:]


# -- measuring -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chain", "gathered product"])
def test_what_is_timed_is_not_seen(name):
    """`optimize="measure"` runs candidates, which no mode and no hook around the call sees."""
    call, operands = cold_call(name)
    call = partial(call, optimize="measure")
    got, functions, operators = recorded(lambda: step(call, operands))
    again, *others = recorded(lambda: step(call, operands))
    assert_same(got, again)
    assert [functions, operators] == others
    call, operands = cold_call(name)
    call = partial(call, optimize="measure")
    got = step(lambda *xs: checkpoint(call, *xs, use_reentrant=False), operands)
    assert_same(got, step(call, operands))
    call, operands = cold_call(name)
    call = partial(call, optimize="measure")
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        got = step(call, operands)
    assert_same(got, step(call, operands))
