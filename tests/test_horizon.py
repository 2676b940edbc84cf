"""`horizon="auto"`: from the cache and the batches alone, changing at fixed batches, bounded by bytes, reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cdlrm
from cdlrm.cli import main
from cdlrm.horizon import BATCHES_PER_SHARE, LARGEST_HORIZON, LEAST_HORIZON, PERIOD, HorizonChooser, horizon_for
from cdlrm.plan import Planner


def chosen(sizes: list[int], cache_rows: int, *, depth: int = 1, window_bytes: int = 1 << 40) -> tuple[list[int], str]:
    """The horizon after each choice, for batches of so many distinct rows and 8 bytes each."""
    planner = Planner(10_000, cache_rows)
    chooser = HorizonChooser([planner], depth, window_bytes)
    found = []
    for size in sizes:
        planner.scan(np.arange(size))
        horizon = chooser.scanned(8 * size)
        if horizon is not None:
            found.append(horizon)
        planner.plan()
    return found, chooser.why


def test_it_follows_the_batches() -> None:
    found, why = chosen([10] + [10] * (PERIOD - 1) + [20] * PERIOD + [40] * PERIOD, 400)
    assert found == [480, 480, 240, 120]
    assert why == (
        "horizon: 120 batches, 12 (at most 512 in all) for each time that the cache of 400 rows holds the 40 distinct "
        "rows of a batch."
    )


def test_it_changes_at_fixed_batches_only() -> None:
    sizes = np.random.default_rng(0).integers(1, 200, 3 * PERIOD).tolist()
    found, _ = chosen(sizes, 300)
    means = [sizes[0], *(np.mean(sizes[lo + (lo == 0) : lo + PERIOD]) for lo in range(0, 3 * PERIOD, PERIOD))]
    assert found == [max(LEAST_HORIZON, horizon_for(300, mean)) for mean in means]


def test_bounds() -> None:
    assert chosen([1], 5000)[0] == [LARGEST_HORIZON]
    assert chosen([9000], 9000)[0] == [BATCHES_PER_SHARE]
    assert chosen([100], 9000, window_bytes=800 * 20)[0] == [20], "as many batches as fit the bytes"
    assert "limited from 512 by the 0 MiB" in chosen([100], 9000, window_bytes=800 * 20)[1]
    assert chosen([100], 9000, depth=3, window_bytes=1)[0] == [3], "never less than the prefetch depth"
    found, why = chosen([100], 10_000)
    assert found == [LEAST_HORIZON] and "all rows fit" in why


def ids(batches: int) -> list[dict[str, torch.Tensor]]:
    rng = np.random.default_rng(1)
    sizes = [60 if b < 100 else 15 for b in range(batches)]
    return [{"a": torch.from_numpy((rng.random(n) ** 3 * 500).astype(np.int64))} for n in sizes]


@pytest.mark.parametrize("threads", [False, True])
def test_a_pass_adapts_and_plans_stay_the_same(threads: bool) -> None:
    """Rule 2: neither threads nor when anybody looks changes what is chosen or planned."""
    runs = []
    for again in range(2):
        ebc = cdlrm.EmbeddingBagCollection([cdlrm.Table("a", 500, 4)], optimizer=cdlrm.SGD(lr=0.1), cache_rows=120)
        look = cdlrm.ahead.Lookahead(ebc, ids(260), threads=threads and not again)
        seen = []
        for batch in look:
            ebc(batch).sum().backward()
            seen.append(look.stats()["horizon"])
        stats = ebc.stats()
        runs.append(
            (stats["fills"], stats["evicts"], stats["short_windows"], look.stats()["horizon"], look.horizon_why)
        )
        assert stats["fills"] <= 1.02 * stats["mind_fills"] + 2
        assert len(set(seen)) > 1, "it changed while running"
        ebc.close()
    assert runs[0] == runs[1]


def test_the_command_reports_what_it_chose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--synthetic-rows", "2000-300", "--mini-batch-size", "32", "--num-batches", "70", "--no-progress"]
    reports: dict[str, Any] = {}
    for name, flags in {"default": [], "auto": ["--horizon", "auto"], "fixed": ["--horizon", "5"]}.items():
        file = tmp_path / f"{name}.json"
        assert main(["train", *small, *flags, "--cache-rows", "400", "--json", str(file)]) == 0
        reports[name] = json.loads(file.read_text())
        assert ("horizon: " in capsys.readouterr().out) == (name != "fixed")
    assert reports["default"]["config"]["horizon"] == "auto"
    assert reports["fixed"]["cache"]["horizon"] == 5
    for name in ("default", "auto"):
        sentence = next(s for s in reports[name]["chosen"] if s.startswith("horizon: "))
        assert f"horizon: {reports[name]['cache']['horizon']} batches" in sentence
        assert reports[name]["cache"]["horizon"] > 32
    assert main(["train", "--horizon", "far"]) != 0
    assert "a whole number or auto" in capsys.readouterr().err
