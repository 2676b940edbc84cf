"""Which rows the batches of a run use, counted from their ids: for `--dry-run`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from .data import Batch, Source
from .driver.signatures import LONG_ROW
from .store import bits

COUNTED_BATCHES = 4096
REHEARSED_BATCHES = 256  # at most; sizes of batches are taken from as many
TEST_BATCHES = 32  # evaluated: the largest of some is near the largest of all
PIECE_ROWS = 1 << 20


@dataclasses.dataclass
class Use:
    """What the batches of a run use: batches counted, one bit for each row used, rows of the largest batch."""

    batches: int
    complete: bool  # all batches of the run were counted
    trained: np.ndarray
    rows: int
    largest: int
    lookups: int = 0  # of the largest batch
    long_chunks: int = 0  # of 256 lookups, of rows that more of them hit, in one batch
    several: bool = False  # ids a bag
    written: int = 0  # distinct rows of the batches between two checkpoints


def group_rows(batch: Batch, bases: Mapping[str, int]) -> np.ndarray:
    """Rows of all lookups of a batch, int64 [L]; `bases`: the first row of each feature's table."""
    return np.concatenate([jagged.values.numpy() + bases[name] for name, jagged in batch.sparse.items()])


def count(source: Source, rows: list[int], every: int | None = None) -> Use:
    """Read the ids of an epoch's batches, at most COUNTED_BATCHES, and mark the rows that they use.  `every`: batches
    between two checkpoints."""
    bases = dict(zip(source.features, np.cumsum([0, *rows[:-1]]), strict=True))
    trained, batches, complete = np.zeros(-(-sum(rows) // 8), np.uint8), 0, True
    largest = lookups = chunks = written = 0
    several, since = False, np.zeros_like(trained)  # rows since the last checkpoint
    for batch in source:
        if batches == COUNTED_BATCHES:
            complete = False
            break
        ids = group_rows(batch, bases)
        bits.mark(trained, ids)
        if every is not None:
            if batches % every == 0:
                since[:] = 0
            bits.mark(since, ids)
            written = max(written, int(np.bitwise_count(since).sum()))
        if batches < REHEARSED_BATCHES:  # the largest of some is near the largest of all
            hits = np.unique(ids, return_counts=True)[1]
            largest, lookups = max(largest, hits.size), max(lookups, ids.size)
            chunks = max(chunks, int((-(-hits[hits > LONG_ROW] // LONG_ROW)).sum()))
            several = several or any(jagged.offsets is not None for jagged in batch.sparse.values())
        batches += 1
    used = int(np.bitwise_count(trained).sum())
    return Use(batches, complete, trained, used, largest, lookups, chunks, several, written)


def pages(trained: np.ndarray, lo: int, hi: int, row_bytes: int, page: int) -> int:
    """Pages of `page` bytes that hold a used row of [lo, hi), where a row has `row_bytes`."""
    if row_bytes == 0:
        return 0
    found, before = 0, -1
    for at in range(lo, hi, PIECE_ROWS):
        stop = min(at + PIECE_ROWS, hi)
        flags = np.unpackbits(trained[at >> 3 : (stop + 7) >> 3], bitorder="little")
        used = np.flatnonzero(flags[at & 7 : (at & 7) + stop - at]) + at
        if used.size:
            first, last = used * row_bytes // page, (used * row_bytes + row_bytes - 1) // page
            span = np.maximum(last - np.maximum(first, np.concatenate([[before], last[:-1]]) + 1) + 1, 0)
            found, before = found + int(span.sum()), int(last[-1])
    return found
