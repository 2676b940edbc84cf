"""`open_source`: the source for some files, by their suffix."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from cdlrm.data.arrays import BinarySource, NpySource, NpzSource
from cdlrm.data.columnar import OrcSource, ParquetSource
from cdlrm.data.files import expand, format_of
from cdlrm.data.filesource import FileSource
from cdlrm.data.tsv import TsvSource
from cdlrm.errors import ConfigError, DataError

__all__ = ["open_source", "open_train_test"]

_SOURCES: dict[str, type[FileSource]] = {
    "parquet": ParquetSource,
    "orc": OrcSource,
    "tsv": TsvSource,
    "npz": NpzSource,
    "bin": BinarySource,
    "npy": NpySource,
}
Data = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def open_source(data: Data, *, batch_size: int, **settings: Any) -> FileSource:
    """A source over the files of `data` (path, glob, directory, or a list of these; natural order), one format for all.

    Formats by suffix: .parquet .pq · .orc · .tsv .txt .csv and no suffix (TAB-separated text as Criteo publishes it),
    also with .gz or .zst behind · .npz (DLRM's) · .bin (MLPerf's) · .npy (TorchRec's triples). Settings: table_rows
    (int, "n1-n2-…" or list; None: what the data says, else 2**20), ids "hash"|"rows"|None (what the data says, else
    hash), bad_rows "raise"|"skip", shuffle, seed, row_range (first, last+1 over the rows of all files), limit_batches,
    progress, and columns, a mapping: label_column, dense_columns, sparse_columns, padding for all but text; num_dense,
    num_sparse for text. Raises DataError and ConfigError.
    """
    files = expand(data)
    return _SOURCES[format_of(files)](files, batch_size=batch_size, **settings)


def open_train_test(
    data: Data,
    *,
    batch_size: int,
    test_data: Data | None = None,
    test_fraction: float = 0.0,
    test_batch_size: int | None = None,
    shuffle: bool = False,
    **settings: Any,
) -> tuple[FileSource, FileSource | None]:
    """Training and test source: the test rows are `test_data`, or the last `test_fraction` of `data`. Tests are not
    shuffled."""
    if not 0 <= test_fraction < 1:
        raise ConfigError(f"test_fraction is {test_fraction}, outside [0, 1); give the share of rows to test on")
    test_batch_size = batch_size if test_batch_size is None else test_batch_size
    limit = settings.pop("limit_batches", None)
    train = open_source(data, batch_size=batch_size, shuffle=shuffle, limit_batches=limit, **settings)
    test: FileSource | None = None
    if test_data is not None:
        settings["table_rows"] = None
        test = open_source(test_data, batch_size=test_batch_size, **settings)
        test.use_tables_of(train)
        if (test.num_dense, len(test.features)) != (train.num_dense, len(train.features)):
            raise DataError(
                f"{test.files[0]}: the test data has {test.num_dense} dense and "
                f"{len(test.features)} categorical columns where "
                f"the training data has {train.num_dense} and {len(train.features)}; give files with equal columns"
            )
    elif test_fraction:
        rows = train.count_rows()
        cut = rows - math.ceil(rows * test_fraction)
        test = train.restricted((cut, rows), batch_size=test_batch_size, shuffle=False, limit_batches=None)
        train = train.restricted((0, cut))
    return train, test
