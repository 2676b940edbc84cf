"""Bad input to a module is refused in one sentence that names table or feature, position, value and bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scenarios import same_bits

import cdlrm
from cdlrm.errors import InputError, PipelineError

ROWS = 50


@pytest.fixture
def ebc() -> Iterator[Any]:
    """A module that has trained a little; every test ends with proof that nothing was harmed."""
    tables = [cdlrm.Table("items", ROWS, 4, features=["clicked", "bought"]), cdlrm.Table("users", ROWS, 4)]
    module = cdlrm.EmbeddingBagCollection(tables, optimizer=cdlrm.SGD(lr=0.1), cache_rows=20, device="cpu")
    module(good()).sum().backward()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    yield module
    module.check()
    for key, value in module.state_dict().items():
        same_bits(value, before[key], f"{key} after bad input")
    module(good()).sum().backward()
    module.check()
    assert not torch.equal(module.state_dict()["embedding_bags.items.weight"], before["embedding_bags.items.weight"])
    module.close()


def good() -> dict[str, Any]:
    ids = torch.tensor([1, 2, 3, 4, 5])
    offsets = torch.tensor([0, 2, 2, 5])
    return {"clicked": (ids, offsets), "bought": (ids + 7, offsets), "users": (ids, offsets)}


def refuse(ebc: Any, parts: Any, *needles: str, feature: str = "bought") -> str:
    """The call is refused, eagerly and through the look-ahead, and the message holds every needle."""
    batch = good() | {feature: parts}
    with pytest.raises(InputError) as caught:
        ebc(batch)
    message = str(caught.value)
    for needle in needles:
        assert needle in message, (needle, message)
    assert "\n" not in message and len(message) < 400
    with pytest.raises((InputError, PipelineError)) as ahead:
        for b in cdlrm.lookahead(ebc, [batch]):
            ebc(b)
    error = ahead.value if isinstance(ahead.value, InputError) else ahead.value.__cause__
    assert isinstance(error, InputError)
    for needle in needles:
        assert needle in str(error), (needle, str(error))
    return message


@pytest.mark.parametrize(
    "bad", [-1, -(2**31), -(2**63), ROWS, ROWS + 1, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**40, 2**63 - 1]
)
@pytest.mark.parametrize("position", [0, 3, 4])
def test_ids_out_of_range(ebc: Any, bad: int, position: int) -> None:
    ids = torch.tensor([1, 2, 3, 4, 5])
    ids[position] = bad
    refuse(ebc, (ids, torch.tensor([0, 2, 2, 5])), "bought", "items", str(position), str(bad), str(ROWS))


@pytest.mark.parametrize("bad", [-1, ROWS, 2**31 - 1, -(2**31)])
def test_int32_ids_out_of_range(ebc: Any, bad: int) -> None:
    ids = torch.tensor([1, 2, 3, 4, bad], dtype=torch.int32)
    refuse(ebc, (ids, torch.tensor([0, 2, 2, 5], dtype=torch.int32)), "bought", "4", str(bad), str(ROWS))


def test_bad_id_in_a_later_feature(ebc: Any) -> None:
    refuse(ebc, (torch.tensor([1, 2, 99]), torch.tensor([0, 2, 2, 3])), "users", "99", str(ROWS), feature="users")


def test_bad_one_hot_id(ebc: Any) -> None:
    batch = {f: torch.tensor([1, 2, 3]) for f in ("clicked", "bought", "users")}
    with pytest.raises(InputError, match="clicked.*1.*-7|-7"):
        ebc(batch | {"clicked": torch.tensor([1, -7, 3])})


@pytest.mark.parametrize(
    ("offsets", "needles"),
    [
        ([1, 2, 2, 5], ["1"]),  # does not start at 0
        ([-1, 2, 2, 5], ["-1"]),
        ([0, 3, 2, 5], ["2"]),  # decreases
        ([0, 2, 2, 6], ["6", "5"]),  # overruns
        ([0, 2, 2, 4], ["4", "5"]),  # lookups left over
        ([0, 2**40, 2, 5], []),
        ([0, 2, -(2**63), 5], []),
        ([0, 2, 2, 2**63 - 1], []),
        ([], []),
    ],
)
def test_bad_offsets(ebc: Any, offsets: list[int], needles: list[str]) -> None:
    ids = torch.tensor([1, 2, 3, 4, 5])
    refuse(ebc, (ids, torch.tensor(offsets, dtype=torch.int64)), "bought", "offsets", *needles)


def test_batch_sizes_differ(ebc: Any) -> None:
    refuse(ebc, (torch.tensor([1, 2]), torch.tensor([0, 1, 2])), "bought")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int16, torch.uint8])
def test_wrong_dtype_of_ids(ebc: Any, dtype: torch.dtype) -> None:
    refuse(ebc, (torch.tensor([1, 0, 1, 0, 1]).to(dtype), torch.tensor([0, 2, 2, 5])), "bought", str(dtype)[6:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_wrong_dtype_of_offsets(ebc: Any, dtype: torch.dtype) -> None:
    refuse(ebc, (torch.tensor([1, 0, 1, 0, 1]), torch.tensor([0, 2, 2, 5]).to(dtype)), "bought", str(dtype)[6:])


def test_wrong_shapes(ebc: Any) -> None:
    ids, offsets = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 2, 5])
    refuse(ebc, (ids[None], offsets), "bought")
    refuse(ebc, (ids, offsets[None]), "bought")
    refuse(ebc, (torch.tensor(3), offsets), "bought")
    refuse(ebc, (ids, offsets, torch.ones(4)), "bought", "4", "5")
    refuse(ebc, (ids, offsets, torch.ones(5, 1)), "bought")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [0, 3])
def test_non_finite_weights(ebc: Any, bad: float, position: int) -> None:
    weights = torch.ones(5)
    weights[position] = bad
    refuse(ebc, (torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 2, 5]), weights), "bought", str(position), str(bad))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_wrong_dtype_of_weights(ebc: Any, dtype: torch.dtype) -> None:
    parts = (torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2, 2, 5]), torch.ones(5).to(dtype))
    refuse(ebc, parts, "bought", str(dtype)[6:])


def test_wrong_device(ebc: Any) -> None:
    refuse(ebc, (torch.empty(5, dtype=torch.int64, device="meta"), torch.tensor([0, 2, 2, 5])), "bought", "meta")


def test_missing_feature(ebc: Any) -> None:
    batch = good()
    del batch["bought"]
    with pytest.raises(InputError, match="bought"):
        ebc(batch)


@pytest.mark.parametrize("thing", [None, 3, "ids", [1, 2], np.zeros(3), torch.zeros(3)])
def test_not_a_batch_at_all(ebc: Any, thing: Any) -> None:
    with pytest.raises((InputError, TypeError)):
        ebc(thing)


@pytest.mark.parametrize("parts", [None, (), "ids", [1, 2, 3], (torch.tensor([1]),) * 4, np.array([1])])
def test_not_a_feature_at_all(ebc: Any, parts: Any) -> None:
    with pytest.raises((InputError, TypeError)) as caught:
        ebc(good() | {"bought": parts})
    assert "bought" in str(caught.value)


def test_sparse_or_strided_ids(ebc: Any) -> None:
    """Views are fine; they are read as they are."""
    wide = torch.tensor([1, 99, 2, 99, 3, 99])
    with torch.no_grad():
        strided = {f: wide[::2] for f in ("clicked", "bought", "users")}
        plain = {f: torch.tensor([1, 2, 3]) for f in ("clicked", "bought", "users")}
        same_bits(ebc(strided), ebc(plain), "strided ids")


def test_no_grad_is_checked_too(ebc: Any) -> None:
    with torch.no_grad(), pytest.raises(InputError, match="bought"):
        ebc(good() | {"bought": torch.tensor([1, 2, ROWS])})
