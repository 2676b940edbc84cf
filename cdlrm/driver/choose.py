"""Which device to use, and why: one sentence that the report shows."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from ..errors import ConfigError

LEAST_CAPABILITY = (7, 0)


class Chosen(NamedTuple):
    """`kind` "cpu" or "cuda", number of the `gpu` (None on the CPU), `reason` a sentence."""

    kind: str
    gpu: int | None
    reason: str


def choose(device: str | torch.device | None) -> Chosen:
    """The device to use for "auto", "cpu", "cuda", "cuda:N", a torch.device, or None (torch's default device).

    "auto" is the current GPU where torch and CuPy can use it, else the CPU.  CuPy is imported only where torch sees
    a GPU.  Raises ConfigError for a device that does not exist or cannot be used.
    """
    if device == "auto":
        index = current_gpu()
        obstacle = gpu_obstacle(index)
        if obstacle:
            return Chosen("cpu", None, f"device: cpu, because {obstacle}.")
        return Chosen("cuda", index, f"device: {_describe(index)}, because torch and CuPy can use it.")
    wanted = _parse(device)
    asked = "torch's default device" if device is None else "asked for"
    if wanted.type == "cpu":
        return Chosen("cpu", None, f"device: cpu, {asked}.")
    if wanted.type != "cuda":
        raise ConfigError(f'device={str(device)!r}: must be "auto", "cpu", "cuda" or "cuda:N".')
    index = current_gpu() if wanted.index is None else wanted.index
    obstacle = gpu_obstacle(index)
    if obstacle:
        raise ConfigError(f'device={str(wanted)!r}: {obstacle}; or use "cpu" or "auto".')
    return Chosen("cuda", index, f"device: {_describe(index)}, {asked}.")


def _parse(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.get_default_device()
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f'device={device!r}: must be "auto", "cpu", "cuda" or "cuda:N".') from error


def current_gpu() -> int:
    """torch's current GPU; 0 where there is none."""
    return int(torch.cuda.current_device()) if torch.version.cuda and torch.cuda.is_available() else 0


def _describe(index: int) -> str:
    return f"cuda:{index} ({torch.cuda.get_device_name(index)})"


def extra() -> str:
    """The extra that brings CuPy for torch's version of CUDA."""
    return "cuda12" if (torch.version.cuda or "").startswith("12.") else "cuda13"


def gpu_obstacle(index: int) -> str | None:
    """Why GPU `index` cannot be used, with the remedy, as the rest of a sentence; None if it can."""
    if getattr(torch.version, "hip", None):
        return "this torch is built for ROCm, and only NVIDIA's GPUs are supported"
    if not torch.version.cuda:
        return f"this torch ({torch.__version__}) is built without CUDA; install a CUDA build of torch to use a GPU"
    if not torch.cuda.is_available():
        return (
            f"torch (CUDA {torch.version.cuda}) finds no GPU or no driver that fits; look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES"
        )
    count = torch.cuda.device_count()
    if index >= count:
        return f"there is no GPU {index}: torch sees {count}, counted from 0"
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        return (
            f"{_describe(index)} has compute capability {capability[0]}.{capability[1]}, and 7.0 (Volta) is the "
            "least that is supported"
        )
    return cupy_obstacle()


def cupy_obstacle() -> str | None:
    """Why CuPy or NVRTC does not work here, with the remedy; None if they do.  Imports CuPy."""
    install = f"pip install 'cdlrm[{extra()}]'"
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return f"CuPy is not installed; {install}"
        return f"CuPy cannot be imported ({_line(error)}); {install}"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        return f"CuPy {cupy.__version__} does not work with this driver ({_line(error)}); {install}"
    try:
        cupy.cuda.nvrtc.getVersion()
    except (RuntimeError, OSError, ImportError) as error:
        return f"CuPy finds no NVRTC to compile kernels with ({_line(error)}); {install}"
    return None


def _line(error: BaseException) -> str:
    """The first line of an error's text, without a final full stop."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
