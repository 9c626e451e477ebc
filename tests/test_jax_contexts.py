"""JAX's contexts around a call: `disable_jit`, `debug_nans`, `debug_infs` and `default_matmul_precision`."""

import contextlib
import itertools
import re
from functools import partial

import numpy as np
import pytest
from conftest import examples, run_python

import planner
from planner import api

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

from planner.backends.jax import guards  # noqa: E402
from planner.backends.jax import step as jax_step  # noqa: E402
from planner.backends.jax.index import bring_into_range  # noqa: E402

# Loops come of memory limits, which are held to what XLA makes of plans.
pytestmark = pytest.mark.usefixtures("xla_sizes")


def numbers(*shape, dtype="float32"):
    """Small integers, so that every order of summation gives the same floats."""
    return jnp.asarray(np.random.default_rng(sum(shape)).integers(-2, 3, shape), dtype)


def names(count, size):
    """An index array that names every row but the last."""
    return jnp.asarray(np.random.default_rng(count).integers(0, size - 1, count))


# A call: spec, operands, keywords.
SMALL = (numbers(9, 3), numbers(4, 3, 5))
GATHER, Q = "nj,q[n]jk->nk", names(9, 4)
LARGE, LARGE_Q = (numbers(64, 8, 16), numbers(8, 16, 16), numbers(64, 16)), names(64, 8)
POOLED, POOL = "bxd,bq[bxk]d->bxk", (numbers(2, 100, 8), numbers(2, 40, 8))
POOL_Q = names(2 * 100 * 60, 40).reshape(2, 100, 60)
CHAIN = tuple(numbers(8, 8) for _ in range(4))
CALLS = {
    "product": ("ij,jk->ik", (numbers(3, 4), numbers(4, 5)), {}),
    "chain": ("ij,jk,kl->il", (numbers(3, 4), numbers(4, 5), numbers(5, 6)), {}),
    "sum": ("ij->j", (numbers(3, 4),), {}),
    "view": ("ij->ij", (numbers(3, 4),), {}),
    "gather": (GATHER, SMALL, {"q": Q}),
    "scatter": ("nj->q[n]j", SMALL[:1], {"q": Q, "sizes": {"q": 4}}),
    "pool first": ("nk,jk,q[n]j->n", (numbers(500, 8), numbers(8, 8), numbers(4, 8)), {"q": names(500, 4)}),
    "dropped": (GATHER, SMALL, {"q": Q.at[2].set(7), "index_mode": "drop"}),
    "clipped": (GATHER, SMALL, {"q": Q.at[2].set(7), "index_mode": "clip"}),
    "two dtypes": (GATHER, (SMALL[0], SMALL[1].astype(jnp.bfloat16)), {"q": Q}),
    "whole pool": (POOLED, POOL, {"q": POOL_Q, "minimize": "bytes"}),
    "whole pool, halves": (POOLED, tuple(x.astype("float16") for x in POOL), {"q": POOL_Q, "minimize": "bytes"}),
    "recomputed": ("ab,bc,cd,de->ae", CHAIN, {"retain_limit": 300}),
    "loop": ("nij,q[n]jk,nk->ni", LARGE, {"q": LARGE_Q, "memory_limit": 10_000}),
    "trained loop": ("nij,q[n]jk,nk->ni", LARGE, {"q": LARGE_Q, "memory_limit": 70_000}),
    "measured": (GATHER, SMALL, {"q": Q, "optimize": "measure"}),
}


def bound(name):
    """A call of the table as a function of its operands."""
    spec, operands, options = CALLS[name]
    return partial(planner.contract, spec, **options), operands


def planned(name):
    """The same call through a plan."""
    spec, operands, options = CALLS[name]
    plan = planner.plan(spec, *operands, **options)
    return partial(plan, **{k: v for k, v in options.items() if len(k) == 1})


def value(call, *xs):
    return call(*xs)


def gradients(call, *xs):
    return jax.grad(lambda *xs: (call(*xs) ** 2).sum(), tuple(range(len(xs))))(*xs)


def second_derivatives(call, *xs):
    return jax.grad(lambda *xs: sum((g**2).sum() for g in gradients(call, *xs)))(*xs)


def tangents(call, *xs):
    return jax.jvp(call, xs, tuple(map(jnp.ones_like, xs)))


def mapped(call, *xs):
    """Over the last axis of the first operand, and the others as they are."""
    first = jnp.stack([xs[0], xs[0]], -1)
    return jax.vmap(call, (-1, *[None] * (len(xs) - 1)))(first, *xs[1:])


def scanned(call, *xs):
    """Three times in a row, added up."""
    start = jnp.zeros_like(call(*xs))
    return jax.lax.scan(lambda total, scale: (total + scale * call(*xs), None), start, jnp.arange(3.0))[0]


def forget():
    """Make the next call cold: nothing is planned, bound or compiled."""
    api._RUNNERS.clear()
    jax_step.compile_step.cache_clear()
    jax.clear_caches()


def assert_same(got, wanted):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, "float32"), np.asarray(y, "float32"))


def test_the_table_holds_what_its_names_say():
    plans = {}
    for name, (spec, xs, options) in CALLS.items():
        trained = name in ("recomputed", "trained loop", "whole pool", "whole pool, halves")
        stand_ins = [planner.Operand(x.shape, x.dtype.name, requires_grad=trained) for x in xs]
        options = {**options, "optimize": "auto"}
        plans[name] = planner.plan(spec, *stand_ins, backend="jax", **options)
    assert plans["loop"].loop is not None
    assert plans["trained loop"].loop is not None
    assert any(step.op.source_dtype for step in plans["two dtypes"].steps)
    assert not plans["pool first"].programs.forward.computing[0].op.arrays
    assert plans["recomputed"].keep != "all"
    for name in ("whole pool", "whole pool, halves"):
        assert "whole pool, then take" in [step.choice.lowering for step in plans[name].steps]


# -- disable_jit --------------------------------------------------------------------------------------------


WITHOUT_JIT = [
    *itertools.product(CALLS, [value]),
    *itertools.product([name for name in CALLS if name not in ("measured", "loop")], [gradients]),
    *itertools.product(["product", "gather", "pool first", "trained loop"], [mapped, tangents, scanned]),
    ("gather", second_derivatives),
]


@pytest.mark.parametrize(("name", "way"), WITHOUT_JIT, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_calls_work_without_jit(name, way):
    """Of the warm call each step is still one operation, which the cold call compiled."""
    call, operands = bound(name)
    wanted, plan = way(call, *operands), planned(name)
    forget()
    with jax.disable_jit():
        assert_same(way(call, *operands), wanted)
        compiled = jax_step.compile_step.cache_info().misses
        assert_same(way(call, *operands), wanted)
        assert jax_step.compile_step.cache_info().misses == compiled
        for made in (plan, planned(name)) if way is value else ():
            assert_same(made(*operands), wanted)
        assert jax.config.jax_disable_jit


def test_a_process_that_never_compiles_contracts():
    program = """
import jax.numpy as jnp, planner
x, q = jnp.arange(6.).reshape(2, 3), jnp.array([1, 0, 1])
assert (planner.contract("ij,kj->ik", x, x) == x @ x.T).all()
assert (planner.contract("nj,q[n]j->n", x[q], x, q=q) == (x[q] ** 2).sum(1)).all()
"""
    run_python(program, JAX_DISABLE_JIT="1")


# -- debug_nans and debug_infs ------------------------------------------------------------------------------


@contextlib.contextmanager
def nans_without_jit(on):
    with jax.disable_jit(), jax.debug_nans(on):
        yield


DEBUG = {"nan": jax.debug_nans, "inf": jax.debug_infs, "nan, no jit": nans_without_jit}
WAYS = {
    "value": value,
    "jit": lambda call, *xs: jax.jit(call)(*xs),
    "gradients": gradients,
    "jit of gradients": lambda call, *xs: jax.jit(lambda *xs: gradients(call, *xs))(*xs),
    "gradients of jit": lambda call, *xs: gradients(jax.jit(call), *xs),
    "tangents": tangents,
    "tangents of gradients": lambda call, *xs: tangents(partial(gradients, call), *xs),
    "vmap": mapped,
    "vmap of gradients": lambda call, *xs: mapped(partial(gradients, call), *xs),
    "checkpoint": lambda call, *xs: gradients(jax.checkpoint(call), *xs),
    "scan": scanned,
}


def spoilt(name, held):
    """The call's operands with a NaN or an infinity that the result shows."""
    call, (first, *others) = bound(name)
    return call, (first.at[(1,) * first.ndim].set(held), *others)


@pytest.mark.parametrize(
    ("name", "way", "held"),
    [
        *itertools.product(["gather"], [way for way in WAYS if way != "checkpoint"], ["nan"]),
        *itertools.product(["product", "scatter", "pool first", "recomputed"], ["value", "gradients"], ["nan"]),
        ("loop", "value", "nan"),
        ("trained loop", "gradients", "nan"),
        *itertools.product(["gather"], ["value", "jit", "gradients"], ["inf"]),
        ("gather", "value", "nan, no jit"),
    ],
)
def test_what_a_result_shows_is_raised(name, way, held):
    call, operands = spoilt(name, float(held[:3]))
    sound, others = bound(name)
    message = r"invalid value \(nan\) encountered in dot_general" if name == "product" else None
    with DEBUG[held](True):
        with pytest.raises(FloatingPointError, match=message):
            WAYS[way](call, *operands)
        WAYS[way](sound, *others)


def test_a_gradient_that_is_no_number_is_raised():
    call, operands = bound("gather")
    result, pullback = jax.vjp(call, *operands)
    with jax.debug_nans(True):
        pullback(jnp.ones_like(result))
        with pytest.raises(FloatingPointError):
            pullback(jnp.full_like(result, jnp.nan))
        with pytest.raises(FloatingPointError):
            jax.grad(lambda *xs: jnp.sqrt(0 * call(*xs)).sum())(*operands)


OF_GRADIENTS = ["jit of gradients", "tangents of gradients", "vmap of gradients", "checkpoint"]


@pytest.mark.parametrize(
    ("name", "way", "held"),
    [
        *itertools.product(["pool first"], WAYS, ["nan"]),
        *itertools.product(["gather", "dropped", "two dtypes"], ["value", "gradients"], ["nan"]),
        ("loop", "value", "nan"),
        ("trained loop", "gradients", "nan"),
        *itertools.product(["two dtypes"], ["gradients of jit", "vmap"], ["nan"]),
        *itertools.product(["gather", "whole pool"], OF_GRADIENTS, ["nan", "inf"][: examples(1, 2)]),
        *itertools.product(["whole pool, halves"], ["gradients", "jit of gradients"], ["nan"]),
        *itertools.product(["pool first"], ["value", "gradients"], ["inf"]),
        ("measured", "value", "nan"),
    ],
)
def test_rows_that_no_index_names_may_hold_anything(name, way, held):
    call, operands = bound(name)
    terms = CALLS[name][0].split("->")[0].split(",")
    # The last row along the dimension that is indexed, which may come second.
    unread = [
        x.at[(slice(None),) * term.index("q") + (-1,)].set(float(held)) if "q" in term else x
        for x, term in zip(operands, terms, strict=True)
    ]
    wanted = WAYS[way](call, *operands)
    forget()
    with DEBUG[held](True):
        cold = WAYS[way](call, *unread)
        warm = WAYS[way](call, *unread)
    for got in (cold, warm, WAYS[way](call, *unread)):
        assert_same(got, wanted)


def test_a_bad_index_is_named_where_its_mark_is_found():
    """Where values cannot be seen a bad index shows as NaN; `debug_nans` finds the NaN, and then the index."""
    spec, operands, options = CALLS["gather"]
    q = options["q"].at[3].set(11)

    def call(q):
        return planner.contract(spec, *operands, q=q)

    assert jnp.isnan(jax.jit(call)(q)).any()
    with jax.debug_nans(True), pytest.raises(planner.IndexRangeError, match="'q'.*11"):
        jax.jit(call)(q)


def test_a_checkpoint_that_is_not_compiled_raises():
    """JAX raises an error of its own for any compiled function inside of one: no `FloatingPointError`."""
    call, operands = spoilt("gather", float("nan"))
    for function in (call, jax.jit(lambda x, c: jnp.log(x - 9))):
        with jax.debug_nans(True), pytest.raises(Exception, match="nan"):
            jax.checkpoint(function)(*operands)


# -- default_matmul_precision -------------------------------------------------------------------------------

PRECISE = jax.default_matmul_precision


def precisions(function, *xs):
    """The precisions of all products of a program, in the order in which it computes them."""
    text = jax.jit(function).lower(*xs).as_text()
    return [found.split(",")[0] for found in re.findall(r"precision = \[([A-Z, ]+)\]", text)]


def einsum(spec, *xs, **options):
    return jnp.einsum(spec, *xs, **options)


X = numbers(4, 4)


def inside(contract, x):
    with PRECISE("highest"):
        return contract("ij,jk->ik", x, x)


def nested(contract, x):
    with PRECISE("highest"):
        y = contract("ij,jk->ik", x, x)
        with PRECISE("high"):
            y = contract("ij,jk->ik", x, y)
        y = contract("ij,jk->ik", x, y)
    return contract("ij,jk->ik", x, y)


def explicit(contract, x):
    with PRECISE("highest"):
        y = contract("ij,jk->ik", x, x, precision="default")
        return contract("ij,jk->ik", x, y, precision="high")


def differentiated(contract, x):
    return gradients(partial(inside, contract), x)


def differentiated_in_contexts(contract, x, forward, backward):
    """The precision of the forward program, and of the backward program."""
    with PRECISE(forward):
        result, pullback = jax.vjp(lambda y: contract("ij,jk->ik", y, x), x)
    with PRECISE(backward):
        return pullback(result)


PROGRAMS = {
    "inside": inside,
    "nested": nested,
    "explicit": explicit,
    "differentiated": differentiated,
    "differentiated in the context": partial(differentiated_in_contexts, forward=None, backward="highest"),
    "differentiated out of the context": partial(differentiated_in_contexts, forward="highest", backward="high"),
    "pushed forward": lambda contract, x: tangents(partial(inside, contract), x),
    "mapped over": lambda contract, x: mapped(partial(inside, contract), x),
    "checkpointed": lambda contract, x: gradients(jax.checkpoint(partial(inside, contract)), x),
    "jitted": lambda contract, x: jax.jit(partial(inside, contract))(x) + jax.jit(partial(contract, "ij,jk->ik"))(x, x),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_products_have_the_precision_that_einsum_gives_them(program):
    wanted = precisions(partial(program, einsum), X)
    assert wanted
    assert precisions(partial(program, planner.contract), X) == wanted
    with PRECISE("high"):
        assert precisions(partial(program, planner.contract), X) == precisions(partial(program, einsum), X)


def test_all_products_of_second_derivatives_are_as_precise():
    assert set(precisions(partial(second_derivatives, partial(inside, planner.contract)), X)) == {"HIGHEST"}


@pytest.mark.parametrize("name", ["gather", "pool first", "recomputed", "trained loop"])
def test_every_product_of_a_plan_is_as_precise(name):
    call, operands = bound(name)

    def asked(*xs):
        with PRECISE("highest"):
            return call(*xs)

    for way in (value, gradients):
        assert set(precisions(partial(way, asked), *operands)) == {"HIGHEST"}
        assert set(precisions(partial(way, call), *operands)) == {"DEFAULT"}


def test_a_program_is_as_precise_as_it_was_traced():
    for program in (lambda x: planner.contract("ij,jk->ik", x, x), partial(differentiated, planner.contract)):
        traced = jax.jit(program).trace(X)
        alone = traced.lower().as_text()
        with PRECISE("highest"):
            assert traced.lower().as_text() == alone
            assert jax.jit(program).trace(X).lower().as_text().count("HIGHEST") > 0


@pytest.mark.parametrize("plan", [False, True], ids=["contract", "plan"])
def test_eager_calls_are_as_precise_as_their_context(plan):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), "float32")
    call = planner.plan("ij,jk->ik", x, x) if plan else lambda *xs: planner.contract("ij,jk->ik", *xs)
    context = PRECISE("F64_F64_F64")  # on a CPU it alone gives other numbers
    for function in (call, lambda *xs: jax.grad(lambda a, b: call(a, b).sum())(*xs)):
        plain = function(x, x)
        for _ in range(2):  # cold and warm
            with context:
                exact = function(x, x)
                with PRECISE(None):
                    assert (function(x, x) == plain).all()
            assert (exact != plain).any()
            assert (function(x, x) == plain).all()


# -- arrays of 64 bits, where these are not enabled ---------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("spec", ["nj, q[n]jk -> nk", "nj, jk -> nk"])
def test_arrays_of_64_bits_are_computed_in_64_bits_anywhere(spec, jitted):
    # So many rows are one grouped product; a few would be taken, and multiplied by JAX's own product.
    shapes = ((4096, 16), (64, 16, 16)) if "q" in spec else ((6, 4), (4, 5))
    indices = {"q": names(4096, 64)} if "q" in spec else {}
    with jax.enable_x64(True):
        xs = [numbers(*shape, dtype="float64") + 2.0**-40 for shape in shapes]

    def run(*xs):
        result, back = jax.vjp(lambda *xs: planner.contract(spec, *xs, **indices), *xs)
        return result, *back(result)

    found = (jax.jit(run) if jitted else run)(*xs)
    with jax.enable_x64(True):
        wanted = run(*xs)
    assert {x.dtype.name for x in found} == {"float64"}
    # JAX's own product, which the second is, narrows the operands of its gradients.
    count = len(found) if "q" in spec else 1
    jax.tree.map(np.testing.assert_array_equal, found[:count], wanted[:count])
    narrow = [x.astype("float32") for x in found[1:]]
    with pytest.raises(planner.PlannerError, match="dtype float64 is off in jax"):
        planner.contract(spec, *narrow, **indices, dtype="float64")


# -- index arrays of NumPy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["raise", "drop", "clip", "nan"])
def test_an_index_array_that_was_prepared_in_numpy(mode):
    x, c = numbers(6, 4), numbers(3, 4, 5)
    raw = np.array([0, 2, 1, -1, 0, 2] if mode == "raise" else [0, 2, 9, 1, -1, 3])
    q = planner.group(raw, 3, mode)
    assert type(q) is type(planner.group(np.zeros(2, int), 3))
    call = partial(planner.contract, "nj, q[n]jk -> nk", index_mode=mode)
    wanted = call(np.asarray(x), np.asarray(c), q=raw)
    plan = planner.plan("nj, q[n]jk -> nk", x, c, q=(6,), index_mode=mode)
    for found in (call(x, c, q=q), jax.jit(lambda x: call(x, c, q=q))(x), plan(x, c, q=q)):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("value", "dtype"), [(2**40, "int64"), (-(2**40), "int64"), (2**63, "uint64")])
def test_errors_show_an_index_beyond_32_bits_as_it_is(value, dtype):
    x, c, q = numbers(2, 4), numbers(3, 4, 5), np.array([1, value], dtype)
    call = partial(planner.contract, "nj, q[n]jk -> nk")
    for run in (call, jax.jit(lambda x, c: call(x, c, q=q))):
        with pytest.raises(planner.IndexRangeError, match=rf"'q'\[1\] is {value}, "):
            run(x, c, q=q) if run is call else run(x, c)
    wanted = call(np.asarray(x), np.asarray(c), q=q, index_mode="drop")
    np.testing.assert_array_equal(call(x, c, q=q, index_mode="drop"), wanted)
    np.testing.assert_array_equal(jax.jit(lambda x: call(x, c, q=q, index_mode="drop"))(x), wanted)


@pytest.mark.parametrize("spec", ["q[n]j -> nj", "q[n]j, nj -> n"])
def test_an_empty_pool_has_no_row_under_jit(spec):
    """So every index is out of range, and every result is NaN."""
    operands = jnp.ones((0, 3)), jnp.ones((5, 3))
    call = jax.jit(lambda q, *xs: planner.contract(spec, *xs, q=q))
    assert jnp.isnan(call(jnp.zeros(5, jnp.int32), *operands[: spec.count(",") + 1])).all()


@pytest.mark.parametrize("values", [[0, 2, 2, 4], [0, -1, 2, 4], [0, 5, 2, 4]], ids=["in range", "negative", "bad"])
@pytest.mark.parametrize("mode", ["raise", "drop"])
def test_rows_that_are_read_are_found_alike_by_comparing_and_by_counting(mode, values, monkeypatch):
    """Few indices are compared with each row. A bad index under "raise" could have named any row."""
    spec = planner.resolve("q[n]j -> nj", (5, 2), q=(4,))
    (term,) = spec.inputs

    found = []
    for most in (guards.FEW_PAIRS, 0):
        monkeypatch.setattr(guards, "FEW_PAIRS", most)

        def mask(q):
            return guards.read_mask(jnp.ones((5, 2)), term, spec, bring_into_range({spec.gathers[0]: q}, mode))

        text = jax.jit(mask).lower(jnp.array(values)).as_text()
        found.append(("scatter" in text, np.asarray(mask(jnp.array(values))).ravel().tolist()))
    named = {v % 5 if mode == "raise" else v for v in values}
    everything = mode == "raise" and 5 in values
    wanted = [everything or row in named for row in range(5)]
    assert found == [(False, wanted), (True, wanted)]
