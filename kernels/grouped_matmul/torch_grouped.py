"""Rows meet the matrix of their group, `n i j, g[n] j k -> n i k`, and both its gradients, without building `c[g]`.

Rows are walked in sorted order, one piece of some 50 groups at a time, through two buffers that every step uses
again: fresh memory is dear on a CPU (33 MB of new pages cost 11 ms, refilling them 0.9 ms).

    a  --take rows-->  left (groups, pad, J)  --@ c-->  right (groups, pad, K)  --pack-->  left  --put-->  out[rows]

Loops run on the host, so these serve tensors on a CPU. No gradients are recorded: call them without autograd.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from planner.kernels.grouping.torch_grouping import Cutting, Groups, Piece, accumulator, pieces

# Bytes of each of the two buffers. Half of it takes a sixth to a half more time on seed 000 (2-core Xeon with 2 MiB of
# L2 a core), a sixteenth twice the time; twice of it wins little and costs memory.
BUFFER_BYTES = 2 << 20
# A matrix product of fewer rows does not pay for reading its matrix.
FEWEST_ROWS = 512
# Bytes of the matrices that a piece may copy: those of half types, and those of groups that it names.
MATRIX_BYTES = 1 << 19
# Measured on a 2-core AMD EPYC 7003 (AVX2), torch 2.13: flop/s of small products, bytes/s of taken rows, seconds
# of the calls of one piece.
FLOPS, TAKEN, PIECE = 90e9, 8e9, 60e-6
# Whether large results ask for huge pages, see `fresh`.
HUGE_PAGES = sys.platform == "linux"
HUGE_PAGE = 1 << 21


def cutting(i: int, j: int, k: int, n: int, dtype: torch.dtype, share: int = 1) -> Cutting:
    """How N rows `(i, j)` are cut for matrices `(j, k)`; shapes alone decide, so that a plan can foretell memory.

    `share` cuts them for buffers of that share, a half or a sixteenth: for where memory is what counts.
    """
    buffer_bytes = BUFFER_BYTES // share
    itemsize = accumulator(dtype).itemsize
    rows = max(buffer_bytes // max(1, i * max(j, k) * itemsize), FEWEST_ROWS // max(1, i))
    rows = max(1, min(rows, n))
    picked = max(1, MATRIX_BYTES // max(1, j * k * itemsize))
    matrices = picked if accumulator(dtype) != dtype else rows
    seconds = 2 * i * j * k / FLOPS + i * (j + k) * itemsize / TAKEN
    return Cutting(rows, matrices, picked, seconds, 2 * j * k * itemsize / TAKEN, PIECE)


def grouped_matmul(
    a: Tensor,
    c: Tensor,
    groups: Groups,
    source: Tensor | None = None,
    target: Tensor | None = None,
    targets: int | None = None,
    out_dtype: torch.dtype | None = None,
    share: int = 1,
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
        share: For buffers of this share of their usual bytes, see `cutting`.

    Returns:
        `(N, I, K)`, or `(targets, I, K)` with `target`.
    """
    out_dtype = out_dtype or a.dtype
    wide = accumulator(a.dtype)
    n, (i, j), k = len(groups.order), a.shape[1:], c.shape[2]
    a, c = a.resolve_conj(), c.resolve_conj()
    rows_left_out = False
    if target is None:
        out = fresh((n, i, k), out_dtype)
        out.index_fill_(0, groups.order[int(groups.ends[-1]) :], 0)
    else:
        assert targets is not None
        out = torch.zeros((targets, i, k), dtype=accumulator(out_dtype), device="cpu")
        rows_left_out = bool((target == targets).any())
    if not (out.numel() and j):
        return out.zero_().to(out_dtype)
    cut = cutting(i, j, k, n, a.dtype, share)
    left, right = _buffers(cut.rows * i * max(j, k), wide)
    for piece, matrices in _walk(groups, cut, c, wide):
        if not piece.pad:
            continue
        x = _take(a, piece.padded, source, left).view(piece.count, piece.pad * i, j)
        y = _packed(piece, _multiply(x, matrices, right).view(-1, i, k), left)
        if target is None:
            _put(out, piece.rows, y.to(out.dtype))
            continue
        rows = target.index_select(0, piece.rows)
        if rows_left_out:
            kept = (rows < out.shape[0]).nonzero().view(-1)
            rows, y = rows.index_select(0, kept), y.index_select(0, kept)
        out.index_add_(0, rows, y.to(out.dtype))
    return out.to(out_dtype)


def grouped_outer(
    a: Tensor,
    b: Tensor,
    groups: Groups,
    source_a: Tensor | None = None,
    source_b: Tensor | None = None,
    share: int = 1,
) -> Tensor:
    """Sum `a[r]^T @ b[r]` over the rows of each group; empty groups are zero.

    Args:
        a: `(Na, I, J)`, any strides.
        b: `(Nb, I, K)`, any strides; the same dtype.
        groups: The group of each of N rows.
        source_a: `(N,)`: row `r` uses `a[source_a[r]]`; None: `a[r]`.
        source_b: The same for `b`.
        share: For buffers of this share of their usual bytes, see `cutting`.

    Returns:
        `(G, J, K)`, summed in float32 for half types.
    """
    a, b = a.resolve_conj(), b.resolve_conj()
    (i, j), k, n = a.shape[1:], b.shape[2], len(groups.order)
    cut = cutting(i, j, k, n, a.dtype, share)
    sums = _Sums(groups, min(cut.picked, groups.size), j, k, a.dtype)
    if not (sums.out.numel() and i):
        return sums.out.zero_()
    left, right = _buffers(cut.rows * i * max(j, k), sums.wide)
    for piece, _ in _walk(groups, cut, None, sums.wide):
        blank = piece.blank()
        x = _take(a, piece.padded, source_a, left, blank).view(piece.count, piece.pad * i, j)
        y = _take(b, piece.padded, source_b, right, blank).view(piece.count, piece.pad * i, k)
        sums.add(piece, x, y)
    return sums.result()


def grouped_gradients(
    gout: Tensor, a: Tensor, c: Tensor, groups: Groups, source: Tensor | None = None, share: int = 1
) -> tuple[Tensor, Tensor]:
    """Both gradients of `grouped_matmul` without target, in one walk.

        out[r] = a[s(r)] @ c[g(r)]   gives
        da[r] = gout[r] @ c[g(r)]^H,   dc[g] = sum of a[s(r)]^H @ gout[r] over its rows

    Args:
        gout: `(N, I, K)`, any strides.
        a: `(Na, I, J)`.
        c: `(G, J, K)`.
        groups: The group of each row.
        source: As in `grouped_matmul`.
        share: As in `grouped_matmul`.

    Returns:
        `(N, I, J)`, a gradient for each row (zero where it was dropped; the caller sums those of one source), and
        `(G, J, K)`.
    """
    gout, a, c = gout.resolve_conj(), a.resolve_conj(), c.resolve_conj()
    (i, j), k, n = a.shape[1:], c.shape[2], len(groups.order)
    grad_rows = fresh((n, i, j), a.dtype)
    grad_rows.index_fill_(0, groups.order[int(groups.ends[-1]) :], 0)
    cut = cutting(i, j, k, n, a.dtype, share)
    sums = _Sums(groups, min(cut.picked, groups.size), j, k, a.dtype)
    if not (sums.out.numel() and i and n):
        return grad_rows.zero_(), sums.out.zero_()
    left, right = _buffers(cut.rows * i * max(j, k), sums.wide)
    for piece, matrices in _walk(groups, cut, c.transpose(1, 2), sums.wide):
        blank = piece.blank()
        x = _take(a, piece.padded, source, left, blank).view(piece.count, piece.pad * i, j)
        g = _take(gout, piece.padded, None, right, blank).view(piece.count, piece.pad * i, k)
        sums.add(piece, x.conj(), g)
        if piece.pad:
            y = _multiply(g, matrices.conj(), left).view(-1, i, j)  # The rows of a are done with.
            _put(grad_rows, piece.rows, _packed(piece, y, right).to(a.dtype))
    return grad_rows, sums.result()


def matmul_scratch_bytes(
    rows: int, size_i: int, groups: int, size_j: int, size_k: int, dtype: torch.dtype, sourced: bool = False,
    share: int = 1,
) -> int:  # fmt: skip
    """Upper bound of what `grouped_matmul` allocates beside its result.

    A half-precision result that is added into targets is summed in float32: add its bytes in that dtype.
    """
    cut = cutting(size_i, size_j, size_k, rows, dtype, share)
    wide = accumulator(dtype).itemsize
    width = cut.rows * size_i * max(size_j, size_k)
    needed = 2 * width * wide + _matrix_bytes(cut, groups, size_j, size_k, dtype)
    if accumulator(dtype) != dtype:
        # Rows in the half type, or named matrices before they are converted.
        needed += max(width, min(cut.picked, groups) * size_j * size_k) * dtype.itemsize
    # Six index arrays of a piece; those that decide the cut are a few for each group.
    return needed + (6 + sourced) * 8 * cut.rows + 64 * groups + 1024


def _matrix_bytes(cut: Cutting, groups: int, size_j: int, size_k: int, dtype: torch.dtype) -> int:
    """Bytes of the matrices that are copied: none where a group is always alone and needs no conversion."""
    if cut.picked == 1 and accumulator(dtype) == dtype:
        return 0
    return min(cut.picked, groups) * size_j * size_k * accumulator(dtype).itemsize


def outer_scratch_bytes(
    rows: int, size_i: int, groups: int, size_j: int, size_k: int, dtype: torch.dtype, sourced: bool = False,
    share: int = 1,
) -> int:  # fmt: skip
    """Upper bound of what `grouped_outer` allocates beside its result."""
    return matmul_scratch_bytes(rows, size_i, groups, size_j, size_k, dtype, sourced, share)


def gradients_scratch_bytes(
    rows: int, size_i: int, groups: int, size_j: int, size_k: int, dtype: torch.dtype, sourced: bool = False,
    share: int = 1,
) -> int:  # fmt: skip
    """Upper bound of what `grouped_gradients` allocates beside its results."""
    cut = cutting(size_i, size_j, size_k, rows, dtype, share)
    sums = _matrix_bytes(cut, groups, size_j, size_k, dtype)
    return matmul_scratch_bytes(rows, size_i, groups, size_j, size_k, dtype, sourced, share) + sums


class _Sums:
    """The sums of outer products, filled piece by piece; `held` are those of the latest first piece, at most `most`."""

    def __init__(self, groups: Groups, most: int, j: int, k: int, dtype: torch.dtype) -> None:
        self.wide = accumulator(dtype)
        self.out = fresh((groups.size, j, k), dtype)
        self.held = self.out[:0]
        self.place: slice | Tensor = slice(0, 0)
        self.most = most
        self.scratch: Tensor | None = None

    def add(self, piece: Piece, x: Tensor, y: Tensor) -> None:
        """Add `x^T @ y`, `(count, rows, J)` and `(count, rows, K)`, to the groups of a piece."""
        if not piece.pad:
            assert isinstance(piece.groups, Tensor)
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
        if self.scratch is None:
            self.scratch = torch.empty(self.most * prod(self.out.shape[1:]), dtype=self.wide, device="cpu")
        self.held = _shaped(self.scratch, (piece.count, *self.out.shape[1:]))

    def _store(self) -> None:
        if isinstance(self.place, Tensor):
            self.out.index_copy_(0, self.place, self.held.to(self.out.dtype))
        elif self.out.dtype != self.wide:
            self.out[self.place].copy_(self.held)


def _walk(groups: Groups, cut: Cutting, c: Tensor | None, wide: torch.dtype) -> Iterator[tuple[Piece, Tensor]]:
    """Every piece with the matrices of its groups, in the accumulator's dtype."""
    held = torch.empty(0, dtype=wide, device="cpu")
    matrices = held
    for piece in pieces(groups, cut):
        if c is not None and piece.pad and piece.first:
            by_range = isinstance(piece.groups, slice)
            if by_range and c.dtype == wide:
                matrices = c[piece.groups]
            else:
                if not held.numel():
                    held = torch.empty(min(cut.picked, groups.size) * prod(c.shape[1:]), dtype=wide, device="cpu")
                matrices = _pick(c, piece.groups, held)
        yield piece, matrices


def _pick(c: Tensor, groups: slice | Tensor, buffer: Tensor) -> Tensor:
    """`c[groups]` in the buffer, in the layout of `c`: a copy that also transposes is several times slower."""
    if c.stride(1) < c.stride(2):
        return _pick(c.transpose(1, 2), groups, buffer).transpose(1, 2)
    if isinstance(groups, slice):
        return _shaped(buffer, c[groups].shape).copy_(c[groups])
    out = _shaped(buffer, (len(groups), *c.shape[1:]))
    return torch.index_select(c, 0, groups, out=out) if c.dtype == out.dtype else out.copy_(c.index_select(0, groups))


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised array; a large one asks the kernel for huge pages.

    Rows that are put in random order touch a new page almost each time: 33 MB cost 25 ms so, 13 ms in huge pages, and
    10 ms where the pages are not new (2-core AMD EPYC 7003, Linux with transparent huge pages by `madvise`, torch
    2.13). Elsewhere this is `torch.empty`.
    """
    out = torch.empty(shape, dtype=dtype, device="cpu")
    if HUGE_PAGES and out.nbytes >= 2 * HUGE_PAGE:
        first = -(-out.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        last = (out.data_ptr() + out.nbytes) // HUGE_PAGE * HUGE_PAGE
        # 14 is MADV_HUGEPAGE. Whole pages inside the array, and advice only: a refusal changes nothing.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), 14)
    return out


def _buffers(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(numel, dtype=dtype, device="cpu"), torch.empty(numel, dtype=dtype, device="cpu")


def _take(x: Tensor, rows: Tensor, source: Tensor | None, buffer: Tensor, blank: Tensor | None = None) -> Tensor:
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


def _packed(piece: Piece, y: Tensor, buffer: Tensor) -> Tensor:
    """The real rows of a piece, in the buffer where some are not."""
    if piece.kept is None:
        return y
    return torch.index_select(y, 0, piece.kept, out=_shaped(buffer, (len(piece.kept), *y.shape[1:])))


def _put(out: Tensor, rows: Tensor, y: Tensor) -> None:
    """`out[rows] = y`, both contiguous, in the widest elements that divide a row: they are moved one by one."""
    row = prod(out.shape[1:]) * out.itemsize
    out, y = out.view(len(out), -1), y.view(len(y), -1)
    for dtype in (torch.complex128, torch.int64, torch.int32):
        if row % dtype.itemsize == 0:
            out, y = out.view(dtype), y.view(dtype)
            break
    out.index_copy_(0, rows, y)


def _shaped(buffer: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The first elements of a flat buffer, as an array of that shape."""
    return buffer[: prod(shape)].view(shape)
