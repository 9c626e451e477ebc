"""`make packages`, the models in JAX: trained for 20 steps as they are and within `planner.patch()`.

Each row of the table is a small model of a package from the package index, or one written in the manner of public code.
On one device, on eight simulated ones with the batch split, and on these with parameters split too, it compares
the losses of all steps, how long a step takes to trace and compile, XLA's temporary memory, what devices exchange, and
how long a compiled step takes. `--write` writes the part on JAX of docs/benchmarks/packages.md.
Row names select rows: ``python tests/peers/jax_packages.py flax e3nn``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import importlib.metadata
import math
import os
import pathlib
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]
from packages import TABLE, put_section, timed  # noqa: E402

import planner  # noqa: E402

STEPS = 20
# Both sides round, each in its own order of sums: of a loss of float32, after 20 steps of Adam.
CLOSE = 1e-4
# The median of several compilations must not take longer than this times theirs.
SLOWEST_COMPILATION = 1.1

# From parameters and a batch to a loss.
Loss = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """A model: `make` returns its parameters, a batch whose arrays have the batch first, and its loss."""

    package: str
    what: str
    make: Callable[[], tuple[Any, Any, Loss]]


def normal(*shape: int) -> Any:
    """Return random numbers, the same for the same shape."""
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), "float32")


def whole(most: int, *shape: int) -> Any:
    """Return random integers below a number, the same for the same shape."""
    return jnp.asarray(np.random.default_rng(shape).integers(0, most, shape), "int32")


def square(x: Any, wanted: Any) -> Any:
    return jnp.mean((x - wanted) ** 2)


# -- flax --------------------------------------------------------------------------------------------------------------


def linen_attention() -> Any:
    import flax.linen as nn

    layer, x = nn.MultiHeadDotProductAttention(num_heads=8), normal(16, 64, 128)
    mask = nn.make_causal_mask(jnp.ones((16, 64)))
    params = layer.init(jax.random.key(0), x)
    return params, (x, mask), lambda params, batch: square(layer.apply(params, batch[0], mask=batch[1]), batch[0])


def linen_layers() -> Any:
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            heads = nn.DenseGeneral((8, 16))(x)
            mixed = nn.Einsum((8, 16, 32), "bthd,hdk->bthk")(heads)
            gates = jax.nn.sigmoid(nn.Einsum((8, 32, 32), "...hk,hkl->...hl", use_bias=False)(mixed))
            return nn.DenseGeneral(128, axis=(-2, -1))(mixed * gates)

    layer, x = Block(), normal(16, 64, 128)
    return layer.init(jax.random.key(0), x), x, lambda params, x: square(layer.apply(params, x), x)


def linen_transformer() -> Any:
    import flax.linen as nn

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            x = nn.Embed(256, 128)(tokens)
            for _ in range(2):
                mask = nn.make_causal_mask(tokens)
                x = x + nn.MultiHeadDotProductAttention(num_heads=8)(nn.LayerNorm()(x), mask=mask)
                x = x + nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x))))
            return nn.Dense(256)(x)

    import optax

    model, tokens = Transformer(), whole(256, 16, 33)

    def loss(params: Any, tokens: Any) -> Any:
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return model.init(jax.random.key(0), tokens[:, :-1]), tokens, loss


def linen_half() -> Any:
    """Attention in bfloat16, with parameters in float32."""
    import flax.linen as nn

    layer, x = nn.MultiHeadDotProductAttention(num_heads=8, dtype=jnp.bfloat16), normal(16, 64, 128)
    params = layer.init(jax.random.key(0), x)
    return params, x, lambda params, x: square(layer.apply(params, x).astype("float32"), x)


def nnx_attention() -> Any:
    from flax import nnx

    layer, x = nnx.MultiHeadAttention(8, 128, decode=False, rngs=nnx.Rngs(0)), normal(16, 64, 128)
    graph, state = nnx.split(layer)
    return state, x, lambda state, x: square(nnx.merge(graph, state)(x), x)


def nnx_layers() -> Any:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.heads = nnx.LinearGeneral(128, (8, 16), rngs=rngs)
            self.mix = nnx.Einsum("bthd,hdk->bthk", (8, 16, 32), (8, 32), rngs=rngs)
            self.out = nnx.LinearGeneral((8, 32), 128, axis=(-2, -1), rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.out(jax.nn.relu(self.mix(self.heads(x))))

    graph, state = nnx.split(Block(nnx.Rngs(0)))
    return state, normal(16, 64, 128), lambda state, x: square(nnx.merge(graph, state)(x), x)


# -- equinox, haiku, e3nn_jax, jax.nn ----------------------------------------------------------------------------------


def equinox_attention() -> Any:
    import equinox

    layer = equinox.nn.MultiheadAttention(8, 128, key=jax.random.key(0))
    arrays, rest = equinox.partition(layer, equinox.is_array)

    def loss(arrays: Any, x: Any) -> Any:
        attend = equinox.combine(arrays, rest)
        return square(jax.vmap(lambda row: attend(row, row, row))(x), x)

    return arrays, normal(16, 64, 128), loss


def haiku_attention() -> Any:
    import haiku as hk

    def forward(x: Any) -> Any:
        layer = hk.MultiHeadAttention(8, 16, w_init=hk.initializers.VarianceScaling(1.0), model_size=128)
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1])))[None, None]
        return layer(x, x, x, mask=mask)

    model, x = hk.without_apply_rng(hk.transform(forward)), normal(16, 64, 128)
    return model.init(jax.random.key(0), x), x, lambda params, x: square(model.apply(params, x), x)


def e3nn_messages() -> Any:
    """Message passing: spherical harmonics of edges times features of their sources, added up at their targets."""
    import e3nn_jax as e3nn
    import flax.linen as nn
    from e3nn_jax.flax import Linear, MultiLayerPerceptron

    class Layer(nn.Module):
        out: Any

        @nn.compact
        def __call__(self, vectors: Any, features: Any, senders: Any, receivers: Any) -> Any:
            lengths = e3nn.norm(vectors).array
            harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", vectors, True)
            messages = e3nn.tensor_product(Linear("8x0e + 8x1o")(features)[senders], harmonics)
            weights = MultiLayerPerceptron([16, messages.irreps.num_irreps], jax.nn.silu)(e3nn.bessel(lengths[:, 0], 8))
            added = e3nn.scatter_sum(messages * weights, dst=receivers, output_size=features.shape[0]) / 4.0
            return Linear(self.out)(e3nn.concatenate([features, added]).regroup())

    class Network(nn.Module):
        @nn.compact
        def __call__(self, positions: Any, kinds: Any, senders: Any, receivers: Any) -> Any:
            vectors = e3nn.IrrepsArray("1o", positions[senders] - positions[receivers])
            features = e3nn.IrrepsArray("8x0e", jax.nn.one_hot(kinds, 8))
            for out in ("8x0e + 8x1o", "8x0e + 8x1o", "1x0e"):
                features = Layer(out)(vectors, features, senders, receivers)
            return features.array

    model = Network()
    batch = (normal(64, 3), whole(8, 64), whole(64, 256), whole(64, 1, 256)[0])

    def loss(params: Any, batch: Any) -> Any:
        return square(model.apply(params, *batch), jnp.sin(batch[0][:, :1]))

    return model.init(jax.random.key(0), *batch), batch, loss


def e3nn_product() -> Any:
    import e3nn_jax as e3nn

    first, second = e3nn.Irreps("16x0e + 8x1o + 4x2e"), e3nn.Irreps("1x0e + 1x1o + 1x2e")
    product = e3nn.legacy.FunctionalFullyConnectedTensorProduct(first, second, first)
    params = [normal(*i.path_shape) for i in product.instructions]

    def loss(params: Any, batch: Any) -> Any:
        a, b = (e3nn.IrrepsArray(irreps, x) for irreps, x in zip((first, second), batch, strict=True))
        return square(jax.vmap(lambda x, y: product.left_right(params, x, y))(a, b).array, batch[0])

    return params, (normal(64, first.dim), normal(64, second.dim)), loss


def jax_attention() -> Any:
    params = {name: normal(*shape) / 12 for name, shape in (("qkv", (3, 128, 8, 16)), ("out", (8, 16, 128)))}

    def loss(params: Any, x: Any) -> Any:
        q, k, v = jnp.einsum("btd,sdhc->sbthc", x, params["qkv"])
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return square(jnp.einsum("bthc,hcd->btd", y, params["out"]), x)

    return params, normal(16, 64, 128), loss


# -- written in the manner of public code ------------------------------------------------------------------------------


def experts() -> Any:
    """A top-2 mixture of experts, with one-hot dispatch and combine tensors as in GShard and flax's examples."""
    groups, tokens, width, hidden, count, capacity = 16, 64, 64, 128, 8, 24
    params = {
        "gate": normal(width, count) / 8,
        "in": normal(count, width, hidden) / 8,
        "out": normal(count, hidden, width) / 11,
    }

    def route(logits: Any) -> tuple[Any, Any]:
        """Return weights and places, (G, S, E, C): at most C tokens of a group go to an expert."""
        gates = jax.nn.softmax(logits)
        combine, taken = jnp.zeros((*gates.shape, capacity)), jnp.zeros((gates.shape[0], 1, count))
        left = gates
        for _ in range(2):
            chosen = jax.nn.one_hot(jnp.argmax(left, -1), count)
            place = (jnp.cumsum(chosen, 1) - 1 + taken) * chosen
            fits = chosen * (place < capacity)
            places = jax.nn.one_hot(jnp.einsum("gse->gs", place * fits), capacity)
            combine += jnp.einsum("gse,gse,gsc->gsec", gates, fits, places)
            taken += jnp.einsum("gse->ge", fits)[:, None]
            left = left * (1 - chosen)
        return combine / (jnp.einsum("gsec->gs", combine)[..., None, None] + 1e-6), combine > 0

    def loss(params: Any, x: Any) -> Any:
        combine, dispatch = route(jnp.einsum("gsm,me->gse", x, params["gate"]))
        inside = jnp.einsum("gsec,gsm->egcm", dispatch.astype(x.dtype), x)
        between = jax.nn.gelu(jnp.einsum("egcm,emh->egch", inside, params["in"]))
        outside = jnp.einsum("egch,ehm->egcm", between, params["out"])
        return square(jnp.einsum("gsec,egcm->gsm", combine, outside), x)

    return params, normal(groups, tokens, width), loss


def graph() -> Any:
    """A graph attention network on a batch of graphs with dense adjacency, then one on edges with segment sums."""
    heads, width = 4, 32
    params = {
        "in": normal(16, heads, width) / 4,
        "left": normal(heads, width) / 6,
        "right": normal(heads, width) / 6,
        "edges": normal(heads, width, 64) / 11,
        "out": normal(64, 16) / 8,
    }

    def loss(params: Any, batch: Any) -> Any:
        x, adjacency, senders, receivers = batch
        h = jnp.einsum("bni,ihd->bnhd", x, params["in"])
        scores = jnp.einsum("bnhd,hd->bnh", h, params["left"])[:, :, None]
        scores += jnp.einsum("bnhd,hd->bnh", h, params["right"])[:, None]
        scores = jnp.where(adjacency[..., None], jax.nn.leaky_relu(scores), -1e9)
        h = jax.nn.elu(jnp.einsum("bnmh,bmhd->bnhd", jax.nn.softmax(scores, 2), h))
        messages = jnp.take_along_axis(h, senders[:, :, None, None], 1)
        messages = jax.nn.relu(jnp.einsum("behd,hdk->bek", messages, params["edges"]))
        added = jax.vmap(lambda m, r: jax.ops.segment_sum(m, r, x.shape[1]))(messages, receivers)
        return square(jnp.einsum("bnk,ki->bni", added, params["out"]), x)

    batch = (normal(16, 24, 16), normal(16, 24, 24) > 0, whole(24, 16, 96), whole(24, 16, 1, 96)[:, 0])
    return params, batch, loss


def tensor_network() -> Any:
    """Contractions of three and four operands: a low-rank bilinear layer, and a chain of factors (tensor train)."""
    params = {
        "a": normal(64, 12) / 8,
        "b": normal(64, 12) / 8,
        "c": normal(12, 64) / 4,
        "train": [normal(1, 8, 8, 6) / 3, normal(6, 8, 8, 1) / 6],
    }

    def loss(params: Any, x: Any) -> Any:
        y = jnp.einsum("bi,ir,bj,jr,rk->bk", x, params["a"], x, params["b"], params["c"])
        first, second = params["train"]
        z = jnp.einsum("bij,aikr,rjla->bkl", y.reshape(-1, 8, 8), first, second).reshape(x.shape)
        return square(z, x)

    return params, normal(128, 64), loss


ROWS = (
    Row("flax", "linen attention", linen_attention),
    Row("flax", "linen Einsum, DenseGeneral", linen_layers),
    Row("flax", "linen transformer, 2 layers", linen_transformer),
    Row("flax", "linen attention in bfloat16", linen_half),
    Row("flax", "nnx attention", nnx_attention),
    Row("flax", "nnx Einsum, LinearGeneral", nnx_layers),
    Row("equinox", "attention under vmap", equinox_attention),
    Row("dm-haiku", "attention", haiku_attention),
    Row("e3nn-jax", "message passing", e3nn_messages),
    Row("e3nn-jax", "tensor product", e3nn_product),
    Row("jax", "jax.nn attention", jax_attention),
    Row("jax", "top-2 mixture of experts", experts),
    Row("jax", "graph network", graph),
    Row("jax", "tensor networks", tensor_network),
)


# -- what is compared --------------------------------------------------------------------------------------------------


PLACES = ("one device", "batch on 8", "batch on 4, parameters on 2")


def placed(params: Any, batch: Any, place: str) -> tuple[Any, Any]:
    """Put parameters and a batch on their devices."""
    if place == PLACES[0]:
        return jax.device_put((params, batch), jax.devices()[0])
    shape = (8, 1) if place == PLACES[1] else (4, 2)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def put(x: Any, spec: PartitionSpec) -> Any:
        return jax.device_put(x, NamedSharding(mesh, spec))

    def put_parameter(x: Any) -> Any:
        x = jnp.asarray(x)
        dims = [d for d, n in enumerate(x.shape) if n % 8 == 0]
        return put(x, PartitionSpec(*("model" if d == dims[-1] else None for d in range(x.ndim)) if dims else ()))

    return jax.tree.map(put_parameter, params), jax.tree.map(lambda x: put(x, PartitionSpec("data")), batch)


def make_step(loss: Loss) -> tuple[Any, Any]:
    """Return what starts Adam, and a training step."""
    import optax

    optimizer = optax.adam(1e-3)

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    return optimizer.init, train_step


def _placed_as(x: Any, like: Any) -> Any:
    return jax.device_put(x, like.sharding) if isinstance(like.sharding, NamedSharding) else x


class Side:
    """A model on its devices, whose training step is compiled within a context, and run.

    Attributes:
        compiling: the seconds of the processor that tracing, planning and compiling took, each time.
    """

    def __init__(self, row: Row, place: str, context: Callable[[], Any]) -> None:
        params, batch, self.loss = row.make()
        self.params, self.batch = placed(params, batch, place)
        self.start, self.train_step = make_step(self.loss)
        self.state = jax.tree.map(jnp.asarray, self.start(self.params))
        self.context, self.compiling = context, list[float]()

    def compile(self) -> None:
        """Compile the step with empty caches."""
        jax.clear_caches()
        planner.caches().clear()
        before = time.process_time()
        with self.context():
            step = jax.jit(lambda *xs: self.train_step(*xs))
            self.compiled = step.lower(self.params, self.state, self.batch).compile()
        self.compiling.append(time.process_time() - before)

    def losses(self) -> list[float]:
        """Return the loss before each step."""
        at, losses = (self.params, self.state), []
        for _ in range(STEPS):
            at = jax.tree.map(_placed_as, tuple(at), (self.params, self.state))  # XLA places results as it likes
            *at, value = self.compiled(*at, self.batch)
            losses.append(float(value))
        return losses

    def step(self) -> None:
        """Run a compiled step."""
        jax.block_until_ready(self.compiled(self.params, self.state, self.batch))

    @property
    def temporary(self) -> int:
        """XLA's temporary memory, in bytes."""
        return int(self.compiled.memory_analysis().temp_size_in_bytes)

    def exchanged(self) -> dict[str, int]:
        """Return the bytes of the results of collectives in the compiled step, by kind."""
        found: collections.Counter[str] = collections.Counter()
        kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
        for result, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", self.compiled.as_text()):
            for dtype, shape in re.findall(r"\b([a-z]+\d+)\[([\d,]*)\]", result):
                bits = int(re.sub(r"\D", "", dtype))
                found[kind] += math.prod(map(int, filter(None, shape.split(",")))) * bits // 8
        return dict(found)


def kept(row: Row, context: Callable[[], Any]) -> int:
    """Return the bytes that a gradient outside of jit keeps, besides parameters and batch."""
    params, batch, loss = row.make()
    with context():
        _, pull = jax.vjp(loss, params, batch) if _is_real(batch) else jax.vjp(lambda p: loss(p, batch), params)
    given = {id(x) for x in jax.tree.leaves((params, batch))}
    return sum({id(x): x.nbytes for x in jax.tree.leaves(pull) if hasattr(x, "nbytes") and id(x) not in given}.values())


def _is_real(batch: Any) -> bool:
    return all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(batch))


def judge(row: Row, place: str, compilations: int, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Compare a model with itself within `planner.patch()`; return the figures and the faults."""
    reports = []

    @contextlib.contextmanager
    def patched() -> Any:
        with planner.patch("jax") as report:
            yield
        reports.append(report)

    sides = ours, theirs = Side(row, place, patched), Side(row, place, contextlib.nullcontext)
    for _ in range(compilations):  # in turn, so that both meet the same load of the machine
        for side in sides:
            side.compile()
    losses, expected = ours.losses(), theirs.losses()
    exchanged, allowed = ours.exchanged(), theirs.exchanged()
    faults = []
    error = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, expected, strict=True))
    # Half types round every value; Adam carries that on.
    close = 2e-2 if "bfloat16" in row.what else CLOSE
    if not error <= close:
        faults.append(f"losses differ by {error:.1e}")
    if not expected[-1] < expected[0]:
        faults.append("nothing is learned")
    if ours.temporary > theirs.temporary:
        faults.append(f"{ours.temporary} bytes of temporary memory for {theirs.temporary}")
    for kind, size in exchanged.items():
        if size > allowed.get(kind, 0):
            faults.append(f"{kind} of {size} bytes for {allowed.get(kind, 0)}")
    ratio = min(ours.compiling) / min(theirs.compiling)
    if compilations > 1 and ratio > SLOWEST_COMPILATION:
        faults.append(f"compiles in {ratio:.2f} of their time")
    if not reports[-1].routed:
        faults.append("no call of einsum was routed")
    figures = {
        "routed": reports[-1].routed, "passed_on": dict(reports[-1].passed_on), "error": error,
        "temporary": (ours.temporary, theirs.temporary), "exchanged": (exchanged, allowed),
        "compiling": (min(ours.compiling), min(theirs.compiling)),
    }  # fmt: skip
    if place == PLACES[0]:
        figures["kept"] = (kept(row, patched), kept(row, contextlib.nullcontext))
        if figures["kept"][0] > figures["kept"][1]:
            faults.append(f"keeps {figures['kept'][0]} bytes for {figures['kept'][1]}")
    if seconds:
        figures |= timed({"theirs": theirs.step, "ours": ours.step}, seconds)
    return figures, faults


HEAD = """`python tests/peers/jax_packages.py --compilations 2 --times 0.3 --write`, with the packages installed, trains each
model for {steps} steps of Adam, as it is and within `planner.patch()`, on one device and on eight simulated ones of a CPU.
Losses agree to {close:g} of themselves (in bfloat16 to 0.02). XLA's temporary memory and what a gradient outside of jit
keeps are at most the original's. Devices exchange the same kinds of collectives, of at most the same bytes. Compile times
are seconds of the processor for tracing, planning and compiling with empty caches, the least of {compilations}. Step
times are medians{beside}.

Measured {date} on {cores} cores, with {versions}.

| package | model | devices | calls routed | passed on | losses differ by | MB temporary, ours / theirs | kB exchanged | s to compile | ratio | ms a step | ratio |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""  # noqa: E501


def was_busy(loads: tuple[float, float, float]) -> bool:
    """Whether other jobs ran in the last 15 minutes: this one alone makes a load of about 1."""
    return loads[2] > 1.5


def write(lines: list[tuple[Row, str, str, dict[str, Any]]], compilations: int) -> None:
    """Write the table into its part of the page."""
    rows = []
    for row, version, place, f in lines:
        pairs = {name: f[name] for name in ("temporary", "compiling")}
        exchanged = [sum(side.values()) for side in f["exchanged"]]
        ms = (f["ours ms"], f["theirs ms"])
        rows.append(
            f"| {row.package} {version} | {row.what} | {place} | {f['routed']} | {sum(f['passed_on'].values())} "
            f"| {f['error']:.0e} | {pairs['temporary'][0] / 1e6:.3g} / {pairs['temporary'][1] / 1e6:.3g} "
            f"| {exchanged[0] / 1e3:.4g} / {exchanged[1] / 1e3:.4g} "
            f"| {pairs['compiling'][0]:.2f} / {pairs['compiling'][1]:.2f} "
            f"| {pairs['compiling'][0] / pairs['compiling'][1]:.2f} "
            f"| {ms[0]:.3g} / {ms[1]:.3g} | {ms[0] / ms[1]:.2f} |"
        )
    versions = f"jax {jax.__version__}, numpy {np.__version__}"
    head = HEAD.format(
        steps=STEPS, close=CLOSE, compilations=compilations, date=datetime.date.today().isoformat(), versions=versions,
        cores=os.cpu_count(), beside="; other jobs ran beside them" if was_busy(os.getloadavg()) else "",
    )  # fmt: skip
    put_section("JAX", head + "\n".join(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="packages, or words of what a model is; all by default")
    parser.add_argument("--times", type=float, default=0.0, metavar="SECONDS", help="time steps of each row so long")
    parser.add_argument("--compilations", type=int, default=3, help="how often each step is compiled")
    parser.add_argument("--places", nargs="*", default=PLACES, choices=PLACES)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    given = parser.parse_args()
    lines, failed = [], 0
    for row in ROWS:
        if given.rows and not any(word == row.package or word in row.what for word in given.rows):
            continue
        try:
            version = importlib.metadata.version(row.package)
        except importlib.metadata.PackageNotFoundError:
            print(f"SKIP  {row.package}: not installed; make packages installs it")
            continue
        for place in given.places:
            figures: dict[str, Any] = {}
            try:
                figures, faults = judge(row, place, given.compilations, given.times)
            except Exception as error:  # a model that does not run shows beside those that do
                traceback.print_exc()
                faults = [f"{type(error).__name__}: {error}"[:300]]
            failed += bool(faults)
            print(
                f"{'FAIL' if faults else 'ok  '}  {row.package} {version}, {row.what}, {place}: {figures}", flush=True
            )
            for fault in faults:
                print(f"      {fault}", flush=True)
            if figures:
                lines.append((row, version, place, figures))
    if given.write:
        write(lines, given.compilations)
    return failed


if __name__ == "__main__":
    sys.exit(main())
