"""What sizes that were not met before cost in JAX: `python tests/peers/new_sizes.py time|memory ours|jnp [grad] [jit]`.

For each contraction it prints the median of the processor time of a first call in milliseconds, or by how many
megabytes the process grows over 300 sizes. Measure memory in one process for each contraction: name its number last.
"""

import gc
import random
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import planner

# The spec, the shapes and index arrays' sizes for n rows, `sizes=`, and the same in jnp.
CASES = [
    ("nj, q[n]jk -> nk", lambda n: [(n, 16), (40, 16, 16)], {"q": 40}, None,
     lambda x, w, q: jnp.einsum("nj, njk -> nk", x, w[q])),
    ("s[n]j, nj, jk -> t[n]k", lambda n: [(50, 16), (n, 16), (16, 16)], {"s": 50, "t": 50}, (50, 16),
     lambda x, e, w, s, t: jnp.zeros((50, 16)).at[t].add(jnp.einsum("nj, nj, jk -> nk", x[s], e, w))),
    ("ab, bc, cd, de -> ae", lambda n: [(n, 16), (16, 16), (16, 16), (16, 16)], {}, None,
     lambda *x: jnp.einsum("ab, bc, cd, de -> ae", *x)),
    ("bnd, de -> bne", lambda n: [(4, n, 16), (16, 16)], {}, None,
     lambda *x: jnp.einsum("bnd, de -> bne", *x)),
]  # fmt: skip


def resident() -> int:
    """The bytes of the process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def main(what: str, who: str, *options: str) -> None:
    for number, (spec, shapes, indices, sizes, peer) in enumerate(CASES):
        if any(option.isdigit() for option in options) and str(number) not in options:
            continue
        count, random_numbers = len(shapes(1)), np.random.default_rng(0)

        def ours(*arrays, spec=spec, count=count, indices=indices, sizes=sizes):
            return planner.contract(
                spec, *arrays[:count], sizes=sizes, **dict(zip(indices, arrays[count:], strict=True))
            )

        function = ours if who == "ours" else peer
        if "grad" in options:
            function = jax.grad(lambda *arrays, f=function: f(*arrays).sum(), tuple(range(count)))
        if "jit" in options:
            function = jax.jit(function)

        def seconds(n, function=function, shapes=shapes, indices=indices, random_numbers=random_numbers):
            arrays = [jnp.ones(shape) for shape in shapes(n)]
            arrays += [jnp.asarray(random_numbers.integers(0, size, n), "int32") for size in indices.values()]
            jax.block_until_ready(arrays)
            start = time.process_time()
            jax.block_until_ready(function(*arrays))
            return time.process_time() - start

        met, *new = random.Random(0).sample(range(100, 700), 301)
        for n in (met, *new[:4]):
            seconds(n)
        if what == "time":
            print(f"{spec}: {sorted(map(seconds, new[4:19]))[7] * 1e3:.0f} ms")
        else:
            gc.collect()
            before = resident()
            for n in new:
                seconds(n)
            gc.collect()
            print(f"{spec}: {(resident() - before) / 1e6:.0f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
