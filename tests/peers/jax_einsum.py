"""What `jnp.einsum` does, call by call. JAX's wheel has no tests of its einsum, so these are written from behaviour.

Each result is held to that of `jnp.einsum` in shape, dtype and value, see `rewritten`; so are gradients here.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from rewritten import assert_close, jax_einsum

jax = pytest.importorskip("jax", reason="jax is not installed")
from jax import lax  # noqa: E402
from jax import numpy as jnp  # noqa: E402

EINSUM = jax_einsum()
SIZES = dict(zip("abcdefghijklmnopqrstuvwxyz", [2, 3, 4, 5, 6] * 6, strict=False))
RNG = np.random.default_rng(0)

# Sums, transposes, diagonals and traces; products with batch axes in front, in the middle and last; axes that one
# operand has alone; outer products; more operands, some of them scalars; implicit outputs.
SPECS = [
    "a->",
    "ab->",
    "ab->a",
    "ab->b",
    "ab->ba",
    "aa->a",
    "aa->",
    "aab->b",
    "aba->ab",
    "abab->ab",
    "aaa->a",
    "abc->cab",
    "aabb->ab",
    "ab",
    "ba",
    "aa",
    "aab",
    "abb",
    "a,a->",
    "a,a->a",
    "a,b->ab",
    "ab,b->a",
    "ab,b",
    "ab,bc->ac",
    "ab,bc->ca",
    "ab,cb->ac",
    "ba,bc->ac",
    "ab,ab->",
    "ab,ab->ab",
    "ab,ba->",
    "abc,abd->abcd",
    "abc,acd->abd",
    "bac,bcd->bad",
    "cab,cad->cbd",
    "abc,abd->acd",
    "abcd,abce->abde",
    "abc,bd->acd",
    "abc,c->ba",
    "abc,bad->dc",
    "ab,cd->acbd",
    "aab,bc->ac",
    "ab,bbc->ac",
    "ab,cd->",
    "abc,de->ad",
    "aab,ccb->ac",
    "abc,cbd->a",
    "abcd,dcb->a",
    "abc,ab->c",
    "ab,abc->c",
    "abcd,cd->dab",
    "a,ab,b->",
    "ab,bc,cd->ad",
    "ab,bc,cd->da",
    "ab,cd,ef->ace",
    "a,b,c->abc",
    "abc,bd,ce->ade",
    "ea,fb,abcd,gc,hd->efgh",
    "ab,ab,ab->ab",
    "ab,ac,ad->bcd",
    "aab,bbc,cd->ad",
    ",ab->ab",
    ",,a->a",
    ",->",
    "ab,,bc->ac",
    "ab,cd,bd->ac",
    "aef,bef,cef->abc",
    "abc,bcd,cde,def->af",
]

# With the shapes, because sizes of 1 and ellipses have no letter of their own.
BROADCAST = [
    ("...->...", [(2, 3)]),
    ("...a->...", [(2, 3, 4)]),
    ("...ab->...ba", [(2, 3, 4)]),
    ("a...->...", [(2, 3, 4)]),
    ("...a,a->...", [(2, 3, 4), (4,)]),
    ("...ab,...bc->...ac", [(2, 3, 4), (4, 5)]),
    ("...ab,...bc->...ac", [(2, 1, 3, 4), (6, 4, 5)]),
    ("a...,a...->...", [(2, 3), (2, 1)]),
    ("...,...", [(2, 1), (3,)]),
    ("...a,...a", [(2, 3), (3,)]),
    ("ab,bc->ac", [(2, 1), (3, 4)]),
    ("ab,bc->ac", [(2, 3), (1, 4)]),
    ("ab,ab->ab", [(1, 3), (2, 1)]),
    ("abc,acd->abd", [(1, 3, 4), (5, 4, 2)]),
    ("abc,acd->abd", [(5, 3, 1), (5, 4, 2)]),
    ("ab,bc,cd->ad", [(2, 1), (3, 1), (4, 5)]),
    ("ab,ab", [(0, 3), (0, 3)]),
    ("ab,bc->ac", [(2, 0), (0, 3)]),
]


def drawn(shape, dtype="float32"):
    return jnp.asarray(RNG.integers(-3, 4, shape), "float32").astype(dtype)


def operands_of(spec, *dtypes):
    terms = spec.partition("->")[0].split(",")
    return [
        drawn([SIZES[a] for a in term], d) for term, d in zip(terms, dtypes or ["float32"] * len(terms), strict=True)
    ]


@pytest.mark.parametrize("spec", SPECS)
def test_specs(spec):
    operands = operands_of(spec)
    result = EINSUM(spec, *operands)
    assert_close(np.asarray(jax.jit(functools.partial(EINSUM, spec))(*operands)), np.asarray(result), 0.0)


@pytest.mark.parametrize(("spec", "shapes"), BROADCAST, ids=str)
def test_broadcasting(spec, shapes):
    EINSUM(spec, *map(drawn, shapes))


@pytest.mark.parametrize("spec", [*SPECS[:40:3], *SPECS[40::2]])
def test_gradients(spec):
    operands = operands_of(spec)
    weights = drawn(jax.eval_shape(functools.partial(jnp.einsum, spec), *operands).shape)
    places = tuple(range(len(operands)))
    ours, theirs = (
        jax.grad(lambda *xs, einsum=einsum: (einsum(spec, *xs) * weights).sum(), places)(*operands)
        for einsum in (EINSUM, jnp.einsum)
    )
    for got, want in zip(ours, theirs, strict=True):
        assert_close(np.asarray(got), np.asarray(want), 0.0)


def test_under_vmap_and_forward_mode():
    a, b = operands_of("abc,cd")
    result = jax.vmap(lambda x: EINSUM("bc,cd->db", x, b))(a)
    assert_close(np.asarray(result), np.asarray(jnp.einsum("abc,cd->adb", a, b)), 0.0)
    results = jax.jvp(lambda x: EINSUM("abc,cd->abd", x, b), (a,), (2 * a,))
    for got, factor in zip(results, (1, 2), strict=True):
        assert_close(np.asarray(got), factor * np.asarray(jnp.einsum("abc,cd->abd", a, b)), 0.0)


# -- call forms --------------------------------------------------------------------------------------------------------


def test_sublists():
    a, b, c = operands_of("ab,bc,cd")
    EINSUM(a, [0, 1], b, [1, 2])
    EINSUM(a, (0, 1), b, (1, 2), (2, 0))
    EINSUM(a, (0, 1), b, (1, 2), c, (2, 3), [0, 3])
    EINSUM(a, [..., 0], [0, ...])
    EINSUM(a, [0, 1], ())


def test_spaces_and_capitals():
    a, b = operands_of("ab,bc")
    EINSUM(" ab , bc -> a c ", a, b)
    EINSUM("Ab,bC->AC", a, b)
    EINSUM("bA,Ac", b.T, b)


def test_what_becomes_an_array():
    a, b = operands_of("ab,bc")

    class Parameter:
        def __jax_array__(self):
            return a

    EINSUM("ab,bc", Parameter(), b)
    EINSUM("ab,bc", np.asarray(a), b)
    EINSUM("ab,bc", a, np.asarray(b, "float64"))
    EINSUM("ab,", a, 2)
    EINSUM(",ab", 2.5, a)
    EINSUM(",ab", True, a)
    EINSUM(",ab", np.float32(3), a)
    jax.jit(lambda x: EINSUM("ab,bc", x, np.asarray(b)))(a)


@pytest.mark.parametrize(
    "optimize", [True, False, "auto", "optimal", "greedy", [(0, 1), (0, 1)], [(1, 2), (0, 1)]], ids=str
)
def test_optimize(optimize):
    EINSUM("ab,bc,cd->ad", *operands_of("ab,bc,cd"), optimize=optimize)


def test_path_of_einsum_path():
    operands = operands_of("abc,bd,ce")
    path, _ = jnp.einsum_path("abc,bd,ce->ade", *operands, optimize="optimal")
    EINSUM("abc,bd,ce->ade", *operands, optimize=path)


@pytest.mark.parametrize(
    "precision",
    [None, "default", "high", "highest", "float32", "bfloat16", "tensorfloat32", lax.Precision.HIGH,
     (lax.Precision.HIGHEST, lax.Precision.HIGHEST), ("high", "default"), (None, None),
     lax.DotAlgorithmPreset.DEFAULT, lax.DotAlgorithmPreset.F32_F32_F32],
    ids=str,
)  # fmt: skip
def test_precision(precision):
    EINSUM("ab,bc->ac", *operands_of("ab,bc"), precision=precision)
    EINSUM("ab,bc,cd->ad", *operands_of("ab,bc,cd"), precision=precision)


def test_precision_of_the_context():
    a, b = operands_of("ab,bc")
    with jax.default_matmul_precision("bfloat16"):
        EINSUM("ab,bc->ac", a, b)
        text = jax.jit(functools.partial(EINSUM, "ab,bc->ac")).lower(a, b).as_text()
    assert "DEFAULT" in text


def test_hook():
    seen = []

    def hook(a, b, numbers, precision=None, preferred_element_type=None):
        seen.append((precision, preferred_element_type))
        return 2 * lax.dot_general(a, b, numbers, precision, preferred_element_type)

    EINSUM("ab,bc->ac", *operands_of("ab,bc"), _dot_general=hook, precision="high")
    EINSUM("ab,bc,cd->ad", *operands_of("ab,bc,cd"), _dot_general=hook)
    assert seen


# -- dtypes ------------------------------------------------------------------------------------------------------------

DTYPES = ["float32", "bfloat16", "float16", "complex64", "int32", "int8", "uint8", "bool"]


@pytest.mark.parametrize("first", DTYPES)
@pytest.mark.parametrize("second", DTYPES)
def test_promotion(first, second):
    EINSUM("ab,bc->ca", *operands_of("ab,bc", first, second))
    if first == second:
        EINSUM("ab->a", *operands_of("ab", first))
        EINSUM("ab,b->ab", *operands_of("ab,b", first, first))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int4", "uint4"])
def test_smallest_dtypes(dtype):
    EINSUM("ab,bc->ac", *operands_of("ab,bc", dtype, dtype))
    if dtype.startswith("float"):
        EINSUM("ab,bc->ac", *operands_of("ab,bc", dtype, dtype), preferred_element_type="float32")


@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16", "int32", "complex64"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_preferred_element_type(dtype, wanted):
    for spec in ("ab,bc->ac", "ab,ab->ab", "ab->b", "ab->ba", "aab,bc,cd->ad"):
        EINSUM(spec, *operands_of(spec, *[dtype] * (spec.count(",") + 1)), preferred_element_type=wanted)
    if dtype == "bfloat16":
        ones = jnp.ones((1, 1000), dtype)
        assert EINSUM("ab,cb->ac", ones, 1 + ones / 128, preferred_element_type="float32")[0, 0] == 1007.8125


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")]
)
def test_gradients_of_preferred_element_type(dtype, wanted):
    operands = operands_of("ab,bc", dtype, dtype)
    ours, theirs = (
        jax.grad(
            lambda *xs, einsum=einsum: einsum("ab,bc->ac", *xs, preferred_element_type=wanted).sum().astype("float32"),
            (0, 1),
        )(*operands)
        for einsum in (EINSUM, jnp.einsum)
    )
    for got, want in zip(ours, theirs, strict=True):
        assert_close(np.asarray(got), np.asarray(want), 0.0)


def test_wide_types():
    with jax.enable_x64(True):
        EINSUM("ab,bc->ac", *(jnp.asarray(np.asarray(x, "float64")) for x in operands_of("ab,bc")))
        EINSUM("ab->a", jnp.asarray(np.ones((2, 3), "int64")))
        EINSUM("ab,bc->ac", *operands_of("ab,bc"), preferred_element_type="float64")
    EINSUM("ab,bc->ac", *operands_of("ab,bc"), preferred_element_type="float64")


# -- errors: a call that jnp.einsum refuses is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("ab,bc->ac", [(2, 3), (4, 5)]),
        ("ab->a", [(2,)]),
        ("ab,bc->ac", [(2, 3)]),
        ("ab->a", [(2, 3), (3, 4)]),
        ("ab>a", [(2, 3)]),
        ("ab->ad", [(2, 3)]),
        ("ab->aa", [(2, 3)]),
        ("ab,ab->a->b", [(2, 3), (2, 3)]),
        ("...a->a..b", [(2, 3)]),
        ("aa->a", [(2, 3)]),
    ],
    ids=str,
)
def test_refused(spec, shapes):
    operands = list(map(drawn, shapes))
    with pytest.raises((ValueError, TypeError)):
        jnp.einsum(spec, *operands)
    with pytest.raises((ValueError, TypeError)):
        EINSUM(spec, *operands)


def test_out_is_refused():
    a, b = operands_of("ab,bc")
    with pytest.raises((NotImplementedError, TypeError)):
        EINSUM("ab,bc->ac", a, b, out=jnp.zeros((2, 4)))


def test_unknown_options_are_refused():
    with pytest.raises(TypeError):
        EINSUM("ab->a", *operands_of("ab"), casting="safe")


# -- programs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["ab,bc->ac", "abc,acd->abd", "abc,cd->abd", "ab,b->a"])
def test_no_unnecessary_transpose(spec):
    """A product whose axes come out in order is one `dot_general` and no transpose."""
    text = str(jax.make_jaxpr(functools.partial(EINSUM, spec))(*operands_of(spec)))
    assert "transpose" not in text
    assert text.count("dot_general") == 1
