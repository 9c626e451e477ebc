"""Pages, graphs and traces say what the plan says, for random plans and odd ones. `test_browser.py` opens pages."""

import dataclasses
import html.parser
import itertools
import json
import math
import random
import re

import numpy as np
import pytest
from conftest import examples, run_python
from hypothesis import given, settings

import planner
from planner.inspect.memory import torch_backward_memory, torch_memory
from planner.pages.figures import graph_of, moments, ticks
from planner.pages.tables import Table, page_of_tables
from planner.pages.tree_drawing import draw_tree, places_of
from planner.testing import problems

VOID = {"meta", "br"}
GATHER = "nij, q[n]jk -> nik"


def gather_plan(backend="numpy", requires_grad=True, **options):
    shapes = ((40, 2, 8), (6, 8, 4))
    operands = [planner.Operand(shape, requires_grad=requires_grad) for shape in shapes]
    return planner.plan(GATHER, *operands, q=(40,), backend=backend, **options)


class Page(html.parser.HTMLParser):
    """Reads a page: its texts, and what it refers to. It fails where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.attributes = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def figures_of(page, name):
    """The figures of the table of costs, of one plan, from the attributes that hold them whole."""
    row = re.search(rf'<tr data-plan="{name}">(.*?)</tr>', page, re.DOTALL)[1]
    return {key: int(value) for key, value in re.findall(r'data-figure="(\w+)" data-value="(\d+)"', row)}


@settings(max_examples=examples(ci=40, nightly=1000))
@given(problems())
def test_a_page_shows_the_figures_of_its_plan(problem):
    plan = planner.plan(problem.spec, *problem.operands(), **problem.arguments())
    text = plan.to_html()
    Page(text)
    assert not re.search(r"""(?:src|href|url|@import)\s*[=(]|https?://""", text)
    for name, cost in (("naive", plan.naive_cost), ("this plan", plan.cost)):
        found = figures_of(text, name)
        assert found["peak"] == cost.peak_bytes
        assert found["retained"] == cost.retained_bytes
        assert found["FLOPs"] == cost.flops
        assert found["moves"] == cost.bytes_moved
        assert found["time"] == round(cost.seconds * 1e12)
    assert [int(n) for n in re.findall(r'data-step="(\d+)"', text)][: len(plan.steps)] == list(range(len(plan.steps)))


@settings(max_examples=examples(ci=60, nightly=1000))
@given(problems())
def test_moments_and_graph_are_the_plans(problem):
    operands = [planner.Operand(x.shape, str(x.dtype), requires_grad=x.dtype.kind == "f") for x in problem.operands()]
    plan = planner.plan(problem.spec, *operands, backend="torch", **problem.arguments())
    found = moments(plan)
    assert [m.live for m in found] == [step.live_bytes for step in plan.steps]
    assert all(m.kept >= 0 and m.scratch >= 0 and m.kept + m.scratch <= m.live for m in found)
    forward = [m for m in found if not m.backward]
    if forward and plan.programs.backward is not None and plan.loop is None:
        assert forward[-1].kept <= plan.cost.retained_bytes or plan.programs.result in plan.programs.kept
    graph = graph_of(plan)
    names = [node.name for node in graph.nodes]
    assert len(set(names)) == len(names)
    kinds = [node.kind for node in graph.nodes]
    assert kinds.count("operand") == len(operands)
    assert len([k for k in kinds if k in ("step", "guard", "loop")]) == len(plan.programs.forward.steps)
    assert kinds.count("index") == sum(len(step.op.arrays) for step in plan.programs.forward.steps)
    assert {edge.source for edge in graph.edges} | {edge.target for edge in graph.edges} == set(names)
    places = places_of(graph)
    boxes = [(p.x, p.x + p.width, p.y) for p in places.values()]
    for number, (left, right, y) in enumerate(boxes):
        for other_left, other_right, other_y in boxes[:number]:
            assert right < other_left or other_right < left or abs(y - other_y) >= 40
    assert all(places[e.source].x + places[e.source].width < places[e.target].x for e in graph.edges)


@pytest.mark.parametrize("most", [0, 1, 3, 7, 10, 99, 4096, 75_000_000, 10**18 + 1, 10**250])
def test_ticks_are_round_and_reach_the_top(most):
    marks = ticks(most)
    step = marks[1]
    assert marks == list(range(0, marks[-1] + 1, step))
    assert marks[-1] >= most
    assert marks[-1] - step < max(most, 1)
    assert 2 <= len(marks) <= 6
    assert str(step).rstrip("0") in {"1", "2", "5"}


def test_odd_characters_are_text():
    """An axis may be any character. None of them is markup, and what no page can show is written as an escape."""
    plan = planner.plan("<&, &\x07 -> <\x07", (2, 3), (3, 4), backend="numpy")
    page = Page(plan.to_html())
    assert "<&, &\\x07 -> <\\x07" in page.text
    assert "\x07" not in plan.to_html()
    assert "#60;#38;" in plan.to_mermaid()
    quoted = planner.plan('"\\, \\a -> "a', (2, 3), (3, 4), backend="numpy")
    assert '[label="0: \\"\\\\\\n2 x 3, 24 B"]' in quoted.to_dot()
    assert '""' not in quoted.to_mermaid()


def test_numbers_beyond_machine_integers():
    """A clique of 16 tensors, every two of which share an axis of size 16: some 10^83 FLOPs."""
    edges = {pair: chr(0x4E00 + n) for n, pair in enumerate(itertools.combinations(range(16), 2))}
    terms = ["".join(letter for pair, letter in edges.items() if node in pair) for node in range(16)]
    plan = planner.plan(f"{', '.join(terms)} ->", *[(16,) * 15] * 16, backend="numpy", minimize="flops")
    assert plan.cost.flops > 10**80
    page = plan.to_html()
    assert figures_of(page, "this plan")["FLOPs"] == plan.cost.flops
    planner.compare(plan).to_html()


def test_no_steps():
    plan = planner.plan("ij -> ij", (2, 3), backend="numpy")
    assert "There are no steps" in Page(plan.to_html()).text
    assert 'o0 -->|"24 B"| r' in plan.to_mermaid()
    assert "24 B" in planner.compare(plan).to_html()


def test_measured_figures_stand_beside_predicted_ones(torch, tmp_path):
    random = torch.Generator().manual_seed(0)
    a, c = torch.rand(400, 2, 8, generator=random), torch.rand(6, 8, 4, generator=random)
    q = torch.randint(0, 6, (400,), generator=random)
    plan = planner.plan(GATHER, a.requires_grad_(), c.requires_grad_(), q=q)
    analysis = plan.analyze(a, c, q=q)
    text = plan.to_html(analysis=analysis)
    assert plan.to_html(tmp_path / "page.html", analysis) is None  # nothing to show at a prompt
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == text
    page = Page(text)
    assert sum(row == ("tr", "class", "measured") for row in page.attributes) == len(plan.steps)
    assert sum(row == ("line", "class", "measured") for row in page.attributes) == len(plan.steps)
    assert page.text.count("measured ") >= 3 * len(plan.steps)
    assert "The steps of this plan took " in page.text
    warned = dataclasses.replace(analysis, warnings=("the machine is not the plan's",))
    shown = Page(plan.to_html(analysis=warned)).text
    assert shown.index("the machine is not the plan's") < shown.index("What it costs")
    slow = dataclasses.replace(
        analysis.steps[0], measured=dataclasses.replace(analysis.steps[0].measured, seconds=20.0)
    )
    shown = Page(plan.to_html(analysis=dataclasses.replace(analysis, steps=(slow, *analysis.steps[1:])))).text
    assert re.search(r"time off by \d{4,}x", shown)
    other = planner.plan(GATHER, a, c.detach(), q=q)
    with pytest.raises(planner.PlannerError, match="that of another plan"):
        other.to_html(analysis=analysis)


def test_both_memory_charts_have_one_scale():
    """Their axes have the same marks, and each legend stands beside its chart."""
    plan = planner.plan(GATHER, (40_000, 2, 8), (6, 8, 4), q=(40_000,), backend="torch")
    assert plan.naive_cost.peak_bytes != plan.cost.peak_bytes
    first, second = re.findall(r'<svg[^>]*aria-label="Memory of.*?</svg>', plan.to_html(), re.DOTALL)
    marks = [re.findall(r'text-anchor="end"[^>]*>([^<]*)<', chart) for chart in (first, second)]
    assert marks[0] == marks[1] != []
    text = Page(plan.to_html()).text
    assert text.index("Time by step") < text.index("at the rate of products")


@pytest.mark.parametrize("name", ["matmul", "a name of an implementation that is long"])
def test_times_in_a_tree_are_never_cut(name):
    graph = graph_of(planner.plan("ij, jk -> ik", (20, 30), (30, 40), backend="numpy"))
    graph = dataclasses.replace(graph, nodes=tuple(dataclasses.replace(node, detail=name) for node in graph.nodes))
    drawn = draw_tree(graph, {"s0": "42.9 ms, measured 123.4 ms"})
    (detail,) = (element.text for element in drawn.iter("text") if "measured" in element.text)
    assert detail.endswith(", 42.9 ms, measured 123.4 ms")
    assert detail.startswith(name[:10] if len(name) > 10 else name)


def test_loops_show_their_slices():
    operands = [planner.Operand(shape, "float64") for shape in ((1000, 8, 64), (1000, 64, 8), (1000, 8, 64))]
    plan = planner.plan("nij, njk, nkl -> il", *operands, backend="numpy", memory_limit="300 kB")
    assert plan.loop is not None
    page = Page(plan.to_html())
    assert "In each whole slice of step 0, loop over n" in page.text
    for step in plan.loop.body.steps:
        assert str(step.op.spec) in page.text


def test_a_thousand_steps():
    """The page of a large network stays small: the longest steps list their implementations."""
    draw = random.Random(0)
    count = 500
    spec = ", ".join(f"{chr(0x4E00 + n)}{chr(0x4E00 + n + 1)}" for n in range(count))
    shapes = [(draw.randint(2, 5),) * 2 for _ in range(1)] * count
    operands = [planner.Operand(shape, requires_grad=True) for shape in shapes]
    plan = planner.plan(f"{spec} -> {chr(0x4E00)}{chr(0x4E00 + count)}", *operands, backend="torch")
    assert len(plan.steps) > 1000
    text = plan.to_html()
    assert len(text.encode()) < 2_000_000
    assert text.count("<details>") == 100


def test_a_notebook_gets_a_part_of_a_page():
    plan = gather_plan()
    part = plan._repr_html_()
    assert part.startswith('<div class="plan-page">')
    Page(part)
    # Its style holds within the part only.
    style = part[part.index("<style>") + 7 : part.index("</style>")]
    assert all(".plan-page" in rule for rule in re.findall(r"([^{}]+)\{", re.sub(r"@media[^{]*\{", "", style)))
    assert Page(planner.compare(plan)._repr_html_()).text.count("Contraction tree") == 2


def test_graphs_name_gathers_and_kept_values():
    plan = planner.plan(
        "ij, q[j]k, kl -> il", *[planner.Operand(s, requires_grad=True) for s in ((30, 40), (9, 40), (40, 5))],
        q=(40,), backend="torch",
    )  # fmt: skip
    mermaid, dot = plan.to_mermaid(), plan.to_dot()
    assert re.search(r's\d+q\(\["q<br>index array, 40"\]\)', mermaid)
    assert "-.->" in mermaid
    assert "style=dashed" in dot
    kept = sum(bool(step.keeps) for step in plan.programs.forward.steps)
    assert kept
    assert "kept" in mermaid
    assert "kept" in dot


def test_plots(tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    plan = gather_plan()
    figure = plan.plot(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").stat().st_size > 1000
    assert [text.get_text() for text in figure.axes[0].texts if text.get_text().startswith("nij")]
    with pytest.raises(planner.PlannerError, match="nothing was drawn"):
        plan.plot(tmp_path / "plan.nonsense")
    planner.plan("ij -> ij", (2, 3), backend="numpy").plot()
    with pytest.raises(planner.PlannerError, match="nothing was drawn to '3.5'"):
        gather_plan().plot(3.5)


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(planner.PlannerError, match="nothing was written to"):
        gather_plan().to_html(tmp_path / "no such folder" / "page.html")
    with pytest.raises(planner.PlannerError, match="nothing was written to"):
        gather_plan().to_html(tmp_path)


def test_compare():
    fast = gather_plan()
    table = str(planner.compare(fast))
    assert table.splitlines()[2].split()[0] == "0"
    assert "naive" in table.splitlines()[3]
    other = planner.plan(GATHER, (80, 2, 8), (6, 8, 4), q=(80,), backend="jax")
    both = planner.compare(fast, other)
    assert len(both) == 2
    assert both[1] is other
    assert "jax · cpu · float32" in str(both)
    assert [n for n in re.findall(r'data-plan="(\d+):', both.to_html())] == ["0", "1"]
    with pytest.raises(planner.PlannerTypeError, match="argument 1 is a str: give plans"):
        planner.compare(fast, "ij -> ij")
    front = planner.tradeoff(GATHER, (40, 2, 8), (6, 8, 4), q=(40,), backend="numpy")
    assert front.to_html().count("data-plan=") == len(front)


# --- the naive plan -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "shapes", "cut"),
    [
        ("ijk, ikl -> jl", ((16, 64, 32), (8, 32, 16)), 8),  # a part of a larger array: copied, and kept
        ("ijk, ikl -> jl", ((8, 64, 32), (8, 32, 16)), 8),
        ("ij, jk -> ik", ((20, 30), (30, 40)), 20),
        ("ijkl, mip -> jklmp", ((4, 5, 6, 7), (3, 4, 8)), 4),
        ("bij, bjk -> bik", ((6, 8, 9), (6, 9, 5)), 6),
        ("bhi, bhj, bk -> ijk", ((6, 8, 9), (6, 8, 5), (6, 7)), 6),
    ],
)
def test_the_naive_plan_keeps_what_einsum_keeps(torch, spec, shapes, cut):
    operands = [torch.ones(shape)[: cut if n == 0 else None].requires_grad_() for n, shape in enumerate(shapes)]
    plan = planner.plan(spec, *operands)

    def run():
        return torch.einsum(spec.replace(" ", ""), *operands)

    run()
    assert plan.naive.cost.retained_bytes == torch_memory(run)[1].retained_bytes
    assert plan.naive_cost == plan.naive.cost


# What a user would write, of operands a, b and c and index array e.
GATHERED = [
    ("tm, e[ts]mh, ts -> th", ((512, 64), (16, 64, 32), (512, 2)),
     lambda torch, e, a, b, c: torch.einsum("tm,tsmh,ts->th", a, b[e], c)),
    ("tm, ts, e[ts]mh -> th", ((512, 64), (512, 2), (16, 64, 32)),
     lambda torch, e, a, b, c: torch.einsum("tms,tsmh->th", torch.einsum("tm,ts->tms", a, b), c[e])),
    ("nij, e[n]jk -> nik", ((512, 1, 64), (16, 64, 32)), lambda torch, e, a, b: a @ b[e]),
    ("nj, e[n]j -> n", ((512, 64), (16, 64)), lambda torch, e, a, b: (a[:, None] @ b[e][:, :, None]).squeeze()),
    ("nj, e[n]j -> nj", ((512, 64), (16, 64)), lambda torch, e, a, b: a * b[e]),
    ("nj, je[k] -> nk", ((64, 512), (512, 16)), lambda torch, e, a, b: a @ b[:, e]),
    ("kjc, kic -> ijc", ((64, 80, 70), (64, 90, 70)),  # no unit stride
     lambda torch, e, a, b: torch.einsum("kjc,kic->ijc", a, b)),
    ("kjc, kc -> jc", ((64, 80, 70), (64, 70)), lambda torch, e, a, b: torch.einsum("kjc,kc->jc", a, b)),
]  # fmt: skip


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("spec", "shapes", "program"), GATHERED)
def test_the_naive_peak_is_that_of_einsum(torch, spec, shapes, program, gradients):
    """Gradients of rows that were read are not copied, and `torch.bmm` copies matrices one at a time."""
    operands = [torch.ones(shape).requires_grad_(gradients) for shape in shapes]
    shape = (512, 2) if "[ts]" in spec else (512,)
    e = torch.arange(math.prod(shape)).reshape(shape) % 16
    naive = planner.plan(spec, *operands, **({"e": e} if "[" in spec else {})).naive

    def run():
        return program(torch, e, *operands)

    result, forward = torch_memory(run)
    peaks = [forward.peak_bytes]
    if gradients:
        peaks.append(torch_backward_memory(run, operands, torch.ones_like(result))[1].peak_bytes)
    assert naive.cost.retained_bytes == forward.retained_bytes
    assert naive.cost.peak_bytes == pytest.approx(max(peaks), rel=0.05)


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((1, 80, 70), lambda x: x.expand(64, 80, 70)),
        ((64, 1, 70), lambda x: x.expand(64, 80, 70)),
        ((64, 80, 1), lambda x: x.expand(64, 80, 70)),
        ((64, 80, 140), lambda x: x[..., ::2]),
        ((70, 80, 64), lambda x: x.permute(2, 1, 0)),
    ],
)
def test_matrices_are_copied_one_at_a_time_and_not_kept(torch, shape, view):
    x, y = view(torch.ones(shape)), torch.ones(64, 70, 60, requires_grad=True)

    def run():
        return torch.einsum("bij,bjk->bik", x, y)

    result, forward = torch_memory(run)
    backward = torch_backward_memory(run, [y], torch.ones_like(result))[1]
    cost = planner.plan("bij, bjk -> bik", x, y).naive.cost
    assert (cost.retained_bytes, cost.forward.peak_bytes) == (forward.retained_bytes, forward.peak_bytes)
    assert cost.backward.peak_bytes == pytest.approx(backward.peak_bytes, rel=0.01)


@pytest.mark.parametrize("name", ["several index arrays", "an inner dimension"])
def test_the_naive_peak_is_an_upper_bound(torch, name):
    generator = torch.Generator().manual_seed(0)
    if name == "several index arrays":
        a, b = (torch.ones(2, 4, n, 32, requires_grad=True) for n in (64, 128))
        i = torch.randint(0, 128, (2, 4, 64, 10), generator=generator)
        rows = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None], i
        spec, call = "bhqd, bhi[bhqk]d -> bhqk", lambda: torch.einsum("bhqd,bhqkd->bhqk", a, b[rows])
    else:
        a, b = torch.ones(50, 20, requires_grad=True), torch.ones(64, 30, 20, requires_grad=True)
        i = torch.randint(0, 30, (40,), generator=generator)
        spec, call = "bh, mi[k]h -> bmk", lambda: torch.einsum("bh,mkh->bmk", a, b[:, i])
    result, forward = torch_memory(call)
    backward = torch_backward_memory(call, [a, b], torch.ones_like(result))[1]
    measured = max(forward.peak_bytes, backward.peak_bytes)
    assert measured <= planner.plan(spec, a, b, i=i).naive.cost.peak_bytes <= 1.3 * measured


def test_the_naive_plan_says_what_it_copies(torch):
    x, y = torch.ones(16, 64, 64)[:8, :, :32].requires_grad_(), torch.ones(8, 32, 16).requires_grad_()
    naive = planner.plan("ijk, ikl -> jl", x, y).naive
    text = str(naive)
    assert "operand 0, ijk, is not row-major: its strides are 4096, 64, 1" in text
    assert re.search(r"moves +copies +live", text)
    assert "  65.5 kB  69.6 kB  " in text
    assert text.count("naive") == 1
    assert naive.naive == naive
    assert (naive(x, y) == planner.contract("ijk, ikl -> jl", x, y)).all()


# --- traces and the command line ----------------------------------------------------------------


def test_a_trace_has_a_slice_for_each_step(tmp_path):
    a, b = np.ones((20, 30)), np.ones((30, 40))
    analysis = planner.plan("ij, jk, kl -> il", a, b, b.T).analyze(a, b, b.T)
    analysis.to_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert [event["args"]["step"] for event in slices] == [0, 1]
    assert slices[1]["ts"] == slices[0]["ts"] + slices[0]["dur"]
    assert sum(event["dur"] for event in slices) == pytest.approx(
        1e6 * sum(step.measured.seconds for step in analysis.steps)
    )
    counted = [event["args"]["bytes"] for event in events if event["name"] == "predicted live bytes"]
    assert counted == [*(step.predicted.live_bytes for step in analysis.steps), 0]
    assert all({"name", "ph", "pid"} <= set(event) for event in events)


def test_pages_from_the_shell(tmp_path):
    arguments = [GATHER, "40x2x8", "6x8x4", "--index", "q=40"]
    program = "import sys; from planner.cli import main; sys.exit(main(sys.argv[1:]))"
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    shown = run_python(program, "explain", *arguments, "--analyze", "--html", page, "--trace", trace)
    assert shown.startswith(GATHER)
    assert "measured" in Page(page.read_text(encoding="utf-8")).text
    assert json.loads(trace.read_text())["traceEvents"]
    assert "naive" in run_python(program, "explain", *arguments, "--naive").splitlines()[2]
    run_python(program, "tradeoff", *arguments, "--html", page)
    assert "side by side" in page.read_text(encoding="utf-8")


def test_pages_are_made_without_a_framework():
    loaded = run_python(
        "import sys, planner; planner.plan('ij, jk -> ik', (2, 3), (3, 4), backend='numpy').to_html();"
        "print(sorted({'torch', 'jax', 'matplotlib'} & set(sys.modules)))"
    )
    assert loaded.strip() == "[]"


def test_a_page_of_tables_shows_texts_figures_and_bars():
    """A text is never markup, and the bars are as long as their figures say; NaN has none."""
    rows = [["<a>", "1 s", "note"], ["b", "-", ""], ["c", "3 s", "& more"]]
    timed = Table("Times", ["Said."], ["way", "time", "words"], rows, ("words",), ("bar", [2.0, math.nan, 1.0]))
    listing = Table("Listing", [], [], [], programs=["x < y\n  z"])
    text = page_of_tables("Title", "Lead.", [timed, listing])
    page = Page(text)
    assert "Title Lead. Times Said. way time words bar <a> 1 s note b - - c 3 s & more Listing x < y z" in page.text
    widths = [float(value) for tag, name, value in page.attributes if (tag, name) == ("rect", "width")]
    assert widths == [160, 80]
    aligned = [name for name, kind in re.findall(r'<th scope="col"(?: class="(\w+)")?>(\w+)', text)]
    assert aligned == ["text", "", "text", ""]
    assert "<table" not in page_of_tables("Title", "Lead.", [listing])
