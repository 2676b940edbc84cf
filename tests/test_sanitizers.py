"""The kernels' text under ASan, UBSan and TSan, on random launches; and three planted faults that each must see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cdlrm.driver import signatures
from tests.emulator import compile as host
from tests.emulator import sanitize
from tests.emulator.launches import FAR_SLOTS, LARGEST_DIM, MAKERS, Far, Launch, launches

ADDRESS_LAUNCHES, THREAD_LAUNCHES, WORKERS = 2000, 1000, 3

pytestmark = [
    pytest.mark.skipif(host.unavailable() is not None, reason=str(host.unavailable())),
    pytest.mark.limit(600),  # the first test of each program compiles it
]


@pytest.fixture(scope="module")
def address() -> Path:
    return sanitize.build("address")


@pytest.fixture(scope="module")
def thread() -> Path:
    return sanitize.build("thread")


@pytest.mark.parametrize("name", list(signatures.KERNELS))
def test_no_access_outside_an_array_and_no_undefined_behaviour(address: Path, name: str) -> None:
    done = sanitize.run(address, launches(name, ADDRESS_LAUNCHES, seed=1), 1)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{ADDRESS_LAUNCHES} launches\n", "")


@pytest.mark.parametrize("name", list(signatures.KERNELS))
def test_no_two_teams_touch_one_place(thread: Path, name: str) -> None:
    done = sanitize.run(thread, launches(name, THREAD_LAUNCHES, seed=2), WORKERS)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{THREAD_LAUNCHES} launches\n", "")


OWNERS = {  # what a kernel has one team for; None: a sum over all
    "fill": "count", "evict": "count", "lookup": "batch", "finite": "count", "update_short": "distinct",
    "chunk_sums": "chunks", "update_long": "count", "weight_grad": "lookups", "stream_copy": "vectors",
}  # fmt: skip


@pytest.mark.parametrize("name", list(OWNERS))
def test_the_launches_have_every_shape(name: str) -> None:
    """None, one, an odd number and many owners; every variant; odd, small and the largest dims; indices past 2^31."""
    drawn = list(launches(name, ADDRESS_LAUNCHES, seed=1))
    owners = np.array([launch.values[OWNERS[name]] for launch in drawn])
    assert {0, 1} <= set(owners.tolist()) and (owners % 2 == 1).any() and owners.max() >= 90
    assert {launch.variant for launch in drawn} == set(signatures.KERNELS[name].variants)
    assert (np.array([launch.grid for launch in drawn]) >= 2).sum() > 200
    if "dim" in drawn[0].values:
        dims = {launch.values["dim"] for launch in drawn}
        assert {1, 4, 33, 64, 128, *LARGEST_DIM.values()} <= dims
    if name in ("fill", "evict", "update_short", "update_long"):
        far = [launch for launch in drawn if isinstance(launch.values["weight"], Far)]
        assert len(far) >= 20
        assert max(launch.values["weight"].nbytes for launch in far) > 4 * 2**31
    if name == "update_short":
        lengths = [np.diff(launch.values["seg_start"]) for launch in drawn]
        assert any((each > signatures.LONG_ROW).any() and (each <= signatures.LONG_ROW).any() for each in lengths)


def _a_launch(name: str, least: int) -> Launch:
    """One that has at least so many owners and ordinary memory."""
    return next(
        launch for launch in launches(name, 500, seed=3)
        if launch.values[OWNERS[name]] >= least and isinstance(launch.values["weight"], np.ndarray)
    )  # fmt: skip


@pytest.mark.parametrize("name", ["evict", "lookup", "update_short"])
def test_an_array_one_element_too_short_is_caught(address: Path, name: str) -> None:
    launch = _a_launch(name, least=20)
    short = {"evict": "home_weight", "lookup": "slots", "update_short": "seg_start"}[name]
    good = sanitize.run(address, [launch], 1)
    assert (good.returncode, good.stdout) == (0, "1 launches\n")
    values = launch.values | {short: launch.values[short][:-1].copy()}
    if name == "evict":  # the last home row must be one that is written
        values |= {"staged": 1, "home_weight": launch.values["home_weight"][: _home_floats(launch) - 1].copy()}
    done = sanitize.run(address, [launch._replace(values=values)], 1)
    assert done.returncode == 66
    assert "heap-buffer-overflow" in done.stderr


def _home_floats(launch: Launch) -> int:
    """Floats of `count` staged weights."""
    values = launch.values
    return (values["count"] - 1) * values["home_weight_stride"] + values["dim"]


@pytest.mark.parametrize("name", ["fill", "update_short"])
def test_two_teams_that_write_one_row_are_caught(thread: Path, name: str) -> None:
    launch = _a_launch(name, least=20)
    where = {"fill": "slots", "update_short": "seg_slot"}[name]
    launch = launch._replace(values=launch.values | dict.fromkeys(("flag", "sticky") if name == "update_short" else ()))
    good = sanitize.run(thread, [launch], WORKERS)
    assert (good.returncode, good.stdout) == (0, "1 launches\n")
    slots = launch.values[where].copy()
    slots[1] = slots[0]
    done = sanitize.run(thread, [launch._replace(values=launch.values | {where: slots})], WORKERS)
    assert done.returncode == 66
    assert "data race" in done.stderr


def test_an_index_of_32_bits_is_caught() -> None:
    """Row times stride in `int`: the launches with rows far apart overflow it."""
    wide, narrow = "T* row_at(T* rows, i64 number, int stride)", "T* row_at(T* rows, int number, int stride)"

    def change(text: str) -> str:
        assert wide in text
        return text.replace(wide, narrow)

    far = [launch for launch in launches("evict", 500, seed=1) if isinstance(launch.values["weight"], Far)]
    assert far and all(FAR_SLOTS - 1 in launch.values["slots"] for launch in far)
    done = sanitize.run(sanitize.build("address", ["evict.cu"], change), far, 1)
    assert done.returncode != 0
    assert "signed integer overflow" in done.stderr


def test_every_kernel_has_launches() -> None:
    assert list(MAKERS) == list(signatures.KERNELS)
