"""Which files a source consists of, and of which format they are."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cdlrm.errors import DataError

__all__ = ["FORMATS", "PACKED", "expand", "fingerprint", "format_of", "kind_of", "natural_key"]

FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".orc": "orc",
    ".tsv": "tsv",
    ".txt": "tsv",
    ".csv": "tsv",
    "": "tsv",
    ".npz": "npz",
    ".bin": "bin",
    ".npy": "npy",
}
"""Suffix -> format. A name without suffix (day_0) is Criteo's text, as it is published; so is .csv, if
TAB-separated. Text may end in .gz or .zst as well (day_0.gz, log.tsv.zst)."""
PACKED = (".gz", ".zst")
_MAGIC = {
    b"PAR1": "Parquet",
    b"ORC": "ORC",
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x93NUMPY": "NumPy",
}
_CONTENT = {"parquet": "Parquet", "orc": "ORC", "npz": "zip", "npy": "NumPy"}
_SIDE_FILE = re.compile(r"_(fea_count|day_count|fea_dict_[0-9]+)\.npz$")


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
    files = [name for name in files if not _SIDE_FILE.search(name)] or files  # DLRM's, which hold no samples
    for name in files:
        if not os.path.isfile(name):
            raise DataError(f"{name}: no such file; check the path")
        if os.path.getsize(name) == 0:
            raise DataError(f"{name}: the file is empty (0 bytes); remove it or write it again")
    return files


def _expand_one(item: str) -> list[str]:
    item = os.path.expanduser(item)
    if os.path.isdir(item):
        names = [n for n in os.listdir(item) if n[0] not in "._" and Path(n).suffix.lower() in (*FORMATS, *PACKED)]
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


def kind_of(name: str) -> str | None:
    """The format that a file's ending stands for, or None."""
    path = Path(name)
    if path.suffix.lower() in PACKED:
        return "tsv" if kind_of(path.stem) == "tsv" else None
    suffix = path.suffix.lower()
    # The published files are called day_0 … day_23; a dot in front of digits only is no format either (part.0).
    return FORMATS.get("" if suffix[1:].isdigit() else suffix)


def format_of(files: Sequence[str]) -> str:
    """ "parquet", "orc", "tsv", "npz", "bin" or "npy", by suffix; `DataError` for unknown or mixed suffixes and
    contents of another kind."""
    first = ""
    for name in files:
        kind = kind_of(name)
        if kind is None:
            ending = "".join(Path(name).suffixes[-2:]) if Path(name).suffix in PACKED else Path(name).suffix
            raise DataError(f"{name}: the ending {ending} is of no known format; known endings are {_endings()}")
        first = first or kind
        if kind != first:
            raise DataError(f"{name}: the file is {kind} where {files[0]} is {first}; give files of one format")
        _check_magic(name, kind)
    return first


def _check_magic(name: str, kind: str) -> None:
    try:
        with open(name, "rb") as file:
            head = file.read(6)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror}); check its permissions") from error
    unknown = "text or unknown data"
    found = next((title for magic, title in _MAGIC.items() if head.startswith(magic)), unknown)
    if kind == "bin":  # any four bytes are a number
        return
    packed = {".gz": "gzip", ".zst": "zstd"}.get(Path(name).suffix.lower())
    if packed:
        if found != packed:
            raise DataError(
                f"{name}: the content is {found} where the ending says {packed}; give the file its right ending"
            )
        return
    expected = _CONTENT.get(kind, unknown)
    if found != expected:
        remedy = {
            "gzip": "unpack it first, or give it the ending .gz",
            "zstd": "unpack it first, or give it the ending .zst",
            "zip": "unpack it first",
        }.get(found, "give the file the ending of its format")
        wanted = "text" if kind == "tsv" else expected
        raise DataError(f"{name}: the content is {found} where the ending says {wanted}; {remedy}")


def fingerprint(files: Sequence[str]) -> str:
    """Names (without directories) and sizes of the files, in short: a moved data set is the same one."""
    listing = "\n".join(f"{os.path.basename(name)}\t{os.path.getsize(name)}" for name in files)
    return f"{len(files)} file(s) {hashlib.blake2b(listing.encode(), digest_size=8).hexdigest()}"


def _endings() -> str:
    return ", ".join(s or "none (day_0)" for s in FORMATS) + ", and for text also .gz and .zst"
