"""Erase rectangles, and add noise.

Shape suffixes: B = rows, C = channels, H = height, W = width, T = tries.
"""

import math

import torch
from torch import Tensor

from engine.data.augmentation.flips_and_crops import filling
from engine.data.augmentation.random_numbers import RowRandom, between
from glasshouse.spec.augmentation import ErasingArgs, NoiseArgs

TRIES = 10


def erase(x_BCHW: Tensor, chance: RowRandom, args: ErasingArgs) -> Tensor:
    """Erase a rectangle. Draws 23 numbers per row, and one per value if the values are random.

    In order: whether to erase (below ``p``), ten areas, ten ratios, and the position, from the top
    and from the left, of the first rectangle that fits.
    """
    height, width = x_BCHW.shape[2:]
    uniform = chance.uniform(1 + 2 * TRIES + 2)
    area_BT = between(args.scale, uniform[:, 1 : 1 + TRIES]) * (height * width)
    logs = math.log(args.ratio[0]), math.log(args.ratio[1])
    ratio_BT = between(logs, uniform[:, 1 + TRIES : 1 + 2 * TRIES]).exp()
    high_BT, wide_BT = (area_BT * ratio_BT).sqrt().round(), (area_BT / ratio_BT).sqrt().round()
    fits_BT = (high_BT < height) & (wide_BT < width)
    first_B1 = fits_BT.int().argmax(1, keepdim=True)
    high_B, wide_B = high_BT.gather(1, first_B1)[:, 0], wide_BT.gather(1, first_B1)[:, 0]
    top_B = (uniform[:, -2] * (height - high_B + 1)).floor()
    left_B = (uniform[:, -1] * (width - wide_B + 1)).floor()
    is_inside = _inside(top_B, high_B, height)[:, :, None] & _inside(left_B, wide_B, width)[:, None]
    is_erased_B = (uniform[:, 0] < args.p) & fits_BT.any(1)
    is_erased = (is_inside & is_erased_B[:, None, None])[:, None].to(x_BCHW.device)
    if args.value == "random":
        values = chance.normal(x_BCHW[0].numel(), x_BCHW.device).view(x_BCHW.shape)
    else:
        values = filling(args.value, x_BCHW)
    return torch.where(is_erased, values, x_BCHW)


def _inside(first_B: Tensor, count_B: Tensor, size: int) -> Tensor:
    """Return which positions of an axis are in a run: [B, size]."""
    places = torch.arange(size)
    return (places >= first_B[:, None]) & (places < (first_B + count_B)[:, None])


def add_noise(x_BCHW: Tensor, chance: RowRandom, args: NoiseArgs) -> Tensor:
    """Add Gaussian noise. Draws one number per value."""
    normal = chance.normal(x_BCHW[0].numel(), x_BCHW.device).view(x_BCHW.shape)
    noisy = x_BCHW + (normal * args.sigma + args.mean)
    return noisy.clamp(0, 1) if args.clip else noisy
