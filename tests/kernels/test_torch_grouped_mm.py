"""torch's own grouped product as rows for a card: where it is taken and priced; its values are in `test_grouped.py`."""

import dataclasses
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not hasattr(torch.nn.functional, "grouped_mm"):
    pytest.skip("this torch has no grouped_mm", allow_module_level=True)

from grouped_laws import steps_agree  # noqa: E402

import planner  # noqa: E402
from planner.backends.torch import backend as torch_backend  # noqa: E402
from planner.cost.device import A100, CPU, H100, H200  # noqa: E402
from planner.cost.layout import layout_of  # noqa: E402
from planner.inspect.verdicts import table_verdicts  # noqa: E402
from planner.kernels.grouped_matmul import torch_grouped, torch_grouped_mm  # noqa: E402
from planner.kernels.grouping import torch_grouping  # noqa: E402
from planner.program.frameworks import load_backend  # noqa: E402
from planner.program.ops import Einsum  # noqa: E402

SPEC, NAME = "nij, q[n]jk -> nik", "grouped matmul, grouped_mm"


def verdicts(spec, *shapes, dtype="bfloat16", device=H200, layouts=None, rows=0):
    """Seconds of each row that runs a step on a device, or why it does not; by the last word of the row's name."""
    resolved = planner.resolve(spec, *(planner.Operand(x, dtype) for x in shapes), q=(rows or shapes[0][0],))
    op = Einsum(resolved, dtype)
    return table_verdicts(load_backend("torch").table, op.with_layouts(layouts) if layouts else op, device)


@pytest.mark.parametrize(
    ("spec", "shapes", "dtype", "reason"),
    [
        (SPEC, ((90, 1, 8), (7, 8, 8)), "float32", "does not multiply float32"),
        (SPEC, ((90, 1, 8), (1024, 8, 8)), "bfloat16", "1 to 1,023 groups"),
        (SPEC, ((90, 1, 12), (7, 12, 8)), "bfloat16", "multiples of 8"),
        (SPEC, ((0, 1, 8), (7, 8, 8)), "bfloat16", "1 to 2^31 - 1 rows"),
        (SPEC, ((2**31, 1, 8), (7, 8, 8)), "bfloat16", "1 to 2^31 - 1 rows"),
        ("ij, q[n]jk -> nik", ((3, 8), (7, 8, 8)), "bfloat16", "the rows' operand has no row axis"),
        ("nij, q[n]jk -> ik", ((90, 3, 8), (7, 8, 8)), "bfloat16", "shared or summed"),
        ("nij, j q[n] k -> nik", ((90, 1, 8), (8, 7, 8)), "bfloat16", "one after the other"),
    ],
)
def test_what_it_is_not_asked_for(spec, shapes, dtype, reason):
    assert reason in verdicts(spec, *shapes, dtype=dtype)[NAME]


@pytest.mark.parametrize(
    ("strides", "taken"),
    [((64, 8, 1), True), ((64, 1, 8), True), ((8, 56, 1), False), ((128, 16, 1), False), ((64, 8, 0), False)],
)
def test_matrices_lie_by_rows_or_by_columns(strides, taken):
    """One after the other, without gaps."""
    found = verdicts(SPEC, (90, 1, 8), (7, 8, 8), layouts=(None, layout_of((7, 8, 8), strides)))[NAME]
    assert isinstance(found, str) != taken


def test_only_cards_that_do_not_wait_take_it():
    devices = H100, A100, planner.Device("mine", 1e13, 1e12, kind="cuda"), CPU
    taken, *refused = (verdicts(SPEC, (90, 1, 8), (7, 8, 8), device=device)[NAME] for device in devices)
    assert not isinstance(taken, str)
    assert refused == [*["it runs on compute capability 9.0 and 10.0"] * 2, "it runs on cuda"]


def test_amd_has_no_compute_capability(monkeypatch):
    """Its cards report 9.0 too."""
    card = types.SimpleNamespace(
        get_device_name=lambda _: "AMD Instinct MI250X", get_device_capability=lambda _: (9, 0)
    )
    monkeypatch.setattr(torch_backend, "load_rates", lambda device, *_: device)
    found = {}
    for hip in (None, "6.4"):
        stand_in = types.SimpleNamespace(cuda=card, version=types.SimpleNamespace(hip=hip), __version__="2.13")
        monkeypatch.setattr(torch_backend, "torch", stand_in)
        found[hip] = torch_backend._card(None).capability
    assert found == {None: 90, "6.4": 0}


def test_a_card_that_waits_gets_the_kernel(monkeypatch):
    """Whatever its capability is: a tiny product tells. torch's setting is put back."""
    modes, waits = ["default"], []

    def product(*arguments, **offsets):
        if waits and modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", product)
    for name, stand_in in (
        ("is_current_stream_capturing", lambda: False), ("get_sync_debug_mode", lambda: modes[-1]),
        ("set_sync_debug_mode", modes.append),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    device = torch.device("cpu")
    assert not torch_grouped_mm._waits.__wrapped__(device)
    waits.append(True)
    assert torch_grouped_mm._waits.__wrapped__(device)
    assert modes == ["default", "error", "default", "error", "default"]


def test_products_of_halves_have_a_rate_of_their_own():
    assert H200.product_rate(512, 512, 512, "bfloat16") == H200.half_rate > H200.product_rate(512, 512, 512)
    assert CPU.product_rate(512, 512, 512, "bfloat16") == CPU.product_rate(512, 512, 512)
    single, half = (
        verdicts(SPEC, (4096, 1, 4096), (4, 4096, 4096), dtype=dtype)["grouped matmul, Triton"].picoseconds
        for dtype in ("float32", "float16")
    )
    assert single > 4 * half


def test_it_is_taken_for_large_matrices_and_priced_beside_the_kernels():
    """Its copies of rows cost more than it saves where matrices are small."""
    large = verdicts(SPEC, (32_768, 1, 2048), (32, 2048, 2048))
    small = verdicts(SPEC, (131_072, 1, 64), (1000, 64, 64))
    assert large[NAME].picoseconds < large["grouped matmul, Triton"].picoseconds
    assert small[NAME].picoseconds > small["grouped matmul, Triton"].picoseconds


@pytest.mark.parametrize("kind", ["aligned", "offset", "strided", "expanded", "padded"])
def test_steps_that_take_it_are_right(monkeypatch, kind):
    """On operands of other strides than were planned for, too: those that torch does not take go to the kernel."""
    if kind != "aligned":  # the interpreter multiplies the bits of bfloat16
        monkeypatch.setattr(torch_grouped_mm, "_kernels", lambda: torch_grouped)
    a, c, gradient = (torch.randint(-2, 3, shape).bfloat16() for shape in ((90, 2, 16), (5, 16, 8), (90, 2, 8)))
    if kind == "expanded":
        c = c[:, :, :1].expand(5, 16, 8)
    else:
        strides = {"aligned": (128, 8, 1), "offset": (128, 8, 1), "strided": (256, 16, 2), "padded": (192, 12, 1)}[kind]
        c = torch.zeros(5 * 16 * 20).bfloat16().as_strided((5, 16, 8), strides, int(kind == "offset")).copy_(c)
    given = (planner.Operand(x.shape, "bfloat16", requires_grad=True) for x in (a, c))
    options = {"backend": "torch", "device": "H200", "minimize": "peak", "sizes": {"q": 5}, "index_mode": "drop"}
    plan, indices = planner.plan(SPEC, *given, q=(90,), **options), {"q": torch.randint(0, 6, (90,))}
    assert len(steps_agree(plan, (a, c), indices, gradient, "grouped_mm")) >= 2


@pytest.mark.parametrize("kind", ["plain", "padded", "offset", "expanded", "by columns"])
def test_sorted_rows_lie_as_they_like(monkeypatch, kind):
    """Rows that are in order already are not copied by their order, and torch refuses some layouts of them."""
    given, product = [], torch.nn.functional.grouped_mm

    def aligned(x, y, offs):
        given.append(x)
        assert x.data_ptr() % 16 == 0  # a card asks for that, a CPU does not
        return product(x, y, offs=offs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", aligned)
    q = torch.randint(0, 3, (40,)).sort().values
    groups = dataclasses.replace(torch_grouping.group_rows(q, 3), order=None)
    memory = torch.randint(-2, 3, (40 * 24 + 1,)).bfloat16()
    x = {
        "plain": memory[: 40 * 16].view(40, 1, 16),
        "padded": memory[: 40 * 19].view(40, 1, 19)[..., :16],
        "offset": memory[1 : 40 * 16 + 1].view(40, 1, 16),
        "expanded": memory[:1].expand(40, 1, 16),
        "by columns": memory[: 16 * 41].view(16, 1, 41).permute(2, 1, 0)[:40],
    }[kind]
    c, other = torch.randint(-2, 3, (3, 16, 8)).bfloat16(), torch.randint(-2, 3, (40, 1, 8)).bfloat16()
    assert torch.equal(torch_grouped_mm.grouped_matmul(x, c, groups), x @ c[q])
    sums = torch.zeros(3, 16, 8).index_add_(0, q, (x.mT @ other).float()).bfloat16()
    assert torch.equal(torch_grouped_mm.grouped_outer(x, other, groups), sums)
    turned = c.mT.contiguous()
    rows, matrices = torch_grouped_mm.grouped_gradients(x, other, turned, groups)
    assert torch.equal(rows, x @ c[q])
    assert torch.equal(matrices, sums.mT)
    assert (given[0].data_ptr() == x.data_ptr()) == (kind == "plain")
