"""Watches the calls of a torch program: reads of rows, views, products and sums become expressions."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from planner.audits.expression import Array, Expression, Problem, Read, contract, matmul, multiply, problem_of
from planner.audits.replay import Slot, Step, Today, map_leaves, slots_of
from planner.audits.sites import Call, Record, find_place, name_in, user_frame
from planner.dropin.einsum import read_arguments
from planner.language.parse import parse
from planner.language.spec import ELLIPSIS, Operand, Spec
from planner.program.frameworks import load_backend

Args = Sequence[Any]
Kwargs = Mapping[str, Any]


class Known(NamedTuple):
    """What a tensor was computed from, and the recorded calls that computed it. It holds if nothing has changed.

    The step is what the program called last; its arguments may hold tensors in the place of slots.
    """

    expression: Expression
    calls: tuple[int, ...]
    version: int
    step: Step | None


class TorchWatch:
    """Turns calls into expressions, and records einsums, and products of which a factor is read by an index array.

    Tensors are remembered by what they were computed from, as long as they live, and until a program changes them, or
    what they were computed from, in place. Tensors of `torch.inference_mode` do not count their changes, so they are
    never remembered.
    """

    def __init__(self, record: Record, measure: bool) -> None:
        self.record, self.measure = record, measure
        self.known: dict[int, Known] = {}
        # Tensors of zeros, by the calls that made them.
        self.zeros: dict[int, Step | None] = {}
        # The first problem of a line, with names: to find these takes longer than all else.
        self.problems: dict[Any, tuple[Problem, Today | None]] = {}
        # The call that is looked at; None if nothing is measured.
        self.step: Step | None = None

    def __call__(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run a call of torch, and look at it. A call that cannot be read is left out: no audit stops a program."""
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute, such as `x.mT`
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        look = _LOOKS.get(name)
        if look is None or user_frame() is None:  # what planner itself calls is no waste
            return func(*args, **kwargs)
        if self.measure:  # before the call: it may change its arguments
            self.step = None
            with contextlib.suppress(Exception):
                self.step = Step(func, map_leaves(self.source, args), map_leaves(self.source, kwargs))
        result = func(*args, **kwargs)
        with contextlib.suppress(Exception):
            look(self, args, kwargs, result)
        self.step = None
        return result

    def source(self, x: Any) -> Any:
        """Return the step that computed an argument of a call; the argument itself if that is unknown."""
        if id(x) not in self.known and id(x) not in self.zeros:
            return x
        known = self.remembered(x)
        step = known.step if known is not None else self.zeros.get(id(x)) if _version(x) == 0 else None
        return x if step is None else step

    def forget_later(self, table: dict[int, Any], x: Any, value: Any) -> None:
        """Put a value into a table under a tensor, and take it out when the tensor is freed."""
        table[id(x)] = value
        weakref.finalize(x, table.pop, id(x), None)

    def index(self, q: Any) -> Array:
        """Describe an index array.

        Raises:
            TypeError: it is no tensor of integers.
        """
        load_backend("torch").check_index("q", q)
        return Array(Operand(tuple(q.shape), "int64"), origin=q, version=_version(q))

    def remembered(self, x: Any) -> Known | None:
        """Return what a tensor was computed from; None if that is unknown or has changed.

        Rows that were read without gradients have none later either.
        """
        known = self.known.get(id(x))
        if known is None or known.version != _version(x):
            return None
        describe = load_backend("torch").operand
        for array in known.expression.arrays:
            if not array.unchanged or describe(array.origin).requires_grad != array.operand.requires_grad:
                return None
        return known

    def expression(self, x: Any) -> Expression:
        """Return the expression of a tensor."""
        known = self.remembered(x)
        if known is not None:
            return known.expression
        return Expression.of(Array(load_backend("torch").operand(x), origin=x, version=_version(x)))

    def calls(self, x: Any) -> tuple[int, ...]:
        """Return the numbers of the recorded calls that computed a tensor."""
        known = self.remembered(x)
        return () if known is None else known.calls

    def remember(self, x: Any, expression: Expression | None, calls: tuple[int, ...] = ()) -> None:
        """Remember what a tensor was computed from."""
        version = _version(x)
        if expression is None or version is None or tuple(x.shape) != expression.shape:
            return
        if all(array.version is not None and array.origin is not x for array in expression.arrays):
            self.forget_later(self.known, x, Known(expression, calls, version, self.step))

    def add(self, function: str, expression: Expression, result: Any, completes: tuple[int, ...] = (),
            **rest: Any) -> int:  # fmt: skip
        """Record a call at the user's line."""
        frame = user_frame()
        tensors = [array.origin for array in expression.arrays]
        dtypes = {x.dtype for x in tensors if x.is_floating_point() or x.is_complex()}
        if dtypes and dtypes != {result.dtype}:
            rest["dtype"] = str(result.dtype).removeprefix("torch.")
        if any(x.device.type != "cpu" for x in tensors):
            rest["device"] = load_backend("torch").device(tensors)

        def named(array: Array) -> Array:
            kept = array.origin.detach().clone() if self.measure and array.operand.strides is None else None
            return Array(array.operand, name_in(frame, array.origin), kept)

        place = find_place(frame)
        key = place, function, problem_of(expression, named=lambda array: Array(array.operand), **rest).key
        if key not in self.problems:
            problem = problem_of(expression, named=named, **rest)
            today = None
            with contextlib.suppress(Exception):
                today = self.today(problem, result)
            self.problems[key] = problem, today
        return self.record.add(Call(place, function, *self.problems[key]), completes)

    def today(self, problem: Problem, result: Any) -> Today | None:
        """Return the calls that computed a problem, cut off from the program's tensors; None if nothing is measured."""
        import torch

        if self.step is None:
            return None
        describe = load_backend("torch").operand
        own = {array.identity for array in (*problem.operands, *problem.indices.values())}
        extras: dict[int, Array] = {}

        steps: dict[Step, Step] = {}  # one that is used twice stays one

        def cut(leaf: Any) -> Any:
            if isinstance(leaf, Step):
                if leaf not in steps:
                    args, kwargs = (map_leaves(cut, part) for part in (leaf.args, leaf.kwargs))
                    steps[leaf] = Step(leaf.function, args, kwargs)
                return steps[leaf]
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) not in own:
                extras[id(leaf)] = Array(describe(leaf), identity=id(leaf))
            return Slot(id(leaf))

        step = cut(self.step)
        if not own <= set(slots_of(step)):
            return None
        device = result.device.type
        half, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        today = Today(step, tuple(extras.values()), lambda: torch.autocast(device, half, enabled, False))
        if result.requires_grad:  # that of a sum is one number, expanded: torch multiplies it three times as slowly
            result.register_hook(lambda gradient: today.gradients.append(gradient.stride()))
        return today


def _version(x: Any) -> int | None:
    return None if x.is_inference() else x._version


# --- what each function does to expressions -------------------------------------------------------


def _read_by_key(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any) -> None:
    """``x[key]``, where the key holds one index array, and else only full slices, None and an ellipsis."""
    x, key = args
    calls = watch.calls(x)
    keys = list(key) if isinstance(key, tuple) else [key]
    expression = watch.expression(x)
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


def _read_by_call(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any) -> None:
    """``torch.index_select(x, dim, q)``."""
    x, dim, q = _bound(("input", "dim", "index"), args, kwargs)
    watch.remember(result, watch.expression(x).take(dim % x.dim(), watch.index(q)))


def _embed(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any) -> None:
    """``F.embedding(q, weight)``, where all rows get gradients, and all occurrences count."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    plain = all(given.get(name) in (None, False) for name in ("max_norm", "scale_grad_by_freq", "sparse"))
    if plain and given.get("padding_idx") is None:
        watch.remember(result, watch.expression(given["weight"]).take(0, watch.index(given["input"])))


def _view(order: Callable[..., Sequence[int]]) -> Callable[..., None]:
    """Return a look at a function that reorders dimensions; `order` says how, from their number and the arguments."""

    def look(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any) -> None:
        x, *rest = args
        known = watch.remembered(x)
        if known is not None and result is not x:
            watch.remember(result, known.expression.permuted(order(x.dim(), *rest, **kwargs)), known.calls)

    return look


def _swapped(count: int, dim0: int, dim1: int) -> list[int]:
    order = list(range(count))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return order


def _matrix(count: int) -> list[int]:
    return _swapped(count, -2, -1)


def _moved(count: int, source: int, destination: int) -> list[int]:
    order = list(range(count))
    axis = order.pop(source)
    order.insert(destination % count, axis)
    return order


def _permuted(count: int, *dims: Any) -> list[int]:
    (order,) = dims if len(dims) == 1 else (dims,)
    return [d % count for d in order]


def _unsqueeze(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any) -> None:
    x, dim = _bound(("input", "dim"), args, kwargs)
    watch.remember(result, watch.expression(x).unsqueezed(dim % (x.dim() + 1)), watch.calls(x))


def _multiply(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any) -> None:
    factors = _bound(("input", "other"), args, kwargs)
    if not any(id(x) in watch.known for x in factors):
        return  # no rows were read
    a, b = map(watch.expression, factors)
    product = multiply(a, b)
    if product is not None and product.reads and a.dims and b.dims and product.shape == tuple(result.shape):
        watch.remember(result, product, (watch.add("mul", product, result),))


def _matmul(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any) -> None:
    if len(args) != 2 or kwargs or not any(id(x) in watch.known for x in args):
        return
    a, b = map(watch.expression, args)
    product = matmul(a, b)
    if product is not None and product.reads and product.shape == tuple(result.shape):
        watch.add("matmul", product, result)


def _sum(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any) -> None:
    """``x.sum(dim)`` of a product that is remembered: it completes the product."""
    x, *rest = args
    names = set(kwargs)
    known = watch.remembered(x)
    if known is None or not names <= {"dim", "axis"} or len(names) + len(rest) > 1 or result.dtype != x.dtype:
        return
    (dims,) = [*rest, *kwargs.values()] or [tuple(range(x.dim()))]
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    summed = known.expression.squeezed(d % x.dim() for d in dims)
    if dims and len(known.expression.factors) > 1 and summed.shape == tuple(result.shape):
        watch.add("mul, sum", summed, result, known.calls)


def _zeros(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any) -> None:
    if result._version == 0 and not result.requires_grad:
        watch.forget_later(watch.zeros, result, watch.step)


def _scatter(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any) -> None:
    """``out.index_add(dim, d, x)`` of rows that were read, or of a product of such: it completes the product."""
    x, dim, index, source = _bound(("input", "dim", "index", "source"), args, kwargs)
    known = watch.remembered(source)
    in_place = result is x
    shape = list(source.shape)
    dim %= source.dim()
    shape[dim] = x.shape[dim]
    if known is None or list(x.shape) != shape or x.dtype != source.dtype or index.dim() != 1:
        return
    rest: dict[str, Any] = {}
    if id(x) not in watch.zeros or x._version != in_place:
        rest = {"target": name_in(user_frame(), x), "in_place": in_place}
        if not rest["target"]:
            return
    read = Read(watch.index(index), ())
    watch.add("index_add", known.expression, result, known.calls, scatter=(dim, read, x.shape[dim]), **rest)


def _einsum(watch: TorchWatch, args: Args, kwargs: Kwargs, result: Any) -> None:
    text, operands, _ = read_arguments(args, {})
    parsed = text if isinstance(text, Spec) else parse(text)
    parts = []
    for x, term in zip(operands, parsed.inputs, strict=True):
        wide = x.dim() - (len(term) - (ELLIPSIS in term))
        labels: list[Any] = []
        for entry in term:
            labels += [("...", d) for d in range(-wide, 0)] if entry is ELLIPSIS else [entry]
        parts.append((watch.expression(x), labels))
    dots = {label for _, labels in parts for label in labels if isinstance(label, tuple)}
    out: list[Any] = []
    for entry in parsed.output:
        out += sorted(dots, key=lambda label: label[1]) if entry is ELLIPSIS else [entry]
    product = contract(parts, out)
    if product is not None and product.shape == tuple(result.shape):
        watch.add("einsum", product, result)


def _bound(names: Sequence[str], args: Args, kwargs: Kwargs) -> list[Any]:
    """Return the arguments of these names, positional or by keyword.

    Raises:
        ValueError: there are others.
    """
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if len(args) > len(names) or set(given) != set(names):
        raise ValueError("the call has other arguments")
    return [given[name] for name in names]


def _same(count: int, *_: Any, **__: Any) -> range:
    return range(count)


_LOOKS: dict[str, Callable[..., None]] = {
    "__getitem__": _read_by_key,
    "index_select": _read_by_call,
    "embedding": _embed,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _view(_swapped)),
    "permute": _view(_permuted),
    **dict.fromkeys(("movedim", "moveaxis"), _view(_moved)),
    "mT": _view(_matrix),
    "contiguous": _view(_same),
    "unsqueeze": _unsqueeze,
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _multiply),
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm", "mv"), _matmul),
    "sum": _sum,
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _zeros),
    **dict.fromkeys(("index_add", "index_add_"), _scatter),
    "einsum": _einsum,
}
