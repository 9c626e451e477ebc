"""Each row times the matrix of its group, and both gradients, on a CPU. The package states the contract.

Rows are walked in sorted order, one piece of some 50 groups at a time, through two buffers that every step uses again:
new memory is expensive on a CPU (33 MB of new pages cost 11 ms, refilling them 0.9 ms).

    a  --take rows-->  left (groups, pad, J)  --@ c-->  right (groups, pad, K)  --pack-->  left  --put-->  out[rows]

The loops run on the host, so these functions are for tensors on a CPU. They record no gradients: call them without
autograd. `share` divides the size of the buffers, a half or a sixteenth of their usual bytes, to save memory.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from planner.kernels.grouping.torch_grouping import Cutting, Groups, Piece, accumulator, pieces

# Bytes of each of the two buffers. With half of it, seed 000 takes a sixth to a half more time (2-core Xeon with 2 MiB
# of L2 per core); with a sixteenth, twice the time. With twice the bytes it gains little and costs memory.
BUFFER_BYTES = 2 << 20
# Matrix products of fewer rows take as long as reading their matrix.
FEWEST_ROWS = 512
# Bytes of matrices that a piece may copy: matrices of half types, and of groups that it names one by one.
MATRIX_BYTES = 1 << 19
# Measured on a 2-core AMD EPYC 7003 (AVX2), torch 2.13: FLOP/s of small products, bytes/s of taking rows, seconds
# of the calls of one piece.
FLOPS, TAKEN, PIECE = 90e9, 8e9, 60e-6
# Whether large results ask the kernel for huge pages, see `fresh`.
HUGE_PAGES = sys.platform == "linux"
HUGE_PAGE = 1 << 21


def cutting(i: int, j: int, k: int, n: int, dtype: torch.dtype, share: int = 1) -> Cutting:
    """Choose how N rows `(i, j)` are cut for matrices `(j, k)`, from shapes alone: so plans can predict the memory."""
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
    share: int = 1,
) -> Tensor:
    """Multiply each row by the matrix of its group, see the package."""
    wide = accumulator(a.dtype)
    n, (i, j), k = groups.rows, a.shape[1:], c.shape[2]
    a, c = a.resolve_conj(), c.resolve_conj()
    drops_targets = False
    if target is None:
        out = fresh((n, i, k), a.dtype)
        out.index_fill_(0, groups.row_numbers[int(groups.ends[-1]) :], 0)
    else:
        assert targets is not None
        out = torch.zeros((targets, i, k), dtype=wide, device="cpu")
        drops_targets = bool((target == targets).any())
    if not (out.numel() and j):
        return out.zero_().to(a.dtype)
    limits = cutting(i, j, k, n, a.dtype, share)
    left, right = _buffers(limits.rows * i * max(j, k), wide)
    for piece, matrices in _walk(groups, limits, c, wide):
        if not piece.pad:
            continue
        x = _take(a, piece.padded, source, left).view(piece.count, piece.pad * i, j)
        y = _pack(piece, _multiply(x, matrices, right).view(-1, i, k), left)
        if target is None:
            _put(out, piece.rows, y.to(out.dtype))
            continue
        rows = target.index_select(0, piece.rows)
        if drops_targets:
            kept = (rows < out.shape[0]).nonzero().view(-1)
            rows, y = rows.index_select(0, kept), y.index_select(0, kept)
        out.index_add_(0, rows, y.to(out.dtype))
    return out.to(a.dtype)


def grouped_outer(
    a: Tensor,
    b: Tensor,
    groups: Groups,
    source_a: Tensor | None = None,
    source_b: Tensor | None = None,
    share: int = 1,
) -> Tensor:
    """Sum `a[r]^T @ b[r]` over the rows of each group, see the package."""
    a, b = a.resolve_conj(), b.resolve_conj()
    (i, j), k, n = a.shape[1:], b.shape[2], groups.rows
    limits = cutting(i, j, k, n, a.dtype, share)
    sums = _Sums(groups, min(limits.picked, groups.size), j, k, a.dtype)
    if not (sums.out.numel() and i):
        return sums.out.zero_()
    left, right = _buffers(limits.rows * i * max(j, k), sums.wide)
    for piece, _ in _walk(groups, limits, None, sums.wide):
        blank = piece.blank()
        x = _take(a, piece.padded, source_a, left, blank).view(piece.count, piece.pad * i, j)
        y = _take(b, piece.padded, source_b, right, blank).view(piece.count, piece.pad * i, k)
        sums.add(piece, x, y)
    return sums.result()


def grouped_gradients(
    gout: Tensor, a: Tensor, c: Tensor, groups: Groups, source: Tensor | None = None, share: int = 1
) -> tuple[Tensor, Tensor]:
    """Return both gradients of `grouped_matmul` without a target, see the package; one walk takes each row once."""
    gout, a, c = gout.resolve_conj(), a.resolve_conj(), c.resolve_conj()
    (i, j), k, n = a.shape[1:], c.shape[2], groups.rows
    grad_rows = fresh((n, i, j), a.dtype)
    grad_rows.index_fill_(0, groups.row_numbers[int(groups.ends[-1]) :], 0)
    limits = cutting(i, j, k, n, a.dtype, share)
    sums = _Sums(groups, min(limits.picked, groups.size), j, k, a.dtype)
    if not (sums.out.numel() and i and n):
        return grad_rows.zero_(), sums.out.zero_()
    left, right = _buffers(limits.rows * i * max(j, k), sums.wide)
    for piece, matrices in _walk(groups, limits, c.transpose(1, 2), sums.wide):
        blank = piece.blank()
        x = _take(a, piece.padded, source, left, blank).view(piece.count, piece.pad * i, j)
        g = _take(gout, piece.padded, None, right, blank).view(piece.count, piece.pad * i, k)
        sums.add(piece, x, g)
        if piece.pad:
            # This overwrites the rows of a: `sums` has used them.
            y = _multiply(g, matrices, left).view(-1, i, j)
            _put(grad_rows, piece.rows, _pack(piece, y, right).to(a.dtype))
    return grad_rows, sums.result()


def scratch_bytes(
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    sourced: bool = False,
    share: int = 1,
    pair: bool = False,
    turned: bool = False,
) -> int:
    """Upper bound of the bytes that the grouped functions allocate beside their results.

    With a target, a result of a half type is summed in a float32 array: add the bytes of that array.

    Args:
        sizes: rows N, size I, groups G, sizes J and K.
        dtype: dtype of the operands.
        sourced: whether rows have a source.
        share: as in `grouped_matmul`.
        pair: whether both gradients are computed.
        turned: whether the columns of some rows come before their own rows in memory.
    """
    rows, size_i, groups, size_j, size_k = sizes
    limits = cutting(size_i, size_j, size_k, rows, dtype, share)
    wide = accumulator(dtype).itemsize
    width = limits.rows * size_i * max(size_j, size_k)
    # Matrices are copied unless each named group is alone and needs no conversion.
    alone = limits.picked == 1 and accumulator(dtype) == dtype
    matrices = 0 if alone else min(limits.picked, groups) * size_j * size_k * wide
    needed = 2 * width * wide + matrices * (1 + pair)
    if accumulator(dtype) != dtype:
        # Rows in the half type, or the matrices of named groups before they are converted.
        needed += max(width, min(limits.picked, groups) * size_j * size_k) * dtype.itemsize
    elif turned:
        needed += width * wide
    # Six index arrays per piece, and a few numbers per group to decide how rows are cut.
    return needed + (6 + sourced) * 8 * limits.rows + 64 * groups + 1024


class _Sums:
    """The sums of outer products, filled piece by piece.

    `held` are the sums of the current groups, at most `most` of them. Later pieces of the same group are added to them.
    They are stored in `out` when a piece of other groups comes, and at the end.
    """

    def __init__(self, groups: Groups, most: int, j: int, k: int, dtype: torch.dtype) -> None:
        self.wide = accumulator(dtype)
        self.out = fresh((groups.size, j, k), dtype)
        self.held = self.out[:0]
        self.place: slice | Tensor = slice(0, 0)
        self.most = most
        self.scratch: Tensor | None = None

    def add(self, piece: Piece, x: Tensor, y: Tensor) -> None:
        """Add `x^T @ y` to the sums of a piece's groups; x is `(count, rows, J)`, y is `(count, rows, K)`."""
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
        """Store the sums that are still held, and return all of them."""
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
        self.held = _reshape(self.scratch, (piece.count, *self.out.shape[1:]))

    def _store(self) -> None:
        if isinstance(self.place, Tensor):
            self.out.index_copy_(0, self.place, self.held.to(self.out.dtype))
        elif self.out.dtype != self.wide:
            self.out[self.place].copy_(self.held)


def _walk(groups: Groups, limits: Cutting, c: Tensor | None, wide: torch.dtype) -> Iterator[tuple[Piece, Tensor]]:
    """Yield every piece with the matrices of its groups, in the accumulator's dtype."""
    held = torch.empty(0, dtype=wide, device="cpu")
    matrices = held
    for piece in pieces(groups, limits):
        if c is not None and piece.pad and piece.first:
            by_range = isinstance(piece.groups, slice)
            if by_range and c.dtype == wide:
                matrices = c[piece.groups]
            else:
                if not held.numel():
                    held = torch.empty(min(limits.picked, groups.size) * prod(c.shape[1:]), dtype=wide, device="cpu")
                matrices = _pick(c, piece.groups, held)
        yield piece, matrices


def _pick(c: Tensor, groups: slice | Tensor, buffer: Tensor) -> Tensor:
    """Copy `c[groups]` to the buffer, in the layout of `c`: a copy that also transposes is several times slower."""
    if c.stride(1) < c.stride(2):
        return _pick(c.transpose(1, 2), groups, buffer).transpose(1, 2)
    if isinstance(groups, slice):
        return _reshape(buffer, c[groups].shape).copy_(c[groups])
    out = _reshape(buffer, (len(groups), *c.shape[1:]))
    return torch.index_select(c, 0, groups, out=out) if c.dtype == out.dtype else out.copy_(c.index_select(0, groups))


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised array; if it is large, ask the kernel for huge pages.

    Rows that are written in random order touch a new page almost each time. Writing 33 MB so takes 25 ms, 13 ms in huge
    pages, and 10 ms if the pages are not new (2-core AMD EPYC 7003, Linux with transparent huge pages by `madvise`,
    torch 2.13). On other systems this is `torch.empty`.
    """
    out = torch.empty(shape, dtype=dtype, device="cpu")
    if HUGE_PAGES and out.nbytes >= 2 * HUGE_PAGE:
        first = -(-out.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        last = (out.data_ptr() + out.nbytes) // HUGE_PAGE * HUGE_PAGE
        # 14 is MADV_HUGEPAGE, for the whole pages inside the array. It is advice only: a refusal changes nothing.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), 14)
    return out


def _buffers(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty(numel, dtype=dtype, device="cpu"), torch.empty(numel, dtype=dtype, device="cpu")


def _take(x: Tensor, rows: Tensor, source: Tensor | None, buffer: Tensor, blank: Tensor | None = None) -> Tensor:
    """Copy `x[source[rows]]` to the buffer, with zeros at the positions `blank`.

    Torch takes rows of an array that is not contiguous one by one. If the columns of each come first, they are taken as
    they lie, and then copied. If the cache holds them, 8,386 rows of 3 x 8 take 60 us so, and 660 us one by one (one
    core of an AMD EPYC with AVX-512, torch 2.13, 2026-11-30).
    """
    if source is not None:
        rows = source.index_select(0, rows)
    out = _reshape(buffer, (len(rows), *x.shape[1:]))
    if not x.is_contiguous() and x.mT.is_contiguous():
        out.copy_(x.mT.index_select(0, rows).mT)
    elif x.dtype == buffer.dtype:
        torch.index_select(x, 0, rows, out=out)
    else:
        out.copy_(x.index_select(0, rows))
    if blank is not None:
        out.index_fill_(0, blank, 0)
    return out


def _multiply(x: Tensor, matrices: Tensor, buffer: Tensor) -> Tensor:
    """Write `(G, rows, J) @ (G, J, K)` to the buffer; a single group is a plain product, which uses all cores."""
    out = _reshape(buffer, (x.shape[0], x.shape[1], matrices.shape[2]))
    if x.shape[0] == 1:
        torch.mm(x[0], matrices[0], out=out[0])
    elif x.shape[1]:
        torch.bmm(x, matrices, out=out)
    return out


def _pack(piece: Piece, y: Tensor, buffer: Tensor) -> Tensor:
    """Return the rows of a piece without its padding; they are copied to the buffer if there is padding."""
    if piece.kept is None:
        return y
    return torch.index_select(y, 0, piece.kept, out=_reshape(buffer, (len(piece.kept), *y.shape[1:])))


def _put(out: Tensor, rows: Tensor, y: Tensor) -> None:
    """Write `out[rows] = y`, both contiguous.

    Torch copies element by element, so rows are viewed as the widest elements that divide them.
    """
    row = prod(out.shape[1:]) * out.itemsize
    out, y = out.view(len(out), -1), y.view(len(y), -1)
    for dtype in (torch.complex128, torch.int64, torch.int32):
        if row % dtype.itemsize == 0:
            out, y = out.view(dtype), y.view(dtype)
            break
    out.index_copy_(0, rows, y)


def _reshape(buffer: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Return the first elements of a flat buffer as an array of that shape."""
    return buffer[: prod(shape)].view(shape)
