"""Parts that are linked from the last checkpoint: what is shared, and that no order of events shares a stale one."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import cdlrm
from cdlrm import checkpoint_files, checkpoint_tables
from cdlrm.checkpoint import load, load_tables, save
from cdlrm.checkpoint_files import checkpoints
from cdlrm.errors import DataError

PART = 2048
ROWS = {"a": 400, "b": 90}  # 51 rows to a piece (Adagrad, dim 4): eight of a, two of b


@pytest.fixture(autouse=True)
def small_parts() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for module in (checkpoint_files, checkpoint_tables):
            patch.setattr(module, "PART_BYTES", PART)
        yield


def made(store: str = "ram", cache: Any = 60, seed: int = 0, **settings: Any) -> Any:
    tables = [cdlrm.Table(name, rows, 4) for name, rows in ROWS.items()]
    return cdlrm.EmbeddingBagCollection(
        tables, optimizer=cdlrm.Adagrad(lr=0.1), cache_rows=cache, store=store, seed=seed, device="cpu", **settings
    )


def train(bags: Any, name: str, rows: Any) -> None:
    """One step on some rows of one table, a few at a time."""
    rows = torch.as_tensor(rows)
    for some in rows.split(20):
        none = (torch.empty(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
        bags({f: none if f != name else (some, torch.tensor([0, len(some)])) for f in ROWS}).sum().backward()


def contents(bags: Any) -> dict[str, np.ndarray]:
    """Weights and optimizer state of each table, copied."""
    return {
        key: value.numpy().copy()
        for name in ROWS
        for key, value in (("w " + name, bags.table_weight(name)), ("s " + name, bags.table_state(name)["sum"]))
    }


def assert_same(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    for key, value in theirs.items():
        np.testing.assert_array_equal(mine[key], value, key)


def loads_as(directory: Path, wanted: dict[str, np.ndarray], seed: int = 0) -> None:
    other = made(cache=100, seed=seed)
    load(directory, other)
    assert_same(contents(other), wanted)
    for name, table in load_tables(directory).items():
        np.testing.assert_array_equal(table.numpy(), wanted["w " + name])


def shared(folder: Path) -> int:
    return sum(path.stat().st_nlink > 1 for path in folder.glob("part-*"))


def total(bags: Any) -> int:
    return int(sum(np.bitwise_count(group.store.changed).sum() for group in bags.groups))


@pytest.mark.parametrize("store", ["ram", "file", "resident"])
def test_what_did_not_change_is_linked(store: str, tmp_path: Path) -> None:
    bags = made("ram" if store == "resident" else store.replace("file", f"file:{tmp_path / 's'}"),
                "auto" if store == "resident" else 60)  # fmt: skip
    for name, rows in ROWS.items():
        train(bags, name, range(rows))
    bags.flush()
    assert total(bags) == sum(ROWS.values())
    first = save(tmp_path, bags, keep=9)
    parts = len(list(first.glob("part-*")))
    assert parts > 9 and shared(first) == 0 and total(bags) == 0
    train(bags, "a", [3, 4, 399])
    second = save(tmp_path, bags, keep=9)
    wanted = contents(bags)
    assert total(bags) == 0
    # two of the pieces have changed; a part that is small, or has something else in it, is written again
    assert 6 <= shared(second) <= parts - 2
    loads_as(first, contents(made_as(first)))
    shutil.rmtree(first)
    loads_as(second, wanted)
    loads_as(second, wanted, seed=5)
    train(bags, "b", [0])
    third = save(tmp_path, bags, keep=1)
    assert checkpoints(tmp_path) == [third] and len(list(third.glob("part-*"))) <= parts
    loads_as(tmp_path, contents(bags))


def made_as(folder: Path) -> Any:
    """A model that knows nothing of `folder` but its tensors."""
    other = made(cache="auto", seed=3)
    load(folder, other)
    return other


def test_a_loaded_checkpoint_is_linked_to_and_another_is_not(tmp_path: Path) -> None:
    bags = made()
    train(bags, "a", range(400))
    save(tmp_path / "one", bags)
    save(tmp_path / "two", bags)
    assert shared(save(tmp_path / "one", bags, keep=2)) == 0  # the bits are relative to two
    again = made(f"file:{tmp_path / 's'}", 100)
    load(tmp_path / "one", again)
    train(again, "a", [1])
    assert total(again) <= 1
    assert shared(save(tmp_path / "one", again, keep=2)) > 3
    again.close()
    again = made(f"file:{tmp_path / 's'}", 200)  # the folder remembers
    train(again, "a", [399])
    newest = save(tmp_path / "one", again, keep=2)
    assert shared(newest) > 3
    loads_as(newest, contents(again))
    other_seed = made(seed=9)
    load(newest, other_seed)
    assert shared(save(tmp_path / "one", other_seed, keep=2)) == 0  # rows that were never trained have another source
    loads_as(tmp_path / "one", contents(again))


@pytest.mark.parametrize("cache", [60, "auto"])
@pytest.mark.parametrize("store", ["ram", "file"])
@pytest.mark.parametrize("way", ["set_table", "state_dict", "load"])
def test_rows_that_are_set_are_written(way: str, store: str, cache: Any, tmp_path: Path) -> None:
    other = made(seed=7)
    train(other, "a", range(350))
    save(tmp_path / "other", other)
    bags = made(store.replace("file", f"file:{tmp_path / 's'}"), cache)
    train(bags, "a", range(400))
    save(tmp_path / "kept", bags)
    if way == "set_table":
        bags.set_table("a", other.table_weight("a"))
    elif way == "state_dict":
        bags.load_state_dict(other.state_dict())
    else:
        load(tmp_path / "other", bags)
    save(tmp_path / "kept", bags)
    loads_as(tmp_path / "kept", contents(bags))
    assert torch.equal(bags.table_weight("a"), other.table_weight("a"))


def test_swapped_names_are_not_mixed_up(tmp_path: Path) -> None:
    def bag(steps: int) -> Any:
        one = cdlrm.EmbeddingBag(400, 4, optimizer=cdlrm.Adagrad(lr=0.1), device="cpu")
        for _ in range(steps):
            one(torch.arange(400)[None]).sum().backward()
        return one

    left, right = bag(1), bag(2)
    save(tmp_path, torch.nn.ModuleDict({"x": left, "y": right}))
    save(tmp_path, torch.nn.ModuleDict({"x": right, "y": left}))
    tables = load_tables(tmp_path)
    assert torch.equal(tables["x"], right.weight) and torch.equal(tables["y"], left.weight)


@pytest.mark.parametrize("cache", [60, "auto"])
def test_rows_changed_during_a_save_keep_their_bits(cache: Any, tmp_path: Path, monkeypatch: Any) -> None:
    bags = made(cache=cache)
    train(bags, "a", range(400))
    finish = checkpoint_files.PartWriter.finish

    def late(*arguments: Any) -> None:
        train(bags, "a", [7])  # its piece is in the checkpoint by now
        finish(*arguments)

    monkeypatch.setattr(checkpoint_files.PartWriter, "finish", late)
    before = contents(bags)
    save(tmp_path, bags)
    loads_as(tmp_path, before)
    monkeypatch.undo()
    save(tmp_path, bags)
    loads_as(tmp_path, contents(bags))


def test_without_links_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bags = made()
    train(bags, "a", range(400))
    save(tmp_path, bags)

    def refused(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    assert shared(save(tmp_path, bags, keep=2)) == 0
    loads_as(tmp_path, contents(bags))


def test_a_damaged_last_checkpoint_is_not_linked_to(tmp_path: Path) -> None:
    bags = made()
    train(bags, "a", range(400))
    first = save(tmp_path, bags)
    content = checkpoint_files.Parts(first).content
    part = first / content["files"][content["tensors"]["tables/a/102/weight"]["file"]]["name"]
    os.truncate(part, part.stat().st_size - 1)
    second = save(tmp_path, bags, keep=2)
    assert shared(second) > 3
    loads_as(second, contents(bags))
    (second / "manifest.json").write_text("{")
    third = save(tmp_path, bags, keep=3)
    assert shared(third) == 0
    loads_as(third, contents(bags))


def test_an_interrupt_behind_an_update_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come when the update is through and nothing after it."""
    for cache in (60, "auto"):
        bags = made(cache=cache)
        records = bags.groups[0].records
        update = records.update

        def interrupted(*arguments: Any, update: Any = update) -> None:
            update(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(records, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(bags, "a", [5])
        bags.flush()
        assert total(bags) == 1


class Broken(Exception):
    """A failure in the middle of a save that is not of the disk."""


class Saving(RuleBasedStateMachine):
    """A user who saves here and there; `self.kept` is what each directory's newest checkpoint must be."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.kept: dict[str, list[dict[str, np.ndarray]]] = {"A": [], "B": []}
        self.bags: Any = None

    @initialize(store=st.booleans(), resident=st.booleans(), seed=st.integers(0, 1))
    def make(self, store: bool, resident: bool, seed: int) -> None:
        self.bags = made(f"file:{self.folder / 's'}" if store else "ram", "auto" if resident else 70, seed)
        self.store, self.seed = store, seed
        train(self.bags, "a", range(0, 300))

    @rule(name=st.sampled_from("ab"), at=st.integers(0, 89), count=st.integers(1, 25))
    def train_rows(self, name: str, at: int, count: int) -> None:
        train(self.bags, name, [row % ROWS[name] for row in range(at * 4, at * 4 + count)])

    @rule(name=st.sampled_from("ab"), value=st.integers(-3, 3))
    def set_a_table(self, name: str, value: int) -> None:
        self.bags.set_table(name, np.full((ROWS[name], 4), value, np.float32))

    @rule(name=st.sampled_from("ab"), value=st.integers(-3, 3))
    def load_a_state_dict(self, name: str, value: int) -> None:
        state = self.bags.state_dict()
        state[f"embedding_bags.{name}.weight"][3:9] = value
        self.bags.load_state_dict(state)

    @rule(where=st.sampled_from("AB"), keep=st.integers(1, 2))
    def save(self, where: str, keep: int) -> None:
        save(self.folder / where, self.bags, keep=keep)
        self.kept[where] = [*self.kept[where], contents(self.bags)][-keep:]

    @rule(where=st.sampled_from("AB"), at=st.integers(0, 12), disk=st.booleans())
    def fail_to_save(self, where: str, at: int, disk: bool) -> None:
        left, real = [at], checkpoint_files.save_file

        def failing(*arguments: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device") if disk else Broken
            real(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_files, "save_file", failing)
            try:
                save(self.folder / where, self.bags)
            except (DataError, Broken):
                return
        self.kept[where] = [contents(self.bags)]

    @rule(where=st.sampled_from("AB"), back=st.integers(0, 1))
    def load(self, where: str, back: int) -> None:
        if len(self.kept[where]) > back:
            load(checkpoints(self.folder / where)[-1 - back], self.bags)
            assert_same(contents(self.bags), self.kept[where][-1 - back])

    @rule(where=st.sampled_from("AB"), at=st.integers(0, 3))
    def fail_to_load(self, where: str, at: int) -> None:
        """What is in the tables then is nobody's promise; what is saved of it is."""
        left, real = [at], checkpoint_tables._restore_piece

        def failing(*arguments: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Broken
            real(*arguments)

        if self.kept[where]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(checkpoint_tables, "_restore_piece", failing)
                with pytest.raises(Broken):
                    load(self.folder / where, self.bags)
            for group in self.bags.groups:
                if not group.in_place:
                    with group.cache.pause():
                        group.cache.refresh()

    @rule(where=st.sampled_from("AB"))
    def delete_checkpoints(self, where: str) -> None:
        shutil.rmtree(self.folder / where, ignore_errors=True)
        self.kept[where] = []

    @rule(cache=st.sampled_from([25, 70, "auto"]), other_store=st.booleans())
    def go_on_in_another_module(self, cache: Any, other_store: bool) -> None:
        """On the same file store as it was left, or on another one with a checkpoint loaded."""
        self.bags.close()
        if self.store and not other_store:
            before = contents_of_closed(self.folder / "s", self.seed)
            self.bags = made(f"file:{self.folder / 's'}", cache, self.seed)
            assert_same(contents(self.bags), before)
            return
        self.store = self.store and not other_store
        self.bags = made("ram", cache, self.seed)
        if self.kept["A"]:
            load(self.folder / "A", self.bags)

    @precondition(lambda self: self.bags is not None)
    @rule()
    def all_checkpoints_are_right(self) -> None:
        for where, kept in self.kept.items():
            folders = checkpoints(self.folder / where)
            assert len(folders) == len(kept)
            for folder, wanted in zip(folders, kept, strict=True):
                loads_as(folder, wanted, self.seed)

    def teardown(self) -> None:
        if self.bags is not None:
            self.all_checkpoints_are_right()
            self.bags.close()
        shutil.rmtree(self.folder)


def contents_of_closed(folder: Path, seed: int) -> dict[str, np.ndarray]:
    bags = made(f"file:{folder}", 30, seed)
    out = contents(bags)
    bags.close()
    return out


def campaign(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Saving,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


def test_any_order_of_saving_and_loading() -> None:
    campaign(80, 15)


@pytest.mark.long
def test_many_orders_of_saving_and_loading() -> None:
    campaign(600, 30)
