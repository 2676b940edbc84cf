"""Where all records live while they are not cached: host memory, or a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..driver.base import Driver
from ..errors import ConfigError
from ..initial import Initializer
from ..optim import Optimizer
from ..table import Table
from .file import FileStore
from .folder import seed_of
from .ram import RamStore

__all__ = ["FileStore", "RamStore", "Store", "open_store", "seed_in"]


class Store(Protocol):
    """Home of the records (weights float32 [D], then state float32 [S]) of the rows 0 .. num_rows - 1.

    A row that was never trained is not stored: its value is generated.  `read` and `write` are called
    from one thread at a time.
    """

    kind: str
    num_rows: int
    dim: int
    state_width: int
    initial_state: np.float32
    initializer: Initializer
    trained: np.ndarray  # one bit a row, packed: was ever trained
    changed: np.ndarray  # one bit a row, packed: may differ from what the checkpoint `saved["base"]` has
    writes: int  # how often records were written

    @property
    def record_bytes(self) -> int: ...

    @property
    def saved(self) -> Mapping[str, Any]: ...

    def read(self, rows: np.ndarray, weight: np.ndarray, state: np.ndarray, index: np.ndarray) -> int:
        """Copy the records of `rows int64 [n]` to `weight[index]`, `state[index]` (index int32 [n]); returns
        how many were stored (the others were generated)."""

    def write(self, rows: np.ndarray, weight: np.ndarray, state: np.ndarray, index: np.ndarray) -> None:
        """Store `weight[index]`, `state[index]` as the records of the distinct `rows int64 [n]`."""

    def get(self, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of weights [hi-lo, D] and state [hi-lo, S] of the rows [lo, hi)."""

    def put(self, lo: int, weight: np.ndarray | None, state: np.ndarray | None) -> None:
        """Replace weights and/or state of the rows from `lo` on (float32, as `get` returns them)."""

    def remember(self, key: str, value: object) -> None:
        """Keep a small JSON value with the records; `saved` has what was kept when the store was opened."""

    def clear_changed(self, base: Any) -> None:
        """The checkpoint `base` (a JSON value, kept as `saved["base"]`; None: no known one) has every record as it is
        now."""

    def flush(self) -> None:
        """Make what was written durable, where that means anything."""

    def close(self) -> None:
        """Release what the store holds.  May be called twice."""


def open_store(
    spec: str,
    group: int,
    tables: Sequence[Table],
    optimizer: Optimizer,
    initializer: Initializer,
    driver: Driver,
    seed: int,
    fresh: bool = False,
) -> Store:
    """The store of group number `group` with `tables`: `spec` is "ram" or "file:DIR".

    `fresh`: whatever the folder holds is discarded.
    """
    rows, dim = sum(table.num_embeddings for table in tables), tables[0].embedding_dim
    if spec == "ram":
        return RamStore(rows, dim, optimizer.state_width(dim), optimizer.initial_state, initializer, driver)
    if isinstance(spec, str) and spec.startswith("file:") and len(spec) > len("file:"):
        return FileStore(spec[len("file:") :], group, tables, optimizer, initializer, driver, seed, fresh=fresh)
    raise ConfigError(f'store={spec!r}: must be "ram", or "file:DIR" for tables larger than the memory.')


def seed_in(spec: str) -> int | None:
    """The seed of the records that `spec` has already: of a folder that was used before, else None."""
    return seed_of(Path(spec[len("file:") :])) if isinstance(spec, str) and spec.startswith("file:") else None
