"""`GpuDriver`: the seam by launches of the kernels in `cuda/` on a `Backend`; the CPU driver's results, bit for bit.

It never waits for the device on the training path, except where a tray of a ring is still in use or too small (see
`staging`).  `backend.traffic` counts launches, copies, bytes and waits.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DeviceError, PinError
from ..optim import SGD, Optimizer
from ..store.ram import RamStore
from .backend import Backend, Stream
from .base import Driver, Records, Segments, Verdict, merged_weights
from .calibrate import Choice, measure, padded
from .carrier import Staged, ZeroCopy
from .cpu import CpuDriver
from .foretell import Foretold, Need, foretell
from .formulas import Formula
from .gpu_records import GpuRecords
from .launches import Launcher
from .pinned import host_memory
from .plan_arrays import add_inputs, add_update
from .staging import Layout, Ring
from .verdicts import DeviceVerdict, Verdicts

if TYPE_CHECKING:
    from ..step import Call
    from ..store import Store

log = logging.getLogger("cdlrm")


class GpuDriver(Driver):
    """A GPU.  `zero_copy`: kernels may reach pinned tables; `padded`: records of host tables lie together, padded
    to 32 bytes (None: both are measured by `prepare`, once for all drivers with the same `measured`); `why`: how
    the device was chosen."""

    in_place = False

    def __init__(
        self, backend: Backend, *, zero_copy: bool | None = None, padded: bool | None = None, why: str = "",
        measured: dict[Any, Choice] | None = None,
    ) -> None:  # fmt: skip
        self._measured = {} if measured is None else measured
        self.backend, self.name, self.device = backend, backend.name, backend.device
        self.zero_copy, self.padded = zero_copy, padded
        self.host = CpuDriver()
        self.transfer = backend.new_stream()
        self.verdicts = Verdicts(backend)
        self._norms = Ring(backend, self.transfer, 1)  # of gradients that wait, one after the other
        self._open = 0  # records that are in use
        self._notes = [why] if why else []

    @property
    def pins_tables(self) -> bool:  # type: ignore[override]
        return bool(self.zero_copy)

    def notes(self) -> list[str]:
        return list(self._notes)

    def prepare(self, record_widths: Sequence[tuple[int, int]]) -> None:
        if self.zero_copy is not None or not record_widths:
            return
        key = (str(self.device), *sorted(record_widths))
        if key not in self._measured:
            self._measured[key] = measure(self.backend, record_widths)
        choice = self._measured[key]
        self.zero_copy, self.padded = choice.zero_copy, choice.joined_records
        self._notes.append(choice.sentence)

    def most_bytes(self) -> tuple[int, int]:
        return self.backend.most_bytes()

    def foretell(self, need: Need) -> Foretold:
        return foretell(need, self.pins_tables, self.padded_width(need.dim, need.state_width))

    def seconds_to_pin(self, nbytes: int) -> float:
        if not self.pins_tables:
            return 0.0
        memory, started = host_memory(nbytes), time.perf_counter()
        self.backend.register(memory)
        seconds = time.perf_counter() - started
        self.backend.unregister(memory)
        return seconds

    def free_bytes(self) -> int:
        return self.backend.free_bytes()

    def records(self, store: Store, bases: np.ndarray, optimizer: Optimizer, *, in_place: bool = False) -> Records:
        made = GpuRecords(self, store, bases, optimizer)
        self._open += 1
        return made

    def records_closed(self) -> None:
        self._open -= 1

    def padded_width(self, dim: int, state_width: int) -> int:
        return padded((dim, state_width)) if self.padded and state_width else 0

    def carrier(self, store: Store, ring: Ring) -> ZeroCopy | Staged:
        """How the records of `store` travel."""
        if not isinstance(store, RamStore) or not self.zero_copy:
            return Staged(self.backend, store, ring)
        try:
            made = ZeroCopy(self.backend, store, self.transfer, self.progress)
            self._notes.append(made.sentence)
            return made
        except PinError as error:
            told = (
                f"the tables stay in pageable memory and their rows pass through a staging buffer, which costs a copy "
                f"by the host for each row that moves: {error}"
            )
            log.warning("%s", told)
            self._notes.append(told)
            return Staged(self.backend, store, ring)

    def output(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self.backend.output(shape, dtype)

    def hand_over(self) -> None:
        with self._noting():
            self.backend.hand_over(self.backend.compute_stream())

    # --- gradients ---

    def finite(self, grads: Sequence[Tensor], raising: bool, where: str) -> Verdict:
        with self._noting():
            return self.verdicts.check(grads, raising, where)

    def note(self, error: DeviceError) -> None:
        """After a sticky error the device does nothing any more."""
        self.dead = self.dead or error.sticky

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except DeviceError as error:
            self.note(error)
            raise

    def after_checks(self, stream: Stream, verdicts: Sequence[Verdict]) -> list[Stream]:
        """What is issued on `stream` from now on comes after the gradients of `verdicts` and their checks; the other
        streams that made them."""
        waiting = [verdict for verdict in verdicts if isinstance(verdict, DeviceVerdict) and verdict.stream != stream]
        for verdict in waiting:
            self.verdicts.order(stream, verdict)
        return [verdict.stream for verdict in waiting]

    def suppression(self, verdicts: Sequence[Verdict]) -> dict[str, int]:
        """What keeps an update from changing anything, for a kernel."""
        waiting = [verdict for verdict in verdicts if isinstance(verdict, DeviceVerdict)]
        sticky = self.verdicts.sticky if any(verdict.raising for verdict in waiting) else 0
        if not waiting:
            return {"flag": 0, "number": 0, "sticky": sticky}
        one = self.verdicts.either(waiting)
        return {"flag": one.flag, "number": one.number, "sticky": sticky}

    def waited(self, reason: str, times: int) -> None:
        if times:
            self.backend.traffic.synchronizations[reason] += times

    def poll(self) -> None:
        with self._noting():
            self.verdicts.poll()

    def finish(self) -> None:
        with self._noting():
            self.verdicts.finish()

    def told_until(self, verdict: int) -> None:
        """Raise what is known, at least up to that verdict, whose batch has run."""
        with self._noting():
            self.verdicts.finish(verdict, "ring")

    def resume(self) -> None:
        self.verdicts.resume()

    def sum_of_squares(self, calls: Sequence[Call], dim: int) -> float:
        """The sums are made by the update kernels themselves: one step of SGD with lr -1 on rows of zeros."""
        backend, stream = self.backend, self.backend.compute_stream()
        lookups = [call.lookups for call in calls]
        rows, inverse = np.unique(np.concatenate([each.rows for each in lookups]), return_inverse=True)
        segments: Segments = self.host.build_segments(inverse.astype(np.int32), self.host.new_stamps(len(rows)))
        layout = Layout()
        add_inputs(layout, lookups[0])
        weights = merged_weights(lookups)
        long = add_update(layout, segments, lookups, weights, True)
        tray = self._norms.take(layout)
        self._norms.upload(tray, stream)
        sums = backend.output((len(rows), dim), torch.float32)
        backend.clear(backend.address(sums), 4 * sums.numel(), stream)
        grads = [call.grad for call in calls if call.grad is not None]
        grad = grads[0] if len(grads) == 1 else torch.cat(grads)
        optimizer = SGD(lr=0.0)
        launcher = Launcher(backend, dim)
        source = {**launcher.source(tray, lookups, grad, True), "per_sample": tray.at("weights")}
        records = {"weight": backend.address(sums), "weight_stride": dim, "state": 0, "state_stride": 1}
        formula = Formula(optimizer)
        launcher.apply(records, formula.number, tray, len(rows), long, source, formula.values(optimizer, -1.0),
                       {"flag": 0, "number": 0, "sticky": 0}, stream)  # fmt: skip
        backend.synchronize(backend.record(stream), "norm")
        self._norms.give_back(tray, None)
        backend.hand_over(stream)
        return float(sums.double().square().sum())

    def close(self) -> None:
        """Nothing, while records of another group are in use."""
        if self._open == 0:
            self._norms.close()
            self.host.close()
            self.backend.close()
