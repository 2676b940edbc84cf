"""First touches: initial values generated in the cache, against copies from tables that were written before training.

A row that was never trained is not stored: its initial value is a function of its number and is generated where it is
needed.  The rival's store holds all initial values already, as when a table is loaded (every row counts as trained), so
each first touch is a copy; writing them is a start-up cost of its own (`seconds_before`, `store_bytes_before`).  Both
train the embeddings on one epoch of the real sample ($CDLRM_DATA or ../shared/data/criteo_tb_orc, 80,000 rows of the
Criteo 1TB logs), with a gradient of ones; reader, planner, transfer and trainer take turns in one thread, so that
seconds of the transfer are those of nothing else.  Both end with the same tables, which is checked.  Rounds alternate;
the least of each figure is kept.

On the CPU device a copy crosses no link; what a link would have carried is given as bytes, and as milliseconds by the
profiles of `cdlrm plan` (predicted: not run on a GPU).

    python bench/first_touches.py [--rounds 5] [--batch-size 2048] [--out bench/results/first_touches.jsonl]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from dlrm_step import circumstances  # noqa: E402

import cdlrm  # noqa: E402
from cdlrm.ahead import Lookahead  # noqa: E402
from cdlrm.assemble import build_tables  # noqa: E402
from cdlrm.config import TrainConfig  # noqa: E402
from cdlrm.data import Batch  # noqa: E402
from cdlrm.datasets import Datasets, open_datasets  # noqa: E402
from cdlrm.sizing.model import fill_seconds, padded  # noqa: E402
from cdlrm.sizing.profiles import GPUS  # noqa: E402

PIECE_ROWS = 1 << 16


def sample() -> Path:
    root = Path(os.environ.get("CDLRM_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    folder = root / "criteo_tb_orc"
    if not folder.is_dir():
        raise SystemExit(f"error: {folder}: the real sample is not here; set CDLRM_DATA.")
    return folder


def write_initial_values(tables: cdlrm.EmbeddingBagCollection) -> None:
    """Every row of the store holds its initial value and counts as trained."""
    store = tables.groups[0].store
    for lo in range(0, store.num_rows, PIECE_ROWS):
        weight, state = store.get(lo, min(lo + PIECE_ROWS, store.num_rows))
        store.put(lo, weight, state)


def epoch(config: TrainConfig, data: Datasets, batches: list[Batch], written: bool) -> tuple[dict[str, Any], str]:
    """Figures of one epoch on fresh tables, and a digest of the tables afterwards."""
    import hashlib

    tables = build_tables(config, data, [])
    group = tables.groups[0]
    started = time.perf_counter()
    if written:
        write_initial_values(tables)
    before = time.perf_counter() - started
    grad = torch.ones(batches[0].size, len(data.features), config.arch_sparse_feature_size)
    started = time.perf_counter()
    with_turns = Lookahead(tables, batches, horizon=config.horizon, prefetch_depth=1, threads=False)
    for batch in with_turns:
        tables(batch).backward(grad[: batch.size])
    seconds = time.perf_counter() - started
    stats = tables.stats()
    tables.flush()
    digest = hashlib.sha256()
    for lo in range(0, group.num_rows, PIECE_ROWS):
        for part in group.store.get(lo, min(lo + PIECE_ROWS, group.num_rows)):
            digest.update(np.ascontiguousarray(part))
    tables.close()
    names = ("steps", "distinct", "fills", "fills_copied", "fills_initialised", "bytes_filled", "seconds_transfer")
    figures = {name: stats[name] for name in names}
    figures |= {"seconds_epoch": seconds, "seconds_before": before}
    figures["store_bytes_before"] = group.num_rows * group.store.record_bytes if written else 0
    return figures, digest.hexdigest()


def compare(config: TrainConfig, rounds: int) -> dict[str, Any]:
    data = open_datasets(config, [])
    batches = list(data.train)
    kinds = {"generated": False, "copied": True}
    best: dict[str, dict[str, Any]] = {}
    digests = set()
    for number in range(rounds + 1):  # the first compiles
        for name, written in kinds.items() if number % 2 else reversed(kinds.items()):
            figures, digest = epoch(config, data, batches, written)
            digests.add(digest)
            if number == 0:
                continue
            known = best.setdefault(name, figures)
            for key in ("seconds_transfer", "seconds_epoch", "seconds_before"):
                known[key] = min(known[key], figures[key])
    if len(digests) != 1:
        raise SystemExit("error: the tables differ.")
    ours, rival = best["generated"], best["copied"]
    saved = rival["bytes_filled"] - ours["bytes_filled"]
    record = rival["bytes_filled"] // rival["fills_copied"]
    return {
        "dim": config.arch_sparse_feature_size,
        "optimizer": config.optimizer,
        "cache_rows": config.cache_rows,
        "batch_size": config.mini_batch_size,
        "record_bytes": record,
        **best,
        "bytes_saved": saved,
        "share_of_bytes_saved": round(saved / rival["bytes_filled"], 4),
        "transfer_seconds_ratio": round(ours["seconds_transfer"] / rival["seconds_transfer"], 3),
        "epoch_seconds_ratio": round(ours["seconds_epoch"] / rival["seconds_epoch"], 3),
        "link_ms_saved_predicted": {
            name: round(1e3 * fill_seconds(GPUS[name], padded(record), saved / record)[0], 3)
            for name in ("t4", "rtx4090", "h100")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--table-rows", default="131072")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    files = str(sample() / "*.orc")
    for dim, cache_rows in ((16, 20_000), (16, 60_000), (64, 20_000), (64, 60_000)):
        config = TrainConfig(
            data=[files], table_rows=options.table_rows, mini_batch_size=options.batch_size, test_fraction=0.0,
            arch_sparse_feature_size=dim, cache_rows=cache_rows,
        )  # fmt: skip
        result = compare(config, options.rounds)
        line = {"bench": "first_touches", **circumstances(), "rounds": options.rounds, **result}
        print(json.dumps(line, indent=1))
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
