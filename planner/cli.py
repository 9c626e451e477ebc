"""``python -m planner``: explain a plan, show a trade-off, check a spec, run the demo, or measure the machine."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from planner.api import plan
from planner.audits.entry import audit
from planner.inspect.analysis import Analysis
from planner.inspect.verdicts import implementations_text
from planner.language.errors import PlannerError
from planner.language.options import INDEX_MODES
from planner.language.spec import Operand, is_axis, is_letter
from planner.plan import Plan
from planner.progress import Progress
from planner.tradeoff import Tradeoff, tradeoff
from planner.workloads import to_framework


class _Parser(argparse.ArgumentParser):
    """A parser that prints errors in one line, as the library does."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message:.600} (see --help)\n")


def _shape(text: str) -> tuple[int, ...]:
    """Parse a shape such as ``128x1x64``; ``-`` is the shape of a single number."""
    try:
        return tuple(int(size) for size in text.split("x")) if text != "-" else ()
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not a shape: write 128x1x64, or - for a single number"
        ) from None


def _named_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse the shape of an index array, such as ``q=128``."""
    name, equals, shape = text.partition("=")
    if not equals or len(name) != 1 or not is_letter(name):
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is not a shape of an index array: write q=128; index arrays are named by single letters"
        )
    return name, _shape(shape)


def _named_size(text: str) -> tuple[str, int]:
    """Parse the size of an axis or index array, such as ``d=100``."""
    # Split by position instead of `partition`: an axis may be called "=".
    name, equals, size = text[:1], text[1:2], text[2:]
    if equals != "=" or not is_axis(name):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a size of an axis or index array: write d=100")
    try:
        return name, int(size)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{size!r:.80} is not a size: write d=100") from None


def _by_letter(option: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Collect the values that an option gave for each letter.

    Raises:
        PlannerError: A letter was given twice.
    """
    values: dict[str, Any] = {}
    for letter, value in pairs:
        if letter in values:
            raise PlannerError(f"{option} gives {letter!r} twice: {values[letter]} and {value}")
        values[letter] = value
    return values


def _analyze(plan: Plan) -> Analysis:
    """Run a plan on small random integers and random indices, and compare predicted with measured figures."""
    framework: Any = plan.backend
    random = np.random.default_rng(0)
    operands = [to_framework(framework, random.integers(-2, 3, o.shape), o.dtype) for o in plan.operands]
    sizes: dict[str, int] = {}
    for gather in plan.resolved.spec.gathers:  # indices into two dimensions must fit the smaller one
        sizes[gather.array] = min(sizes.get(gather.array, gather.size or 0), gather.size or 0)
    indices = {}
    for name, shape in plan.index_shapes:
        if not sizes[name] and 0 not in shape:
            raise PlannerError(f"no index array {name!r} fits a dimension of size 0, so there is nothing to run")
        values = random.integers(0, max(sizes[name], 1), shape)
        indices[name] = to_framework(framework, np.asarray(values), "int64")
    return plan.analyze(*operands, **indices)


def _add_spec(command: argparse.ArgumentParser, size_help: str) -> None:
    """Add the arguments that all commands about a spec share."""
    command.add_argument("spec", help="such as 'nij, q[n]jk -> nik'")
    command.add_argument("--size", action="append", default=[], type=_named_size, metavar="d=100", help=size_help)


def _add_problem(command: argparse.ArgumentParser) -> None:
    """Add the arguments that describe a contraction."""
    _add_spec(command, "size of an axis or scattered dimension")
    command.add_argument("shapes", nargs="*", type=_shape, help="a shape for each operand, such as 128x1x64")
    command.add_argument(
        "--index", action="append", default=[], type=_named_shape, metavar="q=128", help="shape of an index array"
    )
    command.add_argument("--backend", default="numpy", choices=("torch", "jax", "numpy"))
    command.add_argument("--dtype", default="float32")
    command.add_argument("--grad", action="store_true", help="plan the gradients of all operands too")
    command.add_argument("--memory-limit", metavar="BYTES", help="such as '2 GiB'")
    command.add_argument("--retain-limit", metavar="BYTES", help="such as '100 MB'")
    command.add_argument("--device", help="predict times for a preset: cpu, a100, h100, h200, or 'tpu v5e'")


def _add_html(command: argparse.ArgumentParser) -> None:
    """Add the option that writes what the command prints as a page."""
    command.add_argument("--html", metavar="FILE", help="also write a page with pictures, which any browser opens")


def _add_check(commands: Any) -> None:
    """Add the command that property-tests a spec."""
    command = commands.add_parser(
        "check", help="property-test a spec: values, gradients, every path and implementation, memory"
    )
    _add_spec(command, "fix the size of an axis or of an indexed dimension; others are drawn")
    command.add_argument(
        "--backend", action="append", choices=("torch", "jax", "numpy"), help="by default all installed"
    )
    command.add_argument("--dtype", action="append", metavar="float32", help="by default float32")
    command.add_argument(
        "--index-mode", action="append", choices=tuple(INDEX_MODES), help="by default all; nan for its own law"
    )
    command.add_argument("--law", action="append", metavar="values", help="by default all; named as in the table")
    command.add_argument("--max-examples", type=int, default=40, metavar="N", help="problems for each law")
    _add_html(command)


def _check(options: argparse.Namespace) -> int:
    """Run `planner.testing.check`; return 0 if every law holds, else 1."""
    try:
        from planner.testing.checking import check
    except ModuleNotFoundError as error:
        raise PlannerError(f"{error.name} is not installed: pip install 'contraction-planner[testing]'") from None
    bar = Progress(0)

    def progress(what: str, total: int) -> None:
        bar.total = total
        bar(what)

    try:
        report = check(
            options.spec,
            _by_letter("--size", options.size),
            backends=options.backend,
            dtypes=options.dtype or ("float32",),
            laws=options.law,
            index_modes=options.index_mode,
            max_examples=options.max_examples,
            progress=progress,
        )
    except KeyboardInterrupt:
        return 130
    finally:
        bar.close()
    print(report)
    if options.html:
        report.to_html(options.html)
    return 0 if report.passed else 1


def _add_audit(commands: Any) -> None:
    """Add the command that audits a script of torch."""
    command = commands.add_parser(
        "audit", help="run a torch script, and print what its products cost and what to write"
    )
    command.add_argument("script", help="a Python file")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    command.add_argument("--measure", action="store_true", help="measure times and bytes; else they are predicted")
    _add_html(command)


def _add_compare(commands: Any) -> None:
    """Add the command that times a contraction beside what a user would write."""
    command = commands.add_parser("compare", help="run a spec here and now: einsum, compiled, opt_einsum and planner")
    _add_problem(command)
    command.set_defaults(backend="torch")
    command.add_argument("--plot", metavar="FILE", help="also draw times and memory to a file")
    _add_html(command)


def _compare(options: argparse.Namespace) -> int:
    """Time the ways to write a contraction; return 1 if one of them gives other values."""
    from planner.bench.compare import compare_ways, draw, page_of_ways

    given = {"--memory-limit": options.memory_limit, "--retain-limit": options.retain_limit, "--device": options.device}
    for name, value in given.items():
        if value is not None:
            raise PlannerError(f"compare runs what is there: it takes no {name}")
    if options.backend == "numpy" or options.dtype != "float32":
        raise PlannerError("compare runs float32 in torch or JAX: pass --backend torch or jax")
    sizes, indices = _by_letter("--size", options.size), _by_letter("--index", options.index)
    rows = compare_ways(options.spec, options.shapes, indices, sizes, options.backend)
    if options.plot:
        draw(rows, options.plot)
    if options.html:
        page_of_ways(rows, options.html)
    return 1 if any(row.differs for row in rows) else 0


def _audit(options: argparse.Namespace) -> int:
    """Run a script within an audit, and print the report."""
    if not os.path.isfile(options.script):
        raise PlannerError(f"there is no script {options.script!r:.200}")
    before = sys.argv, sys.path
    folder = os.path.dirname(os.path.abspath(options.script))
    sys.argv, sys.path = [options.script, *options.arguments], [folder, *sys.path]
    ended: SystemExit | None = None
    try:
        with audit(measure=options.measure) as report:
            runpy.run_path(options.script, run_name="__main__")
    except SystemExit as error:
        ended = error
    finally:
        sys.argv, sys.path = before
    print(report)
    if options.html:
        report.to_html(options.html)
    if ended is not None:
        raise ended
    return 0


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(prog="python -m planner", description="Plan contractions with gather indices.")
    commands = parser.add_subparsers(dest="command", required=True)
    explain = commands.add_parser("explain", help="print the plan of a spec")
    _add_problem(explain)
    explain.add_argument("--minimize", default="time")
    explain.add_argument("--naive", action="store_true", help="print the naive plan in its place, with its copies")
    explain.add_argument("--json", action="store_true", help="print the plan as JSON")
    explain.add_argument("--alternatives", action="store_true", help="also print the plans that were not taken")
    explain.add_argument(
        "--implementations", action="store_true", help="also print the ways to run each step, and why some are refused"
    )
    explain.add_argument(
        "--analyze", action="store_true", help="run the plan on random operands: predicted figures beside measured ones"
    )
    _add_html(explain)
    explain.add_argument("--trace", metavar="FILE", help="with --analyze: also write a trace for Perfetto")
    front = commands.add_parser("tradeoff", help="print the plans between time, peak and retained bytes")
    _add_problem(front)
    front.add_argument("--json", action="store_true", help="print the plans as a JSON list")
    front.add_argument("--plot", metavar="FILE", help="also draw them to a file")
    _add_html(front)
    _add_check(commands)
    _add_audit(commands)
    _add_compare(commands)
    commands.add_parser("demo", help="run the seed workloads against what their authors wrote")
    commands.add_parser("calibrate", help="measure this machine's rates and store them for plans to use")
    with contextlib.suppress(ModuleNotFoundError):
        import shtab

        shtab.add_argument_to(parser, "--print-completion", help="print what a shell needs to complete this command")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        from planner.demo import command

        return command.main(arguments[1:])
    if arguments[:1] == ["calibrate"]:
        from planner.calibrate import command as calibrate

        return calibrate.main(arguments[1:])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII only
    options = _make_parser().parse_args(arguments)
    try:
        if options.command in ("check", "audit"):
            return _check(options) if options.command == "check" else _audit(options)
        operands = [Operand(shape, options.dtype, requires_grad=options.grad) for shape in options.shapes]
        if options.command == "compare":
            return _compare(options)
        problem: dict[str, Any] = {
            "sizes": _by_letter("--size", options.size) or None,
            "backend": options.backend,
            "device": options.device,
            "memory_limit": options.memory_limit,
            "retain_limit": options.retain_limit,
            **_by_letter("--index", options.index),
        }
        if options.command == "tradeoff":
            return _tradeoff(tradeoff(options.spec, *operands, **problem), options)
        chosen = plan(options.spec, *operands, minimize=options.minimize, **problem)
        return _explain(chosen.naive if options.naive else chosen, options)
    except PlannerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"MemoryError: {error}: take smaller sizes, or run nothing here", file=sys.stderr)
        return 2


def _explain(plan: Plan, options: argparse.Namespace) -> int:
    """Print a plan, and what the options ask for beside it."""
    # Both may fail, so they come before anything is printed.
    alternatives = plan.alternatives() if options.alternatives else ()
    analysis = _analyze(plan) if options.analyze else None
    if options.trace and analysis is None:
        raise PlannerError("--trace writes what was measured: add --analyze")
    if options.html:
        plan.to_html(options.html, analysis)
    if options.trace and analysis is not None:
        analysis.to_chrome_trace(options.trace)
    if analysis is None or not options.json:
        print(plan.to_json() if options.json else plan)
    if analysis is not None:
        print(analysis.to_json() if options.json else analysis)
    if options.alternatives:
        print("alternatives")
        for alternative in alternatives:
            print(f"  {alternative}")
    if options.implementations:
        print(implementations_text(plan))
    return 0


def _tradeoff(front: Tradeoff, options: argparse.Namespace) -> int:
    """Print the plans of a trade-off, and draw them if a file was named."""
    if options.plot:
        front.plot(options.plot)
    if options.html:
        front.to_html(options.html)
    print(f"[{', '.join(point.to_json() for point in front)}]" if options.json else front)
    return 0
