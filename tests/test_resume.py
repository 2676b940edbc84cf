"""`cdlrm train --checkpoint-dir … --resume`: a run that was killed or interrupted ends as if it had not been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import cdlrm
from cdlrm.cli import main
from cdlrm.config import TrainConfig
from cdlrm.errors import ConfigError, DataError
from cdlrm.progress import Listener
from cdlrm.report import render
from cdlrm.train import Trainer

ROOT = Path(__file__).resolve().parent.parent
SMALL: dict[str, Any] = {
    "synthetic_rows": "300-50-7-1000-2", "arch_sparse_feature_size": 4, "arch_mlp_bot": "13-8-4",
    "arch_mlp_top": "8-1", "mini_batch_size": 64, "test_mini_batch_size": 30000, "num_batches": 12, "cache_rows": 260,
    "nepochs": 2, "shuffle": True, "dense_optimizer": "adam", "optimizer": "adam", "test_freq": 8,
    "learning_rate": 0.01,
}  # fmt: skip
RESUMED_ELSEWHERE: list[dict[str, Any]] = [
    {"cache_rows": 1000, "horizon": 3, "prefetch_depth": 2},
    {"cache_rows": None, "cache_ratio": 1.0, "horizon": 0, "prefetch_depth": 0},
    {"store": "file:tables"},
]


class Killed(Exception):
    pass


class StopAt(Listener):
    """Ends the run at a step: by an exception out of nowhere, or by Ctrl-C."""

    def __init__(self, step: int, ctrl_c: bool = False) -> None:
        self.left, self.ctrl_c = step, ctrl_c

    def step(self, samples: int) -> None:
        self.left -= 1
        if self.left == 0:
            if not self.ctrl_c:
                raise Killed
            signal.raise_signal(signal.SIGINT)


def run(listener: Listener | None = None, **changes: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Every number of the trained model and its optimizers as bytes, and what the report says of the training."""
    with Trainer(TrainConfig(**{**SMALL, **changes}), listener) as trainer:
        report = trainer.run()
        state = {f"tables.{name}": value for name, value in trainer.tables.state_dict().items()}
        for table in trainer.tables.tables:
            state |= {f"{table.name}.{key}": value for key, value in trainer.tables.table_state(table.name).items()}
        state |= {f"dense.{i}": value for i, value in enumerate(trainer.model.dense_parameters())}
        for i, moments in trainer.dense_optimizer.state_dict()["state"].items():
            state |= {f"dense.{i}.{key}": torch.as_tensor(value) for key, value in moments.items()}
        told = {key: report["training"][key] for key in ("steps", "samples", "epochs", "loss", "skipped_steps")}
        return {k: v.detach().numpy().tobytes() for k, v in state.items()}, {
            **told, "evaluations": report["evaluations"], "report": report,
        }  # fmt: skip


def same(found: tuple[dict[str, bytes], dict[str, Any]], whole: tuple[dict[str, bytes], dict[str, Any]]) -> bool:
    told = [{key: value for key, value in each[1].items() if key != "report"} for each in (found, whole)]
    return found[0] == whole[0] and told[0] == told[1]


@pytest.fixture(scope="module")
def whole() -> tuple[dict[str, bytes], dict[str, Any]]:
    """The run that nothing stops, without checkpoints."""
    return run()


@pytest.mark.parametrize("stop", [5, 13])
def test_resumed_as_if_never_stopped(whole: Any, tmp_path: Path, stop: int) -> None:
    """In the middle of an epoch, and from the checkpoint at the end of one."""
    check_stopped_and_resumed(whole, tmp_path, stop, {})


@pytest.mark.parametrize("changes", RESUMED_ELSEWHERE)
def test_resumed_with_another_cache_or_store(
    whole: Any, tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_stopped_and_resumed(whole, tmp_path, 14, changes)


def check_stopped_and_resumed(whole: Any, folder: Path, stop: int, changes: dict[str, Any]) -> None:
    keep = {"checkpoint_dir": str(folder / "kept"), "checkpoint_every": 4}
    with pytest.raises(Killed):
        run(StopAt(stop), **keep)
    assert len(list((folder / "kept").glob("checkpoint-*"))) == 1
    resumed = run(**keep, **changes, resume=True)
    assert same(resumed, whole)
    assert any(f"after step {stop // 4 * 4}." in s for s in resumed[1]["report"]["chosen"])
    again = run(**keep, **changes, resume=True)  # it is at its end: nothing more to train
    assert same(again, whole)


def test_ctrl_c_leaves_a_checkpoint_of_its_step(whole: Any, tmp_path: Path) -> None:
    keep = {"checkpoint_dir": str(tmp_path)}
    report = run(StopAt(7, ctrl_c=True), **keep)[1]["report"]
    assert report["interrupted"] and report["checkpoint"]["newest"] in render(report)
    assert cdlrm.checkpoint_info(tmp_path)["extra"]["progress"]["steps"] == 7
    assert same(run(**keep, resume=True), whole)


def test_an_epoch_can_be_added(tmp_path: Path) -> None:
    one_then_two = {"checkpoint_dir": str(tmp_path)}
    run(nepochs=1, **one_then_two)
    resumed = run(resume=True, **one_then_two)
    assert resumed[0] == run(metrics=False)[0]  # the first run evaluated at its end, the whole one does not


def test_sigkill_in_a_process_of_its_own(whole: Any, tmp_path: Path) -> None:
    """As a user, with a file store: killed at a moment that nobody chose, resumed, the same to the bit."""
    flags: list[str] = []
    for name, value in SMALL.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    keep = tmp_path / "kept"
    flags += ["--checkpoint-dir", str(keep), "--checkpoint-every", "2", "--store", f"file:{tmp_path / 'tables'}"]
    command = [sys.executable, "-m", "cdlrm", "train", *flags, "--no-progress"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not list(keep.glob("checkpoint-*/manifest.json")) and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.002)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    steps = cdlrm.checkpoint_info(keep)["extra"]["progress"]["steps"]
    assert 0 < steps < 24
    resumed = run(checkpoint_dir=str(keep), checkpoint_every=2, resume=True, store=f"file:{tmp_path / 'tables'}")
    assert same(resumed, whole)


def test_wrong_turns_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep = {"checkpoint_dir": str(tmp_path / "kept"), "num_batches": 3, "nepochs": 1, "metrics": False}
    with pytest.raises(DataError, match="--resume: there is no checkpoint in .* start without --resume"):
        run(**keep, resume=True)
    run(**keep)
    with pytest.raises(ConfigError, match="a run has left checkpoints there; add --resume"):
        run(**keep)
    with pytest.raises(ConfigError, match="started with --learning-rate 0.01, not 0.5"):
        run(**keep, resume=True, learning_rate=0.5)
    with pytest.raises(ConfigError, match="started with --optimizer adam, not sgd"):
        run(**keep, resume=True, optimizer="sgd")
    with pytest.raises(ConfigError, match="started with --num-batches 3, not 6; give it as it was"):
        run(**{**keep, "num_batches": 6}, resume=True)
    with pytest.raises(ConfigError, match="--resume from .*checkpoint-.*: table 'c1'"):
        run(**keep, resume=True, synthetic_rows="301-50-7-1000-2")
    with pytest.raises(ConfigError, match="--resume from .*: the saved place in the data is of a run with exponents"):
        run(**keep, resume=True, synthetic_zipf=0.3)
    for flags, words in {
        "--resume": "--resume without --checkpoint-dir",
        "--checkpoint-every 3": "--checkpoint-every without --checkpoint-dir",
        "--checkpoint-every 0 --checkpoint-dir x": "at least 1",
        "--store file:": "expected ram, or file:DIR",
    }.items():
        assert main(["train", *flags.split()]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1


def test_a_folder_is_one_runs_alone(tmp_path: Path) -> None:
    """A lock of this process's own is as strange to a second Trainer as another process's is."""
    keep: dict[str, Any] = {**SMALL, "checkpoint_dir": str(tmp_path), "num_batches": 3, "nepochs": 1, "metrics": False}
    for resume in (False, True):
        with Trainer(TrainConfig(**keep, resume=resume)) as first:
            for again in (False, True):
                with pytest.raises((ConfigError, DataError)) as caught:
                    Trainer(TrainConfig(**keep, resume=again))
                taken = "another process is training or saving there; wait until it ends, or name another folder."
                assert str(caught.value).endswith(taken) or not (resume or not again)
            first.run()
    with pytest.raises(ConfigError):  # leaves no lock behind
        Trainer(TrainConfig(**{**keep, "arch_mlp_bot": "12-8-4"}, resume=True))
    with Trainer(TrainConfig(**keep, resume=True)):
        holder = "import sys; from pathlib import Path; from cdlrm.checkpoint_files import FolderLock as L; "
        command = [sys.executable, "-c", holder + "L(Path(sys.argv[1]))", str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        other = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert "BlockingIOError" in other.stderr


def test_samples_per_second_are_of_this_process(tmp_path: Path) -> None:
    keep = {"checkpoint_dir": str(tmp_path), "metrics": False}
    run(StopAt(20, ctrl_c=True), **keep)
    with Trainer(TrainConfig(**SMALL, **keep, resume=True)) as trainer:
        training = trainer.run()["training"]
        seconds = trainer._seconds["loop"] - trainer._seconds["first_step"]
        assert training["steps"] == 24 and not training["nothing_left"]
        assert training["samples_per_second"] * seconds == pytest.approx(3 * 64)


def test_nothing_left_to_train_is_said(tmp_path: Path) -> None:
    keep = {"checkpoint_dir": str(tmp_path), "metrics": False, "nepochs": 1}
    first = run(**keep)[1]["report"]
    again = run(**keep, resume=True)[1]["report"]
    assert not first["training"]["nothing_left"] and "nothing was left" not in render(first)
    assert again["training"]["nothing_left"] and "nothing was left to train" in render(again)
    assert again["training"]["samples_per_second"] is None


def test_the_folder_is_tried_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for folder, words in {
        "": "--checkpoint-dir is empty",
        " ": "--checkpoint-dir is empty",
        str(tmp_path / "file"): "file: is a file; name a folder",
        str(tmp_path / "file" / "below"): "cannot be written to .* or name another folder",
        "/proc/none/below": "/proc/none/below: cannot be written to",
    }.items():
        with pytest.raises((ConfigError, DataError), match=words):
            Trainer(TrainConfig(**SMALL, checkpoint_dir=folder))

    def full(**_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(DataError, match="No space left on device"):
        Trainer(TrainConfig(**SMALL, checkpoint_dir=str(tmp_path / "new")))
