"""How long a step takes: a roofline for every stage, and how the stages overlap.

A stage's time is what it moves or computes, over what the machine can move or compute (GPUs), or the sum of its units
of work times their measured cost (this machine, see `calibrate`).  Three resources work at the same time:

    trainer    lookup, update and the dense part, one after another: on the GPU, or on all cores
    transfer   write-back and fill of one batch after those of the batch before; with prefetch depth d the transfer of
               batch j may begin when batch j-d-1 has ended
    planner    scan and plan, in the window, many batches ahead: only its mean counts

A step is what `pipeline` makes of these, batch by batch, so a few batches with many fills are smoothed over d batches.
Where the device is the host, planner and transfer take cores from the trainer (`contended`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..plan.planner import LOOKUPS_PER_THREAD, MAX_SHARDS, shards_for
from .fit import cost
from .profiles import GB, Profile
from .work import (
    Moves,
    Shape,
    dense_counts,
    fill_counts,
    lookup_counts,
    plan_counts,
    resident_counts,
    update_counts,
    write_counts,
)

TRAINER = ("lookup", "update", "dense")
HIDDEN = 1.02
"""A transfer is hidden when the step is at most this much longer than without it."""
NAMED = 0.1
"""Waiting of at least this share of the step is named as the limit, before what the trainer does."""


@dataclass(frozen=True)
class Stage:
    """Means over batches.  `core_seconds` of the host; `bytes` that it must move, of a peak of `peak_gb_per_s`."""

    name: str
    resource: str  # trainer, transfer, planner
    seconds: float
    core_seconds: float
    bytes: float
    peak_gb_per_s: float

    @property
    def bandwidth_utilisation(self) -> float:
        """MBU: the bandwidth that it gets, as a share of the peak of what it moves over."""
        return self.bytes / (self.seconds * self.peak_gb_per_s * GB) if self.seconds and self.peak_gb_per_s else 0.0


@dataclass(frozen=True)
class Prediction:
    """Seconds a step.  `trainer_seconds`: without any waiting or sharing of cores."""

    stages: list[Stage]
    step_seconds: float
    trainer_seconds: float
    limit: str

    @property
    def stall_seconds(self) -> float:
        return max(self.step_seconds - self.trainer_seconds, 0.0)

    @property
    def stall_share(self) -> float:
        return self.stall_seconds / self.step_seconds if self.step_seconds else 0.0


def predict(
    profile: Profile, shape: Shape, batches: Sequence[Moves], depth: int, cache_rows: int | None, tf32: bool = False,
    shards: int | None = None,
) -> Prediction:  # fmt: skip
    """The step on this machine, for the rows that move with each of `batches`; `cache_rows` None: all resident.

    `shards` of a GPU's planner (None: as many as the cache size gives)."""
    moves = np.array(batches, np.float64)
    stages = [stages_of(profile, shape, Moves(*row), cache_rows, tf32, shards) for row in moves.tolist()]
    mean = [_mean([each[i] for each in stages]) for i in range(len(stages[0]))]
    by_resource = {
        name: np.array([sum(s.seconds for s in each if s.resource == name) for each in stages])
        for name in ("trainer", "transfer", "planner")
    }
    alone = float(by_resource["trainer"].mean())
    compute = by_resource["trainer"]
    if profile.kind == "cpu":
        compute = np.array([_on_shared_cores(each, profile) for each in stages])
    step = max(pipeline(compute, by_resource["transfer"], depth), float(by_resource["planner"].mean()))
    return Prediction(mean, step, alone, _limit(mean, step, alone, float(compute.mean())))


def pipeline(compute: np.ndarray, transfer: np.ndarray, depth: int) -> float:
    """Mean seconds a step when transfers of a batch wait for the batch before the `depth` last ones to end."""
    end = np.zeros(len(compute))
    moved = 0.0
    for j in range(len(compute)):
        may_begin = end[j - depth - 1] if j > depth else 0.0
        moved = max(moved, may_begin) + transfer[j]
        end[j] = max(end[j - 1] if j else 0.0, moved) + compute[j]
    if len(end) == 1:
        return float(compute[0] + (transfer[0] if depth == 0 else max(transfer[0] - compute[0], 0.0)))
    return float((end[-1] - end[0]) / (len(end) - 1))


def contended(wall: float, core: float, background: float, cores: int) -> float:
    """Seconds of a trainer that takes `wall` alone, with `core` core seconds, beside `background` core seconds.

    The parallel part of the trainer, spread evenly over `cores`, has one core less while the background runs: its
    threads are woken where the one that needs them runs, not where the background is.
    """
    if cores < 2:
        return core + background
    parallel = min(max(core - wall, 0.0) / (cores - 1), wall)
    beside = wall + parallel / (cores - 1)  # the trainer's time with one core less all the time
    slowed = wall + background * (1.0 - wall / beside) if beside > 0 else wall
    return max(min(slowed, beside), (core + background) / cores)


def _on_shared_cores(stages: Sequence[Stage], profile: Profile) -> float:
    trainer = [stage for stage in stages if stage.resource == "trainer"]
    background = sum(stage.core_seconds for stage in stages if stage.resource != "trainer")
    wall, core = sum(s.seconds for s in trainer), sum(s.core_seconds for s in trainer)
    return contended(wall, max(core, wall), background, profile.cores) + profile.background_cost * background


def _mean(stages: Sequence[Stage]) -> Stage:
    first, count = stages[0], len(stages)
    return Stage(
        first.name, first.resource, sum(s.seconds for s in stages) / count,
        sum(s.core_seconds for s in stages) / count, sum(s.bytes for s in stages) / count, first.peak_gb_per_s,
    )  # fmt: skip


def _limit(stages: Sequence[Stage], step: float, alone: float, compute: float) -> str:
    """What takes the longest, in words."""
    longest = max(stages, key=lambda stage: stage.seconds)
    if step - alone < NAMED * step:
        return max((s for s in stages if s.resource == "trainer"), key=lambda s: s.seconds).name
    by_resource = {name: sum(s.seconds for s in stages if s.resource == name) for name in ("transfer", "planner")}
    busiest = max(by_resource, key=lambda name: by_resource[name])
    if by_resource[busiest] >= step / HIDDEN:
        return max((s for s in stages if s.resource == busiest), key=lambda s: s.seconds).name
    if step <= HIDDEN * compute:
        return "cores"
    return longest.name if longest.resource == "transfer" else "prefetch depth"


# --- seconds of the stages ---


def stages_of(
    profile: Profile, shape: Shape, moves: Moves, cache_rows: int | None, tf32: bool = False, shards: int | None = None
) -> list[Stage]:
    """The stages of one batch."""
    if profile.kind == "cpu":
        return _measured(profile, shape, moves, cache_rows is None)
    return _from_data_sheet(profile, shape, moves, cache_rows, tf32, shards)


def planning_threads(profile: Profile, lookups: float, shards: int) -> int:
    """Threads of the planner: two cores are the trainer's and the transfer's, and few lookups are worth one only.

    Their speeds are taken to add up, which we could not measure: our machine has two cores."""
    return int(max(1, min(profile.cores - 2, shards, lookups // LOOKUPS_PER_THREAD)))


def useful_shards(profile: Profile, lookups: float) -> int:
    """The fewest shards that let the planner use as many threads as it can here."""
    threads = planning_threads(profile, lookups, MAX_SHARDS)
    return 1 << (threads - 1).bit_length()


def _lookup_bytes(shape: Shape, moves: Moves) -> tuple[float, float]:
    """Bytes at random places (distinct rows), and one after another (outputs, slots)."""
    return moves.distinct * 4 * shape.dim, moves.lookups * (4 * shape.dim + 4)


def _update_bytes(shape: Shape, moves: Moves) -> tuple[float, float]:
    """Records read and written; gradients checked and read, segments."""
    return 2 * moves.distinct * shape.record_bytes, moves.lookups * (2 * 4 * shape.dim + 8)


def _dense_bytes(shape: Shape) -> float:
    """Activations and their gradients, written and read; the interaction's operands; parameters."""
    values = shape.batch_size * (sum(b for _, b in shape.layers) + shape.vectors * shape.dim + shape.pairs)
    return 4.0 * (6 * values + 5 * shape.parameters)


def _plan_bytes(moves: Moves) -> float:
    """Ids read twice, entry, slot and segment written; of a distinct row: map, ring, slot and lists."""
    return moves.lookups * (2 * 8 + 3 * 4) + moves.distinct * (8 + 16 + 16 + 24)


def _measured(profile: Profile, shape: Shape, moves: Moves, resident: bool) -> list[Stage]:
    def stage(name: str, resource: str, of: str, counts: dict[str, float], moved: float) -> Stage:
        wall, core = (cost(profile.costs[of][kind], counts) for kind in ("wall", "core"))
        return Stage(name, resource, wall, max(core, wall), moved, profile.host_gb_per_s)

    record = shape.record_bytes
    fills, writes = fill_counts(shape, moves), write_counts(shape, moves)
    if not moves.copied and not moves.generated:
        fills = dict.fromkeys(fills, 0.0)
    if resident:
        plan = stage("segments", "planner", "resident", resident_counts(moves), _plan_bytes(moves))
    else:
        plan = stage("scan + plan", "planner", "plan", plan_counts(moves), _plan_bytes(moves))
    return [
        plan,
        stage("write-back", "transfer", "transfer", writes, 2 * moves.written * record),
        stage("fill", "transfer", "transfer", fills, (2 * moves.copied + moves.generated) * record),
        stage("lookup", "trainer", "lookup", lookup_counts(shape, moves), sum(_lookup_bytes(shape, moves))),
        stage("update", "trainer", "update", update_counts(shape, moves), sum(_update_bytes(shape, moves))),
        stage("dense", "trainer", "dense", dense_counts(shape), _dense_bytes(shape)),
    ]


LOOKUP_LAUNCHES, UPDATE_LAUNCHES = 1, 4
LAUNCHES_A_LAYER, OTHER_LAUNCHES = 10, 30
"""Kernel launches of a step: ours, with long rows (held by tests/test_gpu_driver.py); PyTorch's forward, backward and
optimizer, counted roughly."""


def _from_data_sheet(
    profile: Profile, shape: Shape, moves: Moves, cache_rows: int | None, tf32: bool, shards: int | None
) -> list[Stage]:
    p, launch = profile, profile.launch_us * 1e-6
    random = p.device_gb_per_s * p.device_random_share * GB
    if cache_rows is None:
        planners = max(1, min(p.cores - 2, shape.features))
    else:
        planners = planning_threads(p, moves.lookups, shards or shards_for(cache_rows))
    plan = moves.lookups / ((p.segment_lookups_per_s if cache_rows is None else p.planner_lookups_per_s) * planners)
    record = padded(shape.record_bytes)
    fill, gather = fill_seconds(p, record, moves.copied)
    make = moves.generated * record / random + (launch if moves.copied or moves.generated else 0.0)
    write = moves.written * record
    down = write / (p.link_to_host_gb_per_s * p.write_share * GB)
    dense = max(
        shape.dense_flops / ((p.tf32_tflops if tf32 else p.fp32_tflops) * p.dense_share * 1e12)
        + _dense_bytes(shape) / (p.device_gb_per_s * GB),
        (len(shape.layers) * LAUNCHES_A_LAYER + OTHER_LAUNCHES) * launch,
    )

    def on_device(name: str, parts: tuple[float, float], launches: int) -> Stage:
        seconds = max(parts[0] / random + parts[1] / (p.device_gb_per_s * GB), launches * launch)
        return Stage(name, "trainer", seconds, 0.0, sum(parts), p.device_gb_per_s)

    return [
        Stage("segments" if cache_rows is None else "scan + plan", "planner", plan, plan * planners, _plan_bytes(moves),
              p.host_gb_per_s),
        Stage("write-back", "transfer", down + (launch if write else 0.0), 0.0, write, p.link_to_host_gb_per_s),
        Stage("gather on the host", "transfer", gather, gather * p.cores, moves.copied * record if gather else 0.0,
              p.host_gb_per_s),
        Stage("fill", "transfer", fill + make, 0.0, moves.copied * record, p.link_to_device_gb_per_s),
        on_device("lookup", _lookup_bytes(shape, moves), LOOKUP_LAUNCHES),
        on_device("update", _update_bytes(shape, moves), UPDATE_LAUNCHES),
        Stage("dense", "trainer", dense, 0.0, _dense_bytes(shape), p.device_gb_per_s),
    ]  # fmt: skip


def padded(record_bytes: int) -> int:
    """Records start at multiples of 32 bytes, the device's piece of memory."""
    return -(-record_bytes // 32) * 32


def fill_seconds(profile: Profile, record: int, copied: float) -> tuple[float, float]:
    """Seconds on the link and of a gather before it: zero copy, or gathered and staged, whichever is faster."""
    moved = copied * record
    in_place = moved / (profile.zero_copy_rate(record) * GB)
    gather = moved / (profile.host_record_rate(record) * max(profile.cores - 2, 1) * GB)
    staged = moved / (profile.link_to_device_gb_per_s * profile.staged_share * GB)
    if staged + gather < in_place:
        return staged, gather
    return in_place, 0.0
