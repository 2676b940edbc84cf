"""The checkpoints of a `cdlrm train` run: when a folder may be used, what is saved, what must agree to resume.

The files themselves are `cdlrm.checkpoint`'s.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import nn, optim

from .checkpoint import checkpoint_info, load, save
from .checkpoint_files import FolderLock, checkpoints
from .config import TrainConfig, flag_of
from .data import Source
from .datasets import SYNTHETIC_BATCHES
from .errors import ConfigError, DataError

MUST_AGREE = (
    "arch_sparse_feature_size", "pooling", "arch_mlp_top", "arch_interaction_op", "arch_interaction_itself",
    "loss_function", "mini_batch_size", "learning_rate", "optimizer", "dense_optimizer", "seed", "shuffle",
)  # fmt: skip
"""Settings that a resumed run would ignore or go on differently with.  What the tables, the model and the data
can tell themselves (rows, MLPs, files) is checked by them."""


class Checkpoints:
    """The folder `config.checkpoint_dir` and the position in the data behind the newest trained batch.

    The folder is this run's alone until `close`.  Raises ConfigError where another run has it, or where it holds
    another run's checkpoints (without `resume`), DataError where it holds none (with it).
    """

    def __init__(self, config: TrainConfig) -> None:
        """`data`, for who loads the model without the training data, is to be set before the first save."""
        assert config.checkpoint_dir is not None
        if not config.checkpoint_dir.strip():
            raise ConfigError("--checkpoint-dir is empty; name the folder for the checkpoints, or leave it out.")
        self.config, self.directory = config, Path(config.checkpoint_dir)
        self.newest: Path | None = None
        self.resumed_from: str | None = None
        self.position: Any = None
        self.data: dict[str, Any] = {}
        self._written = 0
        self._lock: FolderLock | None = None
        try:
            self._take()
        except BaseException:
            self.close()
            raise

    def _take(self) -> None:
        if self._found() or not self.config.resume:
            self._probe()
            self._hold()
        found = self._found()  # again: now it stays so
        if self.config.resume and not found:
            raise DataError(
                f"--resume: there is no checkpoint in {self.directory} to go on from; start without --resume, or name "
                "the folder of the run in --checkpoint-dir."
            )
        if found and not self.config.resume:
            raise ConfigError(
                f"--checkpoint-dir {self.directory}: a run has left checkpoints there; add --resume to go on from "
                f"{found[-1].name}, or name another folder."
            )
        if self.config.resume:
            self._check(checkpoint_info(self.directory)["extra"])

    def close(self) -> None:
        """Give the folder back to other runs; may be called twice."""
        if self._lock is not None:
            self._lock.close()

    def _hold(self) -> None:
        try:
            self._lock = FolderLock(self.directory)
        except BlockingIOError:
            raise ConfigError(
                f"--checkpoint-dir {self.directory}: another process is training or saving there; wait until it ends, "
                "or name another folder."
            ) from None
        except OSError as error:
            raise DataError(
                f"--checkpoint-dir {self.directory}: cannot be locked ({error.strerror}); name another folder."
            ) from error

    def _found(self) -> list[Path]:
        try:
            if self.directory.exists() and not self.directory.is_dir():
                raise ConfigError(f"--checkpoint-dir {self.directory}: is a file; name a folder.")
            return checkpoints(self.directory)
        except OSError as error:
            raise DataError(
                f"--checkpoint-dir {self.directory}: cannot be read ({error.strerror}); name another folder."
            ) from error

    def _probe(self) -> None:
        """Make the folder and write to it: before hours of training, not after."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory) as file:
                file.write(b"written")
        except OSError as error:
            raise DataError(
                f"--checkpoint-dir {self.directory}: cannot be written to ({error.strerror}); give it the rights and "
                "the space, or name another folder."
            ) from error

    def _check(self, extra: Any) -> None:
        """Raise ConfigError unless the run was started with the same settings."""
        if not isinstance(extra, dict) or "config" not in extra:
            raise ConfigError(f"--resume: the checkpoint in {self.directory} was not written by cdlrm train.")
        then, now = extra["config"], self.config.to_mapping()
        for values in (then, now):
            values.setdefault("pooling", "sum")  # of runs before there was a choice
            values["embedding_learning_rate"] = values["embedding_learning_rate"] or values["learning_rate"]
            if not values["data"]:  # how many samples there are
                values["num_batches"] = values["num_batches"] or SYNTHETIC_BATCHES
        synthetic = () if now["data"] else ("num_batches",)
        for name in (*MUST_AGREE, "embedding_learning_rate", *synthetic):
            if then.get(name) != now[name]:
                flag = flag_of(name)
                raise ConfigError(
                    f"--resume: the run in {self.directory} was started with {flag} {then.get(name)}, not {now[name]}; "
                    f"give it as it was."
                )

    def load(self, model: nn.Module, dense_optimizer: optim.Optimizer, source: Source) -> dict[str, Any]:
        """Restore everything from the newest checkpoint; what `save` was told of the run's progress."""
        self.newest = checkpoints(self.directory)[-1]
        self.resumed_from = str(self.newest)
        try:
            got = load(self.newest, model, optimizers=[dense_optimizer], loader=source)
        except ConfigError as error:
            raise ConfigError(f"--resume from {self.newest}: {error}") from error
        self.position = got["loader"]
        return got["extra"]["progress"]

    def save(self, model: nn.Module, dense_optimizer: optim.Optimizer, progress: dict[str, Any]) -> None:
        """Write a checkpoint; the one before it is removed when it is complete."""
        extra = {"config": self.config.to_mapping(), "progress": progress, "data": self.data}
        at = _Position(self.position)
        self.newest = save(self.directory, model, optimizers=[dense_optimizer], loader=at, extra=extra)
        self._written += 1

    def facts(self) -> dict[str, Any]:
        """For the report."""
        newest = None if self.newest is None else str(self.newest)
        return {"newest": newest, "written": self._written, "resumed_from": self.resumed_from}


class _Position:
    """A loader that is at a known place: behind the batch trained last, however far was read ahead."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state
