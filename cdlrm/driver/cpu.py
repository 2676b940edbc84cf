"""The CPU driver: numba kernels under our own threads.

A call cuts its work into ranges of about equal cost and hands them to a few threads; the calling
thread takes part.  Ranges are taken in order by whoever is free, so a busy core delays little.
Kernels release the GIL.  (numba's own `parallel=True` aborts when two Python threads use it.)
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .. import optim
from ..interrupt import interrupt_later
from ..lookups import Lookups
from ..machine import available_bytes
from . import cpu_kernels as kernels
from . import cpu_update
from .base import Driver, Records, Segments, Verdict, merged_rows, merged_weights

if TYPE_CHECKING:
    from ..step import Call
    from ..store import Store

_ALIGNMENT = 64
_SMALL_FLOATS = 1 << 16  # below this many values a second thread costs more than it saves
_RANGES_PER_THREAD = 4
_INT32_MAX = 2**31 - 1
_NO_WEIGHTS = np.empty(0, np.float32)
_NO_INDEX = np.empty(0, np.int32)


def stacked(calls: Sequence[Call]) -> np.ndarray:
    """The gradient matrices of `calls` below each other, float32 [R, D]."""
    grads = [call.grad.numpy() for call in calls if call.grad is not None]
    return grads[0] if len(grads) == 1 else np.concatenate(grads)


def _aligned(raw: np.ndarray, size: int) -> np.ndarray:
    """`size` bytes of `raw` from an address that is a multiple of 64."""
    skip = -raw.ctypes.data % _ALIGNMENT
    return raw[skip : skip + size]


class Known(Verdict):
    """A verdict of a device that answers at once."""

    def __init__(self, finite: bool) -> None:
        self.known = finite

    def __bool__(self) -> bool:
        return bool(self.known)

    def stand_in(self) -> Tensor:
        return torch.full((), 0.0 if self.known else float("inf"))


class CpuDriver(Driver):
    """Runs kernels on `threads` CPU threads (default: torch's number of threads).

    Besides the seam's methods it has the kernels on arrays, which `CpuRecords` and the stores use.
    """

    name = "cpu"
    device = torch.device("cpu")
    in_place = True

    def __init__(self, threads: int | None = None) -> None:
        self.threads = max(1, threads or torch.get_num_threads())
        self.host = self
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0

    # --- the seam ---

    def free_bytes(self) -> int:
        return available_bytes()

    def records(
        self, store: Store, bases: np.ndarray, optimizer: optim.Optimizer, *, in_place: bool = False
    ) -> Records:
        from .cpu_records import CpuRecords

        return CpuRecords(self, store, bases, in_place)

    def output(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        if dtype == torch.float32:
            return torch.from_numpy(self.empty(shape, np.float32))
        return torch.empty(shape, dtype=dtype)

    def finite(self, grads: Sequence[Tensor], raising: bool, where: str) -> Verdict:
        return Known(all(self.all_finite(grad.numpy()) for grad in grads))

    def sum_of_squares(self, calls: Sequence[Call], dim: int) -> float:
        """The sums are made by the update kernel itself: one step of SGD with lr -1 on rows of zeros."""
        rows, inverse = np.unique(np.concatenate([call.lookups.rows for call in calls]), return_inverse=True)
        segments = self.build_segments(inverse.astype(np.int32), self.new_stamps(len(rows)))
        lookups = [call.lookups for call in calls]
        weights = merged_weights(lookups)
        sums, none = np.zeros((len(rows), dim), np.float32), np.empty((len(rows), 0), np.float32)
        self.update(optim.SGD(lr=0.0), -1.0, sums, none, segments, merged_rows(lookups), stacked(calls), weights)
        return float(np.einsum("ij,ij->", sums, sums, dtype=np.float64))

    # --- memory ---

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """Uninitialised array, 64-byte aligned.  NumPy asks the kernel for huge pages for large ones."""
        count = int(np.prod(shape, dtype=np.int64))
        size = count * np.dtype(dtype).itemsize
        return _aligned(np.empty(size + _ALIGNMENT, np.uint8), size).view(dtype).reshape(shape)

    def copy_rows(
        self, dst: np.ndarray, dst_index: np.ndarray | None, src: np.ndarray, src_index: np.ndarray | None
    ) -> None:
        """dst[dst_index[k]] = src[src_index[k]] for all k (None: k itself); float32 [., D]; dst_index is unique."""
        if dst_index is None and src_index is None:
            dst[:] = src
            return
        if not (dst.flags.c_contiguous and src.flags.c_contiguous):  # views of padded records
            dst[slice(None) if dst_index is None else dst_index] = src if src_index is None else src[src_index]
            return
        count = len(src_index) if dst_index is None else len(dst_index)  # type: ignore[arg-type]
        to, of = (_NO_INDEX if index is None else index for index in (dst_index, src_index))
        self._run(
            self._even(count, count * dst.shape[1]),
            lambda lo, hi: kernels.move_rows(dst, to, src, of, lo, hi),
        )

    # --- forward ---

    def lookup(
        self, weight: np.ndarray, slots: np.ndarray, lookups: Lookups, weights: np.ndarray | None, out: np.ndarray
    ) -> None:
        """`Records.lookup` on arrays: weight float32 [C, D], out float32 [R, D], weights float32 [L] or None."""
        scale = _NO_WEIGHTS if weights is None else weights
        weighted = weights is not None
        starts = lookups.starts
        if starts is None:
            self._run(
                self._even(-(-lookups.batch_size // kernels.TILE), out.size),
                lambda lo, hi: kernels.lookup_single(
                    weight, slots, lookups.out_row, lookups.batch_size, scale, weighted, out, lo, hi
                ),
            )
        else:
            ranges = self._by_lookups(starts, weight.shape[1])
            self._run(
                ranges,
                lambda lo, hi: kernels.lookup_bags(
                    weight, slots, starts, lookups.out_row, lookups.mean, lookups.batch_size, scale, weighted, out, lo,
                    hi,
                ),  # fmt: skip
            )

    # --- backward ---

    def scale_mean(self, lookups: Lookups, grad: np.ndarray) -> np.ndarray:
        """grad float32 [R, D] with mean bags divided by their length: a copy, or grad itself if nothing changes."""
        starts = lookups.starts
        if starts is None or not lookups.mean.any():
            return grad
        out = np.empty_like(grad)
        self._run(
            self._even(len(lookups.out_row), grad.size),
            lambda lo, hi: kernels.scale_mean(
                starts, lookups.out_row, lookups.mean, lookups.batch_size, grad, out, lo, hi
            ),
        )
        return out

    def all_finite(self, array: np.ndarray) -> bool:
        """Whether a float32 array (any shape, C order) has neither NaN nor infinity."""
        flat = array.reshape(-1)
        paired = flat.size // 2 * 2
        pairs = flat[:paired].view(np.int64)
        found = [not np.isfinite(flat[paired:]).all()]
        self._run(
            self._even(len(pairs), paired),
            lambda lo, hi: found.append(kernels.full_exponents(pairs, lo, hi)),
        )
        return not any(found)

    def weight_grad(
        self, weight: np.ndarray, slots: np.ndarray, lookups: Lookups, grad: np.ndarray, out: np.ndarray
    ) -> None:
        """out float32 [L] = lane sum of `grad[bag] * row` (grad as returned by scale_mean, rows before the update)."""
        self._run(
            self._even(len(slots), len(slots) * weight.shape[1]),
            lambda lo, hi: kernels.weight_grad(weight, slots, lookups.lookup_row, grad, out, lo, hi),
        )

    def update(
        self,
        optimizer: optim.Optimizer,
        lr: float,
        weight: np.ndarray,
        state: np.ndarray,
        segments: Segments,
        lookup_row: np.ndarray,
        grad: np.ndarray,
        per_sample: np.ndarray | None = None,
        step_sizes: np.ndarray | None = None,
    ) -> None:
        """Sum every distinct row's gradients and apply `optimizer` to it, in place.

        weight float32 [C, D], state float32 [C, S], lookup_row int32 [L] (row of grad of each lookup), grad
        float32 [R, D] (as returned by scale_mean), per_sample float32 [L] or None, step_sizes float32 [T] or None
        (Adam: step size of each table, indexed by segments.seg_table).
        """
        rows = (segments.seg_slot, segments.seg_start, segments.seg_lookup)
        weighted = per_sample is not None
        gradient = (lookup_row, grad, _NO_WEIGHTS if per_sample is None else per_sample, weighted)
        rate, decay = np.float32(lr), np.float32(optimizer.weight_decay)
        kernel: Callable[[int, int], Any]
        if isinstance(optimizer, optim.SGD):

            def kernel(lo: int, hi: int) -> None:
                cpu_update.sgd(weight, state, rows, gradient, rate, decay, lo, hi)

        elif isinstance(optimizer, (optim.RowWiseAdagrad, optim.Adagrad)):
            row_wise = isinstance(optimizer, optim.RowWiseAdagrad)
            formula = cpu_update.row_wise_adagrad if row_wise else cpu_update.adagrad
            eps = np.float32(optimizer.eps)

            def kernel(lo: int, hi: int) -> None:
                formula(weight, state, rows, gradient, rate, decay, eps, lo, hi)

        elif isinstance(optimizer, optim.Adam):
            rate1, rate2 = (np.float32(1.0 - beta) for beta in optimizer.betas)
            eps = np.float32(optimizer.eps)
            if segments.seg_table is None or step_sizes is None:
                raise TypeError("Adam needs segments.seg_table and step_sizes")

            def kernel(lo: int, hi: int) -> None:
                cpu_update.adam(
                    weight, state, rows, gradient, segments.seg_table, step_sizes, rate1, rate2, decay, eps, lo, hi
                )

        else:
            raise TypeError(f"{type(optimizer).__name__} has no CPU kernel")
        self._run(self._by_lookups(segments.seg_start, weight.shape[1]), kernel)

    # --- segments ---

    def new_stamps(self, slots: int) -> np.ndarray:
        """Scratch for `build_segments` over `slots` places; keep one per cache.

        int32 [slots + 1]: the last element is the base of the next batch's stamps."""
        stamps = self.empty(slots + 1, np.int32)
        stamps[:] = -1
        stamps[-1] = 0
        return stamps

    def build_segments(self, slots: np.ndarray, stamps: np.ndarray, cuts: Sequence[int] = ()) -> Segments:
        """Group lookups by slot without a sort.  slots int32 (or int64) [L], all in [0, C), `stamps` of C or more.

        cuts: ascending lookup numbers at which no slot on the left occurs on the right (starts of tables, from
        `Lookups.feature_starts`): the work may be split there.  Rows come in order of first use.
        """
        count = len(slots)
        base = int(stamps[-1])
        if base > _INT32_MAX - count - 1:
            stamps[:] = -1
            base = 0
        stamps[-1] = base + count
        scratch = np.empty((3, count), np.int32)
        entry, entry_slot, tally = scratch[0], scratch[1], scratch[2]
        ranges = self._at_cuts(count, cuts)
        used: dict[int, int] = {}

        def stamp(lo: int, hi: int) -> None:
            used[lo] = kernels.stamp_entries(slots, stamps, base, entry, entry_slot, tally, lo, hi)

        self._run(ranges, stamp)
        first = dict(zip((lo for lo, _ in ranges), itertools.accumulate((used[lo] for lo, _ in ranges), initial=0),
                         strict=False))  # fmt: skip
        distinct = sum(used.values())
        seg_slot, seg_start, seg_lookup = (np.empty(n, np.int32) for n in (distinct, distinct + 1, count))
        seg_start[distinct] = count
        self._run(
            ranges,
            lambda lo, hi: kernels.sort_entries(
                entry, entry_slot, tally, used[lo], first[lo], seg_slot, seg_start, seg_lookup, lo, hi
            ),
        )
        return Segments(seg_slot, seg_start, seg_lookup)

    # --- threads ---

    def _even(self, count: int, cost: int) -> list[tuple[int, int]]:
        """Ranges of equal length over [0, count); one if the cost (values touched) is small."""
        parts = min(self.threads * _RANGES_PER_THREAD, count) if self.threads > 1 and cost >= _SMALL_FLOATS else 1
        edges = [count * k // parts for k in range(parts + 1)] if count else [0]
        return list(itertools.pairwise(edges))

    def _by_lookups(self, starts: np.ndarray, dim: int) -> list[tuple[int, int]]:
        """Ranges of owners (bags, rows) with about equal lookups; `starts` [n+1] ascends."""
        owners, total = len(starts) - 1, int(starts[-1])
        if owners <= 0:
            return []
        if self.threads == 1 or (total + owners) * dim < _SMALL_FLOATS:
            return [(0, owners)]
        parts = self.threads * _RANGES_PER_THREAD
        inner = np.searchsorted(starts, [total * k // parts for k in range(1, parts)]).tolist()
        edges = sorted({0, owners, *(min(edge, owners) for edge in inner)})
        return list(itertools.pairwise(edges))

    def _at_cuts(self, count: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """Ranges over [0, count) that begin at given places only, at most one a thread or so."""
        if count == 0:
            return []
        step = max(count // self.threads, _SMALL_FLOATS // 8)
        edges = [0]
        for cut in cuts:
            if 0 < cut < count and cut >= edges[-1] + step:
                edges.append(int(cut))
        return list(itertools.pairwise([*edges, count]))

    def _run(self, ranges: Sequence[tuple[int, int]], kernel: Callable[[int, int], Any]) -> None:
        """Call `kernel(lo, hi)` for every range, on this and the other threads; returns when all are done."""
        helpers = min(self.threads, len(ranges)) - 1
        if helpers < 1:
            for lo, hi in ranges:
                kernel(lo, hi)
            return
        waiting = iter(ranges)  # next() on a list iterator is atomic under the GIL

        def work() -> None:
            for lo, hi in waiting:
                kernel(lo, hi)

        # Ctrl-C waits: it would leave an update half made, and inside `submit` one of the pool's locks locked for ever.
        with interrupt_later():
            pool = self._threads()
            futures = [pool.submit(work) for _ in range(helpers)]
            try:
                work()
            finally:
                for future in futures:
                    if not future.cancel():  # not started yet: nothing is left for it
                        future.result()

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pool_process != os.getpid():  # threads do not survive a fork
            self._pool = ThreadPoolExecutor(max(1, self.threads - 1), thread_name_prefix="cdlrm-cpu")
            self._pool_process = os.getpid()
        return self._pool

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None and self._pool_process == os.getpid():
            pool.shutdown(wait=True)
