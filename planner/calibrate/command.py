"""``python -m planner calibrate``: measure this machine's rates and store them, or check predictions."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from planner.calibrate.labs import Lab, make_labs
from planner.calibrate.measurements import PASSES, STAGES, measure
from planner.calibrate.predictions import check, check_text
from planner.cost import rates
from planner.cost.device import Device
from planner.cost.products import CLASSES, SIDES
from planner.language.errors import PlannerError
from planner.progress import Progress
from planner.workloads import WORKLOADS


def rates_text(device: Device, preset: Device) -> str:
    """Return a table with the measured rates beside those of the preset."""
    lines = [device.source, f"  {'':18} {'preset':>12} {'measured':>12}"]
    for name in rates.rate_fields():
        if name == "products":
            lines.append(
                f"  {name:18} {'below' if preset.products else 'none':>12} {'below' if device.products else 'none':>12}"
            )
            continue
        lines.append(f"  {name:18} {getattr(preset, name):12.4g} {getattr(device, name):12.4g}")
    if device.products:
        lines += ["  GFLOP/s of products, alone and in a batch, by rows, columns (from left to right) and terms:"]
        lines += _classes_text(device.products)
    return "\n".join(lines)


def _classes_text(products: Sequence[float]) -> list[str]:
    """Return a line for each number of rows and of terms, alone and in a batch."""
    rates_of = dict(zip(CLASSES, products, strict=True))
    return [
        f"  {rows:6} {terms:6}  {' '.join(f'{rates_of[False, rows, n, terms] / 1e9:7.2f}' for n in SIDES)}"
        f"   {' '.join(f'{rates_of[True, rows, n, terms] / 1e9:7.2f}' for n in SIDES)}"
        for rows in SIDES
        for terms in SIDES
    ]


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m planner calibrate", description="Measure this machine's rates and store them for plans to use."
    )
    parser.add_argument("--dry-run", action="store_true", help="measure and print, store nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--check",
        nargs="*",
        metavar="WORKLOAD",
        help="measure no rates: time the steps of the named workloads (all by default) against their predictions",
    )
    options = parser.parse_args(argv)
    try:
        return _check(options) if options.check is not None else _calibrate(options)
    except KeyboardInterrupt:
        print("interrupted: what was stored before is unchanged", file=sys.stderr)
        return 130
    except (PlannerError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _check(options: argparse.Namespace) -> int:
    with closing(Progress(3 * len(options.check or WORKLOADS))) as progress:
        times = check(options.check, progress)
    print(json.dumps([dataclasses.asdict(t) for t in times], indent=1) if options.json else check_text(times))
    return 0


def _report(progress: Progress, lab: Lab, what: str) -> None:
    progress(f"{lab.framework} {lab.key.kind} {what}")


def _calibrate(options: argparse.Namespace) -> int:
    labs = list(make_labs())
    with closing(Progress(PASSES * STAGES * len(labs))) as progress:
        for _ in range(PASSES):
            devices = [measure(lab, partial(_report, progress, lab)) for lab in labs]
    # Stored together at the end, so an interrupted run changes nothing.
    measured = [
        (lab, device, None if options.dry_run else rates.write(device, lab.key))
        for lab, device in zip(labs, devices, strict=True)
    ]
    if options.json:
        rows = [_as_json(lab, device, path) for lab, device, path in measured]
        print(json.dumps(rows, indent=1))
        return 0
    for lab, device, path in measured:
        print(rates_text(device, lab.preset))
        print(f"  stored in {path}\n" if path else "  not stored\n")
    return 0


def _as_json(lab: Lab, device: Device, path: Path | None) -> dict[str, Any]:
    return {
        "key": dataclasses.asdict(lab.key),
        "path": None if path is None else str(path),
        "preset": _finite(lab.preset),
        "measured": _finite(device),
    }


def _finite(device: Device) -> dict[str, Any]:
    """Return a device for JSON, which has no infinity: infinite rates are null."""
    return {name: None if value == math.inf else value for name, value in dataclasses.asdict(device).items()}
