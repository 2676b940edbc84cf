"""`replace_embeddings`: put the embedding tables of an existing model behind shared caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .bag import Embedding, EmbeddingBag
from .errors import ConfigError
from .fused import FusedOptimizer
from .module import CachedModule
from .optim import Optimizer, check_specification
from .placement import check_cache_settings, choose_driver, choose_seed, make_groups
from .table import Table

_KINDS = (nn.Embedding, nn.EmbeddingBag)


class Replacement:
    """What `replace_embeddings` did: `modules` (path -> new module), `optimizer`, `undo()`, `close()`."""

    def __init__(self, model: nn.Module, modules: dict[str, CachedModule], originals: dict[str, Any],
                 optimizer: FusedOptimizer) -> None:  # fmt: skip
        self.model, self.modules, self.optimizer = model, modules, optimizer
        self._originals = originals

    def undo(self) -> None:
        """Put the original modules back, with the rows as trained, and close ours.  A second call changes nothing."""
        for path, original in self._originals.items():
            values = self.modules[path].table_copy(path)
            original.weight.data = values.to(original.weight.data.device)
            _swap(self.model, self.modules[path], original)
        self._originals = {}
        self.close()

    def close(self) -> None:
        """End look-aheads and threads; the tables stay readable."""
        for module in self.modules.values():
            module.close()


def replace_embeddings(
    model: nn.Module,
    *,
    optimizer: Optimizer | Mapping[str, Optimizer],
    min_rows: int = 0,
    skip: Sequence[str] = (),
    cache_rows: int | str = "auto",
    cache_ratio: float | None = None,
    device: str | torch.device = "auto",
    store: str = "ram",
    strict: bool = False,
    seed: int | None = None,
    nonfinite: str = "raise",
    update: str = "backward",
    shards: int | None = None,
) -> Replacement:
    """Replace every `nn.EmbeddingBag` and `nn.Embedding` of `model`, in place, keeping their values.

    Tables of equal dim and optimizer share one group, one cache and one plan, whatever their number.
    `optimizer`: one specification for all, or a mapping module path -> specification.  `min_rows`: only
    tables with at least so many rows; `skip`: paths to leave alone.  `device`: "auto" is where the rows that are
    replaced live now.  The other arguments are those of `EmbeddingBagCollection`.  The model's own optimizer
    should be made afterwards (or must not hold the replaced weights): rows are updated in the backward pass.
    `Replacement.undo()` restores torch's modules.

    Raises ConfigError, before anything is changed, when there is nothing to replace or a module cannot
    be (max_norm, scale_grad_by_freq, mode "max", other dtypes, tied weights, several devices), naming it.
    """
    check_cache_settings(cache_rows, cache_ratio)
    found = _find(model, min_rows, skip)
    if device == "auto":
        device = _home(found)
    if isinstance(optimizer, Mapping):
        unknown = sorted(set(optimizer) - {path for path, _ in model.named_modules(remove_duplicate=False)})
        if unknown:
            raise ConfigError(f"optimizer: the model has no module {unknown[0]!r}; name its modules by their paths.")
    tables, optimizers = [], []
    for path, module in found.items():
        tables.append(Table(path, module.num_embeddings, module.embedding_dim, pooling=getattr(module, "mode", "sum")))
        chosen = optimizer.get(path) if isinstance(optimizer, Mapping) else optimizer
        check_specification(f"optimizer of {path!r}", chosen)
        assert isinstance(chosen, Optimizer)
        optimizers.append(chosen)
    seed = choose_seed(seed, store, used=False)  # the rows have values already
    groups, notes = make_groups(
        tables, optimizers, cache_rows=cache_rows, cache_ratio=cache_ratio, driver=choose_driver(device), store=store,
        strict=strict, seed=seed, shards=shards, update=update,
    )  # fmt: skip
    fused = FusedOptimizer(groups)
    modules: dict[str, CachedModule] = {}
    for path, chosen in zip(found, optimizers, strict=True):
        original = found[path]
        group = next(g for g in groups if any(table.name == path for table in g.tables))
        ours = _counterpart(original, {
            "optimizer": chosen, "cache_rows": cache_rows, "cache_ratio": cache_ratio, "store": store, "strict": strict,
            "seed": seed, "nonfinite": nonfinite, "update": update, "device": device, "_joined": (group, fused, path),
        })  # fmt: skip
        ours.notes = notes
        ours.set_table(path, original.weight.detach())
        ours.anchor.requires_grad_(original.weight.requires_grad)
        ours.train(original.training)
        for name, hooks in original.__dict__.items():  # the user's hooks go on working
            if "_hooks" in name and hooks:
                ours.__dict__[name].update(hooks)
        modules[path] = ours
    for path, original in found.items():
        _swap(model, original, modules[path])
        original.weight.data = original.weight.data.new_empty(0)  # its rows are ours now; undo brings them back
    return Replacement(model, modules, found, fused)


def _find(model: nn.Module, min_rows: int, skip: Sequence[str]) -> dict[str, Any]:
    """Path -> module of what is to be replaced; each module once."""
    by_path = dict(model.named_modules(remove_duplicate=False))
    for path in skip:
        if path not in by_path:
            raise ConfigError(f"skip={path!r}: the model has no such module.")
    skipped = {id(by_path[path]) for path in skip}  # a module may have several paths
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, _KINDS) and id(module) not in skipped and module.num_embeddings >= min_rows:
            if path == "":
                raise ConfigError(
                    "the model is itself an embedding; use cdlrm.EmbeddingBag.from_pretrained or cdlrm.Embedding "
                    "instead."
                )
            reason = _obstacle(model, module)
            if reason:
                raise ConfigError(f"{path!r} cannot be replaced: {reason}; pass skip=[{path!r}] to leave it alone.")
            found[path] = module
    if not found:
        raise ConfigError(f"the model has no nn.EmbeddingBag or nn.Embedding with at least {min_rows} rows to replace.")
    return found


def _obstacle(model: nn.Module, module: Any) -> str:
    """Why a module cannot be replaced ("" if it can)."""
    if module._parameters.get("weight") is None:
        return "its weight is no parameter but computed from others (torch.nn.utils.prune, parametrize, weight_norm)"
    if type(module) not in _KINDS:
        return f"its class {type(module).__name__} may do more than torch's"
    if module.max_norm is not None:
        return "max_norm would change rows at lookup"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq is not offered"
    if getattr(module, "mode", "sum") == "max":
        return 'mode="max" is not offered'
    if module.weight.dtype != torch.float32 or module.weight.device.type not in ("cpu", "cuda"):
        return (
            f"its rows are {module.weight.dtype} on {module.weight.device}, and only float32 on the CPU or an NVIDIA "
            "GPU can be trained"
        )
    lo, hi = _memory(module.weight)
    for other in model.modules():
        for tensor in (*other.parameters(recurse=False), *other.buffers(recurse=False)):
            start, end = _memory(tensor)
            if other is not module and max(lo, start) < min(hi, end):  # one parameter, or tied by `.data`
                return f"its weight is shared with a {type(other).__name__}, which needs it as one tensor"
    return ""


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """From which address to which a tensor lies in memory ((0, 0): nowhere)."""
    if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.is_meta:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _home(found: Mapping[str, Any]) -> torch.device:
    """The device of the rows that are replaced.  Raises ConfigError where they are on several."""
    devices = {module.weight.device: path for path, module in found.items()}
    if len(devices) > 1:
        (first, one), (second, other) = list(devices.items())[:2]
        raise ConfigError(
            f'the rows of {one!r} are on {first} and those of {other!r} on {second}; give device="cuda" or "cpu", or '
            "replace them in two calls with skip=."
        )
    return next(iter(devices))


def _counterpart(original: Any, settings: dict[str, Any]) -> CachedModule:
    """Our module with the settings of torch's."""
    common = {"padding_idx": original.padding_idx, "sparse": original.sparse, **settings}
    if isinstance(original, nn.Embedding):
        return Embedding(original.num_embeddings, original.embedding_dim, **common)
    return EmbeddingBag(
        original.num_embeddings, original.embedding_dim, mode=original.mode,
        include_last_offset=original.include_last_offset, **common,
    )  # fmt: skip


def _swap(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` is a child."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children() names a shared child once
            if child is old:
                setattr(parent, name, new)
