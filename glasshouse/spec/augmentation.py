"""Random image transforms for training, with the names, arguments and defaults of torchvision.

Transforms that change the shape of an image are not supported. Pixel values are those after
``scale`` and before ``normalize``.
"""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field as Constraint
from pydantic import PositiveFloat, PositiveInt, model_validator

from glasshouse.spec.strict import Spec, WrongAt

Probability = Annotated[float, Constraint(ge=0, le=1)]
Pixels = Annotated[int, Constraint(ge=0, le=10_000)]
Factor = Annotated[float, Constraint(ge=0)]
Shift = Annotated[float, Constraint(ge=-0.5, le=0.5)]
Fill = float | Annotated[tuple[float, ...], Constraint(min_length=1, max_length=1000)]
Interpolation = Literal["nearest", "bilinear"]
Ends = tuple[float, float]


def _check_ends(name: str, ends: Ends | None) -> None:
    if ends is not None and ends[0] > ends[1]:
        detail = f"{name} is [from, to], and {ends[0]} is greater than {ends[1]}: swap the two"
        raise WrongAt(name, detail=detail)


class FlipArgs(Spec):
    """Arguments of a flip."""

    p: Probability = 0.5
    """Probability that a row is flipped."""


class RandomHorizontalFlip(Spec):
    """Flips images horizontally at random."""

    type: Literal["RandomHorizontalFlip"]
    """Selects this transform."""
    args: FlipArgs = FlipArgs()
    """Arguments of the flip."""


class RandomVerticalFlip(Spec):
    """Flips images vertically at random."""

    type: Literal["RandomVerticalFlip"]
    """Selects this transform."""
    args: FlipArgs = FlipArgs()
    """Arguments of the flip."""


class CropArgs(Spec):
    """Arguments of a crop."""

    size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = None
    """Height and width of the crop, in pixels. Must be the image's own size. Default: that size.
    Example: ``[28, 28]``."""
    padding: Pixels | tuple[Pixels, Pixels] | tuple[Pixels, Pixels, Pixels, Pixels]
    """Padding before the crop, in pixels: on all sides; left/right and top/bottom; or left, top,
    right, bottom. Example: ``4``."""
    fill: Fill = 0.0
    """Pixel value of ``constant`` padding: one number, or one per channel."""
    padding_mode: Literal["constant", "edge", "reflect", "symmetric"] = "constant"
    """``constant``: ``fill``. ``edge``: the last pixel. ``reflect``: mirrored without the last
    pixel. ``symmetric``: mirrored with the last pixel."""


class RandomCrop(Spec):
    """Pads the image and crops it to its original size at a random position."""

    type: Literal["RandomCrop"]
    """Selects this transform."""
    args: CropArgs
    """Arguments of the crop. Example: ``{"padding": 4}``."""


class RotationArgs(Spec):
    """Arguments of a rotation."""

    degrees: Factor | Ends
    """Range of the angle in degrees, counter-clockwise: ``d`` for [-d, d], or [from, to]. Example:
    ``10``."""
    interpolation: Interpolation = "nearest"
    """``nearest``: the nearest pixel. ``bilinear``: the weighted mean of the four nearest
    pixels."""
    center: tuple[float, float] | None = None
    """x and y of the center in pixels, from the upper left corner. Default: the center of the
    image. Example: ``[14, 14]``."""
    fill: Fill = 0.0
    """Pixel value outside of the rotated image: one number, or one per channel."""

    @model_validator(mode="after")
    def _check_degrees(self) -> Self:
        _check_ends("degrees", self.degrees if isinstance(self.degrees, tuple) else None)
        return self


class RandomRotation(Spec):
    """Rotates the image by a random angle."""

    type: Literal["RandomRotation"]
    """Selects this transform."""
    args: RotationArgs
    """Arguments of the rotation. Example: ``{"degrees": 10}``."""


class AffineArgs(Spec):
    """Arguments of an affine transform."""

    degrees: Factor | Ends
    """Range of the angle in degrees, clockwise: ``d`` for [-d, d], or [from, to]. Example:
    ``10``."""
    translate: tuple[Probability, Probability] | None = None
    """Maximum horizontal and vertical shift, as fractions of the image size. Default: no shift.
    Example: ``[0.1, 0.1]``."""
    scale: tuple[PositiveFloat, PositiveFloat] | None = None
    """Range [from, to] of the scale factor. Default: no scaling. Example: ``[0.9, 1.1]``."""
    shear: Factor | Ends | tuple[float, float, float, float] | None = None
    """Range of the shear angle in degrees, parallel to the x axis: ``s`` for [-s, s], or [from,
    to]. Four numbers also give the range parallel to the y axis. Default: no shear. Example:
    ``5``."""
    interpolation: Interpolation = "nearest"
    """``nearest``: the nearest pixel. ``bilinear``: the weighted mean of the four nearest
    pixels."""
    fill: Fill = 0.0
    """Pixel value outside of the transformed image: one number, or one per channel."""
    center: tuple[float, float] | None = None
    """x and y of the center in pixels, from the upper left corner. Default: the center of the
    image. Example: ``[14, 14]``."""

    @model_validator(mode="after")
    def _check_all_ends(self) -> Self:
        _check_ends("degrees", self.degrees if isinstance(self.degrees, tuple) else None)
        _check_ends("scale", self.scale)
        if isinstance(self.shear, tuple):
            _check_ends("shear", self.shear[:2])
            if len(self.shear) == 4:
                _check_ends("shear", self.shear[2:])
        return self


class RandomAffine(Spec):
    """Rotates, shifts, scales and shears the image at random."""

    type: Literal["RandomAffine"]
    """Selects this transform."""
    args: AffineArgs
    """Arguments of the transform. Example: ``{"degrees": 10, "translate": [0.1, 0.1]}``."""


class JitterArgs(Spec):
    """Arguments of a color jitter. At least one must not be 0."""

    brightness: Factor | tuple[Factor, Factor] = 0.0
    """Range of the brightness factor: ``b`` for [max(0, 1 - b), 1 + b], or [from, to]. A factor of
    1 changes nothing. Example: ``0.2``."""
    contrast: Factor | tuple[Factor, Factor] = 0.0
    """Range of the contrast factor, like ``brightness``. Example: ``0.2``."""
    saturation: Factor | tuple[Factor, Factor] = 0.0
    """Range of the saturation factor, like ``brightness``. Example: ``0.2``."""
    hue: Annotated[float, Constraint(ge=0, le=0.5)] | tuple[Shift, Shift] = 0.0
    """Range of the hue shift: ``h`` for [-h, h], or [from, to], each within [-0.5, 0.5]. A shift of
    0.5 gives the opposite color. Example: ``0.1``."""

    @model_validator(mode="after")
    def _check_all(self) -> Self:
        names = ("brightness", "contrast", "saturation", "hue")
        if not any(getattr(self, name) for name in names):
            given = next((name for name in names if name in self.model_fields_set), names[0])
            detail = "brightness, contrast, saturation and hue are all 0, which has no effect"
            raise WrongAt(given, detail=f"{detail}: set at least one of them to another value")
        for name in names:
            ends: float | Ends = getattr(self, name)
            _check_ends(name, ends if isinstance(ends, tuple) else None)
        return self


class ColorJitter(Spec):
    """Changes brightness, contrast, saturation and hue, in a random order for each row.

    Pixel values must be in [0, 1]; results are clipped to this range.
    """

    type: Literal["ColorJitter"]
    """Selects this transform."""
    args: JitterArgs
    """Arguments of the color jitter. Example: ``{"brightness": 0.2}``."""


class ErasingArgs(Spec):
    """Arguments of random erasing."""

    p: Probability = 0.5
    """Probability that a rectangle of a row is erased."""
    scale: tuple[Probability, Probability] = (0.02, 0.33)
    """Range [from, to] of the rectangle's area, as a fraction of the image's area."""
    ratio: tuple[PositiveFloat, PositiveFloat] = (0.3, 3.3)
    """Range [from, to] of the rectangle's height divided by its width."""
    value: Fill | Literal["random"] = 0.0
    """Pixel value of the rectangle: one number, one per channel, or ``random`` for values from the
    standard normal distribution."""

    @model_validator(mode="after")
    def _check_all_ends(self) -> Self:
        _check_ends("scale", self.scale)
        _check_ends("ratio", self.ratio)
        return self


class RandomErasing(Spec):
    """Fills a random rectangle. If no rectangle fits in ten tries, the row is unchanged."""

    type: Literal["RandomErasing"]
    """Selects this transform."""
    args: ErasingArgs = ErasingArgs()
    """Arguments of the erasing."""


class NoiseArgs(Spec):
    """Arguments of the noise."""

    mean: float = 0.0
    """Mean of the normal distribution."""
    sigma: Factor = 0.1
    """Standard deviation of the normal distribution."""
    clip: bool = True
    """Whether to clip the results to [0, 1]."""


class GaussianNoise(Spec):
    """Adds a random number from a normal distribution to each value."""

    type: Literal["GaussianNoise"]
    """Selects this transform."""
    args: NoiseArgs = NoiseArgs()
    """Arguments of the noise. Example: ``{"sigma": 0.05}``."""


Augment = Annotated[
    RandomHorizontalFlip
    | RandomVerticalFlip
    | RandomCrop
    | RandomRotation
    | RandomAffine
    | ColorJitter
    | RandomErasing
    | GaussianNoise,
    Constraint(discriminator="type"),
]
MODELS: tuple[type[Spec], ...] = tuple(
    dict.fromkeys(
        model
        for transform in get_args(get_args(Augment)[0])
        for model in (transform, transform.model_fields["args"].annotation)
    )
)
"""The transforms of `Augment`, each followed by its arguments."""
