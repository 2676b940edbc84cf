"""`cdlrm sweep`: its flags, its table and its files."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

from ..arguments import (
    WORDS,
    add_command,
    add_common,
    add_grid,
    add_settings,
    check_file,
    given_settings,
    number_list,
    quiet_openmp,
    settings_of,
    whole,
)
from ..config import flag_of
from ..errors import ConfigError
from ..simulate.command import SHORTENED
from .points import SWEPT, TIED, make_points, read_lines, shown_horizon

ABOUT = """\
Train (or, with --simulate, simulate) over cache sizes, horizons and prefetch depths: one JSON line a run, and figures.
A sweep may be stopped at any time: the same command goes on where it stopped, and runs in the file are not repeated.
"""
EXAMPLES = """\
examples:
  cdlrm sweep --cache-ratio 0.1 0.2 0.4 --horizon 1 4 16 64 --num-batches 200 --figures figures
  cdlrm sweep --cache-ratio 0.2 --horizon 1 4 16 64 --prefetch-depth 1 horizon    (one parameter for both, as cDLRM)
  cdlrm sweep --simulate --data 'logs/*.orc' --cache-ratio 0.05 0.1 0.2 --horizon 0 8 32 128 --out plans.jsonl
  cdlrm sweep --mini-batch-size 1024 4096 --arch-sparse-feature-size 16 64 --out shapes.jsonl
"""
GRID: dict[str, tuple[type, str]] = {
    "cache_rows": (int, "rows that the cache holds"),
    "cache_ratio": (float, "the same as a share of all rows (default: 0.1)"),
    "horizon": (int, "batches whose ids are read ahead; auto: as the cache and the batches suit (default: auto)"),
    "prefetch_depth": (int, f"batches whose rows may be copied ahead; {TIED!r}: as many as the horizon (default: 1)"),
    "mini_batch_size": (int, "samples a training step (default: 2048)"),
    "arch_sparse_feature_size": (int, "dim of the tables (default: 16)"),
}
MARKS = {
    "*": "* a batch needs more rows than the cache that was asked for, so it grew to this.",
    "=": f"= the depth is the horizon (--prefetch-depth {TIED}): one parameter for both.",
    "+": "+ a shorter horizon was asked for; it is never below the depth.",
    "~": SHORTENED,
}
# not to be given: they are swept, or would tie the runs together
OTHERS = {"cache_rows", "cache_ratio", "store", "test_data", "test_mini_batch_size"}


def other_fields() -> list[dataclasses.Field[Any]]:
    """Settings of `cdlrm train` that are the same for all runs."""
    others = OTHERS | set(GRID)
    return settings_of(lambda f: f.name not in others and f.metadata["group"] not in ("checkpoint", "output"))


def add_sweep(commands: Any) -> None:
    """Register the command with the parser of the command line."""
    parser = add_command(
        commands, "sweep", run_sweep, about="many runs over cache sizes, horizons and prefetch depths, with figures",
        description=ABOUT, examples=EXAMPLES,
    )  # fmt: skip
    grid = parser.add_argument_group("Grid", "each flag takes several values; every combination is a run")
    add_grid(grid, GRID)
    grid.add_argument("--repeats", metavar="N", default="1", help="runs of each; figures show the least (default: 1)")
    grid.add_argument("--simulate", action="store_true", help="count fills from ids alone, without training")
    output = parser.add_argument_group("Output")
    output.add_argument(
        "--out", metavar="FILE", default="sweep.jsonl", help="one JSON line a run; appended to (default: sweep.jsonl)"
    )
    output.add_argument("--figures", metavar="DIR", default=None, help="draw the figures into this folder")
    output.add_argument("--figure-format", metavar="png|svg", default="png", help="(default: png)")
    add_common(output)
    add_settings(parser.add_argument_group("Every run", "as for `cdlrm train`"), other_fields())


def _swept(found: argparse.Namespace) -> dict[str, list[Any]]:
    given = vars(found)
    swept: dict[str, list[Any]] = {}
    for name in SWEPT:
        if name in given:
            words = given[name]
            tied = [TIED] if name == "prefetch_depth" and TIED in words else []
            numbers = [word for word in words if word not in tied]
            swept[name] = number_list(flag_of(name), GRID[name][0], numbers, WORDS.get(name, ())) + tied
    return swept


def run_sweep(found: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    quiet_openmp()
    from .run import Appender, Stopped, check_data, simulate_points, train_points

    repeats = whole("--repeats", found.repeats, 1) or 1
    if found.figure_format not in ("png", "svg"):
        raise ConfigError(f"--figure-format {found.figure_format}: expected png or svg.")
    if found.simulate and repeats > 1:
        raise ConfigError("--repeats with --simulate: counts do not vary; leave --repeats out.")
    base = given_settings(found, other_fields())
    points = make_points(base, _swept(found), repeats=repeats, mode="simulate" if found.simulate else "train")
    check_file("--out", found.out)
    _check_figures(found.figures)
    check_data(points)
    file = Path(found.out)
    done = {line["key"] for line in read_lines(file)}
    todo = [point for point in points if point.key() not in done]
    stopped = False
    try:
        with Bar(len(points), len(points) - len(todo), found.progress) as bar:
            (simulate_points if found.simulate else train_points)(todo, Appender(file), bar.advance)
    except (Stopped, KeyboardInterrupt):
        stopped = True
    wanted = {point.key() for point in points}
    lines = [line for line in read_lines(file) if line["key"] in wanted]
    text = [render(lines), f"{len(lines)} of {len(points)} runs are in {file}, {len(points) - len(todo)} from before."]
    if stopped:
        text.append("INTERRUPTED: the same command goes on with the others.")
    elif found.figures is not None:
        from .figures import draw_all

        written = draw_all(lines, Path(found.figures), found.figure_format)
        text.append("figures: " + ", ".join(str(path) for path in written))
    sys.stdout.write("\n".join(text) + "\n")
    return 130 if stopped else 0


def _check_figures(folder: str | None) -> None:
    if folder is None:
        return
    from ..simulate.figure import require_matplotlib

    require_matplotlib()
    if Path(folder).exists() and not Path(folder).is_dir():
        raise ConfigError(f"--figures {folder}: is a file; name a folder.")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)  # now, not after hours of runs
    except OSError as error:
        raise ConfigError(f"--figures {folder}: cannot be made ({error.strerror}); name another folder.") from error


class Bar:
    """Runs done and time left, on standard error."""

    def __init__(self, total: int, done: int, shown: bool) -> None:
        from tqdm import tqdm

        form = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total} runs [{elapsed}, {remaining} left]"
        self._bar = tqdm(
            total=total, initial=done, desc="sweep", file=sys.stderr, disable=not shown, ncols=100, bar_format=form
        )

    def advance(self, runs: float) -> None:
        self._bar.update(runs)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()


def render(lines: list[dict[str, Any]]) -> str:
    """The table for people; times in milliseconds a batch."""
    out = [
        f"{'batch':>7}{'dim':>5}{'cache rows':>13}{'share':>8}{'horizon':>11}{'depth':>7}{'compute':>9}{'overhead':>10}"
        f"{'stall':>8}{'fills':>13}{'/ MIN(0)':>10}{'/ MIN(d)':>10}"
    ]
    marked: set[str] = set()

    def marks(value: str, mark: str, seen: bool) -> str:
        marked.update(mark * seen)
        return value + mark * seen

    order = ("batch_size", "dim", "cache_rows", "depth_is_horizon", "prefetch_depth", "horizon", "repeat")
    for line in sorted(lines, key=lambda entry: [entry[name] for name in order]):
        times = (line.get(f"{name}_seconds_a_batch") for name in ("compute", "overhead", "stall"))
        shown = ["-" if seconds is None else f"{1e3 * seconds:.2f}" for seconds in times]
        ratios = [f"{line['fills'] / line[key]:.4f}" if line[key] else "-" for key in ("min0_fills", "mind_fills")]
        cached = marks(f"{line['cache_rows']:,}", "*", _has_grown(line))
        asked = line.get("asked_horizon")
        horizon = marks(shown_horizon(line), "+", isinstance(asked, int) and asked < line["horizon"])
        depth = marks(str(line["prefetch_depth"]), "=", line["depth_is_horizon"])
        ratios[1] = marks(ratios[1], "~", line.get("mind_shortened", 0) > 0)
        out.append(
            f"{line['batch_size']:>7}{line['dim']:>5}{cached:>13}{line['cache_ratio']:>8.2%}"
            f"{horizon:>11}{depth:>7}{shown[0]:>9}{shown[1]:>10}{shown[2]:>8}"
            f"{line['fills']:>13,}{ratios[0]:>10}{ratios[1]:>10}"
        )
    return "\n".join(out + [text for mark, text in MARKS.items() if mark in marked])


def _has_grown(line: dict[str, Any]) -> bool:
    """Whether a batch needed more rows than the cache that was asked for; a planner's shards only round it up."""
    if "grows" in line:
        return bool(line["grows"] > 0)
    asked = line["asked_cache_rows"]
    if asked is None:
        asked = math.ceil(line["table_rows"] * line["asked_cache_ratio"])
    return bool(line["cache_rows"] > asked)
