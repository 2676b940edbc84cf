"""Which tables to keep resident: the fills that it would save, for the memory that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .grid import Grid, simulate
from .trace import BatchRows, Trace


def propose_resident(result: Mapping[str, Any], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tables in the order in which they are worth being resident, best first; at most half of the cache in all.

    `result`: one configuration with `fills_by_table`; `summary` of the same simulation.  A resident table is loaded
    once, so it saves the fills after the first of each of its rows.  It takes its rows from the cache, so a row of it
    must save more fills than a row of the cache saves on average (hits per row).  An estimate: `check_proposal` knows.
    """
    by_table = result["fills_by_table"]
    if by_table is None:
        return []
    room = result["cache_rows"] / 2
    worth = (summary["distinct"] - result["fills"]) / result["cache_rows"]
    ranked = []
    for name, table in summary["tables"].items():
        saved = by_table[name] - table["rows_touched"]
        if saved > 0 and saved / table["rows"] > worth:
            ranked.append((saved / table["rows"], name, table["rows"], saved))
    ranked.sort(key=lambda entry: (-entry[0], entry[1]))
    chosen = []
    for value, name, rows, saved in ranked:
        if rows <= room:
            room -= rows
            chosen.append(
                {
                    "table": name,
                    "rows": rows,
                    "bytes": rows * summary["record_bytes"],
                    "saved_fills": saved,
                    "saved_fills_a_byte": value / summary["record_bytes"],
                }
            )
    return chosen


class WithoutTables(Trace):
    """A trace without the lookups of some tables."""

    def __init__(self, trace: Trace, names: Sequence[str]) -> None:
        self.trace, self.names, self.table_rows = trace, trace.names, trace.table_rows
        self.batches = trace.batches
        self._left_out = np.array([name in names for name in trace.names])
        self._ends = np.cumsum(trace.table_rows)

    def __iter__(self) -> Iterator[BatchRows]:
        for rows, epoch, nbytes in self.trace:
            keep = ~self._left_out[np.searchsorted(self._ends, rows, side="right")]
            yield BatchRows(rows[keep], epoch, nbytes)


def check_proposal(
    trace: Trace, result: Mapping[str, Any], summary: Mapping[str, Any], tables: Sequence[str], workers: int | None
) -> int:
    """Fills with these tables resident in the same memory, each of their used rows counted once: a second pass."""
    taken = sum(summary["tables"][name]["rows"] for name in tables)
    grid = Grid(
        cache_rows=[result["cache_rows"] - taken],
        horizon=["auto" if result["horizon_auto"] else result["horizon"]],
        prefetch_depth=[result["prefetch_depth"]],
        policy=[result["policy"]],
    )
    rest = simulate(WithoutTables(trace, tables), grid, workers=workers)
    loaded = sum(summary["tables"][name]["rows_touched"] for name in tables)
    return int(rest.results[0]["fills"]) + int(loaded)
