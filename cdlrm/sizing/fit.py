"""Non-negative least squares of relative errors: what each unit of work costs, from measured totals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .work import Counts

SWEEPS = 4000


def fit_costs(counts: Sequence[Counts], seconds: Sequence[float]) -> dict[str, float]:
    """Seconds of one unit of each name in `counts`, none negative, such that sum(count * cost) is near `seconds`.

    The squares of relative errors are least, so short steps count as much as long ones.
    """
    names = sorted({name for each in counts for name in each})
    if not names or not len(seconds):
        return dict.fromkeys(names, 0.0)
    rows = np.array([[each.get(name, 0.0) for name in names] for each in counts], np.float64)
    rows /= np.asarray(seconds, np.float64)[:, None]
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    rows /= scale
    gram, right = rows.T @ rows, rows.T @ np.ones(len(rows))
    x = np.zeros(len(names))
    for _ in range(SWEEPS):  # coordinate descent: the problem is convex and small
        for i in range(len(names)):
            if gram[i, i] > 0:
                x[i] = max(0.0, x[i] + (right[i] - gram[i] @ x) / gram[i, i])
    return dict(zip(names, (x / scale).tolist(), strict=True))


def cost(costs: dict[str, float], counts: Counts) -> float:
    """Seconds of `counts`."""
    return sum(count * costs[name] for name, count in counts.items())
