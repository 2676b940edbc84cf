"""What each kernel reads and writes, exactly by rows, worked out from its arguments at the moment when it runs.

An access is (parameter, writes, address, offsets int64 [n], nbytes of each row); `shared` parameters may be written
by more than one owner, `atomic` ones are relaxed atomic stores, which may race with each other, but not with what
reads them.
Where a kernel may or may not write (a flag; an update that a flag suppresses), it is declared to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cdlrm.driver.signatures import KERNELS, LONG_ROW

from .arguments import LAYOUTS
from .memory import AccessError

_START = np.zeros(1, np.int64)
OUTPUT_BYTES = {"float": 4, "bf16": 2, "fp16": 2}
SGD, ROW_WISE, ADAGRAD, ADAM = range(4)


class Access(NamedTuple):
    parameter: str
    writes: bool
    address: int
    offsets: np.ndarray
    nbytes: int
    shared: bool = False
    atomic: bool = False

    @property
    def total(self) -> int:
        return len(self.offsets) * self.nbytes


def one_range(parameter: str, address: int, nbytes: int, *, writes: bool = False) -> Access:
    """Bytes that a copy or the host touches."""
    return Access(parameter, writes, address, _START, nbytes, shared=True)


class Call:
    """The arguments of a launch by name, and the accesses found so far.  `view(address, dtype, count, what)` reads."""

    def __init__(self, kernel: str, variant: tuple[Any, ...], args: tuple[Any, ...], view: Callable[..., np.ndarray]):
        self.kernel, self.variant, self._view = kernel, variant, view
        layout = LAYOUTS[kernel]
        self.values = dict(zip(_NAMES[kernel], layout.unpack(layout.pack(*args)), strict=True))
        self.accesses: list[Access] = []

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def whole(
        self, name: str, count: int, itemsize: int, *, writes: bool = False, first: int = 0, **more: bool
    ) -> None:
        """`count` items from item `first`; nothing if the pointer is null or count is 0."""
        if self[name] and count > 0:
            address = self[name] + first * itemsize
            self.accesses.append(Access(name, writes, address, _START, count * itemsize, **more))

    def rows(
        self, name: str, numbers: np.ndarray, stride: int, width: int, *, size: int = 4, writes: bool = False
    ) -> None:
        """`width` items from item numbers[k] * stride for each k."""
        if self[name] and width > 0 and len(numbers):
            offsets = numbers.astype(np.int64) * (stride * size)
            self.accesses.append(Access(name, writes, self[name], offsets, width * size))

    def items(self, name: str, dtype: Any, count: int, first: int = 0) -> np.ndarray:
        """The `count` items from `first`, which the kernel reads; none if the pointer is null."""
        if not self[name]:
            return np.empty(0, dtype)
        itemsize = np.dtype(dtype).itemsize
        self.whole(name, count, itemsize, first=first)
        return self._view(self[name] + first * itemsize, dtype, count, f"{self.kernel}'s {name}")


def _records(call: Call, numbers: np.ndarray, writes: bool, state_width: int) -> None:
    call.rows("weight", numbers, call["weight_stride"], call["dim"], writes=writes)
    call.rows("state", numbers, call["state_stride"], state_width, writes=writes)


def _home(call: Call, numbers: np.ndarray, writes: bool) -> None:
    call.rows("home_weight", numbers, call["home_weight_stride"], call["dim"], writes=writes)
    call.rows("home_state", numbers, call["home_state_stride"], call["state_width"], writes=writes)


def _fill(call: Call) -> None:
    count, copied, tables = call["count"], call["copied"], call["tables"]
    _records(call, call.items("slots", np.int32, count), True, call["state_width"])
    first = copied if call["staged"] else 0
    rows = call.items("rows", np.int64, count - first, first)
    _home(call, np.arange(copied) if call["staged"] else rows[:copied], False)
    if copied < count:
        for name, number, size in (("bases", tables + 1, 8), ("kinds", tables, 4), ("numbers", tables, 4)):
            call.whole(name, number, size)
        call.whole("keys", 2 * tables, 4)
        call.whole("scales", tables, 4)


def _evict(call: Call) -> None:
    count = call["count"]
    _records(call, call.items("slots", np.int32, count), False, call["state_width"])
    _home(call, np.arange(count) if call["staged"] else call.items("rows", np.int64, count), True)


def _lookup(call: Call) -> None:
    dim, batch, features, width = call["dim"], call["batch"], call["features"], call["width"]
    bags = batch * features
    columns = call.items("columns", np.int32, features)
    first, last = 0, bags
    if call["starts"]:
        starts = call.items("starts", np.int32, bags + 1)
        first, last = int(starts[0]), int(starts[-1])
        call.whole("mean", features, 1)
    call.rows("weight", call.items("slots", np.int32, last - first, first), call["weight_stride"], dim)
    call.whole("per_sample", last - first, 4, first=first)
    out = (np.arange(batch)[None, :] * width + columns[:, None]).ravel()
    call.rows("out", out, dim, dim, size=OUTPUT_BYTES[call.variant[2]], writes=True)


def _finite(call: Call) -> None:
    call.whole("grad", call["count"], 4)
    call.whole("flag", 1, 4, writes=True, shared=True)
    call.whole("sticky", 1, 4, writes=True, shared=True)
    call.whole("host_flag", 1, 4, writes=True, shared=True, atomic=True)


def _combine(call: Call) -> None:
    call.whole("first", 1, 4)
    call.whole("second", 1, 4)
    call.whole("flag", 1, 4, writes=True)


def _suppression(call: Call) -> None:
    call.whole("flag", 1, 4)
    call.whole("sticky", 1, 4)


def _gradients(call: Call, lookups: np.ndarray, *, per_sample: bool = True) -> None:
    """The gradients of these lookups, with the factors that apply to them."""
    if call["lookup_row"]:
        call.rows("lookup_row", lookups, 1, 1)
        count = int(lookups.max()) + 1 if len(lookups) else 0
        rows = call._view(call["lookup_row"], np.int32, count, f"{call.kernel}'s lookup_row")[lookups]
    elif len(lookups):
        batch = call["batch"]
        columns = call.items("columns", np.int32, int(lookups.max()) // batch + 1)
        rows = (lookups % batch).astype(np.int64) * call["width"] + columns[lookups // batch]
    else:
        rows = lookups
    call.rows("grad", rows, call["dim"], call["dim"])
    call.rows("divisor", lookups, 1, 1)
    if per_sample:
        call.rows("per_sample", lookups, 1, 1)


def _formula(call: Call, rows: np.ndarray, slots: np.ndarray) -> None:
    """The records of `slots` are updated; rows: their numbers among the distinct rows of the batch."""
    opt, dim = call.variant[0], call["dim"]
    _records(call, slots, True, (0, 1, dim, 2 * dim)[opt])
    if opt == ADAM and len(rows):
        call.rows("seg_table", rows, 1, 1)
        tables = call._view(call["seg_table"], np.int32, int(rows.max()) + 1, f"{call.kernel}'s seg_table")[rows]
        used = np.unique(tables)
        call.rows("steps", used, 1, 1, size=8)
        steps = call._view(call["steps"], np.int64, int(used[-1]) + 1, f"{call.kernel}'s steps")[used]
        call.rows("factors", steps + 1, 1, 1, size=8)


def _update_short(call: Call) -> None:
    distinct = call["distinct"]
    starts = call.items("seg_start", np.int32, distinct + 1) if distinct else np.zeros(1, np.int32)
    slots = call.items("seg_slot", np.int32, distinct)
    lengths = np.diff(starts)
    short = np.flatnonzero(lengths <= LONG_ROW)
    if len(short) == distinct:
        lookups = call.items("seg_lookup", np.int32, int(starts[-1] - starts[0]), int(starts[0]))
    else:
        places = np.flatnonzero(np.repeat(lengths <= LONG_ROW, lengths)) + starts[0]
        call.rows("seg_lookup", places, 1, 1)
        lookups = call._view(call["seg_lookup"], np.int32, int(starts[-1]), "update_short's seg_lookup")[places]
    _gradients(call, lookups)
    _formula(call, short, slots[short])
    if call.variant[0] == ADAM and call["next_steps"]:
        tables = call["tables"]
        call.whole("steps", tables, 8)
        call.whole("used", tables, 1)
        call.whole("next_steps", tables, 8, writes=True)
    _suppression(call)


def _chunk_sums(call: Call) -> None:
    chunks = call["chunks"]
    starts, stops = (call.items(name, np.int32, chunks) for name in ("chunk_start", "chunk_stop"))
    parts = [call.items("seg_lookup", np.int32, b - a, a) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
    _gradients(call, np.concatenate(parts) if parts else np.empty(0, np.int32))
    call.whole("sums", chunks * call["dim"], 4, writes=True)
    _suppression(call)


def _update_long(call: Call) -> None:
    count, dim = call["count"], call["dim"]
    if count:
        rows = call.items("long_rows", np.int32, count)
        chunks = call.items("long_chunks", np.int32, count + 1)
        call.whole("sums", int(chunks[-1] - chunks[0]) * dim, 4, first=int(chunks[0]) * dim)
        call.rows("seg_slot", rows, 1, 1)
        view = call._view(call["seg_slot"], np.int32, int(rows.max()) + 1, "update_long's seg_slot")
        _formula(call, rows, view[rows])
    _suppression(call)


def _weight_grad(call: Call) -> None:
    lookups = call["lookups"]
    call.rows("weight", call.items("slots", np.int32, lookups), call["weight_stride"], call["dim"])
    _gradients(call, np.arange(lookups), per_sample=False)
    call.whole("out", lookups, 4, writes=True)


def _stream_copy(call: Call) -> None:
    call.whole("source", call["vectors"], 16)
    call.whole("target", call["vectors"], 16, writes=True)


_NAMES = {name: [parameter for parameter, _ in kernel.parameters] for name, kernel in KERNELS.items()}
DECLARED: dict[str, Callable[[Call], None]] = {
    "fill": _fill,
    "evict": _evict,
    "lookup": _lookup,
    "finite": _finite,
    "combine": _combine,
    "update_short": _update_short,
    "chunk_sums": _chunk_sums,
    "update_long": _update_long,
    "weight_grad": _weight_grad,
    "stream_copy": _stream_copy,
}


def accesses(
    kernel: str, variant: tuple[Any, ...], args: tuple[Any, ...], view: Callable[..., np.ndarray]
) -> list[Access]:
    call = Call(kernel, variant, args, view)
    try:
        DECLARED[kernel](call)
    except (ValueError, IndexError) as error:  # numbers read from the device make no sense
        raise AccessError(f"what a launch of {kernel} touches cannot be worked out: {error}") from error
    return call.accesses
