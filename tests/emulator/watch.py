"""The checks of accesses: bounds, races by the shadow, one owner per word, and bytes changed without being declared."""

from __future__ import annotations

from collections import deque

import numpy as np

from .access import Access
from .clocks import FINE, MAX_STREAMS, OUTSIDE, TWICE, Clocks, mark_rows, read_rows, write_rows
from .memory import AccessError, EmulatorError, Memory, Region, UndeclaredWriteError
from .streams import Operation

REMEMBERED = 4096  # operations whose accesses can be named
COMPARED_BYTES = 16 << 20  # of memory, around a launch


class RaceError(EmulatorError):
    """Two accesses to the same bytes, one of them a write, that no event orders."""


class Watch:
    def __init__(self, memory: Memory, clocks: Clocks) -> None:
        self.memory, self.clocks = memory, clocks
        self._known: dict[int, tuple[Operation, list[Access]]] = {}
        self._order: deque[int] = deque()

    def touch(self, operation: Operation, accesses: list[Access]) -> None:
        """Check the accesses of an operation that is about to run (of the host: that happen now)."""
        self._known[operation.number] = operation, accesses
        self._order.append(operation.number)
        if len(self._order) > REMEMBERED:
            del self._known[self._order.popleft()]
        stream, streams = operation.stream.index, self.clocks.streams
        for access in accesses:
            if access.total == 0:
                continue
            region = self.memory.at(access.address)
            if region is None or not region.live:
                self.memory.find(access.address, access.nbytes, _named(operation, access))
            if region.readers is None or len(region.readers) < streams:
                region.watch(streams)
            base = access.address - region.start
            if access.atomic:  # of two such writers none is wrong; the host that reads must be ordered after them
                self.memory.find(access.address, access.nbytes, _named(operation, access))
                words = (base + access.offsets) // 4
                region.writer[words] = operation.number
                early = words[region.readers[0][words] > operation.clock[0]]  # of the host, which did not wait
                if early.size:
                    self._report(operation, access, region, int(early[0]))
                continue
            if access.writes:
                if region.kind == "tensor":
                    raise AccessError(f"{_named(operation, access)} is written, but torch made it: use output()")
                aligned = (base | access.nbytes) % 4 == 0
                found = write_rows(
                    region.writer, region.readers, streams, operation.clock, operation.number, region.nbytes, base,
                    access.offsets, access.nbytes, aligned and not access.shared,
                )  # fmt: skip
            else:
                found = read_rows(
                    region.writer, region.readers[stream], operation.clock, operation.number, region.nbytes, base,
                    access.offsets, access.nbytes,
                )  # fmt: skip
            if found != FINE:
                self._report(operation, access, region, int(found))

    def _report(self, operation: Operation, access: Access, region: Region, found: int) -> None:
        if found <= OUTSIDE:
            offset = access.address - region.start + int(access.offsets[OUTSIDE - found])
            raise AccessError(
                f"{_named(operation, access)}: row {OUTSIDE - found} is at bytes [{offset}, {offset + access.nbytes}) "
                f"of {region}"
            )
        word = found - TWICE if found >= TWICE else found
        first = _row_at(access, region.start + 4 * word) - region.start
        place = f"bytes [{first}, {first + access.nbytes}) of {region}"
        if found >= TWICE:
            raise RaceError(f"{_named(operation, access)}: two owners of one launch write {place}")
        other, verb = int(region.writer[word]), "writes"
        if other <= operation.clock[other % MAX_STREAMS]:
            column = region.readers[: self.clocks.streams, word]
            other, verb = int(column[column > operation.clock[: len(column)]][0]), "reads"
        raise RaceError(
            f"{_named(operation, access)} {'writes' if access.writes else 'reads'} {place} (race at byte {4 * word}), "
            f"which no event orders after {self._other(other, region.start + 4 * word)} that {verb} it"
        )

    def _other(self, number: int, address: int) -> str:
        if number not in self._known:
            return f"work of stream {number % MAX_STREAMS} (of long ago, or torch's own before it gave this memory)"
        operation, accesses = self._known[number]
        for access in accesses:
            if _row_at(access, address) >= 0:
                return _named(operation, access)
        return str(operation)

    # --- bytes that change without being declared ---

    def before(self, accesses: list[Access]) -> list[tuple[Region, np.ndarray]]:
        """Copies of the memory that nobody but the coming launch may change now.

        Host arrays and torch's tensors are among it only if the launch uses them: other threads may write others.
        """
        used = [region for access in accesses if (region := self.memory.at(access.address)) is not None]
        regions = {region.start: region for region in used if region.kind != "pinned"}
        for region in self.memory.live("device"):
            regions.setdefault(region.start, region)
        copies, room = [], COMPARED_BYTES
        for region in regions.values():
            if region.nbytes <= room:
                room -= region.nbytes
                copies.append((region, region.raw.copy()))
        return copies

    def after(self, operation: Operation, accesses: list[Access], copies: list[tuple[Region, np.ndarray]]) -> None:
        """Raise if a byte of `copies` changed that no access declares to write."""
        for region, old in copies:
            if np.array_equal(region.raw, old):
                continue
            declared = np.zeros(len(old), np.bool_)
            for access in accesses:
                if access.writes and region.start <= access.address < region.end:
                    base = access.address - region.start + region.offset
                    mark_rows(declared, base, access.offsets, access.nbytes)
            wrong = np.flatnonzero((region.raw != old) & ~declared) - region.offset
            if len(wrong):
                raise UndeclaredWriteError(
                    f"{operation} changed {len(wrong)} bytes of {region} that it does not declare to write, "
                    f"the first at byte {wrong[0]}"
                )


def _named(operation: Operation, access: Access) -> str:
    return f"{operation}, parameter {access.parameter}"


def _row_at(access: Access, address: int) -> int:
    """Address of the row of `access` that holds a byte of the word at `address`, or -1."""
    starts = access.address + access.offsets
    hits = np.flatnonzero((starts < address + 4) & (starts + access.nbytes > address))
    return int(starts[hits[0]]) if len(hits) else -1
