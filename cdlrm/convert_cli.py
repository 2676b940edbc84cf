"""`cdlrm convert`: any source into Parquet."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from .errors import ConfigError

ABOUT = """\
Convert samples of any format into one Parquet file with flat columns (lists only where a feature has several ids).
Reading it is several times faster than text, and it says itself how it is read: names of columns, table sizes.
Memory does not grow with the data. A conversion that was stopped goes on where it was: repeat the command.
"""

FORMATS = """\
input formats, by the ending of the names (folders and quoted globs are fine; one format at a time):
  .tsv .txt none   Criteo's text: label, 13 integers, 26 hexadecimal ids, TAB between; .gz and .zst are unpacked
                   while reading, also by `cdlrm train`, where --shuffle then takes files in any order but not blocks
  .parquet .orc    columns label, i1…, c1… or as named; lists are multi-hot; --padding drops what fills them up
  .npz             DLRM's data_utils.py: X_int, X_cat, y, counts; or a file a day, counts in *_fea_count.npz beside
  .bin             MLPerf: 40 little-endian int32 a row (label, 13 integers, 26 row numbers)
  .npy             TorchRec: X_dense.npy, X_sparse.npy, X_labels.npy; dense values are used as they are
  --layout alimama 267 comma-separated numbers: three histories of 50 (0 = padding), 15 ids, price, label
  --layout amazon  lines "user item" in time order -> history, item, user; negatives are drawn, see below

ids:
  Without a vocabulary ids stay as they are (training hashes them; row numbers of .npz, .bin and the layouts are kept).
  --vocabulary numbers them column by column in the order of first occurrence, as DLRM does; row 0 is for missing
  and rare ones. It is left in OUT.parquet.vocabulary; --use-vocabulary gives test data the same numbers, and row 0
  to ids that are not in it. `cdlrm train` then takes the sizes of the tables from the file.
"""

EXAMPLES = """\
examples:
  cdlrm convert day_0.gz day_1.gz days.parquet
  cdlrm convert 'day_[0-5].gz' train.parquet --vocabulary --min-count 5
  cdlrm convert day_6.gz test.parquet --use-vocabulary train.parquet
  cdlrm train --data train.parquet --test-data test.parquet
  cdlrm convert criteo_tb_orc criteo.parquet --vocabulary
  cdlrm convert --layout alimama alimama_dmr_500.csv alimama.parquet
  cdlrm train --data alimama.parquet --pooling mean --mini-batch-size 64
  cdlrm convert --layout amazon --split train --negatives 4 amazon_video_games_seq.txt train.parquet
  cdlrm convert --layout amazon --split test --negatives 100 amazon_video_games_seq.txt test.parquet
  cdlrm convert kaggleAdDisplayChallenge_processed.npz kaggle.parquet
"""


def add_convert(commands: Any) -> None:
    """Register the command with argparse's subparsers."""
    parser = commands.add_parser(
        "convert",
        usage="cdlrm convert IN [IN …] OUT.parquet [flags]",
        help="any format to Parquet, with or without a vocabulary",
        description=ABOUT,
        epilog=FORMATS + "\n" + EXAMPLES,
    )
    parser.set_defaults(command=run_convert, parser=parser)
    add = parser.add_argument
    names = "files, folders or globs to read, and the file to write"
    paths = add("paths", nargs="+", metavar="IN… OUT.parquet", help=names)
    paths.required, paths.default = False, []  # their absence gets a sentence of `_check_paths`
    add("--vocabulary", action="store_true", help="number the ids, and keep the numbering in OUT.parquet.vocabulary")
    add("--min-count", type=int, default=1, metavar="N", help="with --vocabulary: ids seen fewer times get row 0")
    add("--use-vocabulary", metavar="FILE", help="number the ids by that vocabulary (or the Parquet file beside it)")
    add("--bad-rows", choices=("raise", "skip"), default="raise", help="what a malformed row does (default: raise)")
    add("--label-column", metavar="NAME", help="Parquet and ORC: the column of labels (default: label)")
    add("--dense-columns", nargs="+", metavar="NAME", help="Parquet and ORC: columns of numbers (default: i1, i2, …)")
    add("--sparse-columns", nargs="+", metavar="NAME", help="Parquet and ORC: columns of ids (default: c1, c2, …)")
    add("--padding", type=int, metavar="ID", help="a number that fills lists up and is dropped, usually 0")
    add("--num-dense", type=int, metavar="N", help="text: columns of integers (default: 13)")
    add("--num-sparse", type=int, metavar="N", help="text: columns of ids (default: 26)")
    add("--layout", choices=("alimama", "amazon"), help="the input is text of this layout, see below")
    add("--history", type=int, metavar="N", help="amazon: items of a history at most, the newest (default: 50)")
    add("--negatives", type=int, metavar="N", help="amazon: items drawn for each true one, label 0 (default: 1)")
    add("--split", choices=("train", "test", "all"), help="amazon: test is each user's last item (default: all)")
    add("--seed", type=int, metavar="N", help="amazon: of the negatives (default: 0)")
    add("--overwrite", action="store_true", help="replace OUT.parquet, when the new one is complete")
    add("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a bar (default: yes)")
    add("--debug", action="store_true", help="show the traceback of an error")


COLUMNS = ("label_column", "dense_columns", "sparse_columns", "padding", "num_dense", "num_sparse")
DRAWS = ("history", "negatives", "split", "seed")


def run_convert(found: argparse.Namespace) -> int:
    _check_paths(found)
    from .data.convert import Converted, convert, vocabulary_file
    from .data.files import expand
    from .data.filesource import FileSource
    from .data.layouts import open_layout
    from .data.opening import open_source

    *inputs, out = found.paths
    columns = {name: value for name in COLUMNS + DRAWS if (value := getattr(found, name)) is not None}
    for name in DRAWS:
        if name in columns and found.layout != "amazon":
            raise ConfigError(f"--{name} is only for --layout amazon; leave it out")
    settings: dict[str, Any] = {"batch_size": 1, "bad_rows": found.bad_rows, "columns": columns, "raw": True}
    source: FileSource
    if found.layout:
        source = open_layout(found.layout, expand(inputs), **settings)
    else:
        source = open_source(inputs, **settings)
    began = time.perf_counter()
    bar = _Bar() if found.progress else None
    try:
        result: Converted = convert(
            source,
            out,
            vocabulary=found.vocabulary,
            min_count=found.min_count,
            use_vocabulary=found.use_vocabulary,
            overwrite=found.overwrite,
            **({"progress": bar} if bar else {}),
        )
    finally:
        if bar:
            bar.close()
    lines = [f"{out}: {result.rows:,} rows in {time.perf_counter() - began:.1f} s"]
    if result.resumed_blocks:
        lines.append(f"went on behind block {result.resumed_blocks:,}, which an earlier run had finished")
    if result.bad_rows:
        lines.append(f"left out {result.bad_rows:,} bad rows")
        lines += source.bad_examples
    lines.append(f"columns: 1 label, {len(source.dense)} dense, {len(source.features)} categorical")
    if result.multi_hot:
        lines.append(f"with several ids: {', '.join(result.multi_hot)}")
    if result.counts:
        lines.append(f"table rows: {sum(result.counts.values()):,} in {len(result.counts)} tables")
    if found.vocabulary:
        lines.append(f"vocabulary: {vocabulary_file(Path(out))} (for --use-vocabulary)")
    sys.stdout.write("\n  ".join(lines) + "\n")
    return 0


def _check_paths(found: argparse.Namespace) -> None:
    """Files to read and one to write are named, and not behind a flag that takes them for names of columns."""
    if len(found.paths) >= 2:
        return
    lists = {name: words for name in ("dense_columns", "sparse_columns") if (words := getattr(found, name))}
    for name, words in lists.items():
        if words[-1].endswith((".parquet", ".pq")) or (not found.paths and len(lists) == 1):
            raise ConfigError(
                f"--{name.replace('_', '-')} took {words[-1]} as one of its names, because it takes all words up to "
                "the next flag; put the files to read and the Parquet file to write before the flags, or all behind "
                "-- at the end"
            )
    raise ConfigError("convert needs files to read and, last, the Parquet file to write; name both, before the flags")


class _Bar:
    """One bar a stage, on standard error."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            from tqdm import tqdm

            self.close()
            on_screen = sys.stderr.isatty()
            self._bar = tqdm(
                total=total, desc=stage, unit=" parts", file=sys.stderr, mininterval=0.2 if on_screen else 5.0,
                initial=done - 1, dynamic_ncols=on_screen,
            )  # fmt: skip
            self._stage = stage
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
