"""The settings of a training run: one frozen dataclass, from which flags, YAML and help are made.

Each field says in its metadata what the command line needs to know, so a setting is written once.
Names are DLRM's where DLRM has one (https://github.com/facebookresearch/dlrm, flags of
`dlrm_s_pytorch.py`), with underscores instead of dashes.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import ConfigError


def setting(
    default: Any,
    help: str,
    *,
    group: str,
    kind: type = str,
    many: bool = False,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    metavar: str | None = None,
) -> Any:
    """A field with its help, group, type, inclusive bounds (`above`: exclusive), other flag names, and words that
    are taken besides values of the type."""
    metadata = {key: value for key, value in locals().items() if key != "default"}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


GROUPS = {
    "data": "Data: where the samples come from",
    "synthetic": "Synthetic data: used when --data is not given",
    "model": "Model: the DLRM",
    "training": "Training",
    "cache": "Cache: how much of the tables the device holds, and how far ahead it looks",
    "checkpoint": "Checkpoints: to stop and to go on",
    "output": "Output",
}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Settings of `cdlrm train`.  `None` means: chosen from the data, and said in the report."""

    # fmt: off
    data: list[str] | None = setting(
        None, "files, folders or globs of one format: .parquet, .orc, Criteo's TAB-separated text (.tsv, .txt or no "
        "ending, also .gz and .zst), DLRM's .npz, MLPerf's .bin, TorchRec's .npy; default: synthetic data",
        group="data", many=True, metavar="FILE")
    test_data: list[str] | None = setting(
        None, "files or globs to evaluate on; default: the end of --data, see --test-fraction",
        group="data", many=True, metavar="FILE")
    test_fraction: float = setting(
        0.1, "share of --data, from its end, that is only evaluated on (ignored with --test-data)",
        group="data", kind=float, low=0.0, high=0.9)
    table_rows: str | None = setting(
        None, "rows of the tables: one number for all, or n1-n2-… one per column; default: 2^20 a column, "
        "for synthetic data the cardinalities", group="data", aliases=("--arch-embedding-size",), metavar="N|n1-n2-…")
    ids: str | None = setting(
        None, "hash: raw ids are mapped to rows by mix64(id) mod rows; rows: ids are row numbers, taken as they "
        "are and checked; default: hash for files, rows for synthetic data", group="data", choices=("hash", "rows"))
    bad_rows: str = setting(
        "raise", "what a malformed row does: stop with an error, or be left out and counted",
        group="data", choices=("raise", "skip"))
    label_column: str | None = setting(
        None, "Parquet and ORC: the column of labels, 0 or 1; default: label", group="data", metavar="NAME")
    dense_columns: list[str] | None = setting(
        None, "Parquet and ORC: the columns of numbers; default: i1, i2, …", group="data", many=True, metavar="NAME")
    sparse_columns: list[str] | None = setting(
        None, "Parquet and ORC: the columns of ids, or of lists of ids; default: c1, c2, …", group="data", many=True,
        metavar="NAME")
    padding: int | None = setting(
        None, "the id that fills lists up, which is left out", group="data", kind=int, metavar="ID")
    num_dense: int | None = setting(
        None, "text: columns of numbers behind the label; default: 13", group="data", kind=int, low=0)
    num_sparse: int | None = setting(
        None, "text: columns of ids behind those; default: 26, or what is left", group="data", kind=int, low=1)
    shuffle: bool = setting(False, "shuffle the training rows in blocks, by (seed, epoch)", group="data", kind=bool)

    synthetic_rows: str | None = setting(
        None, "cardinalities n1-n2-… of the columns; default: like the Criteo 1TB sample, 26 columns",
        group="synthetic", metavar="n1-n2-…")
    synthetic_zipf: float | None = setting(
        None, "Zipf exponent of every column; default: fitted to the Criteo 1TB sample, column by column",
        group="synthetic", kind=float, above=0.0, high=4.0)
    synthetic_multi_hot: int = setting(
        1, "ids per column and sample", group="synthetic", kind=int, low=1, high=1000,
        aliases=("--num-indices-per-lookup",))

    arch_sparse_feature_size: int = setting(16, "dim of the tables", group="model", kind=int, low=1, high=4096)
    pooling: str = setting(
        "sum", "how the rows of a sample's ids become one vector; sum lets histories of tens of ids diverge at rates "
        "at which mean learns", group="model", choices=("sum", "mean"))
    arch_mlp_bot: str | None = setting(
        None, "layers of the bottom MLP, from the number of dense columns to --arch-sparse-feature-size; "
        "default: that number-128-64-dim", group="model", metavar="13-512-256-64-16")
    arch_mlp_top: str = setting(
        "128-64-1", "layers of the top MLP without its input, which is computed; the last is 1",
        group="model", metavar="512-256-1")
    arch_interaction_op: str = setting(
        "dot", "dot: products of all pairs of features; cat: the features one after another",
        group="model", choices=("dot", "cat"))
    arch_interaction_itself: bool = setting(
        False, "dot: also each feature with itself", group="model", kind=bool)
    # one choice: command lines and files written for DLRM name it
    loss_function: str = setting("bce", "binary cross-entropy", group="model", choices=("bce",))

    mini_batch_size: int = setting(2048, "samples a training step", group="training", kind=int, low=1, high=2**24)
    test_mini_batch_size: int | None = setting(
        None, "samples an evaluation step; default: 8 training batches", group="training", kind=int, low=1, high=2**24)
    nepochs: int = setting(1, "times that the training data is read", group="training", kind=int, low=1)
    num_batches: int | None = setting(
        None, "training batches an epoch; default: all of --data, 400 for synthetic data",
        group="training", kind=int, low=1)
    learning_rate: float = setting(
        0.1, "of the dense part, and of the tables unless --embedding-learning-rate is given",
        group="training", kind=float, above=0.0, high=1e6)
    embedding_learning_rate: float | None = setting(
        None, "of the tables; default: --learning-rate", group="training", kind=float, above=0.0, high=1e6)
    optimizer: str = setting(
        "rowwise-adagrad", "of the tables; it runs inside the backward pass", group="training",
        choices=("sgd", "rowwise-adagrad", "adagrad", "adam"))
    dense_optimizer: str = setting(
        "sgd", "of the MLPs (torch.optim)", group="training", choices=("sgd", "adagrad", "adam"))
    nonfinite: str = setting(
        "raise", "what a NaN or infinite loss or gradient does: stop with an error that names the batch, or skip "
        "the step and count it; on a GPU, raise stops up to --prefetch-depth + 2 steps later, and skip makes every "
        "step wait for the device", group="training", choices=("raise", "skip"))
    seed: int = setting(
        0, "of the initial values, the synthetic data and the shuffle", group="training", kind=int, low=0,
        high=2**63 - 1, aliases=("--numpy-rand-seed",))

    cache_ratio: float = setting(
        0.1, "rows that the cache holds, as a share of all rows (1: everything resident)",
        group="cache", kind=float, above=0.0, high=1.0)
    cache_rows: int | None = setting(
        None, "rows that the cache holds; overrides --cache-ratio", group="cache", kind=int, low=1)
    horizon: int | str = setting(
        "auto", "batches whose ids are read ahead, to plan with; auto: by the cache and the batches, and said in the "
        "report", group="cache", kind=int, low=0, high=2**20, words=("auto",), metavar="auto|N")
    prefetch_depth: int = setting(
        1, "batches whose rows may be copied ahead of the batch that computes", group="cache", kind=int, low=0,
        high=64)
    store: str = setting(
        "ram", "where the tables live: in memory, or in a file in folder DIR, for tables larger than the memory",
        group="cache", metavar="ram|file:DIR")
    device: str = setting(
        "auto", "where the cache and the model live; auto: the GPU if there is one that can be used", group="cache",
        choices=("auto", "cuda", "cpu"))
    strict: bool = setting(
        False, "refuse a batch that needs more rows than the cache holds, instead of letting the cache grow",
        group="cache", kind=bool)

    checkpoint_dir: str | None = setting(
        None, "write checkpoints into this folder: every --checkpoint-every steps, at the end, and on Ctrl-C",
        group="checkpoint", metavar="DIR")
    checkpoint_every: int | None = setting(
        None, "steps from one checkpoint to the next; default: only at the end and on Ctrl-C",
        group="checkpoint", kind=int, low=1, metavar="N")
    resume: bool = setting(
        False, "go on from the newest checkpoint in --checkpoint-dir; the result is the same as without the stop",
        group="checkpoint", kind=bool)

    metrics: bool = setting(True, "evaluate: AUC, log loss, normalized entropy, accuracy", group="output", kind=bool)
    progress: bool = setting(True, "the progress bar (on standard error)", group="output", kind=bool)
    test_freq: int | None = setting(
        None, "evaluate every N steps, besides before the first and after the last; default: never",
        group="output", kind=int, low=1, metavar="N")
    print_freq: int = setting(
        10, "steps between two updates of the loss that the progress bar shows", group="output", kind=int, low=1,
        metavar="N")
    logdir: str | None = setting(
        None, "also write the figures for TensorBoard into this folder (extra: cdlrm[tensorboard])", group="output",
        metavar="DIR")
    json: str | None = setting(None, "also write the report to this file, as JSON", group="output", metavar="FILE")
    # fmt: on

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, checked(field, getattr(self, field.name)))
        dashed("--arch-mlp-top", self.arch_mlp_top)
        if dashed("--arch-mlp-top", self.arch_mlp_top)[-1] != 1:
            raise ConfigError(f"--arch-mlp-top {self.arch_mlp_top}: the last layer must be 1, the click's logit.")
        if self.arch_mlp_bot is not None:
            layers = dashed("--arch-mlp-bot", self.arch_mlp_bot)
            if len(layers) < 2 or layers[-1] != self.arch_sparse_feature_size:
                raise ConfigError(
                    f"--arch-mlp-bot {self.arch_mlp_bot}: it must name at least two sizes and end in "
                    f"--arch-sparse-feature-size {self.arch_sparse_feature_size}, because the bottom MLP's output "
                    "meets the embeddings."
                )
        for flag, value in (("--table-rows", self.table_rows), ("--synthetic-rows", self.synthetic_rows)):
            if value is not None:
                dashed(flag, value)
        if self.arch_interaction_itself and self.arch_interaction_op != "dot":
            raise ConfigError("--arch-interaction-itself: only --arch-interaction-op dot has pairs; leave it out.")
        if self.store != "ram" and not (self.store.startswith("file:") and len(self.store) > len("file:")):
            raise ConfigError(f"--store {self.store}: expected ram, or file:DIR for tables larger than the memory.")
        for flag, given in (("--checkpoint-every", self.checkpoint_every), ("--resume", self.resume)):
            if given and self.checkpoint_dir is None:
                raise ConfigError(f"{flag} without --checkpoint-dir: name the folder of the checkpoints.")
        if self.test_data and not self.data:
            raise ConfigError("--test-data without --data: give the training data too.")
        if self.data and self.synthetic_rows:
            raise ConfigError("--synthetic-rows with --data: the files say what is in them; use --table-rows.")
        for name in self.columns():
            if not self.data:
                raise ConfigError(f"{flag_of(name)} without --data: the synthetic columns have their names.")
        if self.table_rows and not self.data:
            raise ConfigError("--table-rows without --data: synthetic columns are described by --synthetic-rows.")

    def columns(self) -> dict[str, Any]:
        """The names of columns that were given."""
        named = ("label_column", "dense_columns", "sparse_columns", "padding", "num_dense", "num_sparse")
        return {name: value for name in named if (value := getattr(self, name)) is not None}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TrainConfig:
        """From names to values (a YAML file); names may have dashes; an unknown one is refused with a suggestion."""
        names = {field.name: field.name for field in dataclasses.fields(cls)}
        for field in dataclasses.fields(cls):
            names |= {name_of(alias): field.name for alias in field.metadata["aliases"]}
        known: dict[str, Any] = {}
        for key, value in values.items():
            name = names.get(name_of(key))
            if name is None:
                raise ConfigError(f"setting {key!r} is unknown{suggestion(name_of(key), names)}.")
            known[name] = value
        return cls(**known)

    def to_mapping(self) -> dict[str, Any]:
        """Names to values, in order; `from_mapping` gives the same settings again."""
        return dataclasses.asdict(self)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def in_flags(sentence: str) -> str:
    """A sentence that names arguments of the library, for somebody who gives flags: `cache_rows=10` becomes
    `--cache-rows 10`, and `table_rows` becomes `--table-rows`."""
    for field in dataclasses.fields(TrainConfig):
        flag, name = flag_of(field.name), re.escape(field.name)
        sentence = re.sub(rf"(?<![-\w/.]){name} \({flag}\)", flag, sentence)
        sentence = re.sub(rf"(?<![-\w/.]){name}=(?!True|False)(?:'([^']*)'|([\w.+-]*\w))", rf"{flag} \1\2", sentence)
        if "_" in field.name:  # others are words; "did you mean x?" is about a name in a file
            sentence = re.sub(rf"(?<![-\w/.]){name}(?![\w/.=?-])", flag, sentence)
    return sentence


def name_of(key: object) -> str:
    """A setting's name from a flag or a YAML key."""
    return str(key).lstrip("-").replace("-", "_")


def suggestion(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the known word that is closest, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


LARGEST_LAYER = 1 << 16


def dashed(flag: str, text: str) -> list[int]:
    """`"13-512-16"` -> [13, 512, 16]; every number is at least 1."""
    try:
        numbers = [int(part) for part in text.split("-")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{flag} {text}: expected whole numbers of at least 1 with dashes between, as 13-512-16.")
    if max(numbers) > LARGEST_LAYER and flag.startswith("--arch-mlp"):
        raise ConfigError(f"{flag} {text}: a layer may have at most {LARGEST_LAYER} units.")
    return numbers


def checked(field: dataclasses.Field[Any], value: Any) -> Any:
    """`value` in the field's type; raises ConfigError with the flag, the value and the bound."""
    about = field.metadata
    if value is None and field.default is None:
        return None
    flag = flag_of(field.name)
    if about["many"]:
        files = [value] if isinstance(value, str) else value
        if not isinstance(files, (list, tuple)) or not files or not all(isinstance(f, str) and f for f in files):
            raise ConfigError(f"{flag} {value!r}: expected one or more names.")
        return list(files)
    if value in about["words"]:
        return value
    value = _typed(flag, about["kind"], value, about["words"])
    if about["choices"] and value not in about["choices"]:
        raise ConfigError(f"{flag} {value}: expected one of {', '.join(about['choices'])}.")
    low, high, above = about["low"], about["high"], about["above"]
    if above is not None and value <= above:
        raise ConfigError(f"{flag} {value}: must be above {above:g}.")
    if low is not None and value < low:
        raise ConfigError(f"{flag} {value}: must be at least {low:g}.")
    if high is not None and value > high:
        raise ConfigError(f"{flag} {value}: must be at most {high if isinstance(high, int) else f'{high:g}'}.")
    return value


def _typed(flag: str, kind: type, value: Any, words: tuple[str, ...]) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{flag} {value}: expected true or false.")
    if isinstance(value, bool) or value is None:
        raise ConfigError(f"{flag} {value}: expected {'text' if kind is str else 'a number'}.")
    try:
        if kind is int and isinstance(value, float) and not value.is_integer():
            raise ValueError
        typed = kind(value)
    except (TypeError, ValueError, OverflowError):
        expected = " or ".join(["a whole number" if kind is int else "a number", *words])
        raise ConfigError(f"{flag} {value}: expected {expected}.") from None
    if kind is float and not math.isfinite(typed):
        raise ConfigError(f"{flag} {value}: expected a finite number.")
    return typed
