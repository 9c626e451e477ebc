"""Takes of rows on CUDA, in one launch. The package states the contract.

The result is seen as outer and inner elements: the inner ones are its last axes, as far as all arrays walk along these
by one stride each. A program copies a tile of both, and looks up an index once for all elements that share it:

    s[e]c -> ec       c is inner, and each row of a tile has one index
    cs[e] -> ce       e is inner, and each column of a tile has one index
    s[ek] -> ek       all is inner

torch's own takes go row by row: 131,072 rows of 64 float32 took 83 us, where this kernel took 12 (H200, torch 2.11,
2026-11-27).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from planner.kernels.grouping.triton_grouping import Check
from planner.kernels.grouping.triton_launch import launch, replayed
from planner.kernels.segment_sum.triton_sum import REGISTERS
from planner.kernels.take import MOST_AXES, MOST_INDICES, Read
from planner.kernels.tiled_product.triton_product import pieces_of

# Elements of a tile.
_TILE = 2048
_OUTER = MOST_AXES - 1
# Dtypes whose elements kernels copy as they are. Others are seen as integers.
_COPIED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32,
           torch.int64, torch.uint8)  # fmt: skip
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A position beyond all entries of an index array: no entry is out of range.
_NONE = tl.constexpr(2**62)


@triton.jit
def _place(a, b, c, d, by_a, by_b, by_c, by_d):  # type: ignore[no-untyped-def]
    """Return positions of outer elements from their places along up to four axes."""
    place = a * by_a
    if by_b is not None:
        place += b * by_b
    if by_c is not None:
        place += c * by_c
    if by_d is not None:
        place += d * by_d
    return place


@triton.jit
def _named(  # type: ignore[no-untyped-def]
    index, by_a, by_b, by_c, by_d, by_inner, stride, size, a, b, c, d, i, outer_there, inner_there,
    word, poison, ticket, DROPS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Return how far an index array goes in `x`, which of its entries name a row, and which are out of range.

    With a word, negative entries count from the end, and one out of range is told.
    """
    if by_a is None:
        place = (i.to(INDEX) * by_inner)[None, :]
        there = inner_there[None, :]
    else:
        place = _place(a, b, c, d, by_a, by_b, by_c, by_d)[:, None]
        there = outer_there[:, None]
        if by_inner is not None:
            place = place + (i.to(INDEX) * by_inner)[None, :]
            there = there & inner_there[None, :]
    at = tl.load(index + place, mask=there, other=0)
    if word is not None:
        at = at.to(tl.int64)
        bad = there & ((at < -size) | (at >= size))
        at = tl.where(at < 0, at + size, at)
        first = tl.min(tl.where(bad, place.to(tl.int64), _NONE))
        tl.store(word, (tl.cast(ticket, tl.int64) << 40) + first + 1, mask=first < _NONE)
        tl.store(poison, float("nan"), mask=first < _NONE)
        there = there & (bad == 0)
    else:
        bad = there & (place < 0)
    at = at.to(INDEX)
    if DROPS:
        there = there & (at < size)
    return at * stride, there, bad


@triton.jit(do_not_specialize=["ticket"])
def take_kernel(  # type: ignore[no-untyped-def]  # noqa: D417
    x, x_a, x_b, x_c, x_d, x_inner,
    q, q_a, q_b, q_c, q_d, q_inner, q_stride, q_size,
    r, r_a, r_b, r_c, r_d, r_inner, r_stride, r_size,
    s, s_a, s_b, s_c, s_d, s_inner, s_stride, s_size,
    out, size_a, size_b, size_c, outer, inner, word, poison, ticket,
    DROPS: tl.constexpr, INDEX: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Copy one tile.

    Args:
        x: pointer to the tensor; its strides along up to four outer axes, of which `a` is the last, and along the inner
            axis.
        q, r, s: pointers to index arrays, or None, each with the same strides; the stride in `x` of what it indexes,
            and the size of that. Without strides it is the same for all outer or for all inner elements.
        out: pointer to the result, `(outer, inner)`, contiguous.
        size_a, size_b, size_c: sizes of outer axes; None if there is no axis beyond.
        outer, inner: how many elements there are.
        word, poison, ticket: where an entry of `q` out of range is told; None if all are in range.
        DROPS: whether an index may name no row.
        INDEX: a type for all positions.
    """
    tiles = pieces_of(inner, BLOCK_I)
    o = (tl.program_id(0) // tiles).to(INDEX) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = (tl.program_id(0) % tiles).to(INDEX) * BLOCK_I + tl.arange(0, BLOCK_I)
    o_there, i_there = o < outer, i < inner
    a, b, c, d = o, o, o, o
    if size_a is not None:
        b = o // size_a
        a = o - b * size_a
        if size_b is not None:
            c = b // size_b
            b = b - c * size_b
            if size_c is not None:
                d = c // size_c
                c = c - d * size_c
    there = o_there[:, None] & i_there[None, :]
    where = _place(a, b, c, d, x_a, x_b, x_c, x_d)[:, None]
    if x_inner is not None:
        where = where + (i * x_inner)[None, :]
    far, found, bad = _named(
        q, q_a, q_b, q_c, q_d, q_inner, q_stride, q_size, a, b, c, d, i, o_there, i_there,
        word, poison, ticket, DROPS, INDEX,
    )  # fmt: skip
    where = where + far
    found = there & found
    if r is not None:
        far, r_found, _ = _named(
            r, r_a, r_b, r_c, r_d, r_inner, r_stride, r_size, a, b, c, d, i, o_there, i_there,
            None, None, None, DROPS, INDEX,
        )  # fmt: skip
        where = where + far
        found = found & r_found
    if s is not None:
        far, s_found, _ = _named(
            s, s_a, s_b, s_c, s_d, s_inner, s_stride, s_size, a, b, c, d, i, o_there, i_there,
            None, None, None, DROPS, INDEX,
        )  # fmt: skip
        where = where + far
        found = found & s_found
    taken = tl.load(x + where, mask=found, other=0)
    if word is not None:
        taken = tl.where(bad, float("nan"), taken).to(taken.dtype)
    tl.store(out + o[:, None] * inner + i[None, :], taken, mask=there)


def take(
    x: Tensor, read: Read, indices: Sequence[Tensor], shape: Sequence[int], drops: bool, check: Check | None = None
) -> Tensor:
    """Return what index arrays name in a tensor, row-major.

    Args:
        x: the tensor.
        read: how it is read, by up to `MOST_INDICES` index arrays.
        indices: the index arrays.
        shape: the shape of the result, of up to `MOST_AXES` axes.
        drops: whether an index may be the size of what it indexes.
        check: where an entry out of range is told. What it names is NaN then, and negative entries count from the end.
            This is for floats and a single index array, contiguous and read as a whole.
    """
    x, shape = x.resolve_conj().resolve_neg(), tuple(shape)
    out = x.new_empty(shape)
    if not out.numel():
        return out
    given, into = _copied(x), _copied(out)
    index_facts = [fact for index in indices for fact in (index.dtype, index.stride())]
    key = "take", read, x.dtype, x.shape, x.stride(), shape, drops, check and check.ticket, *index_facts
    told = (None, None) if check is None else check[:2]
    replayed(key, (given, into, *indices, *told), lambda: _launch(given, into, read, indices, shape, drops, check))
    return out


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows of a tensor: the entries along its first dimension that an index array of one dimension names."""
    lasts = range(1, x.dim())
    read = Read(((), *[(d,) for d in lasts]), (((0,), ((0,), *[() for _ in lasts])),))
    return take(x, read, [rows], (len(rows), *x.shape[1:]), False)


def _copied(x: Tensor) -> Tensor:
    """Return a tensor as the kernel copies it: a number of 16 bytes is two of 8, along one more dimension."""
    if x.dtype in _COPIED:
        return x
    return torch.view_as_real(x) if x.element_size() > 8 else x.view(_INTEGERS[x.element_size()])


def _launch(
    x: Tensor,
    out: Tensor,
    read: Read,
    indices: Sequence[Tensor],
    shape: tuple[int, ...],
    drops: bool,
    check: Check | None,
) -> None:
    by, sizes = x.stride(), list(out.shape)
    walks = [[sum([by[d] for d in dims]) for dims in read.x]]
    steps = [sum([by[d] for d in dims]) for dims, _ in read.indices]
    named = [x.shape[dims[0]] for dims, _ in read.indices]
    for index, (_, axes) in zip(indices, read.indices, strict=True):
        walks.append([sum([index.stride(d) for d in dims]) for dims in axes])
    if out.dim() > len(shape):
        walks = [[*walk, int(place == 0)] for place, walk in enumerate(walks)]
    count, reach = out.numel(), sum([n * step for n, step in zip(named, steps, strict=True)])
    reach += sum([(n - 1) * step for n, step in zip(sizes, walks[0], strict=True)])
    for walk in walks[1:]:
        reach = max(reach, sum([(n - 1) * step for n, step in zip(sizes, walk, strict=True)]))
    sizes, walks = _joined(sizes, walks)
    *outer, inner = sizes
    arguments: list[Any] = [x, *_steps(walks[0])]
    for index, walk, step, size in zip(indices, walks[1:], steps, named, strict=True):
        arguments += [index, *_steps(walk, True), step, size]
    arguments += [None] * 8 * (MOST_INDICES - len(indices))
    below = outer[:0:-1]  # the sizes of outer axes, without the first
    arguments += [out, *below, *[None] * (_OUTER - 1 - len(below)), count // inner, inner]
    arguments += [None] * 3 if check is None else check
    block_i = min(_TILE, triton.next_power_of_2(inner))
    block_o = min(_TILE // block_i, triton.next_power_of_2(count // inner))
    # Positions are computed up to a tile beyond the last.
    positions = tl.int32 if max(reach, count, *named) < 2**31 - 2**16 else tl.int64
    launch(
        take_kernel, triton.cdiv(count // inner, block_o) * triton.cdiv(inner, block_i), arguments,
        DROPS=drops, INDEX=positions, BLOCK_O=block_o, BLOCK_I=block_i, num_warps=4, **REGISTERS,
    )  # fmt: skip


def _joined(sizes: Sequence[int], walks: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Return the sizes of axes, and the strides along each, with those joined that all arrays walk as one."""
    joined: list[tuple[int, Sequence[int]]] = []
    for size, *steps in zip(sizes, *walks, strict=True):
        if size == 1:
            continue
        if joined and all([before == size * step for before, step in zip(joined[-1][1], steps, strict=True)]):
            joined[-1] = joined[-1][0] * size, steps
        else:
            joined.append((size, steps))
    joined = joined or [(1, [0] * len(walks))]
    return [size for size, _ in joined], [list(walk) for walk in zip(*[steps for _, steps in joined], strict=True)]


def _steps(walk: Sequence[int], is_index: bool = False) -> list[int | None]:
    """Return the kernel's arguments for the strides of an array: outer ones from the last to the first, and inner."""
    *outer, inner = walk
    steps: list[int | None] = [*outer[::-1]] or [0]
    if is_index and inner and not any(outer):
        steps = []
    return [*steps, *[None] * (_OUTER - len(steps)), inner or None]
