"""Flip and crop: pixels move, and keep their values.

Shape suffixes: B = rows, C = channels, H = height, W = width.
"""

import torch
from torch import Tensor

from engine.data.augmentation.random_numbers import RowRandom
from glasshouse.spec.augmentation import CropArgs, Fill, FlipArgs


def flip_horizontally(x_BCHW: Tensor, chance: RowRandom, args: FlipArgs) -> Tensor:
    """Flip rows. Draws one number per row: below ``p`` it is flipped."""
    return _flipped(x_BCHW, 3, chance, args)


def flip_vertically(x_BCHW: Tensor, chance: RowRandom, args: FlipArgs) -> Tensor:
    """Flip rows. Draws one number per row: below ``p`` it is flipped."""
    return _flipped(x_BCHW, 2, chance, args)


def _flipped(x_BCHW: Tensor, axis: int, chance: RowRandom, args: FlipArgs) -> Tensor:
    is_flipped_B1 = chance.uniform(1) < args.p
    is_flipped = is_flipped_B1.to(x_BCHW.device)[:, :, None, None]
    return torch.where(is_flipped, x_BCHW.flip(axis), x_BCHW)


def crop(x_BCHW: Tensor, chance: RowRandom, args: CropArgs) -> Tensor:
    """Crop rows. Draws two numbers per row: the offset from the top and left of the padded image.

    Nothing is padded in memory: each pixel is read from its source.
    """
    num_channels, height, width = x_BCHW.shape[1:]
    left, top, right, bottom = sides(args)
    room = torch.tensor([top + bottom + 1, left + right + 1])
    first_B2 = (chance.uniform(2) * room).long() - torch.tensor([top, left])
    y_BH = _looked_up(first_B2[:, :1] + torch.arange(height), height, args.padding_mode)
    x_BW = _looked_up(first_B2[:, 1:] + torch.arange(width), width, args.padding_mode)
    places = y_BH.clamp(min=0)[:, :, None] * width + x_BW.clamp(min=0)[:, None, :]
    places = places.to(x_BCHW.device).flatten(1)[:, None, :].expand(-1, num_channels, -1)
    made = x_BCHW.flatten(2).gather(2, places).view(x_BCHW.shape)
    if args.padding_mode != "constant":
        return made
    is_outside = ((y_BH < 0)[:, :, None] | (x_BW < 0)[:, None, :])[:, None].to(x_BCHW.device)
    return torch.where(is_outside, filling(args.fill, x_BCHW), made)


def sides(args: CropArgs) -> tuple[int, int, int, int]:
    """Return the pixels of padding: left, top, right, bottom."""
    match args.padding:
        case int(number):
            return number, number, number, number
        case (x, y):
            return x, y, x, y
        case (left, top, right, bottom):
            return left, top, right, bottom


def _looked_up(places: Tensor, size: int, mode: str) -> Tensor:
    """Return the source of each position in the padded image; -1 for constant padding."""
    if mode == "edge":
        return places.clamp(0, size - 1)
    if mode == "constant":
        return places.where((places >= 0) & (places < size), -1)
    repeats = 1 if mode == "symmetric" else 0  # whether the edge pixel is repeated
    before = -places - repeats
    behind = 2 * (size - 1) - places + repeats
    return places.where(places >= 0, before).where(places < size, behind)


def filling(fill: Fill, x_BCHW: Tensor) -> Tensor:
    """Return the fill, one number or one per channel, in a shape that broadcasts to a batch."""
    values = fill if isinstance(fill, tuple) else (fill,)
    return torch.tensor(values, dtype=x_BCHW.dtype).to(x_BCHW.device).view(-1, 1, 1)
