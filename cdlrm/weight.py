"""`TableWeight`: what a module's `.weight` returns: a copy of the table that says that it is one.

The table itself lives in a cache and a store.  Reading the copy is fine; writing to it, freezing it, or
asking for its gradient, would silently do nothing, so these raise a sentence with the way that works.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from .errors import UsageError

_NOT_WRITING = ("detach_", "__index__", "__int__", "__invert__")


class TableWeight(Tensor):
    """A detached copy of a table, float32 [num_embeddings, embedding_dim]; it and its views are read only.

    What is computed from it is a plain tensor; `.numpy()` gives a read-only array.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes `tensor=`
        if _copies(kwargs.get("out")) or (_in_place(name) and _copies(target)):
            _refuse(name)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if isinstance(out, np.ndarray):
            out.flags.writeable = False
            return out
        return _views(out, [copy for arg in (*args, *kwargs.values()) for copy in _copies(arg)])

    @property
    def grad(self) -> Tensor:
        raise UsageError(
            "the gradient of a cdlrm table is never a tensor: the backward pass applies it to the rows at once; to "
            "look at it, compare .weight before and after a step, or use torch.nn.EmbeddingBag."
        )

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            _refuse("grad")

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("set_")

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


def _views(out: Any, sources: list[TableWeight]) -> Any:
    """`out`, where what shares memory with `sources` is a TableWeight too."""
    if type(out) in (list, tuple):
        return type(out)(_views(item, sources) for item in out)
    if type(out) is Tensor and out.layout == torch.strided and out.numel():
        memory = out.untyped_storage().data_ptr()
        if any(memory == source.untyped_storage().data_ptr() for source in sources):
            return out.as_subclass(TableWeight)
    return out


def _refuse(name: str) -> NoReturn:
    raise UsageError(
        f"{name}: .weight of a cdlrm module is a copy of its table, so writing to it would change nothing; use "
        f"module.set_weight(values) (or load_state_dict) to replace the rows, module.requires_grad_(False) to freeze "
        f"them."
    )


def table_weight(values: Tensor) -> TableWeight:
    """`values` as a TableWeight (no copy)."""
    return torch.Tensor._make_subclass(TableWeight, values)
