"""What does reading cost? All batches of a file through cdlrm, against bare pyarrow reading the same file.

    python bench/reading.py [--rows 300000] [--repeats 7]

Rivals take turns in one process after a warm-up; both may use pyarrow's threads, so wall and CPU seconds are given.
Bare pyarrow: `read_row_group` / `read_stripe` one after the other, and `pyarrow.csv.open_csv` with ids read as text
(what it can do without help). several.parquet has as many ids as flat.parquet, in
lists of 0 to 10; "ours per id" compares the two. Appends one JSON line a file to bench/results/reading.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.orc
import pyarrow.parquet

from cdlrm.data import SyntheticSource, open_source
from cdlrm.data.hashing import mix64_array

HERE = Path(__file__).parent
NAMES = ["label", *(f"i{i + 1}" for i in range(13)), *(f"c{i + 1}" for i in range(26))]
BATCH = 2048


def click_log(rows: int) -> pa.Table:
    """Rows like the real logs: whole numbers and 32-bit ids, some missing."""
    columns: list[list[np.ndarray]] = [[] for _ in NAMES]
    for batch in SyntheticSource(num_rows=rows, batch_size=65536):
        columns[0].append(batch.labels.numpy().astype(np.int32))
        for d in range(13):
            columns[1 + d].append(np.rint(np.expm1(batch.dense[:, d].numpy())).astype(np.int32))
        for f, jagged in enumerate(batch.sparse.values()):
            ids = mix64_array(jagged.values.numpy().view(np.uint64) + np.uint64(f << 32)) >> np.uint64(32)
            columns[14 + f].append(ids.astype(np.int64))
    arrays = []
    for name, parts in zip(NAMES, columns, strict=True):
        values = np.concatenate(parts)
        gone = values == 0 if name[0] == "i" else None  # a dense 0 of the generator is (mostly) a missing value
        arrays.append(pa.array(values, mask=gone))
    return pa.table(arrays, NAMES)


def as_lists(table: pa.Table) -> pa.Table:
    """Every column as lists of 0 or 1 element."""
    arrays = []
    for column in table.columns:
        flat = column.combine_chunks()
        offsets = np.concatenate([[0], np.cumsum(flat.is_valid().to_numpy(zero_copy_only=False))]).astype(np.int32)
        arrays.append(pa.ListArray.from_arrays(offsets, flat.drop_null()))
    return pa.table(arrays, table.column_names)


def several(table: pa.Table) -> pa.Table:
    """As many ids in a fifth of the rows: lists of 0 to 10 ids, 5 on average."""
    rows = table.num_rows // 5
    lengths = np.random.default_rng(0).integers(0, 11, rows)
    lengths[-1] += 5 * rows - lengths.sum()  # the draw is a little off
    while lengths[-1] < 0:
        lengths[np.argmax(lengths[:-1])] += lengths[-1]
        lengths[-1] = 0
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    arrays = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        flat = column.combine_chunks()
        lists = name[0] == "c"
        arrays.append(pa.ListArray.from_arrays(offsets, flat[: 5 * rows]) if lists else flat[:rows])
    return pa.table(arrays, table.column_names)


def write_files(folder: Path, rows: int) -> dict[str, str]:
    table = click_log(rows)
    lists = as_lists(table)
    files = {name: str(folder / name) for name in ("flat.parquet", "lists.parquet", "flat.orc", "lists.orc", "log.tsv")}
    pa.parquet.write_table(table, files["flat.parquet"], row_group_size=65536)
    pa.parquet.write_table(lists, files["lists.parquet"], row_group_size=65536)
    files["several.parquet"] = str(folder / "several.parquet")
    pa.parquet.write_table(several(table), files["several.parquet"], row_group_size=65536 // 5)
    pa.orc.write_table(table, files["flat.orc"])
    pa.orc.write_table(lists, files["lists.orc"])
    with open(files["log.tsv"], "w") as out:
        for batch in table.to_batches(8192):
            texts = [
                ["" if v is None else f"{v:08x}" if name[0] == "c" else str(v) for v in column.to_pylist()]
                for name, column in zip(NAMES, batch.columns, strict=True)
            ]
            out.writelines("\t".join(line) + "\n" for line in zip(*texts, strict=True))
    return files


def bare(path: str) -> int:
    rows = 0
    for file in sorted(Path(path).iterdir()) if os.path.isdir(path) else [Path(path)]:
        if file.suffix == ".parquet":
            parquet = pa.parquet.ParquetFile(file)
            rows += sum(parquet.read_row_group(i).num_rows for i in range(parquet.num_row_groups))
        elif file.suffix == ".orc":
            orc = pa.orc.ORCFile(str(file))
            rows += sum(orc.read_stripe(i).num_rows for i in range(orc.nstripes))
        else:
            types = {name: pa.string() if name[0] == "c" else pa.int32() for name in NAMES}
            reader = pa.csv.open_csv(
                file,
                read_options=pa.csv.ReadOptions(column_names=NAMES, block_size=2**24),
                parse_options=pa.csv.ParseOptions(delimiter="\t"),
                convert_options=pa.csv.ConvertOptions(column_types=types),
            )
            rows += sum(batch.num_rows for batch in reader)
    return rows


def ours(path: str) -> int:
    return sum(batch.size for batch in open_source(path, batch_size=BATCH))


def measure(path: str, repeats: int) -> dict[str, float]:
    rivals: dict[str, Callable[[str], int]] = {"pyarrow": bare, "cdlrm": ours}
    wall: dict[str, list[float]] = {name: [] for name in rivals}
    cpu: dict[str, list[float]] = {name: [] for name in rivals}
    counts = {name: read(path) for name, read in rivals.items()}
    assert counts["pyarrow"] == counts["cdlrm"], counts
    for _ in range(repeats):
        for name, read in rivals.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            read(path)
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - began_cpu)
    result: dict[str, float] = {"rows": counts["cdlrm"]}
    for what, seconds in (("wall", wall), ("cpu", cpu)):
        for name in rivals:
            result[f"{name}_{what}_seconds_median"] = round(statistics.median(seconds[name]), 4)
            result[f"{name}_{what}_seconds_min"] = round(min(seconds[name]), 4)
        pairs = [a / b for a, b in zip(seconds["cdlrm"], seconds["pyarrow"], strict=True)]
        result[f"{what}_ratio_median"] = round(statistics.median(pairs), 3)
        result[f"{what}_ratio_of_minima"] = round(min(seconds["cdlrm"]) / min(seconds["pyarrow"]), 3)
    return result


def measure_per_id(flat: str, several: str, repeats: int) -> dict[str, float]:
    """The two files have (nearly) the same number of ids, so seconds compare as they are."""
    best = {path: (float("inf"), float("inf")) for path in (flat, several)}
    for _ in range(repeats + 1):
        for path, (wall, cpu) in best.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            ours(path)
            best[path] = (min(wall, time.perf_counter() - began), min(cpu, time.process_time() - began_cpu))
    (wall, cpu), (wall_several, cpu_several) = best[flat], best[several]
    return {"wall_ratio_of_minima": round(wall_several / wall, 3), "cpu_ratio_of_minima": round(cpu_several / cpu, 3)}


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "reading.jsonl")
    args = parser.parse_args()
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "pyarrow": pa.__version__,
    }
    with tempfile.TemporaryDirectory() as folder, open(args.out, "a") as out:
        files = write_files(Path(folder), args.rows)
        sample = Path(os.environ.get("CDLRM_DATA", HERE.parents[1] / "shared" / "data")) / "criteo_tb_orc"
        if sample.is_dir():
            files["criteo_tb_orc"] = str(sample)
        per_id = measure_per_id(files["flat.parquet"], files["several.parquet"], args.repeats)
        print(
            f"an id in lists  wall x{per_id['wall_ratio_of_minima']} cpu x{per_id['cpu_ratio_of_minima']} of one a row"
        )
        about = {"commit": commit(), "date": datetime.date.today().isoformat(), "machine": machine}
        out.write(
            json.dumps({"bench": "reading per id", **about, "load": round(os.getloadavg()[0], 1), **per_id}) + "\n"
        )
        for name, path in files.items():
            line = {
                "bench": "reading", "file": name, "commit": commit(), "date": datetime.date.today().isoformat(),
                "machine": machine, "load": round(os.getloadavg()[0], 1), "batch": BATCH, **measure(path, args.repeats),
            }  # fmt: skip
            print(
                f"{name:15} wall x{line['wall_ratio_median']:<6} cpu x{line['cpu_ratio_median']:<6} "
                f"{line['rows'] / line['cdlrm_wall_seconds_median'] / 1e3:,.0f}k rows/s"
            )
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
