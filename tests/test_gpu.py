"""A backend at work: the same test bodies on the emulated backend, and on a real GPU where there is one.

The GPU's half is marked `gpu`.  What only a real one has (its allocator's limit, sticky errors) is at the end.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulator.backend import EmulatedBackend
from emulator.compile import compiler
from emulator.costs import Costs

from cdlrm.driver import calibrate, pinned, signatures
from cdlrm.driver.backend import Backend
from cdlrm.driver.calibrate import Choice, decide, measure
from cdlrm.driver.choose import choose, gpu_obstacle
from cdlrm.errors import DeviceMemoryError

ROOT = Path(__file__).resolve().parent.parent
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler to build the emulated kernels with")


@pytest.fixture(params=[pytest.param("emulated", marks=needs_compiler), pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made: Backend
    if request.param == "emulated":
        made = EmulatedBackend(7)
    else:
        if obstacle := gpu_obstacle(0):
            pytest.skip(obstacle)
        from cdlrm.driver.cuda import CudaBackend

        made = CudaBackend(0)
    yield made
    made.close()


def send(backend: Backend, array: np.ndarray, stream: Any) -> Any:
    """A device buffer with the bytes of `array`, and the pinned memory that they came from."""
    host, buffer = backend.pinned(array.nbytes), backend.alloc(array.nbytes)
    backend.host_writes(host.address, array.nbytes)
    host.array[:] = array.reshape(-1).view(np.uint8)
    backend.wait(stream, backend.record(backend.compute_stream()))
    backend.copy(buffer.address, host.address, array.nbytes, "h2d", stream)
    return buffer, host


def fetch(backend: Backend, address: int, like: np.ndarray, stream: Any) -> np.ndarray:
    host = backend.pinned(like.nbytes)
    backend.copy(host.address, address, like.nbytes, "d2h", stream)
    backend.synchronize(backend.record(stream), "test")
    backend.host_reads(host.address, like.nbytes)
    return host.array.view(like.dtype).reshape(like.shape).copy()


def test_there_and_back(backend: Backend) -> None:
    first, second = backend.new_stream(), backend.new_stream()
    words = np.random.default_rng(1).integers(0, 2**31, 40_000, np.int32)
    buffer, _keep = send(backend, words, first)
    other = backend.alloc(words.nbytes)
    backend.wait(second, backend.record(backend.compute_stream()))
    backend.wait(second, backend.record(first))
    backend.copy(other.address, buffer.address, words.nbytes, "d2d", second)
    backend.clear(other.address + 400, 800, second)
    args = {"target": buffer.address, "source": other.address, "vectors": words.nbytes // 16}
    backend.launch("stream_copy", (), 4, signatures.pack("stream_copy", args), second)
    words[100:300] = 0
    assert np.array_equal(fetch(backend, buffer.address, words, second), words)
    event = backend.record(second)
    backend.synchronize(event, "test")
    assert backend.is_done(event)


@pytest.mark.parametrize(("dim", "width"), [(64, 1), (8, 8), (5, 1), (3, 6), (128, 0)])
def test_records_travel_by_zero_copy_through_registered_memory(backend: Backend, dim: int, width: int) -> None:
    """Fill from a registered table and evict into it, rows and slots in any order, subnormal numbers among them."""
    vec, rows, count = 4 if dim % 4 == 0 else 1, 300, 77
    rng = np.random.default_rng(dim)
    table = pinned.host_memory(4 * rows * (dim + width)).view(np.float32)
    home = backend.register(table)
    stream = backend.new_stream()
    backend.host_writes(home, table.nbytes)
    table[:] = rng.integers(0, 2**32, table.size, np.uint32).view(np.float32)
    table[::7] = np.float32(1e-40)
    before = table.copy().view(np.uint32)
    row, slot = rng.permutation(rows)[:count].astype(np.int64), rng.permutation(count).astype(np.int32)
    (row_buffer, _a), (slot_buffer, _b) = send(backend, row, stream), send(backend, slot, stream)
    cache = backend.alloc(4 * count * (dim + width))
    backend.wait(stream, backend.record(backend.compute_stream()))
    values = {
        "weight": cache.address, "weight_stride": dim, "state": cache.address + 4 * count * dim, "state_stride": width,
        "home_weight": home, "home_weight_stride": dim, "home_state": home + 4 * rows * dim,
        "home_state_stride": width, "rows": row_buffer.address, "slots": slot_buffer.address, "count": count,
        "staged": 0, "dim": dim, "state_width": width,
    }  # fmt: skip
    grid = signatures.blocks(vec, count)
    fill = values | {"copied": count, "tables": 0, "initial_state": 0}
    backend.launch("fill", (vec,), grid, signatures.pack("fill", fill), stream)
    found = fetch(backend, cache.address, np.empty(count * (dim + width), np.uint32), stream)
    weight, state = before[: rows * dim].reshape(rows, dim), before[rows * dim :].reshape(rows, width)
    assert np.array_equal(found[: count * dim].reshape(count, dim)[slot], weight[row])
    assert np.array_equal(found[count * dim :].reshape(count, width)[slot], state[row])

    backend.host_writes(home, table.nbytes)
    table[:] = 0
    backend.launch("evict", (vec,), grid, signatures.pack("evict", values), stream)
    backend.synchronize(backend.record(stream), "test")
    backend.host_reads(home, table.nbytes)
    after = table.view(np.uint32)
    assert np.array_equal(after[: rows * dim].reshape(rows, dim)[row], weight[row])
    assert np.array_equal(after[rows * dim :].reshape(rows, width)[row], state[row])
    untouched = np.setdiff1d(np.arange(rows), row)
    assert not after[: rows * dim].reshape(rows, dim)[untouched].any()
    backend.unregister(table)


def test_subnormal_numbers_are_kept_and_products_are_rounded_once(backend: Backend) -> None:
    """CuPy's own way to compile flushes subnormal numbers to zero; contraction would round once instead of twice."""
    rng = np.random.default_rng(3)
    weight = (rng.standard_normal(128) * np.float32(1e-38)).astype(np.float32)
    weight[64:] = rng.standard_normal(64).astype(np.float32)
    grad = rng.standard_normal(128).astype(np.float32)
    grad[:64] *= np.float32(1e-39)
    rate = np.float32(0.3)
    expected = weight - rate * (np.float32(0) + grad)
    assert (np.abs(expected[:64]) < np.finfo(np.float32).tiny).any()
    stream = backend.compute_stream()
    zero, ends = np.zeros(1, np.int32), np.array([0, 1], np.int32)
    sent = {name: send(backend, array, stream) for name, array in {
        "weight": weight, "grad": grad, "seg_slot": zero, "seg_start": ends, "seg_lookup": zero, "columns": zero,
    }.items()}  # fmt: skip
    values: dict[str, Any] = {name: 0 for name, _ in signatures.KERNELS["update_short"].parameters}
    values |= {name: buffer.address for name, (buffer, _) in sent.items()}
    values |= {"weight_stride": 128, "distinct": 1, "batch": 1, "width": 1, "dim": 128, "lr": float(rate)}
    variant = (signatures.OPTIMIZERS["SGD"], 4, 4)
    backend.launch("update_short", variant, signatures.blocks(4, 1), signatures.pack("update_short", values), stream)
    found = fetch(backend, sent["weight"][0].address, weight, stream)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


# --- calibration ---


@pytest.mark.parametrize("widths", [[(64, 1)], [(16, 16), (5, 1)], [(8, 0)], [(128, 0), (128, 1)]])
def test_a_measurement_tells_what_it_chose_and_why(backend: Backend, widths: list[tuple[int, int]]) -> None:
    seconds = 0.5 if backend.name == "cuda" else 0.0
    choice = measure(backend, widths, table_bytes=1 << 20, moved_bytes=1 << 16, seconds=seconds)
    with_state = any(width for _, width in widths)
    assert len(choice.figures) == sum(8 if width else 4 for _, width in widths)
    assert all(figure > 0 for figure in choice.figures.values())
    assert choice.sentence.startswith("records: " + ("zero copy" if choice.zero_copy else "staged"))
    assert "\n" not in choice.sentence and choice.sentence.endswith(".")
    assert ("padded record" in choice.sentence) == with_state and (with_state or not choice.joined_records)
    for dim, width in widths:
        assert f"{dim}+{width}" in choice.sentence
    assert set(backend.traffic.synchronizations) == {"calibration"}


@needs_compiler
@pytest.mark.parametrize("zero_copy", [True, False])
def test_the_quicker_way_is_chosen(zero_copy: bool) -> None:
    costs = Costs()
    costs.gigabytes_per_s["host_read"] = costs.gigabytes_per_s["host_write"] = 1e3 if zero_copy else 1e-6
    backend = EmulatedBackend(1, costs=costs)
    choice = measure(backend, [(32, 1)], table_bytes=1 << 20, moved_bytes=1 << 16, seconds=0.0)
    assert choice.zero_copy == zero_copy


@needs_compiler
@pytest.mark.parametrize("width", [(64, 1), (8, 8), (5, 1), (16, 0)])
@pytest.mark.parametrize("key", [(True, False), (True, True), (False, False), (False, True)])
def test_what_is_measured_moves_the_records(width: tuple[int, int], key: tuple[bool, bool]) -> None:
    """A fill and an evict bring every record back to its place, and nothing else changes."""
    bench = calibrate._Bench(EmulatedBackend(5), 1 << 18, 1 << 14)
    bench.table.array[:] = np.random.default_rng(2).integers(0, 256, 1 << 18, np.uint8)
    before = bench.table.array.copy()
    fill, evict = bench.move(width, key)
    assert fill > 0 and evict > 0 and np.array_equal(bench.table.array, before)
    assert bench.moved_bytes[width] == 4 * sum(width) * ((1 << 14) // (4 * calibrate.padded(width)))


def figures(zero: tuple[float, float], staged: tuple[float, float]) -> Choice:
    """The choice for one width, by milliseconds of (two arrays, one record)."""
    width, ms = (64, 1), {}
    for zero_copy, pair in ((True, zero), (False, staged)):
        for joined, each in zip((False, True), pair, strict=True):
            ms |= {(width, (zero_copy, joined), direction): each / 2 for direction in ("fill", "evict")}
    return decide(ms, {width: 260_000})


def test_decisions() -> None:
    for zero, staged, zero_copy, joined in (
        ((4.0, 3.0), (5.0, 6.0), True, True),
        ((3.0, 4.0), (5.0, 6.0), True, False),
        ((4.0, 3.0), (2.0, 6.0), False, False),
        ((4.0, 3.0), (6.0, 2.0), False, True),
        ((3.0, 3.0), (3.0, 3.0), True, False),
    ):
        choice = figures(zero, staged)
        assert (choice.zero_copy, choice.joined_records) == (zero_copy, joined)
    choice = figures((4.0, 3.0), (5.0, 6.0))
    assert choice.figures["zero-copy fill, one record, 64+1 floats"] == pytest.approx(260_000 / 1.5e-3 / 1e9)
    assert choice.sentence == (
        "records: zero copy (filling and evicting random records of 64+1 floats: 3.00 ms, staged 5.00 ms); weights and "
        "state in one padded record (3.00 ms, two arrays 4.00 ms)."
    )


def test_a_measurement_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        measure(EmulatedBackend(1), [])


# --- a real GPU only ---


@pytest.fixture
def cuda() -> Iterator[Any]:
    if obstacle := gpu_obstacle(0):
        pytest.skip(obstacle)
    from cdlrm.driver.cuda import CudaBackend

    made = CudaBackend(0)
    yield made
    made.close()


@pytest.mark.gpu
def test_auto_takes_the_gpu(cuda: Any) -> None:
    assert choose("auto").kind == "cuda"


@pytest.mark.gpu
def test_every_variant_of_every_kernel_compiles_and_loads(cuda: Any) -> None:
    for name, kernel in signatures.KERNELS.items():
        for variant in kernel.variants:
            assert cuda._load(name, variant) is cuda._load(name, variant)


@pytest.mark.gpu
def test_more_memory_than_there_is(cuda: Any) -> None:
    free = cuda.free_bytes()
    with pytest.raises(DeviceMemoryError, match="bytes are free"):
        cuda.alloc(2 * free + (1 << 30))
    assert cuda.alloc(1 << 20).nbytes == 1 << 20


@pytest.mark.gpu
def test_a_large_table_is_pinned_in_pieces_and_copied_across_them(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdlrm.driver.cuda.pin", lambda *args: pinned.pin(*args, piece_bytes=64 << 20))
    table = pinned.host_memory(200 << 20)
    table[:: 1 << 12] = np.arange(table.size >> 12, dtype=np.uint64).astype(np.uint8)
    seen: list[int] = []
    home = cuda.register(table, lambda done, total: seen.append(done))
    assert len(seen) == 4 and seen[-1] == table.nbytes
    stream, buffer = cuda.new_stream(), cuda.alloc(table.nbytes)
    cuda.copy(buffer.address, home, table.nbytes, "h2d", stream)
    assert np.array_equal(fetch(cuda, buffer.address, table, stream), table)
    cuda.unregister(table)


@pytest.mark.gpu
def test_two_events_have_a_time_between_them(cuda: Any) -> None:
    stream, buffer = cuda.new_stream(), cuda.alloc(256 << 20)
    first = cuda.record_timed(stream)
    cuda.clear(buffer.address, buffer.nbytes, stream)
    last = cuda.record_timed(stream)
    cuda.synchronize(last, "test")
    assert cuda.elapsed_ms(first, last) > 0


@pytest.mark.gpu
def test_torch_and_the_backend_share_the_current_stream(cuda: Any) -> None:
    ones = torch.ones(1 << 20, device=cuda.device)
    target = cuda.output((1 << 20,), torch.float32)
    args = {"target": cuda.address(target), "source": cuda.address(ones), "vectors": (1 << 20) // 4}
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        ones.add_(1)
        cuda.launch("stream_copy", (), 64, signatures.pack("stream_copy", args), cuda.compute_stream())
        assert bool((target * 2 == 4).all())


STICKY = """
import numpy as np, torch
from cdlrm.driver import signatures
from cdlrm.driver.cuda import CudaBackend
from cdlrm.errors import DeviceError
cuda = CudaBackend(0)
memory = cuda.pinned(1 << 20)
memory.array[:] = 5
stream = cuda.new_stream()
args = signatures.pack("stream_copy", {"target": 64, "source": 128, "vectors": 1000})
cuda.launch("stream_copy", (), 4, args, stream)
try:
    cuda.synchronize(cuda.record(stream), "test")
except DeviceError as error:
    assert error.sticky and "kernel stream_copy" in str(error) and "illegal memory access" in str(error), str(error)
else:
    raise SystemExit("no error")
assert int(memory.array.astype(np.int64).sum()) == 5 << 20
try:
    cuda.copy(memory.address, memory.address + 64, 64, "d2d", stream)
except DeviceError as error:
    assert error.sticky
cuda.close()
print("told")
"""


@pytest.mark.gpu
def test_a_sticky_error_is_told_and_host_memory_stays_readable(cuda: Any) -> None:
    """In a process of its own: the device does nothing more in it."""
    done = subprocess.run([sys.executable, "-c", STICKY], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "told" in done.stdout, done.stderr
