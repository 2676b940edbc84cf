"""`EmbeddingBagCollection`: the embedding tables of a model as one `torch.nn.Module`.

The rows live in a store, are trained in a cache, and are updated inside the backward pass.  With
`cdlrm.lookahead` around the loader the rows of coming batches are in the cache before they are
needed; without it they are fetched on demand.  The results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .compiler import outside_compiler
from .data.batch import Batch, check_dense
from .errors import ConfigError, InputError
from .fused import FusedOptimizer
from .group import Group
from .lookups import FeatureSlot, Lookups, to_host
from .module import CachedModule
from .optim import Optimizer, check_specification
from .placement import check_cache_settings, choose_driver, choose_seed, make_groups
from .stats import table_stats
from .table import Table

OUTPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class EmbeddingBagCollection(CachedModule):
    """Pooled lookups of several tables, through a cache that is exact.

    Arguments:
        tables: `Table`s with distinct names and features.
        optimizer: one specification (`SGD(lr=)`, `RowWiseAdagrad(lr=)`, …) for all tables, or a mapping
            table name -> specification.  Tables of equal dim and optimizer form a group with one cache.
        cache_rows: slots in all ("auto": everything resident if it fits); `cache_ratio` instead: the
            share of the rows that the cache holds.
        device: "auto" (the GPU that torch and CuPy can use, else the CPU), "cpu", "cuda", "cuda:N" or a torch.device:
            where the cache, the outputs and the gradients are; ids may be anywhere, and are quickest on the CPU.
            (`EmbeddingBag` and `Embedding` default to None, torch's default device, because torch's signature does.)
        store: "ram" (host memory) or "file:DIR" (tables larger than it).
        strict: refuse a batch that needs more rows than the cache has, instead of growing.
        seed: of the initial values.  None: that of the folder which `store` opens again, else drawn once from torch's
            default CPU generator, so that torch.manual_seed(s) fixes it and two modules differ.
        nonfinite: "raise" NonFiniteGradientError on NaN or infinity in a gradient, or "skip" that
            step's update and count it in `stats()["skipped_steps"]`.
        update: "backward" updates rows in the backward pass; "step" keeps their gradients until
            `module.optimizer.step()`, for gradient accumulation and torch's clip_grad_norm_ (slower).
        fresh_store: discard what the folder of `store="file:DIR"` holds (before a checkpoint is loaded).
        output_dtype: of the outputs: torch.float32, or torch.bfloat16 or torch.float16, to which the float32
            result is rounded once.  Rows, state and the gradients' sums stay float32.
        progress: show a bar while much host memory is pinned for a GPU.
        shards: of the planner (default: from the cache size).

    Raises ConfigError for settings that cannot work.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        optimizer: Optimizer | Mapping[str, Optimizer],
        cache_rows: int | str = "auto",
        cache_ratio: float | None = None,
        device: str | torch.device = "auto",
        store: str = "ram",
        strict: bool = False,
        seed: int | None = None,
        nonfinite: str = "raise",
        update: str = "backward",
        fresh_store: bool = False,
        output_dtype: torch.dtype = torch.float32,
        progress: bool = True,
        shards: int | None = None,
    ) -> None:
        super().__init__(nonfinite)
        if output_dtype not in OUTPUT_DTYPES:
            raise ConfigError(f"output_dtype={output_dtype!r}: must be one of {', '.join(map(str, OUTPUT_DTYPES))}.")
        self.output_dtype = output_dtype
        self.tables = _checked_tables(tables)
        check_cache_settings(cache_rows, cache_ratio)
        self.features = [feature for table in self.tables for feature in table.feature_names]
        groups, self.notes = make_groups(
            self.tables, _optimizers(self.tables, optimizer), cache_rows=cache_rows, cache_ratio=cache_ratio,
            driver=choose_driver(device, progress), store=store, strict=strict,
            seed=choose_seed(seed, store, fresh_store), shards=shards, update=update, fresh=fresh_store,
        )  # fmt: skip
        dims = sorted({table.embedding_dim for table in self.tables})
        self._features_of_dim = {
            dim: [f for table in self.tables if table.embedding_dim == dim for f in table.feature_names] for dim in dims
        }
        slots = {}
        for group in groups:
            columns = {feature: c for c, feature in enumerate(self._features_of_dim[group.dim])}
            slots[group] = _feature_slots(group, columns)
        self._attach(
            slots,
            {group: len(self._features_of_dim[group.dim]) for group in groups},
            {f"embedding_bags.{table.name}.weight": table.name for table in self.tables},
            FusedOptimizer(groups),
        )

    # --- forward ---

    @outside_compiler
    def forward(self, features: Any) -> Tensor | dict[str, Tensor]:
        """Pooled rows, `output_dtype` [B, features, dim]; with mixed dims a dict feature -> [B, dim].

        `features`: a `Batch`, a mapping feature -> (values, offsets[, weights]) or bare values (one id
        per sample), or a TorchRec KeyedJaggedTensor.  With gradients enabled this is a training call
        (a backward may follow); otherwise it reads the newest values and changes nothing.

        Raises InputError for bad input, UsageError after `close`.
        """
        inputs, size = _inputs(features)
        outputs = self._look_up(inputs, size, self._weights_that_learn(inputs))
        if len(outputs) == 1:
            return outputs[0]
        by_feature = {
            feature: output[:, column]
            for names, output in zip(self._features_of_dim.values(), outputs, strict=True)
            for column, feature in enumerate(names)
        }
        return {feature: by_feature[feature] for feature in self.features}

    def _weights_that_learn(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Per-sample weights that want a gradient."""
        out: dict[str, Tensor] = {}
        if torch.is_grad_enabled():
            for feature in self.features:
                entry = inputs.get(feature)
                if isinstance(entry, (tuple, list)) and len(entry) > 2:
                    weights = entry[2]
                    if isinstance(weights, Tensor) and weights.requires_grad:
                        out[feature] = weights
        return out

    def table_stats(self) -> dict[str, dict[str, int]]:
        """Counters of each table by name, see `cdlrm.stats.table_stats`.  Trained rows are counted as of the last
        `flush()`, since a row in the cache is written home later."""
        found = {name: stats for group in self.groups for name, stats in table_stats(group).items()}
        return {table.name: found[table.name] for table in self.tables}

    def lookahead_calls(self, features: Any) -> dict[Group, Lookups]:
        """What `forward(features)` will look up in each group (used by `cdlrm.lookahead`)."""
        if isinstance(features, tuple) and len(features) == 1:
            features = features[0]  # a tuple of forward's arguments
        if isinstance(features, Batch):
            check_dense(features.dense, features.size)
        return self._flatten(*_inputs(features))


def _inputs(features: Any) -> tuple[Mapping[str, Any], int | None]:
    """The mapping feature -> (values, offsets, weights) of what a user passes, and B where it is known."""
    sparse = getattr(features, "sparse", None)
    if isinstance(sparse, Mapping):
        return sparse, int(features.size)
    if isinstance(features, Mapping):
        return features, None
    if all(hasattr(features, name) for name in ("keys", "values", "lengths")):
        return _keyed_jagged(features)
    raise InputError(
        f"the input is a {type(features).__name__}; pass a cdlrm.Batch, a mapping feature -> (values, "
        "offsets[, weights]), "
        f"or a KeyedJaggedTensor."
    )


def _keyed_jagged(features: Any) -> tuple[dict[str, Any], int]:
    """A TorchRec KeyedJaggedTensor (by its methods): features after each other, B lengths each."""
    keys, values, lengths = list(features.keys()), features.values(), features.lengths()
    weights = features.weights_or_none() if hasattr(features, "weights_or_none") else None
    size = len(lengths) // max(len(keys), 1)
    if size * len(keys) != len(lengths):
        raise InputError(
            f"the KeyedJaggedTensor has {len(lengths)} lengths for {len(keys)} keys; give as many per key."
        )
    ends = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), torch.cumsum(to_host(lengths), 0)])
    if int(ends[-1]) != len(values):
        raise InputError(f"the KeyedJaggedTensor's lengths add up to {int(ends[-1])} but it has {len(values)} values.")
    out = {}
    for f, key in enumerate(keys):
        offsets = ends[f * size : (f + 1) * size + 1]
        lo, hi = int(offsets[0]), int(offsets[-1])
        out[key] = (values[lo:hi], offsets - lo, None if weights is None else weights[lo:hi])
    return out, size


def _checked_tables(tables: Sequence[Table]) -> list[Table]:
    if isinstance(tables, Table):
        raise ConfigError(f"tables is one Table ({tables.name!r}); give a list of them.")
    out = list(tables)
    if not out:
        raise ConfigError("tables=[]: give at least one Table.")
    for table in out:
        if not isinstance(table, Table):
            raise ConfigError(f"tables: {table!r} is a {type(table).__name__}; give cdlrm.Table objects.")
    for what, names in (
        ("table", [table.name for table in out]),
        ("feature", [feature for table in out for feature in table.feature_names]),
    ):
        double = sorted({name for name in names if names.count(name) > 1})
        if double:
            raise ConfigError(f"the {what} name {double[0]!r} occurs twice; names must be distinct.")
    return out


def _optimizers(tables: Sequence[Table], optimizer: Optimizer | Mapping[str, Optimizer]) -> list[Optimizer]:
    """The specification of each table."""
    if isinstance(optimizer, Mapping):
        missing = [table.name for table in tables if table.name not in optimizer]
        if missing:
            raise ConfigError(f"optimizer: no entry for table {missing[0]!r}; give one for each table.")
        chosen = [optimizer[table.name] for table in tables]
    else:
        chosen = [optimizer for _ in tables]
    for value in chosen:
        check_specification("optimizer", value)
    return chosen


def _feature_slots(group: Group, columns: dict[str, int]) -> list[FeatureSlot]:
    """The features of a group in the order of its tables; `columns` of the output."""
    return [
        FeatureSlot(feature, table.name, base, table.num_embeddings, columns[feature], table.pooling == "mean")
        for table, base in zip(group.tables, group.bases[:-1].tolist(), strict=True)
        for feature in table.feature_names
    ]
