"""Optimizer specifications: what to do with a row's summed gradient, one formula each.

A specification is a value: it holds hyper-parameters only, so one may serve any number of
tables, and tables with equal specifications share a group.  The arithmetic (float32, no
contraction, every operation rounded once) is written once per device, in the driver, and once
more in NumPy in `tests/oracle.py`.

`g` is the sum of a row's gradients over the batch.  With weight decay, `g` becomes
`g + weight_decay * w` for the rows that the batch touches, and only for those (torch refuses
weight decay on sparse gradients).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import ConfigError

FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class Optimizer:
    """Base of the specifications.  `lr` is the initial learning rate."""

    lr: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self._require("lr", "weight_decay")

    def _require(self, *names: str) -> None:
        """Raise ConfigError unless these settings are float32 numbers, 0 or more."""
        for name in names:
            value, told = getattr(self, name), f"{self.name}({name}={getattr(self, name)!r}): {name} must"
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
                raise ConfigError(f"{told} be a finite number.")
            if abs(value) > FLOAT32_MAX:
                raise ConfigError(f"{told} fit float32, at most {FLOAT32_MAX:.4g}.")
            if value < 0:
                raise ConfigError(f"{told} be >= 0.")

    @property
    def name(self) -> str:
        return type(self).__name__

    def state_width(self, dim: int) -> int:
        """Number of float32 of optimizer state that one row of `dim` weights carries."""
        raise TypeError("use one of SGD, RowWiseAdagrad, Adagrad, Adam")

    def state_names(self, dim: int) -> dict[str, tuple[int, int]]:
        """Columns [start, stop) of a row's state by torch's name of that state."""
        return {}

    @property
    def one_state_a_row(self) -> bool:
        """Whether the state is one number a row (shape [rows] instead of [rows, dim])."""
        return False

    @property
    def initial_state(self) -> float:
        """Value of every state element of a row that was never trained."""
        return 0.0

    @property
    def counts_steps(self) -> bool:
        """Whether the formula uses a per-table step count."""
        return False


@dataclass(frozen=True)
class SGD(Optimizer):
    """`w = w - lr * g`.  (Robbins & Monro 1951; `torch.optim.SGD` without momentum.)"""

    def state_width(self, dim: int) -> int:
        return 0


@dataclass(frozen=True)
class RowWiseAdagrad(Optimizer):
    """One accumulator a row: `s = s + mean(g*g)`, `w = w - (lr / (sqrt(s) + eps)) * g`.

    (Duchi, Hazan & Singer 2011, with the row-wise accumulator of Mudigere et al. 2022,
    "Software-hardware co-design for fast and scalable training of DLRMs", section 4.1.)
    """

    eps: float = 1e-8
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("eps", "initial_accumulator_value")

    def state_width(self, dim: int) -> int:
        return 1

    def state_names(self, dim: int) -> dict[str, tuple[int, int]]:
        return {"sum": (0, 1)}

    @property
    def one_state_a_row(self) -> bool:
        return True

    @property
    def initial_state(self) -> float:
        return self.initial_accumulator_value


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """`s = s + g*g`, `w = w - (lr * g) / (sqrt(s) + eps)`.  (Duchi et al. 2011; `torch.optim.Adagrad`.)"""

    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("eps", "initial_accumulator_value")

    def state_width(self, dim: int) -> int:
        return dim

    def state_names(self, dim: int) -> dict[str, tuple[int, int]]:
        return {"sum": (0, dim)}

    @property
    def initial_state(self) -> float:
        return self.initial_accumulator_value


@dataclass(frozen=True)
class Adam(Optimizer):
    """Lazy Adam, as `torch.optim.SparseAdam` (Kingma & Ba 2015, section 2, on touched rows only).

    `m = m + (1-b1) * (g - m)`, `v = v + (1-b2) * (g*g - v)`,
    `w = w - (step_size * m) / (sqrt(v) + eps)`, `step_size = lr * (sqrt(1 - b2^t) / (1 - b1^t))`;
    `t` counts the steps of the row's *table* (also steps with empty bags only); `step_size` is
    computed in float64 and rounded once.  A row's state is `m` (dim values) then `v` (dim values).
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("eps")
        for beta in self.betas:
            if not 0.0 <= beta < 1.0:
                raise ConfigError(f"Adam(betas={self.betas!r}): each beta must be in [0, 1).")

    def state_width(self, dim: int) -> int:
        return 2 * dim

    def state_names(self, dim: int) -> dict[str, tuple[int, int]]:
        return {"exp_avg": (0, dim), "exp_avg_sq": (dim, 2 * dim)}

    @property
    def counts_steps(self) -> bool:
        return True

    def step_size(self, lr: float, step: int) -> float:
        """`lr * (sqrt(1 - b2^t) / (1 - b1^t))` in float64 for the `step`-th step (from 1)."""
        beta1, beta2 = self.betas
        return lr * (math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step))


def check_specification(what: str, value: object) -> None:
    """Raise ConfigError unless `value`, called `what`, is a specification."""
    if isinstance(value, Optimizer) and type(value) is not Optimizer:
        return
    shown = repr(value)
    if "\n" in shown:  # torch's optimizers are shown with all their settings
        shown = f"{type(value).__module__.split('.')[0]}'s {type(value).__name__}"
    raise ConfigError(
        f"{what} is {shown}: give a specification of cdlrm, such as cdlrm.SGD(lr=0.1) or "
        "cdlrm.RowWiseAdagrad(lr=0.01); rows are updated in the backward pass."
    )
