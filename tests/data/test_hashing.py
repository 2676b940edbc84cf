"""Mapping of raw ids: known answers, range, independence of process and PYTHONHASHSEED."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from cdlrm.data import parse_table_rows
from cdlrm.data.hashing import MISSING_ID, hash_rows, mix64_array, permutation
from cdlrm.errors import ConfigError


def plain_mix64(x: int) -> int:
    """The same in Python's whole numbers."""
    mask = 2**64 - 1
    z = (x + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_known_answers() -> None:
    # The first output of SplitMix64 seeded with 0 is published as 0xE220A8397B1DCDAF, the second as 0x6E789E6AA1B965F4.
    words = mix64_array(np.array([0, 0x9E3779B97F4A7C15], np.uint64))
    assert [int(w) for w in words] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize("rows", [1, 2, 3, 1000, 2**20, 2**31 - 1, 2**40])
def test_rows_are_mix64_mod_rows(rows: int) -> None:
    ids = [0, 1, 2, 10, 2**31 - 1, 2**31, 2**40, 2**63 - 1, -1, -(2**63)]
    expected = [plain_mix64(i % 2**64) % rows for i in ids]
    assert hash_rows(np.array(ids, np.int64), rows).tolist() == expected


def test_same_in_another_process_with_another_hash_seed() -> None:
    code = (
        "import numpy as np; from cdlrm.data.hashing import *; "
        f"print(hash_rows(np.array([0, 7, 2**40, {MISSING_ID}]), 1000003).tolist(), permutation(9, 1, 2).tolist())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    here = f"{hash_rows(np.array([0, 7, 2**40, MISSING_ID]), 1000003).tolist()} {permutation(9, 1, 2).tolist()}"
    assert done.stdout.strip() == here


def test_permutation_is_one_and_depends_on_its_keys() -> None:
    one = permutation(1000, 3, 4)
    assert sorted(one.tolist()) == list(range(1000))
    assert one.tolist() != permutation(1000, 3, 5).tolist() != permutation(1000, 4, 4).tolist()
    assert permutation(0, 1).tolist() == [] and permutation(1, 1).tolist() == [0]


def test_table_rows() -> None:
    assert parse_table_rows("100", 3) == [100, 100, 100]
    assert parse_table_rows("1-2-3", 3) == [1, 2, 3]
    assert parse_table_rows([4, 5], 2) == [4, 5]
    for bad, why in (
        ("1-2", "3 categorical"),
        ("0", "outside"),
        ("x", "N or n1-n2"),
        ("-5", "N or"),
        (2**41, "outside"),
    ):
        with pytest.raises(ConfigError, match=why):
            parse_table_rows(bad, 3)
