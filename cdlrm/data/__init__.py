"""Data: files or a generator -> `Batch` (see `cdlrm.data.source` for how)."""

from __future__ import annotations

from cdlrm.data.batch import Batch, Jagged, check_batch
from cdlrm.data.source import Source

__all__ = ["Batch", "Jagged", "Source", "check_batch"]
