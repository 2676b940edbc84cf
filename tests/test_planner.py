"""The planner against independent referees: rules 1-6, MIN(d), LRU, growth, determinism."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from reference_min import (
    brute_force_fills,
    distinct,
    furthest_fills,
    held_rows,
    lru_fills,
    smallest_cache,
    window_fills,
)

from cdlrm.errors import CacheTooSmallError, UsageError
from cdlrm.plan import MinCounter, Planner, plan_kernels
from cdlrm.plan import kernels as k
from cdlrm.plan.shards import Shards

FIELDS = (
    "slots seg_slot seg_row seg_start seg_lookup fill_rows fill_slots evict_rows evict_slots batch wait_for cache_rows"
).split()
SHARDS = [1, 2, 3, 7, 8, 16]


class Replay:
    """Follows plans with a dictionary and asserts the rules; knows nothing of how plans are made."""

    def __init__(self, depth: int, one_shard: bool) -> None:
        self.depth = depth
        self.one_shard = one_shard
        self.row_of: dict[int, int] = {}
        self.slot_of: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        self.history: list[list[int]] = []
        self.cache_rows = 0
        self.let_go = 0  # batches before this one are not held any more
        self.fills = 0
        self.evicts = 0

    def apply(self, plan: Any, rows: np.ndarray) -> None:
        j = len(self.history)
        assert plan.batch == j, "plans come in batch order"
        assert plan.cache_rows >= self.cache_rows, "a cache never shrinks"
        batch = distinct(rows.tolist())
        self._evict(plan, batch, j)
        self._fill(plan, batch)
        self.cache_rows = plan.cache_rows
        self.history.append(batch)
        for row in batch:
            self.last_use[row] = j
        self._lookups(plan, rows)

    def _evict(self, plan: Any, batch: list[int], j: int) -> None:
        rows, slots = plan.evict_rows.tolist(), plan.evict_slots.tolist()
        assert len(rows) == len(slots) == len(set(rows))
        assert not set(rows) & set(batch), "a row of the batch is evicted"
        held = {r for b in self.history[max(0, j - self.depth) : j] for r in b} if self.depth else set()
        held &= set(self.slot_of)  # an earlier plan may have had to break a hold already
        for row, slot in zip(rows, slots, strict=True):
            assert self.row_of.pop(slot) == row and self.slot_of.pop(row) == slot, "evicts what is not there"
            assert self.last_use[row] <= plan.wait_for, "evicted before its last batch must have finished"
        assert plan.wait_for < j, "waits for a batch that is not before it"
        if not rows:
            assert plan.wait_for == -1, "needs no victim and yet waits"
        broken = len(held & set(rows))
        if not broken and not plan.grows:  # growing replaces the arrays, so it may wait for all
            assert plan.wait_for < max(0, j - self.depth), "waits for a batch it may overlap with"
        if self.one_shard:
            # where the rows of batches j-depth..j do not fit, whole batches are let go, oldest first, for good
            self.let_go = max(self.let_go, j - self.depth)
            while len({r for b in self.history[self.let_go : j] for r in b} | set(batch)) > plan.cache_rows:
                self.let_go += 1
            assert all(self.last_use[row] < self.let_go for row in rows), "a held row is evicted although the holds fit"

    def _fill(self, plan: Any, batch: list[int]) -> None:
        rows, slots = plan.fill_rows.tolist(), plan.fill_slots.tolist()
        assert sorted(rows) == sorted(r for r in batch if r not in self.slot_of), "fills are the missing rows"
        assert len(slots) == len(rows) == len(set(slots))
        for row, slot in zip(rows, slots, strict=True):
            assert 0 <= slot < plan.cache_rows and slot not in self.row_of, "fills a slot that is taken"
            self.row_of[slot], self.slot_of[row] = row, slot
        self.fills += len(rows)
        self.evicts += len(plan.evict_rows)

    def _lookups(self, plan: Any, rows: np.ndarray) -> None:
        assert plan.slots.dtype == np.int32 and plan.seg_row.dtype == np.int64
        assert plan.slots.tolist() == [self.slot_of[r] for r in rows.tolist()]
        seg_rows = plan.seg_row.tolist()
        assert plan.seg_slot.tolist() == [self.slot_of[r] for r in seg_rows]
        assert sorted(seg_rows) == sorted(set(rows.tolist())) and len(seg_rows) == len(set(seg_rows))
        starts = plan.seg_start.tolist()
        assert starts[0] == 0 and starts[-1] == len(rows) == len(plan.seg_lookup)
        assert len(starts) == len(seg_rows) + 1
        order = {row: [] for row in seg_rows}
        for i, row in enumerate(rows.tolist()):
            order[row].append(i)
        for u, row in enumerate(seg_rows):
            assert plan.seg_lookup[starts[u] : starts[u + 1]].tolist() == order[row], "segment out of lookup order"


def drive(
    trace: Sequence[Iterable[int]],
    num_rows: int,
    cache_rows: int,
    *,
    depth: int = 1,
    horizon: int | None = None,
    shards: int = 1,
    strict: bool = False,
    every: int = 1,
) -> tuple[Replay, list[Any]]:
    """Plan a whole trace: plan j sees the batches up to j + horizon.  Checks every plan."""
    planner = Planner(num_rows, cache_rows, prefetch_depth=depth, shards=shards, strict=strict)
    replay = Replay(depth, one_shard=shards == 1)
    batches = [np.asarray(list(b), np.int64) for b in trace]
    horizon = len(batches) if horizon is None else horizon
    scanned = 0
    plans = []
    for j, rows in enumerate(batches):
        while scanned < min(len(batches), j + 1 + horizon):
            assert planner.scan(batches[scanned]) == scanned
            scanned += 1
        missing = {row for row in rows.tolist() if row not in replay.slot_of}
        assert planner.needs_victim() == _too_many(missing, replay.slot_of, planner), "asks whether a row must leave"
        plan = planner.plan()
        replay.apply(plan, rows)
        if j % every == 0:
            planner.check()
        plans.append(plan)
    planner.check()
    return replay, plans


def _too_many(missing: set[int], cached: Iterable[int], planner: Planner) -> bool:
    """Whether some shard has fewer free slots than missing rows."""
    needed = Counter(int(k.shard_of(row, planner.shards)) for row in missing)
    used = Counter(int(k.shard_of(row, planner.shards)) for row in cached)
    return any(n > planner.cache_rows // planner.shards - used[s] for s, n in needed.items())


def random_trace(rng: np.random.Generator, rows: int, batches: int, most: int, zipf: float = 0.0) -> list[list[int]]:
    """Batches of 0..most lookups with duplicates."""
    weights = (np.arange(rows) + 1.0) ** -zipf
    weights /= weights.sum()
    return [rng.choice(rows, rng.integers(0, most + 1), p=weights).tolist() for _ in range(batches)]


def dedupe(trace: Sequence[Sequence[int]]) -> list[list[int]]:
    return [distinct(b) for b in trace]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_fills_equal_brute_force(depth: int, seed: int) -> None:
    """Fills equal an independent MIN(d), one shard, full horizon, whenever the holds fit."""
    rng = np.random.default_rng([depth, seed])
    for _ in range(60):
        rows = int(rng.integers(2, 10))
        trace = random_trace(rng, rows, int(rng.integers(1, 11)), int(rng.integers(1, 5)), float(rng.choice([0, 1.05])))
        small = dedupe(trace)
        slots = max(1, smallest_cache(small, depth)) + int(rng.integers(0, 4))
        best = brute_force_fills(small, slots, depth)
        replay, plans = drive(trace, rows, slots, depth=depth)
        assert replay.fills == best, (trace, slots, depth)
        assert plans[-1].cache_rows == slots, "the holds fit, nothing grows"
        counter = MinCounter(rows, slots, depth)
        for batch in small:
            counter.add(np.asarray(batch, np.int64))
        assert int(counter.fills) == best, (trace, slots, depth)


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("zipf", [0.0, 1.05])
def test_fills_equal_furthest_next_use_on_larger_traces(depth: int, zipf: float) -> None:
    rng = np.random.default_rng([depth, int(100 * zipf)])
    trace = random_trace(rng, 600, 60, 80, zipf)
    small = dedupe(trace)
    for factor in (1.0, 1.3, 2.0):
        slots = int(factor * smallest_cache(small, depth))
        best = furthest_fills(small, slots, depth)
        assert drive(trace, 600, slots, depth=depth)[0].fills == best
        counter = MinCounter(600, slots, depth)
        for batch in small:
            counter.add(np.asarray(batch, np.int64))
        assert int(counter.fills) == best and counter.shortened_at(depth) == 0
    tight = MinCounter(600, max(map(len, small)), depth)  # each batch alone fits, not always with those before it
    held = [len(set().union(*map(set, small[max(0, b - depth) : b + 1]))) for b in range(len(small))]
    for batch in small:
        tight.add(np.asarray(batch, np.int64))
    assert tight.shortened_at(depth) == sum(rows > tight.cache_rows for rows in held)


def wandering_trace(rng: np.random.Generator, batches: int) -> list[list[int]]:
    """Batches of 1 to 4 rows out of few, then many, then others: some never fill a cache, some do."""
    trace: list[list[int]] = []
    while len(trace) < batches:
        low, width = int(rng.integers(0, 250)), int(rng.choice([6, 20, 50]))
        length = int(rng.integers(200, 1500))
        trace += [dedupe([rng.integers(low, low + width, rng.integers(1, 5)).tolist()])[0] for _ in range(length)]
    return trace[:batches]


@pytest.mark.parametrize("seed", range(6))
def test_min_forgets_only_what_cannot_matter(seed: int) -> None:
    """Thousands of batches in a ring of 1,024: as many fills as furthest next use."""
    rng = np.random.default_rng(seed)
    trace = wandering_trace(rng, 5000)
    depth = int(rng.integers(0, 4))
    forgot = 0
    for slots in (smallest_cache(trace, depth) + 1, 25, 60, 260):
        counter = MinCounter(300, slots, 0, depth)
        for batch in trace:
            counter.add(np.asarray(batch, np.int64))
        assert counter.fills_at(depth) == furthest_fills(trace, slots, depth), slots
        assert counter.double_fills == furthest_fills(trace, 2 * slots, depth), slots
        forgot += counter.nbytes < 100_000
    assert forgot, "some ring stayed as it was made"


def test_min_is_bounded_where_the_cache_never_fills() -> None:
    """Few rows a batch, fewer in all than the cache holds: nothing is kept of old batches."""
    rng = np.random.default_rng(0)
    counter = MinCounter(2000, 900, 0, 1)
    made = counter.nbytes
    for b in range(30_000):
        counter.add(np.unique(rng.integers(0, 800, 1 + b % 2)))
    assert counter.nbytes == made
    assert counter.fills == 800, "each row once"


@pytest.mark.parametrize("horizon", [0, 1, 2, 3, 8, 20, 100])
@pytest.mark.parametrize("zipf", [0.0, 0.8, 1.3])
def test_never_more_fills_than_lru(horizon: int, zipf: float) -> None:
    """LRU acts beyond the horizon, and knowing more never costs a fill."""
    rng = np.random.default_rng([horizon, int(10 * zipf)])
    for depth in (0, 1, 2, 3):
        trace = random_trace(rng, 300, 80, 30, zipf)
        small = dedupe(trace)
        for extra in (0, 5, 40, 120):
            slots = smallest_cache(small, depth) + extra
            fills = drive(trace, 300, slots, depth=depth, horizon=horizon)[0].fills
            assert fills <= lru_fills(small, slots, depth)
            assert fills == window_fills(small, slots, depth, horizon)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_cache_of_exactly_one_batch(depth: int) -> None:
    rng = np.random.default_rng(depth)
    for horizon in (0, 3, None):
        trace = random_trace(rng, 50, 40, 12)
        slots = max(len(set(b)) for b in trace)
        replay, plans = drive(trace, 50, slots, depth=depth, horizon=horizon, strict=True)
        assert plans[-1].cache_rows == slots
        assert all(p.batch > p.wait_for for p in plans)
        del replay


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_too_small_grows_and_stays_right(shards: int) -> None:
    rng = np.random.default_rng(shards)
    for depth in (0, 1, 2):
        trace = random_trace(rng, 200, 40, 60)
        need = max(len(set(b)) for b in trace)
        replay, plans = drive(trace, 200, max(shards, 4), depth=depth, horizon=6, shards=shards)
        assert plans[-1].cache_rows >= need
        if shards == 1:
            assert plans[-1].cache_rows == need, "grows to what is needed, no further"
        del replay


def test_strict_refuses_before_anything_changes() -> None:
    planner = Planner(100, 4, prefetch_depth=1, shards=1, strict=True)
    replay = Replay(1, one_shard=True)
    batches = [np.array([1, 2, 3]), np.array([3, 4, 9, 9]), np.arange(10, 17)]
    for rows in batches:
        planner.scan(rows)
    for rows in batches[:2]:
        replay.apply(planner.plan(), rows)
    for _ in range(2):  # the second try is refused in the same way: nothing was consumed
        with pytest.raises(CacheTooSmallError, match=r"\b7\b"):
            planner.plan()
        planner.check()


def test_plans_are_the_same_bytes_from_any_thread() -> None:
    """Rule 2: ids and settings alone decide."""
    rng = np.random.default_rng(0)
    trace = random_trace(rng, 2000, 40, 300, 1.05)
    results: list[list[Any]] = []

    def work() -> None:
        results.append(drive(trace, 2000, 700, depth=2, horizon=5, shards=4, every=10)[1])

    work()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for other in results[1:]:
        same_plans(results[0], other)


def test_long_run_wraps_the_ring() -> None:
    rng = np.random.default_rng(3)
    for horizon, rows, most in ((0, 40, 10), (1, 60, 25), (7, 500, 40)):
        trace = random_trace(rng, rows, 1500, most, 0.7)
        small = dedupe(trace)
        slots = smallest_cache(small, 1) + 3
        replay, _ = drive(trace, rows, slots, depth=1, horizon=horizon, every=100)
        assert replay.fills == window_fills(small, slots, 1, horizon)


def test_growing_batches_grow_the_ring() -> None:
    """A window whose batches become much larger than the first ones were."""
    rng = np.random.default_rng(4)
    trace = [rng.integers(0, 5000, size).tolist() for size in (1, 2, 1, 3000, 1, 4000, 0, 2, 4500, 1, 1)]
    for shards in (1, 4):
        drive(trace, 5000, 8, depth=2, horizon=4, shards=shards)


def test_many_equal_ids_and_empty_batches() -> None:
    same = np.full(65536, 7)
    trace = [[], same.tolist(), [], [7, 8, 7], same.tolist(), []]
    for depth in (0, 1):
        replay, plans = drive(trace, 10, 2, depth=depth, horizon=2)
        assert replay.fills == 2 and len(plans[1].seg_row) == 1 and len(plans[0].slots) == 0
    drive([[], [], []], 10, 1)
    drive([[0]], 1, 1)


def same_plans(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        for field in FIELDS:
            a, b = np.asarray(getattr(mine, field)), np.asarray(getattr(theirs, field))
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), (mine.batch, field)


@pytest.mark.parametrize("threads", [2, 3])
def test_plans_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    """Rule 2, with batches that are big enough for several threads."""
    rng = np.random.default_rng(9)
    trace = [(rng.random(50_000) ** 3 * 60_000).astype(np.int64) for _ in range(6)]
    names: set[str] = set()

    def plans(planner: Planner) -> list[Any]:
        out = []
        for rows in trace:
            planner.scan(rows)
            if planner.window > 2:
                out.append(planner.plan())
        names.update(t.name for t in threading.enumerate())
        planner.check()
        planner.close()
        return out

    one, many = (Planner(60_000, 40_000, 1, 4, threads=n) for n in (1, threads))
    alone = plans(one)
    assert not any("cdlrm-plan-" in name for name in names)
    same_plans(alone, plans(many))
    assert any("cdlrm-plan-" in name for name in names), "several threads took part"
    assert not any(t.name.startswith("cdlrm-plan-") for t in threading.enumerate()), "close ends them"


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("kernel", ["scan_batch", "plan_batch"])
def test_an_error_in_a_thread_reaches_the_caller(kernel: str, worker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody waits for the thread that has failed, wherever it was."""
    module: Any = plan_kernels if kernel == "plan_batch" else k
    run, failed = getattr(module, kernel), threading.Event()

    def fail(mine: int, workers: int, claims: np.ndarray, *arrays: Any) -> Any:
        if mine == worker:
            claims[1:, 1] = 1  # one member of each phase was begun, and will never be finished
            failed.set()
            raise MemoryError("injected")
        assert failed.wait(60)
        return run(mine, workers, claims, *arrays)

    planner = Planner(60_000, 40_000, 1, 4, threads=2)
    planner.scan(np.arange(50_000))
    monkeypatch.setattr(module, kernel, fail)
    with pytest.raises(MemoryError, match="injected"):
        if kernel == "plan_batch":
            planner.plan()
        else:
            planner.scan(np.arange(50_000))
    planner.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("where", ["scan_batch", "plan_batch", "grow_rings", "grow_slots", "make_room"])
@pytest.mark.parametrize("after", [False, True])
def test_after_an_interrupted_call(where: str, after: bool, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come wherever Python runs: nothing goes on before `reset`, and afterwards all plans are right."""
    module: Any = plan_kernels if where == "plan_batch" else k if where == "scan_batch" else Shards
    run, calls = getattr(module, where), iter(range(1000))

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 0:
            if after or (threads == 2 and where.endswith("_batch") and arguments[0] != 0):
                run(*arguments)
            raise KeyboardInterrupt
        return run(*arguments)

    rng = np.random.default_rng(3)
    planner = Planner(300_000, 40_000, 1, 4, threads=threads)
    replay = Replay(1, one_shard=False)
    batches = [(rng.random(n) ** 2 * 300_000).astype(np.int64) for n in (40_000, 50_000)]
    for rows in batches:
        planner.scan(rows)
        replay.apply(planner.plan(), rows)
    planner.scan(batches[0])
    with monkeypatch.context() as patch:
        patch.setattr(module, where, interrupted)
        planner._room = where != "make_room"
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                planner.scan((rng.random(200_000) * 300_000).astype(np.int64))
            while True:
                planner.plan()
    with pytest.raises(UsageError, match="interrupted"):
        planner.scan(batches[0])
    truth = np.full(planner.cache_rows, -1)
    for slot, row in replay.row_of.items():
        truth[slot] = row
    planner.reset(truth)
    planner.check()
    assert np.array_equal(planner.slot_rows(), truth) and planner.window == 0
    replay.last_use = dict.fromkeys(replay.last_use, -1)  # every batch before the reset is over
    replay.history += [[]] * (planner.planned - len(replay.history))
    for rows in (*batches, batches[0][:60], (rng.random(100_000) * 300_000).astype(np.int64), *batches):
        planner.scan(rows)
        replay.apply(planner.plan(), rows)
        planner.check()
    planner.close()


@pytest.mark.parametrize(("shards", "skewed"), [(1, False), (4, False), (4, True), (16, True)])
def test_metadata_is_small(shards: int, skewed: bool) -> None:
    """At most 8 bytes a row, 32 a slot, 16 a scanned distinct row, whatever the window has grown to, and if all ids
    fall into one shard."""
    rng = np.random.default_rng(shards)
    of_one = np.array([row for row in range(200_000) if not skewed or k.shard_of(row, shards) == 1])
    for rows, slots, horizon, lookups in ((200_000, 20_000, 3, 60_000), (50_000, 30_000, 40, 9000)):
        planner = Planner(rows, slots, 1, shards)
        empty = planner.metadata_bytes
        constant = shards * 16_384  # a block of entries and 64 batches
        assert empty <= 8 * rows + 32 * slots + constant
        sizes = []
        for _ in range(3 * horizon + 6):
            own = of_one[of_one < rows]
            batch = own[(rng.random(lookups) ** 2 * own.size).astype(np.int64)]
            sizes.append(np.unique(batch).size)
            planner.scan(batch)
            window = sum(sizes[max(0, planner.planned - 1) :])  # and the batch before, which is held
            assert planner.metadata_bytes <= 8 * rows + 32 * planner.cache_rows + 16 * window + constant
            if planner.window > horizon:
                planner.plan()


def test_metadata_stays_small_while_ids_move_from_shard_to_shard() -> None:
    rows, slots, shards = 100_000, 64_000, 16
    rng, replay = np.random.default_rng(0), Replay(1, one_shard=False)
    owner = np.array([k.shard_of(row, shards) for row in range(rows)])
    planner = Planner(rows, slots, 1, shards)
    batches: list[np.ndarray] = []
    most = 0
    for s in [*range(shards), 3, 0]:
        own = np.flatnonzero(owner == s)
        for _ in range(5):
            batches.append(rng.choice(own, 5000))
            planner.scan(batches[-1])
            window = sum(np.unique(batch).size for batch in batches[max(0, planner.planned - 1) :])
            most = max(most, window)
            assert planner.metadata_bytes <= 8 * rows + 32 * planner.cache_rows + 16 * most + shards * 16_384
            if planner.window > 2:
                replay.apply(planner.plan(), batches[planner.planned - 1])
                planner.check()


@pytest.mark.parametrize("shards", [1, 3])
def test_entry_numbers_wrap(shards: int) -> None:
    """Numbers are modulo 2^31; rows that were not seen for long are renumbered before they could look new."""
    rng = np.random.default_rng(shards)
    trace = random_trace(rng, 400, 120, 60, 0.6)

    def grow_old(planner: Planner) -> None:
        """As if 2^29 entries had been used up since by rows that nobody asks for again."""
        owner = np.array([k.shard_of(row, shards) for row in range(400)])
        every = planner._shards
        number = every.meta[1::2].astype(np.int64)
        for s in range(shards):
            head, tail = every.regs[s, k.HEAD], every.start[s, every.regs[s, k.RELEASED] & (every.start.shape[1] - 1)]
            old = (owner == s) & (((head - number) & k.MASK31) > head - tail)
            number[old] = (number[old] - k.UNSEEN) & k.MASK31
            every.regs[s, k.SWEPT] -= k.UNSEEN
        every.meta[1::2] = number

    def plans(start: int, every: int) -> list[Any]:
        planner = Planner(400, 150, 1, shards)
        planner._shards.regs[:, [k.HEAD, k.ORIGIN, k.SWEPT]] = start
        planner._shards.start[:] = start
        planner._shards.meta[1::2] = (start - k.UNSEEN) & k.MASK31
        out = []
        for batch in trace:
            planner.scan(np.asarray(batch, np.int64))
            if planner.window > 3:
                out.append(planner.plan())
            planner.check()
            if planner.scanned % every == 0:
                grow_old(planner)
        return out

    expected = plans(k.UNSEEN, 1000)
    same_plans(expected, plans((1 << 31) - 300, 1000))
    same_plans(expected, plans((1 << 31) - 900, 15))


@pytest.mark.parametrize("shards", SHARDS)
def test_shards(shards: int) -> None:
    rng = np.random.default_rng(shards)
    trace = random_trace(rng, 3000, 30, 400, 0.9)
    small = dedupe(trace)
    slots = 2 * smallest_cache(small, 1)
    replay, plans = drive(trace, 3000, slots, depth=1, horizon=10, shards=shards, every=3)
    assert replay.fills >= furthest_fills(small, slots, 1) or plans[-1].cache_rows > slots
    assert replay.fills <= 1.25 * window_fills(small, slots, 1, 10)


def test_everything_fits_no_evictions_no_waits() -> None:
    rng = np.random.default_rng(6)
    trace = random_trace(rng, 100, 30, 40)
    for horizon in (0, None):
        replay, plans = drive(trace, 100, 100, depth=2, horizon=horizon)
        assert replay.evicts == 0 and all(p.wait_for == -1 for p in plans)
        assert replay.fills == len({r for b in trace for r in b})


def test_needs_victim_before_a_batch_is_scanned() -> None:
    planner = Planner(100, 4, 0, 1)
    planner.scan(np.arange(4))
    planner.plan()
    assert not planner.needs_victim()
    planner.scan(np.arange(10, 14))
    assert planner.needs_victim(), "what was told of no batch is not told of this one"


def test_inputs_are_not_modified() -> None:
    rows = np.array([5, 1, 5, 2])
    planner = Planner(10, 4)
    planner.scan(rows)
    plan = planner.plan()
    assert rows.tolist() == [5, 1, 5, 2]
    rows[:] = 0
    assert sorted(plan.seg_row.tolist()) == [1, 2, 5]
    assert "batch 0" in str(plan) and "3 distinct" in str(plan)


def test_deeper_prefetch_needs_more_slots_only() -> None:
    """Holding more never helps: MIN(d) grows with d; with room for everything all are equal."""
    rng = np.random.default_rng(8)
    trace = random_trace(rng, 200, 40, 30, 0.5)
    slots = smallest_cache(dedupe(trace), 4)
    counts = [drive(trace, 200, slots, depth=d)[0].fills for d in range(5)]
    assert counts == sorted(counts)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_campaign_against_brute_force(seed: int) -> None:
    rng = np.random.default_rng([99, seed])
    for _ in range(250):
        rows = int(rng.integers(2, 12))
        trace = random_trace(rng, rows, int(rng.integers(1, 16)), int(rng.integers(1, 6)), float(rng.choice([0, 1.3])))
        small = dedupe(trace)
        depth = int(rng.integers(0, 5))
        slots = max(1, smallest_cache(small, depth)) + int(rng.integers(0, 4))
        assert drive(trace, rows, slots, depth=depth)[0].fills == brute_force_fills(small, slots, depth)
        assert held_rows(small, 0, depth) == set(small[0])


@pytest.mark.parametrize("shards", [1, 3])
def test_the_map_of_slots_is_the_callers(shards: int) -> None:
    planner = Planner(100, 12, 1, shards)
    planner.scan(np.arange(5))
    planner.plan()
    before = planner.slot_rows()
    kept = before.copy()
    planner.scan(np.arange(50, 55))
    planner.plan()
    assert np.array_equal(before, kept) and not np.array_equal(planner.slot_rows(), kept)
