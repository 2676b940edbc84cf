"""A block is read a few columns at a time by several threads: the same columns whatever is read together."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import pytest

from cdlrm.data import columnar, open_source
from cdlrm.data.block import Readers
from cdlrm.data.hashing import hash_rows
from cdlrm.errors import DataError

ROWS, IDS = 700, 23


def table() -> tuple[pa.Table, dict[str, list[list[int | None]]]]:
    """Columns of one id and of lists (some empty, null, or holding a null), and the ids of every row."""
    rng = np.random.default_rng(8)
    columns: dict[str, pa.Array] = {"i1": pa.array(rng.random(ROWS)), "label": pa.array(rng.integers(0, 2, ROWS))}
    wanted: dict[str, list[list[int | None]]] = {}
    for f in range(IDS):
        kind = f % 3
        rows: list[list[int | None] | None] = [
            [int(x) for x in rng.integers(0, 2**40, rng.integers(0, 5) if kind == 2 else 1)] for _ in range(ROWS)
        ]
        if kind:
            rows = [None if rng.random() < 0.1 else row for row in rows]
        if kind == 2:
            rows = [[None, *row] if row and rng.random() < 0.1 else row for row in rows]
        values = rows if kind == 2 else [row[0] if row else None for row in rows]
        columns[f"c{f + 1}"] = pa.array(values, pa.list_(pa.int64()) if kind == 2 else pa.int64())
        wanted[f"c{f + 1}"] = [row or [None] for row in rows]
    return pa.table(columns), wanted


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    whole, _ = table()
    pa.parquet.write_table(whole, tmp_path / "a.parquet", row_group_size=300)
    pa.orc.write_table(whole, tmp_path / "a.orc", stripe_size=4096, batch_size=64)
    return {"parquet": tmp_path / "a.parquet", "orc": tmp_path / "a.orc"}


@pytest.mark.parametrize("kind", ["parquet", "orc"])
@pytest.mark.parametrize(("together", "threads"), [(1, 1), (1, 4), (5, 2), (100, 2)])
def test_whatever_is_read_together(
    files: dict[str, Path], kind: str, together: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columnar, "_PART_COLUMNS", together)
    monkeypatch.setattr(columnar, "_PART_VALUES", 0)
    monkeypatch.setattr(columnar.ColumnarSource, "reading_threads", lambda self: threads)
    whole, wanted = table()
    source = open_source(files[kind], batch_size=256, table_rows=1000)
    seen: dict[str, list[list[int]]] = {name: [] for name in wanted}
    dense = []
    for batch in source:
        dense.append(batch.dense.numpy()[:, 0])
        for name, jagged in batch.sparse.items():
            offsets = range(batch.size + 1) if jagged.offsets is None else jagged.offsets.tolist()
            values = jagged.values.tolist()
            seen[name] += [values[a:b] for a, b in zip(offsets, list(offsets)[1:], strict=False)]
    assert np.array_equal(np.concatenate(dense), np.log1p(whole["i1"].to_numpy()).astype(np.float32))
    for name, rows in wanted.items():
        hashed = [hash_rows(np.array([-1 if x is None else x for x in row], np.int64), 1000).tolist() for row in rows]
        assert seen[name] == hashed, name


@pytest.mark.parametrize("threads", [1, 3])
def test_bad_rows_of_any_part(tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "_PART_COLUMNS", 1)
    monkeypatch.setattr(columnar.ColumnarSource, "reading_threads", lambda self: threads)
    columns = {"label": np.zeros(90, np.int64), "i1": np.zeros(90)}
    columns |= {f"c{f + 1}": np.full(90, f) for f in range(8)}
    columns["c3"][[40, 7]] = 50
    columns["c6"][[6, 70]] = -1
    pa.parquet.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=30)
    with pytest.raises(DataError, match=r"row 7 .*column 'c3' is 50, outside"):  # the first column, then the first row
        list(open_source(tmp_path / "a.parquet", batch_size=16, ids="rows", table_rows=50))
    source = open_source(tmp_path / "a.parquet", batch_size=16, ids="rows", table_rows=50, bad_rows="skip")
    assert sum(batch.size for batch in source) == 86 and source.skipped_rows == 4
    assert [text.split(": ")[1] for text in source.bad_examples] == [f"row {r} (from 0)" for r in (6, 7, 40, 70)]


def test_a_block_goes_without_the_garbage_collector(files: dict[str, Path]) -> None:
    """Its memory is to be used again for the next block but one."""
    source = open_source(files["parquet"], batch_size=64)
    gc.disable()
    try:
        with ThreadPoolExecutor(2) as pool:
            block, parts = source.start_block(pool, 0, 0, None)  # type: ignore[attr-defined]
            columns, _ = source.read_block(0, 0, None, (block, parts))  # type: ignore[attr-defined]
            gone = [weakref.ref(block), weakref.ref(columns)]
            del block, parts, columns
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def open_files(folder: Path) -> int:
    names = [entry.path for entry in os.scandir("/proc/self/fd")]
    return sum(os.path.realpath(name).startswith(str(folder)) for name in names)


@pytest.mark.parametrize("kind", ["parquet", "orc"])
def test_files_close_with_the_source(files: dict[str, Path], kind: str) -> None:
    """Without the garbage collector, which may not run before there are too many."""
    gc.disable()
    try:
        source = open_source(files[kind], batch_size=64)
        batches = iter(source)
        next(batches)
        assert open_files(files[kind].parent) > 0
        del source, batches
        assert open_files(files[kind].parent) == 0
    finally:
        gc.enable()


def test_a_reader_is_used_by_one_thread_at_a_time() -> None:
    opened: list[threading.Lock] = []

    def open_file(name: str) -> threading.Lock:
        opened.append(threading.Lock())
        return opened[-1]

    readers = Readers(2)
    both = threading.Barrier(2)

    def use(_: int) -> None:
        for turn in range(200):
            with readers.of("ab"[turn % 2], open_file) as reader:
                assert reader.acquire(blocking=False)
                if not turn:
                    both.wait()
                reader.release()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(use, range(2)))
    with pytest.raises(OSError), readers.of("c", open_file) as broken:
        raise OSError
    with readers.of("c", open_file) as reader:
        assert reader is not broken  # after an error it is opened anew
    assert len(readers._idle) == 2


def test_a_column_that_has_gone_since_the_start(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"label": [0, 1], "c1": [1, 2], "c2": [3, 4]}), path)
    source = open_source(path, batch_size=2)
    source._readers._idle.clear()  # type: ignore[attr-defined]
    path.unlink()
    pa.parquet.write_table(pa.table({"label": [0, 1], "c1": [1, 2]}), path)
    with pytest.raises(DataError, match="column 'c2' has gone since the start"):
        list(source)
