"""What `cdlrm info` tells: versions, processor, memory, and what GPU support is there or missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("cdlrm", "torch", "numpy", "numba", "pyarrow", "safetensors", "torchmetrics")
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def package_version(name: str) -> str | None:
    """The version of an installed package, found without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, Any]:
    """Facts about this machine; sizes in bytes, None where the system does not tell."""
    cupy = {name: found for name in CUPY if (found := package_version(name))}
    return {
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _proc("/proc/cpuinfo", ("model name", "Model")) or platform.processor() or None,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _kib(_proc("/proc/meminfo", ("MemTotal",))),
        "memory_available_bytes": _kib(_proc("/proc/meminfo", ("MemAvailable",))),
        "cupy": cupy or None,
        "device": "cpu",
        "notes": [
            "Training runs on the CPU device; this version has no GPU device.",
            "CuPy: " + (", ".join(f"{name} {number}" for name, number in cupy.items()) if cupy else _no_cupy()),
        ],
    }


def _no_cupy() -> str:
    return "not installed; the extras cdlrm[cuda12] and cdlrm[cuda13] bring it."


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
        "python": facts["python"],
        **{name: number or "not installed" for name, number in facts["packages"].items()},
    }
    return "\n".join([*(f"{name:<14}{value}" for name, value in rows.items()), *facts["notes"]])
