"""Small files of every format with known contents, written for the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet

Raw = dict[str, list]


def raw_rows(rows: int, seed: int = 0, num_dense: int = 13, num_sparse: int = 26) -> Raw:
    """Columns label, i…, c… of Python values, None = missing; ids below 2**32."""
    rng = np.random.default_rng(seed)

    def missing(values: np.ndarray, share: float) -> list:
        gone = rng.random(rows) < share
        return [None if g else int(v) for g, v in zip(gone, values, strict=True)]

    columns: Raw = {"label": [int(v) for v in rng.integers(0, 2, rows)]}
    for d in range(num_dense):
        columns[f"i{d + 1}"] = missing(rng.integers(-2, 100000, rows), 0.2)
    for f in range(num_sparse):
        columns[f"c{f + 1}"] = missing(rng.integers(0, 2**32, rows), 0.1)
    return columns


def write_tsv(path: Path, raw: Raw) -> None:
    def text(name: str, value: int | None) -> str:
        return "" if value is None else f"{value:08x}" if name[0] == "c" else str(value)

    lines = zip(*([text(name, v) for v in values] for name, values in raw.items()), strict=True)
    path.write_text("".join("\t".join(line) + "\n" for line in lines))


def arrow_table(raw: Raw, lists: bool = False) -> pa.Table:
    def column(name: str, values: list) -> pa.Array:
        kind = pa.int64() if name[0] == "c" else pa.float64() if lists else pa.int32()
        if lists:
            return pa.array([[] if v is None else v if isinstance(v, list) else [v] for v in values], pa.list_(kind))
        return pa.array(values, pa.int64() if name[0] == "c" else kind)

    return pa.table({name: column(name, values) for name, values in raw.items()})


def write_parquet(path: Path, raw: Raw, lists: bool = False, group: int = 100) -> None:
    pa.parquet.write_table(arrow_table(raw, lists), path, row_group_size=group)


def write_orc(path: Path, raw: Raw, lists: bool = False) -> None:
    pa.orc.write_table(arrow_table(raw, lists), str(path), stripe_size=4096)


WRITERS: dict[str, Callable[..., None]] = {
    "tsv": write_tsv,
    "parquet": write_parquet,
    "parquet-lists": lambda path, raw: write_parquet(path, raw, lists=True),
    "orc": write_orc,
    "orc-lists": lambda path, raw: write_orc(path, raw, lists=True),
}


def suffix(kind: str) -> str:
    return "." + kind.split("-")[0]
