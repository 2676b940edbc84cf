"""`cdlrm train --dry-run`: how much memory a run will use, without training it or allocating its tables.

Two things are added up.

* What grows with the tables is computed: the store, the cache, the planner's 8 bytes a row, the MIN counter's 4, the
  slots' descriptions.  A table in memory that is cached is used page by page: only pages with a row that some batch
  uses count.  So the ids of one epoch's batches are read (at most COUNTED_BATCHES) and marked, one bit a row.
* What does not is measured: a rehearsal trains some batches, and evaluates some, of the same data with the same
  settings on tables cut to SMALL_ROWS rows, in this process, and its peak is taken.  That is the interpreter with
  its libraries, the window of batches read ahead, plans, the MLPs with their gradients, activations, and threads.

On a GPU the same is done with its memory and with the host memory that is pinned for it: see `driver/foretell.py`.

The peak is the kernel's high-water mark of resident memory (VmHWM), as in the report of a run.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba.core.event import install_recorder

import cdlrm

from . import report as reporting
from .config import TrainConfig
from .data import Batch, Source
from .datasets import Datasets, open_datasets
from .driver.base import Driver
from .driver.choose import choose
from .driver.foretell import Need
from .driver.signatures import LONG_ROW
from .horizon import LEAST_HORIZON, horizon_for
from .plan.planner import shards_for
from .store import bits
from .train import TABLE_OPTIMIZERS, Trainer

SMALL_ROWS = 512
COUNTED_BATCHES = 4096
REHEARSED_BATCHES = 256
TEST_BATCHES = 32
HUGE, PAGE = 2 << 20, 4096
START_ROWS, START_PINNED = 1 << 16, 64 << 20  # what start-up is measured on
AUC_BYTES = 100  # a test sample, while the area under the curve is computed (measured)
PIECE_ROWS = 1 << 20


@dataclasses.dataclass
class Layout:
    """What the tables' memory depends on; bytes of a row's weights and of its state, slots of the cache."""

    rows: list[int]
    weight_bytes: int
    state_bytes: int
    slots: int
    resident: bool
    in_file: bool
    apart: bool = False  # the device has memory of its own
    pinned: bool = False  # it pins the store

    @property
    def total_rows(self) -> int:
        return sum(self.rows)

    @property
    def record_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes


@dataclasses.dataclass
class Use:
    """What the batches of a run use: batches counted, one bit for each row used, rows of the largest batch."""

    batches: int
    complete: bool  # all batches of the run were counted
    trained: np.ndarray
    rows: int
    largest: int
    lookups: int = 0  # of the largest batch
    long_chunks: int = 0  # of 256 lookups, of rows that more of them hit, in one batch
    several: bool = False  # ids a bag


def plan_memory(config: TrainConfig) -> dict[str, Any]:
    """The plan as a mapping; all sizes in bytes.  Raises what opening the data and the settings would raise.

    `parts`: name -> bytes, together `total_bytes`; `tables`: name, rows, store_bytes, metadata_bytes of each;
    `most_bytes`: the total if every row is trained; `batches`, `batches_counted`, `notes`.
    """
    notes: list[str] = []
    data = open_datasets(config, notes)
    layout = _layout(config, data.table_rows)
    small = _layout(config, [min(rows, SMALL_ROWS) for rows in data.table_rows])
    with install_recorder("numba:compile") as compiled:
        use = count(open_datasets(config, []).train, data.table_rows)
        peak = _rehearse(dataclasses.replace(config, horizon=_horizon(config, layout)), data, small)
    if compiled.buffer:
        notes.append(
            "data, MLPs and libraries: with the memory of compiling kernels, which this dry run had to do first; the "
            "run will not, and needs about 100 MiB less (repeat the dry run for the figure without it)."
        )
    apart = None
    if peak.driver is not None:
        for each in (layout, small):
            each.apart, each.pinned = True, peak.driver.pins_tables and not each.in_file
        apart = _on_device(config, data, peak, layout, small, use)
    everything = dataclasses.replace(use, trained=np.full(-(-layout.total_rows // 8), 255, np.uint8))
    parts = _parts(config, layout, use)
    parts["data, MLPs and libraries"] = max(peak.host - sum(_full(config, small).values()), 0)
    if config.metrics and data.test is not None:
        beyond = (data.test.rows_total or 0) - TEST_BATCHES * data.test.batch_size
        parts["metrics"] = AUC_BYTES * max(beyond, 0)
    total = sum(parts.values())
    most = total + sum(_parts(config, layout, everything).values()) - sum(_parts(config, layout, use).values())
    if not use.complete and most > total:
        notes.append(
            f"rows used: counted over {use.batches:,} batches, a part of the run; later batches may use more, up to "
            "the second total."
        )
    if layout.slots < use.largest:
        notes.append(
            f"cache: a batch needs {use.largest:,} rows, more than the {layout.slots:,} of the cache, which will grow."
        )
    return {
        "tables": _tables(layout, use, data.features),
        "parts": parts,
        "total_bytes": total,
        "most_bytes": total if use.complete else most,
        "batches_counted": use.batches,
        "complete": use.complete,
        "rows": layout.total_rows,
        "rows_used": use.rows,
        "cache_rows": layout.slots,
        "record_bytes": layout.record_bytes,
        "store": config.store,
        "file_bytes": layout.total_rows * layout.record_bytes if layout.in_file else 0,
        "resident": layout.resident,
        "device": peak.notes[0],
        **(apart or {"device_parts": {}, "device_bytes": 0, "pinned_parts": {}, "pinned_bytes": 0}),
        "start_seconds": _start(config, layout),
        "notes": notes + peak.notes[1:],
    }


def _layout(config: TrainConfig, rows: list[int]) -> Layout:
    """As `cdlrm.placement` decides."""
    total, dim = sum(rows), config.arch_sparse_feature_size
    state = TABLE_OPTIMIZERS[config.optimizer](lr=1.0).state_width(dim)
    slots = -(-total * config.cache_ratio // 1) if config.cache_rows is None else min(config.cache_rows, total)
    slots, in_file = int(max(slots, 1)), config.store != "ram"
    resident = slots >= total and not in_file
    if not resident:
        shards = shards_for(slots)
        slots = -(-slots // shards) * shards
    return Layout(rows, 4 * dim, 4 * state, slots, resident, in_file)


# --- measured ---


class _Cut:
    """A source whose ids are taken modulo SMALL_ROWS, so that small tables will do; at most `limit` batches."""

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


def _rehearsed_slots(small: Layout) -> int:
    return small.total_rows if small.resident else max(small.total_rows - 1, 1)


def _horizon(config: TrainConfig, layout: Layout) -> int:
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
    device: int = 0
    pinned: int = 0
    driver: Driver | None = None
    read_only: int = 0  # distinct rows of the largest evaluated batch
    read_only_cut: int = 0  # and of the largest one of the rehearsal


def _rehearse(config: TrainConfig, data: Datasets, small: Layout) -> Peak:
    """Peak memory after training and evaluating some batches on small tables."""
    assert isinstance(config.horizon, int)
    steps = min(config.horizon + config.prefetch_depth + 16, REHEARSED_BATCHES)
    test = None if data.test is None else _Cut(data.test, small.rows, TEST_BATCHES)
    cut = Datasets(
        _Cut(data.train, small.rows, steps),  # type: ignore[arg-type]
        test,  # type: ignore[arg-type]
        data.features, data.num_dense, small.rows,
    )  # fmt: skip
    log, level = logging.getLogger("cdlrm"), logging.getLogger("cdlrm").level
    with tempfile.TemporaryDirectory(prefix="cdlrm-dry-run-") as folder:
        settings = dataclasses.replace(
            config, nepochs=1, test_freq=None, resume=False, logdir=None,
            cache_rows=_rehearsed_slots(small),
            store=f"file:{Path(folder) / 'tables'}" if small.in_file else "ram",
            checkpoint_dir=str(Path(folder) / "kept") if config.checkpoint_dir else None, strict=False,
        )  # fmt: skip
        log.setLevel(logging.ERROR)  # the small cache may have to grow
        try:
            with Trainer(settings, data=cut) as trainer:
                trainer.run()
                driver = trainer.tables.groups[0].driver
                most = driver.most_bytes()
        finally:
            log.setLevel(level)
    told = [note for note in driver.notes() if not note.startswith("tables:")]  # which are small here
    peak = Peak(reporting.peak_memory_bytes(), list(dict.fromkeys([choose(config.device).reason, *told])))
    if most is not None:
        peak.device, peak.pinned = most
        peak.driver = driver
        if test is not None and config.metrics:
            peak.read_only, peak.read_only_cut = test.largest, test.largest_cut
    return peak


# --- counted ---


def count(source: Source, rows: list[int]) -> Use:
    """Read the ids of an epoch's batches, at most COUNTED_BATCHES, and mark the rows that they use."""
    bases = dict(zip(source.features, np.cumsum([0, *rows[:-1]]), strict=True))
    trained, batches, complete = np.zeros(-(-sum(rows) // 8), np.uint8), 0, True
    largest = lookups = chunks = 0
    several = False
    for batch in source:
        if batches == COUNTED_BATCHES:
            complete = False
            break
        ids = np.concatenate([jagged.values.numpy() + bases[name] for name, jagged in batch.sparse.items()])
        bits.mark(trained, trained, ids)
        if batches < REHEARSED_BATCHES:  # the largest of some is near the largest of all
            hits = np.unique(ids, return_counts=True)[1]
            largest, lookups = max(largest, hits.size), max(lookups, ids.size)
            chunks = max(chunks, int((-(-hits[hits > LONG_ROW] // LONG_ROW)).sum()))
            several = several or any(jagged.offsets is not None for jagged in batch.sparse.values())
        batches += 1
    used = int(np.bitwise_count(trained).sum())
    return Use(batches, complete, trained, used, largest, lookups, chunks, several)


def _pages(trained: np.ndarray, lo: int, hi: int, row_bytes: int, page: int) -> int:
    """Pages of `page` bytes that hold a used row of [lo, hi), where a row has `row_bytes`."""
    if row_bytes == 0:
        return 0
    found, before = 0, -1
    for at in range(lo, hi, PIECE_ROWS):
        stop = min(at + PIECE_ROWS, hi)
        flags = np.unpackbits(trained[at >> 3 : (stop + 7) >> 3], bitorder="little")
        used = np.flatnonzero(flags[at & 7 : (at & 7) + stop - at]) + at
        if used.size:
            first, last = used * row_bytes // page, (used * row_bytes + row_bytes - 1) // page
            span = np.maximum(last - np.maximum(first, np.concatenate([[before], last[:-1]]) + 1) + 1, 0)
            found, before = found + int(span.sum()), int(last[-1])
    return found


# --- on a device with memory of its own ---


def _on_device(
    config: TrainConfig, data: Datasets, peak: Peak, layout: Layout, small: Layout, use: Use
) -> dict[str, Any]:
    """`device_parts`, `device_bytes`, `pinned_parts`, `pinned_bytes`: computed for these tables; what a rehearsal on
    small ones had besides its own is the rest."""
    assert peak.driver is not None
    ids = count(_Cut(open_datasets(config, []).train, small.rows, REHEARSED_BATCHES), small.rows)  # type: ignore[arg-type]
    small = dataclasses.replace(small, slots=_rehearsed_slots(small))
    full = peak.driver.foretell(_need(config, data, layout, use, peak))
    cut = peak.driver.foretell(_need(
        dataclasses.replace(config, resume=False), data, small, ids,
        dataclasses.replace(peak, read_only=peak.read_only_cut),
    ))  # fmt: skip
    assert full is not None and cut is not None
    found: dict[str, Any] = {}
    for name, most, parts, own in (
        ("device", peak.device, full.device, cut.device), ("pinned", peak.pinned, full.pinned, cut.pinned)
    ):  # fmt: skip
        parts = {part: size for part, size in parts.items() if size}
        parts["MLPs, activations and inputs" if name == "device" else "inputs"] = max(most - sum(own.values()), 0)
        if name == "device" and (more := full.last - max(most - sum(own.values()), 0)) > 0:
            parts["ring slots, when rows are written home"] = more
        found |= {f"{name}_parts": parts, f"{name}_bytes": sum(parts.values())}
    return found


def _need(config: TrainConfig, data: Datasets, layout: Layout, use: Use, peak: Peak) -> Need:
    changed = min(layout.slots, use.rows)
    if config.checkpoint_every is not None:
        changed = min(changed, config.checkpoint_every * use.largest)
    return Need(
        tables=len(layout.rows), rows=layout.total_rows, dim=layout.weight_bytes // 4,
        state_width=layout.state_bytes // 4, slots=max(layout.slots, use.largest), resident=layout.resident,
        in_file=layout.in_file, prefetch_depth=config.prefetch_depth, batch_size=config.mini_batch_size,
        features=len(data.features), lookups=use.lookups, distinct=use.largest, long_chunks=use.long_chunks,
        several=use.several, mean=config.pooling == "mean", written=changed, read_only=peak.read_only,
        counts_steps=TABLE_OPTIMIZERS[config.optimizer](lr=1.0).counts_steps,
        growing=layout.slots < use.largest,
        saves=0 if config.checkpoint_every is None else use.batches * config.nepochs // config.checkpoint_every,
    )  # fmt: skip


def _start(config: TrainConfig, layout: Layout) -> dict[str, float]:
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


# --- computed ---


def _huge(setting: str) -> bool:
    """Whether the kernel gives huge pages to memory that asks for them ("madvise") or to all ("always")."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
    except OSError:
        return False
    return "[always]" in text or (setting == "madvise" and "[madvise]" in text)


def _store_bytes(layout: Layout, use: Use, lo: int, hi: int) -> int:
    """Memory of the records of the rows [lo, hi)."""
    if layout.in_file:
        return 0
    if layout.pinned or (layout.resident and not layout.apart):
        return (hi - lo) * layout.record_bytes
    page = HUGE if _huge("always") else PAGE
    return sum(page * _pages(use.trained, lo, hi, size, page) for size in (layout.weight_bytes, layout.state_bytes))


def _row_bytes(layout: Layout, use: Use, lo: int, hi: int) -> int:
    """Memory of what is known of each of the rows [lo, hi)."""
    flags = (hi - lo) // 4  # trained, changed: a bit each
    if layout.resident:
        return flags + (4 + 9 * layout.apart) * (hi - lo)  # stamps; rows of the slots, and which are dirty
    page = HUGE if _huge("madvise") else PAGE  # NumPy asks for huge pages
    return flags + sum(min(page * _pages(use.trained, lo, hi, size, page), size * (hi - lo)) for size in (8, 4))


def _parts(config: TrainConfig, layout: Layout, use: Use) -> dict[str, int]:
    everything = (0, layout.total_rows)
    parts = {"store": _store_bytes(layout, use, *everything), "metadata of rows": _row_bytes(layout, use, *everything)}
    if layout.resident:
        return parts
    slots = max(layout.slots, use.largest)
    filled = min(slots, use.rows)
    parts["cache"] = 0 if layout.apart else filled * layout.record_bytes
    order = 6 * slots  # of last use, written as far as rows were used
    parts["metadata of slots"] = slots * (16 + 4 + 8) + filled + min(order, 4 * use.batches * use.largest)
    parts["moving"] = 12 * min(slots, use.rows)  # lists of what is written at the end
    if slots > layout.slots or (config.resume and config.metrics):
        parts["cache, while it grows"] = parts["cache"]
    return parts


def _full(config: TrainConfig, layout: Layout) -> dict[str, int]:
    """The parts of small tables of which everything is used."""
    trained = np.full(-(-layout.total_rows // 8), 255, np.uint8)
    return _parts(config, layout, Use(1, True, trained, layout.total_rows, 0))


def _tables(layout: Layout, use: Use, features: list[str]) -> list[dict[str, Any]]:
    bases = np.cumsum([0, *layout.rows]).tolist()
    return [
        {
            "name": name, "rows": hi - lo, "store_bytes": _store_bytes(layout, use, lo, hi),
            "metadata_bytes": _row_bytes(layout, use, lo, hi),
        }
        for name, lo, hi in zip(features, bases[:-1], bases[1:], strict=True)
    ]  # fmt: skip
