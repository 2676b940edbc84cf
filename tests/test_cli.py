"""The command line: help that teaches, errors of one sentence with the right exit code, YAML, and whole runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from cdlrm.arguments import write_json
from cdlrm.cli import main
from cdlrm.config import TrainConfig, in_flags
from cdlrm.errors import DataError

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    "--synthetic-rows", "300-50-7-1000-2", "--arch-sparse-feature-size", "4", "--arch-mlp-bot", "13-8-4",
    "--arch-mlp-top", "8-1", "--mini-batch-size", "64", "--test-mini-batch-size", "30000",
]  # fmt: skip


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "cdlrm train" in out and "cdlrm info" in out


def test_help_is_grouped_and_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for words in ("Data:", "Model:", "Cache:", "examples:", "--arch-mlp-bot 13-512-256-64-16", "(default: 2048)"):
        assert words in out


BAD_FLAGS = {
    "--mini-batch-size 0": "at least 1",
    "--mini-batch-size two": "whole number",
    "--mini-batch-size 1.5": "whole number",
    "--learning-rate -1": "above 0",
    "--learning-rate nan": "finite",
    "--cache-ratio 0": "above 0",
    "--cache-ratio 1.5": "at most 1",
    "--cache-rows 0": "at least 1",
    "--horizon -1": "at least 0",
    "--prefetch-depth 65": "at most 64",
    "--seed -3": "at least 0",
    "--test-fraction 1": "at most 0.9",
    "--nepochs 0": "at least 1",
    "--ids number": "hash, rows",
    "--bad-rows maybe": "raise, skip",
    "--arch-interaction-op sum": "dot, cat",
    "--arch-mlp-top 8-2": "must be 1",
    "--arch-mlp-top 8--1": "with dashes between",
    "--arch-mlp-bot 13-8-5": "--arch-sparse-feature-size 16",
    "--arch-mlp-bot 7-8-16": "13 dense columns",
    "--arch-interaction-itself --arch-interaction-op cat": "leave it out",
    "--synthetic-rows 10-0": "at least 1",
    "--synthetic-zipf 9": "at most 4",
    "--table-rows 100": "--synthetic-rows",
    "--test-data x.orc": "--data",
    "--json /no/such/folder/report.json": "folder does not exist",
    "--config /no/such.yaml": "No such file",
    "--device tpu": "auto, cuda, cpu",
    "--store disk": "ram",
    "--mini-bach-size 3": "did you mean --mini-batch-size?",
    "--mini-batch 3": "not a known flag",
    "extra": "'extra' is not a known flag",
    "--seed": "expected one argument",
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_bad_flags_are_one_sentence_and_exit_2(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *flags.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert BAD_FLAGS[flags] in captured.err


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "'train'" in capsys.readouterr().err


def test_library_error_is_one_sentence_and_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.orc")
    assert main(["train", "--data", missing]) == 1
    err = capsys.readouterr().err
    assert "none.orc" in err and err.count("\n") == 1 and "Traceback" not in err
    assert main(["train", "--data", missing, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_print_config_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--learning-rate", "0.5", "--numpy-rand-seed", "7", "--no-progress", "--print-config"]) == 0
    text = capsys.readouterr().out
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    assert TrainConfig.from_mapping(yaml.safe_load(text)) == TrainConfig(learning_rate=0.5, seed=7, progress=False)
    assert main(["train", "--config", str(file), "--seed", "8", "--print-config"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert (values["learning_rate"], values["seed"], values["progress"]) == (0.5, 8, False)


@pytest.mark.parametrize(
    "text,words",
    [
        ("mini_bach_size: 3", "did you mean mini_batch_size?"),
        ("- 1\n- 2", "name: value"),
        ("a: [", "not YAML"),
        ("mini_batch_size: [1]", "whole number"),
        ("shuffle: maybe", "true or false"),
        ("seed: null", "expected a number"),
        ("data: 3", "one or more names"),
    ],
)
def test_bad_yaml(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    assert main(["train", "--config", str(file)]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_yaml_takes_dashes_and_aliases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("--mini-batch-size: 99\nnumpy-rand-seed: 5\n", encoding="utf-8")
    assert main(["train", "--config", str(file), "--print-config"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert (values["mini_batch_size"], values["seed"]) == (99, 5)


def test_report_is_printed_and_written_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert main(["train", *SMALL, "--num-batches", "6", "--json", str(file)]) == 0
    captured = capsys.readouterr()
    report = json.loads(file.read_text(encoding="utf-8"))
    assert "Training report" in captured.out and "Chosen automatically" in captured.out
    assert f"{report['cache']['fills']:,} rows" in captured.out
    assert "samples/s" in captured.err and "step 0: AUC" in captured.err
    assert report["training"]["steps"] == 6 and report["config"]["mini_batch_size"] == 64


def test_bad_rows_stop_or_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Criteo's text: 400 good lines, and one whose fifth number is a word."""
    good = ["\t".join([str(n % 2), *[str(n)] * 13, *[f"{n * 977:08x}"] * 26]) for n in range(400)]
    bad = good[7].replace("7", "seven", 5)
    file, json_file = tmp_path / "day_0", tmp_path / "report.json"
    file.write_text("\n".join([*good[:200], bad, *good[200:]]) + "\n", encoding="utf-8")
    flags = ["train", "--data", str(file), "--table-rows", "1000", "--mini-batch-size", "64", "--no-progress"]
    assert main(flags) == 1
    err = capsys.readouterr().err
    assert "day_0" in err and err.count("\n") == 1
    assert "or pass --bad-rows skip" in err and "bad_rows=" not in err
    assert main([*flags, "--bad-rows", "skip", "--json", str(json_file)]) == 0
    told = capsys.readouterr()
    assert "1 malformed" in told.out and "day_0: line 201: column i1 is 'seven'" in told.out
    report = json.loads(json_file.read_text(encoding="utf-8"))
    assert "day_0: line 201" in report["data"]["bad_row_examples"][0]
    assert report["data"]["bad_rows"] == 1 and report["training"]["samples"] == 359


@pytest.mark.parametrize(
    ("lines", "flags", "words"),
    [
        (["0"] * 3, ["--bad-rows", "skip"], "no row is left to train on (3 malformed rows were left out"),
        (["\t".join(["1", *["2"] * 13, *["0f"] * 26])], ["--test-fraction", "0.9"], "a smaller --test-fraction"),
        (["a_user,item,1,0"], [], "line 1 has 1 columns where 40 are needed"),
        (["a_user,item,1,0"], [], "other layouts: see cdlrm convert --layout"),
    ],
)
def test_nothing_to_train_on_is_exit_1(
    lines: list[str], flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = ["--data", str(tmp_path / "x.tsv"), "--table-rows", "1000", "--no-progress"]
    assert main(["train", *data, "--checkpoint-dir", str(tmp_path / "kept"), *flags]) == 1
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_no_progress_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SMALL, "--num-batches", "2", "--no-progress", "--no-metrics"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and "none: --no-metrics" in captured.out


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cdlrm.machine.package_version", lambda name: None if name == "torchrec" else "1.2.3")
    assert main(["info", "--help"]) == 0
    assert "cdlrm info --json > machine.json" in capsys.readouterr().out
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and "missing: torchrec" in out and "pip install 'cdlrm[torchrec]'" in out
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"package": "torchrec", "extra": "torchrec", "for": "KeyedJaggedTensor as input"} in facts["missing"]
    assert facts["devices"][0]["device"] == "cpu" and set(facts["drivers"]) == {"cpu", "cuda", "nvidia"}
    assert facts["cpus"] >= 1 and facts["packages"]["torch"] and facts["memory_bytes"] > 2**28


def test_ctrl_c_while_modules_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python 3.11 raises RuntimeError for what comes while a dataclass is made; other ones are faults."""

    def fail(arguments: list[str]) -> int:
        raise RuntimeError("Error calling __set_name__") from cause

    monkeypatch.setattr("cdlrm.cli._run", fail)
    cause: BaseException = KeyboardInterrupt()
    assert main(["info"]) == 130 and capsys.readouterr().err == "interrupted.\n"
    cause = ValueError()
    with pytest.raises(RuntimeError):
        main(["info"])


def test_ctrl_c_reports_and_exits_130(tmp_path: Path) -> None:
    """As a user: `python -m cdlrm` in a process of its own, SIGINT in the middle of training."""
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "cdlrm", "train", *SMALL, "--num-batches", "1000000", "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        while line and "step 0: AUC" not in line:
            line = process.stderr.readline()
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "INTERRUPTED" in out and "Traceback" not in err
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["interrupted"] is True and report["training"]["steps"] < 1_000_000


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("needs cache_rows=500 in all", "needs --cache-rows 500 in all"),
        ("raise cache_rows (--cache-rows) or", "raise --cache-rows or"),
        ("more rows (table_rows), hash the ids (ids='hash')", "more rows (--table-rows), hash the ids (--ids hash)"),
        ("the file /data/table_rows.tsv and table_rows/x", "the file /data/table_rows.tsv and table_rows/x"),
        ("no seed; allow growth (strict=False, no --strict)", "no seed; allow growth (strict=False, no --strict)"),
        ("store='file:DIR' holds", "--store file:DIR holds"),
    ],
)
def test_errors_name_flags(told: str, shown: str) -> None:
    assert in_flags(told) == shown


def test_a_cache_that_is_too_small_is_told_in_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--synthetic-rows", "3000-3000", "--mini-batch-size", "256", "--cache-rows", "20", "--strict"]
    assert main(["train", *flags, "--num-batches", "2", "--no-progress", "--no-metrics"]) == 1
    err = capsys.readouterr().err
    assert "--cache-rows" in err and "cache_rows" not in err


def test_json_that_cannot_be_written_is_one_sentence() -> None:
    with pytest.raises(DataError, match=r"--json /dev/full: cannot be written \(No space left on device\)\."):
        write_json("/dev/full", {"a": 1})
