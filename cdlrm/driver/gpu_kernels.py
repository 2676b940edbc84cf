"""`Kernels`: the launches on torch's current stream: lookup, gradient of per-sample weights, update.

What a launch reads is on the device already where its plan has brought it; the rest is uploaded here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..lookups import Lookups
from ..optim import Optimizer
from .backend import DeviceBuffer, Stream
from .base import Update, merged_weights
from .formulas import Formula, StepCounts
from .gpu_order import Order
from .gpu_places import Places
from .gpu_transfers import Brought, Transfers
from .launches import Launcher
from .plan_arrays import add_gradient_source, add_inputs, add_update, add_weights
from .staging import Layout, Ring, Tray

if TYPE_CHECKING:
    from ..step import Call

OUTPUTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Kernels:
    """On the records of one group in `places`.  `things` of a `Held` keep what they use."""

    def __init__(
        self, optimizer: Optimizer, bases: np.ndarray, order: Order, places: Places, transfers: Transfers,
        launcher: Launcher, things: dict[str, Any],
    ) -> None:  # fmt: skip
        self.backend, self.bases, self.order, self.places = order.backend, bases, order, places
        self.transfers, self.launcher, self.things = transfers, launcher, things
        self.dim = places.dim
        self.extra = Ring(self.backend, order.transfer)  # what no plan has brought
        self.formula = Formula(optimizer)
        self.counts = StepCounts(self.backend, optimizer, len(bases) - 1) if optimizer.counts_steps else None
        self._apart: DeviceBuffer = self.backend.alloc(0)  # rows that are only read

    # --- lookup ---

    def lookup(self, slots: np.ndarray, lookups: Lookups, out: Tensor, call: Call | None) -> None:
        stream = self.order.stream()
        brought = None if call is None else self.transfers.of(call)
        if brought is not None and call is not None:
            number, tray = call.announced, brought.tray
            self.backend.wait(stream, tray.ready)
            at = brought.at("slots", number)
            weights, extra = self._weights(brought, number, lookups, stream)
        else:
            layout, number = Layout(), 0
            layout.add("slots", slots, np.int32)
            add_inputs(layout, lookups)
            add_weights(layout, lookups.weights)
            tray = extra = self._upload(layout, stream)
            at, weights = tray.at("slots"), tray.at("weights")
        place = {"weight": self.places.weight.address, "slots": at, "per_sample": weights}
        self._pool(place, tray, number, lookups, out, stream)
        self._done_with(extra, stream)
        self.order.used(stream)

    def lookup_apart(self, slots: np.ndarray, lookups: Lookups, out: Tensor) -> None:
        stream, carrier = self.order.stream(), self.transfers.carrier
        rows, first, inverse = np.unique(lookups.rows, return_index=True, return_inverse=True)
        at = slots[first].astype(np.int64)
        cached, missing = np.flatnonzero(at >= 0), np.flatnonzero(at < 0)
        carrier.before_read(rows[missing])
        order, copied = self.transfers.fill_order(rows[missing])
        layout = Layout()
        layout.add("slots", inverse, np.int32)
        add_inputs(layout, lookups)
        add_weights(layout, lookups.weights)
        layout.add("own_rows", at[cached], np.int64)
        layout.add("own_slots", cached, np.int32)
        layout.add("fill_rows", rows[missing][order], np.int64)
        layout.add("fill_slots", missing[order], np.int32)
        carrier.fill_room(layout, copied)
        tray = self.extra.take(layout)
        if copied:
            carrier.gather(tray, rows[missing][order][:copied])
        self.order.after_moves(stream)
        self.extra.upload(tray, stream)
        room = self._room_apart(rows.size)
        place = {"weight": room, "weight_stride": self.dim, "state": 0, "state_stride": 1}
        ours = {"home_weight": self.places.weight.address, "home_weight_stride": self.dim, "home_state": 0,
                "home_state_stride": 1, "staged": 0}  # fmt: skip
        theirs, fill = carrier.home(tray, "fill"), self.transfers.launch_fill
        fill(tray, "own", place, ours, cached.size, cached.size, 0, stream)
        fill(tray, "fill", place, theirs, missing.size, copied, 0, stream)
        read = {"weight": room, "slots": tray.at("slots"), "per_sample": tray.at("weights")}
        self._pool(read, tray, 0, lookups, out, stream)
        self._done_with(tray, stream)
        self.order.used(stream)

    def _pool(
        self, place: dict[str, int], tray: Tray, number: int, lookups: Lookups, out: Tensor, stream: Stream
    ) -> None:
        """Launch the pooled lookup of call `number` of `tray`; `place`: weight, slots and per_sample."""
        values = {
            **place, "weight_stride": self.dim, "starts": tray.at(f"starts{number}"),
            "columns": tray.at(f"columns{number}"), "mean": tray.at(f"mean{number}"),
            "out": self.backend.address(out), "dim": self.dim, "batch": lookups.batch_size,
            "features": lookups.mean.size, "width": lookups.width,
        }  # fmt: skip
        bags = lookups.batch_size * lookups.mean.size
        self.launcher.launch("lookup", (self.launcher.column_steps, OUTPUTS[out.dtype]), bags, stream, values)

    def _room_apart(self, rows: int) -> int:
        """Address of room for weights of `rows` rows that are only read."""
        if self._apart.nbytes < 4 * rows * self.dim:
            self.backend.synchronize(self.order.computed(), "growth")
            self.things.pop("apart", None)
            self._apart = self.backend.alloc(0)
            self._apart = self.things["apart"] = self.backend.alloc(4 * rows * self.dim)
        return self._apart.address

    def _weights(self, brought: Brought, number: int, lookups: Lookups, stream: Stream) -> tuple[int, Tray | None]:
        """Address of a call's per-sample weights: those announced, unless they have changed since."""
        if lookups.weights is None:
            return 0, None
        announced = brought.lookups[number].weights
        if announced is not None and np.array_equal(announced, lookups.weights):
            return brought.at("weights", number), None
        return self._upload_weights(lookups.weights, stream)

    # --- gradients ---

    def weight_grad(self, call: Call, grad: Tensor) -> Tensor:
        stream, lookups = self.order.stream(), call.lookups
        out = self.backend.output((lookups.rows.size,), torch.float32)
        brought, extra = self.transfers.of(call), None
        if brought is not None and len(brought.lookups) == 1:
            tray = brought.tray
        else:
            layout = Layout()
            layout.add("slots", call.slots, np.int32)
            add_inputs(layout, lookups)
            add_gradient_source(layout, [lookups], lookups.lookup_row, False)
            tray = extra = self._upload(layout, stream)
        grad = self.launcher.aligned(grad)
        source = self.launcher.source(tray, [lookups], grad, divided=False)
        values = {"weight": self.places.weight.address, "weight_stride": self.dim, "slots": tray.at("slots"),
                  "lookups": lookups.rows.size, **source, "per_sample": 0,
                  "out": self.backend.address(out)}  # fmt: skip
        self.launcher.launch("weight_grad", (), lookups.rows.size, stream, values)
        self._done_with(extra, stream)
        self.order.used(stream)
        self.backend.hand_over(stream)
        return out

    def update(self, update: Update, suppress: dict[str, int]) -> None:
        """`suppress`: what keeps it from changing anything, for the kernels."""
        stream, calls = self.order.stream(), update.calls
        lookups = [call.lookups for call in calls]
        divided, extra = calls[0].divided, None
        weights = merged_weights(lookups)
        brought = None if update.plan is None else self.transfers.of(calls[0])
        if brought is not None:
            tray, long = brought.tray, brought.long
            per_sample = 0 if weights is None else tray.at("weights")
            if weights is not None and not (brought.weights is not None and np.array_equal(weights, brought.weights)):
                per_sample, extra = self._upload_weights(weights, stream)
        else:
            layout = Layout()
            add_inputs(layout, lookups[0])
            bases = None if self.counts is None else self.bases
            long = add_update(layout, update.segments, lookups, weights, divided, bases)
            tray = extra = self._upload(layout, stream)
            per_sample = tray.at("weights")
        grads = [call.grad for call in calls if call.grad is not None]
        grad = self.launcher.aligned(grads[0] if len(grads) == 1 else torch.cat(grads))
        source = {**self.launcher.source(tray, lookups, grad, divided), "per_sample": per_sample}
        formula = self.formula.values(update.optimizer, update.lr)
        steps = {} if self.counts is None else self.counts.next(tray)
        distinct = update.segments.seg_slot.size
        self.launcher.apply(self.places.addresses(), self.formula.number, tray, distinct, long, source,
                            {**formula, **steps}, suppress, stream)  # fmt: skip
        self._done_with(extra, stream)
        self.order.used(stream)

    # --- what no plan has brought ---

    def _upload(self, layout: Layout, stream: Stream) -> Tray:
        """Arrays on the stream that uses them; after all transfers."""
        self.order.after_moves(stream)
        tray = self.extra.take(layout)
        self.extra.upload(tray, stream)
        return tray

    def _upload_weights(self, weights: np.ndarray, stream: Stream) -> tuple[int, Tray]:
        layout = Layout()
        add_weights(layout, weights)
        tray = self._upload(layout, stream)
        return tray.at("weights"), tray

    def _done_with(self, tray: Tray | None, stream: Stream) -> None:
        if tray is not None:
            self.extra.give_back(tray, self.backend.record(stream))

    def close(self) -> None:
        """Wait for what is in use."""
        self.extra.close()
