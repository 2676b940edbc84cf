"""Ctrl-C, wherever it comes, and when it comes again: nothing hangs, nothing is refused, and all values are right."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import cdlrm
from cdlrm.driver.cpu import CpuDriver
from cdlrm.plan import Planner
from cdlrm.plan.team import Team
from cdlrm.runtime import Pipeline

ROWS, CACHE = 3000, 700
GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [torch.randint(ROWS, (600,), generator=GENERATOR) for _ in range(8)]
OFFSETS = torch.arange(0, 600, 10)


@pytest.fixture
def bags() -> Iterator[list[Any]]:
    """Two that are equal, of whom one shall be disturbed."""
    made = [
        cdlrm.EmbeddingBag(ROWS, 8, mode="sum", optimizer=cdlrm.SGD(lr=0.1), cache_rows=CACHE, seed=1, device="cpu")
        for _ in range(2)
    ]
    yield made
    for bag in made:
        bag.close()


def train(bag: Any, *calls: torch.Tensor) -> None:
    sum(bag(ids, OFFSETS[: -(-len(ids) // 10)]).square().sum() for ids in calls).backward()  # type: ignore[union-attr]


def read(bag: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return bag(ids, OFFSETS)


def same(bags: list[Any]) -> None:
    """What is read by ids, what is trained from here on, and the tables as a whole."""
    for ids in BATCHES:
        assert torch.equal(*(read(bag, ids) for bag in bags))
    for ids in BATCHES[::-1]:
        for bag in bags:
            train(bag, ids)
        bags[0].check()
    assert torch.equal(bags[0].weight, bags[1].weight)


def press(*arguments: Any) -> None:
    """As when the key is pressed now: wherever Ctrl-C is to wait, it does."""
    signal.raise_signal(signal.SIGINT)


def once(patch: pytest.MonkeyPatch, owner: Any, name: str, before: Callable[..., None] = press) -> None:
    """`before` comes before the first call of the method."""
    run, calls = getattr(owner, name), iter(range(10**6))

    def pressed(*arguments: Any, **settings: Any) -> Any:
        if next(calls) == 0:
            before(*arguments)
        return run(*arguments, **settings)

    patch.setattr(owner, name, pressed)


def when_a_thread_has_started(patch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        start(thread)
        press()

    patch.setattr(threading.Thread, "start", started)


def ours() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("cdlrm-reader", "cdlrm-plan", "cdlrm-transf"))]


# ---- threads that share a kernel


@pytest.mark.parametrize("where", ["kernel", "submit"])
def test_a_kernel_on_several_threads_is_finished(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of some of the rows is none that anybody asked for, and a pool that was interrupted hangs."""
    driver, done, pressed = CpuDriver(2), [], threading.Event()

    def kernel(lo: int, hi: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert pressed.wait(60)
        elif not pressed.is_set():
            pressed.set()
            if where == "kernel":
                press()
        done.append(lo)

    if where == "submit":
        once(monkeypatch, driver._threads(), "submit")
    with pytest.raises(KeyboardInterrupt):
        driver._run([(i, i + 1) for i in range(8)], kernel)
    assert sorted(done) == list(range(8))
    driver.close()


def test_a_plan_on_several_threads_is_finished() -> None:
    team, done = Team(2), []

    def kernel(worker: int, workers: int, claims: np.ndarray) -> None:
        if worker == 0:
            press()
            done.append(worker)

    with pytest.raises(KeyboardInterrupt):
        team.run(kernel, 2, 1)
    team.close()
    assert done == [0]


def test_no_thread_is_left_half_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    before, team = set(threading.enumerate()), Team(3)
    with monkeypatch.context() as patch:
        when_a_thread_has_started(patch)
        with pytest.raises(KeyboardInterrupt):
            team.run(lambda worker, workers, claims: 0, 3, 1)
    team.close()
    assert not [t for t in threading.enumerate() if t not in before and t.name.startswith("cdlrm-plan-")]


# ---- on demand


def test_while_a_transfer_is_waited_for(bags: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = bags[0].groups[0].cache
    for bag in bags:
        train(bag, BATCHES[0])
    with monkeypatch.context() as patch:

        def wait(seconds: float) -> None:
            press()
            cache._busy = False

        patch.setattr(cache._gate, "wait", wait)
        cache._busy = True
        with pytest.raises(KeyboardInterrupt):
            read(bags[0], BATCHES[1])
    same(bags)


def test_just_when_a_plan_is_to_be_executed(bags: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a `with` a signal may be heard, outside of the `try` that follows."""
    cache = bags[0].groups[0].cache

    class Lock:
        pressed = False

        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()
            if not self.pressed:
                self.pressed = True
                press()

    lock = cache._lock
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_lock", Lock())
        with pytest.raises(KeyboardInterrupt):
            train(bags[0], BATCHES[0])
    assert not cache._busy, "whoever reads now would wait for ever"
    same(bags)


@pytest.mark.parametrize("where", ["give_back", "_let_go"])
def test_at_the_end_of_a_reading(bags: list[Any], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were lent for it are not taken for the newest ones later, and nothing is paused for ever."""
    if where == "give_back" and bags[0].groups[0].records.reads_apart:
        pytest.skip("a GPU reads without lending")
    for bag in bags:
        train(bag, BATCHES[0])
    with monkeypatch.context() as patch:
        once(patch, bags[0].groups[0].cache, where)
        with pytest.raises(KeyboardInterrupt):
            read(bags[0], BATCHES[1])
    for bag in bags:
        train(bag, BATCHES[1])
        train(bag, BATCHES[2])
    same(bags)


@pytest.mark.parametrize("second", ["end", "reset", "inside reset"])
def test_again_while_the_first_is_dealt_with(bags: list[Any], second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that was not executed, or half forgotten, is not built upon: by who trains (below), or reads."""
    group = bags[0].groups[0]
    for bag in bags:
        train(bag, BATCHES[0])
    with monkeypatch.context() as patch:
        once(patch, group.cache, "_execute")
        if second == "end":
            once(patch, group, "abandon", lambda: once(patch, group, "end"))
        elif second == "reset":
            once(patch, Planner, "reset")
        else:
            once(patch, type(group.planner._shards), "reset", lambda shards, s, rows: (shards.meta.fill(0), press()))
        with pytest.raises(KeyboardInterrupt):
            train(bags[0], BATCHES[1])
    assert torch.equal(*(read(bag, BATCHES[0]) for bag in bags))
    for bag in bags:
        train(bag, BATCHES[2])
    same(bags)


# ---- look-ahead


def test_in_the_return_of_lent_rows(bags: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of ids that nobody has announced are brought home."""
    other, cache = torch.arange(2000, 2600), bags[0].groups[0].cache

    def write(rows: np.ndarray, slots: np.ndarray, plan: Any = None) -> None:
        if plan is None and slots.size and slots.min() >= cache.rows:  # lent
            patch.undo()
            press()
        type(cache)._write(cache, rows, slots, plan)

    with monkeypatch.context() as patch:
        look = cdlrm.lookahead(bags[0], BATCHES, ids=lambda ids: (ids, OFFSETS))
        with pytest.raises(KeyboardInterrupt):
            for i, ids in enumerate(look):
                train(bags[0], ids, other)
                train(bags[1], ids, other)
                if i == 1:
                    patch.setattr(cache, "_write", write)

        look.close()
    same(bags)


def test_lent_rows_that_cannot_be_written(bags: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not Ctrl-C but an error: what is lost was told, and what is written later is not written to row -1."""
    cache = bags[0].groups[0].cache

    def full(rows: np.ndarray, slots: np.ndarray, plan: Any = None) -> None:
        raise OSError("no space")

    look = cdlrm.lookahead(bags[0], BATCHES, ids=lambda ids: (ids, OFFSETS))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        for ids in look:
            train(bags[0], ids, torch.arange(2000, 2600))
            patch.setattr(cache, "_write", full)
            bags[0].groups[0].end()
    bags[0].check()
    assert not cache.dirty[cache.slot_row < 0].any()
    look.close()
    assert torch.isfinite(bags[0].weight).all()


@pytest.mark.parametrize("where", ["finish_batch", "abandon", "join", "reset"])
def test_while_a_look_ahead_ends(bags: list[Any], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks rows up next finishes that."""
    group, before = bags[0].groups[0], set(threading.enumerate())
    look = cdlrm.lookahead(bags[0], BATCHES, ids=lambda ids: (ids, OFFSETS), horizon=4)
    for i, ids in enumerate(look):
        train(bags[0], ids)
        train(bags[1], ids)
        if i == 2:
            break
    with monkeypatch.context() as patch:
        owner: Any = {"abandon": group, "join": threading.Thread, "reset": Planner}.get(where, Pipeline)
        once(patch, owner, where)
        with pytest.raises(KeyboardInterrupt):
            look.close()
    same(bags)
    assert group.attached is None
    assert not [t for t in threading.enumerate() if t not in before and t.name in ours()]


def test_while_a_look_ahead_begins(bags: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        when_a_thread_has_started(patch)
        with pytest.raises(KeyboardInterrupt):
            next(cdlrm.lookahead(bags[0], BATCHES, ids=lambda ids: (ids, OFFSETS)))
    assert bags[0].groups[0].attached is None
    assert not [t for t in threading.enumerate() if t not in before and t.name in ours()]
    same(bags)


# ---- an error in a backward pass


def test_a_gradient_that_is_not_finite_refuses_those_of_the_same_step(bags: list[Any]) -> None:
    """`nothing was updated` is true also where the gradient of another call came first."""
    if bags[0].groups[0].driver.name != "cpu":
        pytest.skip("a GPU tells it later")
    before, (first, second) = bags[0].weight.clone(), (torch.arange(600), torch.arange(1000, 1600))
    loss = (bags[0](first, OFFSETS) * float("inf")).sum() + bags[0](second, OFFSETS).sum()
    with pytest.raises(cdlrm.NonFiniteGradientError, match="nothing was updated"):
        loss.backward()
    del loss
    assert torch.equal(bags[0].weight, before)
    same(bags)
