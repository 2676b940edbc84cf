"""Vocabularies: ids -> row numbers of a table in the order of first occurrence, as DLRM's scripts number them.

Row 0 is for what is missing, was seen fewer than `min_count` times, or is not in the vocabulary; the ids have rows
1, 2, …. One column is numbered at a time, in passes that know at most MOST_IDS ids, the next ones in the order of first
occurrence; so memory is 18 to 28 bytes for each of those, and where there is not so much the column is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numba import njit

from cdlrm.data.hashing import mix64
from cdlrm.errors import DataError
from cdlrm.machine import available_bytes

__all__ = ["Numbering", "VocabularyReader", "VocabularyWriter"]

KEY = b"cdlrm.vocabulary"
_SCHEMA = pa.schema([("feature", pa.string()), ("row", pa.int64()), ("id", pa.int64()), ("count", pa.int64())])
_CHUNK = 2**18
_MISSING = -1
_SMALL_BYTES = 2**22  # so much is not asked for
MOST_IDS = 3 * 2**21  # three quarters of a table of 32 MiB


@njit(cache=True, nogil=True)
def _number(
    ids: np.ndarray, insert: bool, before: int, used: int, table: np.ndarray, order: np.ndarray, counts: np.ndarray,
    out: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """out[i], where it is 0: `before` + 1 + the place of ids[i] in `order`, or 0; stops when `order` is full. Returns
    ids done and places used.

    table: open addressing, a power of two and a third longer than `order` at least; places + 1, 0 = free."""
    mask = np.uint64(len(table) - 1)
    for i in range(len(ids)):
        if ids[i] == _MISSING or out[i] != 0:
            continue
        at = mix64(np.uint64(ids[i])) & mask
        while table[at] != 0 and order[table[at] - 1] != ids[i]:
            at = (at + np.uint64(1)) & mask
        if table[at] == 0 and insert:
            if used == len(order):
                return i, used
            order[used] = ids[i]
            counts[used] = 0
            used += 1
            table[at] = used
        number = table[at]
        if number:
            counts[number - 1] += 1
            out[i] = before + number
    return len(ids), used


@njit(cache=True, nogil=True)
def _fill(order: np.ndarray, table: np.ndarray) -> None:
    """Put all of `order` into an empty table."""
    mask = np.uint64(len(table) - 1)
    for i in range(len(order)):
        at = mix64(np.uint64(order[i])) & mask
        while table[at] != 0:
            at = (at + np.uint64(1)) & mask
        table[at] = i + 1


class Numbering:
    """The numbers of one column's ids while they are found; int32, so at most 2**31 - 2 distinct ids and samples.

    before: ids that earlier passes have numbered. `left`: there was no room for an id, which the next pass numbers."""

    def __init__(self, name: str = "", before: int = 0) -> None:
        self._used, self.before, self.left = 0, before, False
        self._order, self._counts = np.zeros(min(1024, MOST_IDS), np.int64), np.zeros(min(1024, MOST_IDS), np.int32)
        self._table = np.zeros(2048, np.int32)
        self.name = name

    @property
    def numbered(self) -> int:
        """Ids that this pass and those before have numbered."""
        return self.before + self._used

    def number(self, ids: np.ndarray, insert: bool = True, out: np.ndarray | None = None) -> np.ndarray:
        """int64 [L] (-1: missing) -> int32 [L], `out` where earlier passes have left it at 0; unknown ids get the next
        number, or 0 if not `insert` or there is no room."""
        out = np.zeros(len(ids), np.int32) if out is None else out
        done = 0
        while True:
            args = (insert, self.before, self._used, self._table, self._order, self._counts)
            more, self._used = _number(ids[done:], *args, out[done:])
            done += more
            if done == len(ids):
                return out
            if self._used == MOST_IDS:
                self.left, insert = True, False
            else:
                self._grow()

    def _grow(self) -> None:
        """A fourth longer, without two copies of anything."""
        size, slots = min(len(self._order) * 5 // 4 + 1, MOST_IDS), len(self._table)
        more = 12 * (size - len(self._order))
        if size > slots * 3 // 4:
            more, slots = more + 4 * slots, 2 * slots
        self._check_room(more)
        self._order.resize(size, refcheck=False)
        self._counts.resize(size, refcheck=False)
        if slots != len(self._table):
            self._table = np.zeros(0, np.int32)  # the old one goes first
            self._table = np.zeros(slots, np.int32)
            _fill(self._order[: self._used], self._table)

    def _check_room(self, more: int) -> None:
        """Before the kernel ends the process for it."""
        if more < _SMALL_BYTES or more < (have := available_bytes()):
            return
        raise DataError(
            f"column '{self.name}' has more than {self.numbered:,} distinct ids, and numbering more of them needs "
            f"{more / 2**20:,.0f} MiB of memory where {have / 2**20:,.0f} MiB are available; leave --vocabulary out "
            "(raw ids are hashed when they are read), or convert where there is more memory"
        )

    def frozen(self, min_count: int, rows_before: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """ids (int64) and counts (int32) of rows rows_before + 1, …, and the row of every number of this pass, int32,
        or None where it is the number."""
        self._table = np.zeros(0, np.int32)
        order, counts = self._order[: self._used], self._counts[: self._used]
        if min_count <= 1:
            return order, counts, None
        kept = counts >= min_count
        return order[kept], counts[kept], np.where(kept, rows_before + np.cumsum(kept, dtype=np.int32), np.int32(0))


class VocabularyWriter:
    """Writes a vocabulary as Parquet, feature by feature: columns feature, row, id, count."""

    def __init__(self, path: str, features: list[str], min_count: int) -> None:
        self._digest = hashlib.blake2b(json.dumps(features).encode(), digest_size=8)
        self._about: dict[str, Any] = {"version": 1, "features": features, "min_count": min_count}
        self._writer = pa.parquet.ParquetWriter(path, _SCHEMA)
        self._feature: str | None = None

    def write(self, feature: str, before: int, ids: np.ndarray, counts: np.ndarray) -> None:
        """ids (int64) and counts of rows before + 1, …."""
        if feature != self._feature:  # once, however many calls bring its ids
            self._feature = feature
            self._digest.update(f"|{feature}|".encode())
        self._digest.update(np.ascontiguousarray(ids, "<i8").data)
        for lo in range(0, len(ids), _CHUNK):
            part = slice(lo, lo + _CHUNK)
            size = len(ids[part])
            names = pa.DictionaryArray.from_arrays(np.zeros(size, np.int32), pa.array([feature]))
            rows = np.arange(before + lo + 1, before + lo + 1 + size)
            columns = [names.cast(pa.string()), rows, ids[part], counts[part].astype(np.int64)]
            self._writer.write_table(pa.table(columns, schema=_SCHEMA))

    def close(self) -> str:
        """Ends the file; returns the vocabulary's short name, a digest of what is in it."""
        name = self._digest.hexdigest()
        self._writer.add_key_value_metadata({KEY: json.dumps({**self._about, "name": name}).encode()})
        self._writer.close()
        return name


class VocabularyReader:
    """A vocabulary that was written before. Raises DataError for a file that is none."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._file = pa.parquet.ParquetFile(path)
            about = json.loads(self._file.metadata.metadata[KEY])
            self.name, self.features = str(about["name"]), [str(f) for f in about["features"]]
        except FileNotFoundError as error:
            raise DataError(f"{path}: no such vocabulary; cdlrm convert --vocabulary writes one") from error
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: is no vocabulary, or a damaged one; name the file that cdlrm convert --vocabulary wrote"
            ) from error

    def ids(self, feature: str) -> Iterator[np.ndarray]:
        """int64: the ids of rows 1, 2, …, in pieces."""
        for group in range(self._file.num_row_groups):
            statistics = self._file.metadata.row_group(group).column(0).statistics
            if statistics is None or statistics.min <= feature <= statistics.max:
                table = self._file.read_row_group(group, columns=["feature", "id"])
                if len(table) and table["feature"][0].as_py() == feature:
                    yield table["id"].to_numpy()
