"""The whole embedding step with all rows resident, against the fastest of three rivals.

Step: ids in, pooled lookup, gradient in, dedupe, update of the touched rows.  26 tables x 100,000 rows x dim 64,
batch 2048, uniform and Zipf(1.05) ids, 1 and 10 ids a bag, SGD and row-wise Adagrad, two threads each.

Rivals (each spared what it does not need: ids merged beforehand, outputs not concatenated):
  fbgemm   FBGEMM's CPU table-batched embedding with its fused optimizer (`pip install --no-deps
           fbgemm-gpu-cpu==1.8.0` beside torch 2.13.0); left out, and said so, where it does not import
  bags     26 x nn.EmbeddingBag(sparse=True) and one torch optimizer
  merged   one nn.EmbeddingBag(sparse=True) over all rows and a torch optimizer
torch has no row-wise Adagrad; its Adagrad stands in.  `--optimizers adagrad adam` measures these two (Adam is
torch's SparseAdam, and FBGEMM has none on the CPU).  The contestants take turns in one process, a few steps each.

    python bench/embedding_step.py [--rounds 8] [--out bench/results/embedding_step.jsonl]
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TABLES, ROWS, DIM, BATCH = 26, 100_000, 64, 2048
BATCHES = 8  # distinct batches that a contestant cycles through
LR = 0.01
REST = 0.03  # seconds before each block: OpenMP threads spin for some ms after their work, on the next one's core
BLOCK, UNCOUNTED = 6, 2  # steps in a row, as in training; the first ones wake threads and fill caches
Step = Callable[[int], None]


def draw_ids(kind: str, per_bag: int, seed: int) -> list[list[torch.Tensor]]:
    """int64 [BATCH * per_bag] for each batch and table."""
    rng = np.random.default_rng(seed)
    weight = np.cumsum(1.0 / np.arange(1, ROWS + 1) ** 1.05)
    scatter = [rng.permutation(ROWS) for _ in range(TABLES)]

    def one(table: int) -> torch.Tensor:
        size = BATCH * per_bag
        if kind == "uniform":
            return torch.from_numpy(rng.integers(0, ROWS, size))
        rank = np.searchsorted(weight, rng.random(size) * weight[-1])
        return torch.from_numpy(scatter[table][np.minimum(rank, ROWS - 1)])

    return [[one(table) for table in range(TABLES)] for _ in range(BATCHES)]


def offsets_of(per_bag: int, bags: int) -> torch.Tensor:
    return torch.arange(bags + 1, dtype=torch.int64) * per_bag


def ours(ids: list[list[torch.Tensor]], per_bag: int, optimizer: str, grad: torch.Tensor) -> Step:
    import cdlrm

    tables = [cdlrm.Table(f"t{t}", ROWS, DIM) for t in range(TABLES)]
    spec = {
        "sgd": cdlrm.SGD, "rowwise_adagrad": cdlrm.RowWiseAdagrad, "adagrad": cdlrm.Adagrad, "adam": cdlrm.Adam,
    }[optimizer](lr=LR)  # fmt: skip
    module = cdlrm.EmbeddingBagCollection(tables, optimizer=spec, cache_rows="auto", device="cpu", seed=0)
    offsets = None if per_bag == 1 else offsets_of(per_bag, BATCH)
    batches = [{f"t{t}": (values, offsets) for t, values in enumerate(batch)} for batch in ids]

    def step(k: int) -> None:
        module(batches[k % BATCHES]).backward(grad)

    return step


def fbgemm(ids: list[list[torch.Tensor]], per_bag: int, optimizer: str, grad: torch.Tensor) -> Step:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        optimizer={
            "sgd": EmbOptimType.EXACT_SGD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
        }[optimizer],
        learning_rate=LR,
        eps=1e-8,
    )
    module.init_embedding_weights_uniform(-0.003, 0.003)
    batches = [torch.cat(batch) for batch in ids]
    offsets = offsets_of(per_bag, BATCH * TABLES)
    flat = grad.reshape(BATCH, TABLES * DIM)

    def step(k: int) -> None:
        module(batches[k % BATCHES], offsets).backward(flat)

    return step


def torch_optimizer(optimizer: str, parameters: Any) -> torch.optim.Optimizer:
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.SparseAdam}
    return kinds.get(optimizer, torch.optim.Adagrad)(parameters, lr=LR)


def new_bag(rows: int) -> torch.nn.EmbeddingBag:
    bag = torch.nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True, _weight=torch.empty(rows, DIM))
    torch.nn.init.uniform_(bag.weight, -0.003, 0.003)
    return bag


def bags(ids: list[list[torch.Tensor]], per_bag: int, optimizer: str, grad: torch.Tensor) -> Step:
    modules = [new_bag(ROWS) for _ in range(TABLES)]
    update = torch_optimizer(optimizer, [module.weight for module in modules])
    offsets = offsets_of(per_bag, BATCH)[:-1]
    grads = [grad[:, t].contiguous() for t in range(TABLES)]

    def step(k: int) -> None:
        update.zero_grad()
        outs = [module(values, offsets) for module, values in zip(modules, ids[k % BATCHES], strict=True)]
        torch.autograd.backward(outs, grads)
        update.step()

    return step


def merged(ids: list[list[torch.Tensor]], per_bag: int, optimizer: str, grad: torch.Tensor) -> Step:
    module = new_bag(TABLES * ROWS)
    update = torch_optimizer(optimizer, [module.weight])
    batches = [torch.cat([values + t * ROWS for t, values in enumerate(batch)]) for batch in ids]
    offsets = offsets_of(per_bag, BATCH * TABLES)[:-1]
    flat = grad.transpose(0, 1).reshape(TABLES * BATCH, DIM).contiguous()

    def step(k: int) -> None:
        update.zero_grad()
        module(batches[k % BATCHES], offsets).backward(flat)
        update.step()

    return step


CONTESTANTS = {"cdlrm": ours, "fbgemm": fbgemm, "bags": bags, "merged": merged}


def measure(kind: str, per_bag: int, optimizer: str, rounds: int, names: list[str]) -> dict[str, list[float]]:
    """Milliseconds of every step of every contestant, taking turns."""
    ids = draw_ids(kind, per_bag, seed=per_bag)
    grad = torch.randn(BATCH, TABLES, DIM, generator=torch.Generator().manual_seed(0)) * 1e-3
    steps = {name: CONTESTANTS[name](ids, per_bag, optimizer, grad) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name, step in steps.items():
            time.sleep(REST)
            for k in range(BLOCK):
                begin = time.perf_counter()
                step(number * BLOCK + k)
                if number >= 1 and k >= UNCOUNTED:
                    times[name].append((time.perf_counter() - begin) * 1e3)
    return times


def summarise(times: dict[str, list[float]]) -> dict[str, Any]:
    median = {name: statistics.median(each) for name, each in times.items()}
    low = {name: min(each) for name, each in times.items()}
    result: dict[str, Any] = {
        "median_ms": {name: round(value, 3) for name, value in median.items()},
        "min_ms": {name: round(value, 3) for name, value in low.items()},
    }
    rivals = [name for name in times if name != "cdlrm"]
    if rivals and "cdlrm" in times:
        fastest = min(rivals, key=lambda name: median[name])
        result["fastest_rival"] = fastest
        result["ratio_of_medians"] = round(median[fastest] / median["cdlrm"], 3)
        result["ratio_of_minima"] = round(min(low[name] for name in rivals) / low["cdlrm"], 3)
    return result


def about_machine(threads: int) -> dict[str, Any]:
    def first(command: list[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
        return done.stdout.strip()

    processor = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), platform.machine())  # fmt: skip
    return {
        "commit": first(["git", "rev-parse", "--short=12", "HEAD"]),
        "changed": bool(first(["git", "status", "--porcelain", "--untracked-files=no"])),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{processor}, {threads} threads, torch {torch.__version__}",
    }


OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")


def settings(optimizers: list[str]) -> Iterator[tuple[str, int, str]]:
    for optimizer in optimizers:
        for kind in ("uniform", "zipf"):
            for per_bag in (1, 10):
                yield kind, per_bag, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, help="turns of each contestant, of 4 measured steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--optimizers", nargs="*", choices=OPTIMIZERS, default=list(OPTIMIZERS[:2]))
    parser.add_argument("--out", type=Path, default=None, help="append JSON lines to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = list(arguments.only)
    if "fbgemm" in names:
        try:
            import fbgemm_gpu  # noqa: F401
        except (ImportError, OSError) as error:
            names.remove("fbgemm")
            print(f"fbgemm is left out: {error}", file=sys.stderr)
    for kind, per_bag, optimizer in settings(arguments.optimizers):
        able = [name for name in names if name != "fbgemm" or optimizer != "adam"]
        load = os.getloadavg()[0]  # of others, before
        times = measure(kind, per_bag, optimizer, arguments.rounds, able)
        line = {"bench": "embedding_step", "ids": kind, "per_bag": per_bag, "optimizer": optimizer,
                **summarise(times), "load_before": round(load, 2), **about_machine(arguments.threads)}  # fmt: skip
        print(json.dumps(line), flush=True)
        if arguments.out is not None:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
