"""The folder beside a conversion's output: finished parts, so that a killed run goes on behind the last one."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet

from cdlrm.errors import ConfigError

__all__ = ["Part", "Parts", "replace_file", "write_parquet"]

_NAME = re.compile(r"part-(\d{8})-(\d{8})-rows-(\d+)-bad-(\d+)\.parquet")


class Part(NamedTuple):
    """A finished file with the samples of blocks first..last-1."""

    path: Path
    first: int
    last: int
    rows: int
    bad: int


class Parts:
    """The parts of one conversion. `settings`: what must be the same for parts to fit together, plain values. Raises
    ConfigError for parts of another conversion and while another process is at work. A context manager."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._lock = open(folder / "settings.json", "a+", encoding="utf-8")  # noqa: SIM115 (held until the end)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(f"{folder}: another conversion is writing here; wait for it, or stop it") from None
        self._lock.seek(0)
        found, mine = self._lock.read(), json.dumps(settings, sort_keys=True)
        if found and found != mine:
            self._lock.close()
            raise ConfigError(
                f"{folder}: holds the parts of another conversion to the same file; remove the folder to start anew, "
                "or repeat that conversion to finish it"
            )
        if not found:
            self._lock.write(mine)
            self._lock.flush()
        for left in folder.glob("*.tmp"):
            left.unlink()

    def finished(self) -> list[Part]:
        """The parts in order, up to the first gap."""
        parts: list[Part] = []
        for name in sorted(os.listdir(self.folder)):
            match = _NAME.fullmatch(name)
            if match:
                part = Part(self.folder / name, *(int(number) for number in match.groups()))
                if part.first == (parts[-1].last if parts else 0):
                    parts.append(part)
        return parts

    def add(self, table: pa.Table, first: int, last: int, bad: int) -> None:
        """Write a part; it exists whole or not at all."""
        name = f"part-{first:08d}-{last:08d}-rows-{table.num_rows}-bad-{bad}.parquet"
        write_parquet(table, self.folder / "part.tmp")
        replace_file(self.folder / "part.tmp", self.folder / name)

    def remove(self) -> None:
        """Everything is done."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()


def write_parquet(table: pa.Table, path: Path) -> None:
    """One file with one row group."""
    pa.parquet.write_table(table, path, row_group_size=max(table.num_rows, 1))


def replace_file(source: Path, target: Path) -> None:
    """`target` is now what `source` was, also after a power failure."""
    with open(source, "rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
