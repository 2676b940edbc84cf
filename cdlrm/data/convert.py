"""Any source -> one Parquet file with flat columns, in memory that does not grow with the data.

Three stages, of which only the first reads the input: (1) blocks are parsed and written as parts into the folder
OUT.parts, where a run that was killed goes on; (2) the ids are numbered column by column, if a vocabulary is asked
for, into one file of int32 a column; (3) the parts are put together into a file in that folder, which then takes the
output's name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from cdlrm.data.columns import Columns
from cdlrm.data.filesource import FileSource
from cdlrm.data.hashing import MISSING_ID, MISSING_ROW
from cdlrm.data.parts import Part, Parts, replace_file
from cdlrm.data.prepared import Prepared
from cdlrm.data.vocabulary import Numbering, VocabularyReader, VocabularyWriter
from cdlrm.errors import ConfigError, DataError

__all__ = ["Converted", "Progress", "VOCABULARY_ENDING", "convert"]

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, of how many): blocks read, columns numbered, parts written."""
VOCABULARY_ENDING = ".vocabulary"
_PART_ROWS = 65536
_LARGEST = np.nextafter(2.0**63, 0)  # float64 that is an int64: 2**63 - 1 itself has become 2**63 on the way


@dataclass
class Converted:
    """What a conversion did."""

    rows: int
    bad_rows: int
    resumed_blocks: int
    multi_hot: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    vocabulary: str = ""


def convert(
    source: FileSource,
    out: str | os.PathLike[str],
    *,
    vocabulary: bool = False,
    min_count: int = 1,
    use_vocabulary: str | None = None,
    overwrite: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> Converted:
    """Write all samples of a source opened with `raw=True` to the Parquet file `out`.

    vocabulary: number the ids and leave the numbering in `out` + ".vocabulary"; min_count: rarer ids get row 0;
    use_vocabulary: such a file (or the output that lies beside it), to be used as it is. Without any of these the ids
    stay as they are. Raises ConfigError and DataError; what was finished by then is used by the next call.
    """
    target = Path(out)
    reader = _check(source, target, vocabulary, min_count, use_vocabulary, overwrite)
    numbers = _Numbers(reader, vocabulary, min_count)
    try:
        return _convert(source, target, numbers, progress)
    except OSError as error:  # of reading: the sources make DataErrors of theirs
        reason = error.strerror or " ".join(str(error).split())
        raise DataError(
            f"{target}: cannot be written ({reason}); make room or name another place, and repeat the command, which "
            "goes on behind the finished parts"
        ) from error


def _convert(source: FileSource, target: Path, numbers: _Numbers, progress: Progress) -> Converted:
    with Parts(target.with_name(target.name + ".parts"), source.settings()) as parts:
        resumed = _read(source, parts, progress)
        done = parts.finished()
        result = Converted(sum(part.rows for part in done), sum(part.bad for part in done), resumed)
        if result.rows == 0:
            parts.remove()
            raise DataError(f"{source.files[0]}: no row is left, all {result.bad_rows} are bad; give other files")
        _put_together(source, parts, done, result, numbers, progress)
        if numbers.new:
            replace_file(parts.folder / "vocabulary", vocabulary_file(target))
        replace_file(parts.folder / "result", target)
        parts.remove()
    return result


@dataclass
class _Numbers:
    """How ids are numbered: by a vocabulary that exists, by a new one, or not."""

    reader: VocabularyReader | None
    new: bool
    min_count: int

    @property
    def wanted(self) -> bool:
        return self.new or self.reader is not None


def vocabulary_file(target: Path) -> Path:
    return target.with_name(target.name + VOCABULARY_ENDING)


def _check(
    source: FileSource, target: Path, vocabulary: bool, min_count: int, use: str | None, overwrite: bool
) -> VocabularyReader | None:
    """Everything that can be refused before hours of work."""
    if target.suffix not in (".parquet", ".pq"):
        raise ConfigError(f"{target}: the output is Parquet, so its name has to end in .parquet; rename it")
    if not target.resolve().parent.is_dir():
        raise ConfigError(f"{target}: its folder does not exist; create it first")
    if any(os.path.realpath(name) == os.path.realpath(target) for name in source.files):
        raise ConfigError(f"{target}: is an input as well; write to another file")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target}: exists already; pass --overwrite to replace it, or name another file")
    if vocabulary and use is not None:
        raise ConfigError("vocabulary and use_vocabulary are both given; make a new one or use one, not both")
    if min_count < 1 or (min_count > 1 and not vocabulary):
        raise ConfigError(f"min_count is {min_count} where 1 or, with vocabulary, more is possible; change it")
    if use is None:
        return None
    path = Path(use)
    reader = VocabularyReader(str(vocabulary_file(path) if path.suffix in (".parquet", ".pq") else path))
    if reader.features != source.features:
        raise DataError(
            f"{reader.path}: is of the columns {', '.join(reader.features)} where the data has "
            f"{', '.join(source.features)}; use the vocabulary of files with equal columns"
        )
    return reader


# Stage 1.


def _read(source: FileSource, parts: Parts, progress: Progress) -> int:
    """Write the parts that are missing; returns the blocks that an earlier run had done."""
    total = source.num_blocks()
    done = parts.finished()
    first = start = done[-1].last if done else 0
    waiting: list[pa.Table] = []
    bad = 0
    if first == total:
        return first
    for block, (columns, skipped) in enumerate(source.blocks(first), first):
        waiting.append(_table(source, columns))
        bad += skipped
        if sum(table.num_rows for table in waiting) >= _PART_ROWS or block + 1 == total:
            parts.add(_joined(waiting), first, block + 1, bad)
            waiting, bad, first = [], 0, block + 1
        progress("reading", block + 1, total)
    return start


def _table(source: FileSource, columns: Columns) -> pa.Table:
    arrays: list[pa.Array] = [pa.array(columns.labels.astype(np.int8))]
    for d, kind in enumerate(source.dense_types()):
        values = columns.dense[:, d]
        gone = np.isnan(values)
        if pa.types.is_integer(kind):
            values = np.where(gone, 0, np.minimum(values, _LARGEST))
        arrays.append(pa.array(values.astype(kind.to_pandas_dtype()), kind, mask=gone))
    for f in range(len(source.features)):
        bags = columns.bags.get(f)
        flat = columns.ids[f] if bags is None else bags.values
        ids = pa.array(flat, mask=flat == MISSING_ID)
        arrays.append(ids if bags is None else _lists(bags.offsets, ids))
    return pa.table(arrays, [source.label, *source.dense, *source.features])


def _lists(offsets: np.ndarray, values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def _joined(tables: list[pa.Table]) -> pa.Table:
    """One table; a column that is of lists in any of them is of lists."""
    listed = _list_columns(table.schema for table in tables)
    return pa.concat_tables([_with_lists(table, listed) for table in tables]).combine_chunks()


def _list_columns(schemas: Iterator[pa.Schema]) -> set[str]:
    return {entry.name for schema in schemas for entry in schema if pa.types.is_list(entry.type)}


def _with_lists(table: pa.Table, listed: set[str]) -> pa.Table:
    for at, entry in enumerate(table.schema):
        if entry.name in listed and not pa.types.is_list(entry.type):
            flat = table.column(at).combine_chunks()
            table = table.set_column(at, entry.name, _lists(np.arange(len(flat) + 1), flat))
    return table


# Stages 2 and 3.


def _put_together(
    source: FileSource, parts: Parts, done: list[Part], result: Converted, numbers: _Numbers, progress: Progress
) -> None:
    """Write parts.folder/"result", and "vocabulary" if a new one is wanted; fills in `result`."""
    listed = _list_columns(pa.parquet.read_schema(part.path) for part in done)
    result.multi_hot = [name for name in source.features if name in listed]
    told = source.prepared or Prepared()
    if numbers.wanted:
        result.vocabulary = _number(source, parts, done, result, numbers, progress)
    elif source.ids == "rows":
        result.vocabulary = told.vocabulary
        result.counts = {name: _rows_of(source, done, name) for name in source.features}
    numbered = numbers.wanted or source.ids == "rows"
    about = Prepared(
        source.label,
        list(source.dense),
        list(source.features),
        numbered,
        result.counts,
        told.dense_ready,
        result.vocabulary,
    )
    # Where the numbers are in files, the ids themselves are needed no more, except for the lengths of lists.
    columns = [source.label, *source.dense, *(result.multi_hot if numbers.wanted else source.features)]
    writer: pa.parquet.ParquetWriter | None = None
    files = [open(_number_file(parts, f), "rb") for f in range(len(source.features))] if numbers.wanted else []
    try:
        for at, part in enumerate(done):
            table = _with_lists(pa.parquet.read_table(part.path, columns=columns), listed)
            if files:
                table = _with_numbers(source, table, [file.read for file in files])
            elif numbered:
                table = _with_row_numbers(source, table)
            table = table.replace_schema_metadata(about.to_metadata())
            if writer is None:
                writer = pa.parquet.ParquetWriter(parts.folder / "result", table.schema)
            if table.num_rows:
                writer.write_table(table, row_group_size=table.num_rows)
            progress("writing", at + 1, len(done))
    finally:
        if writer is not None:
            writer.close()
        for file in files:
            file.close()


def _with_numbers(source: FileSource, table: pa.Table, read: list[Callable[[int], bytes]]) -> pa.Table:
    """The categorical columns from the files of numbers; `table` has those with lists, for their lengths."""
    arrays = [table.column(name) for name in (source.label, *source.dense)]
    for name, more in zip(source.features, read, strict=True):
        if name in table.column_names:
            lists = table.column(name).combine_chunks()
            rows = pa.array(np.frombuffer(more(4 * len(lists.values)), np.int32))
            arrays.append(pa.ListArray.from_arrays(lists.offsets, rows))
        else:
            arrays.append(pa.array(np.frombuffer(more(4 * table.num_rows), np.int32)))
    return pa.table(arrays, [source.label, *source.dense, *source.features])


def _with_row_numbers(source: FileSource, table: pa.Table) -> pa.Table:
    """Ids are row numbers already: what is missing becomes its row."""
    for name in source.features:
        column = table.column(name).combine_chunks()
        if pa.types.is_list(column.type):
            rows = pa.ListArray.from_arrays(column.offsets, column.values.fill_null(MISSING_ROW))
        else:
            rows = column.fill_null(MISSING_ROW)
        table = table.set_column(table.schema.get_field_index(name), name, rows)
    return table


def _number_file(parts: Parts, feature: int) -> Path:
    return parts.folder / f"numbers-{feature}"


def _ids(done: list[Part], name: str) -> Iterator[np.ndarray]:
    """int64: all ids of a column part by part, -1 where missing."""
    for part in done:
        column = pa.parquet.read_table(part.path, columns=[name]).column(0).combine_chunks()
        flat = column.values if pa.types.is_list(column.type) else column
        yield flat.fill_null(MISSING_ID).to_numpy(zero_copy_only=False)


def _rows_of(source: FileSource, done: list[Part], name: str) -> int:
    """Rows that a table needs for ids that are numbers already."""
    told = source.prepared.counts.get(name) if source.prepared else None
    return told or 1 + max(0, *(int(ids.max(initial=0)) for ids in _ids(done, name)), 0)


def _number(
    source: FileSource, parts: Parts, done: list[Part], result: Converted, numbers: _Numbers, progress: Progress
) -> str:
    """Number the ids column by column into files of int32; returns the vocabulary's name."""
    writer = None
    if numbers.new:
        writer = VocabularyWriter(str(parts.folder / "vocabulary"), source.features, numbers.min_count)
    for f, name in enumerate(source.features):
        path = _number_file(parts, f)
        path.write_bytes(b"")
        if writer is not None:
            result.counts[name] = 1 + _number_new(path, done, name, writer, numbers.min_count)
        elif numbers.reader is not None:
            result.counts[name] = 1 + _number_known(path, done, name, numbers.reader)
        progress("numbering", f + 1, len(source.features))
    return writer.close() if writer is not None else numbers.reader.name if numbers.reader else ""


def _number_new(path: Path, done: list[Part], name: str, writer: VocabularyWriter, min_count: int) -> int:
    """Number a column's ids into the file `path`, and write them as a vocabulary; returns how many have rows."""
    kept_before, maps = 0, [np.zeros(1, np.int32)]
    numbering = Numbering(name)
    while True:
        _pass(path, done, name, numbering, insert=True)
        kept, counts, rows = numbering.frozen(min_count, kept_before)
        writer.write(name, kept_before, kept, counts)
        kept_before += len(kept)
        if rows is not None:
            maps.append(rows)
        if not numbering.left:
            break
        numbering = Numbering(name, numbering.numbered)
    if len(maps) > 1:
        _renumber(path, np.concatenate(maps))
    return kept_before


def _number_known(path: Path, done: list[Part], name: str, reader: VocabularyReader) -> int:
    """The same by a vocabulary that is there; returns how many ids it has."""
    numbering = Numbering(name)
    for known in reader.ids(name):
        while (found := numbering.number(known)).size and numbering.left:
            _pass(path, done, name, numbering, insert=False)
            known, numbering = known[found == 0], Numbering(name, numbering.numbered)
    _pass(path, done, name, numbering, insert=False)
    return numbering.numbered


def _pass(path: Path, done: list[Part], name: str, numbering: Numbering, insert: bool) -> None:
    """Number what earlier passes have not."""
    with open(path, "r+b") as file:
        for ids in _ids(done, name):
            data = file.read(4 * len(ids))  # nothing in the first pass
            file.seek(-len(data), os.SEEK_CUR)
            numbers = np.frombuffer(data, np.int32).copy() if data else np.zeros(len(ids), np.int32)
            file.write(numbering.number(ids, insert, numbers).tobytes())


def _renumber(path: Path, rows: np.ndarray) -> None:
    """Replace every number in the file by its final row."""
    with open(path, "r+b") as file:
        while data := file.read(2**22):
            file.seek(-len(data), os.SEEK_CUR)
            file.write(rows[np.frombuffer(data, np.int32)].tobytes())
