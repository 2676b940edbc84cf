"""Training on a GPU that is not there: what is on which device, and that the host does not wait for a step.

torch's device "meta" stands for it: its tensors have no values, and mixing it with the CPU, or asking for a value, is
an error.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_train import small
from torch import Tensor, nn

from cdlrm import transit
from cdlrm.config import TrainConfig
from cdlrm.errors import DeviceError, NonFiniteGradientError
from cdlrm.model import DLRM
from cdlrm.train import Trainer
from cdlrm.transit import LateCheck, to_device

ELSEWHERE = torch.device("meta")


class Rows(nn.Module):
    """Tables in torch only."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, features, dim))

    def forward(self, batch: Any) -> Tensor:
        return self.weight.expand(batch.size, -1, -1) * 1.0


class Home:
    """Where scalars arrive: each step's with an event that is done after it was asked `patience` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, patience: int = 0) -> None:
        self.sent: list[Any] = []
        self.waited = 0
        self.patience = patience
        monkeypatch.setattr(transit, "send_home", self.send)

    def send(self, values: Tensor) -> tuple[Tensor, Any]:
        left = [self.patience]

        def query() -> bool:
            left[0] -= 1
            return left[0] < 0

        def synchronize() -> None:
            self.waited += 1

        self.sent.append(values)
        return values, SimpleNamespace(query=query, synchronize=synchronize)


def elsewhere(trainer: Trainer, model: DLRM, optimizer: str) -> None:
    """The trainer's model and optimizer, elsewhere."""
    trainer.model, trainer.device = model.to(ELSEWHERE), ELSEWHERE
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[optimizer]
    trainer.dense_optimizer = kind(model.dense_parameters(), lr=0.1)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_a_step_mixes_no_devices_and_asks_for_no_value(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    home = Home(monkeypatch, patience=100)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    with Trainer(small(metrics=False)) as trainer:
        batch, features = next(iter(trainer.data.train)), len(trainer.data.features)
        model = DLRM(Rows(features, 4), features=features, dim=4, mlp_bot=[13, 8, 4], mlp_top=[8, 1])
        elsewhere(trainer, model, optimizer)
        trainer._late = LateCheck(most=2)
        for _ in range(2):
            trainer._step(batch)
        assert trainer._loss_sum is not None and trainer._loss_sum.device == ELSEWHERE
        assert [values.device for values in home.sent] == [ELSEWHERE, ELSEWHERE] and home.waited == 0
        with monkeypatch.context() as left, pytest.raises(RuntimeError, match="device"):  # were the batch not moved
            left.setattr("cdlrm.train.to_device", lambda tensor, device: tensor)
            trainer._step(batch)
        trainer._late = None  # as on the CPU: the loss is looked at
        with pytest.raises(RuntimeError, match="meta"):
            trainer._step(batch)


def test_nothing_is_copied_on_the_cpu() -> None:
    tensor = torch.rand(3)
    assert to_device(tensor, torch.device("cpu")) is tensor
    transit.wait_for(torch.device("cpu"))


def scalars(loss: float, norm: float = 1.0) -> dict[str, Tensor]:
    return {"loss": torch.tensor(loss), "gradient of the MLPs": torch.tensor(norm, dtype=torch.float64)}


@pytest.mark.parametrize(("loss", "norm", "words"), [(math.nan, 1.0, "loss is nan"), (1.0, math.inf, "MLPs is inf")])
def test_what_is_not_finite_is_told_with_its_step(
    monkeypatch: pytest.MonkeyPatch, loss: float, norm: float, words: str
) -> None:
    Home(monkeypatch)
    check = LateCheck(most=2)
    check.watch("batch 0", scalars(0.5))
    with pytest.raises(NonFiniteGradientError, match=words) as caught:
        check.watch("batch 1", scalars(loss, norm))
    assert caught.value.where == "batch 1" and "--nonfinite skip" in str(caught.value)
    check.watch("batch 2", scalars(0.5))
    check.finish()


def test_the_host_waits_only_for_steps_that_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    home, told = Home(monkeypatch, patience=1000), []
    check = LateCheck(2, lambda: told.append(home.waited))
    check.watch("batch 0", scalars(math.nan))
    check.watch("batch 1", scalars(0.5))
    assert home.waited == 0 and not told
    with pytest.raises(NonFiniteGradientError) as caught:
        check.watch("batch 2", scalars(0.5))
    assert caught.value.where == "batch 0" and home.waited == 1 and told == [0]


def test_a_step_that_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def query() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(transit, "send_home", lambda values: (values, SimpleNamespace(query=query)))
    with pytest.raises(DeviceError, match="batch 7 of epoch 0 failed on the device: CUDA error: an illegal") as caught:
        LateCheck(most=1).watch("batch 7 of epoch 0", scalars(0.5))
    assert caught.value.sticky and "\n" not in str(caught.value)


# --- a whole run, whose scalars arrive late ---


def late_run(config: TrainConfig, monkeypatch: pytest.MonkeyPatch, patience: int, bad: int) -> Trainer:
    """A trainer as on a GPU: infinite loss in batch `bad` (-1: none), scalars that arrive `patience` looks later."""
    Home(monkeypatch, patience)
    trainer = Trainer(config)
    trainer._late = LateCheck(config.prefetch_depth + 1)
    step, number = trainer._step, [0]

    def poisoned(batch: Any) -> None:
        if batch.index == bad:
            batch.labels = torch.full_like(batch.labels, torch.inf)
        number[0] += 1
        step(batch)

    monkeypatch.setattr(trainer, "_step", poisoned)
    return trainer


@pytest.mark.parametrize("patience", [0, 1, 1000])
@pytest.mark.parametrize("bad", [3, 11])
def test_the_batch_is_named_and_no_checkpoint_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, patience: int, bad: int
) -> None:
    config = small(metrics=False, checkpoint_dir=str(tmp_path), checkpoint_every=2, prefetch_depth=1)
    # the tables of a GPU would be left alone by the device's own flag; here their check must not come first
    with late_run(config, monkeypatch, patience, bad) as trainer:
        monkeypatch.setattr(trainer.tables, "nonfinite", "skip")
        with pytest.raises(NonFiniteGradientError, match=f"^batch {bad} of epoch 0: the loss is"):
            trainer.run()
        assert bad <= trainer.steps <= bad + config.prefetch_depth + 2
    newest = max(path.name for path in tmp_path.glob("checkpoint-*"))
    with Trainer(small(metrics=False, checkpoint_dir=str(tmp_path), resume=True)) as resumed:
        assert resumed.steps <= bad, newest
        assert all(bool(torch.isfinite(p).all()) for p in resumed.model.dense_parameters())


def test_late_checks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    with Trainer(small(metrics=False)) as plain:
        plain.run()
        expected = [p.detach().clone() for p in plain.model.dense_parameters()]
    with late_run(small(metrics=False), monkeypatch, 1, -1) as trainer:
        trainer.run()
        assert all(torch.equal(a, b) for a, b in zip(expected, trainer.model.dense_parameters(), strict=True))
