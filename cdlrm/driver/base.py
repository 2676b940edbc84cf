"""The seam between the library and a device: everything above it is the same code.

A `Driver` is a device; `Records` are the records of one group on it, with the kernels that work on them.
A device decides nothing.  It is handed plans, slots and gradients and does the arithmetic of rule 9: float32,
every multiply and add rounded once, no contraction, fixed order, one owner per output.  So two
drivers, and any number of threads, give the same bits.

Calls *issue* work: on the CPU it is done when they return; on a GPU it is done in the order of its streams,
and the host waits for it only where a docstring says so.

Shapes used below: C places, D dim, S floats of optimizer state a row, L lookups, Q bags, U distinct rows of
the batch, R rows of the output matrix (B * width).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..lookups import Lookups
from ..optim import Optimizer

if TYPE_CHECKING:
    from ..plan import Plan
    from ..step import Call
    from ..store import Store
    from .cpu import CpuDriver
    from .foretell import Foretold, Need


@dataclass
class Segments:
    """The lookups of a batch grouped by row, for the backward pass.

    seg_slot    int32 [U]: cache slot of each distinct row.
    seg_start   int32 or int64 [U+1]: row u has the entries [seg_start[u], seg_start[u+1]) of seg_lookup.
    seg_lookup  int32 [L]: lookup numbers grouped by row, ascending inside a row.
    seg_row     int64 [U] or None: group row of each distinct row (only optimizers that count steps need it).
    seg_table   int32 [U] or None: its table's number, made of seg_row by the device.

    The order of the rows has no effect on results.
    """

    seg_slot: np.ndarray
    seg_start: np.ndarray
    seg_lookup: np.ndarray
    seg_row: np.ndarray | None = None
    seg_table: np.ndarray | None = None


class Verdict(ABC):
    """Whether the gradients of one backward pass are finite; a device may know it later."""

    known: bool | None
    """The answer, or None while only the device has it."""

    raising: bool = False
    """Whether a later call raises it if it is not finite."""

    @abstractmethod
    def __bool__(self) -> bool:
        """The answer; waits for the device if need be."""

    @abstractmethod
    def stand_in(self) -> Tensor:
        """A scalar on the device: 0 where all were finite, else infinity (what a GradScaler looks at)."""


@dataclass
class Update:
    """One update of a group: the gradients of `calls` (in the order of their forwards), by `optimizer` with `lr`.

    `plan`: the plan that was made for exactly these calls, if there is one.  Rows stay as they are where a
    verdict is not finite.
    """

    optimizer: Optimizer
    lr: float
    calls: list[Call]
    segments: Segments
    plan: Plan | None = None
    verdicts: list[Verdict] = field(default_factory=list)


class Records(ABC):
    """`rows` places for records of one group on a device, the way to and from their store, and the kernels on them.

    Which thread: `begin`, `write`, `read` and `executed` with a plan the transfer's; all else the trainer's, or while
    the cache is paused.
    """

    rows: int
    store: Store
    reads_apart = False  # rows that are only read need no places among the others: `lookup_apart`

    @abstractmethod
    def resize(self, rows: int, spans: Sequence[tuple[int, int, int]]) -> None:
        """`rows` places; for each span (to, start, count) the records from `start` on are kept at `to`.  Without spans
        the old places may go before the new ones are there."""

    def set_depth(self, depth: int) -> None:  # noqa: B027
        """How many batches ahead plans are executed."""

    # --- the way to and from the store ---

    def may_begin(self) -> bool:
        """Whether there is room for another plan before a batch ends."""
        return True

    def begin(self, plan: Plan, rows: np.ndarray, slots: np.ndarray) -> None:  # noqa: B027 - nothing on the CPU
        """A plan is executed: its arrays and the inputs of its calls go to the device.  `rows`, `slots`: what of
        its evicts is dirty and will be written."""

    @abstractmethod
    def write(self, rows: np.ndarray, slots: np.ndarray, plan: Plan | None = None) -> None:
        """Records home: those of `rows int64 [n]` from the places `slots int32 [n]`.  Without a plan the store has
        them on return."""

    @abstractmethod
    def read(self, rows: np.ndarray, slots: np.ndarray, plan: Plan | None = None) -> int:
        """Records of `rows int64 [n]` to `slots int32 [n]`, before whatever is computed later with them; returns how
        many were stored (the others are generated)."""

    def executed(self, plan: Plan) -> None:  # noqa: B027
        """All moves of the plan were issued."""

    def batch_ended(self, plan: Plan) -> None:  # noqa: B027
        """All work on the plan's batch was issued: what comes after it may be moved away then."""

    def fence(self) -> None:  # noqa: B027
        """What was issued until now on any rows comes before any later transfer."""

    def forget_plans(self) -> None:  # noqa: B027
        """Plans that were executed and have not ended will not be trained."""

    # --- kernels ---

    @abstractmethod
    def lookup(self, slots: np.ndarray, lookups: Lookups, out: Tensor, call: Call | None = None) -> None:
        """Pooled lookup: writes exactly the rows `lookups.out_row` of out (float32, bfloat16 or float16 [R, D]).

        slots int32 (or int64) [L]; `call`: the training call, if it is one.
        A bag is +0.0 plus its rows in order, each `weights[l] * row` if weighted; mean bags are then
        divided by their length; an empty bag is 0; the result is rounded to `out`'s dtype once.
        """

    def lookup_apart(self, slots: np.ndarray, lookups: Lookups, out: Tensor) -> None:
        """Like `lookup` where rows with slot -1 are only in the store: all are gathered in a place of their own, so
        that reading makes the cache no larger."""
        raise NotImplementedError(f"{type(self).__name__} reads rows where they are")

    @abstractmethod
    def weight_grad(self, call: Call, grad: Tensor) -> Tensor:
        """Gradient of the per-sample weights, float32 [L]: lane sum of `grad[bag] * row` (grad float32 [R, D] of
        the output; rows before the update)."""

    @abstractmethod
    def take_gradient(self, call: Call, grad: Tensor, keep: bool) -> None:
        """`call.grad` becomes the gradient float32 [R, D] of the call's output, for an update.

        `keep`: the update comes later than this backward pass; mean bags are divided by their length now."""

    @abstractmethod
    def update(self, update: Update) -> None:
        """Sum every distinct row's gradients and apply the optimizer to it, in place.  `lr` is rounded once."""

    # --- counts of steps, for optimizers that use them ---

    @property
    @abstractmethod
    def table_steps(self) -> np.ndarray:
        """int64 [T], a copy: updates of each table so far (a device is waited for)."""

    @abstractmethod
    def set_table_steps(self, steps: np.ndarray) -> None:
        """Replace them."""

    def close(self) -> None:  # noqa: B027
        """Release what the device holds.  The store has all records.  May be called twice."""


class Driver(ABC):
    """A device."""

    name: str
    device: torch.device  # of outputs, gradients and anchors
    in_place: bool  # resident rows are trained where the store keeps them
    pins_tables: bool = False  # it will pin the memory of stores, which must share no page with anything else
    progress: bool = True  # show how far work is that takes seconds
    dead: bool = False  # an error that it cannot recover from: it does nothing any more
    host: CpuDriver  # for work on the host: segments, copies

    def prepare(self, record_widths: Sequence[tuple[int, int]]) -> None:  # noqa: B027
        """Before any store in memory is made: how wide its records are (dim, floats of state).  At most a second."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory that the device may still use for records."""

    @abstractmethod
    def records(self, store: Store, bases: np.ndarray, optimizer: Optimizer, *, in_place: bool = False) -> Records:
        """No places yet for the records of `store`; bases int64 [T+1]: the first group row of each table.
        `in_place`: all records, in the store's own memory (where the driver can)."""

    def padded_width(self, dim: int, state_width: int) -> int:
        """Floats of a record in host memory if weights and state shall lie together; 0: in two arrays."""
        return 0

    @abstractmethod
    def output(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor for `Records.lookup`."""

    def hand_over(self) -> None:  # noqa: B027
        """What was looked up is about to be used by torch."""

    @abstractmethod
    def finite(self, grads: Sequence[Tensor], raising: bool, where: str) -> Verdict:
        """Whether float32 tensors have neither NaN nor infinity.  On a device that answers later, `raising`
        makes a non-finite one an error of a later call, naming `where`, and stops all updates until then."""

    @abstractmethod
    def sum_of_squares(self, calls: Sequence[Call], dim: int) -> float:
        """Of the summed gradients of all rows of `calls`, in float64; a device is waited for."""

    def notes(self) -> list[str]:
        """What was chosen automatically, and why."""
        return []

    def most_bytes(self) -> tuple[int, int] | None:
        """The most bytes of device memory and of pinned host memory in use at once; None: it has no memory of its
        own."""
        return None

    def foretell(self, need: Need) -> Foretold | None:
        """What a run will use of them that depends on `need`; None as for `most_bytes`."""
        return None

    def seconds_to_pin(self, nbytes: int) -> float:
        """How long pinning so much host memory takes: it is tried.  0: tables are not pinned."""
        return 0.0

    def waited(self, reason: str, times: int) -> None:  # noqa: B027
        """The host waited for the device outside of the driver, such as for ids that are on the device."""

    def poll(self) -> None:  # noqa: B027
        """Raise what the device has reported since; never waits."""

    def finish(self) -> None:  # noqa: B027
        """Wait until the device has told everything, and raise it."""

    def resume(self) -> None:  # noqa: B027
        """Whoever trains has heard of an error that stopped updates: they run again."""

    def close(self) -> None:  # noqa: B027 - a device without resources has nothing to do
        """Release threads and memory.  May be called twice."""


def merged_rows(lookups: Sequence[Lookups]) -> np.ndarray:
    """`lookup_row int32 [L]` of the lookups of several calls, in their gradient matrices below each other."""
    if len(lookups) == 1:
        return lookups[0].lookup_row
    base, rows = 0, [np.empty(0, np.int32)]
    for each in lookups:
        rows.append(each.lookup_row + np.int32(base))
        base += each.batch_size * each.width
    return np.concatenate(rows)


def merged_weights(lookups: Sequence[Lookups]) -> np.ndarray | None:
    """Per-sample weights float32 [L] of the lookups of several calls (1.0 for calls that have none; None: no call
    has)."""
    if len(lookups) == 1 or all(each.weights is None for each in lookups):
        return lookups[0].weights if lookups else None
    every = [np.ones(each.rows.size, np.float32) if each.weights is None else each.weights for each in lookups]
    return np.concatenate(every)


def used_tables(lookups: Sequence[Lookups], bases: np.ndarray) -> np.ndarray:
    """Numbers (in the group) of the tables that several calls use, also where all bags are empty."""
    used = np.concatenate([np.empty(0, np.int64), *(each.bases for each in lookups)])
    return np.unique(np.searchsorted(bases, used, side="right") - 1)
