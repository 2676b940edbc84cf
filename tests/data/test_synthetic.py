"""The generator: what was asked for comes out, the same every time, and its labels can be learned and not guessed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cdlrm.data import SyntheticSource, check_batch
from cdlrm.data.columns import Columns
from cdlrm.data.synthetic import CARDINALITIES
from cdlrm.errors import ConfigError


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    order = np.argsort(scores, kind="stable")
    ranks = np.empty(len(scores))
    ranks[order] = np.arange(1, len(scores) + 1)
    positives = labels.sum()
    return float((ranks[labels > 0].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives)))


def whole(source: SyntheticSource) -> Columns:
    return Columns.concat([source.read_block(b, 0, None)[0] for b in range(source.num_blocks())])


def test_default_is_shaped_like_the_sample() -> None:
    source = SyntheticSource(num_rows=80000, batch_size=2048)
    assert source.table_rows == CARDINALITIES and sum(CARDINALITIES) == 183569 and source.num_dense == 13
    data = whole(source)
    (first, *_) = source
    check_batch(first, dict(zip(source.features, source.table_rows, strict=True)))
    assert data.labels.mean() == pytest.approx(0.25, abs=0.02)
    assert 0.19 < (data.dense[:, 0] == 0).mean() < 0.26 and data.dense.min() == 0 and data.dense.max() < 20
    assert (data.ids[13] == 0).mean() == pytest.approx(0.42, abs=0.02)
    for f, share in ((3, 0.29), (5, 0.87), (8, 0.5)):  # the most popular row; as in the sample
        assert np.bincount(data.ids[f]).max() / 80000 == pytest.approx(share, rel=0.4)
    assert 1500 < len(np.unique(data.ids[3])) <= 2567


def test_zipf_law_and_scattering() -> None:
    source = SyntheticSource(
        num_rows=200000, batch_size=1000, cardinalities=[1000, 1000, 1, 7], exponents=[1.0, 0.0, 1.0, 2.0]
    )
    ids = whole(source).ids
    counts = np.sort(np.bincount(ids[0], minlength=1000))[::-1]
    # The continuous law: P(rank r) is the integral of 1/x from r to r+1.
    expected = 200000 * np.log(np.arange(2, 12) / np.arange(1, 11)) / np.log(1001)
    np.testing.assert_allclose(counts[:10], expected, rtol=0.06)
    assert np.bincount(ids[1], minlength=1000).min() > 100 and not ids[2].any() and set(ids[3]) == set(range(7))
    popular = np.argsort(np.bincount(ids[0], minlength=1000))[::-1][:10]
    assert popular.max() - popular.min() > 500


def test_deterministic_and_free_of_batch_size() -> None:
    one, two = (whole(SyntheticSource(num_rows=40000, batch_size=b, seed=3)) for b in (7, 2048))
    other = whole(SyntheticSource(num_rows=40000, batch_size=7, seed=4))
    assert (
        np.array_equal(one.ids, two.ids)
        and np.array_equal(one.dense, two.dense)
        and np.array_equal(one.labels, two.labels)
    )
    assert not np.array_equal(one.ids, other.ids) and not np.array_equal(one.labels, other.labels)


def test_lengths() -> None:
    how = {"cardinalities": [50, 50, 50], "num_rows": 5000, "batch_size": 5000, "num_dense": 0}
    (batch,) = SyntheticSource(**how, lengths=[0, 1, 3])
    lengths = [j.offsets.diff() if j.offsets is not None else torch.ones(5000) for j in batch.sparse.values()]
    assert [set(x.tolist()) for x in lengths] == [{0}, {1}, {3}] and batch.sparse["c2"].offsets is None
    assert batch.dense.shape == (5000, 0)
    (batch,) = SyntheticSource(**how, lengths=[0.5, 1, 9.3], vary_lengths=True)
    check_batch(batch, dict.fromkeys(batch.sparse, 50))
    for jagged, mean in zip(batch.sparse.values(), (0.5, 1, 9.3), strict=True):
        assert jagged.offsets is not None
        assert jagged.offsets.diff().float().mean() == pytest.approx(mean, rel=0.1) and jagged.offsets.diff().min() == 0
    assert len(list(SyntheticSource(num_batches=3, batch_size=10))) == 3
    assert list(SyntheticSource(num_rows=0, batch_size=10)) == []


def test_refuses() -> None:
    for wrong, word in (
        ({"cardinalities": [0]}, "cardinality of feature 0 is 0"),
        ({"cardinalities": [5, 2**40]}, "cardinality of feature 1"),
        ({"exponents": [1.0]}, "1 values are given as exponent for 26"),
        ({"exponents": -1.0}, "exponent"),
        ({"missing": 1.5}, "missing rate"),
        ({"lengths": 1.5}, "vary_lengths"),
        ({"num_rows": 5, "num_batches": 5}, "both"),
        ({"click_rate": 0.0}, "click rate"),
        ({"missing": float("nan")}, "missing rate"),
    ):
        with pytest.raises(ConfigError, match=word):
            SyntheticSource(**wrong)


@pytest.mark.parametrize("settings", [{}, {"cardinalities": [20] * 8}, {"lengths": 3}, {"click_rate": 0.03, "seed": 5}])
def test_hidden_model_can_be_known(settings: dict) -> None:
    source = SyntheticSource(num_rows=40000, batch_size=2048, **settings)
    data = whole(source)
    assert data.labels.mean() == pytest.approx(source.click_rate, rel=0.2)
    assert 0.8 < auc(source.logits(data), data.labels) < 0.93


class SmallDlrm(torch.nn.Module):
    """Rows of dim 16, a bottom and a top network, dot products of all pairs."""

    def __init__(self, rows: list[int], dense: int) -> None:
        super().__init__()
        self.bottom = torch.nn.Sequential(
            torch.nn.Linear(dense, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16), torch.nn.ReLU()
        )
        pairs = len(rows) * (len(rows) + 1) // 2
        self.top = torch.nn.Sequential(torch.nn.Linear(16 + pairs, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self.tables = torch.nn.Embedding(sum(rows), 16, sparse=True)
        with torch.no_grad():
            scale = torch.repeat_interleave(torch.tensor(rows) ** -0.5, torch.tensor(rows))
            self.tables.weight.uniform_(-1, 1).mul_(scale[:, None])
        self.register_buffer("starts", torch.tensor(np.cumsum([0, *rows[:-1]])))
        self.register_buffer("triangle", torch.tril_indices(len(rows) + 1, len(rows) + 1, -1))

    def forward(self, batch) -> torch.Tensor:  # noqa: ANN001
        x = self.bottom(batch.dense)
        ids = torch.stack([j.values for j in batch.sparse.values()], 1) + self.starts
        vectors = torch.cat([x[:, None], self.tables(ids)], 1)
        products = (vectors @ vectors.transpose(1, 2))[:, self.triangle[0], self.triangle[1]]
        return self.top(torch.cat([x, products], 1))[:, 0]


def test_trained_network_beats_chance_and_untrained_does_not() -> None:
    test = list(SyntheticSource(num_rows=240000, row_range=(200000, None), batch_size=8192))
    train = SyntheticSource(num_rows=240000, row_range=(0, 2048 * 50), batch_size=2048)
    labels = np.concatenate([b.labels for b in test])

    def score(model: torch.nn.Module) -> float:
        with torch.no_grad():
            return auc(np.concatenate([model(b).numpy() for b in test]), labels)

    untrained = []
    for seed in range(5):
        torch.manual_seed(seed)
        model = SmallDlrm(train.table_rows, 13)
        untrained.append(score(model))
    assert all(abs(a - 0.5) < 0.02 for a in untrained), untrained
    dense = torch.optim.SGD([*model.bottom.parameters(), *model.top.parameters()], lr=0.1)
    rows = torch.optim.Adagrad(model.tables.parameters(), lr=0.1)
    for batch in train:
        torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
        for optimizer in (dense, rows):
            optimizer.step()
            optimizer.zero_grad()
    assert score(model) > 0.70
