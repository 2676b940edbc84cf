"""The referees themselves, against torch, published vectors and naive loops."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracle import CHUNK, Oracle, chunked_row_sums, initial_table, lane_sum, philox4x32
from reference_min import brute_force_fills, furthest_fills, lru_fills, smallest_cache, window_fills
from torch import nn

from cdlrm.optim import SGD, Adagrad, Adam, RowWiseAdagrad


def table(name: str, rows: int, dim: int, pooling: str = "sum", features: list[str] | None = None) -> SimpleNamespace:
    return SimpleNamespace(name=name, num_embeddings=rows, embedding_dim=dim, pooling=pooling, features=features)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    """The known-answer vectors published with Random123."""
    assert [int(w[0]) for w in philox4x32([np.array([c]) for c in counter], key)] == list(words)


def test_initial_values_are_uniform_and_keyed() -> None:
    values = initial_table(7, 2, 1000, 17)
    bound = np.sqrt(1 / 1000)
    assert np.abs(values).max() <= bound and abs(values.mean()) < 0.02 * bound
    assert abs(values.std() - bound / np.sqrt(3)) < 0.02 * bound
    assert not np.array_equal(values, initial_table(7, 3, 1000, 17))
    assert not np.array_equal(values, initial_table(7 + 2**32, 2, 1000, 17))
    assert np.array_equal(values[:, :5], initial_table(7, 2, 1000, 5))


@pytest.mark.parametrize("dim", [1, 3, 31, 32, 33, 100, 257])
def test_lane_sum_equals_the_scalar_loop(dim: int) -> None:
    x = np.random.default_rng(dim).standard_normal((4, dim)).astype(np.float32)
    for row, got in zip(x, lane_sum(x), strict=True):
        lane = [np.float32(0)] * 32
        for c in range(dim):
            lane[c % 32] = lane[c % 32] + row[c]
        h = 16
        while h:
            for i in range(h):
                lane[i] = lane[i] + lane[i + h]
            h //= 2
        assert lane[0] == got


@pytest.mark.parametrize("distinct", [1, 2, 50])
@pytest.mark.parametrize("dim", [1, 5])
def test_chunked_sums_equal_the_scalar_loop(distinct: int, dim: int) -> None:
    rng = np.random.default_rng(distinct)
    rows = rng.integers(0, distinct, 6 * CHUNK + 7)
    grads = rng.standard_normal((len(rows), dim)).astype(np.float32)
    got_rows, got = chunked_row_sums(rows, grads)
    assert got_rows.tolist() == sorted(set(rows.tolist()))
    for row, sums in zip(got_rows, got, strict=True):
        mine = grads[rows == row]
        total = np.zeros(dim, np.float32)
        for first in range(0, len(mine), CHUNK):
            chunk = np.zeros(dim, np.float32)
            for g in mine[first : first + CHUNK]:
                chunk = chunk + g
            total = total + chunk
        assert np.array_equal(total, sums)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_oracle_against_torch(name: str, pooling: str) -> None:
    rng = np.random.default_rng(3)
    rows, dim, batch = 40, 9, 8
    spec = {"SGD": SGD(lr=0.3), "Adagrad": Adagrad(lr=0.2), "Adam": Adam(lr=0.01)}[name]
    oracle = Oracle([table("a", rows, dim, pooling)], spec, seed=1)
    bag = nn.EmbeddingBag(rows, dim, mode=pooling, sparse=True)
    with torch.no_grad():
        bag.weight.copy_(torch.from_numpy(oracle.weight("a")))
    rival = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.3),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.2),
        "Adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.01),
    }[name](bag.parameters())
    for _ in range(60):
        lengths = rng.integers(0, 5, batch)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = rng.integers(0, rows, offsets[-1])
        grad = rng.standard_normal((batch, 1, dim)).astype(np.float32)
        out = oracle.forward({"a": (ids, offsets, None)})
        theirs = bag(torch.from_numpy(ids), torch.from_numpy(offsets[:-1]))
        np.testing.assert_allclose(out[:, 0], theirs.detach().numpy(), rtol=1e-5, atol=1e-6)
        rival.zero_grad()
        theirs.backward(torch.from_numpy(grad[:, 0]))
        rival.step()
        oracle.backward(grad)
    ours, torchs = oracle.weight("a"), bag.weight.detach().numpy()
    assert np.linalg.norm(ours - torchs) <= 1e-5 * np.linalg.norm(torchs)


def test_weight_gradients_against_torch() -> None:
    rng = np.random.default_rng(5)
    oracle = Oracle([table("a", 20, 33)], SGD(lr=0.0))
    bag = nn.EmbeddingBag(20, 33, mode="sum")
    with torch.no_grad():
        bag.weight.copy_(torch.from_numpy(oracle.weight("a")))
    ids, offsets = rng.integers(0, 20, 11), np.array([0, 3, 3, 11])
    weights = rng.standard_normal(11).astype(np.float32)
    grad = rng.standard_normal((3, 1, 33)).astype(np.float32)
    theirs = torch.from_numpy(weights).requires_grad_()
    out = bag(torch.from_numpy(ids), torch.from_numpy(offsets[:-1]), theirs)
    out.backward(torch.from_numpy(grad[:, 0]))
    mine = oracle.forward({"a": (ids, offsets, weights)})
    np.testing.assert_allclose(mine[:, 0], out.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(oracle.backward(grad)[0]["a"], theirs.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_several_calls_are_one_update() -> None:
    """Two calls with one id each must equal one call with both ids: the same bits in call-major order."""
    spec = RowWiseAdagrad(lr=0.1)
    one, two = (Oracle([table("a", 5, 4)], spec) for _ in range(2))
    grads = np.random.default_rng(0).standard_normal((2, 1, 4)).astype(np.float32)
    one.forward({"a": (np.array([3, 3]), None, None)})
    one.backward(grads)
    for _ in range(2):
        two.forward({"a": (np.array([3]), None, None)})
    two.backward(grads[:1], grads[1:])
    assert np.array_equal(one.weight("a"), two.weight("a"))
    assert np.array_equal(one.state("a")["sum"], two.state("a")["sum"])


def test_planner_referees_agree() -> None:
    rng = np.random.default_rng(11)
    for _ in range(150):
        rows = int(rng.integers(3, 9))
        trace = [rng.permutation(rows)[: rng.integers(0, 4)].tolist() for _ in range(rng.integers(1, 9))]
        depth = int(rng.integers(0, 4))
        slots = max(1, smallest_cache(trace, depth)) + int(rng.integers(0, 3))
        best = brute_force_fills(trace, slots, depth)
        assert best == furthest_fills(trace, slots, depth) == window_fills(trace, slots, depth, len(trace))
        assert best <= window_fills(trace, slots, depth, 2) <= lru_fills(trace, slots, depth)
        assert window_fills(trace, slots, depth, 0) == lru_fills(trace, slots, depth)
