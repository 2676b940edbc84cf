"""Random configurations and inputs shared by the exactness tests; no test in here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from oracle import Oracle

import cdlrm

Inputs = dict[str, tuple[np.ndarray, "np.ndarray | None", "np.ndarray | None"]]
TorchInputs = dict[str, tuple[torch.Tensor, ...]]


def random_optimizer(rng: np.random.Generator) -> cdlrm.optim.Optimizer:
    decay = float(rng.choice([0.0, 0.0, 0.01]))
    lr = float(rng.choice([0.5, 0.1, 0.013]))
    start = float(rng.choice([0.0, 0.1]))
    return [
        cdlrm.SGD(lr=lr, weight_decay=decay),
        cdlrm.RowWiseAdagrad(lr=lr, weight_decay=decay, initial_accumulator_value=start),
        cdlrm.Adagrad(lr=lr, weight_decay=decay, initial_accumulator_value=start),
        cdlrm.Adam(lr=lr / 10, weight_decay=decay),
    ][rng.integers(4)]


def random_tables(rng: np.random.Generator, dims: list[int], most_rows: int = 60) -> list[cdlrm.Table]:
    """1..5 tables, some shared by several features, poolings and dims mixed."""
    mixed = rng.random() < 0.5
    one_dim = int(rng.choice(dims))
    tables = []
    for t in range(rng.integers(1, 6)):
        features = [f"f{t}_{i}" for i in range(rng.integers(2, 4))] if rng.random() < 0.3 else None
        tables.append(
            cdlrm.Table(
                f"t{t}",
                int(rng.integers(1, most_rows)),
                int(rng.choice(dims)) if mixed else one_dim,
                pooling=str(rng.choice(["sum", "mean"])),
                features=features,
            )
        )
    return tables


def features_of(tables: list[cdlrm.Table]) -> list[tuple[str, cdlrm.Table]]:
    return [(f, t) for t in tables for f in (t.features or [t.name])]


@dataclass
class InputShape:
    """What random inputs look like."""

    max_batch: int = 6
    max_bag: int = 4
    weighted: set[str] = field(default_factory=set)
    one_hot: set[str] = field(default_factory=set)
    zipf: float = 0.0
    empty_batches: bool = True


def random_shape(rng: np.random.Generator, tables: list[cdlrm.Table]) -> InputShape:
    names = [f for f, _ in features_of(tables)]
    return InputShape(
        max_batch=int(rng.integers(1, 7)),
        max_bag=int(rng.integers(1, 5)),
        weighted={f for f in names if rng.random() < 0.3},
        one_hot={f for f in names if rng.random() < 0.2},
        zipf=float(rng.choice([0.0, 1.05, 2.0])),
        empty_batches=bool(rng.random() < 0.5),
    )


def random_ids(rng: np.random.Generator, rows: int, count: int, zipf: float) -> np.ndarray:
    if zipf == 0.0:
        return rng.integers(0, rows, count)
    weights = (np.arange(rows) + 1.0) ** -zipf
    return rng.choice(rows, count, p=weights / weights.sum())


def random_inputs(rng: np.random.Generator, tables: list[cdlrm.Table], shape: InputShape) -> Inputs:
    batch = int(rng.integers(0 if shape.empty_batches else 1, shape.max_batch + 1))
    inputs: Inputs = {}
    for feature, table in features_of(tables):
        one_hot = feature in shape.one_hot
        lengths = np.ones(batch, np.int64) if one_hot else rng.integers(0, shape.max_bag + 1, batch)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        values = random_ids(rng, table.num_embeddings, int(offsets[-1]), shape.zipf)
        weights = rng.standard_normal(len(values)).astype(np.float32) if feature in shape.weighted else None
        inputs[feature] = (values, None if one_hot and weights is None else offsets, weights)
    return inputs


def random_grad(rng: np.random.Generator, out: Any) -> Any:
    if isinstance(out, dict):
        return {f: random_grad(rng, o) for f, o in out.items()}
    return rng.standard_normal(out.shape).astype(np.float32)


def to_torch(inputs: Inputs, dtype: torch.dtype = torch.int64) -> TorchInputs:
    """The mapping a module takes; weights are leaves that want gradients."""
    result: TorchInputs = {}
    for feature, (values, offsets, weights) in inputs.items():
        parts = [torch.from_numpy(np.array(values)).to(dtype)]
        if offsets is not None:
            parts.append(torch.from_numpy(np.array(offsets)).to(dtype))
        if weights is not None:
            parts.append(torch.from_numpy(np.array(weights)).requires_grad_())
        result[feature] = tuple(parts)
    return result


def same_bits(mine: Any, theirs: Any, what: str) -> None:
    """0 ulp: shapes, dtypes and bytes are equal (-0.0 is not 0.0)."""
    if isinstance(theirs, dict):
        assert set(mine) == set(theirs), what
        for key in theirs:
            same_bits(mine[key], theirs[key], f"{what}[{key}]")
        return
    a = mine.detach().numpy() if isinstance(mine, torch.Tensor) else np.asarray(mine)
    b = theirs.detach().numpy() if isinstance(theirs, torch.Tensor) else np.asarray(theirs)
    assert a.shape == b.shape and a.dtype == b.dtype, (what, a.shape, b.shape, a.dtype, b.dtype)
    if a.tobytes() != b.tobytes():
        wrong = np.argwhere(a != b)
        raise AssertionError(f"{what}: {len(wrong)} of {a.size} values differ, first at {wrong[:1].tolist()}")


def backward(out: Any, grad: Any) -> None:
    """Backward through one output, a tensor or a mapping."""
    outs = list(out.values()) if isinstance(out, dict) else [out]
    grads = [grad[f] for f in out] if isinstance(out, dict) else [grad]
    pairs = [(o, torch.from_numpy(g.copy())) for o, g in zip(outs, grads, strict=True)]
    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


def train_step(ebc: Any, batch: TorchInputs, grad: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Forward and backward; output and the gradients of the per-sample weights."""
    out = ebc(batch)
    backward(out, grad)
    return out, weight_grads(batch)


def weight_grads(batch: TorchInputs) -> dict[str, np.ndarray]:
    return {f: parts[2].grad.numpy() for f, parts in batch.items() if len(parts) == 3 and parts[2].grad is not None}


def same_tables(ebc: Any, oracle: Oracle, where: str) -> None:
    """Every weight and every optimizer state equals the oracle's."""
    state = ebc.state_dict()
    for table in oracle.tables:
        weight = state[f"embedding_bags.{table.name}.weight"]
        same_bits(weight, oracle.weight(table.name), f"{where}: {table.name}.weight")
        rows = table.num_embeddings  # a dim of 1 must not hide a difference of shapes: test_collection has that
        mine = {k: v.reshape(rows, v.numel() // max(rows, 1)) for k, v in ebc.table_state(table.name).items()}
        theirs = {k: v.reshape(rows, v.size // max(rows, 1)) for k, v in oracle.state(table.name).items()}
        same_bits(mine, theirs, f"{where}: {table.name} state")


def set_lr(ebc: Any, lr: float) -> None:
    for group in ebc.optimizer.param_groups:
        group["lr"] = lr
