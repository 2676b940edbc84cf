"""Part (b) of `device_check.py`: the workload that NVIDIA published for dynamicemb, with caches of several sizes.

10 tables of 26.8 million rows, dim 128, float32, SGD; 1,048,580 lookups a step, one a bag, ids by a power law of
exponent 1.05 (drawn as its continuous form, cut to whole numbers), about 433,700 distinct a step.  100 batches are
trained twice; the second pass is timed.  Ids are compacted to the rows that these batches use (about 19.6 million,
10 GB), and popular ones are scattered.

"Plans made ahead": all 200 plans exist before the first step, so a step holds copies, launches and the host's work to
issue them, but no planning; the planner's own speed is a figure beside it.  Published on an H100: FBGEMM 4.77 ms,
dynamicemb 20.8 ms a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from device_common import Setup

import cdlrm

EXPONENT, LR = 1.05, 0.01
PERCENTS = (80, 20, 10)  # of the footprint, beside 100 = resident
TARGET_MS, TARGET_PERCENT, TARGET_PLANNER = 1.5, 80, 0.4  # G lookups/s, on 16 cores


class Shape(NamedTuple):
    tables: int
    rows: int  # of a table, before compaction
    dim: int
    lookups: int  # of a table in a step
    batches: int


FULL = Shape(10, 26_800_000, 128, 104_858, 100)
SMALL = Shape(3, 20_000, 8, 60, 20)


class Workload(NamedTuple):
    shape: Shape
    footprint: list[int]  # rows of each table after compaction
    batches: list[dict[str, torch.Tensor]]  # int64 ids on the host
    distinct: float  # a step


def draw(shape: Shape, device: torch.device) -> Workload:
    """The batches' ids; drawn and compacted on `device`, a table at a time."""
    generator = torch.Generator(device).manual_seed(7)
    batches: list[dict[str, torch.Tensor]] = [{} for _ in range(shape.batches)]
    footprint, distinct = [], 0
    for t in range(shape.tables):
        uniform = torch.rand(shape.batches * shape.lookups, generator=generator, device=device, dtype=torch.float64)
        low = (shape.rows + 1.0) ** (1.0 - EXPONENT)
        rank = (1.0 - uniform * (1.0 - low)) ** (1.0 / (1.0 - EXPONENT))
        used, ids = torch.unique(rank.long().clamp_(1, shape.rows), return_inverse=True)
        scatter = torch.randperm(used.numel(), generator=generator, device=device)
        ids = scatter[ids].view(shape.batches, shape.lookups)
        distinct += sum(int(row.unique().numel()) for row in ids)
        footprint.append(used.numel())
        for batch, row in zip(batches, ids.cpu(), strict=True):
            batch[f"t{t}"] = row
    return Workload(shape, footprint, batches, distinct / shape.batches)


def plan_all(stream: cdlrm.Lookahead) -> float:
    """Scan and plan every batch of a `Lookahead(threads=False)` now; seconds that the planner took."""
    pipeline = iter(stream)._pipeline
    assert pipeline is not None
    reader, planner, _ = pipeline.stages
    seconds = 0.0
    while True:
        read = reader.step()
        started = time.perf_counter()
        planned = planner.step()
        seconds += time.perf_counter() - started
        if not read and not planned:
            return seconds


def train_cached(setup: Setup, work: Workload, percent: int) -> dict[str, Any]:
    """Milliseconds a step of the second pass, and the planner's lookups a second."""
    shape = work.shape
    tables = [cdlrm.Table(f"t{t}", rows, shape.dim) for t, rows in enumerate(work.footprint)]
    size: dict[str, Any] = {"cache_ratio": 1.0}
    if percent < 100:
        size = {"cache_rows": sum(work.footprint) * percent // 100}
    module = cdlrm.EmbeddingBagCollection(tables, optimizer=cdlrm.SGD(lr=LR), device=setup.device, seed=1, **size)
    twice = [*work.batches, *work.batches]
    stream = cdlrm.Lookahead(
        module, twice, horizon=len(twice), prefetch_depth=1, window_bytes=1 << 40, threads=False
    )  # fmt: skip
    planned = plan_all(stream)
    grad = torch.full((shape.lookups, shape.tables, shape.dim), 1e-3, device=setup.torch_device)

    def one_pass() -> None:
        for _ in work.batches:
            module(next(stream)).backward(grad)

    ms = _timed_passes(setup, one_pass) / shape.batches
    stream.close()
    stats = module.stats()
    module.close()
    lookups = len(twice) * shape.tables * shape.lookups
    return {
        "ms": ms, "planner_G_lookups_per_s": lookups / planned / 1e9,
        "fills_per_step": stats["fills"] / len(twice), "grows": stats["grows"],
    }  # fmt: skip


def _timed_passes(setup: Setup, one_pass: Callable[[], None]) -> float:
    """Milliseconds of the second of two passes, with all work on the device done at both ends."""
    one_pass()
    setup.synchronize()
    started = time.perf_counter()
    one_pass()
    setup.synchronize()
    return 1e3 * (time.perf_counter() - started)


def train_torch(setup: Setup, work: Workload) -> float:
    """One nn.EmbeddingBag over all rows, sparse gradients, torch's SGD; milliseconds a step."""
    shape, device = work.shape, setup.torch_device
    bag = torch.nn.EmbeddingBag(sum(work.footprint), shape.dim, mode="sum", sparse=True, device=device)
    optimizer = torch.optim.SGD(bag.parameters(), lr=LR)
    batches = [ids.to(device) for ids in _merged(work)]
    offsets = torch.arange(shape.tables * shape.lookups, device=device)
    grad = torch.full((shape.tables * shape.lookups, shape.dim), 1e-3, device=device)

    def one_pass() -> None:
        for ids in batches:
            optimizer.zero_grad(set_to_none=True)
            bag(ids, offsets).backward(grad)
            optimizer.step()

    return _timed_passes(setup, one_pass) / shape.batches


def train_fbgemm(setup: Setup, work: Workload) -> float:
    """FBGEMM's table-batched embedding on the device with its fused SGD.  Raises ImportError, OSError."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    shape, device = work.shape, setup.torch_device
    on_gpu = device.type == "cuda"
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, shape.dim, *place) for rows in work.footprint], optimizer=EmbOptimType.EXACT_SGD, learning_rate=LR
    )
    batches = [torch.cat(list(batch.values())).to(device) for batch in work.batches]
    offsets = torch.arange(shape.tables * shape.lookups + 1, device=device)
    grad = torch.full((shape.lookups, shape.tables * shape.dim), 1e-3, device=device)

    def one_pass() -> None:
        for ids in batches:
            module(ids, offsets).backward(grad)

    return _timed_passes(setup, one_pass) / shape.batches


def _merged(work: Workload) -> list[torch.Tensor]:
    """Ids of each batch in one row space, a table after the other."""
    bases = torch.tensor([0, *work.footprint]).cumsum(0).tolist()
    return [torch.cat([ids + bases[t] for t, ids in enumerate(batch.values())]) for batch in work.batches]


def fitting(shape: Shape, free_device: int, free_host: int) -> Shape:
    """The shape with fewer rows and lookups where 19.6 million records and the batches do not fit."""
    need = shape.tables * shape.rows * 0.075 * shape.dim * 4  # the footprint, as a share of the rows
    share = min(1.0, 0.8 * free_device / (need + (4 << 30)), 0.7 * free_host / (need + (8 << 30)))
    if shape is not FULL or share == 1.0:
        return shape
    return shape._replace(rows=int(shape.rows * share), lookups=int(shape.lookups * share))


def check(setup: Setup) -> None:
    report, wanted = setup.report, FULL if setup.full else SMALL
    shape = fitting(wanted, *setup.free_bytes())
    whole = shape == FULL  # else the target does not apply
    work = draw(shape, setup.torch_device)
    at: dict[str, Any] = {"shape": shape._asdict(), "as_published": whole}
    report.figure("b", "distinct rows a step", work.distinct, "rows", **at)
    report.figure("b", "footprint", sum(work.footprint), "rows", **at)
    planner = 0.0
    for percent in (TARGET_PERCENT, 100, *(p for p in PERCENTS if p != TARGET_PERCENT)):
        if setup.out_of_time("b", "step", 25 if setup.full else 0, cache_percent=percent, **at):
            continue
        found = train_cached(setup, work, percent)
        most = TARGET_MS if percent == TARGET_PERCENT and whole else None
        name = "step, resident" if percent == 100 else "step, cached, plans made ahead"
        report.figure("b", name, found["ms"], "ms", most=most, cache_percent=percent, **found, **at)
        planner = max(planner, found["planner_G_lookups_per_s"]) if percent < 100 else planner
    if planner:
        least = TARGET_PLANNER if whole and report.circumstances["cores"] >= 16 else None
        report.figure("b", "planner, fastest of the caches", planner, "G lookups/s", least=least, **at)
    for name, rival in (("torch.nn.EmbeddingBag", train_torch), ("FBGEMM", train_fbgemm)):
        if setup.out_of_time("b", f"step, {name}", 10 if setup.full else 0, **at):
            continue
        try:
            report.figure("b", f"step, {name}", rival(setup, work), "ms", **at)
        except (ImportError, OSError, torch.OutOfMemoryError) as error:
            report.left_out("b", f"step, {name}", f"{type(error).__name__}: {error}", **at)
