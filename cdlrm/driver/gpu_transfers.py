"""`Transfers`: plans and records on their way to a GPU and home, all on its stream of transfers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..lookups import Lookups
from ..store import bits
from .backend import Event, Stream
from .base import Segments, merged_weights
from .carrier import Staged, ZeroCopy
from .gpu_order import Order
from .gpu_places import Places
from .launches import Launcher
from .plan_arrays import Long, add_inputs, add_update
from .staging import Layout, Ring, Tray

if TYPE_CHECKING:
    from ..plan import Plan
    from ..step import Call
    from ..store import Store
    from .gpu import GpuDriver

PIECE_ROWS = 1 << 16  # rows moved at once outside of plans
Move = tuple[np.ndarray, np.ndarray]  # rows int64 [n] and their slots int32 [n]
NOTHING: Move = (np.empty(0, np.int64), np.empty(0, np.int32))


@dataclass
class Brought:
    """A plan on the device: its tray, and what the host must remember of it."""

    tray: Tray
    lookups: list[Lookups]
    first: list[int]  # number of each call's first lookup
    weights: np.ndarray | None
    long: Long
    copied: int  # fills that are not generated on the device

    def at(self, name: str, number: int) -> int:
        """Where the part of announced call `number` begins in an array of 4 bytes a lookup."""
        return self.tray.at(name) + 4 * self.first[number]


class Transfers:
    """Of one group, between `store` and `places`.  `counts_steps`: its optimizer does."""

    def __init__(
        self, driver: GpuDriver, store: Store, bases: np.ndarray, order: Order, places: Places, launcher: Launcher,
        counts_steps: bool,
    ) -> None:  # fmt: skip
        self.store, self.bases, self.counts_steps = store, bases, counts_steps
        self.order, self.places, self.launcher = order, places, launcher
        self.backend, self.stream = order.backend, order.transfer
        self.ring = Ring(self.backend, self.stream)  # plans, and moves outside of them
        self.carrier: ZeroCopy | Staged = driver.carrier(store, self.ring)
        self.brought: dict[int, Brought] = {}  # executed, not ended, by batch
        self._upload_seeds()

    def _upload_seeds(self) -> None:
        """What the fill kernel needs to generate rows; per table whether it can."""
        arrays = self.store.initializer.for_device()
        self._makes = arrays["kinds"] >= 0
        layout = Layout()
        for name, array in arrays.items():
            layout.add(name, array, array.dtype)
        self.seeds = Ring(self.backend, self.stream).take(layout)
        self.ring.upload(self.seeds, self.stream)
        self.backend.synchronize(self.backend.record(self.stream), "start")
        self._seed_addresses = {name: self.seeds.at(name) for name in arrays}

    # --- plans ---

    def begin(self, plan: Plan, rows: np.ndarray, slots: np.ndarray) -> Tray:
        """As `Records.begin`; the tray that carries the plan."""
        self.order.before_transfer(plan.wait_for)
        self.carrier.before_read(plan.fill_rows)
        layout, segments = Layout(), Segments(plan.seg_slot, plan.seg_start, plan.seg_lookup, plan.seg_row)
        layout.add("slots", plan.slots, np.int32)
        for number, lookups in enumerate(plan.calls):
            add_inputs(layout, lookups, number)
        weights = merged_weights(plan.calls)
        long = add_update(layout, segments, plan.calls, weights, False, self.bases if self.counts_steps else None)
        order, copied = self.fill_order(plan.fill_rows)
        tray = self._take(layout, (rows, slots), (plan.fill_rows[order], plan.fill_slots[order]), copied)
        self.ring.upload(tray, self.stream)
        first = np.cumsum([0, *(lookups.rows.size for lookups in plan.calls)]).tolist()
        self.brought[plan.batch] = Brought(tray, plan.calls, first, weights, long, copied)
        return tray

    def of(self, call: Call) -> Brought | None:
        """The plan of an announced call, while it is on the device."""
        return None if call.plan is None or call.announced < 0 else self.brought.get(call.plan.batch)

    def release(self, batch: int, event: Event, verdict: int) -> None:
        """After `event` nothing uses the plan of `batch`; `verdict`: the newest that was asked for."""
        brought = self.brought.pop(batch, None)
        if brought is not None:
            brought.tray.verdict = verdict
            self.ring.give_back(brought.tray, event)

    # --- records home, and to their places ---

    def write(self, rows: np.ndarray, slots: np.ndarray, plan: Plan | None) -> None:
        if plan is not None:
            self._evict(self.brought[plan.batch].tray, rows)
            return
        for lo in range(0, rows.size, PIECE_ROWS):
            some = slice(lo, lo + PIECE_ROWS)
            tray = self._move((rows[some], slots[some]), NOTHING, 0)
            self._evict(tray, rows[some])
            self.ring.give_back(tray, self.backend.record(self.stream))
        self.ring.land_all()
        self.backend.synchronize(self.backend.record(self.stream), "write home")

    def read(self, rows: np.ndarray, slots: np.ndarray, plan: Plan | None) -> int:
        if plan is not None:
            brought = self.brought[plan.batch]
            self._fill(brought.tray, rows.size, brought.copied)
            return brought.copied
        total = 0
        self.carrier.before_read(rows)
        for lo in range(0, rows.size, PIECE_ROWS):
            own_rows, own_slots = rows[lo : lo + PIECE_ROWS], slots[lo : lo + PIECE_ROWS]
            order, copied = self.fill_order(own_rows)
            tray = self._move(NOTHING, (own_rows[order], own_slots[order]), copied)
            self._fill(tray, own_rows.size, copied)
            self.ring.give_back(tray, self.order.moved())
            total += copied
        return total

    def fill_order(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        """Which fills come first: those that are copied (their number is the second value), then those generated."""
        stored, fresh = bits.positions(self.store.trained, rows)
        if fresh.size and not self._makes.all():
            made = self._makes[np.searchsorted(self.bases, rows[fresh], side="right") - 1]
            stored, fresh = np.concatenate([stored, fresh[~made]]), fresh[made]
        return np.concatenate([stored, fresh]), int(stored.size)

    def launch_fill(
        self, tray: Tray, lists: str, place: dict[str, int], home: dict[str, int], count: int, copied: int,
        state_width: int, stream: Stream,
    ) -> None:  # fmt: skip
        """`count` records to their `place`: the first `copied` of them from `home`, the others generated.  The arrays
        `{lists}_rows` and `{lists}_slots` of `tray` say which and where."""
        values = {**place, **home, "rows": tray.at(f"{lists}_rows"), "slots": tray.at(f"{lists}_slots"),
                  "copied": copied, "count": count, "dim": self.store.dim, "state_width": state_width,
                  "tables": len(self.bases) - 1, "initial_state": self.store.initial_state,
                  **self._seed_addresses}  # fmt: skip
        self.launcher.launch("fill", (), count, stream, values)

    def _fill(self, tray: Tray, count: int, copied: int) -> None:
        home, width = self.carrier.home(tray, "fill"), self.store.state_width
        self.launch_fill(tray, "fill", self.places.addresses(), home, count, copied, width, self.stream)

    def _evict(self, tray: Tray, rows: np.ndarray) -> None:
        values = {**self.places.addresses(), **self.carrier.home(tray, "evict"), "rows": tray.at("evict_rows"),
                  "slots": tray.at("evict_slots"), "count": rows.size, "dim": self.store.dim,
                  "state_width": self.store.state_width}  # fmt: skip
        self.launcher.launch("evict", (), rows.size, self.stream, values)
        self.carrier.bring_home(tray, rows, self.stream)

    def _move(self, evicts: Move, fills: Move, copied: int) -> Tray:
        """Lists of a move outside of plans, on the device; after all that was computed."""
        self.backend.wait(self.stream, self.order.computed())
        tray = self._take(Layout(), evicts, fills, copied)
        self.ring.upload(tray, self.stream)
        return tray

    def _take(self, layout: Layout, evicts: Move, fills: Move, copied: int) -> Tray:
        """A tray with `layout`, the lists of both moves, and the records that are copied where they travel with it."""
        for name, (rows, slots) in (("evict", evicts), ("fill", fills)):
            layout.add(f"{name}_rows", rows, np.int64)
            layout.add(f"{name}_slots", slots, np.int32)
        self.carrier.fill_room(layout, copied)
        self.carrier.evict_room(layout, evicts[0].size)
        tray = self.ring.take(layout)
        if copied:
            self.carrier.gather(tray, fills[0][:copied])
        return tray

    def close(self) -> None:
        """Wait for what is on its way."""
        self.ring.close()
