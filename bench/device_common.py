"""What the parts of `device_check.py` share: the setup, the time box, and the report with its JSON lines."""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from cdlrm.driver.backend import Backend, Stream  # noqa: E402

SCALES = ("full", "small")


class Box:
    """A part's time: parts ask it before each measurement and leave out what no longer fits."""

    def __init__(self, seconds: float) -> None:
        self.ends = time.monotonic() + seconds

    def left(self) -> float:
        return self.ends - time.monotonic()


@dataclass
class Report:
    """Collects figures and appends each, as it is measured, as one JSON line to `path` (None: nowhere)."""

    path: Path | None
    circumstances: dict[str, Any]
    claims: bool  # only a full-size run on a GPU says of a target whether it is met
    lines: list[dict[str, Any]] = field(default_factory=list)

    def figure(
        self, part: str, name: str, value: float, unit: str, *, most: float | None = None, least: float | None = None,
        **at: Any,
    ) -> None:
        """`most`, `least`: the target; `at`: under what conditions."""
        line: dict[str, Any] = {"bench": "device_check", "part": part, "figure": name, "value": value, "unit": unit}
        if most is not None or least is not None:
            line["target"] = f"<= {most}" if most is not None else f">= {least}"
            met = (most is None or value <= most) and (least is None or value >= least)
            line["met"] = met if self.claims else None
        self._write(line | at)

    def left_out(self, part: str, name: str, reason: str, **at: Any) -> None:
        """A figure that was not measured, and why."""
        self._write({"bench": "device_check", "part": part, "figure": name, "left_out": reason} | at)

    def _write(self, line: dict[str, Any]) -> None:
        line |= self.circumstances
        self.lines.append(line)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


@dataclass
class Setup:
    """What a part runs on.  `device` is what the public API takes; `backend` the same device below the driver seam
    (None where there is none, as on the CPU)."""

    device: str
    scale: str
    backend: Backend | None
    report: Report
    box: Box

    @property
    def full(self) -> bool:
        return self.scale == "full"

    @property
    def torch_device(self) -> torch.device:
        return self.backend.device if self.backend is not None else torch.device(self.device)

    def synchronize(self) -> None:
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize()

    def free_bytes(self) -> tuple[int, int]:
        """Free memory of the device and of the host."""
        host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return (self.backend.free_bytes() if self.backend is not None else host), host

    def out_of_time(self, part: str, name: str, needs: float, **at: Any) -> bool:
        """Whether fewer than `needs` seconds are left; says so in the report."""
        if self.box.left() >= needs:
            return False
        self.report.left_out(part, name, "the part's time box is used up", **at)
        return True


@functools.cache
def work_streams(backend: Backend) -> tuple[Stream, Stream]:
    """The two streams that all measurements use: torch's, on which its memory may be used at once, and another that
    must wait for it."""
    return backend.compute_stream(), backend.new_stream()


def device_ms(backend: Backend, issue: Callable[[Stream], None], repeats: int = 5) -> float:
    """Median milliseconds of what `issue` puts on the first work stream, after one round that is not counted."""
    stream, times = work_streams(backend)[0], []
    for number in range(repeats + 1):
        first = backend.record_timed(stream)
        issue(stream)
        last = backend.record_timed(stream)
        backend.synchronize(last, "device_check")
        if number:
            times.append(backend.elapsed_ms(first, last))
    return max(statistics.median(times), 1e-6)


def wall_ms(work: Callable[[], Any], repeats: int = 5) -> float:
    """Median milliseconds of a call on the host, after one that is not counted."""
    times = []
    for number in range(repeats + 1):
        started = time.perf_counter()
        work()
        if number:
            times.append(1e3 * (time.perf_counter() - started))
    return max(statistics.median(times), 1e-6)


def circumstances(device: str, scale: str) -> dict[str, Any]:
    """Date, commit, GPU, driver and versions."""
    packages = ("cupy-cuda12x", "cupy-cuda13x", "numba", "numpy", "pyarrow", "safetensors", "tqdm", "fbgemm-gpu")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "torch_cuda": torch.version.cuda}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    about: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _first_line("git", "rev-parse", "--short=12", "HEAD"),
        "changed": bool(_first_line("git", "status", "--porcelain", "--untracked-files=no", "cdlrm", "cuda", "bench")),
        "device": device, "scale": scale, "cores": len(os.sched_getaffinity(0)), "versions": versions,
    }  # fmt: skip
    if device == "cuda":
        query = "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max"
        about["gpu"] = torch.cuda.get_device_name()
        about["driver, pcie generation, lanes"] = _first_line("nvidia-smi", query, "--format=csv,noheader")
    return about


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().split("\n")[0]
