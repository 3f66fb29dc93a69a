"""Change the values of pixels: colors, erased rectangles, and noise.

Shape suffixes: B = rows, C = channels, H = height, W = width, K = changes, T = tries.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from engine.data.augmentation.geometry import Ends, filling
from engine.data.augmentation.random_numbers import RowRandom, between
from glasshouse.spec.augmentation import ErasingArgs, JitterArgs, NoiseArgs

TRIES = 10
_GRAY = (0.2989, 0.587, 0.114)


def jitter(x_BCHW: Tensor, chance: RowRandom, args: JitterArgs) -> Tensor:
    """Jitter colors. Draws eight numbers per row: four factors, and four for their order."""
    uniform = chance.uniform(8)
    wanted = _wanted(args)
    order_BK = uniform[:, [4 + number for number, _, _ in wanted]].argsort(dim=1, stable=True)
    for turn in range(len(wanted)):
        for place, (number, change, ends) in enumerate(wanted):
            rows = (order_BK[:, turn] == place).nonzero()[:, 0]
            if not len(rows):
                continue
            factor = between(ends, uniform[rows, number]).float().to(x_BCHW.device)
            there = rows.to(x_BCHW.device)
            made = change(x_BCHW.index_select(0, there), factor[:, None, None, None])
            x_BCHW = x_BCHW.index_copy(0, there, made)
    return x_BCHW


def _wanted(args: JitterArgs) -> list[tuple[int, Callable[[Tensor, Tensor], Tensor], Ends]]:
    """Return the changes to apply, each with its index and the range of its factor."""
    factors = (args.brightness, args.contrast, args.saturation)
    ends = [item if isinstance(item, tuple) else (max(0.0, 1 - item), 1 + item) for item in factors]
    ends.append(args.hue if isinstance(args.hue, tuple) else (-args.hue, args.hue))
    changes = (brighten, contrast, saturate, turn_hue)
    nothing = (1.0, 1.0, 1.0, 0.0)
    return [
        (number, change, ends[number])
        for number, (change, same) in enumerate(zip(changes, nothing, strict=True))
        if ends[number] != (same, same)
    ]


def brighten(x_BCHW: Tensor, factor: Tensor) -> Tensor:
    """Blend with black; a factor above 1 moves away from it."""
    return (x_BCHW * factor).clamp(0, 1)


def contrast(x_BCHW: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean gray of the image; a factor above 1 moves away from it."""
    return _blended(x_BCHW, _mean(_gray(x_BCHW)), factor)


def saturate(x_BCHW: Tensor, factor: Tensor) -> Tensor:
    """Blend with the gray of each pixel; a factor above 1 moves away from it."""
    return _blended(x_BCHW, _gray(x_BCHW), factor)


def _blended(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    return (x * factor + other * (1 - factor)).clamp(0, 1)


def _gray(x_BCHW: Tensor) -> Tensor:
    """Return the gray image, [B, 1, H, W]."""
    if x_BCHW.shape[1] == 1:
        return x_BCHW
    red, green, blue = (
        channel * share for channel, share in zip(x_BCHW.split(1, dim=1), _GRAY, strict=True)
    )
    return red + green + blue


def _mean(x_B1HW: Tensor) -> Tensor:
    """Return means, [B, 1, 1, 1], by halves: torch's sum uses another order for a single row."""
    sums = x_B1HW.flatten(1)
    count = sums.shape[1]
    while (size := sums.shape[1]) > 1:
        half = size // 2
        rest = sums[:, 2 * half :]
        sums = torch.cat((sums[:, :half] + sums[:, half : 2 * half], rest), 1)
    return (sums / count)[:, :, None, None]


def turn_hue(x_BCHW: Tensor, shift: Tensor) -> Tensor:
    """Rotate the hue of each color by ``shift`` turns; gray, white and black stay."""
    most, least = x_BCHW.amax(1, keepdim=True), x_BCHW.amin(1, keepdim=True)
    width = most - least
    is_gray = width == 0
    red, green, blue = ((most - x_BCHW) / width.masked_fill(is_gray, 1)).split(1, dim=1)
    is_red, is_green = x_BCHW[:, :1] == most, x_BCHW[:, 1:2] == most
    sector = torch.where(
        is_red, blue - green, torch.where(is_green, 2 + red - blue, 4 + green - red)
    )
    hue = (torch.fmod(sector / 6 + 1, 1) + shift) % 1
    saturation = width / most.masked_fill(is_gray, 1)
    return torch.cat([_channel(hue, saturation, most, first) for first in (5, 3, 1)], 1)


def _channel(hue: Tensor, saturation: Tensor, value: Tensor, first: int) -> Tensor:
    """Return red (5), green (3) or blue (1) of a hue: full over a third of the circle."""
    at = (hue * 6 + first) % 6
    share = torch.minimum(at, 4 - at).clamp(0, 1)
    return (value * (1 - saturation * share)).clamp(0, 1)


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
