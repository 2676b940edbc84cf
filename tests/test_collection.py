"""`EmbeddingBagCollection` against torch, and what a user sees of it (points 4 and 6)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Oracle, initial_table
from scenarios import (
    InputShape,
    backward,
    random_grad,
    random_inputs,
    same_bits,
    same_tables,
    set_lr,
    to_torch,
    train_step,
)
from torch import nn

import cdlrm
from cdlrm.errors import CacheTooSmallError, ConfigError, NonFiniteGradientError, UsageError

STEPS = 200


def collection(tables: list[cdlrm.Table], **options: Any) -> Any:
    options.setdefault("optimizer", cdlrm.SGD(lr=0.1))
    options.setdefault("device", "cpu")
    options.setdefault("seed", 0)
    return cdlrm.EmbeddingBagCollection(tables, **options)


@contextmanager
def opened(tables: list[cdlrm.Table], **options: Any) -> Iterator[Any]:
    ebc = collection(tables, **options)
    try:
        yield ebc
        ebc.check()
    finally:
        ebc.close()


def relative_error(mine: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))


# ---- against torch


def torch_rival(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=0.1)
    if name == "Adagrad":
        return torch.optim.Adagrad(parameters, lr=0.1)
    return torch.optim.SparseAdam(parameters, lr=0.01)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize(
    ("name", "spec", "bound"),
    [
        ("SGD", cdlrm.SGD(lr=0.1), 1e-6),
        ("Adagrad", cdlrm.Adagrad(lr=0.1), 1e-5),
        ("Adam", cdlrm.Adam(lr=0.01), 1e-5),
    ],
)
def test_against_torch(name: str, spec: Any, bound: float, pooling: str) -> None:
    """200 steps with duplicates and empty bags on nn.EmbeddingBag(sparse=True)."""
    rng = np.random.default_rng(7)
    tables = [cdlrm.Table("a", 100, 16, pooling=pooling), cdlrm.Table("b", 30, 16, pooling=pooling)]
    ebc = collection(tables, optimizer=spec, cache_rows=70, seed=3)
    start = ebc.state_dict()
    bags = {t.name: nn.EmbeddingBag(t.num_embeddings, 16, mode=pooling, sparse=True) for t in tables}
    for key, bag in bags.items():
        with torch.no_grad():
            bag.weight.copy_(start[f"embedding_bags.{key}.weight"])
    rival = torch_rival(name, [b.weight for b in bags.values()])
    shape = InputShape(max_batch=16, max_bag=4, zipf=0.8, empty_batches=False)
    loader = [to_torch(random_inputs(rng, tables, shape)) for _ in range(STEPS)]
    for batch in cdlrm.lookahead(ebc, loader, horizon=8):
        out = ebc(batch)
        grad = torch.from_numpy(random_grad(rng, out)) * 0.1
        out.backward(grad)
        rival.zero_grad()
        theirs = torch.stack([bags[f](v, o[:-1]) for f, (v, o) in batch.items()], dim=1)
        torch.testing.assert_close(out.detach(), theirs.detach(), rtol=1e-4, atol=1e-5)
        theirs.backward(grad)
        rival.step()
    end = ebc.state_dict()
    for key, bag in bags.items():
        mine, other = end[f"embedding_bags.{key}.weight"].numpy(), bag.weight.detach().numpy()
        assert relative_error(mine, other) <= bound
        assert relative_error(mine, start[f"embedding_bags.{key}.weight"].numpy()) > 0.05, "nothing was learned"
    ebc.close()


def test_row_wise_adagrad_against_float64() -> None:
    rng = np.random.default_rng(8)
    tables = [cdlrm.Table("a", 60, 32), cdlrm.Table("b", 20, 32, pooling="mean")]
    spec = cdlrm.RowWiseAdagrad(lr=0.05)
    ebc = collection(tables, optimizer=spec, cache_rows=50)
    double = Oracle(tables, spec, dtype=np.float64)
    shape = InputShape(max_batch=8, max_bag=4, zipf=0.8, empty_batches=False)
    for _ in range(STEPS):
        inputs = random_inputs(rng, tables, shape)
        out = double.forward(inputs)
        grad = random_grad(rng, out)
        double.backward(grad)
        train_step(ebc, to_torch(inputs), grad)
    for t in tables:
        weight = ebc.state_dict()[f"embedding_bags.{t.name}.weight"].numpy()
        assert relative_error(weight, double.weight(t.name)) <= 2e-6
        assert relative_error(ebc.table_state(t.name)["sum"].numpy(), double.state(t.name)["sum"]) <= 2e-6
    ebc.close()


# ---- forms of input

TABLES = [cdlrm.Table("a", 20, 4), cdlrm.Table("b", 30, 4, pooling="mean", features=["b1", "b2"])]


def one_batch(seed: int = 0, weighted: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    names = {"a", "b1", "b2"} if weighted else set()
    return random_inputs(rng, TABLES, InputShape(max_batch=5, weighted=names, empty_batches=False))


class FakeKeyedJaggedTensor:
    """What TorchRec's KeyedJaggedTensor offers: keys, values, lengths, offsets, weights, stride."""

    def __init__(self, inputs: dict[str, Any], order: list[str]) -> None:
        self._keys = order
        self._values = torch.cat([torch.from_numpy(inputs[f][0]) for f in order])
        self._lengths = torch.cat([torch.from_numpy(np.diff(inputs[f][1])) for f in order])
        weights = [inputs[f][2] for f in order]
        self._weights = None if weights[0] is None else torch.cat([torch.from_numpy(w) for w in weights])
        self._stride = len(inputs[order[0]][1]) - 1

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def lengths(self) -> torch.Tensor:
        return self._lengths

    def offsets(self) -> torch.Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self._lengths.cumsum(0)])

    def weights(self) -> torch.Tensor:
        assert self._weights is not None
        return self._weights

    def weights_or_none(self) -> torch.Tensor | None:
        return self._weights

    def stride(self) -> int:
        return self._stride


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("order", [["a", "b1", "b2"], ["b2", "a", "b1"]])
def test_keyed_jagged_tensor(weighted: bool, order: list[str]) -> None:
    inputs = one_batch(1, weighted)
    with opened(TABLES, cache_rows=40) as ebc:
        kjt = FakeKeyedJaggedTensor(inputs, order)
        oracle = Oracle(TABLES, cdlrm.SGD(lr=0.1))
        out = oracle.forward(inputs)
        grad = random_grad(np.random.default_rng(0), out)
        got = ebc(kjt)
        same_bits(got, out, "output")
        backward(got, grad)
        oracle.backward(grad)
        same_tables(ebc, oracle, "after the step")
        for _ in cdlrm.lookahead(ebc, [kjt]):
            same_bits(ebc(kjt), oracle.lookup(inputs), "in lookahead")


def test_batch_and_mapping_and_dtypes_give_the_same() -> None:
    inputs = one_batch(2)
    outs = []
    with opened(TABLES) as ebc:
        for dtype in (torch.int32, torch.int64):
            outs.append(ebc(to_torch(inputs, dtype)))
        mixed = {f: (torch.from_numpy(v).int(), torch.from_numpy(o)) for f, (v, o, _) in inputs.items()}
        outs.append(ebc(mixed))
        sparse = {f: cdlrm.Jagged(torch.from_numpy(v), torch.from_numpy(o)) for f, (v, o, _) in inputs.items()}
        size = len(inputs["a"][1]) - 1
        outs.append(ebc(cdlrm.Batch(torch.zeros(size, 0), torch.zeros(size), sparse)))
    for other in outs[1:]:
        same_bits(other, outs[0], "output")


def test_one_hot_forms() -> None:
    ids = torch.tensor([3, 1, 3])
    offsets = torch.arange(4)
    with opened([cdlrm.Table("a", 5, 3)]) as ebc:
        want = ebc({"a": (ids, offsets)})
        same_bits(ebc({"a": ids}), want, "bare tensor")
        same_bits(ebc({"a": (ids,)}), want, "values only")
        same_bits(ebc({"a": (ids, None)}), want, "no offsets")
        same_bits(ebc({"a": cdlrm.Jagged(ids)}), want, "Jagged")
        assert want.shape == (3, 1, 3) and want.dtype == torch.float32


def test_shapes_and_feature_order() -> None:
    with opened(TABLES) as ebc:
        assert list(ebc.features) == ["a", "b1", "b2"]
        out = ebc({f: torch.tensor([0, 1]) for f in ("b2", "b1", "a")})
        assert out.shape == (2, 3, 4)
        weight = ebc.state_dict()["embedding_bags.a.weight"]
        same_bits(out[:, 0], weight[:2], "column of feature a")
        assert ebc({f: torch.empty(0, dtype=torch.int64) for f in ebc.features}).shape == (0, 3, 4)


def test_mixed_dims_give_a_mapping() -> None:
    tables = [cdlrm.Table("a", 9, 3), cdlrm.Table("b", 9, 5), cdlrm.Table("c", 9, 3)]
    oracle = Oracle(tables, cdlrm.SGD(lr=0.1))
    inputs = random_inputs(np.random.default_rng(0), tables, InputShape(empty_batches=False))
    with opened(tables, cache_rows=12) as ebc:
        want = oracle.forward(inputs)
        out = ebc(to_torch(inputs))
        assert isinstance(out, dict) and list(out) == ["a", "b", "c"]
        same_bits(out, want, "output")
        backward(out, grad := random_grad(np.random.default_rng(1), want))
        oracle.backward(grad)
        same_tables(ebc, oracle, "mixed dims")


def test_mixed_dims_only_one_output_used() -> None:
    """Autograd sends nothing for the other outputs: their rows must not move."""
    tables = [cdlrm.Table("a", 9, 3), cdlrm.Table("b", 9, 5)]
    with opened(tables) as ebc:
        before = {k: v.clone() for k, v in ebc.state_dict().items()}
        ebc({"a": torch.tensor([1]), "b": torch.tensor([1])})["a"].sum().backward()
        after = ebc.state_dict()
        same_bits(after["embedding_bags.b.weight"], before["embedding_bags.b.weight"], "b")
        assert not torch.equal(after["embedding_bags.a.weight"], before["embedding_bags.a.weight"])


def test_gradient_of_per_sample_weights() -> None:
    """Finite differences of a loss in the weights (lr = 0, so the tables stand still)."""
    rng = np.random.default_rng(3)
    inputs = one_batch(3, weighted=True)
    with opened(TABLES, optimizer=cdlrm.SGD(lr=0.0)) as ebc:
        batch = to_torch(inputs)
        out = ebc(batch)
        grad = torch.from_numpy(random_grad(rng, out))
        out.backward(grad)
        for feature in ebc.features:
            analytic = batch[feature][2].grad
            assert analytic is not None
            for i in range(len(analytic)):
                losses = []
                for h in (0.5, -0.5):  # the loss is linear in each weight: any step is exact up to rounding
                    moved = {f: tuple(p.detach().clone() for p in parts) for f, parts in batch.items()}
                    moved[feature][2][i] += h
                    with torch.no_grad():
                        losses.append(float((ebc(moved).double() * grad.double()).sum()))
                assert abs(losses[0] - losses[1] - float(analytic[i])) < 1e-5


def test_inputs_are_never_modified() -> None:
    inputs = one_batch(4, weighted=True)
    batch = to_torch(inputs)
    with opened(TABLES, cache_rows=12) as ebc:
        for b in cdlrm.lookahead(ebc, [batch, batch]):
            ebc(b).sum().backward()
    for feature, parts in inputs.items():
        for part, tensor in zip((p for p in parts if p is not None), batch[feature], strict=True):
            same_bits(tensor, part, feature)


# ---- initial values, lr, optimizer object


@pytest.mark.parametrize("dim", [1, 3])
def test_state_has_the_names_and_shapes_of_torch(dim: int) -> None:
    shapes = {
        cdlrm.SGD(lr=0.1): {},
        cdlrm.RowWiseAdagrad(lr=0.1): {"sum": (7,)},
        cdlrm.Adagrad(lr=0.1): {"sum": (7, dim)},
        cdlrm.Adam(lr=0.1): {"exp_avg": (7, dim), "exp_avg_sq": (7, dim)},
    }
    for spec, want in shapes.items():
        with opened([cdlrm.Table("a", 7, dim)], optimizer=spec) as ebc:
            assert {k: tuple(v.shape) for k, v in ebc.table_state("a").items()} == want


def test_initial_values() -> None:
    tables = [cdlrm.Table("a", 50, 7), cdlrm.Table("b", 11, 3)]
    with opened(tables, seed=12345678901) as ebc:
        for t, table in enumerate(tables):
            want = initial_table(12345678901, t, table.num_embeddings, table.embedding_dim)
            same_bits(ebc.state_dict()[f"embedding_bags.{table.name}.weight"], want, table.name)
            same_bits(ebc({"a": torch.arange(3), "b": torch.arange(3)})[table.name], want[:3], "read on demand")


def test_the_default_seed_is_drawn_once_from_torchs_generator() -> None:
    def values(**settings: Any) -> torch.Tensor:
        with opened([cdlrm.Table("a", 30, 3)], **{"seed": None, **settings}) as ebc:
            return ebc.state_dict()["embedding_bags.a.weight"]

    torch.manual_seed(5)
    first, second = values(), values()
    assert not torch.isin(first, second).any()
    torch.manual_seed(5)
    assert torch.equal(values(), first) and torch.equal(values(), second)
    before = torch.get_rng_state()
    same_bits(values(seed=7), initial_table(7, 0, 30, 3), "a")
    assert torch.equal(torch.get_rng_state(), before)


def test_init_callable() -> None:
    def init(rows: np.ndarray, dim: int) -> np.ndarray:
        return (rows[:, None] * 100 + np.arange(dim)).astype(np.float32)

    with opened([cdlrm.Table("a", 30, 3, init=init), cdlrm.Table("b", 30, 3)], cache_rows=8) as ebc:
        for batch in cdlrm.lookahead(ebc, [{"a": torch.tensor([7, 29]), "b": torch.tensor([0, 1])}]):
            out = ebc(batch)
        assert out[:, 0].tolist() == [[700, 701, 702], [2900, 2901, 2902]]
        same_bits(ebc.state_dict()["embedding_bags.a.weight"], init(np.arange(30), 3), "a")
        same_bits(ebc.state_dict()["embedding_bags.b.weight"], initial_table(0, 1, 30, 3), "b")


def test_the_optimizer_of_tables_takes_no_other_parameters() -> None:
    with opened(TABLES) as ebc:
        with pytest.raises(UsageError, match="rows only.*to an optimizer of torch of their own") as caught:
            ebc.optimizer.add_param_group({"params": nn.Linear(3, 1).parameters()})
        assert "\n" not in str(caught.value)
        assert len(ebc.optimizer.param_groups) == len(ebc.groups)
        ebc.optimizer.load_state_dict(ebc.optimizer.state_dict())


def test_scheduler_through_the_optimizer() -> None:
    """torch's schedulers work without a warning, and the lr of the step is used."""
    oracle = Oracle(TABLES, cdlrm.SGD(lr=0.5))
    rng = np.random.default_rng(5)
    with opened(TABLES, optimizer=cdlrm.SGD(lr=0.5), cache_rows=25) as ebc:
        assert isinstance(ebc.optimizer, torch.optim.Optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(ebc.optimizer, step_size=3, gamma=0.3)
        inputs = [random_inputs(rng, TABLES, InputShape(empty_batches=False)) for _ in range(10)]
        for i, batch in zip(inputs, cdlrm.lookahead(ebc, [to_torch(i) for i in inputs]), strict=True):
            oracle.lr = ebc.optimizer.param_groups[0]["lr"]
            grad = random_grad(rng, oracle.forward(i))
            ebc.optimizer.zero_grad()
            train_step(ebc, batch, grad)
            oracle.backward(grad)
            ebc.optimizer.step()
            scheduler.step()
        assert oracle.lr < 0.05
        same_tables(ebc, oracle, "scheduled")


def test_lr_between_forward_and_backward() -> None:
    oracle = Oracle(TABLES, cdlrm.SGD(lr=0.5))
    inputs = one_batch(6)
    with opened(TABLES, optimizer=cdlrm.SGD(lr=0.5)) as ebc:
        out, want = ebc(to_torch(inputs)), oracle.forward(inputs)
        grad = random_grad(np.random.default_rng(0), want)
        set_lr(ebc, 0.125)
        oracle.lr = 0.125
        backward(out, grad)
        oracle.backward(grad)
        same_tables(ebc, oracle, "lr changed before backward")


def test_torch_optimizer_over_parameters_is_harmless() -> None:
    with opened(TABLES) as ebc:
        assert len(list(ebc.parameters())) == 1
        rival = torch.optim.SGD(ebc.parameters(), lr=1.0, weight_decay=0.1)
        oracle = Oracle(TABLES, cdlrm.SGD(lr=0.1))
        inputs = one_batch(7)
        rival.zero_grad()
        grad = random_grad(np.random.default_rng(0), oracle.forward(inputs))
        train_step(ebc, to_torch(inputs), grad)
        oracle.backward(grad)
        rival.step()
        same_tables(ebc, oracle, "torch optimizer")


# ---- non-finite gradients, strict, usage


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradient_raises_and_nothing_moves(bad: float) -> None:
    with opened(TABLES, cache_rows=20) as ebc:
        before = {k: v.clone() for k, v in ebc.state_dict().items()}
        out = ebc(to_torch(one_batch(8)))
        grad = torch.ones_like(out)
        grad[-1, 1, 2] = bad
        with pytest.raises(NonFiniteGradientError):
            out.backward(grad)
            ebc.flush()  # a GPU tells later
        ebc.check()
        for key, value in ebc.state_dict().items():
            same_bits(value, before[key], key)
        train_step(ebc, to_torch(one_batch(9)), np.ones_like(ebc(to_torch(one_batch(9))).detach().numpy()))


@pytest.mark.parametrize("ahead", [False, True])
def test_non_finite_gradient_skips_and_counts(ahead: bool) -> None:
    spec = cdlrm.Adam(lr=0.1)
    oracle = Oracle(TABLES, spec)
    with opened(TABLES, optimizer=spec, cache_rows=20, nonfinite="skip") as ebc:
        inputs = [one_batch(s) for s in range(6)]
        loader: Any = [to_torch(i) for i in inputs]
        for j, batch in enumerate(cdlrm.lookahead(ebc, loader) if ahead else loader):
            out, want = ebc(batch), oracle.forward(inputs[j])
            same_bits(out, want, f"batch {j}")
            grad = random_grad(np.random.default_rng(j), want)
            if j in (1, 4):
                grad[0, 0, 0] = np.nan
                oracle.forget()
            else:
                oracle.backward(grad)
            backward(out, grad)
        assert ebc.stats()["skipped_steps"] == 2
        ebc.check()
        same_tables(ebc, oracle, "skipped")


def test_strict_refuses_and_stays_usable() -> None:
    tables = [cdlrm.Table("a", 50, 4)]
    oracle = Oracle(tables, cdlrm.SGD(lr=0.1))
    with opened(tables, cache_rows=4, strict=True) as ebc:
        with pytest.raises(CacheTooSmallError, match=r"\b9\b"):
            ebc({"a": torch.arange(9)})
        ebc.check()
        inputs = {"a": (np.array([1, 2, 2, 3]), None, None)}
        grad = random_grad(np.random.default_rng(0), oracle.forward(inputs))
        train_step(ebc, to_torch(inputs), grad)
        oracle.backward(grad)
        same_tables(ebc, oracle, "after the refusal")
        assert ebc.stats()["grows"] == 0


def test_growing_is_counted() -> None:
    with opened([cdlrm.Table("a", 50, 4)], cache_rows=4) as ebc:
        ebc({"a": torch.arange(9)}).sum().backward()
        assert ebc.stats()["grows"] == 1 and ebc.stats()["cache_rows"] >= 9


def test_bad_settings_are_refused() -> None:
    good = [cdlrm.Table("a", 5, 4)]
    for make in (
        lambda: collection([]),
        lambda: collection([cdlrm.Table("a", 5, 4), cdlrm.Table("a", 5, 4)]),
        lambda: collection([cdlrm.Table("a", 5, 4), cdlrm.Table("b", 5, 4, features=["a"])]),
        lambda: collection([cdlrm.Table("a", -1, 4)]),
        lambda: collection([cdlrm.Table("a", 5, 0)]),
        lambda: collection([cdlrm.Table("a", 5, 4, pooling="max")]),
        lambda: collection(good, cache_rows=0),
        lambda: collection(good, cache_rows=-3),
        lambda: collection(good, cache_ratio=0.0),
        lambda: collection(good, cache_ratio=float("nan")),
        lambda: collection(good, device="tpu"),
        lambda: collection(good, nonfinite="ignore"),
        lambda: collection(good, store="cloud"),
    ):
        with pytest.raises((ConfigError, ValueError)):
            make()


def test_closed_module_says_so() -> None:
    ebc = collection(TABLES)
    ebc.close()
    ebc.close()
    with pytest.raises(UsageError):
        ebc(to_torch(one_batch()))


def test_resident_table_equals_cached_table() -> None:
    """A resident table beside cached ones, in one collection."""
    tables = [cdlrm.Table("a", 20, 4, resident=True), cdlrm.Table("b", 90, 4)]
    oracle = Oracle(tables, cdlrm.RowWiseAdagrad(lr=0.1))
    rng = np.random.default_rng(1)
    with opened(tables, optimizer=cdlrm.RowWiseAdagrad(lr=0.1), cache_rows=30) as ebc:
        inputs = [random_inputs(rng, tables, InputShape()) for _ in range(20)]
        for i, batch in zip(inputs, cdlrm.lookahead(ebc, [to_torch(i) for i in inputs]), strict=True):
            grad = random_grad(rng, oracle.forward(i))
            train_step(ebc, batch, grad)
            oracle.backward(grad)
        same_tables(ebc, oracle, "resident beside cached")


def test_load_state_dict() -> None:
    rng = np.random.default_rng(3)
    oracle = Oracle(TABLES, cdlrm.SGD(lr=0.1))
    with opened(TABLES, cache_rows=20) as ebc:
        for _ in range(2):
            for t in TABLES:
                oracle.weight(t.name)[:] = rng.standard_normal((t.num_embeddings, t.embedding_dim))
            state = {f"embedding_bags.{t.name}.weight": torch.from_numpy(oracle.weight(t.name).copy()) for t in TABLES}
            ebc.load_state_dict(ebc.state_dict() | state)
            same_tables(ebc, oracle, "just loaded")
            inputs = [random_inputs(rng, TABLES, InputShape()) for _ in range(8)]
            for i, batch in zip(inputs, cdlrm.lookahead(ebc, [to_torch(i) for i in inputs]), strict=True):
                grad = random_grad(rng, oracle.forward(i))
                train_step(ebc, batch, grad)
                oracle.backward(grad)
            same_tables(ebc, oracle, "trained on")


def test_stats_add_up() -> None:
    rng = np.random.default_rng(2)
    with opened(TABLES, cache_rows=20) as ebc:
        inputs = [random_inputs(rng, TABLES, InputShape(max_batch=8)) for _ in range(30)]
        for batch in cdlrm.lookahead(ebc, [to_torch(i) for i in inputs]):
            ebc(batch).sum().backward()
        stats = ebc.stats()
        lookups = sum(len(v) for i in inputs for v, _, _ in i.values())
        tables_of = {"a": "a", "b1": "b", "b2": "b"}
        distinct = sum(len({(tables_of[f], int(r)) for f, (v, _, _) in i.items() for r in v}) for i in inputs)
        assert stats["steps"] == 30 and stats["lookups"] == lookups and stats["distinct"] == distinct
        assert stats["hits"] + stats["fills"] == distinct
        assert stats["fills"] == stats["fills_copied"] + stats["fills_initialised"]
        assert stats["min0_fills"] <= stats["mind_fills"] <= stats["fills"]
        assert stats["evicts_written"] <= stats["evicts"] <= stats["fills"]
        assert stats["table_rows"] == 50 and stats["unannounced"] == 0 and stats["skipped_steps"] == 0
