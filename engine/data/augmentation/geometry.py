"""Move the pixels of images: flip, crop, rotate, and apply affine changes.

Rotations and affine changes compute what torchvision does for one image at a time, for all rows at
once. No operation sums over rows (no matrix product), so a row has the same bits in every batch.

Shape suffixes: B = rows, C = channels, H = height, W = width.
"""

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from engine.data.augmentation.random_numbers import RowRandom, between
from glasshouse.spec.augmentation import AffineArgs, CropArgs, Fill, FlipArgs, RotationArgs

Ends = tuple[float, float]
Pair = tuple[Tensor, Tensor]


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


def rotate(x_BCHW: Tensor, chance: RowRandom, args: RotationArgs) -> Tensor:
    """Rotate each row. Draws one number per row: its angle."""
    angle_B = between(_ends(args.degrees), chance.uniform(1)[:, 0])
    none_B = torch.zeros_like(angle_B)
    matrix = _matrix(x_BCHW, args.center, -angle_B, (none_B, none_B), none_B + 1, (none_B, none_B))
    return _sampled(x_BCHW, matrix, args)


def change(x_BCHW: Tensor, chance: RowRandom, args: AffineArgs) -> Tensor:
    """Change each row. Draws six numbers per row: angle, shift right and down, scale, 2 shears."""
    uniform_6B = chance.uniform(6).T
    height, width = x_BCHW.shape[2:]
    x, y = args.translate or (0.0, 0.0)
    right = between((-x * width, x * width), uniform_6B[1]).round()
    down = between((-y * height, y * height), uniform_6B[2]).round()
    by_x, by_y = _shears(args.shear)
    matrix = _matrix(
        x_BCHW,
        args.center,
        between(_ends(args.degrees), uniform_6B[0]),
        (right, down),
        between(args.scale or (1.0, 1.0), uniform_6B[3]),
        (between(by_x, uniform_6B[4]), between(by_y, uniform_6B[5])),
    )
    return _sampled(x_BCHW, matrix, args)


def _ends(given: float | Ends) -> Ends:
    return given if isinstance(given, tuple) else (-given, given)


def _shears(given: float | tuple[float, ...] | None) -> tuple[Ends, Ends]:
    match given:
        case (x_from, x_to, y_from, y_to):
            return (x_from, x_to), (y_from, y_to)
        case (x_from, x_to):
            return (x_from, x_to), (0.0, 0.0)
        case float(most) | int(most):
            return (-most, most), (0.0, 0.0)
        case _:
            return (0.0, 0.0), (0.0, 0.0)


def _matrix(
    x_BCHW: Tensor,
    center: tuple[float, float] | None,
    angle_B: Tensor,
    way: Pair,
    scale_B: Tensor,
    shear: Pair,
) -> tuple[Tensor, ...]:
    """Return the map from pixel positions in the new image to the old one, both from the center.

    It is the inverse of moving from the rotation center to the origin, shearing by x and then by y,
    scaling, rotating, moving back and translating. Six numbers per row: a 2 x 3 matrix by rows.
    """
    height, width = x_BCHW.shape[2:]
    x, y = (0.0, 0.0) if center is None else (center[0] - width / 2, center[1] - height / 2)
    angle_B, shear_x, shear_y = (torch.deg2rad(item) for item in (angle_B, *shear))
    turned = angle_B - shear_y
    slope = shear_x.tan()
    a, c = turned.cos() / shear_y.cos(), turned.sin() / shear_y.cos()
    b, d = -a * slope - angle_B.sin(), angle_B.cos() - c * slope
    a, b, c, d = d / scale_B, -b / scale_B, -c / scale_B, a / scale_B
    back_x, back_y = -x - way[0], -y - way[1]
    return a, b, a * back_x + b * back_y + x, c, d, c * back_x + d * back_y + y


def _sampled(x_BCHW: Tensor, matrix: tuple[Tensor, ...], args: RotationArgs | AffineArgs) -> Tensor:
    """Return the new images. Outside of the old ones is the fill, blended in like torchvision."""
    mode, fill = args.interpolation, filling(args.fill, x_BCHW)
    grid = _grid(x_BCHW, matrix)
    if mode == "nearest" and not args.fill:  # grid_sample fills with 0 anyway
        return grid_sample(x_BCHW, grid, mode, align_corners=False)
    inside = x_BCHW.new_ones(len(x_BCHW), 1, *x_BCHW.shape[2:])
    both = grid_sample(torch.cat((x_BCHW, inside), 1), grid, mode, align_corners=False)
    made, share = both[:, :-1], both[:, -1:]
    if mode == "nearest":
        return torch.where(share < 0.5, fill, made)
    return made * share + (1 - share) * fill


def _grid(x_BCHW: Tensor, matrix: tuple[Tensor, ...]) -> Tensor:
    """Return the positions in the old images for `grid_sample`, float32 [B, H, W, 2]."""
    sizes = x_BCHW.shape[3], x_BCHW.shape[2]
    x_W, y_H = (
        torch.arange(size, device=x_BCHW.device, dtype=torch.float32) - (size - 1) / 2
        for size in sizes
    )
    axes: list[Tensor] = []
    for size, row in zip(sizes, (matrix[:3], matrix[3:]), strict=True):
        by_x, by_y, rest = ((item / (size / 2)).float().to(x_BCHW.device)[:, None] for item in row)
        axes.append((by_y * y_H + rest)[:, :, None] + (by_x * x_W)[:, None, :])
    return torch.stack(axes, dim=-1)
