"""The DLRM against plain loops, and its metrics against torchmetrics' exact ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from cdlrm.errors import ConfigError, InputError
from cdlrm.metrics import ClickMetrics, normalized_entropy
from cdlrm.model import DLRM, CatInteraction, DotInteraction, mlp


class Given(nn.Module):
    """Embeddings that are given: the sparse input is the pooled output."""

    def forward(self, pooled: Tensor) -> Tensor:
        return pooled


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("features", [0, 1, 5])
def test_dot_interaction_is_the_plain_loop(features: int, itself: bool) -> None:
    torch.manual_seed(3)
    batch, dim = 7, 6
    dense, pooled = torch.randn(batch, dim), torch.randn(batch, features, dim)
    out = DotInteraction(features, itself=itself)(dense, pooled)
    for sample in range(batch):
        vectors = [dense[sample], *pooled[sample]]
        expected = list(dense[sample])
        for i in range(len(vectors)):
            for j in range(i + 1 if itself else i):
                expected.append(torch.dot(vectors[i], vectors[j]))
        torch.testing.assert_close(out[sample], torch.stack(expected))


def test_cat_interaction_is_concatenation() -> None:
    dense, pooled = torch.randn(4, 3), torch.randn(4, 2, 3)
    expected = torch.cat([dense, pooled[:, 0], pooled[:, 1]], dim=1)
    assert torch.equal(CatInteraction()(dense, pooled), expected)


@pytest.mark.parametrize("interaction,itself", [("dot", False), ("dot", True), ("cat", False)])
def test_forward_by_hand(interaction: str, itself: bool) -> None:
    torch.manual_seed(1)
    model = DLRM(
        Given(), features=3, dim=4, mlp_bot=[5, 8, 4], mlp_top=[6, 1], interaction=interaction,
        interaction_itself=itself,
    )  # fmt: skip
    dense, pooled = torch.randn(9, 5), torch.randn(9, 3, 4)
    hidden = dense
    for linear in (model.bottom[0], model.bottom[2]):
        hidden = torch.relu(hidden @ linear.weight.T + linear.bias)
    joined = (CatInteraction() if interaction == "cat" else DotInteraction(3, itself=itself))(hidden, pooled)
    top = torch.relu(joined @ model.top[0].weight.T + model.top[0].bias)
    expected = (top @ model.top[2].weight.T + model.top[2].bias).squeeze(1)
    torch.testing.assert_close(model(dense, pooled), expected)
    assert len(model.dense_parameters()) == 8


def test_initial_values_are_seeded_and_of_the_published_variance() -> None:
    first, second, other = (
        mlp([400, 300], last_relu=False, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)
    )
    assert torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)
    assert first[0].weight.std().item() == pytest.approx(math.sqrt(2 / 700), rel=0.02)
    assert first[0].bias.std().item() == pytest.approx(math.sqrt(1 / 300), rel=0.15)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="dim=4"):
        DLRM(Given(), features=1, dim=4, mlp_bot=[5, 3], mlp_top=[1])
    with pytest.raises(ConfigError, match="must end in 1"):
        DLRM(Given(), features=1, dim=4, mlp_bot=[5, 4], mlp_top=[2])
    with pytest.raises(ConfigError, match="'dot' or 'cat'"):
        DLRM(Given(), features=1, dim=4, mlp_bot=[5, 4], mlp_top=[1], interaction="sum")
    model = DLRM(Given(), features=1, dim=4, mlp_bot=[5, 4], mlp_top=[1])
    with pytest.raises(InputError, match=r"\[B, 5\]"):
        model(torch.zeros(2, 6), torch.zeros(2, 1, 4))


def test_auc_is_the_share_of_pairs_in_the_right_order() -> None:
    torch.manual_seed(2)
    logits = torch.randn(600).mul(4).round().div(4)  # with ties
    labels = (torch.rand(600) < torch.sigmoid(logits - 2)).float()
    metrics = ClickMetrics()
    for part in range(0, 600, 70):
        metrics.update(logits[part : part + 70], labels[part : part + 70])
    clicks, others = logits[labels == 1], logits[labels == 0]
    right = (clicks[:, None] > others).double() + 0.5 * (clicks[:, None] == others)
    assert metrics.compute()["auc"] == pytest.approx(right.mean().item(), abs=1e-6)


def test_metrics_of_a_stream_by_their_formulas() -> None:
    torch.manual_seed(4)
    logits = torch.randn(5_000) - 2
    labels = (torch.rand(5_000) < 0.1).float()
    metrics = ClickMetrics()
    for part in range(0, 5_000, 1_000):
        metrics.update(logits[part : part + 1_000], labels[part : part + 1_000])
    metrics.update(logits[:0], labels[:0])
    found = metrics.compute()
    p = torch.sigmoid(logits.double())
    rate = labels.double().mean().item()
    loss = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean().item()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert found["samples"] == 5_000
    assert found["log_loss"] == pytest.approx(loss, rel=1e-6)
    assert found["normalized_entropy"] == pytest.approx(loss / entropy, rel=1e-6)
    assert found["accuracy"] == pytest.approx(((p > 0.5) == (labels > 0.5)).double().mean().item(), rel=1e-6)
    assert found["click_rate"] == pytest.approx(rate, rel=1e-6)


def test_metrics_of_nothing_and_of_one_class_are_nan() -> None:
    assert math.isnan(ClickMetrics().compute()["auc"])
    metrics = ClickMetrics()
    metrics.update(torch.zeros(3), torch.zeros(3))
    found = metrics.compute()
    assert math.isnan(found["auc"]) and math.isnan(found["normalized_entropy"])
    assert found["log_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert normalized_entropy(0.3, 0.5) == pytest.approx(0.3 / math.log(2))
