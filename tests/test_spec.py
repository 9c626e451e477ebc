"""The language: what parses, what it means, and what the errors say."""

from __future__ import annotations

import itertools
import re

import numpy as np
import opt_einsum
import pytest
from conftest import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

import planner
from planner.language.derive import batched
from planner.language.parse import parse, parse_sublists
from planner.language.spec import ELLIPSIS, Gather, Spec, is_axis, is_letter, unused_letters
from planner.testing import reference, specs
from planner.workloads import to_framework


@settings(max_examples=examples(150, 3000))
@given(specs(), st.randoms(use_true_random=False))
def test_printing_a_spec_or_adding_spaces_changes_nothing(text, random):
    spec = parse(text)
    assert parse(str(spec)) == spec
    assert str(parse(str(spec))) == str(spec)
    tokens = re.findall(r"\.\.\.|->|[^ ]", text)
    assert parse("".join(" " * random.randrange(3) + token for token in tokens)) == spec


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
        ("\u00a0a,\u3000 \u00a0", (("\u00a0", "a"), ("\u3000", "\u00a0")), ("a", "\u3000")),
        ("×\t÷,\n_+\r->\f÷\v_", (("×", "÷"), ("_", "+")), ("÷", "_")),
        ("\u0663e\u0301²->\u0301", (("\u0663", "e", "\u0301", "²"),), ("\u0301",)),
        ("Kq[\u212a]ﬁ->q[ﬁ]", (("K", Gather("q", ("\u212a",)), "ﬁ"),), (Gather("q", ("ﬁ",)),)),
        ("αβ,βγ", (("α", "β"), ("β", "γ")), ("α", "γ")),
    ],
)
def test_what_parses(text, inputs, output):
    assert parse(text) == Spec(inputs, output)


CARETS = [
    ("ij,jk->ik->il", 9, "a spec has one output term"),
    ("ij->i,j", 5, "a spec has one output term"),
    ("ij-k", 2, "'-' must be followed by '>'"),
    ("ij>k", 2, "'>' must follow '-'"),
    ("i..j", 1, "three dots"),
    ("...i...->i", 4, "at most one '...'"),
    ("q[...,n]->n", 1, "never closed"),
    ("q[......]->n", 5, "at most one '...'"),
    ("q[n1]->i", 3, "inside a bracket"),
    ("ij[k->i", 2, "never closed: add ']'"),
    ("ij, [k]->i", 4, "needs the letter of its index array"),
    ("ij]->i", 2, r"no '\[' before it"),
    ("q[p[n]]->n", 3, "a bracket may hold only axes"),
    ("i1->i", 1, "'1' cannot name an axis: an axis is one character other than"),
    ("µ[a]->a", 0, r"index arrays are keyword arguments, and Python reads this one as 'μ' \(NFKC"),
    ("b,aﬁ[a]->a", 3, "as 'fi'"),
    ("ij,a\u212a [a]->a", 4, "as 'K'"),
    ("a->×[a]", 3, "'×' cannot name an index array: .* single letters"),
    ("_[a]->a", 0, "'_' cannot name an index array"),
    ("\u0663[a]->a", 0, "cannot name an index array"),
    ("\u00a0[a]->a", 0, "cannot name an index array"),
    ("i\ud800j->i", 1, "cannot name an axis"),
    ("q[n\udfff]->i", 3, "cannot name an axis"),
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
    assert shown[4:] == re.sub("[\u00a0\ud800\udfff]", " ", text)
    assert caret.index("^") == position + 4


@pytest.mark.parametrize("text", ["a" * 70_000 + "9" + "b" * 30_000, "a\u2028b\x85c\vd\0e9"], ids=["long", "odd"])
def test_the_caret_stands_in_a_short_line_whatever_the_axes_are(text):
    with pytest.raises(planner.SpecError) as caught:
        parse(text)
    _, shown, caret = str(caught.value).splitlines()
    assert len(shown) < 200
    assert shown[caret.index("^")] == "9"


def test_letters_enough_for_any_spec():
    letters = unused_letters("aQ", 500)
    assert len(set(letters)) == 500
    assert not {"a", "Q"} & set(letters)
    assert all(map(is_letter, letters))


# -- axes that are not letters -----------------------------------------------------------------------------

# What `get_symbol` gives first: latin letters; letters with accents, × and ÷; beyond 500 all kinds of characters.
SYMBOLS = st.one_of(st.integers(0, 60), st.integers(52, 400), st.integers(400, 19_999)).map(opt_einsum.get_symbol)
SYMBOLS = SYMBOLS.filter(lambda symbol: symbol != "q")  # the index array
GRAMMAR = " \t\n\r\f\v0123456789,->.[]"


def test_every_character_but_the_grammars_own_names_an_axis():
    every = map(chr, (*range(0xD800), *range(0xE000, 0x110000)))
    assert {c for c in every if not is_axis(c)} == set(GRAMMAR)
    assert not any(map(is_axis, ("", "ab", "\ud800", "\udfff")))
    for i in range(20_000):
        assert is_axis(opt_einsum.get_symbol(i))


@settings(max_examples=examples(30, 5000))
@given(st.lists(SYMBOLS, min_size=4, max_size=4, unique=True))
@example(["µ", "μ", "K", "\u212a"])  # NFKC unifies them in pairs
@example(["\u00a0", "\u3000", "\u0663", "\u0301"])
@example(["\0", "\x1f", "\u2028", "="])
def test_any_symbol_is_an_axis_everywhere(symbols):
    a, b, c, d = symbols
    plain, text = "abq[c]d, cbb -> acd", f"{a}{b}q[{c}]{d}, {c}{b}{b} -> {a}{c}{d}"
    random = np.random.default_rng(0)
    x, y, q = random.integers(-3, 4, (2, 3, 5, 2)), random.integers(-3, 4, (4, 3, 3)), np.array([4, 0, -1, 4])
    assert parse(str(parse(text))) == parse(text)
    assert [len(term) for term in parse(text).terms] == [4, 3, 3]
    expected = planner.contract(plain, x, y, q=q)
    plan = planner.plan(text, x, y, q=q, sizes={a: 2, c: 4})
    again = planner.Plan.from_json(plan.to_json())
    assert str(again) == str(plan)
    for way in (plan, again):
        np.testing.assert_array_equal(way(x, y, q=q), expected)
    np.testing.assert_array_equal(reference(text, x, y, q=q), expected)
    # The implicit output sorts by code point, as numpy does with its letters; new letters are none of the spec's.
    ordered = sorted(symbols)
    assert parse(f"{d}{c},{b}{a}").output == tuple(ordered)
    spec = planner.resolve(f"...{a}, {a}{b} -> ...{b}", (7, 6, 2), (2, 3))
    assert spec.output_shape == (7, 6, 3)
    assert len(spec.sizes) == 4
    assert batched(spec, 5).output_shape == (5, 7, 6, 3)
    assert batched(spec, 5, letter="\ue000").output[0] == "\ue000"
    wide = planner.contract(f"{a} -> {b}{a}", np.ones(2), sizes={b: 3})
    assert wide.shape == (3, 2)
    with pytest.raises(planner.ShapeError, match="is in use"):
        batched(spec, 5, letter=b)
    with pytest.raises(planner.ShapeError) as caught:
        planner.contract(f"{a}{b},{b}{c}", np.ones((2, 3)), np.ones((4, 5)))
    assert f"axis {b!r} has size 3" in str(caught.value)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_a_network_of_more_labels_than_there_are_letters_runs(framework):
    """A chain of 52 tensors, each joined to the next by six bonds: 306 labels, × and ÷ among them."""
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    labels = ["".join(map(opt_einsum.get_symbol, range(6 * i, 6 * i + 6))) for i in range(51)]
    assert {"×", "÷"} <= set("".join(labels))
    terms = [labels[0], *(left + right[::-1] for left, right in itertools.pairwise(labels)), labels[-1]]
    random = np.random.default_rng(0)
    operands = [random.uniform(0.0, 0.04, (2,) * len(term)).astype("float32") for term in terms]
    spec, given = f"{','.join(terms)}->", [to_framework(framework, x, "float32") for x in operands]
    expected = operands[0].reshape(64).astype("float64")
    for x in operands[1:]:
        expected = expected @ x.astype("float64").transpose(*range(6), *reversed(range(6, x.ndim))).reshape(64, -1)
    plan = planner.plan(spec, *given, optimize="greedy")
    assert len(plan.resolved.spec.sizes) == 306
    np.testing.assert_allclose(float(plan(*given)), expected.item(), rtol=1e-4)


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
