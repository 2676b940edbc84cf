"""`EmbeddingBagCollection`: the embedding tables of a model as one `torch.nn.Module`.

The rows live in a store, are trained in a cache, and are updated inside the backward pass.  With
`cdlrm.lookahead` around the loader the rows of coming batches are in the cache before they are
needed; without it they are fetched on demand.  The results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .autograd import GroupCall, pooled_lookup
from .driver.cpu import CpuDriver
from .errors import ConfigError, InputError, UsageError
from .fused import FusedOptimizer
from .group import Group, feature_slots
from .ahead import Lookahead, lookahead
from .lookups import FeatureSlot, Lookups, flatten
from .optim import Optimizer
from .placement import check_cache_settings, place, split_groups
from .stats import group_stats, total
from .table import Table

NONFINITE = ("raise", "skip")


class EmbeddingBagCollection(nn.Module):
    """Pooled lookups of several tables, through a cache that is exact.

    Arguments:
        tables: `Table`s with distinct names and features.
        optimizer: one specification (`SGD(lr=)`, `RowWiseAdagrad(lr=)`, …) for all tables, or a mapping
            table name -> specification.  Tables of equal dim and optimizer form a group with one cache.
        cache_rows: slots in all ("auto": everything resident if it fits); `cache_ratio` instead: the
            share of the rows that the cache holds.
        device: "auto" or "cpu".   store: "ram".
        strict: refuse a batch that needs more rows than the cache has, instead of growing.
        seed: of the initial values.
        nonfinite: "raise" NonFiniteGradientError on NaN or infinity in a gradient, or "skip" that
            step's update and count it in `stats()["skipped_steps"]`.
        shards: of the planner (a power of two; default: from the cache size).

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
        seed: int = 0,
        nonfinite: str = "raise",
        shards: int | None = None,
    ) -> None:
        super().__init__()
        self.tables = _checked_tables(tables)
        check_cache_settings(cache_rows, cache_ratio)
        if nonfinite not in NONFINITE:
            raise ConfigError(f"nonfinite={nonfinite!r}: must be one of {', '.join(NONFINITE)}.")
        if store != "ram":
            raise ConfigError(f'store={store!r}: this version keeps tables in host memory only; use store="ram".')
        if str(device) not in ("auto", "cpu"):
            raise ConfigError(f'device={str(device)!r}: this version runs on the CPU only; use "cpu" or "auto".')
        self.nonfinite = nonfinite
        self.features = [feature for table in self.tables for feature in table.feature_names]
        self.driver = CpuDriver()
        self.anchor = nn.Parameter(torch.zeros(()))  # makes autograd call our backward
        self.notes: list[str] = []  # what was chosen automatically, and why
        self._closed = False
        self.groups = self._make_groups(_optimizers(self.tables, optimizer), cache_rows, cache_ratio, strict, seed, shards)
        dims = sorted({table.embedding_dim for table in self.tables})
        self._features_of_dim = {
            dim: [f for table in self.tables if table.embedding_dim == dim for f in table.feature_names] for dim in dims
        }
        self._slots: dict[Group, list[FeatureSlot]] = {}
        for group in self.groups:
            columns = {feature: c for c, feature in enumerate(self._features_of_dim[group.dim])}
            self._slots[group] = feature_slots(group.tables, group.bases, columns)
        self.optimizer = FusedOptimizer(self.groups)

    def _make_groups(
        self,
        optimizers: list[Optimizer],
        cache_rows: int | str,
        cache_ratio: float | None,
        strict: bool,
        seed: int,
        shards: int | None,
    ) -> list[Group]:
        members = split_groups(self.tables, optimizers)
        rows = [sum(self.tables[n].num_embeddings for n in numbers) for numbers in members]
        free = [i for i, numbers in enumerate(members) if not self.tables[numbers[0]].resident]
        sizes = []
        for i in free:
            dim = self.tables[members[i][0]].embedding_dim
            sizes.append(4 * (dim + optimizers[members[i][0]].state_width(dim)))
        slots = dict(enumerate(rows))
        if free:
            chosen, self.notes = place([rows[i] for i in free], sizes, cache_rows, cache_ratio)
            slots.update(zip(free, chosen, strict=True))
        return [
            Group(
                [self.tables[n] for n in numbers], numbers, optimizers[numbers[0]], self.driver, cache_rows=slots[i],
                resident=slots[i] >= rows[i], strict=strict, seed=seed, shards=shards,
            )
            for i, numbers in enumerate(members)
        ]  # fmt: skip

    # --- forward ---

    def forward(self, features: Any) -> Tensor | dict[str, Tensor]:
        """Pooled rows, float32 [B, features, dim]; with mixed dims a dict feature -> [B, dim].

        `features`: a `Batch`, a mapping feature -> (values, offsets[, weights]) or bare values (one id
        per sample), or a TorchRec KeyedJaggedTensor.  With gradients enabled this is a training call
        (a backward may follow); otherwise it reads the newest values and changes nothing.

        Raises InputError for bad input, UsageError after `close`.
        """
        self.require_open()
        inputs, size = _inputs(features)
        calls = [
            GroupCall(group, flatten(self._slots[group], len(self._features_of_dim[group.dim]), inputs, size))
            for group in self.groups
        ]
        weights = self._weights_that_learn(inputs)
        outputs = pooled_lookup(self, calls, self.anchor, weights)
        if len(outputs) == 1:
            return outputs[0]
        return {
            feature: output[:, column]
            for (_, names), output in zip(self._features_of_dim.items(), outputs, strict=True)
            for column, feature in enumerate(names)
        }

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

    def feature_order(self, group: Group) -> list[str]:
        """Features of `group` in the order of its lookups."""
        return [slot.feature for slot in self._slots[group]]

    def lookahead_calls(self, features: Any) -> dict[Group, Lookups]:
        """What `forward(features)` will look up in each group (used by `cdlrm.lookahead`)."""
        inputs, size = _inputs(features)
        return {
            group: flatten(self._slots[group], len(self._features_of_dim[group.dim]), inputs, size)
            for group in self.groups
        }

    def lookahead(self, loader: Iterable[Any], **settings: Any) -> Lookahead:
        """`cdlrm.lookahead(self, loader, **settings)`."""
        return lookahead(self, loader, **settings)

    # --- tables as a whole ---

    def flush(self) -> None:
        """Write every changed row of the cache to the store."""
        for group in self.groups:
            group.flush()

    def close(self) -> None:
        """Stop look-aheads, bring all rows home, stop threads.  Tables stay readable; forward does not work
        any more.  May be called twice."""
        if self._closed:
            return
        for group in self.groups:
            if group.attached is not None:
                group.attached.close()
        for group in self.groups:
            group.close()
        self._closed = True
        self.driver.close()

    def require_open(self) -> None:
        if self._closed:
            raise UsageError("this EmbeddingBagCollection was closed; make a new one (its state_dict() still works).")

    def check(self) -> None:
        """Verify rules and structure; raises AssertionError naming what is broken (for tests)."""
        for group in self.groups:
            group.check()

    def stats(self) -> dict[str, Any]:
        """Counters since the module was made, summed over groups; see `cdlrm.stats`."""
        return total([group_stats(group) for group in self.groups])

    def table_weight(self, name: str) -> Tensor:
        """A copy of a table's newest weights, float32 [num_embeddings, embedding_dim]."""
        return torch.from_numpy(self._group_of(name).table_values(name)[0])

    def table_state(self, name: str) -> dict[str, Tensor]:
        """Copies of a table's optimizer state by torch's names: float32 [rows] or [rows, dim]."""
        group = self._group_of(name)
        state = group.table_values(name)[1]
        out = {}
        for key, (lo, hi) in group.optimizer.state_names(group.dim).items():
            part = torch.from_numpy(np.ascontiguousarray(state[:, lo:hi]))
            out[key] = part[:, 0] if hi - lo == 1 and group.optimizer.state_width(group.dim) == 1 else part
        return out

    def set_table(self, name: str, weight: Tensor | np.ndarray) -> None:
        """Replace a table's weights by float32 [num_embeddings, embedding_dim]; optimizer state stays."""
        group = self._group_of(name)
        lo, hi = group.span(name)
        values = np.ascontiguousarray(weight.detach().cpu().numpy() if isinstance(weight, Tensor) else weight)
        if values.dtype != np.float32 or values.shape != (hi - lo, group.dim):
            raise InputError(
                f"table {name!r}: weights are {values.dtype} {list(values.shape)}; pass float32 {[hi - lo, group.dim]}."
            )
        group.set_table(name, values, None)

    def _group_of(self, name: str) -> Group:
        for group in self.groups:
            if any(table.name == name for table in group.tables):
                return group
        names = ", ".join(repr(table.name) for table in self.tables)
        raise ConfigError(f"there is no table {name!r}; the tables are {names}.")

    def _key(self, table: Table) -> str:
        return f"embedding_bags.{table.name}.weight"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for table in self.tables:
            destination[prefix + self._key(table)] = self.table_weight(table.name)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        wanted = {prefix + self._key(table): table.name for table in self.tables}
        for key, name in wanted.items():
            if key not in state_dict:
                missing_keys.append(key)
                continue
            try:
                self.set_table(name, state_dict[key])
            except InputError as error:
                error_msgs.append(str(error))
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in wanted]

    def extra_repr(self) -> str:
        stats = self.stats()
        return f"tables={len(self.tables)}, rows={stats['table_rows']}, cache_rows={stats['cache_rows']}"


def _inputs(features: Any) -> tuple[Mapping[str, Any], int | None]:
    """The mapping feature -> (values, offsets, weights) of what a user passes, and B where it is known."""
    sparse = getattr(features, "sparse", None)
    if isinstance(sparse, Mapping):
        return sparse, int(features.size)
    if isinstance(features, Mapping):
        return features, None
    if hasattr(features, "keys") and hasattr(features, "stride"):  # TorchRec's KeyedJaggedTensor
        out = {}
        for key in features.keys():  # noqa: SIM118 - not a mapping
            jagged = features[key]
            out[key] = (jagged.values(), jagged.offsets(), jagged.weights_or_none())
        return out, int(features.stride())
    raise InputError(
        f"the input is a {type(features).__name__}; pass a cdlrm.Batch, a mapping feature -> (values, offsets[, weights]), "
        f"or a KeyedJaggedTensor."
    )


def _checked_tables(tables: Sequence[Table]) -> list[Table]:
    out = list(tables)
    if not out:
        raise ConfigError("tables=[]: give at least one Table.")
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
        if not isinstance(value, Optimizer) or type(value) is Optimizer:
            raise ConfigError(
                f"optimizer={value!r}: give a specification of cdlrm, such as cdlrm.SGD(lr=0.1) or "
                f"cdlrm.RowWiseAdagrad(lr=0.01)."
            )
    return chosen
