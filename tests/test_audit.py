"""Audits of models with planted waste, and of clean ones: what is found, where, what it costs, and what to write."""

import ast
import dataclasses
import re
import runpy
import sys
import textwrap
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import run_python

import planner
from planner.audits.expression import Array, Expression, contract, matmul, multiply, problem_of
from planner.audits.findings import figure_texts
from planner.audits.jaxpr import read_jaxpr
from planner.audits.replay import replay, slots_of
from planner.audits.report import Audit
from planner.audits.sites import Figures, Record
from planner.audits.torch_calls import TorchWatch
from planner.inspect.memory import torch_backward_memory, torch_memory
from planner.language.spec import Operand
from planner.program.frameworks import load_backend


def line_of(text):
    """The number of the one line of this file that ends with a text as a comment."""
    with open(__file__, encoding="utf-8") as file:
        (number,) = [n for n, line in enumerate(file, 1) if line.endswith(f"# {text}\n")]
    return number


def written(code, names):
    """What a call that an audit wrote returns: ``planner.contract("spec", x, w, sizes={...}, q=q)``."""
    call = ast.parse(code, mode="eval").body
    assert ast.unparse(call.func) == "planner.contract"
    spec, *operands = call.args
    keywords = {}
    for keyword in call.keywords:
        value = keyword.value
        keywords[keyword.arg] = names[value.id] if isinstance(value, ast.Name) else ast.literal_eval(value)
    return planner.contract(spec.value, *(names[operand.id] for operand in operands), **keywords)


@pytest.fixture
def models(torch):
    """Models with planted waste, and clean ones: functions of a random generator that run a step."""
    from torch import nn

    def integers(high, count, generator):
        return torch.randint(0, high, (count,), generator=generator)

    class Adapters(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Parameter(torch.randn(24, 64, 16))
            self.up = nn.Parameter(torch.randn(24, 16, 64))

        def forward(self, x, q):
            h = torch.bmm(x.unsqueeze(1), self.down[q])  # planted: adapters, down
            return torch.einsum("nij,njk->nik", h, self.up[q])  # planted: adapters, up

    def adapters(generator):
        model, x = Adapters(), torch.randn(3000, 64, generator=generator)
        model(x, integers(24, 3000, generator)).sum().backward()

    class Keys(nn.Module):
        def forward(self, queries, keys, chosen):
            picked = keys[chosen]
            return (queries.unsqueeze(1) * picked).sum(-1)  # planted: keys

    def keys(generator):
        queries = torch.randn(300, 64, generator=generator, requires_grad=True)
        pool = torch.randn(200, 64, generator=generator, requires_grad=True)
        chosen = torch.randint(0, 200, (300, 60), generator=generator)
        Keys()(queries, pool, chosen).sum().backward()

    def slices(generator):
        whole = torch.randn(16, 512, 96, generator=generator, requires_grad=True)
        w = torch.randn(8, 96, 32, generator=generator, requires_grad=True)
        torch.einsum("ijk,ikl->jl", whole[:8], w).sum().backward()  # planted: slices

    def attention(generator):
        q, k, v = (torch.randn(2, 4, 64, 32, generator=generator, requires_grad=True) for _ in range(3))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / 32**0.5
        torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v).sum().backward()

    def language(generator):
        table = nn.Embedding(500, 64)
        tokens = torch.randint(0, 500, (4, 32), generator=generator)
        x = table(tokens)
        x = nn.Linear(64, 64)(x) + x[:, torch.arange(32)]
        torch.einsum("btd,vd->btv", x, table.weight).sum().backward()

    def planned(generator):
        x, w = torch.randn(3000, 1, 64, generator=generator), torch.randn(24, 64, 16, requires_grad=True)
        planner.contract("nij, q[n]jk -> nik", x, w, q=integers(24, 3000, generator)).sum().backward()

    return {f.__name__: f for f in (adapters, keys, slices, attention, language, planned)}


PLANTED = {
    "adapters": {"planted: adapters, down": "matmul", "planted: adapters, up": "einsum"},
    "keys": {"planted: keys": "mul, sum"},
    "slices": {"planted: slices": "einsum"},
    "attention": {},
    "language": {},
    "planned": {},
}


@pytest.mark.parametrize("name", PLANTED)
def test_all_waste_is_found_and_nothing_else(torch, models, name):
    generator = torch.Generator().manual_seed(0)
    with planner.audit() as report:
        models[name](generator)
    found = {(site.place.line, site.function) for site in report.waste}
    assert found == {(line_of(text), function) for text, function in PLANTED[name].items()}
    assert all(site.place.file == __file__ for site in report)
    assert report.unread == {}
    assert len(report) >= len(PLANTED[name])
    for site in report.waste:
        assert site.code in str(report)


PROGRAMS = {  # those of the planted models: what they call, and what takes a gradient
    "down": ("y = torch.bmm(x.unsqueeze(1), down[q])", ("x", "down")),
    "up": ("y = torch.einsum('nij,njk->nik', h, up[q])", ("h", "up")),
    "keys": ("y = (queries.unsqueeze(1) * keys[chosen]).sum(-1)", ("queries", "keys")),
    "slices": ("y = torch.einsum('ijk,ikl->jl', whole, w)", ("whole", "w")),
}
MORE = {  # what the naive plan computes in other steps than the program
    "all summed": ("y = (x * table[q]).sum()", ("x", "table")),
    "added": ("y = torch.zeros(7, 64).index_add_(0, d, x * table[q])", ("x", "table")),
    "target": ("y = t.index_add(0, d, table[q])", ("table",)),
    "views": ("y = x[:, None] @ turned[q].mT", ("x", "turned")),
}


@pytest.fixture
def arrays(torch):
    """What the programs know."""
    generator = torch.Generator().manual_seed(0)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    shapes = {"x": (3000, 64), "down": (24, 64, 16), "h": (3000, 1, 16), "up": (24, 16, 64), "table": (24, 64)}
    shapes |= {
        "turned": (24, 16, 64),
        "queries": (300, 64),
        "keys": (200, 64),
        "whole": (16, 512, 96),
        "w": (8, 96, 32),
        "t": (7, 64),
    }
    names = {name: integers(-3, 4, *shape).float() for name, shape in shapes.items()}
    names["whole"] = names["whole"][:8]
    names |= {"q": integers(0, 24, 3000), "d": integers(0, 7, 3000), "chosen": integers(0, 200, 300, 60)}
    return {**names, "torch": torch}


def taken(torch, call, leaves):
    """The peak and retained bytes of a call with its gradients."""
    result, forward = torch_memory(call)
    _, back = torch_backward_memory(call, leaves, torch.ones_like(result))
    return max(forward.peak_bytes, back.peak_bytes), forward.retained_bytes


@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_are_those_of_the_changed_program(torch, arrays, name, tmp_path):
    """The code to write runs, returns what the program returned, and takes what the audit said."""
    program, needed = PROGRAMS[name]
    leaves = [arrays[need].requires_grad_() for need in needed]
    with planner.audit() as report:
        wanted = run_text(program, arrays, tmp_path)["y"]
    (site,) = report.waste

    def changed():
        return written(site.code, arrays)

    assert torch.equal(changed(), wanted)
    peak, retained = taken(torch, changed, leaves)
    assert retained == site.planned.retained_bytes == site.plan.cost.retained_bytes
    # The plan has room for one flat index: rows of other sizes need it, torch's own calls do not.
    flat = 8 * arrays["chosen"].numel() if name == "keys" else 0
    assert peak == pytest.approx(site.planned.peak_bytes - flat, rel=0.05)
    assert peak <= site.planned.peak_bytes <= site.plan.cost.peak_bytes


@pytest.mark.parametrize("name", [*PROGRAMS, *MORE])
def test_measured_bytes_are_those_of_the_program(torch, arrays, name, tmp_path):
    """What a program takes today is what its own calls take, and not what the naive plan takes."""
    program, needed = (PROGRAMS | MORE)[name]
    leaves = [arrays[need].requires_grad_() for need in needed]

    def run():
        return run_text(program, arrays, tmp_path)["y"]

    with planner.audit(measure=True) as report:
        run()
    (site,) = report
    assert site.today.measured
    assert site.planned.measured
    assert site.today.seconds > 0 < site.planned.seconds
    assert (site.today.peak_bytes, site.today.retained_bytes) == taken(torch, run, leaves)
    assert all(leaf.grad is None for leaf in leaves)


@pytest.mark.parametrize(
    ("backward", "strides"),
    [
        (lambda y: y.sum().backward(), (0, 0, 0)),
        (lambda y: y.backward(y.new_ones(60, 9, 3).mT), (27, 1, 3)),
        (lambda y: y.backward(y.new_ones(9).expand(60, 3, 9)), (0, 0, 1)),
        (lambda y: None, (27, 9, 1)),
    ],
)
def test_gradients_lie_as_those_of_the_program(torch, monkeypatch, backward, strides):
    """One that is expanded takes three times as long as one that is not, so both calls are measured with it."""
    given = []

    def watched(forward, inputs, gradient):
        given.append((gradient.shape, gradient.stride()))
        return torch_backward_memory(forward, inputs, gradient)

    monkeypatch.setattr("planner.audits.measure.torch_backward_memory", watched)
    x, w, q = torch.ones(60, 3, 8), torch.ones(5, 8, 9, requires_grad=True), torch.arange(60) % 5
    with planner.audit(measure=True) as report:
        backward(torch.bmm(x, w[q]))
    assert report[0].today.measured
    assert given == [((60, 3, 9), strides)] * 2


def test_what_was_called_runs_again(torch, arrays, tmp_path):
    """The recorded calls of every program compute what it computed."""
    for program, _ in (PROGRAMS | MORE).values():
        record = Record()
        with load_backend("torch").routing(TorchWatch(record, measure=True), every=True):
            wanted = run_text(program, arrays, tmp_path)["y"]
        (call,) = record
        values = {id(x): x for x in arrays.values()}
        assert torch.equal(replay(call.today.step, values), wanted)
        assert len({*slots_of(call.today.step)} & {*values}) > 1


def test_a_product_in_place_is_measured_on_other_arrays(torch, arrays):
    table, q, d, t = (arrays[name] for name in ("table", "q", "d", "t"))
    with planner.audit(measure=True) as report:
        t.index_add_(0, d, table.requires_grad_()[q])
    (site,) = report
    assert site.code == "t.add_(planner.contract(\"q[i]j -> p[i]j\", table, sizes={'p': 7}, q=q, p=d))"
    assert site.today.measured
    assert t.grad_fn.next_functions[0][0] is None  # the audit added nothing to it


def test_copied_bytes_are_the_rows_that_are_read(torch, arrays):
    x, down, table, q, d, t = (arrays[name] for name in ("x", "down", "table", "q", "d", "t"))
    with planner.audit() as report:
        torch.bmm(x[:, None], down[q])
        (x * table[q]).sum()
        t.index_add(0, d, table[q])
    assert {site.function: site.today.copied_bytes for site in report} == {
        "index_add": 3000 * 64 * 4,
        "matmul": 3000 * 64 * 16 * 4,
        "mul, sum": 3000 * 64 * 4,
    }


def test_calls_of_one_line_are_one_site(torch):
    x, w = torch.ones(8, 4), torch.ones(4, 5)
    with planner.audit() as report:
        for _ in range(7):
            torch.einsum("ij,jk->ik", x, w)
        torch.einsum(x, [0, 1], w, [1, 2], [0, 2])
    assert sorted(site.calls for site in report) == [1, 7]
    assert not report.waste
    assert report[0].calls == 7


def test_calls_of_one_line_in_several_shapes_are_one_site(torch):
    w = torch.ones(24, 64, 32, requires_grad=True)
    with planner.audit() as report:
        for rows in (1000, 1800, 1200, 1800):
            x, q = torch.ones(rows, 64), torch.arange(rows) % 24
            torch.einsum("bs,bsh->bh", x, w[q])
    (site,) = report
    assert (site.calls, site.shapes, site.naive.operands[0].shape) == (4, 3, (1800, 64))
    assert "4 calls, 3 shapes" in str(report)
    assert "4 calls, 3 shapes" in report.to_html()
    assert str(report).count("planner.contract") == 1


def test_the_letters_of_an_einsum_stay(torch):
    """Those of its axes do, even where they are what index arrays are called elsewhere."""
    x, w = torch.ones(6, 4), torch.ones(3, 4, 5)
    rows = torch.arange(6) % 3
    calls = {
        "bs,bsd->bd": "bs, q[b]sd -> bd",
        "qs,qsp->qp": "qs, r[q]sp -> qp",
        "Ns,N...s->N...": "Ns, q[N]is -> Ni",
    }
    for text, spec in calls.items():
        with planner.audit() as report:
            wanted = torch.einsum(text, x, (w.mT if "." in text else w)[rows])
        assert report[0].spec == spec
        names = {"x": x, "w": w, "x1": w.mT, "rows": rows}
        assert torch.equal(written(report[0].code, names), wanted)


# Before and after: milliseconds, megabytes of the peak, noise in milliseconds; and what is said.
VERDICTS = [
    ((10, 80, 0), (12, 10, 0), "leaner, 1.2x slower here"),
    ((10, 80, 2), (11.5, 10, 1), "leaner"),
    ((10, 80, 0), (5, 10, 0), "faster, leaner"),
    ((10, 80, 0), (5, 80, 0), "faster"),
    ((10, 80, 4), (7, 80, 2), ""),
    ((10, 80, 0), (5, 90, 0), ""),
    ((10, 80, 0), (9.5, 79, 0), ""),
]


@pytest.mark.parametrize(("before", "after", "said"), VERDICTS)
def test_memory_counts_whatever_the_time(torch, before, after, said):
    with planner.audit() as report:
        torch.einsum("ij,jk->ik", torch.ones(3, 4), torch.ones(4, 5))
    (site,) = report
    figures = [Figures(ms / 1e3, int(mb * 1e6), 0, 0, True, noise / 1e3) for ms, mb, noise in (before, after)]
    site = dataclasses.replace(site, today=figures[0], planned=figures[1])
    assert site.verdict == said
    assert site.wasteful == bool(said)
    for shown in (str(Audit((site,))), Audit((site,)).to_html()):
        assert "with planner" in shown
        assert said in shown


def test_forms_of_products(torch):
    """Views between the read and the product, products by any name, and sums of messages."""
    generator = torch.Generator().manual_seed(0)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    x, w, q = integers(-4, 5, 30, 8).float(), integers(-4, 5, 5, 8, 6).float(), integers(0, 5, 30)
    d, half = integers(0, 7, 30), integers(0, 3, 30)
    t, v = w.transpose(1, 2).contiguous(), w[:, :, 0].contiguous()
    row, column, columns = x[0, :, None], x[:, 0, None, None], integers(0, 6, 30)
    cases = [
        lambda: x[:, None] @ w[q],
        lambda: torch.einsum("ni,nij->nj", x, w[q]),
        lambda: torch.einsum("...i,...ij->...j", x, w[q]),
        lambda: torch.einsum(w[q], [0, 1, 2], x, [0, 1], [2, 0]),
        lambda: x.unsqueeze(1).bmm(t[q].transpose(1, 2)),
        lambda: x.unsqueeze(1).matmul(torch.index_select(t, 0, q).permute(0, 2, 1)),
        lambda: (torch.nn.functional.embedding(q, v) * x).sum(dim=1),
        lambda: (x * v[q]).sum((0, 1)),
        lambda: torch.zeros(7, 8, 6).index_add_(0, d, w[q] * column),
        lambda: torch.zeros(7, 8).index_add(dim=0, index=d, source=v[q]),
        lambda: x.unsqueeze(1) @ t[q].mT,
        lambda: x.unsqueeze(1) @ t[q].movedim(1, 2),
        lambda: w[..., columns] * row,
        lambda: v[q][:, None] * v[half][None],
    ]
    for call in cases:
        with planner.audit() as report:
            wanted = call()
        (site,) = report
        names = {"x": x, "w": w, "t": t, "v": v, "q": q, "d": d, "half": half}
        names |= {"row": row, "column": column, "columns": columns}
        found = written(site.code, names)
        assert found.shape == wanted.shape
        assert (found == wanted).all(), site.code
        assert site.plan.programs.variables[site.plan.programs.result].shape == wanted.shape


def test_a_sum_completes_its_product(torch):
    x, c, q = torch.ones(50, 8), torch.ones(9, 8), torch.arange(50) % 9
    with planner.audit() as report:
        whole = x * c[q]
        whole.sum(-1)
        _ = x * c[q]
    assert [(site.function, site.calls) for site in report] in (
        [("mul, sum", 1), ("mul", 1)],
        [("mul", 1), ("mul, sum", 1)],
    )


def test_unusual_calls_are_left_out(torch):
    """An audit changes no result, and stops no program."""
    x = torch.arange(12.0).reshape(3, 4)
    with planner.audit() as report:
        assert (x[x > 5] * 2).sum() == 2 * sum(range(6, 12))
        assert (x[[0, 1]] * x[torch.tensor([1, 2])][:, :4:1]).shape == (2, 4)
        assert (x[torch.tensor([0]), torch.tensor([1])] * 3).item() == 3
        assert torch.einsum("ii->i", x[:3, :3]).shape == (3,)
        with pytest.raises(RuntimeError):
            torch.einsum("ij,jk->ik", x, x)
    assert {site.function for site in report} <= {"mul", "einsum"}


def test_an_error_of_the_program_comes_through(torch):
    with pytest.raises(ZeroDivisionError), planner.audit() as report:
        raise ZeroDivisionError
    assert len(report) == 0


def test_what_was_measured_is_said(torch):
    x, w = torch.ones(2000, 1, 64), torch.ones(16, 64, 48, requires_grad=True)
    q = torch.arange(2000) % 16

    def audited(measure):
        with planner.audit(measure=measure) as report:
            torch.bmm(x, w[q])
        return report

    report, page = audited(True), audited(True).to_html()
    assert report[0].today.seconds > report[0].planned.seconds > 0
    rows = ElementTree.fromstring(Audit((report[0],)).to_html().partition("<tbody>")[2].partition("</tbody>")[0])
    cells = [(cell.text, cell[0].text) for cell in rows.iter("td") if len(cell)]
    today, planned = (figure_texts(each, [report[0]]) for each in (report[0].today, report[0].planned))
    assert cells == list(zip(today, planned, strict=True))
    said = "Time, peak and retained bytes are measured by running each call again."
    assert said in str(report)
    assert said in page
    assert "All figures are predicted" in str(audited(False))
    assert "All figures are predicted" in audited(False).to_html()
    predicted = audited(False)[0]
    mixed = Audit((report[0], predicted))
    assert "again, but for those with a ~, which are predicted." in str(mixed)
    assert str(mixed).count("~") == 1 + 2 * 3


def test_a_site_that_cannot_run_again_is_predicted(torch, monkeypatch):
    """What the calls raise when they run again is no error of the program."""

    def fail(step, values):
        raise MemoryError("no room\nfor it")

    x, c, q = torch.ones(8, 6), torch.ones(5, 6), torch.arange(8) % 5
    said = "when its calls ran again: MemoryError: no room"
    with monkeypatch.context() as failing:
        failing.setattr("planner.audits.measure.replay", fail)
        with planner.audit(measure=True) as report:
            for _ in range(2):
                x * c[q]
    for shown in (str(report), report.to_html()):
        assert shown.count(f"{report[0].place}: predicted; {said}") == 1
        assert "for it" not in shown
    with monkeypatch.context() as blind:
        blind.setattr(TorchWatch, "today", lambda *_: None)
        with planner.audit(measure=True) as unseen:
            x * c[q]
    for shown in (str(unseen), unseen.to_html()):
        assert f"{unseen[0].place}: predicted; not all calls between its arrays and the result were seen" in shown
    with planner.audit() as asked_for_none:
        x * c[q]
    assert "predicted;" not in str(asked_for_none)
    (site,) = report
    assert not site.today.measured
    assert site.today.peak_bytes == site.naive.cost.forward.peak_bytes - 8 * 8  # no copy of the index array


def test_measured_figures_of_jax(jnp, jax):
    """The recorded equations run together, jitted, and compute what the function computed."""

    def function(a, c, q, d):
        rows = c[q]
        weights = (a * rows).sum(-1)
        return jax.ops.segment_sum(rows * weights[:, None], d, 7) + (a.T @ rows)[:7]

    random = np.random.default_rng(0)
    a, c = (jnp.asarray(random.integers(-3, 4, shape), "float32") for shape in ((500, 60), (50, 60)))
    q, d = (jnp.asarray(random.integers(0, n, 500), "int32") for n in (50, 7))
    report = planner.audit(function, a, c, q, d, measure=True)
    assert report.unread == {}
    assert all(site.today.measured for site in report), report
    for function in (jax.jit(lambda a, c, q: (a * c[q]).sum(-1)), lambda a, c, q: (a * jnp.take(c, q, axis=0)).sum(-1)):
        record = Record()
        read_jaxpr(function, (a, c, q), {}, record)
        (call,) = record
        problem = call.problem
        arrays = (*problem.operands, *problem.indices.values())
        names = {"a": a, "c": c, "q": q}
        values = {array.identity: names[array.name] for array in arrays}
        assert (replay(call.today.step, values) == function(a, c, q)).all()


def test_a_product_under_autocast_is_planned_in_its_dtype(torch):
    x, w, q = torch.ones(8, 1, 6), torch.ones(5, 6, 4), torch.arange(8) % 5
    with planner.audit() as report, torch.autocast("cpu", torch.bfloat16):
        torch.bmm(x, w[q])
    assert report[0].plan.dtype == "bfloat16"


def test_jax(jnp, jax):
    def loss(params, x, q, d):
        h = jnp.einsum("ni,nij->nj", x, params["w"][q])  # planted: jax
        weights = (h * params["e"][q]).sum(-1)
        return jax.ops.segment_sum(h[d] * weights[d][:, None], d, 7).sum()

    params = {"w": jnp.ones((16, 48, 40)), "e": jnp.ones((16, 40))}
    x, q, d = jnp.ones((2000, 48)), jnp.arange(2000) % 16, jnp.arange(900) % 7
    for function in (loss, jax.jit(loss)):
        report = planner.audit(function, params, x, q, d)
        found = {site.spec: site for site in report}
        assert found["ij, q[i]jk -> ik"].code == "planner.contract(\"ij, q[i]jk -> ik\", x, params['w'], q=q)"
        assert found["ij, q[i]jk -> ik"].wasteful
        assert found["ij, q[i]jk -> ik"].place.line == line_of("planted: jax")
        assert "ij, q[i]j -> i" in found
        assert {site.function for site in report} == {"dot_general", "mul, sum", "scatter_add"}

    def scanned(w, xs, q):
        return jax.lax.scan(lambda carry, x: (carry + (x[:, None] @ w[q]).sum(), None), 0.0, xs)[0]

    (site,) = planner.audit(scanned, jnp.ones((16, 48, 40)), jnp.ones((3, 2000, 48)), q)
    assert site.function == "dot_general"
    assert site.wasteful
    with pytest.raises(planner.PlannerTypeError, match="takes a function of JAX arrays"):
        planner.audit(3)
    with pytest.raises(planner.PlannerTypeError, match="for a function only"):
        planner.audit(x=3)


def test_products_of_a_gradient_in_jax_are_those_of_their_line(jnp, jax):
    def layer(x, w, q):
        return jnp.einsum("ni,nij->nj", x, w[q])  # planted: backward

    def loss(x, w, q):
        return layer(x, w, q).sum() + jax.jit(layer)(2 * x, w, q).sum()

    x, w, q = jnp.ones((3000, 48)), jnp.ones((16, 48, 40)), jnp.arange(3000) % 16
    report = planner.audit(jax.grad(loss), x, w, q)
    line = line_of("planted: backward")
    (backward,) = (site for site in report.waste if site.backward)
    assert (backward.place.line, backward.code, backward.calls) == (line, "", 2)
    for shown in (str(report), report.to_html()):
        assert f"backward of line {line}: goes when line {line} is changed" in shown
    assert str(report).count("planner.contract") == len(report.waste) - 1
    gradient = jax.grad(lambda x, w, v: layer(x, w, v).sum())
    alone = Audit(tuple(site for site in planner.audit(gradient, x, w, q) if site.backward or not site.wasteful))
    assert f"line {line} is changed\n" in f"{alone}\n"
    forward = dataclasses.replace(alone[0], backward=False, code="instead()", planned=alone[0].today)
    assert f"line {line} is changed, to instead()" in str(Audit((*alone, forward)))
    assert not any(site.backward for site in planner.audit(loss, x, w, q))


def test_a_function_of_torch_is_refused(torch):
    for function, args in ((torch.relu, (torch.ones(3),)), (torch.nn.Linear(3, 4), ())):
        with pytest.raises(planner.PlannerTypeError, match=r"in torch, .* `with planner.audit\(\) as report:`"):
            planner.audit(function, *args)


def test_a_script_from_the_shell(torch, tmp_path):
    script, page = tmp_path / "model.py", tmp_path / "audit.html"
    script.write_text(
        textwrap.dedent("""
            import sys
            import torch
            x, w = torch.ones(4000, 1, 64), torch.ones(16, 64, 64, requires_grad=True)
            q = torch.arange(4000) % 16
            def main():
                torch.bmm(x, w[q]).sum().backward()
                print("the script's own", sys.argv[1:])
            sys.exit(main())
        """)
    )
    program = "import sys; from planner.cli import main; sys.exit(main(sys.argv[1:]))"
    shown = run_python(program, "audit", "--html", page, script, "--steps", "3")
    assert shown.startswith("the script's own ['--steps', '3']\n1 site, 1 call; planner would change 1")
    assert 'planner.contract("ijk, q[i]kl -> ijl", x, w, q=q)' in shown
    assert "model.py:7" in shown
    text = page.read_text(encoding="utf-8")
    assert 'data-wasteful="true"' in text
    assert "Both plans" in text
    assert "1 site, 1 call; planner would change 1." in text


# --- no line is wrong -----------------------------------------------------------------------------

TORCH_PROGRAMS = """
w = (p := a * b[q]).clone(); p.mul_(2); y = p.sum(-1)         | mul
rows = b[q]; b.zero_(); y = a * rows                          |
rows = b[q]; q.add_(-1).abs_(); y = a * rows                  |
rows = b[q]; rows.add_(1); y = a * rows                       |
v = b[:]; rows = b[q]; v[0] = 7; y = a * rows                 |
rows = b[:][q]; b[0] = 7; y = a * rows                        |
y = (a * g[q]).sum(-1)                                        | mul, sum
y = (a * b[q]).sum(axis=-1)                                   | mul, sum
y = (a * b[q]).sum(0)                                         | mul, sum
y = (a * b[q]).sum()                                          | mul, sum
w = a * b[q]; y = w.sum(-1, True)                             | mul
w = a * b[q]; y = w.sum(-1, keepdims=True)                    | mul
w = a * b[q]; y = w.sum(dtype=torch.float64)                  | mul
w = a * b[q]; y = w.sum(dim=())                               | mul
u, v = a.int(), b.int(); w = u * v[q]; y = w.sum(-1)          | mul
y = t.index_add(0, d, b[q])                                   | index_add
y = t.index_add(0, d, a * b[q])                               | index_add
y = z.index_add_(0, d, b[q])                                  | index_add
u = torch.zeros(7, 6); y = u.index_add(0, d, b[q])            | index_add
y = torch.zeros_like(t).index_add_(0, d, b[q])                | index_add
u = t.new_zeros(7, 6); u[1] = 2; y = u.index_add(0, d, b[q])  | index_add
y = t.index_add(0, d, b[q], alpha=2)                          |
rows = b; rows = rows[q]; y = a * rows                        | mul
y = model(a, q)                                               | mul
y = a * model.part.weight[q]                                  | mul
y = a * F.embedding(q, b, padding_idx=1)                      |
y = a * F.embedding(q, b)                                     | mul
"""


@pytest.mark.parametrize("row", TORCH_PROGRAMS.strip().splitlines())
def test_the_lines_of_torch_programs(torch, row, tmp_path):
    """The code of the site computes what the line computed. Where that is in doubt, there is no site."""
    program, _, function = (part.strip() for part in row.partition("|"))
    names = torch_names(torch)
    given = {name: x.detach().clone() for name, x in names.items() if isinstance(x, torch.Tensor)}
    with planner.audit() as report:
        names = run_text(program, names, tmp_path)
    assert report.unread == {}
    assert [site.function for site in report] == [function] * bool(function)
    for site in report:
        code = site.code.replace("self.", "model.")
        assert not re.search(r"\bx\d", code), code
        assert torch.equal(value_of(code, {**names, **given}, tmp_path), names.get("w", names["y"]))


def run_text(text, names, folder):
    """Run a program that knows names, and return what it has at its end."""
    file = folder / "program.py"
    file.write_text(text, encoding="utf-8")
    return runpy.run_path(str(file), names)


def value_of(text, names, folder):
    """The value of an expression."""
    return run_text(f"value = {text}", names, folder)["value"]


def torch_names(torch):
    """What the programs of the table know."""
    generator = torch.Generator().manual_seed(0)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    class Part(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(integers(-4, 5, 5, 6).float())

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Part()

        def forward(self, a, q):
            return a * self.part.weight[q]

    names = {"a": integers(-4, 5, 8, 6).float(), "b": integers(-4, 5, 5, 6).float(), "t": integers(1, 5, 7, 6).float()}
    names |= {"q": integers(0, 5, 8), "d": integers(0, 7, 8), "g": integers(-4, 5, 5, 6).float().requires_grad_()}
    names["z"] = names["t"].clone()
    return {**names, "model": Model(), "torch": torch, "F": torch.nn.functional, "planner": planner}


def test_a_name_holds_another_array_by_then(torch):
    """A line is written with the names that hold at the line of the product."""
    x, c, q = torch.ones(8, 6), torch.ones(5, 6), torch.arange(8) % 5

    def multiply_rows(factor, pool):
        pool = pool[q]
        return factor * pool

    with planner.audit() as report:
        multiply_rows(x, c[:])
    assert report[0].code == 'planner.contract("ij, q[i]j -> ij", factor, x1, q=q)'


def test_rows_without_gradients_stay_so(torch):
    x, c, q = torch.ones(8, 6), torch.ones(5, 6, requires_grad=True), torch.arange(8) % 5
    with planner.audit() as report:
        with torch.no_grad():
            rows = c[q]
        x * rows
    assert len(report) == 0


def test_tensors_that_count_no_changes_are_not_remembered(torch):
    with torch.inference_mode(), planner.audit() as report:
        x, c, q = torch.ones(8, 6), torch.ones(5, 6), torch.arange(8) % 5
        rows = c[q]
        c.zero_()
        x * rows
        torch.einsum("ij,kj->ik", x, c)
    assert [site.function for site in report] == ["einsum"]


JAX_PROGRAMS = {
    "x[q] * a": "",
    "w[q + 1] * a": None,
    "c[jnp.where(q > 2, q, 0)] * a": None,
    "c[q + r] * a": None,
    "c[q.reshape(2, 4).T.reshape(8)] * a": None,
    "c[jnp.concatenate([q, q])[:8]] * a": None,
    "c[jnp.clip(q, 0, 2)] * a": None,
    "c[q.astype(jnp.int8)] * a": None,
    "c[jnp.where(q < 0, q + 3, q)] * a": None,
    "c[q] * a": "",
    "c.at[q].get(mode='fill') * a": "nan",
    "c.at[q].get(mode='fill', fill_value=0) * a": None,
    "c.at[q].get(mode='clip') * a": None,
    "jnp.take(c, q, axis=0) * a": "nan",
    "jnp.take(c, q, axis=0, mode='clip') * a": "clip",
    "jnp.take(c.T, q, axis=1, mode='clip') * a.T": "clip",
    "(c[q] * a).sum(-1)": "",
    "jnp.broadcast_to((c[q] * a)[None], (5, 8, 6)).sum(0)": None,
    "jnp.zeros((7, 6)).at[d].add(c[q])": "nan",
    "t.at[d].add(c[q])": None,
    "jnp.zeros((7, 6)).at[d].add(c[q], mode='clip')": None,
    "jax.ops.segment_sum(c[q], d, 7)": "drop",
    "jax.ops.segment_sum(h[d] * a, d, 7)": "drop",
    "jax.ops.segment_sum(c[q] * a, d, 7, mode='clip')": "clip",
    "helper(c, q, a) + helper(x, r, a)": "",
}


@pytest.mark.parametrize("program", JAX_PROGRAMS)
def test_the_lines_of_jax_programs(jnp, jax, program, tmp_path):
    """The code computes what the program computed, for positions out of range too if the program allows them."""
    random = np.random.default_rng(0)
    shapes = {"x": (9, 6), "w": (9, 6), "c": (5, 6), "a": (8, 6), "t": (7, 6), "h": (8, 6)}
    names = {name: jnp.asarray(random.integers(-4, 5, shape), "float32") for name, shape in shapes.items()}
    mode = JAX_PROGRAMS[program]
    promised = "[q]" in program or "[d]" in program or "helper" in program
    low, high = (-5, 5) if promised else (-9, 9)
    names["q"] = jnp.asarray(random.integers(low, high, 8), "int32")
    names["r"] = jnp.asarray(random.integers(0, 4, 8), "int32")
    names["d"] = jnp.asarray(
        random.integers(-8 if "h[d]" in program else -9, 8 if "h[d]" in program else 9, 8), "int32"
    )
    helper = jax.jit(lambda pool, rows, factor: (pool[rows] * factor).sum(-1))
    outer = {"jnp": jnp, "jax": jax, "planner": planner, "helper": helper, **names}
    function = value_of(f"lambda {', '.join(names)}: {program}", outer, tmp_path)
    report = planner.audit(function, *names.values())
    assert report.unread == {}
    if mode is None:  # the product before a sum may be a site of its own
        assert [site.function for site in report] == ["mul"] * ("sum(0)" in program)
        return
    found = [value_of(site.code, outer, tmp_path) for site in report]
    assert len(found) == 1 + ("helper" in program)
    assert all((f'index_mode="{mode}"' if mode else "") in site.code for site in report)
    assert mode or "index_mode" not in report[0].code
    np.testing.assert_array_equal(sum(found), function(*names.values()))


def test_a_jitted_helper_is_read_afresh(jnp, jax):
    """The second call reads rows that the program computes: nothing of the first call is left."""
    helper = jax.jit(lambda pool, rows, factor: (pool[rows] * factor).sum(-1))
    random = np.random.default_rng(0)
    c, a = (jnp.asarray(random.integers(-4, 5, shape), "float32") for shape in ((5, 6), (8, 6)))
    q = jnp.arange(8) % 5
    report = planner.audit(lambda c, q, a: helper(c, q, a) + helper(c, q * q % 5, a), c, q, a)
    assert [(site.calls, site.function) for site in report] == [(1, "mul, sum")]


# --- programs go on -------------------------------------------------------------------------------


def test_an_audit_stops_no_program(torch):
    """Objects whose attributes raise are passed over, and `torch.compile` captures whole functions."""

    class Proxy:
        @property
        def __dict__(self):
            raise RuntimeError("no context")

    proxy = Proxy()
    x, c, q = torch.ones(8, 6), [torch.ones(5, 6)], torch.arange(8) % 5
    step = torch.compile(lambda x, c, q: x * c[q], fullgraph=True, backend="eager")
    with planner.audit() as report:
        assert (step(x, c[0], q) == 1).all()
        x * c[0][q]
    assert isinstance(proxy, Proxy)
    assert 'planner.contract("ij, q[i]j -> ij", x, x1, q=q)' in [site.code for site in report]


def test_a_program_that_ends_has_a_report(torch):
    x, c, q = torch.ones(8, 6), torch.ones(5, 6), torch.arange(8) % 5

    def program():
        x * c[q]
        sys.exit(3)

    with pytest.raises(SystemExit), planner.audit() as report:
        program()
    assert len(report) == 1


def test_a_naive_plan_is_compared_with_no_other():
    plan = planner.plan("ij, jk, kl -> il", (64, 8), (8, 64), (64, 64), backend="numpy")
    assert len(planner.compare(plan)) == 2
    assert len(planner.compare(plan.naive)) == 1


# --- expressions ----------------------------------------------------------------------------------


def array(*shape):
    return Expression.of(Array(Operand(shape)))


@pytest.mark.parametrize(
    ("left", "right", "spec", "shape"),
    [
        ((3, 4), (4, 5), "ij, jk -> ik", (3, 5)),
        ((4,), (4, 5), "i, ij -> j", (5,)),
        ((3, 4), (4,), "ij, j -> i", (3,)),
        ((4,), (4,), "i, i -> ", ()),
        ((2, 3, 4), (4, 5), "ijk, kl -> ijl", (2, 3, 5)),
        ((3, 4), (7, 4, 5), "ij, kjl -> kil", (7, 3, 5)),
        ((7, 1, 3, 4), (2, 4, 5), "ijkl, jlm -> ijkm", (7, 2, 3, 5)),
    ],
)
def test_matmul_is_numpys(left, right, spec, shape):
    product = matmul(array(*left), array(*right))
    assert problem_of(product).spec == spec
    assert product.shape == shape == (np.ones(left) @ np.ones(right)).shape
    values = [np.arange(np.prod(s)).reshape(s) % 5 for s in (left, right)]
    assert (planner.contract(spec, *values) == values[0] @ values[1]).all()


def test_products_that_do_not_fit_are_none():
    assert matmul(array(3, 4), array(5, 6)) is None
    assert multiply(array(3), array(4)) is None
    assert matmul(array(), array(3)) is None
    assert contract([(array(3), "a"), (array(4), "a")], "a") is None


def test_an_array_may_stand_in_a_product_twice():
    x = array(3, 3)
    assert problem_of(matmul(x, x)).spec == "ij, jk -> ik"
    assert problem_of(multiply(x, x.permuted((1, 0)))).spec == "ij, ji -> ij"


def test_one_index_array_has_one_letter():
    q = Array(Operand((6,), "int64"), "rows")
    both = multiply(array(5, 2).take(0, q), array(7, 2).take(0, q))
    problem = problem_of(both)
    assert problem.spec == "q[i]j, q[i]j -> ij"
    assert problem.code == 'planner.contract("q[i]j, q[i]j -> ij", x0, x1, q=rows)'
