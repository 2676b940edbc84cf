"""`cdlrm plan` and `cdlrm calibrate`: their flags, their tables and their files."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import (
    add_command,
    add_common,
    add_settings,
    check_file,
    number_list,
    quiet_openmp,
    settings_of,
    whole,
    write_json,
)
from ..config import TrainConfig
from ..errors import ConfigError
from ..simulate.command import Bar, add_trace, open_trace

if TYPE_CHECKING:
    from ..simulate.trace import Trace
    from .answer import Answer, Row
    from .profiles import Profile
    from .traffic import Ids

PLAN_ABOUT = """\
Before buying or starting: will it fit, how fast will it be, which cache, and what limits it.  The ids of the data are
read and planned for caches of several sizes; a profile of the machine says how long it takes to move and compute what
the plans say.  Nothing is trained.  Times leave out reading the data.
"""
PLAN_EXAMPLES = """\
examples:
  cdlrm plan --gpu rtx4090
  cdlrm plan --gpu a100-40 --data 'logs/*.orc' --table-rows 1000000 --arch-sparse-feature-size 64
  cdlrm plan --gpu rtx3060 --cores 6 --host-memory 32 --cache-ratio 0.02 0.05 0.1 --json plan.json
  cdlrm calibrate --out here.json && cdlrm plan --profile here.json --mini-batch-size 4096
"""
CALIBRATE_ABOUT = """\
Measure this machine for `cdlrm plan`: memory, the stages of a step on small tables, the MLPs, and whole steps; about
a minute, longer on a busy machine.  What else runs meanwhile makes the machine look slower than it is: the repeats
tell, and the profile and `cdlrm plan` say so.
"""
CALIBRATE_EXAMPLES = """\
example:
  cdlrm calibrate --out here.json && cdlrm plan --profile here.json
"""
DEFAULT_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
BESIDE_TRACE = (
    "arch_sparse_feature_size", "optimizer", "mini_batch_size", "arch_mlp_bot", "arch_mlp_top", "arch_interaction_op",
    "arch_interaction_itself", "horizon", "prefetch_depth",
)  # fmt: skip


def plan_fields() -> list[dataclasses.Field[Any]]:
    """Settings of `cdlrm train` that say what is looked up and computed."""
    names = ("mini_batch_size", "num_batches", "nepochs", "seed", "optimizer", "horizon", "prefetch_depth")
    return settings_of(lambda f: f.metadata["group"] in ("data", "synthetic", "model") or f.name in names)


def add_plan(commands: Any) -> None:
    """Register `cdlrm plan` with the parser of the command line."""
    parser = add_command(
        commands,
        "plan",
        run_plan,
        usage="--gpu NAME | --profile FILE [flags]",
        about="will it fit, how fast, which cache, what limits: a prediction for a GPU or this machine",
        description=PLAN_ABOUT,
        examples=PLAN_EXAMPLES + "\nGPUs: " + _gpu_names() + "; cpu: this machine, measured now.\n",
    )
    machine = parser.add_argument_group("Machine")
    machine.add_argument("--gpu", metavar="NAME", default=None, help="a GPU, see below, or cpu")
    machine.add_argument("--profile", metavar="FILE", default=None, help="a profile that `cdlrm calibrate` wrote")
    machine.add_argument("--cores", metavar="N", default=None, help="cores of the host (default: the profile's)")
    machine.add_argument("--host-memory", metavar="GB", default=None, help="of the host (default: the profile's)")
    machine.add_argument("--tf32", action="store_true", help="the MLPs use TF32, as torch does when it is told to")
    about = "each flag takes several values (default: six from 1 % to half); all rows resident is always one of them"
    grid = parser.add_argument_group("Caches", about)
    grid.add_argument("--cache-rows", nargs="+", metavar="N", default=[], help="rows that the cache holds")
    grid.add_argument("--cache-ratio", nargs="+", metavar="X", default=[], help="the same as a share of all rows")
    data = parser.add_argument_group("Data and model", "as for `cdlrm train`, or a recorded trace")
    add_trace(data)
    add_settings(data, plan_fields())
    output = parser.add_argument_group("Output")
    output.add_argument("--json", metavar="FILE", default=None, help="also write the answer to this file, as JSON")
    add_common(output)


def add_calibrate(commands: Any) -> None:
    """Register `cdlrm calibrate` with the parser of the command line."""
    parser = add_command(
        commands, "calibrate", run_calibrate, usage="[--out FILE]", about="measure this machine for `cdlrm plan`",
        description=CALIBRATE_ABOUT, examples=CALIBRATE_EXAMPLES,
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE", default="profile.json", help="the profile (default: profile.json)")
    add_common(parser)


def _gpu_names() -> str:
    from .profiles import GPUS

    return ", ".join(GPUS)


def run_calibrate(found: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    check_file("--out", found.out)
    profile = _measure(found.progress)
    from .profiles import save_profile

    save_profile(profile, Path(found.out))
    sys.stdout.write(render_profile(profile) + f"\nwritten to {found.out}\n")
    return 0


def _measure(shown: bool) -> Profile:
    """This machine's profile, with progress."""
    quiet_openmp()  # as `cdlrm train` does, so that it is what will run
    from .calibrate import calibrate

    with Bar(100, shown, "calibrate", " %") as bar:
        done = 0

        def tell(share: float) -> None:
            nonlocal done
            bar.update(int(100 * share) - done)
            done = max(done, int(100 * share))

        return calibrate(tell)


def render_profile(profile: Profile) -> str:
    from .profiles import doubt

    records = ", ".join(f"{bytes_} B {rate:.1f}" for bytes_, rate in profile.host_record_gb_per_s.items())
    doubts = doubt(profile)
    return "\n".join([
        f"{profile.name}: {profile.cores} cores, {profile.host_memory_bytes / 2**30:.1f} GiB",
        f"  {'memory, sequential':<34}{profile.host_gb_per_s:>10.1f} GB/s",
        f"  {'records at random places, one core':<34}{'':>3}{records} GB/s",
        f"  {'planning, one core':<34}{profile.planner_lookups_per_s / 1e6:>10.1f} million lookups/s",
        f"  {'MLPs, at best':<34}{1e3 * profile.fp32_tflops:>10.1f} GFLOP/s",
        f"  {'a core second beside the trainer':<34}{profile.background_cost:>10.2f} s of the trainer's",
        f"  {'repeats, median over least':<34}{profile.spread:>10.2f}",
        *([] if doubts is None else [doubts]),
    ])  # fmt: skip


def _profile(found: argparse.Namespace) -> Profile:
    from .profiles import gpu_profile, load_profile

    if (found.gpu is None) == (found.profile is None):
        what = "both are given" if found.gpu else "none is given"
        raise ConfigError(f"--gpu and --profile: {what} where one is needed; GPUs: {_gpu_names()}, or cpu.")
    cores = whole("--cores", found.cores, 1)
    memory = None if found.host_memory is None else number_list("--host-memory", float, [found.host_memory])[0]
    if memory is not None and not 0 < memory < math.inf:
        raise ConfigError(f"--host-memory {found.host_memory}: must be above 0, in GB.")
    if found.profile is not None:
        profile = load_profile(found.profile)
    else:
        profile = _measure(found.progress) if found.gpu == "cpu" else gpu_profile(found.gpu)
    changed: dict[str, Any] = {}
    if cores is not None:
        changed["cores"] = cores
    if memory is not None:
        changed["host_memory_bytes"] = int(memory * 1e9)
    return dataclasses.replace(profile, **changed)


def run_plan(found: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    check_file("--json", found.json)
    quiet_openmp()  # `--gpu cpu` measures
    from ..simulate.grid import Grid
    from .answer import Question, answer
    from .traffic import read_ids
    from .work import shape_of

    grid = Grid(
        cache_rows=number_list("--cache-rows", int, found.cache_rows),
        cache_ratio=number_list("--cache-ratio", float, found.cache_ratio),
    )
    config, trace = open_trace(found, plan_fields(), BESIDE_TRACE)
    asked = bool(grid.cache_rows or grid.cache_ratio)
    sizes = (grid if asked else Grid(cache_ratio=list(DEFAULT_RATIOS))).sizes(trace.num_rows)
    profile = _profile(found)  # after what may be refused: measuring takes a minute
    with Bar(trace.batches, found.progress, "read") as bar:
        ids = read_ids(trace, bar.update)
    config = _with_batch_size(found, config, ids, len(trace.names))
    shape = shape_of(config, len(trace.names), _num_dense(config, trace))
    question = Question(profile, shape, ids, config.horizon, config.prefetch_depth, found.tf32)
    with Bar(len({*sizes, ids.rows}), found.progress, "plan", " caches") as bar:
        given = answer(question, sizes, bar.update)
    sys.stdout.write(render(given) + "\n")
    if found.json is not None:
        write_json(found.json, as_mapping(given))
    return 0


def _num_dense(config: TrainConfig, trace: Trace) -> int:
    """Dense columns of the data; a recorded trace has none, so as many as the bottom MLP takes, or Criteo's 13."""
    from ..simulate.trace import SourceTrace

    if isinstance(trace, SourceTrace):
        return trace.source.num_dense
    return 13 if config.arch_mlp_bot is None else int(config.arch_mlp_bot.split("-")[0])


def _with_batch_size(found: argparse.Namespace, config: TrainConfig, ids: Ids, features: int) -> TrainConfig:
    """Of a recorded trace the batch size is not known: as many samples as a feature has lookups."""
    if found.trace is None or hasattr(found, "mini_batch_size"):
        return config
    return dataclasses.replace(config, mini_batch_size=max(1, round(float(ids.lookups.mean()) / features)))


def render(given: Answer) -> str:
    """The answer as text."""
    from .profiles import doubt

    q = given.question
    ids, shape = q.ids, q.shape
    title = f"Plan for {q.profile.name}"
    of = "batches" if ids.complete else "first batches"
    distinct = sum(d.size for d in ids.distinct) / ids.batches
    lines = [
        title,
        "=" * len(title),
        f"{ids.rows:,} rows of {shape.record_bytes} bytes in {shape.features} tables "
        f"({_gib(ids.rows * shape.record_bytes)}), dim {shape.dim}, {shape.optimizer}; batches of "
        f"{shape.batch_size:,}, horizon {q.horizon}, prefetch depth {q.depth}",
        f"from {ids.batches:,} {of}: {ids.lookups.mean():,.0f} lookups, {distinct:,.0f} distinct rows each; figures "
        "are of the warm part",
        f"{'cache rows':>13}{'share':>8}{'device':>11}{'host':>11}{'fits':>6}{'fills':>9}{'copied':>9}{'ms/step':>9}"
        f"{'samples/s':>11}{'stall':>7}  limit",
    ]
    lines += [_line(row, ids, shape.batch_size) for row in given.rows]
    if any(row.traffic.grown for row in given.rows):
        lines.append("* a batch needs more rows than the cache that was asked for, which would grow to this")
    if not all(row.traffic.full for row in given.rows):
        lines.append("+ not full within these batches: a longer trace would copy more rows")
    if given.hiding is not None and given.hiding not in given.rows:
        lines.append(f"smallest cache that hides the transfer: about {given.hiding.traffic.cache_rows:,} rows")
    lines += _stages(given.chosen or given.rows[-1])
    if q.profile.kind == "gpu":
        lines.append(
            "Not measured on this GPU: from its data sheet and the estimates in cdlrm.sizing.profiles.  Its host is "
            f"assumed: {q.profile.cores} cores, {q.profile.host_memory_bytes / 1e9:.0f} GB (--cores, --host-memory)."
        )
    lines.append(
        f"Reading took {1e3 * ids.read_seconds:.1f} ms a batch on one thread here; it overlaps, and is left out."
    )
    doubts = doubt(q.profile)
    lines += [] if doubts is None else [doubts]
    lines.append(given.advice)
    return "\n".join(lines)


def _stages(row: Row) -> list[str]:
    """What each stage of a step takes and moves; MBU: bandwidth utilisation."""
    lines = [f"A step with {row.traffic.cache_rows:,} rows cached"]
    lines.append(f"  {'stage':<20}{'ms':>9}{'MiB':>9}{'GB/s':>9}{'MBU':>7}")
    for stage in row.prediction.stages:
        if stage.seconds:
            lines.append(
                f"  {stage.name:<20}{1e3 * stage.seconds:>9.3f}{stage.bytes / 2**20:>9.2f}"
                f"{stage.bytes / stage.seconds / 1e9:>9.1f}{stage.bandwidth_utilisation:>7.0%}"
            )
    return lines


def _line(row: Row, ids: Ids, batch_size: int) -> str:
    moves, p = row.traffic.moves(ids), row.prediction
    fills = sum(m.copied + m.generated for m in moves) / len(moves)
    copied = sum(m.copied for m in moves) / len(moves)
    mark = "*" if row.traffic.grown else ("" if row.traffic.full else "+")
    fits = "yes" if row.fits else ("host" if row.fits_device else "no")
    cached, limit = row.traffic.cache_rows, p.limit + " (all rows resident)" * row.traffic.resident
    return (
        f"{format(cached, ',') + mark:>13}{cached / ids.rows:>8.2%}{_gib(row.device_bytes):>11}"
        f"{_gib(row.host_bytes):>11}{fits:>6}{fills:>9,.0f}{copied:>9,.0f}{1e3 * p.step_seconds:>9.2f}"
        f"{batch_size / p.step_seconds:>11,.0f}{p.stall_share:>7.0%}  {limit}"
    )


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def as_mapping(given: Answer) -> dict[str, Any]:
    """The answer for programs: sizes in bytes, times in seconds."""
    q = given.question

    def row(r: Row) -> dict[str, Any]:
        moves, p = r.traffic.moves(q.ids), r.prediction
        return {
            "cache_rows": r.traffic.cache_rows,
            "cache_ratio": r.traffic.cache_rows / q.ids.rows,
            "grows": r.traffic.grown,
            "full": r.traffic.full,
            "estimated": r.traffic.estimated,
            "device_bytes": r.device_bytes,
            "host_bytes": r.host_bytes,
            "fits_device": r.fits_device,
            "fits_host": r.fits_host,
            "rows_a_batch": {
                name: sum(getattr(m, name) for m in moves) / len(moves) for name in moves[0]._fields
            },
            "step_seconds": p.step_seconds,
            "samples_per_second": q.shape.batch_size / p.step_seconds,
            "trainer_seconds": p.trainer_seconds,
            "stall_seconds": p.stall_seconds,
            "transfer_hidden": r.hidden,
            "limit": p.limit,
            "stages": {
                s.name: {
                    "resource": s.resource, "seconds": s.seconds, "bytes": s.bytes,
                    "bandwidth_utilisation": s.bandwidth_utilisation,
                }
                for s in p.stages
            },
        }  # fmt: skip

    return {
        "profile": dataclasses.asdict(q.profile),
        "shape": {**dataclasses.asdict(q.shape), "record_bytes": q.shape.record_bytes},
        "horizon": q.horizon,
        "prefetch_depth": q.depth,
        "table_rows": q.ids.rows,
        "batches": q.ids.batches,
        "read_seconds_a_batch": q.ids.read_seconds,
        "caches": [row(r) for r in given.rows],
        "smallest_hiding": None if given.hiding is None else row(given.hiding),
        "chosen": None if given.chosen is None else row(given.chosen),
        "advice": given.advice,
    }
