"""`Team`: threads that run one kernel together; inside it they share the work by `claims.py`.

Not a ThreadPoolExecutor: there a job that a late thread has not begun stays queued, and keeps a batch's arrays; and to
wait for every thread to come back takes as long as a small batch's shard.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ..interrupt import interrupt_later
from .claims import give_up, new_claims

Kernel = Callable[[int, int, np.ndarray], Any]
"""(worker, workers, claims) -> what is the same for every worker that came to the end."""


class _Job:
    def __init__(self, kernel: Kernel, workers: int, claims: np.ndarray) -> None:
        self.kernel, self.workers, self.claims = kernel, workers, claims
        self.error: BaseException | None = None

    def run(self, worker: int) -> Any:
        try:
            return self.kernel(worker, self.workers, self.claims)
        except BaseException as error:
            self.error = error
            give_up(self.claims)
            raise


class _Helper:
    """A thread that runs the newest job whenever it is woken.  It may come late: then all is claimed already, or
    the job was given up."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.job: _Job | None = None
        self._ended = False
        self._asleep, self._busy = threading.Lock(), threading.Lock()
        self._asleep.acquire()
        self._thread = threading.Thread(target=self._run, name=f"cdlrm-plan-{worker}", daemon=True)
        self._thread.start()

    def wake(self, job: _Job | None) -> None:
        self.job = job
        if self._asleep.locked():
            self._asleep.release()

    def leave(self) -> None:
        """Come back when the thread has left its job, and never begins it any more.

        It takes a member's time at most, and only then nobody writes to what the job writes to.
        """
        self.job = None
        with self._busy:
            pass

    def end(self) -> None:
        self._ended = True
        self.wake(None)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while not self._ended:
            self._asleep.acquire()
            with self._busy:
                job = self.job
                if job is not None:
                    try:
                        job.run(self.worker)
                    except BaseException:
                        pass  # the caller finds it in the job
                del job  # and what it holds, while asleep


class Team:
    """Up to `size` workers: the caller, who is worker 0, and threads of the team's own, begun when first needed.

    `close` ends them; so does dropping the team.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._helpers: list[_Helper] = []
        self._process = 0
        self._end: Any = None

    def run(self, kernel: Kernel, workers: int, *members: int) -> Any:
        """`kernel` on that many workers, which share phases of so many members; the result, or the first error, and
        then no worker is in the kernel any more.  Ctrl-C waits until it ends."""
        if workers == 1:  # nothing else runs, and inside a kernel Ctrl-C waits anyway
            return kernel(0, 1, new_claims(*members))
        with interrupt_later():  # a thread may be half begun
            return self._run_together(_Job(kernel, workers, new_claims(*members)))

    def _run_together(self, job: _Job) -> Any:
        helpers = self._begun()[: job.workers - 1]
        try:
            for helper in helpers:
                helper.wake(job)
            result = job.run(0)
            if job.error is not None:
                raise job.error
            return result
        except BaseException:
            give_up(job.claims)
            for helper in helpers:
                helper.leave()
            raise
        finally:
            for helper in helpers:
                helper.job = None

    def _begun(self) -> list[_Helper]:
        if self._process != os.getpid():  # threads do not survive a fork
            helpers: list[_Helper] = []
            try:
                for worker in range(1, self.size):
                    helpers.append(_Helper(worker))
            except BaseException:
                _end(helpers)
                raise
            if self._end is not None:
                self._end.detach()  # of the process before
            self._end = weakref.finalize(self, _end, helpers)
            self._helpers, self._process = helpers, os.getpid()
        return self._helpers

    def close(self) -> None:
        """End the threads; the team can still be used."""
        if self._process == os.getpid():
            self._end()
            for helper in self._helpers:
                helper.join()
        self._helpers, self._process = [], 0


def _end(helpers: list[_Helper]) -> None:
    for helper in helpers:
        helper.end()
