"""Traces: the table rows that every batch looks up, from any data source or from a recorded file.

A recorded trace is one of

* Parquet: one record a batch, column `rows` (a list of integers, of any width: the batch's lookups, duplicates
  included, as rows of all tables laid one after another: row = first row of the table + id), optional column `epoch`
  (integers).  File metadata `cdlrm.table_rows` (JSON list: rows of each table) and, optionally, `cdlrm.tables` (JSON
  list of names).
* NumPy `.npz` (`numpy.savez`): `rows` (integers [L], all batches one after another), `starts` (integers
  [batches + 1]: batch b has the lookups starts[b] .. starts[b + 1]), optional `table_rows` (integers [tables]).

Both are read piece by piece: a trace may be longer than the memory.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..arguments import writing
from ..config import TrainConfig, dashed
from ..datasets import open_datasets
from ..errors import ConfigError, DataError
from ..interrupt import interrupt_later
from ..lookups import FeatureSlot, flatten

WRITE_LOOKUPS = 1 << 20
READ_BATCHES = 16
MOST_ROWS = 2**31 - 2


class BatchRows(NamedTuple):
    """`rows int64 [L]` of all tables laid one after another; windows do not reach over the end of an epoch.

    `nbytes`: host memory that the batch takes in training while it is read ahead (0: not known, as in a file).
    """

    rows: np.ndarray
    epoch: int
    nbytes: int = 0


class Trace:
    """An iterable of `BatchRows`; `names` and `table_rows` of its tables, `batches` (None: not known)."""

    names: list[str]
    table_rows: list[int]
    batches: int | None

    def __iter__(self) -> Iterator[BatchRows]:
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        return sum(self.table_rows)

    def check_size(self) -> None:
        if self.num_rows > MOST_ROWS:
            raise ConfigError(
                f"the tables have {self.num_rows} rows in all where a simulation takes at most {MOST_ROWS}; use a "
                "smaller --table-rows."
            )


class SourceTrace(Trace):
    """What `cdlrm train` with these settings would look up, epoch after epoch."""

    def __init__(self, config: TrainConfig) -> None:
        self.chosen: list[str] = []
        data = open_datasets(config, self.chosen)
        self.source, self.epochs = data.train, config.nepochs
        self.names, self.table_rows = list(data.features), list(data.table_rows)
        counted = data.train_samples is not None or self.source.format != "tsv"  # counting a text means reading it
        self.batches = len(self.source) * self.epochs if counted else None
        self.check_size()

    def __iter__(self) -> Iterator[BatchRows]:
        first = np.concatenate([[0], np.cumsum(self.table_rows)])
        slots = [
            FeatureSlot(name, name, int(first[i]), rows, i, False)
            for i, (name, rows) in enumerate(zip(self.names, self.table_rows, strict=True))
        ]
        for epoch in range(self.epochs):
            self.source.set_epoch(epoch)
            for batch in self.source:
                lookups = flatten(slots, len(slots), batch.sparse, batch.size)
                yield BatchRows(lookups.rows, epoch, batch.nbytes + lookups.nbytes)


class FileTrace(Trace):
    """A recorded trace.  `table_rows` (as in `--table-rows`) where the file does not say.  Raises DataError."""

    def __init__(self, file: str, table_rows: str | None = None) -> None:
        self.file = Path(file)
        if not self.file.is_file():
            raise DataError(f"--trace {file}: there is no such file.")
        readers = {".parquet": self._open_parquet, ".npz": self._open_npz}
        if self.file.suffix not in readers:
            raise ConfigError(f"--trace {file}: expected a file that ends in .parquet or .npz.")
        try:
            rows, names = readers[self.file.suffix]()
            if not isinstance(rows, list) or not all(type(n) is int and n > 0 for n in rows):
                raise ValueError("the rows of its tables must be a list of integers above 0")
            if not isinstance(names, list) or len({name for name in names if isinstance(name, str)}) != len(names):
                raise ValueError("the names of its tables (cdlrm.tables) must be a list of different words")
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise DataError(f"--trace {file}: not a trace: {_line(error)}.") from error
        if table_rows is not None:
            rows = dashed("--table-rows", table_rows)
        if not rows or min(rows) < 1:
            raise ConfigError(f"--trace {file}: it does not say how many rows the tables have; give --table-rows.")
        self.table_rows = list(rows)
        self.names = names if len(names) == len(rows) else [f"t{i}" for i in range(len(rows))]
        if self.batches == 0:
            raise DataError(f"--trace {file}: it has no batches; record one with --record.")
        self.check_size()

    def __iter__(self) -> Iterator[BatchRows]:
        limit = self.num_rows
        pieces = self._parquet() if self.file.suffix == ".parquet" else self._npz()
        try:
            for number, (rows, epoch) in enumerate(pieces):
                if rows.size and (rows.min() < 0 or rows.max() >= limit):
                    at = int(np.flatnonzero((rows < 0) | (rows >= limit))[0])
                    raise DataError(
                        f"--trace {self.file}: lookup {at} of batch {number} is row {rows[at]}, outside [0, {limit}); "
                        "give the --table-rows that it was recorded with."
                    )
                # Not before: the largest uint64 would become other rows.
                yield BatchRows(rows.astype(np.int64, copy=False), epoch)
        except DataError:
            raise
        except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"--trace {self.file}: cannot be read: {_line(error)}.") from error

    def _open_parquet(self) -> tuple[Sequence[int], list[str]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.file) as found:
            schema = found.schema_arrow
            self.batches = found.metadata.num_rows
        if "rows" not in schema.names:
            raise ValueError("it has no column `rows`")
        kind = schema.field("rows").type
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        if not any(is_one(kind) for is_one in lists) or not pa.types.is_integer(kind.value_type):
            raise ValueError(f"the column `rows` is {kind} where a list of integers a batch is expected")
        if "epoch" in schema.names and not pa.types.is_integer(schema.field("epoch").type):
            raise ValueError("the column `epoch` does not hold integers")
        said = schema.metadata or {}
        return json.loads(said.get(b"cdlrm.table_rows", b"[]")) or [], json.loads(said.get(b"cdlrm.tables", b"[]"))

    def _parquet(self) -> Iterator[tuple[np.ndarray, int]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.file) as found:
            wanted = [name for name in ("rows", "epoch") if name in found.schema_arrow.names]
            for group in range(found.num_row_groups):
                for piece in found.iter_batches(batch_size=READ_BATCHES, row_groups=[group], columns=wanted):
                    lists = piece.column("rows")
                    lists = lists.cast(pa.large_list(lists.type.value_type))
                    if lists.null_count or lists.values.null_count:
                        raise DataError(f"--trace {self.file}: a batch or a row is null; every batch needs a list.")
                    values = lists.values.to_numpy(zero_copy_only=False)
                    starts = lists.offsets.to_numpy()
                    if "epoch" in wanted and piece.column("epoch").null_count:
                        raise DataError(f"--trace {self.file}: an epoch is null; every batch needs one, or none has.")
                    epochs = piece.column("epoch").to_numpy() if "epoch" in wanted else np.zeros(len(lists), np.int32)
                    if epochs.size and not -(2**31) <= int(epochs.min()) <= int(epochs.max()) < 2**31:
                        raise DataError(f"--trace {self.file}: an epoch does not fit int32; number them from 0 on.")
                    for b in range(len(lists)):
                        yield values[starts[b] : starts[b + 1]], int(epochs[b])

    def _open_npz(self) -> tuple[Sequence[int], list[str]]:
        with zipfile.ZipFile(self.file) as archive:
            self._starts = np.asarray(_whole_member(archive, "starts"))
            with archive.open("rows.npy") as stream:
                count, self._dtype = _npy_header(stream)
            rows = _whole_member(archive, "table_rows").tolist() if "table_rows.npy" in archive.namelist() else []
        starts = self._starts
        if starts.ndim != 1 or starts.dtype.kind not in "iu" or starts.size < 1 or self._dtype.kind not in "iu":
            raise ValueError("`rows` and `starts` must be integers, `starts` with one more element than batches")
        if starts[0] != 0 or starts[-1] != count or (np.diff(starts.astype(np.int64)) < 0).any():
            raise ValueError(f"`starts` must rise from 0 to the {count} elements of `rows`")
        self.batches = int(starts.size) - 1
        return rows, []

    def _npz(self) -> Iterator[tuple[np.ndarray, int]]:
        with zipfile.ZipFile(self.file) as archive, archive.open("rows.npy") as stream:
            _npy_header(stream)
            for count in np.diff(self._starts.astype(np.int64)):
                data = stream.read(int(count) * self._dtype.itemsize)
                if len(data) != count * self._dtype.itemsize:
                    raise EOFError("`rows` ends early")
                yield np.frombuffer(data, self._dtype), 0


def _line(error: Exception) -> str:
    """What an exception says, without the full stop that the sentence around it ends with."""
    return " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split()).rstrip(".")


def _npy_header(stream: Any) -> tuple[int, np.dtype]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    if len(shape) != 1:
        raise ValueError("`rows` must have one dimension")
    return int(shape[0]), dtype


def _whole_member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


class Recorder:
    """Writes a trace as Parquet, piece by piece; the file appears when `close` is called.

    Raises DataError where it cannot be written.
    """

    def __init__(self, file: str, trace: Trace) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._file, self._part = Path(file), Path(f"{file}.part")
        said = {"cdlrm.table_rows": json.dumps(trace.table_rows), "cdlrm.tables": json.dumps(trace.names)}
        fields = [("rows", pa.list_(pa.int64())), ("epoch", pa.int32())]
        self._schema = pa.schema(fields, metadata=said)
        # row numbers have no runs or common prefixes worth the time of an encoder
        with writing("--record", file):
            self._writer = pq.ParquetWriter(self._part, self._schema, use_dictionary=False, compression="none")
        self._waiting: list[BatchRows] = []
        self._lookups = 0
        self.batches = 0

    def add(self, batch: BatchRows) -> None:
        self._waiting.append(batch)
        self._lookups += batch.rows.size
        self.batches += 1
        if self._lookups >= WRITE_LOOKUPS:
            self._write()

    def _write(self) -> None:
        import pyarrow as pa

        if not self._waiting:
            return
        starts = np.concatenate([[0], np.cumsum([batch.rows.size for batch in self._waiting])]).astype(np.int32)
        rows = pa.ListArray.from_arrays(starts, np.concatenate([batch.rows for batch in self._waiting]))
        epochs = pa.array([batch.epoch for batch in self._waiting], pa.int32())
        with writing("--record", self._file):
            self._writer.write_table(pa.Table.from_arrays([rows, epochs], schema=self._schema))
        self._waiting, self._lookups = [], 0

    def close(self, keep: bool = True) -> None:
        """Finish the file, or (`keep=False`, after an error; or no batch came) remove what was written."""
        with interrupt_later():
            try:
                if keep:
                    self._write()
                with writing("--record", self._file):
                    self._writer.close()
                    if keep and self.batches:
                        self._part.replace(self._file)
            finally:
                self._part.unlink(missing_ok=True)
