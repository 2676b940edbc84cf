"""What a run is made of, from its `TrainConfig` and data: seeds, tables, model."""

from __future__ import annotations

import random

import numpy as np
import torch

import cdlrm

from .config import TrainConfig, dashed
from .datasets import Datasets
from .driver.choose import choose
from .errors import ConfigError
from .model import DLRM
from .optim import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad

TABLE_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "rowwise-adagrad": RowWiseAdagrad,
    "adagrad": Adagrad,
    "adam": Adam,
}
DENSE_OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


def seed_everything(seed: int) -> None:
    """Seed torch's, NumPy's and Python's generators, whatever may draw from them: layers of one's own, loaders.
    A resumed run gets the states that were saved."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def build_tables(config: TrainConfig, data: Datasets, chosen: list[str]) -> cdlrm.EmbeddingBagCollection:
    """One table a feature, all of one dim and optimizer, so one group and one cache."""
    dim = config.arch_sparse_feature_size
    rate = config.embedding_learning_rate or config.learning_rate
    tables = [
        cdlrm.Table(feature, rows, dim, pooling=config.pooling)
        for feature, rows in zip(data.features, data.table_rows, strict=True)
    ]
    collection = cdlrm.EmbeddingBagCollection(
        tables,
        optimizer=TABLE_OPTIMIZERS[config.optimizer](lr=rate),
        cache_rows="auto" if config.cache_rows is None else config.cache_rows,
        cache_ratio=config.cache_ratio if config.cache_rows is None else None,
        device=config.device,
        store=config.store,
        strict=config.strict,
        seed=config.seed,
        nonfinite=config.nonfinite,
        progress=config.progress,
        fresh_store=config.resume,  # the checkpoint says what the rows are
    )
    chosen.extend(collection.notes)
    if config.cache_rows is None:
        chosen.append(
            f"cache: {collection.stats()['cache_rows']:,} rows, {100 * config.cache_ratio:g} % of all "
            f"{sum(data.table_rows):,} (--cache-ratio; --cache-rows gives a number instead)."
        )
    reason = choose(config.device).reason
    if reason not in chosen:
        chosen.append(reason)
    return collection


def bottom_mlp(config: TrainConfig, num_dense: int) -> list[int]:
    """Its layers' sizes, on data with `num_dense` dense columns; raises ConfigError where it starts with others."""
    if config.arch_mlp_bot is None:
        return [num_dense, 128, 64, config.arch_sparse_feature_size]
    bottom = dashed("--arch-mlp-bot", config.arch_mlp_bot)
    if bottom[0] != num_dense:
        raise ConfigError(
            f"--arch-mlp-bot {config.arch_mlp_bot}: the data has {num_dense} dense columns, so it must start with "
            f"{num_dense}."
        )
    return bottom


def build_model(config: TrainConfig, data: Datasets, tables: cdlrm.EmbeddingBagCollection, chosen: list[str]) -> DLRM:
    """The DLRM over the tables, on their device; its bottom MLP must start with the number of dense columns."""
    dim = config.arch_sparse_feature_size
    bottom = bottom_mlp(config, data.num_dense)
    if config.arch_mlp_bot is None:
        chosen.append(
            f"bottom MLP: {'-'.join(map(str, bottom))}, from the {data.num_dense} dense columns to dim {dim} "
            "(--arch-mlp-bot)."
        )
    model = DLRM(
        tables,
        features=len(data.features),
        dim=dim,
        mlp_bot=bottom,
        mlp_top=dashed("--arch-mlp-top", config.arch_mlp_top),
        interaction=config.arch_interaction_op,
        interaction_itself=config.arch_interaction_itself,
        seed=config.seed,
    )
    return model.to(tables.device)
