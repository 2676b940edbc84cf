"""The training run: data, tables, model and loop from one `TrainConfig`.

`train(config)` is the whole of it and returns the report; `Trainer` is the same in steps, for those
who want the trained model afterwards.  The tables learn inside the backward pass; the MLPs by a
torch optimizer after it.  Listeners (progress) and metrics only look: without them the result is
the same, bit for bit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import cdlrm

from . import report as reporting
from .assemble import DENSE_OPTIMIZERS, build_model, build_tables, seed_everything
from .config import TrainConfig
from .data import Batch
from .datasets import Datasets, open_datasets, why_nothing
from .errors import DataError, NonFiniteGradientError
from .interrupt import Interrupt
from .machine import package_version
from .progress import Listener, Several
from .resuming import Checkpoints
from .transit import LateCheck, not_finite, to_device, wait_for

PROGRESS = ("steps", "samples", "skipped", "epochs", "evaluations", "_loss", "_loss_sum", "_loss_samples")
"""What a checkpoint says about the run, besides model, tables and position."""

FIRST_EVALUATION_BATCHES = 32
"""How much of the test data the evaluation before training sees: it only shows where things start."""


def train(config: TrainConfig, listener: Listener | None = None) -> dict[str, Any]:
    """Train as `config` says and return the report (see `cdlrm.report`)."""
    with Trainer(config, listener) as trainer:
        return trainer.run()


class Trainer:
    """One run: `run()` trains, evaluates and returns the report; `model` and `tables` stay usable until `close()`.

    Raises ConfigError for settings that cannot work, DataError for files, InputError for bad
    samples, NonFiniteGradientError as `nonfinite` says.  Ctrl-C ends the run after the current step.
    """

    def __init__(self, config: TrainConfig, listener: Listener | None = None, *, data: Datasets | None = None) -> None:
        self.config = config
        self.listener = listener or Listener()
        if config.logdir is not None:
            from .tensorboard import TensorBoard

            self.listener = Several([self.listener, TensorBoard(config.logdir)])
        seed_everything(config.seed)
        self.chosen: list[str] = []
        self._horizon_why: str | None = None
        self.checkpoints = None if config.checkpoint_dir is None else Checkpoints(config)
        try:
            self.data: Datasets = open_datasets(config, self.chosen) if data is None else data
            self.tables = build_tables(config, self.data, self.chosen)
            self.device = self.tables.device
            self.model = build_model(config, self.data, self.tables, self.chosen)
            self.dense_optimizer = DENSE_OPTIMIZERS[config.dense_optimizer](
                self.model.dense_parameters(), lr=config.learning_rate
            )
        except BaseException:
            if self.checkpoints is not None:
                self.checkpoints.close()
            raise
        self.steps = self.samples = self.skipped = 0
        self.epochs = 0
        self.evaluations: list[dict[str, Any]] = []
        self.interrupted = False
        self._interrupt = Interrupt()
        self._seconds = dict.fromkeys(
            ("loop", "first_step", "forward_backward", "evaluation", "checkpoint", "read", "stall"), 0.0
        )
        self._first_samples: int | None = None  # samples after the first step of this process
        self._torn = False  # a step was left in its middle, by a second Ctrl-C
        # On a GPU whether a step was finite is read later, except where the step is to be left out exactly.
        late = self.device.type != "cpu" and config.nonfinite == "raise"
        self._late = LateCheck(config.prefetch_depth + 1, partial(self._waited, "steps")) if late else None
        self._step_name = ""
        self._step_names: dict[str, str] = {}  # the tables' name of each of the newest steps -> ours
        self._loss: float | None = None
        self._loss_sum: Tensor | None = None
        self._loss_samples = 0
        if self.checkpoints is not None:
            self.checkpoints.position = self.data.train.state_dict()
            self.checkpoints.data = self.data.description()
            if config.resume:
                self._restore(self.checkpoints)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Write the cache back, end the tables' threads, and give the checkpoints' folder to other runs."""
        try:
            self.tables.close()
        finally:
            if self.checkpoints is not None:
                self.checkpoints.close()

    def run(self) -> dict[str, Any]:
        """Train every epoch, evaluate, and return the report."""
        started = time.perf_counter()
        try:
            with self._interrupt, self._naming():
                self._train()
        except KeyboardInterrupt:
            self._interrupt.asked = True
        finally:
            self.listener.close()
        self.interrupted = self._interrupt.asked
        if self.steps == 0 and not self.interrupted and not self.config.resume:
            raise DataError(why_nothing(self.config, self.data))
        with self._naming():
            self.settle()
            self.tables.flush()
            if self.checkpoints is not None and not self._torn:
                self._save()
        return self._report(time.perf_counter() - started)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Name the batch whose gradients were not finite; a GPU tells of it after others have come."""
        try:
            yield
        except NonFiniteGradientError as error:
            where = self._step_names.get(error.where, error.where or self._step_name)
            raise NonFiniteGradientError(f"{where}: {error}", where=where) from error

    def _train(self) -> None:
        if self.steps == 0:
            self.evaluate(limit=FIRST_EVALUATION_BATCHES)
        self.listener.start(self._total_samples())
        if self.steps:
            self.listener.resumed(self.steps, self.samples)
        for epoch in range(self.data.train.epoch, self.config.nepochs):
            self._epoch(epoch)
            if self._interrupt.asked:
                return
        self.evaluate()

    def evaluate(self, limit: int | None = None) -> dict[str, Any] | None:
        """Metrics on the test data (its first `limit` batches); None without test data or with `--no-metrics`."""
        if not self.config.metrics or self.data.test is None:
            return None
        if self.evaluations and self.evaluations[-1]["step"] == self.steps:
            return self.evaluations[-1]
        from .metrics import ClickMetrics

        started = time.perf_counter()
        metrics = ClickMetrics()
        with torch.no_grad():
            for position, batch in enumerate(self.data.test):
                if position == limit:
                    break
                metrics.update(self.model(to_device(batch.dense, self.device), batch), batch.labels)
        evaluation = {"step": self.steps, **metrics.compute()}
        self.evaluations.append(evaluation)
        self._seconds["evaluation"] += time.perf_counter() - started
        self.listener.evaluated(evaluation)
        return evaluation

    def _total_samples(self) -> int | None:
        per_epoch = self.data.train_samples
        return None if per_epoch is None else per_epoch * self.config.nepochs

    def _epoch(self, epoch: int) -> None:
        config, started, besides = self.config, time.perf_counter(), self._seconds_besides()
        self.data.train.set_epoch(epoch)
        batches = cdlrm.lookahead(
            self.model, self.data.train, horizon=config.horizon, prefetch_depth=config.prefetch_depth
        )
        try:
            for batch in batches:
                with self._interrupt.step():
                    self._train_batch(epoch, batch)
                if self.checkpoints is not None:
                    self.checkpoints.position = batches.state_dict()
                if self._first_samples is None:
                    self._first_samples, self._seconds["first_step"] = self.samples, time.perf_counter() - started
                if self.steps % config.print_freq == 0:
                    self._figures(batches.stats(), time.perf_counter() - started)
                if config.test_freq and self.steps % config.test_freq == 0:
                    self.evaluate()
                if self._interrupt.asked:
                    return
                if config.checkpoint_every and self.steps % config.checkpoint_every == 0:
                    with self._interrupt.step():
                        self._save()
                    if self._interrupt.asked:
                        return
            self.settle()
            self.epochs = epoch + 1
        finally:
            batches.close()
            ahead = batches.stats()
            self._horizon_why = batches.horizon_why
            self._seconds["read"] += ahead["seconds_read"]
            self._seconds["stall"] += ahead["seconds_stall"]
            besides = self._seconds_besides() - besides
            self._seconds["loop"] += time.perf_counter() - started - besides

    def settle(self) -> None:
        """Wait until the device has done every step; raises NonFiniteGradientError for one that was not finite."""
        if self._late is not None:
            self._late.finish()
        wait_for(self.device)

    def _seconds_besides(self) -> float:
        """What is not training: it is left out of samples/s."""
        return self._seconds["evaluation"] + self._seconds["checkpoint"]

    def _save(self) -> None:
        assert self.checkpoints is not None
        started = time.perf_counter()
        self.settle()  # a step that was not finite must not replace the checkpoint before it
        progress = {name: getattr(self, name) for name in PROGRESS}
        self.checkpoints.save(self.model, self.dense_optimizer, progress)
        self._seconds["checkpoint"] += time.perf_counter() - started

    def _restore(self, checkpoints: Checkpoints) -> None:
        try:
            progress = checkpoints.load(self.model, self.dense_optimizer, self.data.train)
        except BaseException:
            self.close()
            raise
        for name in PROGRESS:
            setattr(self, name, progress[name])
        if self._loss_sum is not None:
            self._loss_sum = self._loss_sum.to(self.device)
        self.chosen.append(f"resumed: from {checkpoints.newest}, after step {self.steps:,}.")

    def _train_batch(self, epoch: int, batch: Batch) -> None:
        started = time.perf_counter()
        self._torn = True
        self._step_name = f"batch {batch.index} of epoch {epoch}"
        self._remember_name()
        self._step(batch)
        self._torn = False
        self.steps += 1
        self.samples += batch.size
        self._seconds["forward_backward"] += time.perf_counter() - started
        self.listener.step(batch.size)

    def _remember_name(self) -> None:
        """The tables number batches in their own way."""
        step = self.tables.groups[0].step
        if step is not None:
            self._step_names[f"batch {step.batch}"] = self._step_name
        while len(self._step_names) > self.config.prefetch_depth + 8:
            del self._step_names[next(iter(self._step_names))]

    def _step(self, batch: Batch) -> None:
        """Forward, loss, backward (which updates the tables), then the MLPs' update."""
        dense, labels = (to_device(tensor, self.device) for tensor in (batch.dense, batch.labels))
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(dense, batch), labels)
        if not self._finite("loss", loss.detach()):
            return
        self.dense_optimizer.zero_grad(set_to_none=True)
        loss.backward()
        gradients = [p.grad for p in self.model.dense_parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not self._finite("gradient of the MLPs", norm):
            return
        self.dense_optimizer.step()
        if self._late is not None:
            self._late.watch(self._step_name, {"loss": loss.detach(), "gradient of the MLPs": norm})
        part = loss.detach() * batch.size
        self._loss_sum = part if self._loss_sum is None else self._loss_sum + part
        self._loss_samples += batch.size

    def _finite(self, what: str, value: Tensor) -> bool:
        """Whether `value` is finite; otherwise the step is skipped and counted, or the run stops.  A GPU that tells
        later is taken to say yes."""
        if self._late is not None:
            return True
        self._waited("finite")
        if bool(torch.isfinite(value)):
            return True
        if self.config.nonfinite == "raise":
            raise NonFiniteGradientError(not_finite(what, value.item()))
        self.skipped += 1
        return False

    def _waited(self, reason: str) -> None:
        """The host waits for the device now: counted beside the waits of the tables."""
        self.tables.groups[0].driver.waited(reason, 1)

    def _take_loss(self) -> None:
        """Mean loss of the steps since the last call: the only place that waits for its value."""
        if self._loss_sum is not None and self._loss_samples:
            self._waited("logging")
            self._loss = float(self._loss_sum) / self._loss_samples
        self._loss_sum, self._loss_samples = None, 0

    def _figures(self, ahead: dict[str, Any], seconds: float) -> None:
        self._take_loss()
        stats = self.tables.stats()
        self.listener.figures(
            {
                "loss": self._loss,
                "hit_rate": reporting.ratio(stats["hits"], stats["distinct"]),
                "stall_share": reporting.ratio(ahead["seconds_stall"], seconds),
            }
        )

    def _samples_per_second(self) -> float | None:
        """Of all steps of this process but the first, in which kernels are compiled; reading and waiting count,
        evaluation does not.  None where there are none."""
        if self._first_samples is None or self.samples == self._first_samples:
            return None
        seconds = self._seconds["loop"] - self._seconds["first_step"]
        return reporting.ratio(self.samples - self._first_samples, seconds)

    def _report(self, seconds_total: float) -> dict[str, Any]:
        self._take_loss()
        stats = self.tables.stats()
        return {
            "cdlrm": package_version("cdlrm"),
            "interrupted": self.interrupted,
            "evaluations": self.evaluations,
            "training": {
                "steps": self.steps,
                "epochs": self.epochs,
                "samples": self.samples,
                "mini_batch_size": self.config.mini_batch_size,
                "loss": self._loss,
                "samples_per_second": self._samples_per_second(),
                "skipped_steps": self.skipped + stats["skipped_steps"],
                "nothing_left": self._first_samples is None and self.config.resume and not self.interrupted,
            },
            "cache": reporting.cache_section(stats),
            "tables": self.tables.table_stats(),
            "seconds": reporting.seconds_section(seconds_total, self._seconds, stats),
            "checkpoint": None if self.checkpoints is None else self.checkpoints.facts(),
            "memory": reporting.memory_section(self.tables.groups[0].driver.most_bytes()),
            "data": self.data.counters(),
            "chosen": self.chosen + ([self._horizon_why] if self._horizon_why else []),
            "config": self.config.to_mapping(),
        }
