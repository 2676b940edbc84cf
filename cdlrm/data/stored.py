"""Arrays in files, read by rows: a part of an .npy file, a member of an .npz archive, or bare numbers."""

from __future__ import annotations

import shutil
import struct
import tempfile
import zipfile
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from cdlrm.errors import DataError

__all__ = ["StoredArray", "array_in", "arrays_in"]


@dataclass
class StoredArray:
    """An array in a file from byte `at` on; shape [N] or [N, k]; fortran: its columns lie one after the other.

    Read by rows with plain reads and not by a memory map, so that what was read does not count as memory of ours.
    `packed`: a compressed member of an archive, unpacked into a temporary file (in TMPDIR) at the first read.
    """

    file: BinaryIO
    at: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool = False
    packed: tuple[zipfile.ZipFile, str] | None = None

    def turned(self) -> StoredArray:
        """The transposed array."""
        return StoredArray(self.file, self.at, self.dtype, self.shape[::-1], not self.fortran, self.packed)

    def rows(self, lo: int, hi: int) -> np.ndarray:
        """Rows lo..hi-1 as [k, hi-lo] (k = 1 for an array of one dimension), each line contiguous."""
        if self.packed is not None:
            self._unpack(*self.packed)
        total, width = self.shape[0], int(np.prod(self.shape[1:]))
        if self.fortran:
            return np.stack([self._numbers(k * total + lo, hi - lo) for k in range(width)])
        return np.ascontiguousarray(self._numbers(lo * width, (hi - lo) * width).reshape(hi - lo, width).T)

    def _numbers(self, first: int, count: int) -> np.ndarray:
        self.file.seek(self.at + first * self.dtype.itemsize)
        data = self.file.read(count * self.dtype.itemsize)
        if len(data) < count * self.dtype.itemsize:
            raise OSError("the file ends too early")
        return np.frombuffer(data, self.dtype)

    def _unpack(self, archive: zipfile.ZipFile, member: str) -> None:
        target = tempfile.TemporaryFile(prefix="cdlrm-")  # noqa: SIM115 (has no name, and goes with us)
        with archive.open(member) as source:
            source.read(self.at)
            shutil.copyfileobj(source, target, 2**20)
        self.file, self.at, self.packed = target, 0, None


def array_in(name: str, file: BinaryIO, packed: tuple[zipfile.ZipFile, str] | None = None) -> StoredArray:
    """The array whose .npy header is at the file's current position."""
    begin = file.tell()
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except ValueError as error:
        raise DataError(f"{name}: there is no NumPy array where one is needed ({error}); write it again") from error
    if dtype.kind not in "biuf" or not 1 <= len(shape) <= 2:
        raise DataError(
            f"{name}: an array of {dtype} with shape {list(shape)} is found where numbers in one or two dimensions are "
            "needed; write it with np.save or np.savez"
        )
    at = file.tell() - (begin if packed else 0)
    return StoredArray(file, at, dtype, shape, fortran and len(shape) == 2, packed)


def arrays_in(name: str) -> dict[str, StoredArray]:
    """The arrays of an .npz archive by name. Raises OSError or DataError for one that is broken."""
    try:
        archive = zipfile.ZipFile(name)
    except zipfile.BadZipFile as error:
        raise OSError(str(error)) from error
    found = {}
    for member in archive.infolist():
        if not member.filename.endswith(".npy"):
            continue
        title = member.filename[:-4]
        if member.compress_type == zipfile.ZIP_STORED:
            file = open(name, "rb")  # noqa: SIM115 (stays open as long as the array)
            file.seek(member.header_offset)
            names = struct.unpack("<HH", file.read(30)[26:])
            file.seek(member.header_offset + 30 + sum(names))
            found[title] = array_in(f"{name}: {title}", file)
        else:
            with archive.open(member) as head:
                found[title] = array_in(f"{name}: {title}", head, (archive, member.filename))  # type: ignore[arg-type]
    return found
