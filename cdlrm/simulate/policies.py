"""Look-ahead caches with other rules beyond the horizon than LRU: for comparison, and to choose the default from.

`lfu` halves all use counts every `HALF_LIFE` batches; `frequency` never forgets; `s3fifo` is S3-FIFO-like.  All see
every use of a row, also while it is not cached (S3-FIFO: its ghosts only).
"""

from __future__ import annotations

import numpy as np

from . import kernels as k
from . import policy_kernels as p
from .auto import AutoWindow
from .caches import LookAheadCache
from .uses import Stretch, grown

HALF_LIFE = 32  # batches
NEVER = 1 << 40  # score of a class when nothing is forgotten: above every batch number
POLICIES = ("lfu", "frequency", "s3fifo")


class PolicyCache(LookAheadCache):
    """`policy`: one of `POLICIES`.  The cache is one shard whatever its size."""

    def __init__(
        self,
        policy: str,
        cache_rows: int,
        horizon: int | AutoWindow,
        depth: int,
        tables: int,
        half_life: int = HALF_LIFE,
    ) -> None:
        super().__init__(cache_rows, horizon, depth, tables)
        self.policy, self.half_life = policy, half_life
        self.shards, self.per_shard, self.slots = 1, cache_rows, cache_rows
        self.parts = self.parts[:1]
        self.parts[0].regs = np.zeros(11, np.int64)
        self.parts[0].regs[p.FREE_NODE] = -1
        self.node = np.zeros((0, 4), np.int32)
        self.queue = np.array([[-1, -1, 0]] * (2 if policy == "s3fifo" else p.QUEUES), np.int64)
        self.at = np.full(1024, -1, np.int32)
        self.count, self.counted = np.zeros(1024, np.float32), np.zeros(1024, np.int32)
        self.main, self.ghost = np.zeros(1024, np.uint8), np.zeros(1024, np.int64)

    def _run(self, number: int, stretch: Stretch, slots: np.ndarray, far: np.ndarray) -> None:
        part, split = self.parts[number], stretch.splits[self.shards]
        part.make_room(stretch.rows, 1, self._bucket_size)
        self.at = grown(self.at, stretch.rows, -1)
        for name in ("count", "counted", "main", "ghost"):
            setattr(self, name, grown(getattr(self, name), stretch.rows, 0))
        self._more_nodes(2 * self.slots + 2, part.regs)
        rule = p.S3FIFO if self.policy == "s3fifo" else p.SCORED
        forgets = self.policy == "lfu"
        p.look_ahead(
            rule, self.half_life // 2 if forgets else NEVER, 1.0 / self.half_life if forgets else 0.0, stretch.begin,
            stretch.end, stretch.first_batch, split.lo[0], split.hi[0], split.row, split.following, stretch.first,
            far, self.depth, slots, self.state, part.bucket, part.regs, self.node, self.queue, self.at, self.count,
            self.counted, self.main, self.ghost, stretch.table, part.fills_by_table,
        )  # fmt: skip

    def _more_nodes(self, nodes: int, regs: np.ndarray) -> None:
        """New nodes are chained in front of the free ones."""
        old = self.node.shape[0]
        if nodes > old:
            self.node = np.concatenate([self.node, np.zeros((nodes - old, 4), np.int32)])
            self.node[old:, 3] = np.append(np.arange(old + 1, nodes), regs[p.FREE_NODE])
            regs[p.FREE_NODE] = old

    def results(self) -> list[dict[str, object]]:
        return [{**result, "policy": self.policy} for result in super().results()]


assert k.PEAK < p.FREE_NODE  # the registers of both kernels lie in one array
