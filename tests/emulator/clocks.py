"""Vector clocks and the shadow: which accesses are ordered by the program, whatever order they ran in.

Every operation has a number, `count * MAX_STREAMS + stream`, growing as operations are issued (the host is
stream 0).  A clock holds, by stream, the number of the newest operation that happened before; so an earlier access
by operation w is ordered before the present one exactly if `w <= clock[w % MAX_STREAMS]`.
The shadow of a region holds, for each 4 bytes, the last writer and each stream's last reader.  It is filled in the
order in which operations run, but compares by clocks, which follow from the issued program alone.
"""

from __future__ import annotations

import numpy as np
from numba import njit

MAX_STREAMS = 64
FINE = -1  # results of the checks below: nothing found,
OUTSIDE = -2  # OUTSIDE - k: row k leaves the region,
TWICE = 1 << 62  # TWICE + word: one launch writes a word by two owners; a word alone: a race there
_STREAM = np.uint32(MAX_STREAMS - 1)


@njit(nogil=True, cache=True)
def read_rows(writer, reader, clock, op, size, base, offsets, nbytes):
    """Rows of `nbytes` bytes at base + offsets[k] of a region of `size` bytes are read by operation `op`."""
    for k in range(len(offsets)):
        at = base + offsets[k]
        if at < 0 or at + nbytes > size:
            return OUTSIDE - k
        for word in range(at >> 2, (at + nbytes + 3) >> 2):
            last = writer[word]
            if last > clock[last & _STREAM]:
                return word
            reader[word] = op
    return FINE


@njit(nogil=True, cache=True)
def write_rows(writer, readers, streams, clock, op, size, base, offsets, nbytes, one_owner):
    """The same for rows that are written (or read and written)."""
    for k in range(len(offsets)):
        at = base + offsets[k]
        if at < 0 or at + nbytes > size:
            return OUTSIDE - k
        for word in range(at >> 2, (at + nbytes + 3) >> 2):
            last = writer[word]
            if last > clock[last & _STREAM]:
                return word
            if one_owner and last == op:
                return TWICE + word
            for s in range(streams):
                if readers[s, word] > clock[s]:
                    return word
            writer[word] = op
    return FINE


@njit(nogil=True, cache=True)
def mark_rows(mask, base, offsets, nbytes):
    """Set the bytes of the rows in `mask`."""
    for k in range(len(offsets)):
        at = base + offsets[k]
        for byte in range(at, at + nbytes):
            mask[byte] = True


class Clocks:
    """The clock of every stream and of the host, and the numbers of operations."""

    def __init__(self) -> None:
        self._of = np.zeros((MAX_STREAMS, MAX_STREAMS), np.uint32)
        self._count = 0
        self.streams = 1

    def new_stream(self) -> int:
        if self.streams == MAX_STREAMS:
            raise ValueError(f"the emulator has no more than {MAX_STREAMS - 1} streams")
        self.streams += 1
        return self.streams - 1

    def next(self, stream: int) -> tuple[int, np.ndarray]:
        """Number and clock of a new operation on `stream`, issued by the host now."""
        self._count += 1
        number = self._count * MAX_STREAMS + stream
        mine = self._of[stream]
        if stream:
            np.maximum(mine, self._of[0], out=mine)
        mine[stream] = number
        return number, mine.copy()

    def join(self, stream: int, clock: np.ndarray) -> None:
        """`stream` goes on after everything in `clock`."""
        np.maximum(self._of[stream], clock, out=self._of[stream])

    def covers(self, stream: int, clock: np.ndarray) -> bool:
        """Whether everything in `clock` comes before what `stream` does next."""
        return bool((self._of[stream] >= clock).all())

    def of(self, stream: int) -> np.ndarray:
        return self._of[stream].copy()
