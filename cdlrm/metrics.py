"""Metrics of click prediction, streaming and of bounded memory, as torchmetrics metrics.

- AUC: area under the receiver operating characteristic: the probability that a click gets a higher
  score than a non-click, ties counting half.
- log loss: mean binary cross-entropy, in nats.
- normalized entropy: log loss divided by the entropy of the base rate p (the share of clicks),
  `-(p ln p + (1-p) ln(1-p))`: 1 is what a constant prediction reaches, lower is better
  (He et al. 2014, "Practical lessons from predicting clicks on ads at Facebook", section 3).
- accuracy: share of samples whose probability is on the label's side of 0.5.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import BinaryAccuracy


class BinnedAUC(Metric):
    """AUC from two histograms of the logits: memory does not grow with the samples.

    131,072 bins over x / (1 + |x|), which takes any logit x and is finest around 0 (at x = -3 a bin
    is 0.00024 wide); only pairs of a click and a non-click inside one bin are counted half instead
    of exactly.
    """

    full_state_update = False
    higher_is_better = True
    BINS = 1 << 17

    clicks: Tensor
    others: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("clicks", "others"):
            self.add_state(name, torch.zeros(self.BINS, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """logits: float32 [B]; labels: float32 [B], a click is > 0.5."""
        logits = logits.double().clamp(-1e9, 1e9)
        squashed = logits / (1.0 + logits.abs())
        bins = ((squashed + 1.0) * (self.BINS / 2)).long().clamp_(0, self.BINS - 1)
        is_click = labels > 0.5
        self.clicks += torch.bincount(bins[is_click], minlength=self.BINS)
        self.others += torch.bincount(bins[~is_click], minlength=self.BINS)

    def compute(self) -> Tensor:
        """The AUC, or NaN when there are only clicks or only non-clicks."""
        clicks, others = self.clicks.double(), self.others.double()
        below = torch.cumsum(others, 0) - 0.5 * others
        return (clicks * below).sum() / (clicks.sum() * others.sum())


class ClickMetrics:
    """All four metrics of a stream of batches: `update` any number of times, then `compute`."""

    def __init__(self) -> None:
        self._auc = BinnedAUC()
        self._log_loss = MeanMetric().set_dtype(torch.float64)
        self._rate = MeanMetric().set_dtype(torch.float64)
        self._accuracy = BinaryAccuracy()
        self._samples = 0

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """logits: float32 [B]; labels: float32 [B] of 0 and 1.  An empty batch changes nothing."""
        if logits.numel() == 0:
            return
        logits, labels = logits.detach().cpu(), labels.detach().cpu()
        self._auc.update(logits, labels)
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double())
        self._log_loss.update(losses, weight=logits.numel())
        self._rate.update(labels.double().mean(), weight=labels.numel())
        self._accuracy.update(torch.sigmoid(logits), (labels > 0.5).long())
        self._samples += logits.numel()

    def compute(self) -> dict[str, float]:
        """auc, log_loss (nats), normalized_entropy, accuracy, click_rate, samples; NaN where undefined."""
        if self._samples == 0:
            names = ("auc", "log_loss", "normalized_entropy", "accuracy", "click_rate")
            return {**dict.fromkeys(names, math.nan), "samples": 0}
        loss, rate = float(self._log_loss.compute()), float(self._rate.compute())
        return {
            "auc": float(self._auc.compute()),
            "log_loss": loss,
            "normalized_entropy": normalized_entropy(loss, rate),
            "accuracy": float(self._accuracy.compute()),
            "click_rate": rate,
            "samples": self._samples,
        }


def normalized_entropy(log_loss: float, click_rate: float) -> float:
    """`log_loss / -(p ln p + (1-p) ln(1-p))` with p the click rate; NaN when p is 0 or 1."""
    if not 0.0 < click_rate < 1.0:
        return math.nan
    entropy = -(click_rate * math.log(click_rate) + (1.0 - click_rate) * math.log1p(-click_rate))
    return log_loss / entropy
