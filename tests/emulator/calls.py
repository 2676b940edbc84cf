"""Random calls of the kernels, and how a test launches them: arrays instead of addresses, blocks in any order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cdlrm.driver import signatures

from .compile import FLAGS, LANE_FLAGS, compiled, team_threads

F = np.float32
CHUNK = 256


flags = FLAGS  # how launch() compiles
DIMS = [1, 3, 17, 31, 33, 100, 257, 4, 32, 64, 128, 132, 512, 4096]


@pytest.fixture(autouse=True, params=[FLAGS, LANE_FLAGS], ids=["teams", "lanes"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a team as in the emulator, then one call a lane as on a device."""
    monkeypatch.setattr(f"{__name__}.flags", request.param)


def dims_of(vec: int) -> list[int]:
    return [dim for dim in DIMS if dim % vec == 0]


def generator(*seed: object) -> np.random.Generator:
    return np.random.default_rng([abs(hash(part)) % 2**32 if not isinstance(part, str) else len(part) for part in seed])


def launch(name: str, variant: signatures.Variant, owners: int, seed: int = 0, **values: Any) -> None:
    """Run a kernel with a team for each of `owners` (and a block too many), its blocks in random order."""
    args = {key: value.ctypes.data if isinstance(value, np.ndarray) else value for key, value in values.items()}
    grid = -(-owners // (signatures.BLOCK_THREADS // team_threads(variant, name))) + 1
    order = np.random.default_rng(seed).permutation(grid)
    compiled(flags).run(name, variant, grid, signatures.pack(name, args), [(int(b), int(b) + 1) for b in order])


def floats(count: int, offset: int = 0) -> np.ndarray:
    """`count` float32 of noise, `offset` floats after an address that is a multiple of 64."""
    raw = np.full(count + 32 + offset, 7.25, F)
    skip = -raw.ctypes.data % 64 // 4 + offset
    return raw[skip : skip + count]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Aligned normal numbers, some of them -0."""
    out = floats(int(np.prod(shape))).reshape(shape)
    out[...] = rng.normal(size=shape)
    out.reshape(-1)[::7] = -0.0
    return out


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal to the bit."""
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@dataclass
class Records:
    """Rows of weights and state as a device holds them: two strided views, of one allocation or of two."""

    weight: np.ndarray
    state: np.ndarray

    @property
    def arguments(self) -> dict[str, Any]:
        strides = {"weight_stride": self.weight.strides[0] // 4, "state_stride": self.state.strides[0] // 4}
        return {"weight": self.weight, "state": self.state if self.state.shape[1] else None, **strides}

    def home_arguments(self) -> dict[str, Any]:
        return {f"home_{key}": value for key, value in self.arguments.items()}

    def copies(self) -> tuple[np.ndarray, np.ndarray]:
        """Weights and state, C-contiguous, as the CPU driver takes them."""
        return self.weight.copy(), self.state.copy()


def records(rng: np.random.Generator, rows: int, dim: int, width: int, vec: int) -> Records:
    """`rows` records of noise (state not negative).  With VEC = 1 the addresses are odd multiples of 4 bytes."""
    shared, offset = bool(rng.integers(2)), 0 if vec == 4 else 1
    pads = [4 * int(pad) if vec == 4 else int(pad) for pad in rng.integers(0, 3, 2)]
    if shared:
        whole = dim + width + pads[0]
        whole += -whole % 4 if vec == 4 else 0
        record = floats(rows * whole, offset).reshape(rows, whole)
        weight, state = record[:, :dim], record[:, dim : dim + width]
    else:
        weight = floats(rows * (dim + pads[0]), offset).reshape(rows, -1)[:, :dim]
        state = floats(rows * (width + pads[1]), offset).reshape(rows, width + pads[1])[:, :width]
    weight[...] = normal(rng, rows, dim)
    state[...] = np.abs(normal(rng, rows, width))
    return Records(weight, state)


@dataclass
class Call:
    """Bags of a group (feature-major), and their lookups grouped by slot.  `starts` None: one lookup a bag."""

    slots: np.ndarray
    starts: np.ndarray | None
    out_row: np.ndarray
    lookup_row: np.ndarray
    divisor: np.ndarray | None
    columns: np.ndarray
    mean: np.ndarray
    per_sample: np.ndarray | None
    batch: int
    width: int
    seg_slot: np.ndarray
    seg_start: np.ndarray
    seg_lookup: np.ndarray

    @property
    def source(self) -> dict[str, Any]:
        """Arguments of a kernel's gradient source, but grad and dim; no lookup_row where the kernel can do without."""
        names = ("columns", "batch", "width", "divisor", "per_sample")
        own = {name: getattr(self, name) for name in names}
        return {**own, "lookup_row": None if self.starts is None else self.lookup_row}

    @property
    def long(self) -> dict[str, np.ndarray]:
        """long_rows, long_chunks, chunk_start, chunk_stop of the rows with more than a chunk of lookups."""
        lengths = np.diff(self.seg_start)
        rows = np.flatnonzero(lengths > CHUNK)
        chunks = [np.arange(self.seg_start[u], self.seg_start[u + 1], CHUNK) for u in rows]
        stops = [np.append(starts[1:], self.seg_start[u + 1]) for u, starts in zip(rows, chunks, strict=True)]
        counts = np.cumsum([0, *map(len, chunks)])
        empty = [np.empty(0, np.int32)]
        parts = (rows, counts, np.concatenate(chunks or empty), np.concatenate(stops or empty))
        names = ("long_rows", "long_chunks", "chunk_start", "chunk_stop")
        return {name: np.ascontiguousarray(part, np.int32) for name, part in zip(names, parts, strict=True)}


def call(
    rng: np.random.Generator,
    rows: int,
    batch: int,
    features: int = 3,
    *,
    single: bool = False,
    weighted: bool = False,
    mean: bool = False,
    longest: int = 6,
) -> Call:
    """Random bags, some empty, with duplicate slots; output columns are not in the features' order, one is free."""
    bags, width = features * batch, features + 1
    lengths = np.ones(bags, np.int64) if single else rng.integers(0, longest, bags)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    slots = rng.integers(0, rows, starts[-1]).astype(np.int32)
    columns = rng.permutation(width)[:features].astype(np.int32)
    means = (rng.integers(0, 2, features) if mean else np.zeros(features)).astype(np.uint8)
    feature, sample = np.divmod(np.arange(bags), batch) if bags else (np.empty(0, int), np.empty(0, int))
    out_row = (sample * width + columns[feature]).astype(np.int32)
    lookup_bag = np.repeat(np.arange(bags), lengths)
    divisor = np.where(means[feature] != 0, lengths, 1).astype(F)[lookup_bag]
    order = np.argsort(slots, kind="stable").astype(np.int32)
    seg_slot, counts = np.unique(slots, return_counts=True)
    return Call(
        slots, None if single else starts, out_row, out_row[lookup_bag], divisor if mean and not single else None,
        columns, means, normal(rng, len(slots)) if weighted else None, batch, width,
        seg_slot.astype(np.int32), np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), order,
    )  # fmt: skip
