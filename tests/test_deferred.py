"""Gradient accumulation, clipping and GradScaler: as torch's, or refused with a sentence."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from dropin import OPTIMIZERS, close, relative, torch_optimizer, twins
from oracle import Oracle
from scenarios import same_bits
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import cdlrm
from cdlrm import UsageError

ROWS, DIM = 40, 4


class Model(nn.Module):
    """A bag, a table and a dense part; `forward` of ids [B, 3] gives [B, 1]."""

    def __init__(self, bag: nn.Module, table: nn.Module) -> None:
        super().__init__()
        self.bag, self.table = bag, table
        torch.manual_seed(0)
        self.dense = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(torch.cat([self.bag(ids), torch.tanh(self.table(ids[:, 0]))], 1))


class Trainer:
    """The optimizers of a model: ours has one for each of its modules, torch's one for both tables."""

    def __init__(self, model: Model, spec: Any, ours: bool) -> None:
        self.model, self.ours = model, ours
        self.dense = torch.optim.SGD(model.dense.parameters(), lr=0.1)
        tables = [model.bag, model.table]
        if ours:
            self.rows: list[Any] = [module.optimizer for module in tables]
        else:
            self.rows = [torch_optimizer(spec, [module.weight]) for module in tables]

    @property
    def all(self) -> list[Any]:
        return [self.dense, *self.rows]

    def step(self) -> None:
        for each in self.all:
            each.step()

    def zero_grad(self) -> None:
        for each in self.all:
            each.zero_grad()


def pair(name: str = "sgd", update: str = "step", sparse: bool = True, **cache: Any) -> tuple[Trainer, Trainer]:
    spec = OPTIMIZERS[name]
    own = {"optimizer": spec, "update": update, "cache_rows": 16, **cache}
    bags, tables = (twins(kind, ROWS, DIM, own, sparse=sparse) for kind in ("EmbeddingBag", "Embedding"))
    return Trainer(Model(bags[0], tables[0]), spec, True), Trainer(Model(bags[1], tables[1]), spec, False)


def batches(count: int, size: int = 4) -> list[Tensor]:
    rng = np.random.default_rng(3)
    return [torch.from_numpy(np.minimum(rng.zipf(1.3, (size, 3)) - 1, ROWS - 1)) for _ in range(count)]


def ids_of(model: Model) -> Any:
    return lambda ids: {model.bag: ids, model.table: ids[:, 0]}


def ahead(trainer: Trainer, loader: Iterable[Tensor], depth: int = 1) -> Iterable[Tensor]:
    if not trainer.ours:
        return loader
    return cdlrm.lookahead(trainer.model, loader, ids=ids_of(trainer.model), horizon=6, prefetch_depth=depth)


def same(ours: Trainer, theirs: Trainer, limit: float = 1e-5) -> None:
    a, b = ours.model, theirs.model
    for mine, reference in ((a.bag, b.bag), (a.table, b.table), (a.dense, b.dense)):
        assert relative(mine.weight, reference.weight) <= limit
    for module in (a.bag, a.table):
        assert module.stats()["unannounced"] == 0
        module.check()


def accumulate(trainer: Trainer, k: int, look: bool, clip: float | None = None, steps: int = 30) -> list[float]:
    norms = []
    loader = batches(k * steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, ids in enumerate(ahead(trainer, loader) if look else loader):
            (trainer.model(ids).square().mean() / k).backward()
            if (i + 1) % k == 0:
                if clip is not None:
                    norms.append(float(clip_grad_norm_(trainer.model.parameters(), clip)))
                trainer.step()
                trainer.zero_grad()
    return norms


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_accumulation_over_micro_batches(name: str, look: bool, k: int) -> None:
    """The cache holds less than the rows of k batches, so rows leave before their update comes."""
    ours, theirs = pair(name)
    for trainer in (ours, theirs):
        accumulate(trainer, k, look)
    same(ours, theirs)
    if k > 1:
        assert ours.model.bag.stats()["evicts"] > 0
    assert ours.model.bag.stats()["grows"] == 0


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize(("clip", "binds"), [(0.05, True), (1e3, False)])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_clip_grad_norm(look: bool, clip: float, binds: bool, k: int, name: str) -> None:
    ours, theirs = pair(name, sparse=False)  # dense gradients, whose norm torch can tell
    mine, reference = (accumulate(trainer, k, look, clip) for trainer in (ours, theirs))
    np.testing.assert_allclose(mine, reference, rtol=1e-5)
    assert (max(reference) > clip) == binds
    same(ours, theirs)


def test_clipping_between_micro_batches_clips_what_has_come() -> None:
    ours, theirs = pair(sparse=False)
    for trainer in (ours, theirs):
        for i, ids in enumerate(batches(24)):
            trainer.model(ids).square().mean().backward()
            clip_grad_norm_(trainer.model.parameters(), 0.1)
            if i % 3 == 2:
                trainer.step()
                trainer.zero_grad()
    same(ours, theirs)


@pytest.mark.parametrize("foreach", [False, True, None])
def test_clipping_with_a_dense_optimizer_that_holds_the_anchors(foreach: bool | None) -> None:
    ours, theirs = pair(sparse=False)
    for trainer in (ours, theirs):
        if trainer.ours:
            trainer.dense = torch.optim.SGD(trainer.model.parameters(), lr=0.1, foreach=foreach)
        for ids in batches(12):
            trainer.model(ids).square().mean().backward()
            clip_grad_norm_(trainer.model.parameters(), 0.1, foreach=foreach)
            trainer.step()
            trainer.zero_grad()
    same(ours, theirs)


@pytest.mark.parametrize("how", ["modules", "model", "set to zero"])
def test_zero_grad_drops_what_waits(how: str) -> None:
    ours, theirs = pair()
    for trainer in (ours, theirs):
        for i, ids in enumerate(batches(20)):
            trainer.model(ids).square().mean().backward()
            if i % 4 == 1:  # thrown away
                if how == "modules":
                    trainer.zero_grad()
                else:
                    trainer.model.zero_grad(set_to_none=how == "model")
            if i % 4 == 3:
                trainer.step()
                trainer.zero_grad()
    same(ours, theirs)


def test_nothing_is_updated_before_step() -> None:
    ours, _ = pair()
    before = ours.model.bag.weight.clone()
    ours.model(batches(1)[0]).sum().backward()
    assert torch.equal(ours.model.bag.weight, before)
    with torch.no_grad():
        ours.model(batches(1)[0])
    ours.step()
    assert not torch.equal(ours.model.bag.weight, before)
    after = ours.model.bag.weight.clone()
    ours.step()  # used up
    assert torch.equal(ours.model.bag.weight, after)


def test_other_ways_to_clip_are_refused() -> None:
    ours, _ = pair()
    ours.model(batches(1)[0]).sum().backward()
    for wrong in (
        lambda p: clip_grad_value_(p, 0.1),
        lambda p: clip_grad_value_(p, 0.1, foreach=True),
        lambda p: clip_grad_norm_(p, 0.1, norm_type=1.0),
        lambda p: clip_grad_norm_(p, 0.1, norm_type=float("inf")),
        lambda p: [each.grad.add_(1.0) for each in p],
        lambda p: [each.grad.sign_() for each in p],
        lambda p: [each.grad.data.clamp_(-0.1, 0.1) for each in p],
        lambda p: [each.grad.detach().view(-1).clamp_(-0.1, 0.1) for each in p],
        lambda p: [each.grad.data.norm(1) for each in p],
    ):
        with pytest.raises(UsageError, match="2-norm") as caught:
            wrong([ours.model.bag.anchor, ours.model.table.anchor])
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("clip", [lambda p: clip_grad_norm_(p, 0.1), lambda p: clip_grad_value_(p, 0.1),
                                  lambda p: clip_grad_value_(p, 0.1, foreach=True),
                                  lambda p: [each.grad.data.clamp_(-0.1, 0.1) for each in p],
                                  lambda p: [each.grad.data.norm() for each in p],
                                  lambda p: [each.grad.mul_(0.5) for each in p],
                                  lambda p: [each.grad.add_(torch.randn_like(each.grad)) for each in p],
                                  lambda p: [each.grad.copy_(each.grad) for each in p],
                                  lambda p: [each.grad.flatten()[:].mul_(0.5) for each in p],
                                  lambda p: [torch.mul(each.grad, 0.5, out=each.grad) for each in p],
                                  lambda p: [each.grad.data.div_(2) for each in p]])  # fmt: skip
def test_clipping_after_updates_in_the_backward_pass_is_refused(clip: Any) -> None:
    ours, _ = pair(update="backward")
    ours.model(batches(1)[0]).sum().backward()
    with pytest.raises(UsageError, match='update="step"'):
        clip(ours.model.parameters())
    clip_grad_norm_(ours.model.dense.parameters(), 0.1)


@pytest.mark.parametrize("held", [True, False])
def test_gradients_replaced_after_updates_in_the_backward_pass_are_refused(held: bool) -> None:
    ours, _ = pair(update="backward")
    parameters = ours.model.parameters() if held else ours.model.dense.parameters()
    every = torch.optim.SGD(parameters, lr=0.1)
    for scale in (None, 0.5):
        ours.model(batches(1)[0]).sum().backward()
        for each in ours.model.parameters():
            each.grad = each.grad if scale is None else each.grad * scale
        with pytest.raises(UsageError, match="was replaced") if scale else contextlib.nullcontext():
            every.step()
        ours.model.zero_grad()
        if scale is None:
            every.step()  # nothing came since


MULTIPLES: list[Callable[[Tensor], Tensor]] = [
    lambda g: g * 0.5, lambda g: 0.5 * g, lambda g: g / 2, lambda g: torch.tensor(0.5) * g, lambda g: g.clone(),
    lambda g: torch.div(g, torch.tensor(2.0)), lambda g: g.clone().mul_(0.25),
]  # fmt: skip
OTHERS: list[Callable[[Tensor], Tensor]] = [
    lambda g: g.clamp(-0.01, 0.01), lambda g: g.sign(), lambda g: g + 0.01, lambda g: g - g.mean(), lambda g: g * g,
    lambda g: 1 / g, lambda g: torch.zeros_like(g), lambda g: torch.clamp(g, -1, 1, out=g), lambda g: g + g,
]  # fmt: skip


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_a_multiple_in_place_of_a_gradient_counts_for_the_rows(multiple: Callable[[Tensor], Tensor]) -> None:
    ours, theirs = pair(update="step")
    for trainer in (ours, theirs):
        for ids in batches(5):
            trainer.model(ids).square().mean().backward()
            for each in trainer.model.parameters():
                each.grad = multiple(each.grad)
            trainer.step()
            trainer.zero_grad()
    same(ours, theirs)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_something_else_in_place_of_a_gradient_is_refused(other: Callable[[Tensor], Tensor], again: bool) -> None:
    ours, _ = pair(update="step")
    before = [module.weight.clone() for module in (ours.model.bag, ours.model.table)]
    ours.model(batches(1)[0]).square().mean().backward()
    with pytest.raises(UsageError, match="wait as one number"):
        for each in ours.model.parameters():
            each.grad = other(each.grad)
        if again:
            ours.model(batches(1)[0]).square().mean().backward()
        else:
            ours.step()
    for module, weight in zip((ours.model.bag, ours.model.table), before, strict=True):
        close(module.weight, weight)


@pytest.mark.parametrize("look", [False, True])
def test_accumulation_has_the_bits_of_one_large_batch(look: bool) -> None:
    """k micro-batches, then a step: the oracle's one update from k calls."""
    for name, spec in OPTIMIZERS.items():
        module = cdlrm.EmbeddingBag(ROWS, DIM, mode="sum", optimizer=spec, update="step", cache_rows=13)
        oracle = Oracle([cdlrm.Table("t", ROWS, DIM)], spec)
        oracle.weights[0] = module.weight.numpy().copy()
        rng = np.random.default_rng(1)
        grads = []
        loader = batches(12)
        for i, ids in enumerate(module.lookahead(loader, horizon=4) if look else loader):
            values, offsets = ids.reshape(-1).numpy(), np.arange(5) * 3
            same_bits(module(ids), oracle.forward({"t": (values, offsets, None)})[:, 0], f"{name} {i}")
            grads.append(rng.standard_normal((4, 1, DIM)).astype(np.float32))
            out = module(ids) if i == 0 and not look else None  # a call without a backward takes no part
            last = module(ids) if not look else None
            del out
            (last if last is not None else module(ids)).backward(torch.from_numpy(grads[-1][:, 0].copy()))
            if i % 3 == 2:
                oracle.backward(*grads)
                module.optimizer.step()
                grads = []
        same_bits(module.weight.clone(), oracle.weight("t"), name)
        module.check()


# --- one module, several calls in a step ------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("look", [False, True])
def test_several_calls_of_one_module_make_one_update(name: str, update: str, look: bool) -> None:
    """As in DIN: candidate and history read one table.  The bits are the oracle's."""
    spec = OPTIMIZERS[name]
    module = cdlrm.Embedding(ROWS, DIM, optimizer=spec, update=update, cache_rows=20)
    oracle = Oracle([cdlrm.Table("t", ROWS, DIM)], spec)
    oracle.weights[0] = module.weight.numpy().copy()
    rng = np.random.default_rng(4)
    loader = [(ids[:, 0], ids) for ids in batches(20)]
    steps = cdlrm.lookahead(module, loader, ids=lambda b: [b[0], b[1]], horizon=5) if look else loader
    for candidate, history in steps:
        expected = [oracle.forward({"t": (ids.reshape(-1).numpy(), None, None)})[:, 0] for ids in (candidate, history)]
        outs = [module(candidate), module(history)]
        grads = [rng.standard_normal(tuple(out.shape)).astype(np.float32) for out in outs]
        for out, reference in zip(outs, expected, strict=True):
            same_bits(out.reshape(-1, DIM), reference, "forward")
        torch.autograd.backward(outs, [torch.from_numpy(g.copy()) for g in grads])
        oracle.backward(*[g.reshape(-1, 1, DIM) for g in grads])
        if update == "step":
            module.optimizer.step()
            module.optimizer.zero_grad()
    same_bits(module.weight.clone(), oracle.weight("t"), "weight")
    for key, value in module.table_state("Embedding").items():
        same_bits(value.reshape(ROWS, -1), oracle.state("t")[key].reshape(ROWS, -1), key)
    assert module.stats()["unannounced"] == 0
    if name == "adam":
        assert int(module.groups[0].table_steps[0]) == 20
    module.check()


def test_several_calls_train_as_torchs() -> None:
    ours, theirs = twins("Embedding", ROWS, DIM, {"optimizer": OPTIMIZERS["adam"], "cache_rows": 20})
    update = torch_optimizer(OPTIMIZERS["adam"], theirs.parameters())
    for ids in batches(50):
        for module in (ours, theirs):
            candidate, history = module(ids[:, :1]), module(ids)
            torch.softmax((candidate * history).sum(-1), 1).square().sum().backward()
        update.step()
        update.zero_grad()
    assert relative(ours.weight, theirs.weight) <= 1e-5


# --- GradScaler -------------------------------------------------------------------------------------


def scaled_training(
    trainer: Trainer, look: bool, poison: set[int], k: int = 1, clip: float | None = None, one: bool = False
) -> tuple[list[float], int]:
    """Scales after each step, and steps that left the rows alone.  `poison`: micro-batches with an inf."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
    model = trainer.model
    if trainer.ours:
        model.bag.grad_scaler = model.table.grad_scaler = scaler
    scales, still = [], 0
    loader = batches(24)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, ids in enumerate(ahead(trainer, loader) if look else loader):
            before = model.bag.weight.detach().clone()
            loss = model(ids).square().mean() / k
            scaler.scale(loss * (float("inf") if i in poison else 1.0)).backward()
            if (i + 1) % k == 0:
                optimizers = [trainer.dense] if one else trainer.all
                if clip is not None:
                    for each in optimizers:
                        scaler.unscale_(each)
                    clip_grad_norm_(model.parameters(), clip)
                for each in optimizers:
                    scaler.step(each)
                scaler.update()
                trainer.zero_grad()
                scales.append(scaler.get_scale())
                still += torch.equal(model.bag.weight, before) if i not in poison or k > 1 else 1
    return scales, still


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_grad_scaler(update: str, look: bool, name: str) -> None:
    poison = {2, 3, 11}
    ours, theirs = pair(name, update=update)
    mine, reference = (scaled_training(trainer, look, poison) for trainer in (ours, theirs))
    assert mine == reference and len(set(mine[0])) > 2
    same(ours, theirs)
    for module in (ours.model.bag, ours.model.table):
        assert module.stats()["skipped_steps"] == len(poison)


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
@pytest.mark.parametrize("poison", [set(), {0}, {1, 2}, {7, 18}])
def test_grad_scaler_with_accumulation_and_clipping(look: bool, name: str, poison: set[int]) -> None:
    """An inf in any of the micro-batches skips the whole step, wherever it came."""
    ours, theirs = pair(name, sparse=False)
    mine, reference = (scaled_training(trainer, look, poison, k=3, clip=0.05) for trainer in (ours, theirs))
    assert mine == reference
    same(ours, theirs)
    expected = len({i // 3 for i in poison})
    assert ours.model.bag.stats()["skipped_steps"] == expected


@pytest.mark.parametrize("clip", [None, 0.05])
def test_grad_scaler_with_one_optimizer_for_all_parameters(clip: float | None) -> None:
    """The dense optimizer holds the anchors too (`model.parameters()`): nothing is unscaled twice."""
    ours, theirs = pair(sparse=False)
    ours.dense = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    for trainer in (ours, theirs):
        scaled_training(trainer, False, {2, 9}, k=3, clip=clip)
    same(ours, theirs)


def test_the_scaler_sees_a_skipped_step_through_the_anchor_alone() -> None:
    """update="backward", one torch optimizer over model.parameters(), and no step of the module's optimizer."""
    ours, theirs = pair(update="backward", sparse=False)
    ours.dense = torch.optim.SGD(ours.model.parameters(), lr=0.1)
    theirs.dense = torch.optim.SGD(theirs.model.parameters(), lr=0.1)
    mine, reference = (scaled_training(trainer, False, {2, 3, 11}, one=True) for trainer in (ours, theirs))
    assert mine == reference
    same(ours, theirs)


def test_a_disabled_scaler_changes_nothing() -> None:
    ours, theirs = pair()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    ours.model.bag.grad_scaler = ours.model.table.grad_scaler = scaler
    for trainer in (ours, theirs):
        for ids in batches(10):
            scaler.scale(trainer.model(ids).square().mean()).backward()
            for each in trainer.all:
                scaler.step(each)
            scaler.update()
            trainer.zero_grad()
    same(ours, theirs)


def test_non_finite_gradients_without_a_scaler() -> None:
    for update in ("backward", "step"):
        module = cdlrm.EmbeddingBag(8, 3, optimizer=cdlrm.SGD(lr=0.1), update=update, seed=0)
        before = module.weight.clone()
        with pytest.raises(cdlrm.NonFiniteGradientError, match="nothing was updated"):
            (module(torch.tensor([[1, 2]])) * float("inf")).sum().backward()
            module.flush()  # a GPU tells later
        skipping = cdlrm.EmbeddingBag(8, 3, optimizer=cdlrm.SGD(lr=0.1), update=update, nonfinite="skip", seed=0)
        (skipping(torch.tensor([[1, 2]])) * float("nan")).sum().backward()
        skipping.optimizer.step()
        assert skipping.stats()["skipped_steps"] == 1
        close(skipping.weight, before)
        close(module.weight, before)
        skipping(torch.tensor([[1, 2]])).sum().backward()
        skipping.optimizer.step()
        assert not torch.equal(skipping.weight, before)


@pytest.mark.parametrize("update, given", [("backward", "none"), ("step", "none"), ("backward", "another")])
def test_a_scaler_that_the_module_does_not_know_is_refused(update: str, given: str) -> None:
    """Its rows would be updated with gradients that are 64 times too large."""
    ours, _ = pair(update=update)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    modules = (ours.model.bag, ours.model.table)
    if given == "another":
        for module in modules:
            module.grad_scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    before = [module.weight.clone() for module in modules]
    with pytest.raises(UsageError, match=r"(?s)nothing was updated.*grad_scaler = scaler"):
        scaler.scale(ours.model(batches(1)[0]).sum()).backward()
    for module, weight in zip(modules, before, strict=True):
        close(module.weight, weight)
        module.grad_scaler = scaler
    for ids in batches(3):
        scaler.scale(ours.model(ids).sum()).backward()
        for each in ours.all:
            scaler.step(each)
        scaler.update()
        ours.zero_grad()


SCALED: dict[str, Callable[[Tensor, Any], Any]] = {
    "scaled": lambda out, scaler: scaler.scale(out.square().mean()),
    "scaled by sample": lambda out, scaler: scaler.scale(out.square().sum(1)).mean(),
    "scaled, in a sum": lambda out, scaler: scaler.scale(out.sum()) / 2 + scaler.scale(out.mean()),
    "one of a list": lambda out, scaler: sum(scaler.scale([out.sum(), out.mean()])),
    "a lazy one": lambda out, scaler: sum(scaler.scale(each for each in (out.sum(), out.mean()))),
}
UNSCALED: dict[str, Callable[[Tensor], Tensor]] = {
    "of rows alone": lambda out: (out * out).sum(1).mean(),
    "times a constant": lambda out: 0.5 * out.mean(),
    "weighted": lambda out: (out * torch.full((2,), 64.0)).sum(),
}


def fails(grad: Tensor) -> None:
    raise RuntimeError("out of memory")


class BesideAnother:
    """A module that is trained without any optimizer, and other models with optimizers and a GradScaler."""

    def __init__(self, update: str) -> None:
        self.bag = cdlrm.EmbeddingBag(9, 2, mode="sum", optimizer=cdlrm.SGD(lr=0.1), update=update)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        self.models = [nn.Linear(2, 1), nn.Linear(2, 1)]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]

    def rows(self) -> Tensor:
        return self.bag(torch.tensor([[1, 2], [3, 1]]))

    def scaled_step(self) -> None:
        self.scaler.scale(self.models[0](torch.ones(1, 2)).sum()).backward()
        self.scaler.step(self.optimizers[0])
        self.scaler.update()

    def unscaled_step(self) -> None:
        self.models[1](torch.ones(1, 2)).sum().backward()
        self.optimizers[1].step()


@pytest.mark.parametrize("before", ["nothing", "scaled steps", "unscaled steps", "own unscaled steps"])
@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_loss_is_noticed_whatever_stepped_before(name: str, update: str, before: str) -> None:
    loop = BesideAnother(update)
    for _ in range(2):
        if before == "own unscaled steps":
            loop.rows().sum().backward()
            loop.bag.optimizer.step()
        if before != "nothing":
            loop.unscaled_step()
        if before == "scaled steps":
            loop.scaled_step()
    weight = loop.bag.weight.clone()
    with pytest.raises(UsageError, match="a GradScaler has scaled this loss"):
        SCALED[name](loop.rows(), loop.scaler).backward()
    close(loop.bag.weight, weight)
    loop.bag.grad_scaler = loop.scaler
    SCALED[name](loop.rows(), loop.scaler).backward()


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("name", UNSCALED)
def test_the_scaler_of_another_model_is_no_concern(name: str, update: str) -> None:
    loop = BesideAnother(update)
    for first in (True, False, True):
        for rows in (first, not first):
            if rows:
                UNSCALED[name](loop.rows()).backward()
                loop.bag.optimizer.step()
            else:
                loop.scaled_step()
    for fail in range(2):  # a pass with a mark that fails does not count for the next
        with pytest.raises(RuntimeError if fail else UsageError):
            failing = loop.models[1](torch.ones(1, 2))
            failing.register_hook(fails)
            loop.scaler.scale(failing.sum() if fail else loop.rows().sum()).backward()
        UNSCALED[name](loop.rows()).backward()


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_failed_pass_does_not_hide_an_unknown_scaler(update: str) -> None:
    loop = BesideAnother(update)
    loop.bag.grad_scaler = loop.scaler
    failing = loop.models[1](torch.ones(1, 2))
    failing.register_hook(fails)
    with pytest.raises(RuntimeError):
        loop.scaler.scale(failing.sum()).backward()
    other = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if update == "backward":
        with pytest.raises(UsageError, match="was given another one"):
            other.scale(loop.rows().sum()).backward()
    else:
        with pytest.raises(UsageError, match="was not scaled by its scale"):
            loop.rows().sum().backward()


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_loss_that_the_modules_scaler_did_not_scale_is_refused(update: str) -> None:
    """The rows' gradients would be divided by a scale that they do not have, as when AMP is switched off."""
    loop = BesideAnother(update)
    loop.bag.grad_scaler = loop.scaler
    loop.scaler.scale(loop.rows().sum()).backward()
    loop.bag.optimizer.step()
    before = loop.bag.weight.clone()
    with pytest.raises(UsageError, match=r"was not scaled by its scale\(\).*grad_scaler = None"):
        loop.rows().sum().backward()
    close(loop.bag.weight, before)
    loop.bag.grad_scaler = None  # what the sentence says
    loop.rows().sum().backward()
    loop.bag.optimizer.step()
    assert not torch.equal(loop.bag.weight, before)


def test_one_scaler_a_network_where_gradients_wait() -> None:
    """The gradients that another network's pass leaves are dropped by zero_grad, and divided by our scaler else."""
    ours, theirs = twins("EmbeddingBag", 9, 2, {"optimizer": cdlrm.SGD(lr=0.1), "update": "step"})
    for module in (ours, theirs):
        own, other = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 64.0))
        if module is ours:
            ours.grad_scaler = own
        update = ours.optimizer if module is ours else torch.optim.SGD(theirs.parameters(), lr=0.1)
        for drop in (True, False, True, False):
            other.scale(module(torch.tensor([[1, 2], [3, 1]])).square().sum()).backward()
            if drop:
                update.zero_grad()
            own.scale(module(torch.tensor([[1, 2], [3, 4]])).square().sum()).backward()
            own.step(update)
            own.update()
            update.zero_grad()
    close(ours.weight, theirs.weight)


def test_norms_before_the_scale_is_out_are_refused() -> None:
    """The rows' gradients are without the scale, torch's have it until `unscale_`: one norm of both is none."""
    ours, _ = pair(update="step")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    ours.model.bag.grad_scaler = ours.model.table.grad_scaler = scaler
    for _ in range(2):
        scaler.scale(ours.model(batches(1)[0]).sum()).backward()
        with pytest.raises(UsageError, match=r"scaler\.unscale_\(optimizer\) before"):
            clip_grad_norm_(ours.model.parameters(), 1.0)
        for each in ours.all:
            scaler.unscale_(each)
        clip_grad_norm_(ours.model.parameters(), 1.0)
        for each in ours.all:
            scaler.step(each)
        scaler.update()
        ours.zero_grad()


def test_a_scaled_pass_around_another_is_noticed() -> None:
    """Reentrant checkpointing runs a backward pass of its own inside."""
    loop = BesideAnother("backward")
    scaled = torch.utils.checkpoint.checkpoint(
        lambda x: loop.rows() * x, torch.ones(2, requires_grad=True), use_reentrant=True
    )
    with pytest.raises(UsageError, match="a GradScaler has scaled this loss"):
        loop.scaler.scale(scaled.sum()).backward()


@pytest.mark.parametrize("own", [True, False])
def test_a_loss_scaled_by_hand_is_noticed_when_the_scaler_steps(own: bool) -> None:
    loop = BesideAnother("backward")
    loop.scaler.scale(torch.ones(()))  # it has a scale from now on
    if own:
        (loop.rows().sum() * loop.scaler.get_scale()).backward()
    else:
        loop.rows().sum().backward()
    (loop.models[0](torch.ones(1, 2)).sum() * loop.scaler.get_scale()).backward()
    with pytest.raises(UsageError, match=r"cannot be told apart.*torch\.amp\.GradScaler\(enabled=False\)"):
        loop.scaler.step(loop.optimizers[0])
    loop.bag.grad_scaler = torch.amp.GradScaler(enabled=False)  # what the sentence says
    for _ in range(2):
        loop.rows().sum().backward()
        (loop.models[0](torch.ones(1, 2)).sum() * loop.scaler.get_scale()).backward()
        loop.scaler.step(loop.optimizers[0])
        loop.scaler.update()


def test_a_module_that_says_it_is_not_scaled_may_share_a_pass() -> None:
    loop = BesideAnother("backward")
    loop.bag.grad_scaler = torch.amp.GradScaler(enabled=False)
    (loop.scaler.scale(loop.models[0](torch.ones(1, 2)).sum()) + loop.rows().sum()).backward()


def test_clipping_the_optimizers_parameters_is_refused() -> None:
    ours, _ = pair()
    ours.model(batches(1)[0]).sum().backward()
    with pytest.raises(UsageError, match="are no rows"):
        clip_grad_norm_(ours.rows[0].param_groups[0]["params"], 1.0)


def looping(k: int, zero: str, look: bool) -> None:
    """A loop that steps its optimizer every k batches."""
    ours, _ = pair(update="backward")
    parameters = ours.model.dense.parameters() if zero == "dense only" else ours.model.parameters()
    update = torch.optim.SGD(parameters, lr=0.1)
    loader = batches(12)
    for i, ids in enumerate(ahead(ours, loader) if look else loader):
        ours.model(ids).square().mean().backward()
        if i % k == k - 1:
            update.step()
            update.zero_grad()


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("zero", ["all", "dense only"])
def test_accumulating_with_updates_in_the_backward_pass_is_refused(look: bool, zero: str) -> None:
    with pytest.raises(UsageError, match="gradients are accumulated"):
        looping(3, zero, look)
    looping(1, zero, look)


@pytest.mark.parametrize("holds", ["tables", "anchors", "tables, stepped less"])
def test_accumulating_rows_alone_is_refused(holds: str) -> None:
    """What steps the rows should do so once an update; the first time that it does not is told in the log."""
    for k in (1, 3):
        bag = cdlrm.EmbeddingBag(20, 4, mode="sum", optimizer=cdlrm.SGD(lr=0.1))
        dense = nn.Linear(4, 1)
        each_batch = torch.optim.SGD(dense.parameters(), lr=0.1)
        steps = torch.optim.SGD(bag.parameters(), lr=0.1) if holds == "anchors" else bag.optimizer
        with contextlib.nullcontext() if k == 1 else pytest.raises(UsageError, match="gradients are accumulated"):
            for i in range(12):
                out = bag(torch.tensor([[i % 20, 3]]))
                (dense(out) if "less" in holds else out).sum().backward()
                if "less" in holds:
                    each_batch.step()
                    each_batch.zero_grad()
                if i % k == k - 1:
                    steps.step()
                    steps.zero_grad()
        assert bag.stepping.told == (k > 1)


@pytest.mark.parametrize("rows_too", [False, True])
def test_rows_that_nobody_steps_are_told(rows_too: bool, caplog: pytest.LogCaptureFixture) -> None:
    bag = cdlrm.EmbeddingBag(20, 4, mode="sum", optimizer=cdlrm.SGD(lr=0.1), update="step")
    torchs = torch.optim.SGD(bag.parameters(), lr=0.1)
    for _ in range(10):
        torchs.zero_grad()
        bag(torch.tensor([[1, 3]])).sum().backward()
        torchs.step()
        if rows_too:
            bag.optimizer.step()
    told = [record for record in caplog.records if "module.optimizer.step()" in record.message]
    assert len(told) == (0 if rows_too else 1)


def test_rows_that_are_dropped_before_their_step_are_told(caplog: pytest.LogCaptureFixture) -> None:
    bag = cdlrm.EmbeddingBag(20, 4, mode="sum", optimizer=cdlrm.SGD(lr=0.1), update="step")
    for _ in range(10):
        bag(torch.tensor([[1, 3]])).sum().backward()
        for each in (torch.optim.SGD(bag.parameters(), lr=0.1), bag.optimizer):
            each.step()
            each.zero_grad()
    assert len([record for record in caplog.records if "before any zero_grad" in record.message]) == 1


@pytest.mark.parametrize("tasks", ["two losses", "in turn"])
def test_two_modules_of_one_group_do_not_accumulate(tasks: str) -> None:
    """Each backward updates one of them, once a step."""
    model = nn.ModuleDict({name: nn.EmbeddingBag(20, 4, mode="sum") for name in "ab"})
    heads = nn.ModuleDict({name: nn.Linear(4, 1) for name in "ab"})
    done = cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.01))
    both = torch.optim.SGD([*model.parameters(), *heads.parameters()], lr=0.01)
    towers = {n: torch.optim.SGD([*model[n].parameters(), *heads[n].parameters()], lr=0.01) for n in "ab"}
    for ids in [batch % 20 for batch in batches(8)]:
        for name in "ab":
            heads[name](model[name](ids)).mean().backward()
            if tasks == "in turn":
                towers[name].step()
                towers[name].zero_grad()
        if tasks == "two losses":
            both.step()
            done.optimizer.step()
            both.zero_grad()
    assert not any(module.stepping.told for module in done.modules.values())


def test_optimizers_that_take_turns_do_not_accumulate() -> None:
    bag = cdlrm.EmbeddingBag(40, 4, mode="sum", optimizer=cdlrm.SGD(lr=0.1))
    turns = [torch.optim.SGD(bag.parameters(), lr=0.1), torch.optim.Adam(bag.parameters())]
    for i, ids in enumerate(batches(20)):
        update = turns[i // 3 % 2]
        bag(ids).sum().backward()
        update.step()
        update.zero_grad()
    assert not bag.stepping.told


def test_a_gradient_dropped_after_the_update_is_refused() -> None:
    """`p.grad = None` freezes a parameter for a step in torch; these rows have moved."""
    bag = cdlrm.EmbeddingBag(40, 4, mode="sum", optimizer=cdlrm.SGD(lr=0.1))
    update = torch.optim.SGD(bag.parameters(), lr=0.1)
    bag(batches(1)[0]).sum().backward()
    bag.anchor.grad = None
    with pytest.raises(UsageError, match="replaced or dropped"):
        update.step()


def test_a_scaled_pass_of_another_thread_is_no_concern() -> None:
    loop, inside, go_on = BesideAnother("backward"), threading.Event(), threading.Event()

    def wait(grad: Tensor) -> None:
        inside.set()
        assert go_on.wait(10)

    def scaled() -> None:
        out = loop.models[0](torch.ones(1, 2))
        out.register_hook(wait)
        loop.scaler.scale(out.sum()).backward()

    thread = threading.Thread(target=scaled)
    thread.start()
    assert inside.wait(10)
    loop.rows().sum().backward()
    go_on.set()
    thread.join()


@pytest.mark.parametrize("poison", [set(), {3, 4}])
def test_a_step_that_a_scaler_skips_is_no_accumulation(poison: set[int]) -> None:
    bag = cdlrm.EmbeddingBag(20, 4, mode="sum", optimizer=cdlrm.SGD(lr=0.1))
    steps = torch.optim.SGD(bag.parameters(), lr=0.1)
    scaler = bag.grad_scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for i in range(12):
        scaler.scale(bag(torch.tensor([[i, 3]])).sum() * (float("inf") if i in poison else 1.0)).backward()
        for each in (steps, bag.optimizer):
            scaler.step(each)
        scaler.update()
        steps.zero_grad()
    assert bag.stats()["skipped_steps"] == len(poison) and not bag.stepping.told


class Upstream(nn.Module):
    """Whose dense parameters are all computed before the lookup, so that their gradients come after the rows'."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 3 if weights else 4)
        self.item = cdlrm.EmbeddingBag(40, 4, mode="sum", optimizer=cdlrm.SGD(lr=0.1))
        self.weights = weights

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dense(ids.float())
        return self.item(ids, per_sample_weights=x) if self.weights else x * self.item(ids)


@pytest.mark.parametrize("weights", [False, True])
def test_accumulating_is_refused_where_dense_gradients_come_late(weights: bool) -> None:
    for k in (3, 1):
        model = Upstream(weights)
        update = torch.optim.SGD(model.dense.parameters(), lr=0.01)
        with contextlib.nullcontext() if k == 1 else pytest.raises(UsageError, match="gradients are accumulated"):
            for i, ids in enumerate(batches(12)):
                model(ids).mean().backward()
                if i % k == k - 1:
                    update.step()
                    update.zero_grad()


def test_networks_that_are_stepped_in_turn_do_not_accumulate() -> None:
    """Two steps of a generator with our rows for one of a discriminator, whose gradients G's passes leave."""
    make, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    bag = cdlrm.EmbeddingBag(40, 4, mode="sum", optimizer=cdlrm.SGD(lr=0.1))
    one, other = torch.optim.SGD(make.parameters(), lr=0.001), torch.optim.SGD(judge.parameters(), lr=0.001)
    for ids in batches(5):
        other.zero_grad()
        judge(make(bag(ids)).detach()).sum().backward()
        other.step()
        for _ in range(2):
            one.zero_grad()
            judge(make(bag(ids))).sum().backward()
            one.step()
    # And a second phase, which steps a part only.
    both, part = (torch.optim.SGD(p, lr=0.001) for p in ([*make.parameters(), *judge.parameters()], judge.parameters()))
    for i, ids in enumerate(batches(10)):
        update = both if i < 5 else part
        update.zero_grad()
        judge(make(bag(ids))).sum().backward()
        update.step()
    assert not bag.stepping.told


def test_accumulating_is_refused_whatever_other_models_step_between() -> None:
    ours, _ = pair(update="backward")
    update = torch.optim.SGD(ours.model.dense.parameters(), lr=0.1)
    other = nn.Linear(2, 1)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="gradients are accumulated"):
        for i, ids in enumerate(batches(12)):
            ours.model(ids).square().mean().backward()
            other(torch.ones(1, 2)).sum().backward()
            others.step()
            others.zero_grad()
            if i % 3 == 2:
                update.step()
                update.zero_grad()
