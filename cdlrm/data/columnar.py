"""Parquet and ORC files as sources: a block is a row group or a stripe."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet

from cdlrm.data import arrow
from cdlrm.data.block import Block, Readers
from cdlrm.data.columns import Columns
from cdlrm.data.filesource import FileSource
from cdlrm.data.prepared import Prepared
from cdlrm.errors import ConfigError, DataError

__all__ = ["ColumnarSource", "OrcSource", "ParquetSource"]

_PART_COLUMNS = 9  # few enough to stay in the caches until they are converted, and for several threads to have work,
_PART_VALUES = 80_000  # but enough values to be worth a call of Arrow and ours around it, about 100 us


class ColumnarSource(FileSource):
    """Columns `label`, `i1…` and `c1…` (other names: `label_column`, `dense_columns`, `sparse_columns`), each of
    numbers or of lists with at most one number; a categorical list may be longer. Empty lists and nulls are missing
    values. `padding`: a number that fills lists up and is dropped from them. What `cdlrm convert` wrote says itself
    how its columns are called, whether its ids are row numbers, and how many rows the tables need.

    Memory: two row groups (stripes) as columns and a few columns as Arrow has them, so files with huge row groups need
    more. Up to `pyarrow.cpu_count()` threads read.
    """

    column_settings: tuple[str, ...] = ("label_column", "dense_columns", "sparse_columns", "padding")
    open_files = 16
    by_columns = False  # whether a few columns can be read without reading the others

    def _open(self, columns: dict[str, Any]) -> None:
        self._readers = Readers(self.open_files)
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
        self._dense_kinds: list[set[pa.DataType]] = [set() for _ in self.dense]
        for file in self.files:
            self._check_columns(file)
            self._check_prepared(file)
            with self._reading(file), self._readers.of(file, self._open_file) as reader:
                rows, counts = self._sizes(reader)
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
                first = file == self.files[0]
                remedy = f"{'name columns that are there, or ' if first else ''}give files that have it"
                raise DataError(
                    f"{file}: there is {how} column '{name}' among {_shown(schema.names)}{meant or '; ' + remedy}"
                )
            arrow.check_type(file, name, schema.field(name).type, name in self.sparse)
        for kinds, name in zip(self._dense_kinds, self.dense, strict=True):
            kinds.add(arrow.number_type(arrow.inner_type(schema.field(name).type)))

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

    def _schema(self, file: str) -> pa.Schema:
        with self._reading(file), self._readers.of(file, self._open_file) as reader:
            return self._schema_of(reader)

    def dense_types(self) -> list[pa.DataType]:
        """Arrow types that hold the raw dense values of all files."""
        return [next(iter(kinds)) if len(kinds) == 1 else pa.float64() for kinds in self._dense_kinds]

    # The source.

    def reading_threads(self) -> int:
        return pa.cpu_count() if self.by_columns else 1

    def parts(self, block: int) -> list[tuple[bool, int, int]]:
        """What is read together: labels and dense features, or not, and a range of the categorical features."""
        features = len(self.sparse)
        if not self.by_columns:
            return [(True, 0, features)]
        width = max(_PART_COLUMNS, _PART_VALUES // max(self._rows[block] or _PART_VALUES, 1))
        return [(True, 0, 0), *((False, first, min(first + width, features)) for first in range(0, features, width))]

    def num_blocks(self) -> int:
        return len(self._blocks)

    def _known_rows(self) -> int:
        return self._total

    def block_rows(self, block: int) -> int:
        rows = self._rows[block]
        if rows is None:
            rows = self._rows[block] = self.fetch(block, [self.label]).num_rows
        return rows

    def fetch(self, block: int, names: list[str]) -> pa.Table | pa.RecordBatch:
        """Columns of a block as Arrow has them."""
        file, index = self._blocks[block]
        with self._reading(file), self._readers.of(file, self._open_file) as reader:
            table = self._read(reader, index, names)
        for name in names:
            if name not in table.schema.names:
                raise DataError(f"{file}: column '{name}' has gone since the start; leave the files as they are")
        self._rows[block] = table.num_rows
        return table

    def start_block(self, threads: Executor, block: int, lo: int, hi: int | None) -> tuple[Block, list[Future[None]]]:
        reading = Block(self, block, lo, hi)
        return reading, [threads.submit(reading.convert, *part) for part in self.parts(block)]

    def _read_here(self, block: int, lo: int, hi: int | None) -> Block:
        reading = Block(self, block, lo, hi)
        for part in self.parts(block):
            reading.convert(*part)
        return reading

    def read_block(self, block: int, lo: int, hi: int | None, started: Any = None) -> tuple[Columns, int]:
        if started is None:
            reading = self._read_here(block, lo, hi)
        else:
            reading, parts = started
            for part in parts:
                part.result()
        columns, bad = reading.columns, reading.bad
        if not self.skip_bad:
            self._refuse(block, lo, reading.firsts)
        skipped = int(np.count_nonzero(bad))
        if skipped and self._more_examples > 0:
            self._name_bad(block, lo, np.flatnonzero(bad)[: self._more_examples])
        return (columns.take(np.flatnonzero(bad == 0)) if skipped else columns), skipped

    def _refuse(self, block: int, lo: int, firsts: Sequence[int]) -> None:
        """`DataError` for the first column with a bad row."""
        sentence = self._what_is_wrong(block, lo, firsts)
        if sentence is not None:
            raise DataError(f"{sentence}, or pass bad_rows='skip'")

    def _what_is_wrong(self, block: int, lo: int, firsts: Sequence[int]) -> str | None:
        for at, (name, first) in enumerate(zip((self.label, *self.dense, *self.sparse), firsts, strict=True)):
            if first >= 0:
                file, index = self._blocks[block]
                row = lo + first
                role = "label" if at == 0 else "dense" if at <= self.num_dense else "ids"
                ids = self.id_maps[at - 1 - self.num_dense] if role == "ids" else None
                wrong, remedy = arrow.bad_value(self.fetch(block, [name]).column(name), row, role, ids, self.padding)
                row += sum(self.block_rows(block - i) for i in range(1, index + 1))
                return f"{file}: row {row} (from 0): column '{name}' {wrong}; {remedy}"
        return None

    def _name_bad(self, block: int, lo: int, rows: np.ndarray) -> None:
        """What is wrong with some bad rows: each is read once more by itself."""
        for row in (lo + rows).tolist():
            sentence = self._what_is_wrong(block, row, self._read_here(block, row, row + 1).firsts)
            if sentence is not None:
                self._left_out(sentence)

    def settings(self) -> dict[str, Any]:
        mine: dict[str, Any] = {"columns": [self.label, *self.dense, *self.sparse]}
        return {**super().settings(), **mine, **({} if self.padding is None else {"padding": self.padding})}


class ParquetSource(ColumnarSource):
    format = "parquet"
    by_columns = True

    def _prepared(self, file: str) -> Prepared | None:
        with self._reading(file), self._readers.of(file, self._open_file) as reader:
            metadata = reader.schema_arrow.metadata
        return Prepared.from_metadata(file, metadata)

    def _open_file(self, file: str) -> pa.parquet.ParquetFile:
        return pa.parquet.ParquetFile(file, pre_buffer=False)  # which helps where a whole row group is read at once

    def _schema_of(self, reader: pa.parquet.ParquetFile) -> pa.Schema:
        return reader.schema_arrow

    def _sizes(self, reader: pa.parquet.ParquetFile) -> tuple[int, list[int | None]]:
        meta = reader.metadata
        return meta.num_rows, [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]

    def _read(self, reader: pa.parquet.ParquetFile, block: int, columns: list[str]) -> pa.Table:
        return reader.read_row_group(block, columns=columns, use_threads=False)


class OrcSource(ColumnarSource):
    format = "orc"
    by_columns = True

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
