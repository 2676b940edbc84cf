"""CPU kernels: lookup, checks, copies and segments (the update's are in cpu_update.py).

Each works on a range [lo, hi) of its owners (bags, rows, ...), so that any number of threads may
share the work without a lock and without a change of result.  No contraction and no fast-math: the
compiler may not fuse `a * b + c`, so every product and sum is rounded once.

Random rows miss every cache, so each loop asks for the rows it will need some lookups later.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .intrinsics import prefetch_read, prefetch_write

LINE = 16  # float32 values in a cache line
AHEAD = 24  # rows asked for ahead of use (24 x 256 B in flight is more than one core can track)
LANES = 32  # of a lane sum


@njit(nogil=True, cache=True, error_model="numpy")
def lane_sum_product(a, row_a, b, row_b, lanes):
    """Sum of a[row_a] * b[row_b] in 32 lanes, folded 16, 8, 4, 2, 1 (the same order on every device)."""
    dim = a.shape[1]
    for i in range(LANES):
        lanes[i] = np.float32(0.0)
    full = dim - dim % LANES
    for c in range(0, full, LANES):
        for i in range(LANES):
            lanes[i] += a[row_a, c + i] * b[row_b, c + i]
    for i in range(dim - full):
        lanes[i] += a[row_a, full + i] * b[row_b, full + i]
    half = LANES // 2
    while half > 0:
        for i in range(half):
            lanes[i] += lanes[i + half]
        half //= 2
    return lanes[0]


@njit(nogil=True, cache=True, error_model="numpy")
def lookup_single(weight, slots, out_row, weights, weighted, out, lo, hi):
    """Bags [lo, hi) of one lookup each: out[out_row[q]] = 0 + row (or 0 + weight * row)."""
    dim = weight.shape[1]
    for q in range(lo, hi):
        if q + AHEAD < hi:
            far, to = np.int64(slots[q + AHEAD]) * dim, np.int64(out_row[q + AHEAD]) * dim
            for c in range(0, dim, LINE):
                prefetch_read(weight, far + c)
                prefetch_write(out, to + c)
        slot, row = np.uint64(slots[q]), np.uint64(out_row[q])
        if weighted:
            scale = weights[q]
            for c in range(dim):
                out[row, c] = np.float32(0.0) + scale * weight[slot, c]
        else:
            for c in range(dim):
                out[row, c] = np.float32(0.0) + weight[slot, c]


@njit(nogil=True, cache=True, error_model="numpy")
def lookup_bags(weight, slots, starts, out_row, mean, batch_size, weights, weighted, out, lo, hi):
    """Bags [lo, hi) of any length: +0 plus the rows in order; mean bags divided once; empty bags 0."""
    dim = weight.shape[1]
    last = starts[hi]
    for q in range(lo, hi):
        row = np.uint64(out_row[q])
        begin, end = starts[q], starts[q + 1]
        for c in range(dim):
            out[row, c] = np.float32(0.0)
        for i in range(begin, end):
            if i + AHEAD < last:
                far = np.int64(slots[i + AHEAD]) * dim
                for c in range(0, dim, LINE):
                    prefetch_read(weight, far + c)
            slot = np.uint64(slots[i])
            if weighted:
                scale = weights[i]
                for c in range(dim):
                    out[row, c] += scale * weight[slot, c]
            else:
                for c in range(dim):
                    out[row, c] += weight[slot, c]
        if mean[q // batch_size] != 0 and end > begin:
            length = np.float32(end - begin)
            for c in range(dim):
                out[row, c] /= length


@njit(nogil=True, cache=True, error_model="numpy")
def scale_mean(starts, out_row, mean, batch_size, grad, out, lo, hi):
    """Bags [lo, hi): out[row] = grad[row], divided by the bag's length for mean bags."""
    dim = grad.shape[1]
    for q in range(lo, hi):
        row = np.uint64(out_row[q])
        length = np.float32(1.0)
        if mean[q // batch_size] != 0 and starts[q + 1] > starts[q]:
            length = np.float32(starts[q + 1] - starts[q])
        for c in range(dim):
            out[row, c] = grad[row, c] / length


@njit(nogil=True, cache=True, error_model="numpy")
def largest_magnitude(bits, lo, hi):
    """Largest |x| of [lo, hi) as the integer that orders like it; NaN and infinity are >= 0x7F800000."""
    largest = np.int32(0)
    for i in range(lo, hi):
        largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return largest


@njit(nogil=True, cache=True, error_model="numpy")
def weight_grad(weight, slots, lookup_row, grad, out, lo, hi):
    """Lookups [lo, hi): out = lane sum of grad[bag] * row."""
    dim = weight.shape[1]
    lanes = np.empty(LANES, np.float32)
    for i in range(lo, hi):
        if i + AHEAD < hi:
            far = np.int64(slots[i + AHEAD]) * dim
            for c in range(0, dim, LINE):
                prefetch_read(weight, far + c)
        out[i] = lane_sum_product(grad, np.uint64(lookup_row[i]), weight, np.uint64(slots[i]), lanes)


@njit(nogil=True, cache=True, error_model="numpy")
def gather_rows(dst, src, src_index, lo, hi):
    dim = dst.shape[1]
    for k in range(lo, hi):
        if k + AHEAD < hi:
            far = np.int64(src_index[k + AHEAD]) * src.shape[1]
            for c in range(0, dim, LINE):
                prefetch_read(src, far + c)
        row = np.uint64(src_index[k])
        for c in range(dim):
            dst[k, c] = src[row, c]


@njit(nogil=True, cache=True, error_model="numpy")
def scatter_rows(dst, dst_index, src, lo, hi):
    dim = dst.shape[1]
    for k in range(lo, hi):
        if k + AHEAD < hi:
            far = np.int64(dst_index[k + AHEAD]) * dim
            for c in range(0, dim, LINE):
                prefetch_write(dst, far + c)
        row = np.uint64(dst_index[k])
        for c in range(dim):
            dst[row, c] = src[k, c]


@njit(nogil=True, cache=True, error_model="numpy")
def move_rows(dst, dst_index, src, src_index, lo, hi):
    dim = dst.shape[1]
    for k in range(lo, hi):
        if k + AHEAD < hi:
            far, to = np.int64(src_index[k + AHEAD]) * dim, np.int64(dst_index[k + AHEAD]) * dim
            for c in range(0, dim, LINE):
                prefetch_read(src, far + c)
                prefetch_write(dst, to + c)
        row, target = np.uint64(src_index[k]), np.uint64(dst_index[k])
        for c in range(dim):
            dst[target, c] = src[row, c]


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
