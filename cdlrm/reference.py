"""`TableReference`: stands in a state_dict for a table whose copy would not fit the host memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TableReference:
    """Rows of `table`, float32 [rows, dim], in the store's data file `file` (of `store="file:DIR"`).

    A module that has this file open as its store accepts the reference in `load_state_dict`: the rows
    are there.  To move them elsewhere save a checkpoint (`cdlrm.save`) and read it in pieces
    (`cdlrm.load_tables`, `cdlrm.iter_tables`).
    """

    file: str
    table: str
    rows: int
    dim: int
