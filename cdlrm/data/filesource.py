"""What sources that read files have in common: names, table sizes, bad rows, errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from cdlrm.data.arrow import IDENTITY, IdMap
from cdlrm.data.files import fingerprint
from cdlrm.data.prepared import Prepared
from cdlrm.data.source import Source
from cdlrm.errors import ConfigError, DataError

__all__ = ["DEFAULT_TABLE_ROWS", "FileSource", "parse_table_rows"]

log = logging.getLogger("cdlrm")

DEFAULT_TABLE_ROWS = 2**20
BAD_EXAMPLES = 5
"""So many bad rows are named; the others are counted."""
_MOST_ROWS = 2**40


class FileSource(Source):
    """files: paths of one format. table_rows: one number, or one a feature; None: what the files say, else 2**20. ids:
    "hash" (row = mix64(id) mod rows), "rows" (ids are row numbers, checked), or None: what the files say, else "hash".
    bad_rows: "raise" a `DataError` at the first bad row, or "skip" and count them. raw: for converting; ids as they
    are in the files, -1 where missing, and dense values without log(1 + x), float64, NaN where missing.

    columns: what the format wants to know of its columns, see there. notes: what was chosen because the files say it.
    """

    column_settings: tuple[str, ...] = ()
    """Names that the mapping `columns` may hold."""
    label: str
    dense: list[str]
    """Names of the columns of labels and of numbers."""
    prepared: Prepared | None = None
    """What the files say of themselves."""

    def __init__(
        self,
        files: Sequence[str],
        *,
        table_rows: int | str | Sequence[int] | None = None,
        ids: str | None = None,
        bad_rows: str = "raise",
        columns: dict[str, Any] | None = None,
        raw: bool = False,
        **stream: Any,
    ) -> None:
        super().__init__(**stream)
        for name, value, known in (("ids", ids, ("hash", "rows", None)), ("bad_rows", bad_rows, ("raise", "skip"))):
            if value not in known:
                raise ConfigError(f"{name} is {value!r} where {known[0]!r} or {known[1]!r} is needed; change it")
        self.files = list(files)
        self.skip_bad = bad_rows == "skip"
        self.raw = raw
        columns = columns or {}
        for name in columns:
            if name not in self.column_settings:
                raise ConfigError(
                    f"columns has {name!r}, which {self.format} files do not know; use "
                    f"{', '.join(self.column_settings)}"
                )
        self._open(columns)
        self.notes: list[str] = []
        self._choose(table_rows, ids)
        self._files_id = fingerprint(self.files)

    def _choose(self, table_rows: int | str | Sequence[int] | None, ids: str | None) -> None:
        """Table sizes, and how ids become rows."""
        prepared = self.prepared or Prepared()
        self.ids = ids or ("rows" if prepared.numbered else "hash")
        counts = [prepared.counts.get(name) for name in self.features] if self.ids == "rows" else []
        known = [rows for rows in counts if rows is not None]
        if ids is None and prepared.numbered:
            self.notes.append("ids: taken as row numbers, because the data says that they are (--ids).")
        if table_rows is not None:
            self.table_rows = parse_table_rows(table_rows, len(self.features))
        elif known and len(known) == len(self.features):
            self.table_rows = known
            self.notes.append(f"table rows: {sum(known):,} in {len(known)} tables, as the data says (--table-rows).")
        else:
            self.table_rows = [DEFAULT_TABLE_ROWS] * len(self.features)
        for name, rows, needed in zip(self.features, self.table_rows, counts or self.table_rows, strict=True):
            if needed is not None and rows < needed and not self.raw:
                raise ConfigError(
                    f"table_rows of column '{name}' is {rows} where {self.files[0]} has been numbered with {needed} "
                    f"rows; give at least {needed}, leave table_rows out, or hash the ids (ids='hash')"
                )
        hashed = self.ids == "hash"
        self.id_maps = [IDENTITY if self.raw else IdMap(rows, hashed) for rows in self.table_rows]

    def use_tables_of(self, train: FileSource) -> None:
        """Map ids as `train` does. Raises `DataError` for data that was prepared in another way, `ConfigError` for
        numbers that do not fit."""
        one, two = train.prepared or Prepared(), self.prepared or Prepared()
        if (one.vocabulary, one.dense_ready) != (two.vocabulary, two.dense_ready):
            raise DataError(
                f"{self.files[0]}: the test data was prepared in another way than the training data (other numbers for "
                "the ids, or other dense values); convert it with that one's vocabulary (cdlrm convert "
                "--use-vocabulary)"
            )
        if len(train.features) == len(self.features):
            self._choose(train.table_rows, train.ids)

    def _open(self, columns: dict[str, Any]) -> None:
        """Look into the files: set `features`, `num_dense` and what `num_blocks` needs."""
        raise NotImplementedError

    def dense_types(self) -> list[pa.DataType]:
        """Arrow types that hold the raw dense values."""
        return [pa.int64()] * self.num_dense

    def settings(self) -> dict[str, Any]:
        mine = {"files": self._files_id, "ids": "raw" if self.raw else self.ids, "skip_bad": self.skip_bad}
        return {**super().settings(), **mine}

    @property
    def _more_examples(self) -> int:
        """How many more bad rows are to be named."""
        return BAD_EXAMPLES - len(self.bad_examples)

    def _left_out(self, sentence: str) -> None:
        """A bad row was left out; sentence: where it is and what is wrong, a semicolon, the remedy."""
        what = sentence.rpartition("; ")[0]
        if what in self.bad_examples or self._more_examples <= 0:  # another epoch comes to the same rows
            return
        self.bad_examples.append(what)
        more = "" if self._more_examples else " (further ones are only counted)"
        log.warning("a bad row is left out: %s%s", what, more)

    @contextmanager
    def _reading(self, file: str) -> Iterator[None]:
        """Turn whatever the reader says about a broken file into one sentence."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            what = " ".join(str(error).split())
            title = {"parquet": "Parquet", "orc": "ORC", "tsv": "text"}.get(self.format, self.format)
            raise DataError(
                f"{file}: the file cannot be read as {title} and may be truncated or "
                f"damaged ({what[:200]}); write it again"
            ) from error


def parse_table_rows(text: int | str | Sequence[int], num_features: int) -> list[int]:
    """ "N" or "n1-n2-…" (or the numbers themselves) -> rows of every table; `ConfigError` if count or size is wrong."""
    if isinstance(text, str):
        parts = text.strip().split("-")
        if not all(part.strip().isdecimal() for part in parts):
            raise ConfigError(f"table_rows is {text!r} where N or n1-n2-… with whole numbers is needed; change it")
        numbers = [int(part) for part in parts]
    else:
        numbers = [text] if isinstance(text, int) else [int(n) for n in text]
    if len(numbers) == 1:
        numbers = numbers * num_features
    if len(numbers) != num_features:
        raise ConfigError(
            f"table_rows has {len(numbers)} numbers for {num_features} categorical columns; give one, or one a column"
        )
    for column, rows in enumerate(numbers):
        if not 1 <= rows <= _MOST_ROWS:
            raise ConfigError(f"table_rows of column {column} is {rows}, outside [1, {_MOST_ROWS}]; change it")
    return numbers
