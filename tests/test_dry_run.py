"""`cdlrm train --dry-run`: the plan agrees with the peak of the real run within 5 %, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from emulated import Emulated, use
from emulator.compile import compiler

from cdlrm import memory_moves, memory_parts, memory_plan, memory_rehearsal, memory_use, runtime
from cdlrm.cli import main
from cdlrm.config import TrainConfig
from cdlrm.datasets import open_datasets
from cdlrm.driver.staging import LEAST_BYTES
from cdlrm.driver.tray_sizes import ring_bytes
from cdlrm.memory_moves import planned_moves
from cdlrm.memory_parts import Layout, tables_of
from cdlrm.memory_plan import plan_memory
from cdlrm.memory_text import render_plan
from cdlrm.memory_use import Use, count, pages
from cdlrm.report import render
from cdlrm.train import Trainer

ROOT = Path(__file__).resolve().parent.parent
ROWS = ["--synthetic-rows", "4000000-3000000-2000000-100000-1000", "--num-batches", "24", "--horizon", "8"]
ROWS += ["--no-progress"]
RUNS = {
    "resident": ["--cache-ratio", "1", "--no-metrics"],
    "cached": ["--cache-ratio", "0.1", "--arch-sparse-feature-size", "32", "--synthetic-zipf", "0.9"],
    "file": ["--cache-ratio", "0.25", "--arch-sparse-feature-size", "32", "--store", "file:tables"],
}


def cdlrm_train(folder: Path, *flags: str) -> str:
    """Run in a process of its own, whose peak is the run's."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "cdlrm", "train", *flags]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.limit(300)
@pytest.mark.parametrize("name", RUNS)
def test_real_peak_agrees_within_5_percent(name: str, tmp_path: Path) -> None:
    text = cdlrm_train(tmp_path, *ROWS, *RUNS[name], "--dry-run", "--json", "plan.json")
    assert "Memory plan (dry run: nothing was trained)" in text and "c1" in text
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    plan: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    cdlrm_train(tmp_path, *ROWS, *RUNS[name], "--json", "report.json")
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert plan["total_bytes"] == pytest.approx(report["memory"]["peak_bytes"], rel=0.05)
    assert plan["cache_rows"] == report["cache"]["cache_rows"]
    own = plan["total_bytes"] - plan["parts"]["data, MLPs and libraries"]
    assert own == sum(plan["parts"].values()) - plan["parts"]["data, MLPs and libraries"]
    assert own > 150 * 2**20  # large enough to matter


def test_a_dry_run_that_compiled_measures_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compiler's memory, some 100 MiB, is not the run's."""

    def plan_and_compile(config: TrainConfig) -> dict[str, Any]:
        numba.njit(lambda x: x + 1)(1)
        return {"total_bytes": 1}

    monkeypatch.setattr("cdlrm.memory_plan.plan_memory", plan_and_compile)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    plan = tmp_path / "plan.json"
    flags = ["--synthetic-rows", "300-50-7", "--num-batches", "3", "--no-progress", "--dry-run", "--json", str(plan)]
    assert main(["train", *flags]) == 0
    shown = capsys.readouterr()
    assert "measuring once more" in shown.err and "Memory plan (dry run: nothing was trained)" in shown.out
    assert json.loads(plan.read_text(encoding="utf-8"))["total_bytes"] > 100 * 2**20


@pytest.mark.parametrize("page", [4096, 65536])
def test_pages_are_counted_as_touched(page: int) -> None:
    random = np.random.default_rng(0)
    for size in (4, 12, 64, 132, 5000):
        rows = np.unique(random.integers(0, 9000, 300))
        flags = np.zeros(9000, bool)
        flags[rows] = True
        trained = np.packbits(flags, bitorder="little")
        for lo, hi in ((0, 9000), (1003, 7777)):
            expected: set[int] = set()
            for row in rows[(rows >= lo) & (rows < hi)].tolist():
                expected |= set(range(row * size // page, (row * size + size - 1) // page + 1))
            assert pages(trained, lo, hi, size, page) == len(expected)
    assert pages(trained, 0, 9000, 0, page) == 0


@pytest.mark.parametrize(
    "page, huge, enabled, store_page, metadata_page",
    [
        (4096, 2 << 20, "always madvise [never]", 4096, 4096),
        (4096, 2 << 20, "always [madvise] never", 4096, 2 << 20),
        (4096, 2 << 20, "[always] madvise never", 2 << 20, 2 << 20),
        (65536, 2 << 20, None, 65536, 65536),
        (65536, 512 << 20, "always [madvise] never", 65536, 512 << 20),
        (65536, 512 << 20, "[always] madvise never", 512 << 20, 512 << 20),
    ],
)
def test_pages_are_as_large_as_the_machine_has_them(
    page: int, huge: int, enabled: str | None, store_page: int, metadata_page: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """aarch64 has kernels with pages of 64 KiB; a table smaller than a page takes no more than the table."""
    monkeypatch.setattr("mmap.PAGESIZE", page)
    monkeypatch.setattr(memory_parts, "HUGE_PAGES", tmp_path)
    if enabled is not None:
        (tmp_path / "enabled").write_text(enabled + "\n", encoding="utf-8")
        (tmp_path / "hpage_pmd_size").write_text(f"{huge}\n", encoding="utf-8")
    rows = 1 << 20
    trained = np.zeros(rows // 8, np.uint8)
    trained[0] = 1  # row 0
    layout = Layout([rows], weight_bytes=64, state_bytes=4, slots=100, resident=False, in_file=False)
    (table,) = tables_of(layout, Use(1, True, trained, 1, 1), ["c1"])
    assert table["store_bytes"] == min(store_page, 64 * rows) + min(store_page, 4 * rows)
    assert table["metadata_bytes"] == rows // 4 + min(metadata_page, 8 * rows) + min(metadata_page, 4 * rows)


def test_used_rows_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(synthetic_rows="300-50-7", mini_batch_size=64, num_batches=5)
    data = open_datasets(config, [])
    expected = {
        (name, row) for batch in open_datasets(config, []).train for name, j in batch.sparse.items()
        for row in j.values.tolist()
    }  # fmt: skip
    use = count(data.train, data.table_rows)
    assert (use.rows, use.batches, use.complete, use.written) == (len(expected), 5, True, 0)
    found = [
        {(name, row) for name, j in batch.sparse.items() for row in j.values.tolist()}
        for batch in open_datasets(config, []).train
    ]
    two = max(len(found[0] | found[1]), len(found[2] | found[3]), len(found[4]))
    assert count(open_datasets(config, []).train, data.table_rows, every=2).written == two
    assert [memory_plan._saves(14, every) for every in (None, 15, 14, 5)] == [0, 0, 1, 3]
    monkeypatch.setattr(memory_use, "COUNTED_BATCHES", 3)
    use = count(open_datasets(config, []).train, data.table_rows)
    assert (use.batches, use.complete) == (3, False)


def test_wrong_flags_are_noticed_by_the_dry_run_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dry-run", "--data", "none.orc"]) == 1
    assert "none.orc" in capsys.readouterr().err
    assert main(["train", "--dry-run", "--arch-mlp-bot", "7-8-16"]) == 2
    assert "13 dense columns" in capsys.readouterr().err


# --- on a GPU ---

LARGE: dict[str, Any] = {
    "synthetic_rows": "600000-400000-100000-60000", "mini_batch_size": 1024, "test_mini_batch_size": 512,
    "cache_rows": 5000, "arch_sparse_feature_size": 64, "arch_mlp_bot": "13-16-64", "small_bytes": 2 << 20,
}  # fmt: skip
ON_GPU: dict[str, tuple[bool, dict[str, Any]]] = {
    "zero copy": (True, {"optimizer": "rowwise-adagrad"}),
    "staged": (False, {"optimizer": "sgd"}),
    "staged, saved": (False, {"optimizer": "sgd", "checkpoint_every": 10, "metrics": False}),
    "saved thrice, deep": (
        False, {"optimizer": "adam", "checkpoint_every": 5, "num_batches": 14, "prefetch_depth": 6, "cache_ratio": 0.1},
    ),
    "many batches": (True, {"num_batches": 40, "cache_ratio": 0.1}),
    "file, evaluated": (
        False, {"optimizer": "adam", "store": "file:tables", "synthetic_multi_hot": 3, "cache_ratio": 0.1,
                "arch_sparse_feature_size": 7, "arch_mlp_bot": "13-16-7"},
    ),
    "counted steps": (False, {"optimizer": "adam", "cache_ratio": 0.3, "metrics": False, "prefetch_depth": 2}),
    "resident": (True, {"optimizer": "adagrad", "cache_ratio": 1.0}),
    "several ids": (True, {"synthetic_multi_hot": 3, "pooling": "mean", "num_batches": 6}),
    "a cache that grows": (True, {"cache_rows": 200, "metrics": False}),
    "a cache of large records that grows": (
        True, {"cache_rows": 500, "metrics": False, "optimizer": "adam", "mini_batch_size": 2048, "synthetic_zipf": 0.2,
               "synthetic_rows": "2000000-500000-5000-300", "prefetch_depth": 3},
    ),
    "file": (False, {"store": "file:tables", "metrics": False}),
    # Rows travel with their plans, and the rehearsal's tables (of `small_bytes`) are smaller, so it moves other rows.
    "file, large records": (False, {**LARGE, "store": "file:tables", "metrics": False, "num_batches": 30}),
    "file, uniform": (
        False, {**LARGE, "store": "file:tables", "metrics": False, "synthetic_zipf": 0.3, "num_batches": 30},
    ),
    "staged, large records": (False, LARGE),
    "staged, large records, a cache that grows": (False, {**LARGE, "cache_rows": 500}),
}


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the emulated GPU cannot compile kernels")
@pytest.mark.parametrize("name", ON_GPU)
def test_real_device_and_pinned_bytes_agree_within_5_percent(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero_copy, changes = ON_GPU[name]
    monkeypatch.chdir(tmp_path)
    use(monkeypatch, check=False, compare=0)
    monkeypatch.setattr(Emulated, "driver", Emulated.zero_copy_driver if zero_copy else Emulated.staged_driver)
    changes = dict(changes)
    monkeypatch.setattr(memory_rehearsal, "SMALL_BYTES", changes.pop("small_bytes", memory_rehearsal.SMALL_BYTES))
    if "checkpoint_every" in changes:
        changes["checkpoint_dir"] = str(tmp_path / "kept")
    settings = {
        "synthetic_rows": "200000-100000-5000-300", "mini_batch_size": 512, "test_mini_batch_size": 2048,
        "num_batches": 10, "arch_mlp_bot": "13-16-16", "arch_mlp_top": "8-1", "horizon": 4, **changes,
    }  # fmt: skip
    config = TrainConfig(**settings)
    plan = plan_memory(config)
    with Trainer(config) as trainer:
        report = trainer.run()
        device, pinned = trainer.tables.groups[0].driver.most_bytes() or (0, 0)
    assert (report["memory"]["device_peak_bytes"], report["memory"]["pinned_peak_bytes"]) == (device, pinned)
    assert plan["device_bytes"] == pytest.approx(device, rel=0.05)
    assert plan["pinned_bytes"] == pytest.approx(pinned, rel=0.05)
    assert plan["device_bytes"] == sum(plan["device_parts"].values())
    text = render_plan(plan)
    assert "Memory of the device" in text and "device: cpu" in text
    assert any(what.startswith("pinning the tables, at ") for what in plan["start_seconds"]) == zero_copy
    assert ("filling the resident rows" in plan["start_seconds"]) == (changes.get("cache_ratio") == 1.0)
    assert all(seconds > 0 for seconds in plan["start_seconds"].values())
    assert ("pinned" in render(report)) and "device" in text


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the emulated GPU cannot compile kernels")
def test_moves_are_planned_as_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are filled, copied and written home, over two epochs with checkpoints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runtime, "PATIENCE_SECONDS", 60.0)  # no window is short because the machine is busy
    use(monkeypatch, check=False, compare=0)
    monkeypatch.setattr(Emulated, "driver", Emulated.staged_driver)
    config = TrainConfig(
        synthetic_rows="20000-5000-300", mini_batch_size=128, num_batches=12, nepochs=2, cache_rows=1200, horizon=4,
        prefetch_depth=2, checkpoint_every=5, checkpoint_dir=str(tmp_path / "kept"), arch_mlp_bot="13-16-16",
    )  # fmt: skip
    data = open_datasets(config, [])
    moves, complete = planned_moves(
        data, data.table_rows, 1200, horizon=4, depth=2, epochs=2, saves_every=5, evaluates=True
    )
    with Trainer(config) as trainer:
        trainer.run()
        group, stats = trainer.tables.groups[0], trainer.tables.stats()
    carried = [each for each in moves.carried if each is not None]
    assert complete and [each.lookups > 0 for each in carried].count(True) == 24 == moves.carried.count(None)
    assert sum(each.fills for each in carried) == stats["fills"]
    assert 0 < sum(each.copied for each in carried) == stats["fills_copied"]
    assert sum(each.evicts for each in carried) == group.cache.moves.rows_written
    monkeypatch.setattr(memory_moves, "COUNTED_BATCHES", 9)
    some, complete = planned_moves(data, data.table_rows, 1200, horizon=4, depth=2)
    assert not complete and some.carried.count(None) == 9
    plan = plan_memory(config)
    (note,) = (note for note in plan["notes"] if note.startswith("rows that travel"))
    assert "over the first 9 batches, a part of the run" in note and "KiB more" in note


def test_trays_take_turns_and_grow_by_a_quarter() -> None:
    """A tray whose batch has not ended is not used again; a move outside of plans takes the one that waits longest."""
    plan = (100_000, True)
    assert ring_bytes([plan, None] * 9, limit=3) == 3 * 125_000
    assert ring_bytes([plan, plan, (125_000, False), None, (10, False), (125_001, False)], limit=3) == (
        156_251 + 125_000 + 156_250
    )
    assert ring_bytes([plan, plan, plan, plan], limit=3) == 4 * 125_000
    assert ring_bytes([(100_000, False), (1, False), *[(125_001, False)] * 2], limit=2) == 2 * 156_251
    assert ring_bytes([(1, False)] * 2, limit=3) == 2 * LEAST_BYTES


def test_no_device_memory_on_the_cpu() -> None:
    plan = plan_memory(TrainConfig(synthetic_rows="300-50-7", mini_batch_size=64, num_batches=5, cache_ratio=1.0))
    assert plan["device_bytes"] == plan["pinned_bytes"] == 0 and plan["device_parts"] == {}
    assert list(plan["start_seconds"]) == ["filling the resident rows"]
    assert "Memory of the device" not in render_plan(plan) and "device: cpu" in render_plan(plan)
