"""`Source`: blocks of columns -> a stream of batches that can be shuffled, split, stopped and continued.

A source is a numbered sequence of *blocks* (a row group, a stripe, a piece of a text file, a stretch of synthetic
rows). An epoch concatenates the blocks and cuts the stream every `batch_size` rows; the last batch may be shorter.
Shuffling permutes the blocks, and the rows within each block, by a function of (seed, epoch) alone. A position in the
stream is (block, row of the block), so that continuing reads no block twice and none that lies before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple, Self

from cdlrm.data.batch import Batch
from cdlrm.data.columns import Columns
from cdlrm.data.hashing import permutation
from cdlrm.errors import ConfigError

__all__ = ["Piece", "Progress", "Source"]

Progress = Callable[[int, "int | None"], None]
"""Called as progress(rows_read, rows_total or None) after every batch is cut."""


class _Position(NamedTuple):
    """Where the stream continues: `batch` batches are out, the next row is `row` of the block at place `block` in the
    order."""

    batch: int = 0
    block: int = 0
    row: int = 0
    rows_read: int = 0
    skipped: int = 0  # in the blocks before `block`


class Piece(NamedTuple):
    """Rows lo..hi-1 of block `block`; hi None means to its end."""

    block: int
    lo: int
    hi: int | None


class Source:
    """Base of all sources; an iterable of `Batch`.

    features: names of the categorical features; table_rows: rows of each one's table, int; num_dense: dense features;
    skipped_rows: bad rows left out so far in this epoch; bad_examples: what was wrong with the first few, since the
    source was made; rows_read: rows handed out so far in this epoch;
    rows_total: rows of an epoch, None while unknown (a text file that nobody has counted).

    Each `iter()` starts where a loaded state says, otherwise at the beginning of the current epoch. `state_dict()`
    describes the place behind the batch yielded last. Raises `DataError` (bad files) while iterating, `ConfigError`
    for bad settings.
    """

    format = ""
    features: list[str]
    table_rows: list[int]
    num_dense: int

    def __init__(
        self,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        row_range: tuple[int, int | None] | None = None,
        limit_batches: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size} where at least 1 is needed; raise it")
        if limit_batches is not None and limit_batches < 0:
            raise ConfigError(f"limit_batches is {limit_batches} where at least 0 is needed; raise it or leave it out")
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.limit_batches = limit_batches
        self.progress = progress
        self.epoch = 0
        self.row_range = _check_range(row_range)
        self._pieces: list[Piece] | None = None
        self._settings: dict[str, Any] | None = None
        self._skipped = 0
        self.bad_examples: list[str] = []
        self._position = _Position()
        self._resume: _Position | None = None

    # What a kind of source provides.

    def num_blocks(self) -> int:
        """Number of blocks, without reading them."""
        raise NotImplementedError

    def block_rows(self, block: int) -> int:
        """Rows of a block, bad ones included; may have to read the file."""
        raise NotImplementedError

    def reading_threads(self) -> int:
        """How many threads `start_block` can use; 0: it is not to be called."""
        return 0

    def start_block(self, threads: Executor, block: int, lo: int, hi: int | None) -> Any:
        """Let other threads begin to read rows lo..hi-1 of a block; the result is for `read_block`."""
        raise NotImplementedError

    def read_block(self, block: int, lo: int, hi: int | None, started: Any = None) -> tuple[Columns, int]:
        """Rows lo..hi-1 of a block without the bad ones, and how many bad ones were left out."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Plain values that must agree between a saved state and the source that loads it."""
        return {
            "format": self.format,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed if self.shuffle else None,
            "row_range": None if self.row_range is None else list(self.row_range),
            "features": len(self.features),
            "table_rows": list(self.table_rows),
        }

    def _known_rows(self) -> int | None:
        """All rows of all blocks when that is known without reading."""
        return None

    def restricted(self, row_range: tuple[int, int | None], **changes: Any) -> Self:
        """A source over some rows of the same data, at its beginning; `changes`: batch_size, shuffle, seed,
        limit_batches, progress."""
        other = copy.copy(self)
        stream = {name: getattr(self, name) for name in ("batch_size", "shuffle", "seed", "limit_batches", "progress")}
        Source.__init__(other, row_range=row_range, **{**stream, **changes})
        return other

    # Sizes.

    @property
    def rows_total(self) -> int | None:
        """Rows of an epoch before bad ones are left out, or None where only reading the files would tell."""
        if self.row_range is None and self._pieces is None:
            return self._known_rows()
        if self._pieces is None or any(piece.hi is None for piece in self._pieces):
            return self._known_rows() if self.row_range is None else None
        return sum(piece.hi - piece.lo for piece in self._pieces if piece.hi is not None)

    def count_rows(self) -> int:
        """Rows of an epoch before bad ones are left out; a text file is read once for it, quickly."""
        known = self.rows_total
        if known is not None:
            return known
        return sum((self.block_rows(p.block) if p.hi is None else p.hi) - p.lo for p in self._plan())

    def __len__(self) -> int:
        """Batches of an epoch (an upper bound where bad rows are skipped). A text file is counted once, when asked."""
        batches = -(-self.count_rows() // self.batch_size)
        return batches if self.limit_batches is None else min(batches, self.limit_batches)

    def _plan(self) -> list[Piece]:
        if self._pieces is None:
            blocks = range(self.num_blocks())
            if self.row_range is None:
                self._pieces = [Piece(block, 0, None) for block in blocks]
            else:
                self._pieces = list(_cut(self.row_range, (self.block_rows(block) for block in blocks)))
        return self._pieces

    # Where we are.

    @property
    def rows_read(self) -> int:
        """Rows handed out so far in this epoch."""
        return self._position.rows_read

    @property
    def skipped_rows(self) -> int:
        """Bad rows left out so far in this epoch."""
        return self._skipped

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` goes through. Another epoch than the current one starts at its
        beginning."""
        if epoch < 0:
            raise ConfigError(f"the epoch is {epoch} where at least 0 is needed; count epochs from 0")
        if epoch != self.epoch:
            self.epoch = epoch
            self._position, self._resume, self._skipped = _Position(), None, 0

    def state_dict(self) -> dict[str, Any]:
        """A small plain dict: the place behind the batch yielded last, and the settings it is valid for."""
        at = self._position
        if self._settings is None:
            self._settings = self.settings()
        return {"epoch": self.epoch, **at._asdict(), "settings": self._settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `iter()` continue behind the batch of `state_dict()`; `ConfigError` if settings or data
        differ."""
        fields = ("epoch", *_Position._fields)
        if not isinstance(state, dict) or not all(type(state.get(k)) is int and state[k] >= 0 for k in fields):
            raise ConfigError(
                f"the state of the source lacks one of {', '.join(fields)}; pass what state_dict() returned"
            )
        mine, theirs = self.settings(), state.get("settings") or {}
        for key in {**mine, **theirs}:
            if mine.get(key) != theirs.get(key):
                words = {"files": "other files", "row_range": "other rows", "format": "files of another format"}
                what = words.get(key, f"{key} {theirs.get(key)!r}, not {mine.get(key)!r}")
                raise ConfigError(
                    f"the saved place in the data is of a run with {what}; open the same files with the same settings, "
                    "or start anew without it"
                )
        if state["block"] > len(self._plan()):
            raise ConfigError(
                f"the saved place in the data is block {state['block']}, where the data has {len(self._plan())} "
                "blocks; open the same files"
            )
        self.epoch = state["epoch"]
        self._position = self._resume = _Position(**{k: state[k] for k in _Position._fields})
        self._skipped = self._position.skipped

    # The stream.

    def __iter__(self) -> Iterator[Batch]:
        start = self._resume or _Position()
        self._resume, self._position, self._skipped = None, start, start.skipped
        return self._batches(start, self.epoch)

    def _batches(self, at: _Position, epoch: int) -> Iterator[Batch]:
        pieces = self._plan()
        order = self._shuffled(pieces, epoch) if self.shuffle else range(len(pieces))
        limit = self.limit_batches if self.limit_batches is not None else 2**63
        parts: list[Columns] = []  # the beginning of the next batch
        missing, skipped = self.batch_size, at.skipped
        if at.batch >= limit:
            return
        with closing(self._started([pieces[i] for i in order], at.block)) as stream:
            for place, started in stream:
                columns, bad = self._read_piece(pieces[order[place]], started, epoch)
                del started  # its memory goes before the batches are handed out
                self._skipped = skipped + bad
                row = at.row if place == at.block else 0
                while row < columns.rows:
                    end = min(row + missing, columns.rows)
                    parts.append(columns.slice(row, end))
                    missing, row = missing - (end - row), end
                    if missing:
                        break
                    here = (place, row, skipped) if row < columns.rows else (place + 1, 0, skipped + bad)
                    at = self._advance(at, here, parts)
                    yield self._emit(parts, at)
                    parts, missing = [], self.batch_size
                    if at.batch >= limit:
                        return
                skipped += bad
        if parts:
            at = self._advance(at, (len(pieces), 0, skipped), parts)
            yield self._emit(parts, at)

    def _shuffled(self, pieces: Sequence[Piece], epoch: int) -> Sequence[int]:
        """The order in which an epoch takes the pieces, a function of (seed, epoch)."""
        return permutation(len(pieces), self.seed, epoch).tolist()

    def _advance(self, at: _Position, here: tuple[int, int, int], parts: list[Columns]) -> _Position:
        block, row, skipped = here
        rows_read = at.rows_read + sum(part.rows for part in parts)
        self._position = _Position(at.batch + 1, block, row, rows_read, skipped)
        return self._position

    def _emit(self, parts: list[Columns], at: _Position) -> Batch:
        if self.progress is not None:
            self.progress(at.rows_read, self.rows_total)
        return Columns.concat(parts).to_batch(self.features, at.batch - 1)

    def _started(self, pieces: Sequence[Piece], first: int) -> Generator[tuple[int, Any], None, None]:
        """Pieces from the `first` on, each read by other threads while the one before is used; the threads end with
        us."""
        threads = self.reading_threads()
        if not threads:
            yield from ((place, None) for place in range(first, len(pieces)))
            return
        pool = ThreadPoolExecutor(threads, thread_name_prefix="cdlrm-fetch")
        try:
            ahead = [self.start_block(pool, *piece) for piece in pieces[first : first + 1]]
            for place in range(first, len(pieces)):
                started = ahead.pop()
                if place + 1 < len(pieces):
                    ahead.append(self.start_block(pool, *pieces[place + 1]))
                yield place, started
                del started
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def blocks(self, first: int = 0) -> Generator[tuple[Columns, int], None, None]:
        """The blocks from `first` on in the files' order, each with the number of its bad rows, which are left out."""
        pieces = [Piece(block, 0, None) for block in range(self.num_blocks())]
        with closing(self._started(pieces, first)) as stream:
            for place, started in stream:
                yield self.read_block(place, 0, None, started)

    def _read_piece(self, piece: Piece, started: Any, epoch: int) -> tuple[Columns, int]:
        columns, skipped = self.read_block(*piece, started)
        if self.shuffle:
            columns = columns.take(permutation(columns.rows, self.seed, epoch, piece.block + 1))
        return columns, skipped


def _check_range(row_range: tuple[int, int | None] | None) -> tuple[int, int | None] | None:
    if row_range is None:
        return None
    lo, hi = row_range
    if lo < 0 or (hi is not None and hi < lo):
        raise ConfigError(f"row_range is [{lo}, {hi}) where 0 <= first <= last is needed; give a range of row numbers")
    return lo, hi


def _cut(row_range: tuple[int, int | None], rows_of_blocks: Iterator[int]) -> Iterator[Piece]:
    lo, hi = row_range
    first = 0
    for block, rows in enumerate(rows_of_blocks):
        start, end = max(lo - first, 0), rows if hi is None else min(hi - first, rows)
        if start < end:
            yield Piece(block, start, end)
        first += rows
