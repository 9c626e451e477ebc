"""What measures a framework's kernels on a card, and writes the figures down: `torch_card` and `jax_card` say what.

--smoke     tiny sizes on a CPU, the kernels interpreted: that the command works; nothing is written
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

__all__ = ["Card", "Program", "run"]

Program = Callable[[], Any]


class Card(Protocol):
    """A framework's view of a card.

    Attributes:
        device: the card's name; None where there is none.
    """

    device: str | None

    def correctness(self) -> Iterator[tuple[str, str]]:
        """Yield each kernel and dtype, and what is wrong with it, "" if nothing."""

    def repeated(self, times: int) -> str:
        """Whether equal calls give equal bits; "" if so."""

    def rates(self) -> dict[str, float]:
        """Bytes a second of a copy, as "copy, bytes/s", and FLOP/s of a large product in each dtype."""

    def comparisons(self) -> Iterator[tuple[str, Mapping[str, Program], float]]:
        """Yield what is compared: its name, programs, those of the library first, and the bytes that it must move."""

    def seconds(self, program: Program) -> float:
        """The median of many runs."""

    def extra_bytes(self, program: Program) -> int | None:
        """What a run allocates at most; None where nobody knows."""


def run(make: Callable[[bool], Card], framework: str, about: str | None) -> int:
    """Hold the kernels to what is right, time them, and write the figures; 1 if something differs.

    Args:
        make: the framework's card; whether sizes are tiny and it is a CPU.
        framework: its name.
        about: what the command says of itself.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/benchmarks"), metavar="FOLDER")
    options = parser.parse_args()
    from planner.bench.report import circumstances
    from planner.bench.timing import Settings

    card = make(options.smoke)
    if not options.smoke and card.device is None:
        parser.error(f"{framework} sees no card here; --smoke runs tiny sizes on the CPU")
    wrong = 0
    for what, difference in card.correctness():
        wrong += bool(difference)
        print(f"{what}: {difference or 'equal'}", flush=True)
    difference = card.repeated(3 if options.smoke else 100)
    wrong += bool(difference)
    print(f"repeated: {difference or 'equal bits'}", flush=True)
    rates, rows = card.rates(), []
    print(rates, flush=True)
    for name, ways, size in card.comparisons():
        row: dict[str, Any] = {
            "what": name,
            "seconds": {},
            "extra_bytes": {},
            "floor_seconds": size / rates["copy, bytes/s"],
        }
        for label, program in ways.items():
            try:
                row["seconds"][label] = card.seconds(program)
                row["extra_bytes"][label] = card.extra_bytes(program)
            except Exception as error:  # noqa: BLE001  # a way that fails is a figure too
                row["seconds"][label] = None
                row["extra_bytes"][label] = f"{type(error).__name__}: {str(error)[:200]}"
                wrong += label.startswith("planner")
        print(json.dumps(row), flush=True)
        rows.append(row)
    if card.device is not None and not options.smoke:
        name = card.device.lower().replace(" ", "-")
        told = {**circumstances(Settings()), "machine": name, "framework": framework, "wrong": wrong, "rates": rates}
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"{name}-{framework}.json"
        path.write_text(json.dumps({"circumstances": told, "results": rows}, indent=2) + "\n")
        path.with_suffix(".md").write_text(_markdown(told, rows))
    return int(wrong > 0)


def _markdown(about: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [f"# Benchmarks of {about['framework']} on {about['machine']}", "", "Written by `make gpu`.", ""]
    lines += [f"- {about['date']}, commit {about['commit']}, {about['versions']}, {about['wrong']} checks failed"]
    lines += [f"- {name} {rate:.3g}" for name, rate in about["rates"].items()]
    lines += ["", "| what | way | time | beside the least | extra memory |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        for label, seconds in row["seconds"].items():
            extra = row["extra_bytes"][label]
            floor = f"{seconds / row['floor_seconds']:.2f}x" if seconds and row["floor_seconds"] else ""
            told = f"{extra / 1e6:.1f} MB" if isinstance(extra, int) else str(extra)
            lines.append(
                f"| {row['what']} | {label} | {f'{1e6 * seconds:.1f} us' if seconds else 'failed'} | {floor} | {told} |"
            )
    return "\n".join(lines) + "\n"
