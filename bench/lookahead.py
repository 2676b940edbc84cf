"""Does look-ahead ever hurt?  A training step with it against one that fetches on demand, in turns.

A collection of 8 tables (row-wise Adagrad, dim 32) with a small MLP behind it is trained twice on the same batches:
through `cdlrm.lookahead`, and without, where each forward call fetches.  Chunks of steps take turns; a pause before
each lets the look-ahead fill its window, so that in a chunk it reads, plans and copies one batch a step, no more and
no fewer.  Uniform random ids have no reuse to speak of; Zipf 1.05 has.  The cache holds 4 batches' distinct rows.
Run `python bench/lookahead.py`; one JSON line a case is appended to bench/results/lookahead.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `cdlrm train` does, and before torch is loaded

import numpy as np
import torch
from planning import machine

import cdlrm

TABLES, ROWS, DIM = 8, 400_000, 32
RESULTS = Path(__file__).resolve().parent / "results" / "lookahead.jsonl"


def make_batches(zipf: float, samples: int, count: int) -> list[dict[str, torch.Tensor]]:
    rng = np.random.default_rng(0)
    cdf = np.cumsum(np.arange(1, ROWS + 1, dtype=np.float64) ** -zipf)
    cdf /= cdf[-1]
    batches = []
    for _ in range(count):
        ranks = np.searchsorted(cdf, rng.random((TABLES, samples)))
        ids = torch.from_numpy(ranks * 387_420_489 % ROWS)  # a multiplier coprime to ROWS scatters popular rows
        batches.append({f"t{t}": ids[t].contiguous() for t in range(TABLES)})
    return batches


class Model:
    """A collection, an MLP, and a step."""

    def __init__(self, cache_rows: int, hidden: int) -> None:
        torch.manual_seed(0)
        tables = [cdlrm.Table(f"t{t}", ROWS, DIM) for t in range(TABLES)]
        self.tables = cdlrm.EmbeddingBagCollection(
            tables, optimizer=cdlrm.RowWiseAdagrad(lr=0.05), cache_rows=cache_rows, device="cpu", seed=0
        )
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(TABLES * DIM, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1)
        )
        self.dense = torch.optim.SGD(self.mlp.parameters(), lr=0.01)

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        out = self.tables(batch)
        loss = self.mlp(out.reshape(len(out), -1)).square().mean()
        self.dense.zero_grad()
        loss.backward()
        self.dense.step()


def chunk(model: Model, source: Iterator[Any], steps: int) -> float:
    """Seconds a step, fetching the batch included."""
    begun = time.perf_counter()
    for _ in range(steps):  # not `islice`, whose iter() would start the look-ahead anew
        model.step(next(source))
    return (time.perf_counter() - begun) / steps


def run(name: str, zipf: float, args: argparse.Namespace) -> dict[str, object]:
    batches = make_batches(zipf, args.samples, 200)
    distinct = sum(int(ids.unique().numel()) for ids in batches[0].values())
    on_demand, ahead = (Model(4 * distinct, args.hidden) for _ in range(2))
    plain: Iterator[Any] = itertools.cycle(batches)
    looking = iter(cdlrm.lookahead(ahead.tables, itertools.cycle(batches)))
    seconds: list[tuple[float, float]] = []
    for turn in range(args.chunks + 2):
        times = []
        for model, source in ((on_demand, plain), (ahead, looking)):
            time.sleep(args.pause)
            times.append(chunk(model, source, args.steps if turn > 1 else 40))
        if turn > 1:  # the first two warm up: compile, fill the cache
            seconds.append((times[0], times[1]))
    stats, looked = ahead.tables.stats(), looking.stats()
    fills = [model.tables.stats()["fills"] for model in (on_demand, ahead)]
    looking.close()
    on_demand.tables.close()
    ahead.tables.close()
    ms = 1e3 * np.array(seconds)
    return {
        "bench": "lookahead", "ids": name, "samples": args.samples, "lookups": TABLES * args.samples,
        "distinct": distinct, "cache_rows": stats["cache_rows"], "horizon": looked["horizon"],
        "hidden": args.hidden, "chunks": args.chunks, "steps_a_chunk": args.steps,
        "torch_threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 1),
        "short_windows": looked["short_windows"], "fills_on_demand": fills[0], "fills_ahead": fills[1],
        "on_demand_ms_min": round(float(ms[:, 0].min()), 3), "ahead_ms_min": round(float(ms[:, 1].min()), 3),
        "on_demand_ms_median": round(float(np.median(ms[:, 0])), 3),
        "ahead_ms_median": round(float(np.median(ms[:, 1])), 3),
        "ahead_over_on_demand_min": round(float(ms[:, 1].min() / ms[:, 0].min()), 3),
        "ahead_over_on_demand_median": round(float(np.median(ms[:, 1]) / np.median(ms[:, 0])), 3),
        "ahead_over_on_demand_paired": round(float(np.median(ms[:, 1] / ms[:, 0])), 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10, help="steps a chunk")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds before a chunk")
    args = parser.parse_args()
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    about = machine()
    for name, zipf in (("uniform", 0.0), ("zipf 1.05", 1.05)):
        line = json.dumps(about | run(name, zipf, args))
        print(line, flush=True)
        with RESULTS.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
