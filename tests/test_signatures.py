"""What a warm call looks its runner up by: calls that may need different plans never have one signature."""

from __future__ import annotations

import contextlib
import itertools
import sys

import numpy as np
import pytest
from engines import in_each

import planner
from planner.program.frameworks import load_backend


@contextlib.contextmanager
def deterministic(torch):
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def of_numpy(x, q):
    """Calls by what is special of each: operands, index arrays and the context."""
    return {
        "dtype": ([x.astype("f4")], {"q": q}),
        "kind of array": ([x.view(np.matrix)], {"q": q}),
        "dtype of an index array": ([x], {"q": q.astype("i2")}),
        "unsigned index array": ([x], {"q": q.astype("u8")}),
    }


def of_torch(x, q):
    torch = pytest.importorskip("torch")
    trained = x.clone().requires_grad_()
    return {
        "strides": ([x.t()], {"q": q}),
        "expanded": ([x[:1].expand(4, 4)], {"q": q}),
        "dtype": ([x.float()], {"q": q}),
        "device": ([x.to("meta")], {"q": q}),
        "gradient": ([trained], {"q": q}),
        "gradient, none recorded": ([trained], {"q": q}, torch.no_grad()),
        "none recorded": ([x], {"q": q}, torch.no_grad()),
        "autocast": ([x], {"q": q}, torch.autocast("cpu", torch.bfloat16)),
        "deterministic": ([x], {"q": q}, deterministic(torch)),
        "gradient of the first": ([trained, x], {"q": q}),
        "gradient of the second": ([x, trained], {"q": q}),
        "two without an index array": ([x, x], {}),
        "shape of the first of two": ([x[:3], x], {}),
        "shape of the second of two": ([x, x[:3]], {}),
        "strides of the first of two": ([x.t(), x], {}),
        "strides of the second of two": ([x, x.t()], {}),
        "dtype of the first of two": ([x.float(), x], {}),
        "dtype of the second of two": ([x, x.float()], {}),
        "gradient of the first of two": ([trained, x], {}),
        "gradient of the second of two": ([x, trained], {}),
        "dtype of an index array": ([x], {"q": q.int()}),
        "device of an index array": ([x], {"q": q.to("meta")}),
    }


def of_jax(x, q):
    jax = pytest.importorskip("jax")
    return {
        "dtype": ([x.astype("bfloat16")], {"q": q}),
        "weak type": ([jax.lax.full((4, 4), 1.0)], {"q": q}),
        "wide types": ([x], {"q": q}, jax.enable_x64(True)),
        "dtype of an index array": ([x], {"q": q.astype("int8")}),
    }


@in_each(numpy=of_numpy, torch=of_torch, jax=of_jax)
def test_calls_that_differ_have_signatures_that_differ(engine, sample):
    x, q = engine.array(np.ones((4, 4))), engine.array(np.arange(3))
    calls = {
        "plain": ([x], {"q": q}),
        "shape": ([x[:3]], {"q": q}),
        "two operands": ([x, x], {"q": q}),
        "another letter": ([x], {"p": q}),
        "shape of an index array": ([x], {"q": q[:2]}),
        "prepared index array": ([x], {"q": planner.group(q, 4)}),
        **sample(x, q),
    }
    found = {}
    for name, (operands, indices, *contexts) in calls.items():
        with contexts[0] if contexts else contextlib.nullcontext():
            found[name] = load_backend(engine.name).signature(operands, indices)
    for one, other in itertools.combinations(found, 2):
        assert found[one] != found[other], f"{one} and {other} would share a plan"
        assert hash(found[one]) is not None


def entered(call):
    """How many functions of Python a warm call enters."""
    entries = []
    call(), call()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: entries.append(frame) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(before)
    return len(entries)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("index_mode", [None, "raise", "drop", "nan"])
def test_a_warm_call_of_a_plan_does_no_more_than_contract(framework, index_mode):
    """It enters one function more, `Plan.__call__`."""
    module = pytest.importorskip(framework)
    array = module.as_tensor if framework == "torch" else module.numpy.asarray
    x, c, q = array(np.ones((4, 3), "f4")), array(np.ones((2, 3, 5), "f4")), array(np.ones(4, "i4"))
    if index_mode is None:
        call = ("nj, jk -> nk", x, c[0]), {}, {}
    else:
        call = ("nj, q[n]jk -> nk", x, c), {"index_mode": index_mode}, {"q": q}
    (spec, *operands), options, arrays = call
    plan = planner.plan(spec, *operands, **options, **arrays)
    assert entered(lambda: plan(*operands, **arrays)) <= 1 + entered(
        lambda: planner.contract(spec, *operands, **options, **arrays)
    )


@pytest.mark.parametrize(
    ("spec", "shapes", "letters"),
    [
        ("nj, jk -> nk", [(4, 3), (3, 5)], ""),
        ("nj, q[n]jk -> nk", [(4, 3), (2, 3, 5)], "q"),
        ("ab, bc, cd -> ad", [(2, 3), (3, 4), (4, 5)], ""),
    ],
)
def test_a_warm_call_of_einsum_does_little_more_than_contract(spec, shapes, letters):
    jnp = pytest.importorskip("jax").numpy
    operands, arrays = [jnp.ones(shape) for shape in shapes], {letter: jnp.ones(4, "int32") for letter in letters}
    assert entered(lambda: planner.einsum(spec, *operands, **arrays)) <= 6 + entered(
        lambda: planner.contract(spec, *operands, **arrays)
    )


def test_a_warm_call_under_nan_does_little_more_than_one_under_raise():
    """Under "nan" the values are looked at where they lie: that takes no more than "raise" takes to check them."""
    jnp = pytest.importorskip("jax").numpy
    x, c, q = jnp.ones((4, 3)), jnp.ones((2, 3, 5)), jnp.ones(4, "int32")
    counts = {
        mode: entered(lambda mode=mode: planner.contract("nj, q[n]jk -> nk", x, c, q=q, index_mode=mode))
        for mode in ("raise", "nan")
    }
    assert counts["nan"] <= counts["raise"] + 5
