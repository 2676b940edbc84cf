"""CPU kernels: lookup, checks, copies and segments (the update's are in cpu_update.py).

Each works on a range [lo, hi) of its owners (bags, rows, ...), so that any number of threads may
share the work without a lock and without a change of result.  No contraction and no fast-math: the
compiler may not fuse `a * b + c`, so every product and sum is rounded once.

Random rows miss every cache, so each loop asks for the rows it will need some lookups later.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .intrinsics import (
    add_row,
    add_scaled_row,
    copy_row,
    divide_row,
    lane_sum_product,
    prefetch_read,
    prefetch_write,
    start_row,
    start_scaled_row,
)

LINE = 16  # float32 values in a cache line
AHEAD = 16  # rows asked for ahead of their use
TILE = 32  # samples of a tile
NO_SCALE = np.float32(0.0)  # for row operations that have none


@njit(nogil=True, cache=True, error_model="numpy")
def lookup_single(weight, slots, out_row, batch_size, weights, weighted, out, lo, hi):
    """Bags of one lookup each, tiles [lo, hi) of TILE samples: out[out_row[q]] = 0 + row (or 0 + weight * row).

    A tile takes all features of its samples: its part of `out` is a few pages, written one after the other.
    """
    dim = weight.shape[1]
    for first in range(lo * TILE, hi * TILE, TILE):
        stop = min(first + TILE, batch_size)
        for begin in range(first, len(out_row), batch_size):
            end = begin + stop - first
            for q in range(begin, end):
                ahead = q + AHEAD
                if ahead >= end:  # goes on with the same samples of the next feature
                    ahead += batch_size - (stop - first)
                if ahead < len(out_row):
                    far, to = np.int64(slots[ahead]) * dim, np.int64(out_row[ahead]) * dim
                    for c in range(0, dim, LINE):
                        prefetch_read(weight, far + c)
                        prefetch_write(out, to + c)
                if weighted:
                    start_scaled_row(out, out_row[q], weight, slots[q], weights[q])
                else:
                    start_row(out, out_row[q], weight, slots[q], NO_SCALE)


@njit(nogil=True, cache=True, error_model="numpy")
def lookup_bags(weight, slots, starts, out_row, mean, batch_size, weights, weighted, out, lo, hi):
    """Bags [lo, hi) of any length: +0 plus the rows in order; mean bags divided once; empty bags 0."""
    dim = weight.shape[1]
    last = starts[hi]
    for q in range(lo, hi):
        row, begin, end = out_row[q], starts[q], starts[q + 1]
        if begin == end:
            out[row, :] = np.float32(0.0)
        for i in range(begin, end):
            if i + AHEAD < last:
                far = np.int64(slots[i + AHEAD]) * dim
                for c in range(0, dim, LINE):
                    prefetch_read(weight, far + c)
            if weighted:
                if i == begin:
                    start_scaled_row(out, row, weight, slots[i], weights[i])
                else:
                    add_scaled_row(out, row, weight, slots[i], weights[i])
            elif i == begin:
                start_row(out, row, weight, slots[i], NO_SCALE)
            else:
                add_row(out, row, weight, slots[i], NO_SCALE)
        if mean[q // batch_size] != 0 and end > begin:
            divide_row(out, row, out, row, np.float32(end - begin))


@njit(nogil=True, cache=True, error_model="numpy")
def scale_mean(starts, out_row, mean, batch_size, grad, out, lo, hi):
    """Bags [lo, hi): out[row] = grad[row], divided by the bag's length for mean bags."""
    for q in range(lo, hi):
        row, length = out_row[q], np.float32(starts[q + 1] - starts[q])
        if mean[q // batch_size] != 0 and length > 0:
            divide_row(out, row, grad, row, length)
        else:
            copy_row(out, row, grad, row, NO_SCALE)


@njit(nogil=True, cache=True, error_model="numpy")
def full_exponents(pairs, lo, hi):
    """Whether a float of pairs [lo, hi) (two float32 in an int64) is NaN or infinity.

    Such a float's exponent is all ones, so that adding one to it carries into its sign bit.
    """
    found = np.int64(0)
    part = pairs[lo:hi]  # indexed from 0: numba need not allow for negative numbers, and the loop vectorises
    for i in range(len(part)):
        found |= (part[i] & np.int64(0x7F8000007F800000)) + np.int64(0x0080000000800000)
    return (found & np.int64(-0x7FFFFFFF80000000)) != 0


@njit(nogil=True, cache=True, error_model="numpy")
def weight_grad(weight, slots, lookup_row, grad, out, lo, hi):
    """Lookups [lo, hi): out = lane sum of grad[bag] * row."""
    dim = weight.shape[1]
    for i in range(lo, hi):
        if i + AHEAD < hi:
            far = np.int64(slots[i + AHEAD]) * dim
            for c in range(0, dim, LINE):
                prefetch_read(weight, far + c)
        out[i] = lane_sum_product(grad, lookup_row[i], weight, slots[i])


@njit(nogil=True, cache=True, error_model="numpy")
def move_rows(dst, dst_index, src, src_index, lo, hi):
    """dst[dst_index[k]] = src[src_index[k]] for k in [lo, hi); an index of length 0 stands for k itself."""
    dim = dst.shape[1]
    scatter, gather = len(dst_index) > 0, len(src_index) > 0
    for k in range(lo, hi):
        if k + AHEAD < hi:
            if gather:
                far = np.int64(src_index[k + AHEAD]) * dim
                for c in range(0, dim, LINE):
                    prefetch_read(src, far + c)
            if scatter:
                to = np.int64(dst_index[k + AHEAD]) * dim
                for c in range(0, dim, LINE):
                    prefetch_write(dst, to + c)
        target = np.int64(dst_index[k]) if scatter else k
        source = np.int64(src_index[k]) if gather else k
        copy_row(dst, target, src, source, NO_SCALE)


# --- segments by stamping: no sort ----------------------------------------------------------------
#
# stamps[slot] holds the newest entry number of the slot plus a base that grows with every batch, so that
# no stamp needs clearing.  A part of the lookups [lo, hi) numbers its entries lo, lo + 1, ... (there are at
# most hi - lo), so that parts with disjoint slots can run in parallel.


@njit(nogil=True, cache=True, error_model="numpy")
def stamp_entries(slots, stamps, base, entry, entry_slot, count, lo, hi):
    """Number the distinct slots of lookups [lo, hi) in order of first use; returns how many there are.

    entry[i]: number of lookup i's slot; entry_slot[e], count[e]: slot and number of lookups of entry e.
    """
    used = lo
    for i in range(lo, hi):
        if i + 2 * AHEAD < hi:
            prefetch_write(stamps, np.int64(slots[i + 2 * AHEAD]))
        slot = np.uint64(slots[i])
        e = np.int64(stamps[slot]) - base
        if e < lo:
            e = used
            stamps[slot] = np.int32(base + used)
            entry_slot[used] = slot
            count[used] = 0
            used += 1
        entry[i] = e
        count[e] += 1
    return used - lo


@njit(nogil=True, cache=True, error_model="numpy")
def sort_entries(entry, entry_slot, count, used, first, seg_slot, seg_start, seg_lookup, lo, hi):
    """Counting sort of lookups [lo, hi) by entry number; `first` entries come before this part's."""
    at = lo
    for e in range(used):
        seg_slot[first + e] = entry_slot[lo + e]
        seg_start[first + e] = at
        length = count[lo + e]
        count[lo + e] = at
        at += length
    for i in range(lo, hi):
        e = entry[i]
        seg_lookup[count[e]] = i
        count[e] += 1
