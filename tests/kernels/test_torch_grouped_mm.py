"""torch's own grouped product as rows for a card: where it is taken and priced; its values are in `test_grouped.py`."""

import dataclasses

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not hasattr(torch.nn.functional, "grouped_mm"):
    pytest.skip("this torch has no grouped_mm", allow_module_level=True)

import planner  # noqa: E402
from planner.cost.device import A100, CPU, H100, H200  # noqa: E402
from planner.cost.layout import layout_of  # noqa: E402
from planner.kernels.grouped_matmul import torch_grouped, torch_grouped_mm  # noqa: E402
from planner.program.frameworks import load_backend  # noqa: E402
from planner.program.ops import Einsum  # noqa: E402

SPEC = "nij, q[n]jk -> nik"


def problem(seed, n, i, j, k, groups):
    """Rows, matrices, an output gradient, and groups, the last of which is dropped; what is dropped is NaN."""
    made = torch.Generator().manual_seed(seed)

    def small(*shape):
        return torch.randint(-2, 3, shape, generator=made).bfloat16()

    q = torch.randint(0, groups + 1, (n,), generator=made)
    a, c, gradient = small(n, i, j), small(groups, k, j).transpose(1, 2), small(n, i, k)
    a[q == groups] = torch.nan
    return q, a, c, gradient


def choices(spec, *operands, dtype="bfloat16", **indices):
    """Seconds of each row that runs the forward step on an H200, or why it does not."""
    plan = planner.plan(spec, *(planner.Operand(shape, dtype) for shape in operands), backend="torch", **indices)
    return load_backend("torch").table.verdicts(Einsum(plan.resolved.spec, dtype), H200)


@pytest.mark.parametrize(
    ("shapes", "dtype", "reason"),
    [
        (((90, 1, 8), (7, 8, 8)), "float32", "does not multiply float32"),
        (((90, 1, 8), (1024, 8, 8)), "bfloat16", "1 to 1,023 groups"),
        (((90, 1, 12), (7, 12, 8)), "bfloat16", "multiples of 8"),
        (((0, 1, 8), (7, 8, 8)), "bfloat16", "1 to 2^31 - 1 rows"),
        (((2**31, 1, 8), (7, 8, 8)), "bfloat16", "1 to 2^31 - 1 rows"),
    ],
)
def test_what_it_is_not_asked_for(shapes, dtype, reason):
    found = choices(SPEC, *shapes, dtype=dtype, q=(shapes[0][0],))
    assert reason in found["grouped matmul, grouped_mm"]


def test_shared_rows_and_matrices_that_lie_apart_are_refused():
    assert choices("ij, q[n]jk -> nik", (3, 8), (7, 8, 8), q=(90,))["grouped matmul, grouped_mm"] == (
        "the rows' operand has no row axis"
    )
    assert (
        "shared or summed" in choices("nij, q[n]jk -> ik", (90, 3, 8), (7, 8, 8), q=(90,))["grouped matmul, grouped_mm"]
    )
    assert (
        "one after the other"
        in choices("nij, j q[n] k -> nik", (90, 1, 8), (8, 7, 8), q=(90,))["grouped matmul, grouped_mm"]
    )


@pytest.mark.parametrize(
    ("strides", "taken"),
    [((64, 8, 1), True), ((64, 1, 8), True), ((8, 56, 1), False), ((128, 16, 1), False), ((64, 8, 0), False)],
)
def test_matrices_lie_by_rows_or_by_columns(strides, taken):
    """One after the other, without gaps."""
    op = Einsum(planner.resolve(SPEC, (90, 1, 8), (7, 8, 8), q=(90,)), "bfloat16")
    laid = op.with_layouts((None, layout_of((7, 8, 8), strides)))
    found = load_backend("torch").table.verdicts(laid, H200)["grouped matmul, grouped_mm"]
    assert isinstance(found, str) != taken


def test_only_cards_that_do_not_wait_take_it():
    found = [
        load_backend("torch").table.verdicts(
            Einsum(planner.resolve(SPEC, (90, 1, 8), (7, 8, 8), q=(90,)), "bfloat16"), device
        )
        for device in (H100, A100, planner.Device("mine", 1e13, 1e12, kind="cuda"), CPU)
    ]
    assert not isinstance(found[0]["grouped matmul, grouped_mm"], str)
    for refused in found[1:3]:
        assert refused["grouped matmul, grouped_mm"] == "it runs on compute capability 9.0 and 10.0"
    assert found[3]["grouped matmul, grouped_mm"] == "it runs on cuda"


def test_products_of_halves_have_a_rate_of_their_own():
    assert H200.product_rate(512, 512, 512, "bfloat16") == H200.half_rate > H200.product_rate(512, 512, 512)
    assert CPU.product_rate(512, 512, 512, "bfloat16") == CPU.product_rate(512, 512, 512)
    seconds = [
        choices(SPEC, (4096, 1, 4096), (4, 4096, 4096), dtype=dtype, q=(4096,)) for dtype in ("float32", "float16")
    ]
    assert seconds[0]["grouped matmul, Triton"].picoseconds > 5 * seconds[1]["grouped matmul, Triton"].picoseconds


def test_it_is_taken_for_large_matrices_and_priced_beside_the_kernels():
    """Its copies of rows cost more than it saves where matrices are small."""
    large = choices(SPEC, (32_768, 1, 2048), (32, 2048, 2048), q=(32_768,))
    small = choices(SPEC, (131_072, 1, 64), (1000, 64, 64), q=(131_072,))
    for found, faster, slower in ((large, "grouped_mm", "Triton"), (small, "Triton", "grouped_mm")):
        seconds = [found[f"grouped matmul, {name}"].picoseconds for name in (faster, slower)]
        assert seconds[0] < seconds[1]


@pytest.mark.parametrize("kind", ["aligned", "offset", "strided", "expanded", "padded"])
def test_plans_that_take_it_equal_others(monkeypatch, kind):
    """On operands of other strides than were planned for, too: those that torch does not take go to the kernel."""
    if kind != "aligned":  # the interpreter multiplies the bits of bfloat16
        monkeypatch.setattr(torch_grouped_mm, "_kernels", lambda: torch_grouped)
    q, a, c, gradient = problem(3, 90, 2, 16, 8, 5)
    buffer = torch.zeros(5 * 16 * 20, dtype=torch.bfloat16)
    if kind == "expanded":
        c = c[:, :, :1].expand(5, 16, 8)
    else:
        strides = {"aligned": (128, 8, 1), "offset": (128, 8, 1), "strided": (256, 16, 2), "padded": (192, 12, 1)}[kind]
        c = buffer.as_strided((5, 16, 8), strides, int(kind == "offset")).copy_(c)
    a, c = a.nan_to_num().requires_grad_(), c.requires_grad_()
    options = {"q": q, "sizes": {"q": 5}, "index_mode": "drop"}
    given = (planner.Operand(x.shape, "bfloat16", requires_grad=True) for x in (a, c))
    plan = planner.plan(SPEC, *given, backend="torch", device="H200", minimize="peak", **options)
    table = load_backend("torch").table
    expected = planner.contract(SPEC, a, c, **options)
    wanted = torch.autograd.grad(expected, (a, c), gradient)
    programs, changed = plan.programs, {}
    for name in ("forward", "backward"):
        program, steps = getattr(programs, name), []
        for step in program.steps:
            found = [x for x in table.choices(step.op, H200) if x.lowering.endswith("grouped_mm")]
            steps.append(dataclasses.replace(step, choice=found[0]) if found else step)
        changed[name] = dataclasses.replace(program, steps=tuple(steps))
    names = [step.choice.lowering for program in changed.values() for step in program.steps]
    assert sum(name.endswith("grouped_mm") for name in names) >= 2
    plan = dataclasses.replace(plan, programs=dataclasses.replace(programs, **changed))
    result = plan(a, c, q=q)
    assert torch.equal(result, expected)
    assert all(map(torch.equal, torch.autograd.grad(result, (a, c), gradient), wanted))
