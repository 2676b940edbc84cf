"""The main claim on the emulated GPU: the bits of the oracle, whatever the order of the streams.

Every configuration makes two modules (resident, cached), each with a seed of its own: an order of the streams, zero
copy or staged rows, joined or separate records.  2,000 seeds in all; races, undeclared accesses and stale memory
are looked for in one configuration of four, the bits are compared in each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_exact
from emulated import use
from emulator.compile import compiler
from scenarios import random_inputs

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the emulated GPU cannot compile kernels")

GROUPS, EACH, BATCHES = 100, 10, 7


@pytest.mark.parametrize("number", range(GROUPS))
def test_any_order_of_the_streams(monkeypatch: Any, number: int) -> None:
    monkeypatch.setattr(test_exact, "BATCHES", BATCHES)
    emulated = use(monkeypatch, first=2 * EACH * number)
    for seed in range(EACH * number, EACH * (number + 1)):
        emulated.settings = {"check": seed % 4 == 0, "compare": 8}
        rng = np.random.default_rng([4, seed])
        setting = test_exact.random_setting(rng, seed)
        batches = [random_inputs(rng, setting.tables, setting.shape) for _ in range(BATCHES)]
        test_exact.run(setting, batches, rng, f"seed {seed}: {setting}")
    assert emulated.made == 2 * EACH


@pytest.mark.parametrize("seed", range(6))
def test_65536_equal_ids(monkeypatch: Any, seed: int) -> None:
    emulated = use(monkeypatch, first=seed)
    emulated.settings = {"check": seed == 0}
    test_exact.test_65536_equal_ids(seed)


@pytest.mark.parametrize("depth", range(5))
def test_the_smallest_cache_with_disjoint_batches(monkeypatch: Any, depth: int) -> None:
    use(monkeypatch, first=depth)
    test_exact.test_the_smallest_cache_with_disjoint_batches(depth)
