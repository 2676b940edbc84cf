"""The file store: the same bits as the RAM store, what a folder promises, and what is refused."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlrm import SGD, Adam, RowWiseAdagrad, Table
from cdlrm.driver.cpu import CpuDriver
from cdlrm.errors import ConfigError, DataError, UsageError
from cdlrm.initial import Initializer
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


@settings(max_examples=40, deadline=None)
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
