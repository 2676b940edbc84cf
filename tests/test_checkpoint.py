"""Checkpoints: what is restored to the bit, what a crash leaves, what is refused."""

from __future__ import annotations

import builtins
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cdlrm
from cdlrm import checkpoint_files, checkpoint_tables
from cdlrm.checkpoint import checkpoint_info, iter_tables, load, load_tables, save
from cdlrm.checkpoint_files import Packer, Parts, PartWriter, checkpoints, unpack
from cdlrm.data.synthetic import SyntheticSource
from cdlrm.errors import ConfigError, DataError, UsageError
from cdlrm.whole_tables import table_values

ROOT = Path(__file__).resolve().parent.parent
ROWS = [300, 40, 7]
OPTIMIZERS = {
    "SGD": cdlrm.SGD(lr=0.1, weight_decay=0.01),
    "RowWiseAdagrad": cdlrm.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.1),
    "Adagrad": cdlrm.Adagrad(lr=0.1),
    "Adam": cdlrm.Adam(lr=0.01),
}
CACHES: list[dict[str, Any]] = [
    {"cache_rows": 160, "shards": 1}, {"cache_rows": 400}, {"cache_ratio": 0.7, "shards": 2}, {"cache_ratio": 0.5},
]  # fmt: skip


class Model(nn.Module):
    """Dense and sparse features; dropout, so that the random state matters."""

    def __init__(self, optimizer: Any, rows: list[int] = ROWS, dim: int = 4, **cache: Any) -> None:
        super().__init__()
        names = [f"t{i}" for i in range(len(rows))]
        self.bags = cdlrm.EmbeddingBagCollection(
            [cdlrm.Table(f"t{i}", n, dim, pooling="mean" if i else "sum") for i, n in enumerate(rows)],
            optimizer=optimizer, device="cpu", **{"seed": 0, **cache},
        )  # fmt: skip
        self.drop = nn.Dropout(0.2)
        self.top = nn.Linear(2 + dim * len(rows), 1)
        self.names = names

    def forward(self, batch: cdlrm.Batch) -> Tensor:
        sparse = dict(zip(self.names, batch.sparse.values(), strict=True))
        pooled = self.bags({name: (jagged.values, jagged.offsets) for name, jagged in sparse.items()})
        return self.top(torch.cat([batch.dense, self.drop(pooled.flatten(1))], 1)).squeeze(1)


def ids(batch: cdlrm.Batch) -> Any:
    return {f"t{i}": (jagged.values, jagged.offsets) for i, jagged in enumerate(batch.sparse.values())}


def source(**settings: Any) -> SyntheticSource:
    return SyntheticSource(
        num_rows=250, batch_size=20, cardinalities=ROWS, exponents=1.1, missing=0.0, lengths=[2, 1, 3], num_dense=2,
        seed=3, shuffle=True, **settings,
    )  # fmt: skip


class Run:
    """One's own training loop with everything that has a state."""

    def __init__(self, name: str, **cache: Any) -> None:
        torch.manual_seed(11)
        self.model = Model(OPTIMIZERS[name], **cache)
        self.dense = torch.optim.Adam(self.model.top.parameters(), lr=0.01)
        self.schedules = [
            torch.optim.lr_scheduler.MultiStepLR(self.dense, [5, 9], 0.5),
            torch.optim.lr_scheduler.ExponentialLR(self.model.bags.optimizer, 0.95),
        ]
        self.data = source()
        self.stateful = [self.dense, *self.schedules]

    def train(
        self, save_at: int = -1, directory: Path | None = None, horizon: int = 4, depth: int = 1
    ) -> dict[str, Any]:
        step = 0
        for epoch in range(self.data.epoch, 2):
            self.data.set_epoch(epoch)
            ahead = cdlrm.lookahead(self.model, self.data, ids=ids, horizon=horizon, prefetch_depth=depth)
            for batch in ahead:
                loss = nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.labels)
                self.dense.zero_grad()
                loss.backward()
                self.dense.step()
                for schedule in self.schedules:
                    schedule.step()
                step += 1
                if step == save_at:
                    assert directory is not None
                    save(directory, self.model, optimizers=self.stateful, lookahead=ahead, extra={"step": step})
                    self.model.bags.check()
        self.model.bags.check()
        return self.result()

    def result(self) -> dict[str, Any]:
        out: dict[str, Any] = {key: value.clone() for key, value in self.model.state_dict().items()}
        for table in self.model.bags.tables:
            out |= {f"{table.name}.{key}": value for key, value in self.model.bags.table_state(table.name).items()}
        for i, state in self.dense.state_dict()["state"].items():
            out |= {f"dense.{i}.{key}": torch.as_tensor(value) for key, value in state.items()}
        group = self.model.bags.groups[0]
        out["steps"], out["lr"] = torch.from_numpy(group.table_steps.copy()), torch.tensor(group.lr)
        out["dense lr"] = torch.tensor(self.dense.param_groups[0]["lr"])
        out["random"] = torch.get_rng_state()
        return out


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        assert mine[key].numpy().tobytes() == value.numpy().tobytes(), key


@pytest.mark.parametrize("number, name", list(enumerate(OPTIMIZERS)))
def test_a_resumed_run_ends_as_an_uninterrupted_one(number: int, name: str, tmp_path: Path) -> None:
    expected = Run(name, cache_rows="auto").train()
    interrupted = Run(name, **CACHES[number])
    at = (5, 13, 18, 26)[number]  # in the middle and at the very end of the first epoch (13 batches) and of the second
    assert_same(interrupted.train(at, tmp_path), expected)  # saving does not disturb
    torch.manual_seed(999)
    resumed = Run(name, seed=77, **CACHES[-1 - number])
    torch.nn.init.zeros_(resumed.model.top.weight)
    torch.manual_seed(998)
    got = load(tmp_path, resumed.model, optimizers=resumed.stateful, loader=resumed.data)
    assert got["extra"] == {"step": at} and got["loader"]["batch"] == (at - 1) % 13 + 1
    assert_same(resumed.train(horizon=9, depth=2), expected)


def test_a_run_resumes_with_another_store(tmp_path: Path) -> None:
    expected = Run("Adam", cache_rows="auto").train()
    first = Run("Adam", cache_rows=160, store=f"file:{tmp_path / 'a'}")
    first.train(7, tmp_path / "saved")
    for store in ("ram", f"file:{tmp_path / 'b'}", f"file:{tmp_path / 'a'}"):
        first.model.bags.close()
        first = Run("Adam", cache_rows=170, store=store, seed=None if store.endswith("a") else 5)
        load(tmp_path / "saved", first.model, optimizers=first.stateful, loader=first.data)
        assert_same(first.train(), expected)


def test_a_run_resumes_with_other_groups(tmp_path: Path) -> None:
    expected = Run("Adam", cache_rows="auto").train()
    Run("Adam", cache_rows=160).train(7, tmp_path / "saved")
    split = Run("Adam", cache_rows="auto")
    split.model.bags = cdlrm.EmbeddingBagCollection(
        [cdlrm.Table("t0", 300, 4, resident=True), *split.model.bags.tables[1:]], optimizer=OPTIMIZERS["Adam"],
        cache_rows=100,
    )  # fmt: skip
    split.stateful[2] = split.schedules[1] = torch.optim.lr_scheduler.ExponentialLR(split.model.bags.optimizer, 0.95)
    load(tmp_path / "saved", split.model, optimizers=split.stateful, loader=split.data)
    got = split.train()
    assert len(split.model.bags.groups) == 2
    expected.pop("steps"), got.pop("steps")
    assert_same(got, expected)


# ---- tables


def tables_equal(model: nn.Module, directory: Path) -> None:
    """Through the mapping, in pieces, and in ranges."""
    tables = load_tables(directory)
    pieces: dict[str, list[Tensor]] = {}
    for name, lo, values in iter_tables(directory):
        assert lo == sum(len(piece) for piece in pieces.get(name, []))
        pieces.setdefault(name, []).append(values)
    for name, (group, number) in checkpoint_tables.tables_of(model).items():
        weight = torch.from_numpy(table_values(group, group.tables[number].name)[0])
        assert torch.equal(tables[name], weight) and torch.equal(torch.cat(pieces[name]), weight)
        assert tables.shape(name) == weight.shape and tables[name].dtype == torch.float32
        lo, hi = len(weight) // 3, len(weight) // 2
        assert torch.equal(tables.rows(name, lo, hi), weight[lo:hi])
    assert set(tables) == set(pieces)


def touch(bags: Any, name: str, rows: list[int]) -> None:
    """One step on some rows of one table."""
    none = (torch.empty(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    given = {feature: none for feature in bags.features}
    given[name] = (torch.tensor(rows), torch.tensor([0, len(rows)]))
    bags(given).sum().backward()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces and part files although the tables are small."""
    for module in (checkpoint_files, checkpoint_tables):
        monkeypatch.setattr(module, "PART_BYTES", 4096)
    monkeypatch.setattr(checkpoint_tables, "BLOCK_ROWS", 30)


def constant(rows: np.ndarray, dim: int) -> np.ndarray:
    return np.repeat((rows % 100).astype(np.float32)[:, None], dim, 1)


@pytest.mark.usefixtures("small_parts")
def test_only_rows_that_were_trained_are_written_and_all_are_read(tmp_path: Path) -> None:
    def made(**settings: Any) -> Any:
        tables = [cdlrm.Table("a", 5000, 3), cdlrm.Table("b", 700, 3, init=constant), cdlrm.Table("c", 1, 3)]
        settings = {"seed": 0, **settings}
        return cdlrm.EmbeddingBagCollection(tables, optimizer=OPTIMIZERS["Adagrad"], cache_rows=600, **settings)

    bags = made()
    touch(bags, "a", [0, 17, 4999, *range(2000, 2400)])
    folder = save(tmp_path, bags)
    parts = Parts(folder)
    stored = {name: entry["shape"] for name, entry in parts.content["tensors"].items() if name.endswith("weight")}
    assert sum(shape[0] for name, shape in stored.items() if name.startswith("tables/a/")) == 403
    assert sum(shape[0] for name, shape in stored.items() if name.startswith("tables/b/")) == 700  # a user's function
    assert len(parts.content["files"]) > 3
    assert all(entry["bytes"] < 2 * 4096 for entry in parts.content["files"])
    tables_equal(bags, tmp_path)
    for other in (made(), made(seed=9), made()):
        if other.groups[0].store.initializer._key[0] == 0:
            touch(other, "a", [1, 2, 17, 1999])  # rows that the checkpoint leaves to the generator
            touch(other, "c", [0])
        load(tmp_path, other)
        other.check()
        for name in "abc":
            assert torch.equal(other.table_weight(name), bags.table_weight(name)), name
            assert torch.equal(other.table_state(name)["sum"], bags.table_state(name)["sum"]), name
        tables_equal(other, save(tmp_path / "again", other))


def test_every_optimizers_state_and_step_count_comes_back(tmp_path: Path) -> None:
    for name, optimizer in OPTIMIZERS.items():
        bags = Model(optimizer, cache_rows=60).bags
        for step in range(3):
            touch(bags, "t0", [step, 5])
        save(tmp_path / name, bags)
        other = Model(optimizer, cache_rows="auto", seed=4).bags
        load(tmp_path / name, other)
        for table in ("t0", "t1"):
            mine, theirs = other.table_state(table), bags.table_state(table)
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in theirs)
        assert other.groups[0].table_steps.tolist() == bags.groups[0].table_steps.tolist()
        touch(other, "t0", [3]), touch(bags, "t0", [3])
        assert torch.equal(other.table_weight("t0"), bags.table_weight("t0"))


def test_drop_ins_and_shared_groups(tmp_path: Path) -> None:
    class Towers(nn.Module):
        def __init__(self, seed: int = 0) -> None:
            super().__init__()
            self.user = cdlrm.EmbeddingBag(50, 4, optimizer=cdlrm.SGD(lr=0.1), cache_rows=20, seed=seed)
            self.item = nn.ModuleDict({"bag": cdlrm.Embedding(30, 4, padding_idx=2, optimizer=cdlrm.SGD(lr=0.1))})
            self.rest = nn.Sequential(nn.EmbeddingBag(20, 3), nn.Embedding(10, 3), nn.Linear(3, 1))

    first = Towers()
    cdlrm.replace_embeddings(first, optimizer=cdlrm.Adam(lr=0.1), cache_rows=12)
    first.user(torch.tensor([[1, 2]])).sum().backward()
    folder = save(tmp_path, first)
    assert set(load_tables(folder)) == {"user", "item.bag", "rest.0", "rest.1"}
    tables_equal(first, folder)
    second = Towers(seed=8)
    cdlrm.replace_embeddings(second, optimizer=cdlrm.Adam(lr=0.1))
    with torch.no_grad():
        second.item["bag"](torch.tensor([2]))
    load(tmp_path, second)
    mine, theirs = second.state_dict(), first.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def test_the_dense_part_is_saved_without_copying_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(OPTIMIZERS["SGD"])
    shared = nn.Linear(2, 2)
    model.a, model.b = shared, shared  # one tensor under two names
    model.register_buffer("mean", torch.tensor(3.0, dtype=torch.bfloat16))
    model.register_buffer("none", torch.empty(0, 3))

    def refuse(*_: Any) -> None:
        raise AssertionError("a whole table was copied")

    monkeypatch.setattr(cdlrm.EmbeddingBagCollection, "table_copy", refuse)
    monkeypatch.setattr(cdlrm.EmbeddingBagCollection, "set_table", refuse)
    save(tmp_path, model)
    before = {key: value.clone() for key, value in model.top.state_dict().items()}
    nn.init.zeros_(model.top.weight), nn.init.ones_(model.mean)
    load(tmp_path, model)
    assert torch.equal(model.top.weight, before["weight"]) and model.mean == 3.0
    assert "_save_to_state_dict" not in vars(model.bags)


def test_a_model_without_tables_and_a_single_module(tmp_path: Path) -> None:
    plain = nn.Linear(2, 3)
    save(tmp_path, plain, extra=[1])
    assert load(tmp_path, plain) == {"extra": [1], "loader": None}
    assert dict(load_tables(tmp_path)) == {} and list(iter_tables(tmp_path)) == []


def test_a_compiled_model_has_the_same_checkpoint(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1))
    cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))
    compiled = torch.compile(model, backend="eager")
    save(tmp_path, compiled)
    load(tmp_path, model)
    save(tmp_path, model)
    load(tmp_path, compiled)


# ---- values


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 2**32, 5, dtype=np.uint32)
    value = {
        "none": None, "flags": [True, False], "numbers": (1, -2.5, 2**70, math.inf), "text": "ü", "bytes": b"\x00\xff",
        "keys": {0: "a", (1, 2): "b"}, "$odd": 1, "counter": Counter({5: 2}), "array": array, "scalar": np.float32(0.1),
        "empty": [{}, [], ()], "strided": np.arange(6).reshape(2, 3).T, "zero": torch.tensor(7),
    }  # fmt: skip
    save(tmp_path, nn.Linear(1, 1), extra=value)
    got = load(tmp_path, nn.Linear(1, 1))["extra"]
    assert got["array"].dtype == np.uint32 and (got.pop("array") == array).all()
    assert (got.pop("strided") == value["strided"]).all()
    assert isinstance(got["counter"], Counter) and isinstance(got["numbers"], tuple)
    del value["array"], value["strided"]
    assert got == {**value, "scalar": float(np.float32(0.1))}
    with pytest.raises(ConfigError, match="extra/at/1 is a function"):
        save(tmp_path, nn.Linear(1, 1), extra={"at": [1, constant]})
    with pytest.raises(ConfigError, match="sparse"):
        save(tmp_path, nn.Linear(1, 1), extra=torch.eye(3).to_sparse())
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-000001"]


def test_tensors_of_one_path_are_kept_apart(tmp_path: Path) -> None:
    packer = Packer(PartWriter(tmp_path))
    tree = packer.pack({"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}, "x")
    packer.writer.finish({"tree": tree})
    assert unpack(tree, Parts(tmp_path)) == {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}


# ---- files


def test_the_newest_complete_checkpoints_are_kept(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    for step in range(4):
        folder = save(tmp_path, model, extra=step, keep=2)
    assert folder == tmp_path / "checkpoint-000004"
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-000003", "checkpoint-000004"]
    assert load(tmp_path / "checkpoint-000003", model)["extra"] == 2
    assert load(tmp_path, model)["extra"] == 3
    save(str(tmp_path), model)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoint-000005"]
    info = checkpoint_info(tmp_path)
    assert info["path"] == tmp_path / "checkpoint-000005" and info["tables"] == {}


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    folder = save(tmp_path, Model(OPTIMIZERS["Adam"]), extra={"a": 1})
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("cdlrm checkpoint", 1)
    content = manifest["content"]
    assert content["extra"] == {"a": 1} and content["tables"][0]["optimizer"]["name"] == "Adam"
    assert content["tensors"]["model/top.weight"] == {"file": 0, "dtype": "float32", "shape": [1, 14]}
    for entry in content["files"]:
        assert (folder / entry["name"]).stat().st_size == entry["bytes"] and len(entry["sha256"]) == 64
        assert (folder / entry["name"]).stat().st_mode == (folder / "manifest.json").stat().st_mode
    table = checkpoint_info(tmp_path)["tables"]["t0"]
    assert (table["rows"], table["seed"]) == (300, 0)


class Crash(BaseException):
    """The machine stops here."""


CALLS = [(os, "fsync"), (os, "rename"), (os, "chmod"), (os, "posix_fadvise"), (os, "rmdir"), (os, "mkdir"),
         (os, "unlink"), (checkpoint_files, "save_file"), (builtins, "open")]  # fmt: skip


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """After `crash_at(n)` the n-th of CALLS, and every later one, fails before it does anything; `n` counts down."""
    left = [10**9]
    kind: list[type[BaseException]] = [Crash]

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise kind[0](28, "No space left on device")
            return real(*args, **kwargs)

        return call

    def start(n: int, error: type[BaseException] = Crash) -> list[int]:
        left[0], kind[0] = n, error
        return left

    for owner, name in CALLS:
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    yield start
    left[0] = 10**9


@pytest.mark.parametrize("error", [Crash, OSError])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_crash_or_a_full_disk_at_any_call_leaves_a_complete_checkpoint(
    error: type[BaseException], keep: int, tmp_path: Path, crash_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "PART_BYTES", 300)
    model = nn.Linear(3, 3)
    save(tmp_path, model, extra=0, keep=keep)
    done, calls = 0, 0
    while True:
        left = crash_at(calls, error)
        nn.init.constant_(model.weight, calls + 1)
        try:
            save(tmp_path, model, extra=calls + 1, keep=keep)
        except (Crash, DataError) as failure:
            crash_at(10**9)
            if isinstance(failure, DataError):
                assert "No space left" in str(failure)
            got = load(tmp_path, model)["extra"]
            assert got in (done, calls + 1)
            assert got == 0 or (model.weight == got).all()
            done = got
            calls += 1
            continue
        assert left[0] >= 0
        break
    crash_at(10**9)
    assert calls > 15
    assert load(tmp_path, model)["extra"] == calls + 1
    assert not list(tmp_path.glob(".partial*")) and len(checkpoints(tmp_path)) == keep


KILLED = """
import sys, torch, cdlrm
from torch import nn
from cdlrm.checkpoint import save
from cdlrm import checkpoint_files
checkpoint_files.PART_BYTES = 1 << 16
model = nn.Linear(100, 400)
step = 0
while True:
    step += 1
    nn.init.constant_(model.weight, step)
    save(sys.argv[1], model, extra=step)
    print(step, flush=True)
"""


@pytest.mark.parametrize("milliseconds", [3, pytest.param(11, marks=pytest.mark.long)])
def test_a_killed_process_leaves_a_complete_checkpoint(milliseconds: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        time.sleep(milliseconds / 1000)
        process.send_signal(signal.SIGKILL)
        last = int(([3] + [int(line) for line in process.stdout.read().split()])[-1])
    model = nn.Linear(100, 400)
    got = load(tmp_path, model)["extra"]
    assert got in (last, last + 1) and (model.weight == got).all()
    save(tmp_path, model)
    assert len(checkpoints(tmp_path)) == 1 and not list(tmp_path.glob(".partial*"))


def spoil(folder: Path, what: str) -> None:
    part, manifest = folder / "part-00000.safetensors", folder / "manifest.json"
    if what == "flip":
        data = bytearray(part.read_bytes())
        data[-3] ^= 1
        part.write_bytes(data)
    elif what == "cut":
        os.truncate(part, part.stat().st_size - 1)
    elif what == "gone":
        part.unlink()
    elif what == "json":
        os.truncate(manifest, manifest.stat().st_size // 2)
    elif what == "value":
        manifest.write_text(manifest.read_text().replace('"rows": 300', '"rows": 301'))
    elif what == "version":
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 99'))
    elif what == "format":
        manifest.write_text("{}")


DAMAGE = {
    "flip": "part-00000.safetensors: is damaged", "cut": "part-00000.safetensors: has .* bytes instead of",
    "gone": "part-00000.safetensors: cannot be read", "json": "manifest.json: is damaged",
    "value": "manifest.json: is damaged", "version": "format version 99", "format": "is no manifest",
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_one_sentence_and_changes_nothing(what: str, tmp_path: Path) -> None:
    run = Run("Adam", cache_rows=200)
    save(tmp_path, run.model, optimizers=run.stateful, loader=run.data)
    folder = save(tmp_path, run.model, optimizers=run.stateful, loader=run.data, keep=2)
    touch(run.model.bags, "t0", [1, 2])
    before = run.result()
    spoil(folder, what)
    with pytest.raises(DataError, match=DAMAGE[what]) as caught:
        load(tmp_path, run.model, optimizers=run.stateful, loader=run.data)
    assert "\n" not in str(caught.value)
    if what in ("flip", "cut", "gone"):
        assert "or load 'checkpoint-000001'" in str(caught.value)
        with pytest.raises(DataError, match=DAMAGE[what]):
            list(iter_tables(tmp_path))
    assert_same(run.result(), before)
    load(tmp_path / "checkpoint-000001", run.model)


def test_a_model_that_does_not_fit_is_one_sentence_and_changes_nothing(tmp_path: Path) -> None:
    saved = Run("Adam", cache_rows=200)
    save(tmp_path, saved.model, optimizers=saved.stateful, loader=saved.data)
    adam = OPTIMIZERS["Adam"]
    wrong_top = Model(adam)
    wrong_top.top = nn.Linear(14, 2)
    wide = Model(adam)
    wide.more = nn.Linear(1, 1)
    half = Model(adam)
    half.top.half()
    for model, message in [
        (Model(adam, rows=[300, 41, 7]), "table 't1': the checkpoint has 40 rows of dim 4 where the model has 41"),
        (Model(adam, rows=[300, 40]), "table 't2' is in the checkpoint but not in the model"),
        (Model(adam, rows=[300, 40, 7, 1]), "table 't3' is in the model but not in the checkpoint"),
        (Model(cdlrm.SGD(lr=0.1)), "table 't0': the checkpoint's optimizer is Adam"),
        (Model(cdlrm.Adam(lr=0.1, eps=1e-3)), "eps=0.001"),
        (wrong_top, "'top.weight' is float32 \\[1, 14\\] in the checkpoint and float32 \\[2, 14\\]"),
        (half, "'top.weight' is float32 .* and float16"),
        (wide, "'more.weight' is in the model but not in the checkpoint"),
        (nn.Linear(1, 1), "table 't0' is in the checkpoint but not in the model"),
    ]:
        touch(model.bags, "t0", [1]) if isinstance(model, Model) else None
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, model)
        after = model.state_dict()
        assert all(torch.equal(after[key], before[key]) for key in before)


def test_states_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    saved = Run("Adam", cache_rows=200)
    saved.train(3, tmp_path)
    run = Run("Adam", cache_rows=200)
    before = run.result()
    two = torch.optim.Adam([{"params": [p]} for p in run.model.top.parameters()])
    for optimizers, message in [
        ([run.dense, *run.schedules[:1]], "2 were given where the checkpoint has 3"),
        ([two, *run.schedules], "Adam refuses its saved state"),
        ([run.dense, run.schedules[0], two], "Adam refuses its saved state"),
        ([run.dense, run.schedules[0], 5], "int has no state_dict"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, run.model, optimizers=optimizers, loader=run.data)
    other = SyntheticSource(num_rows=250, batch_size=10, cardinalities=ROWS)
    with pytest.raises(ConfigError, match="batch_size"):
        load(tmp_path, run.model, optimizers=run.stateful, loader=other)
    assert run.schedules[0].last_epoch == 0
    assert_same(run.result(), before)
    save(tmp_path / "none", run.model)
    with pytest.raises(ConfigError, match="no position in the data"):
        load(tmp_path / "none", run.model, loader=run.data)


def test_folders_that_hold_no_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    for path, message in [(tmp_path / "none", "does not exist"), (tmp_path, "holds no complete checkpoint")]:
        with pytest.raises(DataError, match=message):
            load(path, model)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="could not be written"):
        save(tmp_path / "file" / "below", model)
    folder = save(tmp_path, model)
    with pytest.raises(ConfigError, match="is itself a checkpoint"):
        save(folder, model)
    with pytest.raises(ConfigError, match="keep=0"):
        save(tmp_path, model, keep=0)
    with pytest.raises(ConfigError, match="no table 'x'"):
        load_tables(tmp_path, ["x"])
    with checkpoint_files._locked(tmp_path), pytest.raises(UsageError, match="another process"):
        save(tmp_path, model)


# ---- the moment of saving


def test_a_batch_that_is_not_trained_is_not_saved_as_trained(tmp_path: Path) -> None:
    run = Run("SGD", cache_rows=200)
    ahead = cdlrm.lookahead(run.model, run.data, ids=ids)
    iterator = iter(ahead)
    with pytest.raises(UsageError, match="has not yielded a batch"):
        save(tmp_path, run.model, lookahead=ahead)
    batch = next(iterator)
    with pytest.raises(UsageError, match="has not been trained"):
        save(tmp_path, run.model, lookahead=ahead)
    loss = run.model(batch).sum()
    with pytest.raises(UsageError, match="has not been trained"):
        save(tmp_path, run.model, lookahead=ahead)
    with pytest.raises(UsageError, match="being read ahead"):
        save(tmp_path, run.model, loader=run.data)
    loss.backward()
    save(tmp_path, run.model, lookahead=ahead)
    batch = next(iterator)
    loss = run.model(batch).sum()
    del loss  # a step that was skipped
    save(tmp_path, run.model, lookahead=ahead)
    ahead.close()
    assert save(tmp_path, run.model, lookahead=ahead) and load(tmp_path, run.model)["loader"]["batch"] == 2


def test_gradients_that_wait_are_not_left_out(tmp_path: Path) -> None:
    bags = Model(OPTIMIZERS["SGD"], cache_rows=200).bags
    first = bags({f"t{i}": torch.tensor([i]) for i in range(3)})
    second = bags({f"t{i}": torch.tensor([i]) for i in range(3)})
    save(tmp_path, bags)  # nothing has a gradient yet
    second.sum().backward()
    with pytest.raises(UsageError, match="wait for a forward call"):
        save(tmp_path, bags)
    bags.optimizer.step()
    save(tmp_path, bags)
    assert torch.equal(load_tables(tmp_path)["t0"], bags.table_weight("t0"))
    del first


def test_gradients_that_wait_for_the_optimizers_step_are_not_left_out(tmp_path: Path) -> None:
    bags = Model(OPTIMIZERS["SGD"], cache_rows=200, update="step").bags
    batch = {f"t{i}": torch.tensor([i, 4]) for i in range(3)}
    for _ in cdlrm.lookahead(bags, [batch, batch]):
        bags(batch).sum().backward()
        with pytest.raises(UsageError, match="wait for the optimizer's step, and a checkpoint does not hold them"):
            save(tmp_path, bags)  # inside a batch
    with pytest.raises(UsageError, match="wait for the optimizer's step, and a checkpoint does not hold them"):
        save(tmp_path, bags)  # those of batches that have ended
    assert not list(tmp_path.glob("checkpoint-*"))
    bags.optimizer.step()
    save(tmp_path, bags)
    assert torch.equal(load_tables(tmp_path)["t0"], bags.table_weight("t0"))
    for drop in (bags.optimizer.zero_grad, bags.zero_grad):
        bags(batch).sum().backward()
        drop()
        save(tmp_path, bags)


def test_loading_ends_a_lookahead_that_was_left(tmp_path: Path) -> None:
    run = Run("SGD", cache_rows=200)
    expected = run.train(3, tmp_path)
    for _ in cdlrm.lookahead(run.model, source(), ids=ids):
        break
    load(tmp_path, run.model, optimizers=run.stateful, loader=run.data)
    run.model.bags.check()
    assert_same(run.train(), expected)


def test_tables_in_one_group_must_agree_on_the_learning_rate(tmp_path: Path) -> None:
    def made(rates: dict[str, float]) -> Any:
        tables = [cdlrm.Table("a", 5, 2), cdlrm.Table("b", 5, 2)]
        return cdlrm.EmbeddingBagCollection(tables, optimizer={name: cdlrm.SGD(lr=lr) for name, lr in rates.items()})

    save(tmp_path, made({"a": 0.1, "b": 0.2}))
    with pytest.raises(ConfigError, match="share one learning rate"):
        load(tmp_path, made({"a": 0.1, "b": 0.1}))
    apart = made({"a": 0.3, "b": 0.4})
    load(tmp_path, apart)
    assert [group["lr"] for group in apart.optimizer.param_groups] == [0.1, 0.2]


# ---- memory

MEMORY = """
import resource, sys, torch, cdlrm
from cdlrm.checkpoint import save, load, iter_tables
rows, dim = 1_500_000, 64
def made():
    return cdlrm.EmbeddingBagCollection([cdlrm.Table("t", rows, dim)], optimizer=cdlrm.Adagrad(lr=0.1), seed=1)
def now():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0]) / 1024
def peak():
    return int(dict(line.split(":") for line in open("/proc/self/status"))["VmHWM"].split()[0]) / 1024
bags = made()
bags.groups[0].store.trained[:] = 255
save(sys.argv[1] + "/warm", torch.nn.Linear(1, 1))
print("tables", rows * dim * 8 / 2**20)
for name, work in [("save", lambda: save(sys.argv[1], bags)), ("load", lambda: load(sys.argv[1], bags)),
                   ("iter", lambda: [None for _ in iter_tables(sys.argv[1])])]:
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    work()
    print(name, peak() - before)
"""


@pytest.mark.long
def test_extra_memory_is_small_whatever_the_size_of_the_tables(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    figures = {name: float(value) for name, value in (line.split() for line in out.splitlines())}
    assert figures.pop("tables") > 700
    assert all(value < 256 for value in figures.values()), figures


@pytest.mark.parametrize("seed", [1, 2])
def test_a_load_that_writes_every_row_of_a_large_table_is_told(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cdlrm.checkpoint_tables.TOLD_BYTES", 1000)

    def made(seed: int) -> cdlrm.EmbeddingBagCollection:
        return cdlrm.EmbeddingBagCollection([cdlrm.Table("t", 500, 4)], optimizer=cdlrm.SGD(lr=0.1), seed=seed)

    cdlrm.save(tmp_path, first := made(1))
    second = made(seed)
    cdlrm.load(tmp_path, second)
    assert torch.equal(first.table_copy("t"), second.table_copy("t"))
    assert ("made with seed=1 only" in caplog.text) == (seed == 2)
