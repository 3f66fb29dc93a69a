"""Draw captured tensors: feature maps and filters as a grid, matrices, vectors as a strip.

The color maps are perceptual. If a tensor has negative values: blue to red, symmetric around a
white zero. Otherwise: dark to light from min to max. NaN is magenta, Inf is green. Nothing is
interpolated: a value is a square, and values are skipped if there are too many.
"""

import io
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from api.rendering.tensors import Array, as_float64
from glasshouse.errors import InvalidRequest

MAX_TILES = 256
MAX_SIDE = 1024
"""Values in a row or column of the image."""
_SIDE = 512
"""Small images are enlarged to about this many pixels."""
_MAX_ZOOM = 32
_STRIP_ROWS = 2
_NAN = (255, 0, 255)
_INFINITE = (0, 200, 0)
_BETWEEN = (60, 60, 60)


class Picture(NamedTuple):
    """A PNG, and which part of the tensor it shows."""

    png: bytes
    low: float
    high: float
    shown: str


def draw(tensor: Array, *, has_batch: bool) -> Picture:
    """Draw a tensor. With a batch axis and more than two axes, draw the first example.

    Raises:
        InvalidRequest: It has no values, or more axes than an image can show.
    """
    if tensor.size == 0:
        raise InvalidRequest("A tensor without values has no picture.")
    note = ""
    if has_batch and tensor.ndim > 2:
        tensor, note = tensor[0], "example 0; "
    if tensor.ndim > 4:
        raise InvalidRequest(
            f"{tensor.ndim} axes cannot be drawn.", hint="Choose some with slice=, as in numpy."
        )
    tiles, description = _tiles(tensor)
    values = as_float64(tiles)
    finite = values[np.isfinite(values)]
    low, high = _range(finite)
    colors = _colored(values, low, high)
    pixels = _laid_out(colors, tensor.ndim)
    zoom = max(1, min(_MAX_ZOOM, _SIDE // max(pixels.shape[:2])))
    image = Image.fromarray(pixels)
    if zoom > 1:
        size = (pixels.shape[1] * zoom, pixels.shape[0] * zoom)
        image = image.resize(size, Image.Resampling.NEAREST)
    png = io.BytesIO()
    image.save(png, "png")
    return Picture(png.getvalue(), low, high, note + description)


def _tiles(tensor: Array) -> tuple[Array, str]:
    """Return the tensor as (rows, columns, height, width), limited in size, and a description."""
    if tensor.ndim <= 2:
        matrix = np.atleast_1d(tensor)
        matrix = matrix if matrix.ndim == 2 else matrix[np.newaxis]
        height, width = _stride(matrix.shape[0], 1), _stride(matrix.shape[1], 1)
        description = _every(height, width)
        return matrix[np.newaxis, np.newaxis, ::height, ::width], description
    if tensor.ndim == 3:
        shown = tensor[:MAX_TILES]
        columns = math.ceil(math.sqrt(len(shown)))
        rows = math.ceil(len(shown) / columns)
        description = f"{len(shown)} of {len(tensor)} tiles"
    else:
        columns = min(tensor.shape[1], MAX_TILES)
        rows = max(1, min(tensor.shape[0], MAX_TILES // columns))
        shown = tensor[:rows, :columns]
        description = f"{rows} of {tensor.shape[0]} rows, {columns} of {tensor.shape[1]} columns"
        if columns == 1:  # filters with one channel: arrange as a square, not as one column
            return _tiles(tensor[:, 0])
    height, width = _stride(tensor.shape[-2], rows), _stride(tensor.shape[-1], columns)
    shown = shown[..., ::height, ::width]
    description = f"{description}; {_every(height, width)}"
    if tensor.ndim == 3:
        return shown[np.newaxis], description
    return shown, description


def _stride(length: int, tiles: int) -> int:
    return math.ceil(length * tiles / MAX_SIDE)


def _every(height: int, width: int) -> str:
    if height == width == 1:
        return "every value"
    return f"one value in {height} down and in {width} across"


def _range(finite: NDArray[np.float64]) -> tuple[float, float]:
    if not finite.size:
        return 0.0, 0.0
    low, high = float(finite.min()), float(finite.max())
    if low < 0:
        high = max(-low, high)
        low = -high
    return low, high


def _colored(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint8]:
    """Return red, green and blue of each value."""
    from matplotlib import colormaps  # noqa: PLC0415 (slow to import, when asked)

    color_of: Any = colormaps["RdBu_r" if low < 0 else "viridis"]
    finite = np.isfinite(values)
    middle = 0.5 if low < 0 else 0.0
    span = high / 2 - low / 2  # for the largest doubles, the difference itself overflows
    scaled = np.full(values.shape, middle)
    if span > 0:
        scaled[finite] = (values[finite] / 2 - low / 2) / span
    colors: NDArray[np.uint8] = color_of(scaled, bytes=True)[..., :3].copy()
    colors[np.isnan(values)] = _NAN
    colors[np.isinf(values)] = _INFINITE
    return colors


def _laid_out(colors: NDArray[np.uint8], ndim: int) -> NDArray[np.uint8]:
    """Combine (rows, columns, height, width, 3) into one image, with lines between the tiles."""
    rows, columns, height, width, _ = colors.shape
    if ndim <= 2:
        whole = colors[0, 0]
        return np.repeat(whole, _STRIP_ROWS, axis=0) if len(whole) == 1 else whole
    tiles = colors.reshape(-1, height, width, 3)
    if rows == 1:  # a list of tiles: as square as possible
        columns = math.ceil(math.sqrt(len(tiles)))
        rows = math.ceil(len(tiles) / columns)
    whole = np.empty((rows * (height + 1) + 1, columns * (width + 1) + 1, 3), np.uint8)
    whole[:] = _BETWEEN
    for place, tile in enumerate(tiles):
        top = 1 + (place // columns) * (height + 1)
        left = 1 + (place % columns) * (width + 1)
        whole[top : top + height, left : left + width] = tile
    return whole
