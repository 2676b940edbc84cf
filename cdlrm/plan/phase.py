"""`Phase`: a piece of a planner's work that several threads share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Phase:
    """`run(first, last)` for every member of [0, count), in any order; whoever is free takes the next one.

    A thread goes on from phase to phase without being woken anew, which takes longer than a member does; one that was
    not awake yet holds nobody up.
    """

    def __init__(self, count: int, run: Callable[[int, int], None]) -> None:
        self.count, self.run = count, run
        self._waiting = deque(range(count))
        self._left = count
        self._lock, self._done = threading.Lock(), threading.Event()

    def work(self) -> None:
        """Run members until none is left, and wait for those that other threads run."""
        while True:
            try:
                member = self._waiting.popleft()
            except IndexError:
                break
            self.run(member, member + 1)
            with self._lock:
                self._left -= 1
                if self._left == 0:
                    self._done.set()
        self._done.wait()

    def give_up(self) -> None:
        """A thread has failed: let the others end."""
        self._waiting.clear()
        self._done.set()
