"""`.weight` of a table in a loss, or the parameters that its rows are not among: refused where the rows would be left
out silently; reading stays."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import swa_utils

import cdlrm
from cdlrm import UsageError

Loss = Callable[[cdlrm.Embedding], Tensor]
LOSSES: dict[str, Loss] = {
    "tied by a function": lambda e: F.linear(e(torch.tensor([1, 2])), e.weight).sum(),
    "tied, by keyword": lambda e: F.linear(torch.ones(2, 4), weight=e.weight).sum(),
    "penalty": lambda e: e.weight.pow(2).sum(),
    "penalty of one row, beside a lookup": lambda e: e(torch.tensor([1])).sum() + (e.weight[3] ** 2).sum(),
    "view of a view": lambda e: e.weight.t()[0].exp().sum(),
    "rows": lambda e: sum((row.sum() for row in e.weight.unbind()), torch.zeros(())),
    "looked up by hand": lambda e: F.embedding(torch.tensor([1]), e.weight).sum(),
    "in a list": lambda e: torch.cat([e.weight, torch.ones(1, 4)]).sum(),
}


def table() -> cdlrm.Embedding:
    return cdlrm.Embedding(10, 4, optimizer=cdlrm.SGD(lr=0.1))


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_a_loss_through_the_weight_is_refused(loss: Loss) -> None:
    module = table()
    with pytest.raises(UsageError, match=r"torch\.no_grad.*weight_decay=.*torch\.nn\.Embedding") as caught:
        loss(module).backward()
    assert "\n" not in str(caught.value)
    with torch.no_grad():
        looked_at = loss(module)
    assert not looked_at.requires_grad
    (module(torch.tensor([0])).sum() + looked_at).backward()  # the module still learns


@pytest.mark.parametrize("loss", [LOSSES["penalty"], LOSSES["tied, by keyword"]])
def test_a_frozen_table_is_a_constant(loss: Loss) -> None:
    values, head = torch.randn(10, 4), torch.ones((), requires_grad=True)
    for module in (cdlrm.Embedding.from_pretrained(values), table().requires_grad_(False)):
        (loss(module) * head).backward()
    assert head.grad is not None


def test_reading_is_as_before() -> None:
    module = table()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = module.weight
        assert not weight.requires_grad and "grad" not in repr(weight)
        for array in (weight.numpy(), np.asarray(weight), weight.T.numpy().T, weight.clone().numpy(),
                      weight.detach().numpy(), weight.data.numpy(), weight.reshape(-1).numpy().reshape(10, 4),
                      copy.deepcopy(weight).numpy(), weight.cpu().float().numpy()):  # fmt: skip
            assert np.array_equal(array, weight.tolist())
        assert torch.equal(weight, module.weight) and (weight == module.weight).all()
        torch.testing.assert_close(weight, module.weight)
        assert float(weight[0, 0]) == weight[0, 0].item()
        other, buffer = nn.Embedding(10, 4), torch.zeros(10, 4)
        other.load_state_dict({"weight": weight})
        buffer.copy_(weight)
        buffer[0] = weight[0]
        assert not buffer.requires_grad
        (other.weight - weight).abs().max().item()
        module.set_weight(weight * 2)
        file = io.BytesIO()
        torch.save(weight, file)
        file.seek(0)
        assert torch.equal(torch.load(file), buffer)
    assert torch.equal(module.weight, buffer * 2)


def test_a_table_of_a_collection_is_guarded_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = cdlrm.EmbeddingBagCollection([cdlrm.Table("user", 10, 4)], optimizer=cdlrm.SGD(lr=0.1))
    weight = tables.table_weight("user")
    values = weight.clone()
    assert type(values) is Tensor and torch.equal(values, tables.state_dict()["embedding_bags.user.weight"])
    assert type(tables.state_dict()["embedding_bags.user.weight"]) is Tensor
    with pytest.raises(UsageError, match=r"gradient.*compare \.table_weight\('user'\) before"):
        _ = weight.grad
    for write in (lambda: weight[0].zero_(), lambda: nn.init.ones_(weight), lambda: weight.__setitem__(0, 1.0)):
        with pytest.raises(UsageError, match=r"table_weight\('user'\).*copy.*module\.set_table\('user', values\)"):
            write()
    with pytest.raises(ValueError, match="read-only"):
        weight.numpy()[0] = 1
    with pytest.raises(UsageError, match=r"depends on \.table_weight\('user'\).*weight_decay="):
        weight.square().sum().backward()
    tables.requires_grad_(False)
    assert not tables.table_weight("user").square().sum().requires_grad
    tables.set_table("user", weight * 2)
    assert torch.equal(tables.table_weight("user"), values * 2)
    monkeypatch.setattr("cdlrm.module.available_bytes", lambda: 100)
    with pytest.raises(UsageError, match=r"'user' needs .* GiB.*iter_tables"):
        tables.table_weight("user")


# --- .parameters(), among which no rows are ------------------------------------------------------


def with_dense() -> nn.Sequential:
    return nn.Sequential(table(), nn.Linear(4, 1))


@pytest.mark.parametrize("copied", [False, True])
def test_a_loss_through_the_parameters_is_refused(copied: bool) -> None:
    model = copy.deepcopy(with_dense()) if copied else with_dense()
    ids = torch.tensor([1, 2])
    model.requires_grad_(False).requires_grad_(True)
    for penalty in (lambda p: p.square().sum(), lambda p: p.abs().sum(), lambda p: 0 * p.sum()):
        with pytest.raises(UsageError, match='"anchor".*not among the parameters.*weight_decay=') as caught:
            (model(ids).sum() + sum(penalty(p) for p in model.parameters())).backward()
        assert "\n" not in str(caught.value)
    before = model[0].weight.clone()
    dense = [p for name, p in model.named_parameters() if not name.endswith("anchor")]
    (model(ids).sum() + sum(p.square().sum() for p in dense)).backward()
    assert not torch.equal(model[0].weight, before)
    model[0].requires_grad_(False)  # a constant
    (model(ids).sum() + sum(p.square().sum() for p in model.parameters())).backward()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_every_parameter_is_refused_when_it_is_registered(register: str) -> None:
    for module in (table(), copy.deepcopy(table())):
        for parameter in module.parameters():
            with pytest.raises(UsageError, match="leave parameters named \"anchor\" out.*clip_grad_norm_") as caught:
                getattr(parameter, register)(lambda grad: grad.clamp(-1, 1))
            assert "\n" not in str(caught.value)
        before = module.weight.clone()
        module(torch.tensor([1])).sum().backward()
        assert not torch.equal(module.weight, before)


@pytest.mark.parametrize("average", [{}, {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.5)}, {"use_buffers": True}])
def test_an_average_of_the_parameters_is_refused(average: dict[str, Any]) -> None:
    model = with_dense()
    averaged = swa_utils.AveragedModel(model, **average)
    with pytest.raises(UsageError, match=r"rows of Embedding are none.*table_copy and set_table") as caught:
        averaged.update_parameters(model)
    assert "\n" not in str(caught.value)
    dense = swa_utils.AveragedModel(model[1], **average)
    dense.update_parameters(model[1])
    model[0].requires_grad_(False)  # equal in both
    averaged.update_parameters(model)
    assert int(averaged.n_averaged) == int(dense.n_averaged) == 1
