"""Caches simulated from ids alone: fills of any size, horizon, prefetch depth and policy, without training.

    trace (source or file) --uses.Uses--> distinct rows of each batch, with previous and next use
                           --caches-->    one simulated cache a configuration, all on the same distinct rows

Lookups are deduplicated once for all configurations, and rows are renumbered in the order of their first
use, so that a simulated cache needs 8 bytes a row that was ever used.  Memory does not grow with the length
of the trace.  Counts equal those of `cdlrm train` on the same ids (tested).
"""
