"""The GPU's backward kernels and optimizers in every variant against the CPU driver's: equal to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import calls
from emulator.calls import Call, F, Records, dims_of, floats, generator, launch, mode, normal, records, same  # noqa: F401
from emulator.compile import unavailable

from cdlrm import optim
from cdlrm.driver import cpu_kernels, cpu_update
from cdlrm.driver.signatures import OPTIMIZERS, STEPS, VECS

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

NO_WEIGHTS = np.empty(0, F)
SPECIFICATIONS = {
    "SGD": [optim.SGD(lr=0.1), optim.SGD(lr=0.1, weight_decay=0.01)],
    "RowWiseAdagrad": [optim.RowWiseAdagrad(lr=0.1), optim.RowWiseAdagrad(lr=0.1, weight_decay=0.01, eps=1e-3)],
    "Adagrad": [optim.Adagrad(lr=0.1), optim.Adagrad(lr=0.1, weight_decay=0.01)],
    "Adam": [optim.Adam(lr=0.1), optim.Adam(lr=0.1, weight_decay=0.01, betas=(0.5, 0.75))],
}


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
    gradients = (call.lookup_row, scaled_gradient(grad, call), call.per_sample if weighted else NO_WEIGHTS, weighted)
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
    formula = formula_of(spec, call, np.empty(0, np.int32))
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
