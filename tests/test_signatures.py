"""What a warm call looks its runner up by: calls that may need different plans never have one signature."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np

import planner
from planner.program.frameworks import load_backend


def all_differ(backend, calls):
    """Calls by what is special of each, as operands, index arrays and a context."""
    found = {}
    for name, (operands, indices, context) in calls.items():
        with context:
            found[name] = load_backend(backend).signature(operands, indices)
    for one, other in itertools.combinations(found, 2):
        assert found[one] != found[other], f"{one} and {other} would share a plan"
        assert hash(found[one]) is not None


def plain():
    return contextlib.nullcontext()


def test_numpy():
    x, q = np.ones((4, 4)), np.arange(3)
    all_differ(
        "numpy",
        {
            "plain": ([x], {"q": q}, plain()),
            "shape": ([x[:3]], {"q": q}, plain()),
            "dtype": ([x.astype("f4")], {"q": q}, plain()),
            "kind of array": ([x.view(np.matrix)], {"q": q}, plain()),
            "two operands": ([x, x], {"q": q}, plain()),
            "another letter": ([x], {"p": q}, plain()),
            "shape of an index array": ([x], {"q": q[:2]}, plain()),
            "dtype of an index array": ([x], {"q": q.astype("i2")}, plain()),
            "unsigned index array": ([x], {"q": q.astype("u8")}, plain()),
            "prepared index array": ([x], {"q": planner.group(q, 4)}, plain()),
        },
    )


def test_torch(torch):
    x, q = torch.ones(4, 4), torch.arange(3)

    @contextlib.contextmanager
    def deterministic():
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    all_differ(
        "torch",
        {
            "plain": ([x], {"q": q}, plain()),
            "shape": ([x[:3]], {"q": q}, plain()),
            "strides": ([x.t()], {"q": q}, plain()),
            "expanded": ([x[:1].expand(4, 4)], {"q": q}, plain()),
            "dtype": ([x.double()], {"q": q}, plain()),
            "device": ([x.to("meta")], {"q": q}, plain()),
            "gradient": ([x.clone().requires_grad_()], {"q": q}, plain()),
            "gradient, none recorded": ([x.clone().requires_grad_()], {"q": q}, torch.no_grad()),
            "none recorded": ([x], {"q": q}, torch.no_grad()),
            "autocast": ([x], {"q": q}, torch.autocast("cpu", torch.bfloat16)),
            "deterministic": ([x], {"q": q}, deterministic()),
            "two operands": ([x, x], {"q": q}, plain()),
            "gradient of the first": ([x.clone().requires_grad_(), x], {"q": q}, plain()),
            "gradient of the second": ([x, x.clone().requires_grad_()], {"q": q}, plain()),
            "another letter": ([x], {"p": q}, plain()),
            "shape of an index array": ([x], {"q": q[:2]}, plain()),
            "dtype of an index array": ([x], {"q": q.int()}, plain()),
            "device of an index array": ([x], {"q": q.to("meta")}, plain()),
            "prepared index array": ([x], {"q": planner.group(q, 4)}, plain()),
        },
    )


def test_jax(jax):
    jnp = jax.numpy
    x, q = jnp.ones((4, 4)), jnp.arange(3)
    all_differ(
        "jax",
        {
            "plain": ([x], {"q": q}, plain()),
            "shape": ([x[:3]], {"q": q}, plain()),
            "dtype": ([x.astype("bfloat16")], {"q": q}, plain()),
            "weak type": ([jax.lax.full((4, 4), 1.0)], {"q": q}, plain()),
            "wide types": ([x], {"q": q}, jax.enable_x64(True)),
            "another letter": ([x], {"p": q}, plain()),
            "shape of an index array": ([x], {"q": q[:2]}, plain()),
            "dtype of an index array": ([x], {"q": q.astype("int8")}, plain()),
            "prepared index array": ([x], {"q": planner.group(q, 4)}, plain()),
        },
    )
