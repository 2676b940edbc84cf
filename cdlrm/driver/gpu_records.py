"""`GpuRecords`: the records of a group on a GPU; errors of the device say where they came to light.

What it is made of: `gpu_places`, the memory; `gpu_order`, which work waits for which; `gpu_transfers`, plans and
records on their way; `gpu_kernels`, lookup and update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import DeviceError, retold
from ..lookups import Lookups
from ..optim import Optimizer
from .base import Records, Update
from .gpu_kernels import Kernels
from .gpu_order import Order
from .gpu_places import Places
from .gpu_transfers import Transfers
from .held import Held
from .launches import Launcher
from .plan_arrays import divisors

if TYPE_CHECKING:
    from ..plan import Plan
    from ..step import Call
    from ..store import Store
    from .gpu import GpuDriver

Method = TypeVar("Method", bound=Callable[..., Any])


def _named(stage: str) -> Callable[[Method], Method]:
    """Errors of the device say in which stage they came to light, and for which batch."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def named(self: GpuRecords, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except DeviceError as error:
                self.driver.note(error)
                batch = next((number for arg in (*args, *kwargs.values()) if (number := _batch_of(arg)) >= 0), -1)
                raise retold(error, f"{stage}{f' of batch {batch}' if batch >= 0 else ''}: {error}") from error

        return named  # type: ignore[return-value]

    return decorate


def _batch_of(argument: Any) -> int:
    """The batch that a plan, a call or an update belongs to; -1: another kind of argument."""
    if isinstance(argument, Update):
        argument = argument.calls[0]
    owner = getattr(argument, "step", argument)
    return int(getattr(owner, "batch", -1))


class GpuRecords(Records):
    """See `Records`."""

    reads_apart = True

    def __init__(self, driver: GpuDriver, store: Store, bases: np.ndarray, optimizer: Optimizer) -> None:
        self.driver, self.backend, self.store = driver, driver.backend, store
        self.rows, self.closed = 0, False
        self._tables = len(bases) - 1
        self._held = Held(self, self.backend, driver.transfer)
        things, launcher = self._held.things, Launcher(self.backend, store.dim)
        self.order = Order(self.backend, driver.transfer)
        self.places = Places(self.order, store.dim, store.state_width, things)
        self.transfers = Transfers(driver, store, bases, self.order, self.places, launcher, optimizer.counts_steps)
        self.kernels = Kernels(optimizer, bases, self.order, self.places, self.transfers, launcher, things)
        things.update(
            uses=self.order.uses, ring=self.transfers.ring, carrier=self.transfers.carrier, seeds=self.transfers.seeds,
            extra=self.kernels.extra, counts=self.kernels.counts,
        )  # fmt: skip

    @_named("growth of the cache")
    def resize(self, rows: int, spans: Sequence[tuple[int, int, int]]) -> None:
        self.places.resize(rows, spans)
        self.rows = rows

    # --- the way to and from the store ---

    def set_depth(self, depth: int) -> None:
        self.transfers.ring.limit = depth + 2

    def may_begin(self) -> bool:
        return len(self.transfers.brought) < self.transfers.ring.limit - 1

    @_named("transfer")
    def begin(self, plan: Plan, rows: np.ndarray, slots: np.ndarray) -> None:
        tray = self.transfers.begin(plan, rows, slots)
        self.driver.told_until(tray.verdict)

    @_named("write-back")
    def write(self, rows: np.ndarray, slots: np.ndarray, plan: Plan | None = None) -> None:
        self.transfers.write(rows, slots, plan)

    @_named("fill")
    def read(self, rows: np.ndarray, slots: np.ndarray, plan: Plan | None = None) -> int:
        return self.transfers.read(rows, slots, plan)

    @_named("transfer")
    def executed(self, plan: Plan) -> None:
        self.transfers.brought[plan.batch].tray.ready = self.order.moved()

    @_named("end")
    def batch_ended(self, plan: Plan) -> None:
        if self.driver.dead:
            return
        brought = self.transfers.brought.get(plan.batch)
        if brought is not None:
            self.backend.wait(self.backend.compute_stream(), brought.tray.ready)  # also if it was not looked up
        event = self.order.batch_ended(plan.batch)
        self.transfers.release(plan.batch, event, self.driver.verdicts.number)

    @_named("order of streams")
    def fence(self) -> None:
        if not self.driver.dead:
            self.order.fence()

    @_named("end")
    def forget_plans(self) -> None:
        self.fence()
        for batch in list(self.transfers.brought):
            event = None if self.driver.dead else self.backend.record(self.driver.transfer)
            self.transfers.release(batch, event, self.driver.verdicts.number)

    # --- kernels ---

    @_named("lookup")
    def lookup(self, slots: np.ndarray, lookups: Lookups, out: Tensor, call: Call | None = None) -> None:
        self.kernels.lookup(slots, lookups, out, call)

    @_named("lookup")
    def lookup_apart(self, slots: np.ndarray, lookups: Lookups, out: Tensor) -> None:
        self.kernels.lookup_apart(slots, lookups, out)

    @_named("gradient of per-sample weights")
    def weight_grad(self, call: Call, grad: Tensor) -> Tensor:
        return self.kernels.weight_grad(call, grad)

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
        elsewhere = self.driver.after_checks(stream, update.verdicts)
        self.kernels.update(update, self.driver.suppression(update.verdicts))
        for other in elsewhere:  # torch gives the gradients' memory on in the order of the stream that made them
            self.backend.wait(other, self.order.uses[stream])

    # --- counts of steps, the end ---

    @property
    @_named("counts of steps")
    def table_steps(self) -> np.ndarray:
        counts = self.kernels.counts
        return np.zeros(self._tables, np.int64) if counts is None else counts.get()

    @_named("counts of steps")
    def set_table_steps(self, steps: np.ndarray) -> None:
        if self.kernels.counts is not None:
            self.kernels.counts.set(steps)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if not self.driver.dead:
            self.forget_plans()
            self.backend.synchronize(self.order.computed(), "close")
            self.backend.synchronize(self.backend.record(self.driver.transfer), "close")
            self.transfers.close()
            self.kernels.close()
        self.transfers.carrier.close()
        self._held.release()
        self.driver.records_closed()
