"""All stages in one thread, in a random order: neither results nor plans may depend on the order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import Oracle
from scenarios import (
    backward,
    random_grad,
    random_inputs,
    random_optimizer,
    random_shape,
    random_tables,
    same_bits,
    same_tables,
    to_torch,
)

import cdlrm
from cdlrm.ahead import Lookahead
from cdlrm.runtime import Pipeline


def shuffled_rounds(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Each round of the stages runs them in an order of its own, some not at all."""
    rng = np.random.default_rng(seed)

    def run(line: Pipeline) -> None:
        worked = False
        for number in rng.permutation(len(line.stages)):
            for _ in range(int(rng.integers(0, 4))):
                worked = line.stages[number].step() or worked
        if not worked and not any([stage.step() for stage in line.stages]):
            line.patience = 0.0

    monkeypatch.setattr(Pipeline, "run_stages", run)


def run(seed: int, threads: bool) -> tuple[Any, list[str]]:
    """One training run with an oracle beside it; the tables and the text of every plan."""
    rng = np.random.default_rng(seed)
    tables = random_tables(rng, [1, 3, 8])
    optimizer = random_optimizer(rng)
    shape = random_shape(rng, tables)
    inputs = [random_inputs(rng, tables, shape) for _ in range(25)]
    horizon, depth, rows = int(rng.integers(0, 30)), int(rng.integers(0, 5)), int(rng.integers(1, 40))
    shards = int(2 ** rng.integers(0, 3))
    ebc = cdlrm.EmbeddingBagCollection(tables, optimizer=optimizer, cache_rows=rows, shards=shards, seed=0)
    oracle = Oracle(tables, optimizer, seed=0)
    plans: list[str] = []
    for group in ebc.groups:
        plan_next = group.plan_next

        def noting(short: bool = False, plan_next: Any = plan_next) -> Any:
            plan = plan_next(short)
            arrays = (plan.slots, plan.fill_rows, plan.fill_slots, plan.evict_rows, plan.seg_lookup)
            moves = [a.tolist() for a in arrays]
            plans.append(f"{plan} {moves} {plan.wait_for}")
            return plan

        group.plan_next = noting  # type: ignore[method-assign]
    batches = [to_torch(one) for one in inputs]
    grads = np.random.default_rng(seed + 1)
    for one, batch in zip(inputs, Lookahead(ebc, batches, horizon=horizon, prefetch_depth=depth, threads=threads),
                          strict=True):  # fmt: skip
        out = ebc(batch)
        want = oracle.forward(one)
        same_bits(out, want, "output")
        ebc.check()
        grad = random_grad(grads, want)
        backward(out, grad)
        oracle.backward(grad)
    same_tables(ebc, oracle, f"seed {seed}")
    assert ebc.stats()["unannounced"] == 0 and ebc.stats()["short_windows"] == 0
    state = ebc.state_dict()
    ebc.close()
    return state, plans


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_the_stages(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state, plans = run(seed, threads=True)
    for order in range(4):
        shuffled_rounds(monkeypatch, 100 * seed + order)
        other, same = run(seed, threads=False)
        assert same == plans, "plans depend on the order of the stages"
        for key in state:
            same_bits(other[key], state[key], key)
