"""What is read from the files: values, missing values, lists, names; the same from every format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from written import WRITERS, arrow_table, raw_rows, suffix, write_orc, write_parquet, write_tsv

from cdlrm.data import Batch, check_batch, open_source
from cdlrm.data.files import expand, natural_key
from cdlrm.data.hashing import MISSING_ID, hash_rows

ROWS = 300


def expected_dense(values: list) -> np.ndarray:
    return np.log1p(np.maximum([0.0 if v is None else float(v) for v in values], 0)).astype(np.float32)


def expected_ids(values: list, rows: int) -> list[int]:
    return hash_rows(np.array([MISSING_ID if v is None else v for v in values], np.int64), rows).tolist()


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("rows", [2**20, 1000])
def test_values(tmp_path: Path, kind: str, rows: int) -> None:
    raw = raw_rows(ROWS)
    raw["i1"][:4] = [70000, 0, -1, None]
    path = tmp_path / f"x{suffix(kind)}"
    WRITERS[kind](path, raw)
    source = open_source(path, batch_size=ROWS, table_rows=rows)
    (batch,) = source
    check_batch(batch, dict.fromkeys(source.features, rows))
    assert source.num_dense == 13 and source.features == [f"c{f + 1}" for f in range(26)] == list(batch.sparse)
    assert batch.labels.tolist() == raw["label"]
    for d in range(13):
        np.testing.assert_array_equal(batch.dense[:, d].numpy(), expected_dense(raw[f"i{d + 1}"]))
    for name in source.features:
        assert batch.sparse[name].offsets is None
        assert batch.sparse[name].values.tolist() == expected_ids(raw[name], rows)


@pytest.mark.parametrize("kind", WRITERS)
def test_ids_that_are_rows(tmp_path: Path, kind: str) -> None:
    raw = raw_rows(20, num_sparse=2, num_dense=1)
    raw["c1"], raw["c2"] = [None, *range(19)], list(range(20))
    path = tmp_path / f"x{suffix(kind)}"
    WRITERS[kind](path, raw)
    columns = {"num_dense": 1} if kind == "tsv" else {}
    (batch,) = open_source(path, batch_size=20, table_rows=[19, 20], ids="rows", columns=columns)
    assert batch.sparse["c1"].values.tolist() == [0, *range(19)]
    assert batch.sparse["c2"].values.tolist() == list(range(20))


@pytest.mark.parametrize("write", [write_parquet, write_orc])
def test_lists_of_several_ids(tmp_path: Path, write: object) -> None:
    raw = raw_rows(6, num_dense=1, num_sparse=2)
    raw["c1"] = [[5], [1, 2, 3], [], None, [7, None], [8]]
    path = tmp_path / ("x.parquet" if write is write_parquet else "x.orc")
    write(path, raw, lists=True)  # type: ignore[operator]
    first, second = open_source(path, batch_size=4, table_rows=100)
    jagged = first.sparse["c1"]
    assert jagged.offsets is not None and jagged.offsets.tolist() == [0, 1, 4, 5, 6]
    assert jagged.values.tolist() == expected_ids([5, 1, 2, 3, None, None], 100)
    assert second.sparse["c1"].values.tolist() == expected_ids([7, None, 8], 100)
    check_batch(second)
    shuffled = list(open_source(path, batch_size=6, table_rows=100, shuffle=True))[0].sparse["c1"]
    assert shuffled.offsets is not None and sorted(shuffled.values.tolist()) == sorted(
        expected_ids([5, 1, 2, 3, None, None, 7, None, 8], 100)
    )


def test_batch_over_blocks_with_and_without_lists(tmp_path: Path) -> None:
    raw = raw_rows(8, num_dense=1, num_sparse=1)
    raw["c1"] = [[1], [2], [3], [4], [5, 6], [7], [], [8]]
    write_parquet(tmp_path / "x.parquet", raw, lists=True, group=4)
    (batch,) = open_source(tmp_path / "x.parquet", batch_size=8, table_rows=50)
    jagged = batch.sparse["c1"]
    assert jagged.offsets is not None and jagged.offsets.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert jagged.values.tolist() == expected_ids([1, 2, 3, 4, 5, 6, 7, None, 8], 50)


def test_arrow_types_and_sliced_nulls(tmp_path: Path) -> None:
    ids = [3, None, 250, 7, None]
    table = pa.table(
        {
            "label": pa.array([True, False, True, False, True]),
            "i1": pa.array([1.5, None, -2.5, 0.25, 1e30], pa.float32()),
            "i2": pa.array([1, 2, None, 3, 65535], pa.uint16()),
            "c1": pa.array(ids, pa.uint8()),
            "c2": pa.array([2**63 + 5, None, 1, 2, 3], pa.uint64()),
            "c3": pa.array(ids, pa.int64()).dictionary_encode(),
            "c4": pa.array([None] * 5, pa.null()),
            "c5": pa.array([[1], [2], [3], [4], [5]], pa.list_(pa.int64(), 1)),
            "c6": pa.array([[1], None, [3], [], [5]], pa.large_list(pa.int32())),
        }
    )
    pa.parquet.write_table(table, tmp_path / "x.parquet")
    (batch,) = open_source(tmp_path / "x.parquet", batch_size=5, table_rows=1000)
    assert batch.labels.tolist() == [1, 0, 1, 0, 1]
    np.testing.assert_array_equal(batch.dense[:, 0].numpy(), expected_dense([1.5, None, -2.5, 0.25, np.float32(1e30)]))
    np.testing.assert_array_equal(batch.dense[:, 1].numpy(), expected_dense([1, 2, None, 3, 65535]))
    expected = {
        "c1": ids, "c2": [2**63 + 5 - 2**64, None, 1, 2, 3], "c3": ids, "c4": [None] * 5,
        "c5": [1, 2, 3, 4, 5], "c6": [1, None, 3, None, 5],
    }  # fmt: skip
    for name, values in expected.items():
        assert batch.sparse[name].values.tolist() == expected_ids(values, 1000), name
    # A part of the block: validity bits no longer start at a byte.
    (part,) = open_source(tmp_path / "x.parquet", batch_size=5, table_rows=1000, row_range=(1, 4))
    for name, values in expected.items():
        assert part.sparse[name].values.tolist() == expected_ids(values[1:4], 1000), name


def test_other_names_and_case(tmp_path: Path) -> None:
    table = arrow_table(raw_rows(4, num_dense=2, num_sparse=2))
    pa.parquet.write_table(table.rename_columns(["click", "I1", "I2", "C1", "user"]), tmp_path / "x.parquet")
    source = open_source(
        tmp_path / "x.parquet",
        batch_size=4,
        columns={"label_column": "click", "dense_columns": ["I2"], "sparse_columns": ["user", "C1"]},
    )
    assert source.features == ["user", "C1"] and source.num_dense == 1 and list(source)[0].size == 4


def test_text_details(tmp_path: Path) -> None:
    lines = ["1\t-1\t\tdeadbeef\t", "0\t99999999999\t7\tDEADBEEF\t00000001\r", "1\t\t\t\tff"]
    (tmp_path / "day_0").write_text("\n".join(lines) + "\n")
    source = open_source(tmp_path / "day_0", batch_size=8, columns={"num_dense": 2})
    (batch,) = source
    assert batch.labels.tolist() == [1, 0, 1] and source.features == ["c1", "c2"]
    np.testing.assert_array_equal(batch.dense[:, 0].numpy(), expected_dense([None, 99999999999, None]))
    assert batch.sparse["c1"].values.tolist() == expected_ids([0xDEADBEEF, 0xDEADBEEF, None], 2**20)
    assert batch.sparse["c2"].values.tolist() == expected_ids([None, 1, 255], 2**20)
    (tmp_path / "day_0").write_text("\n".join(lines[:2] + ["0\t1\t2\t0000000a\t0000000b"]))  # no newline at the end
    assert list(open_source(tmp_path / "day_0", batch_size=8, columns={"num_dense": 2}))[0].size == 3


@pytest.mark.parametrize("piece", [1, 7, 61, 4096])
def test_pieces_of_text_lose_and_repeat_nothing(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdlrm.data.tsv.PIECE_BYTES", piece)
    raw = raw_rows(9, num_dense=1, num_sparse=1)
    raw["c1"] = list(range(9))
    write_tsv(tmp_path / "x.tsv", raw)
    source = open_source(tmp_path / "x.tsv", batch_size=4, columns={"num_dense": 1}, ids="rows", table_rows=9)
    assert [v for b in source for v in b.sparse["c1"].values.tolist()] == list(range(9))
    assert source.count_rows() == 9 == source.rows_total


def test_which_files(tmp_path: Path) -> None:
    for name in ("p-10.orc", "p-9.orc", "p-1.orc", "_SUCCESS", ".p.orc.crc"):
        (tmp_path / name).write_text("x")
    ordered = [str(tmp_path / name) for name in ("p-1.orc", "p-9.orc", "p-10.orc")]
    assert expand(tmp_path) == expand(str(tmp_path)) == expand(str(tmp_path / "*.orc")) == ordered
    assert expand([ordered[2], str(tmp_path / "p-?.orc")]) == [ordered[2], *ordered[:2]]
    assert sorted(["b2", "b10", "a", "10"], key=natural_key) == ["10", "a", "b2", "b10"]


def test_real_sample(criteo_sample: str) -> None:
    source = open_source(criteo_sample, batch_size=2048, table_rows=2**20)
    assert len(source) == 40 and source.rows_total == 80000 and source.num_dense == 13
    batches: list[Batch] = list(source)
    for batch in batches:
        check_batch(batch, dict.fromkeys(source.features, 2**20))
        assert all(j.offsets is None for j in batch.sparse.values())
    assert sum(float(b.labels.sum()) for b in batches) / 80000 == pytest.approx(0.0321625)
    distinct = len(np.unique(np.concatenate([b.sparse["c1"].values.numpy() for b in batches])))
    assert 24000 < distinct <= 24778  # 24,777 ids and the missing value, a few of which share a row
