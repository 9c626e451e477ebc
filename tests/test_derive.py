"""The language is closed: transposes and batches of specs are specs, of the right values."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.language.derive import sum_dims, summable_dims
from planner.language.parse import parse
from planner.language.resolve import resolve_shapes
from planner.testing import problems, reference
from planner.testing.reference import reference_gradients


def resolved_call(case):
    shapes = {name: q.shape for name, q in case.indices.items()}
    resolved = resolve_shapes(case.spec, case.shapes, shapes, case.sizes)
    views = [x.reshape(s) for x, s in zip(case.operands(), resolved.shapes, strict=True)]
    index_shapes = dict(resolved.index_shapes)
    indices = {name: q.reshape(index_shapes[name]) for name, q in case.indices.items()}
    return resolved.spec, views, indices


MODES = {"index_modes": ("raise", "drop", "clip"), "max_size": 3, "max_operands": 3}


@settings(max_examples=examples(200, 2000))
@given(problems(**MODES), st.data())
def test_transposes_give_the_oracles_gradients(case, data):
    spec, operands, indices = resolved_call(case)
    wanted = case.expected_gradients()
    number = data.draw(st.integers(0, len(operands) - 1))
    transposed = planner.transpose(spec, number)
    operands[number] = case.output_gradient()
    found = planner.contract(transposed, *operands, index_mode=case.index_mode, **indices)
    # Broadcast dimensions were taken out by resolving, so their gradients come without them.
    np.testing.assert_array_equal(found.reshape(wanted[number].shape), wanted[number])
    assert planner.transpose(transposed, number) == spec
    assert planner.transpose(spec, number - len(operands)) == transposed


@pytest.mark.parametrize("derive", [planner.transpose, planner.batched], ids=["transpose", "batched"])
@pytest.mark.parametrize("spec", ["q[n]j->nj", parse("ij->ij"), parse("q[]->"), 3], ids=str)
def test_what_is_not_resolved_is_refused(derive, spec):
    with pytest.raises(planner.SpecError, match=f"{derive.__name__} takes a resolved spec.*pass planner.resolve"):
        derive(spec, 0)
    assert derive(planner.resolve("q[]->", (4,), q=()), 0).gathers


@settings(max_examples=examples(100, 1000))
@given(problems(**MODES), st.data())
def test_batched_is_a_loop(case, data):
    spec, operands, indices = resolved_call(case)
    size = data.draw(st.integers(1, 3))
    chosen = data.draw(st.sets(st.integers(0, len(operands) - 1)))
    arrays = data.draw(st.sets(st.sampled_from(sorted(indices)))) if indices else set()
    batched = planner.batched(spec, size, chosen, arrays)
    many = [np.stack([x + b for b in range(size)]) if i in chosen else x for i, x in enumerate(operands)]
    index = {name: np.stack([q] * size) if name in arrays else q for name, q in indices.items()}
    found = planner.contract(batched, *many, index_mode=case.index_mode, **index)
    for b in range(size):
        single = [x[b] if i in chosen else x for i, x in enumerate(many)]
        sizes = spec.output_shape
        wanted = reference(str(spec), *single, sizes=sizes, index_mode=case.index_mode, **indices)
        np.testing.assert_array_equal(found[b], wanted)


@settings(max_examples=examples(200, 2000))
@given(problems(**MODES), st.data())
def test_a_gradient_that_repeats_is_one_of_a_sum(case, data):
    spec, operands, indices = resolved_call(case)
    gout = case.output_gradient()
    free = [d for d in summable_dims(spec) if gout.shape[d]]
    dims = data.draw(st.sets(st.sampled_from(free))) if free else set()
    once = gout[tuple(slice(1) if d in dims else slice(None) for d in range(gout.ndim))]
    repeated = np.broadcast_to(once, gout.shape)
    wanted = reference_gradients(case.spec, repeated, *case.operands(), **case.arguments())
    for number in range(len(operands)):
        others = list(operands)
        others[number] = once.reshape([n for d, n in enumerate(once.shape) if d not in dims])
        short = planner.transpose(sum_dims(spec, dims), number)
        found = planner.contract(short, *others, index_mode=case.index_mode, **indices)
        np.testing.assert_array_equal(found.reshape(wanted[number].shape), wanted[number])


@pytest.mark.parametrize(
    ("spec", "dims"),
    [
        ("ij, jk -> ik", (0, 1)),
        ("i -> ik", (0,)),  # no input has the other axis: its sum would count once
        ("ij -> iij", (0, 1, 2)),  # a diagonal: its sum over rows is what lies on it
        ("nj -> q[n]jn", (1, 2)),
        ("q[n]j -> nj", (0, 1)),
    ],
)
def test_what_may_be_summed(spec, dims):
    inputs = spec.split(" -> ")[0].replace("[n]", "").split(", ")
    shapes = [tuple(3 if e == "q" else 2 for e in term) for term in inputs]
    sizes = {"q": 3} if "-> q" in spec else {"k": 2} if spec == "i -> ik" else None
    indices = {"q": (2,)} if "q" in spec else {}
    assert summable_dims(planner.resolve(spec, *shapes, sizes=sizes, **indices)) == dims


def test_what_does_not_derive():
    spec = planner.resolve("nij,q[n]jk->nik", (5, 1, 2), (3, 2, 4), q=(5,))
    for letter in ("ab", "1", 3):
        with pytest.raises(planner.ShapeError, match="must be one character that can name an axis, not"):
            planner.batched(spec, 2, letter=letter)
    with pytest.raises(planner.ShapeError, match=r"non-negative integer, but is 2\.5"):
        planner.batched(spec, 2.5)
    with pytest.raises(planner.ShapeError, match="by its number, not by '1'"):
        planner.transpose(spec, "1")
    with pytest.raises(planner.ShapeError, match="has 2 operands, so there is no operand 2"):
        planner.transpose(spec, 2)
    with pytest.raises(planner.ShapeError, match="there is no operand 7"):
        planner.batched(spec, 2, [0, 7])
    with pytest.raises(planner.ShapeError, match="no index array 'p'"):
        planner.batched(spec, 2, arrays=["p"])
    with pytest.raises(planner.ShapeError, match="'n' is in use"):
        planner.batched(spec, 2, letter="n")
    with pytest.raises(planner.ShapeError, match="size"):
        planner.batched(spec, -1)
