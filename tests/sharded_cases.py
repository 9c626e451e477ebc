"""What `test_sharding_jax.py` asks of eight simulated devices, which JAX must be told of before it starts.

Run as a script, it prints a report of each case as JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

Mesh = Mapping[str, tuple[str, ...]]
KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
BYTES = {"pred": 1, "f32": 4, "s32": 4, "bf16": 2}


@dataclasses.dataclass(frozen=True)
class Case:
    """One contraction, split.

    Attributes:
        spec, shapes, indices: the contraction; of each index array its shape and the size of what it indexes.
        split: letters and the axes of the mesh that they are split over; its axes are x of 2 and y of 4 or, if only x
            occurs, x of 8.
        mode: the index mode.
        bad: whether some indices are out of range.
        sizes: as of `planner.contract`.
        explicit: whether the axes of the mesh are in the types of arrays.
        nan: whether a row that no index names holds NaN.
        uneven: whether sizes are no multiples of the parts: then arrays are split inside of the program.
    """

    spec: str
    shapes: tuple[tuple[int, ...], ...]
    indices: Mapping[str, tuple[tuple[int, ...], int]]
    split: Mesh
    mode: str = "raise"
    bad: bool = False
    sizes: Mapping[str, int] | None = None
    explicit: bool = False
    nan: bool = False
    uneven: bool = False


ROWS = Case("nij, q[n]jk -> nik", ((64, 2, 8), (8, 8, 16)), {"q": ((64,), 8)}, {})
GROUPED = Case("nij, q[n]jk -> nik", ((512, 1, 64), (16, 64, 64)), {"q": ((512,), 16)}, {})
UNEVEN = Case("nij, q[n]jk -> nik", ((13, 2, 5), (7, 5, 9)), {"q": ((13,), 7)}, {}, uneven=True)
KEYS = Case("bqhd, bhi[bhqk]d -> bhqk", ((8, 16, 2, 32), (8, 2, 40, 32)), {"i": ((8, 2, 16, 12), 40)}, {})
CHAIN = Case("ij, jk, kl -> il", ((16, 24), (24, 32), (32, 8)), {}, {})
TAKEN_LAST = Case("q[n]j, jk -> nk", ((8, 40), (40, 40)), {"q": ((256,), 8)}, {})
SUMMED = Case("q[n]j -> j", ((7, 9),), {"q": ((13,), 7)}, {}, uneven=True)
BATCH = Case("bnij, bq[bn]jk -> bnik", ((8, 6, 2, 4), (8, 5, 4, 3)), {"q": ((8, 6), 5)}, {})
SCATTER = Case("nj, nk -> q[n]jk", ((32, 8), (32, 8)), {"q": ((32,), 16)}, {}, sizes={"q": 16})
X = ("x",)


def cases() -> dict[str, Case]:
    """All cases, by name."""
    found = {}

    def add(name: str, case: Case, *splits: str, **more: Any) -> None:
        """A case for each split: letters and the axes of the mesh that they are split over, x where none is told."""
        for split in splits:
            pairs = [part.split() for part in split.split(", ")]
            mesh = {letter: tuple(*axes) if axes else X for letter, *axes in pairs}
            found[f"{name} {split}"] = dataclasses.replace(case, split=mesh, **more)

    add("rows", ROWS, "n", "j", "k", "q", "n x, k y", "n x, q y", "q x, j y", "n xy")
    add("uneven", UNEVEN, "n", "j", "k", "q xy")
    add("uneven, summed", SUMMED, "n")
    add("grouped", GROUPED, "n", "q")
    add("batch", BATCH, "b")
    add("keys", KEYS, "b", "i")
    add("chain", CHAIN, "i", "j", "k")
    add("taken last", TAKEN_LAST, "n", "q", "j", nan=True)
    add("scatter", SCATTER, "n")
    for mode in ("raise", "drop", "clip"):
        add(mode, ROWS, "n", "q", mode=mode, bad=True)
    add("uneven raise", UNEVEN, "q x, n y", bad=True)
    add("explicit", ROWS, "q", "n x, k y", explicit=True)
    return found


def exchanged(text: str, numbers: bool = True) -> list[tuple[str, int]]:
    """The kind and the bytes of each result of the collectives in a compiled program; of single numbers if asked."""
    found = []
    for results, kind in re.findall(rf"= (.+?) ({KINDS})(?:-start)?\(", text):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", results):
            if dims or numbers:
                found.append((kind, BYTES[dtype] * math.prod(map(int, filter(None, dims.split(","))))))
    return sorted(found)


def report(case: Case) -> dict[str, Any]:
    """Run a case with all gradients, on eight devices and on one, and say what the programs hold."""
    import jax
    import jax.numpy as jnp
    import jax_fast
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import planner

    several = any("y" in names for names in case.split.values())
    shape, names = ((2, 4), ("x", "y")) if several else ((8,), ("x",))
    kind = AxisType.Explicit if case.explicit else AxisType.Auto
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))
    rng = np.random.default_rng(0)
    xs = [rng.integers(-2, 3, shape).astype("float32") for shape in case.shapes]
    qs = {name: rng.integers(0, size, shape).astype("int32") for name, (shape, size) in case.indices.items()}
    for name, (_, size) in case.indices.items() if case.bad or case.nan else ():
        if case.nan:
            qs[name][qs[name] == 5], xs[0][5] = 2, math.nan
        else:
            qs[name].flat[[3, 7, qs[name].size - 1]] = size + 2, -1, -3 * size
    stand_ins = [planner.Operand(x.shape, requires_grad=True) for x in xs]
    shapes = {name: q.shape for name, q in qs.items()}
    options: dict[str, Any] = {"sizes": case.sizes, "index_mode": case.mode}
    plan = planner.plan(case.spec, *stand_ins, backend="jax", **options, **shapes)
    spec = plan.resolved.spec
    gradient = rng.integers(-2, 3, spec.output_shape).astype("float32")

    def sharding(term: Any) -> Any:
        letters = (getattr(entry, "array", entry) for entry in term)
        return NamedSharding(mesh, PartitionSpec(*(case.split.get(letter) for letter in letters)))

    brackets = {gather.array: gather.axes for gather in spec.gathers}
    terms = [*spec.inputs, *(brackets[name] for name in qs), spec.output]
    arrays = [*xs, *qs.values(), gradient]

    def run(*arrays: Any) -> Any:
        operands, indices = arrays[: len(xs)], dict(zip(qs, arrays[len(xs) : -1], strict=True))
        result, back = jax.vjp(lambda *operands: plan(*operands, **indices), *operands)
        return result, back(arrays[-1])

    def placed(*arrays: Any) -> Any:
        if not case.uneven:
            return run(*arrays)
        return run(*(padded(x, sharding(term)) for x, term in zip(arrays, terms, strict=True)))

    def padded(x: Any, place: Any) -> Any:
        """An array of 50 more, split; what it is filled up with is NaN, or a bad index, not XLA's zero."""
        split = jax.lax.with_sharding_constraint(x, place)
        return split * (split / split) - 50 if x.dtype == jnp.float32 else split - 50

    def compiled(function: Any) -> Any:
        whole = NamedSharding(mesh, PartitionSpec())
        given = [(x + 50, whole) if case.uneven else (x, sharding(t)) for x, t in zip(arrays, terms, strict=True)]
        place = [jax.device_put(*one) for one in given]
        program = jax.jit(function).lower(*place).compile(jax_fast.FAST)
        return program(*place), program.as_text()

    wanted = jax.tree.leaves(jax_fast.jit(run)(*map(jnp.asarray, arrays)))
    found, text = compiled(placed)
    if case.uneven:  # a result of another size is gathered when it leaves the program
        _, text = compiled(lambda *arrays: [x.sum() for x in jax.tree.leaves(placed(*arrays))])
    parts = {letter: math.prod(mesh.shape[name] for name in names) for letter, names in case.split.items()}
    results = jax.tree.leaves(found)
    return {
        "equal": [bool(np.array_equal(x, y, equal_nan=True)) for x, y in zip(results, wanted, strict=True)],
        "marked": bool(jnp.isnan(wanted[0]).any()),
        "split": [not x.sharding.is_fully_replicated for x in results],
        "exchanged": exchanged(text, numbers=not case.uneven),  # the sums above are added up too
        "foretold": sorted((c.kind, c.bytes) for c in plan.collectives(parts)),
        "lowerings": [step.choice.lowering for step in plan.steps],
    }


def others() -> dict[str, Any]:
    """What is no case: transforms, loops, dtypes, and what types say and refuse."""
    import jax
    import jax.numpy as jnp
    import jax_fast
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import planner
    from planner.backends.jax import partition as jax_partition

    def limit() -> int:
        return int(jax.config.jax_traceback_in_locations_limit)

    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    explicit = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    rng = np.random.default_rng(0)

    def small(*shape: int, low: int = -2, dtype: str = "float32") -> Any:
        return jnp.asarray(rng.integers(low, low + 5, shape).astype(dtype))

    def put(x: Any, *names: str | None, on: Any = mesh) -> Any:
        return jax.device_put(x, NamedSharding(on, PartitionSpec(*names)))

    def rows(a: Any, c: Any, q: Any) -> Any:
        return planner.contract("nij, q[n]jk -> nik", a, c, q=q, index_mode="drop")

    def same(function: Any, whole: Any, *split: Any) -> list[Any]:
        """Whether it gives on split arrays what it gives on one device, and what is exchanged."""
        program = jax.jit(function).lower(*split).compile(jax_fast.FAST)
        pairs = zip(jax.tree.leaves(program(*split)), jax.tree.leaves(jax_fast.jit(function)(*whole)), strict=True)
        return [all(bool((x == y).all()) for x, y in pairs), exchanged(program.as_text())]

    def refused(function: Any, *arguments: Any) -> str:
        try:
            function(*arguments)
        except planner.PlannerError as error:
            return str(error)
        return ""

    a, c, q = small(16, 2, 8), small(8, 8, 4), small(16, low=0, dtype="int32")
    batch = small(8, 16, 2, 8), small(8, 8, 8, 4), small(8, 16, low=0, dtype="int32")
    found: dict[str, Any] = {"vmap": same(jax.vmap(rows), batch, *(put(x, "x") for x in batch))}

    def ahead(a: Any, c: Any, q: Any) -> Any:
        return jax.jvp(lambda a, c: rows(a, c, q), (a, c), (2 * a, 3 * c))

    found["jvp"] = same(ahead, (a, c, q), put(a, "x"), c, put(q, "x"))
    for dtype in ("bool", "int32"):
        arrays = (a.astype(dtype), c.astype(dtype), q)
        found[dtype] = same(rows, arrays, put(arrays[0], None, None, "x"), put(arrays[1], None, "x"), q)
    local = jax.shard_map(rows, mesh=mesh, in_specs=(PartitionSpec("x"), None, PartitionSpec("x")),
                          out_specs=PartitionSpec("x"))  # fmt: skip
    found["shard_map"] = [bool((jax.jit(local)(a, c, q) == rows(a, c, q)).all()), same(local, (a, c, q), a, c, q)[1]]
    found["gradients in shard_map"] = [mapped(rows, *kind) for kind in itertools.product((True, False), repeat=2)]
    found["kernels"] = kernels_on_tpus()
    x, many_q = small(5, 4), small(8, low=0, dtype="int32")

    def twice(x: Any, q: Any) -> Any:
        return planner.contract("q[n]j, q[m]j -> nm", x, x, q=q)

    found["two brackets"] = same(twice, (x, many_q), x, put(many_q, "x"))[0]
    long, matrix = small(64, 8), small(8, 4)

    def reshaped(x: Any, y: Any) -> Any:
        return planner.contract("nmj, jk -> nmk", x.reshape(4, 16, 8), y)

    found["reshaped"] = same(reshaped, (long, matrix), put(long, "x"), matrix)[0]
    limits: list[int] = []
    real, before = jax_partition._Part.zero_padding, limit()
    jax_partition._Part.zero_padding = lambda *given: limits.append(limit()) or real(*given)
    jax.jit(lambda x, y: planner.contract("nj, jk -> kn", x, y)).lower(put(long, "x"), matrix).compile()
    jax_partition._Part.zero_padding = real
    found["locations"] = [set(limits) == {0}, limit() == before > 0]
    plan = planner.plan("nj, jk -> nk", long, matrix)
    found["analyzed"] = refused(plan.analyze, put(long, "x"), matrix)
    with jax.default_matmul_precision("highest"):
        whole = jax.jit(rows).lower(put(a, "x"), c, put(q, "x")).compile().as_text()
    found["precision"] = "operand_precision={highest,highest}" in whole

    many = small(64, 8, 16), small(8, 16, 16), small(64, 16), small(64, low=0, dtype="int32")
    limited = planner.plan("nij, q[n]jk, nk -> ni", *(x.shape for x in many[:3]), q=(64,), backend="jax",
                           memory_limit=10_000)  # fmt: skip

    def make_loop(*arrays: Any) -> Any:
        return limited(*arrays[:3], q=arrays[3])

    found["loop"] = str(limited.loop)
    split = put(many[0], "x"), many[1], put(many[2], "x"), put(many[3], "x")
    found["loop, split"] = same(make_loop, many, *split)[0]
    found["loop foretold"] = refused(limited.collectives, {"n": 8})

    typed = put(a, "x", on=explicit), put(c, on=explicit), put(q, "x", on=explicit)
    found["type"] = str(jax.typeof(rows(*typed)))
    found["type under vmap"] = str(jax.typeof(jax.jit(jax.vmap(rows))(*(put(x, "x", on=explicit) for x in batch))))
    found["conflict"] = refused(rows, typed[0], put(c, None, "x", on=explicit), typed[2])
    found["repeated"] = refused(planner.contract, "ii ->", put(small(8, 8), "x", on=explicit))
    found["outside of jit"] = refused(jax.grad(lambda a: rows(a, *typed[1:]).sum()), typed[0])
    return found


def mapped(rows: Any, checked: bool, partial: bool) -> bool:
    """Whether gradients taken inside of `shard_map` are right, over all axes of a mesh or one of two."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, PartitionSpec

    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    a, c = (jnp.asarray(rng.integers(-2, 3, shape), "float32") for shape in ((16, 1, 8), (3, 8, 4)))
    q, split, whole = jnp.asarray(rng.integers(0, 3, 16)), PartitionSpec("x"), PartitionSpec()

    def gradients(a: Any, c: Any, q: Any) -> Any:
        return jax.grad(lambda a, c: (rows(a, c, q) ** 2).sum(), argnums=(0, 1))(a, c)

    def local(a: Any, c: Any, q: Any) -> Any:
        to_a, to_c = gradients(a, c, q)
        return to_a, to_c if checked else jax.lax.psum(to_c, "x")  # checked, JAX adds up what is not split

    axes = {"axis_names": {"x"}} if partial else {}
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(split, whole, split), out_specs=(split, whole), check_vma=checked, **axes
    )
    return all(bool((x == y).all()) for x, y in zip(jax.jit(run)(a, c, q), gradients(a, c, q), strict=True))


def kernels_on_tpus() -> dict[str, bool]:
    """Which programs for TPUs hold our kernels: those of one device, which XLA need not partition."""
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import planner

    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    split, whole = PartitionSpec("x"), PartitionSpec()
    shapes = ((65_536, 1, 64), "float32"), ((512, 64, 64), "float32"), ((65_536,), "int32")
    arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]

    def rows(a: Any, c: Any, q: Any) -> Any:
        return planner.contract("nij, q[n]jk -> nik", a, c, q=q)

    def held(function: Any, **options: Any) -> bool:
        module = jax.export.export(jax.jit(function, **options), platforms=["tpu"])(*arrays).mlir_module()
        return "planner_grouped_matmul" in module

    def local(**options: Any) -> bool:
        return held(jax.shard_map(rows, mesh=mesh, in_specs=(split, whole, split), out_specs=split, **options))

    places = tuple(NamedSharding(mesh, spec) for spec in (split, whole, split))
    return {
        "one device": held(rows),
        "exported for several": held(rows, in_shardings=places),
        "shard_map": local(),
        "shard_map, unchecked": local(check_vma=False),
        "shard_map over one axis of two": local(axis_names={"x"}),
    }


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    chosen = sys.argv[1:]
    for name, case in cases().items():
        if not chosen or name in chosen:
            print(json.dumps([name, report(case)]), flush=True)
    if not chosen or "others" in chosen:
        print(json.dumps(["others", others()]), flush=True)
