"""What a run on a card found: the fastest tiles, the card's rates, checks and a table; and how they are adopted."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.kernels.tiled_product import measured

ROOT = pathlib.Path(__file__).parent.parent.parent.parent


# Rates that depend on the host's processor. `python -m planner calibrate` measures them where calls are made.
_OF_HOST = ("launch_seconds", "kernel_seconds", "group_seconds", "loop_seconds")


def is_wrong(line: Mapping[str, Any]) -> bool:
    """Whether a result is a fault of this library; a peer's program that fails is not."""
    ours = "way" not in line or line["way"].startswith("planner")
    return bool(line.get("difference")) or ("error" in line and ours)


def best_tiles(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by bucket the fastest tiles whose results are right, with their time and that of the default tiles."""
    best: dict[str, dict[str, Any]] = {}
    default: dict[str, float] = {}
    for line in results:
        if "bucket" not in line or line.get("difference") or "seconds" not in line:
            continue
        bucket, seconds = line["bucket"], line["seconds"]
        if not line["change"]:
            default[bucket] = seconds
        if bucket not in best or seconds < best[bucket]["seconds"]:
            best[bucket] = {"tiles": line["tiles"], "seconds": seconds, "product": line["product"]}
    for bucket, seconds in default.items():
        best[bucket]["default_seconds"] = seconds
    return best


def write_findings(results: Sequence[Mapping[str, Any]], folder: pathlib.Path) -> None:
    """Write the results of a part: checks, tiles and rates if it has some, one JSON file, and a table."""
    if not results or results[0]["what"] != "circumstances":
        return
    about = dict(results[0])
    with (folder / "checks.jsonl").open("a", encoding="utf-8") as checks:
        for line in results:
            if "difference" in line:
                checks.write(json.dumps({"framework": about["framework"], **line}) + "\n")
    common = {name: about.get(name) for name in ("machine", "capability", "date", "commit", "versions", "smoke")}
    if best := best_tiles(results):
        _write(folder / "tiles.json", {**common, "buckets": best})
    for line in results:
        if "device" in line:
            _write(folder / "device.json", {**common, "device": line["device"]})
    rates = {line["what"]: line["rate"] for line in results if "rate" in line}
    about |= {"wrong": sum(map(is_wrong, results)), "rates": rates}
    path = folder / f"{about['machine']}-{about['framework']}.json"
    _write(path, {"circumstances": about, "results": results[1:]})
    path.with_suffix(".md").write_text(_markdown(about, results))


def _write(path: pathlib.Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _markdown(about: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"# Benchmarks of {about['framework']} on {about['machine']}", "", "Written by `make gpu`.", ""]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines += [f"- {about['date']}, commit {about['commit']}, {versions}; {about['wrong']} checks failed"]
    lines += [f"- {name} {rate:.3g}" for name, rate in about["rates"].items()]
    lines += ["", "| what | way | time | on the card | beside the least | extra memory |", "| --- " * 6 + "|"]
    copy = about["rates"].get("copy, bytes/s")
    for line in results:
        if "comparison" not in line or "seconds" not in line:
            continue
        floor = line["least_bytes"] / copy if copy else 0.0
        alone = line.get("device_seconds")
        beside = f"{(alone or line['seconds']) / floor:.2f}x" if floor else ""
        card = f"{1e6 * alone:.1f} us" if alone else ""
        extra = line["extra_bytes"]
        memory = "" if extra is None else f"{extra / 1e6:.1f} MB"
        # What flushing the cache takes was subtracted: nothing may be left.
        time = f"{1e6 * line['seconds']:.1f} us | {card} | {beside}" if line["seconds"] else "too short to measure | |"
        lines.append(f"| {line['comparison']} | {line['way']} | {time} | {memory} |")
    if best := best_tiles(results):
        lines += ["", "| product | bucket | fastest tiles | time | default tiles |", "| --- | --- | --- | --- | --- |"]
        for bucket, x in best.items():
            tiles = ", ".join(f"{name} {value}" for name, value in x["tiles"].items())
            default = f"{1e6 * x['default_seconds']:.1f} us" if "default_seconds" in x else ""
            lines.append(f"| {x['product']} | {bucket} | {tiles} | {1e6 * x['seconds']:.1f} us | {default} |")
    failed = [f"- {x['what']}: {x.get('error') or x['difference']}" for x in results if _failed(x)]
    return "\n".join([*lines, *(["", "What failed or differs:", ""] if failed else []), *failed]) + "\n"


def _failed(line: Mapping[str, Any]) -> bool:
    return "error" in line or bool(line.get("difference"))


def adopt(folder: pathlib.Path, root: pathlib.Path = ROOT) -> Iterator[str]:
    """Take over what a run found into a checkout: tiles, rates, and the tables of docs/benchmarks.

    Args:
        folder: what `--out` named.
        root: the checkout.

    Yields:
        What was done, a line each.

    Raises:
        SystemExit: the folder is that of no run on a card.
    """
    tables = [path for path in folder.glob("*-*.json") if path.with_suffix(".md").exists()]
    found = {path.name: json.loads(path.read_text()) for path in [*tables, *folder.glob("*.json")]}
    if not found or any(x.get("smoke", x.get("circumstances", {}).get("smoke")) for x in found.values()):
        raise SystemExit(f"{folder} holds no results of a card: run --out {folder} on a machine with one")
    if (tiles := found.get("tiles.json")) and tiles["capability"]:
        path = root / "kernels" / "tiled_product" / measured.FILE.name
        known = json.loads(path.read_text()) if path.exists() else {}
        mine = known.setdefault(str(tiles["capability"]), {})
        mine.update({bucket: x["tiles"] for bucket, x in tiles["buckets"].items()})
        _write(path, known)
        yield f"{len(tiles['buckets'])} buckets of sm_{tiles['capability']} in {path}"
    if device := found.get("device.json"):
        path = root / "planner" / "cost" / "cards.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        known[device["device"]["name"]] = {name: x for name, x in device["device"].items() if name not in _OF_HOST}
        _write(path, known)
        yield f"the rates of {device['device']['name']} in {path}"
    benchmarks = root / "docs" / "benchmarks"
    benchmarks.mkdir(parents=True, exist_ok=True)
    for path in tables:
        for file in (path, path.with_suffix(".md")):
            (benchmarks / file.name).write_text(file.read_text())
        yield f"the table {benchmarks / path.with_suffix('.md').name}"
