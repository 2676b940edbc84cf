"""Two towers with histories: who likes which item, scored by a dot product.

The user tower reads a user id and the user's history (a bag of items), the item tower an item and its
category.  `Model` is plain torch.  `train_with_cdlrm` shows what changes: three lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import cdlrm

USERS, ITEMS, CATEGORIES, DIM = 300, 400, 20, 8


class Clicks(NamedTuple):
    user: Tensor  # int64 [B]
    history: Tensor  # int64 [L], items of all users after each other
    offsets: Tensor  # int64 [B], where each user's history starts
    item: Tensor  # int64 [B]
    category: Tensor  # int64 [B]
    clicked: Tensor  # float32 [B]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, DIM, sparse=True)
        self.history = nn.EmbeddingBag(ITEMS, DIM, mode="mean", sparse=True)
        self.item = nn.Embedding(ITEMS, DIM, sparse=True)
        self.category = nn.Embedding(CATEGORIES, DIM, sparse=True)
        self.user_tower = nn.Sequential(nn.Linear(2 * DIM, 16), nn.ReLU(), nn.Linear(16, DIM))
        self.item_tower = nn.Sequential(nn.Linear(2 * DIM, 16), nn.ReLU(), nn.Linear(16, DIM))

    def forward(self, batch: Clicks) -> Tensor:
        user = torch.cat([self.user(batch.user), self.history(batch.history, batch.offsets)], 1)
        item = torch.cat([self.item(batch.item), self.category(batch.category)], 1)
        return (self.user_tower(user) * self.item_tower(item)).sum(1)


def batches(count: int, size: int = 16, seed: int = 0) -> Iterator[Clicks]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        lengths = rng.integers(0, 8, size)  # some histories are empty
        offsets = np.concatenate([[0], np.cumsum(lengths)])[:-1]
        history = np.minimum(rng.zipf(1.4, int(lengths.sum())) - 1, ITEMS - 1)
        user, item = rng.integers(0, USERS, size), np.minimum(rng.zipf(1.4, size) - 1, ITEMS - 1)
        clicked = (item < 4).astype(np.float32)
        yield Clicks(*(torch.from_numpy(a) for a in (user, history, offsets, item, item % CATEGORIES, clicked)))


def train_with_torch(model: Model, loader: Iterable[Clicks]) -> list[float]:
    tables = [p for name, p in model.named_parameters() if "tower" not in name]
    dense = [p for name, p in model.named_parameters() if "tower" in name]
    optimizers = [torch.optim.SGD(tables, lr=0.1), torch.optim.SGD(dense, lr=0.1)]
    losses = []
    for batch in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.clicked)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def train_with_cdlrm(
    model: Model, loader: Iterable[Clicks], cache_ratio: float = 0.5, prefetch_depth: int = 1
) -> list[float]:
    replaced = cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1), cache_ratio=cache_ratio)  # 1
    dense = torch.optim.SGD(model.parameters(), lr=0.1)

    def ids(batch: Clicks) -> dict[nn.Module, object]:  # 2: what each table will be called with
        return {
            model.user: batch.user,
            model.history: (batch.history, batch.offsets),
            model.item: batch.item,
            model.category: batch.category,
        }

    losses = []
    for batch in cdlrm.lookahead(model, loader, ids=ids, prefetch_depth=prefetch_depth):  # 3
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.clicked)
        dense.zero_grad()
        loss.backward()  # updates the rows, too
        dense.step()
        losses.append(loss.item())
    replaced.close()  # the tables stay readable; replaced.undo() would bring torch's modules back
    return losses
