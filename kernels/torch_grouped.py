"""Rows meet the matrix of their group, `n i j, g[n] j k -> n i k`, and both its gradients, without building `c[g]`.

Rows are walked in sorted order, a rectangle of some 32 to 64 groups at a time, through two buffers that every
step uses again: fresh memory is dear on a CPU (33 MB of new pages cost 11 ms, refilling them 0.9 ms).

    a  ──gather──►  left (groups, pad, J)  ──bmm with c──►  right (groups, pad, K)  ──► left, packed ──►  out[rows]
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from planner.kernels.torch_grouping import Cutting, Groups, Piece, pieces

# Bytes of each of the two buffers. Smaller ones pay more calls; larger ones are no faster and cost memory.
BUFFER_BYTES = 1 << 20
# A matrix product of fewer rows does not pay for reading its matrix.
FEWEST_ROWS = 512
# Bytes of a block of matrices that must be copied before use: half types, and groups picked from many.
MATRIX_BYTES = 1 << 19
# Measured on a 2-core AMD EPYC 7003 (AVX2), torch 2.13: flop/s of a small product, bytes/s of a gather, seconds of a piece.
FLOPS, GATHER, PIECE = 90e9, 8e9, 60e-6


# Whether large results ask for huge pages, see `fresh`.
HUGE_PAGES = sys.platform == "linux"
HUGE_PAGE = 1 << 21
if HUGE_PAGES:
    _madvise = ctypes.CDLL(None).madvise
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products of `dtype` are summed in: float32 for the half types."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cutting(i: int, j: int, k: int, n: int, dtype: torch.dtype) -> Cutting:
    """How N rows of shape `(i, j)` are cut for matrices `(j, k)`: by shapes alone, so that a plan can foretell memory."""
    itemsize = accumulator(dtype).itemsize
    rows = max(BUFFER_BYTES // max(1, i * max(j, k) * itemsize), FEWEST_ROWS // max(1, i))
    rows = max(1, min(rows, n))
    picked = max(1, MATRIX_BYTES // max(1, j * k * itemsize))
    matrices = picked if accumulator(dtype) != dtype else rows
    seconds = 2 * i * j * k / FLOPS + i * (j + k) * itemsize / GATHER
    return Cutting(rows, matrices, picked, seconds, 2 * j * k * itemsize / GATHER, PIECE)


def grouped_matmul(
    a: Tensor,
    c: Tensor,
    groups: Groups,
    source: Tensor | None = None,
    target: Tensor | None = None,
    targets: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply each row by the matrix of its group.

    Args:
        a: `(Na, I, J)`, any strides.
        c: `(G, J, K)`, any strides; the same dtype.
        groups: The group of each of N rows.
        source: `(N,)` integers in `[0, Na)`: row `r` uses `a[source[r]]`; None: `a[r]`.
        target: `(N,)` integers in `[0, targets]`: the product is added to `out[target[r]]`, or dropped where that is
            `targets`; None: it is `out[r]`, and dropped rows are zero.
        targets: Rows of the result where `target` is given.
        out_dtype: Dtype of the result; None: that of `a`. Half types are summed in float32 either way.

    Returns:
        `(N, I, K)`, or `(targets, I, K)` with `target`.
    """
    dtype, out_dtype = a.dtype, out_dtype or a.dtype
    wide = accumulator(dtype)
    n, (i, j), k = len(groups.order), a.shape[1:], c.shape[2]
    a, c = a.resolve_conj(), c.resolve_conj()
    add = target is not None
    if target is not None:
        assert targets is not None
        sums = torch.promote_types(wide, out_dtype) if out_dtype in (torch.float16, torch.bfloat16) else out_dtype
        out = torch.zeros((targets, i, k), dtype=sums)
        partial = bool((target == targets).any())
    else:
        out = fresh((n, i, k), out_dtype)
        dropped = groups.order[int(groups.ends[-1]) :]
        if len(dropped):
            out.index_fill_(0, dropped, 0)
        partial = False
    if not out.numel():
        return out if out.dtype == out_dtype else out.to(out_dtype)
    if not j:
        return torch.zeros(out.shape, dtype=out_dtype)
    cut = cutting(i, j, k, n, dtype)
    left, right = _buffers(cut.rows * i * max(j, k), wide)
    for piece, matrices in _walk(groups, cut, c, wide):
        if not piece.pad:
            continue
        x = _gather(a, piece.padded, source, left)
        y = _multiply(x.view(piece.count, piece.pad * i, j), matrices, right)
        y = y.view(piece.count * piece.pad, i, k)
        if piece.kept is not None:
            packed = _shaped(left, (len(piece.kept), i, k))
            y = torch.index_select(y, 0, piece.kept, out=packed)
        if y.dtype != out.dtype:
            y = y.to(out.dtype)
        if target is None:
            _wide(out).index_copy_(0, piece.rows, _wide(y))
            continue
        rows = target.index_select(0, piece.rows)
        if partial:
            kept = (rows < targets).nonzero().reshape(-1)
            rows, y = rows.index_select(0, kept), y.index_select(0, kept)
        out.index_add_(0, rows, y)
    return out if not add or out.dtype == out_dtype else out.to(out_dtype)


def grouped_outer(
    a: Tensor,
    b: Tensor,
    groups: Groups,
    source_a: Tensor | None = None,
    source_b: Tensor | None = None,
) -> Tensor:
    """Sum `a[r]^T @ b[r]` over the rows of each group; empty groups are zero.

    Args:
        a: `(Na, I, J)`, any strides.
        b: `(Nb, I, K)`, any strides; the same dtype.
        groups: The group of each of N rows.
        source_a: `(N,)`: row `r` uses `a[source_a[r]]`; None: `a[r]`.
        source_b: The same for `b`.

    Returns:
        `(G, J, K)`, summed in float32 for half types.
    """
    a, b = a.resolve_conj(), b.resolve_conj()
    (i, j), k, n = a.shape[1:], b.shape[2], len(groups.order)
    sums = _Sums(groups, j, k, a.dtype)
    if not (sums.out.numel() and i):
        return sums.out.zero_()
    cut = cutting(i, j, k, n, a.dtype)
    left, right = _buffers(cut.rows * i * max(j, k), sums.wide)
    for piece, _ in _walk(groups, cut, None, sums.wide):
        blank = piece.blank()
        x = _gather(a, piece.padded, source_a, left, blank)
        y = _gather(b, piece.padded, source_b, right, blank)
        sums.add(piece, x.view(piece.count, piece.pad * i, j), y.view(piece.count, piece.pad * i, k))
    return sums.result()


def grouped_gradients(
    gout: Tensor, a: Tensor, c: Tensor, groups: Groups, source: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Both gradients of `grouped_matmul` without target, in one walk.

        out[r] = a[s(r)] @ c[g(r)]   gives   da[r] = gout[r] @ c[g(r)]^H,   dc[g] = sum over its rows of a[s(r)]^H @ gout[r]

    Args:
        gout: `(N, I, K)`, any strides.
        a: `(Na, I, J)`.
        c: `(G, J, K)`.
        groups: The group of each row.
        source: As in `grouped_matmul`.

    Returns:
        `(N, I, J)`, a gradient for each row (zero where it was dropped; the caller sums those of one source), and
        `(G, J, K)`.
    """
    gout, a, c = gout.resolve_conj(), a.resolve_conj(), c.resolve_conj()
    (i, j), k, n = a.shape[1:], c.shape[2], len(groups.order)
    grad_rows = fresh((n, i, j), a.dtype)
    dropped = groups.order[int(groups.ends[-1]) :]
    if len(dropped):
        grad_rows.index_fill_(0, dropped, 0)
    sums = _Sums(groups, j, k, a.dtype)
    if not (sums.out.numel() and i and n):
        return grad_rows.zero_(), sums.out.zero_()
    cut = cutting(i, j, k, n, a.dtype)
    left, right = _buffers(cut.rows * i * max(j, k), sums.wide)
    for piece, matrices in _walk(groups, cut, c.transpose(1, 2), sums.wide):
        blank = piece.blank()
        x = _gather(a, piece.padded, source, left, blank)
        g = _gather(gout, piece.padded, None, right, blank)
        x, g = x.view(piece.count, piece.pad * i, j), g.view(piece.count, piece.pad * i, k)
        sums.add(piece, x.conj(), g)
        if not piece.pad:
            continue
        y = _multiply(g, matrices.conj(), left).view(piece.count * piece.pad, i, j)  # Its rows of a are done with.
        if piece.kept is not None:
            y = torch.index_select(y, 0, piece.kept, out=_shaped(right, (len(piece.kept), i, j)))
        if y.dtype != a.dtype:
            y = y.to(a.dtype)
        _wide(grad_rows).index_copy_(0, piece.rows, _wide(y))
    return grad_rows, sums.result()


class _Sums:
    """The sums of outer products, filled piece by piece; `held` are those of the latest first piece."""

    def __init__(self, groups: Groups, j: int, k: int, dtype: torch.dtype) -> None:
        self.wide = accumulator(dtype)
        self.out = fresh((groups.size, j, k), dtype)
        self.held = self.out[:0]
        self.place: slice | Tensor = slice(0, 0)
        self.scratch = torch.empty(0, dtype=self.wide)

    def add(self, piece: Piece, x: Tensor, y: Tensor) -> None:
        """Add `x^T @ y`, `(count, rows, J)` and `(count, rows, K)`, to the groups of a piece."""
        if not piece.pad:
            self.out.index_fill_(0, piece.groups, 0)
            return
        if piece.first:
            self._hold(piece)
        if piece.count == 1:
            torch.addmm(self.held[0], x[0].t(), y[0], beta=int(not piece.first), out=self.held[0])
        else:
            torch.bmm(x.transpose(1, 2), y, out=self.held)

    def result(self) -> Tensor:
        """All the sums."""
        self._store()
        return self.out

    def _hold(self, piece: Piece) -> None:
        self._store()
        self.place = piece.groups
        if isinstance(piece.groups, slice) and self.out.dtype == self.wide:
            self.held = self.out[piece.groups]
            return
        shape = (piece.count, *self.out.shape[1:])
        if self.scratch.numel() < prod(shape):
            self.scratch = torch.empty(prod(shape), dtype=self.wide)
        self.held = _shaped(self.scratch, shape)

    def _store(self) -> None:
        if isinstance(self.place, Tensor):
            self.out.index_copy_(0, self.place, self.held.to(self.out.dtype))
        elif self.out.dtype != self.wide:
            self.out[self.place].copy_(self.held)


def _walk(groups: Groups, cut: Cutting, c: Tensor | None, wide: torch.dtype) -> Iterator[tuple[Piece, Tensor]]:
    """Every piece with the matrices of its groups, in the accumulator's dtype."""
    scratch = torch.empty(0, dtype=wide)
    matrices = scratch
    for piece in pieces(groups, cut):
        if c is not None and piece.pad and piece.first:
            if isinstance(piece.groups, slice):
                matrices = c[piece.groups]
            else:
                matrices = _pick(c, piece.groups)
            if matrices.dtype != wide:
                if scratch.numel() < matrices.numel():
                    scratch = torch.empty(matrices.numel(), dtype=wide)
                matrices = _shaped(scratch, matrices.shape).copy_(matrices)
        yield piece, matrices


def _pick(c: Tensor, names: Tensor) -> Tensor:
    """`c[names]`, in the layout of `c`: a copy that also transposes is several times slower."""
    if c.stride(1) < c.stride(2):
        return c.transpose(1, 2).index_select(0, names).transpose(1, 2)
    return c.index_select(0, names)


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised array; a large one asks the kernel for huge pages.

    Rows written in random order touch a new page almost each time: 33 MB cost 20 ms so, and 5 ms in huge pages
    (2-core AMD EPYC 7003, Linux, transparent huge pages by `madvise`). Elsewhere this is `torch.empty`.
    """
    out = torch.empty(shape, dtype=dtype)
    if HUGE_PAGES and out.nbytes >= 2 * HUGE_PAGE:
        first = -(-out.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        last = (out.data_ptr() + out.nbytes) // HUGE_PAGE * HUGE_PAGE
        _madvise(first, last - first, 14)  # MADV_HUGEPAGE. It is advice: a refusal changes nothing.
    return out


def _buffers(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)


def _gather(x: Tensor, rows: Tensor, source: Tensor | None, buffer: Tensor, blank: Tensor | None = None) -> Tensor:
    """`x[source[rows]]` in the buffer, zero at `blank`."""
    if source is not None:
        rows = source.index_select(0, rows)
    out = _shaped(buffer, (len(rows), *x.shape[1:]))
    if x.dtype == buffer.dtype:
        torch.index_select(x, 0, rows, out=out)
    else:
        out.copy_(x.index_select(0, rows))
    if blank is not None:
        out.index_fill_(0, blank, 0)
    return out


def _multiply(x: Tensor, matrices: Tensor, buffer: Tensor) -> Tensor:
    """`(G, rows, J) @ (G, J, K)` in the buffer; one group by itself is a plain product, which uses all cores."""
    out = _shaped(buffer, (x.shape[0], x.shape[1], matrices.shape[2]))
    if x.shape[0] == 1:
        torch.mm(x[0], matrices[0], out=out[0])
    elif x.shape[1]:
        torch.bmm(x, matrices, out=out)
    return out


def _shaped(buffer: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The first elements of a flat buffer, as an array of that shape."""
    return buffer[: prod(shape)].view(shape)


def _wide(x: Tensor) -> Tensor:
    """A contiguous array's rows, in the widest elements that divide them: a copy by index moves them one by one."""
    row = prod(x.shape[1:]) * x.itemsize
    flat = x.view(x.shape[0], prod(x.shape[1:]))
    for dtype in (torch.complex128, torch.int64, torch.int32):
        if row and row % dtype.itemsize == 0 and x.storage_offset() * x.itemsize % dtype.itemsize == 0:
            return flat.view(dtype)
    return flat
