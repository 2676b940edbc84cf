"""A rehearsal: some batches of a run, trained and evaluated on tables that are cut to SMALL_BYTES: for `--dry-run`.

What does not grow with the tables is measured by it, and what start-up takes on a part of the tables.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import cdlrm

from . import report as reporting
from .assemble import TABLE_OPTIMIZERS
from .config import TrainConfig
from .data import Batch, Source
from .datasets import Datasets, open_datasets
from .driver.base import Driver
from .driver.choose import choose
from .horizon import LEAST_HORIZON, horizon_for
from .memory_parts import Layout
from .memory_use import REHEARSED_BATCHES, TEST_BATCHES
from .progress import Listener
from .train import Trainer

SMALL_BYTES, MOST_ROWS = 32 << 20, 1 << 16  # of all tables, of each
SETTLING_BATCHES = 80  # behind a full window: the heap still grows by some 3 % until then
START_ROWS, START_PINNED = 1 << 16, 64 << 20  # what start-up is measured on


class Cut:
    """A source whose ids are taken modulo `rows`, so that small tables will do; at most `limit` batches."""

    def __init__(self, source: Source, rows: list[int], limit: int) -> None:
        self._source, self._rows, self._limit = source, dict(zip(source.features, rows, strict=True)), limit
        self.largest = self.largest_cut = 0  # distinct rows of a batch, as they are and as they are cut

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self._source):
            if number == self._limit:
                return
            distinct = sum(int(jagged.values.unique().numel()) for jagged in batch.sparse.values())
            self.largest = max(self.largest, distinct)
            for name, jagged in batch.sparse.items():
                jagged.values.remainder_(self._rows[name])
            cut = sum(int(jagged.values.unique().numel()) for jagged in batch.sparse.values())
            self.largest_cut = max(self.largest_cut, cut)
            yield batch


def cut_data(config: TrainConfig, data: Datasets, small: Layout) -> Datasets:
    """What a rehearsal is trained and evaluated on: two `Cut`s."""
    train = Cut(data.train, small.rows, rehearsed_batches(config))
    test = None if data.test is None else Cut(data.test, small.rows, TEST_BATCHES)
    return Datasets(train, test, data.features, data.num_dense, small.rows)  # type: ignore[arg-type]


def cut(layout: Layout) -> Layout:
    """The tables of the rehearsal, as alike as possible: the same, where they are small."""
    rows = MOST_ROWS
    while rows > 512 and sum(min(rows, each) for each in layout.rows) * layout.record_bytes > SMALL_BYTES:
        rows //= 2
    small = dataclasses.replace(layout, rows=[min(rows, each) for each in layout.rows])
    small.slots = small.total_rows if layout.resident else min(layout.slots, max(small.total_rows - 1, 1))
    return small


def rehearsed_batches(config: TrainConfig) -> int:
    assert isinstance(config.horizon, int)
    return min(config.horizon + config.prefetch_depth + SETTLING_BATCHES, REHEARSED_BATCHES)


def horizon_of(config: TrainConfig, layout: Layout) -> int:
    """As `cdlrm.horizon` decides by the first batch."""
    if isinstance(config.horizon, int):
        return config.horizon
    if layout.resident:
        return LEAST_HORIZON
    for batch in open_datasets(config, []).train:
        return horizon_for(layout.slots, sum(int(jagged.values.unique().numel()) for jagged in batch.sparse.values()))
    return LEAST_HORIZON


@dataclasses.dataclass
class Peak:
    """Of a rehearsal: host memory, and where the device has memory of its own that and pinned memory; its `driver`."""

    host: int
    notes: list[str]  # the first about the device
    device: int = 0  # until all was trained
    pinned: int = 0
    driver: Driver | None = None
    standing: int = 0  # of `device`, what the MLPs have between two steps
    first: int = 0  # like `device`, of the evaluation before training, but with all that is standing later
    read_only: int = 0  # distinct rows of the largest evaluated batch
    read_only_cut: int = 0  # and of the largest one of the rehearsal


def rehearse(config: TrainConfig, data: Datasets, small: Layout) -> Peak:
    """Peak memory after training and evaluating some batches on small tables."""
    some = cut_data(config, data, small)
    test = some.test
    log, level = logging.getLogger("cdlrm"), logging.getLogger("cdlrm").level
    with tempfile.TemporaryDirectory(prefix="cdlrm-dry-run-") as folder:
        settings = dataclasses.replace(
            config, nepochs=1, test_freq=None, resume=False, logdir=None,
            cache_rows=small.slots,
            store=f"file:{Path(folder) / 'tables'}" if small.in_file else "ram",
            checkpoint_dir=str(Path(folder) / "kept") if config.checkpoint_dir else None, strict=False,
        )  # fmt: skip
        log.setLevel(logging.ERROR)  # the small cache may have to grow
        try:
            with Trainer(settings, heard := _Heard(), data=some) as trainer:
                heard.trainer = trainer
                trainer.run()
                driver = trainer.tables.groups[0].driver
                most, standing = driver.most_bytes(), _standing(trainer)
        finally:
            log.setLevel(level)
    told = [note for note in driver.notes() if not note.startswith("tables:")]  # which are small here
    peak = Peak(reporting.peak_memory_bytes(), list(dict.fromkeys([choose(config.device).reason, *told])))
    if most is not None:
        peak.device, peak.pinned = heard.trained, most[1]
        peak.driver, peak.standing = driver, standing
        if isinstance(test, Cut) and config.metrics:
            peak.read_only, peak.read_only_cut = test.largest, test.largest_cut
            peak.first = heard.first + standing
    return peak


class _Heard(Listener):
    """How much device memory a `trainer` has used until something happened."""

    trainer: Trainer
    first = 0  # before training, without what is standing then
    trained = 0  # after the newest step

    def start(self, total_samples: int | None) -> None:
        self.first = self._most() - _standing(self.trainer)

    def step(self, samples: int) -> None:
        self.trained = self._most()

    def _most(self) -> int:
        return (self.trainer.tables.groups[0].driver.most_bytes() or (0, 0))[0]


def _standing(trainer: Trainer) -> int:
    """Device memory of the MLPs, their gradients and the state of their optimizer."""
    parameters = list(trainer.model.dense_parameters())
    tensors = [*parameters, *(p.grad for p in parameters)]
    tensors += [value for state in trainer.dense_optimizer.state.values() for value in state.values()]
    return sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor) and each.is_cuda)


def start_seconds(config: TrainConfig, layout: Layout) -> dict[str, float]:
    """Seconds before the first step, by what takes them: rates measured here, on a part of the tables."""
    seconds: dict[str, float] = {}
    if not (layout.resident or layout.pinned):
        return seconds
    rows, dim = min(layout.total_rows, START_ROWS), layout.weight_bytes // 4
    began = time.perf_counter()
    tables = cdlrm.EmbeddingBagCollection(
        [cdlrm.Table("rows", rows, dim)], cache_ratio=1.0, device=config.device, progress=False,
        optimizer=TABLE_OPTIMIZERS[config.optimizer](lr=1.0),
    )  # fmt: skip
    group = tables.groups[0]
    if not group.in_place:
        for _ in range(2):  # the first compiles kernels
            began = time.perf_counter()
            group.cache.refresh()  # as rows are filled at the start
            with torch.no_grad():
                tables({"rows": torch.zeros(1, dtype=torch.int64, device="cpu")}).cpu()
    filling = time.perf_counter() - began
    if layout.resident:
        seconds["filling the resident rows"] = filling * layout.total_rows / rows
    if layout.pinned:
        pinning = group.driver.seconds_to_pin(START_PINNED)
        size = layout.total_rows * layout.record_bytes
        seconds[f"pinning the tables, at {START_PINNED / 1e9 / pinning:.1f} GB/s"] = pinning * size / START_PINNED
    tables.close()
    return seconds
