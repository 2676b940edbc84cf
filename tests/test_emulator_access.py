"""The accesses declared in emulator/access.py are the kernels' own: nothing else is written, nothing else is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulator import calls
from emulator.access import OUTPUT_BYTES, Access, accesses
from emulator.backend import EmulatedBackend
from emulator.calls import F, normal, records
from emulator.clocks import mark_rows
from emulator.compile import team_threads, unavailable
from emulator.memory import AccessError
from emulator.watch import RaceError

from cdlrm.driver import signatures
from cdlrm.driver.signatures import BLOCK_THREADS, KERNELS

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

TRIALS = 40  # of each kernel
ROWS = 30
STATE_WIDTHS: tuple[Callable[[int], int], ...] = (lambda dim: 0, lambda dim: 1, lambda dim: dim, lambda dim: 2 * dim)
Launch = tuple[int, dict[str, Any]]  # owners, arguments (arrays instead of addresses)


def vec_of(kernel: str, variant: signatures.Variant) -> int:
    if not variant:
        return 4
    return variant[1] if kernel in ("update_short", "update_long") else variant[0]


def random_launch(kernel: str, variant: signatures.Variant, rng: np.random.Generator) -> Launch:
    if kernel in ("fill", "evict"):
        return moved_records(kernel, variant, rng)
    if kernel == "finite":
        grad = normal(rng, int(rng.integers(0, 300)))
        grad[rng.random(len(grad)) < 0.01] = np.inf
        flags = {name: np.zeros(1, np.int32) for name in ("flag", "sticky", "host_flag") if rng.random() < 0.7}
        return 1, {"grad": grad, "count": len(grad), "number": 3, "flag": np.zeros(1, np.int32), **flags}
    if kernel == "combine":
        flags = {name: rng.integers(0, 2, 1).astype(np.int32) for name in ("first", "second", "flag")}
        return 1, {**flags, "first_number": 1, "second_number": 1, "number": 5}
    if kernel == "stream_copy":
        vectors = int(rng.integers(0, 50))
        return 1, {"target": normal(rng, 4 * vectors + 8), "source": normal(rng, 4 * vectors + 8), "vectors": vectors}
    return bags(kernel, variant, rng)


def moved_records(kernel: str, variant: signatures.Variant, rng: np.random.Generator) -> Launch:
    vec = variant[0]
    dim = int(rng.integers(1, 40)) * vec
    width = int(rng.choice([0, 1, dim]))
    count, staged = int(rng.integers(0, ROWS)), int(rng.integers(2))
    cache, home = records(rng, ROWS, dim, width, vec), records(rng, 60, dim, width, vec)
    values = {
        **cache.arguments, **home.home_arguments(), "rows": rng.permutation(60)[:count].astype(np.int64),
        "slots": rng.permutation(ROWS)[:count].astype(np.int32), "count": count, "staged": staged,
        "dim": dim, "state_width": width,
    }  # fmt: skip
    if kernel == "fill":
        tables = int(rng.integers(1, 4))
        values |= {
            "copied": int(rng.integers(0, count + 1)), "tables": tables, "initial_state": F(0.5),
            "bases": np.linspace(0, 60, tables + 1).astype(np.int64),
            "kinds": rng.integers(0, 2, tables).astype(np.int32),
            "numbers": np.arange(tables, dtype=np.int32), "scales": rng.random(tables).astype(F),
            "keys": rng.integers(0, 2**32, 2 * tables, dtype=np.uint32),
        }  # fmt: skip
    return count, values


def bags(kernel: str, variant: signatures.Variant, rng: np.random.Generator) -> Launch:
    vec = vec_of(kernel, variant)
    dim = int(rng.integers(1, 40)) * vec
    opt = variant[0] if kernel in ("update_short", "update_long") else 0
    long = kernel in ("chunk_sums", "update_long", "update_short") and rng.random() < 0.5
    call = calls.call(
        rng, 3 if long else ROWS, 400 if long else int(rng.integers(0, 12)), single=rng.random() < 0.5,
        weighted=rng.random() < 0.5, mean=rng.random() < 0.5,
    )  # fmt: skip
    width = STATE_WIDTHS[opt](dim)
    cache, grad = records(rng, ROWS, dim, width, vec), normal(rng, call.batch * call.width, dim)
    source = {**call.source, "seg_lookup": call.seg_lookup, "grad": grad, "dim": dim}
    distinct, parts = len(call.seg_slot), call.long
    chunks, count = len(parts["chunk_start"]), len(parts["long_rows"])
    guard = {"flag": np.zeros(1, np.int32), "number": 1} if rng.random() < 0.5 else {"number": 1}
    guard |= {"sticky": np.zeros(1, np.int32)} if rng.random() < 0.5 else {}
    rates = {"lr": 0.3, "decay": 0.1, "eps": 1e-3, "rate1": 0.1, "rate2": 0.01, "lr64": 0.3}
    adam = {"seg_table": rng.integers(0, 2, distinct).astype(np.int32), "steps": np.array([4, 0], np.int64)}
    formula = {**rates, **({**adam, "factors": rng.random(8)} if opt == 3 else {})}
    sums = normal(rng, max(1, chunks) * dim)
    if kernel == "lookup":
        out = np.zeros(call.batch * call.width * dim * OUTPUT_BYTES[variant[2]] // 2 + 1, np.uint16)
        return len(call.out_row), {
            "weight": cache.weight, "weight_stride": cache.weight.strides[0] // 4, "slots": call.slots,
            "starts": call.starts, "columns": call.columns, "mean": call.mean, "per_sample": call.per_sample,
            "out": out, "dim": dim, "batch": call.batch, "features": len(call.columns), "width": call.width,
        }  # fmt: skip
    if kernel == "weight_grad":
        del source["seg_lookup"]
        values = {"weight": cache.weight, "weight_stride": cache.weight.strides[0] // 4, "slots": call.slots}
        return len(call.slots), {**values, "lookups": len(call.slots), **source, "out": normal(rng, len(call.slots))}
    if kernel == "update_short":
        counted = {"next_steps": np.full(2, -1, np.int64), "used": np.array([1, 0], np.uint8)} if opt == 3 else {}
        values = {**cache.arguments, "seg_slot": call.seg_slot, "seg_start": call.seg_start, "distinct": distinct}
        return max(distinct, 2), {**values, **source, **formula, **counted, "tables": 2, **guard}
    if kernel == "chunk_sums":
        own = {name: parts[name] for name in ("chunk_start", "chunk_stop")}
        return chunks, {**own, "chunks": chunks, **source, "sums": sums, **guard}
    own = {name: parts[name] for name in ("long_rows", "long_chunks")}
    values = {**cache.arguments, "seg_slot": call.seg_slot, **own, "count": count, "sums": sums, "dim": dim}
    return count, {**values, **formula, **guard}


class OnDevice:
    """The arrays of a launch in device memory, each in an allocation of its own."""

    def __init__(self, kernel: str, variant: signatures.Variant, launch: Launch) -> None:
        self.kernel, self.variant = kernel, variant
        owners, values = launch
        self.grid = -(-owners // (BLOCK_THREADS // team_threads(variant, kernel)))
        self.device = EmulatedBackend(style="early", compare=1)
        self.images: dict[str, np.ndarray] = {}
        self.buffers = {}
        self.itemsizes = {}
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                low, high = np.lib.array_utils.byte_bounds(value) if value.size else (0, 0)
                self.images[name] = np.zeros(high - low, np.uint8)
                if value.size:
                    self.images[name][:] = np.ctypeslib.as_array((_BYTE * (high - low)).from_address(low))
                self.buffers[name], self.itemsizes[name] = self.device.alloc(high - low), value.itemsize
        addresses = {name: buffer.address for name, buffer in self.buffers.items()}
        self.args = signatures.pack(kernel, {**values, **addresses})

    def run(self, images: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name, image in images.items():
            self.memory(name)[:] = image
        self.device.launch(self.kernel, self.variant, self.grid, self.args, self.device.compute_stream())
        return {name: self.memory(name).copy() for name in images}

    def memory(self, name: str) -> np.ndarray:
        return self.device.memory.view(self.buffers[name].address, np.uint8, self.buffers[name].nbytes, name)

    def declared(self) -> list[Access]:
        return accesses(self.kernel, self.variant, self.args, self.device.memory.view)

    def masks(self, declared: list[Access], writes: bool) -> dict[str, np.ndarray]:
        masks = {name: np.zeros(len(image), np.bool_) for name, image in self.images.items()}
        for access in declared:
            name = access.parameter
            if access.writes == writes and access.total:
                mark_rows(masks[name], access.address - self.buffers[name].address, access.offsets, access.nbytes)
        return masks


_BYTE = np.ctypeslib.as_ctypes_type(np.uint8)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_else_is_written_and_nothing_else_makes_a_difference(kernel: str) -> None:
    """Bytes that are neither declared read nor written change, and the launch writes the same."""
    ran = 0
    for trial in range(TRIALS):
        rng = np.random.default_rng([trial, len(kernel)])
        variants = KERNELS[kernel].variants
        on = OnDevice(
            kernel, variants[trial % len(variants)], random_launch(kernel, variants[trial % len(variants)], rng)
        )
        first = on.run(on.images)  # raises where a byte changes that is not declared to be written
        for name in on.images:
            on.memory(name)[:] = on.images[name]
        declared = on.declared()
        reads, writes = on.masks(declared, False), on.masks(declared, True)
        other = {}
        for name, image in on.images.items():
            free = ~(reads[name] | writes[name])
            free[np.arange(len(free)) % on.itemsizes[name] != 0] = False  # lowest bits: numbers of rows stay harmless
            other[name] = image ^ free.astype(np.uint8)
        second = on.run(other)
        for name in on.images:
            assert (first[name] == second[name])[writes[name]].all(), (trial, name)
            ran += int((first[name] != on.images[name]).any())
        on.device.close()
    assert ran > TRIALS // 4


def fill(count: int, slots: list[int], rows: list[int]) -> OnDevice:
    rng = np.random.default_rng(0)
    cache, home = records(rng, 4, 8, 0, 4), records(rng, 4, 8, 0, 4)
    values = {
        **cache.arguments, **home.home_arguments(), "rows": np.array(rows, np.int64),
        "slots": np.array(slots, np.int32), "count": count, "copied": count, "staged": 0, "dim": 8, "state_width": 0,
        "tables": 0, "initial_state": 0.0,
    }  # fmt: skip
    return OnDevice("fill", (4,), (count, values))


def test_slots_and_rows_outside_and_two_writers_of_one_slot_are_caught() -> None:
    for slots, rows, error, named in (
        ([0, 4], [0, 1], AccessError, "parameter weight: row 1"),
        ([0, -1], [0, 1], AccessError, "parameter weight: row 1"),
        ([0, 1], [9, 1], AccessError, "parameter home_weight: row 0"),
        ([2, 2], [0, 1], RaceError, "parameter weight: two owners"),
    ):
        on = fill(2, slots, rows)
        with pytest.raises(error, match=named):
            on.run(on.images)


def test_poisoned_slots_never_reach_a_kernel() -> None:
    on = fill(2, [0, 1], [0, 1])
    images = {**on.images, "slots": np.full(8, 0xFF, np.uint8)}  # as if the copy of the plan had not run
    with pytest.raises(AccessError, match="parameter weight: row 0"):
        on.run(images)
