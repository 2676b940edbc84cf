"""The referee: embedding tables held whole, in plain NumPy, with the arithmetic of rule 9.

Written from the specification alone; it shares no code with the library.  Everything is float32
and every operation is rounded once.  `dtype=np.float64` gives a twin that computes the same
formulas in double precision, to measure rounding errors.

Only the *order of additions* matters here, so the loops run over positions (k-th lookup of every
bag, k-th lookup of every chunk) and are vectorised over everything else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CHUNK = 256
LANES = 32
Jagged = tuple[np.ndarray, "np.ndarray | None", "np.ndarray | None"]
Array = np.ndarray


def philox4x32(counter: Sequence[Array], key: tuple[int, int]) -> list[Array]:
    """Philox4x32-10 (Salmon et al. 2011): four uint32 counters (as uint64 arrays) -> four words."""
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) & mask for c in counter)
    k0, k1 = key[0] & 0xFFFFFFFF, key[1] & 0xFFFFFFFF
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * c0
        p1 = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & mask, (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & mask
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def initial_table(seed: int, table: int, rows: int, dim: int) -> Array:
    """Initial values float32 [rows, dim] of the `table`-th table of a collection."""
    blocks = -(-dim // 4)
    row = np.arange(rows, dtype=np.uint64)[:, None]
    block = np.arange(blocks, dtype=np.uint64)[None, :]
    row, block = np.broadcast_arrays(row, block)
    high = np.uint64(32)
    words = philox4x32([block, row, row >> high, np.full(row.shape, table, np.uint64)], (seed, seed >> 32))
    x = np.stack(words, axis=2).reshape(rows, 4 * blocks)[:, :dim]
    k = (x >> np.uint64(8)).astype(np.int64) - 2**23
    scale = np.float32(math.sqrt(1.0 / rows) * 2.0**-23) if rows else np.float32(0)
    return k.astype(np.float32) * scale


def _rounds(values: Array, starts: Array, lengths: Array) -> Array:
    """Sum values[starts[i] : starts[i] + lengths[i]] in order, from +0.0, for every i.  [n, dim]"""
    total = np.zeros((len(starts), values.shape[1]), values.dtype)
    live = np.flatnonzero(lengths > 0)
    long = live[lengths[live] > 4 * CHUNK]
    for i in long:  # add.accumulate is sequential by definition, so a few long sums need no round each
        part = values[starts[i] : starts[i] + lengths[i]]
        total[i] = np.add.accumulate(np.concatenate([total[i : i + 1], part]), axis=0, dtype=values.dtype)[-1]
    live = live[lengths[live] <= 4 * CHUNK]
    k = 0
    while len(live):
        total[live] += values[starts[live] + k]
        k += 1
        live = live[lengths[live] > k]
    return total


def lane_sum(x: Array) -> Array:
    """Sum of the last axis in 32 lanes: lane i adds elements i, i+32, … in order, then the fold.  [n]"""
    n, dim = x.shape
    lanes = np.zeros((n, LANES), x.dtype)
    for first in range(0, dim, LANES):
        part = x[:, first : first + LANES]
        lanes[:, : part.shape[1]] += part
    half = LANES // 2
    while half:
        lanes[:, :half] = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    return lanes[:, 0].copy()


def chunked_row_sums(rows: Array, grads: Array) -> tuple[Array, Array]:
    """Distinct rows (ascending) and the sum of each one's gradients, by chunks of 256 lookups."""
    order = np.argsort(rows, kind="stable")
    sorted_rows = rows[order]
    first = np.flatnonzero(np.concatenate([[True], sorted_rows[1:] != sorted_rows[:-1]])) if len(rows) else order
    count = np.diff(np.append(first, len(rows)))
    chunks = -(-count // CHUNK)
    chunk_first = np.cumsum(chunks) - chunks
    inside = np.arange(chunks.sum()) - np.repeat(chunk_first, chunks)  # number of the chunk within its row
    starts = np.repeat(first, chunks) + inside * CHUNK
    lengths = np.minimum(CHUNK, np.repeat(count, chunks) - inside * CHUNK)
    partial = _rounds(grads[order], starts, lengths)
    return sorted_rows[first], _rounds(partial, chunk_first, chunks)


class _Call:
    """One forward call: what it read, kept until its gradient arrives or it is forgotten."""

    def __init__(self, lookups: dict[str, tuple[Array, Array, Array, Array | None]], batch: int) -> None:
        self.lookups = lookups  # feature -> rows, bag of each lookup, bag lengths, weights
        self.batch = batch


class Oracle:
    """Whole tables and one optimizer, as `EmbeddingBagCollection(tables, optimizer=, seed=)` must behave."""

    def __init__(self, tables: Sequence[Any], optimizer: Any, seed: int = 0, dtype: type = np.float32) -> None:
        self.tables = list(tables)
        self.optimizer = optimizer
        self.lr = float(optimizer.lr)
        self.dtype = dtype
        self.features: list[str] = []
        self.table_of: dict[str, int] = {}
        for t, table in enumerate(self.tables):
            for feature in table.features or [table.name]:
                self.features.append(feature)
                self.table_of[feature] = t
        shapes = [(t.num_embeddings, t.embedding_dim) for t in self.tables]
        self.weights = [initial_table(seed, t, *shape).astype(dtype) for t, shape in enumerate(shapes)]
        self.states = [self._initial_state(*shape) for shape in shapes]
        self.steps = [0] * len(self.tables)
        self.calls: list[_Call] = []

    def _initial_state(self, rows: int, dim: int) -> dict[str, Array]:
        kind = self.optimizer.name
        if kind == "SGD":
            return {}
        if kind == "Adam":
            return {"exp_avg": np.zeros((rows, dim), self.dtype), "exp_avg_sq": np.zeros((rows, dim), self.dtype)}
        shape = (rows,) if kind == "RowWiseAdagrad" else (rows, dim)
        return {"sum": np.full(shape, self.optimizer.initial_accumulator_value, self.dtype)}

    def _number(self, value: float) -> Any:
        return self.dtype(value)

    def _index(self, name: str) -> int:
        return [t.name for t in self.tables].index(name)

    def weight(self, table: str) -> Array:
        return self.weights[self._index(table)]

    def state(self, table: str) -> dict[str, Array]:
        return self.states[self._index(table)]

    # ---- forward

    def lookup(self, inputs: Mapping[str, Jagged]) -> Array | dict[str, Array]:
        """Pooled output of one call without recording it (evaluation)."""
        return self._forward(inputs)[0]

    def forward(self, inputs: Mapping[str, Jagged]) -> Array | dict[str, Array]:
        """Pooled output [B, features, dim] (a dict feature -> [B, dim] when dims are mixed); recorded."""
        out, call = self._forward(inputs)
        self.calls.append(call)
        return out

    def forget(self) -> None:
        """The recorded calls get no gradient."""
        self.calls = []

    def _forward(self, inputs: Mapping[str, Jagged]) -> tuple[Array | dict[str, Array], _Call]:
        lookups = {}
        outs = {}
        batch = 0
        for feature in self.features:
            values, offsets, weights = (*inputs[feature], None, None)[:3]
            rows = np.asarray(values, np.int64)
            bounds = np.arange(len(rows) + 1) if offsets is None else np.asarray(offsets, np.int64)
            lengths = np.diff(bounds)
            batch = len(lengths)
            bag = np.repeat(np.arange(batch), lengths)
            per_sample = None if weights is None else np.asarray(weights, self.dtype)
            lookups[feature] = (rows, bag, lengths, per_sample)
            t = self.table_of[feature]
            picked = self.weights[t][rows]
            if per_sample is not None:
                picked = per_sample[:, None] * picked
            acc = _rounds(picked, bounds[:-1], lengths)
            outs[feature] = self._divide(acc, lengths, t)
        return self._pack(outs), _Call(lookups, batch)

    def _divide(self, bags: Array, lengths: Array, table: int) -> Array:
        if self.tables[table].pooling != "mean":
            return bags
        result = np.zeros_like(bags)
        full = lengths > 0
        result[full] = bags[full] / lengths[full].astype(self.dtype)[:, None]
        return result

    def _pack(self, outs: dict[str, Array]) -> Array | dict[str, Array]:
        if len({a.shape[1] for a in outs.values()}) == 1:
            return np.stack([outs[f] for f in self.features], axis=1)
        return outs

    # ---- backward

    def backward(self, *grads: Array | Mapping[str, Array] | None) -> list[dict[str, Array]]:
        """One update from the gradients of all recorded calls (None: that call gets none).

        Returns the gradients of the per-sample weights, feature -> [L], for each call.
        """
        assert len(grads) == len(self.calls), "one gradient (or None) per recorded call"
        calls, self.calls = self.calls, []
        rows: list[list[Array]] = [[] for _ in self.tables]
        sums: list[list[Array]] = [[] for _ in self.tables]
        weight_grads: list[dict[str, Array]] = []
        for call, grad in zip(calls, grads, strict=True):
            weight_grads.append({})
            if grad is not None:
                self._lookup_grads(call, grad, rows, sums, weight_grads[-1])
        if any(g is not None for g in grads):
            for t in range(len(self.tables)):
                self.steps[t] += 1
                if rows[t]:
                    self._update(t, *chunked_row_sums(np.concatenate(rows[t]), np.concatenate(sums[t])))
        return weight_grads

    def _lookup_grads(
        self, call: _Call, grad: Any, rows: list[list[Array]], sums: list[list[Array]], weight_grads: dict[str, Array]
    ) -> None:
        for f, feature in enumerate(self.features):
            t = self.table_of[feature]
            ids, bag, lengths, per_sample = call.lookups[feature]
            out_grad = grad[feature] if isinstance(grad, Mapping) else grad[:, f]
            bags = self._divide(np.asarray(out_grad, self.dtype), lengths, t)
            each = bags[bag]
            if per_sample is not None:
                weight_grads[feature] = lane_sum(each * self.weights[t][ids])
                each = per_sample[:, None] * each
            rows[t].append(ids)
            sums[t].append(each)

    def _update(self, t: int, rows: Array, g: Array) -> None:
        one = self._number
        opt, kind = self.optimizer, self.optimizer.name
        w = self.weights[t][rows]
        state = self.states[t]
        lr = one(self.lr)
        if opt.weight_decay != 0:
            g = g + one(opt.weight_decay) * w
        if kind == "SGD":
            w = w - lr * g
        elif kind == "RowWiseAdagrad":
            s = state["sum"][rows] + lane_sum(g * g) / one(w.shape[1])
            state["sum"][rows] = s
            w = w - (lr / (np.sqrt(s) + one(opt.eps)))[:, None] * g
        elif kind == "Adagrad":
            s = state["sum"][rows] + g * g
            state["sum"][rows] = s
            w = w - (lr * g) / (np.sqrt(s) + one(opt.eps))
        else:
            b1, b2 = opt.betas
            step = self.steps[t]
            size = one(self.lr * (math.sqrt(1.0 - b2**step) / (1.0 - b1**step)))
            m, v = state["exp_avg"][rows], state["exp_avg_sq"][rows]
            m = m + one(1.0 - b1) * (g - m)
            v = v + one(1.0 - b2) * (g * g - v)
            state["exp_avg"][rows], state["exp_avg_sq"][rows] = m, v
            w = w - (size * m) / (np.sqrt(v) + one(opt.eps))
        self.weights[t][rows] = w
