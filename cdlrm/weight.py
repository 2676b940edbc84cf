"""`TableWeight`: what a module's `.weight` returns: a copy of the table that says that it is one.

The table itself lives in a cache and a store.  Reading the copy is fine; writing to it, or asking for
its gradient, would silently do nothing, so these raise a sentence with the way that works.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from .errors import UsageError


class TableWeight(Tensor):
    """A detached copy of a table, float32 [num_embeddings, embedding_dim]; it and its views are read only."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes `tensor=`
        if isinstance(target, TableWeight):
            in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
            if (in_place and name not in ("requires_grad_", "detach_")) or isinstance(kwargs.get("out"), TableWeight):
                _refuse(name)
        out = super().__torch_function__(func, types, args, kwargs)
        if isinstance(out, TableWeight) and isinstance(target, TableWeight):
            same = out.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
            return out if same else out.as_subclass(Tensor)
        return out

    @property
    def grad(self) -> Tensor:  # type: ignore[override]
        raise UsageError(
            "the gradient of a cdlrm table is never a tensor: the backward pass applies it to the rows at once; to look "
            "at it, compare .weight before and after a step, or use torch.nn.EmbeddingBag."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _refuse(name: str) -> NoReturn:
    raise UsageError(
        f"{name}: .weight of a cdlrm module is a copy of its table, so writing to it would change nothing; use "
        f"module.set_weight(values) (or load_state_dict) to replace the rows."
    )


def table_weight(values: Tensor) -> TableWeight:
    """`values` as a TableWeight (no copy)."""
    return torch.Tensor._make_subclass(TableWeight, values)
