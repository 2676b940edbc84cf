"""CPU kernels of the backward pass: sum a row's gradients, then update the row, one formula each.

Rows are handled in blocks: `_sum_block` adds the gradients of a few rows into a buffer that stays in the
first-level cache and asks for the rows themselves, which have arrived when the formula is applied.  A row is
written by one owner.  See cpu_kernels.py for ranges, rounding and prefetch.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .cpu_kernels import AHEAD, LINE, NO_SCALE
from .intrinsics import (
    add_row,
    add_scaled_row,
    lane_sum_product,
    prefetch_read,
    prefetch_write,
    start_row,
    start_scaled_row,
    subtract_scaled_row,
)

BLOCK = 32  # rows
# Lookups of one row whose gradients are added before the chunk sums are (rule 9).  It stands here, since numba
# compiles a kernel anew only when the kernel's own file changes.
GRADIENT_CHUNK = 256


@njit(nogil=True, cache=True, error_model="numpy")
def _sum_block(acc, weight, state, segments, gradients, decay, lo, hi, last):
    """acc[u - lo] = gradient of row u for u in [lo, hi); acc[BLOCK] is scratch.

    A gradient is +0 plus those of the row's lookups in lookup order, in chunks of 256 whose sums are added in
    order.  (A sum that starts at +0 is never -0, so a row of one chunk needs no second sum.)
    """
    seg_slot, seg_start, seg_lookup = segments
    lookup_row, grad, per_sample, weighted = gradients
    dim, width = weight.shape[1], state.shape[1]
    for u in range(lo, hi):
        slot = np.int64(seg_slot[u])
        for c in range(0, dim, LINE):
            prefetch_write(weight, slot * dim + c)
        for c in range(0, width, LINE):
            prefetch_write(state, slot * width + c)
        begin, end = np.int64(seg_start[u]), np.int64(seg_start[u + 1])
        for j in range(begin, end):
            if j + AHEAD < last:
                far = np.int64(lookup_row[np.uint64(seg_lookup[j + AHEAD])]) * dim
                for c in range(0, dim, LINE):
                    prefetch_read(grad, far + c)
            lookup = np.uint64(seg_lookup[j])
            row = np.int64(lookup_row[lookup])
            place = (j - begin) % GRADIENT_CHUNK
            k = u - lo if j - begin < GRADIENT_CHUNK else BLOCK
            if weighted:
                if place == 0:
                    start_scaled_row(acc, k, grad, row, per_sample[lookup])
                else:
                    add_scaled_row(acc, k, grad, row, per_sample[lookup])
            elif place == 0:
                start_row(acc, k, grad, row, NO_SCALE)
            else:
                add_row(acc, k, grad, row, NO_SCALE)
            if k == BLOCK and (place == GRADIENT_CHUNK - 1 or j == end - 1):
                add_row(acc, u - lo, acc, BLOCK, NO_SCALE)
        if decay != np.float32(0.0):
            add_scaled_row(acc, u - lo, weight, slot, decay)


@njit(nogil=True, cache=True, error_model="numpy")
def sgd(weight, state, segments, gradients, lr, decay, lo, hi):
    """w = w - lr * g, rows [lo, hi)."""
    seg_slot, last = segments[0], segments[1][hi]
    acc = np.empty((BLOCK + 1, weight.shape[1]), np.float32)
    for first in range(lo, hi, BLOCK):
        stop = min(first + BLOCK, hi)
        _sum_block(acc, weight, state, segments, gradients, decay, first, stop, last)
        for u in range(first, stop):
            subtract_scaled_row(weight, seg_slot[u], acc, u - first, lr)


@njit(nogil=True, cache=True, error_model="numpy")
def row_wise_adagrad(weight, state, segments, gradients, lr, decay, eps, lo, hi):
    """s = s + mean(g * g); w = w - (lr / (sqrt(s) + eps)) * g, rows [lo, hi)."""
    seg_slot, last = segments[0], segments[1][hi]
    dim = np.float32(weight.shape[1])
    acc = np.empty((BLOCK + 1, weight.shape[1]), np.float32)
    for first in range(lo, hi, BLOCK):
        stop = min(first + BLOCK, hi)
        _sum_block(acc, weight, state, segments, gradients, decay, first, stop, last)
        for u in range(first, stop):
            slot, k = np.int64(seg_slot[u]), u - first
            total = state[slot, 0] + lane_sum_product(acc, k, acc, k) / dim
            state[slot, 0] = total
            subtract_scaled_row(weight, slot, acc, k, lr / (np.sqrt(total) + eps))


@njit(nogil=True, cache=True, error_model="numpy")
def adagrad(weight, state, segments, gradients, lr, decay, eps, lo, hi):
    """s = s + g * g; w = w - (lr * g) / (sqrt(s) + eps), rows [lo, hi)."""
    seg_slot, last = segments[0], segments[1][hi]
    acc = np.empty((BLOCK + 1, weight.shape[1]), np.float32)
    for first in range(lo, hi, BLOCK):
        stop = min(first + BLOCK, hi)
        _sum_block(acc, weight, state, segments, gradients, decay, first, stop, last)
        for u in range(first, stop):
            slot, k = np.uint64(seg_slot[u]), u - first
            for c in range(weight.shape[1]):
                g = acc[k, c]
                total = state[slot, c] + g * g
                state[slot, c] = total
                weight[slot, c] -= (lr * g) / (np.sqrt(total) + eps)


@njit(nogil=True, cache=True, error_model="numpy")
def adam(weight, state, segments, gradients, seg_table, step_sizes, rate1, rate2, decay, eps, lo, hi):
    """m = m + rate1 * (g - m); v = v + rate2 * (g * g - v); w = w - (step_size * m) / (sqrt(v) + eps)."""
    seg_slot, last = segments[0], segments[1][hi]
    dim = weight.shape[1]
    acc = np.empty((BLOCK + 1, dim), np.float32)
    for first in range(lo, hi, BLOCK):
        stop = min(first + BLOCK, hi)
        _sum_block(acc, weight, state, segments, gradients, decay, first, stop, last)
        for u in range(first, stop):
            slot, k, step = np.uint64(seg_slot[u]), u - first, step_sizes[seg_table[u]]
            for c in range(dim):
                g = acc[k, c]
                m = state[slot, c] + rate1 * (g - state[slot, c])
                v = state[slot, dim + c] + rate2 * (g * g - state[slot, dim + c])
                state[slot, c] = m
                state[slot, dim + c] = v
                weight[slot, c] -= (step * m) / (np.sqrt(v) + eps)
