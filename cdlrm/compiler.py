"""`outside_compiler`: functions that torch.compile leaves alone, without importing its tracer (2 s) for all."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def outside_compiler(function: F) -> F:
    """`torch.compiler.disable(function)`, applied at the first call after torch's tracer was imported:
    a graph break at the call, and no tracing of what it calls (kernels, planner, locks)."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # how torch marks what it does not inline
    return call  # type: ignore[return-value]
