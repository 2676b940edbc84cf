"""From tables to groups: which there are, which are resident, how many slots the others get, where they live."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .driver.base import Driver
from .driver.choose import Chosen, choose
from .driver.cpu import CpuDriver
from .errors import ConfigError
from .group import Group
from .initial import Initializer
from .machine import available_bytes
from .optim import Optimizer
from .plan.planner import MAX_SLOTS
from .store import Store, open_store, seed_in
from .table import Table

log = logging.getLogger("cdlrm")

UPDATES = ("backward", "step")
RESERVE = 0.25  # of the available memory is left to everything else


_MEASURED: dict[Any, Any] = {}  # how rows travel best, by GPU and width


def _cuda(chosen: Chosen) -> Driver:
    from .driver.cuda import CudaBackend
    from .driver.gpu import GpuDriver

    return GpuDriver(CudaBackend(chosen.gpu or 0), why=chosen.reason, measured=_MEASURED)


DRIVERS: dict[str, Callable[[Chosen], Driver]] = {"cpu": lambda chosen: CpuDriver(), "cuda": _cuda}
"""How the driver of each kind of device is made."""


def choose_driver(device: str | torch.device | None, progress: bool = True) -> Driver:
    """The driver of `device`; see `cdlrm.driver.choose`.  Raises ConfigError for one that does not exist here.
    `progress`: it may show a bar at work that takes seconds."""
    chosen = choose(device)
    driver = DRIVERS[chosen.kind](chosen)
    driver.progress = progress
    return driver


def choose_seed(seed: int | None, store: str, fresh: bool = False, used: bool = True) -> int:
    """`seed`, or for None: that of the rows that `store` has already (unless `fresh` discards them), else one drawn
    from torch's default CPU generator, as torch's modules draw their values there.  `used=False`: every row gets
    another value anyway, so nothing is drawn."""
    if seed is not None:
        return seed
    found = None if fresh else seed_in(store)
    if found is not None:
        return found
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_()) if used else 0


def split_groups(tables: Sequence[Table], optimizers: Sequence[Optimizer]) -> list[list[int]]:
    """Numbers of the tables of each group: equal dim, optimizer and residency, in order of first use."""
    groups: dict[tuple[int, Optimizer, bool], list[int]] = {}
    for number, (table, optimizer) in enumerate(zip(tables, optimizers, strict=True)):
        groups.setdefault((table.embedding_dim, optimizer, table.resident), []).append(number)
    return list(groups.values())


def check_cache_settings(cache_rows: int | str, cache_ratio: float | None) -> None:
    """Raise ConfigError unless at most one of the two is given and it can work."""
    if cache_ratio is not None:
        if cache_rows != "auto":
            raise ConfigError(f"cache_rows={cache_rows!r} and cache_ratio={cache_ratio!r}: give one of the two.")
        if not isinstance(cache_ratio, (int, float)) or isinstance(cache_ratio, bool) or not 0 < cache_ratio <= 1:
            raise ConfigError(f"cache_ratio={cache_ratio!r}: must be above 0 and at most 1 (1 = all rows).")
    elif cache_rows != "auto":
        if not isinstance(cache_rows, int) or isinstance(cache_rows, bool) or cache_rows < 1:
            raise ConfigError(f'cache_rows={cache_rows!r}: must be "auto" or an integer, 1 or more.')


def place(
    rows: Sequence[int], record_bytes: Sequence[int], cache_rows: int | str, cache_ratio: float | None, store: str,
    driver: Driver,
) -> tuple[list[int], list[str]]:  # fmt: skip
    """Slots of each group (as many as its rows = resident), and what was chosen automatically and why.

    `rows` and `record_bytes` of each group that is not resident by request.  `cache_rows` are shared
    among the groups in proportion to their rows.
    """
    total = sum(rows)
    if cache_ratio is not None:
        return [max(1, math.ceil(n * cache_ratio)) for n in rows], []
    if cache_rows != "auto":
        wanted = int(cache_rows)
        return [min(n, max(1, wanted * n // max(total, 1))) for n in rows], []
    need = sum(n * size for n, size in zip(rows, record_bytes, strict=True))
    have, kind = driver.free_bytes(), "host" if driver.in_place else driver.name
    usable = int(have * (1 - RESERVE))
    told = f"{need / 2**30:.2f} GiB of records, {have / 2**30:.2f} GiB of {kind} memory available"
    if need <= usable:
        return list(rows), [f"cache_rows=auto: everything is resident ({told}, {RESERVE:.0%} reserved)."]
    if store == "ram" and not driver.in_place and need <= available_bytes():
        slots = [max(1, int(n * usable / need)) for n in rows]
        return slots, [f"cache_rows=auto: {sum(slots)} of {total} rows are cached ({told}, {RESERVE:.0%} reserved)."]
    if store != "ram":
        slots = [max(1, int(n * usable / 2 / max(need, 1))) for n in rows]
        chosen = f"{sum(slots)} of {total} rows are cached in half of the usable memory"
        return slots, [f"cache_rows=auto: {chosen} ({told})."]
    raise ConfigError(
        f"the tables do not fit the host memory: {told}, of which {RESERVE:.0%} stay reserved; use "
        f'store="file:DIR", fewer rows, a smaller dim, or an optimizer with less state.'
    )


def make_groups(
    tables: Sequence[Table],
    optimizers: Sequence[Optimizer],
    *,
    cache_rows: int | str,
    cache_ratio: float | None,
    driver: Driver,
    store: str,
    strict: bool,
    seed: int,
    shards: int | None,
    update: str,
    fresh: bool = False,
) -> tuple[list[Group], list[str]]:
    """The groups of `tables`, and what was chosen automatically and why."""
    if shards is not None and (isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= 256):
        raise ConfigError(f"shards={shards!r}: must be an integer within [1, 256].")
    if not isinstance(strict, bool):
        raise ConfigError(f"strict={strict!r}: must be True or False.")
    if update not in UPDATES:
        raise ConfigError(f"update={update!r}: must be one of {', '.join(UPDATES)}.")
    members = split_groups(tables, optimizers)
    rows = [sum(tables[n].num_embeddings for n in numbers) for numbers in members]
    free = [i for i, numbers in enumerate(members) if not tables[numbers[0]].resident]
    sizes = []
    for i in free:
        dim = tables[members[i][0]].embedding_dim
        sizes.append(4 * (dim + optimizers[members[i][0]].state_width(dim)))
    slots = dict(enumerate(rows))
    notes: list[str] = []
    if free:
        chosen, notes = place([rows[i] for i in free], sizes, cache_rows, cache_ratio, store, driver)
        slots.update(zip(free, chosen, strict=True))
    if store == "ram":
        widths = {(tables[m[0]].embedding_dim, optimizers[m[0]]) for m in members}
        driver.prepare([(dim, optimizer.state_width(dim)) for dim, optimizer in widths])
    try:
        return _build(
            tables, optimizers, members, rows, slots, free, notes, driver, store, strict, seed, shards, update, fresh
        )
    except MemoryError:
        raise ConfigError(
            f"the tables have {sum(rows):,} rows, for which the host memory ({available_bytes() / 2**30:.1f} GiB "
            f'available) does not suffice; use fewer rows (--table-rows), a smaller dim, or store="file:DIR".'
        ) from None


def _build(
    tables: Sequence[Table],
    optimizers: Sequence[Optimizer],
    members: list[list[int]],
    rows: list[int],
    slots: dict[int, int],
    free: list[int],
    notes: list[str],
    driver: Driver,
    store: str,
    strict: bool,
    seed: int,
    shards: int | None,
    update: str,
    fresh: bool,
) -> tuple[list[Group], list[str]]:
    """The groups with their stores; adds to `notes`.  Raises MemoryError where they do not fit."""
    groups = []
    for i, numbers in enumerate(members):
        optimizer = optimizers[numbers[0]]
        own = [tables[n] for n in numbers]
        home = _store(store, i, own, numbers, optimizer, driver, seed, fresh)
        if home.kind == "file" and home.trained.any():
            kept = int(np.bitwise_count(home.trained).sum())
            notes.append(
                f"store={store}: the folder was there already and {kept} of its rows are trained; they are kept (use "
                f"another folder, or delete it, to start afresh)."
            )
            log.warning(notes[-1])
        # a file's rows are never all on the device in place: its cache may hold all, but as a cache
        resident = slots[i] >= rows[i] and home.kind == "ram" and rows[i] < MAX_SLOTS
        groups.append(
            Group(
                own, optimizer, driver, home, cache_rows=slots[i], resident=resident, strict=strict, shards=shards,
                deferred=update == "step", share=rows[i] / sum(rows[k] for k in free) if i in free else 1.0,
            )
        )
    return groups, notes


def _store(
    spec: str,
    group: int,
    tables: Sequence[Table],
    numbers: Sequence[int],
    optimizer: Optimizer,
    driver: Driver,
    seed: int,
    fresh: bool,
) -> Store:
    bases = np.concatenate([[0], np.cumsum([table.num_embeddings for table in tables])]).astype(np.int64)
    dim = tables[0].embedding_dim
    names = [table.name for table in tables]
    initializer = Initializer(bases, [table.init for table in tables], seed, dim, numbers, names)
    return open_store(spec, group, tables, optimizer, initializer, driver, seed, fresh)
