"""Reading and replacing whole tables of a group: what is cached goes home first, and follows a change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .group import Group


def span(group: Group, name: str) -> tuple[int, int]:
    """Group rows [lo, hi) of a table."""
    t = [table.name for table in group.tables].index(name)
    return int(group.bases[t]), int(group.bases[t + 1])


def table_values(group: Group, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Copies of a table's newest weights float32 [rows, D] and state float32 [rows, S]."""
    lo, hi = span(group, name)
    group.flush()
    with group.cache.pause():
        return group.store.get(lo, hi)


def set_table(group: Group, name: str, weight: np.ndarray | None, state: np.ndarray | None) -> None:
    """Replace a table's weights float32 [rows, D] and/or state float32 [rows, S]."""
    set_rows(group, span(group, name)[0], weight, state)


def set_rows(group: Group, lo: int, weight: np.ndarray | None, state: np.ndarray | None = None) -> None:
    """Replace weights float32 [n, D] and/or state float32 [n, S] of the group rows from `lo` on."""
    group.flush()
    with group.cache.pause():
        group.store.put(lo, weight, state)
        if not group.in_place:
            group.cache.refresh()
