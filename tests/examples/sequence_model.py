"""A sequence model: which item comes next, by a GRU over the items so far.

One table is called twice in a step (the sequence, and the candidates that are scored), so `ids=` gives a
list of calls, and the step makes one update of each row, as torch's optimizer does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import cdlrm

ITEMS, DIM, LENGTH = 500, 8, 6
PADDING = 0


class Sequences(NamedTuple):
    seen: Tensor  # int64 [B, LENGTH], PADDING where a sequence is shorter
    candidates: Tensor  # int64 [B, 4], the first one is what came next


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ITEMS, DIM, padding_idx=PADDING, sparse=True)
        self.recurrent = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, batch: Sequences) -> Tensor:
        _, last = self.recurrent(self.item(batch.seen))
        return (self.item(batch.candidates) * last[0].unsqueeze(1)).sum(2)


def batches(count: int, size: int = 12, seed: int = 0) -> Iterator[Sequences]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        start = np.minimum(rng.zipf(1.3, size), ITEMS - 50)
        seen = start[:, None] + np.arange(LENGTH)[None, :]
        seen[rng.random((size, LENGTH)) < 0.2] = PADDING
        candidates = rng.integers(1, ITEMS, (size, 4))
        candidates[:, 0] = start + LENGTH
        yield Sequences(torch.from_numpy(seen), torch.from_numpy(candidates))


def loss_of(model: Model, batch: Sequences) -> Tensor:
    return nn.functional.cross_entropy(model(batch), torch.zeros(len(batch.seen), dtype=torch.int64))


def train_with_torch(model: Model, loader: Iterable[Sequences]) -> list[float]:
    table = torch.optim.Adagrad([model.item.weight], lr=0.1)
    optimizers = [table, torch.optim.SGD(model.recurrent.parameters(), lr=0.1)]
    losses = []
    for batch in loader:
        loss = loss_of(model, batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def train_with_cdlrm(
    model: Model, loader: Iterable[Sequences], cache_ratio: float = 0.5, prefetch_depth: int = 1
) -> list[float]:
    cdlrm.replace_embeddings(model, optimizer=cdlrm.Adagrad(lr=0.1), cache_ratio=cache_ratio)
    dense = torch.optim.SGD(model.parameters(), lr=0.1)

    def ids(batch: Sequences) -> dict[nn.Module, object]:
        return {model.item: [batch.seen, batch.candidates]}  # two calls, in this order

    losses = []
    for batch in cdlrm.lookahead(model, loader, ids=ids, prefetch_depth=prefetch_depth):
        loss = loss_of(model, batch)
        dense.zero_grad()
        loss.backward()
        dense.step()
        losses.append(loss.item())
    return losses
