"""What sources that read files have in common: names, table sizes, bad rows, errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from cdlrm.data.arrow import IdMap
from cdlrm.data.files import fingerprint
from cdlrm.data.source import Source
from cdlrm.errors import ConfigError, DataError

__all__ = ["DEFAULT_TABLE_ROWS", "FileSource", "parse_table_rows"]

DEFAULT_TABLE_ROWS = 2**20
_MOST_ROWS = 2**40


class FileSource(Source):
    """files: paths of one format. table_rows: one number, or one a feature. ids: "hash" (row = mix64(id) mod rows) or
    "rows" (ids are row numbers, checked). bad_rows: "raise" a `DataError` at the first bad row, or "skip" and count
    them.

    columns: what the format wants to know of its columns, see there.
    """

    reads_ahead = True
    column_settings: tuple[str, ...] = ()
    """Names that the mapping `columns` may hold."""

    def __init__(
        self,
        files: Sequence[str],
        *,
        table_rows: int | str | Sequence[int] = DEFAULT_TABLE_ROWS,
        ids: str = "hash",
        bad_rows: str = "raise",
        columns: dict[str, Any] | None = None,
        **stream: Any,
    ) -> None:
        super().__init__(**stream)
        for name, value, known in (("ids", ids, ("hash", "rows")), ("bad_rows", bad_rows, ("raise", "skip"))):
            if value not in known:
                raise ConfigError(f"{name} is {value!r} where {known[0]!r} or {known[1]!r} is needed; change it")
        self.files = list(files)
        self.ids = ids
        self.skip_bad = bad_rows == "skip"
        columns = columns or {}
        for name in columns:
            if name not in self.column_settings:
                raise ConfigError(
                    f"columns has {name!r}, which {self.format} files do not know; use "
                    f"{', '.join(self.column_settings)}"
                )
        self._open(columns)
        self.table_rows = parse_table_rows(table_rows, len(self.features))
        self.id_maps = [IdMap(rows, ids == "hash") for rows in self.table_rows]
        self._files_id = fingerprint(self.files)

    def _open(self, columns: dict[str, Any]) -> None:
        """Look into the files: set `features`, `num_dense` and what `num_blocks` needs."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        mine = {"files": self._files_id, "ids": self.ids, "skip_bad": self.skip_bad}
        return {**super().settings(), **mine}

    @contextmanager
    def _reading(self, file: str) -> Iterator[None]:
        """Turn whatever the reader says about a broken file into one sentence."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            what = " ".join(str(error).split())
            title = {"parquet": "Parquet", "orc": "ORC", "tsv": "text"}[self.format]
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
