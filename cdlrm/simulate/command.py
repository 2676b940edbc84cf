"""`cdlrm simulate`: its flags, its table and its files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import (
    WORDS,
    add_command,
    add_common,
    add_grid,
    add_settings,
    check_file,
    given_settings,
    number_list,
    settings_of,
    whole,
    writing,
)
from ..config import TrainConfig, flag_of
from ..errors import ConfigError

if TYPE_CHECKING:
    from .trace import Trace

ABOUT = """\
Simulate caches from ids alone, without training: how many rows would be filled, for every combination of cache size,
horizon, prefetch depth and policy, in one pass over the data on all cores.  Counts equal those of `cdlrm train`, except
that a cache of all rows is simulated as a cache (it fills every row once), where training keeps everything resident.
With --horizon auto the table shows the newest horizon chosen.

policies: lru  the look-ahead cache of `cdlrm train`: beyond its horizon the row longest unused goes first
               (with --horizon 0 --prefetch-depth 0: plain LRU, as caches that do not look ahead)
          lfu, frequency, s3fifo  look-ahead caches with another rule beyond the horizon: use counts halved every 32
               batches; use counts of the whole past; S3-FIFO-like
          min  the optimum MIN(prefetch depth): no cache of this size makes fewer fills
"""
EXAMPLES = """\
examples:
  cdlrm simulate --cache-ratio 0.1 0.2 0.4 --horizon 0 8 32
  cdlrm simulate --data 'logs/*.orc' --cache-ratio 0.1 --prefetch-depth 0 1 2 --out caches.jsonl
  cdlrm simulate --data day_0.tsv --record day_0.parquet --curve 24 --figure curve.png
  cdlrm simulate --trace day_0.parquet --cache-rows 100000 200000 --policy lru min
"""
TRACE_FIELDS = ("mini_batch_size", "num_batches", "nepochs", "seed", "arch_sparse_feature_size", "optimizer")
SHORTENED = "~ the rows of depth + 1 batches do not always fit: there MIN(d), as every cache, holds fewer batches."
RECORD_FIELDS = ("arch_sparse_feature_size", "optimizer")  # the size of what moves, not which rows
GRID_FLAGS: dict[str, tuple[type, str]] = {
    "cache_rows": (int, "rows that the cache holds"),
    "cache_ratio": (float, "the same as a share of all rows (default: 0.1)"),
    "horizon": (int, "batches whose ids are read ahead; auto: as `cdlrm train` chooses for each cache (default: auto)"),
    "prefetch_depth": (int, "batches whose rows may be copied ahead (default: 1)"),
    "policy": (str, "see above (default: lru min)"),
}


def trace_fields() -> list[dataclasses.Field[Any]]:
    """Settings of `cdlrm train` that say what is looked up."""
    return settings_of(lambda f: f.metadata["group"] in ("data", "synthetic") or f.name in TRACE_FIELDS)


def add_trace(data: Any) -> None:
    data.add_argument(
        "--trace", metavar="FILE", default=None,
        help="a recorded trace instead of data: Parquet with one record a batch, column rows (list<int64>: the rows "
        "looked up, of all tables laid one after another), optional column epoch (int32: windows end with an epoch), "
        "file metadata cdlrm.table_rows (JSON); or .npz with rows, starts and table_rows",
    )  # fmt: skip


def add_simulate(commands: Any) -> None:
    """Register the command with the parser of the command line."""
    parser = add_command(
        commands, "simulate", run_simulate, about="fills of caches of any size, horizon and policy, from ids alone",
        description=ABOUT, examples=EXAMPLES,
    )  # fmt: skip
    grid = parser.add_argument_group("Grid", "each flag takes several values; every combination is simulated")
    add_grid(grid, GRID_FLAGS)
    grid.add_argument(
        "--curve", type=str, default="0", metavar="N",
        help="also the whole miss-ratio curves of MIN(0) and of LRU without look-ahead, at N cache sizes (default: 0)",
    )  # fmt: skip
    grid.add_argument("--workers", type=str, default=None, metavar="N", help="threads (default: every core)")
    grid.add_argument(
        "--propose-resident", action="store_true",
        help="also propose tables to keep resident, and count the fills with them in a second pass",
    )  # fmt: skip
    data = parser.add_argument_group("Data", "as for `cdlrm train`, or a recorded trace")
    add_trace(data)
    about = "write the trace that is read, as .parquet (see --trace); after Ctrl-C, of the batches until then"
    data.add_argument("--record", metavar="FILE", default=None, help=about)
    add_settings(data, trace_fields())
    output = parser.add_argument_group("Output")
    output.add_argument("--out", metavar="FILE", default=None, help="one JSON line a configuration")
    output.add_argument("--figure", metavar="FILE", default=None, help="fills against cache size, .png or .svg")
    add_common(output)


def run_simulate(found: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    from .grid import Grid, simulate
    from .trace import Recorder

    given = vars(found)
    lists = {
        name: number_list(flag_of(name), kind, given[name], WORDS.get(name, ()))
        for name, (kind, _) in GRID_FLAGS.items()
        if name in given
    }
    grid = Grid(**lists, curve=whole("--curve", found.curve, 0) or 0)
    workers = whole("--workers", found.workers, 1)
    check_file("--out", found.out)
    check_file("--figure", found.figure, (".png", ".svg"))
    check_file("--record", found.record, (".parquet",))
    config, trace = open_trace(found)
    grid.caches(trace.num_rows, 1)  # refuse impossible sizes before anything is written
    if found.figure is not None:
        from .figure import require_matplotlib

        require_matplotlib()
    recorder = None if found.record is None else Recorder(found.record, trace)
    started = time.perf_counter()
    try:
        with Bar(trace.batches, found.progress) as bar:
            simulation = simulate(
                trace, grid, workers=workers, record_bytes=record_bytes(config), progress=bar.update, recorder=recorder
            )
    except BaseException as error:
        if recorder is not None:
            recorder.close(keep=isinstance(error, KeyboardInterrupt))
        raise
    seconds = time.perf_counter() - started
    if recorder is not None:
        recorder.close()
    proposals = _proposals(trace, simulation, workers, check=found.propose_resident)
    if found.out is not None:
        _write_lines(Path(found.out), simulation, proposals)
    if found.figure is not None:
        from .figure import draw

        with writing("--figure", found.figure):
            draw(simulation, Path(found.figure))
    sys.stdout.write(render(simulation, seconds, proposals) + "\n")
    if low := grid.below_depth():
        asked = ", ".join(map(str, low))
        sys.stdout.write(f"A horizon is never below the prefetch depth: {asked} became it where the depth is more.\n")
    if recorder is not None and simulation.summary["interrupted"]:
        sys.stdout.write(f"{found.record} has the {recorder.batches:,} batches that were read; it is a whole trace.\n")
    return 130 if simulation.summary["interrupted"] else 0


def open_trace(
    found: argparse.Namespace,
    fields: Sequence[dataclasses.Field[Any]] | None = None,
    besides_trace: Sequence[str] = RECORD_FIELDS,
) -> tuple[TrainConfig, Trace]:
    """The settings that were given, of `fields`, and the trace that they describe.

    `besides_trace`: those that may be given together with a recorded trace.
    """
    from .trace import FileTrace, SourceTrace

    given = given_settings(found, fields or trace_fields())
    if found.trace is None:
        config = TrainConfig.from_mapping(given)
        return config, SourceTrace(config)
    table_rows = given.pop("table_rows", None)
    for name in given:
        if name not in besides_trace:
            raise ConfigError(f"--trace with {flag_of(name)}: the trace says what is looked up; leave one of them out.")
    return TrainConfig.from_mapping(given), FileTrace(found.trace, table_rows)


class Bar:
    """Batches done and time left, on standard error."""

    def __init__(self, total: int | None, shown: bool, name: str = "simulate", unit: str = " batches") -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc=name, unit=unit, file=sys.stderr, disable=not shown, ncols=100)
        self.update: Callable[[int], Any] = self._bar.update

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()


def record_bytes(config: TrainConfig) -> int:
    """Bytes that move with a row: float32 weights and optimizer state."""
    from ..assemble import TABLE_OPTIMIZERS

    dim = config.arch_sparse_feature_size
    return 4 * (dim + TABLE_OPTIMIZERS[config.optimizer](lr=config.learning_rate).state_width(dim))


def _proposals(trace: Any, simulation: Any, workers: int | None, check: bool) -> dict[int, dict[str, Any]]:
    """By number of the configuration: tables to keep resident, and (`check`) the fills with them."""
    from .proposal import check_proposal, propose_resident

    out: dict[int, dict[str, Any]] = {}
    if not check or simulation.summary["interrupted"]:
        return out
    for number, result in enumerate(simulation.results):
        tables = propose_resident(result, simulation.summary)
        names = [entry["table"] for entry in tables]
        if result["fills_by_table"] is not None:
            fills = check_proposal(trace, result, simulation.summary, names, workers) if names else result["fills"]
            out[number] = {"tables": tables, "fills": fills}
    return out


def _write_lines(file: Path, simulation: Any, proposals: dict[int, dict[str, Any]]) -> None:
    common = {key: value for key, value in simulation.summary.items() if key != "tables"}
    part, text = file.with_name(file.name + ".part"), ""
    for number, result in enumerate(simulation.results):
        line = {**result, **common}
        if result["fills_by_table"] is not None:
            line["tables"] = simulation.summary["tables"]
        if number in proposals:
            line["resident_proposal"] = proposals[number]
        text += json.dumps(line, allow_nan=False) + "\n"
    with writing("--out", file):
        part.write_text(text, encoding="utf-8")
        part.replace(file)


def render(simulation: Any, seconds: float, proposals: dict[int, dict[str, Any]]) -> str:
    """The table for people."""
    s = simulation.summary
    title = "Simulation" + (" (INTERRUPTED: of the batches that were read)" if s["interrupted"] else "")
    lines = [
        title,
        "=" * len(title),
        f"{s['lookups']:,} lookups in {s['batches']:,} batches, {s['distinct']:,} distinct in their batch; "
        f"{s['rows_touched']:,} of {s['table_rows']:,} rows used; {seconds:.1f} s",
        f"{'policy':<8}{'cache rows':>14}{'share':>8}{'horizon':>11}{'depth':>7}{'fills':>14}{'a batch':>10}"
        f"{'hit rate':>10}{'/ MIN(0)':>10}{'/ MIN(d)':>10}",
    ]
    grown = shortened = False
    for r in simulation.results:
        mark = "*" if r["grown_to_rows"] else ""
        grown = grown or bool(mark)
        held_less = "~" if r["hold_shortened"] and r["fills_over_mind"] else ""
        shortened = shortened or bool(held_less)
        horizon = "all" if r["horizon"] is None else f"{'auto ' * r['horizon_auto']}{r['horizon']}"
        lines.append(
            f"{r['policy']:<8}{format(r['cache_rows'], ',') + mark:>14}{r['cache_ratio']:>8.2%}{horizon:>11}"
            f"{r['prefetch_depth']:>7}{r['fills']:>14,}{r['fills_a_batch']:>10,.0f}"
            f"{r['hit_rate_per_distinct_row']:>10.2%}{_ratio(r['fills_over_min0']):>10}"
            f"{_ratio(r['fills_over_mind']) + held_less:>10}"
        )
    if grown:
        lines.append("* a batch needs more rows than this, so the cache grew (see grown_to_rows in --out).")
    if shortened:
        lines.append(SHORTENED)
    for number, proposal in proposals.items():
        lines.append(_said(simulation.results[number], proposal))
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _said(result: dict[str, Any], proposal: dict[str, Any]) -> str:
    where = (
        f"{result['policy']}, {result['cache_rows']:,} cache rows, horizon {result['horizon']}, "
        f"depth {result['prefetch_depth']}"
    )
    tables, fills, before = proposal["tables"], proposal["fills"], result["fills"]
    if not tables:
        return f"Resident tables ({where}): none pays; the cache keeps the rows that are used again."
    names = ", ".join(f"{t['table']} ({t['rows']:,} rows)" for t in tables)
    verdict = "do it" if fills < before else "do not"
    change = 100 * (fills - before) / before
    return (
        f"Resident tables ({where}): {names}: {fills:,} fills instead of {before:,} ({change:+.1f} %) in the same "
        f"memory: {verdict}."
    )
