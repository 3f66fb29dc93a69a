"""Random changes of the images that a job trains on, in the words of torchvision's transforms.

Names, arguments and defaults are torchvision's; what would change the shape of an image is left
out. Values are those of the network: after ``scale``, before ``normalize``.
"""

from typing import Annotated, Literal, Self

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
    """Arguments of the two flips."""

    p: Probability = 0.5
    """The probability that a row is flipped."""


class RandomHorizontalFlip(Spec):
    """Left and right change places."""

    type: Literal["RandomHorizontalFlip"]
    args: FlipArgs = FlipArgs()


class RandomVerticalFlip(Spec):
    """Top and bottom change places."""

    type: Literal["RandomVerticalFlip"]
    args: FlipArgs = FlipArgs()


class CropArgs(Spec):
    """Arguments of a crop."""

    size: PositiveInt | tuple[PositiveInt, PositiveInt] | None = None
    """Left out: the image's own. Another one is refused: rows keep their shape."""
    padding: Pixels | tuple[Pixels, Pixels] | tuple[Pixels, Pixels, Pixels, Pixels]
    """Pixels around the image before it is cropped: on all sides; left/right and top/bottom; or
    left, top, right, bottom."""
    fill: Fill = 0.0
    """What a constant padding has: a number, or one for each channel."""
    padding_mode: Literal["constant", "edge", "reflect", "symmetric"] = "constant"
    """What the padding is: ``fill``, the last pixel, or a mirror without or with the last pixel."""


class RandomCrop(Spec):
    """The image is padded, and a part of its own size is cut out anywhere."""

    type: Literal["RandomCrop"]
    args: CropArgs


class RotationArgs(Spec):
    """Arguments of a rotation."""

    degrees: Factor | Ends
    """``d``: an angle from [-d, d], counter-clockwise; or [from, to]."""
    interpolation: Interpolation = "nearest"
    """A pixel is its nearest one of before, or the mean of the four around it by their nearness."""
    center: tuple[float, float] | None = None
    """x and y in pixels from the upper left corner; left out, the middle."""
    fill: Fill = 0.0
    """What is seen outside of the image: a number, or one for each channel."""

    @model_validator(mode="after")
    def _check_degrees(self) -> Self:
        _check_ends("degrees", self.degrees if isinstance(self.degrees, tuple) else None)
        return self


class RandomRotation(Spec):
    """The image is turned around its centre."""

    type: Literal["RandomRotation"]
    args: RotationArgs


class AffineArgs(Spec):
    """Arguments of an affine change."""

    degrees: Factor | Ends
    """``d``: an angle from [-d, d], clockwise; or [from, to]."""
    translate: tuple[Probability, Probability] | None = None
    """The most that the image is moved to the side, and up or down, as parts of its size."""
    scale: tuple[PositiveFloat, PositiveFloat] | None = None
    """It is scaled by a factor from [from, to]."""
    shear: Factor | Ends | tuple[float, float, float, float] | None = None
    """Degrees parallel to the x axis: from [-s, s], or [from, to]; with four also to the y axis."""
    interpolation: Interpolation = "nearest"
    """A pixel is its nearest one of before, or the mean of the four around it by their nearness."""
    fill: Fill = 0.0
    """What is seen outside of the image: a number, or one for each channel."""
    center: tuple[float, float] | None = None
    """x and y in pixels from the upper left corner; left out, the middle."""

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
    """The image is turned, moved, scaled and sheared."""

    type: Literal["RandomAffine"]
    args: AffineArgs


class JitterArgs(Spec):
    """Arguments of a jitter of colours."""

    brightness: Factor | tuple[Factor, Factor] = 0.0
    """``b``: a factor from [max(0, 1 - b), 1 + b]; or [from, to]. 1 changes nothing."""
    contrast: Factor | tuple[Factor, Factor] = 0.0
    """In the same way."""
    saturation: Factor | tuple[Factor, Factor] = 0.0
    """In the same way."""
    hue: Annotated[float, Constraint(ge=0, le=0.5)] | tuple[Shift, Shift] = 0.0
    """``h``: a shift from [-h, h]; or [from, to]. 0.5 is the opposite colour."""

    @model_validator(mode="after")
    def _check_all(self) -> Self:
        names = ("brightness", "contrast", "saturation", "hue")
        if not any(getattr(self, name) for name in names):
            given = next((name for name in names if name in self.model_fields_set), names[0])
            detail = "brightness, contrast, saturation and hue are all 0, which changes nothing"
            raise WrongAt(given, detail=f"{detail}: give at least one of them another value")
        for name in names:
            ends: float | Ends = getattr(self, name)
            _check_ends(name, ends if isinstance(ends, tuple) else None)
        return self


class ColorJitter(Spec):
    """Brightness, contrast, saturation and hue are changed, in an order drawn for each row.

    For values in [0, 1]; what leaves that range is cut off.
    """

    type: Literal["ColorJitter"]
    args: JitterArgs


class ErasingArgs(Spec):
    """Arguments of erasing."""

    p: Probability = 0.5
    """The probability that a rectangle of a row is erased."""
    scale: tuple[Probability, Probability] = (0.02, 0.33)
    """Its area, as a part of the image's."""
    ratio: tuple[PositiveFloat, PositiveFloat] = (0.3, 3.3)
    """Its height by its width."""
    value: Fill | Literal["random"] = 0.0
    """What it is filled with: a number, one for each channel, or ``random``: each of its values is
    drawn from the standard normal distribution."""

    @model_validator(mode="after")
    def _check_all_ends(self) -> Self:
        _check_ends("scale", self.scale)
        _check_ends("ratio", self.ratio)
        return self


class RandomErasing(Spec):
    """A rectangle is filled. One that does not fit in ten tries is left out."""

    type: Literal["RandomErasing"]
    args: ErasingArgs = ErasingArgs()


class NoiseArgs(Spec):
    """Arguments of noise."""

    mean: float = 0.0
    """Of the distribution."""
    sigma: Factor = 0.1
    """Its standard deviation."""
    clip: bool = True
    """What leaves [0, 1] is cut off."""


class GaussianNoise(Spec):
    """Each value gets a number added that is drawn from a normal distribution."""

    type: Literal["GaussianNoise"]
    args: NoiseArgs = NoiseArgs()


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
