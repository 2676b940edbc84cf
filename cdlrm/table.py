"""`Table`: one logical embedding table and the features that read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .errors import ConfigError

Init = Callable[[np.ndarray, int], np.ndarray]
POOLINGS = ("sum", "mean")


@dataclass(frozen=True)
class Table:
    """`num_embeddings` rows of `embedding_dim` float32.

    `pooling` of its bags is "sum" or "mean"; `features` (default: the table's name) are the inputs
    that look rows up here; `init(rows int64 [K], dim) -> float32 [K, dim]` gives initial values as a
    function of the row numbers alone (default: uniform in ±sqrt(1/num_embeddings)); `resident` keeps
    the whole table on the device.  Raises ConfigError naming the value that cannot be.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    pooling: str = "sum"
    features: Sequence[str] | None = None
    init: Init | None = None
    resident: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"Table(name={self.name!r}): the name must be a non-empty string.")
        for field, low in (("num_embeddings", 1), ("embedding_dim", 1)):
            value = getattr(self, field)
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < low:
                raise ConfigError(f"table {self.name!r}: {field}={value!r} must be an integer, {low} or more.")
            object.__setattr__(self, field, int(value))
        if self.pooling not in POOLINGS:
            raise ConfigError(f"table {self.name!r}: pooling={self.pooling!r} must be one of {', '.join(POOLINGS)}.")
        features = (self.name,) if self.features is None else tuple(self.features)
        if not features or isinstance(self.features, str) or not all(isinstance(f, str) and f for f in features):
            raise ConfigError(f"table {self.name!r}: features={self.features!r} must be a list of feature names.")
        if self.init is not None and not callable(self.init):
            raise ConfigError(f"table {self.name!r}: init={self.init!r} must be callable or None.")
        object.__setattr__(self, "features", features)

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(self.features or ())
