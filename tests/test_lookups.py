"""`flatten`: layout of the lookups, copies, and one-sentence refusals of bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cdlrm.errors import InputError
from cdlrm.lookups import FeatureSlot, Lookups, flatten

SLOTS = [
    FeatureSlot("a", "ads", 0, 10, 0, False),
    FeatureSlot("b", "users", 10, 20, 2, True),
    FeatureSlot("c", "users", 10, 20, 1, False),
]
INT64_MAX = 2**63 - 1


def good() -> dict:
    return {
        "a": (torch.tensor([9, 0, 3]), None),
        "b": (torch.tensor([19, 1, 1, 7], dtype=torch.int32), torch.tensor([0, 3, 3, 4])),
        "c": (np.array([5, 6, 0]), None, None),
    }


def test_layout_is_feature_major() -> None:
    call = flatten(SLOTS, 3, good())
    assert call.rows.tolist() == [9, 0, 3, 29, 11, 11, 17, 15, 16, 10] and call.rows.dtype == np.int64
    assert call.starts is not None and call.starts.tolist() == [0, 1, 2, 3, 6, 6, 7, 8, 9, 10]
    assert call.out_row.tolist() == [0, 3, 6, 2, 5, 8, 1, 4, 7] and call.out_row.dtype == np.int32
    assert call.lookup_row.tolist() == [0, 3, 6, 2, 2, 2, 8, 1, 4, 7] and call.lookup_row.dtype == np.int32
    assert call.mean.tolist() == [0, 1, 0] and (call.batch_size, call.width) == (3, 3)
    assert call.feature_starts.tolist() == [0, 3, 7, 10] and call.weights is None
    assert call.nbytes > 10 * 8


def test_one_lookup_a_bag_needs_no_starts() -> None:
    inputs = good()
    inputs["b"] = (torch.tensor([19, 1, 7]), torch.tensor([0, 1, 2, 3], dtype=torch.int32))
    call = flatten(SLOTS, 3, inputs)
    assert call.starts is None and call.lookup_row is call.out_row
    assert call.same_ids(flatten(SLOTS, 3, {**inputs, "b": torch.tensor([19, 1, 7])}))


def test_weights_default_to_one() -> None:
    inputs = good()
    weights = torch.tensor([0.5, 2.0, -1.0], requires_grad=True)
    inputs["c"] = (inputs["c"][0], None, weights)
    call = flatten(SLOTS, 3, inputs)
    assert call.weights is not None and call.weights.dtype == np.float32
    assert call.weights.tolist() == [1.0] * 7 + [0.5, 2.0, -1.0]


def test_the_users_memory_is_neither_kept_nor_changed() -> None:
    inputs = good()
    inputs["b"] = (*inputs["b"], torch.ones(4))
    before = {name: [None if x is None else np.asarray(x).copy() for x in entry] for name, entry in inputs.items()}
    call = flatten(SLOTS, 3, inputs)
    for name, entry in inputs.items():
        for kept, given in zip(before[name], entry, strict=True):
            assert (kept is None) == (given is None) and (kept is None or (kept == np.asarray(given)).all())
    rows, weights = call.rows.copy(), np.array(call.weights)
    for entry in inputs.values():
        for array in entry:
            if array is not None:
                array[:] = 2
    assert (call.rows == rows).all() and (np.array(call.weights) == weights).all()


def test_strided_read_only_and_int32_arrays() -> None:
    wide = torch.arange(8)
    frozen = np.array([5, 6, 0, 1])
    frozen.flags.writeable = False
    offsets = np.array([0, 9, 1, 9, 2, 9, 4, 9, 4], np.int32)[::2]
    inputs = {"a": wide[::2], "b": (frozen, offsets), "c": (np.array([3, 2, 1, 0], np.int32)[::-1],)}
    call = flatten(SLOTS, 3, inputs)
    assert call.rows.tolist() == [0, 2, 4, 6, 15, 16, 10, 11, 10, 11, 12, 13]
    assert not frozen.flags.writeable


@pytest.mark.parametrize("size", [0, 2])
def test_empty_features_and_batches(size: int) -> None:
    nothing, offsets = torch.empty(0, dtype=torch.int64), torch.zeros(size + 1, dtype=torch.int64)
    call = flatten(SLOTS, 3, {name: (nothing, offsets) for name in "abc"}, batch_size=size)
    assert call.rows.size == 0 and call.batch_size == size and call.out_row.size == 3 * size
    if size:
        assert call.starts is not None and (call.starts == 0).all()
    else:
        one_hot = flatten(SLOTS, 3, {name: nothing for name in "abc"})
        assert one_hot.batch_size == 0 and one_hot.starts is None and one_hot.same_ids(call)


def test_no_features() -> None:
    assert flatten([], 0, {}, batch_size=4).batch_size == 4


def test_same_ids_is_exact() -> None:
    call = flatten(SLOTS, 3, good())
    assert call.same_ids(flatten(SLOTS, 3, good()))
    for name, position in (("a", 2), ("b", 0), ("c", 0)):
        inputs = good()
        inputs[name][0][position] = 2 if inputs[name][0][position] != 2 else 3
        assert not call.same_ids(flatten(SLOTS, 3, inputs))
    inputs = good()
    inputs["b"] = (inputs["b"][0], torch.tensor([0, 2, 3, 4]))
    assert not call.same_ids(flatten(SLOTS, 3, inputs))


def check(call_inputs: dict, message: str, batch_size: int | None = None) -> None:
    with pytest.raises(InputError, match=message) as caught:
        flatten(SLOTS, 3, call_inputs, batch_size)
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    "value", [-1, 10, 11, -(2**31), 2**31 - 1, 2**31, 2**31 + 3, 2**32 + 3, 2**40, -(2**40), INT64_MAX, -(2**63)]
)
def test_ids_out_of_range(value: int, position: int, dtype: type) -> None:
    if not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        return
    values = np.array([1, 2, 3], dtype)
    values[position] = value
    message = rf"table 'ads', feature 'a': id {value} at position {position} is outside \[0, 10\); map"
    check({**good(), "a": values}, message)


def test_the_base_does_not_hide_a_bad_id() -> None:
    check({**good(), "c": torch.tensor([0, -10, 0])}, r"table 'users', feature 'c': id -10 at position 1 .*\[0, 20\)")
    check({**good(), "c": torch.tensor([0, INT64_MAX - 5, 0])}, "id 9223372036854775802 at position 1")


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 3, 3, 4], "offset 1 at position 0 must be 0; start"),
        ([-1, 3, 3, 4], "offset -1 at position 0 must be 0"),
        ([0, 3, 2, 4], "offset 2 at position 2 is below the one before it, 3; pass offsets that never decrease"),
        ([0, 3, 3, 3], "offset 3 at position 3 must be the number of ids, 4; end"),
        ([0, 3, 3, 5], "offset 5 at position 3 must be the number of ids, 4"),
        ([0, 9, 9, 4], "offset 9 at position 1 is beyond the number of ids, 4; pass offsets that are at most"),
        ([0, 2**40, 2**41, 4], f"offset {2**40} at position 1 is beyond the number of ids, 4"),
        ([0, INT64_MAX, INT64_MAX, INT64_MAX], f"offset {INT64_MAX} at position 1 is beyond the number of ids"),
        ([0, 3, 4], "3 offsets mean 2 samples but feature 'a' has 3; pass one bag per sample"),
        ([], "offsets has length 0, below the bound 1"),
    ],
)
def test_offsets(offsets: list[int], message: str) -> None:
    check({**good(), "b": (good()["b"][0], np.array(offsets, np.int64))}, "table 'users', feature 'b': " + message)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (torch.tensor([1.0, 2.0, 3.0]), "values has dtype float32; convert it to int64 or int32"),
        (torch.tensor([True, False, True]), "values has dtype bool"),
        (np.array([1, 2, 3], np.uint64), "values has dtype uint64"),
        (np.array([1, 2, 3], ">i8"), "values has dtype >i8"),
        (torch.tensor([1, 2, 3], dtype=torch.int16), "values has dtype int16"),
        (torch.tensor([[1, 2, 3]]), r"values has shape \(1, 3\), not 1 dimension"),
        (torch.tensor(1), r"values has shape \(\), not 1 dimension"),
        ([1, 2, 3, 4], r"the entry is a list, not \(values, offsets, weights\)"),
        ((), "the entry is a tuple"),
        (7, "the entry is a int"),
        (([1, 2, 3],), "values is a list; pass a 1-D torch tensor or NumPy array of int64 or int32"),
        (torch.tensor([1, 2, 3]).to_sparse(), "values is a tensor .* cannot be read on the CPU"),
        (torch.empty(3, dtype=torch.int64, device="meta"), "has shapes but no data"),
        (torch.ones(3, dtype=torch.bfloat16), "bfloat16"),
        ((torch.tensor([1, 2, 3]), torch.tensor([0.0, 1.0, 2.0, 3.0])), "offsets has dtype float32"),
        ((torch.tensor([1, 2, 3]), None, torch.ones(3, dtype=torch.float64)), "weights has dtype float64; convert"),
        ((torch.tensor([1, 2, 3]), None, torch.ones(2)), "weights has 2 items but values has 3; pass one weight"),
        ((torch.tensor([1, 2, 3]), None, torch.ones(3, 1)), r"weights has shape \(3, 1\)"),
        ((torch.tensor([1, 2, 3]), None, torch.tensor([1, float("nan"), 1])), "weight nan at position 1 is not finite"),
        ((torch.tensor([1, 2, 3]), None, torch.tensor([1, 1, -float("inf")])), "weight -inf at position 2"),
    ],
)
def test_wrong_kinds(entry, message: str) -> None:
    check({**good(), "a": entry}, "table 'ads', feature 'a': .*" + message)


def test_batch_sizes() -> None:
    check(
        {**good(), "c": torch.tensor([1, 2])}, "feature 'c': 2 ids and no offsets mean 2 samples but feature 'a' has 3"
    )
    check(good(), "feature 'a': 3 ids and no offsets mean 3 samples but the batch has 4; pass one id per sample", 4)


def test_a_missing_feature_names_those_present() -> None:
    inputs = good()
    del inputs["b"]
    check(inputs, "table 'users', feature 'b': the batch has no such feature; it has 'a', 'c'; add")


def test_lookups_is_a_plain_record() -> None:
    call = flatten(SLOTS, 3, good())
    assert isinstance(call, Lookups) and {"rows", "starts", "out_row", "lookup_row"} <= set(vars(call))
