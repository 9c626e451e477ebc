"""Sparse arrays of JAX beside dense ones: what `sparsify` makes of contractions with index arrays."""

import pytest

pytest.importorskip("jax", reason="jax is not installed")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import sparse  # noqa: E402

import planner  # noqa: E402


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).integers(-3, 4, shape), "float32")


def thin(*shape):
    """A matrix whose entries are zero, but for one in three."""
    x = numbers(*shape)
    return x * (jnp.arange(x.size).reshape(shape) % 3 == 1)


Q = jnp.array([1, 3, 0, 2, 1])
# The spec, its operands, and which of them is sparse.
GATHERS = {
    "rows of a dense pool": ("q[n]j, jk -> nk", (numbers(4, 6), thin(6, 3)), 1),
    "rows of a sparse pool": ("q[n]j, jk -> nk", (thin(4, 6), numbers(6, 3)), 0),
    "rows of a sparse pool, summed": ("q[n]j -> j", (thin(4, 6),), 0),
    "rows that the result has": ("q[n]j, jk -> k", (numbers(4, 6), thin(6, 3)), 1),
    "sums into rows": ("nj, jk -> q[n]k", (numbers(5, 6), thin(6, 3)), 1),
    "sums of rows into rows": ("q[n]j, jk -> q[n]k", (numbers(4, 6), thin(6, 3)), 1),
    "three operands": ("q[n]j, jk, kl -> nl", (numbers(4, 6), thin(6, 3), numbers(3, 2)), 1),
    "a sum of one operand": ("q[n]j, kj -> n", (numbers(4, 6), thin(3, 6)), 1),
    "half precision": ("q[n]j, jk -> nk", (numbers(4, 6).astype("bfloat16"), thin(6, 3)), 1),
}


def sizes(spec):
    return {"q": 4} if "q[" in spec.partition("->")[2] else None


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jitted", "eager"])
@pytest.mark.parametrize("index_mode", ["raise", "clip"])
@pytest.mark.parametrize("name", GATHERS)
def test_a_sparse_operand_with_index_arrays(name, index_mode, jit):
    """Values, and gradients of the dense operands, are those of dense ones."""
    spec, operands, place = GATHERS[name]
    mixed = [sparse.BCOO.fromdense(x) if i == place else x for i, x in enumerate(operands)]

    def contract(*operands):
        return planner.contract(spec, *operands, q=Q, sizes=sizes(spec), index_mode=index_mode)

    found, wanted = sparse.sparsify(jit(contract))(*mixed), contract(*operands)
    assert found.dtype == wanted.dtype
    assert (getattr(found, "todense", lambda: found)() == wanted).all()
    dense = 1 - place
    if dense == len(operands):
        return

    def loss(*operands):
        return jnp.square(contract(*operands).astype("float32")).sum()

    found, wanted = sparse.sparsify(jit(jax.grad(loss, dense)))(*mixed), jax.grad(loss, dense)(*operands)
    assert found.dtype == wanted.dtype
    assert (found == wanted).all()


def test_a_sparse_operand_beside_matrices_of_a_pool():
    """The batch of a product is one of the sparse array."""
    x, y = thin(5, 6), numbers(4, 6, 3)
    f = sparse.sparsify(lambda x, y: planner.contract("nj, q[n]jk -> nk", x, y, q=Q))
    assert (f(sparse.BCOO.fromdense(x, n_batch=1), y) == f(x, y)).all()
    with pytest.raises(NotImplementedError, match="batch dimensions"):
        sparse.sparsify(lambda x, y: jnp.einsum("nj, njk -> nk", x, y[Q]))(sparse.BCOO.fromdense(x), y)


def test_bad_indices_beside_a_sparse_operand():
    """They are found, dropped, and marked with NaN where they are traced."""
    y, w, bad = numbers(4, 6), sparse.BCOO.fromdense(thin(6, 3)), Q.at[1].set(9)

    def contract(index_mode):
        return sparse.sparsify(lambda y, w, q: planner.contract("q[n]j, jk -> nk", y, w, q=q, index_mode=index_mode))

    wanted = planner.contract("q[n]j, jk -> nk", y, thin(6, 3), q=bad, index_mode="drop")
    assert (contract("drop")(y, w, bad) == wanted).all()
    marked = jax.jit(contract("raise"))(y, w, bad)
    assert jnp.isnan(marked).all(1).tolist() == [False, True, False, False, False]
    with pytest.raises(planner.IndexRangeError, match=r"'q'\[1\] is 9"):
        sparse.sparsify(lambda y, w: planner.contract("q[n]j, jk -> nk", y, w, q=bad))(y, w)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jitted", "eager"])
@pytest.mark.parametrize(
    ("spec", "index_mode", "theirs", "why"),
    [
        ("q[n]j -> nj", "drop", lambda x: jnp.take(x, Q, axis=0), r"an index of q\[n\] may be out of range"),
        ("nj -> q[n]j", "raise", lambda x: jnp.zeros((4, 6)).at[Q].add(x), "the product is sparse, and would be added"),
    ],
)
def test_what_jax_refuses_of_a_sparse_array_is_refused(spec, index_mode, theirs, why, jit):
    x = sparse.BCOO.fromdense(thin(5, 6))
    with pytest.raises(NotImplementedError):
        sparse.sparsify(theirs)(x)
    f = jit(lambda x: planner.contract(spec, x, q=Q, sizes=sizes(spec), index_mode=index_mode))
    with pytest.raises(NotImplementedError, match=f"planner's step .*{why}.*make the array dense"):
        sparse.sparsify(f)(x)
