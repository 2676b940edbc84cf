"""How much device and pinned memory a run will use on a GPU, from what its batches need: for `--dry-run`.

Only what depends on the tables' size, the cache or the batches' distinct rows is computed; trays of the rings as
`tray_sizes` says.
"""

from __future__ import annotations

from dataclasses import dataclass

from .gpu_transfers import PIECE_ROWS
from .tray_sizes import Carried, Moves, Shape, carried_bytes, evaluated_bytes, ring_bytes
from .verdicts import FLAGS

EVALUATION_TRAYS = 3  # of the ring of what no plan has brought


@dataclass
class Need:
    """One group and its largest batch.

    `rows` of the tables, `dim` and `state_width` in floats, `slots` of the cache (all rows: `resident`) and before it
    grew (`first_slots`), `in_file`.
    The batch: `batch_size`, `features`, `lookups`, `distinct` rows, `long_chunks` of rows with many lookups,
    `several` ids a bag, `mean` bags.  `read_only`: distinct rows of the largest evaluated
    batch (0: nothing is evaluated).  `counts_steps`: the optimizer does.  `growing`: the records are
    copied to a larger place while they are in use.  `written`: rows that are written home at once: at each of its
    `saves`, or (0) at the end of the run only.  `moves`: what each batch moves, where that was planned (None: as much
    as the largest one may).
    """

    tables: int
    rows: int
    dim: int
    state_width: int
    slots: int
    first_slots: int
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
    moves: Moves | None = None


@dataclass
class Foretold:
    """Bytes by what they are for, on the device while batches are trained, and pinned in the end.

    More on the device than that: `evaluating`, when all was trained; `last`, when rows are then written home;
    `growing`, between two steps (a batch that needs more than the whole cache waits for the one before it), while the
    records are copied to a larger place.  `first`: all on the device in the evaluation before training.
    """

    device: dict[str, int]
    pinned: dict[str, int]
    first: int
    evaluating: int
    last: int
    growing: int


def foretell(need: Need, pins_tables: bool, padded_width: int) -> Foretold:
    """`padded_width`: floats of a record in host memory, 0 where weights and state are two arrays."""
    record = 4 * (need.dim + need.state_width)
    staged = need.in_file or not pins_tables
    shape = Shape(
        need.features, need.several, need.mean, 4 * need.dim * staged, 4 * need.state_width * staged,
        need.tables if need.counts_steps else 0,
    )  # fmt: skip
    moves = need.moves or _largest_moves(need)
    trays = 3 if need.resident else need.prefetch_depth + 2
    sizes = [None if each is None else (carried_bytes(each, shape), each.lookups > 0) for each in moves.carried]
    ring, trained, read = (ring_bytes(sizes[:end], trays) for end in (len(sizes), moves.trained, moves.read))
    growing = [record * slots + ring_bytes(sizes[:end], trays) for end, slots in moves.grown]
    sizes = [(evaluated_bytes(each, shape), False) for each in moves.evaluated]
    lists, before = (ring_bytes(sizes[:end], EVALUATION_TRAYS) for end in (len(sizes), moves.evaluated_before))
    apart = 0 if need.resident else need.read_only * 4 * need.dim
    flags, steps = 4 * (FLAGS + 1), 16 * need.tables if need.counts_steps else 0
    device = {
        "records": need.slots * record,
        "rows of an evaluation": apart,
        "lists of an evaluation": before,
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
    first = need.first_slots * record + apart + before + flags + steps
    later, grown = lists - before, max(growing, default=0) - need.slots * record - trained
    return Foretold(device, pinned, first, later + read - trained, later + ring - trained, grown)


def _largest_moves(need: Need) -> Moves:
    """As if every batch were the largest one, and all its rows were filled, none of them from the store."""
    rows = need.rows if need.resident else 0  # all of them are filled first
    pieces = [Carried(fills=min(rows - lo, PIECE_ROWS)) for lo in range(0, rows, PIECE_ROWS)]
    plan = Carried(
        need.lookups, need.features * need.batch_size, need.distinct, need.long_chunks, need.long_chunks,
        fills=0 if need.resident else need.distinct,
    )  # fmt: skip
    plans = [plan, None] * (3 if need.resident else need.prefetch_depth + 2)
    written = [Carried(evicts=min(need.written - lo, PIECE_ROWS)) for lo in range(0, need.written, PIECE_ROWS)]
    carried: list[Carried | None] = [*pieces, *plans, *written * max(need.saves, 1)]
    # Else rows are written home when the run is over, and what it had besides is gone.
    trained = len(carried) if need.saves else len(pieces) + len(plans)
    evaluated = [Carried(distinct=0 if need.resident else need.read_only)] * (EVALUATION_TRAYS * bool(need.read_only))
    grown = [(trained, 2 * need.slots)] if need.growing and not need.resident else []
    return Moves(need.slots, carried, trained, trained, grown, evaluated, len(evaluated))
