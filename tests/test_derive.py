"""The language is closed: transposes and batches of specs are specs, of the right values."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import Floors, assert_equal, exact_problems

import planner
from planner.language.derive import sum_dims, summable_dims
from planner.language.parse import parse
from planner.testing.reference import reference, reference_gradients


def resolved_call(case):
    """The spec without ellipses and size-1 dims, and operands and index arrays in its shapes."""
    spec, index_shapes = case.resolved(), dict(case.resolved_indices())
    views = [x.reshape(spec.shape(term)) for x, term in zip(case.operands(), spec.inputs, strict=True)]
    return spec, views, {name: q.reshape(index_shapes[name]) for name, q in case.indices.items()}


def exact_sums(**options):
    return exact_problems(("int64",), **options)


def test_transpose_is_the_oracles_gradient():
    """In every operand; then <y', f(x)> = <f^T(y'), x>, and a transpose twice is the spec."""
    floors = Floors()

    @settings(max_examples=examples(200, 4_000))
    @given(exact_sums())
    def law(case):
        spec, operands, indices = resolved_call(case)
        gout = case.output_gradient()
        pairing = int((gout * case.expected()).sum())
        for number, wanted in enumerate(case.expected_gradients()):
            transposed = planner.transpose(spec, number)
            assert planner.transpose(transposed, number) == spec
            assert planner.transpose(spec, number - len(operands)) == transposed
            swapped = [*operands[:number], gout.reshape(spec.output_shape), *operands[number + 1 :]]
            found = planner.contract(transposed, *swapped, index_mode=case.index_mode, **indices)
            # Broadcast dimensions were taken out by resolving, so their gradients come without them.
            assert_equal((found.reshape(wanted.shape), found.dtype.name), wanted, "int64", f"gradient {number}")
            assert int((found * operands[number]).sum()) == pairing
        floors.note(nonzero=pairing != 0, gather=bool(indices))

    law()
    floors.at_least(examples(150, 3_000), nonzero=0.2, gather=0.5)


@pytest.mark.parametrize("derive", [planner.transpose, planner.batched], ids=["transpose", "batched"])
@pytest.mark.parametrize("spec", ["q[n]j->nj", parse("ij->ij"), parse("q[]->"), 3], ids=str)
def test_what_is_not_resolved_is_refused(derive, spec):
    with pytest.raises(planner.SpecError, match=f"{derive.__name__} takes a resolved spec.*pass planner.resolve"):
        derive(spec, 0)
    assert derive(planner.resolve("q[]->", (4,), q=()), 0).gathers


@settings(max_examples=examples(50, 2_000))
@given(exact_sums(), st.integers(0, 3), st.data())
def test_batched_is_a_loop(case, size, data):
    spec, operands, indices = resolved_call(case)
    chosen = [i for i in range(len(operands)) if data.draw(st.booleans(), label=f"operand {i} has the axis")]
    moved = [name for name in indices if data.draw(st.booleans(), label=f"{name} has the axis")]
    random = np.random.default_rng(case.seed)
    stacked = [random.integers(-3, 4, (size, *x.shape)) if i in chosen else x for i, x in enumerate(operands)]
    rows = {n: random.permuted(np.broadcast_to(q.ravel(), (size, q.size)), axis=1) for n, q in indices.items()}
    shuffled = {n: rows[n].reshape(size, *q.shape) if n in moved else q for n, q in indices.items()}
    batched = planner.batched(spec, size, chosen, moved)
    got = planner.contract(batched, *stacked, index_mode=case.index_mode, **shuffled)
    assert got.shape == (size, *spec.output_shape)
    for b in range(size):
        single = [x[b] if i in chosen else x for i, x in enumerate(stacked)]
        index = {n: q[b] if n in moved else q for n, q in shuffled.items()}
        wanted = reference(str(spec), *single, sizes=spec.output_shape, index_mode=case.index_mode, **index)
        assert_equal((got[b], got.dtype.name), wanted, "int64")


@settings(max_examples=examples(100, 2_000))
@given(exact_sums(max_size=3, max_operands=3), st.data())
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


GROUPED = planner.resolve("nij,q[n]jk->nik", (5, 1, 2), (3, 2, 4), q=(5,))


@pytest.mark.parametrize(
    ("derive", "message"),
    [
        *((partial(planner.batched, size=2, letter=x), "must be one character that can name") for x in ("ab", "1", 3)),
        (partial(planner.batched, size=2, letter="n"), "'n' is in use"),
        (partial(planner.batched, size=2.5), r"non-negative integer, but is 2\.5"),
        (partial(planner.batched, size=-1), "size"),
        (partial(planner.batched, size=2, operands=[0, 7]), "there is no operand 7"),
        (partial(planner.batched, size=2, arrays=["p"]), "no index array 'p'"),
        (partial(planner.transpose, operand="1"), "by its number, not by '1'"),
        (partial(planner.transpose, operand=2), "has 2 operands, so there is no operand 2"),
    ],
)
def test_what_does_not_derive(derive, message):
    with pytest.raises(planner.ShapeError, match=message):
        derive(GROUPED)
