"""README.md is true: its Python runs, its flags parse, the tests it names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cdlrm.cli import build_parser, main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_blocks_run(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks("python")[number], f"README block {number}", "exec"), {"__name__": "readme"})
    fills = re.findall(r"([\d,]+) fills", capsys.readouterr().out)
    assert len(set(fills)) == len(fills), "the text says that each cache moves another number of rows"


def commands() -> list[str]:
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    return [part.strip() for line in lines for part in line.split("&&") if part.strip().startswith("cdlrm ")]


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `cdlrm` line; training with --print-config so that it stops after its settings are read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("checkpoint_dir: run\n", encoding="utf-8")
    words = shlex.split(command.partition(" > ")[0])[1:]
    if words[0] != "train":
        assert build_parser().parse(words).command
        return
    assert main([*words, "--print-config"]) == 0


def test_named_tests_exist() -> None:
    for file, _, test in re.findall(r"`(tests/[\w/]+\.py)(::(\w+))?`", README):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in text, f"{file}::{test}"


def test_the_test_command_is_the_one_that_continuous_integration_runs() -> None:
    found = re.findall(r"^pip install .*&& pytest$", README, flags=re.MULTILINE)
    assert found == ["pip install '.[test]' && pytest"]
