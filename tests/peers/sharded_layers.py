"""How long layers take to compile on eight simulated devices: `python tests/peers/sharded_layers.py [layers]`.

For each kind of layer, forward and with gradients, it prints what planner takes for what jnp takes: trace, lowering and
compilation, in seconds of processor time and in seconds, the least of three. Both take turns.
"""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import planner

MESH = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
NODES = 4096


def put(x, *axes):
    return jax.device_put(x, NamedSharding(MESH, PartitionSpec(*axes)))


def ones(*shape):
    return np.ones(shape, "float32")


def integers(high, *shape):
    return np.random.default_rng(0).integers(0, high, shape).astype("int32")


# For each kind: the operand that all layers share, each layer's operand, the index arrays, and a layer by both.
KINDS = {
    "products": (
        lambda: (put(ones(NODES, 64), "x"), lambda: put(ones(64, 64)), []),
        lambda x, w: planner.contract("nj, jk -> nk", x, w),
        lambda x, w: jnp.einsum("nj, jk -> nk", x, w),
    ),
    "grouped products": (
        lambda: (put(ones(NODES, 16), "x"), lambda: put(ones(8, 16, 16)), [put(integers(8, NODES), "x")]),
        lambda x, w, q: planner.contract("nj, q[n]jk -> nk", x, w, q=q),
        lambda x, w, q: jnp.einsum("nj, njk -> nk", x, w[q]),
    ),
    "grouped products, matrices split": (
        lambda: (put(ones(NODES, 16), "x"), lambda: put(ones(8, 16, 16), "x"), [put(integers(8, NODES), "x")]),
        lambda x, w, q: planner.contract("nj, q[n]jk -> nk", x, w, q=q),
        lambda x, w, q: jnp.einsum("nj, njk -> nk", x, w[q]),
    ),
    "takes": (
        lambda: (put(ones(NODES, 16), "x"), lambda: put(ones(50, 16)), [put(integers(50, NODES), "x")]),
        lambda x, w, q: planner.contract("nj, q[n]j -> nj", x, w, q=q),
        lambda x, w, q: x * w[q],
    ),
    "message passing": (
        lambda: (
            put(ones(NODES, 16), "x"),
            lambda: put(ones(16, 16)),
            [put(integers(NODES, 4 * NODES), "x"), put(integers(NODES, 4 * NODES), "x")],
        ),
        lambda x, w, s, t: planner.contract("s[e]j, jk -> t[e]k", x, w, s=s, t=t, sizes=(NODES, 16)),
        lambda x, w, s, t: jnp.zeros((NODES, 16)).at[t].add(x[s] @ w),
    ),
}


def seconds(layer, gradients, x, weights, indices):
    """Of the processor, and of the clock."""

    def network(x, weights, *indices):
        for w in weights:
            x = jnp.tanh(layer(x, w, *indices))
        return x

    function = jax.grad(lambda *xs: network(*xs).sum(), (0, 1)) if gradients else network
    jax.clear_caches()
    busy, start = time.process_time(), time.perf_counter()
    jax.jit(function).lower(x, weights, *indices).compile()
    return time.process_time() - busy, time.perf_counter() - start


def main(layers: str = "32") -> None:
    for name, (arrays, ours, peer) in KINDS.items():
        x, weight, indices = arrays()
        given = x, [weight() for _ in range(int(layers))], indices
        for gradients in (False, True):
            turns = [[seconds(layer, gradients, *given) for layer in (ours, peer)] for _ in range(3)]
            least = [[min(turn[who][unit] for turn in turns) for who in (0, 1)] for unit in (0, 1)]
            told = ", ".join(f"{a:.2f} / {b:.2f} = {a / b:.2f}" for a, b in least)
            print(f"{name}{', gradients' * gradients}: {told}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
