"""`horizon="auto"`: from the cache and the batches alone, changing at fixed batches, bounded by bytes, reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cdlrm
from cdlrm.cli import main
from cdlrm.horizon import BATCHES_PER_SHARE, LARGEST_HORIZON, LEAST_HORIZON, PERIOD, HorizonChooser, horizon_for
from cdlrm.plan import Planner
from cdlrm.simulate.caches import LookAheadCache, MinCache
from cdlrm.simulate.grid import simulate_caches
from cdlrm.simulate.trace import BatchRows, Trace


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
    assert found == [960, 960, 480, 240]
    assert why == (
        "horizon: 240 batches, 24 (at most 4096 in all) for each time that the cache of 400 rows holds the 40 distinct "
        "rows of a batch."
    )


def test_it_changes_at_fixed_batches_only() -> None:
    sizes = np.random.default_rng(0).integers(1, 200, 3 * PERIOD).tolist()
    found, _ = chosen(sizes, 300)
    means = [sizes[0], *(np.mean(sizes[lo + (lo == 0) : lo + PERIOD]) for lo in range(0, 3 * PERIOD, PERIOD))]
    assert found == [max(LEAST_HORIZON, horizon_for(300, mean)) for mean in means]


def test_bounds() -> None:
    assert chosen([1], 5000)[0] == [LARGEST_HORIZON]
    assert horizon_for(96, 1) == 24 * 96, "caches of 96 times a batch's rows are not cut off: they need it"
    assert chosen([9000], 9000)[0] == [BATCHES_PER_SHARE]
    assert chosen([100], 9000, window_bytes=800 * 20)[0] == [20], "as many batches as fit the bytes"
    assert "limited from 2160 by the 15.6 KiB for batches read ahead" in chosen([100], 9000, window_bytes=800 * 20)[1]
    assert chosen([100], 9000, depth=3, window_bytes=1)[0] == [3], "never less than the prefetch depth"
    found, why = chosen([100], 10_000)
    assert found == [LEAST_HORIZON] and "all rows fit" in why


class Reused(Trace):
    """Zipf ids of 8 tables, 40 % of which are redrawn from the last 16 batches."""

    names, table_rows, batches = list("abcdefgh"), [100_000] * 8, 700

    def __iter__(self) -> Iterator[BatchRows]:
        rng = np.random.default_rng(0)
        cdf = np.cumsum(np.arange(1, 100_001) ** -1.05)
        base = 100_000 * np.arange(8)[:, None]
        past: list[np.ndarray] = []
        for _ in range(700):
            rows = np.searchsorted(cdf, rng.random((8, 128)) * cdf[-1]) + base
            if past:
                batch, at = rng.integers(0, len(past), rows.shape), rng.integers(0, 128, rows.shape)
                old = np.stack(past)[batch, np.arange(8)[:, None], at]
                rows = np.where(rng.random(rows.shape) < 0.4, old, rows)
            past = [*past[-15:], rows]
            yield BatchRows(rows.reshape(-1), 0)


def test_it_is_long_enough_for_long_traces_with_reuse() -> None:
    """700 batches, a cache of 16 times their distinct rows: 12 batches for each time are not enough."""
    distinct = float(np.mean([np.unique(batch.rows).size for batch in Reused()]))
    rows = int(16 * distinct)
    horizons = (horizon_for(rows, distinct), 12 * 16)
    least = MinCache(rows, (0, 1))
    caches = [LookAheadCache(rows, horizon, 1, 8) for horizon in horizons]
    simulate_caches(Reused(), [least, *caches], max(horizons), 1)
    over = [cache.results()[0]["fills"] / least.counter.fills_at(1) for cache in caches]
    assert over[0] <= 1.001 and over[1] > 1.02, over


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
            seen.append(look.horizon)
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
