"""The command `python -m planner.bench`: its parts and options."""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from planner.bench.choices import compare_lowerings, corpus_choices, predicted_steps
from planner.bench.corpus import compare_corpus, compare_workloads, corpus_bytes
from planner.bench.dense import clique, sliced_einsum, three_way_batch, warm_call
from planner.bench.families import families
from planner.bench.gathers import gathered_keys_part, gathered_matmul, limited_matmul
from planner.bench.large import large_networks
from planner.bench.report import as_json, cells, circumstances, markdown
from planner.bench.timing import SCALES, Result, Settings
from planner.demo.ways import Framework

PARTS: dict[str, Callable[[Framework, Settings], Iterator[Result]]] = {
    "seed-gathered-matmul": gathered_matmul,
    "seed-gathered-keys": gathered_keys_part,
    "seed-gathered-matmul-limited": limited_matmul,
    "seed-sliced-einsum": sliced_einsum,
    "three-way-batch": three_way_batch,
    "clique": clique,
    "warm-call": warm_call,
    "families": families,
    "lowerings": compare_lowerings,
    "predictions": predicted_steps,
    "corpus-choices": corpus_choices,
    "large-networks": large_networks,
    "corpus": compare_corpus,
    "workloads": compare_workloads,
    "corpus-bytes": corpus_bytes,
}
_ABOUT = """\
Every comparison runs its programs in one process, interleaved, with a pause before each run, and takes medians. First,
all programs of a comparison must return equal values and gradients. A complete run writes its table and figures to a
folder (docs/benchmarks by default); `--only` prints them and writes nothing.
"""


def _refusal(frameworks: Sequence[Framework]) -> str:
    """Return a reason not to measure: a setting that would distort the figures; "" if there is none."""
    if os.environ.get("THP_MEM_ALLOC_ENABLE"):
        return "THP_MEM_ALLOC_ENABLE is set: it makes allocation cheaper for some programs only; unset it"
    if "torch" in frameworks:
        import torch

        opt_einsum: Any = torch.backends.opt_einsum
        if not (opt_einsum.is_available() and opt_einsum.enabled):
            return "torch.einsum does not use opt_einsum here, so it is not the peer that users have"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table, and write it after a complete run; return 1 if `--strict` and a target is missed."""
    parser = argparse.ArgumentParser("python -m planner.bench", description=_ABOUT)
    parser.add_argument("--only", choices=PARTS, help="one part; nothing is written")
    parser.add_argument("--framework", choices=("torch", "jax"), help="one framework; nothing is written")
    parser.add_argument("--rounds", type=int, default=Settings().rounds, help="runs of each program, at most")
    parser.add_argument("--scale", choices=SCALES, help="one scale of the corpus; all if left out")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="N", help="about N rows of the corpus; all if left out"
    )
    parser.add_argument(
        "--strings", type=int, metavar="SEED", help="random strings in place of the corpus; --sample says how many"
    )
    parser.add_argument(
        "--passes", type=int, default=Settings().passes, help="runs through the corpus or the workloads"
    )
    parser.add_argument("--compile", action="store_true", help="the corpus: torch.compile and products by hand, too")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/benchmarks"), metavar="FOLDER")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    options = parser.parse_args(argv)
    if options.rounds < 3:
        parser.error(f"--rounds {options.rounds}: a median needs 3 at least")
    if options.passes < 1:
        parser.error(f"--passes {options.passes}: give 1 or more")
    if options.sample < 0:
        parser.error(f"--sample {options.sample}: give a number of rows, or 0 for all")
    asked: tuple[Framework, ...] = (options.framework,) if options.framework else ("torch", "jax")
    frameworks = [framework for framework in asked if importlib.util.find_spec(framework)]
    for missing in set(asked) - set(frameworks):
        print(f"{missing} is not installed: its targets are left out", file=sys.stderr)
    # The targets are for a CPU. If there is a GPU, JAX would use it, but torch would not.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    refusal = _refusal(frameworks)
    if refusal:
        print(refusal, file=sys.stderr)
        return 2
    scales = (options.scale,) if options.scale else SCALES
    settings = Settings(
        rounds=options.rounds,
        scales=scales,
        sample=options.sample,
        strings=options.strings,
        compiled=options.compile,
        passes=options.passes,
    )
    results: list[Result] = []
    for name, part in PARTS.items():
        if options.only not in (None, name):
            continue
        for framework in frameworks:
            for result in part(framework, settings):
                results.append(result)
                print("  ".join(cells(result)), flush=True)
    missed = sum(not result.met for result in results)
    print(
        f"{len(results) - missed} of {len(results)} targets met;",
        "{timed} runs, {repeated} repeated, {disturbed} disturbed".format_map(settings.runs),
    )
    if not options.only and len(frameworks) == 2:
        about = circumstances(settings)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{about['machine']}.json").write_text(as_json(results, about))
        (options.out / f"{about['machine']}.md").write_text(markdown(results, about))
    return 1 if options.strict and missed else 0
