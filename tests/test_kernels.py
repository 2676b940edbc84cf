"""CPU kernels against plain NumPy written from rule 9: equal to the bit, for any number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from cdlrm import optim
from cdlrm.driver import cpu, cpu_kernels, cpu_update
from cdlrm.driver.base import Segments
from cdlrm.driver.cpu import CpuDriver
from cdlrm.lookups import FeatureSlot, Lookups, flatten

F = np.float32
DIMS = [1, 3, 15, 16, 17, 31, 32, 33, 64, 100, 257]
OPTIMIZERS = [
    optim.SGD(lr=0.1),
    optim.SGD(lr=0.1, weight_decay=0.01),
    optim.RowWiseAdagrad(lr=0.1),
    optim.RowWiseAdagrad(lr=0.1, weight_decay=0.01, eps=1e-3),
    optim.Adagrad(lr=0.1),
    optim.Adagrad(lr=0.1, weight_decay=0.01),
    optim.Adam(lr=0.1),
    optim.Adam(lr=0.1, weight_decay=0.01, betas=(0.5, 0.75)),
]


@pytest.fixture(params=[1, 2, 3])
def driver(request, monkeypatch):
    monkeypatch.setattr(cpu, "_SMALL_FLOATS", 64)  # so that small cases are shared out too
    made = CpuDriver(request.param)
    yield made
    made.close()


# --- the reference: one operation a line, everything float32 ---


def lane_sum(products: np.ndarray) -> np.float32:
    lanes = np.zeros(32, F)
    for i, value in enumerate(products):
        lanes[i % 32] += value
    for half in (16, 8, 4, 2, 1):
        lanes[:half] += lanes[half : 2 * half]
    return lanes[0]


def bags_of(call: Lookups) -> list[range]:
    if call.starts is None:
        return [range(q, q + 1) for q in range(len(call.out_row))]
    return [range(call.starts[q], call.starts[q + 1]) for q in range(len(call.out_row))]


def reference_lookup(weight, call: Lookups, out) -> None:
    for q, bag in enumerate(bags_of(call)):
        acc = np.zeros(weight.shape[1], F)
        for i in bag:
            row = weight[call.rows[i]]
            acc = acc + (row if call.weights is None else call.weights[i] * row)
        if call.mean[q // call.batch_size] and len(bag):
            acc = acc / F(len(bag))
        out[call.out_row[q]] = acc


def reference_mean(call: Lookups, grad) -> np.ndarray:
    grad = grad.copy()
    for q, bag in enumerate(bags_of(call)):
        if call.mean[q // call.batch_size] and len(bag):
            grad[call.out_row[q]] /= F(len(bag))
    return grad


def reference_row_gradient(call: Lookups, grad, row: int) -> np.ndarray:
    total = np.zeros(grad.shape[1], F)
    mine = np.flatnonzero(call.rows == row)
    for chunk in range(0, len(mine), 256):
        acc = np.zeros(grad.shape[1], F)
        for i in mine[chunk : chunk + 256]:
            g = grad[call.lookup_row[i]]
            acc = acc + (g if call.weights is None else call.weights[i] * g)
        total = total + acc
    return total


def reference_update(optimizer, lr, weight, state, call, grad, tables, step_sizes) -> None:
    lr, decay = F(lr), F(optimizer.weight_decay)
    dim = weight.shape[1]
    for row in np.unique(call.rows):
        g, w, s = reference_row_gradient(call, grad, row), weight[row], state[row]
        if decay:
            g = g + decay * w
        if isinstance(optimizer, optim.SGD):
            w[:] = w - lr * g
        elif isinstance(optimizer, optim.RowWiseAdagrad):
            s[0] = s[0] + lane_sum(g * g) / F(dim)
            w[:] = w - (lr / (np.sqrt(s[0]) + F(optimizer.eps))) * g
        elif isinstance(optimizer, optim.Adagrad):
            s[:] = s + g * g
            w[:] = w - (lr * g) / (np.sqrt(s) + F(optimizer.eps))
        else:
            m, v = s[:dim], s[dim:]
            m[:] = m + F(1 - optimizer.betas[0]) * (g - m)
            v[:] = v + F(1 - optimizer.betas[1]) * (g * g - v)
            w[:] = w - (step_sizes[tables[row]] * m) / (np.sqrt(v) + F(optimizer.eps))


# --- random calls ---


def random_call(seed: int, rows: int = 12, batch: int = 9, single: bool = False, weighted: bool = False) -> Lookups:
    """Two tables, three features (one shared table, one mean), duplicates and empty bags."""
    rng = np.random.default_rng(seed)
    slots = [
        FeatureSlot("a", "t", 0, rows, 2, False),
        FeatureSlot("b", "t", 0, rows, 0, True),
        FeatureSlot("c", "u", rows, rows, 3, False),
    ]
    inputs = {}
    for slot in slots:
        lengths = np.ones(batch, np.int64) if single else rng.integers(0, 6, batch)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = rng.integers(0, rows, offsets[-1])
        inputs[slot.feature] = (ids, offsets, rng.normal(size=len(ids)).astype(F) if weighted else None)
    return flatten(slots, 4, inputs)


def normal(seed: int, *shape: int) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=shape).astype(F)
    values.reshape(-1)[::7] = -0.0  # signed zeros must come out right, too
    return values


def segments_of(driver: CpuDriver, call: Lookups, rows: int) -> Segments:
    return driver.build_segments(call.rows.astype(np.int32), driver.new_stamps(rows))


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_lookup_and_weight_grad(driver: CpuDriver, dim: int, single: bool, weighted: bool) -> None:
    call = random_call(dim, single=single, weighted=weighted)
    weight, grad = normal(1, 24, dim), normal(2, 36, dim)
    expected, out = np.full((36, dim), 7, F), np.full((36, dim), 7, F)
    reference_lookup(weight, call, expected)
    driver.lookup(weight, call.rows.astype(np.int32), call, call.weights, out)
    assert same(out, expected)  # and column 1, which no feature has, stays as it was
    driver.lookup(weight, call.rows, call, call.weights, out)
    assert same(out, expected)
    before = grad.copy()
    scaled = driver.scale_mean(call, grad)
    assert same(grad, before) and (scaled is grad) == single
    for row in call.out_row:
        assert same(scaled[row], reference_mean(call, grad)[row])
    dots = np.empty(len(call.rows), F)
    driver.weight_grad(weight, call.rows.astype(np.int32), call, scaled, dots)
    wanted = [lane_sum(scaled[r] * weight[i]) for r, i in zip(call.lookup_row, call.rows, strict=True)]
    assert same(dots, np.array(wanted, F))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("dim", DIMS)
def test_update(driver: CpuDriver, dim: int, optimizer: optim.Optimizer) -> None:
    call = random_call(dim + 50, weighted=dim % 2 == 0, single=dim % 3 == 0)
    weight, grad = normal(3, 24, dim), reference_mean(call, normal(4, 36, dim))
    state = np.abs(normal(5, 24, optimizer.state_width(dim)))
    tables, step_sizes = np.repeat([0, 1], 12).astype(np.int32), np.array([0.1, 0.3], F)
    expected_weight, expected_state = weight.copy(), state.copy()
    reference_update(optimizer, 0.3, expected_weight, expected_state, call, grad, tables, step_sizes)
    segments = segments_of(driver, call, 24)
    segments.seg_table = tables[segments.seg_slot]
    driver.update(optimizer, 0.3, weight, state, segments, call.lookup_row, grad, call.weights, step_sizes)
    assert same(weight, expected_weight) and same(state, expected_state)


@pytest.mark.parametrize("count", [255, 256, 257, 511, 512, 513, 5000])
@pytest.mark.parametrize("weighted", [False, True])
def test_many_lookups_of_one_row_are_added_in_chunks(driver: CpuDriver, count: int, weighted: bool) -> None:
    weights = normal(8, count) if weighted else None
    slots = [FeatureSlot("a", "t", 0, 3, 0, False)]
    call = flatten(slots, 1, {"a": (np.full(count, 2), None, weights)})
    weight, grad = normal(6, 3, 5), normal(7, count, 5)
    expected = weight.copy()
    reference_update(optim.SGD(lr=1.0), 1.0, expected, np.empty((3, 0), F), call, grad, None, None)
    segments = segments_of(driver, call, 3)
    driver.update(optim.SGD(lr=1.0), 1.0, weight, np.empty((3, 0), F), segments, call.lookup_row, grad, weights)
    assert same(weight, expected)


def test_65536_equal_ids_and_int64_segments() -> None:
    count, driver = 65536, CpuDriver(2)
    grad = normal(9, count, 3)
    call = flatten([FeatureSlot("a", "t", 0, 3, 0, False)], 1, {"a": np.full(count, 1)})
    total = np.zeros(3, F)
    for chunk in range(0, count, 256):
        total = total + np.cumsum(np.concatenate([np.zeros((1, 3), F), grad[chunk : chunk + 256]]), axis=0, dtype=F)[-1]
    weight = np.zeros((3, 3), F)
    segments = segments_of(driver, call, 3)
    wide = Segments(segments.seg_slot, segments.seg_start.astype(np.int64), segments.seg_lookup)
    driver.update(optim.SGD(lr=1.0), 1.0, weight, np.empty((3, 0), F), wide, call.lookup_row, grad)
    assert same(weight[1], F(0) - total) and not weight[[0, 2]].any()
    driver.close()


def test_the_number_of_threads_changes_nothing() -> None:
    """A case large enough to be shared out by the real thresholds."""
    rng = np.random.default_rng(0)
    rows, batch, dim = 3000, 500, 33
    slots = [FeatureSlot(f"f{t}", f"t{t}", t * rows, rows, t, t == 1) for t in range(4)]
    offsets = np.arange(batch + 1) * 7
    inputs = {s.feature: (rng.integers(0, rows, batch * 7), offsets, normal(t, batch * 7)) for t, s in enumerate(slots)}
    call = flatten(slots, 4, inputs)
    results = []
    for threads in (1, 2, 5):
        driver = CpuDriver(threads)
        weight, state, out = normal(1, 4 * rows, dim), np.zeros((4 * rows, 1), F), np.empty((4 * batch, dim), F)
        segments = driver.build_segments(call.rows, driver.new_stamps(4 * rows), call.feature_starts)
        driver.lookup(weight, call.rows, call, call.weights, out)
        grad = driver.scale_mean(call, normal(2, 4 * batch, dim))
        optimizer = optim.RowWiseAdagrad(lr=0.1)
        driver.update(optimizer, 0.1, weight, state, segments, call.lookup_row, grad, call.weights)
        results.append(b"".join(x.tobytes() for x in (out, weight, state, segments.seg_slot, segments.seg_lookup)))
        driver.close()
    assert results[0] == results[1] == results[2]


# --- segments ---


def check_segments(segments: Segments, slots: np.ndarray) -> None:
    seen: dict[int, list[int]] = {}
    for i, slot in enumerate(slots.tolist()):
        seen.setdefault(slot, []).append(i)
    assert segments.seg_slot.tolist() == list(seen)
    assert segments.seg_lookup.tolist() == [i for each in seen.values() for i in each]
    assert segments.seg_start.tolist() == [0, *np.cumsum([len(each) for each in seen.values()], dtype=int)]


def test_segments(driver: CpuDriver) -> None:
    rng = np.random.default_rng(1)
    stamps = driver.new_stamps(50)
    for count in [0, 1, 2, 100, 300, 0, 30]:
        left, right = rng.integers(0, 20, count), rng.integers(20, 50, count)
        slots = np.concatenate([left, right]).astype(np.int32)
        check_segments(driver.build_segments(slots, stamps, [0, count, 2 * count]), slots)
        check_segments(driver.build_segments(slots, stamps), slots)


def test_stamps_wrap_around(driver: CpuDriver) -> None:
    stamps = driver.new_stamps(5)
    slots = np.array([3, 1, 3], np.int32)
    stamps[-1] = 2**31 - 6
    for _ in range(4):
        check_segments(driver.build_segments(slots, stamps), slots)
    assert stamps[-1] < 100


# --- the rest ---


@pytest.mark.parametrize("position", [0, 1, 63, 998, 999, 1000])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_found(driver: CpuDriver, value: float, position: int) -> None:
    array = np.full(1001, np.finfo(F).max, F)
    array[::2] = -np.finfo(F).max
    array[5] = np.finfo(F).smallest_subnormal
    assert driver.all_finite(array) and driver.all_finite(array[:1000].reshape(10, 100))
    array[position] = value
    assert not driver.all_finite(array)


def test_nothing_is_finite(driver: CpuDriver) -> None:
    assert driver.all_finite(np.empty((0, 4), F)) and driver.all_finite(np.ones(1, F))


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("dim", [1, 5, 16, 40])
def test_copy_rows(driver: CpuDriver, dim: int, index: type) -> None:
    rng = np.random.default_rng(2)
    src, to, of = normal(1, 80, dim), rng.permutation(80)[:50].astype(index), rng.integers(0, 80, 50).astype(index)
    for dst_index, src_index, source in (
        (to, of, src),
        (None, of, src),
        (to, None, src[:50]),
        (None, None, src[:50]),
    ):
        dst = np.zeros((80 if dst_index is not None else 50, dim), F)
        expected = dst.copy()
        expected[slice(None) if dst_index is None else dst_index] = source if src_index is None else src[src_index]
        driver.copy_rows(dst, dst_index, source, src_index)
        assert same(dst, expected)
    nothing = np.empty(0, index)
    before = dst.copy()
    driver.copy_rows(dst, nothing, src, nothing)
    driver.copy_rows(dst, nothing, src[:0], None)
    assert same(dst, before)


@pytest.mark.parametrize("shape", [0, (0, 4), 7, (3, 5), (2**20, 2)])
def test_empty_is_aligned(shape) -> None:
    array = CpuDriver(1).empty(shape, np.float32)
    assert array.size == 0 or array.ctypes.data % 64 == 0
    assert array.flags.carray and array.shape == np.empty(shape).shape
    array[...] = 1


def test_an_error_in_a_range_reaches_the_caller() -> None:
    driver = CpuDriver(2)

    def fail(lo: int, hi: int) -> None:
        raise ZeroDivisionError(f"range {lo}")

    with pytest.raises(ZeroDivisionError, match="range"):
        driver._run([(0, 1), (1, 2), (2, 3)], fail)
    assert driver.all_finite(np.ones(10**6, F))
    driver.close()
    driver.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cdlrm-cpu")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_the_driver_works_after_a_fork() -> None:
    driver = CpuDriver(2)
    assert driver.all_finite(np.ones(10**6, F))
    child = os.fork()
    if child == 0:
        os._exit(0 if driver.all_finite(np.ones(10**6, F)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    driver.close()


def machine_code_without_fused_operations() -> None:
    """Compile every kernel with arithmetic, here and now (numba cannot show code that it took from its cache)."""
    driver = CpuDriver(1)
    for weighted in (False, True):
        test_lookup_and_weight_grad(driver, 33, False, weighted)
        test_lookup_and_weight_grad(driver, 33, True, weighted)
    for optimizer in OPTIMIZERS:
        test_update(driver, 33, optimizer)
    names = "lookup_single lookup_bags scale_mean weight_grad sgd row_wise_adagrad adagrad adam".split()
    fused = "vfmadd vfmsub vfnmadd vfnmsub fmla fmadd fmls fmsub llvm.fma llvm.fmuladd".split()
    for name in names:
        kernel = getattr(cpu_kernels, name, None) or getattr(cpu_update, name)
        texts = [*kernel.inspect_asm().values(), *kernel.inspect_llvm().values()]
        assert len(texts) >= 2 and all(len(text) > 1000 for text in texts)
        found = [word for word in fused for text in texts if word in text]
        assert not found, f"{name}: {found}"


def test_no_fused_multiply_add_is_compiled(tmp_path: Path) -> None:
    """Rule 9: no contraction."""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", "import test_kernels as t; t.machine_code_without_fused_operations()"],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Inspection disabled" not in done.stderr
