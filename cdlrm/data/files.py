"""Which files a source consists of, and of which format they are."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cdlrm.errors import DataError

__all__ = ["FORMATS", "expand", "fingerprint", "format_of", "natural_key"]

FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".orc": "orc",
    ".tsv": "tsv",
    ".txt": "tsv",
    ".csv": "tsv",
    "": "tsv",
}
"""Suffix -> format. A name without suffix (day_0) is Criteo's text, as it is published; so is .csv, if
TAB-separated."""
_MAGIC = {b"PAR1": "Parquet", b"ORC": "ORC", b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd"}


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts part-2 before part-10."""
    return [(0, int(s), "") if s.isdigit() else (1, 0, s) for s in re.findall(r"[0-9]+|[^0-9]+", name)]


def expand(data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Files of a path, a glob, a directory or a list of these: a list in its order, each item's files in natural
    order."""
    items = [data] if isinstance(data, (str, os.PathLike)) else list(data)
    if not items:
        raise DataError("no data files are given; give a path, a glob or a directory")
    files = [name for item in items for name in _expand_one(os.fspath(item))]
    for name in files:
        if not os.path.isfile(name):
            raise DataError(f"{name}: no such file; check the path")
        if os.path.getsize(name) == 0:
            raise DataError(f"{name}: the file is empty (0 bytes); remove it or write it again")
    return files


def _expand_one(item: str) -> list[str]:
    item = os.path.expanduser(item)
    if os.path.isdir(item):
        names = [n for n in os.listdir(item) if n[0] not in "._" and Path(n).suffix.lower() in FORMATS]
        found = [os.path.join(item, n) for n in names if os.path.isfile(os.path.join(item, n))]
        if not found:
            raise DataError(f"{item}: no data file is in this directory; known endings are {_endings()}")
    elif os.path.exists(item) or not glob.has_magic(item):
        return [item]
    else:
        found = [name for name in glob.glob(item, recursive=True) if os.path.isfile(name)]
        if not found:
            raise DataError(f"{item}: no file matches this pattern; check it, and quote it in the shell")
    return sorted(found, key=natural_key)


def format_of(files: Sequence[str]) -> str:
    """ "parquet", "orc" or "tsv", by suffix; `DataError` for unknown or mixed suffixes and contents of another kind."""
    first = ""
    for name in files:
        suffix = Path(name).suffix.lower()
        # The published files are called day_0 … day_23; a dot in front of digits only is no format either (part.0).
        kind = FORMATS.get("" if suffix[1:].isdigit() else suffix)
        if kind is None:
            raise DataError(f"{name}: the ending {suffix} is of no known format; known endings are {_endings()}")
        first = first or kind
        if kind != first:
            raise DataError(f"{name}: the file is {kind} where {files[0]} is {first}; give files of one format")
        _check_magic(name, kind)
    return first


def _check_magic(name: str, kind: str) -> None:
    try:
        with open(name, "rb") as file:
            head = file.read(4)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror}); check its permissions") from error
    found = next((title for magic, title in _MAGIC.items() if head.startswith(magic)), "text or unknown data")
    expected = {"parquet": "Parquet", "orc": "ORC", "tsv": "text or unknown data"}[kind]
    if found != expected:
        remedy = "unpack it first" if found in ("gzip", "zip", "zstd") else "give the file the ending of its format"
        wanted = "text" if kind == "tsv" else expected
        raise DataError(f"{name}: the content is {found} where the ending says {wanted}; {remedy}")


def fingerprint(files: Sequence[str]) -> str:
    """Names (without directories) and sizes of the files, in short: a moved data set is the same one."""
    listing = "\n".join(f"{os.path.basename(name)}\t{os.path.getsize(name)}" for name in files)
    return f"{len(files)} file(s) {hashlib.blake2b(listing.encode(), digest_size=8).hexdigest()}"


def _endings() -> str:
    return ", ".join(s or "none (day_0)" for s in FORMATS)
