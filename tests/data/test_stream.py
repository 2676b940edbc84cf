"""Blocks -> batches: order, last batch, shuffle, ranges, and continuing at any batch, for synthetic data and files."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from written import WRITERS, raw_rows, suffix

import cdlrm.data.synthetic
import cdlrm.data.tsv
from cdlrm.data import Batch, Source, SyntheticSource, open_source, open_train_test
from cdlrm.errors import ConfigError


def same(one: Batch, two: Batch) -> bool:
    tensors = [(one.dense, two.dense), (one.labels, two.labels)]
    for name in one.sparse:
        for a, b in zip(one.sparse[name], two.sparse[name], strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                tensors.append((a, b))
    return one.index == two.index and all(torch.equal(a, b) for a, b in tensors)


def rows_of(batches: list[Batch]) -> list[tuple]:
    """One tuple a sample; the first 4 columns tell samples apart."""
    out = []
    for b in batches:
        ids = [b.sparse[n].values.tolist() for n in list(b.sparse)[:4]]
        out += list(zip(b.labels.tolist(), b.dense[:, 0].tolist(), *ids, strict=True))
    return out


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cdlrm.data.synthetic, "_BLOCK_ROWS", 64)
    monkeypatch.setattr(cdlrm.data.synthetic, "_CALIBRATION_ROWS", 256)
    monkeypatch.setattr(cdlrm.data.tsv, "PIECE_BYTES", 5000)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("stream")
    for kind, write in WRITERS.items():
        (folder / kind).mkdir()
        for part, rows in enumerate((250, 3, 120)):
            write(folder / kind / f"part-{part * 9}{suffix(kind)}", raw_rows(rows, seed=part))
    return {kind: str(folder / kind) for kind in WRITERS}


def make(kind: str, files: dict[str, str], **settings: Any) -> Source:
    if kind == "synthetic":
        return SyntheticSource(num_rows=373, lengths=[1] * 20 + [0, 2, 3, 1, 1, 1], **settings)
    return open_source(files[kind], **settings)


KINDS = ["synthetic", *WRITERS]


@pytest.mark.parametrize("kind", KINDS)
def test_length_last_batch_and_two_epochs(kind: str, files: dict[str, str]) -> None:
    source = make(kind, files, batch_size=50)
    first = list(source)
    assert [b.size for b in first] == [50] * 7 + [23] and [b.index for b in first] == list(range(8))
    assert len(source) == 8 and source.rows_total == 373 and source.rows_read == 373 and source.skipped_rows == 0
    assert all(same(a, b) for a, b in zip(first, source, strict=True))
    assert all(v.is_contiguous() for b in first for j in b.sparse.values() for v in j if v is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_shuffle_is_a_permutation_by_seed_and_epoch(kind: str, files: dict[str, str]) -> None:
    plain = rows_of(list(make(kind, files, batch_size=50)))

    def shuffled(seed: int, epoch: int, batch_size: int = 50) -> list[tuple]:
        source = make(
            kind, files, batch_size=batch_size, shuffle=True, **({} if kind == "synthetic" else {"seed": seed})
        )
        source.seed = seed
        source.set_epoch(epoch)
        return rows_of(list(source))

    one = shuffled(1, 0)
    assert one != plain and sorted(one) == sorted(plain)
    assert one == shuffled(1, 0) == shuffled(1, 0, batch_size=7)
    assert one != shuffled(1, 1) and one != shuffled(2, 0)


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    batch_size=st.sampled_from([1, 7, 50, 64, 100, 400]),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
    stop=st.integers(0, 400),
    cut=st.sampled_from([None, (0, 200), (10, 373), (64, 65), (100, None), (5, 5)]),
)
def test_continues_at_the_very_next_batch(
    files: dict[str, str], kind: str, batch_size: int, shuffle: bool, epoch: int, stop: int, cut: Any
) -> None:
    def fresh() -> Source:
        return make(kind, files, batch_size=batch_size, shuffle=shuffle, row_range=cut)

    source = fresh()
    source.set_epoch(epoch)
    whole = list(source)
    stop = min(stop, len(whole))
    running = iter(source)
    for _ in range(stop):
        next(running)
    state = json.loads(json.dumps(source.state_dict()))
    other = fresh()
    other.load_state_dict(state)
    other.set_epoch(epoch)  # what a training loop does; the position stays
    rest = list(other)
    assert len(rest) == len(whole) - stop
    assert all(same(a, b) for a, b in zip(whole[stop:], rest, strict=True))
    assert other.rows_read == source.count_rows() == sum(b.size for b in whole)
    assert len(list(other)) == len(whole)  # the epoch after that is a whole one


def test_continuing_reads_no_earlier_block(files: dict[str, str]) -> None:
    source = open_source(files["parquet"], batch_size=50)
    running = iter(source)
    for _ in range(6):
        next(running)
    state, read = source.state_dict(), []
    source.load_state_dict(state)
    original = source.read_block
    source.read_block = lambda block, *rest: (read.append(block), original(block, *rest))[1]  # type: ignore[method-assign]
    assert len(list(source)) == 2
    assert read == [4, 5]  # of 6 blocks: 100, 100, 50, 3, 100, 20 rows


@pytest.mark.parametrize("kind", KINDS)
def test_no_thread_survives(kind: str, files: dict[str, str]) -> None:
    before = set(threading.enumerate())

    def alive() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("cdlrm-") and t not in before]

    source = make(kind, files, batch_size=10)
    running = iter(source)
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert alive() == []
    for batch in source:
        if batch.index == 3:
            break
    del batch
    assert alive() == []
    list(source)
    assert alive() == []


def test_state_of_other_settings_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    source = open_source(files["parquet"], batch_size=50)
    state = source.state_dict()
    WRITERS["parquet"](tmp_path / "other.parquet", raw_rows(5))
    for other, name in (
        (open_source(files["parquet"], batch_size=51), "batch_size"),
        (open_source(files["parquet"], batch_size=50, shuffle=True), "shuffle"),
        (open_source(files["parquet"], batch_size=50, table_rows=10), "table_rows"),
        (open_source(files["orc"], batch_size=50), "format"),
        (open_source(tmp_path / "other.parquet", batch_size=50), "files"),
        (SyntheticSource(batch_size=50, num_rows=10), "format"),
    ):
        with pytest.raises(ConfigError, match=name):
            other.load_state_dict(state)
    for broken in ({}, {**state, "batch": -1}, {**state, "row": "x"}, {**state, "block": 99}):
        with pytest.raises(ConfigError):
            source.load_state_dict(broken)


@pytest.mark.parametrize("kind", KINDS)
def test_row_ranges_split_the_rows(kind: str, files: dict[str, str]) -> None:
    whole = rows_of(list(make(kind, files, batch_size=50)))
    parts = [rows_of(list(make(kind, files, batch_size=30, row_range=r))) for r in ((0, 99), (99, 260), (260, None))]
    assert sum(parts, []) == whole


@pytest.mark.parametrize("kind", WRITERS)
def test_train_and_test_split(kind: str, files: dict[str, str]) -> None:
    whole = rows_of(list(open_source(files[kind], batch_size=50)))
    train, test = open_train_test(files[kind], batch_size=50, test_fraction=0.25, test_batch_size=31)
    assert test is not None and len(train) == 6 and len(test) == 4
    assert rows_of(list(train)) + rows_of(list(test)) == whole
    train, test = open_train_test(files[kind], test_data=files[kind], batch_size=50, limit_batches=2)
    assert test is not None and len(list(train)) == 2 and rows_of(list(test)) == whole
    assert open_train_test(files[kind], batch_size=50)[1] is None
    with pytest.raises(ConfigError, match="test_fraction"):
        open_train_test(files[kind], batch_size=50, test_fraction=1.0)


def test_limit_progress_and_bad_settings(files: dict[str, str]) -> None:
    seen: list[tuple[int, int | None]] = []
    source = open_source(
        files["orc"], batch_size=50, limit_batches=3, progress=lambda done, total: seen.append((done, total))
    )
    assert len(source) == len(list(source)) == 3
    assert seen == [(50, 373), (100, 373), (150, 373)]
    assert list(open_source(files["orc"], batch_size=50, limit_batches=0)) == []
    assert open_source(files["tsv"], batch_size=50).rows_total is None
    for wrong in (
        {"batch_size": 0},
        {"batch_size": 5, "row_range": (3, 2)},
        {"batch_size": 5, "ids": "x"},
        {"batch_size": 5, "columns": {"num_dense": 1}},
    ):
        with pytest.raises(ConfigError):
            open_source(files["orc"], **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="epoch"):
        source.set_epoch(-1)
