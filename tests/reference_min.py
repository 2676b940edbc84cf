"""Referees for the planner: the fewest fills that any policy can reach, LRU, and furthest next use.

All work on a trace = list of batches, a batch = list of distinct rows in order of first occurrence,
and count a *fill* whenever a row of a batch is not in the cache when that batch is brought in.
When batch j is brought in, all rows of batches j-d .. j must be in the cache; it starts empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

Trace = Sequence[Sequence[int]]


def distinct(rows: Sequence[int]) -> list[int]:
    """Distinct values in order of first occurrence."""
    return list(dict.fromkeys(int(r) for r in rows))


def held_rows(trace: Trace, j: int, depth: int) -> set[int]:
    """Rows that must be in the cache while batch j is brought in."""
    return {r for batch in trace[max(0, j - depth) : j + 1] for r in batch}


def smallest_cache(trace: Trace, depth: int) -> int:
    """Slots that the holds of `depth` need at most."""
    return max((len(held_rows(trace, j, depth)) for j in range(len(trace))), default=0)


def brute_force_fills(trace: Trace, slots: int, depth: int) -> int:
    """Fewest fills over all choices of victims, by search over every cache content (small traces only).

    Keeping a row that could be kept never hurts (dropping it later is always possible), so only
    contents of the largest size are followed; nothing else is assumed.
    """
    assert slots >= smallest_cache(trace, depth), "the holds must fit"
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for j, batch in enumerate(trace):
        held = held_rows(trace, j, depth)
        following: dict[frozenset[int], int] = {}
        for content, cost in states.items():
            cost += len(set(batch) - content)
            optional = content - held
            keep = min(len(optional), slots - len(held))
            for kept in combinations(sorted(optional), keep):
                state = frozenset(kept) | held
                if following.get(state, math.inf) > cost:
                    following[state] = cost
        states = following
    return min(states.values())


def furthest_fills(trace: Trace, slots: int, depth: int) -> int:
    """Fills of furthest-next-use-first under the holds, with the whole trace known.

    Where the holds of `depth` do not fit, the cache grows to what the batch itself needs and the
    oldest holds give way; use it with caches that are large enough.
    """
    uses: dict[int, list[int]] = {}
    for j, batch in enumerate(trace):
        for row in batch:
            uses.setdefault(row, []).append(j)
    position = dict.fromkeys(uses, 0)
    content: set[int] = set()
    fills = 0
    for j, batch in enumerate(trace):
        for row in batch:
            position[row] += 1
        missing = [r for r in batch if r not in content]
        fills += len(missing)
        content.update(missing)
        excess = len(content) - slots
        if excess > 0:
            held = held_rows(trace, j, depth)

            def next_use(row: int) -> float:
                return uses[row][position[row]] if position[row] < len(uses[row]) else math.inf

            victims = sorted((r for r in content if r not in held), key=next_use, reverse=True)[:excess]
            assert len(victims) == excess, "the holds must fit"
            content.difference_update(victims)
    return fills


def lru_fills(trace: Trace, slots: int, depth: int) -> int:
    """Fills of least-recently-used at batch granularity under the same holds.

    Victims in order of last use; among rows last used by one batch, in order of their first
    occurrence in it.
    """
    content: dict[int, None] = {}  # in order of last use, oldest first
    fills = 0
    for j, batch in enumerate(trace):
        held = held_rows(trace, j, depth)
        missing = [r for r in batch if r not in content]
        fills += len(missing)
        excess = len(content) + len(missing) - slots
        if excess > 0:
            victims = [r for r in content if r not in held][:excess]
            assert len(victims) == excess, "the holds must fit"
            for row in victims:
                del content[row]
        for row in batch:
            content.pop(row, None)
            content[row] = None
    return fills


def window_fills(trace: Trace, slots: int, depth: int, horizon: int) -> int:
    """Fills when plan j sees batches up to j + horizon: rows unused in the window go first, in LRU
    order, then furthest next use.  (Ties of next use do not change the count: both rows return.)
    """
    content: dict[int, None] = {}  # in order of last use
    fills = 0
    for j, batch in enumerate(trace):
        held = held_rows(trace, j, depth)
        next_use: dict[int, int] = {}
        for k in range(min(len(trace) - 1, j + horizon), j, -1):
            next_use.update(dict.fromkeys(trace[k], k))
        missing = [r for r in batch if r not in content]
        fills += len(missing)
        excess = len(content) + len(missing) - slots
        if excess > 0:
            free = [r for r in content if r not in held]
            unused = [r for r in free if r not in next_use]
            known = sorted((r for r in free if r in next_use), key=next_use.__getitem__, reverse=True)
            victims = (unused + known)[:excess]
            assert len(victims) == excess, "the holds must fit"
            for row in victims:
                del content[row]
        for row in batch:
            content.pop(row, None)
            content[row] = None
    return fills
