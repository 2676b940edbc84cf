"""CPU kernels of the backward pass: sum a row's gradients, then update the row, one formula each.

A row is written by one owner.  Its gradient is +0 plus the gradients of its lookups in lookup order, in
chunks of 256 whose sums are added in order.  (A sum that starts at +0 is never -0, so a row of at most one
chunk needs no second sum.)  See cpu_kernels.py for ranges, rounding and prefetch.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .base import GRADIENT_CHUNK
from .cpu_kernels import AHEAD, LANES, LINE, lane_sum_product
from .intrinsics import prefetch_read, prefetch_write


@njit(nogil=True, cache=True, error_model="numpy")
def _add_lookups(acc, k, seg_lookup, lookup_row, grad, per_sample, weighted, begin, end, last):
    """acc[k] = +0 plus the gradients of seg_lookup[begin:end] in order."""
    dim = grad.shape[1]
    for c in range(dim):
        acc[k, c] = np.float32(0.0)
    for j in range(begin, end):
        if j + AHEAD < last:
            far = np.int64(lookup_row[seg_lookup[j + AHEAD]]) * dim
            for c in range(0, dim, LINE):
                prefetch_read(grad, far + c)
        lookup = np.uint64(seg_lookup[j])
        row = np.uint64(lookup_row[lookup])
        if weighted:
            scale = per_sample[lookup]
            for c in range(dim):
                acc[k, c] += scale * grad[row, c]
        else:
            for c in range(dim):
                acc[k, c] += grad[row, c]


@njit(nogil=True, cache=True, error_model="numpy")
def _row_gradient(acc, weight, slot, decay, seg_lookup, lookup_row, grad, per_sample, weighted, begin, end, last):
    """acc[0] = the row's gradient, with weight decay; acc[1] is scratch."""
    dim = grad.shape[1]
    if end - begin <= GRADIENT_CHUNK:
        _add_lookups(acc, 0, seg_lookup, lookup_row, grad, per_sample, weighted, begin, end, last)
    else:
        for c in range(dim):
            acc[0, c] = np.float32(0.0)
        for chunk in range(begin, end, GRADIENT_CHUNK):
            stop = min(chunk + GRADIENT_CHUNK, end)
            _add_lookups(acc, 1, seg_lookup, lookup_row, grad, per_sample, weighted, chunk, stop, last)
            for c in range(dim):
                acc[0, c] += acc[1, c]
    if decay != np.float32(0.0):
        for c in range(dim):
            acc[0, c] += decay * weight[slot, c]


@njit(nogil=True, cache=True, error_model="numpy")
def sgd(weight, seg_slot, seg_start, seg_lookup, lookup_row, grad, per_sample, weighted, lr, decay, lo, hi):
    """w = w - lr * g."""
    dim = weight.shape[1]
    acc = np.empty((2, dim), np.float32)
    last = seg_start[hi]
    for u in range(lo, hi):
        if u + AHEAD < hi:
            far = np.int64(seg_slot[u + AHEAD]) * dim
            for c in range(0, dim, LINE):
                prefetch_write(weight, far + c)
        slot = np.uint64(seg_slot[u])
        _row_gradient(acc, weight, slot, decay, seg_lookup, lookup_row, grad, per_sample, weighted,
                      seg_start[u], seg_start[u + 1], last)  # fmt: skip
        for c in range(dim):
            weight[slot, c] -= lr * acc[0, c]


@njit(nogil=True, cache=True, error_model="numpy")
def row_wise_adagrad(
    weight, state, seg_slot, seg_start, seg_lookup, lookup_row, grad, per_sample, weighted, lr, decay, eps, lo, hi
):
    """s = s + mean(g * g); w = w - (lr / (sqrt(s) + eps)) * g."""
    dim = weight.shape[1]
    acc = np.empty((2, dim), np.float32)
    lanes = np.empty(LANES, np.float32)
    zero = np.uint64(0)
    last = seg_start[hi]
    for u in range(lo, hi):
        if u + AHEAD < hi:
            ahead = np.int64(seg_slot[u + AHEAD])
            prefetch_write(state, ahead)
            for c in range(0, dim, LINE):
                prefetch_write(weight, ahead * dim + c)
        slot = np.uint64(seg_slot[u])
        _row_gradient(acc, weight, slot, decay, seg_lookup, lookup_row, grad, per_sample, weighted,
                      seg_start[u], seg_start[u + 1], last)  # fmt: skip
        total = state[slot, 0] + lane_sum_product(acc, zero, acc, zero, lanes) / np.float32(dim)
        state[slot, 0] = total
        step = lr / (np.sqrt(total) + eps)
        for c in range(dim):
            weight[slot, c] -= step * acc[0, c]


@njit(nogil=True, cache=True, error_model="numpy")
def adagrad(
    weight, state, seg_slot, seg_start, seg_lookup, lookup_row, grad, per_sample, weighted, lr, decay, eps, lo, hi
):
    """s = s + g * g; w = w - (lr * g) / (sqrt(s) + eps)."""
    dim = weight.shape[1]
    acc = np.empty((2, dim), np.float32)
    last = seg_start[hi]
    for u in range(lo, hi):
        if u + AHEAD < hi:
            far = np.int64(seg_slot[u + AHEAD]) * dim
            for c in range(0, dim, LINE):
                prefetch_write(state, far + c)
                prefetch_write(weight, far + c)
        slot = np.uint64(seg_slot[u])
        _row_gradient(acc, weight, slot, decay, seg_lookup, lookup_row, grad, per_sample, weighted,
                      seg_start[u], seg_start[u + 1], last)  # fmt: skip
        for c in range(dim):
            g = acc[0, c]
            total = state[slot, c] + g * g
            state[slot, c] = total
            weight[slot, c] -= (lr * g) / (np.sqrt(total) + eps)


@njit(nogil=True, cache=True, error_model="numpy")
def adam(
    weight, state, seg_slot, seg_start, seg_lookup, seg_table, step_sizes, lookup_row, grad, per_sample, weighted,
    rate1, rate2, decay, eps, lo, hi,
):  # fmt: skip
    """m = m + rate1 * (g - m); v = v + rate2 * (g * g - v); w = w - (step_size * m) / (sqrt(v) + eps)."""
    dim = weight.shape[1]
    acc = np.empty((2, dim), np.float32)
    last = seg_start[hi]
    for u in range(lo, hi):
        if u + AHEAD < hi:
            far = np.int64(seg_slot[u + AHEAD]) * dim
            for c in range(0, dim, LINE):
                prefetch_write(state, 2 * far + c)
                prefetch_write(state, 2 * far + dim + c)
                prefetch_write(weight, far + c)
        slot = np.uint64(seg_slot[u])
        _row_gradient(acc, weight, slot, decay, seg_lookup, lookup_row, grad, per_sample, weighted,
                      seg_start[u], seg_start[u + 1], last)  # fmt: skip
        step = step_sizes[seg_table[u]]
        for c in range(dim):
            g = acc[0, c]
            m = state[slot, c] + rate1 * (g - state[slot, c])
            v = state[slot, dim + c] + rate2 * (g * g - state[slot, dim + c])
            state[slot, c] = m
            state[slot, dim + c] = v
            weight[slot, c] -= (step * m) / (np.sqrt(v) + eps)
