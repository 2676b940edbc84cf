"""`cdlrm.Embedding` against `torch.nn.Embedding`, and what both drop-ins do as modules of torch."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dropin import OPTIMIZERS, close, torch_optimizer, twins
from torch import Tensor, nn

import cdlrm
from cdlrm import InputError, UsageError

KINDS = ["EmbeddingBag", "Embedding"]
MATRIX = torch.tensor([[1, 2, 4], [5, 4, 4]])


def trained(kind: str, name: str = "sgd", **settings: Any) -> Any:
    """A module after two steps, so that state and step counts are not those of a new one."""
    module = getattr(cdlrm, kind)(8, 3, optimizer=OPTIMIZERS[name], **settings)
    for _ in range(2):
        module(MATRIX).square().sum().backward()
    return module


# --- initial values -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_default_values_come_from_torchs_generator(kind: str) -> None:
    def made(**settings: Any) -> Tensor:
        return getattr(cdlrm, kind)(20, 4, optimizer=cdlrm.SGD(lr=0.1), **settings).weight.clone()

    torch.manual_seed(5)
    first, second = made(), made()
    assert not torch.isin(first, second).any()
    torch.manual_seed(5)
    assert torch.equal(made(), first) and torch.equal(made(), second)
    torch.manual_seed(6)
    assert not torch.equal(made(), first)
    assert torch.equal(made(seed=3), made(seed=3))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_drawn_where_values_are_given(kind: str) -> None:
    module = trained(kind)
    before = torch.get_rng_state()
    getattr(cdlrm, kind)(20, 4, seed=3)
    getattr(cdlrm, kind).from_pretrained(torch.zeros(5, 3))
    assert torch.equal(copy.deepcopy(module).weight, module.weight)
    assert torch.equal(pickle.loads(pickle.dumps(module)).weight, module.weight)
    model = nn.Sequential(nn.Embedding(6, 2, _weight=torch.ones(6, 2)))
    cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))
    assert torch.equal(torch.get_rng_state(), before)


# --- Embedding: inputs --------------------------------------------------------------------------


def shapes() -> dict[str, Tensor]:
    return {
        "0-d": torch.tensor(3),
        "1-d": torch.tensor([1, 4, 4, 0]),
        "2-d": MATRIX,
        "3-d": torch.arange(24).reshape(2, 3, 4) % 7,
        "empty": torch.empty(0, dtype=torch.int64),
        "empty 3-d": torch.empty(2, 0, 3, dtype=torch.int64),
        "int32": MATRIX.int(),
        "transposed": MATRIX.t(),
        "strided": torch.arange(24).reshape(4, 6)[::2, ::3] % 7,
        "expanded": torch.tensor([[2], [4]]).expand(2, 5),
        "padding only": torch.full((2, 2), 4),
        "0-d padding": torch.tensor(4),
    }


@pytest.mark.parametrize("shape", shapes())
@pytest.mark.parametrize("padding_idx", [None, 4, -4])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_forward_and_update_are_torchs(shape: str, padding_idx: int | None, name: str) -> None:
    spec = OPTIMIZERS[name]
    ours, theirs = twins("Embedding", 8, 3, {"optimizer": spec, "cache_rows": 8}, padding_idx=padding_idx)
    update = torch_optimizer(spec, theirs.parameters())
    ids = shapes()[shape]
    for seed in range(2):
        mine, reference = ours(ids), theirs(ids.reshape(-1)).reshape(*ids.shape, 3)  # torch's padding fails for 0-d
        close(mine, reference, rtol=1e-5)
        assert mine.dtype == torch.float32 and mine.requires_grad
        grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(seed))
        mine.backward(grad)
        reference.backward(grad)
        update.step()
        update.zero_grad()
        close(ours.weight, theirs.weight, rtol=1e-5)
    ours.check()


def test_a_padding_row_that_is_not_zero_is_read_and_not_trained() -> None:
    ours, theirs = twins("Embedding", 8, 3, {"cache_rows": 4}, padding_idx=4)
    rows = torch.randn(8, 3)
    ours.set_weight(rows)
    theirs.load_state_dict({"weight": rows})
    for module in (ours, theirs):
        out = module(MATRIX)
        close(out, rows[MATRIX])
        out.sum().backward()
    assert torch.equal(ours.weight[4], rows[4])
    ours.load_state_dict({"weight": rows * 2})
    close(ours(MATRIX), 2 * rows[MATRIX])


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.tensor([[0, 8]]), "id 8 at position 1"),
        (torch.tensor(-1), "id -1"),
        (torch.tensor([1.0]), "float32"),
        (torch.tensor([True]), "bool"),
        ([1, 2], "list"),
        (None, "NoneType"),
    ],
)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_inputs_that_are_refused(ids: Any, words: str, padding_idx: int | None) -> None:
    ours, _ = twins("Embedding", 8, 3, padding_idx=padding_idx)
    with pytest.raises(InputError, match=words) as caught:
        ours(ids)
    assert "\n" not in str(caught.value)


def test_numpy_ids() -> None:
    ours, theirs = twins("Embedding", 8, 3)
    close(ours(MATRIX.numpy()), theirs(MATRIX))


# --- .weight ------------------------------------------------------------------------------------


def writes() -> dict[str, Callable[[Any], Any]]:
    def assign(attribute: str, value: Any) -> Callable[[Any], Any]:
        return lambda weight: setattr(weight, attribute, value)

    ones = torch.ones(8, 3)
    ways: dict[str, Callable[[Any], Any]] = {
        ".data.copy_": lambda w: w.data.copy_(ones),
        ".data.uniform_": lambda w: w.data.uniform_(-1, 1),
        ".data =": assign("data", ones),
        ".grad =": assign("grad", ones),
        ".requires_grad =": assign("requires_grad", False),
        "requires_grad_": lambda w: w.requires_grad_(False),
        "copy_": lambda w: w.copy_(ones),
        "+=": lambda w: w.__iadd__(1),
        "*=": lambda w: w.__imul__(0.5),
        "**=": lambda w: w.__ipow__(2),
        "[0] =": lambda w: w.__setitem__(0, 1.0),
        "[0, 1] =": lambda w: w.__setitem__((0, 1), 1.0),
        "[mask] =": lambda w: w.__setitem__(w > 0, 1.0),
        "row.zero_": lambda w: w[3].zero_(),
        "view.fill_": lambda w: w.view(-1).fill_(1),
        "t().mul_": lambda w: w.t().mul_(2),
        "detach().zero_": lambda w: w.detach().zero_(),
        "chunk": lambda w: w.chunk(2)[1].zero_(),
        "unbind": lambda w: w.unbind(0)[1].zero_(),
        "for row": lambda w: next(iter(w)).zero_(),
        "index_add_": lambda w: w.index_add_(0, torch.tensor([0]), torch.ones(1, 3)),
        "out=": lambda w: torch.add(ones, 1, out=w),
        "out=view": lambda w: torch.add(ones[0], 1, out=w[0]),
        "foreach": lambda w: torch._foreach_add_([torch.ones(1), w], 1),
        "resize_": lambda w: w.resize_(3),
        "set_": lambda w: w.set_(ones),
        "Parameter": nn.Parameter,
    }
    for name in ("normal_", "uniform_", "zeros_", "ones_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
                 "kaiming_normal_", "trunc_normal_", "orthogonal_", "eye_"):  # fmt: skip
        ways[f"init.{name}"] = getattr(nn.init, name)
    ways["init.constant_"] = lambda w: nn.init.constant_(w, 1.0)
    ways["init.sparse_"] = lambda w: nn.init.sparse_(w, 0.5)
    return ways


@pytest.mark.parametrize("way", writes())
@pytest.mark.parametrize("kind", KINDS)
def test_writing_to_weight_is_refused(way: str, kind: str) -> None:
    module = trained(kind)
    before = module.weight.clone()
    with pytest.raises(UsageError, match="set_weight") as caught, torch.no_grad():
        writes()[way](module.weight)
    assert "\n" not in str(caught.value)
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize("kind", KINDS)
def test_assigning_weight_and_reading_its_gradient_are_refused(kind: str) -> None:
    module = trained(kind)
    for value in (torch.ones(8, 3), nn.Parameter(torch.ones(8, 3)), None):
        with pytest.raises(UsageError, match="set_weight"):
            module.weight = value
    with pytest.raises(UsageError, match=r"gradient.*compare \.weight"):
        _ = module.weight.grad
    with pytest.raises(ValueError, match="read-only"):
        module.weight.numpy()[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(module.weight)[0] = 1
    with pytest.raises(UsageError):
        module.reset_parameters()


def test_reading_weight_gives_plain_tensors() -> None:
    weight = trained("Embedding").weight
    plain = weight.as_subclass(Tensor).clone()
    results: dict[str, tuple[Any, Any]] = {
        "add": (weight + 1, plain + 1),
        "radd": (1 + weight, 1 + plain),
        "second argument": (torch.add(plain, weight), plain + plain),
        "matmul": (torch.ones(2, 8) @ weight, torch.ones(2, 8) @ plain),
        "sum": (weight.sum(0), plain.sum(0)),
        "cat": (torch.cat([weight, weight]), torch.cat([plain, plain])),
        "clone": (weight.clone(), plain),
        "double": (weight.double(), plain.double()),
        "rows": (weight[torch.tensor([1, 1])], plain[[1, 1]]),
        "functional": (nn.functional.embedding(MATRIX, weight), plain[MATRIX]),
        "compare": (weight > 0, plain > 0),
        "deepcopy": (copy.deepcopy(weight), plain),
        "pickle": (pickle.loads(pickle.dumps(weight)), plain),
        "into": (torch.zeros(8, 3).copy_(weight), plain),
    }
    for name, (mine, expected) in results.items():
        assert type(mine) is Tensor and torch.equal(mine, expected), name
    assert torch.equal(weight, plain) and torch.allclose(weight, plain) and hash(weight)
    torch.testing.assert_close(weight, plain)
    assert (weight.shape, weight.dtype, weight.device.type, len(weight)) == ((8, 3), torch.float32, "cpu", 8)
    assert f"{weight[0, 0]:.3f}" == f"{plain[0, 0]:.3f}" and weight.tolist() == plain.tolist()
    assert type(weight.max(0).values) is Tensor
    assert np.array_equal(weight.numpy(), plain.numpy())
    assert weight[2:4].shape == (2, 3)
    assert weight.to_sparse().shape == (8, 3)
    results["clone"][0].zero_()  # a result of its own may be written to
    weight.grad = None  # what zero_grad of an optimizer does


def test_set_weight_reaches_cached_rows() -> None:
    module = trained("EmbeddingBag", cache_rows=5)
    values = torch.randn(8, 3)
    module.set_weight(values)
    assert torch.equal(module.weight, values)
    close(module(MATRIX), values[MATRIX].mean(1))
    module.check()
    for bad in (values.double(), values[:7], values.numpy().astype(np.float64)):
        with pytest.raises(InputError, match="float32"):
            module.set_weight(bad)


def test_weight_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = trained("EmbeddingBag")
    monkeypatch.setattr("cdlrm.module.available_bytes", lambda: 10)
    with pytest.raises(UsageError, match="save a checkpoint"):
        _ = module.weight


# --- torch's ways to treat a module -------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_an_anchor_that_optimizers_leave_harmless(kind: str) -> None:
    module = trained(kind)
    (anchor,) = module.parameters()
    assert anchor.shape == () and anchor.dtype == torch.float32
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        update = make(module.parameters(), lr=0.1)
        before = module.weight.clone()
        module(MATRIX).sum().backward()
        after = module.weight.clone()
        update.step()
        update.zero_grad()
        assert not torch.equal(before, after) and torch.equal(module.weight, after)
    assert float(anchor.detach()) == 0.0
    module.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.half(), lambda m: m.double(), lambda m: m.bfloat16(), lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.float64), lambda m: m.type(torch.float64), lambda m: m.cuda(),
        lambda m: m.to("cuda"), lambda m: m.to("meta"), lambda m: m.share_memory(),
    ],
)  # fmt: skip
def test_conversions_that_are_refused(kind: str, convert: Callable[[Any], Any]) -> None:
    module = trained(kind)
    before = module.weight.clone()
    with pytest.raises(UsageError) as caught:
        convert(module)
    assert "\n" not in str(caught.value)
    if "float" in str(caught.value):
        assert "autocast" in str(caught.value)
    assert torch.equal(module.weight, before)
    module(MATRIX).sum().backward()
    if torch.cuda.is_available():
        return
    if "share" in str(caught.value):
        with pytest.raises(UsageError, match="shared between processes"):
            convert(nn.Sequential(module))


@pytest.mark.parametrize("kind", KINDS)
def test_conversions_that_change_nothing(kind: str) -> None:
    module = trained(kind)
    before = module.weight.clone()
    for same in (module.float(), module.to("cpu"), module.cpu(), module.to(torch.float32)):
        assert same is module
    model = nn.Sequential(module)
    assert model.float() is model and model.to("cpu") is model
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize("kind", KINDS)
def test_freezing_by_requires_grad(kind: str) -> None:
    module = trained(kind)
    before = module.weight.clone()
    model = nn.ModuleDict({"table": module, "head": nn.Linear(3, 1)})
    model.requires_grad_(False)
    assert not module(MATRIX).requires_grad
    model["head"].requires_grad_(True)
    model["head"](module(MATRIX)).sum().backward()
    assert torch.equal(module.weight, before)
    module.requires_grad_(True)
    module(MATRIX).sum().backward()
    assert not torch.equal(module.weight, before)


def continue_alike(a: Any, b: Any) -> None:
    """Further training gives both the same bits: rows, optimizer state, step counts and lr went along."""
    for _ in range(3):
        outs = a(MATRIX), b(MATRIX)
        assert torch.equal(*outs)
        for out in outs:
            out.square().sum().backward()
    assert torch.equal(a.weight, b.weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_are_whole_and_independent(kind: str, name: str, way: str) -> None:
    module = trained(kind, name, cache_rows=6, padding_idx=5)
    module.optimizer.param_groups[0]["lr"] = 0.037
    module.eval()
    model = nn.Sequential(module, nn.Linear(3, 1))
    model.register_buffer("shared", torch.ones(1))
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    copied = twin[0]
    assert type(copied) is type(module) and not copied.training and copied.padding_idx == 5
    assert copied.optimizer.param_groups[0]["lr"] == 0.037
    assert torch.equal(copied.weight, module.weight)
    for (key, mine), theirs in zip(copied.table_state(kind).items(), module.table_state(kind).values(), strict=True):
        assert torch.equal(mine, theirs), key
    before = module.weight.clone()
    copied(MATRIX).sum().backward()
    assert torch.equal(module.weight, before), "the copy is independent"
    copied.load_state_dict(module.state_dict())
    fresh = copy.deepcopy(module)
    continue_alike(module, fresh)


def test_a_module_that_occurs_twice_is_copied_once() -> None:
    module = trained("Embedding")
    for twin in (copy.deepcopy(nn.ModuleList([module, module])),
                 pickle.loads(pickle.dumps(nn.ModuleList([module, module])))):  # fmt: skip
        assert twin[0] is twin[1] and twin[0] is not module


def test_frozen_stays_frozen_in_a_copy() -> None:
    module = cdlrm.EmbeddingBag.from_pretrained(torch.randn(8, 3))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert not twin.anchor.requires_grad and torch.equal(twin.weight, module.weight)


def test_a_module_in_a_file_is_not_copied(tmp_path: Path) -> None:
    module = trained("EmbeddingBag", store=f"file:{tmp_path / 'rows'}", cache_rows=6)
    for copier in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="checkpoint"):
            copier(module)
    module.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache_rows", ["auto", 5])
def test_state_dict_goes_both_ways_bit_for_bit(kind: str, cache_rows: Any) -> None:
    ours, theirs = trained(kind, cache_rows=cache_rows), getattr(nn, kind)(8, 3)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight"]
    assert type(ours.state_dict()["weight"]) is Tensor
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.weight, ours.weight)
    other = getattr(nn, kind)(8, 3)
    result = ours.load_state_dict(other.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(ours.weight, other.weight)
    file = io.BytesIO()
    torch.save(nn.Sequential(ours).state_dict(), file)
    file.seek(0)
    nn.Sequential(theirs).load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(theirs.weight, ours.weight)
    ours.check()


@pytest.mark.parametrize("kind", KINDS)
def test_loading_errors_are_torchs(kind: str) -> None:
    ours = nn.ModuleDict({"table": trained(kind)})
    good = ours.state_dict()
    before = good["table.weight"].clone()
    with pytest.raises(RuntimeError, match=r"Missing key.*table\.weight"):
        ours.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*table\.other"):
        ours.load_state_dict({**good, "table.other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*nonsense"):
        ours.load_state_dict({**good, "nonsense": torch.zeros(1)})
    result = ours.load_state_dict({"table.other": torch.zeros(1)}, strict=False)
    assert result.missing_keys == ["table.weight"] and result.unexpected_keys == ["table.other"]
    for bad in (torch.zeros(7, 3), torch.zeros(8, 3).long()):
        with pytest.raises(RuntimeError, match="float32"):
            ours.load_state_dict({"table.weight": bad})
    assert torch.equal(ours["table"].weight, before)


def test_missing_keys_as_torch_reports_them() -> None:
    """A key is reported once, also where a sibling's name is a longer one of ours."""
    ours = nn.ModuleDict({"a": trained("Embedding"), "ab": trained("Embedding")})
    theirs = nn.ModuleDict({"a": nn.Embedding(8, 3), "ab": nn.Embedding(8, 3)})
    state = {**theirs.state_dict(), "a.x": torch.zeros(1), "ab.weight.y": torch.zeros(1)}
    state.pop("ab.weight")
    mine, reference = ours.load_state_dict(state, strict=False), theirs.load_state_dict(state, strict=False)
    assert mine.missing_keys == reference.missing_keys
    assert sorted(mine.unexpected_keys) == sorted(reference.unexpected_keys)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_values_are_torchs_distribution(kind: str) -> None:
    weight = getattr(cdlrm, kind)(4000, 8, seed=3).weight
    assert abs(weight.mean().item()) < 0.03 and abs(weight.std().item() - 1) < 0.02
    assert torch.equal(weight, getattr(cdlrm, kind)(4000, 8, seed=3).weight)
    assert not torch.equal(weight, getattr(cdlrm, kind)(4000, 8, seed=4).weight)


# --- the rest of torch --------------------------------------------------------------------------


class Small(nn.Module):
    """A table, a bag and a dense part."""

    def __init__(self, bag: nn.Module, table: nn.Module) -> None:
        super().__init__()
        self.bag, self.table = bag, table
        torch.manual_seed(0)
        self.dense = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(torch.cat([self.bag(ids), torch.tanh(self.table(ids[:, 0]))], 1))


def small(cache_rows: Any = 12) -> tuple[Small, Small]:
    bags, tables = (twins(kind, 20, 4, {"cache_rows": cache_rows}) for kind in KINDS)
    return Small(bags[0], tables[0]), Small(bags[1], tables[1])


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 20, (4, 3), generator=generator) for _ in range(count)]


def train(model: Small, count: int, forward: Callable[[Tensor], Tensor] | None = None, autocast: bool = False) -> None:
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids in batches(count):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                out = model(ids) if forward is None else forward(ids)
        out.float().square().mean().backward()
        update.step()
        update.zero_grad()


def test_autocast_in_bf16() -> None:
    """The lookup stays float32 as torch's does, its gradient may come in any precision."""
    ours, theirs = small()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours.bag(MATRIX).dtype == ours.table(MATRIX).dtype == torch.float32 == theirs.bag(MATRIX).dtype
        assert ours(batches(1)[0]).dtype == torch.bfloat16
    train(ours, 20, autocast=True)
    train(theirs, 20, autocast=True)
    close(ours.bag.weight, theirs.bag.weight)
    close(ours.table.weight, theirs.table.weight)
    close(ours.dense.weight, theirs.dense.weight)


def test_autocast_equals_a_reference_made_by_hand() -> None:
    ours, _ = twins("EmbeddingBag", 8, 4, mode="sum")
    rows, dense = ours.weight.clone(), torch.randn(4, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (ours(MATRIX) @ dense).float().square().sum().backward()
    bags = rows[MATRIX[:, 0]] + rows[MATRIX[:, 1]] + rows[MATRIX[:, 2]]
    product = bags.bfloat16() @ dense.bfloat16()
    grad = ((2 * product.float()).bfloat16() @ dense.bfloat16().t()).float()
    expected = rows.clone()
    expected.index_add_(0, MATRIX.reshape(-1), -0.1 * grad.repeat_interleave(3, 0))
    close(ours.weight, expected)


def test_gradients_of_other_precisions_reach_the_rows_as_float32() -> None:
    ours, theirs = twins("Embedding", 8, 3)
    for module in (ours, theirs):
        module(MATRIX).bfloat16().double().sum().backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    close(ours.weight, theirs.weight)


@pytest.mark.limit(240)
def test_compiled_models_train_as_others() -> None:
    """With a graph break at each lookup; how the rest is compiled is torch's business, so not here."""
    ours, theirs = small()
    compiled = torch.compile(ours, backend="eager")
    train(ours, 12, forward=compiled)
    train(theirs, 12)
    close(ours.bag.weight, theirs.bag.weight)
    close(ours.table.weight, theirs.table.weight)
    with torch.no_grad():
        close(compiled(batches(1)[0]), theirs(batches(1)[0]))
    ours.bag.check()


def test_import_does_not_bring_the_compiler() -> None:
    code = (
        "import sys, cdlrm; cdlrm.EmbeddingBag, cdlrm.replace_embeddings, cdlrm.lookahead; "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parent.parent)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", ["trace", "script"])
def test_torchscript_is_refused_in_one_sentence(way: str) -> None:
    bags = cdlrm.EmbeddingBagCollection([cdlrm.Table("a", 9, 4)], optimizer=cdlrm.SGD(lr=0.1))
    for model, example in (
        (trained("Embedding"), MATRIX),
        (nn.Sequential(trained("EmbeddingBag"), nn.Linear(3, 1)), MATRIX),
        (bags, {"a": torch.tensor([1])}),
    ):
        with pytest.raises(UsageError, match="cannot be traced or scripted.*torch.compile") as caught:
            torch.jit.trace(model, (example,), strict=False) if way == "trace" else torch.jit.script(model)
        assert "\n" not in str(caught.value)
        model(example)  # it works as before


def test_distributed_data_parallel_with_its_ignore_list(tmp_path: Path) -> None:
    """What the module's documentation says: DDP is told to leave the anchors alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        ours, theirs = small()
        ignored = [name for name, _ in ours.named_parameters() if name.split(".")[-1] == "anchor"]
        assert ignored == ["bag.anchor", "table.anchor"]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ours, ignored)
        wrapped = nn.parallel.DistributedDataParallel(ours)
        train(ours, 10, forward=wrapped)
        train(theirs, 10)
        close(ours.bag.weight, theirs.bag.weight)
        close(ours.table.weight, theirs.table.weight)
        close(ours.dense.weight, theirs.dense.weight)
    finally:
        torch.distributed.destroy_process_group()


def test_repr_tells_the_size_and_the_cache() -> None:
    for kind in KINDS:
        text = repr(trained(kind, cache_rows=6, padding_idx=5))
        assert "8, 3" in text and "padding_idx=5" in text and "cache_rows=6 of 8" in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_load_state_dict_casts_as_torch_does(dtype: torch.dtype) -> None:
    rows = torch.randn(9, 4, dtype=torch.float64).to(dtype)
    sgd = cdlrm.SGD(lr=0.1)
    for ours, theirs in (
        (cdlrm.EmbeddingBag(9, 4, optimizer=sgd), nn.EmbeddingBag(9, 4)),
        (cdlrm.Embedding(9, 4, optimizer=sgd), nn.Embedding(9, 4)),
    ):
        for module in (ours, theirs):
            module.load_state_dict({"weight": rows})
        assert torch.equal(ours.weight, theirs.weight)
    collection = cdlrm.EmbeddingBagCollection([cdlrm.Table("a", 9, 4)], optimizer=sgd)
    collection.load_state_dict({"embedding_bags.a.weight": rows})
    assert torch.equal(collection.state_dict()["embedding_bags.a.weight"], rows.float())
    with pytest.raises(RuntimeError, match="pass float32"):
        collection.load_state_dict({"embedding_bags.a.weight": torch.zeros(9, 4, dtype=torch.int64)})


def test_ids_on_the_meta_device_are_refused_in_one_sentence() -> None:
    ids, sgd = torch.zeros(4, dtype=torch.int64, device="meta"), cdlrm.SGD(lr=0.1)
    bag = cdlrm.EmbeddingBag(9, 4, optimizer=sgd)
    collection = cdlrm.EmbeddingBagCollection([cdlrm.Table("a", 9, 4)], optimizer=sgd)
    calls: list[Callable[[], Any]] = [
        lambda: bag(ids.view(2, 2)),
        lambda: bag(torch.zeros(4, dtype=torch.int64), ids),
        lambda: cdlrm.Embedding(9, 4, optimizer=sgd)(ids),
        lambda: collection({"a": ids}),
    ]
    for call in calls:
        with pytest.raises(InputError, match="device 'meta', which has shapes but no") as info:
            call()
        assert "\n" not in str(info.value)
