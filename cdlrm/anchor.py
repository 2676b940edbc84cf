"""The anchor: the one parameter of a module whose rows are none.

It makes autograd call the module's backward.  No gradient ever comes to it through autograd, so a loss or a hook that
takes it for the rows would silently leave them out; both are refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .errors import UsageError


def make_anchor() -> nn.Parameter:
    """float32 [].  A plain Parameter, since torch's optimizers take their slow way for a class of ours."""
    anchor = nn.Parameter(torch.zeros(()))
    anchor.register_hook(_refuse_gradient)
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        setattr(anchor, register, _refuse_hook)
    return anchor


def _refuse_gradient(grad: Tensor | None) -> None:
    """None is what our own backward gives."""
    if grad is not None:
        raise UsageError(
            'the loss goes through the parameter "anchor" of a cdlrm module (a penalty over model.parameters() does), '
            "but rows are not among the parameters, so it would leave them out; use weight_decay= of the table's "
            'optimizer instead, and leave parameters named "anchor" out of the loss (this backward pass may have '
            "updated rows already)."
        )


def _refuse_hook(hook: Any) -> NoReturn:
    raise UsageError(
        'a hook on the parameter "anchor" of a cdlrm module would never see a gradient, since those of rows are no '
        'tensors; leave parameters named "anchor" out, and to clip rows make the module with update="step" and use '
        "torch.nn.utils.clip_grad_norm_."
    )
