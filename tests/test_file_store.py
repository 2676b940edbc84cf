"""The file store: the same bits as the RAM store, what a folder promises, and what is refused."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cdlrm
from cdlrm import SGD, Adam, RowWiseAdagrad, Table
from cdlrm.driver.cpu import CpuDriver
from cdlrm.errors import ConfigError, DataError, UsageError
from cdlrm.initial import Initializer
from cdlrm.reference import TableReference
from cdlrm.store import RamStore, blocks, file
from cdlrm.store.file import FileStore

DRIVER = CpuDriver(1)
ROOT = Path(__file__).resolve().parent.parent


def make(folder, rows=1000, dim=8, optimizer=None, seed=3, names=("a", "b"), **kwargs) -> FileStore:
    optimizer = optimizer or RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.5)
    tables = [Table(names[0], rows // 3, dim), Table(names[1], rows - rows // 3, dim)]
    bases = np.array([0, rows // 3, rows], np.int64)
    initializer = Initializer(bases, [None, None], seed, dim, [0, 1])
    return FileStore(folder, 0, tables, optimizer, initializer, DRIVER, seed, **kwargs)


def twin(store: FileStore) -> RamStore:
    """The RAM store of the same records."""
    return RamStore(store.num_rows, store.dim, store.state_width, float(store.initial_state), store.initializer, DRIVER)


def records(store, count: int, rng) -> tuple[np.ndarray, np.ndarray]:
    return rng.random((count, store.dim), np.float32), rng.random((count, store.state_width), np.float32)


def assert_equal(store: FileStore, ram: RamStore) -> None:
    for ours, theirs in zip(store.get(0, store.num_rows), ram.get(0, ram.num_rows), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(store.trained, ram.trained)
    np.testing.assert_array_equal(store.changed, ram.changed)


@contextmanager
def no_bigger_than(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes of a file fail (EFBIG), as a full disk would make them fail."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


# --- the same bits as in memory ---

STEPS = st.lists(
    st.tuples(st.sampled_from(["read", "write", "write", "put", "get", "reopen", "flush"]), st.integers(0, 2**32 - 1)),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    steps=STEPS, rows=st.integers(3, 4000), dim=st.integers(1, 70), kind=st.sampled_from(["sgd", "rowwise", "adam"]),
    buffered=st.booleans(),
)  # fmt: skip
def test_same_bits_as_ram(tmp_path_factory, steps, rows, dim, kind, buffered):
    folder = tmp_path_factory.mktemp("store")
    optimizer = {"sgd": SGD(lr=0.1), "rowwise": RowWiseAdagrad(lr=0.1), "adam": Adam(lr=0.1)}[kind]
    with pytest.MonkeyPatch.context() as patch:
        if buffered:
            patch.delattr(os, "O_DIRECT", raising=False)
            patch.setattr(file, "DROP_BYTES", 1 << 16)
        store = make(folder, rows, dim, optimizer)
        ram = twin(store)
        for action, seed in steps:
            store = play(store, ram, action, np.random.default_rng(seed), lambda: make(folder, rows, dim, optimizer))
        assert_equal(store, ram)
        store.close()


def play(store, ram, action, rng, reopen):
    n = store.num_rows
    lo, hi = sorted(rng.integers(0, n + 1, 2).tolist())
    if action == "read":
        rows = rng.integers(0, n, rng.integers(0, 2 * n))  # duplicates allowed
        index = rng.permutation(rows.size).astype(np.int32)
        got = [np.full((rows.size, w), -1, np.float32) for w in (store.dim, store.state_width)]
        expected = [part.copy() for part in got]
        assert store.read(rows, *got, index) == ram.read(rows, *expected, index)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)
    elif action == "write":
        rows = rng.permutation(n)[: rng.integers(0, max(2, n // int(rng.choice([1, 20]))))]
        source = records(store, n + 3, rng)
        index = rng.permutation(n + 3)[: rows.size].astype(np.int32)
        for each in (store, ram):
            each.write(rows, *source, index)
    elif action == "put":
        weight, state = records(store, hi - lo, rng)
        part = rng.integers(3)
        for each in (store, ram):
            each.put(lo, weight if part != 1 else None, state if part != 0 else None)
    elif action == "get":
        for a, b in zip(store.get(lo, hi), ram.get(lo, hi), strict=True):
            np.testing.assert_array_equal(a, b)
    elif action == "flush":
        store.flush()
    else:
        store.close()
        return reopen()
    return store


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(0, 3000), min_size=1, max_size=80, unique=True), width=st.integers(1, 2100),
    gap=st.integers(0, 3), most=st.integers(1, 64), share=st.booleans(),
)  # fmt: skip
def test_pieces_cover_every_record_once_and_share_no_block(rows, width, gap, most, share):
    rows = np.sort(np.array(rows, np.int64))
    first, block, count = (np.empty(rows.size + 1, np.int64) for _ in range(3))
    pieces = blocks.cut_pieces(rows, width, gap, most, share, first, block, count)
    assert first[0] == 0 and first[pieces] == rows.size
    for p in range(pieces):
        mine = rows[first[p] : first[p + 1]]
        assert mine.size
        assert mine[0] * width // 1024 == block[p]
        assert ((mine + 1) * width - 1).max() // 1024 == block[p] + count[p] - 1
        if p and not share:
            assert block[p] >= block[p - 1] + count[p - 1]


# --- what is in the file, and what is not ---


def test_rows_that_were_never_trained_are_neither_read_nor_stored(tmp_path, monkeypatch):
    store = make(tmp_path / "s", rows=100_000, dim=16)
    monkeypatch.setattr(store, "_read_stored", lambda *args: pytest.fail("a row was read"))
    weight, state = store.get(0, 100_000)
    assert np.array_equal(weight, twin(store).get(0, 100_000)[0])
    assert (state == 0.5).all()
    assert store.path.stat().st_blocks == 0
    store.flush()
    store.close()


def test_a_hundred_gigabytes_are_virtual(tmp_path):
    rows = 400_000_000
    store = make(tmp_path / "s", rows=rows, dim=64, optimizer=SGD(lr=0.1))
    assert store.path.stat().st_size >= 100e9
    rng = np.random.default_rng(0)
    touched = np.unique(rng.integers(0, rows, 500))
    weight, state = records(store, touched.size, rng)
    store.write(touched, weight, state, np.arange(touched.size, dtype=np.int32))
    store.close()
    store = make(tmp_path / "s", rows=rows, dim=64, optimizer=SGD(lr=0.1))
    got = np.zeros_like(weight)
    assert store.read(touched, got, state, np.arange(touched.size, dtype=np.int32)) == touched.size
    np.testing.assert_array_equal(got, weight)
    assert store.path.stat().st_blocks * 512 < 20e6
    store.close()


def test_a_store_opened_again_is_the_same(tmp_path):
    store = make(tmp_path / "s")
    ram = twin(store)
    for each in (store, ram):
        each.put(100, *records(store, 300, np.random.default_rng(0)))
    for each in (store, ram):
        each.clear_changed({"id": "x"})
    store.remember("steps", [3, 4])
    store.close()
    store.close()
    with pytest.raises(UsageError, match="closed"):
        store.get(0, 1)
    again = make(tmp_path / "s")
    assert_equal(again, ram)
    assert again.saved == {"steps": [3, 4], "base": {"id": "x"}}
    again.close()
    fresh = make(tmp_path / "s", fresh=True)
    assert not fresh.trained.any()
    fresh.close()


def test_another_learning_rate_opens_the_same_store(tmp_path):
    make(tmp_path / "s", optimizer=SGD(lr=0.1)).close()
    make(tmp_path / "s", optimizer=SGD(lr=0.5)).close()


# --- refused, with one sentence, nothing damaged ---


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rows": 1200}, ["tables[0].rows", "333", "400"]),
        ({"dim": 16}, ["tables[0].dim", "8", "16"]),
        ({"names": ("a", "x")}, ["tables[1].name", "'b'", "'x'"]),
        ({"optimizer": SGD(lr=0.1)}, ["optimizer", "'RowWiseAdagrad'", "'SGD'"]),
        ({"optimizer": RowWiseAdagrad(lr=0.1)}, ["initial_state", "0.5", "0.0"]),
        ({"seed": 4}, ["seed", "3", "4"]),
    ],
)
def test_a_store_of_something_else_is_refused(tmp_path, change, words):
    store = make(tmp_path / "s")
    store.put(0, *records(store, 10, np.random.default_rng(0)))
    kept = store.get(0, 1000)
    store.close()
    with pytest.raises(ConfigError) as caught:
        make(tmp_path / "s", **change)
    assert all(word in str(caught.value) for word in [*words, "another folder"]), caught.value
    store = make(tmp_path / "s")
    np.testing.assert_array_equal(store.get(0, 1000)[0], kept[0])
    store.close()


def test_another_format_version_is_refused(tmp_path):
    make(tmp_path / "s").close()
    header = tmp_path / "s" / "group0.json"
    header.write_text(json.dumps({**json.loads(header.read_text()), "version": 99}))
    with pytest.raises(ConfigError, match="version 99, this cdlrm reads .* version 1"):
        make(tmp_path / "s")


def test_two_at_once_are_refused(tmp_path):
    store = make(tmp_path / "s")
    with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}"):
        make(tmp_path / "s")
    store.close()
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
    lock = str(tmp_path / "s" / "group0.lock")
    with subprocess.Popen([sys.executable, "-c", code, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="in use by process"):
            make(tmp_path / "s")
        other.communicate(b"\n")
    make(tmp_path / "s").close()


def crash(store: FileStore) -> None:
    """End the store as the end of its process would: no flush."""
    store._release()


def test_after_a_crash_nothing_unsure_is_believed(tmp_path):
    store = make(tmp_path / "s")
    store.put(0, *records(store, 10, np.random.default_rng(0)))
    store.flush()
    kept = store.get(0, 1000)
    crash(store)
    store = make(tmp_path / "s")  # nothing was written since the flush
    np.testing.assert_array_equal(store.get(0, 1000)[0], kept[0])
    store.put(5, *records(store, 1, np.random.default_rng(1)))
    crash(store)
    with pytest.raises(DataError, match="ended without closing it.*start from a checkpoint"):
        make(tmp_path / "s")
    make(tmp_path / "s", fresh=True).close()


@pytest.mark.parametrize("kind", [SGD(lr=0.1), RowWiseAdagrad(lr=0.1)])
def test_a_full_disk_loses_nothing(tmp_path, kind):
    store = make(tmp_path / "s", rows=50_000, dim=16, optimizer=kind)
    rng = np.random.default_rng(0)
    ram = twin(store)
    rows = np.arange(0, 50_000, 3)
    index = np.arange(rows.size, dtype=np.int32)
    old, new = records(store, rows.size, rng), records(store, rows.size, rng)
    for each in (store, ram):
        each.write(rows[: rows.size // 2], *old, index[: rows.size // 2])
    limit = store.path.stat().st_size // 4
    with no_bigger_than(limit), pytest.raises(DataError, match="group0.rows: writing records failed .*make room"):
        store.write(rows, *new, index)
    np.testing.assert_array_equal(store.trained, ram.trained)  # no row is believed that was not written
    others = np.setdiff1d(np.arange(50_000), rows[: rows.size // 2])
    np.testing.assert_array_equal(store.get(0, 50_000)[0][others], ram.get(0, 50_000)[0][others])
    for each in (store, ram):  # room was made: the caller still has the records
        each.write(rows, *new, index)
    assert_equal(store, ram)
    store.close()
    again = make(tmp_path / "s", rows=50_000, dim=16, optimizer=kind)
    assert_equal(again, ram)
    again.close()


def test_no_room_for_the_header_or_the_file(tmp_path):
    with no_bigger_than(4096), pytest.raises(ConfigError, match="does not take a file of"):
        make(tmp_path / "s")
    store = make(tmp_path / "s")
    with no_bigger_than(16), pytest.raises(DataError, match="header.* failed"):
        store.put(0, *records(store, 10, np.random.default_rng(0)))
    assert not store.trained.any()
    store.close()
    make(tmp_path / "s").close()


def test_a_folder_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match="parent folder .* does not exist; create it"):
        make(tmp_path / "no" / "s")
    (tmp_path / "f").write_text("")
    with pytest.raises(ConfigError, match="not a folder"):
        make(tmp_path / "f")
    for folder in ("/proc", "/proc/x"):  # which exists, and where no file or folder can be made
        with pytest.raises(ConfigError, match="the folder cannot be written"):
            make(Path(folder))


@pytest.mark.parametrize("existing", [False, True])
def test_a_read_only_folder(tmp_path, existing):
    folder = tmp_path / "s"
    if existing:
        make(folder).close()
    with read_only(folder if existing else tmp_path), pytest.raises(ConfigError, match="cannot be written"):
        make(folder)
    make(folder).close()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """`folder` may not be written by this process (root becomes nobody meanwhile)."""
    root = os.geteuid() == 0
    folder.chmod(0o555)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda f: os.truncate(f / "group0.rows", 4096), "has 4096 bytes, the header says"),
        (lambda f: (f / "group0.rows").unlink(), "has no bytes"),
        (lambda f: (f / "group0.bits").write_bytes(bytes(250)), "checksum"),
        (lambda f: (f / "group0.bits").unlink(), "cannot be read"),
        (lambda f: (f / "group0.json").write_text("{"), "not the header of a file store"),
        (lambda f: (f / "group0.json").unlink(), "no header"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, damage, words):
    store = make(tmp_path / "s")
    store.put(0, *records(store, 10, np.random.default_rng(0)))
    store.close()
    damage(tmp_path / "s")
    with pytest.raises(DataError, match=words):
        make(tmp_path / "s")


def test_a_file_that_is_cut_while_open(tmp_path):
    store = make(tmp_path / "s")
    store.put(0, *records(store, 1000, np.random.default_rng(0)))
    os.truncate(store.path, 4096)
    with pytest.raises(DataError, match="ends before byte"):
        store.get(0, 1000)
    store.close()


# --- through the module ---


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), RowWiseAdagrad(lr=0.1), Adam(lr=0.1)])
def test_training_gives_the_same_bits_as_in_memory(tmp_path, optimizer):
    rng = np.random.default_rng(0)
    ids = [(rng.zipf(1.3, 64) % 500, rng.integers(0, 300, 64)) for _ in range(30)]
    batches = [{"a": torch.from_numpy(a), "b": torch.from_numpy(b)} for a, b in ids]
    expected = train("ram", optimizer, batches)
    store = f"file:{tmp_path / 's'}"
    if not optimizer.counts_steps:  # a second module continues in the folder
        train(store, optimizer, batches[:17])
        batches = batches[17:]
    for ours, theirs in zip(train(store, optimizer, batches), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def train(store: str, optimizer, batches: list) -> list[np.ndarray]:
    """Weights and states of both tables after `batches`."""
    tables = [Table("a", 500, 12), Table("b", 300, 12)]
    ebc = cdlrm.EmbeddingBagCollection(tables, optimizer=optimizer, cache_rows=200, store=store, seed=0)
    for batch in cdlrm.lookahead(ebc, batches, horizon=4):
        out = ebc(batch)
        (out * out).sum().backward()
    values = [ebc.state_dict()[f"embedding_bags.{name}.weight"].numpy().copy() for name in "ab"]
    values += [state.numpy().copy() for name in "ab" for state in ebc.table_state(name).values()]
    ebc.close()
    return values


@pytest.mark.parametrize("kind", ["collection", "bag"])
def test_a_folder_gives_its_seed_to_a_module_without_one(tmp_path: Path, kind: str) -> None:
    def weight(folder: str, **settings: Any) -> torch.Tensor:
        settings = {"optimizer": cdlrm.SGD(lr=0.1), "cache_rows": 9, "store": f"file:{tmp_path / folder}", **settings}
        if kind == "bag":
            module: Any = cdlrm.EmbeddingBag(40, 4, **settings)
        else:
            module = cdlrm.EmbeddingBagCollection([Table("a", 30, 4), Table("b", 40, 8)], **settings)
        weights = [value.flatten() for value in module.state_dict().values()]
        module.close()
        return torch.cat(weights)

    first = weight("one")
    assert torch.equal(weight("one"), first)
    assert not torch.equal(weight("two"), first)
    given = weight("three", seed=5)
    assert torch.equal(weight("three"), given)
    with pytest.raises(ConfigError, match="seed = 5, this model 6"):
        weight("three", seed=6)
    if kind == "collection":
        assert not torch.equal(weight("one", fresh_store=True), first)  # nothing of the folder is kept
    for header in (tmp_path / "two").glob("*.json"):
        header.write_text("[")
    with pytest.raises(DataError, match="not the header"):
        weight("two")


def test_state_dict_of_a_table_beyond_memory_is_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str) -> cdlrm.EmbeddingBagCollection:
        return cdlrm.EmbeddingBagCollection(
            [cdlrm.Table("a", 50, 4)], optimizer=cdlrm.SGD(lr=0.1), cache_rows=10, store=f"file:{tmp_path / name}"
        )

    first = module("first")
    first({"a": torch.arange(5)}).sum().backward()
    values = first.state_dict()["embedding_bags.a.weight"]
    assert isinstance(values, torch.Tensor)
    monkeypatch.setattr("cdlrm.module.available_bytes", lambda: 50 * 4 * 4 - 1)
    with pytest.raises(cdlrm.UsageError, match="checkpoint"):
        first.table_weight("a")
    state = first.state_dict()
    assert isinstance(state["embedding_bags.a.weight"], TableReference)
    first.load_state_dict(state)
    torch.save(state, tmp_path / "state.pt")
    first.close()
    again = module("first")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    monkeypatch.undo()
    assert torch.equal(again.state_dict()["embedding_bags.a.weight"], values)
    other = module("second")
    with pytest.raises(RuntimeError, match="not this module's"):
        other.load_state_dict(state)
    again.close()
    other.close()
