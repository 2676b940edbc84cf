"""The look-ahead pipeline under good and bad company: equal bits, failures that are told, and no hang."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Oracle
from scenarios import InputShape, backward, random_grad, random_inputs, same_bits, same_tables, to_torch, train_step

import cdlrm
from cdlrm.errors import PipelineError, UsageError

pytestmark = pytest.mark.limit(60)

TABLES = [cdlrm.Table("a", 40, 4), cdlrm.Table("b", 60, 4, pooling="mean", features=["b1", "b2"])]
SPEC = cdlrm.RowWiseAdagrad(lr=0.1)
SHAPE = InputShape(max_batch=5, max_bag=4, empty_batches=False)
TIMES = {"seconds_plan", "seconds_transfer", "seconds_lookup", "seconds_update"}


class Rig:
    """A module, its oracle, and batches; `train` does one step on both and compares the bits."""

    def __init__(self, batches: int = 20, cache_rows: int = 45, seed: int = 0, **options: Any) -> None:
        rng = np.random.default_rng(seed)
        self.inputs = [random_inputs(rng, TABLES, SHAPE) for _ in range(batches)]
        self.loader = [to_torch(i) for i in self.inputs]
        self.grad_rng = np.random.default_rng(1000 + seed)
        self.oracle = Oracle(TABLES, SPEC)
        self.ebc: Any = cdlrm.EmbeddingBagCollection(
            TABLES, optimizer=SPEC, cache_rows=cache_rows, device="cpu", seed=0, **options
        )
        self.trained = 0

    def number(self, batch: Any) -> int:
        return next(j for j, b in enumerate(self.loader) if b is batch)

    def train(self, batch: Any) -> None:
        j = self.number(batch)
        want = self.oracle.forward(self.inputs[j])
        grad = random_grad(self.grad_rng, want)
        got, _ = train_step(self.ebc, batch, grad)
        same_bits(got, want, f"output of batch {j}")
        self.oracle.backward(grad)
        self.trained += 1

    def look(self, loader: Iterable[Any] | None = None, **options: Any) -> Any:
        options.setdefault("horizon", 6)
        return cdlrm.lookahead(self.ebc, self.loader if loader is None else loader, **options)

    def verify(self) -> None:
        self.ebc.check()
        same_tables(self.ebc, self.oracle, "tables")


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs; afterwards they are closed, unharmed, and none of our threads is alive."""
    before = set(threading.enumerate())
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for r in rigs:
        r.verify()
        r.ebc.close()
    survivors = set(threading.enumerate()) - before
    assert not survivors, f"threads survive: {survivors}"


def ours(before: set[threading.Thread]) -> list[str]:
    return [t.name for t in threading.enumerate() if t not in before]


# ---- ways to end


def test_whole_epochs(rig: Callable[..., Rig]) -> None:
    r = rig()
    for _ in range(3):
        count = 0
        for batch in r.look():
            r.train(batch)
            count += 1
        assert count == 20
        r.verify()
    assert r.ebc.stats()["steps"] == 60


@pytest.mark.parametrize("after", [1, 2, 7, 20])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_left_early(rig: Callable[..., Rig], after: int, depth: int) -> None:
    r = rig()
    before = set(threading.enumerate())
    for batch in r.look(prefetch_depth=depth):
        r.train(batch)
        if r.trained == after:
            break
    del batch
    r.verify()
    for batch in r.look(prefetch_depth=depth):  # and again, from the start
        r.train(batch)
    r.verify()
    r.ebc.close()
    assert not ours(before)


def test_left_by_an_exception(rig: Callable[..., Rig]) -> None:
    r = rig()
    with pytest.raises(ZeroDivisionError):
        for batch in r.look():
            r.train(batch)
            if r.trained == 4:
                raise ZeroDivisionError
    r.verify()
    r.train(r.loader[9])


def test_close_is_explicit_and_repeatable(rig: Callable[..., Rig]) -> None:
    r = rig()
    before = set(threading.enumerate())
    with r.look() as look:
        r.train(next(look))
        look.close()
        look.close()
        with pytest.raises((StopIteration, UsageError)):
            next(look)
    assert not ours(before), "close() ends the threads of the look-ahead"
    look = r.look()
    look.close()  # never started
    assert not ours(before)


def test_module_closed_in_the_middle(rig: Callable[..., Rig]) -> None:
    before = set(threading.enumerate())
    r = Rig()
    look = r.look()
    r.train(next(look))
    r.ebc.close()
    with pytest.raises((StopIteration, UsageError, PipelineError)):
        r.ebc(next(look))
    look.close()
    assert not ours(before)


def test_empty_loader(rig: Callable[..., Rig]) -> None:
    r = rig()
    assert list(r.look([])) == []
    assert list(r.look(iter(()))) == []
    r.train(r.loader[0])


@pytest.mark.parametrize("count", [1, 2])
def test_loader_shorter_than_the_depth(rig: Callable[..., Rig], count: int) -> None:
    r = rig()
    for batch in r.look(r.loader[:count], prefetch_depth=4):
        r.train(batch)
    assert r.trained == count


# ---- loaders with a character


class LoaderBroke(Exception):
    pass


@pytest.mark.parametrize("at", [0, 1, 2, 5, 19])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_loader_raises(rig: Callable[..., Rig], at: int, depth: int) -> None:
    """First error wins, keeps its traceback, names thread and batch; within depth + 2 steps."""
    r = rig()
    failed = threading.Event()
    steps_after = 0

    def broken_loader() -> Iterator[Any]:
        yield from r.loader[:at]
        failed.set()
        raise LoaderBroke("the disk is gone")

    look = r.look(broken_loader(), prefetch_depth=depth)
    with pytest.raises(PipelineError) as caught:
        for batch in look:
            steps_after += failed.is_set()
            time.sleep(0.002)
            r.train(batch)
    assert steps_after <= depth + 2
    error = caught.value
    assert isinstance(error.__cause__, LoaderBroke) and "the disk is gone" in str(error)
    assert f"batch {at}" in str(error) and "read" in str(error)
    frames = [f.name for f in traceback.extract_tb(error.__cause__.__traceback__)]
    assert "broken_loader" in frames, "the traceback of the loader is kept"
    look.close()
    r.verify()
    for batch in r.look():
        r.train(batch)


def test_iter_of_the_loader_raises(rig: Callable[..., Rig]) -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            raise LoaderBroke("cannot even start")

    r = rig()
    with pytest.raises((PipelineError, LoaderBroke), match="cannot even start"):
        for batch in r.look(Broken()):
            r.train(batch)


def test_slow_loader_without_busy_waiting(rig: Callable[..., Rig]) -> None:
    r = rig()

    def slow() -> Iterator[Any]:
        for j, batch in enumerate(r.loader):
            time.sleep(1.5 if j == 3 else 0.005)
            yield batch

    for batch in r.look(r.loader):  # compiled and warm
        r.train(batch)
    cpu = time.process_time()
    for batch in r.look(slow()):
        r.train(batch)
    assert r.trained == 40
    assert time.process_time() - cpu < 1.0, "threads burn the processor while they wait"


def test_loader_needs_the_answer_of_the_trainer(rig: Callable[..., Rig]) -> None:
    """Batch j + 1 exists only after batch j was trained: a shorter window, counted, never a hang."""
    r = rig(batches=12, cache_rows=42)
    answers: queue.Queue[int] = queue.Queue()

    def interactive() -> Iterator[Any]:
        for j, batch in enumerate(r.loader):
            if j:
                assert answers.get(timeout=30) == j - 1
            yield batch

    look = r.look(interactive(), horizon=8, prefetch_depth=2)
    for j, batch in enumerate(look):
        r.train(batch)
        answers.put(j)
    assert r.trained == 12
    assert look.stats()["short_windows"] > 0 and r.ebc.stats()["short_windows"] > 0


def test_window_bounded_in_bytes(rig: Callable[..., Rig]) -> None:
    r = rig(cache_rows=42)
    for batch in r.look(horizon=15, window_bytes=100):
        r.train(batch)
    assert r.trained == 20


@pytest.mark.parametrize("depth", [1, 3])
def test_a_cache_grows_only_between_two_steps(depth: int) -> None:
    """Two copies of the cache are not there together with what a step needs: a batch that needs more than the whole
    cache waits for the end of the one before it."""
    bag = cdlrm.EmbeddingBag(200, 4, mode="sum", optimizer=SPEC, cache_rows=4)
    resize, in_step, when = bag.groups[0].records.resize, False, []

    def resized(*args: Any) -> None:
        when.append(in_step)
        resize(*args)

    bag.groups[0].records.resize = resized  # type: ignore[method-assign]
    for ids in bag.lookahead([torch.arange(10 * n)[None] for n in range(1, 12)], prefetch_depth=depth):
        in_step = True
        bag(ids).sum().backward()
        time.sleep(0.05)  # time enough for what comes
        in_step = False
    assert len(when) == 11 and not any(when)
    bag.close()


def test_the_same_object_again_and_again(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.loader, r.inputs = r.loader[:1] * 10, r.inputs[:1] * 10
    for batch in r.look():
        r.train(batch)
    assert r.trained == 10 and r.ebc.stats()["unannounced"] == 0


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> int:
        return i


def test_data_loader_with_worker_processes(rig: Callable[..., Rig]) -> None:
    """Workers are forked while our threads and kernels have already run."""
    r = rig()
    for batch in r.look():
        r.train(batch)
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=None, num_workers=2)
    for i in r.look(loader, ids=lambda i: r.loader[int(i)]):
        r.train(r.loader[int(i)])
    assert r.trained == 40


def test_generator_that_looks_at_the_module(rig: Callable[..., Rig]) -> None:
    """A loader may hold a lock that the training loop also wants between steps."""
    r = rig(batches=8)
    lock = threading.Lock()

    def locking() -> Iterator[Any]:
        for batch in r.loader:
            with lock:
                time.sleep(0.001)
            yield batch

    for batch in r.look(locking()):
        with lock:
            r.train(batch)


# ---- Ctrl-C


def test_ctrl_c_when_the_wait_has_just_let_go_of_the_lock() -> None:
    rig = Rig(batches=6)

    def loader() -> Iterator[Any]:
        yield from rig.loader[:2]
        time.sleep(0.5)  # the trainer waits meanwhile
        yield from rig.loader[2:]

    look = rig.look(loader())
    main = threading.current_thread()
    pressed: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        for batch in look:
            rig.train(batch)
            if rig.trained == 2:
                condition = look._pipeline.condition

                def press(let_go: Any = condition._release_save) -> Any:
                    state = let_go()
                    if threading.current_thread() is main and not pressed:
                        pressed.append(True)
                        signal.raise_signal(signal.SIGINT)
                    return state

                condition._release_save = press
    assert pressed
    look.close()
    same_tables(rig.ebc, rig.oracle, "tables")


def test_keyboard_interrupt_in_the_body(rig: Callable[..., Rig]) -> None:
    r = rig()
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        for batch in r.look():
            r.train(batch)
            if r.trained == 3:
                signal.raise_signal(signal.SIGINT)
    r.verify()
    r.ebc.close()
    assert not ours(before)


def test_keyboard_interrupt_while_waiting(rig: Callable[..., Rig]) -> None:
    r = rig()
    before = set(threading.enumerate())
    release = threading.Event()

    def stuck() -> Iterator[Any]:
        yield r.loader[0]
        release.wait(20)

    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    start = time.monotonic()
    look = r.look(stuck())
    with pytest.raises(KeyboardInterrupt):
        for batch in look:
            r.train(batch)
    assert time.monotonic() - start < 5, "the wait does not notice Ctrl-C"
    timer.join()
    release.set()  # nobody can end a thread that sits in the user's loader; once it returns, the thread ends
    look.close()
    r.verify()
    r.ebc.close()
    deadline = time.monotonic() + 10
    while ours(before) and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_keyboard_interrupt_while_threads_start(
    rig: Callable[..., Rig], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits until all are started, so that they can be ended."""
    r = rig()
    start, calls = threading.Thread.start, [0]

    def interrupted(thread: threading.Thread) -> None:
        if thread.name in ("cdlrm-reader", "cdlrm-planner", "cdlrm-transfer"):
            if calls[0] == which:
                signal.raise_signal(signal.SIGINT)
            calls[0] += 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for batch in r.look():
            r.train(batch)
    monkeypatch.undo()
    assert calls[0] == 3 and r.trained == 0
    for batch in r.look():
        r.train(batch)


@pytest.mark.long  # a signal may land inside Python's own locks once in some hundred times
def test_keyboard_interrupt_at_any_moment(rig: Callable[..., Rig]) -> None:
    """Whatever Ctrl-C interrupts, also the start of the threads: sound, usable, closed, no thread left."""
    rig()  # its end looks for threads
    before = set(threading.enumerate())
    rng = np.random.default_rng(0)
    old = signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    interrupted = 0
    try:
        for seed in range(60):
            r = Rig(seed=seed)
            try:
                signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(0.0003, 0.03 if seed % 2 else 0.004)))
                for batch in r.look(prefetch_depth=2):
                    r.ebc(batch).sum().backward()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            r.ebc.check()
            for batch in r.look():
                r.ebc(batch).sum().backward()
            r.ebc.check()
            r.ebc.close()
            deadline = time.monotonic() + 5
            while ours(before) and time.monotonic() < deadline:
                time.sleep(0.001)  # a thread whose very start was interrupted may need a moment to notice
            assert not ours(before)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert interrupted > 10


# ---- evaluation, unannounced ids


def test_evaluation_in_the_middle(rig: Callable[..., Rig]) -> None:
    """Newest values, nothing dirtied, nothing of the look-ahead consumed."""
    rng = np.random.default_rng(9)
    quiet, asked = rig(), rig()
    for r in (quiet, asked):
        for batch in r.look(prefetch_depth=2):
            r.train(batch)
            if r is asked:
                for _ in range(2):
                    inputs = random_inputs(rng, TABLES, SHAPE)
                    with torch.no_grad():
                        same_bits(r.ebc(to_torch(inputs)), r.oracle.lookup(inputs), "evaluation")
                    r.ebc.check()
        assert r.trained == 20
        r.ebc.flush()
    for key in ("evicts", "evicts_written", "bytes_written", "steps"):
        assert quiet.ebc.stats()[key] == asked.ebc.stats()[key], key


def test_evaluation_alone_writes_nothing(rig: Callable[..., Rig]) -> None:
    r = rig(cache_rows=10)
    with torch.no_grad():
        for batch in r.loader:
            r.ebc(batch)
    for batch in r.look():
        with torch.no_grad():
            r.ebc(batch)
    for batch in r.look():
        r.ebc(batch)  # forward without backward
    r.ebc.flush()
    stats = r.ebc.stats()
    assert stats["evicts_written"] == 0 and stats["bytes_written"] == 0


def test_evaluation_inside_a_training_step(rig: Callable[..., Rig]) -> None:
    r = rig()
    for j, batch in enumerate(r.look()):
        want = r.oracle.forward(r.inputs[j])
        out = r.ebc(batch)
        with torch.no_grad():
            same_bits(r.ebc(r.loader[(j + 5) % 20]), r.oracle.lookup(r.inputs[(j + 5) % 20]), "evaluation")
        grad = random_grad(r.grad_rng, want)
        backward(out, grad)
        r.oracle.backward(grad)


@pytest.mark.parametrize(("depth", "elsewhere"), [(0, False), (1, False), (3, False), (1, True)])
def test_ids_that_differ_from_those_announced(
    rig: Callable[..., Rig], depth: int, elsewhere: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`elsewhere`: in another thread than the one that asks for the next batch."""
    r, thread = rig(), ThreadPoolExecutor(1)
    other = np.random.default_rng(5)
    said = 0
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        for j, batch in enumerate(r.look(prefetch_depth=depth)):
            if j % 3 == 1:
                r.train(batch)
                continue
            inputs = random_inputs(other, TABLES, SHAPE)
            want = r.oracle.forward(inputs)
            grad = random_grad(r.grad_rng, want)
            arguments = r.ebc, to_torch(inputs), grad
            got, _ = thread.submit(train_step, *arguments).result() if elsewhere else train_step(*arguments)
            if elsewhere:  # as asking for the next batch does, which would hang if anything stayed paused
                for group in r.ebc.groups:
                    group.end()
                    assert not group.cache._pauses
            same_bits(got, want, f"unannounced ids at batch {j}")
            r.oracle.backward(grad)
            r.ebc.check()
        said = sum("announced" in str(w.message) for w in caught)
        said += sum("announced" in record.getMessage() for record in caplog.records)
    thread.shutdown()
    assert r.ebc.stats()["unannounced"] == 13
    assert said == 1, "said once"


def test_equal_ids_in_another_object_are_exact(rig: Callable[..., Rig]) -> None:
    r = rig()
    for j, _ in enumerate(r.look()):
        want = r.oracle.forward(r.inputs[j])
        grad = random_grad(r.grad_rng, want)
        got, _ = train_step(r.ebc, to_torch(r.inputs[j]), grad)
        same_bits(got, want, f"batch {j}")
        r.oracle.backward(grad)


def test_batches_that_are_not_trained(rig: Callable[..., Rig]) -> None:
    """Skipping a batch in the loop is allowed."""
    r = rig()
    for j, batch in enumerate(r.look(prefetch_depth=2)):
        if j % 3:
            r.train(batch)


def test_without_lookahead_the_same_bits(rig: Callable[..., Rig]) -> None:
    ahead, demand = rig(), rig()
    for batch in ahead.look():
        ahead.train(batch)
    for batch in demand.loader:
        demand.train(batch)
        demand.ebc.check()
    same_bits(dict(ahead.ebc.state_dict()), dict(demand.ebc.state_dict()), "state")


# ---- the life of a step


@pytest.mark.parametrize("ahead", [True, False])
def test_several_forwards_give_one_update(rig: Callable[..., Rig], ahead: bool) -> None:
    r = rig()
    for j, batch in enumerate(r.look() if ahead else r.loader):
        wants = [r.oracle.forward(r.inputs[j]) for _ in range(3)]
        outs = [r.ebc(batch) for _ in range(3)]
        grads = [random_grad(r.grad_rng, w) for w in wants]
        for out, want in zip(outs, wants, strict=True):
            same_bits(out, want, f"batch {j}")
        torch.autograd.backward(outs, [torch.from_numpy(g.copy()) for g in grads])
        r.oracle.backward(*grads)
        if j % 5 == 0:
            r.verify()


def test_several_different_forwards_give_one_update(rig: Callable[..., Rig]) -> None:
    """Also with ids that were not announced, and in one loss."""
    r = rig()
    for j, batch in enumerate(r.look()):
        k = (j + 7) % 20
        wants = [r.oracle.forward(r.inputs[j]), r.oracle.forward(r.inputs[k])]
        outs = [r.ebc(batch), r.ebc(r.loader[k])]
        for out, want in zip(outs, wants, strict=True):
            same_bits(out, want, f"batch {j}")
        (outs[0].sum() + 2 * outs[1].sum()).backward()
        r.oracle.backward(np.ones_like(wants[0]), np.full_like(wants[1], 2))
        r.ebc.check()


@pytest.mark.parametrize("ahead", [True, False])
def test_forward_without_backward_gives_no_update(rig: Callable[..., Rig], ahead: bool) -> None:
    r = rig()
    for j, batch in enumerate(r.look() if ahead else r.loader):
        if j % 2:
            same_bits(r.ebc(batch), r.oracle.lookup(r.inputs[j]), f"batch {j}")
        else:
            r.train(batch)
        r.ebc.check()


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_only_one_of_two_forwards_gets_a_gradient(rig: Callable[..., Rig], ahead: bool, keep: bool) -> None:
    r = rig()
    kept: list[Any] = []
    for j, batch in enumerate(r.look() if ahead else r.loader):
        wants = [r.oracle.forward(r.inputs[j]) for _ in range(2)]
        outs = [r.ebc(batch) for _ in range(2)]
        grad = random_grad(r.grad_rng, wants[0])
        backward(outs[0], grad)
        r.oracle.backward(grad, None)
        kept = outs[1:] if keep else []
        del outs
        if not ahead:  # without a look-ahead nothing but the end of the graph says that no gradient will come
            kept = []
    del kept


def test_two_updates_in_one_batch(rig: Callable[..., Rig]) -> None:
    """Forward, backward, forward, backward: the second forward reads what the first update made."""
    r = rig()
    for batch in r.look():
        r.train(batch)
        r.train(batch)
    assert r.trained == 40


@pytest.mark.parametrize("ahead", [True, False])
def test_second_backward_raises(rig: Callable[..., Rig], ahead: bool) -> None:
    r = rig(batches=3)
    for j, batch in enumerate(r.look() if ahead else r.loader):
        want = r.oracle.forward(r.inputs[j])
        loss = r.ebc(batch).sum()
        loss.backward(retain_graph=True)
        r.oracle.backward(np.ones_like(want))
        with pytest.raises(UsageError):
            loss.backward()
        with pytest.raises(RuntimeError):
            loss.backward()
        r.verify()


def test_backward_after_the_batch_ended_raises(rig: Callable[..., Rig]) -> None:
    r = rig(batches=6)
    kept: list[Any] = []
    for batch in r.look():
        for old in kept:
            with pytest.raises(UsageError):
                old.backward()
        kept = [r.ebc(batch).sum()]
    with pytest.raises(UsageError):
        kept[0].backward()


def test_module_in_eval_mode_under_no_grad_and_inference(rig: Callable[..., Rig]) -> None:
    r = rig()
    r.train(r.loader[0])
    r.ebc.eval()
    with torch.inference_mode():
        same_bits(r.ebc(r.loader[1]), r.oracle.lookup(r.inputs[1]), "inference mode")
    r.ebc.train()
    r.train(r.loader[2])


# ---- several modules, ids=


def test_several_modules_in_one_lookahead() -> None:
    before = set(threading.enumerate())
    first, second = Rig(seed=1), Rig(seed=2, cache_rows=60)
    for a, b in zip(first.inputs, second.inputs, strict=True):
        assert a is not b
    pairs = list(zip(first.loader, second.loader, strict=True))
    look = cdlrm.lookahead(
        [first.ebc, second.ebc],
        pairs,
        ids=lambda pair: {first.ebc: (pair[0],), second.ebc: (pair[1],)},
        horizon=5,
        prefetch_depth=2,
    )
    for one, two in look:
        first.train(one)
        second.train(two)
    for r in (first, second):
        assert r.trained == 20 and r.ebc.stats()["unannounced"] == 0
        r.verify()
        r.ebc.close()
    assert not ours(before)


def test_model_with_modules_inside(rig: Callable[..., Rig]) -> None:
    r = rig()
    model = torch.nn.ModuleDict({"bags": r.ebc, "top": torch.nn.Linear(3, 1)})
    for batch in cdlrm.lookahead(model, r.loader, horizon=4):
        r.train(batch)
    assert r.ebc.stats()["unannounced"] == 0


def test_ids_function(rig: Callable[..., Rig]) -> None:
    r = rig()
    wrapped = [{"x": j, "ids": batch} for j, batch in enumerate(r.loader)]
    seen = []
    for item in r.look(wrapped, ids=lambda item: (item["ids"],)):
        seen.append(item["x"])
        r.train(item["ids"])
    assert seen == list(range(20)) and r.ebc.stats()["unannounced"] == 0


def test_ids_function_raises(rig: Callable[..., Rig]) -> None:
    r = rig()

    def ids(batch: Any) -> Any:
        if batch is r.loader[3]:
            raise LoaderBroke("no ids in here")
        return (batch,)

    with pytest.raises(PipelineError, match="no ids in here") as caught:
        for batch in r.look(ids=ids):
            r.train(batch)
    assert isinstance(caught.value.__cause__, LoaderBroke) and "batch 3" in str(caught.value)


def test_ids_function_may_return_the_bare_argument(rig: Callable[..., Rig]) -> None:
    r = rig()
    for item in r.look([(j, batch) for j, batch in enumerate(r.loader)], ids=lambda item: item[1]):
        r.train(item[1])
    assert r.trained == 20 and r.ebc.stats()["unannounced"] == 0


def test_a_second_lookahead_takes_over(rig: Callable[..., Rig]) -> None:
    r = rig()
    first = r.look()
    r.train(next(first))
    second = r.look()
    r.train(next(second))
    with pytest.raises((StopIteration, UsageError)):
        next(first)
    r.train(next(second))
    first.close()
    second.close()


# ---- determinism, settings, statistics


@pytest.mark.parametrize("shards", [1, 4])
def test_statistics_are_deterministic(rig: Callable[..., Rig], shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdlrm.runtime.PATIENCE_SECONDS", 60.0)  # however busy the machine is
    results = []
    for pause in (0.0, 0.003):
        r = rig(shards=shards)
        for batch in r.look(horizon=20, prefetch_depth=2):
            time.sleep(pause)
            r.train(batch)
        results.append({k: v for k, v in r.ebc.stats().items() if k not in TIMES})
    assert results[0]["short_windows"] == results[1]["short_windows"] == 0
    assert results[0] == results[1]


def test_horizon_below_the_depth_means_the_larger(rig: Callable[..., Rig]) -> None:
    r = rig()
    look = r.look(horizon=1, prefetch_depth=4)
    for batch in look:
        r.train(batch)
    assert look.stats()["horizon"] == 4 and look.stats()["prefetch_depth"] == 4


@pytest.mark.parametrize(("name", "value"), [("horizon", -1), ("horizon", "soon"), ("prefetch_depth", -1)])
def test_bad_settings(rig: Callable[..., Rig], name: str, value: Any) -> None:
    r = rig()
    with pytest.raises((ValueError, TypeError)):
        next(iter(r.look(**{name: value})))


def test_look_statistics(rig: Callable[..., Rig]) -> None:
    r = rig()
    look = r.look()
    for batch in look:
        r.train(batch)
    stats = look.stats()
    assert stats["batches"] == 20
    assert stats["seconds_read"] >= 0 and stats["seconds_stall"] >= 0 and stats["short_windows"] >= 0


def test_state_of_the_loader_after_the_batch_being_trained() -> None:
    """The reader is ahead; the state belongs to the batch in the trainer's hands."""
    before = set(threading.enumerate())
    r = Rig()

    class Loader:
        def __init__(self) -> None:
            self.position = 0

        def __iter__(self) -> Iterator[Any]:
            while self.position < len(r.loader):
                self.position += 1
                yield r.loader[self.position - 1]

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

    look = r.look(Loader())
    for j, batch in enumerate(look):
        r.train(batch)
        assert look.state_dict() == {"position": j + 1}
    r.ebc.close()
    assert not ours(before)


# ---- failures in our own threads


def fail_on(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int, failed: threading.Event) -> None:
    original = getattr(owner, name)
    count = 0

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            failed.set()
            raise MemoryError(f"injected into {name}")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("call", [1, 2, 3, 8])
@pytest.mark.parametrize("where", ["scan", "plan", "read", "write"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_failure_in_a_thread_reaches_the_caller(
    monkeypatch: pytest.MonkeyPatch, where: str, call: int, depth: int
) -> None:
    """Fail the N-th call: one named error within depth + 2 steps, then close() is clean."""
    from cdlrm.plan import Planner

    before = set(threading.enumerate())
    r = Rig(batches=40, cache_rows=42)
    records = type(r.ebc.groups[0].records)
    failed = threading.Event()
    steps_after = 0
    look = r.look(prefetch_depth=depth)
    with monkeypatch.context() as patch:
        fail_on(patch, Planner if where in ("scan", "plan") else records, where, call, failed)
        with pytest.raises(PipelineError) as caught:
            for batch in look:
                steps_after += failed.is_set()
                time.sleep(0.001)
                r.train(batch)
        assert failed.is_set() and steps_after <= depth + 2
        assert isinstance(caught.value.__cause__, MemoryError) and f"injected into {where}" in str(caught.value)
        assert "batch" in str(caught.value)
        look.close()
    r.ebc.close()
    assert not ours(before)


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="no priorities of threads here")
def test_planner_and_transfer_give_way_to_the_trainer(rig: Callable[..., Rig]) -> None:
    """They share its cores; the user's loader keeps the priority it was given."""
    r = rig()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    for batch in r.look():
        steps = {
            t.name: os.getpriority(os.PRIO_PROCESS, t.native_id or 0) - own
            for t in threading.enumerate() if t.name.startswith("cdlrm-")
        }  # fmt: skip
        assert {"cdlrm-planner", "cdlrm-transfer"} <= set(steps)
        assert all(n == (0 if name == "cdlrm-reader" else min(10, 19 - own)) for name, n in steps.items())
        r.train(batch)
        break


def test_threads_have_names_and_are_daemons_or_joined(rig: Callable[..., Rig]) -> None:
    r = rig()
    before = set(threading.enumerate())
    look = r.look()
    r.train(next(look))
    assert all("cdlrm" in name for name in ours(before))
    look.close()
