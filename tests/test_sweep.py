"""`cdlrm sweep`: every combination once, resumable, nothing lost on Ctrl-C, figures, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cdlrm.sweep.run as run_module
from cdlrm.cli import main
from cdlrm.sweep.figures import MEASURES, SHAPE_MEASURES, shape_curves
from cdlrm.sweep.points import read_lines

ROOT = Path(__file__).resolve().parent.parent
MODEL = ["--arch-mlp-top", "8-1", "--synthetic-rows", "3000-500-7-10000-2", "--no-progress"]
RUN = ["sweep", *MODEL, "--mini-batch-size", "256", "--num-batches", "6"]


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_combination_once_and_never_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.jsonl"
    grid = ["--cache-ratio", "0.2", "--cache-rows", "4000", "--horizon", "1", "3", "--out", str(out)]
    assert main([*RUN, *grid]) == 0
    first = out.read_bytes()
    lines = lines_of(out)
    assert {(line["cache_rows"], line["horizon"]) for line in lines} == {(c, h) for c in (2702, 4000) for h in (1, 3)}
    for line in lines:
        assert line["batches"] == 6 and line["fills"] >= line["mind_fills"] >= line["min0_fills"] > 0
        for name in ("compute", "overhead", "stall"):
            assert line[f"{name}_seconds_a_batch"] >= 0
    assert main([*RUN, *grid]) == 0
    assert out.read_bytes() == first
    assert "4 of 4 runs are in" in capsys.readouterr().out
    more = [*grid[:-2], "5", "--prefetch-depth", "1", "horizon", *grid[-2:]]
    assert main([*RUN, *more]) == 0
    assert out.read_bytes().startswith(first)
    lines = lines_of(out)
    assert len(lines) == len({line["key"] for line in lines}) == 12  # 2 caches, 3 horizons, 2 depths
    tied = [line for line in lines if line["depth_is_horizon"]]
    assert len(tied) == 6 and all(line["prefetch_depth"] == line["horizon"] for line in tied)


def test_simulated_fills_equal_those_of_real_runs(tmp_path: Path) -> None:
    grid = ["--cache-ratio", "0.15", "0.3", "--horizon", "0", "4", "auto", "--prefetch-depth", "0", "2"]
    fills = []
    for mode in ([], ["--simulate"]):
        out = tmp_path / f"{len(fills)}.jsonl"
        assert main([*RUN, *mode, *grid, "--out", str(out)]) == 0
        names = (
            "cache_rows",
            "horizon",
            "horizon_auto",
            "prefetch_depth",
            "distinct",
            "fills",
            "min0_fills",
            "mind_fills",
            "cache_bytes",
        )
        fills.append(sorted([line[name] for name in names] for line in lines_of(out)))
    assert fills[0] == fills[1] and len(fills[0]) == 12


def test_the_table_marks_what_is_not_as_it_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache that grew, a depth that is the horizon, a horizon that was raised, a depth that does not fit."""
    grid = ["--cache-rows", "300", "3000", "--horizon", "1", "--prefetch-depth", "1", "2", "horizon"]
    marked = {}
    for mode in ([], ["--simulate"]):
        out = tmp_path / f"{len(marked)}.jsonl"
        assert main([*RUN, *mode, *grid, "--out", str(out)]) == 0
        said = capsys.readouterr().out
        rows = [line.split() for line in said.splitlines() if line.split()[0] == "256"]
        marked[len(marked)] = [(row[2], row[4], row[5], row[-1][-1] == "~") for row in rows]
        for legend in ("* a batch needs", "= the depth is", "+ a shorter horizon", "~ the rows of depth"):
            assert said.count(legend) == 1
    grew = marked[0][0][0]
    assert grew.endswith("*") and 300 < int(grew[:-1]) < 1000
    three = [("1", "1", True), ("2+", "2", True), ("1", "1=", True)]
    assert marked[0] == [(grew, *r) for r in three] + [("3,000", *r[:2], False) for r in three]
    assert marked[1] == marked[0]
    assert main([*RUN, "--simulate", "--cache-rows", "3000", "--horizon", "2", "--out", str(tmp_path / "x.jsonl")]) == 0
    assert not any(mark in capsys.readouterr().out for mark in ("*", "=", "+", "~"))


def test_a_sweep_goes_on_after_an_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cdlrm.train as training

    real, out = training.train, tmp_path / "s.jsonl"
    runs = 0

    def stopped_at_third(config: object, listener: object = None) -> dict:
        nonlocal runs
        runs += 1
        report = real(config, listener)  # type: ignore[arg-type]
        return {**report, "interrupted": runs == 4}  # the first is the warm-up

    grid = ["--horizon", "1", "2", "3", "4", "--out", str(out)]
    monkeypatch.setattr(training, "train", stopped_at_third)
    assert main([*RUN, *grid]) == 130
    assert [line["horizon"] for line in lines_of(out)] == [1, 2]
    monkeypatch.setattr(training, "train", real)
    assert main([*RUN, *grid]) == 0
    assert [line["horizon"] for line in lines_of(out)] == [1, 2, 3, 4]


def test_ctrl_c_while_simulating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "s.jsonl"
    argv = [*RUN, "--simulate", "--mini-batch-size", "128", "256", "--out", str(out)]
    real = run_module._simulate_pass
    passes = []

    def second_is_interrupted(points: list, *rest: object) -> None:
        passes.append(points)
        if len(passes) == 2:
            raise KeyboardInterrupt
        real(points, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "_simulate_pass", second_is_interrupted)
    assert main(argv) == 130
    assert [line["batch_size"] for line in lines_of(out)] == [128]
    monkeypatch.setattr(run_module, "_simulate_pass", real)
    assert main(argv) == 0
    assert [line["batch_size"] for line in lines_of(out)] == [128, 256]


def test_real_ctrl_c(tmp_path: Path) -> None:
    """SIGINT to the process: exit code 130, whole lines only."""
    out = tmp_path / "s.jsonl"
    argv = [sys.executable, "-m", "cdlrm", *RUN, "--num-batches", "300", "--horizon", "1", "2", "3", "4", "5", "6"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*argv, "--out", str(out)], env=environment, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not (out.exists() and out.stat().st_size) and time.monotonic() < until and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "INTERRUPTED" in said
    assert 1 <= len(lines_of(out)) < 6


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path) -> None:
    out = tmp_path / "s.jsonl"
    argv = [*RUN, "--simulate", "--horizon", "1", "2", "--out", str(out)]
    assert main(argv) == 0
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    assert main(argv) == 0
    assert out.read_bytes() == whole


def test_a_file_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "notes.txt"
    for text in ("my notes\n", "my notes", '{"a": 1}\n', '{"a": 1}', '{"kept": 1', '{"keys": []}'):
        out.write_text(text)
        assert main([*RUN, "--simulate", "--out", str(out)]) == 1
        assert "is not of a sweep" in capsys.readouterr().err
        assert out.read_text() == text


def test_repeats_are_runs_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "s.jsonl"
    assert main([*RUN, "--repeats", "2", "--horizon", "1", "2", "--out", str(out)]) == 0
    assert [(line["repeat"], line["horizon"]) for line in lines_of(out)] == [(0, 1), (0, 2), (1, 1), (1, 2)]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_figures(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, figures = tmp_path / "s.jsonl", tmp_path / "figures"
    grid = ["--horizon", "0", "2", "--cache-ratio", "0.2", "0.4", "--prefetch-depth", "1", "horizon"]
    output = ["--out", str(out), "--figures", str(figures), "--figure-format", ending]
    assert main([*RUN, *grid, *output]) == 0
    assert {file.name for file in figures.iterdir()} == {f"{m.name}.{ending}" for m in MEASURES}
    assert all(file.stat().st_size > 5000 for file in figures.iterdir())


def test_a_folder_that_cannot_be_made_is_refused_before_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "notes").write_text("mine")
    out = tmp_path / "s.jsonl"
    assert main([*RUN, "--simulate", "--out", str(out), "--figures", str(tmp_path / "notes" / "f")]) == 2
    assert "cannot be made" in capsys.readouterr().err and not out.exists()


def test_figures_of_several_shapes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = ["--simulate", "--arch-sparse-feature-size", "4", "16", "--figures", str(tmp_path / "f")]
    assert main([*RUN, *flags, "--out", str(tmp_path / "s.jsonl")]) == 0
    names = {file.name for file in (tmp_path / "f").iterdir()}
    measures = ("fills", "fills_over_min", "memory")
    expected = {f"{name}_batch256_dim{dim}.png" for name in measures for dim in (4, 16)}
    assert names == expected | {"fills_a_sample_by_dim.png", "memory_by_dim.png"}


def test_curves_over_batch_size_and_dim() -> None:
    made = {"cache_rows": 100, "cache_ratio": 0.1, "horizon": 8, "prefetch_depth": 1, "depth_is_horizon": False}
    lines = [
        {**made, "batch_size": batch, "dim": dim, "batches": 10, "fills": fills, "cache_bytes": 2**20 * dim}
        for batch, dim, fills in [(64, 4, 1280), (64, 4, 1920), (128, 4, 1280), (64, 8, 640)]
    ]
    by_name = {measure.name: measure for measure in SHAPE_MEASURES}
    found = shape_curves(by_name["fills_a_sample"], "batch_size", lines)
    assert found == {
        ("cache 10.0%, horizon 8, depth 1", 4): {64: 2.0, 128: 1.0},
        ("cache 10.0%, horizon 8, depth 1", 8): {64: 1.0},
    }
    found = shape_curves(by_name["memory"], "dim", lines)
    assert found["cache 10.0%, horizon 8, depth 1", 64] == {4: 4.0, 8: 8.0}
    assert shape_curves(by_name["samples_per_second"], "dim", lines) == {}


BAD = {
    "--horizon -1": "at least 0",
    "--horizon x": "a whole number or auto",
    "--prefetch-depth horizon": "give --horizon with at most 64",
    "--cache-ratio 0": "above 0",
    "--prefetch-depth wide": "whole number",
    "--prefetch-depth horizon --horizon 100": "at most 64",
    "--cache-rows 100 999999": "--cache-rows 999999: the tables have only",
    "--cache-rows 999999 --simulate": "--cache-rows 999999: the tables have only",
    "--repeats 0": "at least 1",
    "--repeats 2 --simulate": "leave --repeats out",
    "--figure-format pdf": "png or svg",
    "--out /no/such/folder/s.jsonl": "folder does not exist",
    "--out /proc/s.jsonl": "--out /proc/s.jsonl: cannot be written",
    "--arch-mlp-bot 5-8-16": "13 dense columns, so it must start with 13",
    "--checkpoint-dir x": "not a known flag",
    "--cache-ratios 0.1": "did you mean --cache-ratio?",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_are_one_sentence(
    flags: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, *flags.split()]) == 2
    said = capsys.readouterr().err
    assert BAD[flags] in said and said.startswith("error: ") and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_missing_data_are_told_before_anything_begins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "--data", "none.parquet"]) != 0
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "none.parquet" in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_is_named_and_those_before_it_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s.jsonl"
    assert main([*RUN, "--strict", "--cache-rows", "500", "5", "--horizon", "4", "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: the run with cache 5 rows, horizon 4, depth 1,") and said.count("\n") == 1
    assert [line["cache_rows"] for line in read_lines(out)] == [500]


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:" in out and "--prefetch-depth 1 horizon" in out and "--arch-mlp-top" in out


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, bool], dict]:
    """(cache rows, horizon, one parameter for both) -> line of a simulated sweep; about 730 distinct rows a batch."""
    out = tmp_path_factory.mktemp("findings") / "s.jsonl"
    data = ["--synthetic-rows", "3000-500-7-10000-2-40000", "--mini-batch-size", "256", "--num-batches", "200"]
    grid = ["--cache-rows", "1500", "3000", "6000", "--horizon", "1", "8", "16", "32", "64", "--prefetch-depth", "1"]
    assert main(["sweep", "--simulate", "--no-progress", *data, *grid, "horizon", "--out", str(out)]) == 0
    return {(x["asked_cache_rows"], x["horizon"], x["depth_is_horizon"]): x for x in lines_of(out)}


def fills_by_horizon(findings: dict[tuple[int, int, bool], dict], cache: int, tied: bool) -> list[int]:
    return [findings[cache, horizon, tied]["fills"] for horizon in (1, 8, 16, 32, 64)]


def test_finding_1_rows_moved_fall_with_the_window_where_the_cache_is_large_enough(findings: dict) -> None:
    """Balasubramanian et al., RecSys 2021: the caching overhead falls with the window.  Here: rows moved, by counts."""
    for cache in (1500, 3000, 6000):
        fills = fills_by_horizon(findings, cache, tied=False)
        assert fills == sorted(fills, reverse=True)
    large = fills_by_horizon(findings, 6000, tied=False)
    assert large[-1] < 0.75 * large[0] and len(set(large)) == 5  # every doubling still helps
    small = fills_by_horizon(findings, 1500, tied=False)
    assert small[-1] == small[2] == findings[1500, 64, False]["mind_fills"]  # 16 batches are all that it can use


def test_finding_2_cache_and_window_trade_off(findings: dict) -> None:
    """Half the cache with a longer window moves fewer rows than the whole one with a short window."""
    assert findings[3000, 32, False]["fills"] < findings[6000, 8, False]["fills"]
    assert findings[1500, 16, False]["fills"] < findings[3000, 1, False]["fills"]


def test_finding_3_one_parameter_for_both_overflows_the_cache_and_two_do_not(findings: dict) -> None:
    """With depth = horizon, rows not needed yet push out rows that are: past some window, a longer one moves more."""
    tied, apart = fills_by_horizon(findings, 6000, tied=True), fills_by_horizon(findings, 6000, tied=False)
    assert tied[3] > 1.05 * tied[2]  # 32 batches are too many for 6,000 rows ...
    assert apart[3] < 0.95 * apart[2]  # ... as long as all of them are copied ahead
    assert tied[:3] == apart[:3]  # while they fit, it is the same
    for cache in (1500, 3000, 6000):
        tied, apart = fills_by_horizon(findings, cache, tied=True), fills_by_horizon(findings, cache, tied=False)
        assert all(a <= b for a, b in zip(apart, tied, strict=True))
        assert min(apart) < 0.9 * min(tied)  # the best window of two parameters beats the best of one
        assert findings[cache, 64, False]["fills"] < 1.06 * findings[cache, 64, False]["mind_fills"]


def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    """SIGKILL in the middle: whole lines stay, the same command runs the others only."""
    out = tmp_path / "s.jsonl"
    horizons = [str(h) for h in range(1, 7)]
    argv = [*RUN, "--num-batches", "60", "--horizon", *horizons, "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-m", "cdlrm", *argv], env=environment, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not (out.exists() and out.stat().st_size) and time.monotonic() < until and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.wait(timeout=60)
    kept = out.read_bytes()[: out.read_bytes().rfind(b"\n") + 1]
    assert kept and len(kept.splitlines()) < 6
    assert main(argv) == 0
    assert out.read_bytes().startswith(kept) and [line["horizon"] for line in lines_of(out)] == list(range(1, 7))
