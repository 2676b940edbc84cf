"""Two published text layouts as sources, for `cdlrm convert --layout`: Alimama's samples and Amazon's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numba import njit

from cdlrm.data import tsv
from cdlrm.data.columnar import ColumnarSource
from cdlrm.data.hashing import mix64
from cdlrm.data.prepared import Prepared
from cdlrm.data.tsvkernel import count_lines
from cdlrm.errors import ConfigError, DataError

__all__ = ["AlimamaSource", "AmazonSource"]


class AlimamaSource(ColumnarSource):
    """Comma-separated lines of 267 numbers, as the examples of Deep Match to Rank (DMR, AAAI 2020) have them: three
    histories of 50 (behaviour, category, brand; 0 = padding, dropped), two masks of 50 that repeat what is padding
    and are not read, 15 single numbers, the price among them (used as it is: it is
    scaled to [0, 1] already), and the label. Ids are row numbers."""

    format = "alimama"
    column_settings = ()
    histories = {"btag_his": 0, "cate_his": 50, "brand_his": 100}
    singles = (
        "userid cms_segid cms_group_id final_gender_code age_level pvalue_level shopping_level occupation "
        "new_user_class_level adgroup_id cate_id campaign_id customer brand price pid label"
    ).split()
    _length, _first_single = 50, 250

    def _open(self, columns: dict[str, Any]) -> None:
        super()._open({"padding": 0})

    def _open_file(self, file: str) -> str:
        return file

    def _prepared(self, file: str) -> Prepared | None:
        sparse = [*self.histories, *(name for name in self.singles if name not in ("price", "label"))]
        return Prepared("label", ["price"], sparse, numbered=True, dense_ready=True)

    def _schema_of(self, reader: str) -> pa.Schema:
        lists = [(name, pa.list_(pa.int64(), self._length)) for name in self.histories]
        kinds = {"price": pa.float64()}
        return pa.schema([*lists, *((name, kinds.get(name, pa.int64())) for name in self.singles)])

    def _sizes(self, reader: str) -> tuple[int, list[int | None]]:
        counts: list[int | None] = []
        rows, piece = 0, 0
        while len(lines := tsv.plain_lines(reader, piece)) or piece == 0:
            counts.append(int(count_lines(lines)))
            rows, piece = rows + counts[-1], piece + 1  # type: ignore[operator]
        return rows, counts

    def _read(self, reader: str, block: int, columns: list[str]) -> pa.Table:
        width = self._first_single + len(self.singles)
        names = [str(i) for i in range(width)]
        at = {name: str(self._first_single + i) for i, name in enumerate(self.singles)}
        needed = [str(first + i) for first in self.histories.values() for i in range(self._length)]
        kinds = {i: pa.int64() for i in [*needed, *at.values()]} | {at["price"]: pa.float64()}
        table = pa.csv.read_csv(
            pa.py_buffer(tsv.plain_lines(reader, block)),
            read_options=pa.csv.ReadOptions(column_names=names),
            convert_options=pa.csv.ConvertOptions(column_types=kinds, include_columns=list(kinds)),
        )
        arrays = {}
        for name in columns:
            if name in at:
                arrays[name] = table.column(at[name])
            else:
                first = self.histories[name]
                lines = [table.column(str(first + i)).to_numpy() for i in range(self._length)]
                flat = np.stack(lines, axis=1).astype(np.int64).ravel()
                arrays[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat), self._length)
        return pa.table(arrays)


class AmazonSource(ColumnarSource):
    """Lines "user item" in time order -> samples of next-item prediction: `history` (up to `history` items before),
    `item`, `user`, label 1; and after each, `negatives` samples with the same user and history, label 0, and an item
    drawn uniformly from all items that the user has nowhere in the file, by (seed, position) alone.

    split: "train" (all items of a user but the first, which has no history, and the last), "test" (the last item of
    each user: leave-one-out), or "all". Ids are row numbers, 0 = missing. All pairs are held in memory (40 bytes each).
    """

    format = "amazon"
    column_settings = ("history", "negatives", "split", "seed")

    def _open(self, columns: dict[str, Any]) -> None:
        self.history, self.negatives = int(columns.get("history", 50)), int(columns.get("negatives", 1))
        self.split, self.draw_seed = columns.get("split", "all"), int(columns.get("seed", 0))
        for name, value, low, high in (
            ("history", self.history, 1, 10000),
            ("negatives", self.negatives, 0, 1000),
            ("seed", self.draw_seed, 0, 2**63 - 1),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}, outside [{low}, {high}]; change it")
        if self.split not in ("train", "test", "all"):
            raise ConfigError(f"split is {self.split!r} where train, test or all is needed; change it")
        super()._open({})

    def _prepared(self, file: str) -> Prepared | None:
        with self._readers.of(file, self._open_file) as pairs:
            items, users = 1 + int(pairs.items[-1]), 1 + int(pairs.user.max())
        counts = {"history": items, "item": items, "user": users}
        return Prepared("label", [], list(counts), numbered=True, counts=counts)

    def _open_file(self, file: str) -> _Pairs:
        return _Pairs(file, self.split)

    def _schema_of(self, reader: _Pairs) -> pa.Schema:
        whole = pa.int64()
        return pa.schema([("label", whole), ("history", pa.list_(whole)), ("item", whole), ("user", whole)])

    @property
    def _block_targets(self) -> int:
        return max(1, 65536 // (1 + self.negatives))

    def _sizes(self, reader: _Pairs) -> tuple[int, list[int | None]]:
        step, each = self._block_targets, 1 + self.negatives
        targets = len(reader.targets)
        counts: list[int | None] = [each * min(step, targets - lo) for lo in range(0, targets, step)]
        return each * targets, counts

    def _read(self, reader: _Pairs, block: int, columns: list[str]) -> pa.Table:
        each = 1 + self.negatives
        targets = reader.targets[block * self._block_targets : (block + 1) * self._block_targets]
        first = reader.first[targets]
        lengths = np.repeat(np.minimum(targets - first, self.history), each)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        start = np.repeat(targets, each) - lengths
        history = reader.item[np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], lengths)]
        item = np.empty(len(targets) * each, np.int64)
        _draw(targets, reader.item, reader.own, first, reader.last[targets], reader.items, self.draw_seed, each, item)
        label = np.zeros(len(item), np.int64)
        label[::each] = 1
        arrays = {
            "label": pa.array(label),
            "history": pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(history)),
            "item": pa.array(item),
            "user": pa.array(np.repeat(reader.user[targets], each)),
        }
        return pa.table({name: arrays[name] for name in columns})

    def settings(self) -> dict[str, Any]:
        mine = {"history": self.history, "negatives": self.negatives, "split": self.split, "draw": self.draw_seed}
        return {**super().settings(), **mine}


class _Pairs:
    """The pairs of a file, grouped by user in the file's order. user, item: int64 [P]; first, last: where the user's
    pairs begin and end (exclusive), int64 [P]; own: the user's items, sorted, at the same places; items: all distinct
    items, sorted; targets: positions that become samples."""

    def __init__(self, file: str, split: str) -> None:
        table = pa.csv.read_csv(
            file,
            read_options=pa.csv.ReadOptions(column_names=["user", "item"]),
            parse_options=pa.csv.ParseOptions(delimiter=" "),
            convert_options=pa.csv.ConvertOptions(column_types={"user": pa.int64(), "item": pa.int64()}),
        )
        if table.column(0).null_count or table.column(1).null_count:
            raise DataError(f"{file}: a number is missing in a line; give lines of two whole numbers, user and item")
        user, item = table.column(0).to_numpy(), table.column(1).to_numpy()
        if min(user.min(), item.min()) < 0:
            raise DataError(f"{file}: a number is negative; give lines of two whole numbers from 0, user and item")
        order = np.argsort(user, kind="stable")
        self.user, self.item = user[order], item[order]
        starts = np.flatnonzero(np.diff(self.user, prepend=-1))
        lengths = np.diff(np.append(starts, len(user)))
        self.first, self.last = np.repeat(starts, lengths), np.repeat(starts + lengths, lengths)
        self.own = self.item[np.lexsort((self.item, self.user))]
        self.items = np.unique(self.item)
        if lengths.max() >= len(self.items):
            busiest = int(np.argmax(lengths))
            if len(np.unique(self.item[starts[busiest] : starts[busiest] + lengths[busiest]])) == len(self.items):
                raise DataError(f"{file}: user {self.user[starts[busiest]]} has all items, so none is left to draw")
        place = np.arange(len(user))
        is_last, is_first = place == self.last - 1, place == self.first
        wanted = {"train": ~is_first & ~is_last, "test": ~is_first & is_last, "all": ~is_first}[split]
        self.targets = np.flatnonzero(wanted)
        if not len(self.targets):
            raise DataError(f"{file}: no user has enough items for split '{split}'; give longer sequences")


@njit(cache=True, nogil=True)
def _draw(
    targets: np.ndarray,
    item: np.ndarray,
    own: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    items: np.ndarray,
    seed: int,
    each: int,
    out: np.ndarray,
) -> None:
    """out [T * each]: each target's item and each - 1 items that are not among own[first:last]."""
    for t in range(len(targets)):
        out[t * each] = item[targets[t]]
        word = mix64(mix64(np.uint64(seed)) ^ np.uint64(targets[t]))
        for k in range(1, each):
            while True:
                word = mix64(word)
                drawn = items[np.int64(word % np.uint64(len(items)))]
                at = first[t] + np.searchsorted(own[first[t] : last[t]], drawn)
                if at == last[t] or own[at] != drawn:
                    break
            out[t * each + k] = drawn


LAYOUTS: dict[str, type[ColumnarSource]] = {"alimama": AlimamaSource, "amazon": AmazonSource}


def open_layout(layout: str, files: Sequence[str], **settings: Any) -> ColumnarSource:
    """A source over text files of one of `LAYOUTS`."""
    return LAYOUTS[layout](files, **settings)
