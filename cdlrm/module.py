"""`CachedModule`: what all embedding modules of this library share.

A module looks features up in groups.  Several modules may share a group (and so a cache and a plan).
Rows are no parameters: they live in a store, are trained in a cache and updated in the backward pass.

DistributedDataParallel must leave the anchors alone, since their gradients never come through autograd:

    names = [name for name, _ in model.named_parameters() if name.split(".")[-1] == "anchor"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)

It then averages the dense parameters only; each process trains its own rows, and nothing here makes
those of several processes agree.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from . import accumulation, averaging, scaling
from .ahead import Lookahead, lookahead
from .anchor import make_anchor
from .autograd import GroupCall, pooled_lookup
from .compiler import refuse_torchscript
from .driver.base import Verdict
from .errors import ConfigError, InputError, UsageError
from .fused import FusedOptimizer
from .gradient import applied_gradient, require_one_number, waiting_gradient
from .group import Group
from .lookups import FeatureSlot, Lookups, flatten, take_copies
from .machine import available_bytes
from .reference import TableReference
from .stats import group_stats, total
from .step import Call
from .store import FileStore
from .weight import TableWeight, table_weight
from .whole_tables import set_table, span, table_values

log = logging.getLogger("cdlrm")

NONFINITE = ("raise", "skip")


class CachedModule(nn.Module):
    """Base of `EmbeddingBagCollection`, `EmbeddingBag` and `Embedding`.

    `groups` and, for each, `slots`: the features that this module looks up there, in order; `widths`:
    output columns of each group's dim.  `keys`: state_dict key -> name of each of the module's tables.

    `grad_scaler`: the GradScaler of the loop, if there is one.  `several_updates_a_step`: with
    `update="backward"`, allow several backward passes (each an update) before one step of the
    optimizer, which is refused otherwise as gradient accumulation.
    """

    groups: list[Group]
    optimizer: FusedOptimizer

    def __init__(self, nonfinite: str) -> None:
        super().__init__()
        if nonfinite not in NONFINITE:
            raise ConfigError(f"nonfinite={nonfinite!r}: must be one of {', '.join(NONFINITE)}.")
        self.nonfinite = nonfinite
        self.anchor = make_anchor()  # makes autograd call our backward
        self.notes: list[str] = []  # what was chosen automatically, and why
        self.output_dtype = torch.float32
        self.grad_scaler: Any = None
        self.stepping = accumulation.Stepping()
        self.several_updates_a_step = False
        self.newest_pass = 0  # see `scaling.py`
        self._norm = 0.0  # of the row gradients that wait for the optimizer's step
        self._slots: dict[Group, list[FeatureSlot]] = {}
        self._widths: dict[Group, int] = {}
        self._keys: dict[str, str] = {}

    def _attach(
        self, slots: dict[Group, list[FeatureSlot]], widths: dict[Group, int], keys: dict[str, str],
        optimizer: FusedOptimizer,
    ) -> None:  # fmt: skip
        self.groups = list(slots)
        self.anchor.data = self.anchor.data.to(self.device)
        self.notes += self.groups[0].driver.notes()
        accumulation.watch(self)
        scaling.watch(self)
        averaging.watch(self)
        self._slots, self._widths, self._keys, self.optimizer = slots, widths, keys, optimizer

    # --- lookups ---

    def _flatten(self, inputs: Any, size: int | None) -> dict[Group, Lookups]:
        calls = {group: flatten(self._slots[group], self._widths[group], inputs, size) for group in self.groups}
        self.groups[0].driver.waited("inputs", take_copies())
        return calls

    def _look_up(self, inputs: Any, size: int | None, weights: dict[str, Tensor]) -> list[Tensor]:
        """Outputs [B, columns, dim] of each dim, ascending; `weights`: per-sample weights that want a gradient."""
        self.require_open()
        calls = [GroupCall(group, lookups) for group, lookups in self._flatten(inputs, size).items()]
        return pooled_lookup(self, calls, self.anchor, weights)

    def feature_order(self, group: Group) -> list[str]:
        """Features of `group` in the order of its lookups."""
        return [slot.feature for slot in self._slots[group]]

    def lookahead(self, loader: Iterable[Any], **settings: Any) -> Lookahead:
        """`cdlrm.lookahead(self, loader, **settings)`."""
        return lookahead(self, loader, **settings)

    @property
    def device(self) -> torch.device:
        """Where outputs are, and gradients are expected."""
        return self.groups[0].driver.device

    def require_open(self) -> None:
        if any(group.closed for group in self.groups):
            raise UsageError(
                f"this {type(self).__name__} was closed; make a new one (its state_dict() still works, and modules "
                f"that share a cache are closed together)."
            )

    # --- updates that wait for the optimizer's step ---

    def gradients_came(self, verdict: Verdict) -> None:
        """A backward pass is through.  With `update="step"` the anchor's gradient becomes the norm of this
        module's row gradients, so that what is done to it (torch's clip_grad_norm_, a GradScaler) counts
        for the rows too; with updates in the backward pass it is `AppliedGradient`."""
        known = self.grad_scaler is not None
        if self.groups[0].deferred is None:
            self.anchor.grad = applied_gradient(verdict if known else None, known, self.anchor)
            return
        squares = 0.0
        for group in self.groups:
            calls = [call for call in self._waiting(group) if call.owner is self and call.grad is not None]
            squares += group.driver.sum_of_squares(calls, group.dim) if calls else 0.0
        self._norm = math.sqrt(squares)
        scaler = self.grad_scaler if known and self.grad_scaler.is_enabled() else None
        self.anchor.grad = waiting_gradient(self._norm, scaler, self.anchor)

    def _waiting(self, group: Group) -> list[Call]:
        return [] if group.deferred is None else group.deferred.calls()

    def updates_made(self) -> int:
        """Updates in the backward pass so far (0 with `update="step"`)."""
        return max(group.updates.made(self) if group.deferred is None else 0 for group in self.groups)

    def waits(self) -> bool:
        """Whether row gradients wait for the optimizer's step (`update="step"`), dropped by zero_grad or not."""
        return any(call.owner is self for group in self.groups for call in self._waiting(group))

    def gradients_come(self) -> None:
        """Before another backward pass adds to the row gradients that wait: what was done to the anchor's
        gradient since they came (clipped, zeroed) is done to them, and not to the new ones."""
        if not self.waits():
            return
        scale = self.gradient_scale()
        for group in self.groups:
            if group.deferred is not None and scale != 1.0:
                group.deferred.rescale(lambda call: scale if call.owner is self else 1.0)

    def gradient_scale(self) -> float | None:
        """By what the gradients of this module were scaled since they came; None: they were dropped."""
        if self.anchor.grad is None:
            return None
        require_one_number(self.anchor)
        self.groups[0].driver.waited("norm", 1)
        now, came = float(self.anchor.grad), float(np.float32(self._norm))
        if now == came or came == 0.0:
            return 1.0
        return None if now == 0.0 else now / came

    # --- tables as a whole ---

    def flush(self) -> None:
        """Write every changed row of the cache to the store."""
        for group in self.groups:
            group.flush()

    def close(self) -> None:
        """Stop look-aheads, bring all rows home, stop threads.  Forward does not work any more; tables in memory
        stay readable, a folder of tables may be opened by another module.  May be called twice."""
        for group in self.groups:
            if group.attached is not None:
                group.attached.close()
        for group in self.groups:
            group.close()

    def check(self) -> None:
        """Verify rules and structure; raises AssertionError naming what is broken (for tests)."""
        for group in self.groups:
            group.check()

    def stats(self) -> dict[str, Any]:
        """Counters since the module was made, summed over its groups; see `cdlrm.stats`.

        Waits for a GPU where `nonfinite="skip"`, since only it knows which steps were skipped."""
        return total([group_stats(group) for group in self.groups])

    def table_weight(self, name: str) -> TableWeight:
        """A copy of a table's newest weights, float32 [num_embeddings, embedding_dim]; see `TableWeight`.

        Raises UsageError where the copy would not fit the host memory.
        """
        return table_weight(self.table_copy(name), self.anchor.requires_grad, name)

    def table_copy(self, name: str) -> Tensor:
        """The same as a plain tensor of one's own."""
        group = self._group_of(name)
        lo, hi = span(group, name)
        need, have = (hi - lo) * group.dim * 4, available_bytes()
        if need > have:
            raise UsageError(
                f"a copy of table {name!r} needs {need / 2**30:.1f} GiB but {have / 2**30:.1f} GiB of host memory are "
                f"available; save a checkpoint (cdlrm.save) and read it in pieces (cdlrm.iter_tables)."
            )
        return torch.from_numpy(table_values(group, name)[0])

    def table_state(self, name: str) -> dict[str, Tensor]:
        """Copies of a table's optimizer state by torch's names: float32 [rows] or [rows, dim]."""
        group = self._group_of(name)
        state = table_values(group, name)[1]
        out = {}
        for key, (lo, hi) in group.optimizer.state_names(group.dim).items():
            part = torch.from_numpy(np.ascontiguousarray(state[:, lo:hi]))
            out[key] = part[:, 0] if group.optimizer.one_state_a_row else part
        return out

    def set_table(self, name: str, weight: Tensor | np.ndarray) -> None:
        """Replace a table's weights by float32 [num_embeddings, embedding_dim]; optimizer state stays."""
        group = self._group_of(name)
        lo, hi = span(group, name)
        values = weight.detach().cpu().numpy() if isinstance(weight, Tensor) else np.asarray(weight)
        if values.dtype != np.float32 or values.shape != (hi - lo, group.dim):
            raise InputError(
                f"table {name!r}: weights are {values.dtype} {list(values.shape)}; pass float32 {[hi - lo, group.dim]}."
            )
        set_table(group, name, np.ascontiguousarray(values), None)

    def _group_of(self, name: str) -> Group:
        for group in self.groups:
            if any(table.name == name for table in group.tables):
                return group
        names = ", ".join(repr(known) for known in self._keys.values())
        raise ConfigError(f"there is no table {name!r}; the tables are {names}.")

    # --- torch's ways to treat a module ---

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by torch.jit.script, for the modules inside a module too."""
        refuse_torchscript(type(self).__name__)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for key, name in self._keys.items():
            reference = self._reference(name)
            if reference is not None and reference.rows * reference.dim * 4 > available_bytes():
                self._group_of(name).flush()
                destination[prefix + key] = reference
            else:
                destination[prefix + key] = self.table_copy(name)

    def _reference(self, name: str) -> TableReference | None:
        """Where a table's rows are, if they are in a file."""
        group = self._group_of(name)
        if not isinstance(group.store, FileStore):
            return None
        lo, hi = span(group, name)
        return TableReference(str(group.store.path), name, hi - lo, group.dim)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        for key, name in self._keys.items():
            if prefix + key not in state_dict:
                missing_keys.append(prefix + key)
                continue
            value = state_dict[prefix + key]
            try:
                if not isinstance(value, TableReference):
                    cast = isinstance(value, Tensor) and value.is_floating_point()  # as torch copies into parameters
                    self.set_table(name, value.to(torch.float32) if cast else value)
                elif value != self._reference(name):
                    raise InputError(
                        f"table {name!r}: the state_dict refers to the rows in {value.file}, which are not this "
                        f"module's; open that folder with store=, or move the rows by a checkpoint (cdlrm.save)."
                    )
            except InputError as error:
                error_msgs.append(str(error))
        if strict:
            known = {prefix + key for key in self._keys}
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CachedModule:
        """`.to()`, `.half()`, `.cuda()`, …: what changes nothing is done, the rest refused with the reason."""
        home = self.device
        before = torch.zeros(1, device=home)
        advice = "make the module with device=, and move the other parts of the model with .to()"
        try:
            probe = fn(before)
        except (AssertionError, RuntimeError) as error:  # no such device in this torch
            raise UsageError(
                f"{type(self).__name__} lives on {home} and cannot move elsewhere ({error}); {advice}."
            ) from error
        if home.type == "cpu" and before.is_shared():  # torch says so of all memory on a GPU
            self.share_memory()
        if probe.dtype != torch.float32:
            raise UsageError(
                f"{type(self).__name__} keeps and trains its rows in float32 and cannot become {probe.dtype}; use "
                f"torch.autocast for lower precision, or convert the other parts of the model only."
            )
        if probe.device != before.device:
            raise UsageError(f"{type(self).__name__} lives on {home} and cannot move to {probe.device}; {advice}.")
        return self

    def share_memory(self) -> CachedModule:
        raise UsageError("rows and their cache cannot be shared between processes; train in one process.")

    def extra_repr(self) -> str:
        stats = self.stats()
        return f"tables={len(self._keys)}, rows={stats['table_rows']}, cache_rows={stats['cache_rows']}"
