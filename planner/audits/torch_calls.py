"""Watches the calls of a torch program: reads of rows, views, products and sums become expressions."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.audits.expression import Array, Expression, contract, matmul, multiply, problem_of
from planner.audits.sites import Call, Record, find_place, name_in, user_frame
from planner.dropin.einsum import read_arguments
from planner.language.errors import PlannerError
from planner.language.parse import parse
from planner.language.spec import ELLIPSIS, Operand, Spec
from planner.program.frameworks import load_backend

__all__ = ["TorchWatch"]

Args = Sequence[Any]
Kwargs = Mapping[str, Any]


class TorchWatch:
    """Turns calls into expressions, and records einsums, and products of which a factor is read by an index array.

    Tensors are remembered by what they were computed from, as long as they live.
    """

    def __init__(self, record: Record, measure: bool) -> None:
        self.record, self.measure = record, measure
        self.expressions: dict[int, tuple[Expression, tuple[int, ...]]] = {}
        self.arrays: dict[int, Array] = {}

    def __call__(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run a call of torch, and look at it. A call that cannot be read is left out: no audit stops a program."""
        look = _LOOKS.get(getattr(func, "__name__", ""))
        if look is None:
            return func(*args, **kwargs)
        begin = time.perf_counter()
        result = func(*args, **kwargs)
        took = time.perf_counter() - begin if self.measure else None
        if user_frame() is not None:  # what planner itself calls is no waste
            with contextlib.suppress(PlannerError, ValueError, TypeError, IndexError, AttributeError):
                look(self, args, kwargs, result, took)
        return result

    def forget_later(self, table: dict[int, Any], x: Any, value: Any) -> Any:
        """Put a value into a table under a tensor, and take it out when the tensor is freed."""
        table[id(x)] = value
        weakref.finalize(x, table.pop, id(x), None)
        return value

    def array(self, x: Any) -> Array:
        """Describe a tensor."""
        found = self.arrays.get(id(x))
        if found is None:
            found = Array(load_backend("torch").operand(x), name_in(user_frame(), x))
            self.forget_later(self.arrays, x, found)
        return found

    def index(self, q: Any) -> Array:
        """Describe an index array.

        Raises:
            TypeError: it is no tensor of integers.
        """
        load_backend("torch").check_index("q", q)
        found = self.arrays.get(id(q))
        if found is None:
            operand = Operand(tuple(q.shape), "int64")
            value = q.detach().clone() if self.measure else None
            found = self.forget_later(self.arrays, q, Array(operand, name_in(user_frame(), q), value))
        return found

    def expression(self, x: Any) -> tuple[Expression, tuple[int, ...]]:
        """Return the expression of a tensor, and the numbers of the recorded calls that computed it."""
        found = self.expressions.get(id(x))
        return (Expression.of(self.array(x)), ()) if found is None else found

    def remember(self, x: Any, expression: Expression | None, calls: tuple[int, ...] = ()) -> None:
        """Remember what a tensor was computed from."""
        if expression is not None and tuple(x.shape) == expression.shape:
            self.forget_later(self.expressions, x, (expression, calls))

    def add(self, function: str, expression: Expression, took: float | None, completes: tuple[int, ...] = (),
            scatter: tuple[int, Array, int] | None = None) -> int:  # fmt: skip
        """Record a call at the user's line."""
        place = find_place(user_frame())
        return self.record.add(Call(place, function, problem_of(expression, scatter), took), completes)


# --- what each function does to expressions -------------------------------------------------------


def _read_by_key(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any, took: float | None) -> None:
    """``x[key]``, where the key holds one index array, and else only full slices, None and an ellipsis."""
    x, key = args
    keys = list(key) if isinstance(key, tuple) else [key]
    expression, calls = watch.expression(x)
    named = sum(entry is not None and entry is not Ellipsis for entry in keys)
    if Ellipsis in [entry for entry in keys if entry is None or entry is Ellipsis or isinstance(entry, slice)]:
        place = next(n for n, entry in enumerate(keys) if entry is Ellipsis)
        keys[place : place + 1] = [slice(None)] * (x.dim() - named)
    dim, found = 0, False
    for entry in keys:
        if entry is None:
            expression = expression.unsqueezed(dim)
            dim += 1
        elif isinstance(entry, slice):
            if entry != slice(None):
                return
            dim += 1
        else:
            if found:
                return
            index, found = watch.index(entry), True
            taken = expression.take(dim, index)
            if taken is None:
                return
            expression, dim = taken, dim + len(index.operand.shape)
    watch.remember(result, expression, calls)


def _read_by_call(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any, took: float | None) -> None:
    """``torch.index_select(x, dim, q)``."""
    x, dim, q = _bound(("input", "dim", "index"), args, kwargs)
    watch.remember(result, watch.expression(x)[0].take(dim % x.dim(), watch.index(q)))


def _embed(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any, took: float | None) -> None:
    """``F.embedding(q, weight)``."""
    q, weight = _bound(("input", "weight"), args, kwargs)
    watch.remember(result, watch.expression(weight)[0].take(0, watch.index(q)))


def _view(order: Callable[..., Sequence[int]]) -> Callable[..., None]:
    """Return a look at a function that reorders dimensions; `order` says how, from their number and the arguments."""

    def look(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any, took: float | None) -> None:
        x, *rest = args
        if id(x) in watch.expressions:
            expression, calls = watch.expressions[id(x)]
            watch.remember(result, expression.permuted(order(x.dim(), *rest, **kwargs)), calls)

    return look


def _swapped(count: int, dim0: int, dim1: int) -> list[int]:
    order = list(range(count))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return order


def _permuted(count: int, *dims: Any) -> list[int]:
    (order,) = dims if len(dims) == 1 else (dims,)
    return [d % count for d in order]


def _unsqueeze(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any, took: float | None) -> None:
    x, dim = _bound(("input", "dim"), args, kwargs)
    expression, calls = watch.expression(x)
    watch.remember(result, expression.unsqueezed(dim % (x.dim() + 1)), calls)


def _multiply(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any, took: float | None) -> None:
    (a, _), (b, _) = watch.expression(args[0]), watch.expression(args[1])
    product = multiply(a, b)
    if product is not None and product.reads and a.dims and b.dims:
        watch.remember(result, product, (watch.add("mul", product, took),))


def _matmul(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any, took: float | None) -> None:
    (a, _), (b, _) = watch.expression(args[0]), watch.expression(args[1])
    product = matmul(a, b)
    if product is not None and product.reads and product.shape == tuple(result.shape):
        watch.add("matmul", product, took)


def _sum(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any, took: float | None) -> None:
    """``x.sum(dim)`` of a product that is remembered: it completes the product."""
    x = args[0]
    if id(x) not in watch.expressions or kwargs.get("keepdim") or len(args) > 2:
        return
    expression, calls = watch.expressions[id(x)]
    dims = args[1] if len(args) > 1 else kwargs.get("dim", tuple(range(x.dim())))
    if len(expression.factors) > 1:
        summed = expression.squeezed(d % x.dim() for d in ([dims] if isinstance(dims, int) else dims))
        watch.add("mul, sum", summed, took, calls)


def _scatter(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any, took: float | None) -> None:
    """``out.index_add(dim, d, x)`` of rows that were read, or of a product of such: it completes the product."""
    x, dim, index, source = _bound(("input", "dim", "index", "source"), args, kwargs)
    if id(source) in watch.expressions and kwargs.get("alpha", 1) == 1:
        expression, calls = watch.expressions[id(source)]
        dim %= source.dim()
        watch.add("index_add", expression, took, calls, (dim, watch.index(index), x.shape[dim]))


def _einsum(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any, took: float | None) -> None:
    text, operands = read_arguments(args)
    parsed = text if isinstance(text, Spec) else parse(text)
    parts = []
    for x, term in zip(operands, parsed.inputs, strict=True):
        wide = x.dim() - (len(term) - (ELLIPSIS in term))
        labels: list[Any] = []
        for entry in term:
            labels += [("...", d) for d in range(-wide, 0)] if entry is ELLIPSIS else [entry]
        parts.append((watch.expression(x)[0], labels))
    dots = {label for _, labels in parts for label in labels if isinstance(label, tuple)}
    out: list[Any] = []
    for entry in parsed.output:
        out += sorted(dots, key=lambda label: label[1]) if entry is ELLIPSIS else [entry]
    product = contract(parts, out)
    if product is not None and product.shape == tuple(result.shape):
        watch.add("einsum", product, took)


def _bound(names: Sequence[str], args: Args, kwargs: Kwargs) -> list[Any]:
    """Return the arguments of these names, positional or by keyword."""
    return [*args[: len(names)], *(kwargs[name] for name in names[len(args) :])]


def _same(count: int, *_: Any, **__: Any) -> range:
    return range(count)


_LOOKS: dict[str, Callable[..., None]] = {
    "__getitem__": _read_by_key,
    "index_select": _read_by_call,
    "embedding": _embed,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _view(_swapped)),
    "permute": _view(_permuted),
    "contiguous": _view(_same),
    "unsqueeze": _unsqueeze,
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _multiply),
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm", "mv"), _matmul),
    "sum": _sum,
    **dict.fromkeys(("index_add", "index_add_"), _scatter),
    "einsum": _einsum,
}
