"""Window, planner and plan: which rows to copy and evict for each batch, by next use.

The rules of the whole library, which comments and tests name by their numbers:

1. A row's newest value is in exactly one place: while it is cached the cache is right and the store's copy is old.
2. Plans are made in batch order, from ids and settings alone: no clock, no thread timing, no device.  (Batches that
   come late may shorten the window; that changes which rows move, never a result.)
3. A row is evicted after the update of the last batch that used it, and before any later fill of it.
4. A slot is filled after what was in it was evicted, and batch j computes after its fills.
5. Executing plan j waits only for batches before j, so nothing deadlocks.
6. One row, one slot; duplicates are merged before anything is copied; every scatter has one writer for a target.
7. A plan fixes rows, slots and order.  What is written is decided when the transfer is issued: a record is dirty
   when an update that contains it was launched, and clean records are not written back.
8. Planner and trainer see the same batch object; data is read once; inputs are never modified.
9. One arithmetic everywhere: float32, every multiply and add rounded once, no contraction; a bag adds its rows in
   order, a row's gradients are added in lookup order in chunks of 256, then the chunks' sums in order; correctly
   rounded square root and division.  So NumPy, numba and CUDA give the same bits.
"""

from .minimum import MinCounter
from .plan import Plan, check_plan
from .planner import Planner, shards_for

__all__ = ["MinCounter", "Plan", "Planner", "check_plan", "shards_for"]
