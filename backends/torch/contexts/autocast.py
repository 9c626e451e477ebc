"""In which dtype a contraction is computed under `torch.autocast`: that of `torch.einsum` after indexing."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache

import torch

from planner.backends.torch.contexts.modes import autocasts
from planner.backends.torch.ops import promote
from planner.language.spec import Spec, term_axes

_opt_einsum = torch.backends.opt_einsum
# The types of devices that autocast knows, by the names that it has for them.
_DEVICES = {name.lower(): f"Autocast{name}" for name in ("CPU", "CUDA", "MPS", "XPU", "MTIA", "MAIA")}


def autocast_state(device: str) -> Hashable:
    """Return all but the call that `autocast_dtype` depends on, for a type of device; None outside of autocast."""
    if not autocasts() or device not in _DEVICES or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device), _opt_einsum.enabled, _opt_einsum.strategy


@contextlib.contextmanager
def in_region(device: str, half: str | None) -> Iterator[None]:
    """Enter the autocast region that a call was recorded in, of this dtype; None for none.

    `torch.export(strict=True)` records where regions begin and end, but does not enter them.
    """
    if half is None or torch.is_autocast_enabled(device):
        yield
        return
    before = torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, getattr(torch, half))
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        torch.set_autocast_dtype(device, before)


def autocast_changes(dtype: str) -> bool:
    """Return whether a matrix product of a dtype is one of another dtype in this context, on some device."""
    enabled = [device for device in _DEVICES if torch.is_autocast_enabled(device)] if autocasts() else ()
    return any(_cast(dtype, _name(torch.get_autocast_dtype(device))) != dtype for device in enabled)


def autocast_dtype(spec: Spec, dtypes: Sequence[str], device: str) -> str:
    """Return the dtype that `torch.einsum` gives under autocast.

    On most devices `torch.einsum` casts its operands. On a CPU its matrix products do, and its elementwise products do
    not. So there the last of its steps decides: a product that sums no axis gives the dtype that its factors promote
    to. Where torch refuses to multiply two dtypes, they are promoted as outside of autocast.

    Example:
        >>> import torch
        >>> from planner.backends.torch.contexts.autocast import autocast_dtype
        >>> from planner.language.resolve import resolve_shapes
        >>> product, outer = (resolve_shapes(s, [(2, 3), (3, 4)], {}).spec for s in ("ij, jk -> ik", "ij, jk -> ijk"))
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     [autocast_dtype(spec, ["float32", "float32"], "cpu") for spec in (product, outer)]
        ['bfloat16', 'float32']

    Args:
        spec: the resolved spec. Gathers count as taken before.
        dtypes: the operands' dtypes.
        device: the type of their device, such as "cuda".
    """
    half = _name(torch.get_autocast_dtype(device))
    if _einsum_casts(device):
        return _promoted([_cast(dtype, half) for dtype in dtypes])
    sizes = spec.by_axis
    wide = {axis for axis in spec.axes if sizes[axis] != 1}  # torch takes an axis of size 1 for a broadcast one
    kept = set(term_axes(spec.output)) & wide
    values = [(set(term_axes(term)) & wide, dtype) for term, dtype in zip(spec.inputs, dtypes, strict=True)]
    for pair in _path([term_axes(term) for term in spec.inputs], term_axes(spec.output), sizes):
        second, first = (values.pop(i) for i in sorted(pair, reverse=True))
        needed = kept.union(*(axes for axes, _ in values))
        pair_dtypes = [first[1], second[1]]
        if (first[0] & second[0]) - needed:
            pair_dtypes = [_cast(dtype, half) for dtype in pair_dtypes]
        values.append(((first[0] | second[0]) & needed, _promoted(pair_dtypes)))
    return values[0][1]


@cache
def _einsum_casts(device: str) -> bool:
    """Return whether autocast casts the operands of `torch.einsum` itself on a device."""
    has_rule = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_rule("aten::einsum", _DEVICES[device]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cast(dtype: str, half: str) -> str:
    """Return the dtype in which a matrix product reads an operand: autocast leaves float64 and other kinds alone."""
    return half if dtype in ("float32", "float16", "bfloat16") else dtype


def _promoted(dtypes: Sequence[str]) -> str:
    result = dtypes[0]
    for other in dtypes[1:]:
        result = promote(result, other) or result
    return result


def _path(terms: Sequence[Sequence[str]], output: Sequence[str], sizes: Mapping[str, int]) -> Sequence[tuple[int, int]]:
    """Return the order in which `torch.einsum` multiplies operands: opt_einsum's, or from left to right."""
    if len(terms) > 2 and _opt_einsum.enabled and _opt_einsum.is_available():
        letters = {axis: _opt_einsum.get_opt_einsum().get_symbol(n) for n, axis in enumerate(sizes)}
        inputs = ",".join("".join(letters[axis] for axis in term) for term in terms)
        known = {axis for term in terms for axis in term}  # opt_einsum knows no axis that no operand has
        equation = f"{inputs}->{''.join(letters[axis] for axis in dict.fromkeys(output) if axis in known)}"
        shapes = [tuple(sizes[axis] for axis in term) for term in terms]
        path, _ = _opt_einsum.get_opt_einsum().contract_path(
            equation, *shapes, shapes=True, optimize=_opt_einsum.strategy
        )
        return path
    return [(0, 1), *((0, last) for last in range(len(terms) - 2, 0, -1))] if len(terms) > 1 else []
