"""The loss as something to watch: its value, each sample's own, and which rows the samples are.

Shape suffixes: B = rows of a batch.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.losses import Losses
from engine.probes.watched.select import LOSS, LOSS_ROWS, LOSS_SAMPLES

LOSS_NAMES = (LOSS, LOSS_SAMPLES, LOSS_ROWS)


def unreduced(loss_fn: nn.Module) -> nn.Module | None:
    """The same loss without the last sum or mean, or None where it has no such form.

    It shares the tensors of the loss, such as the weights of classes.
    """
    if not isinstance(getattr(loss_fn, "reduction", None), str):
        return None
    twin = copy.copy(loss_fn)
    twin._forward_hooks = type(loss_fn._forward_hooks)()  # pyright: ignore[reportPrivateUsage]
    twin.reduction = "none"  # pyright: ignore[reportArgumentType]
    return twin


@torch.no_grad()
def sample_losses(loss_fn: Losses, inputs: Sequence[Any]) -> Tensor:
    """Each row's loss; one of several figures per row gives their mean.

    Raises:
        ValueError: a loss does not say what each row contributes, or not of the same rows.
    """
    each = [of_one(criterion, given) for criterion, given in loss_fn.split(inputs)]
    if len({item.shape for item in each}) > 1:
        raise ValueError("the losses are of different numbers of rows")
    return loss_fn.weighted(each)


@torch.no_grad()
def of_one(loss_fn: nn.Module, inputs: Sequence[Any]) -> Tensor:
    """Each row's loss by one of torch's.

    Raises:
        ValueError: it does not say what each row contributes.
    """
    twin = unreduced(loss_fn)
    if twin is None:
        raise ValueError(f"{type(loss_fn).__name__} has no reduction to leave out")
    detached = [item.detach() if isinstance(item, Tensor) else item for item in inputs]
    each: Tensor = twin(*detached)
    num_rows = next(item.shape[0] for item in detached if isinstance(item, Tensor) and item.dim())
    if each.dim() == 0 or each.shape[0] != num_rows:
        what = f"gives {list(each.shape)} without its reduction for {num_rows} rows"
        raise ValueError(f"{type(loss_fn).__name__} {what}")
    return each.reshape(num_rows, -1).mean(dim=1) if each.dim() > 1 else each
