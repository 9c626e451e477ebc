"""Reads what a JAX function computes from its jaxpr: reads of rows, views, products and sums become expressions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.audits.expression import Array, Expression, contract, multiply, problem_of
from planner.audits.sites import Call, Place, Record
from planner.language.errors import PlannerError
from planner.language.spec import Operand

__all__ = ["read_jaxpr"]

# Operations that hand an index array on: `x[q]` adds the size to negative entries, casts, and adds a dimension.
_INDEX_STEPS = ("convert_element_type", "reshape", "broadcast_in_dim", "clamp", "squeeze", "stop_gradient")
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")


def read_jaxpr(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], record: Record) -> None:
    """Trace a function of JAX, and record its products."""
    import jax

    leaves, _ = jax.tree.flatten((tuple(args), dict(kwargs)))
    closed: Any = jax.make_jaxpr(function)(*args, **kwargs)
    paths = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    reader = _Reader(record)
    names = [_argument_name(function, path) for path, _ in paths]
    for variable, _, name in zip(closed.jaxpr.invars, leaves, names, strict=True):
        reader.enter(variable, name)
    for variable in closed.jaxpr.constvars:
        reader.enter(variable, "")
    reader.run(closed.jaxpr)


def _argument_name(function: Callable[..., Any], path: Sequence[Any]) -> str:
    """Return what the function calls an argument, such as ``params['w']``."""
    import inspect

    import jax

    kind, first, *rest = path
    name = str(getattr(first, "key", ""))
    if getattr(kind, "idx", None) == 0:
        with contextlib.suppress(ValueError, TypeError, IndexError):
            name = list(inspect.signature(function).parameters)[first.idx]
    return f"{name}{jax.tree_util.keystr(tuple(rest))}"


class _Reader:
    """Walks through equations. Variables are known by what they were computed from."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.expressions: dict[Any, tuple[Expression, tuple[int, ...]]] = {}
        self.indices: dict[Any, Array] = {}

    def enter(self, variable: Any, name: str) -> None:
        """Enter an array that the program is given."""
        aval = variable.aval
        if aval.dtype.kind in "iu":
            self.indices[variable] = Array(Operand(tuple(aval.shape), "int64"), name)
        # Nothing in a jaxpr says what is differentiated. Floats may be.
        operand = Operand(tuple(aval.shape), str(aval.dtype))
        self.expressions[variable] = Expression.of(Array(operand, name)), ()

    def expression(self, variable: Any) -> tuple[Expression, tuple[int, ...]]:
        """Return the expression of a variable or a literal."""
        if not hasattr(variable, "val") and variable in self.expressions:
            return self.expressions[variable]
        aval = variable.aval
        found = Expression.of(Array(Operand(tuple(aval.shape), str(aval.dtype)))), ()
        if not hasattr(variable, "val"):
            self.expressions[variable] = found
        return found

    def run(self, jaxpr: Any) -> None:
        """Read all equations."""
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            inner = _inner(equation)
            if name in _CALLS and inner is not None:
                self._enter_call(equation, inner)
            elif inner is not None:
                self._enter_apart(equation)
            elif name in _LOOKS:
                with contextlib.suppress(PlannerError, ValueError, TypeError, IndexError, KeyError):
                    _LOOKS[name](self, equation)

    def _enter_call(self, equation: Any, inner: Any) -> None:
        """Read a function that is called once: its arguments are those of the call."""
        jaxpr = getattr(inner, "jaxpr", inner)
        for outer, variable in zip(equation.invars[-len(jaxpr.invars) :], jaxpr.invars, strict=True):
            self.expressions[variable] = self.expression(outer)
            if not hasattr(outer, "val") and outer in self.indices:
                self.indices[variable] = self.indices[outer]
        self.run(jaxpr)
        for outer, variable in zip(equation.outvars, jaxpr.outvars, strict=True):
            if not hasattr(variable, "val"):
                if variable in self.expressions:
                    self.expressions[outer] = self.expressions[variable]
                if variable in self.indices:
                    self.indices[outer] = self.indices[variable]

    def _enter_apart(self, equation: Any) -> None:
        """Read the bodies of loops and branches: their variables are new arrays in each pass."""
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                jaxpr: Any = getattr(part, "jaxpr", part)
                if hasattr(jaxpr, "eqns"):
                    for variable in (*jaxpr.invars, *jaxpr.constvars):
                        self.enter(variable, "")
                    self.run(jaxpr)

    def add(self, equation: Any, function: str, expression: Expression, completes: tuple[int, ...] = (),
            scatter: tuple[int, Array, int] | None = None) -> int:  # fmt: skip
        """Record a product."""
        call = Call(_place(equation), function, problem_of(expression, scatter))
        return self.record.add(call, completes)


def _inner(equation: Any) -> Any:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "branches", "body_jaxpr", "cond_jaxpr"):
        if name in equation.params:
            return equation.params[name]
    return None


def _place(equation: Any) -> Place:
    """Return the user's line, as JAX itself names it in errors."""
    from jax._src import source_info_util

    frame = source_info_util.user_frame(equation.source_info.traceback)
    return Place(frame.file_name, frame.start_line) if frame is not None else Place("?", 0)


def _pass_on(reader: _Reader, equation: Any) -> None:
    """Casts, and reshapes of index arrays. Adding a size to negative entries, and choosing, are such too."""
    (out,) = equation.outvars
    for variable in equation.invars:
        if not hasattr(variable, "val") and variable in reader.indices:
            reader.indices[out] = reader.indices[variable]


def _cast(reader: _Reader, equation: Any) -> None:
    _pass_on(reader, equation)
    (x,), (out,) = equation.invars, equation.outvars
    if not hasattr(x, "val") and x in reader.expressions and x.aval.dtype == out.aval.dtype:
        reader.expressions[out] = reader.expressions[x]


def _gather(reader: _Reader, equation: Any) -> None:
    """``c[q]`` and ``jnp.take``: whole slices along one dimension."""
    x, q = equation.invars
    (out,) = equation.outvars
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return
    (dim,) = numbers.start_index_map
    whole = all(n == size for d, (n, size) in enumerate(zip(x.aval.shape, sizes, strict=True)) if d != dim)
    index = reader.indices.get(q)
    if not whole or sizes[dim] != 1 or numbers.collapsed_slice_dims != (dim,) or index is None:
        return
    taken = reader.expression(x)[0].take(dim, index)
    if taken is None:
        return
    # The dimensions of the index array come first, in place, or last; the offsets say where the others are.
    count = len(index.operand.shape)
    rows, rest = taken.dims[dim : dim + count], (*taken.dims[:dim], *taken.dims[dim + count :])
    others, firsts = iter(rest), iter(rows)
    dims = tuple(next(others) if d in numbers.offset_dims else next(firsts) for d in range(len(out.aval.shape)))
    reader.expressions[out] = taken.permuted([taken.dims.index(axis) for axis in dims]), ()


def _transpose(reader: _Reader, equation: Any) -> None:
    (x,), (out,) = equation.invars, equation.outvars
    expression, calls = reader.expression(x)
    reader.expressions[out] = expression.permuted(equation.params["permutation"]), calls


def _broadcast(reader: _Reader, equation: Any) -> None:
    """New dimensions of any size, of which a product makes nothing new: they count as new dimensions of size 1."""
    _pass_on(reader, equation)
    x, (out,) = equation.invars[0], equation.outvars
    places = equation.params["broadcast_dimensions"]
    if not x.aval.shape or hasattr(x, "val"):
        return
    expression, calls = reader.expression(x)
    for dim in range(len(out.aval.shape)):
        if dim not in places:
            expression = expression.unsqueezed(dim)
    reader.expressions[out] = expression, calls


def _squeeze(reader: _Reader, equation: Any) -> None:
    _pass_on(reader, equation)
    (x,), (out,) = equation.invars, equation.outvars
    expression, calls = reader.expression(x)
    reader.expressions[out] = expression.squeezed(equation.params["dimensions"]), calls


def _dot(reader: _Reader, equation: Any) -> None:
    a, b = equation.invars
    (out,) = equation.outvars
    (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
    labels: list[list[Any]] = [
        [("a", d) for d in range(len(a.aval.shape))],
        [("b", d) for d in range(len(b.aval.shape))],
    ]
    for kind, firsts, seconds in (("sum", left, right), ("batch", left_batch, right_batch)):
        for number, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
            labels[0][first] = labels[1][second] = (kind, number)
    batch = [("batch", number) for number in range(len(left_batch))]
    rest = [label for each in labels for label in each if label[0] in "ab"]
    parts = [(reader.expression(x)[0], each) for x, each in zip((a, b), labels, strict=True)]
    product = contract(parts, [*batch, *rest])
    if product is not None and product.shape == tuple(out.aval.shape):
        reader.add(equation, "dot_general", product)


def _multiply(reader: _Reader, equation: Any) -> None:
    a, b = equation.invars
    (out,) = equation.outvars
    if not a.aval.shape or not b.aval.shape:
        return
    product = multiply(reader.expression(a)[0], reader.expression(b)[0])
    if product is not None and product.reads and product.shape == tuple(out.aval.shape):
        reader.expressions[out] = product, (reader.add(equation, "mul", product),)


def _sum(reader: _Reader, equation: Any) -> None:
    (x,) = equation.invars
    expression, calls = reader.expression(x)
    if len(expression.factors) > 1:
        reader.add(equation, "mul, sum", expression.squeezed(equation.params["axes"]), calls)


def _scatter(reader: _Reader, equation: Any) -> None:
    """``out.at[d].add(x)`` and `segment_sum` of rows that were read, or of a product of such."""
    into, q, x = equation.invars
    numbers = equation.params["dimension_numbers"]
    expression, calls = reader.expression(x)
    index = reader.indices.get(q)
    if index is None or not expression.reads or len(index.operand.shape) != 1:
        return
    if numbers.scatter_dims_to_operand_dims != (0,) or numbers.inserted_window_dims != (0,):
        return
    (dim,) = [d for d in range(len(x.aval.shape)) if d not in numbers.update_window_dims]
    reader.add(equation, "scatter_add", expression, calls, (dim, index, into.aval.shape[0]))


_LOOKS: dict[str, Callable[[_Reader, Any], None]] = {
    "gather": _gather,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot,
    "mul": _multiply,
    "reduce_sum": _sum,
    "scatter-add": _scatter,
    "convert_element_type": _cast,
    **dict.fromkeys(("reshape", "clamp", "add", "select_n", "stop_gradient", "copy", "concatenate"), _pass_on),
}
