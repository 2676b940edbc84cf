"""The model of the machine against the machine: predicted and measured milliseconds of ten training configurations.

This machine is calibrated first (`cdlrm.sizing.calibrate`, other configurations, none with the whole pipeline).  Then
each of CONFIGURATIONS is predicted from its ids alone and trained for real: reader, planner and transfer threads beside
the trainer.  They take turns in one process, a block of steps each; a block's figure is the mean of its steps, a
configuration's the least of its blocks.  Batches are generated beforehand, so that reading costs nothing.

    python bench/model_accuracy.py [--rounds 6] [--steps 10] [--threads 2] [--profile FILE] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `cdlrm train` does
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from dlrm_step import circumstances  # noqa: E402

import cdlrm  # noqa: E402
from cdlrm.assemble import build_model, build_tables  # noqa: E402
from cdlrm.config import TrainConfig  # noqa: E402
from cdlrm.data import Batch  # noqa: E402
from cdlrm.datasets import open_datasets  # noqa: E402
from cdlrm.simulate.grid import cache_size  # noqa: E402
from cdlrm.simulate.trace import SourceTrace  # noqa: E402
from cdlrm.sizing.calibrate import calibrate  # noqa: E402
from cdlrm.sizing.measure import train_step  # noqa: E402
from cdlrm.sizing.model import predict  # noqa: E402
from cdlrm.sizing.profiles import Profile, load_profile, save_profile  # noqa: E402
from cdlrm.sizing.traffic import everything_resident, read_ids, run_planner  # noqa: E402
from cdlrm.sizing.work import shape_of  # noqa: E402

WARM, REST_SECONDS, UNCOUNTED = 40, 0.2, 3
WITHIN, OF_TEN = 0.20, 8


def rows(count: int, each: int) -> str:
    return "-".join([str(each)] * count)


CONFIGURATIONS: list[dict[str, Any]] = [
    {},  # the built-in synthetic data
    {"synthetic_rows": rows(26, 60_000), "synthetic_zipf": 1.05, "arch_sparse_feature_size": 32, "optimizer": "sgd",
     "cache_ratio": 0.05, "mini_batch_size": 4096},
    {"synthetic_rows": rows(26, 30_000), "synthetic_zipf": 0.9, "arch_sparse_feature_size": 64, "optimizer": "adagrad",
     "cache_ratio": 0.2, "mini_batch_size": 1024, "horizon": 16},
    {"synthetic_rows": rows(26, 80_000), "synthetic_zipf": 1.2, "arch_sparse_feature_size": 8, "cache_ratio": 0.1,
     "mini_batch_size": 6144, "horizon": 8},
    {"synthetic_rows": rows(26, 25_000), "synthetic_zipf": 1.1, "arch_sparse_feature_size": 128, "cache_ratio": 0.1,
     "mini_batch_size": 512},
    {"synthetic_rows": rows(26, 30_000), "synthetic_zipf": 0.7, "arch_sparse_feature_size": 32, "optimizer": "adam",
     "cache_ratio": 0.4, "mini_batch_size": 1536, "arch_mlp_top": "256-128-1"},
    {"synthetic_rows": rows(16, 50_000), "synthetic_zipf": 1.05, "synthetic_multi_hot": 3, "cache_ratio": 0.15,
     "mini_batch_size": 1024, "optimizer": "sgd"},
    {"synthetic_rows": rows(8, 200_000), "synthetic_zipf": 1.05, "arch_sparse_feature_size": 48, "cache_ratio": 0.05,
     "mini_batch_size": 4096, "arch_mlp_bot": "13-256-48", "arch_mlp_top": "512-256-1"},
    {"synthetic_rows": rows(26, 40_000), "synthetic_zipf": 1.25, "cache_ratio": 0.03, "horizon": 96,
     "prefetch_depth": 2, "mini_batch_size": 3072, "arch_mlp_bot": "13-512-256-64-16", "arch_mlp_top": "512-256-1"},
    {"synthetic_rows": rows(26, 20_000), "synthetic_zipf": 0.5, "arch_sparse_feature_size": 24, "cache_ratio": 0.3,
     "horizon": 4, "mini_batch_size": 768, "optimizer": "adagrad"},
]  # fmt: skip


class Contestant:
    """One configuration: predicted from its ids, then trained in blocks."""

    def __init__(self, settings: dict[str, Any], batches: int, profile: Profile) -> None:
        self.settings = settings
        config = TrainConfig(**{**settings, "num_batches": batches, "seed": 7})
        self.predicted = self._predict(config, profile)
        data = open_datasets(config, [])
        self.tables = build_tables(config, data, [])
        self.model = build_model(config, data, self.tables, [])
        self.optimizer = torch.optim.SGD(self.model.dense_parameters(), lr=config.learning_rate)
        kept = list(data.train)
        self.stream: Iterator[Batch] = cdlrm.lookahead(
            self.model, kept, horizon=config.horizon, prefetch_depth=config.prefetch_depth
        )
        self.blocks: list[float] = []
        for _ in range(WARM):
            self._step()

    def _predict(self, config: TrainConfig, profile: Profile) -> Any:
        trace = SourceTrace(config)
        ids = read_ids(trace)
        slots = cache_size(config, trace.num_rows)
        depth = config.prefetch_depth
        resident = slots >= ids.rows
        traffic = everything_resident(ids) if resident else run_planner(ids, slots, config.horizon, depth)
        shape = shape_of(config, len(trace.names), 13)
        counted = traffic.moves(ids)[WARM - traffic.warm :] if WARM > traffic.warm else traffic.moves(ids)
        self.moves = {name: round(sum(getattr(m, name) for m in counted) / len(counted)) for name in counted[0]._fields}
        return predict(profile, shape, counted, depth, None if resident else traffic.cache_rows)

    def block(self, steps: int) -> None:
        for _ in range(UNCOUNTED):
            self._step()
        started = time.perf_counter()
        for _ in range(steps):
            self._step()
        self.blocks.append((time.perf_counter() - started) / steps)

    def _step(self) -> None:
        batch = next(self.stream)
        train_step(self.model, self.optimizer, batch.dense, batch, batch.labels)

    def result(self) -> dict[str, Any]:
        predicted, measured = self.predicted, min(self.blocks)
        settings = {**self.settings}
        if "synthetic_rows" in settings:
            sizes = settings["synthetic_rows"].split("-")
            settings["synthetic_rows"] = f"{len(sizes)} x {sizes[0]}"
        return {
            "settings": settings,
            "rows_a_batch": self.moves,
            "predicted_ms": round(1e3 * predicted.step_seconds, 2),
            "measured_ms": round(1e3 * measured, 2),
            "ratio": round(predicted.step_seconds / measured, 3),
            "limit": predicted.limit,
            "blocks_ms": [round(1e3 * seconds, 1) for seconds in self.blocks],
            "stages_ms": {stage.name: round(1e3 * stage.seconds, 2) for stage in predicted.stages},
        }

    def close(self) -> None:
        self.stream.close()  # type: ignore[attr-defined]
        self.tables.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=None, help="torch's (default: as torch chooses)")
    parser.add_argument("--profile", type=Path, help="of this machine; read if it exists, else calibrated and written")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.profile and options.profile.exists():
        profile = load_profile(str(options.profile))
    else:
        profile = calibrate()
        if options.profile:
            save_profile(profile, options.profile)
    batches = WARM + options.rounds * (options.steps + UNCOUNTED) + 4
    contestants = [Contestant(settings, batches, profile) for settings in CONFIGURATIONS]
    for number in range(options.rounds):
        for contestant in contestants[number % 10 :] + contestants[: number % 10]:
            time.sleep(REST_SECONDS)
            contestant.block(options.steps)
    results = [contestant.result() for contestant in contestants]
    for contestant in contestants:
        contestant.close()
    within = sum(abs(result["ratio"] - 1) <= WITHIN for result in results)
    line = {
        "bench": "model_accuracy", **circumstances(), "rounds": options.rounds, "within_20_percent": within,
        "of": len(results), "bound": OF_TEN, "results": results,
    }  # fmt: skip
    for result in results:
        print(
            f"{result['predicted_ms']:8.1f} {result['measured_ms']:8.1f} {result['ratio']:7.3f}  {result['settings']}"
        )
    print(f"{within} of {len(results)} within {WITHIN:.0%} (asked: {OF_TEN})")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
