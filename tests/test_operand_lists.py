"""Operands as one list or tuple, as `torch.einsum` takes them, give what operands one by one give."""

import numpy as np
import pytest
from engines import in_each

import planner
from planner.language.spec import Operand

A, B = np.arange(6.0, dtype="f4").reshape(2, 3), np.arange(12.0, dtype="f4").reshape(3, 4)
C, Q = np.arange(20.0, dtype="f4").reshape(5, 4), np.array([4, 0, 4])
CALLS = [("ij, jk -> ik", (A, B), {}), ("ji", (A,), {}), ("q[n]j, nk -> jk", (C, B), {"q": Q})]


@in_each("numpy", "torch", "jax")
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize(("spec", "operands", "indices"), CALLS)
def test_a_list_of_operands(engine, kind, spec, operands, indices):
    operands = [engine.array(x) for x in operands]
    indices = {name: engine.array(q) for name, q in indices.items()}
    expected = planner.contract(spec, *operands, **indices)

    def listed(*xs):
        return planner.contract(spec, kind(xs), **indices)

    for call in (listed, listed, engine.jit(listed)):
        got = call(*operands)
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
