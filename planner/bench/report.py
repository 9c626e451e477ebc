"""The results and the circumstances of a benchmark run, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from planner.bench.timing import Result, Settings
from planner.cost.rates import cpu_name


def _git(*arguments: str) -> str:
    root = pathlib.Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def circumstances(settings: Settings) -> dict[str, Any]:
    """Return what the figures depend on: date, commit, machine, versions and settings."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": (_git("rev-parse", "--short", "HEAD") or "unknown")
        + (" with changes" if _git("status", "--porcelain", "--untracked-files=no") else ""),
        "machine": "cpu",
        "processor": cpu_name(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "triton", "jax", "numpy", "opt_einsum")},
        "pause_seconds": dict(settings.pause_seconds),
        "rounds": settings.rounds,
        "runs": dict(settings.runs),
        "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "unset"),
    }
    if "torch" in sys.modules:
        import torch

        opt_einsum: Any = torch.backends.opt_einsum
        facts["torch_threads"] = torch.get_num_threads()
        facts["opt_einsum_in_torch_einsum"] = bool(opt_einsum.is_available() and opt_einsum.enabled)
    return facts


def _number(value: float, unit: str) -> str:
    return f"{value:.3g}{unit}" if unit == "x" else f"{value:.3g} {unit}"


def cells(result: Result) -> tuple[str, ...]:
    """Return a result as the cells of a table row."""
    bound = "<=" if result.at_most else ">="
    return (
        result.part,
        result.framework,
        result.what,
        f"{bound} {_number(result.target, result.unit)}",
        _number(result.measured, result.unit),
        "yes" if result.met else "NO",
        _absolute(result),
    )


def _absolute(result: Result) -> str:
    if result.unit != "x":
        return ""

    def milliseconds(seconds: float) -> str:
        return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"

    return ", ".join(f"{label} {milliseconds(seconds)}" for label, seconds in result.medians.items())


_HEADINGS = ("workload", "in", "what", "target", "measured", "met", "medians")


def markdown(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    """Return the results as a page in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    rule = ("---",) * len(_HEADINGS)
    rows = [_HEADINGS, rule, *(cells(result) for result in results)]
    pauses = ", ".join(f"{1e3 * s:.0f} ms ({name})" for name, s in about["pause_seconds"].items())
    active = "active" if about.get("opt_einsum_in_torch_einsum") else "not active"
    return "\n".join(
        [
            "# Benchmarks on a CPU",
            "",
            "Written by `make bench`; the figures behind it are in the JSON file beside this page.",
            "",
            f"- {about['date']}, commit {about['commit']}",
            f"- {about['processor']}; {about.get('torch_threads')} torch threads",
            f"- Python {about['python']}, {versions}",
            f"- medians of up to {about['rounds']} interleaved runs, a pause before each: {pauses}; "
            "if a program takes less than 20 ms, each program of its comparison is averaged over 20 ms of runs",
            "- {timed} runs, {repeated} of them repeated because another machine was given a core meanwhile; "
            "{disturbed} of these count although every repetition lost a core too".format_map(Counter(about["runs"])),
            f"- opt_einsum {active} in `torch.einsum`; THP_MEM_ALLOC_ENABLE {about['THP_MEM_ALLOC_ENABLE']}",
            "",
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
        ]
    )


def as_json(results: Sequence[Result], about: Mapping[str, Any]) -> str:
    """Return the results and their circumstances as JSON."""
    rows = [{**dataclasses.asdict(result), "met": result.met} for result in results]
    return json.dumps({"circumstances": about, "results": rows}, indent=2) + "\n"
