"""Which arrays a GPU needs for a plan, a lookup or an update, laid out for one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..lookups import Lookups
from ..plan.tables import tables_of
from . import signatures
from .base import Segments, merged_rows, used_tables
from .staging import Layout


def add_inputs(layout: Layout, lookups: Lookups, number: int = 0) -> None:
    """What `lookup` reads besides slots: of call `number`."""
    if lookups.starts is not None:
        layout.add(f"starts{number}", lookups.starts, np.int32)
    layout.add(f"columns{number}", lookups.columns, np.int32)
    layout.add(f"mean{number}", lookups.mean, np.uint8)


def add_gradient_source(layout: Layout, lookups: Sequence[Lookups], lookup_row: np.ndarray, divided: bool) -> None:
    """Where each lookup of some calls finds its gradient.  One call with one lookup a bag needs no list: the
    kernels compute the row.  `divided`: the gradients of mean bags are divided by their length already."""
    if needs_lookup_rows(lookups):
        layout.add("lookup_row", lookup_row, np.int32)
    if not divided and any(each.starts is not None and each.mean.any() for each in lookups):
        layout.add("divisor", np.concatenate([divisors(each) for each in lookups]), np.float32)


def add_weights(layout: Layout, weights: np.ndarray | None) -> None:
    """Per-sample weights float32 [L], if there are any."""
    if weights is not None:
        layout.add("weights", weights, np.float32)


def needs_lookup_rows(lookups: Sequence[Lookups]) -> bool:
    return len(lookups) != 1 or lookups[0].starts is not None


def divisors(lookups: Lookups) -> np.ndarray:
    """By what the gradient of each lookup is divided, float32 [L]: its bag's length, or 1."""
    if lookups.starts is None or not lookups.mean.any():
        return np.ones(lookups.rows.size, np.float32)
    lengths = np.diff(lookups.starts)
    means = np.repeat(lookups.mean != 0, lookups.batch_size)
    return np.repeat(np.where(means, lengths, 1).astype(np.float32), lengths)


class Long(NamedTuple):
    """Rows that more than 256 lookups hit, and the chunks of their lookups."""

    rows: int
    chunks: int


def add_segments(layout: Layout, segments: Segments) -> Long:
    """The segments, and the chunks of long rows."""
    layout.add("seg_slot", segments.seg_slot, np.int32)
    layout.add("seg_start", segments.seg_start, np.int32)
    layout.add("seg_lookup", segments.seg_lookup, np.int32)
    sizes = np.diff(segments.seg_start)
    long_rows = np.flatnonzero(sizes > signatures.LONG_ROW)
    if not long_rows.size:
        return Long(0, 0)
    counts = -(-sizes[long_rows] // signatures.LONG_ROW)
    first = np.concatenate([[0], np.cumsum(counts)])
    start = np.repeat(segments.seg_start[long_rows] - signatures.LONG_ROW * first[:-1], counts)
    start = start + signatures.LONG_ROW * np.arange(first[-1])
    layout.add("long_rows", long_rows, np.int32)
    layout.add("long_chunks", first, np.int32)
    layout.add("chunk_start", start, np.int32)
    stop = np.repeat(segments.seg_start[long_rows + 1], counts)
    layout.add("chunk_stop", np.minimum(start + signatures.LONG_ROW, stop), np.int32)
    return Long(int(long_rows.size), int(first[-1]))


def add_update(
    layout: Layout, segments: Segments, lookups: Sequence[Lookups], weights: np.ndarray | None, divided: bool,
    bases: np.ndarray | None = None,
) -> Long:  # fmt: skip
    """What the update of calls reads besides the inputs of the first.  `bases`: first group row of each table, for
    formulas that count steps (None: this one does not)."""
    long = add_segments(layout, segments)
    add_gradient_source(layout, lookups, merged_rows(lookups), divided)
    add_weights(layout, weights)
    if bases is not None:
        _add_tables(layout, segments, lookups, bases)
    return long


def _add_tables(layout: Layout, segments: Segments, lookups: Sequence[Lookups], bases: np.ndarray) -> None:
    """Each row's table, and which tables are used."""
    assert segments.seg_row is not None
    tables = len(bases) - 1
    seg_table, used = np.empty(segments.seg_row.size, np.int32), np.zeros(tables, np.uint8)
    tables_of(segments.seg_row, bases, seg_table, np.zeros(tables, np.int64))
    used[used_tables(lookups, bases)] = 1
    layout.add("seg_table", seg_table, np.int32)
    layout.add("used", used, np.uint8)
