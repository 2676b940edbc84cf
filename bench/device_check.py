"""One command for a machine with a GPU: is it right, and how fast is it?  6 minutes in all.

    python bench/device_check.py --out DIR [--only a|b|c|d|e] [--device cuda|cpu] [--scale full|small]

Needs torch, CuPy, numba, numpy, pyarrow, safetensors and tqdm.  Parts, each with a time box and in a process of its
own (a part that hangs or breaks the device is ended and said; the others go on):

    a  bit-equality: cached = resident = CPU for every optimizer, pooling and many dims; 50 repeats
    b  NVIDIA dynamicemb's published workload at several cache sizes, against torch and FBGEMM
    c  fill and evict bandwidth by record size against sequential copies
    d  lookup and update against a device copy
    e  the whole DLRM step: cached at 10 % against resident

Every figure is one JSON line in DIR/device_check.jsonl, with its target and whether it is met, and with GPU, driver,
versions and commit.  A run that is scaled down or not on a GPU claims nothing ("met": null).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import device_exact  # noqa: E402
import device_kernels  # noqa: E402
import device_step  # noqa: E402
import device_workload  # noqa: E402
import torch  # noqa: E402
from device_common import SCALES, Box, Report, Setup, circumstances  # noqa: E402

from cdlrm.driver.backend import Backend  # noqa: E402


class Part(NamedTuple):
    check: Callable[[Setup], None]
    seconds: float


PARTS = {
    "a": Part(device_exact.check, 90),
    "b": Part(device_workload.check, 135),
    "c": Part(device_kernels.check_link, 35),
    "d": Part(device_kernels.check_memory, 25),
    "e": Part(device_step.check, 75),
}
STARTING, ENDING = 8.0, 2.0  # seconds of a box for the imports and for the last figure


def run_part(
    name: str, device: str, scale: str, backend: Backend | None, out: Path | None, seconds: float | None = None
) -> Report:
    """Run one part in this process; `backend` is the device's, None for one without (the CPU); `seconds`: its box."""
    about = circumstances(device, scale)
    report = Report(out, about, claims=device == "cuda" and scale == "full")
    box = Box(PARTS[name].seconds - STARTING - ENDING if seconds is None else seconds)
    PARTS[name].check(Setup(device, scale, backend, report, box))
    return report


def backend_of(device: str) -> Backend | None:
    """The backend of a device that has one."""
    if device != "cuda":
        return None
    from cdlrm.driver.cuda import CudaBackend

    return CudaBackend()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for device_check.jsonl")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="this part (may be repeated)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scale", choices=SCALES, default="full")
    parser.add_argument("--here", action="store_true", help="run the parts in this process, without hard limits")
    options = parser.parse_args(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; run on a machine with one, or try with --device cpu --scale small.")
    path = options.out / "device_check.jsonl"
    for name in options.only or list(PARTS):
        started = time.monotonic()
        if options.here:
            report = run_part(name, options.device, options.scale, backend_of(options.device), path)
            for line in report.lines:
                print(describe(line), flush=True)
        else:
            _run_apart(name, options, path)
        print(f"part {name}: {time.monotonic() - started:.0f} s of {PARTS[name].seconds:.0f} s", flush=True)


def _run_apart(name: str, options: argparse.Namespace, path: Path) -> None:
    """A part in a process of its own, ended when its box is over."""
    command = [sys.executable, __file__, "--here", "--only", name, "--out", str(options.out)]
    command += ["--device", options.device, "--scale", options.scale]
    try:
        code = subprocess.run(command, timeout=PARTS[name].seconds).returncode
        problem = f"the part ended with exit status {code}" if code else ""
    except subprocess.TimeoutExpired:
        problem = f"the part was ended after {PARTS[name].seconds:.0f} s"
    if problem:
        about = {"device": options.device, "scale": options.scale}
        Report(path, about, claims=False).left_out(name, f"part {name}", problem)
        print(f"part {name}: {problem}", flush=True)


def describe(line: dict[str, object]) -> str:
    """A figure for a person."""
    known = ("bench", "part", "figure", "value", "unit", "target", "met", "left_out", *circumstances_names(line))
    at = ", ".join(f"{key}={value}" for key, value in line.items() if key not in known)
    head = f"{line['part']}  {line['figure']}"
    if "left_out" in line:
        return f"{head}: left out ({line['left_out']}) {at}"
    met = {True: ", met", False: ", NOT met"}.get(line.get("met"), "") if "target" in line else ""  # type: ignore[call-overload]
    target = f" (target {line['target']}{met})" if "target" in line else ""
    return f"{head}: {line['value']:.4g} {line['unit']}{target} {at}"


def circumstances_names(line: dict[str, object]) -> list[str]:
    """Keys that every line has."""
    return [key for key in line if key in ("date", "commit", "changed", "device", "scale", "cores", "versions", "gpu")
            or key.startswith("driver")]  # fmt: skip


if __name__ == "__main__":
    main()
