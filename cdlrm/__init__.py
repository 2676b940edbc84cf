"""cDLRM: train recommendation models whose embedding tables do not fit the device, exactly.

Names are imported when they are first used, so `import cdlrm` is quick and needs no GPU.

Where things are, in the order in which a batch meets them (words: README and the docstrings):

    data/                       files and synthetic data -> `Batch`
    lookups                     a batch's ids, checked and flattened -> `Lookups` of a group
    ahead, horizon, runtime     `lookahead`, how far it looks; reader, planner and transfer threads ahead of the trainer
    plan/                       window, `Planner` (its shards, threads and kernels), `Plan`, the rules; MIN, the
                                optimum to compare with
    cache, loans, store/        records on the device; those no plan knows of; their home (memory, file)
    group, whole_tables, step, updates, deferred, growth, counts, stats
                                one row space, cache and plan; its tables as a whole; a batch's life in it; updates, and
                                those that wait; a cache that is too small; what is counted
    driver/base                 the seam: `Driver` a device, `Records` the records of a group on it
    driver/cpu*, intrinsics     the CPU: numba kernels
    driver/gpu*, staging, carrier, plan_arrays, launches, formulas, verdicts, held, foretell, tray_sizes
                                the GPU: its records' memory, order of streams, transfers and kernels; what goes there
                                with a plan, how rows travel, launches of the kernels in cuda/, memory that outlives
                                its owner, bytes foretold
    driver/backend, cuda, cubin, pinned, signatures, sources, calibrate, choose
                                what a GPU must offer; CuPy's; compiling, pinning, choosing
    initial, normal             initial values
    optim, fused, gradient      formulas; learning rates and gradients as torch sees them
    module, anchor, autograd, accumulation, scaling, averaging, compiler
                                what all modules share; their parameter; the bridge to autograd; accumulation, and a
                                GradScaler that is not known, noticed; averages of parameters refused; no tracing
    embedding, bag, replace, weight, reference
                                `EmbeddingBagCollection`; `EmbeddingBag`, `Embedding`; a model's own; `.weight`; tables
                                too large for a state_dict
    placement, table            which tables form a group, and where they live
    checkpoint*                 `save`, `load`, `load_tables`
    model, datasets, assemble, train, transit, interrupt, metrics, report, progress, tensorboard, resuming, scoring,
    unlabelled, memory_*, advice
                                the command line's work
    __main__, cli, convert_cli, arguments, config, scoring_config, simulate/, sweep/
                                the command line
    sizing/                     `cdlrm plan`, `cdlrm calibrate`: a model of the machine, and its advice
    errors, machine             one sentence a mistake; this machine's facts
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "ahead": ["Lookahead", "lookahead"],
    "bag": ["Embedding", "EmbeddingBag"],
    "checkpoint": ["SavedTables", "checkpoint_info", "iter_tables", "load", "load_tables", "save"],
    "data.batch": ["Batch", "Jagged"],
    "embedding": ["EmbeddingBagCollection"],
    "errors": [
        "CacheTooSmallError",
        "CdlrmError",
        "CompileError",
        "ConfigError",
        "DataError",
        "DeviceError",
        "DeviceMemoryError",
        "InputError",
        "NonFiniteGradientError",
        "PinError",
        "PipelineError",
        "UsageError",
    ],
    "optim": ["SGD", "Adagrad", "Adam", "RowWiseAdagrad"],
    "replace": ["replace_embeddings"],
    "table": ["Table"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Batch",
    "CacheTooSmallError",
    "CdlrmError",
    "CompileError",
    "ConfigError",
    "DataError",
    "DeviceError",
    "DeviceMemoryError",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "InputError",
    "Jagged",
    "Lookahead",
    "NonFiniteGradientError",
    "PinError",
    "PipelineError",
    "RowWiseAdagrad",
    "SavedTables",
    "Table",
    "UsageError",
    "__version__",
    "checkpoint_info",
    "iter_tables",
    "load",
    "load_tables",
    "lookahead",
    "replace_embeddings",
    "save",
]

if TYPE_CHECKING:
    from .ahead import Lookahead, lookahead
    from .bag import Embedding, EmbeddingBag
    from .checkpoint import SavedTables, checkpoint_info, iter_tables, load, load_tables, save
    from .data.batch import Batch, Jagged
    from .embedding import EmbeddingBagCollection
    from .errors import (
        CacheTooSmallError,
        CdlrmError,
        CompileError,
        ConfigError,
        DataError,
        DeviceError,
        DeviceMemoryError,
        InputError,
        NonFiniteGradientError,
        PinError,
        PipelineError,
        UsageError,
    )
    from .optim import SGD, Adagrad, Adam, RowWiseAdagrad
    from .replace import replace_embeddings
    from .table import Table


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'cdlrm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
