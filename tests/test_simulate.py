"""`cdlrm simulate`: counts equal to the planner's and to training's, curves, traces, errors."""

from __future__ import annotations

import importlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import cdlrm
import cdlrm.horizon as horizon_module
import cdlrm.plan.planner as planner_module
from cdlrm.cli import main
from cdlrm.errors import ConfigError, DataError
from cdlrm.plan import MinCounter, Planner
from cdlrm.simulate import grid as grid_module
from cdlrm.simulate.grid import POLICIES, Grid, simulate
from cdlrm.simulate.policies import PolicyCache
from cdlrm.simulate.trace import BatchRows, FileTrace, Recorder, SourceTrace, Trace
from cdlrm.simulate.uses import Uses

SMALL = ["--synthetic-rows", "3000-500-7-10000-2", "--mini-batch-size", "256", "--no-progress"]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the trainer would go on with a shorter window, which moves other rows."""
    monkeypatch.setattr("cdlrm.runtime.PATIENCE_SECONDS", 60.0)


class Given(Trace):
    """A trace from memory."""

    def __init__(self, batches: list[np.ndarray], table_rows: list[int], epochs: list[int] | None = None) -> None:
        self.data, self.table_rows = batches, table_rows
        self.epochs = epochs or [0] * len(batches)
        self.sizes: list[int] | None = None
        self.names, self.batches = [f"t{i}" for i in range(len(table_rows))], len(batches)

    def __iter__(self) -> Iterator[BatchRows]:
        yield from map(BatchRows, self.data, self.epochs, self.sizes or [0] * len(self.data))


def random_trace(seed: int) -> Given:
    rng = np.random.default_rng(seed)
    n, most = int(rng.integers(5, 300)), int(rng.integers(1, 80))
    count = int(rng.integers(1, 60))
    sizes = rng.integers(0, most + 1, count)
    batches = [np.minimum((rng.pareto(1.0, size) * n / 20).astype(np.int64), n - 1) for size in sizes]
    batches[0] = np.append(batches[0], 0)
    cut = int(rng.integers(1, n))
    return Given(batches, [cut, n - cut], np.sort(rng.integers(0, 3, count)).tolist())


def planned(trace: Given, cache: int, horizon: int, depth: int) -> tuple[int, int, int]:
    """Fills of the real planner, of MIN(0) and MIN(depth), as `cdlrm.runtime` would drive it."""
    planner = Planner(trace.num_rows, cache, depth)
    least = MinCounter(trace.num_rows, planner.cache_rows, 0, depth)
    fills = 0
    for epoch in sorted(set(trace.epochs)):
        batches = [rows for rows, mine in zip(trace.data, trace.epochs, strict=True) if mine == epoch]
        read = 0
        for _ in batches:
            while read < len(batches) and planner.window <= max(horizon, depth):
                planner.scan(batches[read])
                read += 1
            plan = planner.plan()
            fills += plan.fill_rows.size
            least.resize(plan.cache_rows)
            least.add(plan.seg_row)
    return fills, least.fills, least.fills_at(depth)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("shards", [1, 4])
def test_fills_equal_the_planners(seed: int, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any cache size down to 1 (growing), horizon, depth, number of epochs and shards; stretches of a few batches."""
    for module in (planner_module, __import__("cdlrm.simulate.caches", fromlist=["caches"])):
        monkeypatch.setattr(module, "shards_for", lambda cache_rows: shards)
    monkeypatch.setattr(grid_module, "STRETCH_LOOKUPS", 100)
    trace, rng = random_trace(seed), np.random.default_rng(seed + 1000)
    grid = Grid(
        cache_rows=rng.integers(1, trace.num_rows + 1, 2).tolist(),
        horizon=rng.integers(0, 12, 2).tolist(),
        prefetch_depth=rng.integers(0, 4, 2).tolist(),
    )
    found = simulate(trace, grid, workers=2)
    for result in found.results:
        depth = result["prefetch_depth"]
        fills, min0, mind = planned(trace, result["cache_rows"], result["horizon"] or 0, depth)
        if result["policy"] == "min":
            assert result["fills"] == (min0 if depth == 0 else mind)
        else:
            assert result["fills"] == fills
            assert sum(result["fills_by_table"].values()) == fills
    assert found.summary["distinct"] == sum(np.unique(rows).size for rows in trace.data)
    assert found.summary["rows_touched"] == np.unique(np.concatenate(trace.data)).size


@pytest.mark.parametrize("seed", range(10))
def test_lru_curve_equals_one_cache_after_another(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_module, "STRETCH_LOOKUPS", 50)
    trace = random_trace(seed)
    found = simulate(trace, Grid(cache_rows=[trace.num_rows], curve=12))
    lru = [r for r in found.results if r["policy"] == "lru" and r["horizon"] == 0]
    assert lru
    for result in lru:
        assert result["fills"] == planned(trace, result["cache_rows"], 0, 0)[0]


def scored(trace: Given, cache: int, horizon: int, depth: int, half_life: int | None) -> int:
    """Fills of `lfu` (None: `frequency`), by trying every cached row for every victim."""
    batches = [set(rows.tolist()) for rows in trace.data]
    ends = [max(i for i, e in enumerate(trace.epochs) if e == epoch) for epoch in trace.epochs]
    order = [list(dict.fromkeys(rows.tolist())) for rows in trace.data]
    last: dict[int, int] = {}
    count: dict[int, float] = {}
    cached: set[int] = set()
    fills, oldest, horizon = 0, 0, max(horizon, depth)
    for j, rows in enumerate(batches):
        cache = max(cache, len(rows))
        missing = rows - cached
        for r in rows:
            kept = 1.0 if half_life is None else 2.0 ** ((last.get(r, 0) - j) / half_life)
            count[r] = np.float32(np.float32(count.get(r, 0)) * np.float32(kept)) + np.float32(1)
            last[r] = j
        oldest = max(oldest, j - depth)
        held = [r for r in cached | rows if last[r] >= oldest]
        while len(held) > cache:
            oldest += 1
            held = [r for r in held if last[r] >= oldest]
        free = cache - len(cached)
        far = min(j + horizon, ends[j])

        def preference(r: int, far: int = far, j: int = j) -> tuple:
            use = next((b for b in range(j + 1, far + 1) if r in batches[b]), None)
            if use is not None:
                return (1, -use)
            c = int(2 * np.log2(count[r]))
            place = order[last[r]].index(r)
            return (0, c * 10**9 if half_life is None else c * (half_life // 2) + last[r], c, last[r], place)

        for _ in range(len(missing) - free):
            cached.remove(min(cached - set(held), key=preference))
        cached |= rows
        fills += len(missing)
    return fills


@pytest.mark.parametrize("policy", ["lfu", "frequency"])
@pytest.mark.parametrize("seed", range(12))
def test_policies_equal_brute_force(policy: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_module, "STRETCH_LOOKUPS", 100)
    trace, rng = random_trace(seed), np.random.default_rng(seed)
    for _ in range(3):
        cache, horizon, depth = (
            int(rng.integers(1, trace.num_rows + 1)),
            int(rng.integers(0, 6)),
            int(rng.integers(0, 3)),
        )
        mine = PolicyCache(policy, cache, horizon, depth, 2, half_life=4)
        grid_module.simulate_caches(trace, [mine], 6, 3)
        assert mine.results()[0]["fills"] == scored(trace, cache, horizon, depth, 4 if policy == "lfu" else None)


@pytest.mark.parametrize("seed", range(10))
def test_no_policy_beats_min_and_all_reach_it_with_a_full_horizon(seed: int) -> None:
    trace = random_trace(seed)
    trace.epochs = [0] * len(trace.data)
    size = max(np.unique(rows).size for rows in trace.data) * 2
    grid = Grid(
        cache_rows=[min(size, trace.num_rows)], horizon=[0, 3, 100], prefetch_depth=[0, 2], policy=list(POLICIES)
    )
    found = simulate(trace, grid).results
    least = {r["prefetch_depth"]: r["fills"] for r in found if r["policy"] == "min"}
    for r in found:
        assert r["fills"] >= least[r["prefetch_depth"]]
        if r["horizon"] == 100:
            assert r["fills"] == least[r["prefetch_depth"]]
    assert {r["policy"] for r in found} == set(POLICIES)


def test_s3fifo_keeps_what_is_used_again() -> None:
    """A scan of rows that are used once: LRU loses the rows that come back, S3-FIFO keeps them."""
    batches = [np.concatenate([np.arange(20) if b % 4 < 2 else [], 20 + 40 * b + np.arange(40)]) for b in range(60)]
    trace = Given([b.astype(np.int64) for b in batches], [20 + 40 * 60])
    policies = ["lru", "s3fifo", "lfu", "frequency"]
    grid = Grid(cache_rows=[100], horizon=[0], prefetch_depth=[0], policy=policies)
    fills = {r["policy"]: r["fills"] for r in simulate(trace, grid).results}
    assert fills["lru"] == 60 * 40 + 15 * 20
    assert all(fills[name] < fills["lru"] - 200 for name in policies[1:])


def test_results_do_not_depend_on_workers() -> None:
    trace = random_trace(3)
    grid = Grid(cache_rows=[20, 5], horizon=[0, 4], prefetch_depth=[0, 2], curve=5)
    assert simulate(trace, grid, workers=1) == simulate(trace, grid, workers=3)


def test_memory_does_not_grow_with_the_trace() -> None:
    rng = np.random.default_rng(0)
    uses = Uses([1000], horizon=5, depth=1, shards={1})
    for _ in range(400):
        uses.add(BatchRows(rng.integers(0, 1000, 50), 0))
        uses.take(ended=False)
        assert len(uses._batches) <= 5 + 1 + 2


def test_counts_equal_trainings(tmp_path: Path) -> None:
    """Two epochs of the same data through `cdlrm train` and `cdlrm simulate`."""
    same = [*SMALL, "--num-batches", "12", "--nepochs", "2", "--cache-ratio", "0.2", "--horizon", "3"]
    report, out = tmp_path / "report.json", tmp_path / "out.jsonl"
    assert main(["train", *same, "--arch-mlp-top", "8-1", "--no-metrics", "--json", str(report)]) == 0
    assert main(["simulate", *same, "--out", str(out)]) == 0
    trained = json.loads(report.read_text())["cache"]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    fills = {(line["policy"], line["prefetch_depth"]): line["fills"] for line in lines}
    assert fills == {("lru", 1): trained["fills"], ("min", 0): trained["min0_fills"], ("min", 1): trained["mind_fills"]}
    assert all(line["distinct"] == trained["distinct"] and line["lookups"] == trained["lookups"] for line in lines)
    copied = {line["policy"]: line["bytes_filled"] for line in lines}
    assert copied["lru"] == trained["bytes_filled"] == trained["fills_copied"] * 4 * 17  # dim 16 and one state a row


@pytest.mark.parametrize(
    "flags",
    [[], ["--prefetch-depth", "3", "--cache-ratio", "0.05"], ["--nepochs", "2", "--num-batches", "140"]],
    ids=["as it comes", "deep and small", "epochs"],
)
def test_the_default_horizon_is_trainings(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing about the horizon is said: as it changes in training, it changes here."""
    monkeypatch.setattr(grid_module, "STRETCH_LOOKUPS", 20_000)
    same = [*SMALL[:2], "--mini-batch-size", "64", "--no-progress", "--num-batches", "200"]
    report, out = tmp_path / "report.json", tmp_path / "out.jsonl"
    assert main(["train", *same, *flags, "--arch-mlp-top", "8-1", "--no-metrics", "--json", str(report)]) == 0
    assert main(["simulate", *same, *flags, "--out", str(out)]) == 0
    trained = json.loads(report.read_text())["cache"]
    line = next(x for x in map(json.loads, out.read_text().splitlines()) if x["policy"] == "lru")
    assert trained["short_windows"] == 0 and trained["horizon"] > 8
    for name in ("fills", "fills_copied", "bytes_filled", "horizon", "prefetch_depth", "distinct"):
        assert line[name] == trained[name], name
    assert line["horizon_auto"]


@pytest.mark.parametrize("seed", range(8))
def test_auto_sees_as_far_as_the_runtime(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of all sizes, several epochs, and choices every 4 batches, limited by bytes: against the real stages."""
    for module in (horizon_module, importlib.import_module("cdlrm.simulate.auto")):
        for name, value in {"PERIOD": 4, "LEAST_HORIZON": 1, "WINDOW_BYTES": 4_000}.items():
            monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setattr(grid_module, "STRETCH_LOOKUPS", 100)
    rng = np.random.default_rng(seed)
    epochs, depth = [0] * 30 + [1] * 25, int(rng.integers(0, 3))
    batches = [rng.integers(0, 300, rng.integers(1, rng.choice([5, 60]))) for _ in epochs]
    ebc = cdlrm.EmbeddingBagCollection([cdlrm.Table("a", 300, 4)], optimizer=cdlrm.SGD(lr=0.1), cache_rows=70)
    sizes: list[int] = []
    for epoch in (0, 1):
        loader = [{"a": torch.from_numpy(b)} for b, mine in zip(batches, epochs, strict=True) if mine == epoch]
        look = cdlrm.ahead.Lookahead(ebc, loader, prefetch_depth=depth, window_bytes=4_000, threads=False)
        sizes += [sum(x.nbytes for x in ebc.lookahead_calls(one).values()) for one in loader]
        for batch in look:
            ebc(batch).sum().backward()
    trace = Given(batches, [300], epochs)
    trace.sizes = sizes
    found = simulate(trace, Grid(cache_rows=[70], prefetch_depth=[depth], policy=["lru"])).results[0]
    assert (found["fills"], found["horizon"]) == (ebc.stats()["fills"], look.horizon)
    ebc.close()


def test_a_recorded_trace_gives_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = [*SMALL, "--num-batches", "20", "--nepochs", "2"]
    grid = ["--cache-ratio", "0.1", "0.3", "--horizon", "0", "6", "--curve", "5"]
    trace, first, second = tmp_path / "t.parquet", tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert main(["simulate", *data, *grid, "--record", str(trace), "--out", str(first)]) == 0
    assert main(["simulate", "--no-progress", "--trace", str(trace), *grid, "--out", str(second)]) == 0
    assert first.read_text() == second.read_text()
    assert "MIN(d)" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "t.parquet"]


def test_npz_and_parquet_traces_as_documented(tmp_path: Path) -> None:
    batches = [np.array([0, 5, 5]), np.array([], np.int64), np.array([9, 0])]
    starts = np.array([0, 3, 3, 5], np.int32)
    np.savez_compressed(tmp_path / "t.npz", rows=np.concatenate(batches), starts=starts, table_rows=[4, 6])
    kinds = {"t": pa.list_(pa.int32()), "large": pa.large_list(pa.uint64()), "small": pa.list_(pa.int8())}
    for name, kind in kinds.items():
        schema = pa.schema([("rows", kind)], metadata={"cdlrm.table_rows": "[4, 6]"})
        pq.write_table(pa.table({"rows": [b.tolist() for b in batches]}, schema=schema), tmp_path / f"{name}.parquet")
    for name in ("t.npz", "t.parquet", "large.parquet", "small.parquet"):
        trace = FileTrace(str(tmp_path / name))
        assert (trace.table_rows, trace.batches, trace.names) == ([4, 6], 3, ["t0", "t1"])
        assert [batch.rows.tolist() for batch in trace] == [b.tolist() for b in batches]
        assert all(batch.rows.dtype == np.int64 for batch in trace)
    schema = pa.schema([("rows", pa.list_(pa.int64(), 2))], metadata={"cdlrm.table_rows": "[9]"})
    pq.write_table(pa.table({"rows": [[n % 9, 8] for n in range(50)]}, schema=schema), tmp_path / "fixed.parquet")
    fixed = [batch.rows.tolist() for batch in FileTrace(str(tmp_path / "fixed.parquet"))]
    assert fixed == [[n % 9, 8] for n in range(50)]


def test_bad_traces(tmp_path: Path) -> None:
    def refused(name: str, words: str, table_rows: str | None = None) -> None:
        with pytest.raises((ConfigError, DataError), match=words):
            list(FileTrace(str(tmp_path / name), table_rows))

    refused("none.npz", "no such file")
    assert main(["simulate", "--trace", str(tmp_path / "none.npz")]) == 1
    (tmp_path / "t.txt").write_text("1 2 3")
    refused("t.txt", "parquet or .npz")
    for name in ("junk.npz", "junk.parquet"):
        (tmp_path / name).write_bytes(b"junk" * 100)
        refused(name, "not a trace")
    np.savez(tmp_path / "norows.npz", starts=[0])
    refused("norows.npz", "not a trace")
    np.savez(tmp_path / "starts.npz", rows=[1, 2], starts=[0, 5], table_rows=[9])
    refused("starts.npz", "must rise from 0 to the 2")
    np.savez(tmp_path / "empty.npz", rows=np.empty(0, np.int64), starts=[0], table_rows=[9])
    refused("empty.npz", "no batches")
    np.savez(tmp_path / "range.npz", rows=[1, 12], starts=[0, 2], table_rows=[9])
    refused("range.npz", "lookup 1 of batch 0 is row 12")
    np.savez(tmp_path / "sizes.npz", rows=[1, 2], starts=[0, 2])
    refused("sizes.npz", "give --table-rows")
    assert FileTrace(str(tmp_path / "sizes.npz"), "3-4").table_rows == [3, 4]
    pq.write_table(pa.table({"rows": [1, 2]}), tmp_path / "flat.parquet")
    refused("flat.parquet", "list of integers")

    for number, sizes in enumerate(([[5]], [5.5], 5, ["a"], [0])):
        np.savez(tmp_path / f"sizes{number}.npz", rows=[1], starts=[0, 1], table_rows=sizes)
        refused(f"sizes{number}.npz", "not a trace: the rows of its tables must be a list of integers above 0")
        lists = pa.schema([("rows", pa.list_(pa.int64()))], metadata={"cdlrm.table_rows": json.dumps(sizes)})
        pq.write_table(pa.table({"rows": [[1]]}, schema=lists), tmp_path / f"sizes{number}.parquet")
        refused(f"sizes{number}.parquet", "not a trace: the rows of its tables must be a list of integers above 0")
    huge = pa.table({"rows": pa.array([[1, 2**63]], pa.list_(pa.uint64()))})
    pq.write_table(huge, tmp_path / "huge.parquet")
    refused("huge.parquet", "lookup 1 of batch 0 is row 9223372036854775808, outside", "5")
    np.savez(tmp_path / "huge.npz", rows=np.array([1, 2**64 - 1], np.uint64), starts=[0, 2], table_rows=[9])
    refused("huge.npz", "lookup 1 of batch 0 is row 18446744073709551615, outside")
    pq.write_table(pa.table({"ids": [[1]]}), tmp_path / "other.parquet")
    refused("other.parquet", "it has no column `rows`")
    pq.write_table(pa.table({"rows": [[1.5]]}), tmp_path / "real.parquet")
    refused("real.parquet", "the column `rows` is list<[^ ]* double> where a list of integers")
    two = {"rows": [[1], [2]]}
    pq.write_table(pa.table({**two, "epoch": pa.array([0, None], pa.int32())}), tmp_path / "null.parquet")
    refused("null.parquet", "trace [^ ]*: an epoch is null", "5")
    pq.write_table(pa.table({**two, "epoch": ["a", "b"]}), tmp_path / "words.parquet")
    refused("words.parquet", "the column `epoch` does not hold integers", "5")
    pq.write_table(pa.table({**two, "epoch": pa.array([0, 2**40])}), tmp_path / "late.parquet")
    refused("late.parquet", "an epoch does not fit int32", "5")
    for names in ([["a"], ["b"]], ["a", "a"], [1, 2], {"a": 1}, "ab"):
        said = {"cdlrm.table_rows": "[3, 3]", "cdlrm.tables": json.dumps(names)}
        schema = pa.schema([("rows", pa.list_(pa.int64()))], metadata=said)
        pq.write_table(pa.table(two, schema=schema), tmp_path / "names.parquet")
        refused("names.parquet", "the names of its tables .* must be a list of different words")


def test_an_empty_trace_is_said() -> None:
    with pytest.raises(DataError, match="empty"):
        simulate(Given([], [5]), Grid())
    with pytest.raises(DataError, match="empty"):
        simulate(Given([np.empty(0, np.int64)], [5]), Grid())


BAD = {
    "--policy belady": "one of lru, lfu, frequency, s3fifo, min",
    "--horizon -1": "at least 0",
    "--horizon two": "a whole number or auto",
    "--horizon 9999999": "--horizon 9999999: must be at least 0 and at most 1048576.",
    "--prefetch-depth 65": "at most 64",
    "--cache-rows 0": "--cache-rows 0: must be at least 1.",
    "--cache-rows 99999999": "only 13509 rows",
    "--cache-ratio 0": "above 0",
    "--cache-ratio 1.5": "at most 1",
    "--cache-ratio nan": "above 0",
    "--curve 1": "--curve 1: must be 0 (no curve) or from 2 to 4096 cache sizes.",
    "--curve 9999999999": "from 2 to 4096 cache sizes.",
    "--workers 0": "at least 1",
    "--figure x.bmp": ".png or .svg",
    "--out /no/such/folder/x": "folder does not exist",
    "--record x.npz": ".parquet",
    "--record /proc/x.parquet": "--record /proc/x.parquet: cannot be written",
    "--out /proc/x.jsonl": "--out /proc/x.jsonl: cannot be written",
    "--figure /proc/x.png": "--figure /proc/x.png: cannot be written",
    "--trace x.parquet": "leave one of them out",
    "--cache-row 3": "did you mean --cache-rows?",
    "--horizon": "at least one argument",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_are_one_sentence(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, *flags.split()]) in (1, 2)
    said = capsys.readouterr().err
    assert BAD[flags] in said and said.startswith("error: ") and said.count("\n") == 1


def test_ctrl_c_reports_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(5)

    def stopped(self: Given) -> Iterator[BatchRows]:
        yield from map(BatchRows, self.data[:3], self.epochs[:3])
        raise KeyboardInterrupt

    whole = simulate(Given(trace.data[:3], trace.table_rows, trace.epochs[:3]), Grid(cache_rows=[9]))
    monkeypatch.setattr(Given, "__iter__", stopped)
    part = simulate(trace, Grid(cache_rows=[9]))
    assert part.summary.pop("interrupted") and not whole.summary.pop("interrupted")
    assert part == whole


@pytest.mark.parametrize("while_adding", [False, True])
def test_ctrl_c_keeps_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], while_adding: bool
) -> None:
    """A whole trace of the batches that were counted, wherever the signal comes: between two batches, or inside one."""
    data = ["simulate", *SMALL, "--num-batches", "9", "--cache-ratio", "0.2"]
    whole, part, out = tmp_path / "whole.parquet", tmp_path / "part.parquet", tmp_path / "o.jsonl"
    assert main([*data, "--record", str(whole)]) == 0
    assert "whole trace" not in capsys.readouterr().out
    read, add, came = SourceTrace.__iter__, Recorder.add, iter(range(9))

    def batches(self: SourceTrace) -> Iterator[BatchRows]:
        for number, batch in enumerate(read(self)):
            if number == 4:
                signal.raise_signal(signal.SIGINT)
            yield batch

    def adding(self: Recorder, batch: BatchRows) -> None:
        if next(came) == 3:
            signal.raise_signal(signal.SIGINT)
        add(self, batch)

    monkeypatch.setattr(*((Recorder, "add", adding) if while_adding else (SourceTrace, "__iter__", batches)))
    assert main([*data, "--record", str(part), "--out", str(out)]) == 130
    assert f"{part} has the 4 batches that were read; it is a whole trace." in capsys.readouterr().out
    monkeypatch.undo()
    found = list(FileTrace(str(part)))
    assert len(found) == 4 == json.loads(out.read_text().splitlines()[0])["batches"]
    for mine, full in zip(found, FileTrace(str(whole)), strict=False):
        assert mine.rows.tolist() == full.rows.tolist() and mine.epoch == full.epoch
    assert not list(tmp_path.glob("*.part"))


def test_ctrl_c_before_the_first_batch_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: SourceTrace) -> Iterator[BatchRows]:
        signal.raise_signal(signal.SIGINT)
        yield from ()

    monkeypatch.setattr(SourceTrace, "__iter__", stopped)
    assert main(["simulate", *SMALL, "--record", str(tmp_path / "t.parquet")]) == 130
    assert not list(tmp_path.iterdir())


def test_recording_that_fails_leaves_no_file(tmp_path: Path) -> None:
    trace = random_trace(1)
    recorder = Recorder(str(tmp_path / "t.parquet"), trace)
    recorder.add(BatchRows(trace.data[0], 0))
    recorder.close(keep=False)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found while writing: before, it was possible."""
    (tmp_path / "t.parquet.part").mkdir()
    (tmp_path / "o.jsonl.part").mkdir()
    for flag, name in (("--record", "t.parquet"), ("--out", "o.jsonl")):
        assert main(["simulate", *SMALL, "--num-batches", "4", "--no-progress", flag, str(tmp_path / name)]) == 1
        said = capsys.readouterr().err
        assert f"{flag} {tmp_path / name}: cannot be written" in said and said.count("\n") == 1
    assert {file.name for file in tmp_path.iterdir()} == {"t.parquet.part", "o.jsonl.part"}


def test_a_trace_that_ends_in_an_error_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starts = [0, 2, 4]
    np.savez(tmp_path / "t.npz", rows=[1, 2, 3, 12], starts=starts, table_rows=[9])
    flags = ["--record", str(tmp_path / "r.parquet"), "--out", str(tmp_path / "o.jsonl"), "--no-progress"]
    assert main(["simulate", "--trace", str(tmp_path / "t.npz"), *flags]) == 1
    assert "lookup 1 of batch 1 is row 12" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["t.npz"]


def test_a_horizon_that_is_raised_to_the_depth_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--num-batches", "4", "--cache-ratio", "0.5", "--no-progress", "--horizon"]
    for horizons, told in ((["0", "8"], True), (["1", "8"], False)):
        assert main([*arguments, *horizons]) == 0
        assert ("prefetch depth: 0 became it" in capsys.readouterr().out) == told


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_resident_tables_are_proposed_where_they_pay(
    policy: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small table that is swept in turn defeats every cache; a large one that is never reused fills it."""
    checked: list[list[str]] = []

    def spy(trace: Any, grid: Any, **others: Any) -> Any:
        checked.append(grid.policy)
        return simulate(trace, grid, **others)

    monkeypatch.setattr("cdlrm.simulate.proposal.simulate", spy)
    batches = [np.concatenate([np.arange(20) + 20 * (b % 5), 100 + 150 * b + np.arange(150)]) for b in range(200)]
    np.savez(tmp_path / "t.npz", rows=np.concatenate(batches), starts=np.arange(201) * 170, table_rows=[100, 30000])
    flags = ["--cache-rows", "250", "--horizon", "0", "--prefetch-depth", "0", "--policy", policy]
    out = tmp_path / "o.jsonl"
    flags += ["--propose-resident", "--no-progress", "--out", str(out)]
    assert main(["simulate", "--trace", str(tmp_path / "t.npz"), *flags]) == 0
    assert "t0 (100 rows)" in capsys.readouterr().out
    line = json.loads(out.read_text())
    assert line["resident_proposal"]["tables"][0]["table"] == "t0"
    assert line["fills"] == 200 * 170 and line["resident_proposal"]["fills"] == 200 * 150 + 100
    assert checked == [[policy]], "with the rule of the configuration"


def test_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("f.png", "f.svg"):
        flags = ["--num-batches", "8", "--curve", "6", "--figure", str(tmp_path / name)]
        assert main(["simulate", *SMALL, *flags]) == 0
        assert (tmp_path / name).stat().st_size > 5000


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:" in out and "--trace FILE" in out and "policies:" in out
