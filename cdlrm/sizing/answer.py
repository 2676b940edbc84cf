"""Will it fit, how fast, which cache, what limits me: predictions for several cache sizes, and one sentence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..plan import shards_for
from ..report import size
from .model import HIDDEN, TRAINER, Prediction, padded, predict, useful_shards
from .profiles import Profile
from .traffic import Ids, Traffic, run_planners
from .work import Moves, Shape

USABLE = 0.9
"""Share of a memory that the tables and the model may use."""
CONTEXT_BYTES = 600 << 20
"""A CUDA context with PyTorch's and our kernels: estimate."""
WORTH = 0.03
"""A change that makes the step this much shorter is worth a word."""


@dataclass(frozen=True)
class Row:
    """The answer for one cache size."""

    traffic: Traffic
    prediction: Prediction
    hidden: bool
    device_bytes: int
    host_bytes: int
    fits_device: bool
    fits_host: bool

    @property
    def fits(self) -> bool:
        return self.fits_device and self.fits_host


@dataclass(frozen=True)
class Question:
    """What is asked: machine, model, batches, settings."""

    profile: Profile
    shape: Shape
    ids: Ids
    horizon: int | str  # "auto": as each cache size suits
    depth: int
    tf32: bool = False

    def ask(self, traffic: Traffic) -> Row:
        moves = traffic.moves(self.ids)
        slots = None if traffic.resident else traffic.cache_rows
        prediction = self._predict(moves, slots)
        without = self._predict([m._replace(copied=0, generated=0, written=0) for m in moves], slots)
        device, host = self.device_bytes(traffic), self.host_bytes(traffic)
        both = device + host if self.profile.kind == "cpu" else host
        fits_device = device <= USABLE * self.profile.device_memory_bytes
        return Row(
            traffic, prediction, prediction.step_seconds <= HIDDEN * without.step_seconds, device, host,
            fits_device, both <= USABLE * self.profile.host_memory_bytes,
        )  # fmt: skip

    def _predict(self, moves: Sequence[Moves], slots: int | None, **changed: Any) -> Prediction:
        profile = dataclasses.replace(self.profile, **changed.pop("profile", {}))
        depth, shards = changed.get("depth", self.depth), changed.get("shards")
        return predict(profile, self.shape, moves, depth, slots, self.tf32, shards)

    def step_with(self, traffic: Traffic, **changed: Any) -> float:
        """Seconds a step if something were different: depth, shards, or figures of the profile."""
        slots = None if traffic.resident else traffic.cache_rows
        return self._predict(traffic.moves(self.ids), slots, **changed).step_seconds

    def device_bytes(self, traffic: Traffic) -> int:
        """Cache, MLPs with gradients, activations, and the batches and plans in flight."""
        gpu, shape = self.profile.kind == "gpu", self.shape
        record = padded(shape.record_bytes) if gpu else shape.record_bytes
        widths = sum(b for _, b in shape.layers)
        activations = 4 * shape.batch_size * (2 * widths + 4 * shape.vectors * shape.dim + 2 * shape.vectors**2)
        lookups = int(self.ids.lookups.max())
        in_flight = (self.depth + 2) * (4 * shape.batch_size * shape.mlp_bot[0] + 16 * lookups)
        return traffic.cache_rows * record + 8 * shape.parameters + activations + in_flight + CONTEXT_BYTES * gpu

    def host_bytes(self, traffic: Traffic) -> int:
        """Store (pinned for a GPU), what is known of every row and slot, and the window of batches."""
        if traffic.resident:
            return self.ids.rows // 4  # flags
        largest = max(rows.size for rows in self.ids.distinct)
        batch = 24 * int(self.ids.lookups.max()) + 16 * largest + 4 * self.shape.batch_size * self.shape.mlp_bot[0]
        a_row = (padded(self.shape.record_bytes) if self.profile.kind == "gpu" else self.shape.record_bytes) + 12.25
        return int(self.ids.rows * a_row) + 45 * traffic.cache_rows + (traffic.horizon + self.depth + 2) * batch


@dataclass(frozen=True)
class Answer:
    """`rows` by rising cache size, the last with everything resident; `hiding`: the smallest cache that hides the
    transfer, of any size; `chosen`: what the advice is about, also of any size (None: nothing fits)."""

    question: Question
    rows: list[Row]
    hiding: Row | None
    chosen: Row | None
    advice: str


def answer(question: Question, sizes: Sequence[int], progress: Callable[[int], Any] = lambda done: None) -> Answer:
    """Plans and predictions for caches of these sizes (rows) and for everything resident; advice for any size."""
    sizes = sorted({*sizes, question.ids.rows})
    traffics = run_planners(question.ids, sizes, question.horizon, question.depth, progress)
    different = {traffic.cache_rows: traffic for traffic in traffics}  # several may have grown to the same
    rows = [question.ask(different[cache_rows]) for cache_rows in sorted(different)]
    hiding = smallest_hiding(question, rows)
    considered = [*rows, *rows_between(question, rows), *([] if hiding is None else [hiding])]
    chosen = _choose(considered)
    return Answer(question, rows, hiding, chosen, advise(question, considered, chosen))


def smallest_hiding(question: Question, rows: Sequence[Row]) -> Row | None:
    """The smallest cache whose transfers are hidden, and those of all larger ones.

    Between two sizes that were planned, fills follow the one-pass curve of LRU, scaled to meet the planned ones.
    """
    hidden = len(rows)
    while hidden > 0 and rows[hidden - 1].hidden:
        hidden -= 1
    if hidden == len(rows):
        return None
    if hidden == 0:
        return rows[0]
    low, best = rows[hidden - 1].traffic, rows[hidden]
    high = _as_cache(question.ids, best.traffic)
    left, right = low.cache_rows, high.cache_rows
    while right > left * 1.02 + 1:
        middle = round(math.sqrt(left * right))
        row = question.ask(_between(question.ids, low, high, middle))
        if row.hidden:
            best, right = row, middle
        else:
            left = middle
    return best


def rows_between(question: Question, rows: Sequence[Row]) -> list[Row]:
    """About the answers for the powers of two (where the planner's shards double) between the sizes planned."""
    found = []
    for low, above in zip(rows, rows[1:], strict=False):
        high, cache_rows = _as_cache(question.ids, above.traffic), 1 << low.traffic.cache_rows.bit_length()
        while cache_rows < high.cache_rows:
            found.append(question.ask(_between(question.ids, low.traffic, high, cache_rows)))
            cache_rows *= 2
    return found


def _as_cache(ids: Ids, traffic: Traffic) -> Traffic:
    """A cache of all rows, which fills each once, in the place of everything resident; others as they are."""
    return dataclasses.replace(traffic, fills=ids.first) if traffic.resident else traffic


def _between(ids: Ids, low: Traffic, high: Traffic, cache_rows: int) -> Traffic:
    """About the traffic of a cache between two that were planned."""
    before, after = (float(traffic.fills.sum()) for traffic in (low, high))
    at = math.log(cache_rows / low.cache_rows) / math.log(high.cache_rows / low.cache_rows)
    fills = before + at * (after - before)
    curve = ids.curve
    if low.cache_rows >= curve.largest:
        lru = [float(curve.fills(rows)) for rows in (low.cache_rows, cache_rows, high.cache_rows)]
        fills = lru[1] * (before / lru[0] + at * (after / lru[2] - before / lru[0]))
    touched = float(ids.first.sum())
    repeated = max(before - touched, 1.0)
    share = min(max((fills - touched) / repeated, 0.0), 1.0)
    return low.scaled(cache_rows, share, ids)


def _choose(considered: Sequence[Row]) -> Row | None:
    fitting = [row for row in considered if row.fits]
    if not fitting:
        return None
    least = min(row.prediction.step_seconds for row in fitting)
    good = [row for row in fitting if row.prediction.step_seconds <= HIDDEN * least]
    resident = [row for row in good if row.traffic.resident]  # nothing moves, nothing can go wrong
    return resident[0] if resident else min(good, key=lambda row: row.traffic.cache_rows)


def advise(question: Question, considered: Sequence[Row], chosen: Row | None) -> str:
    """One sentence: what to do, and what would help.  `considered`: the smallest cache first."""
    if chosen is None:
        return _does_not_fit(question.profile, considered[0])
    ids, prediction = question.ids, chosen.prediction
    step, cached = prediction.step_seconds, chosen.traffic.cache_rows
    pace = f"{1e3 * step:.2f} ms a step, {question.shape.batch_size / step:,.0f} samples/s"
    limit = f"limited by {prediction.limit}"
    if chosen.traffic.resident:
        return (
            f"Keep everything resident: all {cached:,} rows fit ({size(chosen.device_bytes)} in all); {pace}, {limit}."
        )
    use = f"Use a cache of {cached:,} rows ({cached / ids.rows:.2%}, {size(chosen.device_bytes)} in all)"
    waiting = f", of which {prediction.stall_share:.0%} is waiting" if prediction.limit not in TRAINER else ""
    hides = ": it hides the transfer" if chosen.hidden else ""
    resident = next(row for row in considered if row.traffic.resident)
    apart = "" if resident.fits else f"; everything resident needs {_needs(resident)}, which is not there"
    use += ", estimated from those planned" * chosen.traffic.estimated
    return f"{use}{hides}: {pace}{waiting}, {limit}{apart}; {_what_helps(question, considered, chosen)}."


def _does_not_fit(profile: Profile, least: Row) -> str:
    if not least.fits_host:
        have = f"{size(profile.host_memory_bytes)}, of which {USABLE:.0%} is taken as usable"
        needs = f"{size(least.host_bytes)} of host memory, and there are {have}"
        return f"It does not fit: the tables need {needs}; keep them in a file (--store file:DIR) or use a smaller dim."
    have = f"{size(profile.device_memory_bytes)}, of which {USABLE:.0%} is taken as usable"
    needs = f"{size(least.device_bytes)}, and {profile.name} has {have}"
    return f"It does not fit: the smallest cache asked for needs {needs}; use smaller caches, batches or a smaller dim."


def _needs(row: Row) -> str:
    return f"{size(row.host_bytes)} of host memory" if row.fits_device else f"{size(row.device_bytes)} of memory"


def _what_helps(question: Question, considered: Sequence[Row], chosen: Row) -> str:
    step, traffic, profile = chosen.prediction.step_seconds, chosen.traffic, question.profile
    changes: list[tuple[str, float]] = [
        (f"--prefetch-depth {question.depth + 1}", question.step_with(traffic, depth=question.depth + 1)),
        ("twice the cores", question.step_with(traffic, profile={"cores": 2 * profile.cores})),
    ]
    if profile.kind == "gpu":
        shards = useful_shards(profile, float(question.ids.lookups.mean()))
        if shards > shards_for(traffic.cache_rows):
            name = f"shards={shards} (of EmbeddingBagCollection; planned on several cores)"
            changes.append((name, question.step_with(traffic, shards=shards)))
        faster = {
            name: 2 * getattr(profile, name)
            for name in ("link_to_device_gb_per_s", "link_to_host_gb_per_s", "link_both_gb_per_s")
        }
        changes.append(("a link twice as fast", question.step_with(traffic, profile=faster)))
    least = min(row.prediction.step_seconds for row in considered)  # of one that does not fit, or of `chosen`
    best = min(
        (row for row in considered if row.prediction.step_seconds <= HIDDEN * least), key=lambda row: row.device_bytes
    )
    what = "for everything resident" if best.traffic.resident else f"for a cache of {best.traffic.cache_rows:,} rows"
    changes.append((f"{_needs(best)} {what}", best.prediction.step_seconds))
    said = [f"{name} would make it {1 - seconds / step:.0%} shorter" for name, seconds in changes
            if seconds < (1 - WORTH) * step]  # fmt: skip
    link = "a faster link, " if profile.kind == "gpu" else ""
    none = f"no other cache size, {link}deeper prefetch or more cores would make it {WORTH:.0%} shorter"
    return ", ".join(said) if said else none
