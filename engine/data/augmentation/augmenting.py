"""Augment the rows of training batches at random, as their fields say.

The result for a row is a function of (seed, epoch, field, position in the list, row number) only.
It does not depend on its batch, on what created the batch, or on earlier random numbers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from engine.data.augmentation.geometry import (
    change,
    crop,
    flip_horizontally,
    flip_vertically,
    rotate,
)
from engine.data.augmentation.pixels import add_noise, erase, jitter
from engine.data.augmentation.random_numbers import RowRandom, key_of
from glasshouse.spec import DenseField, Field
from glasshouse.spec.augmentation import Augment

Change = Callable[[Tensor], Tensor]

APPLIED: dict[str, Callable[[Tensor, RowRandom, Any], Tensor]] = {
    "RandomHorizontalFlip": flip_horizontally,
    "RandomVerticalFlip": flip_vertically,
    "RandomCrop": crop,
    "RandomRotation": rotate,
    "RandomAffine": change,
    "ColorJitter": jitter,
    "RandomErasing": erase,
    "GaussianNoise": add_noise,
}
"""The function of each transform of the spec. It takes images, random numbers and arguments."""


def unchanged(field: Field) -> Field:
    """Return a field without augmentation, for rows that are not trained on."""
    if isinstance(field, DenseField) and field.augment:
        return field.model_copy(update={"augment": ()})
    return field


class Augmenting:
    """The augmentation of a job's fields."""

    def __init__(self, seed: int, wanted: Mapping[str, tuple[Augment, ...]]) -> None:
        self._seed = seed
        self._wanted = wanted

    @staticmethod
    def of(seed: int, fields: Mapping[str, Field]) -> "Augmenting | None":
        """Create the augmentation of a job's fields; None: no field has one."""
        wanted = {
            name: field.augment
            for name, field in fields.items()
            if isinstance(field, DenseField) and field.augment
        }
        return Augmenting(seed, wanted) if wanted else None

    def changes(self, rows_B: Tensor, epoch: int) -> dict[str, Change]:
        """Return the change of each augmented field's values for the given rows.

        ``rows_B``: the row numbers, in host memory. Values are float32 [B, channels, height,
        width], before they are normalized; so are the results.
        """
        return {name: partial(self._changed, name, rows_B, epoch) for name in self._wanted}

    def _changed(self, name: str, rows_B: Tensor, epoch: int, x_BCHW: Tensor) -> Tensor:
        for place, item in enumerate(self._wanted[name]):
            chance = RowRandom(key_of(self._seed, epoch, name, place), rows_B)
            x_BCHW = APPLIED[item.type](x_BCHW, chance, item.args)
        return x_BCHW
