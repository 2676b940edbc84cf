"""Arrays of numbers as sources: DLRM's .npz, MLPerf's .bin and TorchRec's .npy; a block is 65,536 rows.

They look like columnar files with columns label, i1…, c1…, so the rest of reading is that of Parquet.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cdlrm.data.columnar import ColumnarSource
from cdlrm.data.prepared import Prepared
from cdlrm.data.stored import StoredArray, array_in, arrays_in
from cdlrm.errors import DataError

__all__ = ["BinarySource", "NpySource", "NpzSource"]

BLOCK_ROWS = 65536


class Part(NamedTuple):
    """A rectangle of an array: `width` columns from `first` on."""

    array: StoredArray
    first: int
    width: int


class Sample(NamedTuple):
    """A file of samples: labels, dense and categorical values of as many rows. numbered: ids are row numbers, of
    tables with `counts` rows; dense_ready: see `Prepared`."""

    file: str
    labels: Part
    dense: Part
    sparse: Part
    numbered: bool = False
    counts: StoredArray | None = None
    dense_ready: bool = False

    @property
    def rows(self) -> int:
        return self.labels.array.shape[0]


def _part(array: StoredArray) -> Part:
    return Part(array, 0, int(np.prod(array.shape[1:])))


class ArraySource(ColumnarSource):
    """Files of arrays. The categorical values may be stored as floats, as DLRM's scripts leave them."""

    open_files = 2  # a compressed archive that is open has a temporary file

    def _prepared(self, file: str) -> Prepared | None:
        with self._reading(file), self._readers.of(file, self._open_file) as reader:
            dense, sparse = (
                [f"{c}{i + 1}" for i in range(n)] for c, n in (("i", reader.dense.width), ("c", reader.sparse.width))
            )
            counts = {} if reader.counts is None else dict(zip(sparse, _checked_counts(reader), strict=True))
        return Prepared(
            dense=dense, sparse=sparse, numbered=reader.numbered, counts=counts, dense_ready=reader.dense_ready
        )

    def _schema_of(self, reader: Sample) -> pa.Schema:
        ids = pa.int64() if reader.sparse.array.dtype.kind == "f" else _type(reader.sparse.array)
        fields = [("label", _type(reader.labels.array))]
        fields += [(f"i{d + 1}", _type(reader.dense.array)) for d in range(reader.dense.width)]
        fields += [(f"c{f + 1}", ids) for f in range(reader.sparse.width)]
        return pa.schema(fields)

    def _sizes(self, reader: Sample) -> tuple[int, list[int | None]]:
        blocks: list[int | None] = [min(BLOCK_ROWS, reader.rows - lo) for lo in range(0, reader.rows, BLOCK_ROWS)]
        return reader.rows, blocks

    def _read(self, reader: Sample, block: int, columns: list[str]) -> pa.Table:
        lo, hi = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, reader.rows)
        seen: dict[int, np.ndarray] = {}

        def lines(part: Part) -> np.ndarray:
            if id(part.array) not in seen:
                seen[id(part.array)] = part.array.rows(lo, hi)
            return seen[id(part.array)][part.first : part.first + part.width]

        arrays = {"label": lines(reader.labels)[0]}
        arrays |= {f"i{d + 1}": line for d, line in enumerate(lines(reader.dense))}
        ids = lines(reader.sparse)
        if ids.dtype.kind == "f":
            ids = _whole(reader.file, ids, lo)
        arrays |= {f"c{f + 1}": line for f, line in enumerate(ids)}
        return pa.table({name: arrays[name] for name in columns})


def _type(array: StoredArray) -> pa.DataType:
    return pa.from_numpy_dtype(array.dtype.newbyteorder("="))


def _whole(file: str, ids: np.ndarray, lo: int) -> np.ndarray:
    whole = ids.astype(np.int64)
    wrong = np.argwhere(whole != ids)
    if len(wrong):
        column, row = (int(i) for i in wrong[0])
        raise DataError(
            f"{file}: column 'c{column + 1}' is {ids[column, row]} in row {lo + row} (from 0) where a whole number is "
            "needed; write ids as integers"
        )
    return whole


def _checked_counts(reader: Sample) -> list[int]:
    assert reader.counts is not None
    rows, sparse = reader.counts.rows(0, reader.counts.shape[0])[0], reader.sparse.width
    if len(rows) != sparse or (rows < 1).any():
        raise DataError(
            f"{reader.file}: `counts` has {len(rows)} numbers, the least {rows.min(initial=0)}, where one of at least "
            f"1 is needed for each of {sparse} columns of ids; prepare the data again"
        )
    return [int(n) for n in rows]


def _same_rows(file: str, arrays: dict[str, StoredArray]) -> None:
    sizes = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name} has {rows}" for name, rows in sizes.items())
        raise DataError(f"{file}: arrays of different lengths ({found} rows); write them with one row a sample")


def _counts_beside(file: str) -> StoredArray | None:
    """The array `counts` of DLRM's `*_fea_count.npz` in the file's folder, where there is one such file."""
    found = sorted(Path(file).parent.glob("*_fea_count.npz"))
    return arrays_in(str(found[0])).get("counts") if len(found) == 1 else None


class NpzSource(ArraySource):
    """What DLRM's data_utils.py writes: X_int [N, n], X_cat [N, m], y [N] and perhaps counts [m], in one file
    (kaggle…_processed.npz) or one a day (…_day_0_processed.npz, with `counts` in …_fea_count.npz beside). Ids are row
    numbers. The days before renumbering (…_day_0.npz, X_cat_t [m, N]) have raw ids.

    Compressed archives are unpacked into temporary files, two at a time (TMPDIR says where)."""

    format = "npz"

    def _open_file(self, file: str) -> Sample:
        arrays = arrays_in(file)
        if "X_cat" not in arrays and "X_cat_t" in arrays:
            arrays["X_cat"] = arrays["X_cat_t"].turned()
        needed = ("X_int", "X_cat", "y")
        for name in needed:
            if name not in arrays:
                raise DataError(
                    f"{file}: there is no array {name} among {', '.join(arrays) or 'none'}; give files that DLRM's "
                    "data_utils.py wrote (X_int, X_cat, y)"
                )
        _same_rows(file, {name: arrays[name] for name in needed})
        numbered = "X_cat_t" not in arrays
        counts = (arrays.get("counts") or _counts_beside(file)) if numbered else None
        return Sample(file, _part(arrays["y"]), _part(arrays["X_int"]), _part(arrays["X_cat"]), numbered, counts)


class BinarySource(ArraySource):
    """MLPerf's binary: 40 little-endian int32 a row: label, 13 integers, 26 ids, which are row numbers; table sizes
    from DLRM's `*_fea_count.npz` beside, where there is one."""

    format = "bin"
    _dense, _sparse = 13, 26

    def _open_file(self, file: str) -> Sample:
        size, width = os.path.getsize(file), 1 + self._dense + self._sparse
        if size % (4 * width):
            raise DataError(
                f"{file}: the size of {size} bytes is no multiple of {4 * width}, the bytes of a row of {width} int32; "
                "the file may be truncated, or is not MLPerf's binary"
            )
        array = StoredArray(open(file, "rb"), 0, np.dtype("<i4"), (size // (4 * width), width))  # noqa: SIM115
        first = 1 + self._dense
        labels, dense = Part(array, 0, 1), Part(array, 1, self._dense)
        return Sample(file, labels, dense, Part(array, first, self._sparse), True, _counts_beside(file))


class NpySource(ArraySource):
    """TorchRec's triples: X_dense.npy float [N, n], used as they are, X_sparse.npy int [N, m], and X_labels.npy [N].
    Any one of the three names the triple."""

    format = "npy"

    def __init__(self, files: Sequence[str], **settings: Any) -> None:
        super().__init__(list(dict.fromkeys(_triple(name) + "_dense.npy" for name in files)), **settings)

    def _open_file(self, file: str) -> Sample:
        stem = _triple(file)
        arrays = {}
        for title in ("dense", "sparse", "labels"):
            name = f"{stem}_{title}.npy"
            try:
                arrays[title] = array_in(name, open(name, "rb"))  # noqa: SIM115 (stays open as long as the array)
            except FileNotFoundError:
                raise DataError(
                    f"{name}: no such file, where {stem}_dense.npy, _sparse.npy and _labels.npy are needed together; "
                    "put it beside"
                ) from None
        _same_rows(stem, arrays)
        labels, dense, sparse = (_part(arrays[title]) for title in ("labels", "dense", "sparse"))
        return Sample(file, labels, dense, sparse, dense_ready=True)


def _triple(name: str) -> str:
    """The common beginning of the three names."""
    found = re.fullmatch(r"(.*)_(dense|sparse|labels)\.npy", name)
    if not found:
        raise DataError(
            f"{name}: a file of a triple X_dense.npy, X_sparse.npy, X_labels.npy is needed; rename it, or give others"
        )
    return found[1]
