"""The planner's threads: each member of each phase is run once, and nobody waits for who is late, ended or failed."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np
import pytest

from cdlrm.plan.claims import claim, finish, wait
from cdlrm.plan.team import Team


@nb.njit(nogil=True)
def two_phases(worker, workers, claims, first, second, spins):  # type: ignore[no-untyped-def]
    """Each member of the second phase takes the sum of the first's; a member takes some time."""
    for turn in range(first.size):
        member = claim(claims, 0, worker, workers, turn, first.size)
        if member >= 0:
            for i in range(spins):
                first[member] += i % 2
            first[member] += 1
            finish(claims, 0)
    if not wait(claims, 0, first.size):
        return np.int64(-1)
    for turn in range(second.size):
        member = claim(claims, 1, worker, workers, turn, second.size)
        if member >= 0:
            second[member] += first.sum()
            finish(claims, 1)
    if not wait(claims, 1, second.size):
        return np.int64(-1)
    return second.sum()


BEFORE: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _others() -> None:
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def planning_threads() -> list[str]:
    """Names of those that were not there before the test."""
    return [t.name for t in threading.enumerate() if t.name.startswith("cdlrm-plan-") and t not in BEFORE]


def until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not true() and time.monotonic() < end:
        time.sleep(0.001)
    return true()


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize(("members", "spins"), [((1, 1), 0), ((8, 3), 200), ((7, 16), 2000)])
def test_each_member_is_run_once_and_phases_follow_each_other(
    workers: int, members: tuple[int, int], spins: int
) -> None:
    team = Team(workers)
    for _ in range(100):
        first, second = np.zeros(members[0], np.int64), np.zeros(members[1], np.int64)
        run = functools.partial(two_phases, first=first, second=second, spins=spins)
        total = team.run(run, workers, *members)
        assert (first == 1 + spins // 2).all()
        assert (second == first.sum()).all()
        assert total == second.sum()
    team.close()
    assert not planning_threads()


def test_a_long_wait() -> None:
    """So long that who waits sleeps in between."""
    team = Team(3)
    for _ in range(3):
        first, second = np.zeros(1, np.int64), np.zeros(3, np.int64)
        assert team.run(functools.partial(two_phases, first=first, second=second, spins=50_000_000), 3, 1, 3) > 0
        assert (second == 25_000_001).all()
    team.close()


def test_who_comes_late_finds_nothing_to_do() -> None:
    team, may_go_on, began = Team(2), threading.Event(), threading.Event()
    jobs = [(np.zeros(4, np.int64), np.zeros(4, np.int64)) for _ in range(3)]
    late: list[int] = []

    def kernel(number: int) -> Any:
        def run(worker: int, workers: int, claims: np.ndarray) -> int:
            if worker == 1:
                began.set()
                assert may_go_on.wait(60)
                late.append(number)
            elif number == 0:
                assert began.wait(60)
            return int(two_phases(worker, workers, claims, *jobs[number], 0))

        return run

    for number in range(3):
        assert team.run(kernel(number), 2, 4, 4) == 16
    may_go_on.set()
    team.close()
    assert late == [0], "the others were over"
    for first, second in jobs:
        assert (first == 1).all() and (second == 4).all()


def test_after_an_error_no_worker_is_in_the_kernel() -> None:
    """Not even one that would have done everything alone."""
    team, inside = Team(3), threading.Event()
    busy: list[int] = []
    first, second = np.zeros(8, np.int64), np.zeros(8, np.int64)

    def kernel(worker: int, workers: int, claims: np.ndarray) -> int:
        if worker == 0:
            assert inside.wait(60)
            raise KeyboardInterrupt
        busy.append(worker)
        inside.set()
        try:
            return int(two_phases(worker, workers, claims, first, second, 100_000_000))
        finally:
            busy.remove(worker)

    with pytest.raises(KeyboardInterrupt):
        team.run(kernel, 3, 8, 8)
    assert not busy
    assert (first == 0).any(), "the others have begun nothing more"
    team.close()


def test_threads_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    team, start, calls = Team(4), threading.Thread.start, iter(range(100))

    def fail(thread: threading.Thread) -> None:
        if next(calls) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            team.run(lambda w, ws, claims: 0, 4, 1)
    assert until(lambda: not planning_threads()), "those that were begun have ended"
    team.run(lambda w, ws, claims: 0, 4, 1)
    assert len(planning_threads()) == 3, "and another time all are begun"
    team.close()


def test_a_team_that_is_dropped_ends_its_threads() -> None:
    team = Team(3)
    team.run(lambda w, ws, claims: 0, 3, 1)
    assert sorted(planning_threads()) == ["cdlrm-plan-1", "cdlrm-plan-2"]
    del team
    gc.collect()
    assert until(lambda: not planning_threads())


def test_nothing_of_a_batch_is_kept_by_a_thread_that_sleeps() -> None:
    team, kept = Team(2), threading.Event()

    class Big:
        def __del__(self) -> None:
            kept.set()

    def run(big: Big) -> None:
        team.run(lambda w, ws, claims: big is None, 2, 1)

    run(Big())
    gc.collect()
    assert kept.wait(60)
    team.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork() -> None:
    team, first, second = Team(2), np.zeros(4, np.int64), np.zeros(4, np.int64)
    run = lambda w, ws, claims: two_phases(w, ws, claims, first, second, 0)  # noqa: E731
    assert team.run(run, 2, 4, 4) == 16
    child = os.fork()
    if child == 0:
        first[:] = second[:] = 0
        os._exit(0 if team.run(run, 2, 4, 4) == 16 and len(planning_threads()) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    team.close()
