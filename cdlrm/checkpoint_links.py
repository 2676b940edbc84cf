"""Parts of the last checkpoint that are still right: linked into the next one instead of being written again.

A store's `changed` bits are relative to one checkpoint, its *base*: a row whose bit is clear has the record that is
there.  The base is named by a random id, which only that one checkpoint's manifest has, so bits are never held
against another: after a save elsewhere, or where the newest checkpoint of the folder is not the base, all is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import checkpoint_files
from .checkpoint_files import Parts, PartWriter, checkpoints
from .checkpoint_tables import SavedTable, describe, marked, piece_ranges
from .errors import DataError
from .group import Group

Tables = Mapping[str, tuple[Group, int]]  # by name in the checkpoint: group, number in the group


def rebase(identity: str | None, tables: Tables, writes: Mapping[Group, int] | None = None) -> None:
    """All records of `tables` are in the checkpoint `identity` (None: one without an id) as they are now.

    `writes`: what the stores' counters were when the records were read; a store that was written since is left alone.
    """
    for group in dict.fromkeys(group for group, _ in tables.values()):
        names = [name for name, (other, _) in tables.items() if other is group]
        with group.cache.pause():
            if writes is None or group.store.writes == writes[group]:
                group.store.clear_changed(None if identity is None else {"id": identity, "tables": names})


def link_unchanged(writer: PartWriter, directory: Path, tables: Tables) -> dict[str, set[int]]:
    """Link the files of the newest checkpoint of `directory` of which every row is still right.

    Returns the first rows of the pieces that are in them, by table.  Files below a quarter of PART_BYTES are left
    out, so that many saves do not end in many small files.
    """
    linked: dict[str, set[int]] = {name: set() for name in tables}
    found = checkpoints(directory)
    try:
        earlier = Parts(found[-1]) if found else None
    except DataError:  # it is damaged: nothing is taken from it
        earlier = None
    if earlier is None:
        return linked
    right = _unchanged_tensors(earlier.content, tables)
    inside: dict[int, list[str]] = {}
    for tensor, entry in earlier.content["tensors"].items():
        inside.setdefault(entry["file"], []).append(tensor)
    for number, tensors in inside.items():
        large = earlier.content["files"][number]["bytes"] >= checkpoint_files.PART_BYTES // 4
        if large and all(tensor in right for tensor in tensors) and writer.link(earlier, number, tensors):
            for tensor in tensors:
                name, lo = right[tensor]
                linked[name].add(lo)
    return linked


def _unchanged_tensors(content: dict[str, Any], tables: Tables) -> dict[str, tuple[str, int]]:
    """Tensors of a checkpoint that would be written again as they are -> their table and its first row."""
    saved = {entry["name"]: SavedTable(**entry) for entry in content["tables"]}
    right: dict[str, tuple[str, int]] = {}
    for name, (group, number) in tables.items():
        base = group.store.saved.get("base")
        if base is None or base["id"] != content.get("id") or base["tables"][number] != name:
            continue
        then, now = saved[name], describe(name, group, number)
        # the rows that are not in a piece are right only by the same generator
        if any(getattr(then, key) != getattr(now, key) for key in ("rows", "dim", "state", "generator")):
            continue
        first, pieces = int(group.bases[number]), set(map(tuple, then.pieces))
        for lo, hi in piece_ranges(group, now.rows):
            if (lo, hi) in pieces and not marked(group.store.changed, first + lo, first + hi).size:
                right.update({f"tables/{name}/{lo}/{key}": (name, lo) for key in ("weight", "rows", *now.state)})
    return right
