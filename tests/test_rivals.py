"""`bench/rules`: every rule set on a trace worked out by hand, none below MIN(0), libCacheSim's own code agrees."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.reference_min import furthest_fills, lru_fills, window_fills

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import rivals  # noqa: E402
from rules import (  # noqa: E402
    bagpipe,
    cdlrm_window,
    colossal_lfu,
    colossal_static,
    lfu,
    library,
    lru,
    optimal,
    ours,
    s3fifo,
    scratchpipe,
    sieve,
    wtinylfu,
)
from rules.base import Moved, Uses  # noqa: E402

A, B, C, D, E = range(5)
TRACE = [[A, B], [C, C, C], [A], [D], [E], [A], [B], [C], [A, D], [E], [A], [B, B], [D], [C]]
USES = Uses.of(TRACE)


def test_uses() -> None:
    assert [rows.tolist() for rows in USES.batches] == [[r for r in dict.fromkeys(batch)] for batch in TRACE]
    assert [count.tolist() for count in USES.counts][1] == [3] and USES.rows == 5 and USES.largest == 2


def test_made_traces_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = rivals.Made
    monkeypatch.setattr(rivals, "Made", lambda *settings: made(*settings, batches=2))
    for uses in rivals.traces(None).values():
        assert len(uses().batches) == 2


# by hand, with 3 slots: fills and evictions
BY_HAND = {
    lru: (12, 9),
    lfu: (11, 8),  # at 12, C and B have 4 uses: C, used longer ago, goes, and is needed at 13
    colossal_lfu: (10, 7),  # at 12, B counts from its newest fill: it goes
    colossal_static: (10, 7),  # A, C, B, D, E in order of frequency
    sieve: (12, 9),  # A is visited whenever the hand comes by; nothing else is
    s3fifo: (11, 8),  # main A B C; D, E, B through the small queue; ghosts D, E, B come back to main
    wtinylfu: (11, 8),  # main C A; at 12, B (3 uses) wins against C (2)
}


@pytest.mark.parametrize("rule", BY_HAND, ids=lambda rule: rule.__name__)
def test_by_hand(rule) -> None:
    found = rule.moved(USES, 3)
    assert (found.fills, found.evicts) == BY_HAND[rule]


def test_scratchpipe_by_hand() -> None:
    """4 slots.  At 4 (E) all of A, B, C, D are pinned: C, of a batch before, gives way; at 7 B, at 11 E."""
    assert scratchpipe.moved(USES, 4) == Moved(7, 3, {"pins_broken": 3})


def test_scratchpipe_keeps_what_is_pinned() -> None:
    """5 slots.  At batch 4, A is the oldest, but batch 6 needs it; B is the victim, not pinned by a use 4 back."""
    uses = Uses.of([[0, 1], [2], [3], [4], [5], [4], [0], [1]])
    assert scratchpipe.moved(uses, 5) == Moved(7, 2, {"pins_broken": 0})
    assert lru.moved(uses, 5).fills == 8


@pytest.mark.parametrize("depth", [0, 1])
def test_bagpipe_by_hand(depth: int) -> None:
    """3 slots hold windows of 4 batches: A's four returns and D's 8 -> 12 are hits; B, C, E return too late."""
    assert bagpipe.moved(USES, 3, depth) == Moved(11, 10, {"window": 4})
    assert bagpipe.held(USES, USES.following(), 5).max() == 5  # batch 7: C, and A, B, D, E that return within 5


def test_bagpipe_depth_1_holds_the_next_batch() -> None:
    uses = Uses.of([[0, 1], [2, 3], [0, 1], [2, 3]])
    assert bagpipe.moved(uses, 4, 0) == Moved(4, 2, {"window": 4})
    assert bagpipe.moved(uses, 4, 1) == Moved(4, 2, {"window": 4})
    assert bagpipe.moved(uses, 3, 0) == Moved(8, 6, {"window": 1})
    assert bagpipe.moved(uses, 3, 1) == Moved(8, 6, {"window": 0, "holds_broken": True})
    three = Uses.of([[0], [1, 2], [0], [1, 2]])
    assert bagpipe.moved(three, 2, 0).fills == 6
    assert bagpipe.held(three, three.following(), 1, 1).tolist() == [3, 3, 3, 2]


def test_cdlrm_by_hand() -> None:
    forced = Uses.of([[0, 1], [2, 3], [0, 1], [4], [0, 1]])
    assert cdlrm_window.with_window(forced, 2, 1) == Moved(8, 6, {"window": 1})
    beside = Uses.of([[0, 1], [2, 3], [0, 1], [2, 3]])  # two of the four are loaded, the others fetched at each use
    assert cdlrm_window.with_window(beside, 2, 2) == Moved(6, 4, {"window": 2})
    assert cdlrm_window.moved(beside, 2).fills == 6
    assert cdlrm_window.with_window(USES, 5, 14) == Moved(5, 0, {"window": 14})


def random_uses(seed: int, batch: int = 12) -> Uses:
    rng = np.random.default_rng(seed)
    return Uses.of(
        np.minimum(rng.pareto(0.8, rng.integers(1, batch + 1)) * 10, 120).astype(np.int64) for _ in range(80)
    )


@pytest.mark.parametrize("seed", range(5))
def test_against_the_referees(seed: int) -> None:
    uses = random_uses(seed)
    trace = [rows.tolist() for rows in uses.batches]
    for slots in (26, 40, 60):
        assert lru.moved(uses, slots).fills == lru_fills(trace, slots, 0)
        for depth in (0, 1):
            assert optimal.moved(uses, slots, depth).fills == furthest_fills(trace, slots, depth)
        for horizon in (1, 5, 100):
            assert ours.moved(uses, slots, horizon).fills == window_fills(trace, slots, 1, horizon)


@pytest.mark.parametrize("seed", range(5))
def test_none_is_below_min0(seed: int) -> None:
    uses = random_uses(seed)
    for slots in (uses.largest, 20, 40, 60):
        least = rivals.RULES["MIN(0)"](uses, slots)
        for name, rule in rivals.RULES.items():
            found = rule(uses, max(slots, uses.largest))
            assert found.fills >= least.fills, name
            assert 0 <= found.fills - found.evicts <= max(slots, uses.largest), name
    large = rivals.RULES["LRU"](uses, uses.rows)
    for name, rule in rivals.RULES.items():
        assert rule(uses, uses.rows).fills >= large.fills == uses.rows, name


@pytest.mark.parametrize("name, rule", [("SIEVE", sieve), ("S3-FIFO", s3fifo)])
@pytest.mark.parametrize("seed", range(4))
def test_equal_to_libcachesim_row_by_row(name: str, rule, seed: int) -> None:
    if not library.available():
        pytest.skip("libcachesim is not installed: pip install libcachesim")
    uses = random_uses(seed, batch=1)
    more = Uses.of([r] for s in range(20) for rows in random_uses(100 * seed + s, 12).batches for r in rows.tolist())
    for trace in (uses, more):
        for slots in (20, 37, 70):
            assert rule.moved(trace, slots) == library.moved(trace, slots, name)


def test_a_cache_below_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold a batch of 2"):
        lru.moved(USES, 1)
