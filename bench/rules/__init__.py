"""Which rows a cache holds: the rules of other caches and of ours, one a file, for `bench/rivals.py`.

Each file names where its rule comes from.  The rules are written anew from what those texts say, at batch
granularity: all rows of a batch are in the cache at once, so none of them is a victim for another of the same batch
(where a file does it otherwise, it says so).  Every rule starts with an empty cache, and every evicted row is dirty.
"""
