"""What JAX's tools make of steps: Taylor mode, checkify, roofline, checkpoint policies, names, types and settings."""

import contextlib
import re
from functools import partial

import numpy as np
import pytest
from conftest import run_python

import planner
from planner.inspect.memory import jax_temp_bytes
from planner.language.options import INDEX_MODES

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

from jax.experimental import checkify, roofline  # noqa: E402
from jax.experimental.jet import jet2  # noqa: E402

pytestmark = pytest.mark.usefixtures("jax_in_a_hurry")


def numbers(*shape, dtype="float32"):
    """Small integers, so that every order of summation gives the same floats."""
    return jnp.asarray(np.random.default_rng(sum(shape)).integers(-2, 3, shape), dtype)


Q = jnp.asarray([3, 0, 1, 1, 0, 2, 3, 0, 1])
X, C, W = numbers(9, 3), numbers(4, 3, 5), numbers(4, 3)
ROWS, MATRICES, MANY = numbers(128, 1, 64), numbers(24, 64, 64), jnp.arange(128) % 24
# Of each call what `jnp` makes of it: gathers, a scatter, a grouped kernel with a joint gradient, and chains.
PAIRS = {
    "gather": (
        (X, C),
        lambda x, c: planner.contract("nj,q[n]jk->nk", x, c, q=Q),
        lambda x, c: jnp.einsum("nj,njk->nk", x, c[Q]),
    ),
    "no batch": (
        (X, W),
        lambda x, w: planner.contract("nj,q[k]j->nk", x, w, q=Q),
        lambda x, w: jnp.einsum("nj,kj->nk", x, w[Q]),
    ),
    "scatter": (
        (X, X),
        lambda x, y: planner.contract("nj,nj->q[n]j", x, y, q=Q, sizes={"q": 4}),
        lambda x, y: jnp.zeros((4, 3)).at[Q].add(x * y),
    ),
    "dropped": (
        (X, C),
        lambda x, c: planner.contract("nj,q[n]jk->nk", x, c, q=Q.at[2].set(7), index_mode="drop"),
        lambda x, c: jnp.einsum("nj,njk->nk", x * (jnp.arange(9) != 2)[:, None], c[Q]),
    ),
    "grouped": (
        (ROWS, MATRICES),
        lambda a, c: planner.contract("nij,q[n]jk->nik", a, c, q=MANY),
        lambda a, c: jnp.einsum("nij,njk->nik", a, c[MANY]),
    ),
    "three": (
        (X, C, numbers(9, 5)),
        lambda x, c, y: planner.contract("nj,q[n]jk,nk->n", x, c, y, q=Q),
        lambda x, c, y: jnp.einsum("nj,njk,nk->n", x, c[Q], y),
    ),
}


def assert_same(got, wanted):
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    for x, y in zip(got, wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert (x == y).all()


def gradients(call, *xs):
    return jax.grad(lambda *xs: (call(*xs) ** 2).sum(), tuple(range(len(xs))))(*xs)


def test_the_calls_are_what_they_are_for():
    plan = planner.plan("nij,q[n]jk->nik", ROWS, MATRICES, q=MANY, device="cpu")
    assert [step.choice.lowering for step in plan.steps] == ["grouped matmul"]


# -- Taylor mode ---------------------------------------------------------------------------------


WAYS = {
    "value": lambda call, *xs: call(*xs),
    "jit": lambda call, *xs: jax.jit(call)(*xs),
    "gradients": gradients,
    "tangents": lambda call, *xs: jax.jvp(call, xs, tuple(2 * x for x in xs))[1],
}


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "value") for name in PAIRS), *(("grouped", way) for way in WAYS), ("dropped", "gradients")],
)
def test_taylor_series(name, way):
    operands, call, plain = PAIRS[name]
    series = [[x, 1 - x, x // 2] for x in operands]
    got, wanted = (jet2(partial(WAYS[way], f), operands, series) for f in (call, plain))
    assert_same(got, wanted)


def test_taylor_series_are_nested_derivatives():
    """Along a line the coefficient of order k is the k-th derivative by k!."""
    operands, call, _ = PAIRS["gather"]
    tangents = tuple(2 * x for x in operands)
    lines = [[t, jnp.zeros_like(t)] for t in tangents]
    _, (first, second) = jet2(call, operands, lines)

    def along(*xs):
        return jax.jvp(call, xs, tangents)[1]

    assert_same((first, 2 * second), jax.jvp(along, operands, tangents))


# -- checkify ------------------------------------------------------------------------------------


BAD = Q.at[2].set(-9)
CHECKED = {
    "gather": lambda q: planner.contract("nj,q[n]jk->nk", X, C, q=q),
    "scatter": lambda q: planner.contract("nj->q[n]j", X, q=q, sizes={"q": 4}),
    "prepared": lambda q: planner.contract("nj,q[n]jk->nk", X, C, q=planner.group(q, 4)),
    "gradients": lambda q: gradients(lambda x, c: planner.contract("nj,q[n]jk->nk", x, c, q=q), X, C),
    "in a scan": lambda q: jax.lax.scan(lambda s, x: (s, planner.contract("q[n]->n", x, q=q)), 0, C[..., 0].T)[1],
    "mapped": lambda q: jax.vmap(lambda q: planner.contract("q[]jk->jk", C, q=q))(q),
    "in a checkpoint": lambda q: jax.checkpoint(lambda x: planner.contract("q[n]jk->jk", x, q=q))(C),
}


@pytest.mark.parametrize("name", CHECKED)
def test_checkify_reports_a_bad_index_under_jit(name):
    checked = checkify.checkify(jax.jit(CHECKED[name]), errors=checkify.index_checks)
    error, _ = checked(BAD)
    assert re.search(r"index array 'q'\[2\] is -9, outside of \[-4, 4\)", error.get())
    with pytest.raises(checkify.JaxRuntimeError, match="-9"):
        error.throw()
    error, got = jax.jit(checked)(Q - 4)
    assert error.get() is None
    assert_same(got, CHECKED[name](Q))


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "int64", "uint64"])
def test_checkify_reports_an_index_as_it_is(dtype):
    for value in (np.iinfo(dtype).max, np.iinfo(dtype).min or 5, 5):
        with jax.enable_x64("64" in dtype):
            q = jnp.asarray([[0, 1, 2], [3, value, 0]], dtype)
            call = jax.jit(lambda q: planner.contract("q[mn]jk->mnk", C, q=q))
            error, _ = checkify.checkify(call, errors=checkify.index_checks)(q)
        assert f"index array 'q'[1, 1] is {value}, outside of [-4, 4)" in error.get()


def by_rows(x, q):
    return planner.contract("nj,q[n]jk->nk", x, C, q=q).sum()


# What transforms leave of a derivative: no value of the call, but the steps of its gradients.
@pytest.mark.parametrize(
    "around",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x, q: jax.lax.scan(lambda s, _: (s + f(x, q), None), 0.0, None, length=1)[0],
        lambda f: lambda x, q: jax.lax.cond(x[0, 0] > -9, f, lambda x, q: x.sum(), x, q),
    ],
    ids=["jit", "checkpoint", "scan", "cond"],
)
@pytest.mark.parametrize("derive", [jax.grad, lambda f: lambda x, q: jax.linearize(lambda x: f(x, q), x)[1](x)])
def test_checkify_reports_a_bad_index_of_a_derivative(around, derive):
    checked = checkify.checkify(jax.jit(derive(around(by_rows))), errors=checkify.index_checks)
    assert re.search(r"index array 'q'\[2\] is -9, outside of \[-4, 4\)", checked(X, BAD)[0].get())
    error, got = checked(X, Q)
    assert error.get() is None
    assert_same(got, derive(by_rows)(X, Q))


def test_checkify_leaves_alone_what_is_asked_for():
    """Dropped and clipped entries are no errors, and without its checks nothing is reported. Without `jit` planner's
    own error is raised."""
    for mode in ("drop", "clip"):
        call = jax.jit(lambda q, mode=mode: planner.contract("nj,q[n]jk->nk", X, C, q=q, index_mode=mode))
        assert checkify.checkify(call, errors=checkify.all_checks)(BAD)[0].get() is None
    assert checkify.checkify(jax.jit(CHECKED["gather"]), errors=checkify.user_checks)(BAD)[0].get() is None
    with pytest.raises(planner.IndexRangeError, match="-9"):
        checkify.checkify(CHECKED["gather"], errors=checkify.index_checks)(BAD)


def test_checks_of_a_user():
    def call(q):
        result = planner.contract("nj,q[n]jk->nk", X, C, q=q)
        checkify.check((result > 100).all(), "too small: {}", result.max())
        return result

    error, _ = checkify.checkify(jax.jit(call), errors=checkify.user_checks | checkify.index_checks)(Q)
    assert "too small" in error.get()


def test_checkify_finds_a_nan_that_a_result_shows():
    def call(x, c, w):
        return planner.contract("nj,q[n]jk,kl->nl", x, c, w, q=Q % 3)

    operands = X, C, numbers(5, 2)
    for way in (call, partial(gradients, call)):
        checked = checkify.checkify(jax.jit(way), errors=checkify.float_checks)
        assert checked(*operands)[0].get() is None
        assert checked(X, C.at[3].set(jnp.nan), operands[2])[0].get() is None  # a row that no index names
        assert "nan generated" in checked(X, C.at[1, 0, 0].set(jnp.nan), operands[2])[0].get()


# -- what it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "operands", "q", "sizes"),
    [
        ("nj,q[n]jk->nk", (X, C), Q, None),
        ("nj->q[n]j", (X,), Q, {"q": 4}),
        ("nij,q[n]jk->nik", (ROWS, MATRICES), MANY, None),
        ("nj,q[n]jk,kl->nl", (X, C, numbers(5, 2)), Q, None),
    ],
)
def test_roofline_counts_what_the_plan_counts(spec, operands, q, sizes):
    """Of a plain product, which JAX counts, it leaves out what XLA copies first."""
    plan = planner.plan(spec, *operands, q=q, sizes=sizes)
    copied = sum(step.choice.cost.copied_bytes for step in plan.steps if str(step.op.spec) == "nj, lja -> nla")
    call = partial(planner.contract, spec, q=q, sizes=sizes)
    for function in (call, jax.jit(call)):
        found = roofline.roofline(function)(*operands)[1]
        assert (found.flops, found.hbm_bytes) == (plan.cost.flops, plan.cost.bytes_moved - 2 * copied)
        assert (found.unfused_flops, found.unfused_hbm_bytes) == (found.flops, found.hbm_bytes)


def test_roofline_counts_gradients():
    operands, call, _ = PAIRS["grouped"]
    stand_ins = [planner.Operand(x.shape, requires_grad=True) for x in operands]
    plan = planner.plan("nij,q[n]jk->nik", *stand_ins, q=MANY.shape, backend="jax")
    assert len(plan.programs.backward.steps) == 1
    found = roofline.roofline(lambda g, *xs: jax.vjp(call, *xs)[1](g))(call(*operands), *operands)[1]
    assert found.flops == plan.cost.backward.flops
    assert found.hbm_bytes == plan.cost.backward.bytes_moved


# -- checkpoint policies -------------------------------------------------------------------------


POLICIES = jax.checkpoint_policies
OFFLOAD = POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")
NAMES = POLICIES.save_only_these_names("ours")
OFFLOAD_NAMES = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["ours"], offload_src="device", offload_dst="pinned_host"
)


def wrapped(call, policy):
    """A function that reads the result again in its backward pass."""

    def function(*xs):
        return jnp.square(jax.ad_checkpoint.checkpoint_name(call(*xs), "ours")).sum()

    return jax.checkpoint(function, policy=policy)


def residuals(capsys, function, *xs):
    """The lines that JAX prints, without those of arguments and constants."""
    jax.ad_checkpoint.print_saved_residuals(function, *xs)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if "from the argument" not in line and "from a constant" not in line]


def saved_types(capsys, call, policy, *xs):
    return [line.split()[0] for line in residuals(capsys, wrapped(call, policy), *xs)]


@pytest.mark.parametrize("name", ["grouped", "no batch"])
@pytest.mark.parametrize(
    "policy",
    [POLICIES.dots_saveable, POLICIES.dots_with_no_batch_dims_saveable, OFFLOAD, NAMES, OFFLOAD_NAMES,
     POLICIES.nothing_saveable, POLICIES.save_from_both_policies(NAMES, POLICIES.dots_saveable)],
    ids=["dots", "no batch dims", "offload", "names", "offload names", "nothing", "both"],
)  # fmt: skip
def test_policies_save_what_they_save_of_einsum(capsys, name, policy):
    operands, call, plain = PAIRS[name]
    if name == "no batch":  # otherwise the product with the whole pool is cheaper, and smaller
        operands = (operands[0], numbers(40, 3))
    assert saved_types(capsys, call, policy, *operands) == saved_types(capsys, plain, policy, *operands)
    got, wanted = (jax.jit(jax.grad(wrapped(f, policy), (0, 1)))(*operands) for f in (call, plain))
    assert_same(got, wanted)


def test_policies_see_products_only(capsys):
    """No sum into rows, and no take: these are recomputed."""
    call = partial(planner.contract, "nj->q[n]j", q=Q, sizes={"q": 4})
    assert saved_types(capsys, call, POLICIES.dots_saveable, X) == []
    assert saved_types(capsys, call, POLICIES.everything_saveable, X) == ["f32[4,3]"]
    assert saved_types(capsys, partial(planner.contract, "q[n]jk->njk", q=Q), POLICIES.dots_saveable, C) == []


# -- names ---------------------------------------------------------------------------------------


def here(x, c):
    return jnp.sin(planner.contract("nj, q[n]jk -> nk", jnp.sin(x), c, q=Q))


def test_programs_show_the_users_line_and_the_spec(capsys):
    (line,) = residuals(capsys, jax.checkpoint(here, policy=POLICIES.dots_saveable), X, C)
    line_of_call = here.__code__.co_firstlineno + 1
    assert re.search(
        rf"output of (?:planner_step|dot_general) from .*test_jax_rules.py:{line_of_call}:\d+ \(here\)", line
    )
    for function in (here, jax.grad(lambda x, c: here(x, c).sum())):
        text = jax.jit(function).lower(X, C).as_text(debug_info=True)
        assert "nj, q[n]jk -> nk" in text
        assert "backends/jax" not in text
        compiled = jax.jit(function).lower(X, C).compile().as_text()
        assert re.search(r'op_name="jit\(.*nj, q\[n\]jk -> nk', compiled)


def test_a_call_keeps_what_its_gradients_read_and_nothing_else(capsys):
    operands, call, _ = PAIRS["grouped"]
    assert residuals(capsys, call, *operands) == []
    assert residuals(capsys, jax.jit(call), *operands) == []


# -- types and settings --------------------------------------------------------------------------


def test_results_are_weakly_typed_as_those_of_einsum():
    weak, integer, half, floats = jnp.asarray(2.0), jnp.arange(3), jnp.ones(3, "bfloat16"), jnp.full(3, 2.0)
    calls = [(",i->i", (weak, integer)), (",i->i", (weak, half)), (",i->i", (weak, floats)), ("i->", (floats,)),
             ("i->i", (floats,)), (",->", (weak, jnp.asarray(2))), ("i,i->i", (integer, half)),
             ("i,j,->ij", (integer, integer, weak))]  # fmt: skip
    for spec, operands in calls:
        for way in (lambda f: f, jax.jit):
            got, wanted = (way(partial(einsum, spec))(*operands) for einsum in (planner.contract, jnp.einsum))
            assert (got.dtype, got.weak_type) == (wanted.dtype, wanted.weak_type), spec
            assert (got == wanted).all()
    for mode in INDEX_MODES:
        taken = planner.contract("q[i]->i", floats, q=jnp.array([0, 0]), index_mode=mode)
        assert taken.weak_type
        assert (taken + half[:2]).dtype == jnp.bfloat16
    assert not planner.contract("i->i", floats, dtype="float16").weak_type
    with jax.enable_x64(True):  # whole numbers that promote to floats make weak ones
        for signed, wide in (("int8", "uint64"), ("int64", "uint64"), ("int64", "uint32")):
            operands = jnp.ones(3, signed), jnp.ones(3, wide)
            got, wanted = (einsum("i,i->i", *operands) for einsum in (planner.contract, jnp.einsum))
            assert (got.dtype, got.weak_type) == (wanted.dtype, wanted.weak_type)
    with jax.numpy_dtype_promotion("strict"):  # a dtype that is asked for is promoted to, beside a weak operand too
        assert planner.contract("i,i,i->i", floats, half, jnp.ones(3), dtype="float32").dtype == "float32"


HALF, FLOAT = jnp.ones(3, "bfloat16"), jnp.ones(3)
SETTINGS = {
    "strict": jax.numpy_dtype_promotion("strict"),
    "64 bits": jax.enable_x64(True),
    "ranks": jax.numpy_rank_promotion("raise"),
    "precision": jax.default_matmul_precision("float32"),
    "checks": jax.enable_checks(True),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_holds_after_a_warm_call(setting):
    """What `jnp.einsum` gives: its dtypes, and its errors."""

    def outcome(einsum, *operands):
        try:
            return einsum("i,i->i", *operands).dtype
        except jax.dtypes.TypePromotionError as error:
            return type(error)

    pairs = [(HALF, FLOAT), (HALF, HALF), (jnp.arange(3), jnp.ones(3, bool)), (jnp.arange(3), FLOAT)]
    for pair in pairs:
        before = outcome(planner.contract, *pair)
        with SETTINGS[setting]:
            assert outcome(planner.contract, *pair) == outcome(jnp.einsum, *pair)
        assert outcome(planner.contract, *pair) == before == outcome(jnp.einsum, *pair)


@pytest.mark.parametrize("setting", ["strict", "ranks", "64 bits"])
@pytest.mark.parametrize("name", ["dropped", "grouped", "scatter"])
def test_steps_run_under_every_setting(name, setting):
    """In programs that are traced and lowered there."""
    operands, call, _ = PAIRS[name]
    wanted = call(*operands), *gradients(call, *operands)
    jax.clear_caches()
    with SETTINGS[setting]:
        assert_same(jax.jit(lambda *xs: (call(*xs), *gradients(call, *xs)))(*operands), wanted)


def test_x64_within_a_jitted_function():
    """Gathers, scatters and gradients in 64 bits, in a function that is jitted with 32."""

    def inside(x, c, q):
        with jax.enable_x64(True):
            wide = x.astype("float64"), c.astype("float64")
            loss = partial(planner.contract, "nj,q[n]jk->nk", q=q)
            added = planner.contract("nj->q[n]j", wide[0], q=q, sizes={"q": 4})
            return [y.astype("float32") for y in (loss(*wide), added, *gradients(loss, *wide))]

    plain = partial(planner.contract, "nj,q[n]jk->nk", q=Q)
    added = planner.contract("nj->q[n]j", X, q=Q, sizes={"q": 4})
    assert_same(jax.jit(inside)(X, C, Q), [plain(X, C), added, *gradients(plain, X, C)])


def test_a_traced_size_is_refused():
    with pytest.raises(planner.ShapeError, match="sizes=: 'q' must be a non-negative integer, not "):
        jax.jit(lambda n: planner.contract("nj->q[n]j", X, q=Q, sizes={"q": n}))(4)


@pytest.mark.parametrize("keys", [jax.random.key(0), jax.random.split(jax.random.key(0), 3)], ids=["one", "three"])
def test_keys_of_random_numbers_are_refused(keys):
    term = "i"[: keys.ndim]
    with pytest.raises(planner.PlannerError, match="operand 1 holds PRNG keys.*jax.random.normal"):
        planner.contract(f"i,{term}->i", FLOAT, keys)
    with pytest.raises(planner.PlannerError, match="operand 1 holds PRNG keys.*jax.random.normal"):
        jax.jit(partial(planner.contract, f"i,{term}->i"))(FLOAT, keys)
    with pytest.raises(planner.PlannerError, match="index array 'q' has dtype key<fry>"):
        planner.contract(f"q[{term}]->{term}", FLOAT, q=keys)
    assert planner.contract("ij->i", jax.random.key_data(jax.random.split(jax.random.key(0), 3))).shape == (3,)


# -- prepared index arrays -----------------------------------------------------------------------


def test_values_that_change_are_checked_again():
    q = planner.group(Q, 4)
    call = partial(planner.contract, "nj,q[n]jk->nk", X, C)
    same = [jax.tree.map(lambda v: v, q), jax.tree.map(jnp.copy, q), jax.device_put(q), jax.jit(lambda q: q)(q),
            jax.tree.map(lambda v: v // 2 * 2, q), jax.tree.map(np.asarray, q)]  # fmt: skip
    assert [each.may_drop for each in same] == [False] * len(same)
    for each in same:
        assert_same(call(q=each), call(q=jnp.asarray(each.values)))
    changed = jax.tree.map(lambda v: v + 1, q)
    assert changed.may_drop
    with pytest.raises(planner.IndexRangeError, match=r"'q'\[0\] is 4"):
        call(q=changed)
    assert jnp.isnan(jax.jit(lambda q: call(q=q))(changed)).any(1).tolist() == (Q == 3).tolist()
    inside = jax.jit(lambda q: call(q=jax.tree.map(lambda v: v + 1, q)))
    assert jnp.isnan(inside(q)).any(1).tolist() == (Q == 3).tolist()
    checked = checkify.checkify(jax.jit(lambda q: call(q=q)), errors=checkify.index_checks)
    assert "'q'[0] is 4" in checked(changed)[0].get()
    assert checked(q)[0].get() is None


@pytest.mark.parametrize("mode", INDEX_MODES)
def test_values_on_the_host_are_arrays_again(mode):
    """`jax.device_get` makes NumPy arrays of all parts of a model, and of its prepared index arrays."""
    q = planner.group(Q if mode == "raise" else Q.at[2].set(7), 4, index_mode=mode)
    host = jax.device_get(q)
    assert isinstance(host.values, np.ndarray)
    calls = [
        lambda q: planner.contract("nj,q[n]jk->nk", X, C, q=q, index_mode=mode),
        lambda q: planner.contract("nj->q[n]j", X, q=q, sizes={"q": 4}, index_mode=mode),
        lambda q: jax.grad(lambda x: jnp.nansum(planner.contract("nj,q[n]jk->nk", x, C, q=q, index_mode=mode)))(X),
        lambda q: jax.jit(lambda x: planner.contract("nj,q[n]jk->nk", x, C, q=q, index_mode=mode))(X),
        lambda q: planner.plan("nj,q[n]jk->nk", X, C, q=q, index_mode=mode)(X, C, q=q),
    ]
    for call in calls:
        np.testing.assert_array_equal(call(host), call(q))


@pytest.mark.parametrize("values", [None, [0, 1, 2]])
def test_values_that_are_no_array_are_refused(values):
    q = jax.tree.map(lambda _: values, planner.group(Q, 4))
    with pytest.raises(planner.PlannerError, match="index array 'q' was prepared, but something else"):
        planner.contract("nj,q[n]jk->nk", X, C, q=q)
    with pytest.raises(planner.PlannerError, match="index array 'q' was prepared, but something else"):
        planner.plan("nj,q[n]jk->nk", X, C, q=Q)(X, C, q=q)


@pytest.mark.parametrize(
    "around",
    [
        jax.jit,
        lambda f: jax.jit(lambda s: jax.lax.scan(lambda s, _: (s, f(s)), s, None, length=1)[1][0]),
        lambda f: jax.jit(lambda s: jax.grad(lambda x: f(s, x).sum())(X)[:, :2]),
        lambda f: jax.jit(lambda s: jax.vmap(f)(s[None])[0]),
    ],
)
def test_closed_over_values_that_a_program_changes_are_checked_again(around):
    q = planner.group(Q, 4)

    def shifted(by, x=X):
        return planner.contract("nj,q[n]jk->nk", x, C, q=jax.tree.map(lambda v: v + by, q))

    assert jnp.isnan(around(shifted)(jnp.int32(100))).all()
    assert not jnp.isnan(around(shifted)(jnp.int32(0))).any()
    with pytest.raises(planner.IndexRangeError, match="is 10[0-3]"):
        jax.vmap(shifted)(jnp.array([0, 100]))


def test_values_that_a_transform_hands_on_are_not_checked_again():
    """So a jitted function of integers, which have no NaN, takes a prepared index array."""
    q, rows = planner.group(Q, 4), jnp.arange(4)
    call = partial(planner.contract, "q[n]->n", rows)
    wanted = rows[Q]
    assert_same(jax.jit(lambda q: call(q=q))(q), wanted)
    assert_same(jax.jit(jax.checkpoint(lambda q: call(q=q)))(q), wanted)
    assert_same(jax.lax.scan(lambda q, _: (q, call(q=q)), q, None, length=1)[1][0], wanted)
    with pytest.raises(planner.PlannerError, match="no NaN"):
        jax.jit(lambda q: call(q=jax.tree.map(lambda v: v % 4, q)))(q)


# -- speed ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_tracing():
    """Fails if JAX traces or compiles anything."""
    seen = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: seen.append(event))
    try:
        yield
    finally:
        jax.monitoring.clear_event_listeners()
    assert seen == []


@pytest.mark.parametrize("index_mode", INDEX_MODES)
def test_a_warm_call_traces_nothing(index_mode):
    def call():
        return planner.contract("nj,q[n]jk->nk", X, C, q=Q, index_mode=index_mode)

    call()
    with no_tracing():
        call()


@pytest.mark.parametrize(("spec", "shapes"), [("nj->q[n]j", [(600, 64)]), ("q[n]j->nj", [(40, 64)])])
def test_what_is_dropped_is_not_masked(spec, shapes):
    """Neither the sum into rows nor the gradient of a take copies what it adds, in order to zero a part of it."""
    operands = [jnp.ones(shape) for shape in shapes]
    options = {"sizes": {"q": 40}} if spec.startswith("nj") else {}

    def temporaries(mode):
        def call(*xs):
            return planner.contract(spec, *xs, q=jnp.arange(600) % 41 % 40, index_mode=mode, **options)

        def added(x):
            return call(x) if options else jax.vjp(call, x)[1](jnp.ones((600, 64)))

        return jax_temp_bytes(added, *operands)

    assert temporaries("drop") <= temporaries("raise") + 4 * 600


def test_xla_does_not_sort_constants_while_it_compiles():
    """An index array that a jitted function closes over is sorted when the program runs."""
    text = jax.jit(PAIRS["grouped"][1]).lower(ROWS, MATRICES).compile().as_text()
    assert re.search(r"= u32\[128\]\S* sort\(", text)


def test_x64_within_a_jitted_function_of_several_devices():
    """XLA makes the parts of a step on a thread of its own, with JAX's own settings."""
    run_python(
        """
import jax, jax.numpy as jnp, planner
from jax.sharding import NamedSharding, PartitionSpec

@jax.jit
def inside(x, c):
    with jax.enable_x64(True):
        wide = x.astype("float64"), c.astype("float64")
        call = lambda x, c: planner.contract("nj,q[n]jk->nk", x, c, q=jnp.arange(8) % 4)
        values = call(*wide), *jax.vjp(call, *wide)[1](jnp.ones((8, 5)))
        return [y.astype("float32") for y in values]

x, c = jnp.arange(24.0).reshape(8, 3), jnp.arange(60.0).reshape(4, 3, 5)
rows = jax.device_put(x, NamedSharding(jax.make_mesh((2,), ("i",)), PartitionSpec("i")))
for got, wanted in zip(inside(rows, c), inside(x, c), strict=True):
    assert (got == wanted).all()
""",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )
