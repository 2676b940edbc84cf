"""Records in a file of 4096-byte blocks: which blocks to touch, and the loops that touch them.

Record r occupies the floats [r * width, (r + 1) * width) of the file, without padding: a record that
straddles two blocks is still one transfer of 8 KiB, which takes about as long as one of 4 KiB, so
padding would cost space and save nothing.

The rows of a call are sorted and cut into *pieces*: runs of whole blocks, each one transfer.  No two
pieces of a call share a block, so threads may work on them in any order.  The kernels call libc
(`pread`, `pwrite`) without the GIL.  A kernel that meets an error stops and returns the number of the
piece; its caller repeats that piece in Python, where the error gets its name.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba import types
from numba.core import typing

BLOCK_BYTES = 4096
BLOCK_FLOATS = BLOCK_BYTES // 4
MAX_PIECE_BLOCKS = 64  # 256 KiB: above, larger transfers are no faster
# A transfer costs as much as moving about 13 KB more (measured: 38,000 reads/s of 4 KiB, 500 MB/s of 128 KiB).
GAP_BLOCKS = 2

_jit = nb.njit(nogil=True, cache=True, error_model="numpy")
# Resolved by name when the code is loaded, so the kernels can be cached (a ctypes pointer could not).
_SIGNATURE = typing.signature(types.int64, types.int32, types.intp, types.intp, types.int64)
_pread: Any = types.ExternalFunction("pread", _SIGNATURE)
_pwrite: Any = types.ExternalFunction("pwrite", _SIGNATURE)


@_jit
def cut_pieces(rows, width, gap, most, share, first, block, count):
    """Cut ascending `rows int64 [n]` into pieces; returns their number P.

    Piece p has the rows [first[p], first[p+1]) of `rows` and the blocks [block[p], block[p] + count[p]).
    Runs of blocks with at most `gap` unused blocks between them are joined up to `most` blocks.
    Pieces may `share` a block only if they are read.
    """
    pieces = 0
    for i in range(rows.size):
        start = rows[i] * width // BLOCK_FLOATS
        stop = ((rows[i] + 1) * width - 1) // BLOCK_FLOATS + 1
        if pieces:
            last = pieces - 1
            end = block[last] + count[last]
            if (start < end and not share) or (start - end <= gap and stop - block[last] <= most):
                count[last] = max(stop, end) - block[last]
                continue
        first[pieces] = i
        block[pieces] = start
        count[pieces] = stop - start
        pieces += 1
    first[pieces] = rows.size
    return pieces


@_jit
def _read_all(fd, address, size, offset):
    """Whether `size` bytes came from `offset`."""
    done = 0
    while done < size:
        got = _pread(np.int32(fd), address + done, size - done, offset + done)
        if got <= 0:
            return False
        done += got
    return True


@_jit
def _write_all(fd, address, size, offset):
    done = 0
    while done < size:
        put = _pwrite(np.int32(fd), address + done, size - done, offset + done)
        if put <= 0:
            return False
        done += put
    return True


@_jit
def take(buffer, base, rows, index, lo, hi, weight, state):
    """Copy the records rows[lo:hi] from `buffer` (the file's floats from `base` on) to weight[index], state[index]."""
    dim, extra = weight.shape[1], state.shape[1]
    for i in range(lo, hi):
        at = rows[i] * (dim + extra) - base
        to = index[i]
        for c in range(dim):
            weight[to, c] = buffer[at + c]
        for c in range(extra):
            state[to, c] = buffer[at + dim + c]


@_jit
def give(buffer, base, rows, index, lo, hi, weight, state):
    """The reverse of `take`."""
    dim, extra = weight.shape[1], state.shape[1]
    for i in range(lo, hi):
        at = rows[i] * (dim + extra) - base
        of = index[i]
        for c in range(dim):
            buffer[at + c] = weight[of, c]
        for c in range(extra):
            buffer[at + dim + c] = state[of, c]


@_jit
def has_others(trained, num_rows, width, rows, lo, hi, block, count):
    """Whether the blocks hold (a part of) a trained record that is not one of `rows[lo:hi]`."""
    row = block * BLOCK_FLOATS // width
    stop = min(((block + count) * BLOCK_FLOATS - 1) // width + 1, num_rows)
    i = lo
    while row < stop:
        if i < hi and rows[i] == row:
            i += 1
        elif (trained[row >> 3] >> (row & 7)) & 1:
            return True
        row += 1
    return False


@_jit
def read_pieces(fd, rows, index, first, block, count, lo, hi, buffer, weight, state):
    """Read the records of the pieces [lo, hi); returns hi, or the piece that failed."""
    address = buffer.ctypes.data
    for p in range(lo, hi):
        if not _read_all(fd, address, count[p] * BLOCK_BYTES, block[p] * BLOCK_BYTES):
            return p
        take(buffer, block[p] * BLOCK_FLOATS, rows, index, first[p], first[p + 1], weight, state)
    return hi


@_jit
def write_pieces(fd, rows, index, first, block, count, lo, hi, buffer, weight, state, trained, num_rows):
    """Write the records of the pieces [lo, hi), keeping what else is in their blocks.

    Returns hi, or the piece that failed.  Blocks without other
    trained records are not read before: what they hold is never looked at.
    """
    address = buffer.ctypes.data
    width = weight.shape[1] + state.shape[1]
    for p in range(lo, hi):
        size, offset = count[p] * BLOCK_BYTES, block[p] * BLOCK_BYTES
        if has_others(trained, num_rows, width, rows, first[p], first[p + 1], block[p], count[p]):
            if not _read_all(fd, address, size, offset):
                return p
        else:
            buffer[: count[p] * BLOCK_FLOATS] = np.float32(0)
        give(buffer, block[p] * BLOCK_FLOATS, rows, index, first[p], first[p + 1], weight, state)
        if not _write_all(fd, address, size, offset):
            return p
    return hi
