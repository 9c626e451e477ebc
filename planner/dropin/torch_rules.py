"""What `torch.einsum` does beyond values: how it sums integers, how results lie, how little it keeps for gradients.

A plan takes operands to be free, since their owner often holds them anyway. Where `torch.einsum` keeps a sum or a copy
of an operand, and lets the operand go, such a plan would keep more. So here operands are summed or copied first where
`torch.einsum` does it, and a plan that keeps more than the steps of `torch.einsum` gives way to them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from opt_einsum import contract_path

from planner.api import contract, plan, run_met
from planner.cost.layout import view_strides
from planner.language.cached import BACKEND_CACHES, enter
from planner.language.dtypes import dtype_name, itemsize
from planner.language.errors import ShapeError
from planner.language.parse import parse
from planner.language.resolve import expand_ellipses
from planner.language.spec import Operand, Spec
from planner.program.calls import RunPlan
from planner.program.frameworks import framework_of, load_backend
from planner.run import torch_compiles, torch_traces


def _of_constants(
    function: Callable[[str | Spec, tuple[int, ...]], bool],
) -> Callable[[str | Spec, tuple[int, ...]], bool]:
    """Remember the results of a function of constants. torch's compiler calls it, and does not trace it."""
    cached = lru_cache(maxsize=1024)(function)

    def call(spec: str | Spec, dims: tuple[int, ...]) -> bool:
        return cached(spec, dims)

    call.__dict__["_dynamo_marked_constant"] = True  # as torch.compiler.assume_constant_result does
    return call


def search_of(optimize: Any) -> Any:
    """Return the `optimize=` of an einsum as ours."""
    if optimize is None or isinstance(optimize, bool):
        return "auto"
    if isinstance(optimize, (list, tuple)) and optimize and isinstance(optimize[0], str):
        # ["einsum_path", (0, 1), ...], or a name with a limit in elements, which has no like here.
        return list(optimize[1:]) if optimize[0] == "einsum_path" else optimize[0]
    return optimize


# The functions that run calls in which `contract` does all that `torch.einsum` does, by spec, signature and whether
# operands are parts of larger arrays.
_ALIKE: dict[Any, RunPlan] = {}
_MOST_ALIKE = 1024
# Of so many elements an operand may be copied for a result in order, which takes less time than to give a result its
# order; and what may stand in a spec of `torch.einsum`.
_MOST_COPIED = 2**15
_EINSUM_TEXT = frozenset(string.ascii_letters + "->,. ")
BACKEND_CACHES.append(_ALIKE)


def torch_einsum(spec: str | Spec, operands: Sequence[Any], options: dict[str, Any]) -> Any:
    """Contract as `torch.einsum` does; in a traced function, and with options of `contract`, a plan alone decides."""
    key = run = None
    if not (options or torch_compiles()):
        try:
            signature = load_backend("torch").signature(operands, {})
            if signature is not None:  # nothing overrides the call
                key = spec, signature, tuple([x._base is not None and _is_part(x) for x in operands])
                run = _ALIKE.get(key)
        except (AttributeError, TypeError):  # something is no tensor, or sizes are symbols
            key = None
    if run is not None:
        return run(operands, {})
    result, finish = _planned(spec, operands, options)
    if finish is not None and key is not None and (run := run_met(*key[:2])) is not None:
        enter(_ALIKE, key, finish(run), _MOST_ALIKE)
    return result


def _as_planned(run: RunPlan) -> RunPlan:
    return run


def _in_row_major(run: RunPlan) -> RunPlan:
    return lambda operands, indices: run(operands, indices).contiguous()


def _by_einsum(spec: str) -> Callable[[RunPlan], RunPlan]:
    """Return what makes a function that calls `torch.einsum`, but for a profiler, which shows the plan's steps."""
    torch = sys.modules["torch"]
    einsum, profiler = torch._C._VariableFunctions.einsum, torch.autograd.profiler

    def finish(run: RunPlan) -> RunPlan:
        return lambda operands, indices: (
            run(operands, indices).contiguous() if profiler._is_profiler_enabled else einsum(spec, operands)
        )

    return finish


def _as_einsum(spec: str | Spec) -> Callable[[RunPlan], RunPlan]:
    """Return what makes a function that calls `torch.einsum`.

    It does so for a profiler too, since the plan's result would be copied.
    """
    einsum = sys.modules["torch"]._C._VariableFunctions.einsum
    return lambda run: lambda operands, indices: einsum(spec, operands)


def _is_own_outer(spec: str | Spec, operands: Sequence[Any]) -> bool:
    """Whether a call is an outer product of two plain arrays, which planner may lay out otherwise than torch.

    Then torch multiplies itself: programs may call `.view` on its result.
    """
    torch = sys.modules["torch"]
    plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in operands)
    return plain and len(operands) == 2 and _is_outer(spec, dims_of(operands))


def _planned(
    spec: str | Spec, operands: Sequence[Any], options: dict[str, Any]
) -> tuple[Any, Callable[[RunPlan], RunPlan] | None]:
    """Return the result of a call, and what makes the function for such calls of the one that runs their plan.

    The latter is None if `contract` was not given the call as it is.
    """
    asked, given = spec, operands
    if "optimize" in options:
        options = {**options, "optimize": search_of(options["optimize"])}
    bare = not options and len(operands) > 1 and not torch_traces() and isinstance(spec, str) and _is_theirs(spec)
    if bare and isinstance(spec, str) and _trains(operands):
        if len(operands) > 2 and (steps := _lean_steps(spec, _described(operands), _autocast(operands))):
            values = list(operands)
            for places, part in steps:
                values.append(torch_einsum(part, [values.pop(place) for place in places], {}))
            return values[0].contiguous(), None
        if summed := _with_sums_first(spec, tuple(tuple(x.shape) for x in operands)):
            spec, operands = summed[0], [step.run(x) for x, step in zip(operands, summed[1], strict=True)]
        if len(operands) == 2:
            if operands[0].dtype != operands[1].dtype and not _is_summed(spec, *(tuple(x.shape) for x in operands)):
                # `mul` reads two dtypes as they are, and keeps neither in the other's. A plan casts one.
                return sys.modules["torch"].einsum(spec, *operands), None
            operands = [_freed(spec, operands, n) for n in range(2)]
    elif "dtype" not in options and all(map(_is_whole, operands)) and has_private_sum(spec, dims_of(operands)):
        options = {**options, "dtype": "int64"}
    if bare and spec is asked and _is_own_outer(spec, operands):
        return sys.modules["torch"].einsum(spec, *operands), _as_einsum(spec)
    result = contract(spec, *operands, **options)
    if framework_of(result) != "torch":  # fx records the call
        return result, None
    unchanged = spec is asked and not options and all(x is y for x, y in zip(operands, given, strict=True))
    finish: Callable[[RunPlan], RunPlan] | None = _as_planned if unchanged else None
    if result.is_contiguous():
        return result, finish
    if len(operands) == 2 and bare and isinstance(spec, str) and not _trains(operands):
        few = max(x.numel() for x in (*operands, result)) <= _MOST_COPIED
        by_matmul = operands[0].dtype == operands[1].dtype and load_backend("torch").ops.has_matmul(operands[0])
        if unchanged and few and by_matmul:
            finish = _by_einsum(spec)
            return finish(lambda *_: result)(operands, {}), finish
        if not (has_private_sum(asked, dims_of(given)) or _is_summed(spec, *(tuple(x.shape) for x in operands))):
            return result, finish
    if not _is_row_major(asked, dims_of(given)):
        return result, finish
    return result.contiguous(), finish and _in_row_major


@lru_cache(maxsize=1024)
def _is_theirs(spec: str) -> bool:
    """Whether `torch.einsum` takes a spec: it has no index arrays, no other letters, and no diagonals to write on."""
    output = spec.partition("->")[2].replace("...", "").replace(" ", "")
    return set(spec) <= _EINSUM_TEXT and len(set(output)) == len(output)


def _is_whole(x: Any) -> bool:
    """Whether something is a tensor of integers or booleans."""
    return framework_of(x) == "torch" and not (x.is_floating_point() or x.is_complex())


def _autocast(operands: Sequence[Any]) -> Any:
    """Return the dtype of `torch.autocast` for tensors, or False."""
    torch, kind = sys.modules["torch"], operands[0].device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)


def _trains(operands: Sequence[Any]) -> bool:
    """Whether autograd will record a contraction of tensors."""
    if any(framework_of(x) != "torch" for x in operands):
        return False
    return any(x.requires_grad for x in operands) and bool(sys.modules["torch"].is_grad_enabled())


def _described(operands: Sequence[Any]) -> tuple[tuple[Operand, bool], ...]:
    """Return stand-ins for tensors, each with whether it is a part of a larger array."""
    return tuple(
        (Operand(tuple(x.shape), dtype_name(x.dtype), x.stride(), x.requires_grad), _is_part(x)) for x in operands
    )


def _is_part(x: Any) -> bool:
    """Whether a tensor is a view of a part of an array, which it keeps alive."""
    if x._base is None:
        return False
    with contextlib.suppress(RuntimeError, NotImplementedError):  # some tensors have no storage
        return bool(x.untyped_storage().nbytes() > x.numel() * x.element_size())
    return False


@lru_cache(maxsize=1024)
def _lean_steps(
    spec: str, described: tuple[tuple[Operand, bool], ...], autocast: Any
) -> tuple[tuple[tuple[int, ...], str], ...] | None:
    """Return the steps of `torch.einsum` if its path keeps less than our plan: for each the operands and its spec.

    Under autocast (its dtype, or False) that is also so where some of these steps are computed in the half type, and
    others are not. A plan is computed in one dtype.
    """
    operands = [operand for operand, _ in described]
    shapes = tuple(x.shape for x in operands)
    parsed = expand_ellipses(parse(spec), shapes, {})
    _, info = contract_path(str(parsed).replace(" ", ""), *shapes, shapes=True, optimize="auto")
    steps = tuple((places, text) for places, _, text, _, _ in info.contraction_list)
    if any(is_part for _, is_part in described) or any(len(set(term)) < len(term) for term in parsed.inputs):
        return steps  # what a part keeps alive, and a diagonal is one, is known for each step
    if autocast and len(set(_step_dtypes(steps, operands, info.size_dict))) > 1:
        return steps
    width = itemsize(plan(spec, *operands, backend="torch").dtype)
    values = [("".join(map(str, term)), x.requires_grad) for term, x in zip(parsed.inputs, operands, strict=True)]
    theirs = 0
    for places, text in steps:
        picked, result = [values.pop(place) for place in places], text.split("->")[1]
        for n, (term, _) in enumerate(picked):
            others = picked[:n] + picked[n + 1 :]
            if any(grad for _, grad in others):  # it is summed over what it has alone, and kept
                axes = set(term) & set("".join([result, *(other for other, _ in others)]))
                theirs += math.prod(info.size_dict[axis] for axis in axes) * width
        values.append((result, any(grad for _, grad in picked)))
    left = operands
    if summed := _with_sums_first(spec, shapes):
        spec, first = summed
        left = [Operand(f.shape(x.shape), x.dtype, None, x.requires_grad) for x, f in zip(operands, first, strict=True)]
    read = left if sum(x.requires_grad for x in left) > 1 else [x for x in left if not x.requires_grad]
    ours = plan(spec, *left, backend="torch").cost.retained_bytes + sum(x.elements for x in read) * width
    return steps if ours > theirs else None


def _step_dtypes(
    steps: Sequence[tuple[tuple[int, ...], str]], operands: Sequence[Operand], sizes: Mapping[str, int]
) -> Iterator[str]:
    """Yield the dtype of each step of `torch.einsum` in this context."""
    values = list(operands)
    for places, text in steps:
        dtype = plan(text, *(values.pop(place) for place in places), backend="torch").dtype
        values.append(Operand(tuple(sizes[axis] for axis in text.split("->")[1]), dtype))
        yield dtype


@lru_cache(maxsize=1024)
def _is_summed(spec: str, *shapes: tuple[int, ...]) -> bool:
    """Whether two operands share an axis that is summed. To torch an axis of size 1 is none."""
    parsed = expand_ellipses(parse(spec), shapes, {})
    large = [
        {e for e, n in zip(term, shape, strict=True) if n != 1}
        for term, shape in zip(parsed.inputs, shapes, strict=True)
    ]
    return not large[0] & large[1] <= set(parsed.output)


@dataclasses.dataclass(frozen=True, slots=True)
class _First:
    """What `torch.einsum` does with an operand before it multiplies: it takes diagonals, then it sums dimensions.

    Each diagonal is of two dimensions, and is the last dimension of what is left. Dimensions of size 1 are dropped.
    """

    diagonals: tuple[tuple[int, int], ...]
    summed: tuple[int, ...]
    dropped: tuple[int, ...]

    def run(self, x: Any) -> Any:
        for first, second in self.diagonals:
            x = x.diagonal(dim1=first, dim2=second)
        x = x.sum(self.summed, keepdim=True) if self.summed else x
        return x.squeeze((*self.summed, *self.dropped))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what `run` returns for a tensor of a shape without diagonals."""
        return tuple(n for d, n in enumerate(shape) if d not in self.summed + self.dropped)


@lru_cache(maxsize=1024)
def _with_sums_first(spec: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[str, tuple[_First, ...]] | None:
    """Return the spec of operands that are summed over the axes that no other term has, and how they come to be that.

    What is summed is all that `torch.einsum` keeps of such an operand. A plan may keep it whole, as operands are free.
    To torch an axis of size 1 is none. None is returned if nothing is summed, and no axis repeats within a term.
    """
    parsed = expand_ellipses(parse(spec), shapes, {})
    large = [
        {axis for axis, size in zip(term, shape, strict=True) if size != 1}
        for term, shape in zip(parsed.inputs, shapes, strict=True)
    ]
    inputs, first = [], []
    for n, term in enumerate(parsed.inputs):
        left, diagonals = list(term), []
        while repeated := next((axis for axis in left if left.count(axis) > 1), None):
            one = left.index(repeated)
            two = left.index(repeated, one + 1)
            diagonals.append((one, two))
            left = [axis for d, axis in enumerate(left) if d not in (one, two)] + [repeated]
        private = large[n].difference(parsed.output, *large[:n], *large[n + 1 :])
        ones = set(term).difference(parsed.output, large[n])
        summed, dropped = (tuple(d for d, axis in enumerate(left) if axis in axes) for axes in (private, ones))
        first.append(_First(tuple(diagonals), summed, dropped))
        inputs.append(tuple(axis for axis in left if axis not in private | ones))
    if not any(step.diagonals or step.summed for step in first):
        return None
    return str(Spec(tuple(inputs), parsed.output)), tuple(first)


def _freed(spec: str, operands: Sequence[Any], number: int) -> Any:
    """Return an operand, or a copy if `torch.einsum` would keep a copy of it where we would keep a part of an array.

    Keeping a part keeps the whole array alive: the keys of ``qkv.chunk(3)`` keep the queries.
    """
    x, other = operands[number], operands[1 - number]
    if not other.requires_grad:
        return x
    if _is_part(x):
        order = _copied_order(spec, tuple(x.shape), tuple(other.shape), x.stride(), number)
        if order is not None:
            back = sorted(range(len(order)), key=order.__getitem__)
            return x.permute(order).contiguous().permute(back)
    return x


@lru_cache(maxsize=1024)
def _copied_order(
    spec: str, shape: tuple[int, ...], other_shape: tuple[int, ...], strides: tuple[int, ...], number: int
) -> tuple[int, ...] | None:
    """Return the order of dimensions in which `torch.einsum` copies an operand for its product; None if it does not.

    The product has one axis for all batch axes, one for the operand's own, and one for the summed ones. An operand
    whose axes cannot be viewed so is copied.
    """
    shapes = (shape, other_shape) if number == 0 else (other_shape, shape)
    parsed = expand_ellipses(parse(spec), shapes, {})
    term = parsed.inputs[number]
    # A dimension of size 1 is none to torch.
    large, others = (
        {axis for axis, size in zip(entries, sizes, strict=True) if size != 1}
        for entries, sizes in ((term, shape), (parsed.inputs[1 - number], other_shape))
    )
    shared = [axis for axis in parsed.output if axis in large and axis in others]
    own = [axis for axis in parsed.output if axis in large and axis not in others]
    summed = sorted(str(axis) for axis in large & others if axis not in parsed.output)
    if not summed or len({*shared, *own, *summed}) != sum(size != 1 for size in shape):
        return None  # not a product of matrices, or not of the operand as it is
    order = [term.index(axis) for axis in (*shared, *own, *summed)]
    order = [d for d in range(len(term)) if shape[d] == 1] + order
    sizes = [math.prod(shape[term.index(axis)] for axis in group) for group in (shared, own, summed)]
    viewed = view_strides([shape[d] for d in order], [strides[d] for d in order], sizes)
    return tuple(order) if viewed is None else None


def dims_of(operands: Sequence[Any]) -> tuple[int, ...]:
    """Return how many dimensions each operand has; 0 for an object that does not say."""
    return tuple([getattr(x, "ndim", 0) for x in operands])


def _written_out(spec: str | Spec, dims: tuple[int, ...]) -> Spec:
    """Return a spec whose ellipses are axes, of which an empty ellipsis has none.

    A spec with index arrays, whose ellipses may stand in brackets, is returned as it is. So is one that does not fit
    the operands: `contract` says why.
    """
    parsed = parse(spec) if isinstance(spec, str) else spec
    if not parsed.arrays and len(dims) == len(parsed.inputs):
        with contextlib.suppress(ShapeError):
            return expand_ellipses(parsed, [(1,) * n for n in dims], {})
    return parsed


@_of_constants
def _is_row_major(spec: str | Spec, dims: tuple[int, ...]) -> bool:
    """Whether the result of `torch.einsum` is row-major, so that programs may call `.view` on it.

    It sums an operand in the order of the output. Its product of two operands has the axes of both first, then those of
    the left one, then those of the right one; or it multiplies the right one by the left one, if that is the order.
    """
    parsed = _written_out(spec, dims)
    if len(parsed.inputs) > 2:
        return True  # its last product depends on a path
    left, right = parsed.inputs[0], parsed.inputs[-1]
    if len(parsed.inputs) == 1 or set(left) & set(right) <= set(parsed.output):
        return not parsed.arrays and _sums_one(parsed)
    order = [(axis not in left or axis not in right) + (axis not in left) for axis in parsed.output]
    swapped = [(axis not in left or axis not in right) + (axis not in right) for axis in parsed.output]
    return order == sorted(order) or swapped == sorted(swapped)


@_of_constants
def _is_outer(spec: str | Spec, dims: tuple[int, ...]) -> bool:
    """Whether a spec of two operands is an outer product."""
    parsed = _written_out(spec, dims)
    first, second = parsed.inputs
    return not {*first} & {*second} and {*first, *second} == {*parsed.output}


@_of_constants
def has_private_sum(spec: str | Spec, dims: tuple[int, ...]) -> bool:
    """Whether an operand is summed over an axis that no other term has. One operand is either summed or only moved."""
    return _sums_one(_written_out(spec, dims))


def _sums_one(spec: Spec) -> bool:
    terms = spec.terms
    return any(set(term).difference(*terms[:n], *terms[n + 1 :]) for n, term in enumerate(terms[:-1]))
