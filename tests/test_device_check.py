"""`bench/device_check.py`, scaled down: every part runs to its end on the CPU, and (c), (d) on the emulated device.

What it measures on a GPU is measured nowhere yet; here it is the script that is tested."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.emulator import compile as host

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import device_check  # noqa: E402
import device_exact  # noqa: E402
import device_workload  # noqa: E402
from device_common import Box, Report, Setup  # noqa: E402

LONG = 3600.0  # seconds: nothing is left out for want of time
needs_compiler = pytest.mark.skipif(host.unavailable() is not None, reason=str(host.unavailable()))


def figures(report: Report, name: str) -> list[dict]:
    return [line for line in report.lines if line["figure"] == name]


def test_the_boxes_are_six_minutes_in_all() -> None:
    assert sum(part.seconds for part in device_check.PARTS.values()) <= 360


def test_part_a_compares_bits() -> None:
    report = device_check.run_part("a", "cpu", "small", None, None, LONG)
    runs = 2 * len(device_exact.cases(full=False))
    assert [(line["value"], line["of"], line["target"]) for line in figures(report, "bit-equal to the CPU")] == [
        (runs, runs, f">= {runs}")
    ]
    assert [line["value"] for line in figures(report, "bit-equal repeats")] == [5]
    assert figures(report, "different from the CPU") == []


def test_part_a_sees_one_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    real = device_exact.run

    def one_bit_off(device: str, case: device_exact.Case, *, cached: bool) -> list[np.ndarray]:
        arrays = real(device, case, cached=cached)
        if cached and case.pooling == "mean":
            arrays[-2][0] ^= 1
        return arrays

    monkeypatch.setattr(device_exact, "run", one_bit_off)
    report = device_check.run_part("a", "cpu", "small", None, None, LONG)
    means = sum(case.pooling == "mean" for case in device_exact.cases(full=False))
    assert len(figures(report, "different from the CPU")) == means > 0
    assert figures(report, "bit-equal to the CPU")[0]["value"] == 2 * len(device_exact.cases(full=False)) - means


def test_full_size_cases_cover_every_optimizer_pooling_and_dim() -> None:
    cases = device_exact.cases(full=True)
    assert {(c.optimizer, c.pooling) for c in cases} == {
        (o, p) for o in device_exact.OPTIMIZERS for p in ("sum", "mean", "weighted")
    }
    assert {1, 33, 128, 4096} <= {c.dim for c in cases}
    assert max(c.same_row for c in cases) == 65_536


def test_part_b_trains_every_cache_size_with_plans_made_ahead() -> None:
    report = device_check.run_part("b", "cpu", "small", None, None, LONG)
    cached = {line["cache_percent"]: line for line in figures(report, "step, cached, plans made ahead")}
    resident = figures(report, "step, resident")[0]
    assert set(cached) == {80, 20, 10} and resident["cache_percent"] == 100
    assert resident["fills_per_step"] == 0 < cached[80]["fills_per_step"] <= cached[10]["fills_per_step"]
    assert all(line["value"] > 0 for line in report.lines if "value" in line)
    assert all(line["met"] is None for line in report.lines if "target" in line)  # not full size: nothing is claimed
    assert {line["figure"] for line in report.lines} >= {"step, torch.nn.EmbeddingBag", "step, FBGEMM"}


def test_the_workload_is_the_published_one() -> None:
    """Distinct rows a step and the footprint of 100 batches, computed from the power law that `draw` inverts."""
    shape = device_workload.FULL
    edges = np.arange(1, shape.rows + 2, dtype=np.float64) ** (1 - device_workload.EXPONENT)
    share = (edges[:-1] - edges[1:]) / (edges[0] - edges[-1])
    never = np.log1p(-share)
    step = -shape.tables * np.expm1(shape.lookups * never).sum()
    all_batches = -shape.tables * np.expm1(shape.batches * shape.lookups * never).sum()
    assert step == pytest.approx(433_700, rel=0.001)
    assert all_batches == pytest.approx(19.6e6, rel=0.002)
    assert shape.tables * shape.lookups == pytest.approx(1.05e6, rel=0.002)


def test_draw_follows_its_power_law() -> None:
    shape = device_workload.Shape(tables=1, rows=500, dim=4, lookups=4000, batches=5)
    work = device_workload.draw(shape, device_workload.torch.device("cpu"))
    edges = np.arange(1, shape.rows + 2, dtype=np.float64) ** (1 - device_workload.EXPONENT)
    share = np.sort((edges[:-1] - edges[1:]) / (edges[0] - edges[-1]))[::-1]
    ids = np.concatenate([batch["t0"].numpy() for batch in work.batches])
    found = np.sort(np.bincount(ids, minlength=work.footprint[0]))[::-1] / ids.size
    assert work.footprint == [np.unique(ids).size] and ids.min() == 0 and ids.max() == work.footprint[0] - 1
    assert found[0] == pytest.approx(share[0], rel=0.05)
    assert found[:50].sum() == pytest.approx(share[:50].sum(), rel=0.02)


@needs_compiler
@pytest.mark.limit(600)
@pytest.mark.parametrize("part", ["a", "b", "e"])
def test_parts_a_b_and_e_run_on_the_emulated_device(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device named "cuda" is the emulated one; part (a) compares it with the real CPU driver."""
    from cdlrm import placement
    from tests.emulated import Emulated

    emulated, real = Emulated(5), placement.choose_driver
    monkeypatch.setattr(
        placement, "choose_driver",
        lambda device, *more: emulated.driver(None) if device == "cuda" else real(device, *more),
    )
    monkeypatch.setattr("cdlrm.embedding.choose_driver", placement.choose_driver)
    monkeypatch.setattr(Setup, "torch_device", property(lambda setup: device_workload.torch.device("cpu")))
    monkeypatch.setattr(device_check, "circumstances", lambda device, scale: {"cores": 2})
    report = device_check.run_part(part, "cuda", "small", None, None, LONG)
    assert emulated.made >= 3
    if part == "a":
        runs = 2 * len(device_exact.cases(full=False))
        assert [line["value"] for line in figures(report, "bit-equal to the CPU")] == [runs]
        assert [line["value"] for line in figures(report, "bit-equal repeats")] == [5]
    if part == "e":
        assert figures(report, "launches a step, cached")[0]["value"] > 0
    assert all(line.get("met") is None for line in report.lines)


@needs_compiler
@pytest.mark.limit(600)
def test_parts_c_and_d_run_on_the_emulated_device() -> None:
    from tests.emulator.backend import EmulatedBackend

    backend = EmulatedBackend(seed=4)
    link = device_check.run_part("c", "emulated", "small", backend, None, LONG)
    assert {line["direction"] for line in figures(link, "zero copy")} == {"to the device", "to the host", "both"}
    ratios = figures(link, "zero copy / sequential kernel copy")
    assert {line["record_bytes"] for line in ratios if line.get("target") == ">= 0.9"} == {512}
    memory = device_check.run_part("d", "emulated", "small", backend, None, LONG)
    names = {"lookup, MBU", "update SGD, MBU", "update RowWiseAdagrad, MBU"}
    assert names < {line["figure"] for line in memory.lines}
    for line in link.lines + memory.lines:
        assert math.isfinite(line["value"]) and line["value"] > 0 and line.get("met") is None
    launched = backend.traffic.launches
    assert all(launched[kernel] > 0 for kernel in ("fill", "evict", "stream_copy", "lookup", "update_short"))
    backend.close()


def test_part_e_compares_the_cached_step_with_the_resident_one() -> None:
    report = device_check.run_part("e", "cpu", "small", None, None, LONG)
    step = {line["figure"]: line["value"] for line in report.lines}
    ratio = step["DLRM step, cached"] / step["DLRM step, resident"]
    assert figures(report, "DLRM step, cached / resident")[0]["value"] == pytest.approx(ratio)
    assert step["exposed transfer"] == pytest.approx(step["DLRM step, cached"] - step["DLRM step, resident"])


def test_the_command_writes_a_line_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device_check.main(["--out", str(tmp_path), "--device", "cpu", "--scale", "small", "--here", "--only", "e"])
    lines = [json.loads(line) for line in (tmp_path / "device_check.jsonl").read_text().splitlines()]
    assert len(lines) >= 6
    for line in lines:
        assert {"bench", "part", "figure", "date", "commit", "device", "scale", "versions"} <= set(line)
        assert line["versions"]["torch"] and line["versions"]["numpy"]
    said = capsys.readouterr().out
    assert said.count("\n") == len(lines) + 1 and "(target <= 1.05)" in said


def test_without_a_gpu_the_command_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if device_check.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        device_check.main(["--out", str(tmp_path)])
    assert "torch sees no GPU here; run on a machine with one" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_target_is_claimed_at_full_size_only() -> None:
    for claims, expected in ((True, [True, False, True]), (False, [None, None, None])):
        report = Report(None, {}, claims)
        report.figure("c", "x", 0.95, "share", least=0.9)
        report.figure("b", "x", 1.6, "ms", most=1.5)
        report.figure("b", "x", 1.5, "ms", most=1.5)
        assert [line["met"] for line in report.lines] == expected


def test_what_does_not_fit_the_box_is_said() -> None:
    report = Report(None, {}, False)
    setup = Setup("cpu", "small", None, report, Box(0.0))
    device_exact.check(setup)
    assert report.lines[0]["left_out"] == "the part's time box is used up"
    assert [line["value"] for line in figures(report, "bit-equal to the CPU")] == [0]


def test_a_part_that_breaks_is_said_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part has a process of its own; here one that ends badly and one that does not end."""
    broken, endless = tmp_path / "broken.py", tmp_path / "endless.py"
    broken.write_text("raise SystemExit(7)")
    endless.write_text("import time\ntime.sleep(60)")
    parts = {name: part._replace(seconds=3.0) for name, part in device_check.PARTS.items()}
    monkeypatch.setattr(device_check, "PARTS", parts)
    for script in (broken, endless):
        monkeypatch.setattr(device_check, "__file__", str(script))
        device_check.main(["--out", str(tmp_path), "--device", "cpu", "--scale", "small", "--only", "d"])
    lines = [json.loads(line) for line in (tmp_path / "device_check.jsonl").read_text().splitlines()]
    assert [line["left_out"] for line in lines] == [
        "the part ended with exit status 7", "the part was ended after 3 s"
    ]  # fmt: skip
