"""Which rule should choose among rows without a known use?  Fills against MIN(1), in the simulator, depth 1.

Traces: Zipf 0.8, 1.05, 1.2; Zipf 1.05 where 40 % of the lookups are redrawn from the last 16 batches, and that with
drifting popularity (--enough); and the real sample where it is given (--data 'DIR/*.orc').  Caches of 2, 4, 8 and 16
times a batch's distinct rows (--enough: 4 to 32).  Every policy sees the same ids.  Run `python bench/policies.py
--data …`; JSON lines are appended to bench/results/policies.jsonl.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from planning import machine

from cdlrm.config import TrainConfig
from cdlrm.horizon import horizon_for
from cdlrm.simulate.caches import Cache, LookAheadCache, MinCache
from cdlrm.simulate.grid import simulate_caches
from cdlrm.simulate.policies import PolicyCache
from cdlrm.simulate.trace import BatchRows, SourceTrace, Trace

TABLES, ROWS, SAMPLES, BATCHES = 26, 100_000, 128, 400
TIMES = (2, 4, 8, 16)
HORIZONS = (1, 8, 32, 128, 300)
HALF_LIVES = (16, 64)
ENOUGH_TIMES, FACTORS = (4, 8, 16, 24, 32), (4, 8, 12, 16, 20, 24, 32)
RESULTS = Path(__file__).resolve().parent / "results" / "policies.jsonl"


class Made(Trace):
    """Zipf ids; `reuse`: share of the lookups that are redrawn from the last 16 batches of their table; `drift`: ranks
    by which popularity moves on a batch."""

    def __init__(self, zipf: float, reuse: float = 0.0, drift: int = 0, batches: int = BATCHES) -> None:
        self.reuse, self.drift = reuse, drift
        self.names, self.table_rows, self.batches = [f"t{i}" for i in range(TABLES)], [ROWS] * TABLES, batches
        self.cdf = np.cumsum(np.arange(1, ROWS + 1, dtype=np.float64) ** -zipf)
        self.cdf /= self.cdf[-1]

    def __iter__(self) -> Iterator[BatchRows]:
        rng = np.random.default_rng(0)
        base = (np.arange(TABLES) * ROWS)[:, None]
        past: list[np.ndarray] = []
        assert self.batches is not None
        for b in range(self.batches):
            rank = np.searchsorted(self.cdf, rng.random((TABLES, SAMPLES))) + self.drift * b
            rows = rank * 38_561 % ROWS + base  # a multiplier coprime to ROWS scatters the popular rows
            if past and self.reuse:
                old = np.stack(past)[rng.integers(0, len(past), rows.shape), np.arange(TABLES)[:, None],
                                     rng.integers(0, SAMPLES, rows.shape)]  # fmt: skip
                rows = np.where(rng.random(rows.shape) < self.reuse, old, rows)
            past = [*past[-15:], rows]
            yield BatchRows(rows.reshape(-1), 0)


def compare(name: str, trace: Trace, auto: bool = False) -> list[dict[str, object]]:
    """Every policy at every horizon; `auto`: at the one that `horizon="auto"` chooses."""
    sizes = [np.unique(batch.rows).size for batch in trace]
    distinct = int(np.mean(sizes))
    lines: list[dict[str, object]] = []
    tables = len(trace.table_rows)
    for times in TIMES:
        rows = times * distinct
        least = MinCache(rows, (0, 1))
        caches: list[tuple[str, int, Cache]] = []
        horizons = (horizon_for(rows, distinct),) if auto else HORIZONS
        for horizon in horizons:
            caches.append(("lru", horizon, LookAheadCache(rows, horizon, 1, tables)))
            caches += [(p, horizon, PolicyCache(p, rows, horizon, 1, tables)) for p in ("frequency", "s3fifo")]
            caches += [
                (f"lfu, half-life {half}", horizon, PolicyCache("lfu", rows, horizon, 1, tables, half))
                for half in HALF_LIVES
            ]
        passed = simulate_caches(trace, [least, *(cache for *_, cache in caches)], max(horizons), 1)
        for policy, horizon, cache in caches:
            lines.append(
                {
                    "bench": "policies_auto" if auto else "policies",
                    "trace": name, "policy": policy, "horizon": horizon, "times_distinct": times,
                    "cache_rows": rows, "batches": passed.uses.scanned, "distinct": passed.uses.distinct,
                    "rows_touched": passed.uses.known, "fills": cache.results()[0]["fills"],
                    "min0_fills": least.counter.fills_at(0), "mind_fills": least.counter.fills_at(1),
                }
            )  # fmt: skip
    return lines


def enough(name: str, trace: Trace) -> list[dict[str, object]]:
    """Fills of LRU beyond the horizon over MIN(1), for horizons of some batches for each time that the cache holds a
    batch's distinct rows (what `cdlrm.horizon.BATCHES_PER_SHARE` is chosen from)."""
    distinct = int(np.mean([np.unique(batch.rows).size for batch in trace]))
    lines: list[dict[str, object]] = []
    for times in ENOUGH_TIMES:
        least = MinCache(times * distinct, (0, 1))
        ahead = [LookAheadCache(times * distinct, f * times, 1, len(trace.table_rows)) for f in FACTORS]
        passed = simulate_caches(trace, [least, *ahead], max(FACTORS) * times, 1)
        over = [cache.results()[0]["fills"] / least.counter.fills_at(1) for cache in ahead]
        ratios = {str(f): round(ratio, 4) for f, ratio in zip(FACTORS, over, strict=True)}
        lines.append({"bench": "enough_factor", "trace": name, "batches": passed.uses.scanned, "times_distinct": times,
                      "fills_over_min1_by_factor": ratios})  # fmt: skip
    return lines


def summary(lines: list[dict]) -> str:
    """Geometric mean and worst of fills / MIN(1), by policy and horizon."""
    out = [f"{'policy':<22}" + "".join(f"{'h=' + str(h):>16}" for h in HORIZONS) + f"{'all':>16}"]
    for policy in dict.fromkeys(line["policy"] for line in lines):
        cells = []
        for horizon in (*HORIZONS, None):
            mine = [x["fills"] / x["mind_fills"] for x in lines
                    if x["policy"] == policy and horizon in (None, x["horizon"])]  # fmt: skip
            cells.append(f"{np.exp(np.mean(np.log(mine))):>8.4f}{max(mine):>8.4f}")
        out.append(f"{policy:<22}" + "".join(cells))
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="+", help="files of the real sample")
    parser.add_argument("--auto", action="store_true", help="only the horizon that horizon=\"auto\" chooses")
    parser.add_argument("--enough", action="store_true", help="instead: fills by horizon / cache size")
    parser.add_argument("--batches", type=int, default=BATCHES, help=f"of a made trace (default: {BATCHES})")
    args = parser.parse_args()
    traces: dict[str, Trace] = {f"zipf {a}": Made(a, batches=args.batches) for a in (0.8, 1.05, 1.2)}
    traces["zipf 1.05, 40 % reuse"] = Made(1.05, 0.4, batches=args.batches)
    if args.enough:
        traces["zipf 1.05, 40 % reuse, drift"] = Made(1.05, 0.4, 40, batches=args.batches)
    if args.data:
        traces["real sample"] = SourceTrace(TrainConfig(data=args.data, mini_batch_size=SAMPLES, test_fraction=0.0))
    about, lines = machine(), []
    with RESULTS.open("a") as stream:
        for name, trace in traces.items():
            found = enough(name, trace) if args.enough else compare(name, trace, args.auto)
            lines += found
            for line in found:
                stream.write(json.dumps({**about, **line}) + "\n")
            stream.flush()
            if args.enough:
                rows = (f"  {x['times_distinct']}x: {x['fills_over_min1_by_factor']}" for x in found)
                print(name, *rows, sep="\n", flush=True)
                continue
            if args.auto:
                over = {(x["policy"], x["times_distinct"]): x["fills"] / x["mind_fills"] for x in found}
                print(name, *(f"  {p} at {t}x: {r:.4f}" for (p, t), r in over.items()), sep="\n", flush=True)
                continue
            print(f"{name}: geometric mean and worst of fills / MIN(1)\n{summary(found)}\n", flush=True)
    if not args.enough and not args.auto:
        print(f"all traces\n{summary(lines)}")


if __name__ == "__main__":
    main()
