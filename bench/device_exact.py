"""Part (a) of `device_check.py`: the same bits on the CPU, resident and cached on the device, and 50 times over.

Plain functions, since a GPU machine may have no pytest.  Compared are all outputs, the gradients of per-sample
weights, and at the end all weights and optimizer states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from device_common import Setup

import cdlrm
from cdlrm.whole_tables import table_values

OPTIMIZERS = {
    "SGD": cdlrm.SGD(lr=0.1, weight_decay=0.01), "RowWiseAdagrad": cdlrm.RowWiseAdagrad(lr=0.1),
    "Adagrad": cdlrm.Adagrad(lr=0.1), "Adam": cdlrm.Adam(lr=0.01),
}  # fmt: skip
ROWS = (700, 3, 1500)


class Case(NamedTuple):
    optimizer: str
    dim: int
    pooling: str  # sum, mean; weighted: a sum with per-sample weights that learn
    batch: int
    steps: int
    same_row: int = 0  # so many more lookups of one row in every batch


def cases(full: bool) -> list[Case]:
    """Every optimizer with every pooling; small, odd, tiled and large dims; a row hit 65,536 times."""
    batch, steps = (512, 12) if full else (16, 4)
    dims = (1, 16, 33, 64, 128, 200, 1023, 4096) if full else (1, 16, 33)
    found = [
        Case(optimizer, dims[(i + 3 * j) % len(dims)], pooling, batch, steps)
        for i, optimizer in enumerate(OPTIMIZERS) for j, pooling in enumerate(("sum", "mean", "weighted"))
    ]  # fmt: skip
    found += [Case("RowWiseAdagrad", dim, "sum", batch, steps) for dim in dims]
    return [*found, Case("Adagrad", 64 if full else 8, "sum", batch, 3, same_row=65_536 if full else 600)]


def run(device: str, case: Case, *, cached: bool) -> list[np.ndarray]:
    """Train with `lookahead`; everything that must be equal, as arrays of bytes."""
    rng = np.random.default_rng(5)
    pooling = "mean" if case.pooling == "mean" else "sum"
    tables = [cdlrm.Table(f"t{t}", rows, case.dim, pooling=pooling) for t, rows in enumerate(ROWS)]
    batches = [_batch(rng, case) for _ in range(case.steps)]
    size = {"cache_rows": 3 * _most_distinct(batches)} if cached else {"cache_ratio": 1.0}
    module = cdlrm.EmbeddingBagCollection(
        tables, optimizer=OPTIMIZERS[case.optimizer], device=device, seed=3, **size
    )  # fmt: skip
    seen = []
    for batch in cdlrm.lookahead(module, batches):
        out = module(batch)
        grad = torch.from_numpy(rng.standard_normal(out.shape, np.float32))
        out.backward(grad.to(out.device))
        seen.append(out.detach().cpu().numpy())
        seen += [entry[2].grad.numpy() for entry in batch.values() if len(entry) > 2]
    module.flush()
    for group in module.groups:
        for table in group.tables:
            seen += table_values(group, table.name)
    module.close()
    return [np.ascontiguousarray(array).view(np.uint8).reshape(-1) for array in seen]


def _batch(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """Bags of 0 to 3 ids of skewed popularity."""
    out: dict[str, Any] = {}
    for t, rows in enumerate(ROWS):
        lengths = rng.integers(0, 4, case.batch)
        lengths[0] += case.same_row if t == 0 else 0
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        ids = np.minimum(rng.zipf(1.3, int(offsets[-1])) - 1, rows - 1)
        if t == 0:
            ids[: case.same_row] = 7
        entry: tuple[Any, ...] = (torch.from_numpy(ids), offsets)
        if case.pooling == "weighted":
            entry += (torch.from_numpy(rng.standard_normal(ids.size, np.float32)).requires_grad_(),)
        out[f"t{t}"] = entry
    return out


def _most_distinct(batches: list[dict[str, Any]]) -> int:
    return max(sum(int(entry[0].unique().numel()) for entry in batch.values()) for batch in batches)


def same(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return len(first) == len(second) and all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def check(setup: Setup) -> None:
    """Cached = resident = CPU for every case, then repeats; a case that differs is named in a line of its own."""
    tried, equal, wanted = 0, 0, cases(setup.full)
    for case in wanted:
        if setup.out_of_time("a", "bit-equal cases", 5, case=case._asdict()):
            break
        expected = run("cpu", case, cached=False)
        for cached in (False, True):
            tried += 1
            found = same(run(setup.device, case, cached=cached), expected)
            equal += found
            if not found:
                at = {"cached": cached, "case": case._asdict()}
                setup.report.figure("a", "different from the CPU", 1, "cases", most=0, **at)
    setup.report.figure("a", "bit-equal to the CPU", equal, "runs", least=2 * len(wanted), of=tried)
    case = Case("RowWiseAdagrad", 64 if setup.full else 8, "sum", 512 if setup.full else 16, 6)
    expected, repeats, agree = run("cpu", case, cached=False), 50 if setup.full else 5, 0
    done = 0
    while done < repeats and setup.box.left() > 1:
        agree += same(run(setup.device, case, cached=True), expected)
        done += 1
    setup.report.figure("a", "bit-equal repeats", agree, "runs", least=repeats, of=done)
