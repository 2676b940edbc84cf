"""Every GPU kernel in every variant, run by the host's compiler, against the CPU driver's kernels: equal to the bit.

The `.cu` text is what a GPU compiles; blocks run in random order.  Every test runs twice: with one call a team, as
the emulator does, and with one call a lane and real shuffles, as a device does.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap

import numpy as np
import pytest
import torch
from emulator import calls
from emulator.calls import Call, F, Records, floats, launch, normal, records, same
from emulator.compile import (
    EXPORTED,
    FLAGS,
    LANE_FLAGS,
    cache_folder,
    compile_text,
    compiled,
    unavailable,
    with_header,
)

from cdlrm import optim
from cdlrm.driver import cpu_kernels, cpu_update
from cdlrm.driver.signatures import KERNELS, OPTIMIZERS, OUTPUTS, STEPS, VECS
from cdlrm.initial import Initializer
from cdlrm.normal import Normal, quantile

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

DIMS = [1, 3, 17, 31, 33, 100, 257, 4, 32, 64, 128, 132, 512, 4096]
NONE_I, NONE_F = np.empty(0, np.int32), np.empty(0, F)
TORCH = {"float": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SPECIFICATIONS = {
    "SGD": [optim.SGD(lr=0.1), optim.SGD(lr=0.1, weight_decay=0.01)],
    "RowWiseAdagrad": [optim.RowWiseAdagrad(lr=0.1), optim.RowWiseAdagrad(lr=0.1, weight_decay=0.01, eps=1e-3)],
    "Adagrad": [optim.Adagrad(lr=0.1), optim.Adagrad(lr=0.1, weight_decay=0.01)],
    "Adam": [optim.Adam(lr=0.1), optim.Adam(lr=0.1, weight_decay=0.01, betas=(0.5, 0.75))],
}


@pytest.fixture(autouse=True, params=[FLAGS, LANE_FLAGS], ids=["teams", "lanes"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "flags", request.param)


def dims_of(vec: int) -> list[int]:
    return [dim for dim in DIMS if dim % vec == 0]


def generator(*seed: object) -> np.random.Generator:
    return np.random.default_rng([abs(hash(part)) % 2**32 if not isinstance(part, str) else len(part) for part in seed])


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
    scale = call.per_sample if weighted else NONE_F
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


# --- backward ---


def scaled_gradient(grad: np.ndarray, call: Call) -> np.ndarray:
    if call.divisor is None:
        return grad
    out = grad.copy()
    cpu_kernels.scale_mean(call.starts, call.out_row, call.mean, call.batch, grad, out, 0, len(call.out_row))
    return out


@pytest.mark.parametrize("vec", VECS)
def test_weight_grad(vec: int) -> None:
    for number, dim in enumerate(dims_of(vec) * 3):
        rng = generator(vec, number)
        call = calls.call(rng, 40, int(rng.choice([0, 1, 13])), single=number % 2 == 0, mean=True, weighted=True)
        cache, grad = records(rng, 40, dim, 0, vec), normal(rng, call.batch * call.width, dim)
        expected, out = np.empty(len(call.slots), F), floats(len(call.slots))
        cpu_kernels.weight_grad(
            cache.weight.copy(), call.slots, call.lookup_row, scaled_gradient(grad, call), expected, 0, len(call.slots)
        )
        launch(
            "weight_grad", (vec,), len(call.slots), weight=cache.weight, weight_stride=cache.weight.strides[0] // 4,
            slots=call.slots, lookups=len(call.slots), **call.source, grad=grad, dim=dim, out=out,
        )  # fmt: skip
        assert same(out, expected), (dim, number)


def formula_of(spec: optim.Optimizer, call: Call, tables: np.ndarray) -> dict:
    """Arguments of a kernel's formula at lr = 0.3: two tables at different step counts."""
    eps = getattr(spec, "eps", 0.0)
    own = {"lr": 0.3, "decay": spec.weight_decay, "eps": eps, "rate1": 0.0, "rate2": 0.0, "lr64": 0.3}
    if isinstance(spec, optim.Adam):
        own["rate1"], own["rate2"] = (F(1.0 - beta) for beta in spec.betas)
        own["seg_table"], own["steps"] = tables[call.seg_slot], np.array([4, 0])
        own["factors"] = np.array([0.0, *(spec.step_size(1.0, step) for step in range(1, 7))])
    return own


def update_on_cpu(spec, weight, state, call: Call, grad, formula: dict) -> None:
    segments = (call.seg_slot, call.seg_start, call.seg_lookup)
    weighted = call.per_sample is not None
    gradients = (call.lookup_row, scaled_gradient(grad, call), call.per_sample if weighted else NONE_F, weighted)
    lr, decay, eps = F(0.3), F(spec.weight_decay), F(formula["eps"])
    end = len(call.seg_slot)
    if isinstance(spec, optim.SGD):
        cpu_update.sgd(weight, state, segments, gradients, lr, decay, 0, end)
    elif isinstance(spec, optim.Adam):
        sizes = (0.3 * formula["factors"][formula["steps"] + 1]).astype(F)
        rates = formula["rate1"], formula["rate2"]
        cpu_update.adam(weight, state, segments, gradients, formula["seg_table"], sizes, *rates, decay, eps, 0, end)
    else:
        row_wise = isinstance(spec, optim.RowWiseAdagrad)
        kernel = cpu_update.row_wise_adagrad if row_wise else cpu_update.adagrad
        kernel(weight, state, segments, gradients, lr, decay, eps, 0, end)


def update(spec, vec: int, steps: int, cache: Records, call: Call, grad, formula: dict, **suppression) -> dict:
    """The launches of an update: short rows, then chunks and long rows; Adam's step counts in the result."""
    variant, dim = (OPTIMIZERS[spec.name], vec, steps), cache.weight.shape[1]
    source, long = {**call.source, "seg_lookup": call.seg_lookup, "grad": grad, "dim": dim}, call.long
    guard = {"number": 0, **suppression}
    counted = {"next_steps": np.full(2, -1), "used": np.array([1, 0], np.uint8)} if "steps" in formula else {}
    launch(
        "update_short", variant, max(len(call.seg_slot), 2), **cache.arguments, seg_slot=call.seg_slot,
        seg_start=call.seg_start, distinct=len(call.seg_slot), **source, **formula, **counted, tables=2, **guard,
    )  # fmt: skip
    sums, chunks = floats(max(1, len(long["chunk_start"])) * dim), len(long["chunk_start"])
    launch(
        "chunk_sums", (vec, steps), chunks, chunk_start=long["chunk_start"], chunk_stop=long["chunk_stop"],
        chunks=chunks, **source, sums=sums, **guard,
    )  # fmt: skip
    launch(
        "update_long", variant, len(long["long_rows"]), **cache.arguments, seg_slot=call.seg_slot,
        long_rows=long["long_rows"], long_chunks=long["long_chunks"], count=len(long["long_rows"]), sums=sums, dim=dim,
        **formula, **guard,
    )  # fmt: skip
    return counted


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("vec", VECS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update(name: str, vec: int, steps: int) -> None:
    for number, (dim, spec) in enumerate((dim, spec) for dim in dims_of(vec) for spec in SPECIFICATIONS[name] * 2):
        rng = generator(name, vec, steps, number)
        long = number % 4 == 3 and dim < 300  # a few slots, hit some hundred times each
        call = calls.call(
            rng, 3 if long else 40, 400 if long else int(rng.choice([0, 1, 13])), single=number % 2 == 1,
            weighted=number % 3 == 0, mean=number % 5 < 3,
        )  # fmt: skip
        cache, grad = records(rng, 40, dim, spec.state_width(dim), vec), normal(rng, call.batch * call.width, dim)
        formula = formula_of(spec, call, rng.integers(0, 2, 40).astype(np.int32))
        weight, state = cache.copies()
        update_on_cpu(spec, weight, state, call, grad, formula)
        counted = update(spec, vec, steps, cache, call, grad, formula)
        assert same(cache.weight.copy(), weight) and same(cache.state.copy(), state), (dim, spec, number)
        assert not counted or counted["next_steps"].tolist() == [5, 0]


@pytest.mark.parametrize("vec", VECS)
def test_one_row_of_65536_lookups(vec: int) -> None:
    rng, dim = generator(vec), 64 if vec == 4 else 33
    call, spec = calls.call(rng, 1, 65536, 1, single=True, weighted=True), SPECIFICATIONS["RowWiseAdagrad"][1]
    cache, grad = records(rng, 2, dim, 1, vec), normal(rng, 65536 * 2, dim)
    weight, state = cache.copies()
    formula = formula_of(spec, call, NONE_I)
    update_on_cpu(spec, weight, state, call, grad, formula)
    assert len(call.long["chunk_start"]) == 256
    update(spec, vec, 2, cache, call, grad, formula)
    assert same(cache.weight.copy(), weight) and same(cache.state.copy(), state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_suppressed_update_writes_nothing_but_the_old_step_counts(name: str) -> None:
    rng, spec = generator(name), SPECIFICATIONS[name][1]
    call = calls.call(rng, 3, 400, mean=True)
    cache, grad = records(rng, 3, 8, spec.state_width(8), 4), normal(rng, call.batch * call.width, 8)
    formula = formula_of(spec, call, np.zeros(3, np.int32))
    weight, state = cache.copies()
    flag, sticky, clear = np.array([12], np.int32), np.array([5], np.int32), np.zeros(1, np.int32)
    for guard in ({"flag": flag, "number": 12}, {"sticky": sticky}, {"flag": flag, "number": 11, "sticky": sticky}):
        counted = update(spec, 4, 1, cache, call, grad, formula, **guard)
        assert same(cache.weight.copy(), weight) and same(cache.state.copy(), state)
        assert not counted or counted["next_steps"].tolist() == [4, 0]
    update(spec, 4, 1, cache, call, grad, formula, flag=flag, number=11, sticky=clear)
    update_on_cpu(spec, weight, state, call, grad, formula)
    assert same(cache.weight.copy(), weight) and same(cache.state.copy(), state)


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


# --- 64-bit addresses ---


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
