"""The settings of `cdlrm eval` and `cdlrm predict`."""

from __future__ import annotations

import dataclasses
import os

from .config import checked, setting
from .errors import ConfigError

GROUPS = {"input": "Input", "output": "Output"}


@dataclasses.dataclass(frozen=True)
class ScoreConfig:
    """Settings of `cdlrm eval` and `cdlrm predict`.  `None` means: as in training."""

    # fmt: off
    checkpoint: str | None = setting(
        None, "folder that cdlrm train --checkpoint-dir wrote to (its newest checkpoint), or one checkpoint in it",
        group="input", metavar="DIR")
    data: list[str] | None = setting(
        None, "files, folders or globs with the columns of the training data", group="input", many=True, metavar="FILE")
    mini_batch_size: int | None = setting(
        None, "samples a step; default: as in training", group="input", kind=int, low=1, high=2**24,
        aliases=("--test-mini-batch-size",))
    bad_rows: str | None = setting(
        None, "what a malformed row does: stop with an error, or be left out; default: as in training",
        group="input", choices=("raise", "skip"))
    store: str = setting(
        "ram", "where the trained rows are read to: memory, or files in a new folder DIR, where they are too many",
        group="input", metavar="ram|file:DIR")
    device: str = setting(
        "auto", "where the model lives; auto: the GPU if there is one that can be used", group="input",
        choices=("auto", "cuda", "cpu"))
    progress: bool = setting(True, "the progress bar (on standard error)", group="output", kind=bool)
    # fmt: on

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, checked(field, getattr(self, field.name)))
        if self.checkpoint is None:
            raise ConfigError("--checkpoint is missing: name the folder that cdlrm train --checkpoint-dir wrote to.")
        if self.data is None:
            raise ConfigError("--data is missing: name the files to read.")
        if self.store.startswith("file:") and os.path.isdir(self.store[5:]) and os.listdir(self.store[5:]):
            raise ConfigError(f"--store {self.store}: the folder is not empty; name a new one.")
