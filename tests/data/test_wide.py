"""Many columns at once: every kind of column beside every other, and memory that is used again."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from cdlrm.data import open_source, pool
from cdlrm.data.hashing import hash_rows
from cdlrm.errors import DataError

ROWS = 1300  # two tiles of the kernels and a bit
rng = np.random.default_rng(5)


def with_gaps(values: list[object]) -> list[object]:
    return [None if rng.random() < 0.2 else value for value in values]


def singles(values: list[object]) -> list[object]:
    """Lists of 0 or 1 element, some null, some holding a null."""
    return [[value] if rng.random() < 0.7 else None if rng.random() < 0.3 else [] for value in values]


def first_of(value: object) -> object:
    return (value[0] if value else None) if isinstance(value, list) else value


def numbers(kind: pa.DataType) -> list[object]:
    drawn = rng.integers(0 if kind == pa.uint32() else -5, 100_000, ROWS)
    return [float(x) / 4 for x in drawn] if pa.types.is_floating(kind) else [int(x) for x in drawn]


def table() -> pa.Table:
    dense = [pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.uint32()]
    columns = {"label": pa.array([int(x) for x in rng.integers(0, 2, ROWS)], pa.int8())}
    for d, kind in enumerate(dense):
        columns[f"i{2 * d + 1}"] = pa.array(with_gaps(numbers(kind)), kind)
        columns[f"i{2 * d + 2}"] = pa.array(with_gaps(singles(numbers(kind))), pa.list_(kind))
    ids = [int(x) for x in rng.integers(-(2**62), 2**62, ROWS)]
    columns["c1"] = pa.array(ids, pa.int64())
    columns["c2"] = pa.array(with_gaps(ids), pa.int64())
    columns["c3"] = pa.array(singles(ids), pa.list_(pa.int64()))
    columns["c4"] = pa.array(singles(with_gaps(ids)), pa.list_(pa.int64()))
    columns["c5"] = pa.array(singles(with_gaps(ids)), pa.large_list(pa.int64()))
    columns["c6"] = pa.array([[] for _ in ids], pa.list_(pa.int64()))
    columns["c7"] = pa.array([None] * ROWS, pa.int64())
    return pa.table(columns)


def test_every_kind_of_column_beside_every_other(tmp_path: Path) -> None:
    wanted = table()
    pa.parquet.write_table(wanted, tmp_path / "a.parquet", row_group_size=900)
    source = open_source(tmp_path / "a.parquet", batch_size=ROWS, table_rows="1024-1000-7-1024-1000-4096-11")
    (batch,) = source
    for d in range(10):
        raw = [first_of(value) for value in wanted[f"i{d + 1}"].to_pylist()]
        expected = np.array([math.log1p(max(x or 0, 0)) for x in raw], np.float32)
        assert np.array_equal(batch.dense[:, d].numpy(), expected), d
    for f, name in enumerate(source.features):
        raw = [first_of(value) for value in wanted[name].to_pylist()]
        rows = hash_rows(np.array([-1 if x is None else x for x in raw], np.int64), source.table_rows[f])
        assert np.array_equal(batch.sparse[name].values.numpy(), rows), name


def test_the_first_bad_row_of_a_later_tile_is_named(tmp_path: Path) -> None:
    ids = np.zeros(ROWS, np.int64)
    ids[[700, 1200]] = 9
    dense = np.ones((2, ROWS))
    dense[1, 1299] = np.inf
    columns = {"label": np.zeros(ROWS, np.int32), "i1": dense[0], "i2": dense[1], "c1": np.zeros(ROWS, np.int64)}
    pa.parquet.write_table(pa.table({**columns, "c2": ids}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 1299 .*column 'i2'"):
        list(open_source(tmp_path / "a.parquet", batch_size=64, ids="rows", table_rows=9))
    pa.parquet.write_table(pa.table({**columns, "i2": dense[0], "c2": ids}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 700 .*column 'c2' is 9, outside \[0, 9\)"):
        list(open_source(tmp_path / "a.parquet", batch_size=64, ids="rows", table_rows=9))
    source = open_source(tmp_path / "a.parquet", batch_size=64, ids="rows", table_rows=9, bad_rows="skip")
    assert sum(batch.size for batch in source) == ROWS - 2


def test_memory_of_a_block_is_used_again_and_never_while_a_view_lives() -> None:
    gc.collect()  # what other tests left
    pool._spare.clear()
    first = pool.pooled((3, 1000), np.int64)
    at = first.__array_interface__["data"][0]
    view = first[1, 10:20]
    del first
    gc.collect()
    assert not any(pool._spare.values())
    other = pool.pooled((3, 1000), np.int64)
    assert other.__array_interface__["data"][0] != at
    del view
    again = pool.pooled((3, 950), np.int64)
    assert again.__array_interface__["data"][0] == at
    assert again.shape == (3, 950) and again.dtype == np.int64
    assert pool.pooled((2, 2), np.float32).nbytes == 16  # nothing that large for so little
