"""Memory that grows with the tables, computed: for `--dry-run`."""

from __future__ import annotations

import dataclasses
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from .assemble import TABLE_OPTIMIZERS
from .config import TrainConfig
from .memory_use import Use, pages
from .plan.planner import shards_for

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


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


def layout_of(config: TrainConfig, rows: list[int]) -> Layout:
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


def _page_bytes(*settings: str) -> int:
    """Size of the pages of memory, where huge ones are given under `settings`: "always" (to all memory), "madvise" (to
    memory that asks for them).  It is the machine's: 4 KiB and 2 MiB on x86-64, up to 64 KiB and 512 MiB on aarch64."""
    try:
        chosen = (HUGE_PAGES / "enabled").read_text(encoding="utf-8")
        if any(f"[{setting}]" in chosen for setting in settings):
            return int((HUGE_PAGES / "hpage_pmd_size").read_text(encoding="utf-8"))
    except OSError:  # a kernel without huge pages
        pass
    return mmap.PAGESIZE


def _touched(use: Use, lo: int, hi: int, row_bytes: int, page: int) -> int:
    """Memory of the rows [lo, hi) of `row_bytes` each, of which only pages that hold a used row exist."""
    return min(page * pages(use.trained, lo, hi, row_bytes, page), row_bytes * (hi - lo))


def _store_bytes(layout: Layout, use: Use, lo: int, hi: int) -> int:
    """Memory of the records of the rows [lo, hi)."""
    if layout.in_file:
        return 0
    if layout.pinned or (layout.resident and not layout.apart):
        return (hi - lo) * layout.record_bytes
    page = _page_bytes("always")
    return sum(_touched(use, lo, hi, size, page) for size in (layout.weight_bytes, layout.state_bytes))


def _row_bytes(layout: Layout, use: Use, lo: int, hi: int) -> int:
    """Memory of what is known of each of the rows [lo, hi)."""
    flags = (hi - lo) // 4  # trained, changed: a bit each
    if layout.resident:
        return flags + (4 + 9 * layout.apart) * (hi - lo)  # stamps; rows of the slots, and which are dirty
    page = _page_bytes("always", "madvise")  # NumPy asks for huge pages
    return flags + sum(_touched(use, lo, hi, size, page) for size in (8, 4))


def parts_of(config: TrainConfig, layout: Layout, use: Use) -> dict[str, int]:
    """Name -> bytes."""
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
    if config.resume and config.metrics:
        parts["cache, while it grows"] = parts["cache"]
    elif slots > layout.slots:  # between two steps: what a step needs, at least outputs and their gradients, is free
        outputs = config.mini_batch_size * len(layout.rows) * layout.weight_bytes
        parts["cache, while it grows"] = max(parts["cache"] - 2 * outputs, 0)
    return parts


def tables_of(layout: Layout, use: Use, features: list[str]) -> list[dict[str, Any]]:
    """Of each table: name, rows, store_bytes, metadata_bytes."""
    bases = np.cumsum([0, *layout.rows]).tolist()
    return [
        {
            "name": name, "rows": hi - lo, "store_bytes": _store_bytes(layout, use, lo, hi),
            "metadata_bytes": _row_bytes(layout, use, lo, hi),
        }
        for name, lo, hi in zip(features, bases[:-1], bases[1:], strict=True)
    ]  # fmt: skip
