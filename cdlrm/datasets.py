"""The training and test data of a run, opened as its `TrainConfig` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .config import TrainConfig, dashed
from .data import Source
from .errors import ConfigError, DataError

SYNTHETIC_BATCHES = 400
"""Training batches of the synthetic data when --num-batches is not given: well below a minute on two cores."""
SYNTHETIC_TEST_SAMPLES = 32768
TEST_BATCH_FACTOR = 8


@dataclass
class Datasets:
    """`train` and `test` (None: nothing to evaluate on) with the same columns; both may be iterated many times."""

    train: Source
    test: Source | None
    features: list[str]
    num_dense: int
    table_rows: list[int]

    @property
    def train_samples(self) -> int | None:
        """Samples of an epoch, or None where only reading the files would tell."""
        rows, limit = self.train.rows_total, self.train.limit_batches
        if limit is None:
            return rows
        return limit * self.train.batch_size if rows is None else min(rows, limit * self.train.batch_size)

    def description(self) -> dict[str, Any]:
        """What files must agree with to be scored by the trained model."""
        ids = getattr(self.train, "ids", "rows")
        return {"features": list(self.features), "num_dense": self.num_dense, "ids": ids}

    def counters(self) -> dict[str, Any]:
        """What reading counted, for the report: malformed rows that were left out, and the first few by name."""
        test = 0 if self.test is None else self.test.skipped_rows
        examples = self.train.bad_examples + ([] if self.test is None else self.test.bad_examples)
        return {"bad_rows": self.train.skipped_rows + test, "bad_row_examples": examples}


def open_datasets(config: TrainConfig, chosen: list[str]) -> Datasets:
    """Open the data; appends to `chosen` what was decided without being asked.

    Raises ConfigError for settings that do not fit the data, DataError for the files.
    """
    train, test = _from_files(config, chosen) if config.data else _synthetic(config, chosen)
    return Datasets(train, test, train.features, train.num_dense, train.table_rows)


def why_nothing(config: TrainConfig, data: Datasets) -> str:
    """The sentence about a run that had no row to train on."""
    bad = data.counters()["bad_rows"]
    left_out = f" ({bad:,} malformed rows were left out, --bad-rows skip)" if bad else ""
    split = config.data and not config.test_data and config.test_fraction > 0
    remedy = " or a smaller --test-fraction" if split else ""
    return f"nothing was trained: no row is left to train on{left_out}; give --data with more good rows{remedy}."


def _test_batch(config: TrainConfig) -> int:
    return config.test_mini_batch_size or TEST_BATCH_FACTOR * config.mini_batch_size


def _synthetic(config: TrainConfig, chosen: list[str]) -> tuple[Source, Source]:
    from .data.synthetic import CARDINALITIES, SyntheticSource

    if config.ids == "hash":
        raise ConfigError("--ids hash without --data: the ids of the synthetic data are row numbers; use --ids rows.")
    chosen.append("data: synthetic, shaped like the Criteo click logs, because --data is not given.")
    if config.synthetic_rows is None:
        cardinalities = CARDINALITIES
    else:
        cardinalities = dashed("--synthetic-rows", config.synthetic_rows)
    batches = config.num_batches or SYNTHETIC_BATCHES
    if config.num_batches is None:
        chosen.append(f"training batches: {batches}, the default for synthetic data (--num-batches).")
    train_rows = batches * config.mini_batch_size

    def source(first: int, rows: int, batch_size: int, shuffle: bool) -> Source:
        return SyntheticSource(
            batch_size=batch_size,
            num_rows=train_rows + SYNTHETIC_TEST_SAMPLES,
            row_range=(first, first + rows),
            cardinalities=cardinalities,
            exponents=config.synthetic_zipf,
            lengths=config.synthetic_multi_hot,
            seed=config.seed,
            shuffle=shuffle,
        )

    train = source(0, train_rows, config.mini_batch_size, config.shuffle)
    test = source(train_rows, SYNTHETIC_TEST_SAMPLES, _test_batch(config), False)
    return train, test


def _from_files(config: TrainConfig, chosen: list[str]) -> tuple[Source, Source | None]:
    from .data.filesource import DEFAULT_TABLE_ROWS
    from .data.opening import open_train_test

    assert config.data is not None
    if not config.test_data and config.test_fraction > 0:
        chosen.append(
            f"test data: the last {100 * config.test_fraction:g} % of the rows, because --test-data is not given "
            "(--test-fraction)."
        )
    train, test = open_train_test(
        config.data,
        test_data=config.test_data,
        test_fraction=config.test_fraction,
        batch_size=config.mini_batch_size,
        test_batch_size=_test_batch(config),
        shuffle=config.shuffle,
        seed=config.seed,
        limit_batches=config.num_batches,
        table_rows=config.table_rows,
        ids=config.ids,
        bad_rows=config.bad_rows,
        columns=config.columns(),
    )
    chosen += train.notes
    if config.table_rows is None and train.ids == "hash":
        chosen.append(
            f"table rows: {DEFAULT_TABLE_ROWS:,} a column, because --table-rows is not given; ids are mapped by "
            "mix64(id) mod rows."
        )
    if test is not None and (test.features, test.num_dense) != (train.features, train.num_dense):
        raise DataError(
            f"--test-data has {len(test.features)} categorical and {test.num_dense} dense columns where --data has "
            f"{len(train.features)} and {train.num_dense}; give files of the same columns."
        )
    return train, test
