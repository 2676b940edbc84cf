"""The files of a checkpoint: written beside, made durable, renamed; read only after their checksums agree.

    DIR/checkpoint-000007/           complete: a folder gets this name by one rename, when all of it is on the disk;
                                     its parts are never written again, since other checkpoints may share them
        part-00000.safetensors …     tensors, at most PART_BYTES a file (a larger single tensor has a file of its own)
        manifest.json                written last: files with sizes and checksums, every tensor's file, shape and
                                     dtype, and everything that is not a tensor
    DIR/.partial-000008/             being written, or left by a crash; the next save removes it
    DIR/.lock                        held while a process saves here, and by `cdlrm train` for the whole run

A rename is atomic, so there is no moment without the last complete checkpoint: older ones are removed only after
the new one has its name, and they lose their name before their files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import ConfigError, DataError, UsageError

log = logging.getLogger("cdlrm")
FORMAT, VERSION = "cdlrm checkpoint", 1
PART_BYTES = 16 << 20  # what loading holds is some ten times this, with what malloc keeps
ENTRY_BYTES = 100  # of a tensor in a part's header
READ_BYTES = 1 << 20
MANIFEST = "manifest.json"
PARTIAL = ".partial-"
_NAME = re.compile(r"checkpoint-(\d{6,})")


# --- folders ---


def checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / MANIFEST).is_file()]


def find_checkpoint(directory: Path) -> Path:
    """`directory` itself if it is a checkpoint, else the newest one in it; DataError if there is none."""
    if (directory / MANIFEST).is_file():
        return directory
    found = checkpoints(directory)
    if not found:
        reason = "holds no complete checkpoint" if directory.is_dir() else "does not exist"
        raise DataError(
            f"{directory}: this folder {reason}; pass the folder that cdlrm.save, or cdlrm train --checkpoint-dir, "
            "wrote to."
        )
    return found[-1]


def write_checkpoint(directory: Path, keep: int, fill: Callable[[Path], None]) -> Path:
    """Let `fill` write the files of a new checkpoint of `directory`, complete it, and keep the newest `keep`.

    When anything fails the earlier checkpoints are as they were.  DataError when files cannot be written.
    """
    if (directory / MANIFEST).is_file():
        raise ConfigError(f"{directory}: this folder is itself a checkpoint; save to the folder above it.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            _remove_partial(directory)
            numbers = [int(match[1]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
            number = max(numbers, default=0) + 1
            partial, final = directory / f"{PARTIAL}{number:06d}", directory / f"checkpoint-{number:06d}"
            partial.mkdir()
            try:
                fill(partial)
                _sync_folder(partial)
                os.rename(partial, final)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            _sync_folder(directory)
            _sync_folder(directory.parent)
            for old in checkpoints(directory)[:-keep]:
                os.rename(old, directory / f"{PARTIAL}{old.name}")
            _remove_partial(directory)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{directory}: the checkpoint could not be written ({error}); free space there or choose another folder: "
            "complete checkpoints are untouched."
        ) from error
    return final


_held: set[Path] = set()  # folders that a run of this process has for itself


class FolderLock:
    """`directory`, which exists, is one run's alone until `close`; the system ends the lock with the process.

    Raises BlockingIOError while another run, or a process that saves, has it.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory.resolve()
        self._file = open(directory / ".lock", "a")  # noqa: SIM115 (held until close)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise
        _held.add(self._path)

    def close(self) -> None:
        """Give the folder back; may be called twice."""
        if not self._file.closed:
            _held.discard(self._path)
            self._file.close()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Only one process saves into a folder; the system ends the lock with the process."""
    if directory.resolve() in _held:
        yield
        return
    with open(directory / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{directory}: another process saves here; give each run a folder of its own.") from None
        yield


def _remove_partial(directory: Path) -> None:
    for path in directory.glob(f"{PARTIAL}*"):
        shutil.rmtree(path)


def _sync_folder(path: Path) -> None:
    """Names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- writing ---


class PartWriter:
    """Collects tensors into part files of `folder`; `finish` writes what is left and the manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[dict[str, Any]] = []
        self.tensors: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0
        (folder / MANIFEST).touch()
        self._mode = (folder / MANIFEST).stat().st_mode & 0o777  # safetensors' files can be read by their owner only

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write `tensors` (contiguous, on the CPU, not changed any more) into one part, sooner or later."""
        size = sum(tensor.nbytes + ENTRY_BYTES for tensor in tensors.values())
        if self._waiting and self._bytes + size > PART_BYTES:
            self._write()
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.tensors[name] = {"file": len(self.files), "dtype": dtype, "shape": list(tensor.shape)}
            self._waiting[name] = tensor
        self._bytes += size

    def _write(self) -> None:
        path = self.folder / f"part-{len(self.files):05d}.safetensors"
        save_file(self._waiting, path)
        os.chmod(path, self._mode)
        with open(path, "rb") as file:
            self.files.append({"name": path.name, "bytes": os.fstat(file.fileno()).st_size, "sha256": _digest(file)})
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # leave the page cache to the training
        self._waiting, self._bytes = {}, 0

    def link(self, earlier: Parts, number: int, tensors: list[str]) -> bool:
        """Take part `number` of another checkpoint, which holds `tensors`; False where that is not possible."""
        assert not self._waiting  # its number is taken
        entry = earlier.content["files"][number]
        path = self.folder / f"part-{len(self.files):05d}.safetensors"
        try:
            os.link(earlier.folder / entry["name"], path)
            if path.stat().st_size != entry["bytes"]:
                path.unlink()
                return False
        except OSError as error:
            log.info("%s: no link to it can be made (%s); it is written again.", earlier.folder / entry["name"], error)
            return False
        for name in tensors:
            self.tensors[name] = {**earlier.content["tensors"][name], "file": len(self.files)}
        self.files.append({**entry, "name": path.name})
        return True

    def finish(self, content: dict[str, Any]) -> None:
        if self._waiting:
            self._write()
        content = {**content, "files": self.files, "tensors": self.tensors}
        digest = _digest_of(content)
        with open(self.folder / MANIFEST, "w") as file:
            json.dump({"format": FORMAT, "version": VERSION, "sha256": digest, "content": content}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while piece := file.read(READ_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --- reading ---


class Parts:
    """The manifest's `content` and the tensors of the checkpoint `folder`.

    A file's size and checksum are compared before its first tensor is read; `verify` does all of them.
    Raises DataError, naming the file, for whatever is missing, damaged or of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.content = _read_manifest(folder)
        self._verified: set[int] = set()
        self._opened: tuple[int, Any] | None = None

    def verify(self) -> None:
        for number in range(len(self.content["files"])):
            self._verify(number)

    def _verify(self, number: int) -> None:
        if number in self._verified:
            return
        entry = self.content["files"][number]
        path = self.folder / entry["name"]
        try:
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise DataError(f"{path}: has {size} bytes instead of {entry['bytes']}; {self._remedy()}")
            with open(path, "rb") as file:
                if _digest(file) != entry["sha256"]:
                    raise DataError(f"{path}: is damaged (its checksum differs from the manifest's); {self._remedy()}")
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); {self._remedy()}") from error
        self._verified.add(number)

    def _remedy(self) -> str:
        others = [path.name for path in checkpoints(self.folder.parent) if path != self.folder]
        return f"copy it again, or load {others[-1]!r}." if others else "copy it again from where it was saved."

    def get(self, name: str) -> Tensor:
        """A copy of a tensor, on the CPU."""
        number = self.content["tensors"][name]["file"]
        if self._opened is None or self._opened[0] != number:
            self._verify(number)
            self._opened = None
            try:
                self._opened = number, safe_open(self.folder / self.content["files"][number]["name"], framework="pt")
            except (OSError, SafetensorError) as error:
                raise DataError(f"{self.folder}: part {number} cannot be read ({error}); {self._remedy()}") from error
        return self._opened[1].get_tensor(name).clone()  # a view of the mapped file otherwise


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); pass the folder that cdlrm.save made.") from error
    except ValueError as error:
        raise DataError(f"{path}: is damaged (no valid JSON: {error}); copy the checkpoint again.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path}: is no manifest of a {FORMAT}; pass a folder that cdlrm.save wrote to.")
    if manifest.get("version") != VERSION:
        raise DataError(
            f"{path}: has format version {manifest.get('version')!r} where this cdlrm reads version {VERSION}; use the "
            "cdlrm that wrote it."
        )
    content = manifest.get("content")
    if not isinstance(content, dict) or _digest_of(content) != manifest.get("sha256"):
        raise DataError(f"{path}: is damaged (its checksum differs); copy the checkpoint again.")
    return content


# --- Python values ---


class Packer:
    """Nested Python values as JSON; their tensors and arrays go to `writer`, named by their path."""

    def __init__(self, writer: PartWriter) -> None:
        self.writer = writer

    def pack(self, value: Any, path: str) -> Any:
        """JSON for `value`: None, numbers, strings, bytes, lists, tuples, dicts, NumPy arrays and dense tensors."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Tensor):
            return {"$tensor": self._store(value, path)}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {"$array": self._store(torch.from_numpy(np.array(value, order="C")), path)}
        if isinstance(value, bytes):
            return {"$bytes": value.hex()}
        if isinstance(value, (list, tuple)):
            items = [self.pack(item, f"{path}/{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, Mapping):
            plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
            if plain and not isinstance(value, Counter):
                return {key: self.pack(item, f"{path}/{key}") for key, item in value.items()}
            pairs = [[self.pack(k, f"{path}/key {k}"), self.pack(v, f"{path}/{k}")] for k, v in value.items()]
            return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
        raise ConfigError(
            f"save: {path} is a {type(value).__name__}; a checkpoint holds numbers, strings, lists, tuples, dicts, "
            "arrays and tensors, so save its state_dict() or a description of it."
        )

    def _store(self, tensor: Tensor, path: str) -> str:
        if tensor.layout != torch.strided:
            raise ConfigError(f"save: {path} is a sparse tensor; save its to_dense().")
        name, copies = path, 1
        while name in self.writer.tensors:
            copies += 1
            name = f"{path} ({copies})"
        self.writer.add({name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)})
        return name


def unpack(tree: Any, parts: Parts) -> Any:
    """The value that `Packer.pack` turned into `tree`."""
    if isinstance(tree, list):
        return [unpack(item, parts) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((key, inner),) = tree.items()
        if key == "$tensor":
            return parts.get(inner)
        if key == "$array":
            return parts.get(inner).numpy()
        if key == "$bytes":
            return bytes.fromhex(inner)
        if key == "$tuple":
            return tuple(unpack(item, parts) for item in inner)
        if key in ("$dict", "$counter"):
            pairs = {unpack(k, parts): unpack(v, parts) for k, v in inner}
            return Counter(pairs) if key == "$counter" else pairs
    return {key: unpack(item, parts) for key, item in tree.items()}
