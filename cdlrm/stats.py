"""The counters of a group, and their sum over groups.

Rows are counted for the batches that were trained (what was only planned or copied ahead when a loop is
left early is not).

Keys: `steps`, `lookups`, `distinct` (rows a batch), `hits` (distinct rows that were cached), `fills` (=
`fills_copied` from the store + `fills_initialised` without traffic), `evicts`, `evicts_written` (dirty
ones), `rows_written` (by evicts and flushes), `bytes_filled`, `bytes_written`, `grows`, `short_windows`,
`unannounced`, `skipped_steps`, `cache_rows`, `table_rows`, `min0_fills` and `mind_fills` (what MIN(0) and
MIN(prefetch_depth) would have filled on the same batches), `mind_fills_double` (MIN(prefetch_depth) in a
cache twice as large), `mind_shortened` (batches for which MIN(prefetch_depth) held less than that, because the rows
of so many batches do not fit), `prefetch_depth`, `horizon` (of the newest look-ahead), `metadata_bytes`, and seconds
of each stage.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .counts import rows_by_table
from .group import Group

_LARGEST = ("steps", "skipped_steps", "prefetch_depth", "horizon")  # not summed over groups


def group_stats(group: Group) -> dict[str, Any]:
    """Counters of one group since it was made.  With nonfinite="skip" a device is waited for."""
    group.tally.count()
    group.count_skipped()
    counts, moves, minimum = group.counts, group.cache.moves, group.tally.minimum
    depth = group.planner.prefetch_depth
    return {
        "steps": counts.steps,
        "lookups": counts.lookups,
        "distinct": counts.distinct,
        "hits": counts.hits,
        "fills": counts.fills,
        "fills_copied": counts.fills_copied,
        "fills_initialised": counts.fills - counts.fills_copied,
        "evicts": counts.evicts,
        "evicts_written": counts.evicts_written,
        "rows_written": moves.rows_written,
        "bytes_filled": counts.fills_copied * group.store.record_bytes,
        "bytes_written": moves.bytes_written,
        "grows": moves.grows,
        "short_windows": counts.short_windows,
        "unannounced": counts.unannounced,
        "skipped_steps": counts.skipped_steps,
        "cache_rows": group.num_rows if group.resident else group.cache.rows,
        "table_rows": group.num_rows,
        "min0_fills": 0 if minimum is None else minimum.fills,
        "mind_fills": 0 if minimum is None else minimum.fills_at(depth),
        "mind_fills_double": 0 if minimum is None else minimum.double_fills,
        "mind_shortened": 0 if minimum is None else minimum.shortened_at(depth),
        "prefetch_depth": depth,
        "horizon": group.horizon,
        "metadata_bytes": group.planner.metadata_bytes,
        "seconds_plan": counts.seconds_plan,
        "seconds_transfer": counts.seconds_transfer,
        "seconds_lookup": counts.seconds_lookup,
        "seconds_update": counts.seconds_update,
    }


def total(stats: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over groups (steps, skipped steps, prefetch depth, horizon: the largest)."""
    return {key: (max if key in _LARGEST else sum)(s[key] for s in stats) for key in stats[0]}


def table_stats(group: Group) -> dict[str, dict[str, int]]:
    """Counters of each table of a group since it was made.

    `rows`; `distinct` rows summed over its batches, of which `hits` were cached and `fills` not; `cached_rows` now;
    `trained_rows` ever; `record_bytes` of a row; `table_bytes` of all rows.
    """
    group.tally.count()
    counts, cached = group.counts, group.cache.slot_row
    in_cache = np.diff(group.bases) if group.resident else rows_by_table(cached[cached >= 0], group.bases)
    trained = group.store.trained
    out = {}
    for number, table in enumerate(group.tables):
        distinct, fills = int(counts.distinct_by_table[number]), int(counts.fills_by_table[number])
        lo, hi = int(group.bases[number]), int(group.bases[number + 1])
        out[table.name] = {
            "rows": hi - lo,
            "distinct": distinct,
            "hits": distinct - fills,
            "fills": fills,
            "cached_rows": int(in_cache[number]),
            "trained_rows": _bits_set(trained, lo, hi),
            "record_bytes": group.store.record_bytes,
            "table_bytes": (hi - lo) * group.store.record_bytes,
        }
    return out


def _bits_set(bits: np.ndarray, lo: int, hi: int) -> int:
    """Bits set among [lo, hi) of a packed array."""
    first, last = -(-lo // 8), hi // 8
    if last < first:
        return int(np.unpackbits(bits[lo // 8 : lo // 8 + 1], bitorder="little")[lo % 8 : hi - lo // 8 * 8].sum())
    whole = int(np.bitwise_count(bits[first:last]).sum())
    before = np.unpackbits(bits[lo // 8 : first], bitorder="little")[lo % 8 :] if lo % 8 else np.empty(0, np.uint8)
    after = np.unpackbits(bits[last : last + 1], bitorder="little")[: hi % 8] if hi % 8 else np.empty(0, np.uint8)
    return whole + int(before.sum()) + int(after.sum())
