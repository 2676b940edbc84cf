"""`TableWeight`: what `.weight` and `.table_weight(name)` return: a copy of the table that says that it is one.

The table itself lives in a cache and a store.  Reading the copy is fine; writing to it, freezing it, asking for its
gradient, or a backward pass through what is computed from it, would silently do nothing, so these raise a sentence
with the way that works.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from .errors import UsageError

_NOT_WRITING = ("detach_", "__index__", "__int__", "__invert__")
_ONLY_READING = frozenset(
    "__get__ detach detach_ clone numpy __array__ __dlpack__ __repr__ __float__ __int__ __index__ __complex__ copy_ "
    "__setitem__".split()
)  # values are taken out; torch would refuse some of these, or warn, for what has a gradient


class TableWeight(Tensor):
    """A detached copy of a table, float32 [num_embeddings, embedding_dim]; it and its views are read only.

    `.numpy()` gives a read-only array, `.clone()` a plain tensor of one's own.  What is computed from it where
    gradients are recorded is a plain tensor whose backward pass raises UsageError, unless the table is frozen.
    """

    _learns = False
    _table: str | None = None  # a name, where the module has several

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes `tensor=`
        if written := _copies(kwargs.get("out")) or (_copies(target) if _in_place(name) else []):
            written[0]._refuse(name)
        copies = [copy for arg in (*args, *kwargs.values()) for copy in _copies(arg)]
        learns = any(copy._learns for copy in copies)
        if learns and torch.is_grad_enabled() and name not in _ONLY_READING:
            args, kwargs = tuple(map(_guarded, args)), {key: _guarded(value) for key, value in kwargs.items()}
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
            if isinstance(out, np.ndarray):
                out.flags.writeable = False
                return out
            table = copies[0]._table if copies else None
            return _views(out, {copy.untyped_storage().data_ptr() for copy in copies}, learns, table)

    @property
    def _named(self) -> str:
        """How it is read, in a program."""
        return ".weight" if self._table is None else f".table_weight({self._table!r})"

    @property
    def grad(self) -> Tensor:
        raise UsageError(
            "the gradient of a cdlrm table is never a tensor: the backward pass applies it to the rows at once; to "
            f"look at it, compare {self._named} before and after a step, or use torch.nn.EmbeddingBag."
        )

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            self._refuse("grad")

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("set_")

    def _refuse(self, name: str) -> NoReturn:
        write = "set_weight(values)" if self._table is None else f"set_table({self._table!r}, values)"
        raise UsageError(
            f"{name}: {self._named} of a cdlrm module is a copy of its table, so writing to it would change nothing; "
            f"use module.{write} (or load_state_dict) to replace the rows, module.requires_grad_(False) to freeze them."
        )

    def __format__(self, spec: str) -> str:
        return self.as_subclass(Tensor).__format__(spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _copies(value: Any) -> list[TableWeight]:
    """The TableWeights in an argument, which may be a list (torch._foreach_…, torch.cat)."""
    items = value if isinstance(value, (list, tuple)) else (value,)
    return [item for item in items if isinstance(item, TableWeight)]


def _in_place(name: str) -> bool:
    """Whether a function of that name changes its first argument."""
    if name in _NOT_WRITING:
        return False
    return (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set", "__del"))


def _views(out: Any, memory: set[int], learns: bool, table: str | None) -> Any:
    """`out`, where what lies in `memory` is a TableWeight too."""
    if type(out) in (list, tuple):
        return type(out)(_views(item, memory, learns, table) for item in out)
    if type(out) in (Tensor, TableWeight) and out.layout == torch.strided and out.numel():
        if out.untyped_storage().data_ptr() in memory:
            return table_weight(out.detach(), learns, table)
    return out


class _Guard(torch.autograd.Function):
    """The identity; its backward pass is the one that the table would silently miss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, named: str, anchor: Tensor) -> Tensor:
        ctx.named = named
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise UsageError(
            f"the loss depends on {ctx.named} of a cdlrm module, a copy of its table, through which the table cannot "
            "learn; read it under torch.no_grad() or with .detach(), use weight_decay= of the table's optimizer, not a "
            "penalty, and torch.nn.Embedding or torch.nn.EmbeddingBag for a table that is tied to another layer."
        )


def _guarded(value: Any) -> Any:
    """An argument with its TableWeights as plain tensors that refuse a backward pass."""
    if type(value) in (list, tuple):
        return type(value)(map(_guarded, value))
    if isinstance(value, TableWeight) and value._learns:
        with torch._C.DisableTorchFunctionSubclass():
            return _Guard.apply(value.as_subclass(Tensor), value._named, torch.empty((), requires_grad=True))
    return value


def table_weight(values: Tensor, learns: bool, table: str | None = None) -> TableWeight:
    """`values` as a TableWeight (no copy); `learns`: it is not frozen; `table`: its name, if the module has several."""
    out = torch.Tensor._make_subclass(TableWeight, values)
    out._learns, out._table = learns, table
    return out
