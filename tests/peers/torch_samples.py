"""torch's products on the samples that it tests them with (its `OpInfo`s), each of them also as a spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rewritten import contract, einsum

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_unflatten  # noqa: E402

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# A spec and its operands, for the arguments of torch's function; what a product does besides is done by `REST`.
Written = tuple[str, Sequence[Any]]


def _matmul(a: Any, b: Any) -> Written:
    left, right = ("j" if a.ndim == 1 else "...ij"), ("j" if b.ndim == 1 else "...jk")
    output = "..." * (max(a.ndim, b.ndim) > 1) + "i" * (a.ndim > 1) + "k" * (b.ndim > 1)
    return f"{left}, {right} -> {output}", (a, b)


def _inner(a: Any, b: Any) -> Written:
    if not a.ndim or not b.ndim:
        return "..., ...", (a, b)
    left, right = LETTERS[: a.ndim - 1], LETTERS[a.ndim - 1 : a.ndim + b.ndim - 2]
    return f"{left}z, {right}z -> {left}{right}", (a, b)


def _tensordot(a: Any, b: Any, dims: Any) -> Written:
    ours, theirs = (range(a.ndim - dims, a.ndim), range(dims)) if isinstance(dims, int) else dims
    left, right = list(LETTERS[: a.ndim]), list(LETTERS[a.ndim : a.ndim + b.ndim])
    for i, j in zip(ours, theirs, strict=True):
        right[j] = left[i]
    output = [x for n, x in enumerate(left) if n not in {i % a.ndim for i in ours}]
    output += [x for x in right if x not in left]
    return f"{''.join(left)}, {''.join(right)} -> {''.join(output)}", (a, b)


def _multi_dot(tensors: Sequence[Any]) -> Written:
    terms = [LETTERS[n : n + 2] for n in range(len(tensors))]
    terms[0], terms[-1] = terms[0][2 - tensors[0].ndim :], terms[-1][: tensors[-1].ndim]
    output = terms[0][: tensors[0].ndim - 1] + terms[-1][1:]
    return f"{', '.join(terms)} -> {output}", tensors


def _vecdot(a: Any, b: Any, dim: int = -1) -> Written:
    return "...i, ...i -> ...", (a.conj().movedim(dim, -1), b.movedim(dim, -1))


WRITTEN: dict[str, Callable[..., Written]] = {
    "einsum": lambda tensors, equation: (equation, tensors),
    "matmul": _matmul,
    "__rmatmul__": lambda b, a: _matmul(a, b),
    "mm": lambda a, b: ("ij, jk -> ik", (a, b)),
    "bmm": lambda a, b: ("bij, bjk -> bik", (a, b)),
    "mv": lambda a, x: ("ij, j -> i", (a, x)),
    "outer": lambda x, y: ("i, j -> ij", (x, y)),
    "inner": _inner,
    "dot": lambda x, y: ("i, i ->", (x, y)),
    "vdot": lambda x, y: ("i, i ->", (x.conj(), y)),
    "linalg.vecdot": _vecdot,
    "tensordot": _tensordot,
    "trace": lambda a: ("ii ->", (a[: min(a.shape), : min(a.shape)],)),
    "linalg.multi_dot": _multi_dot,
    "nn.functional.linear": lambda x, w, bias=None: ("...i, oi -> ...o" if w.ndim > 1 else "...i, i -> ...", (x, w)),
    "nn.functional.bilinear": lambda x, y, w, bias=None: ("...i, oij, ...j -> ...o", (x, w, y)),
}
# What torch's function does to the product.
REST: dict[str, Callable[..., Any]] = {
    "nn.functional.linear": lambda out, x, w, bias=None: out if bias is None else out + bias,
    "nn.functional.bilinear": lambda out, x, y, w, bias=None: out if bias is None else out + bias,
}
# Sums of integers are int64 in torch.
WIDE = ("trace",)
OPS = {op.name: op for op in op_db if op.name in WRITTEN and not op.variant_test_name}
DTYPES = [torch.float64, torch.complex128, torch.float32, torch.complex64, torch.bfloat16, torch.float16,
          torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]  # fmt: skip
# Of the largest number: sums go in different orders, and half types accumulate in float32 here.
CLOSE = {torch.float64: 1e-13, torch.complex128: 1e-13, torch.float32: 1e-5, torch.complex64: 1e-5,
         torch.float16: 3e-3, torch.bfloat16: 3e-2}  # fmt: skip


def test_torch_has_the_samples():
    assert OPS.keys() == WRITTEN.keys()
    contract("i ->", torch.ones(1))


def _ours(name: str, *arguments: Any, **options: Any) -> Any:
    spec, operands = WRITTEN[name](*arguments, **options)
    integers = not (operands[0].is_floating_point() or operands[0].is_complex())
    call = einsum if name == "einsum" else contract
    result = call(spec, *operands, **{"dtype": torch.int64} if name in WIDE and integers else {})
    return REST[name](result, *arguments, **options) if name in REST else result


def _samples(op: Any, dtype: Any, requires_grad: bool = False) -> list[Any]:
    torch.manual_seed(0)
    given = list(op.sample_inputs("cpu", dtype, requires_grad=requires_grad))
    assert given
    return given + [sample.noncontiguous() for sample in given]


def _named(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, op in OPS.items() for dtype in DTYPES if dtype in op.dtypes], ids=_named
)
def test_values(name, dtype):
    for sample in _samples(OPS[name], dtype):
        ours = _ours(name, sample.input, *sample.args, **sample.kwargs)
        theirs = OPS[name](sample.input, *sample.args, **sample.kwargs)
        close = CLOSE.get(dtype, 0.0)
        scale = float(theirs.abs().max()) if close and theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=close, atol=close * scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=_named)
@pytest.mark.parametrize("name", OPS)
def test_gradients(name, dtype):
    """First and second derivatives, in reverse and forward mode, one at a time and batched."""
    for sample in _samples(OPS[name], dtype, requires_grad=True):
        given, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [n for n, x in enumerate(given) if isinstance(x, torch.Tensor) and x.requires_grad]

        def product(*tensors, given=given, tree=tree, places=places):
            placed = dict(zip(places, tensors, strict=True))
            first, rest, named = tree_unflatten([placed.get(n, x) for n, x in enumerate(given)], tree)
            return _ours(name, first, *rest, **named)

        tensors = tuple(given[n] for n in places)
        options = {"fast_mode": True, "check_batched_grad": True}
        assert torch.autograd.gradcheck(product, tensors, check_forward_ad=True, **options)
        assert torch.autograd.gradgradcheck(product, tensors, **options)
