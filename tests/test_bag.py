"""`cdlrm.EmbeddingBag` against `torch.nn.EmbeddingBag`: arguments, inputs, gradients, refusals."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from dropin import OPTIMIZERS, close, random_bags, torch_optimizer, twins
from torch import Tensor, nn

import cdlrm
from cdlrm import ConfigError, InputError, UsageError
from cdlrm.plan import Planner

VALUES = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9, 1])
OFFSETS = torch.tensor([0, 4, 4, 7, 9])  # the second and the last bag are empty
WEIGHTS = torch.tensor([0.5, -1.0, 2.0, 0.25, 3.0, 1.5, -0.5, 0.1, 1.0])


def torch_names(cls: type) -> list[str]:
    return list(inspect.signature(cls.__init__).parameters)[1:]


@pytest.mark.parametrize("kind", ["EmbeddingBag", "Embedding"])
def test_torchs_arguments_come_first_and_in_torchs_order(kind: str) -> None:
    mine = inspect.signature(getattr(cdlrm, kind).__init__).parameters
    names = torch_names(getattr(nn, kind))
    assert list(mine)[1 : 1 + len(names)] == names
    theirs = inspect.signature(getattr(nn, kind).__init__).parameters
    for name in names:
        assert mine[name].default == theirs[name].default, name
    assert all(p.kind is p.KEYWORD_ONLY for p in list(mine.values())[1 + len(names) :])
    forward = list(inspect.signature(getattr(cdlrm, kind).forward).parameters)
    assert forward == list(inspect.signature(getattr(nn, kind).forward).parameters)


def test_positional_arguments() -> None:
    weight = torch.randn(10, 3)
    arguments = (10, 3, None, 2.0, False, "sum", True, weight, True, 2, None, torch.float32)
    ours, theirs = cdlrm.EmbeddingBag(*arguments, optimizer=cdlrm.SGD(lr=0.1)), nn.EmbeddingBag(*arguments)
    offsets = torch.tensor([0, 4, 9])
    close(ours(VALUES, offsets, WEIGHTS), theirs(VALUES, offsets, WEIGHTS))
    assert (ours.mode, ours.include_last_offset, ours.padding_idx) == ("sum", True, 2)
    assert (ours.num_embeddings, ours.embedding_dim) == (10, 3)


def test_attributes_of_torchs_module_can_be_read() -> None:
    for kind in ("EmbeddingBag", "Embedding"):
        for sparse in (False, True):
            ours, theirs = twins(kind, 10, 3, padding_idx=-1, sparse=sparse)
            for name in getattr(nn, kind).__constants__:
                assert getattr(ours, name) == getattr(theirs, name), name


# --- inputs -------------------------------------------------------------------------------------


def forms() -> dict[str, tuple[dict[str, Any], tuple[Tensor, ...]]]:
    """Name -> constructor settings and the arguments of forward."""
    matrix = torch.tensor([[1, 2, 4], [5, 4, 3]])
    return {
        "flat": ({}, (VALUES, OFFSETS)),
        "last offset": ({"include_last_offset": True}, (VALUES, OFFSETS)),
        "matrix": ({}, (matrix,)),
        "one id a bag": ({}, (VALUES.reshape(9, 1),)),
        "no bag": ({}, (torch.empty(0, 3, dtype=torch.int64),)),
        "no offset": ({}, (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))),
        "only empty bags": ({}, (torch.empty(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))),
        "int32": ({}, (VALUES.int(), OFFSETS.int())),
        "int32 matrix": ({}, (matrix.int(),)),
        "strided": ({}, (torch.stack([VALUES, VALUES], 1)[:, 0], OFFSETS.repeat_interleave(2)[::2])),
        "transposed": ({}, (matrix.t(),)),
        "expanded": ({}, (torch.tensor([[3]]).expand(4, 5),)),
        "expanded flat": ({}, (torch.tensor([3]).expand(9), OFFSETS)),
        "first bag empty": ({}, (VALUES, torch.tensor([0, 0, 9]))),
        "padding": ({"padding_idx": 4}, (VALUES, OFFSETS)),
        "padding from the end": ({"padding_idx": -1}, (VALUES, OFFSETS)),
        "padding last offset": ({"padding_idx": 1, "include_last_offset": True}, (VALUES, OFFSETS)),
        "padding matrix": ({"padding_idx": 4}, (matrix,)),
        "padding one id": ({"padding_idx": 4}, (VALUES.reshape(9, 1),)),
        "padding only": ({"padding_idx": 4}, (torch.full((3, 2), 4),)),
        "padding int32": ({"padding_idx": 4}, (VALUES.int(), OFFSETS.int())),
    }


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("cache_rows", ["auto", 9])
def test_forward_and_update_are_torchs(form: str, mode: str, cache_rows: Any) -> None:
    settings, arguments = forms()[form]
    ours, theirs = twins("EmbeddingBag", 12, 3, {"cache_rows": cache_rows}, mode=mode, **settings)
    update = torch.optim.SGD(theirs.parameters(), lr=0.1)
    kept = [argument.clone() for argument in arguments]
    for grad_enabled in (False, True):
        with torch.set_grad_enabled(grad_enabled):
            mine, reference = ours(*arguments), theirs(*arguments)
        close(mine, reference)
        assert mine.dtype == torch.float32 and mine.requires_grad == grad_enabled
    grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(0))
    mine.backward(grad)
    reference.backward(grad)
    update.step()
    close(ours.weight, theirs.weight)
    for argument, before in zip(arguments, kept, strict=True):
        assert torch.equal(argument, before)
    ours.check()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("padding_idx", [3, -1, 0])
def test_the_padding_row_is_never_touched(name: str, padding_idx: int) -> None:
    ours = cdlrm.EmbeddingBag(8, 4, mode="mean", padding_idx=padding_idx, optimizer=OPTIMIZERS[name], cache_rows=8)
    padded = padding_idx % 8
    assert not ours.weight[padded].any()
    row = torch.randn(4)
    weight = ours.weight.clone()
    weight[padded] = row
    ours.set_weight(weight)
    for _ in range(3):
        ours(torch.tensor([[padded, 1], [2, padded], [padded, padded]])).sum().backward()
    assert torch.equal(ours.weight[padded], row)
    assert not torch.equal(ours.weight[1], weight[1])
    state = ours.table_state("EmbeddingBag")
    assert all(not value[padded].any() for value in state.values())
    assert all(value[1].any() for value in state.values())


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_matrix_without_columns_is_empty_bags(mode: str) -> None:
    """torch refuses it; zeros are what its empty bags give."""
    ours, _ = twins("EmbeddingBag", 12, 3, mode=mode)
    out = ours(torch.empty(3, 0, dtype=torch.int64))
    assert torch.equal(out, torch.zeros(3, 3))
    before = ours.weight.clone()
    out.sum().backward()
    assert torch.equal(ours.weight, before)


def test_numpy_inputs_and_one_dimensional_ids_of_the_dataset() -> None:
    ours, theirs = twins("EmbeddingBag", 12, 3)
    close(ours(VALUES.numpy(), OFFSETS.numpy()), theirs(VALUES, OFFSETS))


# --- weights of lookups -------------------------------------------------------------------------


@pytest.mark.parametrize("padding_idx", [None, 4])
@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_per_sample_weights_and_their_gradient(padding_idx: int | None, matrix: bool, name: str) -> None:
    spec = OPTIMIZERS[name]
    ours, theirs = twins("EmbeddingBag", 12, 3, {"optimizer": spec}, mode="sum", padding_idx=padding_idx)
    update = torch_optimizer(spec, theirs.parameters())
    values, offsets = (VALUES.reshape(3, 3), None) if matrix else (VALUES, OFFSETS)
    for seed in range(3):
        weights = [WEIGHTS.reshape(values.shape).clone().requires_grad_() for _ in range(2)]
        outs = ours(values, offsets, weights[0]), theirs(values, offsets, weights[1])
        close(*outs)
        grad = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(seed))
        for out in outs:
            out.backward(grad)
        update.step()
        update.zero_grad()
        close(weights[0].grad, weights[1].grad)
        close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-5)


def test_expanded_and_strided_weights() -> None:
    ours, theirs = twins("EmbeddingBag", 12, 3, mode="sum")
    for make in (lambda w: w[0].expand(9), lambda w: torch.stack([w, w], 1)[:, 1]):
        leaves = [WEIGHTS.clone().requires_grad_() for _ in range(2)]
        outs = ours(VALUES, OFFSETS, make(leaves[0])), theirs(VALUES, OFFSETS, make(leaves[1]))
        close(*outs)
        for out in outs:
            out.square().sum().backward()
        close(leaves[0].grad, leaves[1].grad)
        ours.set_weight(theirs.weight.detach())


def test_weights_learn_while_rows_are_frozen() -> None:
    ours, theirs = twins("EmbeddingBag", 12, 3, {"optimizer": None}, mode="sum")
    ours.requires_grad_(False)
    theirs.requires_grad_(False)
    before = ours.weight.clone()
    for _ in range(2):
        weights = [WEIGHTS.clone().requires_grad_() for _ in range(2)]
        for module, leaf in zip((ours, theirs), weights, strict=True):
            module(VALUES, OFFSETS, leaf).square().sum().backward()
        close(weights[0].grad, weights[1].grad)
    assert torch.equal(ours.weight, before)
    ours.check()


def test_weights_that_are_no_leaves_pass_their_gradient_on() -> None:
    ours, theirs = twins("EmbeddingBag", 12, 3, mode="sum")
    leaves = [torch.tensor(0.5, requires_grad=True) for _ in range(2)]
    for module, leaf in zip((ours, theirs), leaves, strict=True):
        module(VALUES, OFFSETS, torch.tanh(leaf * WEIGHTS)).square().sum().backward()
    close(leaves[0].grad, leaves[1].grad)


def test_asking_for_the_weights_gradient_alone_trains_nothing() -> None:
    ours, theirs = twins("EmbeddingBag", 12, 3, mode="sum")
    before = ours.weight.clone()
    leaves = [WEIGHTS.clone().requires_grad_() for _ in range(2)]
    outs = [module(VALUES, OFFSETS, leaf) for module, leaf in zip((ours, theirs), leaves, strict=True)]
    grads = [torch.autograd.grad(out.square().sum(), [leaf], retain_graph=True)[0]
             for out, leaf in zip(outs, leaves, strict=True)]  # fmt: skip
    close(*grads)
    for out, leaf in zip(outs, leaves, strict=True):
        out.sum().backward(inputs=[leaf], retain_graph=True)
    close(leaves[0].grad, leaves[1].grad)
    assert torch.equal(ours.weight, before)
    with pytest.raises(UsageError, match="never a tensor"):
        torch.autograd.grad(outs[0].sum(), [ours.anchor], retain_graph=True)
    assert torch.equal(ours.weight, before)
    for out in outs:
        out.sum().backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    close(ours.weight, theirs.weight)


def test_second_derivatives_are_refused() -> None:
    ours, _ = twins("EmbeddingBag", 12, 3, mode="sum")
    leaf = WEIGHTS.clone().requires_grad_()
    grad = torch.autograd.grad(ours(VALUES, OFFSETS, leaf).square().sum(), [leaf], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


# --- pretrained ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["EmbeddingBag", "Embedding"])
@pytest.mark.parametrize("freeze", [None, True, False])
def test_from_pretrained(kind: str, freeze: bool | None) -> None:
    rows = torch.randn(10, 3)
    kept = rows.clone()
    settings = {} if freeze is None else {"freeze": freeze}
    ours = getattr(cdlrm, kind).from_pretrained(rows, padding_idx=2, optimizer=cdlrm.SGD(lr=0.1), **settings)
    theirs = getattr(nn, kind).from_pretrained(rows.clone(), padding_idx=2, **settings)
    ids = torch.tensor([[1, 2], [4, 4]])
    assert torch.equal(ours.weight, theirs.weight)
    mine, reference = ours(ids), theirs(ids)
    close(mine, reference)
    assert mine.requires_grad == reference.requires_grad == (freeze is False)
    if freeze is False:
        mine.sum().backward()
        reference.sum().backward()
        torch.optim.SGD(theirs.parameters(), lr=0.1).step()
        close(ours.weight, theirs.weight)
    assert torch.equal(rows, kept), "the pretrained tensor is not modified"


def test_from_pretrained_frozen_needs_no_optimizer() -> None:
    ours = cdlrm.EmbeddingBag.from_pretrained(torch.randn(10, 3))
    assert not ours(torch.tensor([[1, 2]])).requires_grad
    ours.requires_grad_(True)
    with pytest.raises(UsageError, match="has no optimizer"):
        ours(torch.tensor([[1, 2]]))


@pytest.mark.parametrize("rows", [torch.zeros(3), torch.zeros(2, 2, 2), [[1.0]], torch.zeros(2, 2).double()])
def test_from_pretrained_refuses_other_shapes(rows: Any) -> None:
    for kind in (cdlrm.EmbeddingBag, cdlrm.Embedding):
        with pytest.raises(InputError, match="float32"):
            kind.from_pretrained(rows)
    with pytest.raises(TypeError, match="unexpected keyword"):
        cdlrm.Embedding.from_pretrained(torch.zeros(2, 2), nonsense=1)


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "max"}, "max"),
        ({"mode": "median"}, "median"),
        ({"max_norm": 1.0}, "max_norm"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
        ({"dtype": torch.float64}, "float64"),
        ({"device": "cuda"}, "cuda"),
        ({"padding_idx": 10}, "padding_idx"),
        ({"padding_idx": -11}, "padding_idx"),
        ({"optimizer": torch.optim.SGD}, "cdlrm.SGD"),
        ({"cache_rows": 0}, "cache_rows"),
        ({"update": "later"}, "update"),
        ({"nonfinite": "ignore"}, "nonfinite"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], words: str) -> None:
    for kind in (cdlrm.EmbeddingBag, cdlrm.Embedding):
        if "mode" in settings and kind is cdlrm.Embedding:
            continue
        with pytest.raises(ConfigError, match=words) as caught:
            kind(10, 3, **{"optimizer": cdlrm.SGD(lr=0.1), **settings})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((VALUES,), "offsets are missing"),
        ((VALUES.reshape(3, 3), OFFSETS), "offsets must be None"),
        ((VALUES.reshape(3, 3, 1),), "3 dimensions"),
        ((torch.tensor(3),), "0 dimensions"),
        ((VALUES, OFFSETS, WEIGHTS[:4]), "per_sample_weights have shape"),
        ((VALUES, OFFSETS, WEIGHTS.tolist()), "per_sample_weights are a list"),
        ((VALUES, OFFSETS, WEIGHTS.double()), "float32"),
        ((VALUES, OFFSETS, WEIGHTS * float("nan")), "finite"),
        ((VALUES, torch.tensor([1, 4])), "must be 0"),
        ((VALUES, torch.tensor([0, 4, 3])), "below the one before"),
        ((torch.tensor([1, 2]), torch.tensor([0, 5])), "offset 5 at position 1 is beyond the number of ids, 2; pass"),
        ((VALUES, torch.tensor([0, 12])), "12"),
        ((VALUES, OFFSETS.reshape(1, 5)), "2 dimensions"),
        ((VALUES.double(), OFFSETS), "float64"),
        ((torch.tensor([1, 12]), torch.tensor([0])), "id 12 at position 1"),
        ((torch.tensor([1, -1]), torch.tensor([0])), "id -1 at position 1"),
        (([1, 2], OFFSETS), "list"),
        ((torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged),), "nested"),
    ],
)
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_inputs_that_are_refused(arguments: Any, words: str, padding_idx: int | None) -> None:
    ours, _ = twins("EmbeddingBag", 12, 3, mode="sum", padding_idx=padding_idx)
    with pytest.raises(InputError, match=words) as caught:
        ours(*arguments)
    assert "\n" not in str(caught.value)
    ours(VALUES, OFFSETS).sum().backward()  # nothing is broken
    ours.check()


def test_per_sample_weights_need_sum() -> None:
    ours, theirs = twins("EmbeddingBag", 12, 3)
    with pytest.raises(InputError, match='mode="sum"'):
        ours(VALUES, OFFSETS, WEIGHTS)
    with pytest.raises(NotImplementedError):
        theirs(VALUES, OFFSETS, WEIGHTS)


def test_an_id_out_of_range_that_follows_a_padding_id_is_named_by_its_own_position() -> None:
    ours, _ = twins("EmbeddingBag", 12, 3, padding_idx=3)
    with pytest.raises(InputError, match="id 12"):
        ours(torch.tensor([[3, 3, 12]]))


def test_training_without_an_optimizer_is_refused() -> None:
    ours = cdlrm.EmbeddingBag(10, 3)
    with pytest.raises(UsageError, match="has no optimizer"):
        ours(torch.tensor([[1]]))
    with torch.no_grad():
        assert ours(torch.tensor([[1]])).shape == (1, 3)


@pytest.mark.parametrize("kind", ["EmbeddingBag", "Embedding"])
def test_sparse_is_ignored(kind: str) -> None:
    for sparse in (True, False):
        ours = getattr(cdlrm, kind)(10, 3, sparse=sparse, optimizer=cdlrm.SGD(lr=1.0), seed=1)
        before = ours.weight.clone()
        ours(torch.tensor([[1, 1]])).sum().backward()
        moved = (ours.weight != before).any(1)
        assert moved.nonzero().flatten().tolist() == [1]


def test_double_backward_is_refused() -> None:
    ours, _ = twins("EmbeddingBag", 12, 3)
    out = ours(VALUES, OFFSETS)
    out.sum().backward(retain_graph=True)
    with pytest.raises(UsageError, match="second backward"):
        out.sum().backward()


# --- modes of the module ------------------------------------------------------------------------


def test_train_eval_no_grad_and_inference_mode() -> None:
    ours, theirs = twins("EmbeddingBag", 12, 3, {"cache_rows": 9})
    before = ours.weight.clone()
    with torch.no_grad():
        assert not ours(VALUES, OFFSETS).requires_grad
    with torch.inference_mode():
        out = ours(VALUES, OFFSETS)
        close(out.clone(), theirs(VALUES, OFFSETS).clone())
    assert ours.eval() is ours and not ours.training
    assert ours(VALUES, OFFSETS).requires_grad, "as in torch, eval() alone does not stop gradients"
    assert ours.train().training
    assert torch.equal(ours.weight, before)
    ours(VALUES, OFFSETS).sum().backward()
    assert not torch.equal(ours.weight, before)


def test_random_bags_train_as_torchs() -> None:
    rng = np.random.default_rng(5)
    for mode in ("sum", "mean"):
        ours, theirs = twins("EmbeddingBag", 40, 5, {"cache_rows": 12}, mode=mode)
        update = torch.optim.SGD(theirs.parameters(), lr=0.1)
        for _ in range(30):
            values, offsets = random_bags(rng, 40, int(rng.integers(0, 7)))
            outs = ours(values, offsets), theirs(values, offsets)
            close(*outs, rtol=1e-5, atol=1e-5)
            if outs[0].numel():
                grad = torch.from_numpy(rng.standard_normal(outs[0].shape).astype(np.float32))
                for out in outs:
                    out.backward(grad)
                update.step()
                update.zero_grad()
        close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-5)
        ours.check()


# --- outputs that are kept ----------------------------------------------------------------------


def trained_apart(steps: int, keep: bool, cache_rows: Any = 9) -> tuple[Any, list[Tensor]]:
    ours, _ = twins("EmbeddingBag", 12, 3, {"cache_rows": cache_rows, "seed": 0})
    kept, read = [], []
    for k in range(steps):
        out = ours((VALUES + k) % 12, OFFSETS)
        if keep:
            kept.append(out)
        ours(VALUES, OFFSETS).square().sum().backward()
        if k % 2:
            with torch.no_grad():
                read.append(ours(VALUES, OFFSETS))
        else:
            read.append(ours.weight.clone())
    return ours, read


@pytest.mark.parametrize("cache_rows", ["auto", 9])
def test_an_output_that_is_kept_does_not_hide_updates(cache_rows: Any) -> None:
    """As in a notebook: an output without a backward stays in a variable while training goes on."""
    kept, read = trained_apart(6, keep=True, cache_rows=cache_rows)
    plain, expected = trained_apart(6, keep=False)
    for mine, theirs in zip(read, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert kept.stats()["cache_rows"] <= 12
    kept.check()


def test_a_backward_that_comes_too_late_is_refused_and_not_silently_another_update() -> None:
    for read in (lambda m: m.weight, lambda m: m.state_dict(), lambda m: m(VALUES, OFFSETS)):
        ours, _ = twins("EmbeddingBag", 12, 3)
        first, second = ours(VALUES, OFFSETS), ours(VALUES, OFFSETS)
        first.sum().backward()
        read(ours)
        with pytest.raises(UsageError, match="has been updated"):
            second.sum().backward()
        ours(VALUES, OFFSETS).sum().backward()
        ours.check()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", ["scan", "plan", "reset"])
def test_ctrl_c_in_a_forward_call(where: str, after: bool, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call never happened: training goes on as if only the others had been made, also when Ctrl-C comes twice."""
    rows, generator = 5000, torch.Generator().manual_seed(0)
    batches = [torch.randint(rows, (n,), generator=generator) for n in (600, 900, 700, 800, 650, 900)]
    bags = [
        cdlrm.EmbeddingBag(rows, 8, mode="sum", optimizer=cdlrm.SGD(lr=0.1), cache_rows=1000, seed=1, device="cpu")
        for _ in range(2)
    ]

    def step(bag: Any, ids: torch.Tensor) -> None:
        bag(ids, torch.arange(0, len(ids), 10)).square().sum().backward()

    def interrupt(patch: pytest.MonkeyPatch, name: str) -> None:
        run, calls = getattr(Planner, name), iter(range(100))

        def pressed(*arguments: Any) -> Any:
            if next(calls) > 0:
                return run(*arguments)
            if after:
                run(*arguments)
            raise KeyboardInterrupt

        patch.setattr(Planner, name, pressed)

    for i, ids in enumerate(batches):
        if i == 3:
            with monkeypatch.context() as patch:
                interrupt(patch, "scan" if where == "reset" else where)
                if again or where == "reset":
                    interrupt(patch, "reset")
                with pytest.raises(KeyboardInterrupt):
                    step(bags[0], ids)
        else:
            for bag in bags:
                step(bag, ids)
    assert torch.equal(bags[0].weight, bags[1].weight)
    for bag in bags:
        bag.close()
