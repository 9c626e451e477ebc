# ruff: noqa: E501
"""Random specs and calls: a result, or a `PlannerError` that names the place, the array or the option at fault."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from conftest import examples
from engines import ENGINES

import planner
from planner.language.parse import _parsed

ALPHABET = [
    *"abcijkqpXY", *"[[]]", ".", "...", ",", ",", "->", "-", ">", " ", " ", "\t", "\n", "\0", "_", "1", "é", "ß",
    "ﬁ", "²", "µ", "Ω", "\u212a", "\u2126", "\u0301", "\u200b", "\ud800", "\udfff", "𝒜", "漢", "→", "(", "{", "'", "\\", "%", "q[", "]",
]  # fmt: skip
OPTIONS = ("sizes", "optimize", "minimize", "memory_limit", "retain_limit", "index_mode", "dtype", "precision",
           "deadline")  # fmt: skip


def names_a_culprit(error, indices=()):
    """Whether an error says where to look: a caret under the spec, an operand, an index array, an axis, an option.

    What the call gave under other names counts as an option: the message must have the name.
    """
    text = str(error).partition("\n    in ")[0]  # what follows repeats the call
    if isinstance(error, planner.SpecError) and error.position is not None:
        *_, window, caret = text.split("\n")
        return caret.strip() == "^" and len(caret) <= len(window) + 1
    named = [r"operands? \d+", r"argument \d+", r"index array '.", r"axis '.", r"no operands", r"sizes=", r"the lists",
             r"the spec must be a string", r"\d+ input terms, but \d+ operands", r"output '",
             *(rf"\b{option}=" for option in OPTIONS), *(re.escape(repr(name)) for name in indices)]  # fmt: skip
    return any(re.search(pattern, text) for pattern in named)


def test_what_names_no_culprit_is_told():
    assert not names_a_culprit(planner.PlannerError("something went wrong"))
    assert not names_a_culprit(planner.SpecError("a bad spec"))
    assert names_a_culprit(planner.SpecError("a bad letter", "i?", 1))
    assert names_a_culprit(planner.ShapeError("operand 1 is too large"))
    assert not names_a_culprit(planner.ShapeError("an operand is too large"))


def test_random_strings_parse_or_show_the_place():
    rng = random.Random(0)
    parsed = 0
    for _ in range(examples(100_000, 1_000_000)):
        text = "".join(rng.choices(ALPHABET, k=rng.randrange(24)))
        try:
            spec = _parsed.__wrapped__(text)
        except planner.SpecError as error:
            assert 0 <= error.position <= len(text)  # noqa: PT017
            assert names_a_culprit(error), text  # noqa: PT017
        else:
            parsed += 1
            assert _parsed.__wrapped__(str(spec)) == spec
    assert parsed > 1000


# -- calls -----------------------------------------------------------------------------------------------

TERMS = ["a", "b", "c", "q[a]", "q[b]", "p[ab]", "..."]
VALID = [
    ("ab, bc -> ac", [(2, 3), (3, 2)], {}, {}),
    ("ab, bc, cd -> ad", [(2, 3), (3, 2), (2, 2)], {}, {}),
    ("q[a]b, ab -> ab", [(3, 2), (4, 2)], {"q": (4,)}, {}),
    ("ab -> q[a]b", [(4, 2)], {"q": (4,)}, {"sizes": {"q": 3}}),
    ("p[ab]c, q[a] -> abc", [(3, 2), (3,)], {"p": (4, 2), "q": (4,)}, {}),
    ("...a, a", [(2, 3, 2), (2,)], {}, {}),
    ("a -> ad", [(3,)], {}, {"sizes": {"d": 2}}),
]
STRANGE = [None, True, -1, 0, 1.5, float("nan"), 10**30, -(10**30), "", "x", "2 GiB", "2 parsecs", b"x", [], [1], (), (1, "a"), {},
           {"q": 3}, {"z": 1}, {"a": -1}, {"a": float("nan")}, {1: 2}, object(), np.float32(2), np.array(2.5), {3},
           [(0, 1)], [(0, 0)], [(5,)], "auto", "time", "drop", "float32", lambda *_: None, lambda *_: 1]  # fmt: skip
DTYPES = ["float64", "int8", "uint16", "complex64", "bool", "float16", "U1", "object", "datetime64[s]", "V3", "S2"]


def random_call(rng):
    """A spec, operands' shapes, index arrays' shapes and options: valid half of the time, and as near as that else."""
    if rng.random() < 0.7:
        spec, shapes, indices, options = rng.choice(VALID)
        return spec, list(shapes), dict(indices), dict(options)
    terms = ["".join(rng.choices(TERMS, k=rng.randrange(4))) for _ in range(2)]
    output = "".join(rng.choices(["a", "b", "d", "q[a]", "..."], k=rng.randrange(3)))
    shapes = [tuple(rng.choice([0, 1, 2, 2, 3]) for _ in range(rng.randrange(4))) for _ in range(2)]
    options = {"sizes": rng.choice([{"d": 2}, {"q": 3}, (2,), (2, 3)])} if rng.random() < 0.3 else {}
    return f"{','.join(terms)}->{output}", shapes, {"q": (2,)} if "q" in "".join(terms) + output else {}, options


def index(rng, shape):
    """An index array with values that are in range as a rule, of a dtype that is one of integers as a rule."""
    kind = rng.choice(["int64", "int64", "int8", "uint8", "uint64", "float32", "bool"])
    values = [rng.choice([0, 0, 0, 1, 1, 2, 3, -1, -4, 2**40, 2**63]) for _ in range(int(np.prod(shape)))]
    if kind not in ("float32", "bool"):
        info = np.iinfo(kind)
        values = [min(max(v, int(info.min)), int(info.max)) for v in values]
    return np.array(values, kind).reshape(shape)


def mutate(rng, spec, operands, indices, options):
    """Change one thing of a call, as a user might by mistake or by malice."""
    kind = rng.randrange(11)
    at = rng.randrange(len(operands)) if operands else 0
    x = operands[at] if operands else np.ones(2)
    if kind == 0:
        del operands[at : at + 1]
    elif kind == 1:
        operands.insert(at, x)
    elif kind == 2:
        operands[at : at + 1] = [rng.choice(STRANGE)]
    elif kind in (3, 4, 5) and isinstance(x, np.ndarray):
        dtype = rng.choice(DTYPES)
        other = np.zeros(x.shape, dtype) if dtype in DTYPES[4:] else np.ones(x.shape, dtype)
        operands[at : at + 1] = [rng.choice([x.T, x.T, x[None], x.ravel()[:1], x[None][:0], other, other])]
    elif kind == 6:
        name = rng.choice([*indices, "q", "z", "a"])
        indices[name] = rng.choice([*STRANGE, [0, 1], np.zeros((1, 1), int), np.array(["a"]), np.array(0), np.zeros(3)])
    elif kind == 7 and indices:
        del indices[rng.choice(list(indices))]
    elif kind == 8:
        options[rng.choice(OPTIONS)] = rng.choice(STRANGE)
    elif kind == 9:
        options[rng.choice(["size", "out", "optimise", "device", "qq", "", "é²"])] = rng.choice(STRANGE)
    elif isinstance(spec, str):
        place = rng.randrange(len(spec) + 1)
        cut = spec[:place] + rng.choice([*ALPHABET, ""]) + spec[place + rng.randrange(2) :]
        spec = rng.choice([cut, cut, cut, rng.choice(STRANGE)])
    return spec, operands, indices, options


def to_framework(name, x):
    """The same array in another framework, where it has the dtype."""
    return ENGINES[name]().array(x) if isinstance(x, np.ndarray) and x.dtype.kind in "fiubc" else x


@pytest.mark.parametrize(
    ("framework", "ci", "nightly"), [("numpy", 9_000, 60_000), ("torch", 900, 30_000), ("jax", 200, 10_000)]
)
def test_random_calls_give_results_or_name_the_culprit(framework, ci, nightly, jax_in_a_hurry):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    results, kinds = 0, set()
    for seed in range(examples(ci, nightly)):
        rng = random.Random(seed)
        spec, shapes, index_shapes, options = random_call(rng)
        operands = [np.ones(shape, "float32") for shape in shapes]
        indices = {name: index(rng, shape) for name, shape in index_shapes.items()}
        options["index_mode"] = rng.choice(["raise", "drop", "clip"])
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            spec, operands, indices, options = mutate(rng, spec, operands, indices, options)
        operands = [to_framework(framework, x) for x in operands]
        indices = {name: to_framework(framework, x) for name, x in indices.items()}
        call = f"seed {seed}: {spec!r}, {operands}, {indices}, {options}"
        try:
            planner.contract(spec, *operands, **{**options, **indices})
            results += 1
        except planner.PlannerError as error:
            kinds.add(type(error))
            assert names_a_culprit(error, [*indices, *options]), f"{error}\n{call}"  # noqa: PT017
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error}\n{call}") from error
    assert results > 0.1 * examples(ci, nightly)
    assert kinds >= {planner.SpecError, planner.PlannerTypeError, planner.ShapeError, planner.IndexRangeError}


# -- what the fuzzer found -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_torch_has_no_sums_of_wide_unsigned_integers(dtype, torch):
    a = torch.ones(2, 3).to(getattr(torch, dtype))
    for spec, options in (("ij, kj -> ik", {}), ("ij -> q[i]j", {"q": torch.tensor([0, 0]), "sizes": {"q": 2}})):
        operands = [a] * (spec.count(",") + 1)
        for _ in range(2):
            with pytest.raises(planner.PlannerError, match=f"operand 0 .*{dtype}.*pass dtype='int64'"):
                planner.contract(spec, *operands, **options)
        assert planner.contract(spec, *operands, dtype="int64", **options).sum() == (12 if "," in spec else 6)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_truth_values_add_up_to_true(framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    x, q = (to_framework(framework, np.array(v)) for v in ([True, True, False, False], [0, 0, 1, 3]))
    got = planner.contract("n -> q[n]", x, sizes={"q": 4}, q=q)
    assert (str(got.dtype).removeprefix("torch."), got.tolist()) == ("bool", [True, False, False, False])
    assert planner.contract("n -> nn", x).tolist() == np.diag([True, True, False, False]).tolist()


@pytest.mark.parametrize("other", ["complex64", "uint8", "bool"])
def test_torch_names_what_it_does_not_promote(other, torch):
    operands = torch.ones(2, 2, dtype=getattr(torch, other)), torch.ones(2, 2).to(torch.uint16)
    with pytest.raises(planner.PlannerError, match="operand 1 is uint16, which torch does not promote"):
        planner.contract("ij, jk -> ik", *operands)
