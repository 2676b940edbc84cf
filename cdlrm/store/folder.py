"""The folder of a file store: its lock, its header, its bits; what may be opened and what is refused.

A store NAME has four files: NAME.rows (the records, sparse), NAME.json (the header: what the records
are), NAME.bits (which of them exist) and NAME.lock.  Header and bits are written beside and renamed.

After a crash.  Records are written in place, so after a crash the file is a mixture of moments and is
not believed: the header says "open" on disk before the first record is written after a flush, and
"closed" only after records and bits are on disk.  An "open" store is refused with one sentence.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError
from ..initial import Initializer
from ..optim import Optimizer
from ..table import Table

FORMAT = "cdlrm file store"
VERSION = 1
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT)  # the last: /proc and the like


def identity(tables: Sequence[Table], optimizer: Optimizer, initializer: Initializer, seed: int) -> dict[str, Any]:
    """What the records of a group depend on, as JSON values.

    Of the optimizer only what a record depends on (the learning rate may change from run to run); of the initial
    values a checksum of each table's first and last row, because a table's `init` cannot be compared otherwise.
    """
    dim = int(tables[0].embedding_dim)
    width = optimizer.state_width(dim)
    ends = np.cumsum([table.num_embeddings for table in tables], dtype=np.int64)
    sample = np.empty((2 * len(tables), dim), np.float32)
    both = np.stack([ends - [table.num_embeddings for table in tables], ends - 1], axis=1)
    initializer.rows(sample, None, both.reshape(-1))
    return {
        "tables": [{"name": t.name, "rows": int(t.num_embeddings), "dim": int(t.embedding_dim)} for t in tables],
        "optimizer": optimizer.name,
        "floats_per_record": dim + width,
        "initial_state": float(np.float32(optimizer.initial_state)),
        "seed": int(seed),
        "initial_values_checksum": [zlib.crc32(pair.data) for pair in sample.reshape(len(tables), -1)],
    }


def seed_of(folder: Path) -> int | None:
    """The seed of the stores in a folder; None where there is none that can be read (opening them says why)."""
    for header in sorted(folder.glob("group*.json")):
        try:
            seed = json.loads(header.read_text(encoding="utf-8"))["facts"]["seed"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(seed, int):
            return seed
    return None


def disk_error(path: Path, doing: str, error: OSError) -> DataError:
    """The sentence for a failed read or write of records."""
    remedy = "check the disk, and start from a checkpoint if it is damaged"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "make room there and repeat: nothing stored before is damaged, the rest is still in memory"
    return DataError(f"{path}: {doing} failed ({error.strerror or error}); {remedy}.")


class StoreFolder:
    """The files of one store, locked by this process while open.

    `facts`: what must be equal in a store that is opened again; they are JSON values.
    `fresh`: throw away what is there.  Raises ConfigError and DataError as the module says.
    """

    def __init__(self, folder: Path, name: str, facts: Mapping[str, Any], data_bytes: int, fresh: bool) -> None:
        self.folder, self.name = folder, name
        self.facts = json.loads(json.dumps(dict(facts)))
        self.data_bytes = data_bytes
        self._lock = -1
        self._state = "closed"
        self._bits_crc: int | None = None
        self.saved: dict[str, Any] = {}  # what `mark_closed` was given last
        self._make_folder()
        self._take_lock()
        try:
            if fresh:
                self._discard()
            self.exists = self.header.exists()
            if self.exists:
                self._check()
            else:
                self._create()
        except BaseException:
            self.release()
            raise

    @property
    def data(self) -> Path:
        return self.folder / f"{self.name}.rows"

    @property
    def header(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def bits(self) -> Path:
        return self.folder / f"{self.name}.bits"

    # --- opening ---

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(exist_ok=True)
        except FileNotFoundError as error:
            if self.folder.parent.exists():
                raise self._unusable(error) from error
            raise ConfigError(
                f"store='file:{self.folder}': the parent folder {self.folder.parent} does not exist; create it."
            ) from None
        except FileExistsError:
            raise ConfigError(f"store='file:{self.folder}': this is not a folder; name a folder.") from None
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> ConfigError:
        if error.errno in _NOT_WRITABLE:
            why = "nothing can be made there" if error.errno == errno.ENOENT else error.strerror
            return ConfigError(
                f"store='file:{self.folder}': the folder cannot be written ({why}); use one that this user may write."
            )
        return ConfigError(f"store='file:{self.folder}': {error.strerror or error}; use another folder.")

    def _take_lock(self) -> None:
        try:
            self._lock = os.open(self.folder / f"{self.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            self.release()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise self._unusable(error) from error
            raise ConfigError(
                f"store='file:{self.folder}': {self.name} is in use by process {owner or 'unknown'} "
                f"(this is process {os.getpid()}); close it there or use another folder."
            ) from None
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        except OSError as error:
            self.release()
            raise self._unusable(error) from error

    def _discard(self) -> None:
        """Header first: without one, nothing that lies there is believed."""
        for path in (self.header, self.bits, self.data):
            path.unlink(missing_ok=True)

    def _create(self) -> None:
        for path in (self.data, self.bits):
            if path.exists() and path.stat().st_size:
                raise DataError(
                    f"{path}: there is no header {self.header.name} beside it, so its contents are unknown; "
                    "delete it or use another folder."
                )
        try:
            self._write_header("closed", None)
            self._make_data()
        except OSError as error:
            for path in (self.header, self.data):
                path.unlink(missing_ok=True)
            if error.errno == errno.EFBIG:
                raise ConfigError(
                    f"store='file:{self.folder}': the file system does not take a file of "
                    f"{self.data_bytes / 2**30:.2f} GiB ({error.strerror}); use another folder or smaller tables."
                ) from error
            raise self._unusable(error) from error

    def _make_data(self) -> None:
        fd = os.open(self.data, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(fd, self.data_bytes)  # sparse: takes no space yet
        finally:
            os.close(fd)

    def _check(self) -> None:
        """Raise unless the store that is there is the one that is asked for, whole."""
        found = self._read_header()
        if found.get("format") != FORMAT or found.get("version") != VERSION:
            raise ConfigError(
                f"{self.header}: format {found.get('format')!r} version {found.get('version')!r}, this cdlrm reads "
                f"{FORMAT!r} version {VERSION}; use another folder."
            )
        theirs = found.get("facts", {})
        for key, ours in self.facts.items():
            if theirs.get(key) != ours:
                where, there, here = _first_difference(key, theirs.get(key), ours)
                raise ConfigError(
                    f"{self.header}: the store has {where} = {there!r}, this model {here!r}; use the settings that the "
                    "store was made with, or another folder."
                )
        if found.get("state") != "closed":
            raise DataError(
                f"{self.data}: the process that wrote it ended without closing it, so its rows are of different "
                f"moments; delete {self.name}.* in {self.folder} and start from a checkpoint (or anew)."
            )
        if found.get("bits") is None:
            self._make_data()  # never written: nothing in it is believed
            return
        size = self.data.stat().st_size if self.data.exists() else -1
        if size != self.data_bytes:
            raise DataError(
                f"{self.data}: has {size if size >= 0 else 'no'} bytes, the header says {self.data_bytes}; "
                f"restore the file, or delete {self.name}.* and start from a checkpoint."
            )
        self._bits_crc = found["bits"]
        self.saved = found.get("saved") or {}

    def _read_header(self) -> dict[str, Any]:
        try:
            found = json.loads(self.header.read_text(encoding="utf-8"))
        except OSError as error:
            raise self._unusable(error) from error
        except ValueError:
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("facts", {}), dict):
            raise DataError(f"{self.header}: this is not the header of a file store; use another folder.")
        return found

    # --- the bits and the header ---

    def load_bits(self, trained: np.ndarray, changed: np.ndarray) -> None:
        """Fill both arrays (uint8 [ceil(N/8)]) from the file, if there is one."""
        if not self.exists or self._bits_crc is None:
            return
        try:
            raw = np.fromfile(self.bits, np.uint8)
        except OSError as error:
            raise DataError(
                f"{self.bits}: cannot be read ({error.strerror}); restore it, or delete {self.name}.* and start from "
                "a checkpoint."
            ) from error
        if raw.size != 2 * trained.size or zlib.crc32(raw.data) != self._bits_crc:
            raise DataError(
                f"{self.bits}: {raw.size} bytes, checksum {zlib.crc32(raw.data)}, the header says "
                f"{2 * trained.size} and {self._bits_crc}; restore the file, or delete {self.name}.* "
                "and start from a checkpoint."
            )
        trained[:], changed[:] = raw[: trained.size], raw[trained.size :]

    def mark_open(self) -> None:
        """Records will be written: from now on the file is not believed until `mark_closed`."""
        if self._state != "open":
            self._guarded(lambda: self._write_header("open", None))
            self._state = "open"

    def mark_closed(self, trained: np.ndarray, changed: np.ndarray, saved: dict[str, Any]) -> None:
        """The records are on disk: write the bits, then the header (with `saved`, JSON values)."""

        def write() -> None:
            crc = zlib.crc32(changed.data, zlib.crc32(trained.data))
            self._replace(self.bits, trained.data, changed.data)
            self._write_header("closed", crc, saved)

        self._guarded(write)
        self._state = "closed"

    def _guarded(self, write: Any) -> None:
        try:
            write()
        except OSError as error:
            raise disk_error(self.header, "writing the header", error) from error

    def _write_header(self, state: str, bits_crc: int | None, saved: dict[str, Any] | None = None) -> None:
        text = {"format": FORMAT, "version": VERSION, "state": state, "bits": bits_crc, "facts": self.facts}
        self._replace(self.header, json.dumps(text | {"saved": saved or {}}, indent=1).encode())

    def _replace(self, path: Path, *parts: Any) -> None:
        """Write beside, make durable, rename."""
        beside = path.with_name(path.name + ".new")
        try:
            with open(beside, "wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        fd = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def release(self) -> None:
        """Give the lock back.  May be called twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _first_difference(where: str, there: Any, here: Any) -> tuple[str, Any, Any]:
    """The first place at which two JSON values differ."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in here:
            if there.get(key) != here[key]:
                return _first_difference(f"{where}.{key}", there.get(key), here[key])
    if isinstance(there, list) and isinstance(here, list):
        if len(there) != len(here):
            return f"number of {where}", len(there), len(here)
        for i, (a, b) in enumerate(zip(there, here, strict=True)):
            if a != b:
                return _first_difference(f"{where}[{i}]", a, b)
    return where, there, here
