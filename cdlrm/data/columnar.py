"""Parquet and ORC files as sources: a block is a row group or a stripe."""

from __future__ import annotations

import difflib
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet

from cdlrm.data import arrow
from cdlrm.data.columns import Bags, Columns
from cdlrm.data.filesource import FileSource
from cdlrm.data.prepared import Prepared
from cdlrm.errors import ConfigError, DataError

__all__ = ["ColumnarSource", "OrcSource", "ParquetSource"]


class ColumnarSource(FileSource):
    """Columns `label`, `i1…` and `c1…` (other names: `label_column`, `dense_columns`, `sparse_columns`), each of
    numbers or of lists with at most one number; a categorical list may be longer. Empty lists and nulls are missing
    values. `padding`: a number that fills lists up and is dropped from them. What `cdlrm convert` wrote says itself
    how its columns are called, whether its ids are row numbers, and how many rows the tables need.

    Memory: one row group (stripe) as Arrow has it and once more as columns, so files with huge row groups need more.
    """

    column_settings: tuple[str, ...] = ("label_column", "dense_columns", "sparse_columns", "padding")
    open_files = 16  # so that footers are not read for every block

    def _open(self, columns: dict[str, Any]) -> None:
        self._readers: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()  # of the opened files, which the fetching thread uses as well
        self._blocks: list[tuple[str, int]] = []
        self._rows: list[int | None] = []
        self._total = 0
        names = self._schema(self.files[0]).names
        self.prepared = self._prepared(self.files[0])
        self._name_columns(names, columns)
        self.padding = _padding(columns.get("padding"))
        if not self.sparse and not self.dense:
            raise DataError(
                f"{self.files[0]}: there are no columns i1… or c1… among {_shown(names)}; "
                "name the columns with dense_columns and sparse_columns"
            )
        for file in self.files:
            self._check_columns(file)
            self._check_prepared(file)
            with self._reading(file):
                rows, counts = self._sizes(self._reader(file))
            self._blocks += [(file, i) for i in range(len(counts))]
            self._rows += counts
            self._total += rows
        if self._total == 0:
            raise DataError(f"{self.files[0]}: there are no rows in {len(self.files)} file(s); give data that has some")
        self.num_dense, self.features = len(self.dense), self.sparse

    def _name_columns(self, names: Sequence[str], columns: dict[str, Any]) -> None:
        """Columns as they were named, or as the file says, or by their letter and number."""
        told = self.prepared or Prepared()
        self.label = columns.get("label_column", told.label)
        dense, sparse = columns.get("dense_columns"), columns.get("sparse_columns")
        if dense is None:
            dense = told.dense if self.prepared else _numbered(self.files[0], names, "i")
        if sparse is None:
            sparse = told.sparse if self.prepared else _numbered(self.files[0], names, "c")
        self.dense, self.sparse = list(dense), list(sparse)

    def _prepared(self, file: str) -> Prepared | None:
        """What a file says of itself, where the format can."""
        return None

    def _check_prepared(self, file: str) -> None:
        here = self._prepared(file)
        mine, theirs = self.prepared or Prepared(), here or Prepared()
        if (mine.numbered, mine.vocabulary, mine.dense_ready) != (
            theirs.numbered,
            theirs.vocabulary,
            theirs.dense_ready,
        ):
            raise DataError(
                f"{file}: was prepared in another way than {self.files[0]} (other numbers for the ids, or other dense "
                "values); convert all files with one vocabulary (cdlrm convert --use-vocabulary)"
            )
        if mine.counts and theirs.counts:  # ids that are numbers already may go further in one file than in another
            most = {name: max(rows, theirs.counts.get(name, 0)) for name, rows in mine.counts.items()}
            self.prepared = replace(mine, counts=most)

    def _check_columns(self, file: str) -> None:
        schema = self._schema(file)
        for name in (self.label, *self.dense, *self.sparse):
            if schema.names.count(name) != 1:
                how = "no" if name not in schema.names else "more than one"
                close = difflib.get_close_matches(name, schema.names, n=3) if how == "no" else []
                meant = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
                remedy = "name columns that are there" if file == self.files[0] else "give files with equal columns"
                raise DataError(
                    f"{file}: there is {how} column '{name}' among {_shown(schema.names)}{meant or '; ' + remedy}"
                )
            arrow.check_type(file, name, schema.field(name).type, name in self.sparse)

    # The format.

    def _open_file(self, file: str) -> Any:
        raise NotImplementedError

    def _schema_of(self, reader: Any) -> pa.Schema:
        raise NotImplementedError

    def _sizes(self, reader: Any) -> tuple[int, list[int | None]]:
        """Rows of the file, and of each block where known."""
        raise NotImplementedError

    def _read(self, reader: Any, block: int, columns: list[str]) -> pa.Table | pa.RecordBatch:
        raise NotImplementedError

    def _reader(self, file: str) -> Any:
        """The opened file; a few stay open."""
        if file not in self._readers:
            while len(self._readers) >= self.open_files:
                self._readers.popitem(last=False)
            self._readers[file] = self._open_file(file)
        self._readers.move_to_end(file)
        return self._readers[file]

    def _schema(self, file: str) -> pa.Schema:
        with self._reading(file):
            return self._schema_of(self._reader(file))

    def dense_types(self) -> list[pa.DataType]:
        """Arrow types that hold the raw dense values."""
        kinds = [arrow.inner_type(self._schema(self.files[0]).field(name).type) for name in self.dense]
        return [arrow.number_type(kind) for kind in kinds]

    # The source.

    def restricted(self, row_range: tuple[int, int | None], **changes: Any) -> Self:
        other = super().restricted(row_range, **changes)
        other._readers, other._lock = OrderedDict(), Lock()  # another thread may read through it
        return other

    def num_blocks(self) -> int:
        return len(self._blocks)

    def _known_rows(self) -> int:
        return self._total

    def block_rows(self, block: int) -> int:
        rows = self._rows[block]
        if rows is None:
            rows = self._rows[block] = self._fetch(block, [self.label]).num_rows
        return rows

    def fetch_block(self, block: int) -> pa.Table | pa.RecordBatch:
        """The block as Arrow has it; in another thread, Arrow decodes the next block while this one is converted."""
        return self._fetch(block, [self.label, *self.dense, *self.sparse])

    def _fetch(self, block: int, columns: list[str]) -> pa.Table | pa.RecordBatch:
        file, index = self._blocks[block]
        with self._lock, self._reading(file):
            return self._read(self._reader(file), index, columns)

    def read_block(self, block: int, lo: int, hi: int | None, fetched: Any = None) -> tuple[Columns, int]:
        table = self.fetch_block(block) if fetched is None else fetched
        self._rows[block] = table.num_rows
        if lo or hi is not None:
            table = table.slice(lo, None if hi is None else hi - lo)
        bad = np.zeros(table.num_rows, np.uint8)
        dense, labels, firsts = self._convert_numbers(table, bad)
        ids, bags, firsts_of_ids = self._convert_ids(table, bad)
        if not self.skip_bad:
            self._refuse(block, lo, table, firsts + firsts_of_ids)
        columns = Columns(dense, labels, ids, bags)
        skipped = int(np.count_nonzero(bad))
        if skipped and self._more_examples > 0:
            self._name_bad(block, lo, table, np.flatnonzero(bad)[: self._more_examples])
        return (columns.take(np.flatnonzero(bad == 0)) if skipped else columns), skipped

    def _convert_numbers(self, table: pa.Table, bad: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Dense features, labels and the first bad row of every column."""
        rows = table.num_rows
        labels = np.empty(rows, np.float32)
        firsts = [arrow.label_values(arrow.buffers_of(table.column(self.label), ids=False), labels, bad)]
        missing = np.nan if self.raw else 0.0 if self.prepared and self.prepared.dense_ready else None
        dense = arrow.pooled((rows, self.num_dense), np.float64 if self.raw else np.float32)
        columns = [arrow.buffers_of(table.column(name), ids=False) for name in self.dense]
        return dense, labels, firsts + arrow.dense_values(columns, dense, bad, missing)

    def _convert_ids(self, table: pa.Table, bad: np.ndarray) -> tuple[np.ndarray, dict[int, Bags], list[int]]:
        """Rows of the tables and the first bad row of every column."""
        ids = arrow.pooled((len(self.sparse), table.num_rows), np.int64)
        columns = [arrow.buffers_of(table.column(name), ids=True, padding=self.padding) for name in self.sparse]
        return ids, *arrow.mapped_values(columns, self.id_maps, ids, bad)

    def _refuse(self, block: int, lo: int, table: pa.Table, firsts: Sequence[int]) -> None:
        """`DataError` for the first column with a bad row; firsts: label, dense and categorical columns."""
        sentence = self._what_is_wrong(block, lo, table, firsts)
        if sentence is not None:
            raise DataError(f"{sentence}, or pass bad_rows='skip'")

    def _what_is_wrong(self, block: int, lo: int, table: pa.Table, firsts: Sequence[int]) -> str | None:
        names = [self.label, *self.dense, *self.sparse]
        for at, (name, first) in enumerate(zip(names, firsts, strict=True)):
            if first >= 0:
                file, index = self._blocks[block]
                row = lo + first + sum(self.block_rows(block - i) for i in range(1, index + 1))
                role = "label" if at == 0 else "dense" if at <= self.num_dense else "ids"
                ids = self.id_maps[at - 1 - self.num_dense] if role == "ids" else None
                wrong, remedy = arrow.bad_value(table.column(name), first, role, ids)
                return f"{file}: row {row} (from 0): column '{name}' {wrong}; {remedy}"
        return None

    def _name_bad(self, block: int, lo: int, table: pa.Table, rows: np.ndarray) -> None:
        """What is wrong with some bad rows: each is converted once more by itself."""
        for row in rows.tolist():
            alone, bad = table.slice(row, 1), np.zeros(1, np.uint8)
            firsts = self._convert_numbers(alone, bad)[2] + self._convert_ids(alone, bad)[2]
            sentence = self._what_is_wrong(block, lo + row, alone, firsts)
            if sentence is not None:
                self._left_out(sentence)

    def settings(self) -> dict[str, Any]:
        mine: dict[str, Any] = {"columns": [self.label, *self.dense, *self.sparse]}
        return {**super().settings(), **mine, **({} if self.padding is None else {"padding": self.padding})}


class ParquetSource(ColumnarSource):
    format = "parquet"

    def _prepared(self, file: str) -> Prepared | None:
        with self._reading(file):
            metadata = self._reader(file).schema_arrow.metadata
        return Prepared.from_metadata(file, metadata)

    def _open_file(self, file: str) -> pa.parquet.ParquetFile:
        return pa.parquet.ParquetFile(file)

    def _schema_of(self, reader: pa.parquet.ParquetFile) -> pa.Schema:
        return reader.schema_arrow

    def _sizes(self, reader: pa.parquet.ParquetFile) -> tuple[int, list[int | None]]:
        meta = reader.metadata
        return meta.num_rows, [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]

    def _read(self, reader: pa.parquet.ParquetFile, block: int, columns: list[str]) -> pa.Table:
        return reader.read_row_group(block, columns=columns)


class OrcSource(ColumnarSource):
    format = "orc"

    def _open_file(self, file: str) -> pa.orc.ORCFile:
        return pa.orc.ORCFile(file)

    def _schema_of(self, reader: pa.orc.ORCFile) -> pa.Schema:
        return reader.schema

    def _sizes(self, reader: pa.orc.ORCFile) -> tuple[int, list[int | None]]:
        counts: list[int | None] = [reader.nrows] if reader.nstripes == 1 else [None] * reader.nstripes
        return reader.nrows, counts

    def _read(self, reader: pa.orc.ORCFile, block: int, columns: list[str]) -> pa.RecordBatch:
        return reader.read_stripe(block, columns=columns)


def _padding(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not -(2**63) <= value < 2**63):
        raise ConfigError(f"padding is {value!r} where a whole number is needed; give the id that fills lists up")
    return value


def _numbered(file: str, names: Sequence[str], letter: str) -> list[str]:
    """Columns i1, i2, … (or from i0 on) in numeric order; `DataError` when a number is left out."""
    found = {int(m[1]): name for name in names if (m := re.fullmatch(rf"{letter}([0-9]+)", name, re.IGNORECASE))}
    first = 0 if 0 in found else 1
    for number in range(first, first + len(found)):
        if number not in found:
            raise DataError(
                f"{file}: column '{letter}{number}' is missing among {_shown(names)}; "
                f"number the columns from {letter}1 on without a gap, or name them explicitly"
            )
    return [found[number] for number in sorted(found)]


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:6])}, … {names[-1]} ({len(names)} columns)"
