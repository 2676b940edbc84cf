"""The sentence of what would help, and the count behind it: MIN in a cache twice as large."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cdlrm.advice import advice
from cdlrm.cli import main
from cdlrm.plan import MinCounter

SMALL = ["--synthetic-rows", "3000-500-7-10000-2", "--mini-batch-size", "256", "--num-batches", "30", "--no-progress"]
SMALL += ["--arch-mlp-top", "8-1", "--no-metrics"]


@pytest.mark.parametrize("seed", range(20))
def test_double_fills_are_those_of_a_counter_twice_as_large(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, cache, depth = int(rng.integers(5, 200)), int(rng.integers(1, 60)), int(rng.integers(0, 4))
    both, large = MinCounter(rows, cache, 0, depth), MinCounter(rows, 2 * cache, 0, depth, double=False)
    small = MinCounter(rows, cache, 0, depth, double=False)
    for _ in range(300):
        batch = np.unique((rng.random(int(rng.integers(1, 60))) ** 3 * rows).astype(np.int64))
        for counter, times in ((both, 1), (small, 1), (large, 2)):
            counter.resize(times * max(counter.cache_rows // times, batch.size))
            counter.add(batch)
    assert both.double_fills == large.fills_at(depth)
    assert (both.fills, both.fills_at(depth)) == (small.fills, small.fills_at(depth))
    with pytest.raises(ValueError, match="double=False"):
        _ = small.double_fills


def test_a_run_says_what_simulations_find(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, out = tmp_path / "r.json", tmp_path / "o.jsonl"
    assert main(["train", *SMALL, "--cache-rows", "1400", "--horizon", "2", "--json", str(report)]) == 0
    said = capsys.readouterr().out
    cache = json.loads(report.read_text())["cache"]
    simulated = ["simulate", *SMALL[:6], "--no-progress", "--policy", "min", "--cache-rows", "1400", "2800"]
    assert main([*simulated, "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    fills = {line["cache_rows"]: line["fills"] for line in lines if line["prefetch_depth"] == 1}
    assert (cache["mind_fills"], cache["mind_fills_double"]) == (fills[1400], fills[2800])
    saved = 100 * (cache["fills"] - cache["mind_fills_double"]) / cache["fills"]
    assert "What would help" in said and f"would fill up to {saved:.1f} % fewer rows" in said


def test_resident_tables_need_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SMALL, "--cache-ratio", "1"]) == 0
    assert "What would help" not in capsys.readouterr().out


def test_the_sentence() -> None:
    seconds = {"total": 12.0, "evaluation": 2.0, "checkpoint": 0.0, "stall": 1.0, "read": 0.1}
    cache = {"fills": 1000, "mind_fills": 1000, "mind_fills_double": 400}
    assert advice({"cache": cache, "seconds": seconds}) == (
        "A cache twice as large would fill up to 60.0 % fewer rows; a longer horizon no fewer rows; a faster link "
        "would fill as many, and like the others save at most the 10.0 % of the time that the trainer waited for rows."
    )
    slow = {**seconds, "read": 3.0}
    said = advice({"cache": cache, "seconds": slow})
    assert said is not None and said.endswith("waited for rows or for the data.")
    assert advice({"cache": {**cache, "fills": 0}, "seconds": seconds}) is None


def test_a_horizon_that_reaches_the_end_of_the_epoch_need_not_be_longer(tmp_path: Path) -> None:
    fills, said = [], []
    for horizon in ("20", "40", "200"):
        report = tmp_path / "r.json"
        flags = ["--cache-rows", "2500", "--nepochs", "2", "--horizon", horizon, "--json", str(report)]
        assert main(["train", *SMALL, *flags]) == 0
        found = json.loads(report.read_text())
        fills.append(found["cache"]["fills"])
        said.append(advice(found) or "")
        assert found["cache"]["mind_fills"] < fills[-1]
    assert fills[1] == fills[2] and "a longer horizon up to" in said[0]
    assert "a longer horizon no fewer rows, since none reaches past the end of an epoch" in said[1]
