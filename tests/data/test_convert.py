"""`convert`: the same batches as from the input, vocabularies, stopping and going on, memory, what is refused."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from written import WRITERS, raw_rows, suffix, write_parquet, write_tsv

import cdlrm.data.convert
import cdlrm.data.tsv
from cdlrm.cli import main
from cdlrm.data import Batch, open_source, open_train_test
from cdlrm.data.convert import convert
from cdlrm.data.layouts import open_layout
from cdlrm.data.vocabulary import Numbering
from cdlrm.errors import CdlrmError, ConfigError, DataError

ROWS = 700


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cdlrm.data.tsv, "PIECE_BYTES", 20000)
    monkeypatch.setattr(cdlrm.data.convert, "_PART_ROWS", 150)


def converted(data: Any, out: Path, *, settings: dict[str, Any] | None = None, **how: Any) -> Any:
    return convert(open_source(data, batch_size=1, raw=True, **(settings or {})), out, **how)


def batches(data: Any, size: int = 64, **settings: Any) -> list[Batch]:
    return list(open_source(data, batch_size=size, **settings))


def equal(one: list[Batch], two: list[Batch]) -> bool:
    """The same tensors; a feature with one id a sample may have offsets in one of them."""

    def tensors(batch: Batch) -> list[torch.Tensor]:
        each = [torch.arange(batch.size + 1) if j.offsets is None else j.offsets for j in batch.sparse.values()]
        return [batch.dense, batch.labels, *(j.values for j in batch.sparse.values()), *each]

    return len(one) == len(two) and all(
        torch.equal(x, y) for a, b in zip(one, two, strict=True) for x, y in zip(tensors(a), tensors(b), strict=True)
    )


@pytest.mark.parametrize("kind", WRITERS)
def test_same_batches(tmp_path: Path, kind: str) -> None:
    raw = raw_rows(ROWS)
    raw["i1"][:4] = [70000, 0, -1, None]
    raw["i2"][:2] = [123456789012, None] if kind == "tsv" else [1234567, None]
    WRITERS[kind](tmp_path / f"x{suffix(kind)}", raw)
    result = converted(tmp_path / f"x{suffix(kind)}", tmp_path / "y.parquet")
    assert (result.rows, result.bad_rows, result.multi_hot, result.counts) == (ROWS, 0, [], {})
    assert sorted(os.listdir(tmp_path)) == [f"x{suffix(kind)}", "y.parquet"]
    assert equal(batches(tmp_path / "y.parquet"), batches(tmp_path / f"x{suffix(kind)}"))
    table = pa.parquet.read_table(tmp_path / "y.parquet")
    assert not any(pa.types.is_nested(entry.type) for entry in table.schema)
    assert table["c3"].to_pylist() == raw["c3"] and table["i1"].to_pylist() == raw["i1"]


def test_numbers_of_another_type_in_a_later_file(tmp_path: Path) -> None:
    values = [[2, None], [2.5, 2**53], [0.1, 3]]
    for k, kind in enumerate((pa.int64(), pa.float64(), pa.float32())):
        table = pa.table({"label": [0, 1], "i1": pa.array(values[k], kind), "c1": [1, 2]})
        pa.parquet.write_table(table, tmp_path / f"{k}.parquet")
    converted([tmp_path / f"{k}.parquet" for k in range(3)], tmp_path / "y.parquet")
    wanted = [2, None, 2.5, 2.0**53, float(np.float32(0.1)), 3]
    assert pa.parquet.read_table(tmp_path / "y.parquet")["i1"].to_pylist() == wanted


def test_lists_only_where_there_are_several(tmp_path: Path) -> None:
    raw = raw_rows(ROWS, num_dense=1, num_sparse=2)
    raw["c1"] = [[i, i + 1, 0] if i > 500 else [i % 3] for i in range(ROWS)]
    write_parquet(tmp_path / "x.parquet", raw, lists=True)
    how = {"ids": "rows", "table_rows": 1000, "columns": {"sparse_columns": ["c1"]}}
    assert converted(tmp_path / "x.parquet", tmp_path / "y.parquet").multi_hot == ["c1"]
    assert equal(batches(tmp_path / "y.parquet", **how), batches(tmp_path / "x.parquet", **how))
    converted(tmp_path / "x.parquet", tmp_path / "z.parquet", vocabulary=True, settings={"columns": {"padding": 0}})
    (batch,) = batches(tmp_path / "z.parquet", ROWS)
    flat = batch.sparse["c1"]
    assert flat.offsets is not None and flat.offsets.tolist()[:3] == [0, 1, 2]
    first: dict[int, int] = {0: 0}
    ids = [v for value in raw["c1"] for v in ([x for x in value if x] or [0])]
    assert flat.values.tolist() == [first.setdefault(v, len(first)) for v in ids]


def numbered(values: list, min_count: int = 1) -> list[int]:
    """Row numbers in the order of first occurrence; 0: missing or rare."""
    counts, rows = Counter(values), {None: 0}
    for value in values:
        if counts[value] >= min_count:
            rows.setdefault(value, len(rows))
    return [rows.get(value, 0) for value in values]


@pytest.mark.parametrize("min_count", [1, 3])
@pytest.mark.parametrize("kind", ["tsv", "orc-lists"])
def test_vocabulary(tmp_path: Path, kind: str, min_count: int) -> None:
    raw, other = raw_rows(3 * ROWS), raw_rows(300, seed=1)
    for name in raw:
        if name[0] == "c":
            few = int(name[1:]) * 90
            raw[name] = [None if v is None else v % few for v in raw[name]]
            other[name] = [None if v is None else v % (2 * few) for v in other[name]]
    train, test = tmp_path / f"train{suffix(kind)}", tmp_path / f"test{suffix(kind)}"
    WRITERS[kind](train, raw)
    WRITERS[kind](test, other)
    result = converted(train, tmp_path / "train.parquet", vocabulary=True, min_count=min_count)
    converted(test, tmp_path / "test.parquet", use_vocabulary=str(tmp_path / "train.parquet"))
    one, two = open_train_test(tmp_path / "train.parquet", test_data=tmp_path / "test.parquet", batch_size=3 * ROWS)
    assert two is not None and one.table_rows == two.table_rows == list(result.counts.values())
    (batch,), (tested,) = one, two
    for name in one.features:
        rows = numbered(raw[name], min_count)
        assert batch.sparse[name].values.tolist() == rows
        assert result.counts[name] == 1 + max(rows)
        known = dict(zip(raw[name], rows, strict=True))
        assert tested.sparse[name].values.tolist() == [known.get(v, 0) for v in other[name]]
    with pytest.raises(ConfigError, match="'c1' is 10 where .*train.parquet has been numbered with"):
        open_source(tmp_path / "train.parquet", batch_size=10, table_rows=10)
    vocabulary = pa.parquet.read_table(tmp_path / "train.parquet.vocabulary").to_pylist()
    first = [v for v in vocabulary if v["feature"] == "c1"]
    counted = Counter(raw["c1"])
    assert [v["row"] for v in first] == list(range(1, result.counts["c1"]))
    assert all(v["count"] == counted[v["id"]] for v in first)
    converted(test, tmp_path / "alone.parquet", vocabulary=True)
    with pytest.raises(DataError, match="prepared in another way"):
        open_train_test(tmp_path / "train.parquet", test_data=tmp_path / "alone.parquet", batch_size=10)


def test_counts_of_archives_are_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, (ROWS, 26))
    np.savez_compressed(
        tmp_path / "x.npz",
        X_int=rng.integers(0, 9, (ROWS, 13)), X_cat=ids, y=rng.integers(0, 2, ROWS), counts=np.full(26, 60),
    )  # fmt: skip
    converted(tmp_path / "x.npz", tmp_path / "y.parquet")
    assert open_source(tmp_path / "y.parquet", batch_size=1).table_rows == [60] * 26
    assert equal(batches(tmp_path / "y.parquet"), batches(tmp_path / "x.npz"))
    rows = open_source(tmp_path / "y.parquet", batch_size=1)
    assert rows.ids == "rows" and rows.settings()["ids"] == "rows"


def test_bad_rows(tmp_path: Path) -> None:
    write_tsv(tmp_path / "x.tsv", raw_rows(ROWS))
    lines = (tmp_path / "x.tsv").read_text().split("\n")
    (tmp_path / "x.tsv").write_text("\n".join([*lines[:400], "oops", *lines[400:]]))
    with pytest.raises(DataError, match="line 401: 1 columns where 40"):
        converted(tmp_path / "x.tsv", tmp_path / "y.parquet")
    assert not (tmp_path / "y.parquet").exists() and (tmp_path / "y.parquet.parts").is_dir()
    with pytest.raises(ConfigError, match="parts of another conversion"):
        converted(tmp_path / "x.tsv", tmp_path / "y.parquet", settings={"bad_rows": "skip"})
    result = converted(tmp_path / "x.tsv", tmp_path / "z.parquet", settings={"bad_rows": "skip"})
    assert (result.rows, result.bad_rows) == (ROWS, 1)


def test_refused_at_once(tmp_path: Path) -> None:
    write_tsv(tmp_path / "x.tsv", raw_rows(10))
    write_tsv(tmp_path / "x40.tsv", raw_rows(10, num_sparse=3))
    data, out = tmp_path / "x.tsv", tmp_path / "y.parquet"
    cases: list[tuple[str, Path, dict[str, Any]]] = [
        ("has to end in .parquet", tmp_path / "y.orc", {}),
        ("folder does not exist", tmp_path / "no" / "y.parquet", {}),
        ("no such vocabulary", out, {"use_vocabulary": str(tmp_path / "none.parquet")}),
        ("is no vocabulary", out, {"use_vocabulary": str(data)}),
        ("not both", out, {"use_vocabulary": str(data), "vocabulary": True}),
        ("min_count is 2", out, {"min_count": 2}),
        ("min_count is 0", out, {"min_count": 0, "vocabulary": True}),
    ]
    for words, target, how in cases:
        with pytest.raises(CdlrmError, match=words) as info:
            converted(data, target, **how)
        assert "\n" not in str(info.value)
    converted(data, out, vocabulary=True)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match="exists already; pass --overwrite"):
        converted(data, out)
    with pytest.raises(ConfigError, match="is an input as well"):
        converted(out, out)
    with pytest.raises(DataError, match="of the columns c1, .* where the data has c1, c2, c3"):
        how = {"columns": {"num_dense": 13, "num_sparse": 3}}
        converted(tmp_path / "x40.tsv", tmp_path / "z.parquet", use_vocabulary=str(out), settings=how)
    assert out.read_bytes() == before
    converted(data, out, overwrite=True)
    assert out.read_bytes() != before


SCRIPT = """
import sys, time
import cdlrm.data.tsv, cdlrm.data.convert
from cdlrm.data import open_source
from cdlrm.data.convert import convert
cdlrm.data.tsv.PIECE_BYTES, cdlrm.data.convert._PART_ROWS = int(sys.argv[3]), int(sys.argv[4])
stop = sys.argv[5:]
def progress(stage, done, total):
    if stop and stage == stop[0] and done >= int(stop[1]):
        print("here", flush=True)
        time.sleep(60)
convert(open_source(sys.argv[1], batch_size=1, raw=True), sys.argv[2], vocabulary=True, progress=progress)
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(line.split()[1])
"""


def process(*arguments: object) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("stage", ["reading 8", "numbering 5", "writing 2"])
def test_killed_and_continued(tmp_path: Path, stage: str) -> None:
    raw = raw_rows(2 * ROWS)
    write_tsv(tmp_path / "x.tsv", raw)
    converted(tmp_path / "x.tsv", tmp_path / "whole.parquet", vocabulary=True)
    out = tmp_path / "y.parquet"
    running = process(tmp_path / "x.tsv", out, 20000, 150, *stage.split())
    assert running.stdout is not None and running.stdout.readline() == "here\n"
    with pytest.raises(ConfigError, match="another conversion is writing"):
        converted(tmp_path / "x.tsv", out, vocabulary=True)
    running.send_signal(signal.SIGKILL)
    running.wait()
    running.stdout.close()
    assert not out.exists()
    (tmp_path / "y.parquet.parts" / "part.tmp").write_bytes(b"half a file")
    result = converted(tmp_path / "x.tsv", out, vocabulary=True)
    assert result.resumed_blocks >= 6 and result.rows == 2 * ROWS
    for ending in ("", ".vocabulary"):
        assert Path(f"{out}{ending}").read_bytes() == Path(f"{tmp_path / 'whole.parquet'}{ending}").read_bytes()
    assert not (tmp_path / "y.parquet.parts").exists()


def test_memory_does_not_grow(tmp_path: Path) -> None:
    """Peak memory of a process that converts 8 MB of text, and of one that converts 40 MB of the same ids."""
    raw = raw_rows(4000)
    write_tsv(tmp_path / "x", raw)
    text = (tmp_path / "x").read_bytes()
    peaks = []
    for times in (6, 30):
        (tmp_path / "x.tsv").write_bytes(text * times)
        done = process(tmp_path / "x.tsv", tmp_path / f"{times}.parquet", 2**20, 4000)
        peaks.append(int(done.communicate(timeout=100)[0]) / 1024)
    assert peaks[1] - peaks[0] < 20, f"peaks in MiB: {peaks}"


# Layouts.


def test_alimama(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(20):
        lists = [np.where(np.arange(50) < rng.integers(0, 51), 0, rng.integers(1, 99, 50)) for _ in range(3)]
        single = [*rng.integers(1, 99, 14), 0.5, 1, i % 2]
        rows.append([*np.concatenate(lists), *np.ones(100, int), *single])
    (tmp_path / "x.csv").write_text("\n".join(",".join(str(v) for v in row) for row in rows) + "\n")
    source = open_layout("alimama", [str(tmp_path / "x.csv")], batch_size=1, raw=True)
    convert(source, tmp_path / "y.parquet")
    (batch,) = batches(tmp_path / "y.parquet", 20)
    assert batch.labels.tolist() == [0, 1] * 10 and batch.dense.tolist() == [[0.5]] * 20
    history = batch.sparse["cate_his"]
    assert history.offsets is not None
    for i, row in enumerate(rows):
        found = history.values[history.offsets[i] : history.offsets[i + 1]].tolist()
        assert found == ([v for v in row[50:100] if v] or [0])
        assert batch.sparse["userid"].values[i] == row[250] and batch.sparse["pid"].values[i] == 1
    (tmp_path / "x.csv").write_text("1,2,3\n")
    with pytest.raises(DataError, match="x.csv: the file cannot be read as alimama .*267 columns"):
        convert(open_layout("alimama", [str(tmp_path / "x.csv")], batch_size=1, raw=True), tmp_path / "z.parquet")


@pytest.mark.parametrize("split", ["train", "test", "all"])
def test_amazon(tmp_path: Path, split: str) -> None:
    rng = np.random.default_rng(1)
    sequences = {user: rng.integers(1, 60, rng.integers(1, 15)).tolist() for user in range(1, 40)}
    pairs = [f"{user} {item}" for user, items in sequences.items() for item in items]
    (tmp_path / "x.txt").write_text("\n".join(pairs) + "\n")
    columns = {"split": split, "history": 5, "negatives": 2, "seed": 3}

    def run(out: str) -> list[Batch]:
        source = open_layout("amazon", [str(tmp_path / "x.txt")], batch_size=1, raw=True, columns=columns)
        convert(source, tmp_path / out)
        return batches(tmp_path / out, 10**6)

    (batch,) = one = run("y.parquet")
    history, item, user = (batch.sparse[name] for name in ("history", "item", "user"))
    assert history.offsets is not None and equal(one, run("z.parquet"))
    at = 0
    for name, items in sequences.items():
        places = {"train": range(1, len(items) - 1), "test": range(max(1, len(items) - 1), len(items))}
        for t in places.get(split, range(1, len(items))):
            for k in range(3):
                found = history.values[history.offsets[at] : history.offsets[at + 1]].tolist()
                assert found == items[max(0, t - 5) : t] and user.values[at] == name
                assert batch.labels[at] == (k == 0)
                assert (item.values[at] == items[t]) if k == 0 else (int(item.values[at]) not in items)
                at += 1
    assert at == batch.size
    largest = max(v for items in sequences.values() for v in items)
    assert open_source(tmp_path / "y.parquet", batch_size=1).table_rows == [largest + 1, largest + 1, 40]


def test_amazon_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    for text, words, columns in (
        ("1 2\n1 x\n", "cannot be read as amazon", {}),
        ("1 2\n3 4\n", "no user has enough items", {}),
        ("1 2\n1 3\n2 3\n", "user 1 has all items", {}),
        ("1 -2\n1 3\n", "negative", {}),
        ("1 2\n1 3\n", "split is 'x'", {"split": "x"}),
        ("1 2\n1 3\n", "history is 0", {"history": 0}),
    ):
        path.write_text(text)
        with pytest.raises(CdlrmError, match=words):
            open_layout("amazon", [str(path)], batch_size=1, raw=True, columns=columns)


# The command.


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tsv(tmp_path / "day_0", raw_rows(ROWS))
    out = str(tmp_path / "y.parquet")
    assert main(["convert", str(tmp_path / "day_0"), out, "--vocabulary", "--no-progress"]) == 0
    shown = capsys.readouterr().out
    assert f"{ROWS} rows" in shown and "26 categorical" in shown and ".vocabulary" in shown
    again = str(tmp_path / "z.parquet")
    assert main(["convert", str(tmp_path / "day_0"), again, "--use-vocabulary", out]) == 0
    assert "writing" in capsys.readouterr().err
    assert main(["convert", out]) == 2 and "name both" in capsys.readouterr().err
    assert main(["convert", "--seed", "1", out, out]) == 2 and "--layout amazon" in capsys.readouterr().err
    assert main(["convert", out, out]) == 2 and "input as well" in capsys.readouterr().err
    assert main(["convert", "no.tsv", again]) == 1 and "no such file" in capsys.readouterr().err
    assert main(["convert", "a.parquet", "--sparse-columns", "user", "item", again]) == 2
    err = capsys.readouterr().err
    assert f"--sparse-columns took {again} as one of its names" in err and "before the flags" in err
    for words in (["user", "in.tsv", again], ["user", "in.tsv", "out"]):  # the files behind the flag that takes them
        assert main(["convert", "--sparse-columns", *words]) == 2
        err = capsys.readouterr().err
        assert f"--sparse-columns took {words[-1]} as one of its names" in err and err.count("\n") == 1
    assert main(["convert", "--dense-columns", "age", "--sparse-columns", "user", "in.tsv", "out"]) == 2
    assert "before the flags" in capsys.readouterr().err
    assert main(["convert", "--vocabulary"]) == 2 and "name both" in capsys.readouterr().err
    assert main(["convert", "--sparse-columns", "c1", "nope", "--", out, str(tmp_path / "w.parquet")]) == 1
    assert "no column 'nope' among" in capsys.readouterr().err
    assert main(["convert", out, str(tmp_path / "w.parquet"), "--sparse-columns", "c1", "cc2"]) == 1
    err = capsys.readouterr().err
    assert "no column 'cc2' among" in err and "; did you mean 'c2'" in err and err.count("\n") == 1
    assert main(["convert", "--help"]) == 0
    shown = capsys.readouterr().out
    for word in ("examples:", ".npz", "alimama", "--min-count", "X_dense.npy"):
        assert word in shown


def test_trains_with_the_sizes_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tsv(tmp_path / "day_0", raw_rows(ROWS))
    out = str(tmp_path / "y.parquet")
    converted(tmp_path / "day_0", Path(out), vocabulary=True)
    report = str(tmp_path / "r.json")
    flags = ["train", "--data", out, "--mini-batch-size", "64", "--no-progress"]
    assert main([*flags, "--table-rows", "100"]) == 2
    assert "has been numbered with" in capsys.readouterr().err
    assert main([*flags, "--json", report]) == 0
    sizes = open_source(out, batch_size=1).table_rows
    assert f"{sum(sizes):,} in 26 tables" in " ".join(capsys.readouterr().out.split())
    assert json.loads(Path(report).read_text())


def test_real_files(criteo_sample: str, tmp_path: Path) -> None:
    began = time.perf_counter()
    result = converted(criteo_sample, tmp_path / "criteo.parquet", vocabulary=True)
    assert result.rows == 80000 and sum(result.counts.values()) == 183569 + 26  # as published beside the sample
    root = Path(criteo_sample).parent
    for layout, name, rows in (("alimama", "alimama_dmr_500.csv", 500), ("amazon", "amazon_video_games_seq.txt", None)):
        if (root / name).exists():
            source = open_layout(layout, [str(root / name)], batch_size=1, raw=True)
            found = convert(source, tmp_path / f"{layout}.parquet")
            assert found.rows == (rows or 2 * (287107 - 31013))
    assert time.perf_counter() - began < 60


@pytest.mark.parametrize("stage", ["cdlrm.data.parts.write_parquet", "cdlrm.data.parts.os.replace", "os.fsync"])
def test_full_disk_is_one_sentence(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    write_tsv(tmp_path / "x.tsv", raw_rows(10))
    command = ["convert", str(tmp_path / "x.tsv"), str(tmp_path / "y.parquet"), "--vocabulary", "--no-progress"]
    with monkeypatch.context() as patched:
        patched.setattr(stage, full)
        assert main(command) == 1
    err = capsys.readouterr().err
    assert "y.parquet: cannot be written (No space left on device)" in err and err.count("\n") == 1
    assert not (tmp_path / "y.parquet").exists()
    assert main(command) == 0


def test_numbering_in_passes_gives_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few ids are known at once, so however little memory a column with many distinct ids takes."""
    write_tsv(tmp_path / "x.tsv", raw_rows(ROWS))
    write_tsv(tmp_path / "y.tsv", raw_rows(ROWS // 2, seed=1))
    written: dict[int, list[Any]] = {}
    for most in (2**22, 200, 7):
        monkeypatch.setattr("cdlrm.data.vocabulary.MOST_IDS", most)
        out = [tmp_path / f"{name}{most}.parquet" for name in ("all", "frequent", "known")]
        counts = [
            converted(tmp_path / "x.tsv", out[0], vocabulary=True).counts,
            converted(tmp_path / "x.tsv", out[1], vocabulary=True, min_count=2).counts,
            converted(tmp_path / "y.tsv", out[2], use_vocabulary=str(out[0])).counts,
        ]
        files = [*out, *(f"{path}.vocabulary" for path in out[:2])]
        names = [pa.parquet.read_schema(file).metadata for file in files]  # the vocabularies' names
        written[most] = [*counts, *(pa.parquet.read_table(file).to_pydict() for file in files), *names]
    assert max(written[7][0].values()) > 300
    assert written[200] == written[7] == written[2**22]


def test_numbering_takes_at_most_28_bytes_an_id_and_asks_for_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for count in (40_000, 79_000, 99_000, 125_000, 160_000):
        numbering = Numbering("c1")
        ids = rng.integers(0, 2**40, count)
        found = numbering.number(np.concatenate([ids, ids[::-1], [-1]]))
        assert np.array_equal(found[:count], found[count:-1][::-1]) and found[-1] == 0
        used = len(np.unique(ids))
        held = sum(array.nbytes for array in (numbering._order, numbering._counts, numbering._table))
        assert found.max() == used and held <= 28 * used
        assert np.array_equal(numbering.frozen(1)[0][found[:count] - 1], ids)
    monkeypatch.setattr("cdlrm.data.vocabulary._SMALL_BYTES", 0)
    monkeypatch.setattr("cdlrm.data.vocabulary.available_bytes", lambda: 1000)
    with pytest.raises(DataError, match="column 'c1' has more than .* distinct ids.* leave --vocabulary out") as info:
        Numbering("c1").number(np.arange(5000))
    assert "\n" not in str(info.value)


def test_the_largest_integers_stay_large(tmp_path: Path) -> None:
    table = pa.table({"label": [0, 1], "i1": [2**63 - 1, -(2**63)], "c1": [1, 2]})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    converted(tmp_path / "a.parquet", tmp_path / "out.parquet")
    for name in ("a", "out"):
        (batch,) = open_source(tmp_path / f"{name}.parquet", batch_size=2)
        assert batch.dense[:, 0].tolist() == [pytest.approx(math.log(2**63)), 0.0], name
