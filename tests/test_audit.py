"""Audits of models with planted waste, and of clean ones: what is found, where, what it costs, and what to write."""

import ast
import re
import textwrap

import numpy as np
import pytest
from conftest import run_python

import planner
from planner.audits.expression import Array, Expression, contract, matmul, multiply, problem_of
from planner.inspect.memory import torch_backward_memory, torch_memory
from planner.language.spec import Operand


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
        whole = torch.randn(16, 256, 96, generator=generator, requires_grad=True)
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


def test_bytes_are_those_of_the_changed_program(torch):
    """The code to write runs, returns what the program returned, and takes what the audit said."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (2000, 64), generator=generator).float().requires_grad_()
    w = torch.randint(-3, 4, (16, 64, 64), generator=generator).float().requires_grad_()
    q = torch.randint(0, 16, (2000,), generator=generator)
    with planner.audit() as report:
        wanted = torch.einsum("ni,nij->nj", x, w[q])
    (site,) = report
    assert site.code == 'planner.contract("ij, q[i]jk -> ik", x, w, q=q)'

    def changed():
        return written(site.code, {"x": x, "w": w, "q": q})

    assert (changed() == wanted).all()
    found = torch_memory(changed)[1]
    assert found.retained_bytes == pytest.approx(site.plan.cost.retained_bytes, rel=0.05)
    assert found.peak_bytes == pytest.approx(site.plan.cost.forward.peak_bytes, rel=0.05)
    _, back = torch_backward_memory(changed, (x, w), torch.ones(2000, 64))
    assert back.peak_bytes == pytest.approx(site.plan.cost.backward.peak_bytes, rel=0.05)

    def today():
        return torch.einsum("ni,nij->nj", x, w[q])

    today()
    assert site.copied_bytes == 2000 * 64 * 64 * 4
    assert torch_memory(today)[1].retained_bytes == pytest.approx(site.naive.cost.retained_bytes, rel=0.05)


def test_calls_of_one_line_are_one_site(torch):
    x, w = torch.ones(8, 4), torch.ones(4, 5)
    with planner.audit() as report:
        for _ in range(7):
            torch.einsum("ij,jk->ik", x, w)
        torch.einsum(x, [0, 1], w, [1, 2], [0, 2])
    assert sorted(site.calls for site in report) == [1, 7]
    assert not report.waste
    assert report[0].calls == 7


def test_forms_of_products(torch):
    """Views between the read and the product, products by any name, and sums of messages."""
    x, w, q = torch.ones(30, 8), torch.ones(5, 8, 6), torch.arange(30) % 5
    d, half = torch.arange(30) % 7, q // 2
    t, v = w.transpose(1, 2).contiguous(), w[:, :, 0].contiguous()
    cases = [
        lambda: x[:, None] @ w[q],
        lambda: torch.einsum("ni,nij->nj", x, w[q]),
        lambda: torch.einsum("...i,...ij->...j", x, w[q]),
        lambda: torch.einsum(w[q], [0, 1, 2], x, [0, 1], [2, 0]),
        lambda: x.unsqueeze(1).bmm(t[q].transpose(1, 2)),
        lambda: x.unsqueeze(1).matmul(torch.index_select(t, 0, q).permute(0, 2, 1)),
        lambda: (torch.nn.functional.embedding(q, v) * x).sum(dim=1),
        lambda: (x * v[q]).sum((0, 1)),
        lambda: torch.zeros(7, 8, 6).index_add_(0, d, w[q] * x[:, 0, None, None]),
        lambda: torch.zeros(7, 8).index_add(dim=0, index=d, source=v[q]),
        lambda: w[..., q % 6] * x[0, :, None],
        lambda: v[q][:, None] * v[half][None],
    ]
    for call in cases:
        with planner.audit() as report:
            wanted = call()
        (site,) = report
        names = {"x": x, "w": w, "t": t, "v": v, "q": q, "d": d, "half": half}
        if not re.search(r"\bx\d", site.code):  # all names were found
            assert torch.equal(written(site.code, names), wanted), site.code
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


def test_measured_times(torch):
    x, w = torch.ones(2000, 1, 64), torch.ones(16, 64, 48, requires_grad=True)
    q = torch.arange(2000) % 16
    with planner.audit(measure=True) as report:
        torch.bmm(x, w[q])
    (site,) = report
    assert site.seconds == (site.times.now, site.times.planned)
    assert site.times.now > site.times.planned > 0


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


def test_a_script_from_the_shell(torch, tmp_path):
    script, page = tmp_path / "model.py", tmp_path / "audit.html"
    script.write_text(
        textwrap.dedent("""
            import sys
            import torch
            x, w = torch.ones(4000, 1, 64), torch.ones(16, 64, 64, requires_grad=True)
            q = torch.arange(4000) % 16
            torch.bmm(x, w[q]).sum().backward()
            print("the script's own", sys.argv[1:])
        """)
    )
    program = "import sys; from planner.cli import main; sys.exit(main(sys.argv[1:]))"
    shown = run_python(program, "audit", "--html", page, script, "--steps", "3")
    assert shown.startswith("the script's own ['--steps', '3']\n1 site, 1 call; planner would change 1")
    assert 'planner.contract("ijk, q[i]kl -> ijl", x, w, q=q)' in shown
    assert "model.py:6" in shown
    text = page.read_text(encoding="utf-8")
    assert 'data-wasteful="true"' in text
    assert "Both plans" in text


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
