"""A lint: whatever is multiplied by a stride in a Triton kernel is an integer of 64 bits, or of the type `INDEX`.

`INDEX` has 32 bits only if every offset fits.
"""

import ast
import pathlib

import pytest

KERNELS = pathlib.Path(__file__).parents[2] / "kernels"
SOURCES = sorted(p for p in KERNELS.rglob("triton_*.py") if "@triton.jit" in p.read_text())
# What an address is made of, besides indices: strides, and sizes that are strides in a kernel's own memory.
STRIDES = ("_outer", "_inner", "_column", "_batch", "_row", "_group", "size_m", "size_n", "inner")


def is_stride(node):
    return isinstance(node, ast.Name) and node.id.endswith(STRIDES) and not node.id.startswith("BLOCK")


def called(node):
    """The name of what a call calls."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else function.id


class Kernel:
    """One kernel: which of its names are wide, and the products of strides that are not."""

    def __init__(self, function):
        self.parameters = {a.arg for a in function.args.args}
        self.wide, self.narrow, self.products = set(), [], 0
        for node in ast.walk(function):
            for name, value in assigned(node):
                if self.is_wide(value):
                    self.wide.add(name)
        # A name is wide if all that is assigned to it is.
        for node in ast.walk(function):
            for name, value in assigned(node):
                if not self.is_wide(value):
                    self.wide.discard(name)
        for node in ast.walk(function):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                sides = node.left, node.right
                strides = [side for side in sides if is_stride(side) and side.id in self.parameters]
                if strides:
                    self.products += 1
                    if not any(self.is_wide(side) for side in sides if side not in strides):
                        self.narrow.append(f"{function.name}:{node.lineno}: {ast.unparse(node)}")

    def is_wide(self, node):
        """Whether an expression has 64 bits."""
        match node:
            case ast.Name():
                return node.id in self.wide
            case ast.BinOp():
                return self.is_wide(node.left) or self.is_wide(node.right)
            case ast.Subscript():
                return self.is_wide(node.value)
            case ast.Call():
                name = called(node)
                if name in ("position", "group_of", "row_places", "first_from", "quotient"):
                    return True
                if name == "to":
                    return ast.unparse(node.args[0]) in ("tl.int64", "INDEX") or (
                        "element_ty" not in ast.unparse(node.args[0]) and self.is_wide(node.func.value)
                    )
                if name == "cast":
                    return ast.unparse(node.args[1]) == "tl.int64"
                return name in ("minimum", "maximum", "where", "range", "cdiv") and any(map(self.is_wide, node.args))
        return False


def assigned(node):
    """Names that a statement gives a value."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        yield node.targets[0].id, node.value
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
        names = [t.id for t in node.targets[0].elts]
        # What a function of a kernel returns is as wide as the call; positions come first.
        values = [node.value] * len(names) if isinstance(node.value, ast.Call) else node.value.elts
        yield from zip(names, values, strict=True)
    elif isinstance(node, ast.For):
        yield node.target.id, node.iter


def kernels(text):
    return [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.decorator_list]


def test_the_lint_reads_every_kernel():
    assert {path.name for path in SOURCES} == {
        "triton_arithmetic.py",
        "triton_grouping.py",
        "triton_pair.py",
        "triton_pooled.py",
        "triton_product.py",
        "triton_sum.py",
        "triton_take.py",
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_every_offset_has_64_bits(path):
    found = [Kernel(function) for function in kernels(path.read_text())]
    assert [line for kernel in found for line in kernel.narrow] == []
    assert sum(kernel.products for kernel in found) >= 3 or path.name == "triton_arithmetic.py"


def test_positions_have_64_bits():
    """What the lint takes for granted."""
    text = (KERNELS / "tiled_product" / "triton_product.py").read_text()
    (function,) = (f for f in kernels(text) if f.name == "position")
    returned = [ast.unparse(n.value) for n in ast.walk(function) if isinstance(n, ast.Return)]
    assert len(returned) == 2
    assert all(text.endswith(".to(INDEX)") for text in returned)
    assert ast.unparse(function.args.defaults[-1]) == "tl.int64"


def test_32_bits_are_enough_where_they_are_taken():
    """For terms and for the memory behind each array, with room for a tile behind the last position."""
    triton_axes = pytest.importorskip("planner.kernels.tiled_product.triton_axes", reason="triton is not installed")
    import torch

    few, many = torch.empty(4, device="meta"), torch.empty(2**31 - 2**16, dtype=torch.int8, device="meta")
    types = [triton_axes.index_type(terms, x, None) for terms, x in ((9, few), (2**31, few), (9, many[:1]), (9, None))]
    assert [str(x) for x in types] == ["int32", "int64", "int64", "int32"]


@pytest.mark.parametrize(
    ("line", "narrow"),
    [
        ("n * a_row", True),
        ("position(n, table, n < 3) * a_row", False),
        ("tl.arange(0, 4).to(tl.int64) * a_row", False),
        ("tl.load(order + n) * a_row", True),  # tables have 32 bits wherever their numbers fit
        ("tl.load(order + n).to(tl.int64) * a_row", False),
        ("tl.load(x + n) * a_row", True),
        ("(n % 4) * a_row + 3", True),
    ],
)
def test_the_lint_sees_what_is_narrow(line, narrow):
    text = f"@triton.jit\ndef f(x, order, table, a_row):\n    n = tl.arange(0, 4)\n    tl.store(x + {line}, 0)\n"
    (function,) = kernels(text)
    assert bool(Kernel(function).narrow) == narrow
