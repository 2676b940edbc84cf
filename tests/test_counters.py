"""What is counted, and what is said, when a loop ends early, a batch is refused, or gradients accumulate."""

from __future__ import annotations

import copy
import logging
import re
from collections import deque
from typing import Any

import pytest
import torch

import cdlrm


def batches(count: int, rows: int = 500, size: int = 60) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"a": torch.randint(rows, (size,), generator=generator)} for _ in range(count)]


def test_only_trained_batches_are_counted() -> None:
    ebc = cdlrm.EmbeddingBagCollection([cdlrm.Table("a", 500, 4)], optimizer=cdlrm.SGD(lr=0.1), cache_rows=120)
    data = batches(40)
    trained = distinct = 0
    for _ in range(4):
        for j, batch in enumerate(cdlrm.lookahead(ebc, data, horizon=8)):
            ebc(batch).sum().backward()
            trained += 1
            distinct += len(batch["a"].unique())
            if j == 6:
                break
    stats = ebc.stats()
    assert stats["steps"] == trained == 28
    assert stats["lookups"] == 28 * 60 and stats["distinct"] == distinct
    assert stats["hits"] + stats["fills"] == stats["distinct"]
    assert 0 < stats["min0_fills"] <= stats["fills"]
    of_table = ebc.table_stats()["a"]
    assert of_table["distinct"] == distinct and of_table["fills"] == stats["fills"]
    ebc.close()


def test_strict_names_the_cache_rows_that_do() -> None:
    tables = [cdlrm.Table("a", 1000, 4), cdlrm.Table("b", 100_000, 8)]
    batch = {"a": torch.arange(200), "b": torch.arange(200)}

    def module(rows: int) -> cdlrm.EmbeddingBagCollection:
        return cdlrm.EmbeddingBagCollection(tables, optimizer=cdlrm.SGD(lr=1.0), cache_rows=rows, strict=True)

    refused = module(50)
    with pytest.raises(cdlrm.CacheTooSmallError, match="tables 'a'") as error:
        refused(batch)
    refused.check()
    enough = re.search(r"cache_rows=(\d+)", str(error.value))
    assert enough is not None
    module(int(enough.group(1)))(batch)
    with pytest.raises(cdlrm.CacheTooSmallError):
        module(int(enough.group(1)) - 102)(batch)


def test_growth_is_said_at_first_and_by_quarters(caplog: pytest.LogCaptureFixture) -> None:
    ebc = cdlrm.EmbeddingBagCollection([cdlrm.Table("a", 5000, 4)], optimizer=cdlrm.SGD(lr=0.1), cache_rows=10)
    with caplog.at_level(logging.INFO, "cdlrm"):
        for size in range(11, 60):
            ebc({"a": torch.arange(size)}).sum().backward()
    assert ebc.stats()["grows"] == 49
    told = [record for record in caplog.records if "the cache grows" in record.message]
    assert 2 <= len(told) <= 9 and all(record.levelno == logging.INFO for record in told), "less than 1 MiB"
    ebc.close()


def test_growth_by_a_mebibyte_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    ebc = cdlrm.EmbeddingBagCollection([cdlrm.Table("a", 5000, 1024)], optimizer=cdlrm.SGD(lr=0.1), cache_rows=300)
    with caplog.at_level(logging.INFO, "cdlrm"):
        for size in (400, 556):
            ebc({"a": torch.arange(size)}).sum().backward()
    levels = [record.levelno for record in caplog.records if "the cache grows" in record.message]
    assert levels == [logging.INFO, logging.WARNING]
    ebc.close()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_accumulation_is_refused_in_the_second_round_whatever_the_optimizer_holds(
    k: int, caplog: pytest.LogCaptureFixture
) -> None:
    bag = cdlrm.EmbeddingBag(50, 4, mode="sum", optimizer=cdlrm.SGD(lr=0.1), cache_rows=40)
    head = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    with caplog.at_level(logging.WARNING, "cdlrm"):
        for i in range(12):
            loss, before = head(bag(torch.randint(50, (8, 3)))).sum(), bag.weight
            if k > 1 and i == k + 1:
                with pytest.raises(cdlrm.UsageError, match='update="step"'):
                    loss.backward()
                assert torch.equal(bag.weight, before)
                break
            loss.backward()
            if i % k == k - 1:
                optimizer.step()
                optimizer.zero_grad()
    told = [record for record in caplog.records if "gradients are accumulated" in record.message]
    assert len(told) == (1 if k > 1 else 0)  # in the first round


def loops_that_do_not_accumulate(bag: cdlrm.EmbeddingBag, head: torch.nn.Linear, kind: str) -> None:
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    for i in range(12):
        ids = torch.randint(50, (8, 3))
        if kind == "zero in place" and i:
            optimizer.zero_grad(set_to_none=False)
        if kind == "evaluation":
            with torch.no_grad():
                head(bag(ids))
        losses = [head(bag(ids)).sum() for _ in range(3 if kind == "several forwards" else 1)]
        if kind == "zero after forward":
            optimizer.zero_grad()
        if kind == "several losses":  # the rows of all forwards get one update, as the head does
            losses.append(head(bag(ids)).sum())
            for loss in losses:
                loss.backward()
        else:
            torch.stack(losses).sum().backward()
        if kind == "steps left out" and i % 3:
            optimizer.zero_grad()
            continue
        if kind in ("zero in place", "zero after forward") and i % 3:
            continue  # such as a GradScaler does
        if kind == "rows only" and i:  # beside another model, which has trained
            optimizer.zero_grad()
            head = torch.nn.Linear(4, 1)
            continue
        optimizer.step()
        if kind not in ("zero in place", "zero after forward", "rows only"):
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "kind",
    ["plain", "zero in place", "zero after forward", "evaluation", "several forwards", "several losses",
     "steps left out", "rows only"],
)  # fmt: skip
def test_loops_that_do_not_accumulate_are_not_refused(kind: str) -> None:
    bag = cdlrm.EmbeddingBag(50, 4, mode="sum", optimizer=cdlrm.SGD(lr=0.1), cache_rows=40)
    loops_that_do_not_accumulate(bag, torch.nn.Linear(4, 1), kind)
    bag.check()


def test_rows_alone_beside_another_model_whose_gradients_stay() -> None:
    other = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
    bag = cdlrm.EmbeddingBag(50, 4, mode="sum", optimizer=cdlrm.SGD(lr=0.1), cache_rows=40)
    other(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for _ in range(4):
        bag(torch.randint(50, (8, 3))).sum().backward()


def test_several_updates_a_step_may_be_asked_for() -> None:
    bag = cdlrm.EmbeddingBag(50, 4, mode="sum", optimizer=cdlrm.SGD(lr=0.1), cache_rows=40)
    bag.several_updates_a_step = True
    head = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    for i in range(8):
        head(bag(torch.randint(50, (8, 3)))).sum().backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert bag.updates_made() == 8


def test_copies_and_replacements_keep_hooks_and_attributes() -> None:
    calls: list[int] = []
    bag = cdlrm.EmbeddingBag(20, 4, optimizer=cdlrm.SGD(lr=0.1))
    bag.register_forward_hook(lambda *a: calls.append(1))
    bag.label = "mine"  # type: ignore[assignment]
    other = copy.deepcopy(bag)
    other(torch.tensor([[1, 2]]))
    assert calls == [1] and other.label == "mine"
    model = torch.nn.Sequential(torch.nn.Embedding(9, 3))
    model[0].register_forward_hook(lambda *a: calls.append(2))
    cdlrm.replace_embeddings(model, optimizer=cdlrm.SGD(lr=0.1))
    model(torch.arange(3))
    assert calls == [1, 2]


def test_from_pretrained_takes_torchs_positions() -> None:
    rows = torch.randn(4, 2)
    assert torch.equal(cdlrm.Embedding.from_pretrained(rows, False, 0).weight, rows)
    ours = cdlrm.EmbeddingBag.from_pretrained(rows, True, None, 2.0, False, "sum", False, True, 1)
    theirs = torch.nn.EmbeddingBag.from_pretrained(rows, True, None, 2.0, False, "sum", False, True, 1)
    ids, offsets = torch.tensor([0, 1, 3]), torch.tensor([0, 2, 3])
    assert torch.equal(ours(ids, offsets), theirs(ids, offsets))


def test_a_learning_rate_that_is_no_number_is_refused() -> None:
    ebc = cdlrm.EmbeddingBagCollection([cdlrm.Table("a", 9, 2)], optimizer=cdlrm.SGD(lr=0.1))
    ebc.optimizer.param_groups[0]["lr"] = float("nan")
    out = ebc({"a": torch.arange(3)})
    with pytest.raises(cdlrm.UsageError, match="learning rate"):
        out.sum().backward()
    with pytest.raises(cdlrm.ConfigError, match="float32"):
        cdlrm.SGD(lr=1e39)


def test_user_batches_are_checked_by_the_look_ahead() -> None:
    ebc = cdlrm.EmbeddingBagCollection([cdlrm.Table("a", 9, 2)], optimizer=cdlrm.SGD(lr=0.1))
    for dense in (float("nan"), float("-inf")):
        batch = cdlrm.Batch(torch.full((2, 3), dense), torch.ones(2), {"a": cdlrm.Jagged(torch.arange(2))})
        with pytest.raises(cdlrm.InputError, match="sample 0"):
            next(iter(cdlrm.lookahead(ebc, [batch])))
    ebc.close()


def test_horizon_auto_follows_the_cache() -> None:
    found = {}
    for rows in (60, 240, 500):
        ebc = cdlrm.EmbeddingBagCollection([cdlrm.Table("a", 501, 4)], optimizer=cdlrm.SGD(lr=0.1), cache_rows=rows)
        look = cdlrm.lookahead(ebc, batches(60), horizon="auto")
        for batch in look:
            ebc(batch).sum().backward()
        found[rows] = look.stats()["horizon"]
        assert ebc.stats()["horizon"] == found[rows]
        assert ebc.stats()["fills"] <= 1.02 * ebc.stats()["mind_fills"] + 2
        ebc.close()
    distinct = len(batches(1)[0]["a"].unique())
    assert found == {rows: -(-24 * rows // distinct) for rows in found}
    with pytest.raises(cdlrm.ConfigError, match="auto"):
        cdlrm.lookahead(torch.nn.Sequential(ebc), [], horizon="far")


def test_a_plan_is_pending_until_the_very_moment_it_is_executed() -> None:
    """Evaluation looks through pending plans: one that is executed and still pending would be undone."""
    ebc = cdlrm.EmbeddingBagCollection([cdlrm.Table("a", 500, 4)], optimizer=cdlrm.SGD(lr=0.1), cache_rows=120)
    group, seen = ebc.groups[0], []

    class Watched(deque):  # type: ignore[type-arg]
        def popleft(self) -> Any:
            seen.append(group.cache._busy)
            return super().popleft()

    group.pending = group.loans.pending = Watched()
    for batch in cdlrm.lookahead(ebc, batches(20)):
        ebc(batch).sum().backward()
    assert len(seen) == 20 and all(seen)
    ebc.close()
