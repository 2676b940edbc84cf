"""Refuse torch's `AveragedModel` over a module whose rows are no parameters: it would average everything but them."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from .errors import UsageError

_modules: weakref.WeakSet[Any] = weakref.WeakSet()
_installed: list[bool] = []


def watch(module: Any) -> None:
    """Refuse averages over the parameters of `module` while its rows learn, from now on."""
    if not _installed:
        _installed.append(True)
        _wrap()
    _modules.add(module)


def _wrap() -> None:
    original = AveragedModel.update_parameters

    @functools.wraps(original)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        for module in model.modules():
            if module in _modules and module.anchor.requires_grad:
                raise UsageError(
                    f"AveragedModel averages parameters, and the rows of {type(module).__name__} are none, so they "
                    "would stay as they were; average the dense part only (AveragedModel of it), and the "
                    "tables by hand: keep a copy of the module, and use table_copy and set_table."
                )
        original(self, model)

    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]
