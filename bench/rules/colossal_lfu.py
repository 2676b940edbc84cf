"""ColossalAI, `EvictionStrategy.LFU`: a counter a slot, set to 0 when a row is filled into it.

Source: hpcaitech/ColossalAI, colossalai/legacy/nn/parallel/layers/cache_embedding/cache_mgr.py (`prepare_ids`,
`_find_evict_gpu_idxs`, `_prepare_rows_on_cuda`): duplicates count, rows of the batch are masked, the least counters
go by `torch.topk`, which does not say which of equal ones (here: the one not used for longer).  Its preload of 70 %
of the cache before the training is left out: it would move rows, too.
"""

from __future__ import annotations

import numpy as np

from .base import Moved, Uses, run
from .lfu import Lfu


class InCacheLfu(Lfu):
    def used(self, batch: int, missing: np.ndarray) -> None:
        self.count[self.uses.batches[batch][missing]] = 0
        super().used(batch, missing)


def moved(uses: Uses, slots: int) -> Moved:
    return run(InCacheLfu(uses, slots))
