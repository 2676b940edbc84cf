"""What `calibrate` measures: memory, the MLPs, the stages of the tables one by one, and whole steps."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import cdlrm

from ..ahead import Lookahead
from ..assemble import TABLE_OPTIMIZERS
from ..data.synthetic import SyntheticSource
from ..driver.cpu_kernels import move_rows
from ..model import DLRM
from .model import predict
from .profiles import GB, Profile
from .work import Moves, Shape

RECORD_BYTES = (32, 64, 128, 256, 512, 1024)
TABLE_BYTES = 256 << 20  # beyond the processor's caches
PIECES, RECORD_REPEATS = 32, 3
TABLES, TABLE_ROWS = 26, 40_000
WARM_STEPS, ROUND_STEPS = 24, 8
WHOLE_BLOCKS, WHOLE_STEPS, WHOLE_BATCHES = 3, 6, 64
REST_SECONDS = 0.1  # until nobody's threads work in another's time


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration of the tables' stages."""

    batch_size: int
    dim: int
    optimizer: str
    zipf: float
    cache_ratio: float
    ids: int = 1  # a feature and sample


class Least:
    """The least wall time seen, and the least core time."""

    def __init__(self) -> None:
        self.wall = self.core = float("inf")
        self.walls: list[float] = []

    def add(self, wall: float, core: float) -> None:
        self.wall, self.core = min(self.wall, wall), min(self.core, core)
        self.walls.append(wall)

    @property
    def spread(self) -> float:
        """The median time over the least."""
        return float(np.median(self.walls)) / self.wall

    @property
    def cores(self) -> float:
        """Core seconds; a clock of the process cannot lag the wall's."""
        return max(self.core, self.wall)


class Timer:
    """Wall and core seconds of a `with` block."""

    def __enter__(self) -> Timer:
        self._wall, self._core = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.wall, self.core = time.perf_counter() - self._wall, time.process_time() - self._core


class Memory:
    """Sequential copies on all of torch's threads, and records from random places on one.

    Both in pieces of a few milliseconds, read at other places each time: short enough to fall between what else runs,
    and not what is still in the processor's caches."""

    def __init__(self) -> None:
        self.source = torch.zeros(TABLE_BYTES // 4)
        self.target = torch.zeros(TABLE_BYTES // 4)
        self.sequential = Least()
        self.records = {size: Least() for size in RECORD_BYTES}
        self.places = np.random.default_rng(0)
        self.measure()

    def measure(self) -> None:
        pieces = zip(self.target.chunk(PIECES), self.source.chunk(PIECES), strict=True)
        for piece, read in pieces:
            with Timer() as timer:
                piece.copy_(read)
            self.sequential.add(timer.wall, timer.core)
        for _ in range(RECORD_REPEATS):
            for size, least in self.records.items():
                source, target = (each.numpy().reshape(-1, size // 4) for each in (self.source, self.target))
                index = self.places.integers(len(source), size=TABLE_BYTES // PIECES // size)
                with Timer() as timer:
                    move_rows(target, index[:0], source, index, 0, len(index))
                least.add(timer.wall, timer.core)

    def gb_per_s(self) -> float:
        """Bytes read and written."""
        return 2 * TABLE_BYTES / PIECES / self.sequential.wall / GB

    def record_gb_per_s(self) -> dict[int, float]:
        """Bytes read, by record size.  What disturbed a measurement is undone where it cannot be: larger records are
        copied no slower than smaller ones, and random places no faster than one after another."""
        rate, rates = 0.0, {}
        for size, least in self.records.items():
            moved = TABLE_BYTES // PIECES // size * size
            rate = min(max(rate, moved / least.wall / GB), self.gb_per_s() / 2)
            rates[size] = rate
        return rates


class Dense:
    """The model without tables: pooled embeddings are a tensor that wants a gradient."""

    def __init__(self, batch_size: int, features: int, dim: int, bottom: tuple[int, ...], top: tuple[int, ...]) -> None:
        self.pooled = torch.zeros(batch_size, features, dim, requires_grad=True)
        self.model = DLRM(
            _Given(self.pooled), features=features, dim=dim, mlp_bot=[13, *bottom, dim], mlp_top=list(top)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.inputs, self.labels = torch.rand(batch_size, 13), torch.rand(batch_size).round()
        vectors = features + 1
        pairs = vectors * features // 2
        self.shape = Shape(batch_size, features, dim, 0, "sgd", (13, *bottom, dim), (dim + pairs, *top), pairs)
        self.least = Least()
        for _ in range(2):
            self._step()

    def _step(self) -> None:
        train_step(self.model, self.optimizer, self.inputs, None, self.labels)
        self.pooled.grad = None

    def measure(self) -> None:
        for _ in range(4):
            with Timer() as timer:
                self._step()
            self.least.add(timer.wall, timer.core)

    def close(self) -> None:
        """Nothing to end."""


class _Given(torch.nn.Module):
    def __init__(self, pooled: torch.Tensor) -> None:
        super().__init__()
        self.pooled = pooled

    def forward(self, sparse: Any) -> torch.Tensor:
        return self.pooled


def train_step(model: DLRM, optimizer: Any, dense: torch.Tensor, sparse: Any, labels: torch.Tensor) -> None:
    """What `cdlrm train` does for a batch: forward, loss, checks, backward, the MLPs' optimizer."""
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels)
    bool(torch.isfinite(loss.detach()))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    gradients = [p.grad for p in model.dense_parameters() if p.grad is not None]
    bool(torch.isfinite(torch.nn.utils.get_total_norm(gradients)))
    optimizer.step()


class Tables:
    """A collection whose stages take turns in this thread; batches are generated as they are needed."""

    def __init__(self, case: Case) -> None:
        self.case = case
        tables = [cdlrm.Table(f"c{t + 1}", TABLE_ROWS, case.dim) for t in range(TABLES)]
        optimizer = TABLE_OPTIMIZERS[case.optimizer](lr=0.01)
        self.collection = cdlrm.EmbeddingBagCollection(
            tables, optimizer=optimizer, cache_ratio=case.cache_ratio, device="cpu", seed=0
        )
        self.collection.stepping.told = True  # no optimizer of torch's follows its backward passes
        self.shape = Shape(
            case.batch_size, TABLES, case.dim, optimizer.state_width(case.dim), case.optimizer, (), (), 0
        )
        source = SyntheticSource(
            batch_size=case.batch_size, num_batches=100_000, cardinalities=[TABLE_ROWS] * TABLES,
            exponents=case.zipf, missing=0.0, lengths=case.ids, seed=1,
        )  # fmt: skip
        self.look = Lookahead(self.collection, _Untimed(source), horizon=8, prefetch_depth=1, threads=False)
        iter(self.look)
        self.grad = torch.full((case.batch_size, TABLES, case.dim), 1e-6)
        self.moves: list[Moves] = []
        self.seconds: list[dict[str, tuple[float, float]]] = []
        for _ in range(WARM_STEPS):
            self._step()
        self.seconds.clear()
        self.moves.clear()

    def measure(self) -> None:
        for _ in range(ROUND_STEPS):
            self._step()

    def _step(self) -> None:
        line, group = self.look._pipeline, self.collection.groups[0]
        assert line is not None
        reader, planner, transfer = line.stages
        spent = {"plan": [0.0, 0.0], "transfer": [0.0, 0.0]}
        while not line.ready:
            for stage, name in ((reader, "plan"), (planner, "plan"), (transfer, "transfer")):
                if stage is reader and line.may_read():
                    reader.loader.prepare()  # type: ignore[attr-defined]
                with Timer() as timer:
                    worked = stage.step()
                if worked:
                    spent[name][0] += timer.wall
                    spent[name][1] += timer.core
        work = line.advance()
        assert work is not None
        with Timer() as forward:
            pooled = self.collection(work.batch)
        with Timer() as backward:
            pooled.backward(self.grad)
        line.finish_batch()
        plan = work.plans[group]
        fills = int(plan.fill_rows.size)
        self.moves.append(Moves(plan.lookups, plan.distinct, plan.copied, fills - plan.copied, plan.written))
        self.seconds.append({
            "plan": (spent["plan"][0], spent["plan"][1]),
            "transfer": (spent["transfer"][0], spent["transfer"][1]),
            "lookup": (forward.wall, forward.core),
            "update": (backward.wall, backward.core),
        })  # fmt: skip

    def close(self) -> None:
        self.look.close()
        self.collection.close()

    def typical(self, stage: str) -> tuple[float, float]:
        """Wall and core seconds of a step that nothing disturbed: the lower quartile."""
        wall, core = np.quantile([each[stage] for each in self.seconds], 0.25, axis=0)
        return float(wall), float(max(core, wall))

    def mean_moves(self) -> Moves:
        return Moves(*np.mean(self.moves, axis=0).tolist())


class _Untimed:
    """A loader that generates its next batch when it is told to, so that reading costs nothing."""

    def __init__(self, source: SyntheticSource) -> None:
        self._batches: Iterator[Any] = iter(source)
        self._next: Any = None

    def prepare(self) -> None:
        if self._next is None:
            self._next = next(self._batches)

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.prepare()
            batch, self._next = self._next, None
            yield batch


class Whole:
    """Whole steps as in training: reader, planner and transfer threads beside the trainer."""

    def __init__(self, case: Case) -> None:
        optimizer = TABLE_OPTIMIZERS[case.optimizer](lr=0.01)
        tables = [cdlrm.Table(f"c{t + 1}", TABLE_ROWS, case.dim) for t in range(TABLES)]
        self.collection = cdlrm.EmbeddingBagCollection(
            tables, optimizer=optimizer, cache_ratio=case.cache_ratio, device="cpu", seed=0
        )
        pairs = (TABLES + 1) * TABLES // 2
        self.shape = Shape(
            case.batch_size, TABLES, case.dim, optimizer.state_width(case.dim), case.optimizer,
            (13, 64, case.dim), (case.dim + pairs, 64, 1), pairs,
        )  # fmt: skip
        self.model = DLRM(self.collection, features=TABLES, dim=case.dim, mlp_bot=[13, 64, case.dim], mlp_top=[64, 1])
        self.optimizer = torch.optim.SGD(self.model.dense_parameters(), lr=1e-3)
        batches = list(SyntheticSource(
            batch_size=case.batch_size, num_batches=WHOLE_BATCHES, cardinalities=[TABLE_ROWS] * TABLES,
            exponents=case.zipf, missing=0.0, seed=2,
        ))  # fmt: skip
        self.stream = cdlrm.lookahead(self.model, itertools.cycle(batches), horizon=8)
        self.blocks: list[float] = []
        for _ in range(WARM_STEPS):
            self._step()
        self.before = self.collection.stats()

    def measure(self) -> None:
        time.sleep(REST_SECONDS)
        for _ in range(2):  # these profit from the rest
            self._step()
        for _ in range(WHOLE_BLOCKS):
            started = time.perf_counter()
            for _ in range(WHOLE_STEPS):
                self._step()
            self.blocks.append((time.perf_counter() - started) / WHOLE_STEPS)
        time.sleep(REST_SECONDS)

    def _step(self) -> None:
        batch = next(self.stream)
        train_step(self.model, self.optimizer, batch.dense, batch, batch.labels)

    def excess(self, profile: Profile) -> float:
        """Seconds that the step took longer than predicted, for each core second of planning and copying."""
        now = self.collection.stats()
        names = ("lookups", "distinct", "fills_copied", "fills_initialised", "evicts_written")
        steps = now["steps"] - self.before["steps"]
        moves = Moves(*((now[name] - self.before[name]) / steps for name in names))
        predicted = predict(profile, self.shape, [moves], 1, now["cache_rows"])
        background = sum(stage.core_seconds for stage in predicted.stages if stage.resource != "trainer")
        return (min(self.blocks) - predicted.step_seconds) / background

    def close(self) -> None:
        self.stream.close()
        self.collection.close()
