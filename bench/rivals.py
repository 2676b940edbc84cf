"""Rows moved by other caches' rules and by ours, in one run on the same ids; and step times.

Traces and cache sizes are those of `policies.py`: Zipf 0.8, 1.05, 1.2; Zipf 1.05 where 40 % of the lookups are redrawn
from the last 16 batches; the real sample where it is given; caches of 2, 4, 8 and 16 times a batch's distinct rows.
The rules and their sources are in `rules/`, one a file.

    python bench/rivals.py [--data '../shared/data/criteo_tb_orc/*.orc'] [--report]    (rows moved)
    python bench/rivals.py --steps [--rounds 9]                                        (step times on this machine)

JSON lines are appended to bench/results/rivals.jsonl; `--report` writes the newest run's table and plot (rivals.svg)
into bench/README.md, between its two marks.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `cdlrm train` does, and before torch is loaded

import numpy as np  # noqa: E402
from planning import machine  # noqa: E402
from policies import SAMPLES, TIMES, Made  # noqa: E402
from rules import (  # noqa: E402
    bagpipe,
    cdlrm_window,
    colossal_lfu,
    colossal_static,
    lfu,
    library,
    lru,
    optimal,
    ours,
    s3fifo,
    scratchpipe,
    sieve,
    wtinylfu,
)
from rules.base import Moved, Uses  # noqa: E402

from cdlrm.config import TrainConfig  # noqa: E402
from cdlrm.simulate.trace import SourceTrace  # noqa: E402

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "rivals.jsonl"

Rule = Callable[[Uses, int], Moved]
RULES: dict[str, Rule] = {
    "MIN(0)": lambda uses, slots: optimal.moved(uses, slots, 0),
    "MIN(1)": lambda uses, slots: optimal.moved(uses, slots, 1),
    "ours, horizon 32": lambda uses, slots: ours.moved(uses, slots, 32),
    "ours, horizon auto": lambda uses, slots: ours.moved(uses, slots, ours.auto_horizon(uses, slots)),
    "BagPipe": bagpipe.moved,
    "BagPipe, depth 0": lambda uses, slots: bagpipe.moved(uses, slots, 0),
    "ScratchPipe": scratchpipe.moved,
    "cDLRM": cdlrm_window.moved,
    "LRU": lru.moved,
    "LFU": lfu.moved,
    "ColossalAI, static": colossal_static.moved,
    "ColossalAI, LFU": colossal_lfu.moved,
    "SIEVE": sieve.moved,
    "S3-FIFO": s3fifo.moved,
    "W-TinyLFU": wtinylfu.moved,
}


def compare(name: str, uses: Uses) -> list[dict[str, Any]]:
    """One line for each cache size and rule."""
    rules = dict(RULES)
    if library.available():
        for rule in library.NAMES:
            rules[f"libcachesim {rule}"] = lambda uses, slots, rule=rule: library.moved(uses, slots, rule)
    distinct = int(np.mean([rows.size for rows in uses.batches]))
    lines = []
    for times in TIMES:
        slots = times * distinct
        found = {rule: moved(uses, slots) for rule, moved in rules.items()}
        for rule, moved in found.items():
            lines.append({
                "bench": "rivals", "trace": name, "times_distinct": times, "cache_rows": slots,
                "batches": len(uses.batches), "distinct": sum(rows.size for rows in uses.batches),
                "rows_touched": uses.rows, "rule": rule, "fills": moved.fills, "evicts": moved.evicts,
                "fills_over_min0": round(moved.fills / found["MIN(0)"].fills, 4), **moved.said,
            })  # fmt: skip
    return lines


def traces(data: list[str] | None) -> dict[str, Callable[[], Uses]]:
    def made(zipf: float, reuse: float = 0.0) -> Callable[[], Uses]:
        return lambda: Uses.of(batch.rows for batch in Made(zipf, reuse))

    found = {f"zipf {a}": made(a) for a in (0.8, 1.05, 1.2)}
    found["zipf 1.05, 40 % reuse"] = made(1.05, 0.4)
    if data:
        config = TrainConfig(data=data, mini_batch_size=SAMPLES, test_fraction=0.0)
        found["real sample"] = lambda: Uses.of(batch.rows for batch in SourceTrace(config))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", help="files of the real sample; without: that trace is left out")
    parser.add_argument("--steps", action="store_true", help="measure step times instead")
    parser.add_argument("--rounds", type=int, default=9, help="of --steps, the first warms up (default: 9)")
    parser.add_argument("--report", action="store_true", help="afterwards write bench/README.md and rivals.svg")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: must be 2 or more, since the first one warms up.")
    about = machine()
    with RESULTS.open("a") as stream:
        if args.steps:
            from rivals_steps import measure

            for line in measure(args.rounds):
                stream.write(json.dumps({**about, **line}) + "\n")
                print(json.dumps(line), flush=True)
        else:
            for name, uses in traces(args.data).items():
                for line in compare(name, uses()):
                    stream.write(json.dumps({**about, **line}) + "\n")
                    print(f"{name}, {line['times_distinct']}x: {line['rule']} {line['fills_over_min0']}", flush=True)
    if not args.data and not args.steps:
        print("the real sample was left out: give its files with --data")
    if args.report:
        from rivals_report import write

        write(RESULTS, HERE)


if __name__ == "__main__":
    main()
