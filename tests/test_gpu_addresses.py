"""The GPU kernels on arrays of more than 2^31 floats, where 32 bits of row * stride are too few."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from emulator.calls import F, Records, floats, generator, launch, mode, normal, same  # noqa: F401
from emulator.compile import unavailable

from cdlrm.driver import cpu_kernels
from cdlrm.driver.signatures import VECS

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.fixture
def vast() -> np.ndarray:
    """11 GiB of address space of which only the touched pages exist."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return np.frombuffer(mmap.mmap(-1, 11 << 30, flags=flags), F)


@pytest.mark.parametrize("vec", VECS)
def test_rows_beyond_two_to_the_31_floats(vec: int, vast: np.ndarray) -> None:
    dim, stride, rng = 4, 4096, generator(vec)
    table = vast[: len(vast) // stride * stride].reshape(-1, stride)
    slots = np.array([len(table) - 1, 3, 2**31 // stride, 700_000], np.int32)
    assert int(slots[0]) * stride > 2**31
    table[slots, :dim], table[slots, dim] = normal(rng, 4, dim), 1.0
    cache = Records(table[:, :dim], table[:, dim : dim + 1])
    home, order = Records(normal(rng, 4, dim), normal(rng, 4, 1)), np.arange(4)
    transfer = {"rows": order, "slots": slots, "count": 4, "staged": 0, "dim": dim, "state_width": 1}
    launch("evict", (vec,), 4, **cache.arguments, **home.home_arguments(), **transfer)
    assert same(home.weight, table[slots, :dim]) and same(home.state, table[slots, dim : dim + 1])
    home.weight[...] = normal(rng, 4, dim)
    launch(
        "fill", (vec,), 4, **cache.arguments, **home.home_arguments(), **transfer, copied=4, tables=0, initial_state=0.0
    )
    assert same(home.weight, table[slots, :dim])
    transfer |= {"rows": slots.astype(np.int64), "slots": order.astype(np.int32)}
    table[slots, :dim] = 0
    launch("evict", (vec,), 4, **home.arguments, **cache.home_arguments(), **transfer)  # homes are far apart, too
    assert same(home.weight, table[slots, :dim])
    out, columns = floats(16).reshape(4, 4), np.zeros(1, np.int32)
    forward = {"slots": slots, "weight": table, "weight_stride": stride, "columns": columns, "batch": 4, "width": 1}
    forward["dim"] = dim
    launch("lookup", (vec, 1, "float"), 4, **forward, features=1, out=out)
    assert same(out, home.weight + F(0))
    grad, dots = normal(rng, 4, dim), floats(4)
    launch("weight_grad", (vec,), 4, **forward, lookups=4, grad=grad, out=dots)
    expected = np.empty(4, F)
    cpu_kernels.weight_grad(home.weight, np.arange(4), np.arange(4), grad, expected, 0, 4)
    assert same(dots, expected)
    launch(
        "update_short", (0, vec, 1), 4, **cache.arguments, seg_slot=slots, seg_start=np.arange(5, dtype=np.int32),
        distinct=4, seg_lookup=order.astype(np.int32), columns=columns, batch=4, width=1, grad=grad, dim=dim, lr=0.5,
        decay=0.0, eps=0.0, rate1=0.0, rate2=0.0, lr64=0.0, tables=0, number=0,
    )  # fmt: skip
    assert same(table[slots, :dim], home.weight - F(0.5) * (grad + F(0)))


@pytest.mark.parametrize("vec", VECS)
def test_gradients_outputs_and_homes_beyond_two_to_the_31_floats(vec: int, vast: np.ndarray) -> None:
    dim, width = 4096, 350_000  # two samples of so many output columns: row 699,999 is beyond 2^31 floats
    weight, columns = normal(generator(vec), 2, dim), np.array([width - 1], np.int32)
    slots = np.array([0, 1], np.int32)
    launch(
        "lookup", (vec, 4, "float"), 2, weight=weight, weight_stride=dim, slots=slots, columns=columns, out=vast,
        dim=dim, batch=2, features=1, width=width,
    )  # fmt: skip
    far = (2 * width - 1) * dim
    assert far > 2**31 and same(vast[far : far + dim], weight[1] + F(0))
    sums = floats(dim)
    launch(
        "chunk_sums", (vec, 4), 1, chunk_start=np.array([1], np.int32), chunk_stop=np.array([2], np.int32), chunks=1,
        seg_lookup=slots, columns=columns, batch=2, width=width, grad=vast, dim=dim, sums=sums, number=0,
    )  # fmt: skip
    assert same(sums, weight[1] + F(0))
    records_far = Records(normal(generator(1), 2, dim), np.empty((2, 0), F))
    home = {"home_weight": vast, "home_weight_stride": dim, "home_state_stride": 0, "rows": np.array([2 * width - 1])}
    launch(
        "fill", (vec,), 1, **records_far.arguments, **home, slots=slots, copied=1, count=1, staged=0, dim=dim,
        state_width=0, tables=0, initial_state=0.0,
    )  # fmt: skip
    assert same(records_far.weight[0], weight[1] + F(0))
