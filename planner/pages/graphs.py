"""The contraction tree in the languages of other tools: Mermaid and Graphviz."""

from __future__ import annotations

from planner.language.resolve import shorten
from planner.language.units import bytes_text
from planner.pages.figures import Edge, Node, graph_of
from planner.program.plan import PlanRecord

MOST_CHARACTERS = 60
# How Mermaid writes a node's shape around its text.
_SHAPES = {"operand": "[]", "result": "[]", "index": ("([", "])"), "guard": "()", "step": "()", "loop": ("[[", "]]")}


def mermaid_of(plan: PlanRecord) -> str:
    """Return the contraction tree as a flowchart for Mermaid; see `planner.plan.Plan.to_mermaid`."""
    graph = graph_of(plan)
    lines = ["flowchart LR"]
    for node in graph.nodes:
        opening, closing = _SHAPES[node.kind]
        text = "<br>".join(_entities(line) for line in _lines(node))
        lines.append(f'  {_ascii_name(node.name)}{opening}"{text}"{closing}')
    for edge in graph.edges:
        arrow = "-.->" if edge.gathers else "==>" if edge.kept else "-->"
        names = _ascii_name(edge.source), _ascii_name(edge.target)
        lines.append(f'  {names[0]} {arrow}|"{bytes_text(edge.bytes)}{_kept(edge)}"| {names[1]}')
    return "\n".join(lines)


def dot_of(plan: PlanRecord) -> str:
    """Return the contraction tree in the language of Graphviz; see `planner.plan.Plan.to_dot`."""
    graph = graph_of(plan)
    styles = {"step": ", style=rounded", "loop": ', style="rounded,dashed"', "guard": ", style=dotted",
              "index": ", shape=ellipse"}  # fmt: skip
    lines = ["digraph plan {", "  rankdir=LR;", "  node [shape=box];"]
    for node in graph.nodes:
        text = "\\n".join(map(_escaped, _lines(node)))
        lines.append(f'  "{_escaped(node.name)}" [label="{text}"{styles.get(node.kind, "")}];')
    for edge in graph.edges:
        style = ", style=dashed" if edge.gathers else ""
        names = _escaped(edge.source), _escaped(edge.target)
        lines.append(f'  "{names[0]}" -> "{names[1]}" [label="{bytes_text(edge.bytes)}{_kept(edge)}"{style}];')
    return "\n".join([*lines, "}"])


def _lines(node: Node) -> tuple[str, str]:
    return shorten(node.title, MOST_CHARACTERS), shorten(node.detail, MOST_CHARACTERS)


def _kept(edge: Edge) -> str:
    return ", kept" if edge.kept else ""


def _ascii_name(name: str) -> str:
    """Return a name that Mermaid takes: a letter and digits. Index arrays may have any letter."""
    return "".join(c if c.isascii() else f"u{ord(c):x}" for c in name)


def _entities(text: str) -> str:
    """Return a text with entities for all that Mermaid may read as markup, in its own writing of them."""
    return "".join(c if c.isalnum() or c in " ,:.()[]->" else f"#{ord(c)};" for c in text)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
