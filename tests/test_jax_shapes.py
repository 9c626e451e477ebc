"""Sizes in JAX: contractions at the symbolic sizes of `jax.export`, and calls of sizes that were not met before."""

import dataclasses
from functools import partial

import numpy as np
import pytest
from conftest import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from laws import exact_problems

import planner
from planner.language.options import INDEX_MODES
from planner.language.parse import parse
from planner.language.resolve import expand_ellipses

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp, export = jax.numpy, pytest.importorskip("jax.export")

PLATFORMS = ("cpu", "cuda", "tpu")
B, N, K = export.symbolic_shape("b, n, k")


def array(*shape, dtype="float32"):
    """A stand-in for an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def exported(function, *arrays, platforms=("cpu",)):
    return export.export(jax.jit(function), platforms=platforms)(*arrays)


def cotangent(result):
    """A small gradient of a result, which depends on it."""
    return jax.numpy.where(result > 0, 2.0, -1.0)


def differentiated(contract):
    """From a contraction of operands and index arrays to its result and the gradients of its operands."""

    def both(operands, indices):
        result, pull = jax.vjp(lambda operands: contract(operands, indices), operands)
        return result, *pull(cotangent(result))[0]

    return both


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).integers(-2, 3, shape), "float32")


# By three sizes: the spec, shapes of operands and of index arrays, keywords, and the size of the dimension that `q`
# indexes.
CASES = {
    "product": lambda b, n, k: ("ij,jk->ik", [(b, 3), (3, 4)], [], {}, None),
    "two symbols": lambda b, n, k: ("ij,jk->ik", [(b, n), (n, 4)], [], {}, None),
    "expressions": lambda b, n, k: ("ij,jk->ki", [(2 * b + 1, n * b), (n * b, 4)], [], {}, None),
    "broadcast": lambda b, n, k: ("...j,jk->...k", [(b, 1, 3), (3, 4)], [], {}, None),
    "repeated": lambda b, n, k: ("ijj,k->ik", [(b, n, n), (k,)], [], {}, None),
    "new axis": lambda b, n, k: ("ij->ijb", [(n, 3)], [], {"sizes": {"b": b}}, None),
    "chain": lambda b, n, k: ("ab,bc,cd,de->ae", [(b, n), (n, 3), (3, k), (k, 2)], [], {}, None),
    "gather": lambda b, n, k: ("nj,q[n]jk->nk", [(n, 3), (k, 3, 4)], [(n,)], {}, k),
    "fixed pool": lambda b, n, k: ("nj,q[n]jk->nk", [(n, 3), (5, 3, 4)], [(n,)], {}, 5),
    "two axes": lambda b, n, k: ("bxd,bq[bxk]d->bxk", [(b, n, 3), (b, k, 3)], [(b, n, 2)], {}, k),
    "scatter": lambda b, n, k: ("nj->q[n]j", [(n, 3)], [(n,)], {"sizes": {"q": k + 1}}, k + 1),
    "scatter, fixed": lambda b, n, k: ("nj,n->q[n]j", [(n, 3), (n,)], [(n,)], {"sizes": (4, 3)}, 4),
    "gather, scatter": lambda b, n, k: ("n,q[n]j->q[n]j", [(n,), (k, 3)], [(n,)], {}, k),
    "gathered chain": lambda b, n, k: ("nj,q[n]jk,kl->nl", [(n, 3), (k, 3, 4), (4, 2)], [(n,)], {}, k),
}


@pytest.mark.parametrize("case", CASES)
def test_exported_contractions_run_at_any_size(case):
    """With gradients, at four sizes, from one program for three platforms."""
    spec, shapes, brackets, keywords, _ = CASES[case](B, N, K)
    mode = {"index_mode": "drop"} if brackets and case != "gather" else {}

    def run(operands, indices, _):
        def contract(operands, indices):
            return planner.contract(spec, *operands, **dict(zip("q", indices, strict=False)), **keywords, **mode)

        return differentiated(contract)(operands, indices)

    # Sizes that no array shows are those of an array which is passed along.
    stand_ins = [array(*s) for s in shapes], [array(*s, dtype="int32") for s in brackets], array(B, N, K)
    program = exported(run, *stand_ins, platforms=PLATFORMS)
    for sizes in ((1, 1, 1), (2, 3, 5), (4, 9, 2), (7, 6, 4)):
        spec, shapes, brackets, own, rows = CASES[case](*sizes)
        operands, random = [numbers(*shape) for shape in shapes], np.random.default_rng(3)
        indices = [jnp.asarray(random.integers(0, rows, shape), "int32") for shape in brackets]
        arguments = {**own, **dict(zip("q", map(np.asarray, indices), strict=False))}
        values = [*map(np.asarray, operands)]
        expected = planner.testing.reference(spec, *values, **arguments)
        gradients = planner.testing.reference_gradients(spec, cotangent(expected), *values, **arguments)
        found = program.call(operands, indices, numbers(*sizes))
        for x, y in zip(found, [expected, *gradients], strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("mode", ["raise", "drop", "clip", "nan"])
def test_bad_indices_are_treated_as_at_fixed_sizes(mode):
    """In results and gradients, also where a whole pool is contracted first and rows of it are not read."""

    def run(operands, indices):
        return differentiated(
            lambda operands, indices: planner.contract("nk,jk,q[n]j->n", *operands, q=indices[0], index_mode=mode)
        )(operands, indices)

    program = exported(run, [array(N, 3), array(2, 3), array(K, 2)], [array(N, dtype="int32")])
    for rows, pool in ((5, 3), (9, 4)):
        a, b, c = numbers(rows, 3), numbers(2, 3), numbers(pool, 2)
        unread = jnp.arange(rows) % (pool - 1) + 1
        for pool_rows, q in ((c.at[0].set(jnp.nan), unread), (c, jnp.arange(rows) - pool // 2)):
            found, expected = (f([a, b, pool_rows], [q]) for f in (program.call, jax.jit(run)))
            for x, y in zip(found, expected, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", ["bool", "int32", "bfloat16", "complex64"])
def test_exported_contractions_of_other_dtypes(dtype):
    def run(a, c, q):
        return planner.contract("nj,q[n]jk->nk", a, c, q=q, index_mode="drop")

    program = exported(run, array(N, 3, dtype=dtype), array(K, 3, 4, dtype=dtype), array(N, dtype="int32"))
    arrays = (numbers(6, 3).astype(dtype), numbers(4, 3, 4).astype(dtype), jnp.asarray([0, 3, 4, -1, 2, 2]))
    found, expected = program.call(*arrays), run(*arrays)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_an_exported_program_can_be_stored_with_its_gradient():
    pytest.importorskip("flatbuffers", reason="jax.export stores programs by flatbuffers, which is not installed")
    program = exported(
        lambda a, c, q: planner.contract("nj,q[n]jk->nk", a, c, q=q),
        array(N, 3), array(K, 3, 4), array(N, dtype="int32"), platforms=PLATFORMS,
    )  # fmt: skip
    stored = export.deserialize(program.serialize(vjp_order=1))
    for rows, pool in ((1, 1), (2, 5), (9, 4), (4, 4)):
        a, c, q = numbers(rows, 3), numbers(pool, 3, 4), jnp.arange(rows, dtype="int32") % pool
        result, pull = jax.vjp(lambda a, c, q=q: stored.call(a, c, q), a, c)
        expected, wanted = jax.vjp(lambda a, c, q=q: jnp.einsum("nj,njk->nk", a, c[q]), a, c)
        np.testing.assert_array_equal(result, expected)
        for x, y in zip(pull(result), wanted(expected), strict=True):
            np.testing.assert_array_equal(x, y)


def test_an_exported_program_that_takes_a_prepared_index_array_can_be_stored():
    pytest.importorskip("flatbuffers", reason="jax.export stores programs by flatbuffers, which is not installed")
    a, c, q = numbers(4, 3), numbers(2, 3, 5), planner.group(jnp.asarray([0, 1, 1, -1]), 2)
    program = exported(lambda a, c, q: planner.contract("nj,q[n]jk->nk", a, c, q=q), a, c, q)
    stored = export.deserialize(program.serialize(vjp_order=1))
    for same in (q, planner.group(jnp.asarray([1, 1, 0, 0]), 2)):
        expected, wanted = jax.vjp(lambda a, c, q=same: jnp.einsum("nj,njk->nk", a, c[q.values]), a, c)
        result, pull = jax.vjp(lambda a, c, q=same: stored.call(a, c, q), a, c)
        np.testing.assert_array_equal(result, expected)
        for x, y in zip(pull(result), wanted(expected), strict=True):
            np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match="size=2, index_mode='drop'"):
        stored.call(a, c, planner.group(q.values, 2, index_mode="drop"))


def test_gradients_at_symbolic_sizes_keep_no_rows_that_were_taken():
    """Nor is the batched product of two chains of layers kept twice: what is kept are operands and results."""

    def kept(a, c, w, q):
        return jax.vjp(lambda a, c, w: planner.contract("nj,q[n]jk,kl->nl", a, c, w, q=q), a, c, w)[1]

    pull = jax.eval_shape(kept, array(N, 3), array(K, 3, 4), array(4, 5), array(N, dtype="int32"))
    shapes = {x.shape for x in jax.tree.leaves(pull)}
    assert shapes == {(N, 3), (K, 3, 4), (4, 5), (N,), (N, 4)}


def test_transforms_at_symbolic_sizes():
    """Forward mode, second derivatives, `vmap` and `jax.checkpoint`."""

    def call(a, c, q):
        return planner.contract("nj,q[n]jk->nk", a, c, q=q).sum(-1)

    def run(a, c, q):
        loss = lambda a, c: (call(a, c, q) ** 2).sum()  # noqa: E731
        tangent = jax.jvp(jax.grad(loss, (0, 1)), (a, c), (a, c))[1]
        again = jax.grad(jax.checkpoint(loss), (0, 1))(a, c)
        batched = jax.vmap(call, (0, None, 0))(jnp.stack([a, 2 * a]), c, jnp.stack([q, q[::-1]]))
        return *tangent, *again, batched

    program = exported(run, array(N, 3), array(K, 3, 4), array(N, dtype="int32"))
    arrays = numbers(7, 3), numbers(4, 3, 4), jnp.arange(7, dtype="int32") % 4
    for found, expected in zip(program.call(*arrays), jax.jit(run)(*arrays), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("mode", INDEX_MODES)
def test_vmap_over_an_axis_of_symbolic_size(mode):
    """Calls whose own sizes are numbers, one of which would run a grouped kernel with a joint gradient."""

    def run(a, c, q, x):
        rows = partial(planner.contract, "nij,q[n]jk->nik", index_mode=mode)
        sums = partial(planner.contract, "nj->q[n]j", sizes={"q": 24}, index_mode=mode)
        multiply = jax.vmap(lambda a, c, q: rows(a, c, q=q), (0, None, 0))
        add = jax.vmap(lambda x, q: sums(x, q=q), (None, 0))
        loss = lambda a, c, x: (multiply(a, c, q) ** 2).sum() + (add(x, q) ** 2).sum()  # noqa: E731
        return multiply(a, c, q), add(x, q), *jax.grad(loss, (0, 1, 2))(a, c, x)

    program = exported(run, array(N, 128, 1, 8), array(24, 8, 8), array(N, 128, dtype="int32"), array(128, 2))
    for count in (2, 3):
        q = jnp.arange(128 * count, dtype="int32").reshape(count, 128) % 24
        arrays = numbers(count, 128, 1, 8), numbers(24, 8, 8), q, numbers(128, 2)
        for found, expected in zip(program.call(*arrays), jax.jit(run)(*arrays), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_an_index_array_that_is_known_reads_a_pool_of_any_size():
    program = exported(lambda c: planner.contract("q[n]j->nj", c, q=jnp.asarray([0, 2, -1])), array(K, 2))
    for size in (3, 5):
        c = numbers(size, 2)
        np.testing.assert_array_equal(program.call(c), c[jnp.asarray([0, 2, -1])])
    # An index that is out of range at the size of a call is seen then, and not when the program is exported.
    assert np.isnan(program.call(numbers(2, 2))[1]).all()


def test_symbols_are_planned_at_their_bounds_and_else_at_1024():
    (b, n, k) = export.symbolic_shape("b, n, k", constraints=["b <= 64", "n >= 5000"])
    plan = planner.plan("bi,ij,jk->bk", (b, n), (n, 2 * b), (2 * b, k), backend="jax")
    assert plan.resolved.spec.sizes == (("b", 64), ("i", 5000), ("j", 128), ("k", 1024))
    assert "planned at b = 64, n = 5,000, 2*b = 128, k = 1,024; symbolic sizes run stock steps" in str(plan)
    assert dataclasses.asdict(planner.Plan.from_json(plan.to_json()))["symbols"] == plan.symbols
    fixed = planner.plan("bi,ij,jk->bk", (64, 5000), (5000, 128), (128, 1024), backend="jax")
    assert "stock steps" not in str(fixed)
    assert fixed.path == plan.path


def test_pools_of_two_symbolic_sizes_stay_two():
    program = exported(
        lambda a, c, q: planner.contract("q[n]j,q[n]j->n", a, c, q=q),
        array(N, 2), array(K, 2), array(3, dtype="int32"),
    )  # fmt: skip
    a, c, q = numbers(4, 2), numbers(6, 2), jnp.asarray([1, 0, 3], "int32")
    np.testing.assert_array_equal(program.call(a, c, q), (a[q] * c[q]).sum(-1))


def test_a_plan_that_was_made_at_symbolic_sizes_runs_at_them():
    def run(a, c, q):
        plan = planner.plan("nj,q[n]jk->nk", a, c, q=q)
        scatter = planner.plan("nk->q[n]k", planner.Operand((N, 4)), q=q, sizes={"q": 7}, backend="jax")
        return scatter(plan(a, c, q=q), q=q)

    program = exported(run, array(N, 3), array(K, 3, 4), array(N, dtype="int32"))
    a, c, q = numbers(6, 3), numbers(4, 3, 4), jnp.asarray([0, 3, 1, 1, 2, 2], "int32")
    np.testing.assert_array_equal(program.call(a, c, q), jnp.zeros((7, 4)).at[q].add(jnp.einsum("nj,njk->nk", a, c[q])))


def test_errors_at_symbolic_sizes_name_the_axis_and_what_to_do():
    def error(function, *arrays):
        with pytest.raises(planner.PlannerError) as caught:
            exported(function, *arrays)
        return str(caught.value)

    product = lambda a, b, **options: planner.contract("ij,jk->ik", a, b, **options)  # noqa: E731
    message = error(product, array(N, K), array(B, 3))
    assert message.startswith("axis 'j' has size k in operand 0 but b in operand 1")
    assert "(n, k), (b, 3)" in message
    message = error(lambda a, b: product(a, b, memory_limit=100), array(N, 3), array(3, 4))
    assert "axis 'i' has the symbolic size n: leave the limits out" in message
    message = error(lambda a, b: product(a, b, retain_limit=0), array(3, 3), array(3, N))
    assert "axis 'k' has the symbolic size n" in message
    plan = planner.plan("ij,jk->ik", (5, 3), (3, 4), backend="jax")
    assert "operand 0 is float32[n, 3]" in error(lambda a, b: plan(a, b), array(N, 3), array(3, 4))
    message = error(lambda a, q: planner.group(q, a.shape[0]).values, array(N), array(3, dtype="int32"))
    assert "symbolic size n" in message
    assert "pass the index array itself" in message


# -- sizes that were not met before ------------------------------------------------------------------------

NEW = {
    "chain": ("ij,jk,kl->il", [(3, 4), (4, 5)], None),
    "gather": ("nj,q[n]jk->nk", [(6, 3, 4)], 6),
    "scatter": ("nj,q[n]jk->q[n]k", [(6, 3, 4)], 6),
}


@pytest.fixture
def lowered():
    """The programs that JAX lowered so far, as events."""
    events = []

    def note(name, seconds, **_):
        if name.endswith("jaxpr_to_mlir_module_duration"):
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield events
    jax.monitoring.unregister_event_duration_listener(note)


def of_size(case, n):
    spec, others, pool = NEW[case]
    indices = {} if pool is None else {"q": jnp.arange(n, dtype="int32") % pool}
    operands = [numbers(n, 3), *(numbers(*shape) for shape in others)]
    return lambda *operands: planner.contract(spec, *operands, **indices), operands


@pytest.mark.parametrize("case", NEW)
def test_a_call_of_a_new_size_compiles_one_program(case, lowered):
    """An eager call compiles one for the whole plan, and one more for all gradients."""
    for n in (20, 21):
        call, operands = of_size(case, n)
        lowered.clear()
        result = call(*operands)
        assert len(lowered) == 1
        lowered.clear()
        _, pull = jax.vjp(call, *operands)
        pull(result)
        assert len(lowered) == 2


@pytest.mark.parametrize("case", NEW)
def test_small_jitted_calls_have_neither_branches_nor_loops(case):
    """XLA takes longer to compile a branch or a loop than all else in a small contraction."""
    call, operands = of_size(case, 100)
    indices = jnp.arange(100, dtype="int32") % 6

    def run(operands, q):
        result, pull = jax.vjp(
            lambda *x: planner.contract(NEW[case][0], *x, **({} if case == "chain" else {"q": q})), *operands
        )
        return result, pull(result)

    text = jax.jit(run).lower(operands, indices).as_text()
    assert "stablehlo.case" not in text
    assert "stablehlo.while" not in text


# -- the law: any spec, any of its sizes -----------------------------------------------------------------


def ties(problem, spec):
    """For each dimension of each array, operands first, the name of its size: dimensions of one name have one size."""
    names = [*problem.indices]
    terms = [*spec.inputs, *(next(g.axes for g in spec.gathers if g.array == name) for name in names)]
    same = {}

    def find(name):
        while name in same:
            name = same[name]
        return name

    def join(x, y):
        if find(x) != find(y):
            same[find(x)] = find(y)

    for gather in spec.gathers:  # brackets of one array
        for place, axis in enumerate(gather.axes):
            join(axis, (gather.array, place))
    dims = [[find(e if isinstance(e, str) else e.array) for e in term] for term in terms]
    return dims, find


@settings(max_examples=examples(10, 200))
@given(
    exact_problems(max_operands=3, max_axes=4, max_size=3, without=("size zero", "odd axes", "sizes tuple")),
    st.data(),
)
def test_a_random_spec_exported_with_a_symbolic_axis(problem, data):
    """Its results and gradients at other sizes are those of the oracle."""
    shapes = {name: q.shape for name, q in problem.indices.items()}
    spec = expand_ellipses(parse(problem.spec), problem.shapes, shapes)
    dims, find = ties(problem, spec)
    arrays = [*problem.shapes, *shapes.values()]
    chosen = data.draw(st.sampled_from(sorted({name for names in dims for name in names}, key=str) or [None]))
    assume(chosen is not None)
    sizes = dict(problem.sizes or {})
    hidden = [letter for letter in sizes if find(letter) == chosen]
    # The size of a pool is one symbol, if all the pools that an index array reads have it.
    lengths = {sizes[letter] for letter in hidden}
    for names, shape in zip(dims, arrays, strict=True):
        lengths.update(n for name, n in zip(names, shape, strict=True) if name == chosen and n != 1)
    assume(len(lengths) == 1)

    def resized(shape, names, size):
        return tuple(size if name == chosen and n != 1 else n for n, name in zip(shape, names, strict=True))

    def within(q, name, size):
        """An index array that fits a pool of this size where it must."""
        return np.fmod(q, size) if problem.index_mode == "raise" and find(name) == chosen else q

    count, (length,) = len(problem.shapes), lengths
    options = {"index_mode": problem.index_mode}

    def run(operands, indices, size_of):
        asked = sizes | dict.fromkeys(hidden, size_of.shape[0])
        call = lambda xs, qs: planner.contract(problem.spec, *xs, sizes=asked or None, **options, **qs)  # noqa: E731
        return differentiated(call)(operands, indices)

    stand_ins = [array(*resized(shape, names, N)) for shape, names in zip(arrays, dims, strict=True)]
    indices = {name: array(*x.shape, dtype="int32") for name, x in zip(problem.indices, stand_ins[count:], strict=True)}
    program = exported(run, stand_ins[:count], indices, array(N))
    for size in (length + 1, 2):
        own = dataclasses.replace(
            problem,
            shapes=tuple(resized(shape, names, size) for shape, names in zip(arrays[:count], dims, strict=False)),
            sizes=sizes | dict.fromkeys(hidden, size) or None,
            indices={
                name: np.resize(within(q, name, size), resized(q.shape, names, size))
                for (name, q), names in zip(problem.indices.items(), dims[count:], strict=True)
            },
        )
        operands = [jnp.asarray(x) for x in own.operands()]
        found = program.call(operands, {n: jnp.asarray(q, "int32") for n, q in own.indices.items()}, jnp.zeros(size))
        arguments = own.arguments()
        expected = planner.testing.reference(own.spec, *own.operands(), **arguments)
        gradients = planner.testing.reference_gradients(own.spec, cotangent(expected), *own.operands(), **arguments)
        for x, y in zip(found, [expected, *gradients], strict=True):
            np.testing.assert_array_equal(x, y)


def test_the_search_for_bad_indices_is_traced_once_for_all_sizes(monkeypatch):
    from planner.backends.jax import index

    traced, bounds = [], index._wider_bounds

    def counted(x, y):
        traced.append(x)
        return bounds(x, y)

    monkeypatch.setattr(index, "_wider_bounds", counted)
    sums = jax.jit(lambda x, q: planner.contract("nj -> q[n]j", x, q=q, sizes=(3, 2)))
    for rows in (5, 6, 7):
        assert not jnp.isnan(sums(jnp.ones((rows, 2)), jnp.arange(rows) % 3)).any()
        assert jnp.isnan(sums(jnp.ones((rows, 2)), jnp.arange(rows))).all()
    assert len(traced) == 1
