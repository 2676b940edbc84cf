"""Part (e) of `device_check.py`: the whole DLRM step, a cache of 10 % of the rows against all rows resident.

The Terabyte shape of DLRM's reference: 26 tables with the cardinalities of Criteo 1TB, cut to 10 million rows (fewer
where the memory is small), dim 64, batch 2048, MLPs 13-512-256-64 and 512-512-256-1, dot interaction, SGD, Zipf(1.05)
ids.  Contestants take turns, a block of steps each; a block's first steps are not counted.  Before, every row of the
batches is trained once and then driven out of the cache by other rows, so that a fill is a copy and has a victim.

What is exposed of the transfers = cached step - resident step.  "overlap" compares it with prefetch depth 0, where
nothing overlaps: 1 - exposed(depth 1) / exposed(depth 0).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from device_common import Setup

import cdlrm
from cdlrm.data import Batch
from cdlrm.data.synthetic import SyntheticSource
from cdlrm.model import DLRM

TERABYTE = [
    45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10, 2209, 11267, 128, 4, 974, 14,
    48937457, 11316796, 40094537, 452104, 12606, 104, 35,
]  # fmt: skip
LR, RATIO, TARGET = 0.1, 0.1, 1.05


class Shape(NamedTuple):
    rows: list[int]
    dim: int
    batch: int
    bottom: list[int]
    top: list[int]
    rounds: int
    block: int  # steps of a block
    uncounted: int


def shape_for(setup: Setup) -> Shape:
    """The largest tables of at most 10 million rows that fit a share of the free memory."""
    if not setup.full:
        return Shape([min(rows, 400) for rows in TERABYTE], 8, 32, [13, 16, 8], [16, 1], 2, 3, 1)
    device, host = setup.free_bytes()
    budget = min(0.6 * device, 0.25 * host)
    most = 10_000_000
    while sum(min(rows, most) for rows in TERABYTE) * 64 * 4 > budget:
        most = most * 9 // 10
    return Shape([min(rows, most) for rows in TERABYTE], 64, 2048, [13, 512, 256, 64], [512, 512, 256, 1], 5, 60, 10)


class Contestant:
    """A model of its own with its own look-ahead over the same batches."""

    def __init__(self, setup: Setup, shape: Shape, batches: list[Batch], ratio: float, depth: int) -> None:
        self.setup = setup
        tables = [cdlrm.Table(f"c{c + 1}", rows, shape.dim) for c, rows in enumerate(shape.rows)]
        self.tables = cdlrm.EmbeddingBagCollection(
            tables, optimizer=cdlrm.SGD(lr=LR), cache_ratio=ratio, device=setup.device, seed=0
        )  # fmt: skip
        self.model = DLRM(
            self.tables, features=len(tables), dim=shape.dim, mlp_bot=shape.bottom, mlp_top=shape.top
        )  # fmt: skip
        for part in (self.model.bottom, self.model.top, self.model.interaction):
            part.to(setup.torch_device)
        self.optimizer = torch.optim.SGD(self.model.dense_parameters(), lr=LR)
        self._warm_up(shape, batches, ratio)
        self.stream: Iterator[Batch] = cdlrm.lookahead(self.model, batches, horizon="auto", prefetch_depth=depth)
        self.blocks: list[float] = []  # milliseconds a step

    def _warm_up(self, shape: Shape, batches: list[Batch], ratio: float) -> None:
        """Train every row of the batches; then others, until half of the cache was evicted."""
        for batch in cdlrm.lookahead(self.tables, batches):
            self._touch(batch)
        generator, size = torch.Generator().manual_seed(9), shape.batch * (32 if self.setup.full else 1)
        cache_rows, evicts = self.tables.stats()["cache_rows"], self.tables.stats()["evicts"]
        while ratio < 1 and self.tables.stats()["evicts"] - evicts < cache_rows // 2:
            self._touch({
                f"c{c + 1}": torch.randint(rows, (size,), generator=generator) for c, rows in enumerate(shape.rows)
            })  # fmt: skip

    def _touch(self, features: Any) -> None:
        (self.tables(features) * 0.0).sum().backward()

    def block(self, shape: Shape) -> None:
        for number in range(shape.block):
            if number == shape.uncounted:
                self.setup.synchronize()
                started = time.perf_counter()
            self._step()
        self.setup.synchronize()
        self.blocks.append(1e3 * (time.perf_counter() - started) / (shape.block - shape.uncounted))

    def _step(self) -> None:
        batch, device = next(self.stream), self.setup.torch_device
        labels = batch.labels.to(device, non_blocking=True)
        logits = self.model(batch.dense.to(device, non_blocking=True), batch)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def traffic(self) -> dict[str, int]:
        """Launches and synchronisations so far of a device that counts them."""
        backend = getattr(self.tables.groups[0].driver, "backend", None)
        if backend is None:
            return {}
        return {"launches": backend.traffic.launches.total(), "syncs": backend.traffic.synchronizations.total()}

    def close(self) -> None:
        assert isinstance(self.stream, cdlrm.Lookahead)
        self.stream.close()
        self.tables.close()


def check(setup: Setup) -> None:
    shape = shape_for(setup)
    batches = list(SyntheticSource(
        batch_size=shape.batch, num_batches=shape.rounds * shape.block + 8, cardinalities=shape.rows, exponents=1.05,
        missing=0.0, seed=1,
    ))  # fmt: skip
    contestants = {
        "resident": Contestant(setup, shape, batches, 1.0, 1),
        "cached": Contestant(setup, shape, batches, RATIO, 1),
        "cached, depth 0": Contestant(setup, shape, batches, RATIO, 0),
    }
    for number in range(shape.rounds):
        if number >= 2 and setup.box.left() < 5:
            break
        order = list(contestants.values())
        for contestant in order[number % 3 :] + order[: number % 3]:
            contestant.block(shape)
    ms = {name: statistics.median(contestant.blocks[1:]) for name, contestant in contestants.items()}
    report = setup.report
    at: dict[str, Any] = {"rows": sum(shape.rows), "dim": shape.dim, "batch": shape.batch, "cache_ratio": RATIO}
    for name, each in ms.items():
        blocks = [round(block, 3) for block in contestants[name].blocks[1:]]
        report.figure("e", f"DLRM step, {name}", each, "ms", blocks=blocks, **at)
    report.figure("e", "DLRM step, cached / resident", ms["cached"] / ms["resident"], "ratio", most=TARGET, **at)
    exposed = {name: each - ms["resident"] for name, each in ms.items() if name != "resident"}
    report.figure("e", "exposed transfer", exposed["cached"], "ms", **at)
    if exposed["cached, depth 0"] > 0:
        overlap = 1 - exposed["cached"] / exposed["cached, depth 0"]
        report.figure("e", "overlap", overlap, "share", **at)
    stream = contestants["cached"].stream
    assert isinstance(stream, cdlrm.Lookahead)
    stats = stream.stats()
    report.figure("e", "the trainer waited", 1e3 * stats["seconds_stall"] / max(stats["batches"], 1), "ms", **at)
    for name, contestant in contestants.items():
        steps = len(contestant.blocks) * shape.block
        for what, count in contestant.traffic().items():
            report.figure("e", f"{what} a step, {name}", count / steps, what, **at)
        contestant.close()
