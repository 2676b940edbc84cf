"""The points of a sweep: every combination of the swept settings, each a whole `TrainConfig`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ..config import TrainConfig
from ..errors import ConfigError, DataError

TIED = "horizon"
"""Value of `--prefetch-depth`: one parameter for both, as caches that prefetch all they know of."""
DEEPEST = 64
BEGINNING = b'{"key": '
"""Of every line: so a line that was cut off is told from the end of somebody else's file."""
SWEPT = ("mini_batch_size", "arch_sparse_feature_size", "cache_rows", "cache_ratio", "horizon", "prefetch_depth")


@dataclasses.dataclass(frozen=True)
class Point:
    """One run.  `tied`: its prefetch depth is its horizon."""

    config: TrainConfig
    tied: bool
    repeat: int
    mode: str  # "train" or "simulate"

    def key(self) -> str:
        """What makes it the same point in another run of the sweep: every setting that can change its figures."""
        fields = dataclasses.fields(TrainConfig)
        settings = {f.name: getattr(self.config, f.name) for f in fields if f.metadata["group"] != "output"}
        return json.dumps([self.mode, self.tied, self.repeat, settings], sort_keys=True)

    def name(self) -> str:
        c = self.config
        size = f"{c.cache_rows:,} rows" if c.cache_rows is not None else f"{100 * c.cache_ratio:g} %"
        depth = "depth = horizon" if self.tied else f"depth {c.prefetch_depth}"
        return (
            f"cache {size}, horizon {c.horizon}, {depth}, batch {c.mini_batch_size}, dim {c.arch_sparse_feature_size}"
        )


def make_points(base: Mapping[str, Any], swept: Mapping[str, Sequence[Any]], *, repeats: int, mode: str) -> list[Point]:
    """All combinations of `swept` (name -> values; `prefetch_depth` may be `TIED`) over the settings `base`.

    Repeats are the outer loop, so that a change of the machine's load does not hit one point alone.  Raises
    ConfigError for settings that cannot be.
    """
    caches: list[dict[str, Any]] = [{"cache_rows": n} for n in swept.get("cache_rows", ())]
    caches += [{"cache_ratio": x} for x in swept.get("cache_ratio", ())]
    others = [name for name in SWEPT if name not in ("cache_rows", "cache_ratio") and name in swept]
    points: dict[str, Point] = {}
    for repeat in range(repeats):
        for cache, values in product(caches or [{}], product(*(swept[name] for name in others))):
            chosen = dict(zip(others, values, strict=True))
            tied = chosen.get("prefetch_depth") == TIED
            if tied:
                chosen["prefetch_depth"] = chosen.get("horizon", "auto")
                if chosen["prefetch_depth"] == "auto":
                    raise ConfigError(f"--prefetch-depth {TIED} needs numbers; give --horizon with at most {DEEPEST}.")
                if chosen["prefetch_depth"] > DEEPEST:
                    raise ConfigError(
                        f"--prefetch-depth {TIED} with --horizon {chosen['horizon']}: a prefetch depth is at most "
                        f"{DEEPEST}; give shorter horizons."
                    )
            config = TrainConfig.from_mapping({**base, **cache, **chosen, "metrics": False, "progress": False})
            point = Point(config, tied, repeat, mode)
            points.setdefault(point.key(), point)
    return list(points.values())


def shown_horizon(line: Mapping[str, Any]) -> str:
    """The horizon of a sweep's line: "8", or "auto 120" where 120 was the newest choice."""
    return f"{'auto ' * line.get('horizon_auto', False)}{line['horizon']}"


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of an earlier run of the sweep.  A last line that was cut off is removed from the file.

    Raises DataError for a file of something else.
    """
    if not file.exists():
        return []
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"--out {file}: cannot be read: {error.strerror or error}.") from error
    whole = data.rfind(b"\n") + 1
    lines = []
    for number, text in enumerate(data[:whole].splitlines(), 1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or "key" not in line:
                raise ValueError
        except ValueError as error:
            raise DataError(f"--out {file}: line {number} is not of a sweep; name another file.") from error
        lines.append(line)
    rest = data[whole:]
    if rest[: len(BEGINNING)] != BEGINNING[: len(rest)]:
        raise DataError(f"--out {file}: line {len(lines) + 1} is not of a sweep; name another file.")
    if rest:
        with file.open("r+b") as stream:
            stream.truncate(whole)
    return lines
