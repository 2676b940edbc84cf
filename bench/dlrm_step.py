"""The whole DLRM training step: a cache of 10 % of the rows against all rows resident.

Shape: the published cardinalities of Criteo Kaggle (33.8 million rows, 26 tables), dim 16, Zipf(1.05) ids, batch
2048, MLPs 13-512-256-64-16 and 512-256-1, SGD.  A step is: next batch from `lookahead`, forward, loss, backward with
the tables' update, the MLPs' update.  Batches are generated beforehand.  "resident" is the faster of two: with
`lookahead`, and on demand.

The contestants take turns in one process, a block of steps each.  Between blocks there is a rest, so that nobody's
threads still work in another's block, and a block's first steps, which profit from the rest, are not counted.  The
small cache is filled with other rows before, so that every fill has a victim.

    python bench/dlrm_step.py [--rounds 8] [--steps 20] [--out bench/results/dlrm_step.jsonl]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `cdlrm train` does
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

import cdlrm  # noqa: E402
from cdlrm.data import Batch  # noqa: E402
from cdlrm.data.synthetic import SyntheticSource  # noqa: E402
from cdlrm.model import DLRM  # noqa: E402

KAGGLE = [
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
]  # fmt: skip
DIM, BATCH, LR = 16, 2048, 0.1
HORIZON = 32
REST_SECONDS, UNCOUNTED = 0.2, 3
BOUND = 1.25


class Contestant:
    """A model of its own with its own stream over the same batches."""

    def __init__(
        self, batches: list[Batch], *, cache_ratio: float, ahead: bool, horizon: int | str = HORIZON
    ) -> None:
        tables = [cdlrm.Table(f"c{c + 1}", rows, DIM) for c, rows in enumerate(KAGGLE)]
        self.tables = cdlrm.EmbeddingBagCollection(
            tables, optimizer=cdlrm.SGD(lr=LR), cache_ratio=cache_ratio, device="cpu", seed=0
        )
        self.model = DLRM(self.tables, features=26, dim=DIM, mlp_bot=[13, 512, 256, 64, DIM], mlp_top=[512, 256, 1])
        self.optimizer = torch.optim.SGD(self.model.dense_parameters(), lr=LR)
        self.seconds: list[float] = []
        self.blocks: list[float] = []
        if cache_ratio < 1:
            self._fill_cache()
        self._before = self.tables.stats()
        self._stream: Iterator[Batch] = (
            cdlrm.lookahead(self.model, batches, horizon=horizon) if ahead else iter(batches)
        )

    def _fill_cache(self) -> None:
        """Look uniform ids up, with a gradient of zero, until every slot holds a row and the first is evicted."""
        settings: dict[str, Any] = {"cardinalities": KAGGLE, "exponents": 0.0, "missing": 0.0, "seed": 9}
        for batch in SyntheticSource(batch_size=BATCH, num_batches=2048, **settings):
            (self.tables(batch) * 0.0).sum().backward()
            if self.tables.stats()["evicts"] > 0:
                return
        raise SystemExit("error: the cache did not fill")

    def block(self, steps: int) -> None:
        times = [self._step() for _ in range(steps)]
        self.seconds += times[UNCOUNTED:]
        self.blocks.append(statistics.median(times[UNCOUNTED:]))

    def _step(self) -> float:
        started = time.perf_counter()
        batch = next(self._stream)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(batch.dense, batch), batch.labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - started

    def moved(self) -> dict[str, float]:
        """Per distinct row of all timed steps: hits; and fills a step."""
        now, before = self.tables.stats(), self._before
        delta = {key: now[key] - before[key] for key in ("hits", "distinct", "fills", "evicts", "steps")}
        return {
            "hit_rate": delta["hits"] / max(delta["distinct"], 1),
            "fills_per_step": delta["fills"] / max(delta["steps"], 1),
            "evicts_per_step": delta["evicts"] / max(delta["steps"], 1),
        }

    def close(self) -> None:
        if isinstance(self._stream, cdlrm.Lookahead):
            self._stream.close()
        self.tables.close()


def measure(rounds: int, steps: int) -> dict[str, Any]:
    source = SyntheticSource(
        batch_size=BATCH, num_batches=rounds * steps + 64, cardinalities=KAGGLE, exponents=1.05, missing=0.0, seed=1
    )
    batches = list(source)
    contestants = {
        "cached": Contestant(batches, cache_ratio=0.1, ahead=True),
        "resident_ahead": Contestant(batches, cache_ratio=1.0, ahead=True),
        "resident_on_demand": Contestant(batches, cache_ratio=1.0, ahead=False),
    }
    for number in range(rounds):
        order = list(contestants.values())
        for contestant in order[number % 3 :] + order[: number % 3]:
            time.sleep(REST_SECONDS)
            contestant.block(steps)
        if number == 0:  # the warm-up round
            for contestant in order:
                contestant.seconds.clear()
                contestant.blocks.clear()
    moved = contestants["cached"].moved()
    for contestant in contestants.values():
        contestant.close()
    figures = {
        name: {
            "median_ms": 1e3 * statistics.median(contestant.seconds),
            "min_ms": 1e3 * min(contestant.seconds),
            "block_medians_ms": [round(1e3 * seconds, 2) for seconds in contestant.blocks],
        }
        for name, contestant in contestants.items()
    }
    resident = {key: min(figures[n][key] for n in figures if n != "cached") for key in ("median_ms", "min_ms")}
    return {
        "figures": figures,
        "cached_moves": moved,
        "ratio_of_medians": figures["cached"]["median_ms"] / resident["median_ms"],
        "ratio_of_minima": figures["cached"]["min_ms"] / resident["min_ms"],
        "bound": BOUND,
    }


def circumstances() -> dict[str, Any]:
    root = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "cdlrm") else ""),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.rounds < 2 or options.steps <= UNCOUNTED:
        parser.error(f"--rounds must be at least 2 and --steps at least {UNCOUNTED + 1}")
    result = {"bench": "dlrm_step", **circumstances(), **measure(options.rounds, options.steps)}
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
