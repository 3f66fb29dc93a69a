"""Check from the shapes of images whether they can be augmented as asked. Uses no tensors."""

from collections.abc import Iterator, Mapping
from typing import Any

from engine.core.problems import Findings
from engine.data.augmentation.geometry import sides
from engine.network.shapes import FieldShape
from glasshouse.spec import DenseField, Field
from glasshouse.spec.augmentation import (
    ColorJitter,
    CropArgs,
    GaussianNoise,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomRotation,
)

_RANK = 3
_COLOURS = 3
_GREATEST_BYTE = 255


def check_augment(
    fields: Mapping[str, Field],
    shapes: Mapping[str, FieldShape],
    meta: Mapping[str, Any],
    findings: Findings,
) -> None:
    """Report augmentation that does not fit the shape of an image, or its values."""
    dtypes = {column["name"]: column["dtype"] for column in meta["columns"]}
    for name, field in fields.items():
        if not isinstance(field, DenseField) or not field.augment or name not in shapes:
            continue
        pointer = f"/data/fields/{name}/augment"
        shape = shapes[name].shape
        if len(shape) != _RANK:
            detail = f"field {name!r} has rows of shape {list(shape)}, and an image is"
            detail += " [channels, height, width]: give the field such a shape"
            findings.problem(pointer, detail, "shape")
            continue
        is_byte = all(dtypes.get(item) == "uint8" for item in field.source_columns or (name,))
        greatest = _GREATEST_BYTE * (field.scale or 0.0) if is_byte else 0.0
        for place, item in enumerate(field.augment):
            for key, detail in _problems(item, shape, greatest):
                findings.problem(f"{pointer}/{place}{key}", detail, "augment")


def _problems(item: Any, shape: tuple[int, ...], greatest: float) -> Iterator[tuple[str, str]]:
    """Yield the problems of one augmentation, each with its relative JSON pointer."""
    cuts = isinstance(item, ColorJitter) or (isinstance(item, GaussianNoise) and item.args.clip)
    if cuts and greatest > 1:
        yield "", f"{item.type} is for values in [0, 1], and scale gives {greatest:g}: leave it out"
    if isinstance(item, ColorJitter):
        yield from _of_colours(item, shape[0])
    if isinstance(item, RandomCrop):
        yield from _of_crop(item.args, shape)
    if isinstance(item, RandomErasing) and item.args.value != "random":
        yield from _of_fill("value", item.args.value, shape[0])
    if isinstance(item, RandomCrop | RandomRotation | RandomAffine):
        yield from _of_fill("fill", item.args.fill, shape[0])


def _of_colours(item: ColorJitter, channels: int) -> Iterator[tuple[str, str]]:
    if channels not in (1, _COLOURS):
        yield "", f"ColorJitter is for images of 1 or 3 channels, and these have {channels}"
    for key in ("saturation", "hue"):
        if channels == 1 and getattr(item.args, key):
            yield f"/args/{key}", f"an image of one channel has no {key}: leave it out"


def _of_crop(args: CropArgs, shape: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    own = shape[1:]
    size = (args.size, args.size) if isinstance(args.size, int) else args.size
    if size is not None and size != own:
        detail = f"rows keep their shape, and images have {own[0]} x {own[1]} pixels: leave it out"
        yield "/args/size", detail
    most = {"reflect": [side - 1 for side in own], "symmetric": [*own]}.get(args.padding_mode)
    left, top, right, bottom = sides(args)
    if most is not None and (max(top, bottom) > most[0] or max(left, right) > most[1]):
        detail = f"{args.padding_mode} has {most[0]} pixels above and below to give, and {most[1]}"
        yield "/args/padding", f"{detail} at the sides: take less"


def _of_fill(key: str, fill: Any, channels: int) -> Iterator[tuple[str, str]]:
    if isinstance(fill, tuple) and len(fill) not in (1, channels):  # pyright: ignore[reportUnknownArgumentType]
        detail = f"there are {len(fill)} values, and {channels} channels"  # pyright: ignore[reportUnknownArgumentType]
        yield f"/args/{key}", f"{detail}: give one, or one for each"
