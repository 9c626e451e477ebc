"""Resolving: ellipses, broadcasting and sizes, by the rules of numpy and of our own."""

from __future__ import annotations

import pytest
from conftest import examples
from hypothesis import given, settings

import planner
from planner.language.resolve import resolve_shapes, shorten
from planner.testing import problems


@pytest.mark.parametrize(
    ("text", "shapes", "options", "printed", "output_shape"),
    [
        ("...j,jk", [(2, 3, 4), (4, 5)], {}, "abj, jk -> abk", (2, 3, 5)),
        ("...,...", [(3, 1), (2, 1, 4)], {}, "b, ac -> abc", (2, 3, 4)),
        ("i...->i", [(2, 3)], {}, "ia -> i", (2,)),
        ("ij,ij->ij", [(1, 3), (2, 1)], {}, "j, i -> ij", (2, 3)),
        ("ij,ij->ij", [(1, 0), (1, 1)], {}, "ij, i -> ij", (1, 0)),
        ("ii,i->i", [(3, 3), (1,)], {}, "ii,  -> i", (3,)),
        ("->ij", [()], {"sizes": {"i": 2, "j": 3}}, " -> ij", (2, 3)),
        ("->ij", [()], {"sizes": (2, 3)}, " -> ij", (2, 3)),
        ("i->i...", [(2,)], {}, "i -> i", (2,)),
        ("q[n]j->nj", [(5, 2)], {"q": (3,)}, "q[n]j -> nj", (3, 2)),
        ("q[n]j->nj", [(1, 2)], {"q": (3,)}, "q[n]j -> nj", (3, 2)),
        ("nj,q[n]->nj", [(3, 2), (4,)], {"q": (1,)}, "nj, q[] -> nj", (3, 2)),
        ("n->q[n]", [(3,)], {"q": (3,), "sizes": {"q": 7}}, "n -> q[n]", (7,)),
        ("q[n]->q[n]", [(5,)], {"q": (3,)}, "q[n] -> q[n]", (5,)),
        ("q[n]->q[n]", [(5,)], {"q": (3,), "sizes": {"q": 8}}, "q[n] -> q[n]", (8,)),
        ("q[...]j->...j", [(5, 2)], {"q": (3, 4)}, "q[ab]j -> abj", (3, 4, 2)),
        ("...j,q[...]->...", [(3, 4, 2), (6,)], {"q": (4,)}, "abj, q[b] -> ab", (3, 4)),
    ],
)
def test_what_specs_resolve_to(text, shapes, options, printed, output_shape):
    spec = planner.resolve(text, *shapes, **options)
    assert str(spec) == printed
    assert spec.output_shape == output_shape


@settings(max_examples=examples(100, 2000))
@given(problems())
def test_resolved_specs_agree_with_the_oracle_and_resolve_to_themselves(case):
    shapes = {name: q.shape for name, q in case.indices.items()}
    resolved = resolve_shapes(case.spec, case.shapes, shapes, case.sizes)
    assert resolved.spec.output_shape == case.output_shape()
    again = resolve_shapes(resolved.spec, resolved.shapes, dict(resolved.index_shapes))
    assert again == resolved


# Those that a call of `contract` can end in too are in `test_hostile.py`.
ERRORS = [
    ("...ij->i", [(2,)], {}, r"operand 0 has 1 dimensions, but its axes are \.\.\.ij"),
    ("...,...->...", [(2,), (3,)], {}, "axis 'a' has size 2 in operand 0 but 3 in operand 1"),
    ("nj,q[n]->j", [(3, 2), (5,)], {"q": (4,)}, "axis 'n' has size 3 in operand 0 but 4 in index array 'q'"),
    ("i->ij", [(2,)], {}, "no input has the output's axis 'j'.*pass sizes"),
    ("n->q[n]", [(2,)], {"q": (2,)}, r"output's dimension q\[n\] is not known: pass sizes"),
    # Beyond any address space.
    ("i,j->ij", [(2**40,), (2**40,)], {}, r"the result would have more than 2\^62 elements"),
    ("i,jk->i", [(2,), (2**40, 2**40)], {}, "operand 1 would have"),
]


@pytest.mark.parametrize(("text", "shapes", "options", "message"), ERRORS)
def test_errors_name_axis_place_and_sizes(text, shapes, options, message):
    kind = planner.SearchLimitError if "would have" in message else planner.ShapeError
    with pytest.raises(kind, match=message):
        planner.resolve(text, *shapes, **options)


def test_plan_shows_the_whole_call_with_a_shape_error():
    with pytest.raises(planner.ShapeError, match=r"in 'ij,jk->ik', \(2, 3\), \(4, 5\)"):
        planner.plan("ij,jk->ik", (2, 3), (4, 5), backend="numpy")


@pytest.mark.parametrize("size", [1, 4])
def test_a_resolved_spec_takes_no_other_size(size):
    spec = planner.resolve("ij->i", (2, 3))
    assert planner.resolve(spec, (2, 3), sizes={"j": 3}) == spec
    with pytest.raises(planner.ShapeError, match=f"sizes= says {size} for 'j', but 'ij -> i' is resolved with"):
        planner.resolve(spec, (2, 3), sizes={"j": size})


def test_long_texts_are_cut_for_messages():
    assert shorten("x" * 200) == "x" * 200
    assert shorten("x" * 201) == "x" * 197 + "..."
