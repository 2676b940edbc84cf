"""`GpuRecords`: the records of a group on a GPU, and every launch on them.

Streams.  Transfers (upload of plan and inputs, evict, fill) are issued on a stream of their own, kernels of the
training on torch's current stream; events order them:

* a plan's transfers come after the end of the batch that it waits for (`batch_ended`) and after every `fence`;
* a kernel comes after the transfers of its plan (`Slot.ready`), or, for rows that no plan knows of, after all.

In a steady step the host waits only for a slot of the ring whose batch has not run, or for staged rows to land.
Growth, moves outside of plans and `update="step"` wait too; `traffic.synchronizations` counts each by its reason.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import DeviceError, DeviceMemoryError
from ..lookups import Lookups
from ..optim import Optimizer
from ..plan.kernels import tables_of
from ..store import bits
from .backend import DeviceBuffer, Event, Stream
from .base import Records, Segments, Update, merged_rows, merged_weights, used_tables
from .carrier import Staged, ZeroCopy
from .formulas import Formula, StepCounts
from .held import Held
from .launches import Launcher
from .plan_arrays import Long, add_gradient_source, add_inputs, add_segments, divisors
from .staging import Layout, Ring, Slot

if TYPE_CHECKING:
    from ..plan import Plan
    from ..step import Call
    from ..store import Store
    from .gpu import GpuDriver

Method = TypeVar("Method", bound=Callable[..., Any])

PIECE_ROWS = 1 << 16  # rows moved at once outside of plans
OUTPUTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _named(stage: str) -> Callable[[Method], Method]:
    """Errors of the device say in which stage they came to light, and for which batch."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: GpuRecords, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except DeviceError as error:
                self.driver.note(error)
                batch = next((number for arg in (*args, *kwargs.values()) if (number := _batch_of(arg)) >= 0), -1)
                told = type(error)(f"{stage}{f' of batch {batch}' if batch >= 0 else ''}: {error}")
                told.__dict__.update(error.__dict__)
                raise told from error

        return call  # type: ignore[return-value]

    return decorate


def _batch_of(argument: Any) -> int:
    """The batch that a plan, a call or an update belongs to; -1: another kind of argument."""
    if isinstance(argument, Update):
        argument = argument.calls[0]
    owner = getattr(argument, "step", argument)
    return int(getattr(owner, "batch", -1))


@dataclass
class Staging:
    """A plan on the device: its slot, and what the host must remember of it."""

    slot: Slot
    lookups: list[Lookups]
    first: list[int]  # number of each call's first lookup
    weights: np.ndarray | None
    long: Long
    copied: int  # fills that are not generated on the device
    released: bool = False


class GpuRecords(Records):
    """`weight` float32 [C, D] and `state` float32 [C, S] in device memory."""

    reads_apart = True

    def __init__(self, driver: GpuDriver, store: Store, bases: np.ndarray, optimizer: Optimizer) -> None:
        self.driver, self.backend, self.store, self.bases = driver, driver.backend, store, bases
        self.transfer = driver.transfer
        self.dim, self.state_width = store.dim, store.state_width
        self.launcher = Launcher(self.backend, self.dim)
        self.rows, self.closed = 0, False
        self.weight = self.state = self.backend.alloc(0)
        self.ring = Ring(self.backend, self.transfer)  # plans, and moves outside of them
        self.extra = Ring(self.backend, self.transfer)  # what no plan has brought: the trainer's
        self.carrier: ZeroCopy | Staged = driver.carrier(store, self.ring)
        self._held = Held(self, self.backend, self.transfer)
        self.formula = Formula(optimizer)
        self.counts = StepCounts(self.backend, optimizer, len(bases) - 1) if optimizer.counts_steps else None
        seeds, self._seed_addresses, self._makes = self._upload_seeds()
        used = {"ring": self.ring, "extra": self.extra, "carrier": self.carrier, "counts": self.counts, "seeds": seeds}
        self._held.things.update(used)
        self._ended: deque[tuple[int, Event]] = deque(maxlen=64)
        self._fence: Event = None
        self._moved: Event = None  # all transfers so far
        self._staged: dict[int, Staging] = {}  # executed, not ended, by batch
        self._uses: dict[Stream, Event] = {}  # the last work on records of each stream that was torch's current one
        self._held.things["uses"] = self._uses
        self._apart: DeviceBuffer = self.backend.alloc(0)  # rows that are only read

    def set_depth(self, depth: int) -> None:
        self.ring.limit = depth + 2

    def may_begin(self) -> bool:
        return len(self._staged) < self.ring.limit - 1

    # --- memory ---

    def _upload_seeds(self) -> tuple[Any, dict[str, int], np.ndarray]:
        """What the fill kernel needs to generate rows; per table whether it can."""
        arrays = self.store.initializer.for_device()
        makes = arrays["kinds"] >= 0
        layout = Layout()
        for name, array in arrays.items():
            layout.add(name, array, array.dtype)
        slot = Ring(self.backend, self.transfer).take(layout)
        self.ring.upload(slot, self.transfer)
        self.backend.synchronize(self.backend.record(self.transfer), "start")
        return slot, {name: slot.at(name) for name in arrays}, makes

    @_named("growth of the cache")
    def resize(self, rows: int, spans: Sequence[tuple[int, int, int]]) -> None:
        """Waits for the device: nothing may use the memory that is left."""
        backend, stream = self.backend, self.transfer
        if self.rows and not spans:
            self._replace(rows)
            return
        weight, state = self._places(rows)
        backend.wait(stream, self._computed())
        for to, start, count in spans:
            for new, old, width in ((weight, self.weight, self.dim), (state, self.state, self.state_width)):
                size = 4 * width
                if count and width:
                    backend.copy(new.address + to * size, old.address + start * size, count * size, "d2d", stream)
        self._moved = backend.record(stream)
        backend.synchronize(self._moved, "growth")
        self.rows, self.weight, self.state = rows, weight, state
        self._held.things["records"] = weight, state

    def _places(self, rows: int) -> tuple[DeviceBuffer, DeviceBuffer]:
        return self.backend.alloc(4 * rows * self.dim), self.backend.alloc(4 * rows * self.state_width)

    def _replace(self, rows: int) -> None:
        """`rows` places where nothing is kept of the old ones: their memory is given back first."""
        backend, before = self.backend, self.rows
        backend.wait(self.transfer, self._computed())
        backend.synchronize(backend.record(self.transfer), "growth")
        self._held.things.pop("records", None)
        self.weight = self.state = backend.alloc(0)
        try:
            self.weight, self.state = self._places(rows)
        except DeviceMemoryError:
            self.weight, self.state = self._places(before)
            raise
        finally:
            self._held.things["records"] = self.weight, self.state
            # torch may have freed this memory a moment ago, with work on it still to come on its own stream
            backend.wait(self.transfer, backend.record(backend.compute_stream()))
        self.rows = rows

    def _computed(self) -> Event:
        """An event after all that was computed, whichever streams were torch's current ones."""
        stream = self.backend.compute_stream()
        self._after_others(stream)
        return self.backend.record(stream)

    def _after_others(self, stream: Stream) -> None:
        for other, event in list(self._uses.items()):
            if other != stream:
                self.backend.wait(stream, event)

    def _used(self, stream: Stream) -> None:
        """Work on records was issued on torch's current stream."""
        self._uses[stream] = self.backend.record(stream)

    def _records(self) -> dict[str, int]:
        return {"weight": self.weight.address, "weight_stride": self.dim, "state": self.state.address,
                "state_stride": max(self.state_width, 1)}  # fmt: skip

    # --- the way to and from the store ---

    @_named("transfer")
    def begin(self, plan: Plan, rows: np.ndarray, slots: np.ndarray) -> None:
        self._order_transfer(plan.wait_for)
        self.carrier.before_read(plan.fill_rows)
        layout, segments = Layout(), Segments(plan.seg_slot, plan.seg_start, plan.seg_lookup, plan.seg_row)
        layout.add("slots", plan.slots, np.int32)
        long = add_segments(layout, segments)
        for number, lookups in enumerate(plan.calls):
            add_inputs(layout, lookups, number)
        add_gradient_source(layout, plan.calls, merged_rows(plan.calls), False)
        weights = merged_weights([lookups.weights for lookups in plan.calls], plan.calls)
        if weights is not None:
            layout.add("weights", weights, np.float32)
        if self.counts is not None:
            self._add_tables(layout, segments, plan.calls)
        order, copied = self._fill_order(plan.fill_rows)
        slot = self._take_moves(layout, (rows, slots), (plan.fill_rows[order], plan.fill_slots[order]), copied)
        self.ring.upload(slot, self.transfer)
        first = np.cumsum([0, *(lookups.rows.size for lookups in plan.calls)]).tolist()
        plan.staged = self._staged[plan.batch] = Staging(slot, plan.calls, first, weights, long, copied)
        self.driver.told_until(slot.verdict)

    def _order_transfer(self, wait_for: int) -> None:
        fence, self._fence = self._fence, None
        if fence is not None:
            self.backend.wait(self.transfer, fence)
        for batch, event in list(self._ended):
            if batch >= wait_for >= 0:
                self.backend.wait(self.transfer, event)
                break

    def _fill_order(self, rows: np.ndarray) -> tuple[np.ndarray, int]:
        """Which fills come first: those that are copied (their number is the second value), then those generated."""
        stored, fresh = bits.positions(self.store.trained, rows)
        if fresh.size and not self._makes.all():
            made = self._makes[np.searchsorted(self.bases, rows[fresh], side="right") - 1]
            stored, fresh = np.concatenate([stored, fresh[~made]]), fresh[made]
        return np.concatenate([stored, fresh]), int(stored.size)

    def _take_moves(
        self, layout: Layout, evicts: tuple[np.ndarray, np.ndarray], fills: tuple[np.ndarray, np.ndarray], copied: int
    ) -> Slot:
        """A slot with `layout`, the lists of both moves, and the records that are copied where they travel with it."""
        for name, (rows, slots) in (("evict", evicts), ("fill", fills)):
            layout.add(f"{name}_rows", rows, np.int64)
            layout.add(f"{name}_slots", slots, np.int32)
        self.carrier.fill_room(layout, copied)
        self.carrier.evict_room(layout, evicts[0].size)
        slot = self.ring.take(layout)
        if copied:
            self.carrier.gather(slot, fills[0][:copied])
        return slot

    @_named("write-back")
    def write(self, rows: np.ndarray, slots: np.ndarray, plan: Plan | None = None) -> None:
        if plan is not None:
            self._evict(plan.staged.slot, rows)
            return
        for lo in range(0, rows.size, PIECE_ROWS):
            some = slice(lo, lo + PIECE_ROWS)
            slot = self._move((rows[some], slots[some]), _NOTHING, 0)
            self._evict(slot, rows[some])
            self.ring.give_back(slot, self.backend.record(self.transfer))
        self.ring.land_all()
        self.backend.synchronize(self.backend.record(self.transfer), "write home")

    @_named("fill")
    def read(self, rows: np.ndarray, slots: np.ndarray, plan: Plan | None = None) -> int:
        if plan is not None:
            self._fill(plan.staged.slot, rows.size, plan.staged.copied)
            return int(plan.staged.copied)
        total = 0
        self.carrier.before_read(rows)
        for lo in range(0, rows.size, PIECE_ROWS):
            own_rows, own_slots = rows[lo : lo + PIECE_ROWS], slots[lo : lo + PIECE_ROWS]
            order, copied = self._fill_order(own_rows)
            slot = self._move(_NOTHING, (own_rows[order], own_slots[order]), copied)
            self._fill(slot, own_rows.size, copied)
            self._moved = self.backend.record(self.transfer)
            self.ring.give_back(slot, self._moved)
            total += copied
        return total

    def _move(self, evicts: Any, fills: Any, copied: int) -> Slot:
        """Lists of a move outside of plans, on the device; after all that was computed."""
        self.backend.wait(self.transfer, self._computed())
        slot = self._take_moves(Layout(), evicts, fills, copied)
        self.ring.upload(slot, self.transfer)
        return slot

    def _evict(self, slot: Slot, rows: np.ndarray) -> None:
        values = {**self._records(), **self.carrier.home(slot, "evict"), "rows": slot.at("evict_rows"),
                  "slots": slot.at("evict_slots"), "count": rows.size, "dim": self.dim,
                  "state_width": self.state_width}  # fmt: skip
        self.launcher.launch("evict", (), rows.size, self.transfer, values)
        self.carrier.bring_home(slot, rows, self.transfer)

    def _fill(self, slot: Slot, count: int, copied: int) -> None:
        values = {**self._records(), **self.carrier.home(slot, "fill"), "rows": slot.at("fill_rows"),
                  "slots": slot.at("fill_slots"), "copied": copied, "count": count, "dim": self.dim,
                  "state_width": self.state_width, "tables": len(self.bases) - 1,
                  "initial_state": self.store.initial_state, **self._seed_addresses}  # fmt: skip
        self.launcher.launch("fill", (), count, self.transfer, values)

    @_named("transfer")
    def executed(self, plan: Plan) -> None:
        self._moved = plan.staged.slot.ready = self.backend.record(self.transfer)

    @_named("end")
    def batch_ended(self, plan: Plan) -> None:
        if self.driver.dead:
            return
        if plan.staged is not None:
            self.backend.wait(self.backend.compute_stream(), plan.staged.slot.ready)  # also if it was not looked up
        event = self._computed()
        self._ended.append((plan.batch, event))
        self._release(plan.batch, event)

    @_named("order of streams")
    def fence(self) -> None:
        if not self.driver.dead:
            self._fence = self._computed()

    @_named("end")
    def forget_plans(self) -> None:
        """Plans that were executed and will not be trained."""
        self.fence()
        for batch in list(self._staged):
            self._release(batch, None if self.driver.dead else self.backend.record(self.transfer))

    def _release(self, batch: int, event: Event) -> None:
        staging = self._staged.pop(batch, None)
        if staging is not None:
            staging.released = True
            staging.slot.verdict = self.driver.verdicts.number
            self.ring.give_back(staging.slot, event)

    # --- kernels ---

    @_named("lookup")
    def lookup(self, slots: np.ndarray, lookups: Lookups, out: Tensor, call: Call | None = None) -> None:
        stream = self.backend.compute_stream()
        self._after_others(stream)
        staging = self._staging_of(call)
        if staging is not None and call is not None:
            number = call.announced
            self.backend.wait(stream, staging.slot.ready)
            slot, at = staging.slot, staging.slot.at("slots") + 4 * staging.first[number]
            weights, extra = self._weights(staging, number, lookups, stream)
        else:
            layout, number, extra = Layout(), 0, None
            layout.add("slots", slots, np.int32)
            add_inputs(layout, lookups)
            if lookups.weights is not None:
                layout.add("weights", lookups.weights, np.float32)
            slot = extra = self._upload(layout, stream)
            at, weights = slot.at("slots"), slot.at("weights")
        place = {"weight": self.weight.address, "slots": at, "per_sample": weights}
        self._pool(place, slot, number, lookups, out, stream)
        self._done_with(extra, stream)
        self._used(stream)

    @_named("lookup")
    def lookup_apart(self, slots: np.ndarray, lookups: Lookups, out: Tensor) -> None:
        stream = self.backend.compute_stream()
        self._after_others(stream)
        rows, first, inverse = np.unique(lookups.rows, return_index=True, return_inverse=True)
        at = slots[first].astype(np.int64)
        cached, missing = np.flatnonzero(at >= 0), np.flatnonzero(at < 0)
        self.carrier.before_read(rows[missing])
        order, copied = self._fill_order(rows[missing])
        layout = Layout()
        layout.add("slots", inverse, np.int32)
        add_inputs(layout, lookups)
        if lookups.weights is not None:
            layout.add("weights", lookups.weights, np.float32)
        layout.add("own_rows", at[cached], np.int64)
        layout.add("own_slots", cached, np.int32)
        layout.add("fill_rows", rows[missing][order], np.int64)
        layout.add("fill_slots", missing[order], np.int32)
        self.carrier.fill_room(layout, copied)
        slot = self.extra.take(layout)
        if copied:
            self.carrier.gather(slot, rows[missing][order][:copied])
        if self._moved is not None:
            self.backend.wait(stream, self._moved)
        self.extra.upload(slot, stream)
        room = self._room_apart(rows.size)
        place = {"weight": room, "weight_stride": self.dim, "state": 0, "state_stride": 1}
        ours = {"home_weight": self.weight.address, "home_weight_stride": self.dim, "home_state": 0,
                "home_state_stride": 1, "staged": 0, "rows": slot.at("own_rows"),
                "slots": slot.at("own_slots")}  # fmt: skip
        theirs = {**self.carrier.home(slot, "fill"), "rows": slot.at("fill_rows"), "slots": slot.at("fill_slots")}
        for count, ready, home in ((cached.size, cached.size, ours), (missing.size, copied, theirs)):
            values = {**place, **home, "copied": ready, "count": count, "dim": self.dim, "state_width": 0,
                      "tables": len(self.bases) - 1, "initial_state": 0.0, **self._seed_addresses}  # fmt: skip
            self.launcher.launch("fill", (), count, stream, values)
        weights = {"slots": slot.at("slots"), "per_sample": slot.at("weights")}
        self._pool({"weight": room, **weights}, slot, 0, lookups, out, stream)
        self._done_with(slot, stream)
        self._used(stream)

    def _pool(
        self, place: dict[str, int], slot: Slot, number: int, lookups: Lookups, out: Tensor, stream: Stream
    ) -> None:
        """Launch the pooled lookup of call `number` of `slot`; `place`: weight, slots and per_sample."""
        values = {
            **place, "weight_stride": self.dim, "starts": slot.at(f"starts{number}"),
            "columns": slot.at(f"columns{number}"), "mean": slot.at(f"mean{number}"),
            "out": self.backend.address(out), "dim": self.dim, "batch": lookups.batch_size,
            "features": lookups.mean.size, "width": lookups.width,
        }  # fmt: skip
        bags = lookups.batch_size * lookups.mean.size
        self.launcher.launch("lookup", (self.launcher.held, OUTPUTS[out.dtype]), bags, stream, values)

    def _room_apart(self, rows: int) -> int:
        """Address of room for weights of `rows` rows that are only read."""
        if self._apart.nbytes < 4 * rows * self.dim:
            self.backend.synchronize(self._computed(), "growth")
            self._held.things.pop("apart", None)
            self._apart = self.backend.alloc(0)
            self._apart = self._held.things["apart"] = self.backend.alloc(4 * rows * self.dim)
        return self._apart.address

    def _staging_of(self, call: Call | None) -> Staging | None:
        """The plan of an announced call, while it is on the device."""
        staging: Staging | None = None if call is None or call.plan is None or call.announced < 0 else call.plan.staged
        return None if staging is None or staging.released else staging

    def _weights(self, staging: Staging, number: int, lookups: Lookups, stream: Stream) -> tuple[int, Slot | None]:
        """Address of a call's per-sample weights: those announced, unless they have changed since."""
        if lookups.weights is None:
            return 0, None
        announced = staging.lookups[number].weights
        if announced is not None and np.array_equal(announced, lookups.weights):
            return staging.slot.at("weights") + 4 * staging.first[number], None
        layout = Layout()
        layout.add("weights", lookups.weights, np.float32)
        slot = self._upload(layout, stream)
        return slot.at("weights"), slot

    @_named("gradient of per-sample weights")
    def weight_grad(self, call: Call, grad: Tensor) -> Tensor:
        stream, lookups = self.backend.compute_stream(), call.lookups
        self._after_others(stream)
        out = self.backend.output((lookups.rows.size,), torch.float32)
        staging, extra = self._staging_of(call), None
        if staging is not None and len(staging.lookups) == 1:
            slot = staging.slot
        else:
            layout = Layout()
            layout.add("slots", call.slots, np.int32)
            add_inputs(layout, lookups)
            add_gradient_source(layout, [lookups], lookups.lookup_row, False)
            slot = extra = self._upload(layout, stream)
        grad = self.launcher.aligned(grad)
        source = self.launcher.source(slot, [lookups], grad, divided=False)
        values = {"weight": self.weight.address, "weight_stride": self.dim, "slots": slot.at("slots"),
                  "lookups": lookups.rows.size, **source, "per_sample": 0,
                  "out": self.backend.address(out)}  # fmt: skip
        self.launcher.launch("weight_grad", (), lookups.rows.size, stream, values)
        self._done_with(extra, stream)
        self._used(stream)
        self.backend.hand_over(stream)
        return out

    def take_gradient(self, call: Call, grad: Tensor, keep: bool) -> None:
        """Mean bags are divided in the update's kernel, or here when the gradient is kept."""
        lookups = call.lookups
        call.grad, call.divided = grad, keep
        if keep and (lookups.starts is None or not lookups.mean.any()):
            call.grad = grad.clone()  # autograd may use the memory again
        elif keep:
            self.driver.waited("lengths of bags", 1)
            length = np.ones(grad.shape[0], np.float32)
            length[lookups.lookup_row] = divisors(lookups)
            call.grad = grad / torch.from_numpy(length).to(grad.device)[:, None]

    @_named("update")
    def update(self, update: Update) -> None:
        stream = self.backend.compute_stream()
        self._after_others(stream)
        elsewhere = self.driver.after_checks(stream, update.verdicts)
        calls, extra = update.calls, None
        lookups = [call.lookups for call in calls]
        divided = calls[0].divided
        staging = self._staging_of(calls[0]) if update.plan is not None else None
        weights = merged_weights([call.weights for call in calls], lookups)
        if staging is not None:
            slot, long = staging.slot, staging.long
            same = weights is None or (staging.weights is not None and np.array_equal(weights, staging.weights))
            per_sample = slot.at("weights") if weights is not None else 0
            if not same:
                layout = Layout()
                layout.add("weights", weights, np.float32)  # type: ignore[arg-type]
                extra = self._upload(layout, stream)
                per_sample = extra.at("weights")
        else:
            layout = Layout()
            long = add_segments(layout, update.segments)
            add_inputs(layout, lookups[0])
            add_gradient_source(layout, lookups, merged_rows(lookups), divided)
            if weights is not None:
                layout.add("weights", weights, np.float32)
            if self.counts is not None:
                self._add_tables(layout, update.segments, lookups)
            slot = extra = self._upload(layout, stream)
            per_sample = slot.at("weights")
        grads = [call.grad for call in calls if call.grad is not None]
        grad = self.launcher.aligned(grads[0] if len(grads) == 1 else torch.cat(grads))
        source = {**self.launcher.source(slot, lookups, grad, divided), "per_sample": per_sample}
        formula = self.formula.values(update.optimizer, update.lr)
        suppress = self.driver.suppression(update.verdicts)
        steps = {} if self.counts is None else self.counts.next(slot)
        self.launcher.apply(self._records(), self.formula.number, slot, update.segments.seg_slot.size, long, source,
                   {**formula, **steps}, suppress, stream)  # fmt: skip
        self._done_with(extra, stream)
        self._used(stream)
        for other in elsewhere:  # torch gives the gradients' memory on in the order of the stream that made them
            self.backend.wait(other, self._uses[stream])

    def _add_tables(self, layout: Layout, segments: Segments, calls: Sequence[Lookups]) -> None:
        """Each row's table, and which tables are used, for formulas that count steps."""
        assert segments.seg_row is not None
        tables = len(self.bases) - 1
        seg_table, used = np.empty(segments.seg_row.size, np.int32), np.zeros(tables, np.uint8)
        tables_of(segments.seg_row, self.bases, seg_table, np.zeros(tables, np.int64))
        used[used_tables(calls, self.bases)] = 1
        layout.add("seg_table", seg_table, np.int32)
        layout.add("used", used, np.uint8)

    def _upload(self, layout: Layout, stream: Stream) -> Slot:
        """Arrays that no plan has brought, on the stream that uses them; after all transfers."""
        if self._moved is not None:
            self.backend.wait(stream, self._moved)
        slot = self.extra.take(layout)
        self.extra.upload(slot, stream)
        return slot

    def _done_with(self, slot: Slot | None, stream: Stream) -> None:
        if slot is not None:
            self.extra.give_back(slot, self.backend.record(stream))

    # --- counts of steps, the end ---

    @property
    @_named("counts of steps")
    def table_steps(self) -> np.ndarray:
        return np.zeros(len(self.bases) - 1, np.int64) if self.counts is None else self.counts.get()

    @_named("counts of steps")
    def set_table_steps(self, steps: np.ndarray) -> None:
        if self.counts is not None:
            self.counts.set(steps)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if not self.driver.dead:
            self.forget_plans()
            self.backend.synchronize(self._computed(), "close")
            self.backend.synchronize(self.backend.record(self.transfer), "close")
            self.ring.close()
            self.extra.close()
        self.carrier.close()
        self._held.release()
        self.driver.records_closed()


_NOTHING = (np.empty(0, np.int64), np.empty(0, np.int32))
