"""The numba kernel that reads Criteo's text format in one pass: bytes -> dense features, labels and row numbers."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from cdlrm.data.hashing import to_row

__all__ = ["COLUMN", "COLUMNS", "HEX", "ID", "INTEGER", "LABEL", "RANGE", "TRUNCATED", "count_lines", "parse_lines"]

# Kinds of bad lines.
COLUMNS, LABEL, INTEGER, ID, RANGE, TRUNCATED = 1, 2, 3, 4, 5, 6
# Where the kernel reports: the kind, the line (counted from the piece's first), the column, and first and last+1 byte
# of the field.
KIND, LINE, COLUMN, BEGIN, END = 0, 1, 2, 3, 4

_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO = 9, 10, 13, 45, 48

HEX = np.full(256, 255, np.uint8)
"""Value of a hexadecimal digit, 255 for every other byte."""
for _digit in range(16):
    HEX[ord("0123456789abcdef"[_digit])] = HEX[ord("0123456789ABCDEF"[_digit])] = _digit


@njit(cache=True, nogil=True)
def count_lines(data: np.ndarray) -> int:
    """Lines of the text; one without its newline counts."""
    lines = 0
    for i in range(len(data)):
        lines += data[i] == _NEWLINE
    if len(data) and data[len(data) - 1] != _NEWLINE:
        lines += 1
    return lines


@njit(cache=True, nogil=True)
def _parse_line(
    data: np.ndarray,
    at: int,
    row: int,
    digits: np.ndarray,
    table: np.ndarray,
    hashed: bool,
    table_rows: np.ndarray,
    masks: np.ndarray,
    missing: np.ndarray,
    dense: np.ndarray,
    labels: np.ndarray,
    ids: np.ndarray,
    report: np.ndarray,
    raw: bool,
) -> int:
    """Parse the line that starts at byte `at`; returns the byte behind its newline, or -1 with `report` filled."""
    size = len(data)
    count_dense, count_ids = dense.shape[1], ids.shape[0]
    for column in range(1 + count_dense + count_ids):
        begin = at
        kind = 0
        if column == 0:
            value = np.int64(data[at]) - _ZERO if at < size else np.int64(-1)
            if 0 <= value <= 1:
                labels[row] = value
                at += 1
            else:
                kind = LABEL
        elif column <= count_dense:
            negative = at < size and data[at] == _MINUS
            at += negative
            first = at
            value = np.int64(0)
            while at < size and np.uint8(data[at] - _ZERO) < 10:
                value = value * 10 + np.int64(data[at] - _ZERO)
                at += 1
            if (at == first and negative) or at - first > 18:
                kind = INTEGER
            if raw:
                dense[row, column - 1] = np.nan if at == first else np.float64(-value if negative else value)
            elif negative or value <= 0:
                dense[row, column - 1] = 0.0
            elif value < 65536:
                dense[row, column - 1] = table[value]
            else:
                dense[row, column - 1] = math.log1p(np.float64(value))
        else:
            f = column - 1 - count_dense
            word = np.uint64(0)
            while at < size and digits[data[at]] != 255:
                word = (word << np.uint64(4)) | np.uint64(digits[data[at]])
                at += 1
            if at == begin:
                ids[f, row] = missing[f]
            elif at - begin > 16:
                kind = ID
            elif hashed:
                ids[f, row] = to_row(np.int64(word), table_rows[f], masks[f])
            elif word <= table_rows[f] - np.uint64(1):  # rows = 0: no bound
                ids[f, row] = np.int64(word)
            else:
                kind = RANGE
        # What has to come now: a TAB, or the end of the line behind the last column.
        last = column == count_dense + count_ids
        if last and at < size and data[at] == _RETURN:
            at += 1
        ended = at >= size or data[at] == _NEWLINE
        if kind == 0 and not ended and data[at] != _TAB:
            kind = LABEL if column == 0 else (INTEGER if column <= count_dense else ID)
        if kind == 0 and ended != last:
            kind = COLUMNS
        if kind == 0 and last and at >= size and 0 < at - begin < 8:
            kind = TRUNCATED
        if kind:
            while at < size and data[at] != _TAB and data[at] != _NEWLINE:
                at += 1
            report[KIND], report[COLUMN], report[BEGIN], report[END] = kind, column, begin, at
            return -1
        at += 1
    return at


@njit(cache=True, nogil=True)
def parse_lines(
    data: np.ndarray,
    first_line: int,
    last_line: int,
    digits: np.ndarray,
    table: np.ndarray,
    hashed: bool,
    table_rows: np.ndarray,
    masks: np.ndarray,
    missing: np.ndarray,
    skip: bool,
    dense: np.ndarray,
    labels: np.ndarray,
    ids: np.ndarray,
    report: np.ndarray,
    raw: bool,
) -> int:
    """Lines first_line..last_line-1 of `data` (uint8) into dense [R, n], labels [R] and ids [F, R]; returns the rows
    written.

    raw: dense features are the numbers themselves, NaN where missing.
    A bad line is left out when `skip`; otherwise -1 is returned and `report` says where.
    """
    row = line = at = 0
    while at < len(data) and line < last_line:
        start = at
        if line >= first_line:
            at = _parse_line(
                data,
                at,
                row,
                digits,
                table,
                hashed,
                table_rows,
                masks,
                missing,
                dense,
                labels,
                ids,
                report,
                raw,
            )
            if at >= 0:
                row += 1
            elif not skip:
                report[LINE] = line
                return -1
        if at < 0 or line < first_line:
            at = start
            while at < len(data) and data[at] != _NEWLINE:
                at += 1
            at += 1
        line += 1
    return row
