"""The named workloads: contractions that slowed people down, in one table for tests, demo, benchmarks and docs.

Example:
    >>> from planner.workloads import WORKLOADS
    >>> seed = WORKLOADS["seed-gathered-matmul"]
    >>> print(seed.spec, seed.shapes)
    nij, q[n]jk -> nik ((131072, 1, 64), (2048, 64, 64))
    >>> small = seed.resized(n=8, q=4)
    >>> a, c = small.operands("numpy", seed=0)
    >>> small.indices("numpy", seed=0)["q"].shape == a.shape[:1]
    True
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np

from planner.language.parse import parse
from planner.language.spec import Spec, Term, replace_gathers, term_gathers
from planner.program.frameworks import load_backend

Framework = Literal["numpy", "torch", "jax"]
Values = Literal["integers", "normal"]
Skew = Literal["uniform", "half", "zipf", "one"]
Shape = tuple[int, ...]


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
        source: who met the contraction, and where.
        sizes: the size of each axis.
        pools: for each index array, the size of the dimension that it reads or adds into.
        cpu_sizes: sizes to use instead on a CPU with 24 GB, if the full ones are too large for it.
        gradients: for each operand, whether it takes a gradient; empty if all do.
        views: for each operand, where it lies inside a larger array; empty if none does.
        same_as: for each operand, the number of the first operand with the same array; empty if all arrays differ.
        sorted_indices: the index arrays that are sorted.
    """

    name: str
    spec: str
    source: str
    sizes: Mapping[str, int] = dataclasses.field(hash=False)
    pools: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    cpu_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    gradients: tuple[bool, ...] = ()
    views: tuple[View | None, ...] = ()
    same_as: tuple[int, ...] = ()
    sorted_indices: tuple[str, ...] = ()

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
        return {g.array: tuple(self.sizes[axis] for axis in g.axes) for g in self.parsed.gathers}

    @property
    def takes_gradient(self) -> tuple[bool, ...]:
        """Whether each operand takes a gradient."""
        return self.gradients or (True,) * len(self.parsed.inputs)

    @property
    def options(self) -> dict[str, Any]:
        """The options that `contract` needs besides the arrays: the sizes of scattered dimensions."""
        scattered = {gather.array: self.pools[gather.array] for gather in term_gathers(self.parsed.output)}
        return {"sizes": scattered} if scattered else {}

    def _shape(self, term: Term) -> Shape:
        pools = self.pools
        return Spec((), (), tuple(self.sizes.items())).shape(
            replace_gathers(term, lambda gather: dataclasses.replace(gather, size=pools[gather.array]))
        )

    def resized(self, **sizes: int) -> Self:
        """Return the workload with other sizes of axes, or of pools by the letter of their index array."""
        if unknown := sizes.keys() - self.sizes.keys() - self.pools.keys():
            raise ValueError(f"{self.name} has no axis and no index array {', '.join(sorted(unknown))}")
        return dataclasses.replace(
            self,
            sizes={letter: sizes.get(letter, size) for letter, size in self.sizes.items()},
            pools={letter: sizes.get(letter, size) for letter, size in self.pools.items()},
        )

    def variant(self, name: str, **changes: Any) -> Workload:
        """Return a variant of the workload, in which some fields differ."""
        return dataclasses.replace(self, name=f"{self.name}/{name}", **changes)

    def cpu(self) -> Workload:
        """Return the workload in sizes that a CPU with 24 GB can hold, gradients included."""
        return self.resized(**self.cpu_sizes)

    def operands(
        self,
        framework: Framework,
        seed: int = 0,
        *,
        values: Values = "integers",
        requires_grad: bool = False,
    ) -> tuple[Any, ...]:
        """Make the operands. An operand inside of a larger array is a view of it, if the framework has views.

        Args:
            framework: "numpy", "torch" or "jax".
            seed: seed of the random values. They are the same in every framework.
            values: "integers" from -2 to 2, whose sums are exact, or "normal".
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
            stored = _random(rng, tuple(base_shape[axis] for axis in order), values)
            base = to_framework(framework, stored.transpose(np.argsort(order)), "float32")
            if framework == "torch" and requires_grad and self.takes_gradient[number]:
                base.requires_grad_()
            arrays.append(base[view.slices(shape)] if view else base)
        return tuple(arrays)

    def cotangent(self, framework: Framework, seed: int = 0) -> Any:
        """Make a gradient of the output, of random integers."""
        rng = np.random.default_rng([seed, 1])
        return to_framework(framework, _random(rng, self.output_shape, "integers"), "float32")

    def indices(self, framework: Framework, seed: int = 0, *, skew: Skew = "uniform") -> dict[str, Any]:
        """Make the index arrays, by letter. All indices are in range.

        Args:
            framework: "numpy", "torch" or "jax". JAX narrows int64 unless 64-bit types are enabled.
            seed: seed of the random rows.
            skew: how often each row is named; see `skewed_rows`.

        Returns:
            An index array for each letter.
        """
        rng = np.random.default_rng([seed, 2])
        arrays = {}
        for array, shape in self.index_shapes.items():
            rows = skewed_rows(rng, math.prod(shape), self.pools[array], skew)
            if array in self.sorted_indices:
                rows.sort()
            arrays[array] = to_framework(framework, rows.reshape(shape), "int64")
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


def _random(rng: np.random.Generator, shape: Shape, values: Values) -> np.ndarray[Any, Any]:
    if values == "normal":
        return rng.standard_normal(shape, np.float32)
    return rng.integers(-2, 2, shape, np.int8, endpoint=True).astype(np.float32)


def to_framework(framework: Framework, array: np.ndarray[Any, Any], dtype: str) -> Any:
    """Return an array in a framework and dtype. JAX narrows 64-bit types unless they are enabled."""
    if framework == "numpy":
        return load_backend("numpy").from_numpy(array, dtype, "")
    if framework == "torch":
        import torch

        return torch.from_numpy(array).to(getattr(torch, dtype))
    if framework == "jax":
        import jax
        import jax.numpy as jnp

        wide = jax.dtypes.canonicalize_dtype(dtype)
        return jnp.asarray(array, dtype=wide)
    raise ValueError(f"no framework {framework!r}: 'numpy', 'torch' or 'jax'")


# The seeds are four documents by people whom torch.einsum or torch.matmul surprised. `planner demo` answers them.
_GATHERED_MATMUL = "seed 000: many weird phenomena about torch.matmul()"
_SLICED_EINSUM = "seed 001: when you shouldn't trust einsum"
_OUTER_AND_MATMUL = "seed 002: finishing up matmul"
_ATTENTION_KEYS = "seed 003: speed difference in torch.einsum and torch.bmm when adding an axis"

_HEAD = View((2, 1, 1), (0, 0, 0), (1, 1, 1))
_MIDDLE = View((2, 1, 1), (1, 0, 0), (1, 1, 1))
_EVERY_SECOND_ROW = View((2, 2, 1), (0, 0, 0), (1, 2, 1))
_K_MAJOR = View((2, 1, 1), (0, 0, 0), (1, 1, 1), order=(0, 2, 1))

_SLICED = Workload(
    "seed-sliced-einsum",
    "ijk, ikl -> jl",
    _SLICED_EINSUM,
    {"i": 8, "j": 16384, "k": 2048, "l": 1024},
    cpu_sizes={"i": 8, "j": 2048, "k": 1024, "l": 512},
    views=(_HEAD, None),
)
_IMAGES = Workload("seed-outer-and-matmul", "ik,kj->ij", _OUTER_AND_MATMUL, {"i": 5, "k": 784, "j": 10})
_KEYS = {"b": 8, "h": 1, "q": 1000, "k": 100, "d": 32}
_GATHERED = Workload("seed-gathered-keys", "bhqd, b h i[bhqk] d -> bhqk", _ATTENTION_KEYS, _KEYS, pools={"i": 1000})
_SHARED = Workload("seed-shared-keys", "bhqd, bhkd -> bhqk", _ATTENTION_KEYS, _KEYS)
_EXPERTS = Workload(
    "experts",
    "ti, e[tk]io, tk -> to",
    "mixture of experts",
    {"t": 4096, "k": 2, "i": 512, "o": 1024},
    pools={"e": 64},
)

_ROWS = (
    Workload(
        "seed-gathered-matmul",
        "nij, q[n]jk -> nik",
        _GATHERED_MATMUL,
        {"n": 131072, "i": 1, "j": 64, "k": 64},
        pools={"q": 2048},
    ),
    _SLICED,
    _SLICED.resized(j=8192).variant(
        "strided", views=(_EVERY_SECOND_ROW, None), cpu_sizes={**_SLICED.cpu_sizes, "j": 1024}
    ),
    _SLICED.variant("overlap", views=(_MIDDLE, None)),
    _SLICED.variant("k-major", views=(_K_MAJOR, None)),
    Workload(
        "seed-two-by-matrices",
        "ijk, ikl -> jl",
        _SLICED_EINSUM,
        {"i": 2, "j": 128, "k": 1024, "l": 128},
        views=(_HEAD, None),
    ),
    Workload(
        "seed-layout",
        "ijkl, mip -> jklmp",
        _SLICED_EINSUM,
        {"i": 64, "j": 16, "k": 32, "l": 64, "m": 8, "p": 64},
    ),
    _IMAGES,
    _IMAGES.variant("outer", spec="ik,kj->ikj"),
    _IMAGES.resized(i=50000).variant("large"),
    _IMAGES.resized(i=50000).variant("outer-large", spec="ik,kj->ikj"),
    Workload("seed-separate-keys", "bhqd, bhqkd -> bhqk", _ATTENTION_KEYS, _KEYS),
    _GATHERED,
    *(_GATHERED.resized(k=k).variant(f"k{k}") for k in (10, 30, 1000)),
    _SHARED,
    _SHARED.resized(k=1000).variant("all"),
    Workload("three-way-batch", "bgk, bkd, bk -> bgd", "opt_einsum #254", {"b": 64, "g": 8, "k": 4096, "d": 128}),
    Workload(
        "clique",
        "ij,ik,il,jk,jl,kl->ij",
        "jax #24915",
        dict.fromkeys("ijkl", 8192),
        cpu_sizes=dict.fromkeys("ijkl", 256),
    ),
    Workload(
        "permuted-contraction",
        "jk,ijkl->il",
        "pytorch #57121",
        dict.fromkeys("ijkl", 128),
        cpu_sizes=dict.fromkeys("ijkl", 64),
    ),
    # One array in both places, as in the issue.
    Workload(
        "repeated",
        "nlp,nlq->l",
        "opt_einsum #112",
        {"n": 64, "l": 1024, "p": 32, "q": 32},
        same_as=(0, 0),
    ),
    Workload(
        "chain-ijkl",
        "ijkl,jmik,jmil->jm",
        "opt_einsum #234",
        {"i": 1166, "j": 8000, "k": 3, "l": 3, "m": 6},
        cpu_sizes={"j": 800},
    ),
    Workload(
        "gathered-heads",
        "bh, c[b]hd -> bd",
        "tensorflow #55600",
        {"b": 16384, "h": 128, "d": 128},
        pools={"c": 64},
    ),
    Workload(
        "sparse-convolution",
        "x[pi]c, w[p]cm -> o[pi]m",
        "pytorch #142315",
        {"p": 4529, "i": 128, "c": 64, "m": 64},
        pools={"x": 87680, "w": 27, "o": 87680},
        sorted_indices=("w",),
    ),
    _EXPERTS,
    _EXPERTS.resized(e=8).variant("8"),
    Workload(
        "lora",
        "ti, q[t]ir, q[t]ro -> to",
        "LoRA serving",
        {"t": 4096, "i": 1024, "r": 16, "o": 1024},
        pools={"q": 64},
    ),
    Workload(
        "message-passing",
        "s[e]c, e -> d[e]c",
        "graph networks",
        {"e": 500000, "c": 64},
        pools={"s": 50000, "d": 50000},
    ),
    Workload(
        "equivariant",
        "nci, ijkp, z[n]pc -> ncjk",
        "MACE-like networks",
        {"n": 1024, "c": 64, "i": 16, "j": 16, "k": 16, "p": 8},
        pools={"z": 10},
    ),
)

WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ROWS}
"""Every named workload, by name. A name with a slash is a variant of the workload before the slash."""
