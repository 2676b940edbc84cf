"""What is said of a batch that needs more rows at once than the cache has: that it grows, or why it is refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from .errors import CacheTooSmallError
from .plan import Plan
from .table import Table

log = logging.getLogger("cdlrm")

WARNED_BYTES = 1 << 20  # of growth; of less is told, but nobody warned


class Growth:
    """Of the cache of one group, which had `first_rows` rows of `record_bytes`."""

    def __init__(self, first_rows: int, record_bytes: int) -> None:
        self._first_rows, self._record_bytes = first_rows, record_bytes
        self._told = 0  # rows

    def tell(self, plan: Plan) -> None:
        """Say that the cache grows, the first time and when it has grown by a quarter since; a warning where it
        matters."""
        if plan.grows and plan.cache_rows >= 1.25 * self._told:
            self._told = plan.cache_rows
            growth = (plan.cache_rows - self._first_rows) * self._record_bytes
            log.log(
                logging.WARNING if growth >= WARNED_BYTES else logging.INFO,
                "batch %d needs %d rows at once: the cache grows to %d rows (%.1f MiB; said again when it has grown by "
                "a quarter); raise cache_rows (--cache-rows, --cache-ratio), or use strict=True (--strict) to refuse "
                "such batches",
                plan.batch, plan.distinct, plan.cache_rows, plan.cache_rows * self._record_bytes / 2**20,
            )  # fmt: skip


def refused(error: CacheTooSmallError, tables: Sequence[Table], share: float) -> CacheTooSmallError:
    """Of a batch that `strict` refuses: with the cache_rows of the whole module, of which `tables` have a `share`."""
    names = ", ".join(repr(table.name) for table in tables[:3]) + (", …" if len(tables) > 3 else "")
    total = math.ceil(error.need / share)
    return CacheTooSmallError(
        f"batch {error.batch} has {error.distinct} distinct rows of dim {tables[0].embedding_dim} (tables {names}) and "
        f"needs cache_rows={total} in all ({error.need} for these tables, which have {error.have} now); raise "
        f"cache_rows (--cache-rows) or cache_ratio (--cache-ratio), use a smaller batch, or allow growth "
        f"(strict=False, no --strict)."
    )
