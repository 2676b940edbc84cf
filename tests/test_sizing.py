"""`cdlrm plan` and `cdlrm calibrate`: formulas by hand, what may never get worse, errors, whole commands."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cdlrm.sizing.calibrate as calibrate_module
import cdlrm.sizing.measure as measure_module
from cdlrm.assemble import TABLE_OPTIMIZERS
from cdlrm.cli import main
from cdlrm.config import TrainConfig
from cdlrm.errors import ConfigError, DataError
from cdlrm.plan import Planner
from cdlrm.simulate.trace import BatchRows, SourceTrace, Trace
from cdlrm.sizing.answer import Question, answer
from cdlrm.sizing.command import render, render_profile
from cdlrm.sizing.fit import cost, fit_costs
from cdlrm.sizing.measure import Case
from cdlrm.sizing.model import Prediction, contended, fill_seconds, padded, pipeline, predict, stages_of
from cdlrm.sizing.profiles import GPUS, Profile, gpu_profile, interpolate, load_profile, save_profile
from cdlrm.sizing.traffic import Ids, everything_resident, read_ids, run_planner, run_planners
from cdlrm.sizing.work import Moves, Shape, dense_counts, shape_of, units_by_stage

SHAPE = Shape(1000, 4, 16, 1, "rowwise-adagrad", (13, 32, 16), (26, 8, 1), 10)
GPU = gpu_profile("rtx4090")
SMALL = ["--synthetic-rows", "3000-500-7-10000-2", "--mini-batch-size", "256", "--no-progress"]


class Given(Trace):
    """A trace from arrays."""

    def __init__(self, data: list[np.ndarray], table_rows: list[int]) -> None:
        self.data, self.table_rows = data, table_rows
        self.names = [f"t{i}" for i in range(len(table_rows))]
        self.batches = len(data)

    def __iter__(self):
        for rows in self.data:
            yield BatchRows(rows, 0)


def skewed(batches: int = 60, rows: int = 4000) -> Given:
    rng = np.random.default_rng(3)
    return Given([(rng.zipf(1.3, 600) % rows).astype(np.int64) for _ in range(batches)], [rows])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """This machine, measured briefly: enough to see that everything works, not to believe the figures."""
    patch = pytest.MonkeyPatch()
    cases = tuple(dataclasses.replace(case, batch_size=64) for case in calibrate_module.CASES[:4])
    smaller = {"TABLE_ROWS": 500, "TABLE_BYTES": 4 << 20, "WARM_STEPS": 4, "ROUND_STEPS": 3, "WHOLE_STEPS": 2,
               "WHOLE_BATCHES": 8}  # fmt: skip
    for name, value in smaller.items():
        patch.setattr(measure_module, name, value)
    others = (Case(64, 16, "adagrad", 1.0, 0.1), Case(64, 16, "adam", 1.0, 0.1), Case(64, 8, "sgd", 1.0, 1.0))
    patch.setattr(calibrate_module, "CASES", (*cases, *others))
    patch.setattr(calibrate_module, "WHOLE_CASES", (Case(64, 16, "sgd", 1.0, 0.1),))
    patch.setattr(calibrate_module, "DENSE_CASES", ((64, 26, 16, (32,), (32, 1)), (256, 26, 16, (32,), (32, 1))))
    shares: list[float] = []
    profile = calibrate_module.calibrate(shares.append, seconds=0.0)
    assert shares == sorted(shares) and shares[-1] == 1.0
    patch.undo()
    return profile


def seconds_of(prediction: Prediction, resource: str) -> float:
    return sum(stage.seconds for stage in prediction.stages if stage.resource == resource)


# --- formulas ---


def test_flops_and_shapes_by_hand() -> None:
    # forward: 2 * (13*32 + 32*16 + 26*8 + 8*1) a sample, three times in all, without the gradient of the inputs
    products = 13 * 32 + 32 * 16 + 26 * 8 + 8
    interaction = 6 * 5 * 5 * 16
    assert SHAPE.dense_flops == 1000 * (6 * products - 2 * 13 * 32 + interaction)
    assert SHAPE.parameters == (13 * 32 + 32) + (32 * 16 + 16) + (26 * 8 + 8) + (8 + 1)
    assert SHAPE.record_bytes == 68 and padded(68) == 96 and padded(64) == 64
    counts = dense_counts(SHAPE)
    assert counts["activation"] == 1000 * (32 + 16 + 8 + 1) and counts["pair"] == 10_000 and counts["layer"] == 4
    found = shape_of(TrainConfig(arch_mlp_bot="13-32-16", arch_mlp_top="8-1", mini_batch_size=1000), 4, 13)
    assert found == SHAPE
    cat = shape_of(TrainConfig(arch_interaction_op="cat"), 4, 13)
    assert cat.pairs == 0 and cat.mlp_top[0] == 5 * 16 and dense_counts(cat)["pair_flop"] == 0


def test_stages_of_a_gpu_by_hand() -> None:
    moves = Moves(lookups=4000, distinct=1000, copied=300, generated=100, written=400)
    by_name = {stage.name: stage for stage in stages_of(GPU, SHAPE, moves, 5000)}
    assert by_name["scan + plan"].seconds == pytest.approx(4000 / 30e6)  # a small cache is one shard
    assert by_name["write-back"].seconds == pytest.approx(400 * 96 / (25.6e9 * 0.9) + 6e-6)
    link = 300 * 96 / (25e9 * interpolate(GPU.zero_copy_share, 96))
    random = 1008e9 * 0.6
    assert by_name["fill"].seconds == pytest.approx(link + 100 * 96 / random + 6e-6)
    big = moves._replace(lookups=4e7, distinct=1e7)
    lookup = {stage.name: stage for stage in stages_of(GPU, SHAPE, big, 5000)}["lookup"]
    assert lookup.seconds == pytest.approx(1e7 * 64 / random + 4e7 * 68 / 1008e9)
    assert 0 < lookup.bandwidth_utilisation < 1
    assert lookup.bandwidth_utilisation == pytest.approx((1e7 * 64 + 4e7 * 68) / lookup.seconds / 1008e9)


def test_staging_is_chosen_where_it_is_faster() -> None:
    narrow = dataclasses.replace(GPU, zero_copy_share={64: 0.05}, cores=64)
    link, gather = fill_seconds(narrow, 64, 1e6)
    assert gather > 0 and link == pytest.approx(64e6 / (25e9 * 0.9))
    assert fill_seconds(GPU, 512, 1e6)[1] == 0.0


def test_pipeline_by_hand() -> None:
    compute, transfer = np.full(50, 2.0), np.full(50, 1.0)
    assert pipeline(compute, transfer, 1) == pytest.approx(2.0)  # hidden
    assert pipeline(compute, transfer, 0) == pytest.approx(3.0)  # nothing overlaps
    assert pipeline(compute, 3 * transfer, 1) == pytest.approx(3.0)  # the transfer is the longer
    bursts = np.tile([0.0, 3.0], 25)  # mean 1.5, but one in two takes longer than a step
    assert pipeline(compute, bursts, 1) == pytest.approx(2.5, abs=0.05)
    assert pipeline(compute, bursts, 2) == pytest.approx(2.0, abs=0.05)  # smoothed over two batches
    one = np.ones(1)
    assert pipeline(one, 3 * one, 1) == 3.0 and pipeline(one, 3 * one, 0) == 4.0 and pipeline(one, 0 * one, 1) == 1.0


def test_contention_by_hand() -> None:
    assert contended(10, 10, 8, 2) == 10  # a serial trainer leaves a core free
    assert contended(10, 16, 0, 2) == 10
    assert contended(10, 16, 4, 2) == pytest.approx(10 + 4 * (1 - 10 / 16))
    assert contended(10, 16, 40, 2) == pytest.approx(28)  # more work than two cores do in any other way
    assert contended(10, 16, 4, 1) == 20


def test_costs_are_found_again() -> None:
    rng = np.random.default_rng(0)
    true = {"batch": 1e-3, "lookup": 2e-8, "value": 0.0}
    counts = [{name: float(rng.integers(1, 10**5)) if name != "batch" else 1.0 for name in true} for _ in range(12)]
    seconds = [cost(true, each) for each in counts]
    found = fit_costs(counts, seconds)
    assert min(found.values()) >= 0
    assert [cost(found, each) for each in counts] == pytest.approx(seconds, rel=1e-3)
    assert fit_costs([], []) == {}


# --- traffic ---


def test_traffic_is_the_planners() -> None:
    trace = skewed()
    ids = read_ids(trace)
    assert ids.batches == 60 and ids.rows_used == len(set(np.concatenate(trace.data).tolist()))
    assert [d.size for d in ids.distinct] == [len(set(rows.tolist())) for rows in trace.data]
    assert int(ids.first.sum()) == ids.rows_used and ids.lookups.tolist() == [600] * 60
    planner, fills = Planner(4000, 400, 1), []
    for b in range(60 + 8):
        if b < 60:
            planner.scan(trace.data[b])
        if b >= 8:
            fills.append(planner.plan().fill_rows.size)
    traffic = run_planner(ids, 400, 8, 1)
    assert traffic.fills.tolist() == fills and traffic.full and 30 <= traffic.warm <= 45
    for moves, b in zip(traffic.moves(ids), range(traffic.warm, 60), strict=True):
        assert moves.copied + moves.generated == fills[b] and moves.generated == min(ids.first[b], fills[b])


def test_a_larger_cache_never_moves_more_and_takes_no_longer() -> None:
    ids = read_ids(skewed(120))
    slow = dataclasses.replace(GPU, link_to_device_gb_per_s=0.01, link_to_host_gb_per_s=0.01)
    fills, seconds = [], []
    for rows in (300, 500, 900, 1600, 3000):
        traffic = run_planner(ids, rows, 16, 1)
        fills.append(int(traffic.fills.sum()))
        seconds.append(predict(slow, SHAPE, traffic.moves(ids), 1, rows).step_seconds)
    assert fills == sorted(fills, reverse=True)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("better", ["link_to_device_gb_per_s", "link_to_host_gb_per_s", "device_gb_per_s", "cores",
                                    "planner_lookups_per_s", "fp32_tflops", "zero_copy", "depth"])  # fmt: skip
def test_better_hardware_is_never_slower(better: str) -> None:
    moves = [Moves(1e6, 2e5, 5e4 * (b % 3), 2e3, 5e4) for b in range(20)]
    seconds = []
    for factor in (1, 2, 4, 8):
        profile, depth = GPU, 1
        if better == "depth":
            depth = factor
        elif better == "zero_copy":
            shares = {size: share * factor / 8 for size, share in GPU.zero_copy_share.items()}
            profile = dataclasses.replace(GPU, zero_copy_share=shares)
        else:
            profile = dataclasses.replace(GPU, **{better: type(getattr(GPU, better))(factor * getattr(GPU, better))})
        seconds.append(predict(profile, SHAPE, moves, depth, 1 << 22).step_seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_everything_resident_waits_for_nothing() -> None:
    ids = read_ids(skewed())
    prediction = predict(GPU, SHAPE, everything_resident(ids).moves(ids), 1, None)
    assert prediction.stall_seconds < 1e-15 and seconds_of(prediction, "transfer") == 0 and prediction.limit == "dense"


# --- the answer ---


def ask(profile: Profile, ids: Ids | None = None) -> Question:
    return Question(profile, SHAPE, ids or read_ids(skewed(120)), 16, 1)


def test_the_smallest_hiding_cache_lies_between_one_that_waits_and_one_that_does_not() -> None:
    slow = dataclasses.replace(
        GPU, link_to_device_gb_per_s=0.2, link_to_host_gb_per_s=0.2, launch_us=1.0, planner_lookups_per_s=1e9
    )
    question = ask(slow)
    given = answer(question, [300, 600, 1200, 3900])
    hidden = [row.hidden for row in given.rows]
    assert hidden == sorted(hidden) and not hidden[0] and hidden[-1]
    assert given.hiding is not None and given.hiding.hidden
    at = hidden.index(True)
    assert given.rows[at - 1].traffic.cache_rows < given.hiding.traffic.cache_rows <= given.rows[at].traffic.cache_rows
    exact = question.ask(run_planner(question.ids, given.hiding.traffic.cache_rows, 16, 1))
    assert exact.prediction.step_seconds == pytest.approx(given.hiding.prediction.step_seconds, rel=0.1)
    assert given.rows[-1].traffic.resident and "Keep everything resident" in given.advice
    small = dataclasses.replace(slow, device_memory_bytes=int(given.rows[-2].device_bytes / 0.9) + 1)
    given = answer(dataclasses.replace(question, profile=small), [300, 600, 1200, 3900])
    assert given.chosen is not None and not given.rows[-1].fits
    assert "hides the transfer" in given.advice and "everything resident needs" in given.advice


def test_advice_for_each_case() -> None:
    ids = read_ids(skewed(120))
    assert "Keep everything resident" in answer(ask(GPU, ids), [300, 4000]).advice
    tiny = dataclasses.replace(GPU, device_memory_bytes=10**8)
    assert "does not fit: the smallest cache" in answer(ask(tiny, ids), [300, 4000]).advice
    poor = dataclasses.replace(tiny, host_memory_bytes=10**5)
    given = answer(ask(poor, ids), [300])
    assert given.chosen is None and "--store file:DIR" in given.advice and not given.rows[0].fits_host
    slow = dataclasses.replace(GPU, link_to_device_gb_per_s=1e-3, link_to_host_gb_per_s=1e-3, link_both_gb_per_s=2e-3)
    room = ask(slow, ids).ask(run_planner(ids, 400, 16, 1)).device_bytes
    slow = dataclasses.replace(slow, device_memory_bytes=int(room / 0.9) + 1)
    given = answer(ask(slow, ids), [300, 400])
    assert "a link twice as fast would make it" in given.advice and "limited by" in given.advice
    assert "of memory for everything resident would make it" in given.advice
    assert given.hiding is not None and not given.hiding.fits
    assert given.rows[0].prediction.limit in ("fill", "write-back")


@pytest.mark.parametrize("memory_gb", [24.0, 0.785])
def test_advice_is_no_worse_for_leaving_sizes_out(memory_gb: float) -> None:
    """The advice after two small caches is that after all sizes, and says nothing that a larger cache contradicts."""
    rng = np.random.default_rng(5)
    ids = read_ids(Given([(rng.zipf(1.2, 40_000) % 900_000).astype(np.int64) for _ in range(12)], [900_000]))
    profile = dataclasses.replace(GPU, device_memory_bytes=int(memory_gb * 1e9), planner_lookups_per_s=3e6)
    few, all_ = (
        answer(ask(profile, ids), sizes) for sizes in ([45_000, 90_000], [45_000, 90_000, 300_000, 600_000, 900_000])
    )
    assert few.chosen is not None and all_.chosen is not None
    assert few.chosen.prediction.step_seconds == pytest.approx(all_.chosen.prediction.step_seconds, rel=0.03)
    assert few.rows[-1].traffic.resident and few.rows[-1].fits == (memory_gb > 1)
    if memory_gb < 1:
        assert few.chosen.traffic.cache_rows < 900_000 and "of memory for everything resident would" in few.advice


def test_more_shards_are_advised_where_one_limits() -> None:
    rng = np.random.default_rng(5)
    ids = read_ids(Given([rng.integers(0, 100_000, 80_000) for _ in range(12)], [100_000]))
    planner = dataclasses.replace(GPU, planner_lookups_per_s=1e6)
    room = ask(planner, ids).ask(run_planner(ids, 70_000, 16, 1)).device_bytes
    planner = dataclasses.replace(planner, device_memory_bytes=int(room / 0.9) + 1)
    question = ask(planner, ids)
    given = answer(question, [70_000])
    assert given.chosen is not None and given.chosen.prediction.limit == "scan + plan"
    step = given.chosen.prediction.step_seconds
    assert step == pytest.approx(80_000 / 1e6)  # one shard, on one of eight cores
    with_shards = question.step_with(given.chosen.traffic, shards=4)
    assert with_shards == pytest.approx(step / 4)  # 80,000 lookups are worth four threads
    assert "shards=4" in given.advice and "would make it 75% shorter" in given.advice
    assert "twice the cores" not in given.advice and "no other cache size" not in given.advice


def test_memory_grows_with_the_cache_and_the_rows() -> None:
    question = ask(GPU)
    rows = [question.ask(run_planner(question.ids, rows, 16, 1)) for rows in (300, 1300)]
    assert rows[1].device_bytes - rows[0].device_bytes == 1000 * padded(68)
    assert rows[0].host_bytes >= 4000 * (padded(68) + 12) and rows[0].fits


def test_batches_that_grow_do_not_make_a_larger_cache_look_slower() -> None:
    rng = np.random.default_rng(5)
    sizes = [400 if number < 140 else 6_000 for number in range(200)]
    ids = read_ids(Given([rng.integers(0, 80_000, size) for size in sizes], [80_000]))
    rows = answer(ask(GPU, ids), [14_000, 30_000, 50_000, 60_000]).rows
    trainer = [row.prediction.trainer_seconds for row in rows]
    assert max(trainer[:-1]) == min(trainer[:-1])  # the same batches; the resident one looks up without a plan
    assert rows[-1].traffic.warm == rows[0].traffic.warm


# --- profiles ---


def test_every_profile_is_complete_and_says_where_it_is_from(tmp_path: Path) -> None:
    names = ("rtx3060", "rtx3090", "rtx4090", "rtx5090", "a100-40", "a100-80", "l4", "t4", "h100", "h200")
    assert tuple(GPUS) == names
    for name, profile in GPUS.items():
        file = tmp_path / f"{name}.json"
        save_profile(profile, file)
        assert load_profile(str(file)) == profile  # also checks every figure
        for what in ("device", "link", "zero_copy_share", "dense_share", "host"):
            assert len(profile.sources[what]) > 10
        assert profile.link_both_gb_per_s <= profile.link_to_device_gb_per_s + profile.link_to_host_gb_per_s
    assert gpu_profile("RTX 4090") is GPUS["rtx4090"]


def test_bad_profiles(tmp_path: Path) -> None:
    file = tmp_path / "p.json"

    def refused(text: str, words: str) -> None:
        file.write_text(text)
        with pytest.raises(DataError, match=words) as error:
            load_profile(str(file))
        assert str(error.value).count("\n") == 0 and str(error.value).endswith(".")

    with pytest.raises(DataError, match="cdlrm calibrate"):
        load_profile(str(tmp_path / "none.json"))
    refused("nonsense", "not JSON")
    refused("[1]", "not a profile")
    refused('{"cdlrm_profile": 99}', "not a profile")
    values = {"cdlrm_profile": 1, **dataclasses.asdict(GPU)}
    refused(json.dumps({**values, "speed": 3}), "'speed' is missing or unknown")
    refused(json.dumps({k: v for k, v in values.items() if k != "cores"}), "'cores' is missing or unknown")
    refused(json.dumps({**values, "cores": 0}), "cores is 0")
    refused(json.dumps({**values, "device_gb_per_s": "fast"}), "device_gb_per_s is 'fast'")
    refused(json.dumps({**values, "kind": "tpu"}), "kind 'tpu'")
    refused(json.dumps({**values, "zero_copy_share": {}}), "zero_copy_share")
    for wrong in (5, {"small": 1}, {"64": "fast"}, {"64": None}):
        refused(json.dumps({**values, "host_record_gb_per_s": wrong}), "must give numbers by record size")
    for name in ("launch_us", "background_cost", "spread"):
        refused(json.dumps({**values, name: "none"}), f"{name} is 'none'")
        refused(json.dumps({**values, name: -1}), f"{name} is -1")
    refused(json.dumps({**values, "tf32_tflops": 0}), "tf32_tflops is 0")
    refused(json.dumps({**values, "kind": "cpu"}), "costs of the stage 'plan'")
    for cores in (True, 2.5):
        refused(json.dumps({**values, "cores": cores}), f"cores is {cores}")
    refused(json.dumps({**values, "name": 5}), "name is 5")
    refused(json.dumps({**values, "host_record_gb_per_s": {"64": math.nan}}), "a number above 0 for at least one")
    units = {stage: dict.fromkeys(names, 1e-9) for stage, names in units_by_stage().items()}
    costs: dict[str, Any] = {stage: {"wall": unit, "core": unit} for stage, unit in units.items()}
    file.write_text(json.dumps({**values, "kind": "cpu", "costs": costs}))
    assert load_profile(str(file)).costs == costs
    fewer = {name: 1e-9 for name in units["update"] if name != "adam_value"}
    for wrong in ([], 5, None, {"wall": 3, "core": 4}, {"wall": [1], "core": [1]}, {"wall": units["update"]},
                  {"wall": fewer, "core": fewer}, {"wall": {**fewer, "adam_value": "x"}, "core": fewer},
                  {"wall": {**fewer, "adam_value": -1}, "core": fewer}):  # fmt: skip
        refused(json.dumps({**values, "kind": "cpu", "costs": {**costs, "update": wrong}}), "the stage 'update'")
    refused(json.dumps({**values, "kind": "cpu", "costs": [1]}), "costs of the stage 'plan'")
    with pytest.raises(ConfigError, match="rtx4090"):
        gpu_profile("voodoo2")


# --- this machine ---


def test_every_optimizer_is_calibrated() -> None:
    assert {case.optimizer for case in calibrate_module.CASES} == set(TABLE_OPTIMIZERS)


def test_a_calibrated_profile_predicts_every_stage(measured: Profile, tmp_path: Path) -> None:
    assert measured.kind == "cpu" and measured.cores >= 1 and measured.background_cost >= 0
    assert all(rate > 0 for rate in measured.host_record_gb_per_s.values())
    file = tmp_path / "here.json"
    save_profile(measured, file)
    assert load_profile(str(file)) == measured
    shape = dataclasses.replace(SHAPE, optimizer="rowwise-adagrad")
    moves = Moves(2e4, 1e4, 3e3, 1e3, 4e3)
    small, large = (predict(measured, shape, [Moves(*(k * n for n in moves))], 1, 10**6) for k in (1, 10))
    assert [stage.name for stage in small.stages] == ["scan + plan", "write-back", "fill", "lookup", "update", "dense"]
    assert all(stage.seconds >= 0 for stage in small.stages)
    assert large.step_seconds >= small.step_seconds > 0
    resident = predict(measured, shape, [moves._replace(copied=0, generated=0, written=0)], 1, None)
    assert resident.step_seconds <= small.step_seconds and seconds_of(resident, "transfer") == 0


def test_impossible_rates_are_undone_and_a_busy_machine_is_said(measured: Profile, tmp_path: Path) -> None:
    memory = object.__new__(measure_module.Memory)
    memory.sequential, memory.records = measure_module.Least(), {}
    piece = measure_module.TABLE_BYTES // measure_module.PIECES
    for wall in (0.002, 0.001, 0.002):
        memory.sequential.add(wall, wall)
    for size, share in {32: 0.1, 64: 0.3, 128: 0.2, 256: 1.5}.items():  # of the pace of a sequential copy
        memory.records[size] = measure_module.Least()
        memory.records[size].add(0.001 / share, 0.001 / share)
    copied = piece / 0.001 / 1e9
    assert memory.gb_per_s() == pytest.approx(2 * copied) and memory.sequential.spread == 2.0
    shares = {size: rate / copied for size, rate in memory.record_gb_per_s().items()}
    assert shares == pytest.approx({32: 0.1, 64: 0.3, 128: 0.3, 256: 1.0})
    rates = list(measured.host_record_gb_per_s.values())
    assert rates == sorted(rates) and rates[-1] <= measured.host_gb_per_s / 2 and measured.spread >= 1
    quiet, busy = (dataclasses.replace(measured, spread=spread) for spread in (1.05, 1.8))
    assert "busy" not in render_profile(quiet) and "1.8 times the least" in render_profile(busy)
    save_profile(busy, tmp_path / "busy.json")
    given = answer(ask(load_profile(str(tmp_path / "busy.json")), read_ids(skewed(20))), [700])
    assert "run `cdlrm calibrate` again" in render(given)


# --- commands ---


def test_plan_for_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    flags = ["--num-batches", "30", "--cache-ratio", "0.1", "0.5", "1.0", "--json", str(file)]
    assert main(["plan", "--gpu", "rtx3060", *SMALL, *flags]) == 0
    out = capsys.readouterr().out
    for words in ("Plan for rtx3060", "samples/s", "MBU", "limit", "Not measured on this GPU", "cache rows"):
        assert words in out
    found = json.loads(file.read_text())
    assert [row["cache_rows"] for row in found["caches"]] == [1351, 6755, 13509]
    assert found["advice"] in out and found["table_rows"] == 13509 and found["shape"]["batch_size"] == 256
    assert out.rstrip().endswith(found["advice"])
    trace = SourceTrace(TrainConfig(synthetic_rows="3000-500-7-10000-2", mini_batch_size=256, num_batches=30))
    moves = run_planners(read_ids(trace), [1351, 6755], "auto", 1)[0].moves(read_ids(trace))
    assert found["caches"][0]["rows_a_batch"]["copied"] == pytest.approx(sum(m.copied for m in moves) / len(moves))
    for row in found["caches"]:
        assert row["samples_per_second"] == pytest.approx(256 / row["step_seconds"])


def test_plan_from_a_profile_and_a_trace(measured: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_profile(measured, tmp_path / "here.json")
    trace = skewed(20)
    starts = np.arange(21) * 600
    np.savez(tmp_path / "t.npz", rows=np.concatenate(trace.data), starts=starts, table_rows=trace.table_rows)
    flags = ["--profile", str(tmp_path / "here.json"), "--trace", str(tmp_path / "t.npz"), "--no-progress"]
    assert main(["plan", *flags, "--cores", "4", "--host-memory", "1"]) == 0
    out = capsys.readouterr().out
    assert "this machine" in out and "batches of 600" in out and "4,000 rows of 68 bytes in 1 tables" in out


def test_calibrate_writes_a_profile(
    measured: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def quick(tell):
        for share in (0.3, 1.0):
            tell(share)
        return measured

    monkeypatch.setattr(calibrate_module, "calibrate", quick)
    file = tmp_path / "here.json"
    assert main(["calibrate", "--out", str(file), "--no-progress"]) == 0
    assert "GB/s" in capsys.readouterr().out and load_profile(str(file)) == measured
    assert main(["plan", "--gpu", "cpu", *SMALL, "--num-batches", "4"]) == 0
    assert "this machine" in capsys.readouterr().out


BAD = {
    "--gpu voodoo2": "expected one of rtx3060",
    "": "none is given where one is needed",
    "--gpu rtx4090 --profile p.json": "both are given",
    "--profile /no/such.json": "cdlrm calibrate --out",
    "--gpu l4 --cores 0": "at least 1",
    "--gpu l4 --host-memory much": "a number",
    "--gpu l4 --host-memory -3": "above 0",
    "--gpu l4 --cache-ratio 2": "at most 1",
    "--gpu l4 --cache-rows 99999999": "only 13509 rows",
    "--gpu l4 --cache-rows x": "whole number",
    "--gpu l4 --json /no/such/folder/x": "folder does not exist",
    "--gpu l4 --trace none.npz": "leave one of them out",
    "--gpu l4 --cache-row 3": "did you mean --cache-rows?",
    "--gpu l4 --arch-mlp-top 8-2": "must be 1",
    "--gpu l4 --arch-mlp-bot 5-16": "--arch-mlp-bot 5-16: the data has 13 dense columns, so it must start with 13.",
    "--gpu l4 --json /proc/x": "--json /proc/x: cannot be written",
    "--gpu cpu --cache-rows 0": "--cache-rows 0: must be at least 1.",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_are_one_sentence(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags.split(), *SMALL]) in (1, 2)
    said = capsys.readouterr().err
    assert BAD[flags] in said and said.startswith("error: ") and said.count("\n") == 1


def test_an_empty_trace_is_said() -> None:
    with pytest.raises(DataError, match="empty"):
        read_ids(Given([], [5]))
    with pytest.raises(DataError, match="empty"):
        read_ids(Given([np.empty(0, np.int64)], [5]))


@pytest.mark.parametrize("command", ["plan", "calibrate"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "example" in out and "cdlrm calibrate --out here.json" in out
