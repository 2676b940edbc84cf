"""Speed of `cdlrm simulate`: lookups a second and core, for one configuration and for whole grids, on a recorded trace.

Reading the trace, deduplication and simulation count; CPU seconds are those of the process, so that what else runs on
the machine matters less.  Run `python bench/simulate.py`; JSON lines are appended to bench/results/simulate.jsonl.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from planning import ROWS, TABLES, machine, zipf_ids

from cdlrm.simulate.grid import Grid, simulate
from cdlrm.simulate.trace import BatchRows, FileTrace, Recorder, Trace

RESULTS = Path(__file__).resolve().parent / "results" / "simulate.jsonl"


class Shape(Trace):
    names = [f"t{i}" for i in range(TABLES)]
    table_rows = [ROWS] * TABLES


def record(file: str, samples: int, zipf: float, batches: int) -> None:
    rng, recorder = np.random.default_rng(0), Recorder(file, Shape())
    for _ in range(batches):
        recorder.add(BatchRows(zipf_ids(rng, samples, zipf), 0))
    recorder.close()


def measure(file: str, grid: Grid, workers: int) -> tuple[float, float, int, int]:
    """Wall and CPU seconds, lookups, configurations."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = simulate(FileTrace(file), grid, workers=workers)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall, cpu, found.summary["lookups"], len(found.results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    sizes = [int(n) for n in np.geomspace(100_000, 2_600_000, 16)]
    about = machine()
    with tempfile.TemporaryDirectory() as folder:
        for samples, zipf, batches in [(2048, 1.15, 400), (16_384, 1.05, 60)]:
            file = f"{folder}/trace.parquet"
            record(file, samples, zipf, batches)
            grids = {
                "one look-ahead cache, horizon 32": Grid(cache_rows=[500_000], horizon=[32], policy=["lru"]),
                "one MIN(0)": Grid(cache_rows=[500_000], prefetch_depth=[0], policy=["min"]),
                "MIN(0) at 16 sizes": Grid(cache_rows=sizes, prefetch_depth=[0], policy=["min"]),
                "16 sizes x 3 horizons": Grid(cache_rows=sizes, horizon=[1, 8, 32], policy=["lru"]),
            }
            for name, grid in grids.items():
                runs = [measure(file, grid, 1) for _ in range(args.repeats if "one" in name else 1)]
                wall, cpu, lookups, configurations = min(runs, key=lambda run: run[1])
                line = {
                    **about, "bench": "simulate", "grid": name, "configurations": configurations, "samples": samples,
                    "zipf": zipf, "batches": batches, "lookups": lookups, "wall_seconds": round(wall, 2),
                    "cpu_seconds": round(cpu, 2), "million_lookups_per_cpu_second": round(lookups / cpu / 1e6, 2),
                    "cpu_ns_per_lookup_and_configuration": round(cpu / lookups / configurations * 1e9, 1),
                }  # fmt: skip
                print(json.dumps(line), flush=True)
                with RESULTS.open("a") as stream:
                    stream.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
