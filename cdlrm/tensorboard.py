"""The figures of a run for TensorBoard: a listener (extra `tensorboard`), and an example of how to write one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError
from .progress import Listener


class TensorBoard(Listener):
    """Writes `train/loss`, `train/samples_per_second`, `cache/hit_rate`, `cache/stall_share` and `test/…` by step.

    `logdir`: a folder, which `tensorboard --logdir` shows.  Raises ConfigError where TensorBoard is not installed or
    the folder cannot be written.
    """

    NAMES = {"loss": "train/loss", "hit_rate": "cache/hit_rate", "stall_share": "cache/stall_share"}

    def __init__(self, logdir: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "--logdir: TensorBoard is not installed; pip install 'cdlrm[tensorboard]', or leave --logdir out."
            ) from error
        try:
            self._writer = SummaryWriter(logdir)
        except OSError as error:
            raise ConfigError(f"--logdir {logdir}: cannot be written ({error.strerror}); name another.") from error
        self._steps = self._samples = 0
        self._since = time.perf_counter()

    def resumed(self, steps: int, samples: int) -> None:
        self._steps = steps

    def step(self, samples: int) -> None:
        self._steps += 1
        self._samples += samples

    def figures(self, figures: Mapping[str, float | None]) -> None:
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(self.NAMES.get(name, name), value, self._steps)
        now = time.perf_counter()
        self._writer.add_scalar("train/samples_per_second", self._samples / (now - self._since), self._steps)
        self._samples, self._since = 0, now

    def evaluated(self, evaluation: Mapping[str, Any]) -> None:
        for name, value in evaluation.items():
            if name not in ("step", "samples"):
                self._writer.add_scalar(f"test/{name}", value, evaluation["step"])

    def close(self) -> None:
        self._writer.close()
