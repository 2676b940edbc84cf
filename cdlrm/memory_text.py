"""The memory plan of `--dry-run` as text."""

from __future__ import annotations

from typing import Any

from . import report as reporting


def _apart(plan: dict[str, Any]) -> list[str]:
    """Memory of a device of its own, pinned memory, and what takes time before the first step."""
    lines = []
    for title, name in (("Memory of the device", "device"), ("Pinned, of the host's memory", "pinned")):
        if plan[f"{name}_parts"]:
            lines.append(title)
            parts = {**plan[f"{name}_parts"], "total, at the peak": plan[f"{name}_bytes"]}
            lines += [f"  {part:<36}{reporting.size(size):>14}" for part, size in parts.items()]
    if plan["start_seconds"]:
        lines.append("Start-up, seconds (measured here on a part of the tables)")
        lines += [f"  {what:<46}{seconds:>6.1f}" for what, seconds in plan["start_seconds"].items()]
    return lines


def render_plan(plan: dict[str, Any]) -> str:
    """The plan as text."""
    size = reporting.size
    title = "Memory plan (dry run: nothing was trained)"
    lines = [title, "=" * len(title)]
    lines.append(f"  {'table':<22}{'rows':>14}{'store':>14}{'metadata':>14}")
    for table in plan["tables"]:
        shown = f"{size(table['store_bytes']):>14}{size(table['metadata_bytes']):>14}"
        lines.append(f"  {table['name']:<22}{table['rows']:>14,}{shown}")
    lines.append("Memory of the run")
    for name, count in plan["parts"].items():
        lines.append(f"  {name:<36}{size(count):>14}")
    lines.append(f"  {'total, at the peak':<36}{size(plan['total_bytes']):>14}")
    if plan["most_bytes"] > plan["total_bytes"]:
        lines.append(f"  {'total, if every row is used':<36}{size(plan['most_bytes']):>14}")
    lines += _apart(plan)
    if plan["file_bytes"]:
        lines.append(f"On disk, at most: {size(plan['file_bytes'])} in {plan['store']}")
    where = "all resident" if plan["resident"] else f"{plan['cache_rows']:,} of them cached"
    lines.append(
        f"{plan['rows']:,} rows of {plan['record_bytes']} bytes, {where}; {plan['rows_used']:,} are used by the "
        f"{plan['batches_counted']:,} batches counted."
    )
    lines += ["Chosen automatically", *(f"  - {sentence}" for sentence in [plan["device"], *plan["notes"]])]
    return "\n".join(lines)
