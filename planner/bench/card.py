"""``make gpu``: check the kernels on a card, time them, and write each figure to a file at once.

Each framework (a *part*) runs in a process of its own, which passes on each result as soon as it has it. The command
appends the result to a file of JSON lines and flushes it, so an interrupted run leaves all results so far. If an item
fails, its error is written and the next item follows. If the old process can no longer use the card, for example after
an illegal access, a new process continues. The steps of a part share the time: one that has spent its share is left.
At the end of a part come `tiles.json` (the fastest tiles), `device.json` (the card's rates), `checks.jsonl`, and all
lines as one JSON file and as a table in Markdown.

    --out FOLDER    where the files go (docs/benchmarks); the lines go to <part>-<time>.jsonl
    --seconds N     stop each part after this many seconds; the item that runs then is written as unfinished
    --part NAME     torch or jax; all by default
    --step NAME     only this step of a part, such as checks; may be repeated; all by default
    --smoke         tiny sizes on a CPU with interpreted kernels: tests that the command works
    --adopt FOLDER  measure nothing: take over the tiles, rates and tables that a run left in a folder
"""

from __future__ import annotations

import argparse
import collections
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

from planner.bench.cards.findings import adopt, is_wrong, write_findings

Program = Callable[[], Any]
PARTS = ("torch", "jax")
# The seconds that the shares of the steps add up to.
WHOLE = 540.0
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


class Step(NamedTuple):
    """A part of the work: its name, its share of `WHOLE` seconds, and a function that makes its items."""

    name: str
    seconds: float
    make: Callable[[], Iterator[Item]]


class Card(Protocol):
    """A card as a framework uses it.

    Attributes:
        device: the card's name; None if there is no card.
    """

    device: str | None

    def alive(self) -> bool:
        """Whether this process can still use the card; after an illegal access it cannot."""

    def steps(self) -> Iterator[Step]:
        """Yield the steps, in the same order in every process. Names of items differ within a step."""


def check_items(checks: Iterator[tuple[str, Callable[[], str]]]) -> Iterator[Item]:
    """Yield an item for each check, a function that returns what is wrong; "" if nothing is."""
    for what, check in checks:
        yield Item({"what": what}, partial(_as, "difference", check))


def rate_items(rates: Iterator[tuple[str, Callable[[], float]]]) -> Iterator[Item]:
    """Yield an item for each rate: the bytes/s of a copy, or the FLOP/s of a product."""
    for what, rate in rates:
        yield Item({"what": what}, partial(_as, "rate", rate))


def comparison_items(
    families: Iterator[tuple[str, Callable[[], Iterator[CardComparison]]]],
    figures: Callable[[Program], Mapping[str, Any]],
) -> Iterator[Item]:
    """Yield an item for each program of comparisons that share arrays.

    Args:
        families: names, and functions that make the arrays and the comparisons.
        figures: returns the median `seconds` of many runs of a program; the `device_seconds` of these, without what
            the host adds, if they are known; and the `extra_bytes`, the most that a run allocates, None if not known.
    """
    for family, make in families:
        try:
            for comparison in make():
                for way, program in comparison.ways.items():
                    about = {"comparison": comparison.what, "way": way, "least_bytes": comparison.least_bytes}
                    yield Item({"what": f"{comparison.what}: {way}", **about}, partial(figures, program))
        except Exception as error:  # the arrays could not be made; the next family has other arrays
            yield Item({"what": family}, partial(_raise, error))


def law_items(part: str, smoke: bool) -> Iterator[Item]:
    """Yield an item that checks random specs by `planner.bench.cards.random_specs`, in several processes."""
    shares = 1 if smoke else max(1, min(8, len(os.sched_getaffinity(0)) - 1))
    command = [sys.executable, "-m", f"{__package__}.cards.random_specs", part, "--seconds", "2" if smoke else "40"]

    def run() -> Mapping[str, Any]:
        children = [
            subprocess.Popen(
                [*command, "--share", f"{n}/{shares}", *["--smoke"] * smoke],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for n in range(shares)
        ]  # fmt: skip
        held, broken = collections.Counter[str](), []
        for child in children:
            out, said = child.communicate()
            lines = [json.loads(line) for line in out.splitlines()]
            for line in lines:
                held.update(line.get("held", {}))
            broken += [line for line in lines if "law" in line]
            if child.returncode not in (0, 1) or not lines or "held" not in lines[-1]:
                broken.append({"error": said[-500:]})
        return {"difference": json.dumps(broken[0])[:2000] if broken else "", "broken": len(broken), "held": held}

    yield Item({"what": f"random specs, in {shares} processes"}, run)


def _as(name: str, run: Callable[[], Any]) -> Mapping[str, Any]:
    return {name: run()}


def _raise(error: Exception) -> Mapping[str, Any]:
    raise error


# -- the process that uses the card ----------------------------------------------------------------------


def serve(
    make: Callable[[], Card],
    part: str,
    smoke: bool,
    lines: str,
    seconds: float = WHOLE,
    steps: Sequence[str] | None = None,
) -> None:
    """Run the items, and write each result to standard output as a line of JSON, after a line that announces it.

    Args:
        make: makes the card.
        part: the framework's name.
        smoke: whether to run tiny sizes on a CPU.
        lines: the file with the results of earlier processes, which are not repeated.
        seconds: what all steps together may take.
        steps: the names of the steps to run; None for all.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Output that libraries print goes to standard error, so that it does not mix with the lines.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(line: Mapping[str, Any]) -> None:
        print(json.dumps(line), file=out, flush=True)

    done = [json.loads(line) for line in pathlib.Path(lines).read_text().splitlines()]
    try:
        _serve(make(), part, smoke, done, seconds, say, steps)
    except Exception as error:  # the parent process reports why this one stopped
        say({"what": PROCESS, "error": _said(error)})


def _serve(
    card: Card,
    part: str,
    smoke: bool,
    done: Sequence[Mapping[str, Any]],
    seconds: float,
    say: Callable[[Mapping[str, Any]], None],
    steps: Sequence[str] | None,
) -> None:
    if not smoke and card.device is None:
        say({"what": PROCESS, "error": f"{part} sees no card here; --smoke runs tiny sizes on the CPU"})
        return
    if not done:
        say({"what": "circumstances", **_circumstances(card, part, smoke)})
    known = {(line.get("step"), line["what"]) for line in done}
    for step in card.steps():
        if steps is not None and step.name not in steps:
            continue
        took = sum(line.get("took_seconds", 0.0) for line in done if line.get("step") == step.name)
        left = step.seconds * seconds / WHOLE - took
        for item in _items(step):
            about = {"step": step.name, **item.about}
            if (step.name, item.about["what"]) in known:
                continue
            if left <= 0:
                say({"step": step.name, "what": "the rest", "left_out": f"{step.name} has spent its time"})
                break
            say({"begun": about, "limit_seconds": max(20.0, 2 * left)})
            begun = time.perf_counter()
            try:
                figures = dict(item.run())
            except Exception as error:  # an item that fails is a result too
                figures = {"error": _said(error)}
            took = round(time.perf_counter() - begun, 3)
            left -= took
            say({**about, **figures, "took_seconds": took})
            if "error" in figures and not card.alive():
                sys.exit(3)
    say({"end": True})


def _items(step: Step) -> Iterator[Item]:
    """Yield the items of a step, and one that fails if they cannot be made."""
    try:
        yield from step.make()
    except Exception as error:
        yield Item({"what": f"the items of {step.name}"}, partial(_raise, error))


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
    about = {"machine": machine, "framework": part, "capability": getattr(card, "capability", ""), "smoke": smoke}
    return {**circumstances(Settings()), **about}


# -- the process that writes the results down ------------------------------------------------------------


def collect(command: Sequence[str], lines: TextIO, ends: float = float("inf")) -> list[dict[str, Any]]:
    """Run a process that serves results, and start another one if it ends early; write each result at once.

    Args:
        command: starts the process; the path of the lines is appended to it.
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
            [*command, lines.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as child:
            assert child.stdout is not None
            alarm = _alarm(child, ends - time.monotonic())
            try:
                for text in child.stdout:
                    if not text.endswith("\n"):  # the process was killed while it wrote the line
                        break
                    line = json.loads(text)
                    if "begun" in line:
                        running = line["begun"]
                        alarm.cancel()
                        alarm = _alarm(child, min(ends - time.monotonic(), line["limit_seconds"]))
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


def _alarm(child: subprocess.Popen[str], seconds: float) -> threading.Timer:
    """Return a timer that ends a process after some seconds."""
    alarm = threading.Timer(max(0.0, min(seconds, threading.TIMEOUT_MAX)), _kill, (child,))
    alarm.start()
    return alarm


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
    parser.add_argument("--step", action="append")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--adopt", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--serve", metavar="LINES", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.adopt:
        for line in adopt(options.adopt):
            print(line)
        return 0
    if options.serve is not None:
        (part,) = options.part
        module = importlib.import_module(f"{__package__}.cards.{part}_card")
        serve(
            lambda: module.CARD(options.smoke), part, options.smoke, options.serve, options.seconds or 1e9, options.step
        )
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    # By default JAX allocates most of the card's memory at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    wrong = 0
    for part in dict.fromkeys(options.part or PARTS):
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        path = options.out / f"{part}-{now}-{os.getpid()}.jsonl"
        command = [sys.executable, "-m", f"{__package__}.card", "--part", part, *["--smoke"] * options.smoke]
        command += [word for step in options.step or () for word in ("--step", step)]
        ends = float("inf")
        if options.seconds is not None:
            command += ["--seconds", str(options.seconds)]
            ends = time.monotonic() + options.seconds
        with path.open("x", encoding="utf-8") as lines:
            results = collect([*command, "--serve"], lines, ends)
        wrong += sum(map(is_wrong, results))
        write_findings(results, options.out)
        print(f"{part}: {len(results)} results in {path}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
