"""Read zip archives of images in folders: the folder is the class. Uses numpy and Pillow.

There are two passes: the first reads every image's header to ensure that all rows have one shape,
the second decodes. One image is in memory at a time. Uploaded images are decoded where all uploads
are read: in a separate process with limits. An image of a request to a served model is decoded in
the process of the model, if it is a PNG or JPEG of exactly the size that the model takes.
"""

import struct
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from engine.datasets.reading import ReadOptions
from engine.datasets.unpacking import ArchiveMember, list_members, open_member, read_up_to
from engine.datasets.writer import (
    MAX_NAME_LENGTH,
    SPLIT_WORDS,
    SPLITS,
    DatasetWriter,
)
from glasshouse.errors import InvalidDataset
from glasshouse.spec.preprocessing import MAX_CLASSES

FORMATS = ("JPEG", "PNG", "BMP", "WEBP")
MAX_IMAGES = 200_000
MAX_DIRECTORY_BYTES = 64 << 20
MAX_FILE_BYTES = 64 << 20
MAX_PIXELS = 50_000_000
"""The limit for one image, as stored."""
_GREY = {"1", "L"}
_PLAIN = {*_GREY, "P", "RGB"}
_SEE_THROUGH = {"RGBA", "LA", "PA"}
_DAMAGE = (
    OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError,
    struct.error, zlib.error, Image.DecompressionBombError, Image.DecompressionBombWarning,
)  # fmt: skip
"""What Pillow's decoders raise for damaged files."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Entry:
    member: ArchiveMember
    split: str
    label: str


def read_files(source: Path, writer: DatasetWriter, options: ReadOptions) -> None:
    """Read images as ``image`` [channels, height, width], ``label`` and ``file``.

    Color is RGB; if all images are gray, there is one channel. Without ``resize``, all must have
    the same size.

    Raises:
        InvalidDataset: the archive, or an image by its name, cannot be read.
    """
    with source.open("rb") as file:
        limits = {"max_members": MAX_IMAGES, "max_directory_bytes": MAX_DIRECTORY_BYTES}
        entries = _sorted(list_members(file, max_bytes=options.max_bytes, **limits))
        shape = _survey(file, entries, options.resize)
        writer.expect(len(entries) * int(np.prod(shape)))
        classes = sorted({entry.label for entry in entries})
        places = {name: place for place, name in enumerate(classes)}
        used = {entry.split for entry in entries}
        columns = {
            split: (
                writer.numbers(split, "image", np.dtype(np.uint8), shape),
                writer.numbers(split, "label", np.dtype(np.int64)),
                writer.texts(split, "file"),
            )
            for split in SPLITS
            if split in used
        }
        writer.name_classes("label", classes)
        for entry in entries:
            image, label, name = columns[entry.split]
            image.append(_pixels(file, entry.member, shape))
            label.append(np.array([places[entry.label]], np.int64))
            name.append([entry.member.name.encode()])


# --- folders ---------------------------------------------------------------------------------


def _sorted(members: list[ArchiveMember]) -> list[_Entry]:
    entries = [_entry(member) for member in members]
    if not entries:
        raise InvalidDataset("the zip archive holds no images")
    splits = {entry.split for entry in entries}
    if "all" in splits and len(splits) > 1:
        odd = next(entry.member.name for entry in entries if entry.split == "all")
        raise InvalidDataset(
            f"{odd!r} stands in no folder of a split (train, validation, test), and others do; "
            "put all of them into one, or none"
        )
    if len({entry.label for entry in entries}) > MAX_CLASSES:
        raise InvalidDataset(f"more than {MAX_CLASSES:,} folders of classes; use fewer")
    return sorted(entries, key=lambda entry: (entry.split, entry.label, entry.member.name))


def _entry(member: ArchiveMember) -> _Entry:
    name = member.name
    *above, label, _ = ["", "", *name.replace("\\", "/").split("/")]
    found = [SPLIT_WORDS[part.lower()] for part in above if part.lower() in SPLIT_WORDS]
    if not label or (not found and label.lower() in SPLIT_WORDS):
        raise InvalidDataset(
            f"{name!r} stands in no folder of a class; an image's folder is its class, as in "
            "train/cat/1.jpg or cat/1.jpg"
        )
    if len(label) > MAX_NAME_LENGTH:
        raise InvalidDataset(
            f"the folder of {name[:80]!r} … has a name of more than {MAX_NAME_LENGTH} characters"
        )
    if member.size_bytes > MAX_FILE_BYTES:
        raise InvalidDataset(
            f"{name!r} has {member.size_bytes:,} bytes; {MAX_FILE_BYTES:,} is the limit for one "
            "image"
        )
    return _Entry(member, found[-1] if found else "all", label)


# --- images ----------------------------------------------------------------------------------


def _survey(
    file: BinaryIO, entries: list[_Entry], resize: tuple[int, int] | None
) -> tuple[int, int, int]:
    """Return the shape of all rows."""
    is_grey, size = True, resize
    for entry in entries:
        name = entry.member.name
        with _opened(file, entry.member) as image:
            _check_head(name, image)
            is_grey = is_grey and image.mode in _GREY
            mine = (image.height, image.width)
        if size is None:
            size = mine
        elif resize is None and mine != size:
            first = entries[0].member.name
            raise InvalidDataset(
                f"{name!r} has {mine[0]} x {mine[1]} pixels and {first!r} {size[0]} x {size[1]} "
                "(height x width); give them one size, or upload with resize"
            )
    height, width = size or (0, 0)
    return (1 if is_grey else 3, height, width)


def _check_head(name: str, image: ImageFile.ImageFile) -> None:
    """Refuse images that are too large, have several frames, or are not plain gray or color."""
    if image.width * image.height > MAX_PIXELS:
        raise InvalidDataset(
            f"{name!r} has {image.height:,} x {image.width:,} pixels; {MAX_PIXELS:,} is the limit"
        )
    if getattr(image, "n_frames", 1) > 1:
        raise InvalidDataset(f"{name!r} has several frames; save the one that counts")
    if image.mode not in _PLAIN | _SEE_THROUGH:
        raise InvalidDataset(
            f"{name!r} has pixels of the mode {image.mode}; save it as 8-bit RGB or greyscale"
        )


def _pixels(
    file: BinaryIO, member: ArchiveMember, shape: tuple[int, int, int]
) -> NDArray[np.uint8]:
    channels, height, width = shape
    with _opened(file, member) as image:
        found = _reading(member.name, lambda: _converted(member.name, image, channels))
    if found.size != (width, height):
        found = found.resize((width, height), Image.Resampling.BILINEAR)
    pixels: NDArray[Any] = np.asarray(found, np.uint8)
    return np.moveaxis(pixels.reshape(height, width, channels), 2, 0)


def _converted(name: str, image: ImageFile.ImageFile, channels: int) -> Image.Image:
    """Return the whole image, decoded."""
    image.load()
    if image.mode in _SEE_THROUGH or "transparency" in image.info:
        least = image.convert("RGBA").getchannel("A").getextrema()[0]
        if isinstance(least, tuple) or least < 255:
            raise InvalidDataset(
                f"{name!r} is transparent in places; lay it on a background, and save it as RGB"
            )
    return image.convert("L" if channels == 1 else "RGB")


def decode_image(
    data: bytes, size: tuple[int, int], channels: int, formats: Sequence[str] = FORMATS
) -> NDArray[np.uint8]:
    """Return the pixels of one image, [channels, height, width], as those of an archive.

    Args:
        data: the file.
        size: height and width that it must have. Others are not decoded.
        channels: 1 for gray, which color is converted to, or 3 for color.
        formats: those that are read.

    Raises:
        InvalidDataset: it has another size, or cannot be read.
    """
    height, width = size
    try:
        with Image.open(BytesIO(data), formats=[*formats]) as image:
            if (image.height, image.width) != size:
                raise InvalidDataset(
                    f"the image has {image.height:,} x {image.width:,} pixels, and {height} x "
                    f"{width} (height x width) are read: resize it"
                )
            _check_head(_IMAGE, image)
            found = _converted(_IMAGE, image, channels)
    except (*_DAMAGE, Warning) as error:
        raise _damaged(_IMAGE, error, formats) from error
    pixels: NDArray[Any] = np.asarray(found, np.uint8)
    return np.moveaxis(pixels.reshape(height, width, channels), 2, 0)


_IMAGE = "the image"


def _opened(file: BinaryIO, member: ArchiveMember) -> ImageFile.ImageFile:
    data = read_up_to(open_member(file, member), member.size_bytes + 1)
    return _reading(member.name, lambda: Image.open(BytesIO(data), formats=FORMATS))


def _reading(name: str, work: Callable[[], T]) -> T:
    """Run a function; report its errors as damage to the file ``name``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # decoders' warnings do not concern the user
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return work()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidDataset(f"{name!r} has more than {MAX_PIXELS:,} pixels, the limit") from error
    except _DAMAGE as error:
        raise _damaged(name, error, FORMATS) from error


def _damaged(name: str, error: Exception, formats: Sequence[str]) -> InvalidDataset:
    reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
    if isinstance(error, Image.UnidentifiedImageError):
        reason = f"it is none of {', '.join(formats)}"
    return InvalidDataset(
        f"{name!r} is no image that can be read: {reason}; leave it out, or save it again"
    )
