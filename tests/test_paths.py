"""What a newcomer does first, by the README alone: its commands on files of one's own, and wrong turns on the way."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import cdlrm
from cdlrm.cli import main

ROOT = Path(__file__).resolve().parent.parent
ON_A_GPU = ("of the device", "pinned")  # lines of a report
README = (ROOT / "README.md").read_text(encoding="utf-8")


def own_parquet(file: Path, rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    user, item = random.integers(0, 10**12, rows) % 3001, random.integers(0, 800, rows)
    clicked = random.random(rows) < 0.1 + 0.8 * (item % 2)
    columns = {"user": user, "clicked": clicked.astype(np.int32), "age": random.random(rows)}
    pa.parquet.write_table(pa.table({**columns, "price": random.random(rows), "item": item}), file)


def commands_of_the_readme() -> list[list[str]]:
    """The `sh` block about a Parquet file of one's own, as lists of words."""
    (block,) = (b for b in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL) if "clicks.parquet" in b)
    return [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer")
    own_parquet(folder / "clicks.parquet", 40_000, 1)
    own_parquet(folder / "tomorrow.parquet", 3000, 2)
    return folder


def test_train_kill_resume_evaluate_predict(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Word for word, but for a small batch and a checkpoint every 50 steps, so that it is over soon."""
    monkeypatch.chdir(folder)
    settings, dry_run, train, resume, evaluate, predict = commands_of_the_readme()
    assert settings[-2] == ">" and settings[0] == "cdlrm"
    assert main([*settings[1:-2], "--mini-batch-size", "128", "--checkpoint-every", "50"]) == 0
    (folder / settings[-1]).write_text(capsys.readouterr().out, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *train, "--no-progress"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 100
        while not list((folder / "run").glob("checkpoint-*/manifest.json")) and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert main([*train[1:], "--no-progress"]) == 2  # forgot --resume
    assert "add --resume" in capsys.readouterr().err
    assert main([*resume[1:], "--no-progress"]) == 0
    out = capsys.readouterr().out
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["training"]["samples"] == 36_000 and report["evaluations"][-1]["auc"] > 0.8
    for line in re.findall(r"^\| (.*?) \|", README.split("## Reading the report")[1].split("##")[0], re.MULTILINE)[2:]:
        for name in (name for name in line.split(", ") if name not in ON_A_GPU):
            assert re.search(rf"^  {re.escape(name)}  ", out, re.MULTILINE), name
    assert main([*evaluate[1:], "--no-progress"]) == 0
    assert "normalized entropy" in capsys.readouterr().out
    assert main([*predict[1:], "--no-progress"]) == 0
    found = pa.parquet.read_table(folder / "probabilities.parquet")
    told = pa.parquet.read_table(folder / "tomorrow.parquet")["clicked"].to_numpy()
    probabilities = found["probability"].to_numpy()
    assert probabilities[told == 1].mean() > probabilities[told == 0].mean() + 0.2
    assert dry_run[-1] == "--dry-run"  # run by tests/test_dry_run.py
    assert len(cdlrm.load_tables("run")["item"]) == 100_000


def test_the_first_wrong_turns(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    own = ["--label-column", "clicked", "--dense-columns", "age", "price", "--sparse-columns", "user", "item"]
    for code, words, flags in [
        (1, "clicks.parq", ["--data", "clicks.parq", *own]),
        (1, "name the columns with --dense-columns", ["--data", "clicks.parquet"]),
        (1, "no column 'itme'", ["--data", "clicks.parquet", *own[:-1], "itme"]),
        (1, "no column 'click'", ["--data", "clicks.parquet", "--label-column", "click", *own[2:]]),
        (2, "give one, or one a column", ["--data", "clicks.parquet", *own, "--table-rows", "10-20-30"]),
        (1, "outside", ["--data", "clicks.parquet", *own, "--ids", "rows", "--table-rows", "800"]),
        (2, "2 dense columns", ["--data", "clicks.parquet", *own, "--arch-mlp-bot", "13-16"]),
        (2, "without --data", own),
        (2, "at most 1", ["--cache-ratio", "10"]),
    ]:
        assert main(["train", "--no-progress", "--no-metrics", *flags]) == code, flags
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1, err


def test_rows_from_numpy() -> None:
    """Replace a table's rows; what does not fit is told in one sentence."""
    tables = cdlrm.EmbeddingBagCollection([cdlrm.Table("user", 10, 4)], optimizer=cdlrm.SGD(lr=0.1), cache_rows=3)
    rows = np.arange(40, dtype=np.float32).reshape(10, 4)
    tables.set_table("user", rows)
    assert np.array_equal(tables.state_dict()["embedding_bags.user.weight"].numpy(), rows)
    with pytest.raises(cdlrm.InputError, match=r"float64 \[10, 4\]; pass float32 \[10, 4\]"):
        tables.set_table("user", rows.astype(np.float64))
    with pytest.raises(cdlrm.InputError, match=r"pass float32 \[10, 4\]"):
        tables.set_table("user", rows[:5])
    with pytest.raises(cdlrm.ConfigError, match="no table 'usr'; the tables are 'user'"):
        tables.set_table("usr", rows)
    tables.close()
