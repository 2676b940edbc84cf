"""Whole training runs: what must change no result, what the report counts, and the real sample against plain torch."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cdlrm.config import TrainConfig
from cdlrm.data import Batch
from cdlrm.errors import ConfigError, NonFiniteGradientError
from cdlrm.metrics import ClickMetrics
from cdlrm.model import DLRM
from cdlrm.progress import Listener, ProgressBar
from cdlrm.report import jsonable, render
from cdlrm.train import Trainer, train

SMALL: dict[str, Any] = {
    "synthetic_rows": "300-50-7-1000-2",
    "arch_sparse_feature_size": 4,
    "arch_mlp_bot": "13-8-4",
    "arch_mlp_top": "8-1",
    "mini_batch_size": 64,
    "test_mini_batch_size": 30000,
    "num_batches": 12,
    "cache_rows": 260,
}


def small(**changes: Any) -> TrainConfig:
    return TrainConfig(**{**SMALL, **changes})


def weights(trainer: Trainer) -> dict[str, bytes]:
    """Every number of the trained model, as bytes."""
    state = {f"tables.{name}": value for name, value in trainer.tables.state_dict().items()}
    state |= {f"dense.{i}": value for i, value in enumerate(trainer.model.dense_parameters())}
    return {name: value.detach().numpy().tobytes() for name, value in state.items()}


def trained(config: TrainConfig, listener: Listener | None = None) -> tuple[dict[str, bytes], dict[str, Any]]:
    with Trainer(config, listener) as trainer:
        report = trainer.run()
        return weights(trainer), report


class Quiet:
    """A stream for the progress bar."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


@pytest.fixture(scope="module")
def baseline() -> tuple[dict[str, bytes], dict[str, Any]]:
    return trained(small(metrics=False))


def test_training_changes_every_part(baseline: tuple[dict[str, bytes], dict[str, Any]]) -> None:
    with Trainer(small()) as fresh:
        start = weights(fresh)
    assert all(start[name] != value for name, value in baseline[0].items())


@pytest.mark.parametrize("test_freq", [None, 5])
def test_metrics_and_progress_change_no_bit(baseline: Any, test_freq: int | None) -> None:
    stream = Quiet()
    with_all, report = trained(small(test_freq=test_freq, print_freq=3), ProgressBar(stream))  # type: ignore[arg-type]
    assert with_all == baseline[0]
    steps = [evaluation["step"] for evaluation in report["evaluations"]]
    assert steps == ([0, 12] if test_freq is None else [0, 5, 10, 12])
    assert "AUC" in stream.text and "train" in stream.text


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_rows": None, "cache_ratio": 1.0},
        {"cache_rows": None, "cache_ratio": 0.2, "horizon": 0, "prefetch_depth": 0},
        {"horizon": 3, "prefetch_depth": 3},
        {"cache_rows": 1},
    ],
)
def test_cache_and_look_ahead_change_no_bit_of_the_whole_model(baseline: Any, changes: dict[str, Any]) -> None:
    assert trained(small(metrics=False, **changes))[0] == baseline[0]


def test_same_seed_same_bits_other_seed_other_bits(baseline: Any) -> None:
    assert trained(small(metrics=False, seed=1))[0] != baseline[0]
    assert trained(small(metrics=False, shuffle=True))[0] == trained(small(metrics=False, shuffle=True))[0]


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise-adagrad", "adagrad", "adam"])
def test_optimizers_train_through_the_cache_as_resident(optimizer: str) -> None:
    changes = {"optimizer": optimizer, "dense_optimizer": "adagrad", "metrics": False, "num_batches": 6}
    cached = trained(small(**changes))[0]
    assert cached == trained(small(**changes, cache_rows=None, cache_ratio=1.0))[0]


def test_report_counts(baseline: Any) -> None:
    report = baseline[1]
    training, cache = report["training"], report["cache"]
    assert (training["steps"], training["samples"], training["epochs"]) == (12, 12 * 64, 1)
    assert cache["lookups"] == 12 * 64 * 5
    assert cache["hits"] + cache["fills"] == cache["distinct"]
    assert cache["fills"] >= cache["mind_fills"] >= cache["min0_fills"] > 0
    assert cache["bytes_filled"] >= cache["fills_copied"] * 4 * 4
    assert report["interrupted"] is False and report["evaluations"] == []
    assert report["memory"]["peak_bytes"] > 2**20
    assert set(report["seconds"]) >= {"read", "plan", "transfer", "forward_backward", "stall"}
    assert json.loads(json.dumps(jsonable(report), allow_nan=False))["training"] == training
    text = render(report)
    assert "fills / MIN(0)" in text and "--cache-rows" not in text and "synthetic" in text


def test_epochs_continue_training() -> None:
    two, report = trained(small(metrics=False, nepochs=2))
    assert report["training"]["steps"] == 24 and report["training"]["epochs"] == 2
    assert two != trained(small(metrics=False))[0]


def test_multi_hot_and_all_interactions() -> None:
    for changes in ({"synthetic_multi_hot": 3}, {"arch_interaction_op": "cat"}, {"arch_interaction_itself": True}):
        report = train(small(num_batches=3, **changes))
        assert math.isfinite(report["training"]["loss"])


class Heard(Listener):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("start", "resumed", "step", "figures", "evaluated", "close"):
            self.calls.append(name)
        return super().__getattribute__(name)


def test_listeners_of_ones_own(tmp_path: Path, baseline: Any) -> None:
    """A listener hears everything; TensorBoard's files are read back; neither changes a bit."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    heard = Heard()
    found, report = trained(small(logdir=str(tmp_path), print_freq=4, test_freq=6), heard)
    assert found == baseline[0]
    steps = ["step"] * 4 + ["figures"] + ["step"] * 2 + ["evaluated"] + ["step"] * 2 + ["figures"] + ["step"] * 4
    assert heard.calls == ["evaluated", "start", *steps, "figures", "evaluated", "close"]
    events = EventAccumulator(str(tmp_path)).Reload()
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == [4, 8, 12]
    assert losses[-1].value == pytest.approx(report["training"]["loss"])
    assert [event.step for event in events.Scalars("test/auc")] == [0, 6, 12]
    assert events.Scalars("test/log_loss")[-1].value == pytest.approx(report["evaluations"][-1]["log_loss"])


def test_tensorboard_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'cdlrm\[tensorboard\]'"):
        Trainer(small(logdir=str(tmp_path)))


def test_counters_of_each_table(baseline: Any) -> None:
    tables, cache = baseline[1]["tables"], baseline[1]["cache"]
    assert list(tables) == ["c1", "c2", "c3", "c4", "c5"]
    for key in ("distinct", "hits", "fills"):
        assert sum(table[key] for table in tables.values()) == cache[key]
    assert [table["rows"] for table in tables.values()] == [300, 50, 7, 1000, 2]
    assert sum(table["cached_rows"] for table in tables.values()) == min(cache["cache_rows"], 260)
    with Trainer(small(metrics=False)) as trainer:
        seen: dict[str, set[int]] = {name: set() for name in tables}
        for batch in trainer.data.train:
            for name, jagged in batch.sparse.items():
                seen[name] |= set(jagged.values.tolist())
    assert {name: table["trained_rows"] for name, table in tables.items()} == {n: len(s) for n, s in seen.items()}
    assert "Tables" in render(baseline[1])


class InterruptAt(Listener):
    def __init__(self, step: int) -> None:
        self.left = step

    def step(self, samples: int) -> None:
        self.left -= 1
        if self.left == 0:
            import signal

            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_ends_after_the_step_and_still_reports(baseline: Any) -> None:
    stopped, report = trained(small(metrics=False), InterruptAt(5))
    assert report["interrupted"] and report["training"]["steps"] == 5
    assert "INTERRUPTED" in render(report)
    assert stopped == trained(small(metrics=False, num_batches=5))[0]


class Poisoned:
    """A source whose batch 3 has a label that makes the loss infinite: the settings check comes before the kernels."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def __iter__(self) -> Any:
        for batch in self.source:
            labels = torch.full_like(batch.labels, torch.inf) if batch.index == 3 else batch.labels
            yield Batch(batch.dense, labels, batch.sparse, batch.index)


def test_non_finite_loss_names_the_batch_or_is_skipped() -> None:
    with Trainer(small(metrics=False)) as trainer:
        trainer.data.train = Poisoned(trainer.data.train)  # type: ignore[assignment]
        with pytest.raises(NonFiniteGradientError, match="batch 3 of epoch 0"):
            trainer.run()
    with Trainer(small(metrics=False, nonfinite="skip")) as trainer:
        trainer.data.train = Poisoned(trainer.data.train)  # type: ignore[assignment]
        report = trainer.run()
    assert report["training"]["skipped_steps"] == 1 and math.isfinite(report["training"]["loss"])


def test_settings_that_do_not_fit_the_data() -> None:
    with pytest.raises(ConfigError, match="13 dense columns"):
        Trainer(small(arch_mlp_bot="12-8-4"))
    with pytest.raises(ConfigError, match="row numbers"):
        Trainer(small(ids="hash"))


def test_trained_reaches_auc_and_untrained_does_not() -> None:
    first, last = train(TrainConfig(num_batches=120))["evaluations"]
    assert abs(first["auc"] - 0.5) < 0.02
    assert last["auc"] > 0.70 and last["normalized_entropy"] < 1


# The real sample.


class TorchEmbeddings(nn.Module):
    """The plain torch way: one `nn.EmbeddingBag(sparse=True)` a table."""

    def __init__(self, features: list[str], values: dict[str, Tensor]) -> None:
        super().__init__()
        self.features = features
        self.bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(values[f].clone(), freeze=False, mode="sum", sparse=True) for f in features
        )

    def forward(self, batch: Batch) -> Tensor:
        outputs = []
        for feature, bag in zip(self.features, self.bags, strict=True):
            values, offsets, _ = batch.sparse[feature]
            outputs.append(bag(values.unsqueeze(1)) if offsets is None else bag(values, offsets[:-1]))
        return torch.stack(outputs, dim=1)


def sample_config(data_dir: Path, **changes: Any) -> TrainConfig:
    folder = data_dir / "criteo_tb_orc"
    statistics = json.loads((data_dir / "criteo_tb_stats.json").read_text(encoding="utf-8"))["sparse"]
    settings = {
        "data": [str(folder / "*.orc")],
        "table_rows": "-".join(str(statistics[f"c{i}"]["unique"]) for i in range(1, 27)),
        "arch_mlp_bot": "13-64-16",
        "arch_mlp_top": "64-1",
        "mini_batch_size": 512,
        "learning_rate": 0.3,
        "optimizer": "sgd",
    }
    return TrainConfig(**{**settings, **changes})


def torch_auc(config: TrainConfig, trainer: Trainer) -> float:
    """The AUC of a plain torch DLRM from the same initial values on the same batches."""
    features = trainer.data.features
    state = trainer.tables.state_dict()
    tables = TorchEmbeddings(features, {f: state[f"embedding_bags.{f}.weight"] for f in features})
    model = DLRM(tables, features=26, dim=16, mlp_bot=[13, 64, 16], mlp_top=[64, 1], seed=config.seed)
    optimizers = [
        torch.optim.SGD(parameters, lr=config.learning_rate)
        for parameters in (model.dense_parameters(), tables.parameters())
    ]
    trainer.data.train.set_epoch(0)
    for batch in trainer.data.train:
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch), batch.labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    metrics = ClickMetrics()
    assert trainer.data.test is not None
    with torch.no_grad():
        for batch in trainer.data.test:
            metrics.update(model(batch.dense, batch), batch.labels)
    return float(metrics.compute()["auc"])


def test_real_sample_same_bytes_for_every_cache_and_auc_of_plain_torch(data_dir: Path) -> None:
    found: dict[float, dict[str, bytes]] = {}
    aucs = []
    for cache_ratio in (0.05, 0.2, 1.0):
        state, report = trained(sample_config(data_dir, cache_ratio=cache_ratio))
        found[cache_ratio] = state
        aucs.append(report["evaluations"][-1]["auc"])
        assert report["training"]["samples"] == 72_000 and report["evaluations"][-1]["samples"] == 8_000
        assert report["cache"]["evicts"] > 0 or cache_ratio == 1.0
    assert found[0.05] == found[0.2] == found[1.0]
    assert len(set(aucs)) == 1
    config = sample_config(data_dir, cache_ratio=1.0)
    with Trainer(config) as trainer:
        plain = torch_auc(config, trainer)
    assert aucs[0] == pytest.approx(plain, abs=1e-3)
    assert aucs[0] > 0.6 and not np.isnan(plain)


def test_all_random_generators_start_from_the_seed() -> None:
    """What layers and listeners of one's own draw is the same in two runs, and not with another seed."""

    def drawn(seed: int) -> tuple[float, float, float]:
        with Trainer(small(num_batches=1, seed=seed)):
            return torch.rand(()).item(), float(np.random.rand()), random.random()  # noqa: NPY002

    first, again, other = drawn(5), drawn(5), drawn(2**40)
    assert first == again and all(a != b for a, b in zip(first, other, strict=True))


def test_pooling_of_the_tables() -> None:
    """Sums of two equal ids are twice their mean, and training goes another way."""
    with Trainer(small(pooling="mean", synthetic_multi_hot=2)) as mean, Trainer(small(synthetic_multi_hot=2)) as total:
        ids = {feature: (torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2])) for feature in mean.data.features}
        with torch.no_grad():
            assert torch.equal(2 * mean.tables(ids), total.tables(ids))


def test_the_documented_command_for_long_histories_learns(data_dir: Path, tmp_path: Path) -> None:
    from cdlrm.cli import main

    sample = data_dir / "alimama_dmr_500.csv"
    data = str(tmp_path / "alimama.parquet")
    assert main(["convert", "--layout", "alimama", str(sample), data]) == 0
    flags = ["--pooling", "mean", "--mini-batch-size", "64", "--nepochs", "10", "--no-progress"]
    assert main(["train", "--data", data, *flags, "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["training"]["loss"] < 0.3 < report["evaluations"][0]["log_loss"]
