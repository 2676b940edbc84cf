"""How much device and pinned memory a run will use on a GPU, from what its batches need: for `--dry-run`.

Only what depends on the tables' size, the cache or the batches' distinct rows is computed.  Trays of the ring are laid
out as `gpu_transfers` lays them out, and grow as `Ring.take` lets them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .gpu_transfers import PIECE_ROWS
from .staging import LEAST_BYTES, Layout
from .verdicts import FLAGS

EVALUATION_TRAYS = 3  # of the ring of what no plan has brought


@dataclass
class Need:
    """One group and its largest batch.

    `rows` of the tables, `dim` and `state_width` in floats, `slots` of the cache (all rows: `resident`), `in_file`.
    The batch: `batch_size`, `features`, `lookups`, `distinct` rows, `long_chunks` of rows with many lookups,
    `several` ids a bag, `mean` bags.  `read_only`: distinct rows of the largest evaluated
    batch (0: nothing is evaluated).  `counts_steps`: the optimizer does.  `growing`: the records are
    copied to a larger place while they are in use.  `written`: rows that are written home at once: at each of its
    `saves`, or (0) at the end of the run only.
    """

    tables: int
    rows: int
    dim: int
    state_width: int
    slots: int
    resident: bool
    in_file: bool
    prefetch_depth: int
    batch_size: int
    features: int
    lookups: int
    distinct: int
    long_chunks: int
    several: bool
    mean: bool
    read_only: int
    counts_steps: bool
    growing: bool
    written: int
    saves: int


@dataclass
class Foretold:
    """Bytes by what they are for; `last`: more device memory that is used when all else was done; `growing`: more
    that is used between two steps (a batch that needs more than the whole cache waits for the
    one before it), while the records are copied to a larger place."""

    device: dict[str, int]
    pinned: dict[str, int]
    last: int
    growing: int


def foretell(need: Need, pins_tables: bool, padded_width: int) -> Foretold:
    """`padded_width`: floats of a record in host memory, 0 where weights and state are two arrays."""
    record = 4 * (need.dim + need.state_width)
    ring = ring_bytes(need, staged=need.in_file or not pins_tables)
    # Else rows are written home when the run is over, and what it had besides is gone.
    trained = ring if need.saves else ring_bytes(replace(need, written=0), staged=False)
    places = 0 if need.resident else need.read_only
    lists = EVALUATION_TRAYS * 12 * places * 5 // 4  # row and slot of each; trays are made a quarter larger
    flags, steps = 4 * (FLAGS + 1), 16 * need.tables if need.counts_steps else 0
    device = {
        "records": need.slots * record,
        "rows of an evaluation": places * 4 * need.dim,
        "lists of an evaluation": lists,
        "ring slots": trained,
        "outputs": 4 * need.dim * need.features * need.batch_size,
        "chunk sums": 8 * need.long_chunks * need.dim,
        "flags and step counts": flags + steps,
    }
    tables = 4 * need.rows * (padded_width or need.dim + need.state_width)
    pinned = {
        "tables": tables if pins_tables and not need.in_file else 0,
        "ring slots": ring,
        "lists of an evaluation": lists,
        "flags and step counts": 4 * FLAGS + steps // 2,
    }
    growing = need.slots * record if need.growing and not need.resident else 0
    return Foretold(device, pinned, ring - trained, growing)


def ring_bytes(need: Need, staged: bool) -> int:
    """All trays of the ring, after the run."""
    record = 4 * (need.dim + need.state_width)
    first = need.rows if need.resident else 0  # all rows are filled
    trays = [0] * (3 if need.resident else need.prefetch_depth + 2)
    moves = [  # how often, and the bytes of one
        (-(-first // PIECE_ROWS), 12 * min(first, PIECE_ROWS)),
        (len(trays), plan_bytes(need)),
        (-(-need.written // PIECE_ROWS), (12 + record * staged) * min(need.written, PIECE_ROWS)),
    ]
    if need.saves:
        moves[2] = (moves[2][0] * need.saves, moves[2][1])  # trays take turns
    for often, nbytes in moves:
        for number in range(min(often, len(trays))):
            if nbytes > trays[number]:
                trays[number] = max(LEAST_BYTES, nbytes + nbytes // 4)
    return sum(trays)


def plan_bytes(need: Need) -> int:
    """Layout of the plan of a batch whose rows are all filled, none of them from the store."""
    layout, bags = Layout(), need.features * need.batch_size

    def add(name: str, count: int, dtype: type) -> None:
        layout.add(name, np.broadcast_to(np.zeros((), dtype), count), dtype)

    add("slots", need.lookups, np.int32)
    add("seg_slot", need.distinct, np.int32)
    add("seg_start", need.distinct + 1, np.int32)
    add("seg_lookup", need.lookups, np.int32)
    for name in ("chunk_start", "chunk_stop", "long_rows", "long_chunks") if need.long_chunks else ():
        add(name, need.long_chunks, np.int32)
    add("columns", need.features, np.int32)
    add("mean", need.features, np.uint8)
    if need.several:
        add("starts", bags + 1, np.int32)
        add("lookup_row", need.lookups, np.int32)
        if need.mean:
            add("divisor", need.lookups, np.float32)
    if need.counts_steps:
        add("seg_table", need.distinct, np.int32)
        add("used", need.tables, np.uint8)
    fills = 0 if need.resident else need.distinct
    add("fill_rows", fills, np.int64)
    add("fill_slots", fills, np.int32)
    return layout.nbytes
