"""Criteo's click logs as published: text of TAB-separated columns, label, integers, 8-digit hexadecimal ids, no
header."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Any, Self

import numpy as np

from cdlrm.data import tsvkernel as kernel
from cdlrm.data.columns import Columns
from cdlrm.data.filesource import FileSource
from cdlrm.data.hashing import permutation, row_mask
from cdlrm.data.kernels import LOG1P
from cdlrm.data.packed import LONGEST_LINE_BYTES, PackedText, codec_of
from cdlrm.data.source import Piece
from cdlrm.errors import ConfigError, DataError

__all__ = ["TsvSource", "plain_lines"]

PIECE_BYTES = 2**24
"""A block is the lines that begin in one such piece of a file (about 70,000 lines)."""
PACKED_PIECE_BYTES = 2**22
"""The same of a compressed file, in compressed bytes."""
_NO_LIMIT = 2**62


class TsvSource(FileSource):
    """columns: num_dense (default 13) and num_sparse (default: the other columns of the first line, which must be 26
    if neither is given). An empty field is a missing value, ids are 1 to 16 hexadecimal digits. The features are
    named c1, c2, …. Files may be compressed by gzip or zstd, see `cdlrm.data.packed` for what that costs.

    The number of rows is known only after counting the lines, which `len()` and a row range do once.
    """

    format = "tsv"

    column_settings = ("num_dense", "num_sparse")

    def _open(self, columns: dict[str, Any]) -> None:
        num_dense, num_sparse = columns.get("num_dense"), columns.get("num_sparse")
        self._start_reading()
        self._codecs = {name: codec for name in self.files if (codec := self._codec(name))}
        found = self._first_line().rstrip(b"\r\n").count(b"\t") + 1
        self.num_dense = 13 if num_dense is None else num_dense
        sparse = found - 1 - self.num_dense if num_sparse is None else num_sparse
        if num_dense is None and num_sparse is None:
            sparse = 26
        if self.num_dense < 0 or sparse < 0:
            raise ConfigError(
                f"num_dense={self.num_dense} and num_sparse={sparse} where at least 0 is needed; change them"
            )
        needed = 1 + self.num_dense + sparse
        if found != needed and not self.skip_bad:
            raise DataError(
                f"{self.files[0]}: line 1 has {found} columns where {needed} are needed "
                f"(label, {self.num_dense} integers, "
                f"{sparse} ids, separated by TAB); give a file as Criteo publishes it, or num_dense and num_sparse; "
                "other layouts: see cdlrm convert --layout"
            )
        self.features = [f"c{f + 1}" for f in range(sparse)]
        self.label, self.dense = "label", [f"i{d + 1}" for d in range(self.num_dense)]
        self._blocks = [(file, piece) for file in self.files for piece in range(self._pieces_of(file))]
        self._rows: list[int | None] = [None] * len(self._blocks)

    def _codec(self, name: str) -> str | None:
        with self._reading(name), open(name, "rb") as file:
            return codec_of(file.read(4))

    def _pieces_of(self, file: str) -> int:
        return -(-os.path.getsize(file) // (PACKED_PIECE_BYTES if file in self._codecs else PIECE_BYTES))

    def _first_line(self) -> bytes:
        name = self.files[0]
        if name in self._codecs:
            text = self._unpacked(name, 0)
            self._start_reading()
            return text[: text.find(b"\n") + 1 or len(text)]
        with self._reading(name), open(name, "rb") as file:
            return file.readline(LONGEST_LINE_BYTES)

    # The source.

    def restricted(self, row_range: tuple[int, int | None], **changes: Any) -> Self:
        other = super().restricted(row_range, **changes)
        other._start_reading()  # another thread may read through it
        return other

    def _shuffled(self, pieces: Sequence[Piece], epoch: int) -> Sequence[int]:
        """Compressed files in any order, but each from its beginning to its end."""
        if not self._codecs:
            return super()._shuffled(pieces, epoch)
        groups: dict[str, list[int]] = {}
        for place, piece in enumerate(pieces):
            groups.setdefault(self._blocks[piece.block][0], []).append(place)
        listed = list(groups.values())
        return [place for group in permutation(len(listed), self.seed, epoch) for place in listed[group]]

    def num_blocks(self) -> int:
        return len(self._blocks)

    def _known_rows(self) -> int | None:
        known = [rows for rows in self._rows if rows is not None]
        return sum(known) if len(known) == len(self._rows) else None

    def block_rows(self, block: int) -> int:
        rows = self._rows[block]
        if rows is None:
            rows = self._rows[block] = int(kernel.count_lines(self._lines(block)))
        return rows

    def reading_threads(self) -> int:
        return 1

    def start_block(self, threads: Executor, block: int, lo: int, hi: int | None) -> Future[np.ndarray]:
        return threads.submit(self._lines, block)

    def read_block(self, block: int, lo: int, hi: int | None, started: Any = None) -> tuple[Columns, int]:
        data = self._lines(block) if started is None else started.result()
        lines = int(kernel.count_lines(data))
        self._rows[block] = lines
        rows = max(0, (lines if hi is None else min(hi, lines)) - lo)
        last = _NO_LIMIT if hi is None else hi
        columns, good, report = self._parse(data, lo, last, rows, self.skip_bad)
        if good < 0:
            raise DataError(self._what_is_wrong(block, data, report))
        if good < rows and self._more_examples > 0:
            self._name_bad(block, data, lo, last, rows, rows - good)
        return Columns(columns.dense[:good], columns.labels[:good], columns.ids[:, :good]), rows - good

    def _parse(self, data: np.ndarray, lo: int, last: int, rows: int, skip: bool) -> tuple[Columns, int, np.ndarray]:
        """Columns with room for `rows`, how many are in use (-1 at a bad line), and the kernel's report of that
        line."""
        dense = np.empty((rows, self.num_dense), np.float64 if self.raw else np.float32)
        labels = np.empty(rows, np.float32)
        ids = np.empty((len(self.features), rows), np.int64)
        report = np.zeros(5, np.int64)
        good = kernel.parse_lines(
            data, lo, last, kernel.HEX, LOG1P, self.ids == "hash" and not self.raw,
            np.array([m.rows for m in self.id_maps], np.uint64),
            np.array([row_mask(m.rows) for m in self.id_maps], np.uint64),
            np.array([m.missing for m in self.id_maps], np.int64), skip, dense, labels, ids, report, self.raw,
        )  # fmt: skip
        return Columns(dense, labels, ids), good, report

    def _name_bad(self, block: int, data: np.ndarray, lo: int, last: int, rows: int, bad: int) -> None:
        """What is wrong with the first bad lines: the block is read once more for each of these few."""
        for _ in range(min(bad, self._more_examples)):
            report = self._parse(data, lo, last, rows, False)[2]
            self._left_out(self._what_is_wrong(block, data, report))
            lo = int(report[kernel.LINE]) + 1

    def _lines(self, block: int) -> np.ndarray:
        """The bytes of all lines of the block."""
        name, piece = self._blocks[block]
        if name in self._codecs:
            return np.frombuffer(self._unpacked(name, piece), np.uint8)
        with self._reading(name):
            return plain_lines(name, piece)

    def _start_reading(self) -> None:
        self._text: PackedText | None = None
        self._lock = Lock()  # of the unpacked text, which the reading thread uses as well

    def _unpacked(self, name: str, piece: int) -> bytes:
        with self._lock, self._reading(name):
            if self._text is None or self._text.name != name:
                if self._text is not None:
                    self._text.close()
                self._text = PackedText(name, self._codecs[name], os.path.getsize(name), PACKED_PIECE_BYTES)
            return self._text.lines(piece)

    # Bad lines.

    def _what_is_wrong(self, block: int, data: np.ndarray, report: np.ndarray) -> str:
        name, piece = self._blocks[block]
        kind, line, column, begin, end = (int(v) for v in report)
        field = data[begin : min(end, begin + 40)].tobytes().decode("utf-8", "replace")
        where = f"{name}: {self._line_number(block, line)}: "
        remedy = "correct the line, or pass bad_rows='skip'"
        found, needed = _line(data, line).count(b"\t") + 1, 1 + self.num_dense + len(self.features)
        if found != needed:  # whatever the kernel stumbled over first
            return f"{where}{found} columns where {needed}, separated by TAB, are needed; {remedy}"
        if kind == kernel.LABEL:
            return f"{where}the label is {field!r} where 0 or 1 is needed (there is no header line); {remedy}"
        if kind == kernel.INTEGER:
            return (
                f"{where}column i{column} is {field!r} where an integer of at most 18 digits "
                f"or nothing is needed; {remedy}"
            )
        feature = column - 1 - self.num_dense
        if kind == kernel.RANGE:
            return (
                f"{where}column '{self.features[feature]}' is {int(field, 16)}, outside "
                f"[0, {self.table_rows[feature]}); "
                "give the table more rows (table_rows), hash the ids (ids='hash'), "
                "convert the files with cdlrm convert --use-vocabulary if these are not row numbers, "
                "or pass bad_rows='skip'"
            )
        if kind == kernel.TRUNCATED:
            return (
                f"{where}the file ends inside the id {field!r}, so it is truncated; get it "
                "again, or pass bad_rows='skip'"
            )
        return (
            f"{where}column '{self.features[feature]}' is {field!r} where a hexadecimal id or "
            f"nothing is needed; {remedy}"
        )

    def _line_number(self, block: int, line: int) -> str:
        """ "line N" of the file; of a compressed one whose beginning we have not read (a run that was resumed), of its
        piece, since unpacking goes forwards only."""
        name, piece = self._blocks[block]
        before = range(block - piece, block)
        if name in self._codecs and any(self._rows[b] is None for b in before):
            return f"line {1 + line} behind byte {piece * PACKED_PIECE_BYTES:,} of the compressed file"
        return f"line {1 + line + sum(self.block_rows(b) for b in before)}"

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "num_dense": self.num_dense}


def plain_lines(name: str, piece: int) -> np.ndarray:
    """uint8: the bytes of all lines that begin in a piece of a file. Raises OSError, and DataError for a line without
    end."""
    begin = piece * PIECE_BYTES
    with open(name, "rb", buffering=0) as file:
        # From the byte before, which tells whether a line begins here; to the end of the line of the last byte.
        file.seek(max(begin - 1, 0))
        data = _read_fully(file, PIECE_BYTES + min(begin, 1))
        tail = b"" if data.endswith(b"\n") else file.read(1 << 16)
        while tail and b"\n" not in tail and len(tail) <= LONGEST_LINE_BYTES:
            more = file.read(1 << 16)
            if not more:
                break
            tail += more
    if len(tail) > LONGEST_LINE_BYTES:
        raise DataError(
            f"{name}: a line has more than {LONGEST_LINE_BYTES} bytes; give TAB-separated text with one sample a line"
        )
    start = data.find(b"\n") + 1 if begin else 0
    if begin and not start:
        return np.zeros(0, np.uint8)
    end = tail.find(b"\n") + 1 or len(tail)
    return np.frombuffer(data + tail[:end] if end else data, np.uint8)[start:]


def _read_fully(file: Any, size: int) -> bytes:
    """`size` bytes, or all there are."""
    data = file.read(size)
    while data and len(data) < size:
        more = file.read(size - len(data))
        if not more:
            break
        data += more
    return data


def _line(data: np.ndarray, number: int) -> bytes:
    return data.tobytes().split(b"\n", number + 1)[number]
