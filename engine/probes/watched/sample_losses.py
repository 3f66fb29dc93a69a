"""The loss as a watched tensor: its value, each sample's loss, and which rows the samples are.

Shape suffixes: B = rows of a batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.losses.losses import Losses
from engine.probes.watched.select import LOSS, LOSS_ROWS, LOSS_SAMPLES

LOSS_NAMES = (LOSS, LOSS_SAMPLES, LOSS_ROWS)


@torch.no_grad()
def sample_losses(loss_fn: Losses, inputs: Sequence[Any]) -> Tensor:
    """Return each row's loss; if a row has several values, their mean.

    Raises:
        ValueError: a loss has no value per row, or not for the same rows.
    """
    each = [term.of_rows(given) for term, given in loss_fn.split(inputs)]
    if len({item.shape for item in each}) > 1:
        raise ValueError("the losses are of different numbers of rows")
    return loss_fn.weighted(each)
