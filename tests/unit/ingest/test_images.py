"""Zip archives of images in folders: what becomes of them, and what is refused by name."""

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.datasets import image_files as images
from glasshouse.errors import InvalidDataset
from tests.unit.ingest.conftest import Ingesting


def picture(
    seed: int, size: tuple[int, int] = (4, 6), mode: str = "RGB", form: str = "PNG"
) -> bytes:
    """A picture of noise, height x width."""
    depth = {"RGB": (3,), "L": (), "RGBA": (4,), "CMYK": (4,)}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, *depth)).astype(np.uint8)
    if mode == "RGBA":
        pixels[..., 3] = 255
    return encoded(Image.fromarray(pixels, mode), form)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def pixels_of(data: bytes, mode: str = "RGB") -> np.ndarray:
    image = np.asarray(Image.open(io.BytesIO(data)).convert(mode))
    return image.reshape(*image.shape[:2], -1).transpose(2, 0, 1)


def packed(files: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


FILES = {
    "train/hat/b.png": picture(1),
    "train/hat/a.jpg": picture(2, form="JPEG"),
    "train/dress/1.bmp": picture(3, form="BMP"),
    "val/hat/c.png": picture(4, mode="L"),
    "test/boot/d.webp": picture(5, form="WEBP"),
}


def test_folders_are_splits_and_classes(ingesting: Ingesting):
    for prefix in ("", "pictures/of/"):
        files = {prefix + name: data for name, data in FILES.items()}
        found = ingesting("images.zip", packed(files | {"__MACOSX/x": b"?", ".DS_Store": b"?"}))
        assert found.meta["splits"] == {"train": 3, "validation": 1, "test": 1}
        image, label, file = found.meta["columns"]
        assert (image["dtype"], image["shape"]) == ("uint8", [3, 4, 6])
        assert (label["dtype"], label["classes"]) == ("int64", ["boot", "dress", "hat"])
        assert file["dtype"] == "string"
        assert found.array("train", "label").tolist() == [1, 2, 2]
        names = found.texts("train", "file")
        assert names == [
            prefix + f"train/{name}" for name in ("dress/1.bmp", "hat/a.jpg", "hat/b.png")
        ]
        for split, name, row in (("train", "train/hat/b.png", 2), ("train", "train/hat/a.jpg", 1),
                                 ("validation", "val/hat/c.png", 0)):  # fmt: skip
            expected = pixels_of(FILES[name])
            np.testing.assert_array_equal(found.array(split, "image")[row], expected)


def test_grey_images_have_one_channel_and_no_split_is_all(ingesting: Ingesting):
    files = {f"{label}/{number}.png": picture(number, mode="L")
             for number, label in enumerate("abab")}  # fmt: skip
    found = ingesting("images.zip", packed(files))
    assert found.meta["splits"] == {"all": 4}
    assert found.meta["columns"][0]["shape"] == [1, 4, 6]
    np.testing.assert_array_equal(found.array("all", "image")[2], pixels_of(files["b/1.png"], "L"))


def test_resize_brings_all_images_to_one_height_and_width(ingesting: Ingesting):
    files = {
        "a/1.png": picture(1, (9, 7)),
        "a/2.png": picture(2, (20, 5)),
        "b/3.png": picture(3, (3, 8)),
    }
    found = ingesting("images.zip", packed(files), resize=(3, 8))
    assert found.meta["columns"][0]["shape"] == [3, 3, 8]
    for row, data in enumerate(files.values()):
        small = Image.open(io.BytesIO(data)).resize((8, 3), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(
            found.array("all", "image")[row], np.asarray(small).transpose(2, 0, 1)
        )
    with pytest.raises(InvalidDataset, match=r"'a/2.png' has 20 x 5 pixels and 'a/1.png' 9 x 7"):
        ingesting("images.zip", packed(files))


def test_an_opaque_alpha_channel_and_a_palette_are_colors(ingesting: Ingesting):
    palette = encoded(Image.open(io.BytesIO(picture(1))).convert("P"))
    files = {"a/1.png": picture(2, mode="RGBA"), "a/2.png": palette}
    found = ingesting("images.zip", packed(files))
    for row, data in enumerate(files.values()):
        np.testing.assert_array_equal(found.array("all", "image")[row], pixels_of(data))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes) -> bytes:
    head = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def see_through() -> bytes:
    image = Image.open(io.BytesIO(picture(1, mode="RGBA")))
    image.putpixel((0, 0), (1, 2, 3, 128))
    return encoded(image)


def frames() -> bytes:
    first, second = (Image.open(io.BytesIO(picture(seed))) for seed in (1, 2))
    return encoded(first, save_all=True, append_images=[second])


TRAPS: dict[str, tuple[bytes, str]] = {
    "half a png": (picture(1, (50, 50))[:3000], "no image that can be read"),
    "half a jpeg": (picture(1, (64, 64), form="JPEG")[:900], "no image that can be read"),
    "text": (b"hello", "it is none of JPEG, PNG, BMP, WEBP"),
    "gif": (encoded(Image.new("P", (4, 4)), "GIF"), "it is none of"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is none of"),
    "wide head": (png(60_000, 60_000, zlib.compress(bytes(100))), "pixels"),
    "wide and true": (png(9_000, 9_000, zlib.compress(bytes(9_000 * 27_001))), "9,000 x 9,000"),
    "broken chunk": (picture(1).replace(b"IDAT", b"IDAZ"), "no image that can be read"),
    "cmyk": (picture(1, mode="CMYK", form="JPEG"), "pixels of the mode CMYK"),
    "16 bits": (encoded(Image.fromarray(np.ones((4, 4), np.uint16))), "pixels of the mode I;16"),
    "transparent": (see_through(), "is transparent in places"),
    "frames": (frames(), "has several frames"),
    "empty": (b"", "no image that can be read"),
    "long comment": (
        picture(1)[:33]
        + chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(200 << 20)))
        + picture(1)[33:],
        "no image that can be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_an_image_that_is_a_trap_is_refused_by_its_name(ingesting: Ingesting, name: str):
    data, says = TRAPS[name]
    files = {"cat/good.png": picture(1), "cat/trap.png": data}
    detail = ingesting.problem("images.zip", packed(files), resize=(4, 6))
    assert "'cat/trap.png'" in detail
    assert says in detail


@pytest.mark.parametrize("name", ["wide and true", "long comment", "half a jpeg"])
@pytest.mark.long
def test_a_trap_ends_in_bounded_memory(ingesting: Ingesting, name: str):
    files = {"cat/good.png": picture(1), "cat/trap.png": TRAPS[name][0]}
    source = ingesting.file(packed(files))
    done = ingesting.process("images.zip", source, "--resize", "4x6")
    assert done["status"] == 0
    assert done["answer"]["ok"] is False
    assert done["peak_bytes"] < 256 << 20
    assert done["left"] == []


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"1.png": picture(1)}, "'1.png' stands in no folder of a class"),
        ({"train/1.png": picture(1)}, "'train/1.png' stands in no folder of a class"),
        ({"../cat/1.png": picture(1)}, "points outside it"),
        ({"/etc/cat/1.png": picture(1)}, "points outside it"),
        (
            {"train/cat/1.png": picture(1), "dog/2.png": picture(1)},
            "stands in no folder of a split",
        ),
        ({"cat/README.md": b"cats"}, "'cat/README.md' is no image"),
        ({}, "holds no images"),
    ],
)
def test_an_archive_that_is_laid_out_otherwise_is_refused(
    ingesting: Ingesting, files: dict[str, bytes], says: str
):
    assert says in ingesting.problem("images.zip", packed(files))


def test_a_stored_bomb_and_a_file_that_is_too_large_are_refused(ingesting: Ingesting, monkeypatch):
    monkeypatch.setattr(images, "MAX_FILE_BYTES", 1000)
    files = {"cat/large.bmp": picture(1, (60, 60), form="BMP")}
    assert "'cat/large.bmp' has 1" in ingesting.problem("images.zip", packed(files))
    assert "limit" in ingesting.problem(
        "images.zip", packed({"a/1.png": picture(1)}), max_out_bytes=50
    )


def test_images_may_be_more_than_other_archives_hold(ingesting: Ingesting):
    data = encoded(Image.new("L", (1, 1), 7))
    files = {f"{number % 3}/{number}.png": data for number in range(1500)}
    found = ingesting("images.zip", packed(files, zipfile.ZIP_STORED))
    assert found.meta["splits"] == {"all": 1500}
    assert found.array("all", "image").max() == found.array("all", "image").min() == 7


def test_resize_is_of_images_only(ingesting: Ingesting):
    assert "resize is for images.zip only" in ingesting.problem("csv", b"a\n1\n", resize=(2, 2))
