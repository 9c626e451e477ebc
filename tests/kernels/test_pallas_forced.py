"""The library with its Pallas kernels forced, interpreted on the CPU: derivatives, maps and index modes."""

import functools
import itertools

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams, get_interpret_effects  # noqa: E402

import planner  # noqa: E402
from planner.backends.jax import evaluation as jax_evaluation  # noqa: E402
from planner.backends.jax import step as jax_step  # noqa: E402
from planner.backends.jax import tree as jax_tree  # noqa: E402
from planner.backends.jax.rows import make_table  # noqa: E402
from planner.cost.device import CPU  # noqa: E402
from planner.cost.objective import step_key  # noqa: E402
from planner.kernels.grouped_matmul import pallas_gpu, pallas_tpu  # noqa: E402
from planner.program.build import Lowerer  # noqa: E402

SPEC = "nij, q[n]jk -> nik"


def arrays(n=64, i=2, j=24, k=20, groups=8, seed=0, dtype="float32", most=2):
    random = np.random.default_rng(seed)
    a, c, w = (jnp.asarray(random.integers(-most, most + 1, x), dtype) for x in ((n, i, j), (groups, j, k), (n, i, k)))
    return a, c, jnp.asarray(random.integers(0, groups, n)), w


@pytest.fixture
def force(monkeypatch):
    """A function after which programs for this machine run what they would run on a platform, interpreted."""

    def forced(module, interpret):
        ran = []
        real = module.KERNELS.product
        counted = module.KERNELS._replace(product=lambda *given, **how: ran.append(1) or real(*given, **how))
        table = make_table(counted)

        def grouped_first(op):
            """The grouped kernels wherever they can run."""
            choices = table.choices(op, CPU)
            return [x for x in choices if "group" in x.lowering] or choices

        monkeypatch.setattr(module, "INTERPRET", interpret)
        monkeypatch.setattr(jax_evaluation, "TABLE", table)
        lower = Lowerer(grouped_first, step_key("time"))
        monkeypatch.setattr(jax_tree, "lowerer_of", lambda plan: lower)
        forget()
        return ran

    def forget():
        jax.clear_caches()
        jax_step.compile_step.cache_clear()

    yield forced
    forget()


@pytest.fixture
def forced(force):
    """What a TPU runs."""
    return force(pallas_tpu, True)


def call(a, c, q, **options):
    return planner.contract(SPEC, a, c, q=q, minimize="peak", **options)


def plain(a, c, q):
    return jnp.einsum("nij,njk->nik", a, c[q], precision="highest")


@pytest.mark.parametrize("mapped", [x for x in itertools.product((0, None), repeat=3) if any(y == 0 for y in x)])
def test_vmap_over_any_operands(forced, mapped):
    batches = [arrays(seed=seed)[:3] for seed in range(3)]
    given = [jnp.stack(x) if dim == 0 else x[0] for x, dim in zip(zip(*batches, strict=True), mapped, strict=True)]
    found, wanted = (jax.jit(jax.vmap(f, in_axes=mapped))(*given) for f in (call, plain))
    assert jnp.array_equal(found, wanted)
    # Matrices that are mapped along with rows or indices make no grouped product: stock operators run there.
    assert bool(forced) == (mapped[1] is None or mapped == (None, 0, None))


@pytest.mark.parametrize("mode", ["drop", "clip", "raise"])
def test_index_modes_on_the_kernels(forced, mode):
    a, c, q, w = arrays()
    q = q.at[3].set(9 if mode != "raise" else -1)
    wanted = plain(a, c, jnp.clip(q, 0, 7) if mode == "clip" else q)
    wanted = wanted.at[3].set(0) if mode == "drop" else wanted
    a = a.at[3].set(jnp.nan) if mode == "drop" else a
    run = jax.jit(functools.partial(call, index_mode=mode, sizes={"q": 8}))
    assert jnp.array_equal(run(a, c, q), wanted)
    found = jax.jit(jax.grad(lambda a, c: jnp.sum(run(a, c, q) * w), argnums=(0, 1)))(a, c)
    assert not any(jnp.isnan(x).any() for x in found)
    assert forced


@pytest.fixture
def effectful():
    """Steps may run kernels on JAX's simulated GPU, which takes its callbacks in order."""
    plain = {jax_step.step_p: jax_step._step_abstract, jax_step.tangent_p: jax_step._tangent_abstract}
    for primitive, abstract in plain.items():
        primitive.def_effectful_abstract_eval(
            lambda *given, of=abstract, **how: (of(*given, **how), get_interpret_effects())
        )
    yield
    for primitive, abstract in plain.items():
        primitive.def_abstract_eval(abstract)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_values_and_derivatives(request, force, platform):
    """First, second and third ones, in both modes; on a GPU of 16-bit numbers.

    All are integers that these hold exactly, so that equality is asked for. JAX checkpoints nothing that its simulation
    of a GPU runs: the plan is one step there, which recomputes nothing.
    """
    if platform == "gpu":
        request.getfixturevalue("effectful")
        ran = force(pallas_gpu, InterpretGPUParams())
        a, c, q, w = arrays(dtype="bfloat16", most=1)
    else:
        ran = force(pallas_tpu, True)
        a, c, q, w = arrays()
    tangents = a[::-1], c[::-1]

    def all_of(f):
        def loss(a, c):
            return jnp.sum((f(a, c, q) * w).astype("float32"))

        def along(a, c):
            return jax.jvp(lambda a, c: f(a, c, q), (a, c), tangents)[1]

        def second(a, c):
            """A gradient along tangents, as one number."""
            _, (to_a, to_c) = jax.jvp(jax.grad(loss, argnums=(0, 1)), (a, c), tangents)
            return jnp.sum((to_a * a).astype("float32")) + jnp.sum((to_c * c).astype("float32"))

        found = [
            f(a, c, q),
            along(a, c),
            jax.jvp(along, (a, c), tangents)[1],
            jax.vmap(f, (0, None, 0))(a[None], c, q[None]),
        ]
        found.append(jax.linearize(lambda a, c: f(a, c, q), a, c)[1](*tangents))
        found += [*jax.grad(loss, argnums=(0, 1))(a, c), *jax.grad(second, argnums=(0, 1))(a, c)]
        if platform == "tpu":
            found += jax.grad(jax.checkpoint(loss), argnums=(0, 1))(a, c)
        return found

    found, wanted = (jax.jit(functools.partial(all_of, f))() for f in (call, plain))
    assert all(map(jnp.array_equal, found, wanted))
    assert ran
