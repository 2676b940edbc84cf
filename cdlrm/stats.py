"""The counters of a group, and their sum over groups.

Keys: `steps`, `lookups`, `distinct` (rows a batch), `hits` (distinct rows that were cached), `fills`
(= `fills_copied` from the store + `fills_initialised` without traffic), `evicts`, `evicts_written`
(dirty ones), `rows_written` (by evicts and flushes), `bytes_filled`, `bytes_written`, `grows`,
`short_windows`, `unannounced`, `skipped_steps`, `cache_rows`, `table_rows`, `min0_fills` and
`mind_fills` (what MIN(0) and MIN(prefetch_depth) would have filled on the same batches),
`prefetch_depth`, `horizon` (of the newest look-ahead), `metadata_bytes`, and seconds of each stage.
"""

from __future__ import annotations

from typing import Any

from .group import Group

_LARGEST = ("steps", "prefetch_depth", "horizon")  # not summed over groups


def group_stats(group: Group) -> dict[str, Any]:
    """Counters of one group since it was made."""
    counts, moves, minimum = group.counts, group.cache.moves, group.minimum
    depth = group.planner.prefetch_depth
    return {
        "steps": counts.steps,
        "lookups": counts.lookups,
        "distinct": counts.distinct,
        "hits": counts.hits,
        "fills": moves.fills,
        "fills_copied": moves.fills_copied,
        "fills_initialised": moves.fills_initialised,
        "evicts": moves.evicts,
        "evicts_written": moves.evicts_written,
        "rows_written": moves.rows_written,
        "bytes_filled": moves.bytes_filled,
        "bytes_written": moves.bytes_written,
        "grows": moves.grows,
        "short_windows": counts.short_windows,
        "unannounced": counts.unannounced,
        "skipped_steps": counts.skipped_steps,
        "cache_rows": group.num_rows if group.resident else group.cache.rows,
        "table_rows": group.num_rows,
        "min0_fills": 0 if minimum is None else minimum.fills,
        "mind_fills": 0 if minimum is None else minimum.fills_at(depth),
        "prefetch_depth": depth,
        "horizon": group.horizon,
        "metadata_bytes": group.planner.metadata_bytes,
        "seconds_plan": counts.seconds_plan,
        "seconds_transfer": counts.seconds_transfer,
        "seconds_lookup": counts.seconds_lookup,
        "seconds_update": counts.seconds_update,
    }


def total(stats: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over groups (steps and prefetch depth: the largest)."""
    return {key: (max if key in _LARGEST else sum)(s[key] for s in stats) for key in stats[0]}
