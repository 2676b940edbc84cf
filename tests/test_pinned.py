"""Pinned host memory: exact sizes, pieces, and every way in which pinning fails, with the CUDA calls faked."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from cdlrm.driver import pinned
from cdlrm.driver.pinned import host_memory, pin
from cdlrm.errors import PinError

PAGE = mmap.PAGESIZE


class Calls:
    """CUDA's calls as they behave: an unknown address, 0 bytes and a page pinned twice are refused."""

    def __init__(self, fail_at: int = -1, error: type[BaseException] = RuntimeError, shift: int = 0) -> None:
        self.fail_at, self.error, self.shift = fail_at, error, shift
        self.live: dict[int, int] = {}
        self.history: list[tuple[int, int]] = []

    def register(self, address: int, nbytes: int) -> None:
        if len(self.history) == self.fail_at:
            raise self.error("cudaErrorMemoryAllocation: out of memory")
        if nbytes == 0:
            raise RuntimeError("cudaErrorInvalidValue: invalid argument")
        pages = range(address // PAGE, -(-(address + nbytes) // PAGE))
        for start, size in self.live.items():
            taken = range(start // PAGE, -(-(start + size) // PAGE))
            assert pages.stop <= taken.start or taken.stop <= pages.start, "a page would be pinned twice"
        self.live[address] = nbytes
        self.history.append((address, nbytes))

    def unregister(self, address: int) -> None:
        if address not in self.live:
            raise RuntimeError("cudaErrorHostMemoryNotRegistered: pointer does not correspond to a registered region")
        del self.live[address]

    def device_pointer(self, address: int) -> int:
        return address + self.shift


def one_sentence(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert "\n" not in text and text.endswith(".")
    return text


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, 10 * PAGE + 17, 64 * PAGE])
def test_pieces_cover_the_memory_and_keep_what_it_holds(nbytes: int) -> None:
    memory = host_memory(nbytes)
    assert memory.nbytes == nbytes and memory.ctypes.data % PAGE == 0 and not memory.any()
    memory[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    before = memory.copy()
    calls, seen = Calls(shift=1 << 40), []
    found = pin(memory, calls, lambda done, total: seen.append((done, total)), piece_bytes=4 * PAGE)
    assert np.array_equal(memory, before)
    assert found.address == memory.ctypes.data + (1 << 40) and found.nbytes == nbytes
    assert [start for start, _ in found.pieces] == [memory.ctypes.data + k * 4 * PAGE for k in range(len(found.pieces))]
    assert sum(size for _, size in found.pieces) == nbytes and all(size <= 4 * PAGE for _, size in found.pieces)
    assert found.borders() == [found.address + k * 4 * PAGE for k in range(1, len(found.pieces))]
    assert seen[-1] == (nbytes, nbytes) and sorted(seen) == seen and len(seen) == len(found.pieces)
    found.release(calls)
    assert not calls.live


def test_memory_that_begins_inside_a_page_is_cut_at_pages() -> None:
    memory = host_memory(20 * PAGE)[100:-50].view(np.uint8)
    calls = Calls()
    found = pin(memory, calls, piece_bytes=8 * PAGE)
    assert len(found.pieces) == 3 and all(start % PAGE == 0 for start, _ in found.pieces[1:])
    assert sum(size for _, size in found.pieces) == memory.nbytes


def test_an_array_of_any_type_and_shape() -> None:
    matrix = host_memory(4 * 30 * 50).view(np.float32).reshape(30, 50)
    matrix[:] = np.arange(1500, dtype=np.float32).reshape(30, 50)
    found = pin(matrix, Calls())
    assert found.address == matrix.ctypes.data and found.nbytes == matrix.nbytes
    assert np.array_equal(matrix.ravel(), np.arange(1500, dtype=np.float32))


def test_no_bytes_are_not_registered() -> None:
    calls = Calls()
    found = pin(host_memory(0), calls)
    assert (found.address, found.nbytes, found.pieces) == (0, 0, ()) and not calls.history
    found.release(calls)


def test_large_memory_is_touched_in_parts_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "TOUCH_BYTES", 2 * PAGE)
    memory = host_memory(33 * PAGE)
    memory[:: PAGE // 2] = 7
    assert pinned._threads(memory.nbytes) >= 1
    found = pin(memory, Calls(), piece_bytes=8 * PAGE)
    assert len(found.pieces) == 5 and (memory[:: PAGE // 2] == 7).all() and memory.sum() == 7 * 66


@pytest.mark.parametrize("fail_at", range(5))
def test_a_refused_piece_leaves_nothing_pinned(fail_at: int) -> None:
    memory, calls = host_memory(5 * PAGE), Calls(fail_at)
    with pytest.raises(PinError) as caught:
        pin(memory, calls, piece_bytes=PAGE)
    text = one_sentence(caught)
    assert not calls.live and len(calls.history) == fail_at
    for words in (
        f"{5 * PAGE:,} bytes", "cudaErrorMemoryAllocation", f"after {fail_at * PAGE:,} bytes", "ulimit -l",
        pinned.locked_memory_limit(), 'store="file:DIR"',
    ):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("fail_at", range(3))
def test_ctrl_c_while_pinning_leaves_nothing_pinned(fail_at: int) -> None:
    calls = Calls(fail_at, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        pin(host_memory(3 * PAGE), calls, piece_bytes=PAGE)
    assert not calls.live


def test_an_error_of_the_progress_is_not_taken_for_cudas() -> None:
    def progress(done: int, total: int) -> None:
        raise RuntimeError(f"{done} of {total}")

    calls = Calls()
    with pytest.raises(RuntimeError, match=f"^{PAGE} of {3 * PAGE}$"):
        pin(host_memory(3 * PAGE), calls, progress, piece_bytes=PAGE)
    assert calls.history and not calls.live


def test_unpinning_goes_on_after_a_failure() -> None:
    calls = Calls()
    found = pin(host_memory(4 * PAGE), calls, piece_bytes=PAGE)
    calls.unregister(found.pieces[1][0])
    with pytest.raises(PinError) as caught:
        found.release(calls)
    assert "1 of 4 pieces" in one_sentence(caught) and "cudaErrorHostMemoryNotRegistered" in str(caught.value)
    assert not calls.live


class Apart(Calls):
    """A device that sees each piece somewhere else."""

    def device_pointer(self, address: int) -> int:
        return address * 2


class Unseen(Calls):
    def device_pointer(self, address: int) -> int:
        return 0


class Lost(Calls):
    def device_pointer(self, address: int) -> int:
        raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")


@pytest.mark.parametrize(("kind", "words"), [(Apart, "do not follow"), (Unseen, "0x0"), (Lost, "cudaErrorNoDevice")])
def test_memory_that_kernels_cannot_address_is_refused(kind: type[Calls], words: str) -> None:
    calls = kind()
    with pytest.raises(PinError, match=words):
        pin(host_memory(3 * PAGE), calls, piece_bytes=PAGE)
    assert calls.history and not calls.live


def test_memory_that_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, nbytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pinned.mmap, "mmap", refuse)
    with pytest.raises(PinError) as caught:
        host_memory(123_456_789)
    assert "123,456,789 bytes" in one_sentence(caught) and "Cannot allocate memory" in str(caught.value)


def test_memory_is_as_large_as_asked_not_a_power_of_two() -> None:
    def address_space() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE

    before = address_space()
    memory = host_memory(160 << 20)
    assert abs(address_space() - before - memory.nbytes) < 8 << 20


@pytest.mark.parametrize("shown", [True, False])
def test_a_bar_shows_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shown: bool
) -> None:
    memory = host_memory(10 * PAGE)
    for seconds in (1e9, 0.0):
        monkeypatch.setattr(pinned, "BAR_SECONDS", seconds)
        with pinned.PinBar(20 * PAGE, shown) as bar:
            for _ in range(2):
                pin(memory, Calls(), bar.told, piece_bytes=4 * PAGE)
                bar.next()
        assert bar._done == 20 * PAGE
        told = capsys.readouterr().err
        assert ("pinning the tables" in told) == (shown and seconds == 0.0)
        assert "100%" in told or not told
