"""libCacheSim's own SIEVE, S3-FIFO and W-TinyLFU (package `libcachesim`), fed with the distinct rows of every batch.

The library knows no batches: it may evict a row that the running batch still needs, which no training can use.  It is
here so that nobody has to believe our sieve.py, s3fifo.py and wtinylfu.py.
"""

from __future__ import annotations

from .base import Moved, Uses

NAMES = {"SIEVE": "Sieve", "S3-FIFO": "S3FIFO", "W-TinyLFU": "WTinyLFU"}


def available() -> bool:
    try:
        import libcachesim  # noqa: F401
    except ImportError:
        return False
    return True


def moved(uses: Uses, slots: int, name: str) -> Moved:
    """`name`: one of `NAMES`.  Raises ImportError where the package is not installed."""
    import libcachesim

    cache = getattr(libcachesim, NAMES[name])(cache_size=slots, hashpower=16)
    request = libcachesim.Request()
    request.obj_size = 1
    fills = 0
    for rows in uses.batches:
        for row in rows.tolist():
            request.obj_id = row + 1
            fills += not cache.get(request)
    return Moved(fills, fills - int(cache.get_n_obj()))
