"""``make gpu``: check the kernels on a card, time them, and write each figure to a file at once.

Each framework (a *part*) runs in a process of its own, which passes on each result as soon as it has it. The command
appends the result to a file of JSON lines and flushes it, so an interrupted run leaves all results so far. If an item
fails, its error is written and the next item follows. If the old process can no longer use the card, for example after
an illegal access, a new process continues. At the end of a part the lines are also written as one JSON file and as a
table in Markdown.

    --out FOLDER   where the files go (docs/benchmarks); the lines go to <part>-<time>.jsonl
    --seconds N    stop after this many seconds; the item that runs then is written as unfinished
    --part NAME    torch or jax; all by default
    --smoke        tiny sizes on a CPU with interpreted kernels: tests that the command works
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TextIO

__all__ = ["Card", "CardComparison", "Item", "Program", "collect", "items_of", "main", "serve"]

Program = Callable[[], Any]
PARTS = ("torch", "jax")
# The name of errors that happen outside of any item.
PROCESS = "the process"


class Item(NamedTuple):
    """A check or a measurement.

    Attributes:
        about: its name as `what`; for a timing also the comparison, the way and the least bytes.
        run: returns its figures by name. A check returns the `difference` that it found, "" for none.
    """

    about: Mapping[str, Any]
    run: Callable[[], Mapping[str, Any]]


class CardComparison(NamedTuple):
    """Programs that compute the same; the library's come first.

    Attributes:
        what: the name of the comparison.
        ways: the programs by name.
        least_bytes: bytes that every program must move; 0 if the time is not bounded by bytes.
    """

    what: str
    ways: Mapping[str, Program]
    least_bytes: float


class Card(Protocol):
    """A card as a framework uses it.

    Attributes:
        device: the card's name; None if there is no card.
    """

    device: str | None

    def alive(self) -> bool:
        """Whether this process can still use the card; after an illegal access it cannot."""

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield the name of each check, and a function that returns what is wrong; "" if nothing is."""

    def rates(self) -> Iterator[tuple[str, Callable[[], float]]]:
        """Yield rates of the card: "copy, bytes/s", and the FLOP/s of a large product in each dtype."""

    def comparisons(self) -> Iterator[tuple[str, Callable[[], Iterator[CardComparison]]]]:
        """Yield families of comparisons that share arrays: a name, and a function that makes the comparisons."""

    def seconds(self, program: Program) -> float:
        """Return the median seconds of many runs."""

    def extra_bytes(self, program: Program) -> int | None:
        """Return the most bytes that a run allocates; None if this is not known."""


def items_of(card: Card) -> Iterator[Item]:
    """Yield all checks and measurements for a card, in the same order in every process."""
    for what, check in card.checks():
        yield Item({"what": what}, partial(_as, "difference", check))
    for what, rate in card.rates():
        yield Item({"what": what}, partial(_as, "rate", rate))
    for family, make in card.comparisons():
        try:
            for comparison in make():
                for way, program in comparison.ways.items():
                    about = {"comparison": comparison.what, "way": way, "least_bytes": comparison.least_bytes}
                    yield Item({"what": f"{comparison.what}: {way}", **about}, partial(_time, card, program))
        except Exception as error:  # the arrays could not be made; the next family has other arrays
            yield Item({"what": family}, partial(_raise, error))


def _as(name: str, run: Callable[[], Any]) -> Mapping[str, Any]:
    return {name: run()}


def _time(card: Card, program: Program) -> Mapping[str, Any]:
    return {"seconds": card.seconds(program), "extra_bytes": card.extra_bytes(program)}


def _raise(error: Exception) -> Mapping[str, Any]:
    raise error


# -- the process that uses the card ----------------------------------------------------------------------


def serve(make: Callable[[], Card], part: str, smoke: bool, done: int) -> None:
    """Run the items, and write each result to standard output as a line of JSON, after a line that announces it.

    Args:
        make: makes the card.
        part: the framework's name.
        smoke: whether to run tiny sizes on a CPU.
        done: number of results that earlier processes wrote.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Output that libraries print goes to standard error, so that it does not mix with the lines.
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=lines, flush=True)

    try:
        _serve(make(), part, smoke, done, say)
    except Exception as error:  # the parent process reports why this one stopped
        say({"what": PROCESS, "error": _said(error)})


def _serve(card: Card, part: str, smoke: bool, done: int, say: Callable[[Mapping[str, Any]], None]) -> None:
    if not smoke and card.device is None:
        say({"what": PROCESS, "error": f"{part} sees no card here; --smoke runs tiny sizes on the CPU"})
        return
    if not done:
        say({"what": "circumstances", **_circumstances(card, part, smoke)})
    for number, item in enumerate(items_of(card), 1):
        if number < done:
            continue
        say({"begun": dict(item.about)})
        begun = time.perf_counter()
        try:
            figures = dict(item.run())
        except Exception as error:  # an item that fails is a result too
            figures = {"error": _said(error)}
        say({**item.about, **figures, "took_seconds": round(time.perf_counter() - begun, 3)})
        if "error" in figures and not card.alive():
            sys.exit(3)
    say({"end": True})


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"


def _end_with_parent() -> None:
    """End this process when the command that started it has ended or was killed, to free the card."""
    os.read(0, 1)  # nothing is ever written to it: the read returns when the pipe is closed
    os._exit(1)


def _circumstances(card: Card, part: str, smoke: bool) -> dict[str, Any]:
    from planner.bench.report import circumstances
    from planner.bench.timing import Settings

    machine = "cpu" if smoke else str(card.device).lower().replace(" ", "-")
    return {**circumstances(Settings()), "machine": machine, "framework": part, "smoke": smoke}


# -- the process that writes the results down ------------------------------------------------------------


def collect(command: Sequence[str], lines: TextIO, ends: float = float("inf")) -> list[dict[str, Any]]:
    """Run a process that serves results, and start another one if it ends early; write each result at once.

    Args:
        command: starts the process; the number of results so far is appended to it.
        lines: the file that results are written to.
        ends: when to stop, by `time.monotonic`.

    Returns:
        The results.
    """
    results: list[dict[str, Any]] = []

    def write(line: dict[str, Any]) -> None:
        results.append(line)
        lines.write(json.dumps(line) + "\n")
        lines.flush()
        os.fsync(lines.fileno())
        print(json.dumps(line), flush=True)

    while True:
        before, ended = len(results), False
        running: dict[str, Any] | None = {"what": PROCESS}
        # In its own session, so that the compiler processes that it starts can be ended with it.
        with subprocess.Popen(
            [*command, str(before)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as child:
            assert child.stdout is not None
            left = max(0.0, min(ends - time.monotonic(), threading.TIMEOUT_MAX))
            alarm = threading.Timer(left, _kill, (child,))
            alarm.start()
            try:
                for text in child.stdout:
                    if not text.endswith("\n"):  # the process was killed while it wrote the line
                        break
                    line = json.loads(text)
                    if "begun" in line:
                        running = line["begun"]
                    elif "end" in line:
                        running, ended = None, True
                    else:
                        write(line)
                        running = None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(10)
            finally:
                alarm.cancel()
                _kill(child)
            code = child.wait()
        late = time.monotonic() >= ends
        if running is not None:
            why = "not finished within --seconds" if late else f"the process ended: {_ending(code)}"
            write({**running, "error": why})
        if late or ended or len(results) == before or results[-1]["what"] == PROCESS:
            return results


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and time the kernels, and write the figures; return 1 if a result differs or an item fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/benchmarks"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, metavar="N")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--serve", type=int, metavar="DONE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        (part,) = options.part
        module = importlib.import_module(f"{__package__}.{part}_card")
        serve(lambda: module.CARD(options.smoke), part, options.smoke, options.serve)
        return 0
    ends = float("inf") if options.seconds is None else time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    # By default JAX allocates most of the card's memory at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    wrong = 0
    for part in dict.fromkeys(options.part or PARTS):
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        path = options.out / f"{part}-{now}-{os.getpid()}.jsonl"
        smoke = ["--smoke"] * options.smoke
        command = [sys.executable, "-m", f"{__package__}.card", "--part", part, *smoke, "--serve"]
        with path.open("x", encoding="utf-8") as lines:
            results = collect(command, lines, ends)
        wrong += sum(map(_is_wrong, results))
        if not options.smoke:
            _summarize(results, options.out)
        print(f"{part}: {len(results)} results in {path}", flush=True)
    return int(wrong > 0)


def _is_wrong(line: Mapping[str, Any]) -> bool:
    """Whether a result is a fault of this library; a peer's program that fails is not."""
    ours = "way" not in line or line["way"].startswith("planner")
    return bool(line.get("difference")) or ("error" in line and ours)


def _summarize(results: Sequence[Mapping[str, Any]], folder: pathlib.Path) -> None:
    """Write the results of a part as one JSON file and as a table."""
    about = dict(results[0]) if results and results[0]["what"] == "circumstances" else None
    if about is None:
        return
    rates = {line["what"]: line["rate"] for line in results if "rate" in line}
    about |= {"wrong": sum(map(_is_wrong, results)), "rates": rates}
    path = folder / f"{about['machine']}-{about['framework']}.json"
    path.write_text(json.dumps({"circumstances": about, "results": results[1:]}, indent=2) + "\n")
    path.with_suffix(".md").write_text(_markdown(about, results))


def _markdown(about: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"# Benchmarks of {about['framework']} on {about['machine']}", "", "Written by `make gpu`.", ""]
    lines += [f"- {about['date']}, commit {about['commit']}, {about['versions']}, {about['wrong']} checks failed"]
    lines += [f"- {name} {rate:.3g}" for name, rate in about["rates"].items()]
    lines += ["", "| what | way | time | beside the least | extra memory |", "| --- | --- | --- | --- | --- |"]
    copy = about["rates"].get("copy, bytes/s")
    for line in results:
        if "seconds" not in line:
            continue
        floor = line["least_bytes"] / copy if copy else 0.0
        beside = f"{line['seconds'] / floor:.2f}x" if floor else ""
        extra = line["extra_bytes"]
        memory = "" if extra is None else f"{extra / 1e6:.1f} MB"
        lines.append(f"| {line['comparison']} | {line['way']} | {1e6 * line['seconds']:.1f} us | {beside} | {memory} |")
    failed = [f"- {x['what']}: {x.get('error') or x['difference']}" for x in results if _failed(x)]
    return "\n".join([*lines, *(["", "What failed or differs:", ""] if failed else []), *failed]) + "\n"


def _failed(line: Mapping[str, Any]) -> bool:
    return "error" in line or bool(line.get("difference"))


if __name__ == "__main__":
    sys.exit(main())
