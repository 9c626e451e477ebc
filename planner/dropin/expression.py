"""opt_einsum's `contract_path` and `contract_expression`, with planner's plans."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
import opt_einsum

from planner.api import check_names, contract, plan
from planner.dropin.einsum import read_arguments
from planner.dropin.torch_rules import search_of
from planner.language.dtypes import dtype_name, is_inexact
from planner.language.errors import PlannerError, ShapeError
from planner.language.parse import parse
from planner.language.resolve import expand_ellipses, resolve, shape_of
from planner.language.spec import Operand, Spec, Term, term_axes, term_gathers
from planner.program.frameworks import framework_of
from planner.run import torch_traces


def contract_path(*arguments: Any, shapes: bool = False, optimize: Any = "auto", **options: Any) -> tuple[Any, Any]:
    """Return the path of a contraction, and what it costs in the words of `opt_einsum.contract_path`.

    Example:
        >>> import planner
        >>> path, info = planner.contract_path("ij,jk,kl->il", (2, 30), (30, 40), (40, 5), shapes=True)
        >>> path, int(info.opt_cost), info.eq
        ([(0, 1), (0, 1)], 5600, 'ij,jk,kl->il')

    `print(info)` prints opt_einsum's table. `planner.plan` says more: implementations, bytes, time, gradients.

    Args:
        *arguments: the spec and the operands, as in `einsum`.
        shapes: whether shapes are given in place of arrays.
        optimize: as in `contract`; true and None are "auto", false is one step over all operands, as opt_einsum has it.
        **options: those of `plan`.

    Returns:
        The path, and an `opt_einsum.contract.PathInfo`.

    Raises:
        PlannerError: the spec has gathers, which a path does not show; or as `plan`.
    """
    spec, operands, options = read_arguments(arguments, options)
    parsed = spec if isinstance(spec, Spec) else parse(spec)
    if parsed.arrays:
        raise PlannerError("a PathInfo has no gathers: call planner.plan, and look at its path and steps")
    options.setdefault("backend", "numpy" if shapes else None)
    arrays = [x if shapes or framework_of(x) else np.asarray(x) for x in operands]
    made = plan(spec, *arrays, optimize=search_of(optimize), **options)
    text = str(parsed).replace(" ", "")
    path = [tuple(range(len(arrays)))] if optimize is False else list(made.path)
    try:
        _, info = opt_einsum.contract_path(text, *(o.shape for o in made.operands), shapes=True, optimize=path)
    except ValueError as error:
        raise PlannerError(f"no PathInfo of {text!r:.80} ({error}): call planner.plan, and look at its path") from None
    return info.path, info


def contract_expression(
    *arguments: Any, constants: Collection[int] | None = None, **options: Any
) -> ContractExpression:
    """Return a function of the operands that are not constant, as `opt_einsum.contract_expression` does.

    Example:
        >>> import numpy as np
        >>> import planner
        >>> a, b = np.arange(6.0).reshape(2, 3), np.ones((3, 4))
        >>> expression = planner.contract_expression("ij,jk,kl->il", a, b, (4, 5), constants=[0, 1])
        >>> expression
        <ContractExpression('[ij,jk],kl->il', constants=[0, 1])>
        >>> expression(np.ones((4, 5))).shape
        (2, 5)

    Parts of the plan that read constants alone are computed once, here. What is left is planned for the arrays of each
    call, so these may have other shapes. Constants may be arrays of any framework; a call takes them to the framework
    and the device of its arrays, once for each. A constant that needs a gradient is an operand of every call, and so
    is one of whole numbers without ``dtype=``.

    Args:
        *arguments: the spec and the shapes of the operands, or arrays where they are constant.
        constants: the positions of the constants.
        **options: those of `contract`, and index arrays or their shapes.

    Returns:
        The function.

    Raises:
        PlannerError: a position is no operand's; or as `plan`.
    """
    spec, operands, options = read_arguments(arguments, options)
    return ContractExpression(spec, operands, () if constants is None else constants, options)


class ContractExpression:
    """A contraction of which some operands are constant; `contract_expression` has an example and makes it.

    >>> import planner
    >>> planner.contract_expression("ij,jk->ik", (2, 3), (3, 4))
    <ContractExpression('ij,jk->ik')>

    Attributes:
        text: the spec, with brackets around constants.
        constants: the positions of the constants.
        remaining: the spec of what a call computes.
    """

    def __init__(
        self, spec: str | Spec, operands: Sequence[Any], constants: Collection[int], options: Mapping[str, Any]
    ) -> None:
        self.constants = _positions(constants, len(operands))
        self.options = {name: value for name, value in options.items() if len(name) > 1}
        check_names(contract, [name for name in self.options if name not in signature(contract).parameters])
        if self.options.get("optimize", True) is False:
            raise PlannerError("optimize=False: an expression is planned, leave it out")
        self.options["optimize"] = search_of(self.options.get("optimize"))
        indices = {name: shape_of(value, name) for name, value in options.items() if len(name) == 1}
        shapes = [shape_of(x, f"operand {number}") for number, x in enumerate(operands)]
        resolve(spec, *shapes, sizes=self.options.get("sizes"), **indices)
        parsed = expand_ellipses(spec if isinstance(spec, Spec) else parse(spec), shapes, indices)
        self.text = _marked(parsed, self.constants)
        self._count = len(operands) - len(self.constants)
        # The operands of a call, by the positions that each stands for: variables are None.
        self._operands: list[Any] = [None] * len(operands)
        self._framework = "numpy"
        self._taken: dict[Any, list[Any]] = {}
        self.remaining = str(parsed)
        if self.constants:
            values = {n: _as_array(operands[n]) for n in self.constants}
            self._framework = framework_of(values[self.constants[0]]) or "numpy"
            self._fold(parsed, shapes, indices, values)

    def _fold(
        self,
        parsed: Spec,
        shapes: Sequence[tuple[int, ...]],
        indices: Mapping[str, tuple[int, ...]],
        values: Mapping[int, Any],
    ) -> None:
        """Compute the parts of a plan that read constants alone."""
        asked: dict[str, Any] = {n: x for n, x in self.options.items() if n in ("sizes", "optimize", "minimize")}
        path = plan(parsed, *map(Operand, shapes), backend="numpy", **asked, **dict[str, Any](indices)).path
        # The call's dtype is not known yet: whole numbers would wrap around in their own, where its floats do not.
        wide = self.options.get("dtype") is not None
        known = {n for n, x in values.items() if not _varies(x) and (wide or is_inexact(dtype_name(x.dtype)))}
        fixed = {n for n in known if not term_gathers(parsed.inputs[n])}
        leaves, rest = _fold_path(path, len(shapes), fixed)
        terms: list[Term] = []
        self._operands = []
        for leaf in leaves:
            if not fixed.issuperset(leaf):
                terms.append(parsed.inputs[leaf[0]])
                self._operands.append(values.get(leaf[0]))
                continue
            others = {axis for n, term in enumerate(parsed.inputs) if n not in leaf for axis in term_axes(term)}
            others.update(term_axes(parsed.output))
            inputs = tuple(parsed.inputs[n] for n in leaf)
            output = tuple(axis for axis in term_axes(sum(inputs, ())) if axis in others)
            part = Spec(inputs, output)
            terms.append(output)
            arrays = [_taken_to(values[n], self._framework, None) for n in leaf]
            dtype = self.options.get("dtype")
            with _outside_of_traces(self._framework):
                folded = arrays[0] if inputs == (output,) else contract(str(part), *arrays, dtype=dtype)
            self._operands.append(folded)
        self.remaining = str(Spec(tuple(terms), parsed.output))
        if not (isinstance(self.options["optimize"], str) or callable(self.options["optimize"])):
            self.options["optimize"] = rest

    def __call__(self, *arrays: Any, out: Any = None, backend: str = "auto", **indices: Any) -> Any:
        """Contract arrays with the constants.

        Args:
            *arrays: the operands that are not constant.
            out: an array to write the result into.
            backend: where to compute with NumPy arrays: they are taken to "torch" or "jax", and the result back.
            **indices: index arrays, by letter.

        Raises:
            ShapeError: there are more or fewer arrays.
            PlannerError: `out` has another shape; or as `contract`.
        """
        if len(arrays) != self._count:
            raise ShapeError(
                f"this `ContractExpression` takes exactly {self._count} array arguments but received {len(arrays)}: "
                "give those that are not constant"
            )
        given = [_as_array(x) for x in arrays]
        framework = framework_of(given[0]) if given else self._framework
        back = framework == "numpy" and backend in ("torch", "jax")
        if back:
            framework = backend
            given = [_taken_to(x, framework, None) for x in given]
        rest = iter(given)
        device = getattr(given[0], "device", None) if framework == "torch" and given else None
        operands = [next(rest) if x is None else x for x in self._constants_on(framework or "numpy", device)]
        result = contract(self.remaining, *operands, **self.options, **indices)
        if back:
            result = _taken_to(result, "numpy", None)
        if out is None:
            return result
        if getattr(out, "shape", None) != result.shape:
            raise PlannerError(f"out= is no array of the result's shape {tuple(result.shape)}: {out!r:.80}")
        out[...] = result
        return out

    def _constants_on(self, framework: str, device: Any) -> list[Any]:
        """Return the folded constants as arrays of a framework on a device, with None for operands of the call."""
        taken = self._taken.get((framework, device))
        if taken is None:
            with _outside_of_traces(framework):
                taken = [x if x is None else _taken_to(x, framework, device) for x in self._operands]
            if not _passes(framework):
                self._taken[framework, device] = taken
        return taken

    def __repr__(self) -> str:
        constants = f", constants={list(self.constants)}" if self.constants else ""
        return f"<ContractExpression({self.text!r}{constants})>"


def _positions(constants: Any, count: int) -> tuple[int, ...]:
    """Return the positions of constants among operands, in order, each once."""
    try:
        named = {operator.index(n) for n in constants}
    except TypeError:
        raise PlannerError(f"constants= takes positions of operands, such as [0, 2], not {constants!r:.80}") from None
    for number in named:
        if not -count <= number < count:
            raise PlannerError(f"constants= names operand {number}, but there are {count} operands")
    return tuple(sorted({number % count for number in named}))


def _marked(spec: Spec, constants: Collection[int]) -> str:
    """Return the text of a spec with brackets around the terms of constants."""
    terms = ["".join(map(str, term)) for term in spec.inputs]
    text = ",".join(f"[{term}]" if n in constants else term for n, term in enumerate(terms))
    return f"{text.replace('],[', ',')}->{''.join(map(str, spec.output))}"


def _fold_path(
    path: Sequence[Sequence[int]], count: int, fixed: Collection[int]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return what a path joins once constants are folded, each as the operands in it, and the path over these."""
    left: list[tuple[int, ...]] = [(n,) for n in range(count)]
    joins = []
    for step in path:
        picked = [left[i] for i in step]
        left = [x for i, x in enumerate(left) if i not in step]
        left.append(tuple(sorted(n for x in picked for n in x)))
        if not set(left[-1]) <= set(fixed):
            joins.append((picked, left[-1]))
    leaves = sorted(x for picked, _ in joins for x in picked if len(x) == 1 or set(x) <= set(fixed)) or left
    rest: list[tuple[int, ...]] = []
    left = list(leaves)
    for picked, whole in joins:
        rest.append(tuple(sorted(left.index(x) for x in picked)))
        left = [x for x in left if x not in picked]
        left.append(whole)
    return leaves, rest or [(0,)]


def _as_array(x: Any) -> Any:
    """Return an array of a framework as it is, and anything else as a NumPy array."""
    return x if framework_of(x) is not None else np.asarray(x)


def _varies(x: Any) -> bool:
    """Whether a constant must be read anew by every call: gradients flow to it, or its values are not known."""
    return bool(getattr(x, "requires_grad", False)) or hasattr(x, "aval") and not hasattr(x, "addressable_shards")


def _taken_to(x: Any, framework: str, device: Any) -> Any:
    """Return an array as one of a framework, on a device of torch if one is given."""
    if framework == "torch":
        import torch

        values = x if isinstance(x, torch.Tensor) else torch.as_tensor(np.require(x, requirements="W"))
        return values if device is None else values.to(device)
    if framework_of(x) == "torch":
        x = x.detach().cpu().numpy()
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    return np.asarray(x)


def _passes(framework: str) -> bool:
    """Whether tensors that are made now belong to a context that passes: a trace, or inference mode."""
    if framework != "torch":
        return False
    import torch

    if torch.compiler.is_compiling():  # the compiler reads no further
        return True
    return torch.is_inference_mode_enabled() or torch_traces() or bool(torch._C._len_torch_dispatch_stack())


def _outside_of_traces(framework: str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which JAX computes values at once, so that they can outlive the trace that it is in."""
    if framework != "jax":
        return contextlib.nullcontext()
    import jax

    return jax.ensure_compile_time_eval()
