"""Tables in a checkpoint: trained rows in pieces, all other rows by their generator.

A row that was never trained is a function of (seed, table, row, column), so only the rows that were ever trained
(or set) are written, with their numbers; the manifest names the generator of the others.  A table whose `init` is
the user's own function is written whole.  Nothing here holds more than a few pieces of PART_BYTES at a time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .checkpoint_files import PART_BYTES, Parts, PartWriter, find_checkpoint
from .errors import ConfigError
from .group import Group
from .initial import Initializer
from .normal import Normal

log = logging.getLogger("cdlrm")

BLOCK_ROWS = 1 << 16  # rows that a store is asked for at once
TOLD_BYTES = 1 << 30  # of a table whose rows are all written
ROW_BYTES = 8  # a row's number


@dataclass
class SavedTable:
    """A table's entry in the manifest.

    `pieces`: [lo, hi) table rows each, ascending, together all rows; a piece's tensors are named `tables/NAME/LO/…`:
    `weight` float32 [n, dim], the optimizer's state by torch's names float32 [n, .], and, unless n = hi - lo, `rows`
    int64 [n].
    """

    name: str
    rows: int
    dim: int
    optimizer: dict[str, Any]
    hyper: dict[str, Any]  # the param_group: learning rate, …
    steps: int
    state: dict[str, list[int]]  # columns [start, stop) of the state's parts
    generator: dict[str, Any] | None  # of rows that were never trained; None: every row is written
    pieces: list[list[int]] = field(default_factory=list)

    def initializer(self) -> Initializer:
        assert self.generator is not None
        return _initializer(self.generator, self.rows, self.dim)


# --- which tables a model has ---


def embedding_parts(model: nn.Module) -> dict[str, Any]:
    """This library's embedding modules in `model` by path, each once."""
    return {path: part for path, part in model.named_modules() if hasattr(part, "lookahead_calls")}


def tables_of(model: nn.Module) -> dict[str, tuple[Group, int]]:
    """Name in a checkpoint -> (group, number in the group) of each table of `model`, groups shared by modules once.

    The name is the table's, or its module's path where that would not be unique (several `EmbeddingBag`s).
    """
    found: list[tuple[str, str, Group, int]] = []
    seen: set[int] = set()
    for path, part in embedding_parts(model).items():
        for group in part.groups:
            if id(group) not in seen:
                seen.add(id(group))
                unnamed = len(group.tables) == 1 and group.tables[0].name == type(part).__name__
                for number, table in enumerate(group.tables):
                    found.append((path if unnamed and path else table.name, path, group, number))
    names = [name for name, *_ in found]
    out = {}
    for name, path, group, number in found:
        unique = name if names.count(name) == 1 or not path else f"{path}.{name}"
        if unique in out:
            raise ConfigError(f"two tables of the model have the name {unique!r}; give tables distinct names.")
        out[unique] = (group, number)
    return out


def describe(name: str, group: Group, number: int) -> SavedTable:
    """The entry of a table, without pieces."""
    table, spec = group.tables[number], group.optimizer
    hyper = {key: value for key, value in group.hyper.items() if key not in ("params", "tables")}
    settings = json.loads(json.dumps({"name": spec.name, **asdict(spec)}))
    columns = {key: list(span) for key, span in spec.state_names(group.dim).items()}
    return SavedTable(
        name, table.num_embeddings, group.dim, settings, hyper, int(group.table_steps[number]), columns,
        _generator(group, number),
    )  # fmt: skip


def _generator(group: Group, number: int) -> dict[str, Any] | None:
    """What makes the rows of a table that were never trained; None if it cannot be named."""
    table, initializer = group.tables[number], getattr(group.store, "initializer", None)
    if not isinstance(initializer, Initializer):
        return None
    if isinstance(table.init, Normal):
        made = {"kind": "normal", "seed": int(table.init.seed), "table": int(table.init.table)}
    elif table.init is None:
        low, high = initializer._key
        made = {"kind": "uniform", "seed": int(low) | int(high) << 32, "table": int(initializer._tables[number])}
    else:
        return None
    rows = np.array([0, table.num_embeddings - 1], np.int64)
    mine, theirs = np.empty((2, group.dim), np.float32), np.empty((2, group.dim), np.float32)
    _initializer(made, table.num_embeddings, group.dim).rows(mine, None, rows)
    initializer.rows(theirs, None, rows + group.bases[number])
    return made if mine.tobytes() == theirs.tobytes() else None  # never name a generator that gives other values


def _initializer(generator: dict[str, Any], rows: int, dim: int) -> Initializer:
    seed, table = generator["seed"], generator["table"]
    init = Normal(seed, table) if generator["kind"] == "normal" else None
    return Initializer(np.array([0, rows]), [init], seed, dim, [table])


# --- writing ---


def write_table(writer: PartWriter, name: str, group: Group, number: int, linked: Collection[int] = ()) -> SavedTable:
    """Write the trained rows of a table whose group was flushed, except the pieces that begin at `linked` rows, which
    `writer` has already; its entry for the manifest."""
    saved = describe(name, group, number)
    bits = None if saved.generator is None else group.store.trained
    base = int(group.bases[number])
    for lo, hi in piece_ranges(group, saved.rows):
        if lo not in linked:
            _write_piece(writer, saved, group, base, marked(bits, base + lo, base + hi), lo, hi)
        saved.pieces.append([lo, hi])
    return saved


def piece_ranges(group: Group, rows: int) -> Iterator[tuple[int, int]]:
    """[lo, hi) of each piece of a table: no more than a part takes if all of it is trained, so that it is the same
    in each checkpoint."""
    most = max(PART_BYTES // (group.store.record_bytes + ROW_BYTES), 1)
    for lo in range(0, rows, most):
        yield lo, min(lo + most, rows)


def _write_piece(
    writer: PartWriter, saved: SavedTable, group: Group, base: int, rows: np.ndarray, lo: int, hi: int
) -> None:
    weight, state = _read(group, rows)
    tensors = {"weight": torch.from_numpy(weight)}
    for key, (start, stop) in saved.state.items():
        tensors[key] = torch.from_numpy(np.ascontiguousarray(state[:, start:stop]))
    if rows.size != hi - lo:
        tensors["rows"] = torch.from_numpy(rows - base)
    del weight, state  # not beside a part that is written now
    writer.add({f"tables/{saved.name}/{lo}/{key}": tensor for key, tensor in tensors.items()})


def marked(bits: np.ndarray | None, lo: int, hi: int) -> np.ndarray:
    """Rows of [lo, hi) whose bit is set (None: all), int64."""
    if bits is None:
        return np.arange(lo, hi, dtype=np.int64)
    flags = np.unpackbits(bits[lo >> 3 : (hi + 7) >> 3], bitorder="little")
    return np.flatnonzero(flags[lo & 7 : (lo & 7) + hi - lo]) + lo


def _read(group: Group, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weight = np.empty((rows.size, group.dim), np.float32)
    state = np.empty((rows.size, group.store.state_width), np.float32)
    with group.cache.pause():
        for at, part in _blocks(rows):
            group.store.read(part, weight, state, np.arange(at, at + part.size, dtype=np.int32))
    return weight, state


def _blocks(rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for at in range(0, rows.size, BLOCK_ROWS):
        yield at, rows[at : at + BLOCK_ROWS]


# --- restoring ---


def check_table(saved: SavedTable, own: SavedTable) -> None:
    """Raise ConfigError unless a table of the model is what was saved (its learning rate is restored)."""
    if (saved.rows, saved.dim) != (own.rows, own.dim):
        raise ConfigError(
            f"table {saved.name!r}: the checkpoint has {saved.rows} rows of dim {saved.dim} where the model has "
            f"{own.rows} rows of dim {own.dim}; make the model with the same tables."
        )
    theirs, mine = ({k: v for k, v in table.optimizer.items() if k != "lr"} for table in (saved, own))
    if theirs != mine:
        raise ConfigError(
            f"table {saved.name!r}: the checkpoint's optimizer is {_spec(theirs)} where the model's is {_spec(mine)}; "
            "make the model with the same optimizer."
        )


def _spec(settings: dict[str, Any]) -> str:
    inner = ", ".join(f"{key}={value}" for key, value in settings.items() if key != "name")
    return f"{settings['name']}({inner})"


def restore_table(parts: Parts, saved: SavedTable, group: Group, number: int) -> None:
    """Give every row of a table its saved record.  The group was flushed, its cache is paused and refreshed later."""
    base = int(group.bases[number])
    same = saved.generator is not None and saved.generator == _generator(group, number)
    bits = group.store.trained if same else None
    size = saved.rows * group.store.record_bytes
    if saved.generator is not None and not same and size >= TOLD_BYTES:
        log.warning(
            "table %r: the module's initial rows are others than the checkpoint's, so all %.1f GiB of it are written; "
            "of a module that was made with seed=%d only the trained rows are", saved.name, size / 2**30,
            saved.generator["seed"],
        )  # fmt: skip
    for lo, hi in saved.pieces:
        _restore_piece(parts, saved, group, base, bits, lo, hi)
    group.set_table_steps(number, saved.steps)


def _restore_piece(
    parts: Parts, saved: SavedTable, group: Group, base: int, bits: np.ndarray | None, lo: int, hi: int
) -> None:
    """`bits`: rows that the store may not hold as they were made; None: any."""
    rows, weight = _piece(parts, saved, lo, hi)
    if rows.size != hi - lo:
        _reset(saved, group, base, bits, lo, hi, rows)
    state = np.empty((rows.size, group.store.state_width), np.float32)
    for key, (start, stop) in saved.state.items():
        state[:, start:stop] = parts.get(f"tables/{saved.name}/{lo}/{key}").numpy()
    for at, part in _blocks(rows):
        group.store.write(part + base, weight, state, np.arange(at, at + part.size, dtype=np.int32))


def _reset(
    saved: SavedTable, group: Group, base: int, bits: np.ndarray | None, lo: int, hi: int, written: np.ndarray
) -> None:
    """Initial records for the rows of [lo, hi) that were not written, where the store would give others."""
    initializer = saved.initializer()
    for at in range(lo, hi, BLOCK_ROWS):
        stop = min(at + BLOCK_ROWS, hi)
        first, last = np.searchsorted(written, (at, stop))
        rows = np.setdiff1d(marked(bits, at + base, stop + base) - base, written[first:last], assume_unique=True)
        if rows.size:
            weight = np.empty((rows.size, group.dim), np.float32)
            initializer.rows(weight, None, rows)
            state = np.full((rows.size, group.store.state_width), group.optimizer.initial_state, np.float32)
            group.store.write(rows + base, weight, state, np.arange(rows.size, dtype=np.int32))


def _piece(parts: Parts, saved: SavedTable, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
    """Table rows int64 [n] of a piece and their weights."""
    weight = parts.get(f"tables/{saved.name}/{lo}/weight").numpy()
    if weight.shape[0] == hi - lo:
        return np.arange(lo, hi, dtype=np.int64), weight
    return parts.get(f"tables/{saved.name}/{lo}/rows").numpy(), weight


# --- serving ---


class SavedTables(Mapping[str, Tensor]):
    """The tables of a checkpoint: name -> float32 [rows, dim], read (never-trained rows: generated) when asked for.

    `pieces` reads a table a few MiB at a time.  Nothing is kept in memory.  Raises DataError for damaged files.
    """

    def __init__(self, folder: Path, names: Iterable[str] | None) -> None:
        self._parts = Parts(folder)
        known = {entry["name"]: SavedTable(**entry) for entry in self._parts.content["tables"]}
        wanted = list(known) if names is None else [names] if isinstance(names, str) else list(names)
        for name in wanted:
            if name not in known:
                raise ConfigError(f"{folder}: has no table {name!r}; its tables are {', '.join(map(repr, known))}.")
        self._tables = {name: known[name] for name in wanted}

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name)

    def shape(self, name: str) -> tuple[int, int]:
        """(rows, dim) of a table."""
        return self._tables[name].rows, self._tables[name].dim

    def rows(self, name: str, lo: int = 0, hi: int | None = None) -> Tensor:
        """Rows [lo, hi) of a table, float32 [hi - lo, dim]."""
        lo, hi = self._range(name, lo, hi)
        out = torch.empty((hi - lo, self._tables[name].dim))
        for at, values in self.pieces(name, lo, hi):
            out[at - lo : at - lo + len(values)] = values
        return out

    def pieces(self, name: str, lo: int = 0, hi: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """(first row, float32 [n, dim]) of consecutive rows, together [lo, hi); each at most 16 MiB."""
        saved = self._tables[name]
        lo, hi = self._range(name, lo, hi)
        most = max(PART_BYTES // (4 * saved.dim), 1)
        for first, last in saved.pieces:
            start, stop = max(first, lo), min(last, hi)
            if start >= stop:
                continue
            rows, weight = _piece(self._parts, saved, first, last)
            for at in range(start, stop, most):
                end = min(at + most, stop)
                a, b = np.searchsorted(rows, (at, end))
                out = np.empty((end - at, saved.dim), np.float32)
                if b - a != end - at:
                    saved.initializer().fill(out, at, end)
                out[rows[a:b] - at] = weight[a:b]
                yield at, torch.from_numpy(out)

    def _range(self, name: str, lo: int, hi: int | None) -> tuple[int, int]:
        rows = self._tables[name].rows
        hi = rows if hi is None else hi
        if not 0 <= lo <= hi <= rows:
            raise ConfigError(f"table {name!r}: rows [{lo}, {hi}) are not within [0, {rows}).")
        return lo, hi


def load_tables(directory: str | Path, names: Iterable[str] | None = None) -> SavedTables:
    """The tables (`names`: only these) of the newest checkpoint in `directory`, or of that checkpoint, for serving.

    A mapping name -> float32 tensor [rows, dim], read from the files when asked for; `dict(load_tables(d))` reads
    all, `.rows(name, lo, hi)` and `.pieces(name)` a part.  Needs no model.  Raises DataError for files that are
    missing or damaged, ConfigError for a name that is not there.
    """
    return SavedTables(find_checkpoint(Path(directory)), names)


def iter_tables(directory: str | Path, names: Iterable[str] | None = None) -> Iterator[tuple[str, int, Tensor]]:
    """(table, first row, float32 [n, dim]) of all tables (or `names`), table after table, row after row, at most
    16 MiB at a time.  Raises as `load_tables`."""
    tables = load_tables(directory, names)
    for name in tables:
        for lo, values in tables.pieces(name):
            yield name, lo, values
