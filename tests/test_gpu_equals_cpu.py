"""The GPU driver on the emulated GPU against the CPU driver, call by call: outputs, tables, states, counts, bit by bit.

Each scenario runs on the CPU and under several orders of the emulated streams.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated import use
from emulator.compile import compiler

import cdlrm
from cdlrm import placement

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the emulated GPU cannot compile kernels")

ON_THE_CPU = placement.DRIVERS["cpu"]
SEEDS = range(4)

Seen = list[Any]


def equal(monkeypatch: pytest.MonkeyPatch, scenario: Callable[[], Seen]) -> None:
    monkeypatch.setitem(placement.DRIVERS, "cpu", ON_THE_CPU)
    wanted = scenario()
    assert wanted
    for seed in SEEDS:
        with monkeypatch.context() as patch:
            emulated = use(patch, seed)
            got = scenario()
            assert emulated.made
        assert len(got) == len(wanted)
        for number, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
            assert mine == theirs, f"stream order {seed}: observation {number} of {len(wanted)}"


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def contents(ebc: Any) -> Seen:
    """Weights, optimizer states and skipped steps."""
    seen = [(key, bits(value)) for key, value in ebc.state_dict().items() if key.endswith("weight")]
    for table in ebc.tables:
        seen += [(table.name, key, bits(value)) for key, value in ebc.table_state(table.name).items()]
    return [*seen, ebc.stats()["skipped_steps"]]


def mixed(**settings: Any) -> cdlrm.EmbeddingBagCollection:
    """Two dims, two optimizers of one dim: three groups."""
    tables = [cdlrm.Table("a", 60, 8), cdlrm.Table("b", 50, 5, pooling="mean"), cdlrm.Table("c", 40, 8)]
    each = {"a": cdlrm.Adam(lr=0.05), "b": cdlrm.RowWiseAdagrad(lr=0.1), "c": cdlrm.SGD(lr=0.1)}
    return cdlrm.EmbeddingBagCollection(tables, optimizer=each, **{"cache_rows": 45, "seed": 5, **settings})


def batches(count: int, size: int = 6, seed: int = 0) -> list[Any]:
    """Bags of up to three rows, some empty."""
    rng = np.random.default_rng(seed)

    def bags(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, size))])
        return torch.from_numpy(rng.integers(0, rows, offsets[-1])), torch.from_numpy(offsets)

    return [{"a": bags(60), "b": bags(50), "c": bags(40)} for _ in range(count)]


def grads(out: Any, seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng([7, seed])
    return {key: torch.from_numpy(rng.standard_normal(tuple(o.shape))).to(o.dtype) for key, o in out.items()}


def train(
    ebc: Any, loader: Any, poison: tuple[int, ...] = (), feature: str = "b", evaluate: tuple[int, ...] = ()
) -> Seen:
    """A step a batch; the batches of `poison` have a NaN in `feature`'s gradient, after those of `evaluate` other
    rows are read."""
    seen: Seen = []
    for j, batch in enumerate(loader):
        out = ebc(batch)
        seen += [(j, key, bits(value)) for key, value in out.items()]
        given = grads(out, j)
        if j in poison:
            given[feature][0, 0] = float("nan")
        torch.autograd.backward(list(out.values()), list(given.values()))
        if j in evaluate:
            with torch.no_grad():
                seen += [("eval", j, key, bits(value)) for key, value in ebc(batches(1, 9, 100 + j)[0]).items()]
    return seen


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("feature", ["a", "b", "c"])
def test_one_dim_is_not_finite_and_every_group_skips(monkeypatch: Any, feature: str, depth: int) -> None:
    def scenario() -> Seen:
        ebc = mixed(nonfinite="skip")
        look = cdlrm.lookahead(ebc, batches(12), prefetch_depth=depth)
        seen = train(ebc, look, poison=(0, 4, 5, 11), feature=feature) + contents(ebc)
        assert ebc.stats()["skipped_steps"] == 4
        ebc.close()
        return seen

    equal(monkeypatch, scenario)


@pytest.mark.parametrize("bad", [0, 1])
def test_one_of_two_backward_passes_of_a_step_is_not_finite(monkeypatch: Any, bad: int) -> None:
    """The step is skipped and counted once, whichever it is."""

    def scenario() -> Seen:
        ebc = mixed(nonfinite="skip")
        seen: Seen = []
        for j, batch in enumerate(cdlrm.lookahead(ebc, batches(6))):
            outs = [ebc(batch), ebc(batches(1, 4, 50 + j)[0])]
            for call, out in enumerate(outs):
                given = grads(out, 2 * j + call)
                if j in (1, 3) and call == bad:
                    given["a"][0, 0] = float("inf")
                torch.autograd.backward(list(out.values()), list(given.values()))
            seen += [bits(value) for out in outs for value in out.values()]
        seen += contents(ebc)
        assert ebc.stats()["skipped_steps"] == 2
        ebc.close()
        return seen

    equal(monkeypatch, scenario)


@pytest.mark.parametrize("depth", [0, 2, 4])
def test_evaluation_and_growth_in_the_middle_of_a_look_ahead(monkeypatch: Any, depth: int) -> None:
    def scenario() -> Seen:
        ebc = mixed(cache_rows=6)
        some = batches(4, 2) + batches(3, 12, 1) + batches(4, 3, 2)
        seen = train(ebc, cdlrm.lookahead(ebc, some, prefetch_depth=depth), evaluate=(1, 4, 5, 9))
        assert ebc.stats()["grows"] > 0
        seen += contents(ebc)
        ebc.close()
        return seen

    equal(monkeypatch, scenario)


@pytest.mark.parametrize("stop", [1, 4])
def test_leaving_early_with_batches_executed_ahead(monkeypatch: Any, stop: int) -> None:
    """Then another pass over other batches."""

    def scenario() -> Seen:
        ebc = mixed()
        look = cdlrm.lookahead(ebc, batches(12), prefetch_depth=4)
        seen = train(ebc, (batch for batch, _ in zip(look, range(stop), strict=False)))
        look.close()
        seen += train(ebc, batches(2, 5, 3)) + train(ebc, cdlrm.lookahead(ebc, batches(6, 7, 4), prefetch_depth=2))
        seen += contents(ebc)
        ebc.close()
        return seen

    equal(monkeypatch, scenario)


def test_a_file_store_whose_evicted_rows_are_needed_at_once(monkeypatch: Any, tmp_path: Path) -> None:
    """Two sets of rows that take turns in a cache for one of them."""
    made: list[int] = []

    def scenario() -> Seen:
        made.append(1)
        ebc = mixed(cache_rows=36, store=f"file:{tmp_path}/{len(made)}")
        turns = [batches(1, 8, j % 2)[0] for j in range(14)]
        seen = train(ebc, cdlrm.lookahead(ebc, turns, prefetch_depth=1), evaluate=(3, 8))
        assert ebc.stats()["evicts_written"] > 50 and ebc.stats()["fills_copied"] > 50
        seen += contents(ebc)
        ebc.close()
        return seen

    equal(monkeypatch, scenario)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_rounded_alike(monkeypatch: Any, dtype: torch.dtype) -> None:
    def scenario() -> Seen:
        ebc = mixed(output_dtype=dtype)
        seen = train(ebc, cdlrm.lookahead(ebc, batches(8)), evaluate=(2, 5)) + contents(ebc)
        ebc.close()
        return seen

    equal(monkeypatch, scenario)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_grad_scaler(monkeypatch: Any, update: str) -> None:
    """Two scaled losses overflow: no table changes in those steps, and the scale is halved."""

    def scenario() -> Seen:
        ebc, dense = mixed(update=update), torch.nn.Linear(21, 1)
        torch.nn.init.constant_(dense.weight, 0.1)
        torch.nn.init.zeros_(dense.bias)
        optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
        scaler = ebc.grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        seen: Seen = []
        for j, batch in enumerate(cdlrm.lookahead(ebc, batches(10), prefetch_depth=2)):
            loss = dense(torch.cat(list(ebc(batch).values()), 1)).sum() * (float("inf") if j in (3, 6) else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.step(ebc.optimizer)
            scaler.update()
            seen.append((scaler.get_scale(), bits(dense.weight)))
        assert len({scale for scale, _ in seen}) > 2
        seen += contents(ebc)
        ebc.close()
        return seen

    equal(monkeypatch, scenario)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.user, self.item = torch.nn.EmbeddingBag(40, 8, mode="mean"), torch.nn.EmbeddingBag(60, 8, mode="sum")
        self.word = torch.nn.Embedding(30, 4)


def test_modules_that_share_groups(monkeypatch: Any) -> None:
    """`replace_embeddings`: two bags of one group and an embedding, one of them called twice a step."""

    def scenario() -> Seen:
        model, rng = Model(), np.random.default_rng(0)
        tables = cdlrm.replace_embeddings(model, optimizer=cdlrm.Adagrad(lr=0.1), cache_rows=40)
        some = [[torch.from_numpy(rng.integers(0, n, (5, 2))) for n in (40, 60, 60, 30)] for _ in range(10)]

        def ids(batch: Any) -> Any:
            return {model.user: batch[0], model.item: [batch[1], batch[2]], model.word: batch[3]}

        seen: Seen = []
        for user, first, second, word in cdlrm.lookahead(model, some, ids=ids, prefetch_depth=2):
            outs = [model.user(user), model.item(first), model.item(second), model.word(word)]
            seen += [bits(out) for out in outs]
            sum((out * (k + 1)).square().sum() for k, out in enumerate(outs)).backward()
        tables.undo()
        return seen + [bits(layer.weight) for layer in (model.user, model.item, model.word)]

    equal(monkeypatch, scenario)


@pytest.mark.parametrize("cache_rows", [45, 1000], ids=["cached", "resident"])
def test_a_checkpoint_goes_from_device_to_device(monkeypatch: Any, tmp_path: Path, cache_rows: int) -> None:
    """Trained on the CPU, gone on with on the GPU, and the other way round: as if never stopped."""
    some = batches(12)

    def part(path: str, lo: int, hi: int) -> Seen:
        ebc = mixed(cache_rows=cache_rows)
        if lo:
            cdlrm.load(tmp_path / path, ebc)
        seen = train(ebc, cdlrm.lookahead(ebc, some[lo:hi], prefetch_depth=2))
        seen += contents(ebc)
        cdlrm.save(tmp_path / path, ebc)
        ebc.close()
        return seen

    monkeypatch.setitem(placement.DRIVERS, "cpu", ON_THE_CPU)
    wanted = part("cpu", 0, 6), part("cpu", 6, 12)
    part("from cpu", 0, 6)
    for seed in SEEDS:
        with monkeypatch.context() as patch:
            use(patch, seed)
            assert part(f"gpu {seed}", 0, 6) == wanted[0]
            shutil.copytree(tmp_path / "from cpu", tmp_path / f"from cpu {seed}")
            assert part(f"from cpu {seed}", 6, 12) == wanted[1]
        assert part(f"gpu {seed}", 6, 12) == wanted[1]
