"""Products of groups in many tiles: which are compiled before a card is used, checked, and timed on it.

``python -m planner.bench.cards.sweep --arch 90 --share 0/14`` compiles one of 14 shares of them into Triton's cache,
with a stand-in for the card, and prints what the kernels need. ``--tiny`` runs small ones on the card, for
compute-sanitizer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from planner.backends.torch.executable import Executable
from planner.kernels.tiled_product.measured import forced
from planner.kernels.tiled_product.triton_tiles import float32_precision
from planner.language.derive import transpose
from planner.language.spec import term_gathers
from planner.program.calls import RangedIndices
from planner.program.frameworks import load_backend
from planner.program.ops import Einsum

_SPEC = "nij, q[n]jk -> nik"
_ROWS = {
    "forward": "grouped matmul, Triton",
    "outer": "grouped outer, Triton",
    "gradients": "both grouped gradients, Triton",
}
# By name: sizes of n, i, j, k, the number of groups, the dtype, and what is computed.
PROBLEMS: dict[str, tuple[int, int, int, int, int, str, str]] = {
    "seed float32": (131_072, 1, 64, 64, 2048, "float32", "forward"),
    "seed float32 outer": (131_072, 1, 64, 64, 2048, "float32", "outer"),
    "seed float32 gradients": (131_072, 1, 64, 64, 2048, "float32", "gradients"),
    "seed bfloat16": (131_072, 1, 64, 64, 2048, "bfloat16", "forward"),
    "seed bfloat16 gradients": (131_072, 1, 64, 64, 2048, "bfloat16", "gradients"),
    "8 experts float32": (8192, 1, 2048, 2048, 8, "float32", "forward"),
    "8 experts": (8192, 1, 2048, 4096, 8, "bfloat16", "forward"),
    "8 experts outer": (8192, 1, 2048, 4096, 8, "bfloat16", "outer"),
    "64 experts": (8192, 1, 512, 1024, 64, "bfloat16", "forward"),
    "64 experts float32": (8192, 1, 512, 1024, 64, "float32", "forward"),
    "heads": (16_384, 1, 128, 128, 64, "float32", "forward"),
    "lora": (4096, 1, 1024, 16, 64, "bfloat16", "forward"),
}
TINY: dict[str, tuple[int, int, int, int, int, str, str]] = {
    "tiny": (90, 2, 20, 24, 3, "float32", "forward"),
    "tiny float32 gradients": (90, 1, 20, 24, 3, "float32", "gradients"),
    "tiny gradients": (90, 1, 20, 24, 3, "float16", "gradients"),
}
# Changes of the tiles that were chosen. All products of the sweep take each of them, as far as it fits.
CHANGES: tuple[dict[str, int], ...] = (
    {}, {"m": 32}, {"m": 64}, {"m": 128}, {"k": 16}, {"k": 32}, {"k": 64}, {"warps": 4}, {"warps": 8}, {"stages": 1},
    {"stages": 3}, {"stages": 4}, {"m": 32, "k": 16, "warps": 4, "stages": 3},
    {"m": 128, "n": 128, "k": 64, "warps": 8, "stages": 3}, {"m": 256, "n": 128, "k": 64, "warps": 8, "stages": 3},
    {"m": 128, "n": 256, "k": 64, "warps": 8, "stages": 3}, {"m": 128, "n": 128, "k": 64, "warps": 4, "stages": 3},
    {"m": 32, "k": 32, "warps": 2, "stages": 1}, {"m": 64, "k": 64, "warps": 4, "stages": 1}, {"m": 16},
    {"m": 16, "warps": 2}, {"m": 64, "n": 128, "k": 32, "warps": 4, "stages": 3}, {"k": 16, "stages": 3},
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A product of groups with its arrays: `run` computes it by the kernel, `exact` in float64, group by group.

    `exact` returns for each result its numbers, and the same of absolute values, which errors are measured by.
    """

    run: Callable[[], Sequence[Any]]
    exact: Callable[[], list[tuple[Any, Any]]]


def product_of(name: str, place: str, drops: bool = False, blank: bool = False) -> Product:
    """Make the arrays of a product on a device.

    Args:
        name: of `PROBLEMS` or `TINY`.
        place: torch's device.
        drops: whether some rows belong to no group.
        blank: whether the arrays may hold anything.
    """
    n, i, j, k, groups, dtype, what = (PROBLEMS | TINY)[name]
    import planner

    generator = torch.Generator(place).manual_seed(0)
    shapes = ((n, i, j), (groups, j, k))
    operands = [planner.Operand(shape, dtype, requires_grad=True) for shape in shapes]
    mode = "drop" if drops else "raise"
    plan = planner.plan(_SPEC, *operands, q=(n,), backend="torch", device="h200", index_mode=mode)
    forward = Einsum(plan.resolved.spec, dtype)
    outer = Einsum(transpose(forward.spec, 1), dtype)
    op = {"forward": forward, "outer": outer, "gradients": forward.joint_gradient()}[what]
    q = torch.randint(0, groups + drops, (n,), generator=generator, device=place)
    table = load_backend("torch").table
    inputs = [torch.empty(shape, dtype=getattr(torch, dtype), device=place) for shape in op.input_shapes]
    for x in () if blank else inputs:
        x.normal_(generator=generator)
    index: RangedIndices = Executable(plan, table).prepare({"q": q})
    specs = [op.spec] if what != "gradients" else [transpose(forward.spec, 0), transpose(forward.spec, 1)]

    def exact() -> list[tuple[Any, Any]]:
        given = [inputs if what != "gradients" else _of_gradient(spec, inputs) for spec in specs]
        return [
            (_by_group(spec, xs, q, groups), _by_group(spec, [x.abs() for x in xs], q, groups))
            for spec, xs in zip(specs, given, strict=True)
        ]

    return Product(lambda: table.run(_ROWS[what], op, inputs, index), exact)


def _of_gradient(spec: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs of one gradient, of those of both: the output's gradient, the rows and the matrices."""
    gradient, rows, matrices = inputs
    by_term = {("n", "i", "k"): gradient, ("n", "i", "j"): rows}
    return [by_term.get(term, matrices) for term in spec.inputs]


def _by_group(spec: Any, inputs: Sequence[Any], q: Any, groups: int) -> Any:
    """Compute a product in float64, group by group."""
    sizes = [groups if term_gathers((e,)) else spec.size(e) for e in spec.output]
    out = torch.zeros(sizes, dtype=torch.float64, device=q.device)
    letters = ["".join(e if isinstance(e, str) else "" for e in term) for term in spec.terms]
    order = q.argsort(stable=True)
    ends = torch.searchsorted(q[order], torch.arange(groups + 1, device=q.device)).tolist()
    for group in range(groups):
        rows = order[ends[group] : ends[group + 1]]
        parts = [
            (x[group] if term_gathers(term) else x[rows]).double() for x, term in zip(inputs, spec.inputs, strict=True)
        ]
        product = torch.einsum(f"{','.join(letters[:-1])}->{letters[-1]}", *parts)
        out[group if term_gathers(spec.output) else rows] = product
    return out


def precisions(name: str, arch: str = "90") -> tuple[str, ...]:
    """Return the precisions that a product is timed in on a card of this compute capability, times ten."""
    n, _, j, _, groups, dtype, what = (PROBLEMS | TINY)[name]
    if dtype != "float32":
        return ("ieee",)
    by_parts = float32_precision(n // groups if what == "outer" else j, int(arch), "", True) == "bf16x6"
    return ("ieee", *("bf16x6",) * by_parts, *("float64",) * (arch == "90"), "tf32")


@contextlib.contextmanager
def with_tiles(change: Mapping[str, int], precision: str) -> Iterator[dict[str, Any]]:
    """Let grouped products take changed tiles, and multiply float32 as the precision says.

    Yields:
        A dictionary that gets the bucket of the largest product, and its tiles. It is empty if the change does not fit.
    """
    seen: dict[str, Any] = {}

    def force(bucket: str, tiles: Any) -> Any:
        names = {*tiles._fields}
        fields = {name: value for name, value in change.items() if name in names}
        if "mode=pair" in bucket:  # they cover the whole matrix
            fields = {name: value for name, value in fields.items() if name not in ("m", "n")}
        if "precision=bf16x6" in bucket:  # sums of more terms on tensor cores would be less accurate than float32's
            fields.pop("k", None)
        other = tiles._replace(**fields)
        walked = "m" if "mode=rows" in bucket else "k"
        rows = tiles.chunk * getattr(tiles, walked)  # those of a program stay as they are
        other = other._replace(chunk=max(1, rows // getattr(other, walked)))
        if "bucket" not in seen and (not change or other != tiles):
            seen.update(bucket=bucket, tiles=other._asdict())
        return other

    from planner.kernels.grouped_matmul import triton_grouped

    def precision_of(x: torch.Tensor, terms: int, grouped: bool = True) -> str:
        return precision if x.dtype == torch.float32 else "ieee"

    with forced(force), mock.patch.object(triton_grouped, "precision", precision_of):
        yield seen


def cases(
    names: Sequence[str], changes: Sequence[Mapping[str, int]] = CHANGES, arch: str = "90"
) -> Iterator[tuple[str, str, Any]]:
    """Yield products, precisions and changes of tiles for a card of this compute capability, times ten."""
    for name in names:
        for precision in precisions(name, arch):
            for change in changes:
                yield name, precision, change


def _compile(arch: str, share: int, shares: int, smoke: bool) -> None:
    from planner.bench.ahead_of_time import ARCHES, read_kernel
    from planner.bench.cards.stand_in import stand_in

    chosen = cases(list(TINY), CHANGES[:1]) if smoke else cases(list(PROBLEMS), arch=arch)
    with stand_in("cuda", int(arch), ARCHES[arch].most_shared, name=ARCHES[arch].device) as launches:
        for number, (name, precision, change) in enumerate(chosen):
            if number % shares != share:
                continue
            launches.clear()
            about: dict[str, Any] = {"product": name, "precision": precision, "change": change}
            try:
                with with_tiles(change, precision):
                    product_of(name, "cpu", blank=True).run()
            except Exception as error:  # it does not fit the card
                about["refused"] = f"{type(error).__name__}: {str(error)[-200:]}"
            about["kernels"] = [read_kernel(launch, arch, "") for launch in launches]
            print(json.dumps(about), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile a share of the products, or run tiny ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="90")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    if options.tiny:
        for name in TINY:
            for drops in (False, True):
                product_of(name, "cpu" if options.smoke else "cuda", drops).run()
        return 0
    share, shares = map(int, options.share.split("/"))
    os.environ["TRITON_INTERPRET"] = "0"
    _compile(options.arch, share, shares, options.smoke)
    return 0


if __name__ == "__main__":
    sys.exit(main())
