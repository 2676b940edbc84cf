"""Table and plot of `rivals.py`: the section between the marks in bench/README.md, and rivals.svg beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rivals import RULES

BEGIN, END = "<!-- rivals: written by `python bench/rivals.py --report` -->", "<!-- end of rivals -->"
CURVES = ("ours, horizon auto", "MIN(1)", "BagPipe", "ColossalAI, static", "LFU", "S3-FIFO", "SIEVE", "cDLRM",
          "ScratchPipe", "LRU")  # fmt: skip
BROKEN = ("pins_broken", "holds_broken")

Line = dict[str, Any]


def newest(file: Path) -> tuple[list[Line], list[Line]]:
    """The newest lines: rows moved by (trace, size, rule), step times by size."""
    moved: dict[tuple[Any, ...], Line] = {}
    steps: dict[int, Line] = {}
    for text in file.read_text().splitlines():
        line = json.loads(text)
        if line["bench"] == "rivals":
            moved[line["trace"], line["times_distinct"], line["rule"]] = line
        else:
            steps[line["times_distinct"]] = line
    return list(moved.values()), [steps[times] for times in sorted(steps)]


def table(lines: list[Line]) -> str:
    traces, sizes = list(dict.fromkeys(x["trace"] for x in lines)), sorted({x["times_distinct"] for x in lines})
    at = {(x["trace"], x["times_distinct"], x["rule"]): x for x in lines}
    rules = [*RULES, *dict.fromkeys(x["rule"] for x in lines if x["rule"] not in RULES)]
    out = ["| rule | " + " | ".join(traces) + " |", "| --- |" + " --- |" * len(traces)]
    for rule in rules:
        cells = []
        for trace in traces:
            found = [at[trace, size, rule] for size in sizes]
            marks = ["\\*" if any(x.get(name) for name in BROKEN) else "" for x in found]
            cells.append(" / ".join(f"{x['fills_over_min0']:.2f}{m}" for x, m in zip(found, marks, strict=True)))
        name = f"**{rule}**" if rule.startswith("ours") else rule
        out.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(out)


def rows_table(lines: list[Line]) -> str:
    """Fills and evictions a batch of MIN(0), at each size."""
    out = ["| trace | distinct rows a batch | rows that MIN(0) moves a batch, in / out, by cache size |",
           "| --- | --- | --- |"]  # fmt: skip
    for trace in dict.fromkeys(x["trace"] for x in lines):
        mine = [x for x in lines if x["trace"] == trace and x["rule"] == "MIN(0)"]
        cells = [
            f"{x['times_distinct']}x: {x['fills'] / x['batches']:,.0f} / {x['evicts'] / x['batches']:,.0f}"
            for x in mine
        ]
        out.append(f"| {trace} | {mine[0]['distinct'] / mine[0]['batches']:,.0f} | {', '.join(cells)} |")
    return "\n".join(out)


def steps_table(lines: list[Line]) -> str:
    names = list(lines[0]["steps"])
    out = ["| cache | " + " | ".join(f"{n}: CPU ms / least wall ms (rows in)" for n in names) + " |"]
    out.append("|" + " --- |" * (len(names) + 1))
    for line in lines:
        cells = [f"{s['cpu_ms']:.1f} / {s['min_ms']:.1f} ({s['fills_per_step']:,.0f})" for s in line["steps"].values()]
        out.append(f"| {line['times_distinct']}x | " + " | ".join(cells) + " |")
    return "\n".join(out)


def plot(lines: list[Line], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.hashsalt": "rivals", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    traces = list(dict.fromkeys(x["trace"] for x in lines))
    figure, every = plt.subplots(1, len(traces), figsize=(2.6 * len(traces), 3.6), sharey=True, layout="constrained")
    for axes, trace in zip(every, traces, strict=True):
        for number, rule in enumerate(CURVES):
            mine = sorted(
                (x["times_distinct"], x["fills_over_min0"]) for x in lines if (x["trace"], x["rule"]) == (trace, rule)
            )
            x, y = zip(*mine, strict=True)
            width = 2.2 if rule.startswith("ours") else 1.0
            axes.plot(x, y, ".-" if number < 3 else ".--", label=rule, linewidth=width, color=f"C{number}")
        axes.set_title(trace, fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_xticks([2, 4, 8, 16], ["2x", "4x", "8x", "16x"])
        axes.grid(alpha=0.3)
    every[0].set_ylabel("rows filled / MIN(0)")
    every[len(every) // 2].set_xlabel("cache, in distinct rows of a batch")
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def write(results: Path, folder: Path) -> None:
    lines, steps = newest(results)
    plot(lines, folder / "rivals.svg")
    about = lines[0]
    section = [
        BEGIN, f"Made from {about['commit']} on {about['date'][:10]} ({about['cpu']}).", "", table(lines), "",
        rows_table(lines), "", "![rows filled over MIN(0)](rivals.svg)", "",
    ]  # fmt: skip
    if steps:
        section += [f"A training step ({steps[0]['cpu']}, {steps[0]['rounds'] - 1} rounds in turns, load average "
                    f"{steps[0]['load_average']}):", "",
                    steps_table(steps), ""]  # fmt: skip
    file = folder / "README.md"
    text = file.read_text()
    begin, end = text.index(BEGIN), text.index(END)
    file.write_text(text[:begin] + "\n".join(section) + text[end:])
