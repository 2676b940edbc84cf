"""`cdlrm train --dry-run`: how much memory a run will use, without training it or allocating its tables.

Two things are added up.

* What grows with the tables is computed (`memory_parts`): the store, the cache, the planner's 8 bytes a row, the MIN
  counter's 4, the slots' descriptions.  A table in memory that is cached is used page by page: only pages with a row
  that some batch uses count.  So the ids of one epoch's batches are read (at most COUNTED_BATCHES) and marked, one bit
  a row (`memory_use`).
* What does not is measured (`memory_rehearsal`): a rehearsal trains some batches, and evaluates some, of the same data
  with the same settings on small tables, in this process; what its peak has beside what is computed for those is taken.
  That is the interpreter with its libraries, the window of batches read ahead, plans, the MLPs with their gradients,
  activations, and threads.

On a GPU the same is done with its memory and with the host memory that is pinned for it: see `driver/foretell.py`.
Where rows travel to it with their batches (tables in a file, or not pinned) those are planned too (`memory_moves`).

The peak is the kernel's high-water mark of resident memory (VmHWM), as in the report of a run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from . import report as reporting
from .assemble import TABLE_OPTIMIZERS
from .config import TrainConfig
from .datasets import Datasets, open_datasets
from .driver.base import Driver
from .driver.foretell import Need
from .driver.tray_sizes import Carried
from .memory_moves import planned_moves
from .memory_parts import Layout, layout_of, parts_of, tables_of
from .memory_rehearsal import (
    Cut,
    Peak,
    cut,
    cut_data,
    horizon_of,
    rehearse,
    rehearsed_batches,
    start_seconds,
)
from .memory_use import TEST_BATCHES, Use, count

AUC_BYTES = 100  # a test sample, while the area under the curve is computed (measured)


def plan_memory(config: TrainConfig) -> dict[str, Any]:
    """The plan as a mapping; all sizes in bytes.  Raises what opening the data and the settings would raise.

    `parts`: name -> bytes, together `total_bytes`; `tables`: name, rows, store_bytes, metadata_bytes of each;
    `most_bytes`: the total if every row is trained; `batches`, `batches_counted`, `notes`.
    """
    notes: list[str] = []
    data = open_datasets(config, notes)
    layout = layout_of(config, data.table_rows)
    small = cut(layout)
    use = count(open_datasets(config, []).train, data.table_rows, config.checkpoint_every)
    rehearsal = dataclasses.replace(config, horizon=horizon_of(config, layout))
    peak = rehearse(rehearsal, data, small)
    source = Cut(open_datasets(config, []).train, small.rows, rehearsed_batches(rehearsal))
    used = count(source, small.rows, config.checkpoint_every)  # type: ignore[arg-type]
    apart = None
    if peak.driver is not None:
        for each in (layout, small):
            each.apart, each.pinned = True, peak.driver.pins_tables and not each.in_file
        apart, told = _on_device(config, rehearsal, peak, layout, small, use, used)
        notes += told
    everything = dataclasses.replace(use, trained=np.full(-(-layout.total_rows // 8), 255, np.uint8))
    parts = parts_of(config, layout, use)
    parts["data, MLPs and libraries"] = max(peak.host - sum(parts_of(config, small, used).values()), 0)
    if config.metrics and data.test is not None:
        beyond = (data.test.rows_total or 0) - TEST_BATCHES * data.test.batch_size
        parts["metrics"] = AUC_BYTES * max(beyond, 0)
    total = sum(parts.values())
    most = total + sum(parts_of(config, layout, everything).values()) - sum(parts_of(config, layout, use).values())
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
        "tables": tables_of(layout, use, data.features),
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
        "start_seconds": start_seconds(config, layout),
        "notes": notes + peak.notes[1:],
    }


def _on_device(
    config: TrainConfig, rehearsal: TrainConfig, peak: Peak, layout: Layout, small: Layout, use: Use, used: Use
) -> tuple[dict[str, Any], list[str]]:
    """`device_parts`, `device_bytes`, `pinned_parts`, `pinned_bytes`: computed for these tables; what a rehearsal on
    small ones had besides its own is the rest.  And notes."""
    assert peak.driver is not None
    driver, data = peak.driver, open_datasets(config, [])
    need = _need(config, data, layout, use, peak)
    need_cut = _need(config, data, small, used, dataclasses.replace(peak, read_only=peak.read_only_cut))
    notes = []
    if not (layout.resident or layout.pinned):  # rows travel with their plans
        some = cut_data(rehearsal, open_datasets(config, []), small)
        cut_run = dataclasses.replace(rehearsal, nepochs=1, test_freq=None)
        _plan(need_cut, cut_run, some, small)
        if not _plan(need, rehearsal, data, layout):
            notes.append(_more_may_travel(driver, need))
    full, cut = driver.foretell(need), driver.foretell(need_cut)
    assert full is not None and cut is not None
    own, own_pinned = sum(cut.device.values()), sum(cut.pinned.values())
    rest, inputs = max(peak.device - own, 0), max(peak.pinned - own_pinned, 0)
    device = {**full.device, "MLPs, activations and inputs": rest}
    pinned = {**full.pinned, "inputs": inputs}
    step = full.device["outputs"] + rest  # what a step needs is gone when it is over, but what is standing
    idle = peak.standing + inputs  # inputs have as much on the device, where they stay to the end
    later = {
        "evaluation": full.evaluating + max(peak.first - cut.first, 0) - step,
        "ring slots, when rows are written home": full.last - max(step - idle, 0),
        "records, while they grow": full.growing - max(step - idle, 0),
    }
    name = max(later, key=lambda name: later[name])
    device[name] = max(later[name], 0)
    found: dict[str, Any] = {}
    for where, parts in (("device", device), ("pinned", pinned)):
        parts = {part: size for part, size in parts.items() if size}
        found |= {f"{where}_parts": parts, f"{where}_bytes": sum(parts.values())}
    return found, notes


def _plan(need: Need, config: TrainConfig, data: Datasets, layout: Layout) -> bool:
    """Plan what the batches of a run move, as far as that is done; whether all of it was, from the beginning."""
    assert isinstance(config.horizon, int)
    need.moves, complete = planned_moves(
        data, layout.rows, layout.slots, horizon=config.horizon, depth=config.prefetch_depth, epochs=config.nepochs,
        saves_every=config.checkpoint_every, evaluates=config.metrics, evaluates_every=config.test_freq,
    )  # fmt: skip
    need.slots = need.moves.slots
    need.read_only = max((each.distinct for each in need.moves.evaluated), default=0)
    return complete and not config.resume


def _more_may_travel(driver: Driver, need: Need) -> str:
    """About batches that come later than those that were planned."""
    assert need.moves is not None
    planned = [each for each in need.moves.carried if each is not None and each.lookups]
    columns = zip(*map(dataclasses.astuple, planned), strict=True)
    lookups, bags, distinct, long_rows, long_chunks, fills, _, _ = map(max, columns)
    worst = Carried(lookups, bags, distinct, long_rows, long_chunks, fills, copied=fills, evicts=fills)
    carried = [*need.moves.carried, *[worst, None] * (need.prefetch_depth + 2)]
    bound = driver.foretell(dataclasses.replace(need, moves=dataclasses.replace(need.moves, carried=carried)))
    now = driver.foretell(need)
    assert bound is not None and now is not None
    more = reporting.size(bound.pinned["ring slots"] - now.pinned["ring slots"])
    return (
        f"rows that travel with their batches: counted over the first {len(planned):,} batches, a part of the run; "
        f"later ones may bring more rows that were trained, for at most {more} more of the device and pinned."
    )


def _need(config: TrainConfig, data: Datasets, layout: Layout, use: Use, peak: Peak) -> Need:
    changed = min(layout.slots, use.rows if config.checkpoint_every is None else use.written)
    return Need(
        tables=len(layout.rows), rows=layout.total_rows, dim=layout.weight_bytes // 4,
        state_width=layout.state_bytes // 4, slots=max(layout.slots, use.largest), first_slots=layout.slots,
        resident=layout.resident, in_file=layout.in_file, prefetch_depth=config.prefetch_depth,
        batch_size=config.mini_batch_size, features=len(data.features), lookups=use.lookups, distinct=use.largest,
        long_chunks=use.long_chunks, several=use.several, mean=config.pooling == "mean", written=changed,
        read_only=peak.read_only, counts_steps=TABLE_OPTIMIZERS[config.optimizer](lr=1.0).counts_steps,
        growing=layout.slots < use.largest,
        saves=_saves(use.batches * config.nepochs, config.checkpoint_every),
    )  # fmt: skip


def _saves(batches: int, every: int | None) -> int:
    """Checkpoints of a run, with that at its end; 0: there is no other."""
    return 0 if every is None or every > batches else -(-batches // every)
