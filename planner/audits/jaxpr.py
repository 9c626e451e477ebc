"""Reads what a JAX function computes from its jaxpr: reads of rows, views, products and sums become expressions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from planner.audits.expression import Array, Expression, Read, contract, multiply, problem_of
from planner.audits.replay import Slot, Step, Today, slots_of
from planner.audits.sites import Call, Place, Record
from planner.language.spec import Operand

_identities = itertools.count(1)
# Primitives that know an array of size 1 from one that was broadcast from it.
_STRETCHED = ("mul", "broadcast_in_dim")
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")


def read_jaxpr(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], record: Record) -> None:
    """Trace a function of JAX, and record its products."""
    import jax

    leaves, _ = jax.tree.flatten((tuple(args), dict(kwargs)))
    closed: Any = jax.make_jaxpr(function)(*args, **kwargs)
    paths = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    reader = _Reader(record)
    names = [_argument_name(function, path) for path, _ in paths]
    for variable, leaf, name in zip(closed.jaxpr.invars, leaves, names, strict=True):
        reader.enter(variable, name, leaf)
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
            parameters = list(inspect.signature(function).parameters.values())
            place = min(first.idx, len(parameters) - 1)
            starred = parameters[place].kind is inspect.Parameter.VAR_POSITIONAL
            name = parameters[place].name + (f"[{first.idx - place}]" if starred else "")
    return f"{name}{jax.tree_util.keystr(tuple(rest))}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Index:
    """An integer array on its way from an index array to a read: it may get a last dimension of size 1.

    Attributes:
        array: the index array.
        size: what is added to negative entries; 0 before that.
        step: "negative" for whether entries are negative, "added" for all entries with the size added, else "".
    """

    array: Array
    size: int = 0
    step: str = ""


class _Reader:
    """Walks through the equations of one jaxpr. Variables are known by what they were computed from."""

    def __init__(self, record: Record, backward: bool = False) -> None:
        self.record, self.backward = record, backward
        self.expressions: dict[Any, tuple[Expression, tuple[int, ...]]] = {}
        self.indices: dict[Any, _Index] = {}
        self.zeros: set[Any] = set()
        # What computes the variables that are known, and numbers of those that are not.
        self.steps: dict[Any, Step | Slot] = {}
        self.identities: dict[Any, int] = {}

    def enter(self, variable: Any, name: str, value: Any = None) -> None:
        """Enter an array that the program is given; its value counts if it is an index array."""
        import jax

        aval, identity = variable.aval, self.identity(variable)
        if aval.dtype.kind in "iu":
            kept = value if hasattr(value, "__array__") and not isinstance(value, jax.core.Tracer) else None
            self.indices[variable] = _Index(Array(Operand(tuple(aval.shape), "int64"), name, kept, identity=identity))
        # Nothing in a jaxpr says what is differentiated. Floats may be.
        operand = Operand(tuple(aval.shape), str(aval.dtype))
        self.expressions[variable] = Expression.of(Array(operand, name, identity=identity)), ()

    def identity(self, variable: Any) -> int:
        """Return the number of a variable, which no other array of the program has."""
        if variable not in self.identities:
            self.identities[variable] = next(_identities)
        return self.identities[variable]

    def source(self, variable: Any, stretched: bool = False) -> Any:
        """Return what computes a variable, as far as `known` knows it: a step, a slot, or the value of a literal."""
        if hasattr(variable, "val"):
            return variable.val
        found = self.expressions.get(variable)
        if variable in self.steps and (stretched or found is None or found[0].shape == tuple(variable.aval.shape)):
            return self.steps[variable]
        return Slot(self.identity(variable))

    def expression(self, variable: Any, stretched: bool = False) -> Expression:
        """Return the expression of a variable; if `stretched`, it may have size 1 where the variable has not."""
        return self.known(variable, stretched)[0]

    def known(self, variable: Any, stretched: bool = False) -> tuple[Expression, tuple[int, ...]]:
        """Return the expression of a variable, and the numbers of the recorded calls that computed it."""
        literal, shape = hasattr(variable, "val"), tuple(variable.aval.shape)
        if not literal and variable in self.expressions:
            found = self.expressions[variable]
            if stretched or found[0].shape == shape:
                return found
        identity = 0 if literal else self.identity(variable)
        return Expression.of(Array(Operand(shape, str(variable.aval.dtype)), identity=identity)), ()

    def index(self, variable: Any, step: str = "") -> _Index | None:
        """Return what is known of an index array at a step, None if nothing."""
        found = None if hasattr(variable, "val") else self.indices.get(variable)
        return found if found is not None and found.step == step else None

    def run(self, jaxpr: Any) -> None:
        """Read all equations."""
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            inner = _inner(equation)
            with contextlib.suppress(Exception):  # what cannot be read is left out
                if name in _CALLS and inner is not None:
                    self._enter_call(equation, inner)
                elif inner is not None:
                    self._enter_apart(equation)
                elif name in _LOOKS:
                    _LOOKS[name](self, equation)
                    for out in equation.outvars:
                        if out in self.expressions or out in self.indices or out in self.zeros:
                            self.steps[out] = self.step(equation)

    def step(self, equation: Any) -> Step:
        """Return an equation as a step."""
        stretched = equation.primitive.name in _STRETCHED
        function = functools.partial(equation.primitive.bind, **equation.params)
        return Step(function, tuple(self.source(variable, stretched) for variable in equation.invars))

    def _enter_call(self, equation: Any, inner: Any) -> None:
        """Read a function that is called: its arguments are those of the call."""
        jaxpr = getattr(inner, "jaxpr", inner)
        reader = _Reader(self.record, self.is_backward(equation))
        _hand_on(self, equation.invars[-len(jaxpr.invars) :] if jaxpr.invars else [], reader, jaxpr.invars)
        reader.run(jaxpr)
        _hand_on(reader, jaxpr.outvars, self, equation.outvars)

    def _enter_apart(self, equation: Any) -> None:
        """Read the bodies of loops and branches: their variables are new arrays in each pass."""
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                jaxpr: Any = getattr(part, "jaxpr", part)
                if hasattr(jaxpr, "eqns"):
                    reader = _Reader(self.record, self.is_backward(equation))
                    for variable in (*jaxpr.invars, *jaxpr.constvars):
                        reader.enter(variable, "")
                    reader.run(jaxpr)

    def add(self, equation: Any, function: str, expression: Expression, completes: tuple[int, ...] = (),
            **rest: Any) -> int:  # fmt: skip
        """Record a product."""
        problem, step = problem_of(expression, **rest), self.step(equation)
        own = {array.identity for array in (*problem.operands, *problem.indices.values())}
        today = Today(step) if own == set(slots_of(step)) else None
        call = Call(_place(equation), function, problem, today, self.is_backward(equation))
        return self.record.add(call, completes)

    def is_backward(self, equation: Any) -> bool:
        """Return whether JAX made an equation of another one, for a gradient."""
        return self.backward or "transpose(" in str(equation.source_info.name_stack)


def _hand_on(reader: _Reader, variables: Sequence[Any], other: _Reader, others: Sequence[Any]) -> None:
    """Let another reader know variables under the names that it has for them."""
    for variable, new in zip(variables, others, strict=True):
        if not hasattr(variable, "val"):
            other.expressions[new] = reader.expressions.get(variable, reader.known(variable))
            other.steps[new] = reader.source(variable, True)
            if variable in reader.indices:
                other.indices[new] = reader.indices[variable]
            if variable in reader.zeros:
                other.zeros.add(new)


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
    """Casts to another integer dtype, and reshapes that add or remove a last dimension of size 1."""
    x, (out,) = equation.invars[0], equation.outvars
    found = reader.index(x)
    if found is None or len(equation.invars) > 1 or out.aval.dtype.kind not in "iu" or out.aval.dtype.itemsize < 4:
        return
    shape = found.array.operand.shape
    if tuple(out.aval.shape) in (shape, (*shape, 1)):
        reader.indices[out] = found


def _literal(variable: Any) -> int | None:
    """Return the number that a literal is."""
    value = getattr(variable, "val", None)
    return int(value) if value is not None and not getattr(value, "shape", ()) else None


def _compare(reader: _Reader, equation: Any) -> None:
    """``q < 0``."""
    q, limit = equation.invars
    found = reader.index(q)
    if found is not None and not found.size and _literal(limit) == 0:
        reader.indices[equation.outvars[0]] = dataclasses.replace(found, step="negative")


def _add(reader: _Reader, equation: Any) -> None:
    """``q + size``."""
    q, size = equation.invars
    found, number = reader.index(q), _literal(size)
    if found is not None and not found.size and number is not None and number > 0:
        reader.indices[equation.outvars[0]] = dataclasses.replace(found, size=number, step="added")


def _select(reader: _Reader, equation: Any) -> None:
    """``where(q < 0, q + size, q)``: entries that count from the end."""
    which, q, added = equation.invars
    found = reader.index(added, "added")
    conditions = reader.index(which, "negative"), reader.index(q)
    if found is not None and all(part is not None and part.array is found.array for part in conditions):
        reader.indices[equation.outvars[0]] = dataclasses.replace(found, step="")


def _cast(reader: _Reader, equation: Any) -> None:
    _pass_on(reader, equation)
    (x,), (out,) = equation.invars, equation.outvars
    if not hasattr(x, "val") and x in reader.expressions and x.aval.dtype == out.aval.dtype:
        reader.expressions[out] = reader.expressions[x]


def _promises(index: _Index, size: int, params: Mapping[str, Any], gather: bool) -> dict[str, Any] | None:
    """Return the modes of a read or of a sum of rows, and the size by which it may wrap; None if there are none."""
    mode, fill = params["mode"].name, params.get("fill_value")
    if index.size not in (0, size):
        return None
    modes: tuple[str, ...] = ()
    if mode == "PROMISE_IN_BOUNDS":
        modes = ("raise", "nan") if index.size else ("raise", "nan", "drop", "clip")
        return {"modes": frozenset(modes), "size": index.size}
    if mode == "FILL_OR_DROP":
        if not gather:
            modes = ("nan",) if index.size else ("drop",)
        elif fill is None or fill != fill:
            modes = ("nan",) if index.size else ()
        elif fill == 0 and not index.size:
            modes = ("drop",)
    elif mode == "CLIP" and not index.size:
        modes = ("clip",)
    return {"modes": frozenset(modes)} if modes else None


def _gather(reader: _Reader, equation: Any) -> None:
    """``c[q]`` and ``jnp.take``: whole slices along one dimension."""
    x, q = equation.invars
    (out,) = equation.outvars
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return
    (dim,) = numbers.start_index_map
    whole = all(n == size for d, (n, size) in enumerate(zip(x.aval.shape, sizes, strict=True)) if d != dim)
    index = reader.index(q)
    if not whole or sizes[dim] != 1 or numbers.collapsed_slice_dims != (dim,) or index is None:
        return
    shape = index.array.operand.shape
    promises = _promises(index, x.aval.shape[dim], equation.params, True)
    if tuple(q.aval.shape) != (*shape, 1) or promises is None:
        return
    taken = reader.expression(x).take(dim, index.array, **promises)
    if taken is None:
        return
    # The dimensions of the index array come first, in place, or last; the offsets say where the others are.
    rows, rest = taken.dims[dim : dim + len(shape)], (*taken.dims[:dim], *taken.dims[dim + len(shape) :])
    dims: list[int | None] = [None] * len(out.aval.shape)
    for place, axis in zip(numbers.offset_dims, rest, strict=True):
        dims[place] = axis
    for place, axis in zip([d for d, found in enumerate(dims) if found is None], rows, strict=True):
        dims[place] = axis
    reader.expressions[out] = taken.permuted([taken.dims.index(axis) for axis in dims if axis is not None]), ()


def _transpose(reader: _Reader, equation: Any) -> None:
    (x,), (out,) = equation.invars, equation.outvars
    expression, calls = reader.known(x)
    reader.expressions[out] = expression.permuted(equation.params["permutation"]), calls


def _broadcast(reader: _Reader, equation: Any) -> None:
    """New dimensions of any size: they count as new dimensions of size 1, which is the same to a product."""
    _pass_on(reader, equation)
    x, (out,) = equation.invars[0], equation.outvars
    if hasattr(x, "val") and not x.aval.shape and x.val == 0:
        reader.zeros.add(out)
    places = equation.params["broadcast_dimensions"]
    if not x.aval.shape or hasattr(x, "val"):
        return
    expression, calls = reader.known(x, stretched=True)
    for dim in range(len(out.aval.shape)):
        if dim not in places:
            expression = expression.unsqueezed(dim)
    reader.expressions[out] = expression, calls


def _squeeze(reader: _Reader, equation: Any) -> None:
    _pass_on(reader, equation)
    (x,), (out,) = equation.invars, equation.outvars
    expression, calls = reader.known(x)
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
    parts = [(reader.expression(x), each) for x, each in zip((a, b), labels, strict=True)]
    product = contract(parts, [*batch, *rest])
    if product is not None and product.shape == tuple(out.aval.shape):
        reader.add(equation, "dot_general", product)


def _multiply(reader: _Reader, equation: Any) -> None:
    a, b = equation.invars
    (out,) = equation.outvars
    if not a.aval.shape or not b.aval.shape:
        return
    product = multiply(reader.expression(a, stretched=True), reader.expression(b, stretched=True))
    if product is not None and product.reads and product.shape == tuple(out.aval.shape):
        reader.expressions[out] = product, (reader.add(equation, "mul", product),)


def _sum(reader: _Reader, equation: Any) -> None:
    (x,), (out,) = equation.invars, equation.outvars
    expression, calls = reader.known(x)
    summed = expression.squeezed(equation.params["axes"])
    if len(expression.factors) > 1 and summed.shape == tuple(out.aval.shape):
        reader.add(equation, "mul, sum", summed, calls)


def _scatter(reader: _Reader, equation: Any) -> None:
    """``zeros.at[d].add(x)`` and `segment_sum` of rows that were read, or of a product of such."""
    into, d, x = equation.invars
    numbers, shape = equation.params["dimension_numbers"], tuple(into.aval.shape)
    expression, calls = reader.known(x)
    index = reader.index(d)
    if index is None or not expression.reads or len(index.array.operand.shape) != 1 or into not in reader.zeros:
        return
    if numbers.scatter_dims_to_operand_dims != (0,) or numbers.inserted_window_dims != (0,):
        return
    promises = _promises(index, shape[0], equation.params, False)
    rows = tuple(x.aval.shape)
    if tuple(numbers.update_window_dims) != tuple(range(1, len(rows))) or rows[1:] != shape[1:] or promises is None:
        return
    scatter = 0, Read(index.array, (), **promises), shape[0]
    reader.add(equation, "scatter_add", expression, calls, scatter=scatter)


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
    "lt": _compare,
    "add": _add,
    "select_n": _select,
    **dict.fromkeys(("reshape", "copy"), _pass_on),
}
