"""`einsum`, which takes the calls of `torch.einsum`, `numpy.einsum` and `jax.numpy.einsum` and plans them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from planner.api import contract, run_met
from planner.dropin.torch_rules import dims_of, has_private_sum, search_of, torch_einsum
from planner.language.errors import PlannerError, PlannerTypeError
from planner.language.parse import parse_sublists
from planner.language.resolve import replace_labels
from planner.language.spec import Spec
from planner.program.calls import RunPlan
from planner.program.frameworks import framework_of, load_backend
from planner.run import torch_compiles


def einsum(
    *arguments: Any,
    **options: Any,  # torch.jit.script cannot compile this: use torch.jit.trace or torch.export
) -> Any:
    """Contract arrays as the einsum of their framework does: a drop-in for `torch.einsum`, `np.einsum`, `jnp.einsum`.

    `contract` has its own rules, the same in every framework. This function follows the framework of the operands: what
    may be an operand, which keywords there are, which dtype and kind of result comes back.

    Example:
        >>> import numpy as np
        >>> import planner
        >>> planner.einsum("i,i", [1, 2], [3, 4])
        np.int64(11)
        >>> out = np.zeros((2, 2), "float32")
        >>> planner.einsum(np.eye(2, dtype="float32"), [0, 1], np.ones((2, 2), "f4"), [1, 2], [0, 2], out=out) is out
        True

    Args:
        *arguments: the spec and the operands, one by one or in one list; or each operand and its list of labels, and
            then, if it is not implicit, the list of the output. NumPy arrays, lists and numbers beside a JAX array
            become JAX arrays. Without an array of torch or JAX all operands become NumPy arrays.
        **options: the framework's keywords. numpy: ``out``, ``dtype``, ``order``, ``casting``, ``optimize``. jax:
            ``optimize``, ``precision``, ``preferred_element_type``, ``out_sharding``, ``_dot_general``. torch has none.
            A true, false or missing ``optimize`` is "auto". Others are index arrays and the options of `contract`.

    Returns:
        The result, as the framework's einsum returns it: in torch sums of integers are int64, in NumPy results without
        dimensions are scalars.

    Raises:
        PlannerTypeError: a keyword or an operand is one that planner does not take, or NumPy's rule of casting forbids
            a dtype.
        PlannerError: as `contract`.
    """
    if torch_compiles() and not isinstance(arguments[0], str):
        if "sizes" in options:
            return contract(*arguments, **options)
        arguments = _written_as_text(arguments)
    if len(arguments) > 1 and isinstance(arguments[0], str):  # as below, in less time
        framework = framework_of(arguments[1])
        if framework == "torch":
            return torch_einsum(arguments[0], arguments[1:], options)
        run = _met_in_jax(arguments[0], arguments[1:], options) if framework == "jax" else None
        if run is not None:
            return run(arguments[1:], options)
    spec, operands, options = read_arguments(arguments, options)
    return einsum_in(_framework_of(operands), spec, operands, options)


def _met_in_jax(spec: str, operands: Sequence[Any], indices: dict[str, Any]) -> RunPlan | None:
    """Return the function that runs a call which `contract` has met, if all operands are arrays of JAX; else None.

    In such calls `contract` does what `jnp.einsum` does. In traced programs a call may go along another path.
    """
    tracer = sys.modules["jax"].core.Tracer
    if any([isinstance(x, tracer) for x in operands]):
        return None
    try:
        return run_met(spec, load_backend("jax").signature(operands, indices))
    except (AttributeError, TypeError):  # something is no array, or there are options
        return None


def einsum_in(framework: str, spec: str | Spec, operands: Sequence[Any], options: dict[str, Any]) -> Any:
    """Contract operands as the einsum of a framework does."""
    return _CONVENTIONS[framework](spec, operands, options)


def read_arguments(
    arguments: Sequence[Any], options: dict[str, Any]
) -> tuple[str | Spec, Sequence[Any], dict[str, Any]]:
    """Return the spec, the operands and the options of a call. Sizes that go by label go by letter then.

    Raises:
        PlannerTypeError: there is no operand, or operands and lists of labels do not alternate.
        SpecError: a list of labels holds two ellipses.
        ShapeError: ``sizes=`` names what is no label.
    """
    if not arguments:
        raise PlannerTypeError("no spec was given; an example is einsum('ij, jk -> ik', a, b)")
    spec, operands = arguments[0], arguments[1:]
    if not isinstance(spec, (str, Spec)):
        parsed, operands, letters = parse_sublists(arguments)
        if "sizes" in options:
            options = {**options, "sizes": replace_labels(options["sizes"], letters)}
        return str(parsed), operands, options
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        # One list is all operands, or else, in NumPy, the entries of one.
        kinds = {framework_of(x) for x in operands[0]}
        terms = spec.count(",") + 1 if isinstance(spec, str) else len(spec.inputs)
        if kinds & {"torch", "jax"} or (terms > 1 and len(operands[0]) == terms):
            operands = tuple(operands[0])
    return spec, operands, options


def _written_as_text(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a call whose operands have lists of labels as one with a spec."""
    paired = len(arguments) - len(arguments) % 2
    lists = tuple([tuple(labels) for labels in (*arguments[1::2], *arguments[paired:])])
    return _spec_of_lists(lists, paired // 2), *arguments[0:paired:2]


def _spec_of_lists(lists: tuple[tuple[Any, ...], ...], count: int) -> str:
    """Return the spec of a call of so many operands with lists of labels."""
    alternating = [x for labels in lists[:count] for x in (None, labels)]
    return str(parse_sublists([*alternating, *lists[count:]])[0])


# torch's compiler calls this, and does not trace it.
_spec_of_lists.__dict__["_dynamo_marked_constant"] = True


def _framework_of(operands: Sequence[Any]) -> str:
    """Return whose einsum would take these operands."""
    if operands and framework_of(operands[0]) == "torch":
        return "torch"
    kinds = [framework_of(x) for x in operands]
    if "torch" in kinds or any(hasattr(type(x), "__torch_function__") for x in operands):
        return "torch"
    return "jax" if "jax" in kinds or any(hasattr(x, "__jax_array__") for x in operands) else "numpy"


def _numpy(spec: str | Spec, operands: Sequence[Any], options: dict[str, Any]) -> Any:
    """`np.einsum`: anything that makes an array is an operand, and views are views of it."""
    options = dict(options)
    out, order, casting = options.pop("out", None), options.pop("order", "K"), options.pop("casting", "safe")
    options["optimize"] = search_of(options.pop("optimize", None))
    for number, x in enumerate(operands):
        if hasattr(type(x), "__array_function__") and not isinstance(x, (np.ndarray, np.generic)):
            raise PlannerTypeError(f"operand {number} is a {type(x).__name__}: convert it with numpy.asarray first")
    arrays = [np.asarray(x) for x in operands]
    order = order.upper() if isinstance(order, str) else order
    if order not in ("C", "F", "A", "K"):
        raise PlannerTypeError(f"order={order!r:.80} is unknown: take one of 'C', 'F', 'A', 'K'")
    if casting not in ("no", "equiv", "safe", "same_kind", "unsafe"):
        raise PlannerError(f"casting={casting!r:.80} is unknown: take 'no', 'equiv', 'safe', 'same_kind' or 'unsafe'")
    if out is not None and not isinstance(out, np.ndarray):
        raise PlannerTypeError(f"out= is a {type(out).__name__}, not a NumPy array")
    try:
        dtype = None if options.get("dtype") is None else np.dtype(options["dtype"])
    except TypeError as error:
        raise PlannerTypeError(f"dtype={options['dtype']!r:.80}: {error}") from None
    if dtype is None and out is not None and arrays:
        dtype = np.result_type(*(x.dtype for x in arrays), out.dtype)
    moved = len(arrays) == 1 and out is None and not has_private_sum(spec, dims_of(arrays))
    options["dtype"] = dtype = None if moved else dtype  # NumPy returns a view, whatever the dtype
    if dtype is not None:
        try:
            arrays = [x.astype(dtype, casting=casting, copy=False) for x in arrays]
            np.empty(0, dtype).astype(dtype if out is None else out.dtype, casting=casting)
        except TypeError as error:
            raise PlannerTypeError(f"{error}: pass another casting=") from None
    result = contract(spec, *arrays, **options)
    if out is not None:
        if out.shape != result.shape:
            raise PlannerError(f"out= has shape {out.shape}, but the result has shape {result.shape}")
        np.copyto(out, result, casting=casting)
        return out
    repeats = result.size and any(n > 1 and step == 0 for n, step in zip(result.shape, result.strides, strict=True))
    if moved and arrays[0].flags.writeable and not (result.flags.writeable or repeats):
        with contextlib.suppress(ValueError):  # NumPy cannot tell whether memory of other libraries may be written
            result.flags.writeable = True  # NumPy's own diagonals are read-only, einsum's are not
    if order != "K" and not moved:
        fortran = all(x.flags.f_contiguous and not x.flags.c_contiguous for x in arrays)
        result = np.asarray(result, order="F" if order == "F" or (order == "A" and fortran) else "C")
    return result[()]


def _jax(spec: str | Spec, operands: Sequence[Any], options: dict[str, Any]) -> Any:
    """`jnp.einsum`, whose rules are loaded with the first call."""
    from planner.dropin.jax_rules import jax_einsum

    return jax_einsum(spec, operands, options)


_CONVENTIONS: dict[str, Callable[[str | Spec, Sequence[Any], dict[str, Any]], Any]] = {
    "torch": torch_einsum,
    "numpy": _numpy,
    "jax": _jax,
}
