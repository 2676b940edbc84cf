"""DLRM: a deep learning recommendation model (Naumov et al. 2019, arXiv:1906.00091).

Dense features go through a bottom MLP to a vector of the embeddings' dim; it and the pooled
embeddings interact (products of all pairs, or concatenation); the result goes through a top MLP
to one logit.  The embeddings are any module that returns float32 [B, features, dim]: ours, or a
plain torch one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConfigError, InputError


def mlp(layers: Sequence[int], *, last_relu: bool, generator: torch.Generator) -> nn.Sequential:
    """Linear layers with ReLU between, and after the last if `last_relu`.

    Initial values as DLRM's: W ~ N(0, 2 / (in + out)), b ~ N(0, 1 / out) (variances).
    """
    modules: list[nn.Module] = []
    for position, (width_in, width_out) in enumerate(zip(layers[:-1], layers[1:], strict=True)):
        linear = nn.Linear(width_in, width_out)
        with torch.no_grad():
            linear.weight.normal_(0.0, math.sqrt(2.0 / (width_in + width_out)), generator=generator)
            linear.bias.normal_(0.0, math.sqrt(1.0 / width_out), generator=generator)
        modules.append(linear)
        if last_relu or position < len(layers) - 2:
            modules.append(nn.ReLU())
    return nn.Sequential(*modules)


class DotInteraction(nn.Module):
    """The dense vector, then the products of all pairs of the features (the dense vector is feature 0).

    Pairs are (i, j) with j < i, or j <= i with `itself`, in the order of i, then j.
    Input: float32 [B, dim] and [B, F, dim]; output: float32 [B, dim + pairs].
    """

    pairs: Tensor

    def __init__(self, features: int, *, itself: bool = False) -> None:
        super().__init__()
        self.itself = itself
        count = features + 1
        flat = [i * count + j for i in range(count) for j in range(i + int(itself))]
        self.register_buffer("pairs", torch.tensor(flat, dtype=torch.int64), persistent=False)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        vectors = torch.cat([dense.unsqueeze(1), pooled], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.cat([dense, products.index_select(1, self.pairs)], dim=1)


class CatInteraction(nn.Module):
    """The dense vector and the features one after another: float32 [B, dim + F * dim]."""

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return torch.cat([dense, pooled.flatten(1)], dim=1)


class DLRM(nn.Module):
    """The model: `logits = model(dense, sparse)`.

    dense: float32 [B, mlp_bot[0]].  sparse: whatever `embeddings` takes (for ours, the `Batch`).
    Returns float32 [B] logits; the click probability is their sigmoid.
    `mlp_bot` ends in `dim`; `mlp_top` leaves out its input width, which is computed, and ends in 1.
    The same `seed` gives the same initial MLPs, whatever the embeddings are.
    """

    def __init__(
        self,
        embeddings: nn.Module,
        *,
        features: int,
        dim: int,
        mlp_bot: Sequence[int],
        mlp_top: Sequence[int],
        interaction: str = "dot",
        interaction_itself: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if len(mlp_bot) < 2 or mlp_bot[-1] != dim:
            raise ConfigError(f"DLRM(mlp_bot={list(mlp_bot)}): it must end in dim={dim}, to meet the embeddings.")
        if not mlp_top or mlp_top[-1] != 1:
            raise ConfigError(f"DLRM(mlp_top={list(mlp_top)}): it must end in 1, the click's logit.")
        if interaction == "dot":
            pairs = (features + 1) * (features + 2 * int(interaction_itself)) // 2
            width = dim + pairs
            self.interaction: nn.Module = DotInteraction(features, itself=interaction_itself)
        elif interaction == "cat":
            width = dim * (features + 1)
            self.interaction = CatInteraction()
        else:
            raise ConfigError(f"DLRM(interaction={interaction!r}): expected 'dot' or 'cat'.")
        generator = torch.Generator().manual_seed(seed)
        self.dim = dim
        self.num_dense = mlp_bot[0]
        self.embeddings = embeddings
        self.bottom = mlp(mlp_bot, last_relu=True, generator=generator)
        self.top = mlp([width, *mlp_top], last_relu=False, generator=generator)

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        if dense.dim() != 2 or dense.shape[1] != self.num_dense:
            raise InputError(
                f"dense features of shape {list(dense.shape)}: the model takes [B, {self.num_dense}], "
                "the first number of its bottom MLP."
            )
        return self.top(self.interaction(self.bottom(dense), self.embeddings(sparse))).squeeze(1)

    def dense_parameters(self) -> list[nn.Parameter]:
        """The parameters of both MLPs; the tables are updated by their own module."""
        return [*self.bottom.parameters(), *self.top.parameters()]
