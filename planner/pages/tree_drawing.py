"""The contraction tree of a plan as a drawing: operands on the left, the result on the right."""

from __future__ import annotations

import dataclasses
import math
from xml.etree.ElementTree import Element

from planner.language.resolve import shorten
from planner.pages.figures import Graph, Node
from planner.pages.markup import svg, tag

ROW, GAP, HEIGHT = 54, 120, 40
MOST_CHARACTERS, MOST_OF_DETAIL = 34, 54
CHARACTER = 6.7


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a node is drawn: its left edge, its middle, and its width, in pixels."""

    x: float
    y: float
    width: float


def places_of(graph: Graph) -> dict[str, Place]:
    """Return where to draw each node. What nothing is read for has a row of its own; a step stands between its inputs.

    Columns are as wide as their widest node. A node stands as far right as what reads it allows.
    """
    inputs: dict[str, list[str]] = {node.name: [] for node in graph.nodes}
    for edge in graph.edges:
        inputs[edge.target].append(edge.source)
    column: dict[str, int] = {}
    for node in reversed(graph.nodes):  # what reads a node comes after it
        column.setdefault(node.name, 0)
        for source in inputs[node.name]:
            column[source] = max(column.get(source, 0), column[node.name] + 1)
    rows = _rows(graph, inputs)
    widths = [0.0] * (1 + max(column.values()))
    for node in graph.nodes:
        widths[column[node.name]] = max(widths[column[node.name]], _width(node))
    lefts = [10.0] * len(widths)
    for number in reversed(range(len(widths) - 1)):
        lefts[number] = lefts[number + 1] + widths[number + 1] + GAP
    return {n.name: Place(lefts[column[n.name]], rows[n.name], widths[column[n.name]]) for n in graph.nodes}


def _rows(graph: Graph, inputs: dict[str, list[str]]) -> dict[str, float]:
    """Return the middle of each node: leaves in the order of the tree, one below the other."""
    rows: dict[str, float] = {}
    below = ROW / 2
    stack = [(graph.nodes[-1].name, False)]
    while stack:
        name, visited = stack.pop()
        if name in rows:
            continue
        if visited:
            middles = [rows[source] for source in inputs[name]]
            rows[name] = (min(middles) + max(middles)) / 2
        elif not inputs[name]:
            rows[name], below = below, below + ROW
        else:
            stack.append((name, True))
            stack += [(source, False) for source in reversed(inputs[name])]
    for node in graph.nodes:  # what the result does not need
        if node.name not in rows:
            rows[node.name], below = below, below + ROW
    return rows


def _width(node: Node) -> float:
    longest = max(min(len(node.title), MOST_CHARACTERS), min(len(node.detail), MOST_OF_DETAIL))
    return 18 + CHARACTER * longest


def draw_tree(graph: Graph, times: dict[str, str]) -> Element:
    """Return the drawing. `times` holds, for some nodes, what is added to their second line; it is never cut."""

    def named(node: Node) -> Node:
        time = f", {times[node.name]}" if node.name in times else ""
        return dataclasses.replace(node, detail=shorten(node.detail, MOST_OF_DETAIL - len(time)) + time)

    graph = dataclasses.replace(graph, nodes=tuple(map(named, graph.nodes)))
    places = places_of(graph)
    width = 10 + max(place.x + place.width for place in places.values())
    height = ROW / 2 + max(place.y for place in places.values())
    most = max(edge.bytes for edge in graph.edges) or 1
    lines: list[Element] = []
    labels: list[Element] = []
    for edge in graph.edges:
        start, end = places[edge.source], places[edge.target]
        x0, x1 = start.x + start.width, end.x
        middle = (x0 + x1) / 2
        kinds = ["edge", *["kept"] * edge.kept, *["gathers"] * edge.gathers]
        weight = 1 + (2 if edge.gathers else 5) * math.sqrt(edge.bytes / most)
        said = f"{edge.label}{', kept for the backward program' if edge.kept else ''}"
        path = f"M{x0:g} {start.y:g}C{middle:g} {start.y:g} {middle:g} {end.y:g} {x1:g} {end.y:g}"
        lines.append(tag("path", tag("title", said), d=path, class_=" ".join(kinds), stroke_width=f"{weight:.2g}"))
        # A label stands where its line begins: lines meet at their ends.
        label = shorten(edge.label.rpartition(", ")[2], 16)
        labels.append(tag("text", label, x=f"{x0 + 6:g}", y=f"{start.y - 5:g}", class_="size"))
    boxes = [_box(node, places[node.name]) for node in graph.nodes]
    steps = sum(node.kind in ("step", "loop", "guard") for node in graph.nodes)
    label = f"The contraction tree: {steps} step{'s' * (steps != 1)}. The table of steps says the same in words."
    return svg(width, height, label, *lines, *labels, *boxes, class_="tree")


def _box(node: Node, place: Place) -> Element:
    corners = {"operand": 4, "result": 4, "index": 20}.get(node.kind, 9)
    x, y, top = f"{place.x + 9:g}", place.y, f"{place.y - HEIGHT / 2:g}"
    return tag(
        "g",
        tag("title", f"{node.title}\n{node.detail}"),
        tag("rect", x=f"{place.x:g}", y=top, width=f"{place.width:g}", height=str(HEIGHT), rx=str(corners)),
        tag("text", shorten(node.title, MOST_CHARACTERS), x=x, y=f"{y - 4:g}"),
        tag("text", shorten(node.detail, MOST_OF_DETAIL), x=x, y=f"{y + 12:g}", class_="detail"),
        class_=f"node {node.kind}",
    )
