"""The language: what parses, what it means, and what the errors say."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner.language.parse import parse, parse_sublists
from planner.language.spec import ELLIPSIS, Gather, Spec, is_letter, unused_letters
from planner.testing import specs


@settings(max_examples=examples(300, 3000))
@given(specs())
def test_printing_a_parsed_spec_and_parsing_it_again_changes_nothing(text):
    spec = parse(text)
    assert parse(str(spec)) == spec
    assert str(parse(str(spec))) == str(spec)


@settings(max_examples=examples(200, 2000))
@given(specs(), st.randoms(use_true_random=False))
def test_spaces_are_free(text, random):
    tokens = text.replace(" ", "").replace("...", "…").replace("->", "→")
    spaced = "".join(" " * random.randrange(3) + c for c in tokens).replace("…", "...").replace("→", "->")
    assert parse(spaced) == parse(text)


@pytest.mark.parametrize(
    ("text", "inputs", "output"),
    [
        ("ij,jk->ik", (("i", "j"), ("j", "k")), ("i", "k")),
        ("ij,jk", (("i", "j"), ("j", "k")), ("i", "k")),
        ("ba", (("b", "a"),), ("a", "b")),
        ("ii", (("i", "i"),), ()),
        ("ii->i", (("i", "i"),), ("i",)),
        ("i->ii", (("i",),), ("i", "i")),
        ("...i,i...", ((ELLIPSIS, "i"), ("i", ELLIPSIS)), (ELLIPSIS,)),
        ("...b,a...", ((ELLIPSIS, "b"), ("a", ELLIPSIS)), (ELLIPSIS, "a", "b")),
        ("->", ((),), ()),
        ("", ((),), ()),
        (",->", ((), ()), ()),
        ("->ij", ((),), ("i", "j")),
        ("nij, q[n]jk -> nik", (("n", "i", "j"), (Gather("q", ("n",)), "j", "k")), ("n", "i", "k")),
        ("q[]i->i", ((Gather("q", ()), "i"),), ("i",)),
        ("q[...n]->...n", ((Gather("q", (ELLIPSIS, "n")),),), (ELLIPSIS, "n")),
        ("n->q[n]q[n]", (("n",),), (Gather("q", ("n",)),) * 2),
        ("漢é->é", (("漢", "é"),), ("é",)),
        ("αβ,βγ", (("α", "β"), ("β", "γ")), ("α", "γ")),
    ],
)
def test_what_parses(text, inputs, output):
    assert parse(text) == Spec(inputs, output)


CARETS = [
    ("ij,jk->ik->il", 9, "the output is one term"),
    ("ij->i,j", 5, "the output is one term"),
    ("ij-k", 2, "'-' must be followed by '>'"),
    ("ij>k", 2, "'>' must follow '-'"),
    ("i..j", 1, "three dots"),
    ("...i...->i", 4, "at most one '...'"),
    ("q[...,n]->n", 1, "never closed"),
    ("q[......]->n", 5, "at most one '...'"),
    ("i(j->i", 1, "is no letter"),
    ("q[n+]->i", 3, "inside a bracket"),
    ("ij[k->i", 2, "never closed: add ']'"),
    ("ij, [k]->i", 4, "needs the letter of its index array"),
    ("ij]->i", 2, r"no '\[' before it"),
    ("q[p[n]]->n", 3, "a bracket holds axes only"),
    ("i1->i", 1, "'1' is no letter"),
    ("i_->i", 1, "'_' is no letter"),
    ("i+j->i", 1, r"'\+' is no letter"),
    ("aµ->a", 1, "'µ' becomes 'μ' by the NFKC"),
    ("aﬁ->a", 1, "NFKC"),
    ("a\u212a->a", 1, "becomes 'K' by the NFKC"),
    ("q[µ]->a", 2, "NFKC"),
    ("q[n]j", 5, "the output must be written: add '->'"),
    ("qj,q[n]k->nk", 0, "'q' names an index array elsewhere"),
    ("q[q]->q", 2, "'q' names an index array elsewhere"),
    ("q[n]->q", 6, "'q' names an index array elsewhere"),
]


@pytest.mark.parametrize(("text", "position", "message"), CARETS)
def test_a_bad_spec_gets_a_caret_under_the_place(text, position, message):
    with pytest.raises(planner.SpecError, match=message) as caught:
        parse(text)
    assert caught.value.position == position
    first, shown, caret = str(caught.value).split("\n")
    assert shown.strip() == text
    assert caret.index("^") - (len(shown) - len(shown.lstrip())) == position


def test_the_caret_of_a_long_spec_shows_a_window():
    text = "a" * 70_000 + "+" + "b" * 30_000
    with pytest.raises(planner.SpecError) as caught:
        parse(text)
    _, shown, caret = str(caught.value).split("\n")
    assert len(shown) < 200
    assert shown[caret.index("^")] == "+"


def test_letters_enough_for_any_spec():
    letters = unused_letters("aQ", 500)
    assert len(set(letters)) == 500
    assert not {"a", "Q"} & set(letters)
    assert all(map(is_letter, letters))


# -- sublists --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([0, 1], [1, 2], [0, 2]), "ab,bc->ac"),
        (([0, 1], [1, 2]), "ab,bc"),
        (([5, 3], [3, 5]), "ba,ab"),
        (([..., 0], [0, ...], [...]), "...a,a...->..."),
        (([..., 1], [0, ...]), "...b,a..."),
        ((["x", "yy"], ["yy", "z"], ["x", "z"]), "ab,bc->ac"),
        (([0, 0], [0], []), "aa,a->"),
        ((range(2), np.array([1, 2]), (np.int64(0), 2)), "ab,bc->ac"),
    ],
)
def test_sublists_mean_what_the_letters_mean(arguments, text):
    operands = [np.ones((2,) * len(labels)) for labels in arguments[:2]]
    interleaved = [x for pair in zip(operands, arguments[:2], strict=True) for x in pair] + list(arguments[2:])
    spec, found, _ = parse_sublists(interleaved)
    assert spec == parse(text)
    assert all(a is b for a, b in zip(found, operands, strict=True))
    np.testing.assert_array_equal(planner.contract(*interleaved), planner.contract(text, *operands))


def test_more_labels_than_latin_letters():
    x = np.arange(8.0).reshape((1,) * 10 + (2, 2, 2))
    labels = [100 + i for i in range(13)]
    out = labels[::-1]
    assert np.array_equal(planner.contract(x, labels, out), x.transpose())
    spec, *_ = parse_sublists([x, list(range(80))])
    assert len(spec.output) == 80
