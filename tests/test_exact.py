"""The main claim: training through the cache gives the bits of resident training and of the oracle.

1,000 random configurations × 30 batches; a failure names its seed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Oracle
from scenarios import (
    InputShape,
    features_of,
    random_grad,
    random_inputs,
    random_optimizer,
    random_shape,
    random_tables,
    same_bits,
    same_tables,
    set_lr,
    to_torch,
    train_step,
)

import cdlrm

BATCHES = 30
CONFIGURATIONS = 1000
SEEN: Counter[str] = Counter()  # what the configurations made the cache do
DIMS = [1, 1, 2, 3, 3, 4, 8, 16, 17, 17, 32, 33, 64, 100, 257]


@dataclass
class Setting:
    tables: list[cdlrm.Table]
    optimizer: Any
    shape: InputShape
    depth: int
    horizon: int
    shards: int | None
    dtype: torch.dtype
    seed: int

    def cache_rows(self, rng: np.random.Generator, batches: list[Any]) -> int:
        """From far too small, over the minimum (the most distinct rows of a batch), to everything."""
        total = sum(t.num_embeddings for t in self.tables)
        most = 1
        for inputs in batches:
            rows = {(t.name, int(i)) for f, t in features_of(self.tables) for i in inputs[f][0]}
            most = max(most, len(rows))
        choices = [1, max(1, most // 2), most, most + 1, 2 * most, (most + total) // 2, total]
        return min(max(1, int(rng.choice(choices))), total)


def random_setting(rng: np.random.Generator, seed: int) -> Setting:
    tables = random_tables(rng, DIMS)
    return Setting(
        tables=tables,
        optimizer=random_optimizer(rng),
        shape=random_shape(rng, tables),
        depth=int(rng.integers(0, 5)),
        horizon=int(rng.choice([1, 2, 3, 5, 8, 16, BATCHES, 100])),
        shards=2 ** int(rng.integers(0, 5)) if rng.random() < 0.5 else None,
        dtype=torch.int32 if rng.random() < 0.3 else torch.int64,
        seed=seed,
    )


def resident(table: cdlrm.Table) -> cdlrm.Table:
    return cdlrm.Table(
        table.name,
        table.num_embeddings,
        table.embedding_dim,
        pooling=table.pooling,
        features=table.features,
        resident=True,
    )


class Recorder:
    """The oracle's run, step by step: what every other run must reproduce."""

    def __init__(self, setting: Setting, batches: list[Any], rng: np.random.Generator, evaluate: bool = True) -> None:
        self.setting = setting
        self.batches = batches
        self.oracle = Oracle(setting.tables, setting.optimizer, setting.seed)
        self.lr_at = {int(rng.integers(1, BATCHES)): float(setting.optimizer.lr) * 0.37} if rng.random() < 0.3 else {}
        self.eval_at = int(rng.integers(0, BATCHES)) if evaluate and rng.random() < 0.3 else -1
        self.eval_inputs = random_inputs(rng, setting.tables, setting.shape)
        self.eval_out: Any = None
        self.steps: list[tuple[Any, Any, Any]] = []
        for j, inputs in enumerate(batches):
            self.oracle.lr = self.lr_at.get(j, self.oracle.lr)
            out = self.oracle.forward(inputs)
            grad = random_grad(rng, out)
            self.steps.append((out, grad, self.oracle.backward(grad)[0]))
            if j == self.eval_at:
                self.eval_out = self.oracle.lookup(self.eval_inputs)

    def follow(self, ebc: Any, batches: Any, where: str) -> None:
        """Train `ebc` on the torch batches, comparing every output and weight gradient."""
        j = -1
        for j, batch in enumerate(batches):
            if j in self.lr_at:
                set_lr(ebc, self.lr_at[j])
            out, grad, weight_grad = self.steps[j]
            got, got_weight_grad = train_step(ebc, batch, grad)
            same_bits(got, out, f"{where}: output of batch {j}")
            same_bits(got_weight_grad, weight_grad, f"{where}: weight gradients of batch {j}")
            if j == self.eval_at:
                with torch.no_grad():
                    same_bits(ebc(to_torch(self.eval_inputs)), self.eval_out, f"{where}: evaluation after batch {j}")
        assert j == len(self.batches) - 1
        ebc.check()
        same_tables(ebc, self.oracle, where)


def run(setting: Setting, batches: list[Any], rng: np.random.Generator, what: str) -> None:
    recorder = Recorder(setting, batches, rng)
    options = {"optimizer": setting.optimizer, "seed": setting.seed, "device": "cpu"}

    ebc = cdlrm.EmbeddingBagCollection([resident(t) for t in setting.tables], **options)
    recorder.follow(ebc, [to_torch(b, setting.dtype) for b in batches], f"{what} resident")
    ebc.close()

    cache_rows = setting.cache_rows(rng, batches)
    what = f"{what} cache_rows={cache_rows}"
    ebc = cdlrm.EmbeddingBagCollection(setting.tables, cache_rows=cache_rows, shards=setting.shards, **options)
    loader = [to_torch(b, setting.dtype) for b in batches]
    if rng.random() < 0.1:
        recorder.follow(ebc, loader, f"{what} on demand")
    else:
        look = cdlrm.lookahead(ebc, loader, horizon=setting.horizon, prefetch_depth=setting.depth)
        recorder.follow(ebc, look, f"{what} looking ahead")
        look.close()
    ebc.check()
    stats = ebc.stats()
    SEEN.update(configurations=1, evicted=stats["evicts"] > 0, grew=stats["grows"] > 0)
    SEEN["never grew"] += stats["evicts"] > 0 and stats["grows"] == 0
    ebc.close()


@pytest.mark.parametrize("seed", range(CONFIGURATIONS))
def test_cached_equals_resident_equals_oracle(seed: int) -> None:
    run_seed(seed)


def run_seed(seed: int) -> None:
    rng = np.random.default_rng([2026, seed])
    setting = random_setting(rng, seed)
    batches = [random_inputs(rng, setting.tables, setting.shape) for _ in range(BATCHES)]
    run(setting, batches, rng, f"seed {seed}: {setting}")


@pytest.mark.parametrize("seed", range(6))
def test_65536_equal_ids(seed: int) -> None:
    """One row looked up 65,536 times in a batch: 256 chunks of 256, in one bag or in many."""
    rng = np.random.default_rng([65536, seed])
    setting = random_setting(rng, seed)
    rows = int(rng.integers(2, 20))
    setting.tables = [cdlrm.Table("a", rows, [1, 3, 17][seed % 3], pooling=["sum", "mean"][seed % 2])]
    setting.shape = InputShape()
    batches = [random_inputs(rng, setting.tables, setting.shape) for _ in range(4)]
    count = 65536
    one_bag = np.array([0, 0, count])
    many = np.linspace(0, count, 1001).astype(np.int64)
    weights = rng.standard_normal(count).astype(np.float32) if seed % 2 else None
    same = np.full(count, int(rng.integers(0, rows)))
    batches[1] = {"a": (same, one_bag if seed < 3 else many, weights)}
    batches[3] = {"a": (np.where(np.arange(count) % 1000 == 0, 1, same), None if weights is None else many, weights)}
    run(setting, batches, rng, f"seed {seed}: {setting}")


@pytest.mark.parametrize("depth", range(5))
def test_the_smallest_cache_with_disjoint_batches(depth: int) -> None:
    """Every batch replaces the whole cache: each row travels out and in again many times."""
    tables = [cdlrm.Table("a", 40, 5), cdlrm.Table("b", 40, 5, pooling="mean")]
    rng = np.random.default_rng(depth)
    batches = []
    for j in range(BATCHES):
        part = (np.arange(10) + 10 * (j % 4)) % 40
        offsets = np.array([0, 4, 4, 10])
        batches.append({"a": (rng.permutation(part), offsets, None), "b": (rng.permutation(part), offsets, None)})
    for optimizer in (cdlrm.SGD(lr=0.1), cdlrm.RowWiseAdagrad(lr=0.1), cdlrm.Adagrad(lr=0.1), cdlrm.Adam(lr=0.1)):
        setting = Setting(tables, optimizer, InputShape(), depth, 100, 1, torch.int64, depth)
        setting.cache_rows = lambda rng, batches: 20  # type: ignore[method-assign]
        run(setting, batches, np.random.default_rng(depth), f"depth {depth}")


@pytest.mark.parametrize("cache_ratio", [0.05, 0.2, 1.0])
def test_real_ids(data_dir: Path, cache_ratio: float) -> None:
    """Real click logs (skew, bursts, missing ids): every cache gives the oracle's tables."""
    orc = pytest.importorskip("pyarrow.orc")
    log = orc.read_table(data_dir / "criteo_tb_orc" / "part-0.orc").slice(0, 6144)
    rng = np.random.default_rng(0)
    tables, columns = [], {}
    for c in range(1, 27):
        rows = int(rng.integers(100, 4000))
        tables.append(cdlrm.Table(f"c{c}", rows, 4, pooling="mean" if c % 2 else "sum"))
        column = log[f"c{c}"].combine_chunks()
        columns[f"c{c}"] = (column.flatten().to_numpy() % rows, np.append(0, np.cumsum(column.value_lengths())))
    batches = []
    for first in range(0, log.num_rows, 512):
        inputs = {}
        for name, (values, offsets) in columns.items():
            part = offsets[first : first + 513]
            inputs[name] = (values[part[0] : part[-1]], part - part[0], None)
        batches.append(inputs)
    setting = Setting(tables, cdlrm.RowWiseAdagrad(lr=0.1), InputShape(), 2, 8, None, torch.int64, 0)
    recorder = Recorder(setting, batches, rng, evaluate=False)
    ebc = cdlrm.EmbeddingBagCollection(
        tables, optimizer=setting.optimizer, cache_ratio=cache_ratio, device="cpu", seed=0
    )
    loader = [to_torch(b) for b in batches]
    recorder.follow(ebc, cdlrm.lookahead(ebc, loader, horizon=8, prefetch_depth=2), f"real ids, cache {cache_ratio}")
    assert (ebc.stats()["evicts"] > 0) == (cache_ratio < 1.0)
    ebc.close()


def test_the_configurations_exercised_the_cache() -> None:
    """The campaign is worth nothing if its caches never evict, grow, or hold several groups."""
    if SEEN["configurations"] < 100:
        pytest.skip("the configurations did not run in this session")
    print(dict(SEEN))
    assert SEEN["evicted"] > 0.4 * SEEN["configurations"]
    assert SEEN["grew"] > 0.2 * SEEN["configurations"]
    assert SEEN["never grew"] > 0.2 * SEEN["configurations"]


@pytest.mark.long
@pytest.mark.parametrize("block", range(100))
def test_campaign(block: int) -> None:
    for seed in range(CONFIGURATIONS + 100 * block, CONFIGURATIONS + 100 * (block + 1)):
        run_seed(seed)
