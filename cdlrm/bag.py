"""`EmbeddingBag` and `Embedding`: drop-ins for `torch.nn`'s, with the rows behind an exact cache.

Constructor and forward take torch's arguments; the cache's are keyword-only.  Rows are updated inside
the backward pass by `optimizer`; everything else of one's own loop stays.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from .compiler import outside_compiler
from .errors import ConfigError, InputError, UsageError
from .fused import FusedOptimizer
from .group import Group
from .lookups import FeatureSlot, Lookups, to_host
from .module import CachedModule
from .normal import Normal
from .optim import SGD, Optimizer, check_specification
from .placement import check_cache_settings, choose_driver, choose_seed, make_groups
from .table import Table
from .weight import TableWeight, table_weight
from .whole_tables import set_rows, set_table, span, table_values

FEATURE = "input"


class _OneTable(CachedModule):
    """A module with one table.  `_joined`: (group, table) to join instead of making a group."""

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None

    def _set_up(self, settings: dict[str, Any], mean: bool) -> None:
        """Check the settings that torch's signature and ours have in common, and make or join the group."""
        kind = type(self).__name__
        if settings["max_norm"] is not None:
            raise ConfigError(
                f"{kind}(max_norm={settings['max_norm']!r}): renormalising rows at lookup would change rows that are "
                f"not trained; normalise the output instead (torch.nn.functional.normalize)."
            )
        if settings["scale_grad_by_freq"]:
            raise ConfigError(
                f"{kind}(scale_grad_by_freq=True): gradients are summed, not scaled, in the update; use "
                f"per_sample_weights of 1 / frequency, or scale_grad_by_freq=False."
            )
        if settings["dtype"] not in (None, torch.float32):
            raise ConfigError(
                f"{kind}(dtype={settings['dtype']}): rows are float32; use torch.autocast around the model."
            )
        self.num_embeddings, self.embedding_dim = settings["num_embeddings"], settings["embedding_dim"]
        self.padding_idx = _padding(kind, settings["padding_idx"], self.num_embeddings)
        self.max_norm, self.norm_type, self.scale_grad_by_freq = None, settings["norm_type"], False  # torch has them
        self.sparse = settings["sparse"]
        settings["seed"] = choose_seed(settings["seed"], settings["store"], used=settings["_weight"] is None)
        self._settings = settings  # of copies too, which draw no seed of their own
        self._no_optimizer = settings["optimizer"] is None
        joined = settings["_joined"]
        if joined is None:
            group, optimizer = self._own_group(kind, settings, mean)
            name = group.tables[0].name
        else:
            group, optimizer, name = joined
        base, _ = span(group, name)
        slot = FeatureSlot(FEATURE, name, base, self.num_embeddings, 0, mean)
        self._attach({group: [slot]}, {group: 1}, {"weight": name}, optimizer)
        if settings["_weight"] is not None:
            self.set_weight(settings["_weight"])
        elif self.padding_idx is not None and joined is None:
            set_rows(group, base + self.padding_idx, np.zeros((1, self.embedding_dim), np.float32))
        self._made = frozenset(self.__dict__)  # what else comes is the user's

    def _own_group(self, kind: str, settings: dict[str, Any], mean: bool) -> tuple[Group, FusedOptimizer]:
        check_cache_settings(settings["cache_rows"], settings["cache_ratio"])
        optimizer = SGD(lr=0.0) if self._no_optimizer else settings["optimizer"]
        check_specification(f"optimizer of {kind}", optimizer)
        seed = settings["seed"]
        table = Table(
            kind, self.num_embeddings, self.embedding_dim, pooling="mean" if mean else "sum", init=Normal(seed)
        )
        groups, self.notes = make_groups(
            [table], [optimizer], cache_rows=settings["cache_rows"], cache_ratio=settings["cache_ratio"],
            driver=choose_driver(settings["device"]), store=settings["store"], strict=settings["strict"], seed=seed,
            shards=None, update=settings["update"],
        )  # fmt: skip
        return groups[0], FusedOptimizer(groups)

    # --- lookups ---

    def _arguments(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
        """values [L], offsets [B+1] (None: one each), weights [L], B, of a forward call's arguments."""
        raise TypeError("use EmbeddingBag or Embedding")

    def lookahead_calls(self, argument: Any) -> dict[Group, Lookups]:
        """What `forward` will look up when it is called with `argument`: its input, a tuple of its
        arguments, or a dict of them."""
        if isinstance(argument, Mapping):
            values, offsets, weights, size = self._arguments(**argument)
        elif isinstance(argument, tuple):
            values, offsets, weights, size = self._arguments(*argument)
        else:
            values, offsets, weights, size = self._arguments(argument)
        return self._flatten({FEATURE: (values, offsets, weights)}, size)

    def _pooled(self, values: Tensor, offsets: Tensor | None, weights: Tensor | None, size: int) -> Tensor:
        """float32 [B, dim]."""
        if self._no_optimizer and torch.is_grad_enabled() and self.anchor.requires_grad:
            raise UsageError(
                f"{type(self).__name__} has no optimizer, so it cannot be trained; give optimizer= (such as "
                f"cdlrm.SGD(lr=0.1)), or use it under torch.no_grad() or with requires_grad_(False)."
            )
        learn = {}
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            learn[FEATURE] = weights
        return self._look_up({FEATURE: (values, offsets, weights)}, size, learn)[0][:, 0]

    def _without_padding(
        self, values: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Drop lookups of the padding row: they add nothing, count for no mean, and learn nothing."""
        if self.padding_idx is None:
            return values, offsets, weights
        keep = values != self.padding_idx
        if bool(keep.all()):
            return values, offsets, weights
        if offsets is None:
            offsets = torch.arange(len(values) + 1, device="cpu")
        kept_before = torch.zeros(len(values) + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(keep, 0, out=kept_before[1:])
        inside = offsets.to(torch.int64).clamp(0, len(values))  # what is outside is refused later
        moved = torch.where(inside == offsets, kept_before[inside], offsets)
        return values[keep], moved, None if weights is None else weights[keep]

    # --- the table ---

    @property
    def weight(self) -> TableWeight:
        """A copy of the newest table, float32 [num_embeddings, embedding_dim]; see `TableWeight`."""
        return table_weight(self.table_copy(self._keys["weight"]), self.anchor.requires_grad)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise UsageError(
                f"{type(self).__name__}.weight cannot be assigned: the table is no parameter; use "
                f"module.set_weight(values) to replace its rows (tables cannot be tied to other layers)."
            )
        super().__setattr__(name, value)

    def set_weight(self, values: Tensor | np.ndarray) -> None:
        """Replace the table by float32 [num_embeddings, embedding_dim]; optimizer state stays."""
        self.set_table(self._keys["weight"], values)

    def reset_parameters(self) -> None:
        raise UsageError(
            "rows are initialised by seed where they are first used; make a new module with another seed=."
        )

    # --- copies ---

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        kind, settings, weight, state, flags = self._parts()
        scaler = flags["extras"].pop("grad_scaler", None)  # one scaler serves the copy as well
        extras = copy.deepcopy(flags["extras"], memo)
        module = _rebuild(kind, settings, weight, state, {**flags, "extras": extras})
        module.grad_scaler = scaler
        memo[id(self)] = module
        return module

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, self._parts()

    def _parts(self) -> tuple[Any, ...]:
        group, name = self.groups[0], self._keys["weight"]
        settings = {**self._settings, "_joined": None, "_weight": None}
        if self._settings["store"] != "ram":
            raise UsageError(
                f"a module whose rows live in a file ({self._settings['store']}) cannot be copied or pickled; save a "
                f"checkpoint (cdlrm.save) and load it into a module with another folder."
            )
        weight, state = table_values(group, name)
        t = [table.name for table in group.tables].index(name)
        own = self.__dict__.items()
        extras = {k: v for k, v in own if (k not in self._made and k != "_made") or ("_hooks" in k and v)}
        flags = {"training": self.training, "requires_grad": self.anchor.requires_grad, "lr": group.lr,
                 "steps": int(group.table_steps[t]), "extras": {**extras, "grad_scaler": self.grad_scaler}}  # fmt: skip
        return type(self), settings, weight, state, flags

    def extra_repr(self) -> str:
        stats = self.stats()
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        return f"{text}, cache_rows={stats['cache_rows']} of {stats['table_rows']}"


def _rebuild(kind: type, settings: dict[str, Any], weight: np.ndarray, state: np.ndarray, flags: dict[str, Any]) -> Any:
    module = kind(**settings)
    set_table(module.groups[0], module._keys["weight"], weight, state)
    module.groups[0].set_table_steps(0, flags["steps"])
    module.optimizer.param_groups[0]["lr"] = flags["lr"]
    module.anchor.requires_grad_(flags["requires_grad"])
    module.train(flags["training"])
    module.__dict__.update(flags["extras"])  # hooks and the user's own attributes
    return module


def _padding(kind: str, padding_idx: int | None, rows: int) -> int | None:
    """torch's rule: negative numbers count from the end."""
    if padding_idx is None:
        return None
    if not -rows <= padding_idx < rows:
        raise ConfigError(f"{kind}(padding_idx={padding_idx}): must be within [-{rows}, {rows}), the number of rows.")
    return padding_idx % rows


def _settings(frame: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in frame.items() if name not in ("self", "__class__")}


def _integers(kind: str, name: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor):
        raise InputError(f"{kind}: {name} is a {type(value).__name__}; pass a tensor of int64 or int32.")
    if value.is_nested:
        raise InputError(
            f"{kind}: {name} is a nested tensor; pass its values() and offsets() with include_last_offset."
        )
    if value.is_meta:
        raise InputError(
            f"{kind}: {name} is on the device 'meta', which has shapes but no ids; pass a tensor with ids on the CPU."
        )
    return to_host(value)


class EmbeddingBag(_OneTable):
    """`torch.nn.EmbeddingBag` behind an exact cache.

    Torch's arguments, in torch's order, then keyword-only: `optimizer` (a specification; needed for
    training), `cache_rows`, `cache_ratio`, `store`, `strict`, `seed`, `nonfinite`,
    `update` as in `EmbeddingBagCollection`.  `device` None is torch's default device, because torch's signature says
    so; "auto", the collection's default, takes a GPU that can be used.  `sparse` is accepted and has no effect.
    Modes "sum" and "mean"; initial values N(0, 1) as a function of (seed, row, column), with `seed` None drawn
    once from torch's default CPU generator, so that torch.manual_seed(s) fixes it and two modules differ.  Raises
    ConfigError for max_norm, scale_grad_by_freq, mode="max" and other dtypes, each with the reason.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, _weight: Tensor | None = None,
        include_last_offset: bool = False, padding_idx: int | None = None, device: Any = None, dtype: Any = None,
        *, optimizer: Optimizer | None = None, cache_rows: int | str = "auto", cache_ratio: float | None = None,
        store: str = "ram", strict: bool = False, seed: int | None = None, nonfinite: str = "raise",
        update: str = "backward", _joined: Any = None,
    ) -> None:  # fmt: skip
        settings = _settings(locals())
        super().__init__(nonfinite)
        if mode == "max":
            raise ConfigError(
                'EmbeddingBag(mode="max"): which row wins depends on values that are still being trained, so it is not '
                'offered; use mode="sum" or "mean", or torch.nn.EmbeddingBag for this table.'
            )
        if mode not in ("sum", "mean"):
            raise ConfigError(f'EmbeddingBag(mode={mode!r}): must be "sum" or "mean".')
        self.mode, self.include_last_offset = mode, include_last_offset
        self._set_up(settings, mean=mode == "mean")

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, include_last_offset: bool = False,
        padding_idx: int | None = None, **settings: Any,
    ) -> EmbeddingBag:  # fmt: skip
        """A module with the rows `embeddings` float32 [rows, dim]; `freeze=False` to train them.
        Arguments in torch's order; the others as in the constructor."""
        known = {"max_norm": max_norm, "norm_type": norm_type, "scale_grad_by_freq": scale_grad_by_freq, "mode": mode,
                 "sparse": sparse, "include_last_offset": include_last_offset, "padding_idx": padding_idx}  # fmt: skip
        return _pretrained(cls, embeddings, freeze, {**known, **settings})

    @outside_compiler
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """float32 [B, dim]: `input` int [B, N] (bags of N), or [L] with `offsets` int [B] (or [B+1] with
        include_last_offset); `per_sample_weights` float32 of input's shape, mode "sum" only.
        Raises InputError for what does not fit."""
        return self._pooled(*self._arguments(input, offsets, per_sample_weights))

    def _arguments(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
        values = _integers("EmbeddingBag", "input", input)
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise InputError(f'per_sample_weights need mode="sum", but the mode is {self.mode!r}.')
            if not isinstance(per_sample_weights, Tensor):
                raise InputError(f"per_sample_weights are a {type(per_sample_weights).__name__}; pass a tensor.")
            if per_sample_weights.shape != values.shape:
                raise InputError(
                    f"per_sample_weights have shape {list(per_sample_weights.shape)} but input has "
                    f"{list(values.shape)}; "
                    f"pass one weight per id."
                )
        if values.dim() == 2:
            if offsets is not None:
                raise InputError("offsets must be None for a 2-D input, whose rows are the bags.")
            size, length = values.shape
            values = values.reshape(-1)
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights.reshape(-1)
            offsets = None if length == 1 else torch.arange(size + 1, device="cpu") * length
        elif values.dim() == 1:
            if offsets is None:
                raise InputError("offsets are missing: a 1-D input needs them (the start of each bag).")
            offsets = _integers("EmbeddingBag", "offsets", offsets)
            if offsets.dim() != 1:
                raise InputError(
                    f"offsets have {offsets.dim()} dimensions; pass a 1-D tensor with the start of each bag."
                )
            if not self.include_last_offset:
                offsets = torch.cat([offsets, torch.tensor([len(values)], dtype=offsets.dtype, device="cpu")])
            size = len(offsets) - 1
        else:
            raise InputError(
                f"input has {values.dim()} dimensions; pass 1-D ids with offsets, or a 2-D matrix of bags."
            )
        return (*self._without_padding(values, offsets, per_sample_weights), size)


class Embedding(_OneTable):
    """`torch.nn.Embedding` behind an exact cache; arguments as in torch, then as in `EmbeddingBag`."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False, _weight: Tensor | None = None,
        _freeze: bool = False, device: Any = None, dtype: Any = None, *, optimizer: Optimizer | None = None,
        cache_rows: int | str = "auto", cache_ratio: float | None = None, store: str = "ram", strict: bool = False,
        seed: int | None = None, nonfinite: str = "raise", update: str = "backward", _joined: Any = None,
    ) -> None:  # fmt: skip
        settings = _settings(locals())
        super().__init__(nonfinite)
        self._padding_row: Tensor | None = None
        self._set_up(settings, mean=False)
        self.anchor.requires_grad_(not _freeze)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False, **settings: Any,
    ) -> Embedding:  # fmt: skip
        """A module with the rows `embeddings` float32 [rows, dim]; `freeze=False` to train them.
        Arguments in torch's order; the others as in the constructor."""
        known = {"padding_idx": padding_idx, "max_norm": max_norm, "norm_type": norm_type,
                 "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}  # fmt: skip
        return _pretrained(cls, embeddings, freeze, {**known, **settings})

    def set_table(self, name: str, weight: Tensor | np.ndarray) -> None:
        super().set_table(name, weight)
        self._padding_row = None

    @outside_compiler
    def forward(self, input: Tensor) -> Tensor:
        """float32 [*, dim] for `input` int [*] of any shape.  Raises InputError for what does not fit."""
        input = _integers("Embedding", "input", input)
        shape = tuple(input.shape)
        values, offsets, _, size = self._arguments(input)
        out = self._pooled(values, offsets, None, size)
        if offsets is not None:  # the padding row is not trained, but its value is read
            if self._padding_row is None:
                self._padding_row = self.weight_rows(torch.tensor([self.padding_idx], device="cpu"))[0]
            is_padding = (offsets[1:] == offsets[:-1]).unsqueeze(1).to(out.device)
            out = torch.where(is_padding, self._padding_row, out)
        return out.reshape(*shape, self.embedding_dim)

    def weight_rows(self, rows: Tensor) -> Tensor:
        """Newest values of `rows` int64 [n], float32 [n, dim], without a gradient."""
        with torch.no_grad():
            return self._look_up({FEATURE: (rows, None, None)}, len(rows), {})[0][:, 0]

    def _arguments(self, input: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
        values = _integers("Embedding", "input", input).reshape(-1)
        return (*self._without_padding(values, None, None), len(values))


def _pretrained(cls: type, embeddings: Tensor, freeze: bool, settings: dict[str, Any]) -> Any:
    if not isinstance(embeddings, Tensor) or embeddings.dim() != 2:
        _refuse_pretrained(embeddings)
    known = inspect.signature(cls).parameters
    for name in settings:
        if name not in known or name.startswith("_"):
            raise TypeError(f"{cls.__name__}.from_pretrained() got an unexpected keyword argument {name!r}")
    rows, dim = embeddings.shape
    module = cls(rows, dim, _weight=embeddings, **settings)
    module.anchor.requires_grad_(not freeze)
    return module


def _refuse_pretrained(embeddings: Any) -> NoReturn:
    what = f"shape {list(embeddings.shape)}" if isinstance(embeddings, Tensor) else type(embeddings).__name__
    raise InputError(f"from_pretrained: embeddings are {what}; pass a float32 tensor [rows, dim].")
