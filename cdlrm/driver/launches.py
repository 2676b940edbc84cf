"""`Launcher`: launches for rows of one width, with a team of threads for each owner (see `cuda/common.cuh`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..lookups import Lookups
from . import signatures
from .backend import Backend, DeviceBuffer, Stream
from .plan_arrays import Long, needs_lookup_rows
from .staging import Tray


class Launcher:
    """Kernels on rows of `dim` floats."""

    def __init__(self, backend: Backend, dim: int) -> None:
        self.backend, self.dim = backend, dim
        self.vec = 4 if dim % 4 == 0 else 1
        self.column_steps = signatures.steps_held(dim)
        self._sums: DeviceBuffer = backend.alloc(0)  # of chunks
        self._sums_of = backend.compute_stream()  # whose order torch gives that memory on in

    def launch(
        self, kernel: str, variant: tuple[Any, ...], owners: int, stream: Stream, values: dict[str, Any],
        optimizer: int | None = None,
    ) -> None:  # fmt: skip
        """With a team for each of `owners`."""
        if owners:
            whole = (self.vec, *variant) if optimizer is None else (optimizer, self.vec, *variant)
            grid = signatures.blocks(self.vec, owners)
            self.backend.launch(kernel, whole, grid, signatures.pack(kernel, values), stream)

    def source(self, tray: Tray, lookups: Sequence[Lookups], grad: Tensor, divided: bool) -> dict[str, Any]:
        """Where the gradient of each lookup is."""
        computed = not needs_lookup_rows(lookups)
        return {
            "lookup_row": 0 if computed else tray.at("lookup_row"), "columns": tray.at("columns0"),
            "batch": lookups[0].batch_size, "width": lookups[0].width, "divisor": 0 if divided else tray.at("divisor"),
            "grad": self.backend.address(grad), "dim": self.dim,
        }  # fmt: skip

    def aligned(self, grad: Tensor) -> Tensor:
        """As kernels read it; the caller keeps it until they are launched."""
        return grad.clone() if self.backend.address(grad) % 16 else grad

    def apply(
        self, records: dict[str, int], optimizer: int, tray: Tray, distinct: int, long: Long, source: dict[str, Any],
        formula: dict[str, Any], suppress: dict[str, int], stream: Stream,
    ) -> None:  # fmt: skip
        """Launch the update of `distinct` rows whose segments are in `tray`: short rows, chunks of long ones, sums."""
        seg_lookup = {"seg_lookup": tray.at("seg_lookup")}
        tables = formula.get("tables", 0)
        only_long = {k: v for k, v in formula.items() if k not in ("next_steps", "used", "tables")}
        values = {**records, "seg_slot": tray.at("seg_slot"), "seg_start": tray.at("seg_start"), "distinct": distinct,
                  **seg_lookup, **source, **formula, "tables": tables, **suppress}  # fmt: skip
        self.launch("update_short", (self.column_steps,), max(distinct, tables), stream, values, optimizer)
        if not long.rows:
            return
        sums = self._room_for_sums(long.chunks, stream)
        values = {"chunk_start": tray.at("chunk_start"), "chunk_stop": tray.at("chunk_stop"), "chunks": long.chunks,
                  **seg_lookup, **source, "sums": sums, **suppress}  # fmt: skip
        self.launch("chunk_sums", (self.column_steps,), long.chunks, stream, values)
        values = {**records, "seg_slot": tray.at("seg_slot"), "long_rows": tray.at("long_rows"),
                  "long_chunks": tray.at("long_chunks"), "count": long.rows, "sums": sums, "dim": self.dim,
                  **only_long, **suppress}  # fmt: skip
        self.launch("update_long", (self.column_steps,), long.rows, stream, values, optimizer)

    def _room_for_sums(self, chunks: int, stream: Stream) -> int:
        """`stream` is torch's current one, and comes after all that used the room before."""
        if self._sums.nbytes < 4 * chunks * self.dim:
            if self._sums_of != stream:
                self.backend.wait(self._sums_of, self.backend.record(stream))
            self._sums, self._sums_of = self.backend.alloc(8 * chunks * self.dim), stream
        return self._sums.address
