"""The optimizers against torch's own on sparse modules, and the drop-ins' bits against the oracle."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from dropin import OPTIMIZERS, random_bags, relative, torch_optimizer, twins
from oracle import Oracle
from scenarios import random_optimizer, same_bits
from torch import Tensor

import cdlrm

STEPS = 200
LIMIT = 1e-5

SPECS = {
    "sgd": cdlrm.SGD(lr=0.1),
    "adagrad": cdlrm.Adagrad(lr=0.05),
    "adagrad started": cdlrm.Adagrad(lr=0.1, eps=1e-6, initial_accumulator_value=0.1),
    "adam": cdlrm.Adam(lr=0.003),
    "adam other betas": cdlrm.Adam(lr=0.01, betas=(0.8, 0.99), eps=1e-6),
}


def torch_step(theirs: Any, update: torch.optim.Optimizer, out: Tensor, grad: Tensor) -> None:
    update.zero_grad()
    out.backward(grad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        update.step()


def gradient(rng: np.random.Generator, out: Tensor) -> Tensor:
    return torch.from_numpy((rng.standard_normal(tuple(out.shape)) * 0.3).astype(np.float32))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_two_hundred_steps_are_torchs(name: str, mode: str) -> None:
    """With ids twice in a batch and in a bag, empty bags, and batches of empty bags only."""
    rng = np.random.default_rng(7)
    spec = SPECS[name]
    ours, theirs = twins("EmbeddingBag", 60, 8, {"optimizer": spec, "cache_rows": 40}, mode=mode)
    update = torch_optimizer(spec, theirs.parameters())
    for k in range(STEPS):
        values, offsets = random_bags(rng, 60, 8, most=0 if k % 50 == 7 else 5)
        mine, reference = ours(values, offsets), theirs(values, offsets)
        grad = gradient(rng, mine)
        mine.backward(grad)
        torch_step(theirs, update, reference, grad)
    assert relative(ours.weight, theirs.weight) <= LIMIT
    state = update.state[theirs.weight]
    for key, value in ours.table_state("EmbeddingBag").items():
        assert relative(value, state[key]) <= LIMIT, key
    assert ours.stats()["grows"] == 0
    ours.check()


def schedules() -> dict[str, Any]:
    s = torch.optim.lr_scheduler
    return {
        "step": lambda o: s.StepLR(o, 17, gamma=0.6),
        "lambda": lambda o: s.LambdaLR(o, lambda k: 1 / (1 + 0.02 * k)),
        "exponential": lambda o: s.ExponentialLR(o, 0.99),
        "cosine": lambda o: s.CosineAnnealingLR(o, 50),
        "one cycle": lambda o: s.OneCycleLR(o, 0.2, total_steps=STEPS + 1, cycle_momentum=False),
        "warm-up then decay": lambda o: s.SequentialLR(
            o, [s.LinearLR(o, 0.1, total_iters=20), s.ExponentialLR(o, 0.98)], milestones=[20]
        ),
        "restarts": lambda o: s.CosineAnnealingWarmRestarts(o, 30),
    }


@pytest.mark.parametrize("schedule", schedules())
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_torchs_schedules(schedule: str, name: str) -> None:
    rng = np.random.default_rng(8)
    spec = SPECS[name]
    ours, theirs = twins("EmbeddingBag", 30, 4, {"optimizer": spec, "cache_rows": 20}, mode="sum")
    update = torch_optimizer(spec, theirs.parameters())
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when a scheduler's optimizer was never stepped
        mine_schedule = schedules()[schedule](ours.optimizer)
        for _ in range(60):
            values, offsets = random_bags(rng, 30, 5)
            out = ours(values, offsets)
            grad = gradient(rng, out)
            out.backward(grad)
            rates.append(ours.optimizer.param_groups[0]["lr"])
            mine_schedule.step()
    rng = np.random.default_rng(8)
    schedule_of_theirs = schedules()[schedule](update)
    for k in range(60):
        values, offsets = random_bags(rng, 30, 5)
        out = theirs(values, offsets)
        assert update.param_groups[0]["lr"] == pytest.approx(rates[k], rel=1e-12)
        torch_step(theirs, update, out, gradient(rng, out))
        schedule_of_theirs.step()
    assert len(set(rates)) > 2 and relative(ours.weight, theirs.weight) <= LIMIT


def test_plateau_and_the_schedules_state() -> None:
    ours, _ = twins("EmbeddingBag", 10, 4, mode="sum")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(ours.optimizer, factor=0.5, patience=0)
    for _ in range(3):
        plateau.step(1.0)
    assert ours.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    state = ours.optimizer.state_dict()
    other, _ = twins("EmbeddingBag", 10, 4, mode="sum")
    other.optimizer.load_state_dict(state)
    before = other.weight.clone()
    other(torch.tensor([[1]])).sum().backward()
    torch.testing.assert_close(before[1] - other.weight[1], torch.full((4,), 0.025), rtol=1e-4, atol=1e-7)


def test_optimizer_and_lr_of_each_table() -> None:
    rng = np.random.default_rng(9)
    specs = {"a": cdlrm.SGD(lr=0.1), "b": cdlrm.Adam(lr=0.01), "c": cdlrm.Adagrad(lr=0.2), "d": cdlrm.SGD(lr=0.03)}
    tables = [cdlrm.Table(name, 30, 4) for name in specs]
    ebc = cdlrm.EmbeddingBagCollection(tables, optimizer=specs, cache_rows=100)
    assert len(ebc.optimizer.param_groups) == 4
    assert [group["tables"] for group in ebc.optimizer.param_groups] == [["a"], ["b"], ["c"], ["d"]]
    theirs = {name: torch.nn.EmbeddingBag(30, 4, mode="sum", sparse=True) for name in specs}
    for name, module in theirs.items():
        module.load_state_dict({"weight": ebc.state_dict()[f"embedding_bags.{name}.weight"]})
    updates = {name: torch_optimizer(spec, theirs[name].parameters()) for name, spec in specs.items()}
    for k in range(STEPS):
        if k == 100:  # by hand, for one table alone
            ebc.optimizer.param_groups[3]["lr"] = updates["d"].param_groups[0]["lr"] = 0.3
        bags = {name: random_bags(rng, 30, 5) for name in specs}
        closed = {name: (values, torch.cat([offsets, torch.tensor([len(values)])]))
                  for name, (values, offsets) in bags.items()}  # fmt: skip
        out = ebc(closed)
        grad = gradient(rng, out)
        out.backward(grad)
        for f, name in enumerate(specs):
            torch_step(theirs[name], updates[name], theirs[name](*bags[name]), grad[:, f])
    for name in specs:
        assert relative(ebc.table_weight(name), theirs[name].weight) <= LIMIT, name
    ebc.close()


def test_adam_counts_the_steps_of_each_table_as_sparse_adam() -> None:
    """A step without the table does not count for it, a step with empty bags only does."""
    bag = cdlrm.EmbeddingBag(6, 2, mode="sum", optimizer=cdlrm.Adam(lr=0.1))
    reference = torch.nn.EmbeddingBag(6, 2, mode="sum", sparse=True)
    reference.load_state_dict(bag.state_dict())
    update = torch.optim.SparseAdam(reference.parameters(), lr=0.1)
    empty = torch.empty(0, dtype=torch.int64)
    for values, offsets in ((torch.tensor([1, 2]), torch.tensor([0, 1])), (empty, torch.tensor([0, 0])),
                            (empty, torch.tensor([0, 0])), (torch.tensor([1, 3]), torch.tensor([0, 2]))):  # fmt: skip
        out = bag(values, offsets)
        out.sum().backward()
        torch_step(reference, update, reference(values, offsets), torch.ones_like(out))
    assert relative(bag.weight, reference.weight) < 1e-6


# --- weight decay: torch has none for sparse gradients; the referee is the resident mode, and the oracle -


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_touches_only_the_rows_of_the_batch(name: str) -> None:
    spec = type(OPTIMIZERS[name])(lr=0.1, weight_decay=0.5)
    plain = OPTIMIZERS[name]
    modules = [cdlrm.EmbeddingBag(10, 4, mode="sum", optimizer=s, cache_rows=c, seed=2)
               for s, c in ((spec, "auto"), (spec, 6), (type(plain)(lr=0.1), 6))]  # fmt: skip
    before = modules[0].weight.clone()
    for module in modules:
        for _ in range(3):
            module(torch.tensor([[1, 2], [2, 3]])).square().sum().backward()
    assert torch.equal(modules[0].weight, modules[1].weight)
    moved = (modules[0].weight != before).any(1)
    assert moved.nonzero().flatten().tolist() == [1, 2, 3]
    assert not torch.equal(modules[1].weight, modules[2].weight)


def test_weight_decay_by_hand() -> None:
    module = cdlrm.Embedding(5, 3, optimizer=cdlrm.SGD(lr=0.1, weight_decay=0.5))
    before = module.weight.clone()
    module(torch.tensor([1, 1])).sum().backward()
    expected = before.clone()
    expected[1] = before[1] - 0.1 * (2.0 + 0.5 * before[1])
    torch.testing.assert_close(module.weight.clone(), expected)


# --- bits: cached = resident = oracle ---------------------------------------------------------------


def oracle_twin(module: Any, kind: str, spec: Any, mean: bool) -> Oracle:
    table = cdlrm.Table(kind, module.num_embeddings, module.embedding_dim, pooling="mean" if mean else "sum")
    oracle = Oracle([table], spec)
    oracle.weights[0] = module.weight.numpy().copy()
    return oracle


@pytest.mark.parametrize("seed", range(40))
def test_bags_have_the_oracles_bits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec = random_optimizer(rng)
    kind = str(rng.choice(["EmbeddingBag", "Embedding"]))
    mean = kind == "EmbeddingBag" and rng.random() < 0.5
    rows, dim = int(rng.integers(1, 50)), int(rng.choice([1, 3, 8, 33]))
    settings: dict[str, Any] = {"mode": "mean" if mean else "sum"} if kind == "EmbeddingBag" else {}
    resident, cached = (
        getattr(cdlrm, kind)(rows, dim, optimizer=spec, cache_rows=c, seed=seed, **settings)
        for c in ("auto", int(rng.integers(1, rows + 1)))
    )
    oracle = oracle_twin(resident, kind, spec, mean)
    weighted = kind == "EmbeddingBag" and not mean and rng.random() < 0.5
    for step in range(8):
        if kind == "Embedding":
            values, offsets = rng.integers(0, rows, rng.integers(0, 9)), None
        else:
            lengths = rng.integers(0, 5, int(rng.integers(1, 6)))
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            values = rng.integers(0, rows, int(lengths.sum()))
        weights = rng.standard_normal(len(values)).astype(np.float32) if weighted else None
        expected = oracle.forward({kind: (values, offsets, weights)})[:, 0]
        grad = rng.standard_normal(expected.shape).astype(np.float32)
        weight_grads = oracle.backward(grad[:, None])[0]
        for module in (resident, cached):
            if kind == "Embedding":
                out = module(torch.from_numpy(values))
            else:
                leaf = None if weights is None else torch.from_numpy(weights.copy()).requires_grad_()
                out = module(torch.from_numpy(values), torch.from_numpy(offsets[:-1].copy()), leaf)
            same_bits(out, expected, f"step {step}: output")
            out.backward(torch.from_numpy(grad.copy()))
            if weighted:
                same_bits(leaf.grad, weight_grads[kind], f"step {step}: gradient of the weights")
    for module in (resident, cached):
        same_bits(module.weight.clone(), oracle.weight(kind), "weight")
        for key, value in module.table_state(kind).items():
            theirs = oracle.state(kind)[key]
            same_bits(value.reshape(rows, -1), theirs.reshape(rows, -1), key)
        module.check()
