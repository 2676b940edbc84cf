"""Random launches that are valid by construction, for the sanitizers: every kernel, every variant, odd shapes.

Valid means what the driver guarantees: indices inside their arrays, one writer per target (unique slots, rows and
columns), vector kernels only on rows of a multiple of four floats.  Every array is exactly as long as the kernel may
reach, so one element too far is outside of it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cdlrm.driver import signatures

DIMS = {
    4: (4, 8, 12, 32, 36, 64, 64, 100, 128, 128, 132, 256, 516),
    1: (1, 2, 3, 5, 16, 31, 32, 33, 63, 65, 127, 128, 129, 255, 513),
}
LARGEST_DIM = {4: 4096, 1: 4095}
STATE = {0: lambda dim: 0, 1: lambda dim: 1, 2: lambda dim: dim, 3: lambda dim: 2 * dim}  # floats by optimizer
FAR_STRIDE, FAR_SLOTS = 1 << 20, 3000  # slot * stride passes 2^31
ENTRIES = [(kernel.name, variant) for kernel in signatures.KERNELS.values() for variant in kernel.variants]
Rng = np.random.Generator


class Part(NamedTuple):
    """A pointer into an array, `offset` bytes behind its start."""

    array: np.ndarray | Far
    offset: int


@dataclass(eq=False)
class Far:
    """Memory of `nbytes` zero bytes of which few pages are touched: for indices that pass 2^31."""

    nbytes: int


class Launch(NamedTuple):
    """`values`: parameter -> number, array, `Part` or None (no array)."""

    name: str
    variant: tuple[Any, ...]
    grid: int
    values: dict[str, Any]


def launches(name: str, count: int, seed: int) -> Iterator[Launch]:
    """`count` random launches of a kernel, its variants in turn."""
    rng, variants = np.random.default_rng([seed, list(MAKERS).index(name)]), signatures.KERNELS[name].variants
    for number in range(count):
        yield MAKERS[name](rng, variants[number % len(variants)])


def encode(launch: Launch) -> bytes:
    """As the C++ runner reads it: entry, grid, arrays (length, bytes; a negative length: `Far`), parameters."""
    buffers: dict[int, Any] = {}
    parameters = []
    for name, kind in signatures.KERNELS[launch.name].parameters:
        value = launch.values.get(name)
        if kind != "ptr":
            parameters.append(struct.pack("<ii", -1, 0) + signatures.TYPES[kind].type(value).tobytes().ljust(8, b"\0"))
            continue
        array, offset = value if isinstance(value, Part) else (value, 0)
        if array is None:
            parameters.append(struct.pack("<iiq", -1, 0, 0))
        else:
            index = list(buffers).index(id(array)) if id(array) in buffers else len(buffers)
            buffers[id(array)] = array
            parameters.append(struct.pack("<iiq", index, 0, offset))
    unknown = launch.values.keys() - {name for name, _ in signatures.KERNELS[launch.name].parameters}
    if unknown:
        raise TypeError(f"{launch.name} has no parameter {sorted(unknown)}")
    entry = ENTRIES.index((launch.name, launch.variant))
    head = struct.pack("<iiii", entry, launch.grid, len(buffers), len(parameters))
    return b"".join([head, *map(_contents, buffers.values()), *parameters])


def _contents(array: np.ndarray | Far) -> bytes:
    if isinstance(array, Far):
        return struct.pack("<q", -array.nbytes)
    return struct.pack("<q", array.nbytes) + array.tobytes()


# --- shapes ---------------------------------------------------------------------------------------


def how_many(rng: Rng, most: int = 300) -> int:
    """0, 1, a few, many."""
    kind = rng.integers(0, 20)
    low, high = (0, 1) if kind == 0 else (1, 2) if kind < 3 else (2, 10) if kind < 11 else (10, 60)
    return int(rng.integers(60, most)) if kind == 19 else min(int(rng.integers(low, high)), most)


def columns_of(rng: Rng, vec: int, owners: int) -> int:
    """dim: small, around the tiles' edges, and now and then the largest (with few owners)."""
    if owners <= 4 and rng.integers(0, 12) == 0:
        return LARGEST_DIM[vec]
    return int(rng.choice(DIMS[vec]))


def floats(rng: Rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def some(rng: Rng, array: np.ndarray) -> np.ndarray | None:
    """An array that may be left out."""
    return array if rng.integers(0, 2) else None


def unique(rng: Rng, count: int, below: int) -> np.ndarray:
    return rng.permutation(below)[:count].astype(np.int32)


def strided(rng: Rng, vec: int, rows: int, width: int) -> tuple[np.ndarray, int]:
    """Rows of `width` floats, padded or not, that end with the last row's last float."""
    stride = width + (int(rng.integers(0, 3)) * vec if width else 0)
    return floats(rng, max((rows - 1) * stride + width, 0) if rows else 0), stride


def records(rng: Rng, vec: int, rows: int, dim: int, state_width: int, prefix: str = "") -> dict[str, Any]:
    """weight, state and strides: one padded record, or two arrays, or (seldom) rows very far apart."""
    names = [f"{prefix}{name}" for name in ("weight", "weight_stride", "state", "state_stride")]
    if rows == FAR_SLOTS:
        far = Far(4 * ((rows - 1) * FAR_STRIDE + dim + state_width))
        return dict(zip(names, (far, FAR_STRIDE, Part(far, 4 * dim) if state_width else None, FAR_STRIDE), strict=True))
    if rng.integers(0, 2) and state_width:
        width = dim + state_width
        stride = -(-width // vec) * vec + int(rng.integers(0, 2)) * vec
        both = floats(rng, (rows - 1) * stride + width if rows else 0)
        return dict(zip(names, (both, stride, Part(both, 4 * dim), stride), strict=True))
    weight, weight_stride = strided(rng, vec, rows, dim)
    state, state_stride = strided(rng, vec if state_width > 1 else 1, rows, state_width)
    state = np.abs(state)
    return dict(zip(names, (weight, weight_stride, state if state_width else None, state_stride), strict=True))


def slots_of(rng: Rng, count: int) -> int:
    """How many slots the cache has, at least `count`; seldom so many, so far apart, that 32 bits do not do."""
    far = 0 < count <= 20 and rng.integers(0, 25) == 0
    return FAR_SLOTS if far else count + int(rng.integers(0, 5))


def far_slots(rng: Rng, count: int, slots: int) -> np.ndarray:
    """Unique slots; of a cache with rows far apart the last ones, too."""
    chosen = unique(rng, count, slots)
    if slots == FAR_SLOTS and count and slots - 1 not in chosen:
        chosen[0] = slots - 1
    return chosen


# --- kernels --------------------------------------------------------------------------------------


def fill(rng: Rng, variant: tuple[Any, ...]) -> Launch:
    (vec,) = variant
    values, count = _moves(rng, vec)
    tables = int(rng.integers(1, 5))
    copied = count if rng.integers(0, 3) == 0 else int(rng.integers(0, count + 1))
    if copied == count and rng.integers(0, 2):
        tables = 0
    rows = values.pop("table_rows")
    bases = np.sort(np.concatenate([[0, rows], rng.integers(0, rows + 1, max(tables - 1, 0))])).astype(np.int64)
    values |= {
        "copied": copied, "count": count, "tables": tables, "initial_state": 0.25,
        "bases": bases, "kinds": rng.integers(0, 2, tables).astype(np.int32),
        "numbers": rng.integers(0, 9, tables).astype(np.int32),
        "keys": rng.integers(0, 1 << 32, 2 * tables).astype(np.uint32), "scales": floats(rng, tables),
    }  # fmt: skip
    if not tables:
        values |= dict.fromkeys(("bases", "kinds", "numbers", "keys", "scales"))
    return Launch("fill", variant, max(signatures.blocks(vec, count), 1), values)


def evict(rng: Rng, variant: tuple[Any, ...]) -> Launch:
    (vec,) = variant
    values, count = _moves(rng, vec)
    del values["table_rows"]
    return Launch("evict", variant, max(signatures.blocks(vec, count), 1), {**values, "count": count})


def _moves(rng: Rng, vec: int) -> tuple[dict[str, Any], int]:
    """Cache and home of `count` records, with distinct rows and slots."""
    count = how_many(rng)
    dim = columns_of(rng, vec, count)
    state_width = int(rng.choice([0, 1, dim, 2 * dim]))
    table_rows, slots, staged = count + int(rng.integers(1, 9)), slots_of(rng, count), int(rng.integers(0, 2))
    home_rows = count if staged else table_rows
    values = records(rng, vec, slots, dim, state_width)
    values |= records(rng, vec, home_rows, dim, state_width, "home_")
    values |= {
        "rows": unique(rng, count, table_rows).astype(np.int64), "slots": far_slots(rng, count, slots),
        "staged": staged, "dim": dim, "state_width": state_width, "table_rows": table_rows,
    }  # fmt: skip
    return values, count


def lookup(rng: Rng, variant: tuple[Any, ...]) -> Launch:
    vec, _, output = variant
    batch, features = how_many(rng, 120), int(rng.integers(1, 4))
    bags = batch * features
    dim, width = columns_of(rng, vec, bags), features + int(rng.integers(0, 3))
    starts = None
    lookups = bags
    if rng.integers(0, 2):
        starts = np.concatenate([[0], np.cumsum(rng.integers(0, 5, bags))]).astype(np.int32)
        lookups = int(starts[-1])
    slots = slots_of(rng, min(lookups, 50)) + 1 if lookups > 20 else max(slots_of(rng, lookups), 1)
    weight = records(rng, vec, slots, dim, 0)
    out = np.zeros(batch * width * dim, np.float32 if output == "float" else np.uint16)
    return Launch("lookup", variant, max(signatures.blocks(vec, bags), 1), {
        "weight": weight["weight"], "weight_stride": weight["weight_stride"],
        "slots": rng.integers(max(slots - 20, 0), slots, lookups).astype(np.int32), "starts": starts,
        "columns": unique(rng, features, width), "mean": rng.integers(0, 2, features).astype(np.uint8),
        "per_sample": some(rng, floats(rng, lookups)), "out": out, "dim": dim, "batch": batch, "features": features,
        "width": width,
    })  # fmt: skip


def finite(rng: Rng, variant: tuple[Any, ...]) -> Launch:
    grad = floats(rng, int(rng.integers(0, 4000)) if rng.integers(0, 3) else how_many(rng))
    if grad.size and rng.integers(0, 2):
        grad[rng.integers(0, grad.size)] = rng.choice([np.nan, np.inf, -np.inf])
    word = np.zeros(1, np.int32)
    return Launch("finite", variant, int(rng.integers(1, 5)), {
        "grad": grad, "count": grad.size, "number": int(rng.integers(1, 99)), "flag": word,
        "sticky": some(rng, word.copy()), "host_flag": some(rng, word.copy()),
    })  # fmt: skip


def combine(rng: Rng, variant: tuple[Any, ...]) -> Launch:
    first, second = (rng.integers(0, 3, 1).astype(np.int32) for _ in range(2))
    return Launch("combine", variant, 1, {
        "first": first, "first_number": 1, "second": second, "second_number": 2, "flag": np.zeros(1, np.int32),
        "number": int(rng.integers(1, 99)),
    })  # fmt: skip


def _source(rng: Rng, vec: int) -> tuple[dict[str, Any], int]:
    """Where the gradients of `lookups` come from."""
    batch, features = how_many(rng, 150), int(rng.integers(1, 4))
    if rng.integers(0, 12) == 0:
        batch = int(rng.integers(300, 700))  # enough for a long row
    lookups, width = batch * features, features + int(rng.integers(0, 3))
    dim = columns_of(rng, vec, lookups)
    lookup_row = columns = None
    if rng.integers(0, 2):
        lookup_row = rng.integers(0, max(batch * width, 1), lookups).astype(np.int32)
    else:
        columns = unique(rng, features, width)
    return {
        "lookup_row": lookup_row, "columns": columns, "batch": batch, "width": width,
        "divisor": some(rng, rng.integers(1, 9, lookups).astype(np.float32)),
        "per_sample": some(rng, floats(rng, lookups)), "grad": floats(rng, batch * width, dim), "dim": dim,
    }, lookups  # fmt: skip


def _segments(rng: Rng, lookups: int) -> np.ndarray:
    """seg_start: the lookups cut into rows, none empty; few or many rows."""
    rows = int(rng.integers(1, min(lookups, rng.choice([2, 4, 300])) + 1)) if lookups else 0
    inner = np.sort(rng.permutation(np.arange(1, lookups))[: rows - 1]) if rows > 1 else []
    return np.concatenate([[0], inner, [lookups] if rows else []]).astype(np.int32)


def _formula(rng: Rng, optimizer: int, rows: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "lr": 0.1, "decay": float(rng.choice([0.0, 0.01])), "eps": 1e-8, "rate1": 0.9, "rate2": 0.999, "lr64": 0.1,
    }  # fmt: skip
    if optimizer == 3:
        tables = int(rng.integers(1, 5))
        steps = rng.integers(0, 6, tables)
        values |= {
            "seg_table": rng.integers(0, tables, rows).astype(np.int32), "steps": steps,
            "factors": rng.random(int(steps.max()) + 2),
        }  # fmt: skip
    return values


def _suppression(rng: Rng) -> dict[str, Any]:
    return {
        "flag": some(rng, rng.integers(0, 4, 1).astype(np.int32)), "number": 3,
        "sticky": some(rng, (rng.integers(0, 5, 1) == 0).astype(np.int32)),
    }  # fmt: skip


def update_short(rng: Rng, variant: tuple[Any, ...]) -> Launch:
    optimizer, vec, _ = variant
    values, lookups = _source(rng, vec)
    starts = _segments(rng, lookups)
    rows = starts.size - 1
    slots = slots_of(rng, rows)
    values |= records(rng, vec, slots, values["dim"], STATE[optimizer](values["dim"]))
    values |= {
        "seg_slot": far_slots(rng, rows, slots), "seg_start": starts, "distinct": rows, "tables": 0,
        "seg_lookup": rng.permutation(lookups).astype(np.int32),
    } | _formula(rng, optimizer, rows) | _suppression(rng)  # fmt: skip
    if optimizer == 3:
        tables = values["steps"].size
        used = rng.integers(0, 2, tables).astype(np.uint8)
        values |= {"next_steps": np.zeros(tables, np.int64), "used": used, "tables": tables}
    return Launch("update_short", variant, max(signatures.blocks(vec, max(rows, values["tables"])), 1), values)


def chunk_sums(rng: Rng, variant: tuple[Any, ...]) -> Launch:
    vec, _ = variant
    values, lookups = _source(rng, vec)
    starts = _segments(rng, lookups)
    chunks = [
        (at, min(at + signatures.LONG_ROW, stop))
        for start, stop in zip(starts[:-1], starts[1:], strict=True)
        for at in range(start, stop, signatures.LONG_ROW)
    ]
    values |= {
        "chunk_start": np.array([lo for lo, _ in chunks], np.int32), "chunks": len(chunks),
        "chunk_stop": np.array([hi for _, hi in chunks], np.int32),
        "seg_lookup": rng.permutation(lookups).astype(np.int32),
        "sums": np.zeros(len(chunks) * values["dim"], np.float32),
    } | _suppression(rng)  # fmt: skip
    return Launch("chunk_sums", variant, max(signatures.blocks(vec, len(chunks)), 1), values)


def update_long(rng: Rng, variant: tuple[Any, ...]) -> Launch:
    optimizer, vec, _ = variant
    count = how_many(rng, 100)
    dim, rows = columns_of(rng, vec, count), count + int(rng.integers(0, 5))
    chunks = np.concatenate([[0], np.cumsum(rng.integers(2, 5, count))]).astype(np.int32)
    slots = slots_of(rng, rows)
    values = records(rng, vec, slots, dim, STATE[optimizer](dim)) | {
        "seg_slot": far_slots(rng, rows, slots), "long_rows": np.sort(unique(rng, count, rows)), "long_chunks": chunks,
        "count": count, "sums": floats(rng, int(chunks[-1]), dim), "dim": dim,
    } | _formula(rng, optimizer, rows) | _suppression(rng)  # fmt: skip
    return Launch("update_long", variant, max(signatures.blocks(vec, count), 1), values)


def weight_grad(rng: Rng, variant: tuple[Any, ...]) -> Launch:
    (vec,) = variant
    values, lookups = _source(rng, vec)
    slots = max(slots_of(rng, min(lookups, 20)), 1)
    weight = records(rng, vec, slots, values["dim"], 0)
    values |= {
        "weight": weight["weight"], "weight_stride": weight["weight_stride"], "lookups": lookups,
        "slots": rng.integers(max(slots - 20, 0), slots, lookups).astype(np.int32),
        "out": np.zeros(lookups, np.float32),
    }  # fmt: skip
    return Launch("weight_grad", variant, max(signatures.blocks(vec, lookups), 1), values)


def stream_copy(rng: Rng, variant: tuple[Any, ...]) -> Launch:
    vectors = how_many(rng) if rng.integers(0, 4) else int(rng.integers(0, 5000))
    source = rng.integers(0, 1 << 32, 4 * vectors).astype(np.uint32)
    values = {"target": np.zeros_like(source), "source": source, "vectors": vectors}
    return Launch("stream_copy", variant, int(rng.integers(1, 5)), values)


MAKERS: dict[str, Callable[[Rng, tuple[Any, ...]], Launch]] = {
    "fill": fill, "evict": evict, "lookup": lookup, "finite": finite, "combine": combine,
    "update_short": update_short, "chunk_sums": chunk_sums, "update_long": update_long, "weight_grad": weight_grad,
    "stream_copy": stream_copy,
}  # fmt: skip
