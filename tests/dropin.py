"""Twins of our drop-in modules and torch's, for the tests that compare them; no test in here."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import cdlrm

OPTIMIZERS = {
    "sgd": cdlrm.SGD(lr=0.1),
    "adagrad": cdlrm.Adagrad(lr=0.1),
    "rowwise": cdlrm.RowWiseAdagrad(lr=0.1),
    "adam": cdlrm.Adam(lr=0.01),
}


def twins(kind: str, rows: int, dim: int, cache: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, Any]:
    """Ours ("EmbeddingBag" or "Embedding") and torch's with equal rows; `cache`: our own settings."""
    own = {"optimizer": cdlrm.SGD(lr=0.1), **(cache or {})}
    ours = getattr(cdlrm, kind)(rows, dim, **settings, **own)
    theirs = getattr(nn, kind)(rows, dim, **{"sparse": True, **settings})
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def torch_optimizer(spec: Any, parameters: Any) -> torch.optim.Optimizer:
    """torch's optimizer of the same formula."""
    if spec.name == "SGD":
        return torch.optim.SGD(parameters, lr=spec.lr)
    if spec.name == "Adagrad":
        return torch.optim.Adagrad(
            parameters, lr=spec.lr, eps=spec.eps, initial_accumulator_value=spec.initial_accumulator_value
        )
    return torch.optim.SparseAdam(parameters, lr=spec.lr, betas=spec.betas, eps=spec.eps)


def close(mine: Tensor, theirs: Tensor, rtol: float = 1e-6, atol: float = 1e-6) -> None:
    assert mine.shape == theirs.shape
    torch.testing.assert_close(mine.as_subclass(torch.Tensor).detach(), theirs.detach(), rtol=rtol, atol=atol)


def relative(mine: Tensor, theirs: Tensor) -> float:
    """Norm of the difference by the norm of `theirs`, in float64."""
    a, b = mine.detach().as_subclass(torch.Tensor).double(), theirs.detach().double()
    return float((a - b).norm() / b.norm())


def random_bags(rng: np.random.Generator, rows: int, bags: int, most: int = 5) -> tuple[Tensor, Tensor]:
    """values [L] and offsets [bags]; some bags are empty, ids repeat."""
    lengths = rng.integers(0, most + 1, bags)
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    values = np.minimum(rng.zipf(1.3, int(lengths.sum())) - 1, rows - 1)
    return torch.from_numpy(values), torch.from_numpy(starts)
