"""cDLRM: train recommendation models whose embedding tables do not fit the device, exactly.

Names are imported when they are first used, so `import cdlrm` is quick and needs no GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Adagrad": "optim",
    "Adam": "optim",
    "Batch": "data.batch",
    "EmbeddingBagCollection": "embedding",
    "Jagged": "data.batch",
    "Lookahead": "ahead",
    "RowWiseAdagrad": "optim",
    "SGD": "optim",
    "Table": "table",
    "lookahead": "ahead",
}
_ERRORS = (
    "CacheTooSmallError",
    "CdlrmError",
    "ConfigError",
    "DataError",
    "InputError",
    "NonFiniteGradientError",
    "PipelineError",
    "UsageError",
)
_HOME.update(dict.fromkeys(_ERRORS, "errors"))

__all__ = [*sorted(_HOME), "__version__"]  # noqa: PLE0604

if TYPE_CHECKING:
    from .data.batch import Batch, Jagged
    from .embedding import EmbeddingBagCollection
    from .errors import (
        CacheTooSmallError,
        CdlrmError,
        ConfigError,
        DataError,
        InputError,
        NonFiniteGradientError,
        PipelineError,
        UsageError,
    )
    from .ahead import Lookahead, lookahead
    from .optim import SGD, Adagrad, Adam, RowWiseAdagrad
    from .table import Table


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'cdlrm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
