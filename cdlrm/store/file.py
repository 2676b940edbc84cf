"""`FileStore`: all records of a group in one sparse file, for tables larger than memory.

A row that was never trained is not in the file: its value is generated where it is needed, and its
blocks are neither read nor allocated.  In memory are two bits a row.  Records are read and written in
sorted pieces by a few threads at once, past the page cache (O_DIRECT) where the file system allows
it, so that a table that is much larger than memory does not push everything else out of it.

Guarantee.  After `flush()` or `close()` the folder can be opened again and holds exactly what was
written.  After a crash it is refused with one sentence, unless nothing was written since the last
flush; it is never silently wrong.  (Checkpoints are what survives a crash.)  When the disk is full
the failing call raises DataError; the caller still has the records.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local
from typing import Any

import numpy as np

from ..driver.base import Driver
from ..errors import DataError, UsageError
from ..initial import Initializer
from ..optim import Optimizer
from ..table import Table
from . import bits, blocks
from .folder import StoreFolder, disk_error, identity

log = logging.getLogger("cdlrm")

THREADS = 32  # transfers in flight; they wait for the disk, not for a core (measured: 8 are slower, 64 no faster)
CHUNK_PIECES = 16  # pieces that a thread takes at a time
PIECE_BYTES = 1 << 24  # of a range, at a time
DROP_BYTES = 1 << 28  # without O_DIRECT: page cache that may gather before it is dropped


class FileStore:
    """Home of the records of the rows of `tables`, in the files group<group>.* of `folder`; see `Store`.

    `folder` is made if its parent exists.  A store that is there already is opened again if it was made
    for the same tables, optimizer, initial values and seed; `fresh` discards it (before a checkpoint is loaded).
    Raises ConfigError (another model's store, in use, not writable) and DataError (damaged, disk full).
    """

    kind = "file"

    def __init__(
        self,
        folder: str | Path,
        group: int,
        tables: Sequence[Table],
        optimizer: Optimizer,
        initializer: Initializer,
        driver: Driver,
        seed: int,
        *,
        fresh: bool = False,
    ) -> None:
        self.num_rows, self.dim = sum(table.num_embeddings for table in tables), tables[0].embedding_dim
        self.state_width = optimizer.state_width(self.dim)
        self.initial_state = np.float32(optimizer.initial_state)
        self.initializer, self.driver = initializer, driver
        num_rows = self.num_rows
        size = -(-num_rows * self.record_bytes // blocks.BLOCK_BYTES) * blocks.BLOCK_BYTES
        facts = identity(tables, optimizer, initializer, seed)
        self._files = StoreFolder(Path(folder).absolute(), f"group{group}", facts, size, fresh)
        self.path = self._files.data
        try:
            self.trained = np.zeros(-(-num_rows // 8), np.uint8)
            self.changed = np.zeros(-(-num_rows // 8), np.uint8)
            self._files.load_bits(self.trained, self.changed)
            self._fd, self.direct = _open_data(self.path)
        except BaseException:
            self._files.release()
            raise
        self.saved: dict[str, Any] = dict(self._files.saved)
        self.writes = 0
        self._unsaved = False  # bits or records that the last flush does not hold
        self._piece_rows = max(1, PIECE_BYTES // self.record_bytes)
        self._uncached_bytes = 0
        self._pool = ThreadPoolExecutor(THREADS, "cdlrm-file")
        self._buffers = local()
        self._release = weakref.finalize(self, _release, self._fd, self._files, self._pool)

    @property
    def record_bytes(self) -> int:
        return 4 * (self.dim + self.state_width)

    # --- rows in any order ---

    def read(self, rows: np.ndarray, weight: np.ndarray, state: np.ndarray, index: np.ndarray) -> int:
        """Copy the records of `rows int64 [n]` to `weight[index]`, `state[index]`; returns how many
        were stored (the others were generated).  Raises DataError when the disk fails."""
        self._require_open()
        stored, fresh = bits.positions(self.trained, rows)
        if stored.size:
            self._read_stored(*_ascending(rows[stored], index[stored]), weight, state)
        if fresh.size:
            self.initializer.rows(weight, index[fresh], rows[fresh])
            if self.state_width:
                state[index[fresh]] = self.initial_state
        return int(stored.size)

    def write(self, rows: np.ndarray, weight: np.ndarray, state: np.ndarray, index: np.ndarray) -> None:
        """Store `weight[index]`, `state[index]` as the records of the distinct `rows int64 [n]`.

        Raises DataError when the disk is full or fails; rows that were not stored before are then not believed.
        """
        self._require_open()
        if not rows.size:
            return
        self._files.mark_open()
        self._unsaved = True
        self.writes += 1
        bits.mark(self.changed, rows)  # before: a write that fails may have changed some
        self._write_stored(*_ascending(rows, index), weight, state)
        bits.mark(self.trained, rows)

    def _read_stored(self, rows: np.ndarray, index: np.ndarray, weight: np.ndarray, state: np.ndarray) -> None:
        first, block, count = self._cut(rows, share=True)

        def run(lo: int, hi: int, buffer: np.ndarray) -> int:
            return blocks.read_pieces(self._fd, rows, index, first, block, count, lo, hi, buffer, weight, state)

        def again(p: int, raw: memoryview, buffer: np.ndarray) -> None:
            self._repeat(os.preadv, "reading records", raw, int(block[p]))
            blocks.take(buffer, block[p] * blocks.BLOCK_FLOATS, rows, index, first[p], first[p + 1], weight, state)

        self._each_piece(count, run, again)
        self._drop_cached(blocks.BLOCK_BYTES * int(count.sum()))

    def _write_stored(self, rows: np.ndarray, index: np.ndarray, weight: np.ndarray, state: np.ndarray) -> None:
        first, block, count = self._cut(rows, share=False)
        width = self.dim + self.state_width

        def run(lo: int, hi: int, buffer: np.ndarray) -> int:
            return blocks.write_pieces(
                self._fd, rows, index, first, block, count, lo, hi, buffer, weight, state, self.trained, self.num_rows
            )

        def again(p: int, raw: memoryview, buffer: np.ndarray) -> None:
            span = (rows, first[p], first[p + 1], block[p], count[p])
            if blocks.has_others(self.trained, self.num_rows, width, *span):
                self._repeat(os.preadv, "reading records", raw, int(block[p]))
            else:
                buffer[:] = 0
            blocks.give(buffer, block[p] * blocks.BLOCK_FLOATS, rows, index, first[p], first[p + 1], weight, state)
            self._repeat(os.pwritev, "writing records", raw, int(block[p]))

        self._each_piece(count, run, again)
        self._drop_cached(blocks.BLOCK_BYTES * int(count.sum()))

    def _cut(self, rows: np.ndarray, share: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first, block, count = (np.empty(rows.size + 1, np.int64) for _ in range(3))
        pieces = blocks.cut_pieces(
            rows, self.dim + self.state_width, blocks.GAP_BLOCKS, blocks.MAX_PIECE_BLOCKS, share, first, block, count
        )
        return first[: pieces + 1], block[:pieces], count[:pieces]

    def _each_piece(
        self,
        count: np.ndarray,
        run: Callable[[int, int, np.ndarray], int],
        again: Callable[[int, memoryview, np.ndarray], None],
    ) -> None:
        """`run` chunks of pieces on the threads; a piece that fails is done `again` so that its error is known."""
        pieces = count.size
        most = int(count.max()) * blocks.BLOCK_BYTES
        size = max(1, min(CHUNK_PIECES, pieces // THREADS))
        starts = itertools.count(0, size)
        failed: list[BaseException] = []

        def work() -> None:
            raw, buffer = self._buffer(most)
            while not failed and (lo := next(starts)) < pieces:
                hi = min(lo + size, pieces)
                try:
                    while (lo := run(lo, hi, buffer)) < hi:
                        used = int(count[lo]) * blocks.BLOCK_BYTES
                        again(lo, raw[:used], buffer[: used // 4])
                        lo += 1
                except BaseException as error:
                    failed.append(error)

        helpers = [self._pool.submit(work) for _ in range(min(THREADS, -(-pieces // size)) - 1)]
        work()
        for helper in helpers:
            helper.result()
        if failed:
            raise failed[0]

    def _buffer(self, size: int) -> tuple[memoryview, np.ndarray]:
        """This thread's page-aligned buffer of at least `size` bytes: as bytes and as float32."""
        size = max(size, blocks.MAX_PIECE_BLOCKS * blocks.BLOCK_BYTES)
        memory = getattr(self._buffers, "memory", None)
        if memory is None or len(memory) < size:
            memory = self._buffers.memory = mmap.mmap(-1, size)
        return memoryview(memory), np.frombuffer(memory, np.float32)

    def _repeat(self, call: Callable[..., int], doing: str, raw: memoryview, block: int) -> None:
        done = 0
        while done < len(raw):
            try:
                moved = call(self._fd, [raw[done:]], block * blocks.BLOCK_BYTES + done)
            except OSError as error:
                raise disk_error(self.path, doing, error) from error
            if not moved:
                raise DataError(
                    f"{self.path}: ends before byte {block * blocks.BLOCK_BYTES + done + 1} of the "
                    f"{self._files.data_bytes} that it had; another program has cut it, start from a checkpoint."
                )
            done += moved

    def _drop_cached(self, moved: int) -> None:
        """Without O_DIRECT, keep the page cache from filling with what we keep in the cache anyway."""
        if self.direct:
            return
        self._uncached_bytes += moved
        if self._uncached_bytes >= DROP_BYTES:
            self._uncached_bytes = 0
            self._sync()
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    # --- ranges ---

    def get(self, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of weights [hi-lo, D] and state [hi-lo, S] of the rows [lo, hi)."""
        weight = np.empty((hi - lo, self.dim), np.float32)
        state = np.empty((hi - lo, self.state_width), np.float32)
        for at in range(lo, hi, self._piece_rows):
            rows = np.arange(at, min(at + self._piece_rows, hi), dtype=np.int64)
            self.read(rows, weight, state, rows - lo)
        return weight, state

    def put(self, lo: int, weight: np.ndarray | None, state: np.ndarray | None) -> None:
        """Replace weights and/or state of the rows from `lo` on (float32, as `get` returns them)."""
        given = weight if weight is not None else state
        if given is None or not given.shape[0]:
            return
        for at in range(0, given.shape[0], self._piece_rows):
            stop = min(at + self._piece_rows, given.shape[0])
            rows = np.arange(lo + at, lo + stop, dtype=np.int64)
            new_weight = None if weight is None else weight[at:stop]
            new_state = None if state is None else state[at:stop]
            if new_weight is None or (new_state is None and self.state_width):
                old_weight, old_state = self.get(lo + at, lo + stop)
                new_weight = old_weight if new_weight is None else new_weight
                new_state = old_state if new_state is None else new_state
            if new_state is None:
                new_state = np.empty((stop - at, 0), np.float32)
            new_weight, new_state = (np.ascontiguousarray(part, np.float32) for part in (new_weight, new_state))
            self.write(rows, new_weight, new_state, rows - (lo + at))

    # --- the end ---

    def flush(self) -> None:
        """Everything written so far is on disk and the folder can be opened again, also after a crash from now on
        (until the next write).  Raises DataError when the disk is full."""
        self._require_open()
        if self._unsaved:
            self._sync()
            self._files.mark_closed(self.trained, self.changed, self.saved)
            self._unsaved = False

    def remember(self, key: str, value: Any) -> None:
        """Keep a JSON value with the records (such as step counts); after opening it is in `saved`."""
        self._require_open()
        if self.saved.get(key) != value:
            self._files.mark_open()
            self._unsaved = True
            self.saved[key] = value

    def clear_changed(self, base: Any) -> None:
        """The checkpoint `base` (a JSON value, kept as `saved["base"]`; None: no known one) has every record as it is
        now.  Until the next flush the folder keeps the bits and the base of the last one, which are as true."""
        self._require_open()
        self._unsaved = True
        self.saved.pop("base", None)  # whatever interrupts this, bits are never relative to another checkpoint
        self.changed[:] = 0
        self.saved["base"] = base

    def _sync(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise disk_error(self.path, "writing records", error) from error

    def close(self) -> None:
        """Flush and release the folder; it is released also when the flush fails.  May be called twice."""
        if not self._release.alive:
            return
        try:
            self.flush()
        finally:
            self._release()

    def _require_open(self) -> None:
        if not self._release.alive:
            raise UsageError(f"{self.path}: the file store is closed; make a new module on its folder.")


def _ascending(rows: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`rows` in ascending order, `index` with them."""
    if rows.size < 2 or (rows[1:] > rows[:-1]).all():
        return rows, index
    order = np.argsort(rows, kind="stable")
    return rows[order], index[order]


def _open_data(path: Path) -> tuple[int, bool]:
    """A descriptor of the data file, and whether it goes past the page cache."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | getattr(os, "O_DIRECT", 0))
        try:
            with mmap.mmap(-1, blocks.BLOCK_BYTES) as probe:
                os.preadv(fd, [probe], 0)
        except OSError:
            os.close(fd)
            raise
        return fd, True
    except OSError as error:
        log.info("%s: no O_DIRECT here (%s); the page cache is used and dropped now and then.", path, error.strerror)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error.strerror}); use a folder that you may write.") from error
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd, False


def _release(fd: int, files: StoreFolder, pool: ThreadPoolExecutor) -> None:
    pool.shutdown(wait=True)
    os.close(fd)
    files.release()
