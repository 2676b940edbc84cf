"""Every GPU kernel in every variant, run by the host's compiler, against the CPU driver's kernels: equal to the bit.

The `.cu` text is what a GPU compiles; blocks run in random order.  Every test runs twice: with one call a team, as
the emulator does, and with one call a lane and real shuffles, as a device does.
"""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch
from emulator import calls
from emulator.calls import Call, F, dims_of, floats, generator, launch, mode, normal, records, same  # noqa: F401
from emulator.compile import (
    EXPORTED,
    cache_folder,
    compile_text,
    compiled,
    unavailable,
    with_header,
)

from cdlrm.driver import cpu_kernels
from cdlrm.driver.signatures import KERNELS, OUTPUTS, STEPS, VECS
from cdlrm.initial import Initializer
from cdlrm.normal import Normal, quantile

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

NO_WEIGHTS = np.empty(0, F)
TORCH = {"float": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def test_every_variant_has_a_runner() -> None:
    kernels = compiled(calls.flags)
    assert set(kernels._runners) == {(name, variant) for name, k in KERNELS.items() for variant in k.variants}


# --- records ---


@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize("vec", VECS)
def test_fill_copies_and_first_touches(vec: int, count: int) -> None:
    seed, sizes = 0x1234_5678_9ABC_DEF0, [50, 0, 1, 7, 2**33, 0]
    normals = {3: Normal(seed=99 + 2**40, table=5), 4: Normal(seed=7, table=2)}
    bases = np.concatenate([[0], np.cumsum(sizes)])
    numbers = np.arange(10, 16)
    inits = [normals.get(t) for t in range(6)]
    specs = [(inits[t].seed, inits[t].table) if inits[t] else (seed, int(numbers[t])) for t in range(6)]
    for dim in dims_of(vec):
        rng = generator(vec, count, dim)
        copied = int(rng.integers(0, count + 1))
        initial = Initializer(bases, inits, seed, dim, numbers)
        width = int(rng.choice([0, 1, dim, 2 * dim]))
        cache, home = records(rng, 50, dim, width, vec), records(rng, 59, dim, width, vec)
        rows = np.concatenate([rng.permutation(58)[:copied], rng.permutation(58)[: count - copied]])
        rows[copied::2] += 2**32 * (rows[copied::2] == 57)  # a row beyond 2^32 in the last table, now and then
        slots = rng.permutation(50)[:count].astype(np.int32)
        weight, state = cache.copies()
        staged = int(rng.integers(2))
        of = np.arange(copied) if staged else rows[:copied]
        weight[slots[:copied]], state[slots[:copied]] = home.weight[of], home.state[of]
        initial.rows(weight, slots[copied:], rows[copied:])
        state[slots[copied:]] = 0.5
        launch(
            "fill", (vec,), count, dim, **cache.arguments, **home.home_arguments(), rows=rows, slots=slots,
            copied=copied, count=count, staged=staged, dim=dim, state_width=width, bases=bases,
            kinds=np.array([init is not None for init in inits], np.int32),
            numbers=np.array([number for _, number in specs], np.int32),
            keys=np.array([[key & 0xFFFFFFFF, key >> 32] for key, _ in specs], np.uint32),
            scales=initial._scales, tables=6, initial_state=0.5,
        )  # fmt: skip
        assert same(cache.weight.copy(), weight) and same(cache.state.copy(), state), (dim, width)


def test_many_normal_numbers() -> None:
    rows, dim = np.arange(20000, dtype=np.int64) * 977, 64
    cache, normals = floats(len(rows) * dim).reshape(-1, dim), Normal(seed=3, table=1)
    launch(
        "fill", (4,), len(rows), weight=cache, weight_stride=dim, state_stride=0, home_weight_stride=0,
        home_state_stride=0, rows=rows, slots=np.arange(len(rows), dtype=np.int32), copied=0, count=len(rows), staged=0,
        dim=dim, state_width=0, bases=np.array([0, 2**40]), kinds=np.ones(1, np.int32), numbers=np.ones(1, np.int32),
        keys=np.array([3, 0], np.uint32), scales=np.ones(1, F), tables=1, initial_state=0.0,
    )  # fmt: skip
    expected = normals(rows, dim)
    assert np.abs(expected).max() > 4.7 and same(cache, expected)


def test_normal_quantile_to_the_last_bit() -> None:
    """In float64 and in all branches: the far tails begin at 1e-11, where no test's random number comes to be."""
    runner = (
        f"{EXPORTED} void quantiles(const double* p, double* out, long long count) "
        "{ for (long long i = 0; i < count; ++i) out[i] = quantile(p[i]); }"
    )
    text = with_header("first_touch.cuh", runner)
    library = ctypes.CDLL(str(compile_text("quantile", text, calls.flags, cache_folder())))
    small = 10.0 ** np.random.default_rng(0).uniform(-15.9, 0, 3000)
    p = np.concatenate([small, 1 - small, np.linspace(0.001, 0.999, 999), [2.0**-53, 1 - 2.0**-53, 0.075, 0.925]])
    out = np.empty_like(p)
    library.quantiles(*(ctypes.c_void_p(array.ctypes.data) for array in (p, out)), ctypes.c_longlong(len(p)))
    assert out.max() > 8 and out.min() < -8
    assert same(out, np.array([quantile(value) for value in p]))


@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize("vec", VECS)
def test_evict(vec: int, count: int) -> None:
    for dim in dims_of(vec):
        rng = generator(vec, count, dim)
        for width in (0, 1, dim, 2 * dim):
            cache, home = records(rng, 50, dim, width, vec), records(rng, 60, dim, width, vec)
            rows, slots = rng.permutation(60)[:count], rng.permutation(50)[:count].astype(np.int32)
            weight, state = home.copies()
            staged = int(rng.integers(2))
            to = np.arange(count) if staged else rows
            weight[to], state[to] = cache.weight[slots], cache.state[slots]
            launch(
                "evict", (vec,), count, dim, **cache.arguments, **home.home_arguments(), rows=rows, slots=slots,
                count=count, staged=staged, dim=dim, state_width=width,
            )  # fmt: skip
            assert same(home.weight.copy(), weight) and same(home.state.copy(), state), (dim, width)


# --- forward ---


def lookup_on_cpu(weight: np.ndarray, call: Call) -> np.ndarray:
    out = np.full((call.batch * call.width, weight.shape[1]), 7.25, F)
    weighted = call.per_sample is not None
    scale = call.per_sample if weighted else NO_WEIGHTS
    if call.starts is None:
        tiles = -(-call.batch // cpu_kernels.TILE)
        cpu_kernels.lookup_single(weight, call.slots, call.out_row, call.batch, scale, weighted, out, 0, tiles)
    else:
        cpu_kernels.lookup_bags(
            weight, call.slots, call.starts, call.out_row, call.mean, call.batch, scale, weighted, out, 0,
            len(call.out_row),
        )  # fmt: skip
    return out


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("vec", VECS)
def test_lookup(vec: int, steps: int, kind: str) -> None:
    for number, (dim, single, weighted) in enumerate(
        (dim, single, weighted) for dim in dims_of(vec) for single in (False, True) for weighted in (False, True)
    ):
        rng = generator(vec, steps, kind, number)
        batch = int(rng.choice([0, 1, 13]))
        call = calls.call(rng, 40, batch, single=single, weighted=weighted, mean=number % 3 == 0)
        cache = records(rng, 40, dim, 0, vec)
        expected = torch.from_numpy(lookup_on_cpu(cache.weight.copy(), call)).to(TORCH[kind])
        free = torch.full_like(expected, 7.25).contiguous()
        out = floats(free.numel()) if kind == "float" else floats(free.numel()).view(np.int16)[: free.numel()]
        out[:] = free.view(-1).view(torch.int16 if kind != "float" else torch.float32).numpy()
        launch(
            "lookup", (vec, steps, kind), len(call.out_row), number, weight=cache.weight,
            weight_stride=cache.weight.strides[0] // 4, slots=call.slots, starts=call.starts, columns=call.columns,
            mean=call.mean, per_sample=call.per_sample, out=out, dim=dim, batch=batch, features=3, width=call.width,
        )  # fmt: skip
        wanted = expected.view(-1).view(torch.int16 if kind != "float" else torch.float32).numpy()
        assert same(out, wanted), (dim, single, weighted, batch)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_outputs_are_rounded_once_to_nearest_even(kind: str) -> None:
    """All patterns of the upper 16 bits with the lower bits around every tie; infinities too, NaN as NaN."""
    upper = np.arange(65536, dtype=np.uint32)
    for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        table = floats(65536).reshape(16, 4096)
        table.view(np.uint32)[...] = (upper << 16 | low).reshape(16, 4096)
        out = floats(32768).view(np.int16)
        launch(
            "lookup", (4, 4, kind), 16, weight=table, weight_stride=4096, slots=np.arange(16, dtype=np.int32),
            columns=np.zeros(1, np.int32), out=out, dim=4096, batch=16, features=1, width=1,
        )  # fmt: skip
        got, wanted = torch.from_numpy(out).view(TORCH[kind]), torch.from_numpy(table).view(-1).to(TORCH[kind])
        assert torch.equal(got.isnan(), wanted.isnan())
        finite = ~wanted.isnan() & (wanted != 0)  # a sum that begins with +0 has no -0
        assert torch.equal(got.view(torch.int16)[finite], wanted.view(torch.int16)[finite])
        assert not got[wanted == 0].any()


# --- flags and copies ---


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_finite(offset: int) -> None:
    for number, count in enumerate([0, 1, 3, 4, 5, 127, 128, 1000, 5000]):
        rng = generator(offset, count)
        grad = floats(count, offset)
        grad[:] = rng.uniform(-3.4e38, 3.4e38, count)
        places = sorted({0, count // 2, count - 1}) if count else []
        for at, bad in [(None, 0.0), *itertools.product(places, (np.nan, np.inf, -np.inf))]:
            bad_grad = floats(count, offset)
            bad_grad[:] = grad
            if at is not None:
                bad_grad[at] = bad
            flags = np.array([3, 0, 0], np.int32)
            given = {"grad": bad_grad, "count": count, "flag": flags[:1]}
            launch("finite", (), 3, number, **given, number=9, sticky=flags[1:2], host_flag=flags[2:])
            assert flags.tolist() == ([3, 0, 0] if at is None else [9, 9, 9]), (count, at, bad)
            launch("finite", (), 3, number, **given, number=4)
            assert flags.tolist() == ([3, 0, 0] if at is None else [4, 9, 9])


def test_combine() -> None:
    for first, second, set_ in [(1, 2, True), (1, 0, True), (0, 2, True), (2, 1, False), (0, 0, False)]:
        flag = np.array([5], np.int32)
        flags = {"first": np.array([first], np.int32), "second": np.array([second], np.int32), "flag": flag}
        launch("combine", (), 1, **flags, first_number=1, second_number=2, number=8)
        assert flag[0] == (8 if set_ else 5)


@pytest.mark.parametrize("vectors", [0, 1, 100, 5000])
def test_stream_copy(vectors: int) -> None:
    source, target = normal(generator(vectors), 4 * vectors + 4), floats(4 * vectors + 4)
    expected = np.append(source[: 4 * vectors], target[4 * vectors :])
    launch("stream_copy", (), 2, target=target, source=source, vectors=vectors)
    assert same(target, expected)


# --- what the emulation refuses ---


def test_an_address_that_a_device_would_refuse_is_a_fault() -> None:
    source, target = floats(64, offset=1), floats(64)
    with pytest.raises(RuntimeError, match="stream_copy.*not aligned"):
        launch("stream_copy", (), 2, target=target, source=source, vectors=3)
    launch("stream_copy", (), 2, target=target, source=floats(64), vectors=3)  # and is forgotten


def test_without_a_compiler_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unavailable() is None
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in str(unavailable())
