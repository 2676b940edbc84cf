"""A trained model from a checkpoint on new files: `evaluate` for metrics, `predict` for probabilities, to Parquet.

The rows of the tables are those that were trained; an id that was never seen is mapped to a row as in training, and a
row that was never trained has its initial values.  Nothing of the checkpoint is changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import report as reporting
from .assemble import build_model, build_tables
from .checkpoint import checkpoint_info, load
from .config import TrainConfig
from .data import Batch, Source
from .datasets import Datasets
from .driver.choose import choose
from .errors import ConfigError, DataError
from .machine import available_bytes
from .progress import Listener
from .scoring_config import ScoreConfig
from .transit import to_device
from .unlabelled import open_for_prediction

RESIDENT_SHARE = 0.25  # of the available memory


class Scorer:
    """The model of a checkpoint over some files; `batches()` gives each batch with its logits.

    Raises DataError for files and checkpoints, ConfigError where the two do not fit.
    """

    def __init__(self, config: ScoreConfig, *, labels: bool) -> None:
        assert config.checkpoint is not None
        info = checkpoint_info(config.checkpoint)
        extra = info["extra"]
        if not isinstance(extra, dict) or not {"config", "data"} <= extra.keys():
            raise ConfigError(
                f"--checkpoint {config.checkpoint}: it was not written by cdlrm train; load it with cdlrm.load."
            )
        self.path: Path = info["path"]
        trained = TrainConfig.from_mapping(extra["config"])
        rows = [info["tables"][name]["rows"] for name in extra["data"]["features"]]
        self.source, self.labelled = _open(config, trained, extra["data"], rows, labels)
        settings = dataclasses.replace(
            trained, cache_rows=_slots(config, trained, sum(rows)), store=config.store, device=config.device,
            progress=config.progress, checkpoint_dir=None, checkpoint_every=None, resume=False, logdir=None,
        )  # fmt: skip
        data = Datasets(self.source, None, self.source.features, self.source.num_dense, rows)
        self.chosen: list[str] = []
        self.tables = build_tables(settings, data, self.chosen)
        self.device = self.tables.device
        try:
            self.model = build_model(settings, data, self.tables, []).eval()
            load(self.path, self.model)
        except BaseException:
            self.tables.close()
            raise

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.tables.close()

    def batches(self, listener: Listener) -> Iterator[tuple[Batch, Tensor]]:
        """Each batch and its logits float32 [B], on the CPU."""
        listener.start(self.source.rows_total)
        try:
            for batch in self.source:
                with torch.no_grad():
                    logits = self.model(to_device(batch.dense, self.device), batch).cpu()
                yield batch, logits
                listener.step(batch.size)
        finally:
            listener.close()


def _slots(config: ScoreConfig, trained: TrainConfig, rows: int) -> int:
    """All rows resident where they are a small part of the memory; otherwise every batch reads what it needs."""
    record_bytes = 8 * trained.arch_sparse_feature_size  # weights, and state that is no larger as a rule
    chosen, have = choose(config.device), available_bytes()
    if chosen.kind == "cuda":
        have = min(have, torch.cuda.mem_get_info(chosen.gpu)[0])
    return rows if config.store == "ram" and rows * record_bytes <= RESIDENT_SHARE * have else 1


def _open(
    config: ScoreConfig, trained: TrainConfig, saved: dict[str, Any], rows: list[int], labels: bool
) -> tuple[Source, bool]:
    """The files as in training, and whether they have labels.  Raises DataError where the columns differ."""
    assert config.data is not None
    settings: dict[str, Any] = {
        "batch_size": config.mini_batch_size or trained.mini_batch_size,
        "ids": saved["ids"],
        "bad_rows": config.bad_rows or trained.bad_rows,
        "columns": trained.columns(),
    }
    source, labelled = open_for_prediction(config.data, table_rows=None, **settings)
    if (source.features, source.num_dense) != (saved["features"], saved["num_dense"]):
        raise DataError(
            f"--data has {source.num_dense} dense columns and the categorical columns {', '.join(source.features)} "
            f"where the model was trained on {saved['num_dense']} and {', '.join(saved['features'])}; give files with "
            "the same columns."
        )
    if labels and not labelled:
        raise DataError(
            "--data has no column 'label' to compare with; give files with it, or use cdlrm predict, which needs none."
            if trained.label_column is None
            else f"--data has no column {trained.label_column!r} to compare with; give files with it, or use cdlrm "
            "predict, which needs none."
        )
    source, labelled = open_for_prediction(config.data, table_rows=rows, **settings)
    return source, labelled


def evaluate(config: ScoreConfig, listener: Listener | None = None) -> dict[str, Any]:
    """Metrics of `config.checkpoint` on `config.data`: checkpoint, metrics, samples_per_second, seconds, bad_rows."""
    from .metrics import ClickMetrics

    started = time.perf_counter()
    with Scorer(config, labels=True) as scorer:
        loaded = time.perf_counter()
        metrics = ClickMetrics()
        for batch, logits in scorer.batches(listener or Listener()):
            metrics.update(logits, batch.labels)
        done = time.perf_counter()
        found = metrics.compute()
        return {
            "checkpoint": str(scorer.path),
            "metrics": found,
            "samples_per_second": reporting.ratio(found["samples"], done - loaded),
            "bad_rows": scorer.source.skipped_rows,
            "bad_row_examples": scorer.source.bad_examples,
            "chosen": scorer.chosen,
            "seconds": {"load": loaded - started, "evaluate": done - loaded},
        }


def predict(
    config: ScoreConfig, out: str | Path, listener: Listener | None = None, *, overwrite: bool = False
) -> dict[str, Any]:
    """Write a Parquet file: `row` int64 (position in the data, of the rows that were not left out), `probability`
    float32, and `label` float32 where the data has labels.

    Batch by batch into a file beside `out`, which gets its name when it is complete.  Returns checkpoint, out, samples,
    samples_per_second, bad_rows, seconds.  Raises DataError where it cannot be written, ConfigError where `out` exists
    already (unless `overwrite`).
    """
    import pyarrow as pa
    import pyarrow.parquet

    started, out = time.perf_counter(), Path(out)
    check_out(out, overwrite)
    with Scorer(config, labels=False) as scorer:
        loaded, row = time.perf_counter(), 0
        names = [("row", pa.int64()), ("probability", pa.float32())]
        schema = pa.schema(names + ([("label", pa.float32())] if scorer.labelled else []))
        with _beside(out) as partial, pa.parquet.ParquetWriter(partial, schema) as writer:
            for batch, logits in scorer.batches(listener or Listener()):
                columns = [np.arange(row, row + batch.size), torch.sigmoid(logits).numpy()]
                if scorer.labelled:
                    columns.append(batch.labels.numpy())
                writer.write_batch(pa.record_batch(columns, schema=schema), row_group_size=batch.size)
                row += batch.size
        return {
            "checkpoint": str(scorer.path),
            "out": str(out),
            "samples": row,
            "samples_per_second": reporting.ratio(row, time.perf_counter() - loaded),
            "bad_rows": scorer.source.skipped_rows,
            "bad_row_examples": scorer.source.bad_examples,
            "chosen": scorer.chosen,
            "seconds": {"load": loaded - started, "predict": time.perf_counter() - loaded},
        }


def check_out(out: Path, overwrite: bool) -> None:
    """Before the work, not after."""
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; name a file in it.")
    if not out.resolve().parent.is_dir():
        raise ConfigError(f"--out {out}: its folder does not exist; create it first.")
    if out.suffix != ".parquet":
        raise ConfigError(f"--out {out}: the output is Parquet, so its name has to end in .parquet; rename it.")
    if out.exists() and not out.is_file():
        raise ConfigError(f"--out {out}: exists and is no regular file; name another file.")
    if out.exists() and not overwrite:
        raise ConfigError(f"--out {out}: exists already; pass --overwrite to replace it, or name another file.")


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A name to write to, which becomes `out` when all went well and is removed otherwise."""
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, out)
    except OSError as error:
        raise DataError(f"--out {out}: cannot be written ({error.strerror or error}); choose another place.") from error
    finally:
        partial.unlink(missing_ok=True)


def render_evaluation(found: dict[str, Any]) -> str:
    """The result of `evaluate` as text."""
    title = "Evaluation"
    lines = [title, "=" * len(title), f"  {'checkpoint':<22}{found['checkpoint']}"]
    for key, name in reporting.METRICS.items():
        lines.append(f"  {name:<22}{reporting.number(found['metrics'][key], '.5f')}")
    lines.append(f"  {'samples':<22}{found['metrics']['samples']:,}")
    return "\n".join([*lines, *_common(found)])


def render_prediction(found: dict[str, Any]) -> str:
    """The result of `predict` as text."""
    title = "Predictions"
    lines = [title, "=" * len(title), f"  {'checkpoint':<22}{found['checkpoint']}", f"  {'written':<22}{found['out']}"]
    lines.append(f"  {'samples':<22}{found['samples']:,}")
    return "\n".join([*lines, *_common(found)])


def _common(found: dict[str, Any]) -> list[str]:
    lines = [f"  {'samples/s':<22}{reporting.number(found['samples_per_second'], ',.0f')}"]
    if found["bad_rows"]:
        lines.append(f"  {'rows left out':<22}{found['bad_rows']:,} malformed")
        lines += [f"  - {example}" for example in found["bad_row_examples"]]
    return lines + ["Chosen automatically", *(f"  - {sentence}" for sentence in found["chosen"])]
