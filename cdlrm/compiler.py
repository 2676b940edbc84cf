"""`outside_compiler`: forwards that torch.compile leaves alone, without importing its tracer (2 s) for all; TorchScript
is refused."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from .errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])


def refuse_torchscript(name: str) -> NoReturn:
    raise UsageError(
        f"{name} cannot be traced or scripted by torch.jit, because its rows come from a cache; use torch.compile, "
        f"which leaves its lookups alone."
    )


def outside_compiler(function: F) -> F:
    """For the forward of a module: `torch.compiler.disable(function)`, applied at the first call after torch's tracer
    was imported: a graph break at the call, and no tracing of what it calls (kernels, planner, locks)."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.jit.is_tracing():
            refuse_torchscript(type(args[0]).__name__)
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # how torch marks what it does not inline
    return call  # type: ignore[return-value]
