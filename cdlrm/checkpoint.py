"""`save` and `load`: everything that a training run needs to continue as if it had never stopped.

A checkpoint holds the dense part of the model, the tables with their optimizer state, step counts and learning
rates, the states of other optimizers and schedulers, the random states, the position in the data behind the batch
being trained, and what the user adds.  What is written depends on none of cache size, horizon, prefetch depth,
shards, store or grouping of tables, so it can be loaded with others, and the run goes on to the same bits.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .ahead import Lookahead
from .checkpoint_files import Packer, Parts, PartWriter, find_checkpoint, unpack, write_checkpoint
from .checkpoint_links import link_unchanged, rebase
from .checkpoint_tables import (
    SavedTable,
    SavedTables,
    check_table,
    describe,
    embedding_parts,
    iter_tables,
    load_tables,
    restore_table,
    tables_of,
    write_table,
)
from .errors import ConfigError, UsageError
from .fused import FusedOptimizer
from .group import Group

__all__ = ["SavedTables", "checkpoint_info", "iter_tables", "load", "load_tables", "save"]


def save(
    directory: str | Path,
    model: nn.Module,
    *,
    optimizers: Any = (),
    lookahead: Lookahead | None = None,
    loader: Any = None,
    extra: Any = None,
    keep: int = 1,
) -> Path:
    """Write a checkpoint of `model` into `directory` and return its folder, `directory/checkpoint-NNNNNN`.

    `model`: any module; the tables of its cdlrm modules are saved with their optimizer state and learning rates.
    `optimizers`: of the dense part, and schedulers or a GradScaler: anything with `state_dict` and `load_state_dict`
    (the tables' own `module.optimizer` is not needed here).  `lookahead`: the running look-ahead, whose position
    behind the batch being trained is saved; without one, `loader`: anything with a `state_dict`.  `extra`: your own
    numbers, strings, lists, dicts, arrays, tensors.  `keep`: complete checkpoints that stay in `directory`.

    Inside a loop call it after the batch's backward and optimizer steps; the run is not disturbed.  Needs about
    100 MB beside the model, whatever the tables' size.  A crash at any moment leaves the last complete checkpoint.
    Parts of tables (16 MiB) in which no row has changed since the newest checkpoint of `directory` are not written
    again if this model (or its file store) wrote or loaded that one last: both folders then have the same file.
    Raises DataError when the files cannot be written, UsageError when the batch is not trained yet or gradients wait
    for the optimizer's step (`update="step"`), ConfigError for settings and values that cannot be saved.
    """
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise ConfigError(f"save(keep={keep!r}): must be an integer, 1 or more.")
    model = _plain(model)
    listed = _stateful(optimizers)
    tables = tables_of(model)
    groups = _distinct(tables)
    position = _position(model, lookahead, loader)
    for group in groups:
        _require_settled(group)
        group.flush()
    identity = secrets.token_hex(16)
    writes = {group: group.store.writes for group in groups}

    def fill(folder: Path) -> None:
        writer = PartWriter(folder)
        packer = Packer(writer)
        linked = link_unchanged(writer, folder.parent, tables)
        content = {
            "id": identity,
            "extra": packer.pack(extra, "extra"),
            "loader": packer.pack(position, "loader"),
            "optimizers": [packer.pack(each.state_dict(), f"optimizers/{i}") for i, each in enumerate(listed)],
            "random": packer.pack(_random_state(), "random"),
            "model": packer.pack(_dense_state(model), "model"),
            "tables": [asdict(write_table(writer, name, *place, linked[name])) for name, place in tables.items()],
        }
        for entry in content["tables"]:
            entry["hyper"] = packer.pack(entry["hyper"], f"hyper/{entry['name']}")
        writer.finish(content)

    folder = write_checkpoint(Path(directory), keep, fill)
    rebase(identity, tables, writes)
    return folder


def load(directory: str | Path, model: nn.Module, *, optimizers: Any = (), loader: Any = None) -> dict[str, Any]:
    """Restore the newest checkpoint of `directory` (or that checkpoint) into `model`; returns `extra` and `loader`.

    `optimizers`: those given to `save`, in the same order (none: their states are left alone).  `loader`: gets the
    saved position by `load_state_dict`; or use the returned `["loader"]`.  The model must have the same tables
    (names, rows, dim, optimizer) and the same dense part; cache size, horizon, depth, shards, store and seed may
    differ (with another seed every never-trained row is written to the store, so for large tables make the model with
    the saved one, `checkpoint_info(directory)["tables"][name]["seed"]`).  Learning rates and torch's, NumPy's and
    Python's random states are restored too.  A look-ahead over the model's tables is closed.

    Raises DataError for files that are missing, damaged or of another version and ConfigError for a model or
    optimizer that does not fit, both before anything is changed.
    """
    parts = Parts(find_checkpoint(Path(directory)))
    content = parts.content
    model = _plain(model)
    tables = tables_of(model)
    groups = _distinct(tables)
    for part in embedding_parts(model).values():
        part.require_open()
    saved = {entry["name"]: SavedTable(**entry) for entry in content["tables"]}
    _check_tables(saved, tables)
    hyper = _hyper_of_groups(saved, tables, parts)
    _check_dense(parts, _dense_state(model))
    listed = _stateful(optimizers)
    if listed and len(listed) != len(content["optimizers"]):
        raise ConfigError(
            f"load(optimizers=…): {len(listed)} were given where the checkpoint has {len(content['optimizers'])}; pass "
            "those that were given to save, in the same order."
        )
    position = unpack(content["loader"], parts)
    if loader is not None and position is None:
        raise ConfigError(
            "load(loader=…): the checkpoint has no position in the data, because it was saved without lookahead= or "
            "loader=, or its loader had no state_dict; leave loader out."
        )
    parts.verify()
    dense = unpack(content["model"], parts)
    states = [unpack(state, parts) for state in content["optimizers"]] if listed else []
    for group in groups:
        if group.attached is not None:
            group.attached.close()
        group.abandon()
    _load_states([*zip(listed, states, strict=True), *([] if loader is None else [(loader, position)])])
    with _without_tables(model):
        model.load_state_dict(dense)
    _restore_tables(parts, saved, tables, hyper)
    for part in embedding_parts(model).values():
        if hasattr(part, "_padding_row"):
            part._padding_row = None  # a copy of a row, made when it is next needed
    _set_random_state(unpack(content["random"], parts))
    return {"extra": unpack(content["extra"], parts), "loader": position}


def checkpoint_info(directory: str | Path) -> dict[str, Any]:
    """What a checkpoint holds, without a model: `path`, `extra`, `loader`, and `tables`: name -> rows, dim,
    optimizer, seed (None where the rows were not made by one).

    Raises DataError when there is no checkpoint, or a damaged one.
    """
    folder = find_checkpoint(Path(directory))
    parts = Parts(folder)
    return {
        "path": folder,
        "extra": unpack(parts.content["extra"], parts),
        "loader": unpack(parts.content["loader"], parts),
        "tables": {
            e["name"]: {
                **{key: e[key] for key in ("rows", "dim", "optimizer")},
                "seed": None if e["generator"] is None else e["generator"]["seed"],
            }
            for e in parts.content["tables"]
        },
    }


# --- the moment of saving ---


def _plain(model: nn.Module) -> nn.Module:
    """The model itself where it was compiled: both have the same checkpoint."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def _distinct(tables: dict[str, tuple[Group, int]]) -> list[Group]:
    return list(dict.fromkeys(group for group, _ in tables.values()))


def _require_settled(group: Group) -> None:
    """No gradient has come that is not in the rows yet."""
    group.settle()
    names = ", ".join(repr(table.name) for table in group.tables[:3])
    if group.deferred is not None:
        if any(call.owner.gradient_scale() is not None for call in group.deferred.calls()):  # None: dropped
            raise UsageError(
                f"save: gradients of {names} wait for the optimizer's step, and a checkpoint does not hold them; call "
                "the module's optimizer.step() first (or its zero_grad(), which drops them)."
            )
    elif group.step is not None and group.step.graded:
        raise UsageError(
            f"save: gradients of {names} wait for a forward call of the same step that has had no backward; call the "
            "module's optimizer.step() (or that backward) first."
        )


def _position(model: nn.Module, lookahead: Lookahead | None, loader: Any) -> Any:
    """State of the loader behind the newest trained batch."""
    embeddings = embedding_parts(model).values()
    if lookahead is None:
        for group in (group for part in embeddings for group in part.groups):
            if loader is not None and group.attached is not None and group.attached.reader.loader is loader:
                raise UsageError(
                    "save: this loader is being read ahead, so its position is beyond the batch being trained; pass "
                    "lookahead= instead of loader=."
                )
        return None if loader is None else loader.state_dict()
    if not isinstance(lookahead, Lookahead):
        raise ConfigError(f"save(lookahead={lookahead!r}): pass what cdlrm.lookahead returned.")
    trained = [group for part in embeddings if part.anchor.requires_grad for group in part.groups]
    steps = [group.step for group in trained if group.attached is not None and group.step is not None]
    if steps and not any(step.used or (step._calls and not step.waiting()) for step in steps):
        raise UsageError(
            "save: the batch that the look-ahead yielded has not been trained, and a resume would leave it out; save "
            "after its backward."
        )
    state = lookahead.state_dict()
    if state is None and hasattr(lookahead.loader, "state_dict"):
        raise UsageError("save: the look-ahead has not yielded a batch yet; save after the first, or pass loader=.")
    return state


def _stateful(optimizers: Any) -> list[Any]:
    """`optimizers` as a list, without those whose state is the tables'."""
    given = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for each in given:
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise ConfigError(f"optimizers: {type(each).__name__} has no state_dict and load_state_dict.")
    return [each for each in given if not isinstance(each, FusedOptimizer)]


# --- the dense part ---


@contextmanager
def _without_tables(model: nn.Module) -> Iterator[None]:
    """Inside, state_dict() and load_state_dict() of `model` pass over our modules, which would copy whole tables."""
    silenced = {id(inner): inner for part in embedding_parts(model).values() for inner in part.modules()}
    hooks = ("_save_to_state_dict", "_load_from_state_dict")
    try:
        for module in silenced.values():
            module.__dict__.update(dict.fromkeys(hooks, _nothing))
        yield
    finally:
        for module in silenced.values():
            for hook in hooks:
                module.__dict__.pop(hook, None)


def _nothing(*arguments: Any) -> None:
    """Takes the place of torch's hooks in our modules."""


def _dense_state(model: nn.Module) -> dict[str, Any]:
    with _without_tables(model):
        return dict(model.state_dict())


def _check_dense(parts: Parts, own: dict[str, Any]) -> None:
    """Raise ConfigError unless the dense part has the saved names, shapes and dtypes."""
    saved = parts.content["model"]
    for key in (*saved, *own):
        if key not in own or key not in saved:
            side = "checkpoint but not in the model" if key in saved else "model but not in the checkpoint"
            raise ConfigError(f"{key!r} is in the {side}; make the model as it was when it was saved.")
        if isinstance(saved[key], dict) and "$tensor" in saved[key] and isinstance(own[key], torch.Tensor):
            entry = parts.content["tensors"][saved[key]["$tensor"]]
            theirs = f"{entry['dtype']} {entry['shape']}"
            mine = f"{str(own[key].dtype).removeprefix('torch.')} {list(own[key].shape)}"
            if theirs != mine:
                raise ConfigError(
                    f"{key!r} is {theirs} in the checkpoint and {mine} in the model; make the model as it was when it "
                    "was saved."
                )


# --- restoring ---


def _check_tables(saved: dict[str, SavedTable], tables: dict[str, tuple[Group, int]]) -> None:
    for name in (*saved, *tables):
        if name not in tables or name not in saved:
            side = "checkpoint but not in the model" if name in saved else "model but not in the checkpoint"
            raise ConfigError(f"table {name!r} is in the {side}; make the model with the same tables.")
    for name, (group, number) in tables.items():
        check_table(saved[name], describe(name, group, number))


def _hyper_of_groups(
    saved: dict[str, SavedTable], tables: dict[str, tuple[Group, int]], parts: Parts
) -> dict[Group, dict[str, Any]]:
    """The learning rate and what belongs to it, of each group; tables of a group must agree."""
    out: dict[Group, tuple[str, dict[str, Any]]] = {}
    for name, (group, _) in tables.items():
        hyper = unpack(saved[name].hyper, parts)
        other, known = out.setdefault(group, (name, hyper))
        if hyper != known:
            raise ConfigError(
                f"tables {other!r} and {name!r} had {known} and {hyper} when they were saved but share one learning "
                "rate here; give them different optimizers."
            )
    return {group: hyper for group, (_, hyper) in out.items()}


def _load_states(pairs: list[tuple[Any, Any]]) -> None:
    """`load_state_dict` of each; when one refuses, those before get their own state back."""
    done: list[tuple[Any, Any]] = []
    try:
        for each, state in pairs:
            before = each.state_dict() if hasattr(each, "state_dict") else None
            each.load_state_dict(state)
            done.append((each, before))
    except Exception as error:
        for changed, before in done:
            changed.load_state_dict(before)
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"load: {type(each).__name__} refuses its saved state ({error}); make it as it was when it was saved."
        ) from error


def _restore_tables(
    parts: Parts, saved: dict[str, SavedTable], tables: dict[str, tuple[Group, int]], hyper: dict[Group, dict[str, Any]]
) -> None:
    with ExitStack() as paused:
        for group in hyper:
            group.flush()
            paused.enter_context(group.cache.pause())
        for name, (group, number) in tables.items():
            restore_table(parts, saved[name], group, number)
        for group, values in hyper.items():
            group.hyper.update(values)
            if not group.in_place:
                group.cache.refresh()
        rebase(parts.content.get("id"), tables)


def _random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
