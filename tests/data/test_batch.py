"""What `check_batch` refuses, in one sentence that names place, value, bound and remedy."""

from __future__ import annotations

import pytest
import torch

from cdlrm.data import Batch, Jagged, check_batch
from cdlrm.errors import InputError


def batch(**changes: object) -> Batch:
    parts: dict = {
        "dense": torch.zeros(3, 2),
        "labels": torch.tensor([0.0, 1.0, 0.0]),
        "sparse": {
            "a": Jagged(torch.tensor([0, 1, 2])),
            "b": Jagged(torch.tensor([5, 6]), torch.tensor([0, 2, 2, 2]), torch.ones(2)),
        },
    }
    return Batch(**{**parts, **changes})


def test_good() -> None:
    good = batch()
    check_batch(good, {"a": 3, "b": 7})
    assert good.size == 3
    assert good.nbytes == 3 * 2 * 4 + 3 * 4 + 3 * 8 + 2 * 8 + 4 * 8 + 2 * 4
    check_batch(Batch(torch.zeros(0, 2), torch.zeros(0), {"a": Jagged(torch.zeros(0, dtype=torch.int64))}))


NAN = float("nan")
BAD = {
    "dense nan": (batch(dense=torch.tensor([[0, 0], [0, NAN], [0, 0]])), r"dense feature 1 of sample 1 is nan"),
    "dense inf": (
        batch(dense=torch.tensor([[0, 0], [0, 0], [float("inf"), 0]])),
        r"dense feature 0 of sample 2 is inf",
    ),
    "dense dtype": (batch(dense=torch.zeros(3, 2, dtype=torch.float64)), r"float64 where torch.float32"),
    "dense shape": (batch(dense=torch.zeros(3)), r"shape \[3\]"),
    "dense rows": (batch(dense=torch.zeros(4, 2)), r"4 rows where the batch has 3"),
    "label": (batch(labels=torch.tensor([0, 2.0, 0])), r"label of sample 1 is 2.0"),
    "label nan": (batch(labels=torch.tensor([0, 0, NAN])), r"label of sample 2 is nan"),
    "id": (batch(sparse={"a": Jagged(torch.tensor([0, 1, 3]))}), r"'a' has id 3 at position 2, outside \[0, 3\)"),
    "negative id": (batch(sparse={"a": Jagged(torch.tensor([0, -1, 0]))}), r"id -1 at position 1"),
    "ids int32": (batch(sparse={"a": Jagged(torch.tensor([0, 1, 2], dtype=torch.int32))}), r"int32 where torch.int64"),
    "ids count": (batch(sparse={"a": Jagged(torch.tensor([0, 1]))}), r"2 values and no offsets for 3"),
    "offsets count": (batch(sparse={"a": Jagged(torch.tensor([0]), torch.tensor([0, 1]))}), r"2 offsets for 3"),
    "offsets start": (
        batch(sparse={"a": Jagged(torch.tensor([0]), torch.tensor([1, 1, 1, 1]))}),
        r"offset 0 .* is 1 where 0",
    ),
    "offsets end": (
        batch(sparse={"a": Jagged(torch.tensor([0]), torch.tensor([0, 1, 1, 9]))}),
        r"offset 3 .* is 9 where 1",
    ),
    "offsets fall": (
        batch(sparse={"a": Jagged(torch.tensor([0]), torch.tensor([0, 2, 1, 1]))}),
        r"offset 2 .* less than 2",
    ),
    "weights": (
        batch(sparse={"a": Jagged(torch.tensor([0, 1, 2]), None, torch.tensor([1, NAN, 1]))}),
        r"weight 1 of feature 'a' is nan",
    ),
    "weights count": (batch(sparse={"a": Jagged(torch.tensor([0, 1, 2]), None, torch.ones(2))}), r"2 weights for 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad(name: str) -> None:
    bad, message = BAD[name]
    with pytest.raises(InputError, match=message):
        check_batch(bad, {"a": 3, "b": 7})
