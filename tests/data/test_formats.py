"""Compressed text, DLRM's npz, MLPerf's binary, TorchRec's npy, and lists with padding."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from written import arrow_table, raw_rows, write_tsv

import cdlrm.data.arrays
import cdlrm.data.packed
import cdlrm.data.tsv
from cdlrm.data import Batch, open_source, open_train_test
from cdlrm.data.hashing import hash_rows
from cdlrm.data.prepared import Prepared
from cdlrm.errors import ConfigError, DataError

ROWS = 500


def equal(one: list[Batch], two: list[Batch]) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a.dense, b.dense)
        and torch.equal(a.labels, b.labels)
        and all(torch.equal(a.sparse[n].values, b.sparse[n].values) for n in a.sparse)
        for a, b in zip(one, two, strict=True)
    )


def refused(data: Any, *words: str, kind: type[Exception] = DataError, **settings: Any) -> None:
    with pytest.raises(kind) as info:
        list(open_source(data, batch_size=50, **settings))
    message = str(info.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cdlrm.data.tsv, "PIECE_BYTES", 20000)
    monkeypatch.setattr(cdlrm.data.tsv, "PACKED_PIECE_BYTES", 9000)
    monkeypatch.setattr(cdlrm.data.packed, "_READ_BYTES", 1000)
    monkeypatch.setattr(cdlrm.data.arrays, "BLOCK_ROWS", 128)


# Compressed text.


def pack(text: bytes, ending: str) -> bytes:
    """In two members (frames), as concatenated files are."""
    half = len(text) // 3
    if ending == ".gz":
        return gzip.compress(text[:half]) + gzip.compress(text[half:])
    codec = pa.Codec("zstd")
    return codec.compress(text[:half], asbytes=True) + codec.compress(text[half:], asbytes=True)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_packed_text_is_the_text(tmp_path: Path, ending: str) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "packed").mkdir()
    for day in range(2):
        write_tsv(tmp_path / "plain" / f"day_{day}", raw_rows(ROWS, seed=day))
        text = (tmp_path / "plain" / f"day_{day}").read_bytes()
        (tmp_path / "packed" / f"day_{day}{ending}").write_bytes(pack(text, ending))
    plain = list(open_source(tmp_path / "plain", batch_size=64))
    source = open_source(tmp_path / "packed", batch_size=64)
    assert source.num_blocks() > 6 and equal(list(source), plain)
    assert source.count_rows() == 2 * ROWS
    (tmp_path / "packed" / "day_0").write_bytes((tmp_path / "plain" / "day_0").read_bytes())
    mixed = open_source([tmp_path / "packed" / "day_0", tmp_path / "packed" / f"day_1{ending}"], batch_size=64)
    assert equal(list(mixed), plain)
    train, test = open_train_test(tmp_path / "packed" / f"day_0{ending}", batch_size=64, test_fraction=0.1)
    assert test is not None and sum(b.size for b in train) == 450 and sum(b.size for b in test) == 50


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_packed_text_continues(tmp_path: Path, ending: str, shuffle: bool) -> None:
    for day in range(3):
        write_tsv(tmp_path / "x", raw_rows(200, seed=day))
        (tmp_path / f"day_{day}{ending}").write_bytes(pack((tmp_path / "x").read_bytes(), ending))
    (tmp_path / "x").unlink()
    source = open_source(tmp_path, batch_size=50, shuffle=shuffle, seed=3)
    whole = list(source)
    running = iter(source)
    for _ in range(7):
        next(running)
    state = json.loads(json.dumps(source.state_dict()))
    other = open_source(tmp_path, batch_size=50, shuffle=shuffle, seed=3)
    other.load_state_dict(state)
    assert equal(list(other), whole[7:])
    if shuffle:
        assert not equal(whole, list(open_source(tmp_path, batch_size=50)))
        assert sorted(v for b in whole for v in b.sparse["c1"].values.tolist()) == sorted(
            v for b in open_source(tmp_path, batch_size=50) for v in b.sparse["c1"].values.tolist()
        )


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_packed_text_that_is_broken(tmp_path: Path, ending: str) -> None:
    write_tsv(tmp_path / "x", raw_rows(200))
    good = pack((tmp_path / "x").read_bytes(), ending)
    bad = tmp_path / f"bad.tsv{ending}"
    bad.write_bytes(good[:-100])
    refused(bad, "bad.tsv", "truncated or damaged")
    bad.write_bytes(good[:2000] + bytes(200) + good[2200:])
    refused(bad, "bad.tsv")  # without a checksum of its own, a zstd frame may give wrong lines
    bad.write_bytes((tmp_path / "x").read_bytes())
    refused(bad, "content is text", "ending")
    lines = (tmp_path / "x").read_bytes().split(b"\n")
    bad.write_bytes(pack(b"\n".join([*lines[:150], b"oops", *lines[150:]]), ending))
    refused(bad, "line 151:", "1 columns where 40")
    assert sum(b.size for b in open_source(bad, batch_size=64, bad_rows="skip")) == 200
    bad.write_bytes(
        pack(
            b"\n".join(lines[:100]) + np.random.default_rng(0).bytes(3 << 20).replace(b"\n", b"x") + b"\n".join(lines),
            ending,
        )
    )
    refused(bad, "a line has more than")
    (tmp_path / f"a.parquet{ending}").write_bytes(good)
    refused(tmp_path / f"a.parquet{ending}", f".parquet{ending}", "no known format")


# Arrays.


def filled(raw: dict[str, list], letter: str, missing: int = 0) -> np.ndarray:
    columns = [values for name, values in raw.items() if name[0] == letter]
    return np.array([[missing if v is None else v for v in column] for column in columns]).T


@pytest.fixture
def samples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels [N], integers [N, 13] and row numbers [N, 26] below 1000."""
    raw = raw_rows(ROWS)
    return np.array(raw["label"], np.int32), np.maximum(filled(raw, "i"), 0), filled(raw, "c") % 1000


def check(source: Any, labels: np.ndarray, integers: np.ndarray, ids: np.ndarray) -> None:
    (batch,) = source
    assert batch.labels.tolist() == labels.tolist()
    np.testing.assert_array_equal(batch.dense.numpy(), np.log1p(integers.astype(np.float64)).astype(np.float32))
    for f in range(26):
        assert batch.sparse[f"c{f + 1}"].values.tolist() == ids[:, f].tolist()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("turned", [False, True])
def test_npz(tmp_path: Path, samples: Any, save: Any, turned: bool) -> None:
    labels, integers, ids = samples
    counts = ids.max(axis=0) + 1
    # DLRM transposes doubles, so its archives hold them column after column.
    stored = np.array(ids.T, np.float64).T if turned else ids.astype(np.int32)
    save(tmp_path / "kaggle_processed.npz", X_int=integers.astype(np.int32), X_cat=stored, y=labels, counts=counts)
    source = open_source(tmp_path / "kaggle_processed.npz", batch_size=ROWS)
    assert source.ids == "rows" and source.table_rows == counts.tolist() and len(source.notes) == 2
    assert source.num_blocks() == 4 and source.rows_total == ROWS
    check(source, labels, integers, ids)
    train, test = open_train_test(tmp_path / "kaggle_processed.npz", batch_size=50, test_fraction=0.2, shuffle=True)
    assert sum(b.size for b in train) == 400 and test is not None and sum(b.size for b in test) == 100
    hashed = open_source(tmp_path / "kaggle_processed.npz", batch_size=ROWS, ids="hash", table_rows=100)
    (batch,) = hashed
    assert batch.sparse["c1"].values.tolist() == hash_rows(ids[:, 0].astype(np.int64), 100).tolist()


def test_npz_by_day(tmp_path: Path, samples: Any) -> None:
    labels, integers, ids = samples
    for day in range(2):
        part = slice(day * 250, day * 250 + 250)
        np.savez(tmp_path / f"k_day_{day}_processed.npz", X_int=integers[part], X_cat=ids[part], y=labels[part])
        np.savez(tmp_path / f"raw_{day}.npz", X_int=integers[part], X_cat_t=ids[part].T, y=labels[part])
    np.savez(tmp_path / "k_fea_count.npz", counts=ids.max(axis=0) + 5)
    np.savez(tmp_path / "k_day_count.npz", total_per_file=np.array([250, 250]))
    source = open_source(tmp_path / "k_*.npz", batch_size=ROWS)
    assert len(source.files) == 2 and source.table_rows == (ids.max(axis=0) + 5).tolist()
    check(source, labels, integers, ids)
    before = open_source(tmp_path / "raw_*.npz", batch_size=ROWS)
    assert before.ids == "hash"
    (batch,) = before
    assert batch.sparse["c3"].values.tolist() == hash_rows(ids[:, 2].astype(np.int64), 2**20).tolist()


def test_binary(tmp_path: Path, samples: Any) -> None:
    labels, integers, ids = samples
    np.concatenate([labels[:, None], integers, ids], axis=1).astype("<i4").tofile(tmp_path / "train.bin")
    source = open_source(tmp_path / "train.bin", batch_size=ROWS)
    assert source.ids == "rows" and source.table_rows == [2**20] * 26
    check(source, labels, integers, ids)
    np.savez(tmp_path / "day_fea_count.npz", counts=np.arange(26) + 1000)
    assert open_source(tmp_path / "train.bin", batch_size=1).table_rows == list(range(1000, 1026))
    refused(tmp_path / "train.bin", "'c26' is 1024 where", "1025", "ids='hash'", kind=ConfigError, table_rows=1024)
    (tmp_path / "cut.bin").write_bytes((tmp_path / "train.bin").read_bytes()[:-4])
    refused(tmp_path / "cut.bin", "no multiple of 160", "truncated")


def test_npy_triples(tmp_path: Path, samples: Any) -> None:
    labels, integers, ids = samples
    dense = np.log(integers + 3.0).astype(np.float32) - 2
    for day in range(2):
        part = slice(day * 250, day * 250 + 250)
        np.save(tmp_path / f"day_{day}_dense.npy", dense[part])
        np.save(tmp_path / f"day_{day}_sparse.npy", ids[part].astype(np.int32))
        np.save(tmp_path / f"day_{day}_labels.npy", labels[part][:, None])
    source = open_source(tmp_path, batch_size=ROWS, ids="rows", table_rows=1000)
    assert source.files == [str(tmp_path / f"day_{day}_dense.npy") for day in range(2)]
    (batch,) = source
    assert torch.equal(batch.dense, torch.from_numpy(dense))
    assert batch.sparse["c2"].values.tolist() == ids[:, 1].tolist() and batch.labels.tolist() == labels.tolist()
    assert open_source(tmp_path / "day_1_sparse.npy", batch_size=1).ids == "hash"
    (tmp_path / "day_1_labels.npy").unlink()
    refused(tmp_path, "day_1_labels.npy", "no such file", "beside")
    np.save(tmp_path / "other.npy", ids)
    refused(tmp_path / "other.npy", "triple")
    np.save(tmp_path / "day_0_labels.npy", labels[:5])
    refused(tmp_path / "day_0_dense.npy", "different lengths", "labels has 5")
    np.save(tmp_path / "day_0_labels.npy", np.array(["a"] * 250))
    refused(tmp_path / "day_0_dense.npy", "day_0_labels.npy", "numbers")
    (tmp_path / "day_0_labels.npy").write_bytes(b"no array at all")
    refused(tmp_path / "day_0_dense.npy", "day_0_labels.npy", "no NumPy array")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_bad_arrays(tmp_path: Path, samples: Any, save: Any) -> None:
    labels, integers, ids = samples
    good = {"X_int": integers, "X_cat": ids, "y": labels, "counts": ids.max(axis=0) + 1}
    path = tmp_path / "x.npz"

    def write(**changes: Any) -> None:
        save(path, **{k: v for k, v in {**good, **changes}.items() if v is not None})

    write(y=None)
    refused(path, "x.npz", "no array y", "X_cat")
    write(y=labels[:7])
    refused(path, "different lengths", "y has 7")
    write(counts=np.ones(3, np.int64))
    refused(path, "`counts` has 3 numbers", "26")
    write(y=np.where(np.arange(ROWS) == 200, 7, labels))
    refused(path, "row 200", "'label' is 7")
    assert sum(b.size for b in open_source(path, batch_size=64, bad_rows="skip")) == ROWS - 1
    write(X_cat=np.where(np.arange(ROWS)[:, None] == 300, 1000, ids), counts=np.full(26, 1000))
    refused(path, "row 300", "'c1' is 1000, outside [0, 1000)")
    write(X_cat=ids + 0.5)
    refused(path, "x.npz", "'c1' is", "whole number")
    write(X_cat=np.array([["a"] * 26] * ROWS))
    refused(path, "X_cat", "numbers")
    write()
    data = path.read_bytes()
    path.write_bytes(data[:-300])
    refused(path, "x.npz", "truncated or damaged")
    path.write_bytes(b"PK\x03\x04")
    refused(path, "x.npz", "truncated or damaged")
    path.write_text("text")
    refused(path, "content is text", "zip")


# Lists with padding, and what a file says of itself.


def test_padding_is_dropped(tmp_path: Path) -> None:
    raw = raw_rows(4, num_dense=1, num_sparse=3)
    lists = pa.table(
        {
            "label": raw["label"],
            "i1": raw["i1"],
            "c1": pa.array([[0, 5, 0, 6], [0, 0, 0, 0], [7, None, 0, 1], None], pa.list_(pa.int32())),
            "c2": pa.array([[0, 5, 6], [0, 0, 0], [0, 0, 9], [1, 2, 3]], pa.list_(pa.int64(), 3)),
            "c3": pa.array([[3], [0], [0], [1]], pa.list_(pa.int64())),
        }
    )
    pa.parquet.write_table(lists, tmp_path / "x.parquet")
    settings: dict[str, Any] = {"ids": "rows", "table_rows": 10}
    (batch,) = open_source(tmp_path / "x.parquet", batch_size=4, columns={"padding": 0}, **settings)
    found = {
        name: [j.values[a:b].tolist() for a, b in zip(j.offsets[:-1], j.offsets[1:], strict=True)]
        for name, j in batch.sparse.items()
        if j.offsets is not None
    }
    assert found == {"c1": [[5, 6], [0], [7, 0, 1], [0]], "c2": [[5, 6], [0], [9], [1, 2, 3]]}
    assert batch.sparse["c3"].values.tolist() == [3, 0, 0, 1]
    refused(tmp_path / "x.parquet", "padding is '0'", kind=ConfigError, columns={"padding": "0"})
    (batch,) = open_source(tmp_path / "x.parquet", batch_size=4, **settings)
    assert batch.sparse["c2"].values.tolist() == [0, 5, 6, 0, 0, 0, 0, 0, 9, 1, 2, 3]


def test_padding_is_not_the_bad_id(tmp_path: Path) -> None:
    columns = {"label": [1, 0], "c1": pa.array([[1, -1], [-1, 2, 500]], pa.list_(pa.int64())), "c2": [0, -1]}
    pa.parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    settings: dict[str, Any] = {"ids": "rows", "table_rows": 100}
    lists, single = ({"padding": -1, "sparse_columns": [name]} for name in ("c1", "c2"))
    refused(tmp_path / "x.parquet", "row 1", "column 'c1' is 500, outside [0, 100)", columns=lists, **settings)
    refused(tmp_path / "x.parquet", "row 1", "column 'c2' is -1, outside [0, 100)", columns=single, **settings)


def test_prepared_files_say_how_they_are_read(tmp_path: Path) -> None:
    raw = raw_rows(20, num_dense=1, num_sparse=2)
    raw["c1"], raw["c2"] = list(range(20)), [0] * 20
    table = arrow_table(raw).rename_columns(["click", "price", "user", "item"])
    said = Prepared("click", ["price"], ["user", "item"], True, {"user": 20, "item": 5}, True, "v1")
    pa.parquet.write_table(table.replace_schema_metadata(said.to_metadata()), tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet", batch_size=20)
    assert source.features == ["user", "item"] and source.ids == "rows" and source.table_rows == [20, 5]
    (batch,) = source
    assert batch.dense[:, 0].tolist() == [0.0 if v is None else v for v in raw["i1"]]
    refused(tmp_path / "a.parquet", "'user' is 19 where", "20", kind=ConfigError, table_rows=19)
    assert open_source(tmp_path / "a.parquet", batch_size=20, table_rows=100).table_rows == [100, 100]
    assert open_source(tmp_path / "a.parquet", batch_size=20, ids="hash").table_rows == [2**20, 2**20]
    other = Prepared("click", ["price"], ["user", "item"], True, {"user": 20, "item": 5}, True, "v2")
    pa.parquet.write_table(table.replace_schema_metadata(other.to_metadata()), tmp_path / "b.parquet")
    refused([tmp_path / "a.parquet", tmp_path / "b.parquet"], "b.parquet", "another way", "--use-vocabulary")
    with pytest.raises(DataError, match="test data was prepared in another way"):
        open_train_test(tmp_path / "a.parquet", test_data=tmp_path / "b.parquet", batch_size=5)
    pa.parquet.write_table(table.replace_schema_metadata({b"cdlrm": b"{"}), tmp_path / "c.parquet")
    refused(tmp_path / "c.parquet", "c.parquet", "convert again")
