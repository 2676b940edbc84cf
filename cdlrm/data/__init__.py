"""Data: files or a generator -> `Batch` (see `cdlrm.data.source` for how)."""

from __future__ import annotations

from cdlrm.data.batch import Batch, Jagged, check_batch
from cdlrm.data.filesource import parse_table_rows
from cdlrm.data.opening import open_source, open_train_test
from cdlrm.data.source import Source
from cdlrm.data.synthetic import SyntheticSource

__all__ = [
    "Batch",
    "Jagged",
    "Source",
    "SyntheticSource",
    "check_batch",
    "open_source",
    "open_train_test",
    "parse_table_rows",
]
