"""Faults on request: the n-th call of a kind fails, once, as a device would let it fail."""

from __future__ import annotations

from collections import Counter

# "launch", "copy", "kernel" and "compile" may be narrowed: "launch:fill", "copy:h2d", "kernel:lookup".
KINDS = ("alloc", "pinned", "register", "launch", "copy", "kernel", "compile")


class Faults:
    """`copy` and `kernel` fail when they run, which a later call reports; the others fail at once."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._due: dict[str, set[int]] = {}

    def fail_at(self, what: str, n: int) -> None:
        """The n-th call of `what` from now on fails (1: the next one)."""
        if what.partition(":")[0] not in KINDS or n < 1:
            raise ValueError(f"no such fault: {what!r}, {n}; kinds are {KINDS}, and the next call is number 1")
        self._due.setdefault(what, set()).add(self.calls[what] + n)

    def hit(self, kind: str, narrow: str = "") -> bool:
        """Count a call; whether it is to fail."""
        failed = False
        for what in (kind, f"{kind}:{narrow}") if narrow else (kind,):
            self.calls[what] += 1
            due = self._due.get(what)
            if due and self.calls[what] in due:
                due.remove(self.calls[what])
                failed = True
        return failed
