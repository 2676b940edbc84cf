"""Any order of public calls: after each one the structure is sound, and every table equals the oracle."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from oracle import Oracle
from scenarios import InputShape, random_grad, random_inputs, same_bits, same_tables, set_lr, to_torch

import cdlrm
from cdlrm.errors import PipelineError

SPECS = [cdlrm.SGD(lr=0.2), cdlrm.RowWiseAdagrad(lr=0.1), cdlrm.Adagrad(lr=0.1), cdlrm.Adam(lr=0.05)]
SEEDS = st.integers(0, 2**32 - 1)


class LoaderBroke(Exception):
    pass


def by_name(out: Any, grad: Any) -> list[tuple[Any, Any]]:
    return [(out[f], grad[f]) for f in out] if isinstance(out, dict) else [(out, grad)]


class Training(RuleBasedStateMachine):
    """A user at the keyboard; `self.oracle` is what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = set(threading.enumerate())
        self.ebc: Any = None
        self.look: Any = None
        self.batch: int | None = None  # number of the batch in hand
        self.trained_in_batch = False
        self.fails_at: int | None = None

    @initialize(
        spec=st.sampled_from(SPECS),
        cache_rows=st.sampled_from([1, 8, 20, 40, 100]),
        shards=st.sampled_from([None, 1, 2, 8]),
        mixed=st.booleans(),
        seed=SEEDS,
    )
    def make(self, spec: Any, cache_rows: int, shards: int | None, mixed: bool, seed: int) -> None:
        self.tables = [
            cdlrm.Table("a", 30, 3),
            cdlrm.Table("b", 50, 5 if mixed else 3, pooling="mean", features=["b1", "b2"]),
            cdlrm.Table("c", 7, 3, resident=seed % 2 == 0),
        ]
        self.shape = InputShape(max_batch=4, max_bag=3, weighted={"b2"} if seed % 3 == 0 else set())
        options = {"optimizer": spec, "cache_rows": cache_rows, "shards": shards, "device": "cpu", "seed": seed % 100}
        self.ebc = cdlrm.EmbeddingBagCollection(self.tables, **options)
        self.oracle = Oracle(self.tables, spec, seed % 100)

    # ---- helpers

    def inputs(self, seed: int) -> Any:
        return random_inputs(np.random.default_rng(seed), self.tables, self.shape)

    def step(self, calls: list[tuple[Any, Any]], seed: int) -> None:
        """Forward every (inputs, torch batch), then one backward over all."""
        rng = np.random.default_rng(seed)
        wants = [self.oracle.forward(inputs) for inputs, _ in calls]
        outs = [self.ebc(batch) for _, batch in calls]
        grads = [random_grad(rng, want) for want in wants]
        for out, want in zip(outs, wants, strict=True):
            same_bits(out, want, "output")
        pairs = [(o, g) for out, grad in zip(outs, grads, strict=True) for o, g in by_name(out, grad)]
        torch.autograd.backward([o for o, _ in pairs], [torch.from_numpy(g.copy()) for _, g in pairs])
        self.oracle.backward(*grads)

    def end_look(self) -> None:
        self.look = self.batch = self.fails_at = None

    # ---- the calls

    @precondition(lambda self: self.look is None)
    @rule(
        count=st.integers(0, 12),
        fails=st.booleans(),
        horizon=st.sampled_from([1, 2, 4, 20]),
        depth=st.integers(0, 4),
        seed=SEEDS,
    )
    def open_lookahead(self, count: int, fails: bool, horizon: int, depth: int, seed: int) -> None:
        self.epoch = [self.inputs(seed + j) for j in range(count)]
        self.epoch_torch = [to_torch(i) for i in self.epoch]
        batches = list(self.epoch_torch)
        release = self.release = threading.Event()
        self.fails_at = count if fails else None

        def loader() -> Iterator[Any]:
            yield from batches
            if fails:  # only when the last batch is in hand, so that the moment does not depend on timing
                release.wait(30)
                raise LoaderBroke("broke")

        self.look = cdlrm.lookahead(self.ebc, loader(), horizon=horizon, prefetch_depth=depth)
        self.batch = None

    @precondition(lambda self: self.look is not None)
    @rule(repeat=st.integers(1, 3), train=st.booleans(), seed=SEEDS)
    def advance(self, repeat: int, train: bool, seed: int) -> None:
        for _ in range(repeat):
            at = -1 if self.batch is None else self.batch
            last = at == len(self.epoch) - 1
            if last:
                self.release.set()
            try:
                got = next(self.look)
            except StopIteration:
                assert last and self.fails_at is None
                self.end_look()
                return
            except PipelineError as error:
                assert last and self.fails_at is not None and isinstance(error.__cause__, LoaderBroke)
                self.end_look()
                return
            self.batch = at + 1
            self.trained_in_batch = False
            assert got is self.epoch_torch[self.batch]
            if train:
                self.train_announced(1, seed)

    @precondition(lambda self: self.batch is not None and not self.trained_in_batch)
    @rule(calls=st.integers(1, 3), seed=SEEDS)
    def train_announced(self, calls: int, seed: int) -> None:
        inputs = self.epoch[self.batch]
        # Each call needs weights of its own: gradients of one leaf would be added up.
        batches = [self.epoch_torch[self.batch]] + [to_torch(inputs) for _ in range(calls - 1)]
        self.step([(inputs, b) for b in batches], seed)
        self.trained_in_batch = True

    @precondition(lambda self: self.batch is not None and not self.trained_in_batch)
    @rule(seed=SEEDS, both=st.booleans())
    def train_unannounced(self, seed: int, both: bool) -> None:
        other = self.inputs(seed)
        calls = [(other, to_torch(other))]
        if both:
            calls.insert(0, (self.epoch[self.batch], self.epoch_torch[self.batch]))
        self.step(calls, seed)
        self.trained_in_batch = True

    @precondition(lambda self: self.batch is not None and not self.trained_in_batch)
    @rule()
    def forward_without_backward(self) -> None:
        same_bits(self.ebc(self.epoch_torch[self.batch]), self.oracle.lookup(self.epoch[self.batch]), "output")
        self.trained_in_batch = True

    @precondition(lambda self: self.look is None)
    @rule(seed=SEEDS, calls=st.integers(1, 2))
    def train_on_demand(self, seed: int, calls: int) -> None:
        inputs = [self.inputs(seed + c) for c in range(calls)]
        self.step([(i, to_torch(i)) for i in inputs], seed)

    @rule(seed=SEEDS)
    def evaluate(self, seed: int) -> None:
        inputs = self.inputs(seed)
        with torch.no_grad():
            same_bits(self.ebc(to_torch(inputs)), self.oracle.lookup(inputs), "evaluation")

    @rule()
    def flush(self) -> None:
        self.ebc.flush()

    @rule()
    def read_tables(self) -> None:
        same_tables(self.ebc, self.oracle, "state_dict in the middle")

    @rule(lr=st.sampled_from([0.0, 0.01, 0.3]))
    def change_lr(self, lr: float) -> None:
        set_lr(self.ebc, lr)
        self.oracle.lr = lr

    @precondition(lambda self: self.look is not None)
    @rule(explicit=st.booleans())
    def leave_early(self, explicit: bool) -> None:
        self.release.set()
        if explicit:
            self.look.close()
        self.end_look()

    @invariant()
    def structure_is_sound(self) -> None:
        if self.ebc is not None:
            self.ebc.check()

    def teardown(self) -> None:
        if self.ebc is None:
            return
        if self.look is not None:
            self.release.set()
            self.look.close()
        self.ebc.check()
        same_tables(self.ebc, self.oracle, "at the end")
        self.ebc.close()
        survivors = set(threading.enumerate()) - self.threads
        assert not survivors, f"threads survive: {survivors}"


def campaign(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Training,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_order_of_calls() -> None:
    campaign(60, 30)


@pytest.mark.long
def test_many_orders_of_calls() -> None:
    campaign(2000, 60)
