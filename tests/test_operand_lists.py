"""Operands as one list or tuple, as `torch.einsum` takes them, give what operands one by one give."""

import numpy as np
import opt_einsum
import pytest
from conftest import installed_frameworks

import planner
from planner.language.spec import Operand

A, B = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
C, Q = np.arange(20.0).reshape(5, 4), np.array([4, 0, 4])
CALLS = [("ij, jk -> ik", (A, B), {}), ("ji", (A,), {}), ("q[n]j, nk -> jk", (C, B), {"q": Q})]


def arrays_of(framework, *arrays):
    if framework == "torch":
        torch = pytest.importorskip("torch")
        return [torch.from_numpy(np.ascontiguousarray(x)) for x in arrays]
    if framework == "jax":
        jnp = pytest.importorskip("jax").numpy
        return [jnp.asarray(x) for x in arrays]
    return list(arrays)


@pytest.mark.parametrize("framework", installed_frameworks())
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize(("spec", "operands", "indices"), CALLS)
def test_a_list_of_operands(framework, kind, spec, operands, indices):
    operands = arrays_of(framework, *operands)
    indices = dict(zip(indices, arrays_of(framework, *indices.values()), strict=True))
    expected = planner.contract(spec, *operands, **indices)
    for _ in range(2):
        got = planner.contract(spec, kind(operands), **indices)
        assert type(got) is type(expected)
        assert np.array_equal(got, expected)
    made = planner.plan(spec, kind(operands), **indices)
    assert made == planner.plan(spec, *operands, **indices)
    assert np.array_equal(made(*operands, **indices), expected)
    # A resolved spec in place of the string.
    assert np.array_equal(planner.contract(made.resolved.spec, kind(operands), **indices), expected)


def test_a_list_of_shapes():
    expected = planner.plan("ij, jk -> ik", (2, 3), (3, 4), backend="numpy")
    assert planner.plan("ij, jk -> ik", [(2, 3), (3, 4)], backend="numpy") == expected
    assert planner.plan("ij, jk -> ik", ([2, 3], [3, 4]), backend="numpy") == expected
    assert planner.plan("ij, jk -> ik", [Operand((2, 3)), (3, 4)], backend="numpy") == expected
    # A list of integers is the shape of one operand, as it was.
    one = planner.plan("ij -> ji", Operand((2, 3)), backend="numpy")
    for shape in ((2, 3), [2, 3], (np.int64(2), np.int32(3)), [(2, 3)], ([2, 3],)):
        assert planner.plan("ij -> ji", shape, backend="numpy") == one
    scalar = planner.plan("->", Operand(()), backend="numpy")
    assert planner.plan("->", (), backend="numpy") == planner.plan("->", [()], backend="numpy") == scalar
    found = planner.tradeoff("ij, jk -> ik", [(2, 3), (3, 4)], backend="numpy")
    assert len(found) == len(planner.tradeoff("ij, jk -> ik", (2, 3), (3, 4), backend="numpy"))


def test_sublists_are_read_as_before():
    expected = A @ B
    assert np.array_equal(planner.contract(A, [0, 1], B, [1, 2], [0, 2]), expected)
    assert np.array_equal(planner.contract(A, (0, 1), B, (1, 2), (0, 2)), expected)
    assert np.array_equal(planner.contract(A, [1, 0]), A.T)
    assert planner.plan((2, 3), [0, 1], (3, 4), [1, 2], [0, 2], backend="numpy").cost.flops == 48


def test_a_list_in_the_wrong_place():
    with pytest.raises(planner.PlannerError, match="operand 1 is a list of arrays: give the operands one by one, or"):
        planner.plan("ij, jk -> ik", A, [B])
    with pytest.raises(planner.PlannerError, match="the spec must be a string, not list"):
        planner.contract([A, B], "ij, jk -> ik")


def test_a_list_under_a_torch_compiler():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.compiler.reset()
    a, b, c = (torch.from_numpy(x).requires_grad_() for x in (A.copy(), B.copy(), C.copy()))
    q = torch.from_numpy(Q)

    def function(a, b, c):
        whole = planner.contract("ij, jk -> ik", [a, b])
        return whole.sum() + planner.contract("q[n]j, nk -> jk", (c, b), q=q).sum() + planner.contract(a, [0, 1]).sum()

    made = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(made(a, b, c), function(a, b, c))
    found, expected = (torch.autograd.grad(f(a, b, c), (a, b, c)) for f in (made, function))
    assert all(map(torch.equal, found, expected))
    torch.compiler.reset()


def test_a_list_under_jit():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    a, b, c, q = map(jax.numpy.asarray, (A, B, C, Q))

    def function(a, b, c, q):
        whole = planner.contract("ij, jk -> ik", [a, b])
        return whole.sum() + planner.contract("q[n]j, nk -> jk", (c, b), q=q).sum()

    assert jax.jit(function)(a, b, c, q) == function(a, b, c, q)
    expected = jax.grad(function)(a, b, c, q)
    assert np.array_equal(jax.jit(jax.grad(function))(a, b, c, q), expected)


def test_opt_einsum_on_torch(monkeypatch):
    """Its backend for torch calls `torch.einsum(equation, operands)`."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    a, b, c = (torch.from_numpy(x) for x in (A, B, np.arange(8.0).reshape(4, 2)))
    # An axis that all three have, so that opt_einsum does not take `tensordot`.
    spec, operands = "bij,bjk,bkl->bil", [torch.stack([x, 2 * x]) for x in (a, b, c)]
    expected = torch.einsum(spec, *operands)
    seen = []

    def einsum(*arguments):
        seen.append(arguments)
        return planner.contract(*arguments)

    monkeypatch.setattr(torch, "einsum", einsum)
    assert torch.equal(opt_einsum.contract(spec, *operands, backend="torch"), expected)
    assert len(seen) == 2
    assert all(len(arguments) == 2 and isinstance(arguments[1], (list, tuple)) for arguments in seen)
