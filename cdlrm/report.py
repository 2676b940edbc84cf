"""The closing report of a training run: one mapping, as JSON or as text for people.

The trainer collects it, `render` writes the text.  All times are seconds, all sizes bytes; a rate or a
ratio that is undefined (nothing was counted) is None.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .advice import advice

METRICS = {
    "auc": "AUC",
    "log_loss": "log loss",
    "normalized_entropy": "normalized entropy",
    "accuracy": "accuracy",
    "click_rate": "click rate",
}

SHOWN_TABLES = 5


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far.

    From /proc/self/status: getrusage's figure would include what the parent had when it forked.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def cache_section(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The collection's counters, with the ratios that people ask for."""
    section = {key: stats[key] for key in stats if not key.startswith("seconds_")}
    section["hit_rate_per_distinct_row"] = ratio(stats["hits"], stats["distinct"])
    section["fills_over_min0"] = ratio(stats["fills"], stats["min0_fills"])
    section["fills_over_mind"] = ratio(stats["fills"], stats["mind_fills"])
    return section


def seconds_section(total: float, measured: Mapping[str, float], stats: Mapping[str, Any]) -> dict[str, float]:
    """Where the time went, in the order of the report; `measured` by the trainer, `stats` by the tables."""
    return {
        "total": total,
        "read": measured["read"],
        "plan": stats["seconds_plan"],
        "transfer": stats["seconds_transfer"],
        "forward_backward": measured["forward_backward"],
        "lookup": stats["seconds_lookup"],
        "update": stats["seconds_update"],
        "stall": measured["stall"],
        "evaluation": measured["evaluation"],
        "checkpoint": measured["checkpoint"],
    }


def memory_section(most: tuple[int, int] | None) -> dict[str, int]:
    """Peaks of this process; `most`: those of a device's memory and of pinned memory, None: it has none."""
    section = {"peak_bytes": peak_memory_bytes()}
    if most is not None:
        section |= {"device_peak_bytes": most[0], "pinned_peak_bytes": most[1]}
    return section


def jsonable(value: Any) -> Any:
    """The same value with NaN and infinity as None, which JSON has no word for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value


def render(report: Mapping[str, Any]) -> str:
    """The report as text, about forty lines."""
    training, cache = report["training"], report["cache"]
    title = "Training report"
    if report["interrupted"]:
        title += " (INTERRUPTED: stopped by the user, what was trained is kept up to the last whole step)"
    if training["nothing_left"]:
        title += " (nothing was left to train: the checkpoint is of a finished run, so nothing was counted or timed)"
    lines = [title, "=" * len(title)]
    lines += _metrics(report["evaluations"])
    lines += [
        "Training",
        _row("steps", f"{training['steps']:,} of {training['mini_batch_size']:,} samples"),
        _row("samples", f"{training['samples']:,} in {training['epochs']:g} epoch(s)"),
        _row("loss, last steps", number(training["loss"], ".5f")),
        _row("samples/s", f"{number(training['samples_per_second'], ',.0f')} (first step, which compiles, left out)"),
    ]
    if training["skipped_steps"]:
        lines.append(_row("skipped steps", f"{training['skipped_steps']:,} with a non-finite loss or gradient"))
    lines += _cache(cache)
    would_help = advice(report)
    if would_help is not None:
        lines += ["What would help", f"  {would_help}"]
    lines += _tables(report["tables"])
    lines += ["Time, seconds (reading, planning and copying overlap with computing)"]
    lines += [_row(name.replace("_", " "), f"{seconds:.2f}") for name, seconds in report["seconds"].items()]
    memory = report["memory"]
    lines += ["Memory", _row("peak", size(memory["peak_bytes"]))]
    if "device_peak_bytes" in memory:
        lines.append(_row("of the device", size(memory["device_peak_bytes"])))
        lines.append(_row("pinned", size(memory["pinned_peak_bytes"])))
    if report["checkpoint"] is not None:
        written = report["checkpoint"]["newest"] or "none: the run was stopped in the middle of a step"
        lines += ["Checkpoint", _row("newest", written)]
    if report["data"].get("bad_rows"):
        lines += ["Data", _row("rows left out", f"{report['data']['bad_rows']:,} malformed")]
        lines += [f"  - {example}" for example in report["data"]["bad_row_examples"]]
    if report["chosen"]:
        lines += ["Chosen automatically", *(f"  - {sentence}" for sentence in report["chosen"])]
    return "\n".join(lines)


def _metrics(evaluations: list[dict[str, Any]]) -> list[str]:
    if not evaluations:
        return ["Metrics", "  none: --no-metrics, or no test data"]
    shown = evaluations if len(evaluations) <= 4 else [evaluations[0], *evaluations[-3:]]
    lines = ["Metrics".ljust(24) + "".join(f"{'step ' + format(e['step'], ','):>14}" for e in shown)]
    for key, name in METRICS.items():
        lines.append("  " + name.ljust(22) + "".join(f"{number(e[key], '.5f'):>14}" for e in shown))
    lines.append("  " + "samples".ljust(22) + "".join(f"{e['samples']:>14,}" for e in shown))
    return lines


def _cache(cache: Mapping[str, Any]) -> list[str]:
    share = ratio(cache["cache_rows"], cache["table_rows"])
    seldom = {
        "grown": ("grows", "times, because a batch needed more rows than the cache had"),
        "shorter windows": ("short_windows", "plans, because batches did not arrive in time; no result depends on it"),
        "unannounced": ("unannounced", "lookups that the look-ahead had not announced, fetched on demand"),
    }
    depth, shortened = cache["prefetch_depth"], cache["mind_shortened"]
    fewer = f", which was shortened for {shortened:,} batches: it does not fit the cache" if shortened else ""
    notes = [_row(name, f"{cache[key]:,} {words}") for name, (key, words) in seldom.items() if cache[key]]
    return [
        "Cache",
        _row("rows", f"{cache['cache_rows']:,} of {cache['table_rows']:,} ({_percent(share)})"),
        _row("lookups", f"{cache['lookups']:,}, distinct in their batch {cache['distinct']:,}"),
        _row("hits", f"{cache['hits']:,} ({_percent(cache['hit_rate_per_distinct_row'])} of the distinct rows)"),
        _row("filled", f"{cache['fills']:,} rows, {size(cache['bytes_filled'])}"),
        _row("written back", f"{cache['rows_written']:,} rows, {size(cache['bytes_written'])}"),
        _row("fills / MIN(0)", f"{number(cache['fills_over_min0'], '.4f')} (MIN(0): the fewest that any cache moves)"),
        _row(
            f"fills / MIN({depth})",
            f"{number(cache['fills_over_mind'], '.4f')} (the fewest with prefetch depth {depth}{fewer})",
        ),
        *notes,
    ]


def _tables(tables: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The tables that moved most, up to SHOWN_TABLES of them."""
    most = sorted(tables, key=lambda name: -tables[name]["fills"])[:SHOWN_TABLES]
    title = "Tables" if len(most) == len(tables) else f"The {len(most)} of {len(tables)} tables that filled most"
    lines = [f"{title:<36}{'rows':>14}{'trained':>12}{'filled':>12}{'hits':>9}"]
    for name in most:
        table = tables[name]
        hits = _percent(ratio(table["hits"], table["distinct"]))
        counts = f"{table['rows']:>14,}{table['trained_rows']:>12,}{table['fills']:>12,}{hits:>9}"
        lines.append(f"  {name:<34}{counts}")
    return lines


def _row(name: str, value: str) -> str:
    return "  " + name.ljust(22) + value


def number(value: float | None, form: str) -> str:
    """`value` in a format, or "-" where it is undefined."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def size(count: float) -> str:
    """`count` bytes in the unit that suits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
