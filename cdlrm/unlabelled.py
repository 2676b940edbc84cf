"""Files without labels as sources, for predicting: the missing column is put in as zeros, and told so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from .data.columnar import ColumnarSource, OrcSource, ParquetSource
from .data.files import expand, format_of
from .data.filesource import FileSource
from .data.opening import Data, open_source


def open_for_prediction(data: Data, *, batch_size: int, **settings: Any) -> tuple[FileSource, bool]:
    """`open_source`, for Parquet and ORC also without a label column; and whether there are labels.

    Text has its columns by position, so there the label stays (with any value of 0 or 1).
    """
    files = expand(data)
    kinds = {"parquet": _UnlabelledParquet, "orc": _UnlabelledOrc}
    kind = kinds.get(format_of(files))
    if kind is None:
        return open_source(files, batch_size=batch_size, **settings), True
    source = kind(files, batch_size=batch_size, **settings)
    return (source, False) if source.unlabelled else (open_source(files, batch_size=batch_size, **settings), True)


class _Unlabelled(ColumnarSource):
    _without: frozenset[str] = frozenset()  # files that have no labels

    @property
    def unlabelled(self) -> bool:
        return bool(self._without)

    def _schema(self, file: str) -> pa.Schema:
        schema = super()._schema(file)
        label = getattr(self, "label", None)
        if label is None or label in schema.names:
            return schema
        self._without |= {file}
        return schema.append(pa.field(label, pa.float32()))

    def fetch(self, block: int, columns: list[str]) -> pa.Table | pa.RecordBatch:
        file, _ = self._blocks[block]
        if file not in self._without:
            return super().fetch(block, columns)
        present: Sequence[str] = [name for name in columns if name != self.label]
        table = super().fetch(block, list(present or (self.dense + self.sparse)[:1]))
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        return table.append_column(self.label, pa.array(np.zeros(table.num_rows, np.float32)))


class _UnlabelledParquet(_Unlabelled, ParquetSource):
    pass


class _UnlabelledOrc(_Unlabelled, OrcSource):
    pass
