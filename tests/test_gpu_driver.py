"""The GPU driver on the emulated GPU: what it launches, copies and waits for; what it does when something fails."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from emulated import Emulated, use
from emulator.compile import compiler
from emulator.memory import EmulatorError
from oracle import Oracle
from scenarios import InputShape, backward, random_grad, random_inputs, same_bits, same_tables, to_torch

import cdlrm
from cdlrm.driver import formulas, gpu_order, gpu_records, gpu_transfers, launches, signatures, verdicts
from cdlrm.errors import DeviceError, DeviceMemoryError, NonFiniteGradientError, PinError, UsageError

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the emulated GPU cannot compile kernels")

SPECS = [cdlrm.SGD(lr=0.1), cdlrm.RowWiseAdagrad(lr=0.1), cdlrm.Adagrad(lr=0.1), cdlrm.Adam(lr=0.05)]


def tables(count: int, rows: int = 40, dim: int = 8, pooling: str = "sum") -> list[cdlrm.Table]:
    return [cdlrm.Table(f"t{i}", rows, dim, pooling=pooling) for i in range(count)]


def one_hot(rng: np.random.Generator, some: list[cdlrm.Table], batch: int) -> Any:
    return {t.name: (rng.integers(0, t.num_embeddings, batch), None, None) for t in some}


def multi_hot(rng: np.random.Generator, some: list[cdlrm.Table]) -> Any:
    return random_inputs(rng, some, InputShape(max_batch=5, max_bag=3, empty_batches=False))


def train(ebc: Any, oracle: Oracle, inputs: list[Any], **ahead: Any) -> None:
    rng = np.random.default_rng(1)
    loader = [to_torch(each) for each in inputs]
    for j, batch in enumerate(cdlrm.lookahead(ebc, loader, **ahead)):
        want = oracle.forward(inputs[j])
        out = ebc(batch)
        same_bits(out, want, f"batch {j}")
        grad = random_grad(rng, want)
        backward(out, grad)
        oracle.backward(grad)


def backend_of(ebc: Any) -> Any:
    return ebc.groups[0].driver.backend


# --- no work that grows ---


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("count", [1, 26, 260])
def test_launches_copies_and_waits_of_a_step(monkeypatch: Any, spec: Any, count: int) -> None:
    """At most 8 launches a group and step, one copy to the device, no wait; bytes are those of the moves."""
    emulated = use(monkeypatch)
    emulated.settings = {"check": False, "compare": 0}
    monkeypatch.setattr(Emulated, "driver", Emulated.zero_copy_driver)
    rng = np.random.default_rng(count)
    with_long_rows, batches = count == 1, 12
    some = tables(count, rows=4000 if with_long_rows else 40)
    inputs = [one_hot(rng, some, 600 if with_long_rows else 6) for _ in range(batches)]
    if with_long_rows:  # one row that more than 256 lookups hit
        inputs = [{"t0": (np.where(rng.random(600) < 0.7, 3, i["t0"][0]), None, None)} for i in inputs]
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=spec, cache_rows=600 if with_long_rows else 30 * count, seed=0)
    oracle = Oracle(some, spec)
    train(ebc, oracle, inputs[:6])  # buffers reach their size
    traffic, stats = backend_of(ebc).traffic, ebc.stats()
    before = [Counter(traffic.launches), Counter(traffic.copies), Counter(traffic.copied_bytes)]
    waits = Counter(traffic.synchronizations)
    train(ebc, oracle, inputs[6:], horizon=4)
    launches_made = traffic.launches - before[0]
    steps = batches - 6
    assert sum(launches_made.values()) <= 8 * steps
    kernels = {"fill", "evict", "lookup", "finite", "update_short"}
    kernels |= {"chunk_sums", "update_long"} if with_long_rows else set()
    assert set(launches_made) <= kernels and all(n <= steps for n in launches_made.values())
    assert (traffic.copies - before[1])["h2d"] == steps, "one copy for plan and inputs"
    assert not (traffic.copies - before[1])["d2h"]
    assert set(traffic.synchronizations - waits) <= {"ring"}, "the trainer waits for nothing"
    assert ebc.stats()["fills"] > stats["fills"]
    same_tables(ebc, oracle, "end")
    ebc.close()


def test_waits_for_numbers_that_torch_keeps_on_the_device_are_counted(monkeypatch: Any) -> None:
    """A GradScaler's scale, what clipping did to the norm, and gradients that may be added to."""
    use(monkeypatch)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ebc = cdlrm.EmbeddingBagCollection(tables(2), optimizer=cdlrm.SGD(lr=0.1), cache_rows=20, update="step", seed=0)
    ebc.grad_scaler = scaler
    ids = {f"t{i}": torch.arange(4) for i in range(2)}
    for _ in range(3):
        scaler.scale(ebc(ids).sum()).backward()
        scaler.step(ebc.optimizer)
        scaler.update()
        ebc.optimizer.zero_grad()
    waits = backend_of(ebc).traffic.synchronizations
    # The driver makes the norm; it is read by the step.
    assert (waits["scale"], waits["norm"]) == (3, 3 + 3)
    assert waits["trays"] <= 5, "one for the seeds, three for the plans, one for all norms"
    ebc.close()
    dense = torch.nn.Linear(4, 1)
    twice = cdlrm.EmbeddingBagCollection(tables(2), optimizer=cdlrm.SGD(lr=0.1), cache_rows=20, seed=0)
    step = torch.optim.SGD(dense.parameters(), lr=0.1)
    dense(torch.ones(4)).sum().backward()
    step.step()
    twice(ids).sum().backward()  # without a step of the optimizer, whose gradients are still there at the next forward
    with contextlib.suppress(UsageError):
        dense(twice(ids).flatten(1)[:, :4]).sum().backward()
    assert backend_of(twice).traffic.synchronizations["accumulation"] > 0
    twice.close()


def test_bytes_over_the_link_are_those_of_the_moves(monkeypatch: Any) -> None:
    """Staged: fills of trained rows come with the plan's copy, dirty evicts go by one copy of their records."""
    emulated = use(monkeypatch)
    monkeypatch.setattr(Emulated, "driver", Emulated.staged_driver)
    assert emulated.made == 0
    rng, some = np.random.default_rng(0), tables(2)
    inputs = [one_hot(rng, some, 12) for _ in range(20)]
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=cdlrm.Adagrad(lr=0.1), cache_rows=40, seed=0)
    oracle = Oracle(some, cdlrm.Adagrad(lr=0.1))
    traffic = backend_of(ebc).traffic
    train(ebc, oracle, inputs)
    stats = ebc.stats()
    assert stats["evicts_written"] > 0 and stats["fills_copied"] > 0
    record = ebc.groups[0].store.record_bytes
    assert traffic.copied_bytes["d2h"] == stats["evicts_written"] * record
    plan_bytes = traffic.copied_bytes["h2d"] - stats["fills_copied"] * record
    # Per batch a dozen arrays, each padded to 256 bytes; nothing else.
    assert 0 < plan_bytes < 20 * 256 * 24 + 4096
    same_tables(ebc, oracle, "end")
    ebc.close()


# --- races that are planted ---


def run_small(seed: int = 0, **settings: Any) -> None:
    rng, some = np.random.default_rng(seed), tables(2, rows=30)
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=cdlrm.Adagrad(lr=0.1), cache_rows=24, seed=3, **settings)
    train(ebc, Oracle(some, cdlrm.Adagrad(lr=0.1), 3), [one_hot(rng, some, 8) for _ in range(14)])
    ebc.close()


def test_nothing_is_found_where_nothing_is_planted(monkeypatch: Any) -> None:
    use(monkeypatch)
    for seed in range(4):
        run_small(seed)


# Whoever is dropped later hears of the planted error again.
QUIET = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@contextlib.contextmanager
def found(error: type[EmulatorError]) -> Iterator[None]:
    """It reaches the trainer by the backend, which raises it again, or by the thread that met it."""
    with pytest.raises((error, cdlrm.PipelineError)) as caught:
        yield
    assert isinstance(caught.value, error) or isinstance(caught.value.__cause__, error)


@QUIET
@pytest.mark.parametrize("wait", ["before transfer", "before lookup"])
def test_a_missing_wait_is_caught(monkeypatch: Any, wait: str) -> None:
    emulated = use(monkeypatch)
    if wait == "before transfer":
        monkeypatch.setattr(gpu_order.Order, "before_transfer", lambda self, wait_for: None)
    else:
        executed = gpu_records.GpuRecords.executed

        def forgetful(self: Any, plan: Any) -> None:
            early = self.backend.record(self.backend.new_stream())
            executed(self, plan)
            self.transfers.brought[plan.batch].tray.ready = early

        monkeypatch.setattr(gpu_records.GpuRecords, "executed", forgetful)
    with found(EmulatorError):  # a race; or poison, read as a slot
        run_small()
    assert emulated.made


@QUIET
def test_a_tray_that_is_used_again_too_early_is_caught(monkeypatch: Any) -> None:
    use(monkeypatch, style="late")

    executed = gpu_records.GpuRecords.executed

    def hasty(self: Any, plan: Any) -> None:
        executed(self, plan)
        self.transfers.ring.free.append(self.transfers.brought[plan.batch].tray)  # although its batch has not run

    monkeypatch.setattr(gpu_records.GpuRecords, "executed", hasty)
    with found(AssertionError):  # a race, or a plan that was overwritten
        for seed in range(20):
            run_small(seed)


def test_an_argument_of_the_wrong_type_is_caught(monkeypatch: Any) -> None:
    use(monkeypatch)
    pack = signatures.pack

    def careless(name: str, values: Any) -> Any:
        args = pack(name, values)
        return tuple(int(a) if isinstance(a, np.int32) else a for a in args) if name == "lookup" else args

    monkeypatch.setattr(launches.signatures, "pack", careless)
    with pytest.raises(TypeError, match="lookup"):
        run_small()


# --- non-finite gradients ---


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_gradient_that_is_not_finite_is_raised_in_time_and_stops_every_later_update(
    monkeypatch: Any, depth: int
) -> None:
    use(monkeypatch, 5 + depth)
    rng, some, bad = np.random.default_rng(0), tables(2), 6
    inputs = [one_hot(rng, some, 8) for _ in range(30)]
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=cdlrm.Adam(lr=0.1), cache_rows=60, seed=0)
    oracle, trained = Oracle(some, cdlrm.Adam(lr=0.1)), 0
    look = cdlrm.lookahead(ebc, [to_torch(i) for i in inputs], prefetch_depth=depth)
    with pytest.raises(NonFiniteGradientError, match=f"batch {bad}:"):
        for j, batch in enumerate(look):
            out = ebc(batch)
            grad = torch.ones_like(out)
            if j < bad:
                oracle.forward(inputs[j])
                oracle.backward(np.ones(out.shape, np.float32))
            if j == bad:
                grad[0, 0, 0] = float("nan")
            out.backward(grad)
            trained = j
    assert bad <= trained <= bad + depth + 2
    look.close()
    same_tables(ebc, oracle, "as of the batch before")
    ebc.close()


# --- faults ---


def test_no_room_to_grow(monkeypatch: Any) -> None:
    """The error names batch and stage; afterwards training goes on, exactly, once there is room."""
    use(monkeypatch, 1)
    some = tables(2, rows=50)
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=cdlrm.SGD(lr=0.1), cache_rows=10, seed=0)
    oracle = Oracle(some, cdlrm.SGD(lr=0.1))
    rng = np.random.default_rng(0)
    train(ebc, oracle, [one_hot(rng, some, 4) for _ in range(3)])
    big = one_hot(rng, some, 20)
    backend_of(ebc).fail_at("alloc", 2)  # the first is of the output
    with pytest.raises(DeviceMemoryError, match="growth of the cache"):
        ebc(to_torch(big))
    ebc.check()
    train(ebc, oracle, [big, one_hot(rng, some, 4)])
    same_tables(ebc, oracle, "after growth")
    ebc.close()


def test_tables_that_cannot_be_pinned_are_staged_and_said(monkeypatch: Any, caplog: Any) -> None:
    emulated = use(monkeypatch)
    monkeypatch.setattr(Emulated, "driver", Emulated.zero_copy_driver)
    emulated.prepare = lambda backend: backend.fail_at("register", 1)
    some = tables(2)
    with caplog.at_level(logging.WARNING, "cdlrm"):
        ebc = cdlrm.EmbeddingBagCollection(some, optimizer=cdlrm.SGD(lr=0.1), cache_rows=20, seed=0)
    assert "staging" in caplog.text and any("staging" in note for note in ebc.notes)
    oracle, rng = Oracle(some, cdlrm.SGD(lr=0.1)), np.random.default_rng(0)
    train(ebc, oracle, [one_hot(rng, some, 5) for _ in range(6)])
    same_tables(ebc, oracle, "staged")
    ebc.close()


def test_no_pinned_memory_for_plans(monkeypatch: Any) -> None:
    emulated = use(monkeypatch)
    emulated.prepare = lambda backend: backend.fail_at("pinned", 1)
    with pytest.raises(PinError):
        cdlrm.EmbeddingBagCollection(tables(1), optimizer=cdlrm.SGD(lr=0.1), cache_rows=20, seed=0)


@pytest.mark.parametrize("kernel", ["fill", "lookup", "update_short"])
def test_a_kernel_that_does_not_compile(monkeypatch: Any, kernel: str) -> None:
    emulated = use(monkeypatch)
    emulated.prepare = lambda backend: backend.fail_at(f"compile:{kernel}", 1)
    with pytest.raises(cdlrm.CompileError) as caught:
        run_small()
    assert caught.value.log


@pytest.mark.parametrize("fault", ["kernel:fill", "kernel:evict", "kernel:lookup", "kernel:update_short", "copy:h2d"])
def test_a_device_that_is_lost(monkeypatch: Any, caplog: Any, fault: str) -> None:
    """The error names the stage; nothing hangs, `close` is clean and says what is lost, host tables stay readable."""
    use(monkeypatch, 3)
    some, rng = tables(2, rows=60), np.random.default_rng(0)
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=cdlrm.SGD(lr=0.1), cache_rows=30, seed=0)
    oracle = Oracle(some, cdlrm.SGD(lr=0.1))
    train(ebc, oracle, [one_hot(rng, some, 8) for _ in range(8)])
    ebc.flush()
    saved = {key: value.clone() for key, value in ebc.state_dict().items()}
    backend_of(ebc).fail_at(fault, 3)
    look = cdlrm.lookahead(ebc, [to_torch(one_hot(rng, some, 8)) for _ in range(40)])
    with pytest.raises(DeviceError) as caught:
        for batch in look:
            ebc(batch).sum().backward()
        ebc.flush()
    assert caught.value.sticky
    look.close()
    with caplog.at_level(logging.ERROR, "cdlrm"):
        ebc.close()
    assert "could not be brought home" in caplog.text or not ebc.groups[0].cache.dirty.any()
    weights = {key: value for key, value in ebc.state_dict().items()}
    for key, value in weights.items():
        assert value.shape == saved[key].shape and torch.isfinite(value).all()


def test_a_device_that_is_lost_while_counts_of_steps_come_home(monkeypatch: Any) -> None:
    """The flush tells it, with the stage; `close` is clean."""
    use(monkeypatch)
    monkeypatch.setattr(Emulated, "driver", Emulated.zero_copy_driver)
    some = tables(1)
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=cdlrm.Adam(lr=0.1), cache_rows=20, seed=0)
    ebc({"t0": torch.arange(8)}).sum().backward()
    backend_of(ebc).fail_at("copy:d2h", 1)
    with pytest.raises(DeviceError, match="counts of steps") as caught:
        ebc.flush()
    assert caught.value.sticky
    ebc.close()
    assert torch.isfinite(ebc.state_dict()["embedding_bags.t0.weight"]).all()


def test_ctrl_c_in_the_middle_of_a_transfer(monkeypatch: Any) -> None:
    """Nothing hangs, and what was trained is in the tables."""
    use(monkeypatch, 2)
    some, rng = tables(2, rows=60), np.random.default_rng(0)
    inputs = [one_hot(rng, some, 8) for _ in range(20)]
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=cdlrm.SGD(lr=0.1), cache_rows=30, seed=0)
    oracle = Oracle(some, cdlrm.SGD(lr=0.1))
    fill, calls = gpu_transfers.Transfers._fill, []

    def interrupted(self: Any, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        fill(self, *args)

    monkeypatch.setattr(gpu_transfers.Transfers, "_fill", interrupted)
    rng, done = np.random.default_rng(1), 0
    with pytest.raises((KeyboardInterrupt, cdlrm.PipelineError)):
        for j, batch in enumerate(cdlrm.lookahead(ebc, [to_torch(i) for i in inputs])):
            out, want = ebc(batch), oracle.forward(inputs[j])
            grad = random_grad(rng, want)
            backward(out, grad)
            oracle.backward(grad)
            done = j + 1
    assert 0 < done < len(inputs)
    ebc.check()
    same_tables(ebc, oracle, "after Ctrl-C")
    train(ebc, oracle, inputs[done:])
    same_tables(ebc, oracle, "went on")
    ebc.close()


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_module_that_is_dropped_without_close(monkeypatch: Any, zero_copy: bool, seed: int) -> None:
    """What the device still uses is freed when it has done its work, whoever drops the module and when."""
    use(monkeypatch, seed, style="late")
    monkeypatch.setattr(Emulated, "driver", Emulated.zero_copy_driver if zero_copy else Emulated.staged_driver)
    some, rng = tables(2, rows=60), np.random.default_rng(seed)
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=cdlrm.Adam(lr=0.1), cache_rows=30, seed=0)
    backend = backend_of(ebc)
    look = cdlrm.lookahead(ebc, [to_torch(one_hot(rng, some, 8)) for _ in range(9)], prefetch_depth=3)
    for batch, _ in zip(look, range(4), strict=False):
        ebc(batch).sum().backward()
    look.close()
    del ebc, look, batch
    for _ in range(3):  # what a finalizer lets go may be in a circle
        gc.collect()
    backend.close()  # runs all that was issued, and raises what was wrong
    assert not backend.memory.live("pinned") and not backend.memory.live("registered")


def test_tables_are_unpinned_after_an_evaluation_that_reads_them(monkeypatch: Any) -> None:
    """Also at the end of a process that has closed nothing."""
    use(monkeypatch, 1)
    monkeypatch.setattr(Emulated, "driver", Emulated.zero_copy_driver)
    ebc = cdlrm.EmbeddingBagCollection(tables(2), optimizer=cdlrm.SGD(lr=0.1), cache_rows=10, seed=0)
    ids = [{f"t{i}": torch.arange(lo, lo + 5) for i in range(2)} for lo in (0, 5, 10)]
    for each in ids:
        ebc(each).sum().backward()
    with torch.no_grad():
        ebc(ids[0])  # trained, and not in the cache any more
    ebc.groups[0].records.transfers.carrier.close()


# --- ids and inputs that a plan has not brought ---


def test_several_calls_a_step_weights_that_learn_and_unannounced_ids(monkeypatch: Any) -> None:
    """Uploads besides the plan's: exact as well."""
    use(monkeypatch, 11)
    some = tables(2, rows=30, dim=6, pooling="sum")
    spec = cdlrm.Adam(lr=0.05)
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=spec, cache_rows=30, seed=0)
    oracle, rng = Oracle(some, spec), np.random.default_rng(2)
    shape = InputShape(max_batch=4, max_bag=3, weighted={"t0"}, empty_batches=False)
    inputs = [random_inputs(rng, some, shape) for _ in range(10)]
    others = [random_inputs(rng, some, shape) for _ in range(10)]
    for j, batch in enumerate(cdlrm.lookahead(ebc, [to_torch(i) for i in inputs])):
        calls = [(inputs[j], batch), (others[j], to_torch(others[j]))]
        wants = [oracle.forward(i) for i, _ in calls]
        outs = [ebc(b) for _, b in calls]
        grads = [random_grad(rng, want) for want in wants]
        for out, want in zip(outs, wants, strict=True):
            same_bits(out, want, f"batch {j}")
        torch.autograd.backward(outs, [torch.from_numpy(g) for g in grads])
        oracle.backward_all(grads) if hasattr(oracle, "backward_all") else oracle.backward(*grads)
    same_tables(ebc, oracle, "end")
    ebc.close()


def test_ids_that_are_on_the_device_are_counted(monkeypatch: Any) -> None:
    """They work; the host waits for each tensor, and says so."""
    use(monkeypatch)

    class OnDevice(torch.Tensor):
        """As a tensor of a GPU: no NumPy array of it, and a device of its own."""

        device = torch.device("cuda", 0)  # type: ignore[assignment]

        def numpy(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

        def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.as_subclass(torch.Tensor)

    some = tables(2)
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=cdlrm.SGD(lr=0.1), cache_rows=30, seed=0)
    ids = {table.name: torch.arange(5) for table in some}
    want = ebc(ids)
    assert backend_of(ebc).traffic.synchronizations["inputs"] == 0
    got = ebc({name: each.as_subclass(OnDevice) for name, each in ids.items()})
    assert backend_of(ebc).traffic.synchronizations["inputs"] == 2
    same_bits(got, want.detach().numpy(), "ids on the device")
    ebc.close()


def test_a_verdict_that_is_read_too_early_is_caught(monkeypatch: Any) -> None:
    """The host may look at a flag only after the event behind the check."""
    use(monkeypatch, style="late")
    real = verdicts.Verdicts.poll

    def hasty(self: Any) -> None:
        while self.waiting:
            self.decide(self.waiting.popleft())

    monkeypatch.setattr(verdicts.Verdicts, "poll", hasty)
    assert real is not hasty
    with pytest.raises(EmulatorError):
        for seed in range(10):
            run_small(seed)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("cache_rows", [10, 40])
def test_training_on_a_stream_of_the_users_own(monkeypatch: Any, inside: bool, cache_rows: int) -> None:
    """`with torch.cuda.stream(s)` around the loop, or in its body: what s computed is waited for as well."""
    for seed in range(4):
        use(monkeypatch, seed)
        rng, some = np.random.default_rng(seed), tables(2, rows=50)
        ebc = cdlrm.EmbeddingBagCollection(some, optimizer=cdlrm.Adagrad(lr=0.1), cache_rows=cache_rows, seed=0)
        oracle, backend = Oracle(some, cdlrm.Adagrad(lr=0.1)), backend_of(ebc)
        own = backend.new_stream_named("of the user")
        inputs = [one_hot(rng, some, 4 + j % 7) for j in range(14)]
        backend.wait(own, backend.record(backend.compute_stream()))
        with backend.current(own) if not inside else contextlib.nullcontext():
            for j, batch in enumerate(cdlrm.lookahead(ebc, [to_torch(i) for i in inputs])):
                with backend.current(own) if inside else contextlib.nullcontext():
                    want, out = oracle.forward(inputs[j]), ebc(batch)
                    same_bits(out, want, f"batch {j}")
                    grad = random_grad(rng, want)
                    backward(out, grad)
                    oracle.backward(grad)
        backend.wait(backend.compute_stream(), backend.record(own))
        same_tables(ebc, oracle, "end")
        ebc.close()


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("look", [False, True])
def test_two_calls_of_a_step_on_two_streams(monkeypatch: Any, look: bool, nonfinite: str) -> None:
    """Their gradients are made and checked on two streams, and make one update on one of them."""
    for seed in range(4):
        use(monkeypatch, seed)
        rng, some, spec = np.random.default_rng(seed), tables(2, rows=50), cdlrm.Adam(lr=0.05)
        ebc = cdlrm.EmbeddingBagCollection(some, optimizer=spec, cache_rows=40, nonfinite=nonfinite, seed=0)
        oracle, backend = Oracle(some, spec), backend_of(ebc)
        streams = [backend.compute_stream(), backend.new_stream_named("first"), backend.new_stream_named("second")]
        inputs, others = ([one_hot(rng, some, 5) for _ in range(10)] for _ in range(2))
        loader = [to_torch(each) for each in inputs]
        for j, batch in enumerate(cdlrm.lookahead(ebc, loader) if look else loader):
            wants = [oracle.forward(inputs[j]), oracle.forward(others[j])]
            outs = []
            for call, given in enumerate((batch, to_torch(others[j]))):
                with backend.current(streams[(j + call) % 3]):
                    outs.append(ebc(given))
            grads = [random_grad(rng, want) for want in wants]
            skip = nonfinite == "skip" and j in (3, 6)
            if skip:
                grads[j % 2][0] = np.nan
            for call, (out, want) in enumerate(zip(outs, wants, strict=True)):
                same_bits(out, want, f"batch {j}, call {call}")
                with backend.current(streams[(j + call) % 3]):
                    backward(out, grads[call])
            oracle.backward(*([None, None] if skip else grads))
        same_tables(ebc, oracle, "end")
        ebc.close()


def test_room_for_sums_that_was_outgrown_on_another_stream(monkeypatch: Any) -> None:
    """Torch gives memory on in the order of the stream on which it was asked for."""
    for seed in range(4):
        use(monkeypatch, seed, style="late")
        some, spec = tables(1, rows=60), cdlrm.SGD(lr=0.05)
        ebc = cdlrm.EmbeddingBagCollection(some, optimizer=spec, cache_rows=60, seed=0)
        backend = backend_of(ebc)
        streams = [backend.compute_stream(), backend.new_stream_named("of the user")]
        rng, oracle = np.random.default_rng(seed), Oracle(some, spec)
        for count, number in ((300, 0), (300, 1), (1500, 1), (6000, 1), (300, 0), (20_000, 0)):
            given = {"t0": (np.full(count, 3), None, None)}
            with backend.current(streams[number]):
                want, out = oracle.forward(given), ebc(to_torch(given))
                same_bits(out, want, f"{count} lookups")
                grad = random_grad(rng, want)
                backward(out, grad)
                oracle.backward(grad)
        same_tables(ebc, oracle, "end")
        ebc.close()


def test_evaluation_needs_no_room_for_a_second_cache(monkeypatch: Any) -> None:
    """With a cache of most of the device's memory, rows that are not cached can still be read, in any batch."""
    some = [cdlrm.Table("t0", 60_000, 64)]
    use(monkeypatch, 3, device_bytes=8 << 20)
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=cdlrm.SGD(lr=0.1), cache_rows=24_000, seed=0)
    want = cdlrm.EmbeddingBagCollection(some, optimizer=cdlrm.SGD(lr=0.1), cache_rows=2_000, seed=0)
    rng = np.random.default_rng(0)
    for _ in range(3):
        ids = {"t0": torch.from_numpy(rng.integers(0, 60_000, 500))}
        for module in (ebc, want):
            module(ids).sum().backward()
    with torch.no_grad():
        ids = {"t0": torch.from_numpy(rng.integers(0, 60_000, 2_000))}
        same_bits(ebc(ids), want(ids).numpy(), "evaluation")
    assert ebc.stats()["cache_rows"] == 24_000


@pytest.mark.parametrize("count", [255, 256, 257, 511, 512, 513])
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[3]], ids=lambda s: s.name)
def test_rows_around_the_chunk_of_256(monkeypatch: Any, spec: Any, count: int) -> None:
    """A row that 256 lookups hit is a short one; one more makes it long."""
    use(monkeypatch, count)
    some = tables(1, dim=5)
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=spec, cache_rows=20, seed=0)
    ids = np.concatenate([np.full(count, 3), np.arange(7)])
    inputs = [{"t0": (np.random.default_rng(j).permutation(ids), None, None)} for j in range(3)]
    train(ebc, oracle := Oracle(some, spec), inputs)
    same_tables(ebc, oracle, f"{count} lookups")
    ebc.close()


def test_factors_and_sums_grow_without_a_wait(monkeypatch: Any) -> None:
    """Adam's factors for more steps, and room for more chunks: exact, and the host waits for neither."""
    use(monkeypatch, 9)
    monkeypatch.setattr(formulas, "LEAST_FACTORS", 4)
    some, spec = tables(1, rows=60), cdlrm.Adam(lr=0.05)
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=spec, cache_rows=60, seed=0)
    inputs = [{"t0": (np.full(300 + 300 * j, j), None, None)} for j in range(9)]
    waits = backend_of(ebc).traffic.synchronizations["growth"]
    train(ebc, oracle := Oracle(some, spec), inputs)
    assert backend_of(ebc).traffic.synchronizations["growth"] == waits
    same_tables(ebc, oracle, "end")
    ebc.close()


def test_trays_that_grow_are_counted_as_waits_and_are_few(monkeypatch: Any) -> None:
    """Pinning may wait for the device: once for a tray, then for each quarter that its plans grow by, then never."""
    use(monkeypatch, 3, check=False, compare=0)
    monkeypatch.setattr(Emulated, "driver", Emulated.zero_copy_driver)
    rng, some, sizes = np.random.default_rng(0), tables(1, rows=40), [1000 + 60 * j for j in range(60)]
    ebc = cdlrm.EmbeddingBagCollection(some, optimizer=cdlrm.SGD(lr=0.1), cache_rows=40, seed=0)
    waits, ring = backend_of(ebc).traffic.synchronizations, ebc.groups[0].records.transfers.ring
    start = waits["trays"]
    train(ebc, oracle := Oracle(some, cdlrm.SGD(lr=0.1)), [one_hot(rng, some, size) for size in sizes])
    made, grown = len(ring.trays), waits["trays"] - start - len(ring.trays)
    assert 0 < made <= ring.limit
    assert made <= grown <= made * math.ceil(math.log(sizes[-1] / sizes[0]) / math.log(1.25))
    before = waits["trays"]
    train(ebc, oracle, [one_hot(rng, some, sizes[-1]) for _ in range(8)])
    assert waits["trays"] == before
    ebc.close()


@pytest.mark.parametrize("driver", ["staged_driver", "zero_copy_driver"])
def test_a_flush_waits_for_evicted_rows_when_nothing_is_dirty(driver: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(Emulated, "driver", getattr(Emulated, driver))
    use(monkeypatch)
    ebc = cdlrm.EmbeddingBagCollection(
        [cdlrm.Table("a", 100, 4)], optimizer=cdlrm.SGD(lr=1.0), cache_rows=10, device="cpu", seed=0
    )
    before = ebc.table_weight("a")
    ebc({"a": torch.arange(10)}).sum().backward()
    out = ebc({"a": torch.arange(10, 20)})  # all of the first rows go home
    del out
    assert torch.equal(ebc.table_weight("a")[:10], before[:10] - 1)
    ebc.close()
