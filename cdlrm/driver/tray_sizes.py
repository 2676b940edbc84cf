"""How large the trays of a ring become, from what they carry one after the other: for `--dry-run`.

They are laid out as `gpu_transfers` and `gpu_kernels` lay them out, and take turns and grow as `Ring.take` lets them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .staging import LEAST_BYTES, Layout


@dataclass(frozen=True)
class Carried:
    """What one tray carries: rows that are filled, how many of them are copied, and rows that are written home.

    With `lookups` in `bags` it is a plan, of `distinct` rows of which `long_rows` have many lookups, in `long_chunks`;
    or, in the ring of an evaluation, its batch, of whose `distinct` rows the `copied` ones are neither cached nor
    generated.
    """

    lookups: int = 0
    bags: int = 0
    distinct: int = 0
    long_rows: int = 0
    long_chunks: int = 0
    fills: int = 0
    copied: int = 0
    evicts: int = 0


@dataclass
class Moves:
    """What the trays carry in a run, in its order; None: the oldest batch that was begun has ended.

    `slots` of the cache in the end.  `trained`, `evaluated_before`: how much of `carried` and `evaluated` came before
    the last batch was trained; `read`: of `carried` before the last evaluation.  `grown`: for each time that the cache
    grew how much of `carried` came before, and its slots while they were copied, old and new.
    """

    slots: int = 0
    carried: list[Carried | None] = field(default_factory=list)
    trained: int = 0
    read: int = 0
    grown: list[tuple[int, int]] = field(default_factory=list)
    evaluated: list[Carried] = field(default_factory=list)
    evaluated_before: int = 0


@dataclass(frozen=True)
class Shape:
    """What is the same for all batches of a group: `features`, `several` ids a bag, of which the `mean` is taken;
    bytes of weights and state of a row that travels with its plan (0: they do not); `tables` whose steps are counted
    (0: they are not)."""

    features: int
    several: bool
    mean: bool
    weight_bytes: int
    state_bytes: int
    tables: int


def ring_bytes(sizes: Sequence[tuple[int, bool] | None], limit: int) -> int:
    """All trays of a ring of at most `limit`, in the end: each of `sizes` is the bytes of what is carried and whether
    it stays until a batch has ended (None: the oldest one has)."""
    trays: list[int] = []
    free, used = deque[int](), deque[int]()
    for size in sizes:
        if size is None:
            free.append(used.popleft())
            continue
        nbytes, stays = size
        if not free or len(trays) < limit:
            number = len(trays)
            trays.append(0)
        else:
            number = free.popleft()
        if nbytes > trays[number]:
            trays[number] = max(LEAST_BYTES, nbytes + nbytes // 4)
        (used if stays else free).append(number)
    return sum(trays)


def carried_bytes(carried: Carried, shape: Shape) -> int:
    """Of a plan, or of a move outside of plans."""
    layout = Layout()
    if carried.lookups:
        _room(layout, 4 * carried.lookups)  # slots
        _inputs(layout, carried, shape)
        for count in (carried.distinct, carried.distinct + 1, carried.lookups):  # segments
            _room(layout, 4 * count)
        if carried.long_rows:
            for count in (carried.long_rows, carried.long_rows + 1, carried.long_chunks, carried.long_chunks):
                _room(layout, 4 * count)
        if shape.several:
            for _ in range(1 + shape.mean):  # bag of each lookup, and its length
                _room(layout, 4 * carried.lookups)
        if shape.tables:
            _room(layout, 4 * carried.distinct)
            _room(layout, shape.tables)
    for rows, travelling in ((carried.evicts, carried.evicts), (carried.fills, carried.copied)):
        for nbytes in (8 * rows, 4 * rows, shape.weight_bytes * travelling, shape.state_bytes * travelling):
            _room(layout, nbytes)
    return layout.nbytes


def evaluated_bytes(carried: Carried, shape: Shape) -> int:
    """Of a batch that is only read."""
    layout = Layout()
    _room(layout, 4 * carried.lookups)
    _inputs(layout, carried, shape)
    rows, copied = carried.distinct, carried.copied
    for nbytes in (8 * rows, 4 * rows, shape.weight_bytes * copied, shape.state_bytes * copied):
        _room(layout, nbytes)
    return layout.nbytes


def _inputs(layout: Layout, carried: Carried, shape: Shape) -> None:
    if shape.several:
        _room(layout, 4 * (carried.bags + 1))
    _room(layout, 4 * shape.features)
    _room(layout, shape.features)


def _room(layout: Layout, nbytes: int) -> None:
    layout.add_room("", nbytes, uploaded=True)
