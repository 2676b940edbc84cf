"""What a training run tells while it runs: a listener with nothing to say, one with a bar, and several as one.

A listener only looks: no listener changes a result.  To attach your own, derive from `Listener`, override what you
want to hear, and pass it: `cdlrm.train.train(config, MyListener())`.  All calls come from the training thread, between
steps.  `cdlrm.tensorboard` is an example.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO


class Listener:
    """Hears of every step and evaluation; this one keeps quiet."""

    def start(self, total_samples: int | None) -> None:
        """Training begins; `total_samples` is None when the data does not know its length."""

    def resumed(self, steps: int, samples: int) -> None:
        """After `start`, where the run goes on from a checkpoint: so much was trained before."""

    def step(self, samples: int) -> None:
        """A batch of `samples` was trained."""

    def figures(self, figures: Mapping[str, float | None]) -> None:
        """Every `print_freq` steps: loss, hit_rate (per distinct row), stall_share; None: not known."""

    def evaluated(self, evaluation: Mapping[str, Any]) -> None:
        """An evaluation: step, samples and the metrics of `cdlrm.metrics.ClickMetrics`."""

    def close(self) -> None:
        """The run is over, for whatever reason."""


class Several(Listener):
    """Tells everything to each of `listeners`, in order."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.listeners = list(listeners)

    def start(self, total_samples: int | None) -> None:
        for each in self.listeners:
            each.start(total_samples)

    def resumed(self, steps: int, samples: int) -> None:
        for each in self.listeners:
            each.resumed(steps, samples)

    def step(self, samples: int) -> None:
        for each in self.listeners:
            each.step(samples)

    def figures(self, figures: Mapping[str, float | None]) -> None:
        for each in self.listeners:
            each.figures(figures)

    def evaluated(self, evaluation: Mapping[str, Any]) -> None:
        for each in self.listeners:
            each.evaluated(evaluation)

    def close(self) -> None:
        for each in self.listeners:
            each.close()


class ProgressBar(Listener):
    """A tqdm bar: samples/s, time left, loss, hit rate per distinct row, share of the time spent waiting."""

    def __init__(self, stream: TextIO | None = None, name: str = "train") -> None:
        self._stream = sys.stderr if stream is None else stream
        self._name = name
        self._bar: Any = None

    def start(self, total_samples: int | None) -> None:
        from tqdm import tqdm

        on_screen = self._stream.isatty()
        self._bar = tqdm(
            total=total_samples,
            desc=self._name,
            unit=" samples",
            unit_scale=True,
            file=self._stream,
            mininterval=0.2 if on_screen else 5.0,
            ncols=None if on_screen else 120,
            dynamic_ncols=on_screen,
        )

    def resumed(self, steps: int, samples: int) -> None:
        if self._bar is not None:
            self._bar.update(samples)

    def step(self, samples: int) -> None:
        if self._bar is not None:
            self._bar.update(samples)

    def figures(self, figures: Mapping[str, float | None]) -> None:
        if self._bar is None:
            return
        parts = []
        for name, form in (("loss", ".4f"), ("hit_rate", ".1%"), ("stall_share", ".1%")):
            value = figures.get(name)
            if value is not None:
                parts.append(f"{name.split('_')[0]} {value:{form}}")
        self._bar.set_postfix_str(", ".join(parts), refresh=False)

    def evaluated(self, evaluation: Mapping[str, Any]) -> None:
        text = (
            f"step {evaluation['step']:,}: AUC {evaluation['auc']:.4f}, log loss {evaluation['log_loss']:.5f}, "
            f"normalized entropy {evaluation['normalized_entropy']:.4f}, accuracy {evaluation['accuracy']:.4f} "
            f"on {evaluation['samples']:,} test samples"
        )
        if self._bar is None:
            self._stream.write(text + "\n")
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
