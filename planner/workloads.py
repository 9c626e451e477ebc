"""The named workloads: contractions that slowed people down, in one table for tests, demo, benchmarks and docs.

Example:
    >>> from planner.workloads import WORKLOADS
    >>> seed = WORKLOADS["seed-gathered-matmul"]
    >>> print(seed.spec, seed.shapes)
    nij, q[n]jk -> nik ((131072, 1, 64), (2048, 64, 64))
    >>> tiny = seed.tiny()
    >>> a, c = tiny.operands("numpy", seed=0)
    >>> tiny.indices("numpy", seed=0)["q"].shape == a.shape[:1]
    True
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from planner.language.parse import parse
from planner.language.spec import Spec, Term, axis_of, replace_gathers, term_gathers

__all__ = ["WORKLOADS", "Framework", "Skew", "View", "Workload", "skewed_rows", "to_framework"]

Framework = Literal["numpy", "torch", "jax"]
Values = Literal["integers", "normal"]
Skew = Literal["uniform", "half", "zipf", "one"]
Shape = tuple[int, ...]

# Sizes differ, so that a mistaken axis shows. Axes beyond the table start over.
_TINY_SIZES = (3, 4, 2, 5, 6)
_TINY_POOL = 4


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """How an operand lies inside a larger array, the base. All tuples but `order` have an entry for each dimension.

    Attributes:
        times: the base's size, in multiples of the operand's size.
        start_halves: where the operand starts in the base, in halves of the operand's size.
        step: the distance in the base between the operand's neighbours.
        order: the dimensions in the order in which the base is stored, slowest first; empty for row-major.
    """

    times: tuple[int, ...]
    start_halves: tuple[int, ...]
    step: tuple[int, ...]
    order: tuple[int, ...] = ()

    def base_shape(self, shape: Shape) -> Shape:
        """Return the base's shape, with dimensions in the operand's order."""
        return tuple(n * times for n, times in zip(shape, self.times, strict=True))

    def slices(self, shape: Shape) -> tuple[slice, ...]:
        """Return the index that cuts the operand out of its base."""
        starts = (n * halves // 2 for n, halves in zip(shape, self.start_halves, strict=True))
        return tuple(
            slice(start, start + (n - 1) * step + 1 if n else start, step)
            for n, start, step in zip(shape, starts, self.step, strict=True)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A contraction with its sizes. Its methods make arrays for it.

    Attributes:
        name: the key in `WORKLOADS`. Names of variants have a slash, as in ``seed-gathered-keys/k10``.
        spec: the contraction as `planner.contract` takes it.
        sizes: pairs of axis and size.
        pools: pairs of index array and the size of the dimension that it reads or adds into.
        source: who met the contraction, and where.
        gradients: for each operand, whether it takes a gradient; empty if all do.
        views: for each operand, where it lies inside a larger array; empty if none does.
        same_as: for each operand, the number of the first operand with the same array; empty if all arrays differ.
        sorted_indices: the index arrays that are sorted.
        cpu_sizes: sizes to use instead on a CPU with 24 GB, if the full ones are too large for it.
    """

    name: str
    spec: str
    sizes: tuple[tuple[str, int], ...]
    source: str
    pools: tuple[tuple[str, int], ...] = ()
    gradients: tuple[bool, ...] = ()
    views: tuple[View | None, ...] = ()
    same_as: tuple[int, ...] = ()
    sorted_indices: tuple[str, ...] = ()
    cpu_sizes: tuple[tuple[str, int], ...] = ()

    @property
    def parsed(self) -> Spec:
        """The spec as an object."""
        return parse(self.spec)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shape of each operand."""
        return tuple(self._shape(term) for term in self.parsed.inputs)

    @property
    def output_shape(self) -> Shape:
        """Shape of the result."""
        return self._shape(self.parsed.output)

    @property
    def index_shapes(self) -> dict[str, Shape]:
        """Shape of each index array."""
        sizes = dict(self.sizes)
        return {g.array: tuple(sizes[axis] for axis in g.axes) for g in self.parsed.gathers}

    @property
    def takes_gradient(self) -> tuple[bool, ...]:
        """Whether each operand takes a gradient."""
        return self.gradients or (True,) * len(self.parsed.inputs)

    @property
    def options(self) -> dict[str, Any]:
        """The options that `contract` needs besides the arrays: the sizes of scattered dimensions."""
        pools = dict(self.pools)
        scattered = {gather.array: pools[gather.array] for gather in term_gathers(self.parsed.output)}
        return {"sizes": scattered} if scattered else {}

    def _shape(self, term: Term) -> Shape:
        pools = dict(self.pools)
        return Spec((), (), self.sizes).shape(
            replace_gathers(term, lambda gather: dataclasses.replace(gather, size=pools[gather.array]))
        )

    def resized(self, **sizes: int) -> Workload:
        """Return the workload with other sizes of axes, or of pools by the letter of their index array."""
        unknown = set(sizes) - {letter for letter, _ in self.sizes + self.pools}
        if unknown:
            raise ValueError(f"{self.name} has no axis and no index array {', '.join(sorted(unknown))}")
        return dataclasses.replace(
            self,
            sizes=tuple((letter, sizes.get(letter, size)) for letter, size in self.sizes),
            pools=tuple((letter, sizes.get(letter, size)) for letter, size in self.pools),
        )

    def cpu(self) -> Workload:
        """Return the workload in sizes that a CPU with 24 GB can hold, gradients included."""
        return self.resized(**dict(self.cpu_sizes))

    def tiny(self) -> Workload:
        """Return the workload in sizes for tests: a few elements along each axis, neighbouring axes unequal."""
        sizes = {
            axis: min(size, _TINY_SIZES[number % len(_TINY_SIZES)]) for number, (axis, size) in enumerate(self.sizes)
        }
        terms = self.parsed.inputs
        for number, original in enumerate(self.same_as):
            # An array that is passed twice has one shape, so both terms have the same sizes.
            for axis, other in zip(terms[number], terms[original], strict=True):
                if (a := axis_of(axis)) and (b := axis_of(other)):
                    sizes[a] = sizes[b]
        return self.resized(**sizes, **{array: min(size, _TINY_POOL) for array, size in self.pools})

    def operands(
        self,
        framework: Framework,
        seed: int = 0,
        *,
        values: Values = "integers",
        magnitude: int = 2,
        dtype: str = "float32",
        requires_grad: bool = False,
    ) -> tuple[Any, ...]:
        """Make the operands. An operand inside of a larger array is a view of it, if the framework has views.

        Args:
            framework: "numpy", "torch" or "jax".
            seed: seed of the random values. They are the same in every framework.
            values: "integers" from -magnitude to magnitude, whose sums are exact, or "normal".
            magnitude: the largest integer.
            dtype: dtype name.
            requires_grad: for torch, whether the operands that `takes_gradient` names, or their bases, require it.

        Returns:
            An array for each operand.
        """
        rng = np.random.default_rng(seed)
        arrays: list[Any] = []
        for number, shape in enumerate(self.shapes):
            if self.same_as and self.same_as[number] != number:
                arrays.append(arrays[self.same_as[number]])
                continue
            view = self.views[number] if self.views else None
            base_shape = view.base_shape(shape) if view else shape
            order = view.order if view and view.order else tuple(range(len(shape)))
            stored = _random(rng, tuple(base_shape[axis] for axis in order), values, magnitude)
            base = to_framework(framework, stored, dtype)
            if framework == "torch" and requires_grad and self.takes_gradient[number]:
                base.requires_grad_()
            back = tuple(order.index(axis) for axis in range(len(order)))
            if back != tuple(range(len(back))):
                base = base.permute(back) if framework == "torch" else base.transpose(back)
            arrays.append(base[view.slices(shape)] if view else base)
        return tuple(arrays)

    def cotangent(self, framework: Framework, seed: int = 0, *, magnitude: int = 2, dtype: str = "float32") -> Any:
        """Make a gradient of the output, of random integers."""
        rng = np.random.default_rng([seed, 1])
        return to_framework(framework, _random(rng, self.output_shape, "integers", magnitude), dtype)

    def indices(
        self, framework: Framework, seed: int = 0, *, skew: Skew = "uniform", dtype: str = "int64"
    ) -> dict[str, Any]:
        """Make the index arrays, by letter. All indices are in range.

        Args:
            framework: "numpy", "torch" or "jax". JAX narrows int64 unless 64-bit types are enabled.
            seed: seed of the random rows.
            skew: how often each row is named; see `skewed_rows`.
            dtype: an integer dtype name.

        Returns:
            An index array for each letter.
        """
        rng = np.random.default_rng([seed, 2])
        pools, arrays = dict(self.pools), {}
        for array, shape in self.index_shapes.items():
            rows = skewed_rows(rng, math.prod(shape), pools[array], skew)
            if array in self.sorted_indices:
                rows.sort()
            arrays[array] = to_framework(framework, rows.reshape(shape), dtype)
        return arrays


def skewed_rows(rng: np.random.Generator, count: int, pool: int, skew: Skew) -> np.ndarray[Any, Any]:
    """Draw rows of a pool: "uniform", "half" (one row half of the time), "zipf" (1 / rank) or "one" row only."""
    rows = rng.integers(0, pool, count)
    if skew == "half":
        rows[rng.permutation(count)[: count // 2]] = pool // 2
    elif skew == "zipf":
        weights = 1 / np.arange(1, pool + 1)
        rows = rng.permutation(pool)[rng.choice(pool, count, p=weights / weights.sum())]
    elif skew == "one":
        rows[:] = pool // 2
    return rows


def _random(rng: np.random.Generator, shape: Shape, values: Values, magnitude: int) -> np.ndarray[Any, Any]:
    if values == "normal":
        return rng.standard_normal(shape, np.float32)
    return rng.integers(-magnitude, magnitude, shape, np.int8, endpoint=True).astype(np.float32)


def to_framework(framework: Framework, array: np.ndarray[Any, Any], dtype: str) -> Any:
    """Return an array in a framework and dtype. JAX narrows 64-bit types unless they are enabled."""
    if framework == "numpy":
        return array.astype(dtype)
    if framework == "torch":
        import torch

        return torch.from_numpy(array).to(getattr(torch, dtype))
    if framework == "jax":
        import jax
        import jax.numpy as jnp

        wide = jax.dtypes.canonicalize_dtype(dtype)
        return jnp.asarray(array, dtype=wide)
    raise ValueError(f"no framework {framework!r}: 'numpy', 'torch' or 'jax'")


def _row(
    name: str,
    spec: str,
    source: str,
    sizes: Mapping[str, int],
    *,
    pools: Mapping[str, int] | None = None,
    cpu: Mapping[str, int] | None = None,
    views: tuple[View | None, ...] = (),
    same_as: tuple[int, ...] = (),
    sorted_indices: tuple[str, ...] = (),
) -> Workload:
    return Workload(
        name,
        spec,
        tuple(sizes.items()),
        source,
        pools=tuple((pools or {}).items()),
        views=views,
        same_as=same_as,
        sorted_indices=sorted_indices,
        cpu_sizes=tuple((cpu or {}).items()),
    )


# The seeds are four documents by people whom torch.einsum or torch.matmul surprised. `planner demo` answers them.
_GATHERED_MATMUL = "seed 000: many weird phenomena about torch.matmul()"
_SLICED_EINSUM = "seed 001: when you shouldn't trust einsum"
_OUTER_AND_MATMUL = "seed 002: finishing up matmul"
_ATTENTION_KEYS = "seed 003: speed difference in torch.einsum and torch.bmm when adding an axis"

_HEAD = View((2, 1, 1), (0, 0, 0), (1, 1, 1))
_MIDDLE = View((2, 1, 1), (1, 0, 0), (1, 1, 1))
_EVERY_SECOND_ROW = View((2, 2, 1), (0, 0, 0), (1, 2, 1))
_K_MAJOR = View((2, 1, 1), (0, 0, 0), (1, 1, 1), order=(0, 2, 1))

_SLICED = {"i": 8, "j": 16384, "k": 2048, "l": 1024}
_SLICED_CPU = {"i": 8, "j": 2048, "k": 1024, "l": 512}
_IMAGES = {"i": 5, "k": 784, "j": 10}
_GATHERED_KEYS = "bhqd, b h i[bhqk] d -> bhqk"
_KEYS = {"b": 8, "h": 1, "q": 1000, "k": 100, "d": 32}
_EXPERTS = {"t": 4096, "k": 2, "i": 512, "o": 1024}

_ROWS = (
    _row(
        "seed-gathered-matmul",
        "nij, q[n]jk -> nik",
        _GATHERED_MATMUL,
        {"n": 131072, "i": 1, "j": 64, "k": 64},
        pools={"q": 2048},
    ),
    _row("seed-sliced-einsum", "ijk, ikl -> jl", _SLICED_EINSUM, _SLICED, views=(_HEAD, None), cpu=_SLICED_CPU),
    _row(
        "seed-sliced-einsum/strided",
        "ijk, ikl -> jl",
        _SLICED_EINSUM,
        {**_SLICED, "j": 8192},
        views=(_EVERY_SECOND_ROW, None),
        cpu={**_SLICED_CPU, "j": 1024},
    ),
    _row(
        "seed-sliced-einsum/overlap",
        "ijk, ikl -> jl",
        _SLICED_EINSUM,
        _SLICED,
        views=(_MIDDLE, None),
        cpu=_SLICED_CPU,
    ),
    _row(
        "seed-sliced-einsum/k-major",
        "ijk, ikl -> jl",
        _SLICED_EINSUM,
        _SLICED,
        views=(_K_MAJOR, None),
        cpu=_SLICED_CPU,
    ),
    _row(
        "seed-two-by-matrices",
        "ijk, ikl -> jl",
        _SLICED_EINSUM,
        {"i": 2, "j": 128, "k": 1024, "l": 128},
        views=(_HEAD, None),
    ),
    _row(
        "seed-layout",
        "ijkl, mip -> jklmp",
        _SLICED_EINSUM,
        {"i": 64, "j": 16, "k": 32, "l": 64, "m": 8, "p": 64},
    ),
    _row("seed-outer-and-matmul", "ik,kj->ij", _OUTER_AND_MATMUL, _IMAGES),
    _row("seed-outer-and-matmul/outer", "ik,kj->ikj", _OUTER_AND_MATMUL, _IMAGES),
    _row("seed-outer-and-matmul/large", "ik,kj->ij", _OUTER_AND_MATMUL, {**_IMAGES, "i": 50000}),
    _row("seed-outer-and-matmul/outer-large", "ik,kj->ikj", _OUTER_AND_MATMUL, {**_IMAGES, "i": 50000}),
    _row("seed-separate-keys", "bhqd, bhqkd -> bhqk", _ATTENTION_KEYS, _KEYS),
    _row("seed-gathered-keys", _GATHERED_KEYS, _ATTENTION_KEYS, _KEYS, pools={"i": 1000}),
    _row("seed-gathered-keys/k10", _GATHERED_KEYS, _ATTENTION_KEYS, {**_KEYS, "k": 10}, pools={"i": 1000}),
    _row("seed-gathered-keys/k30", _GATHERED_KEYS, _ATTENTION_KEYS, {**_KEYS, "k": 30}, pools={"i": 1000}),
    _row("seed-gathered-keys/k1000", _GATHERED_KEYS, _ATTENTION_KEYS, {**_KEYS, "k": 1000}, pools={"i": 1000}),
    _row("seed-shared-keys", "bhqd, bhkd -> bhqk", _ATTENTION_KEYS, _KEYS),
    _row("seed-shared-keys/all", "bhqd, bhkd -> bhqk", _ATTENTION_KEYS, {**_KEYS, "k": 1000}),
    _row("three-way-batch", "bgk, bkd, bk -> bgd", "opt_einsum #254", {"b": 64, "g": 8, "k": 4096, "d": 128}),
    _row(
        "clique",
        "ij,ik,il,jk,jl,kl->ij",
        "jax #24915",
        dict.fromkeys("ijkl", 8192),
        cpu=dict.fromkeys("ijkl", 256),
    ),
    _row(
        "permuted-contraction",
        "jk,ijkl->il",
        "pytorch #57121",
        dict.fromkeys("ijkl", 128),
        cpu=dict.fromkeys("ijkl", 64),
    ),
    # One array in both places, as in the issue.
    _row(
        "repeated",
        "nlp,nlq->l",
        "opt_einsum #112",
        {"n": 64, "l": 1024, "p": 32, "q": 32},
        same_as=(0, 0),
    ),
    _row(
        "chain-ijkl",
        "ijkl,jmik,jmil->jm",
        "opt_einsum #234",
        {"i": 1166, "j": 8000, "k": 3, "l": 3, "m": 6},
        cpu={"j": 800},
    ),
    _row(
        "gathered-heads",
        "bh, c[b]hd -> bd",
        "tensorflow #55600",
        {"b": 16384, "h": 128, "d": 128},
        pools={"c": 64},
    ),
    _row(
        "sparse-convolution",
        "x[pi]c, w[p]cm -> o[pi]m",
        "pytorch #142315",
        {"p": 4529, "i": 128, "c": 64, "m": 64},
        pools={"x": 87680, "w": 27, "o": 87680},
        sorted_indices=("w",),
    ),
    _row("experts", "ti, e[tk]io, tk -> to", "mixture of experts", _EXPERTS, pools={"e": 64}),
    _row("experts/8", "ti, e[tk]io, tk -> to", "mixture of experts", _EXPERTS, pools={"e": 8}),
    _row(
        "lora",
        "ti, q[t]ir, q[t]ro -> to",
        "LoRA serving",
        {"t": 4096, "i": 1024, "r": 16, "o": 1024},
        pools={"q": 64},
    ),
    _row(
        "message-passing",
        "s[e]c, e -> d[e]c",
        "graph networks",
        {"e": 500000, "c": 64},
        pools={"s": 50000, "d": 50000},
    ),
    _row(
        "equivariant",
        "nci, ijkp, z[n]pc -> ncjk",
        "MACE-like networks",
        {"n": 1024, "c": 64, "i": 16, "j": 16, "k": 16, "p": 8},
        pools={"z": 10},
    ),
)

WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ROWS}
"""Every named workload, by name. A name with a slash is a variant of the workload before the slash."""
