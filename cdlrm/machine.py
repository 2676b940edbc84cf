"""What `cdlrm info` tells: versions, processor, memory, and what GPU support is there or missing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
import threading
from pathlib import Path
from typing import Any

PACKAGES = (
    "cdlrm", "torch", "numpy", "numba", "pyarrow", "safetensors", "torchmetrics", "tqdm", "pyyaml",
)  # fmt: skip
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
OPTIONAL = {
    "tensorboard": ("tensorboard", "figures of a run in TensorBoard (--logdir)"),
    "matplotlib": ("plot", "plots"),
    "notebook": ("notebook", "notebooks"),
    "torchrec": ("torchrec", "KeyedJaggedTensor as input"),
    "pytest": ("test", "the tests"),
    "hypothesis": ("test", "the tests"),
    "ruff": ("test", "the tests"),
    "mypy": ("test", "the tests"),
}
"""Package -> the extra that brings it, and what it is for."""


def package_version(name: str) -> str | None:
    """The version of an installed package, found without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def give_way(steps: int = 10) -> None:
    """Where processors are few, other threads go before the calling one and those that it starts (on Linux, where a
    thread has a priority of its own, and where it is allowed)."""
    if sys.platform == "linux":
        me = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, me, min(os.getpriority(os.PRIO_PROCESS, me) + steps, 19))


def available_bytes() -> int:
    """Host memory that may still be used: the machine's, or less under a cgroup's limit."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return max(available, 0)


def describe() -> dict[str, Any]:
    """Facts about this machine; sizes in bytes, None where the system does not tell.

    `packages` and `optional`: name -> version or None; `missing`: what is not installed, the extra that brings it and
    what for; `device`: what "auto" chooses here, and why in `notes`; `devices`: those of torch; `drivers`: of this
    library, and NVIDIA's if it is found.
    """
    device, usable, reason, extra = _chosen()
    cupy = {name: found for name in CUPY if (found := package_version(name))}
    optional = {name: package_version(name) for name in OPTIONAL}
    missing = [
        {"package": name, "extra": extra, "for": purpose}
        for name, (extra, purpose) in OPTIONAL.items() if optional[name] is None
    ]  # fmt: skip
    if not cupy:
        missing.append({"package": "cupy", "extra": extra, "for": "GPUs"})
    return {
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "optional": {**optional, **cupy},
        "missing": missing,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _proc("/proc/cpuinfo", ("model name", "Model")) or platform.processor() or None,
        "cpus": cores(),
        "memory_bytes": _kib(_proc("/proc/meminfo", ("MemTotal",))),
        "memory_available_bytes": _kib(_proc("/proc/meminfo", ("MemAvailable",))),
        "device": device,
        "devices": _devices(device),
        "drivers": {"cpu": "numba kernels", "cuda": usable, "nvidia": _nvidia()},
        "notes": [reason],
    }


def _chosen() -> tuple[str, str, str, str]:
    """What "auto" chooses, how the CUDA driver would work, why, and the extra that brings what it needs."""
    try:
        from .driver.choose import choose, extra
    except (ImportError, OSError):  # torch is not installed, or one of its libraries does not load
        return "cpu", "not usable", "device: cpu, because torch cannot be imported.", "cuda13"
    kind, index, reason = choose("auto")
    if kind == "cpu":
        return "cpu", "not usable", reason, extra()
    from .driver.cubin import cache_dir

    cupy = next((f"{name} {found}" for name in CUPY if (found := package_version(name))), "CuPy")
    reason += f"  Compiled kernels are kept in {cache_dir()} (CDLRM_CACHE_DIR)."
    return f"cuda:{index}", f"kernels through {cupy}", reason, extra()


def _devices(used: str) -> list[dict[str, Any]]:
    """The processor, and the GPUs that torch sees; `used`: the one that "auto" chooses."""
    found: list[dict[str, Any]] = [{"device": "cpu", "name": platform.machine(), "used": used == "cpu"}]
    try:
        import torch
    except (ImportError, OSError):  # not installed, or one of its libraries does not load
        return found
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(number)
            name = f"cuda:{number}"
            found.append(
                {
                    "device": name, "name": facts.name, "memory_bytes": facts.total_memory, "used": used == name,
                    "capability": f"{facts.major}.{facts.minor}",
                }
            )  # fmt: skip
    return found


def _nvidia() -> str | None:
    """The version of NVIDIA's kernel driver."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return None
    return next((word for word in words if word.replace(".", "").isdigit() and "." in word), "found")


def _proc(file: str, keys: tuple[str, ...]) -> str | None:
    """The first `key : value` of a /proc file."""
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return None


def _kib(text: str | None) -> int | None:
    return int(text.split()[0]) * 1024 if text else None


def render_info(facts: dict[str, Any]) -> str:
    """The facts as text."""

    def gib(value: int | None) -> str:
        return "unknown" if value is None else f"{value / 2**30:.1f} GiB"

    rows = {
        "system": facts["system"],
        "processor": f"{facts['processor'] or 'unknown'}, {facts['cpus']} usable",
        "memory": f"{gib(facts['memory_bytes'])}, {gib(facts['memory_available_bytes'])} available",
        "device": facts["device"],
        **{
            each["device"]: f"{each['name']}, {gib(each['memory_bytes'])}, compute capability {each['capability']}"
            for each in facts["devices"] if each["device"] != "cpu"
        },
        "drivers": ", ".join(f"{name}: {found or 'not found'}" for name, found in facts["drivers"].items()),
        "python": facts["python"],
        **{name: number or "not installed" for name, number in facts["packages"].items()},
        **{name: number for name, number in facts["optional"].items() if number},
    }  # fmt: skip
    missing = [f"missing: {m['package']}, for {m['for']}; pip install 'cdlrm[{m['extra']}]'" for m in facts["missing"]]
    return "\n".join([*(f"{name:<14}{value}" for name, value in rows.items()), *missing, *facts["notes"]])
