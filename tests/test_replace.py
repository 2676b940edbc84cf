"""`replace_embeddings` on models that are no DLRM, with the two worked examples of the documentation."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from dropin import close, relative
from examples import sequence_model, two_towers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import cdlrm
from cdlrm import ConfigError, UsageError


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 4, padding_idx=0)
        self.small = nn.Embedding(3, 4)


class Nested(nn.Module):
    """Tables at several depths, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 4, mode="sum", include_last_offset=True)
        self.inner = nn.Sequential(Inner(), nn.Linear(4, 4))
        self.again = self.inner[0].table
        self.listed = nn.ModuleList([nn.EmbeddingBag(25, 8, padding_idx=-1)])

    def forward(self, ids: Tensor) -> Tensor:
        flat, offsets = ids.reshape(-1), torch.arange(len(ids) + 1) * ids.shape[1]
        out = self.bag(flat, offsets) + self.again(ids).sum(1) + self.inner[0].table(ids[:, 0])
        return self.inner[1](out + self.inner[0].small(ids[:, 0] % 3)).sum(1) + self.listed[0](ids).sum(1)


def ids(seed: int = 0, size: int = 5) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 20, (size, 3)))


def test_values_stay_and_modules_are_ours() -> None:
    torch.manual_seed(0)
    model = Nested()
    reference = copy.deepcopy(model)
    done = cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))
    assert sorted(done.modules) == ["bag", "inner.0.small", "inner.0.table", "listed.0"]
    for path, module in reference.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            ours = model.get_submodule(path)
            assert isinstance(ours, (cdlrm.Embedding, cdlrm.EmbeddingBag))
            assert torch.equal(ours.weight, module.weight), path
            assert ours.padding_idx == module.padding_idx
    assert model.again is model.inner[0].table, "a module that occurs twice stays one module"
    assert model.bag.include_last_offset and model.bag.mode == "sum" and model.listed[0].mode == "mean"
    close(model(ids()), reference(ids()))
    assert list(model.state_dict()) == list(reference.state_dict())
    reference.load_state_dict(model.state_dict())
    model.load_state_dict(reference.state_dict())
    done.close()


def test_training_is_torchs_and_undo_brings_the_rows_back() -> None:
    torch.manual_seed(0)
    model = Nested()
    reference = copy.deepcopy(model)
    tables = {path: module for path, module in model.named_modules() if hasattr(module, "num_embeddings")}
    done = cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.01), cache_rows=50)
    updates = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, reference)]
    for seed in range(30):
        for each, update in zip((model, reference), updates, strict=True):
            update.zero_grad()
            each(ids(seed)).square().mean().backward()
            update.step()
    model.eval()
    trained = {path: model.get_submodule(path).weight.clone() for path in done.modules}
    done.undo()
    for path, module in tables.items():
        assert model.get_submodule(path) is module, "the very modules of before"
        assert torch.equal(module.weight, trained[path])
        close(module.weight, reference.get_submodule(path).weight, rtol=1e-5)
    assert model.again is model.inner[0].table
    close(model(ids()), reference(ids()), rtol=1e-5)
    torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids()).sum().backward()
    assert model.bag.weight.grad is not None
    with pytest.raises(UsageError, match="closed"):
        done.modules["bag"](torch.tensor([1]), torch.tensor([0, 1]))


class Many(nn.Module):
    def __init__(self, count: int, dims: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(10 + i, dims[i % len(dims)], mode="sum") for i in range(count))


def groups_of(model: nn.Module) -> list[Any]:
    found: list[Any] = []
    for module in model.modules():
        found += [g for g in getattr(module, "groups", []) if g not in found]
    return found


def test_bags_of_one_dim_are_one_group() -> None:
    model = Many(26)
    done = cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))
    assert len(groups_of(model)) == 1 and len(done.optimizer.param_groups) == 1
    assert groups_of(model)[0].num_rows == sum(10 + i for i in range(26))
    mixed = Many(26, dims=(4, 8))
    cdlrm.replace_embeddings(mixed, optimizer=cdlrm.SGD(lr=0.1))
    assert len(groups_of(mixed)) == 2


def test_modes_and_kinds_share_a_group_and_keep_their_pooling() -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict(
        {"sum": nn.EmbeddingBag(10, 4, mode="sum"), "mean": nn.EmbeddingBag(10, 4), "one": nn.Embedding(9, 4)}
    )
    reference = copy.deepcopy(model)
    cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))
    assert len(groups_of(model)) == 1
    matrix = torch.tensor([[1, 2, 2], [3, 4, 5]])
    for name in model:
        close(model[name](matrix), reference[name](matrix))


def test_min_rows_and_skip() -> None:
    model = Nested()
    done = cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1), min_rows=25)
    assert sorted(done.modules) == ["inner.0.table", "listed.0"] and type(model.bag) is nn.EmbeddingBag
    done.undo()
    done = cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1), skip=["bag", "inner.0.table"])
    assert sorted(done.modules) == ["inner.0.small", "listed.0"] and type(model.again) is nn.Embedding
    done.undo()
    assert not groups_of(model)
    for path in ("again", "inner.0.table"):  # either of its names
        done = cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1), skip=[path])
        assert type(model.again) is nn.Embedding is type(model.inner[0].table), path
        done.undo()


def test_an_optimizer_for_each_path() -> None:
    model = Many(3)
    specs = {"bags.0": cdlrm.SGD(lr=0.1), "bags.1": cdlrm.Adam(lr=0.01), "bags.2": cdlrm.SGD(lr=0.1)}
    done = cdlrm.replace_embeddings(model, optimizer=specs)
    assert [g["tables"] for g in done.optimizer.param_groups] == [["bags.0", "bags.2"], ["bags.1"]]
    assert [g["lr"] for g in done.optimizer.param_groups] == [0.1, 0.01]
    assert set(model.bags[1].table_state("bags.1")) == {"exp_avg", "exp_avg_sq"}
    done.undo()
    with pytest.raises(ConfigError, match=r"bags\.2"):
        cdlrm.replace_embeddings(model, optimizer={k: specs[k] for k in ("bags.0", "bags.1")})
    with pytest.raises(ConfigError, match=r"nonsense"):
        cdlrm.replace_embeddings(model, optimizer={**specs, "nonsense": cdlrm.SGD(lr=0.1)})
    assert all(type(bag) is nn.EmbeddingBag for bag in model.bags)


def test_frozen_tables_stay_frozen_and_the_mode_stays() -> None:
    model = Nested()
    model.bag.weight.requires_grad_(False)
    model.listed.eval()
    done = cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))
    assert not model.listed[0].training and model.bag.training
    before = model.bag.weight.clone()
    model(ids()).sum().backward()
    assert torch.equal(model.bag.weight, before)
    done.undo()
    assert not model.bag.weight.requires_grad


class Special(nn.Embedding):
    pass


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.table.weight


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Sequential(nn.Embedding(10, 4, max_norm=1.0)), "max_norm"),
        (lambda: nn.Sequential(nn.Embedding(10, 4, scale_grad_by_freq=True)), "scale_grad_by_freq"),
        (lambda: nn.Sequential(nn.EmbeddingBag(10, 4, mode="max")), "max"),
        (lambda: nn.Sequential(nn.Embedding(10, 4, dtype=torch.float64)), "float64"),
        (lambda: nn.Sequential(nn.Embedding(10, 4, device="meta")), "meta"),
        (lambda: nn.Sequential(Special(10, 4)), "Special"),
        (lambda: nn.Sequential(prune.l1_unstructured(nn.Embedding(10, 4), "weight", 0.5)), "no parameter but computed"),
        (lambda: nn.Sequential(parametrizations.weight_norm(nn.EmbeddingBag(10, 4))), "no parameter but computed"),
        (Tied, "Linear"),
        (lambda: nn.Sequential(nn.Linear(3, 3)), "no nn.EmbeddingBag"),
        (lambda: nn.Embedding(10, 4), "itself an embedding"),
    ],
)
def test_what_cannot_be_replaced_is_refused_before_anything_changes(make: Any, words: str) -> None:
    inner = make()
    model = inner if isinstance(inner, nn.Embedding) else nn.ModuleList([nn.EmbeddingBag(12, 4), inner])
    if words == "no nn.EmbeddingBag":
        model = inner
    before = {name: p.clone() for name, p in model.named_parameters() if p.device.type == "cpu"}
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=words) as caught:
        cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))
    assert "\n" not in str(caught.value)
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(dict(model.named_parameters())[name], value) for name, value in before.items())
    if "cannot be replaced" in str(caught.value):  # the remedy of the sentence works
        path = str(caught.value).split("'")[1]
        assert list(cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1), skip=[path]).modules) == ["0"]


def test_an_optimizer_of_torch_is_refused_in_one_sentence() -> None:
    theirs: Any = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for make in (
        lambda: cdlrm.replace_embeddings(Nested(), optimizer=theirs),
        lambda: cdlrm.EmbeddingBag(10, 4, optimizer=theirs),
        lambda: cdlrm.EmbeddingBagCollection([cdlrm.Table("t", 10, 4)], optimizer=theirs),
    ):
        with pytest.raises(cdlrm.ConfigError, match="is torch's SGD: give a specification of cdlrm") as caught:
            make()
        assert "\n" not in str(caught.value)


def test_settings_that_are_refused_change_nothing() -> None:
    for settings, words in (({"skip": ["nowhere"]}, "nowhere"), ({"optimizer": torch.optim.SGD}, "cdlrm.SGD"),
                            ({"cache_rows": 0}, "cache_rows"), ({"min_rows": 1000}, "1000 rows"),
                            ({"update": "later"}, "update"), ({"nonfinite": "x"}, "nonfinite")):  # fmt: skip
        model = Nested()
        with pytest.raises(ConfigError, match=words):
            cdlrm.replace_embeddings(model, **{"optimizer": cdlrm.SGD(lr=0.1), **settings})
        assert type(model.bag) is nn.EmbeddingBag and model.bag.weight.shape == (20, 4)


def test_a_model_is_replaced_once() -> None:
    model = Nested()
    cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))
    with pytest.raises(ConfigError, match="no nn.EmbeddingBag"):
        cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))


def test_one_module_under_several_names_of_one_parent() -> None:
    bag = nn.EmbeddingBag(20, 4, mode="sum")
    model = nn.Module()
    model.one, model.two, model.listed = bag, bag, nn.ModuleList([bag, bag])
    before = bag.weight.detach().clone()
    done = cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))
    ours = done.modules["one"]
    assert model.one is ours and model.two is ours and model.listed[0] is ours and model.listed[1] is ours
    assert torch.equal(model.two.weight, before)
    done.undo()
    assert model.one is bag and model.two is bag and model.listed[0] is bag and model.listed[1] is bag
    assert torch.equal(bag.weight, before)


def test_undo_happens_once() -> None:
    model = nn.Sequential(nn.Embedding(5, 4))
    done = cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))
    done.undo()
    with torch.no_grad():
        model[0].weight.fill_(7)
    done.undo()
    assert bool((model[0].weight == 7).all())


def test_a_replaced_model_is_copied() -> None:
    torch.manual_seed(0)
    model = Nested()
    cdlrm.replace_embeddings(model, optimizer=cdlrm.Adagrad(lr=0.1), cache_rows=60)
    for seed in range(3):
        model(ids(seed)).sum().backward()
    twin = copy.deepcopy(model)
    assert twin.again is twin.inner[0].table
    for path in ("bag", "inner.0.table", "inner.0.small", "listed.0"):
        a, b = model.get_submodule(path), twin.get_submodule(path)
        assert torch.equal(a.weight, b.weight)
    for each in (model, twin):
        for seed in range(3):
            each(ids(seed + 10)).sum().backward()
    for path in ("bag", "inner.0.table", "listed.0"):
        assert torch.equal(model.get_submodule(path).weight, twin.get_submodule(path).weight), path


# --- with a look-ahead, against torch ---------------------------------------------------------------


@pytest.mark.parametrize("example", [two_towers, sequence_model])
@pytest.mark.parametrize("depth", [0, 2])
def test_two_hundred_steps_with_a_look_ahead(example: Any, depth: int) -> None:
    """The worked examples: nothing unannounced, results as torch's."""
    torch.manual_seed(0)
    ours = example.Model()
    theirs = copy.deepcopy(ours)
    losses = example.train_with_cdlrm(ours, example.batches(200), cache_ratio=0.5, prefetch_depth=depth)
    expected = example.train_with_torch(theirs, example.batches(200))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for module in ours.modules():
        if hasattr(module, "stats"):
            stats = module.stats()
            assert stats["unannounced"] == 0 and stats["evicts"] > 0 and stats["grows"] == 0
    theirs_state = theirs.state_dict()
    for key, value in ours.state_dict().items():
        assert relative(value, theirs_state[key]) <= 1e-6, key
    assert losses[-1] < losses[0]


def test_lookahead_of_a_model_needs_arguments_for_each_module() -> None:
    model = Many(3)
    cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))
    with pytest.raises(cdlrm.CdlrmError, match="mapping module"):
        for _ in cdlrm.lookahead(model, [ids()], ids=lambda b: b):
            pass


PAIR = (torch.tensor([1, 2]), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize(
    ("batch", "chosen", "words"),
    [
        (PAIR, None, r"a batch is a tuple of 2 where Embedding is called with \(input\)"),
        (list(PAIR), None, "float32.* if only a part of the batch, a list of 2, is for Embedding, pass ids="),
        ({"x": PAIR[0], "y": PAIR[1]}, None, "a batch is a mapping with the keys 'x', 'y' where"),
        (PAIR, lambda batch: {"user": batch[0]}, "ids= returned a mapping with the keys 'user' where"),
        (PAIR, lambda batch: batch, "ids= returned a tuple of 2 where"),
    ],
)
def test_a_wrong_announcement_is_one_sentence_with_an_example(batch: Any, chosen: Any, words: str) -> None:
    table = cdlrm.Embedding(10, 4, optimizer=cdlrm.SGD(lr=0.1))
    with pytest.raises(cdlrm.InputError, match=words) as caught:
        for _ in cdlrm.lookahead(table, [batch], ids=chosen):
            pass
    text = str(caught.value)
    assert text.endswith("such as ids=lambda batch: batch[0].") and "TypeError" not in text and "\n" not in text
    for x, _ in cdlrm.lookahead(table, [PAIR], ids=lambda batch: batch[0]):
        table(x).sum().backward()


def test_a_collection_names_ids_too() -> None:
    collection = cdlrm.EmbeddingBagCollection([cdlrm.Table("a", 10, 4)], optimizer=cdlrm.SGD(lr=0.1))
    with pytest.raises(cdlrm.InputError, match=r"is a tuple; .* a tuple of 2, .*ids=lambda batch: batch\[0\]"):
        next(iter(cdlrm.lookahead(collection, [PAIR])))
    with pytest.raises(cdlrm.InputError, match="id 99 at position 0"):  # nothing is wrong with what was announced
        next(iter(cdlrm.lookahead(collection, [{"a": torch.tensor([99])}])))


def accumulate(model: nn.Module, optimizers: list[Any], scaler: Any, poison: int) -> list[float]:
    scales = []
    for k in range(24):
        out = model(ids(k))
        loss = out.square().mean() / 3
        if k == poison:  # in one of the tables alone
            loss = loss + float("inf") * model.bag(torch.tensor([1, 2]), torch.tensor([0, 2])).sum()
        scaler.scale(loss).backward()
        if k % 3 == 2:
            for each in optimizers:
                scaler.unscale_(each)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for each in optimizers:
                scaler.step(each)
            scaler.update()
            for each in optimizers:
                each.zero_grad()
            scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("poison", [-1, 7])
def test_accumulation_clipping_and_a_scaler_in_a_shared_group(poison: int) -> None:
    """All modules in one optimizer, as torch's one optimizer for all tables: an inf in one skips all."""
    torch.manual_seed(0)
    model = Nested()
    reference = copy.deepcopy(model)
    done = cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.01), update="step", cache_rows=50)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) for _ in range(2)]
    for module in done.modules.values():
        module.grad_scaler = scalers[0]
    dense = torch.optim.SGD([p for n, p in model.named_parameters() if "anchor" not in n], lr=0.01)
    tables = [p for n, p in reference.named_parameters() if not n.startswith("inner.1")]
    references = [torch.optim.SGD(reference.inner[1].parameters(), lr=0.01), torch.optim.SGD(tables, lr=0.01)]
    mine = accumulate(model, [dense, done.optimizer], scalers[0], poison)
    assert mine == accumulate(reference, references, scalers[1], poison)
    for path, module in done.modules.items():
        assert relative(module.weight, reference.get_submodule(path).weight) <= 1e-6, path
    done.close()


@pytest.mark.parametrize("tie", ["data", "rows", "buffer"])
def test_tables_tied_by_their_memory_are_refused(tie: str) -> None:
    """As those that share a parameter: `.data` of one in another, a view, a buffer."""
    model = nn.ModuleDict({"a": nn.EmbeddingBag(20, 4), "b": nn.EmbeddingBag(20, 4), "c": nn.Linear(4, 20)})
    if tie == "data":
        model["b"].weight.data = model["a"].weight.data
    elif tie == "rows":
        model["b"] = nn.EmbeddingBag.from_pretrained(model["a"].weight.data[5:15], freeze=False)
    else:
        model["c"].register_buffer("softmax", model["a"].weight.data)
    with pytest.raises(ConfigError, match="'a' cannot be replaced: its weight is shared"):
        cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))


def test_tables_side_by_side_in_one_memory_are_replaced() -> None:
    rows = torch.randn(30, 4)
    parts = {"a": rows[:20], "b": rows[20:]}
    model = nn.ModuleDict({k: nn.EmbeddingBag.from_pretrained(v, freeze=False) for k, v in parts.items()})
    done = cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))
    for name, part in parts.items():
        close(done.modules[name].table_copy(name), part)
    done.undo()
    for name, part in parts.items():
        close(model[name].weight, part)
