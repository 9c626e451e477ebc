"""Three hundred mutants, drawn by a fixed seed from all that cosmic-ray's operators make of the library."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import hashlib
from collections.abc import Iterator

import cosmic_ray.ast
import cosmic_ray.mutating
import cosmic_ray.plugins

from tests.mutants.judge import ROOT, verdicts

SEED = "planner, issue 6"
DRAWN = 300
FOLDERS = ("planner", "backends", "kernels")

# Programs that time the library or show it: they are not part of it.
LEFT_OUT = ("planner/bench/", "planner/demo/")
_PUNCTUATION = frozenset("()[]{},.:=")


@dataclasses.dataclass(frozen=True, order=True)
class Mutation:
    """One change that one operator makes in one file; the rank draws it, whatever is changed elsewhere."""

    rank: str
    file: str
    operator: str
    occurrence: int
    line: int
    function: str
    text: str

    @property
    def name(self) -> str:
        """A short name that stays while the line, its function and the operator do."""
        return f"{self.file}:{self.function}:{self.operator.removeprefix('core/')}:{self.rank[:8]}"

    def apply(self) -> str | None:
        """The file's text with the change, or None where it no longer compiles."""
        operator = cosmic_ray.plugins.get_operator(self.operator)()
        changed = cosmic_ray.mutating.mutate_code((ROOT / self.file).read_text(), operator, self.occurrence)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError:
            return None
        return str(changed)


def files() -> list[str]:
    """The library's files that mutants are drawn from; the symlinks are not followed."""
    found = (p for folder in FOLDERS for p in (ROOT / folder).glob("**/*.py"))
    names = sorted({str(p.resolve().relative_to(ROOT)) for p in found})
    return [name for name in names if not name.startswith(LEFT_OUT)]


def draw(number: int = DRAWN) -> list[Mutation]:
    """The mutations that were judged before and are still there, then those of least rank; all of them compile.

    It takes a minute. At most one mutation of an operator is drawn in a line. Code that is moved or renamed has other
    ranks: its verdicts are kept under their new names, so that only new code is judged anew.
    """
    judged = verdicts()
    drawn: dict[tuple[str, int, str], Mutation] = {}
    for mutation in sorted((m for file in files() for m in mutations(file)), key=lambda m: (m.name not in judged, m)):
        place = (mutation.file, mutation.line, mutation.operator)
        if place not in drawn and mutation.apply() is not None:
            drawn[place] = mutation
            if len(drawn) == number:
                break
    return sorted(drawn.values(), key=lambda m: m.name)


@functools.cache
def _operators() -> tuple[tuple[str, cosmic_ray.operators.operator.Operator], ...]:
    """Cosmic-ray's operators but those that want arguments."""
    classes = ((name, cosmic_ray.plugins.get_operator(name)) for name in cosmic_ray.plugins.operator_names())
    return tuple((name, of()) for name, of in classes if not of.arguments() and "NoOp" not in name)


def mutations(file: str) -> Iterator[Mutation]:
    """All changes in a file, outside of the places that are left out."""
    source = (ROOT / file).read_text()
    lines = source.splitlines()
    tree = ast.parse(source)
    definitions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    # From the outermost inwards, each with its decorators.
    spans = [(min(x.lineno for x in (d, *d.decorator_list)), d.end_lineno or 0, d.name) for d in definitions]
    unread = _unread(tree)
    # No operator changes names, strings or punctuation: without them this takes a quarter of the time.
    nodes = [
        node
        for node in cosmic_ray.ast.ast_nodes(cosmic_ray.ast.get_ast(source))
        if node.type not in ("name", "string", "newline") and getattr(node, "value", None) not in _PUNCTUATION
    ]
    for name, operator in _operators():
        seen: dict[tuple[str, str], int] = {}
        positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (line, column) in enumerate(positions):
            function = ".".join(name for first, last, name in spans if first <= line <= last) or "module"
            text = lines[line - 1].strip()
            repeat = seen[function, text] = seen.get((function, text), -1) + 1
            if not any(start <= (line, column) < end for start, end in unread[line]):
                key = "\n".join((SEED, file, name, function, text, str(repeat)))
                rank = hashlib.sha256(key.encode()).hexdigest()
                yield Mutation(rank, file, name, occurrence, line, function, text)


def _unread(tree: ast.Module) -> dict[int, list[tuple[tuple[int, int], tuple[int, int]]]]:
    """Begin and end of what never runs, by line: annotations, and what only type checkers see."""
    found: list[ast.expr | ast.stmt | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found.append(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found += node.body
    spans = collections.defaultdict(list)
    for part in filter(None, found):
        last = part.end_lineno or 0
        for line in range(part.lineno, last + 1):
            spans[line].append(((part.lineno, part.col_offset), (last, part.end_col_offset or 0)))
    return spans
