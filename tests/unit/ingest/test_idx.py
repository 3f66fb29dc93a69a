import gzip
import io
import struct
import zipfile
from typing import Any

import numpy as np
import pytest

from tests.unit.ingest.conftest import Ingesting

CODES = {"u1": 8, "i1": 9, ">i2": 11, ">i4": 12, ">f4": 13, ">f8": 14}


def idx(values: Any, code: int | None = None) -> bytes:
    values = np.asarray(values)
    code = CODES[values.dtype.str.lstrip("|")] if code is None else code
    return (
        bytes([0, 0, code, values.ndim])
        + struct.pack(f">{values.ndim}I", *values.shape)
        + values.tobytes()
    )


def zipped(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


IMAGES = np.random.default_rng(0).integers(0, 256, (7, 28, 28), np.uint8)
LABELS = np.arange(7, dtype=np.uint8)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("name", ["idx", "idx.gz"])
def test_every_type_of_idx_becomes_native_numbers(ingesting: Ingesting, dtype: str, name: str):
    values = np.arange(24).reshape(4, 6).astype(dtype)
    content = idx(values)
    columns = ingesting(name, gzip.compress(content) if name == "idx.gz" else content)
    read = columns.array("all", "value")
    assert read.dtype.isnative
    np.testing.assert_array_equal(read, values)


def test_a_single_file_is_named_by_its_shape(ingesting: Ingesting):
    assert ingesting("idx", idx(IMAGES)).meta["columns"][0]["name"] == "image"
    assert ingesting("idx", idx(LABELS)).meta["columns"][0]["name"] == "label"
    assert ingesting("idx", idx(IMAGES[0])).meta["columns"][0]["name"] == "value"


@pytest.mark.parametrize("compress", [False, True])
def test_a_zip_of_the_four_files_of_mnist_becomes_train_and_test(
    ingesting: Ingesting, compress: bool
):
    files = {
        "mnist/t10k-labels-idx1-ubyte": idx(LABELS[:3]),
        "mnist/t10k-images.idx3-ubyte": idx(IMAGES[:3]),
        "mnist/train-labels-idx1-ubyte": idx(LABELS),
        "mnist/train-images-idx3-ubyte": idx(IMAGES),
        "__MACOSX/mnist/._train-images-idx3-ubyte": b"of no interest",
    }
    if compress:
        files = {f"{name}.gz": gzip.compress(content) for name, content in files.items()}
    columns = ingesting("idx.zip", zipped(files))
    assert columns.meta == {
        "columns": [
            {"name": "image", "dtype": "uint8", "shape": [28, 28], "file": "0.npy", "missing": 0},
            {"name": "label", "dtype": "uint8", "shape": [], "file": "1.npy", "missing": 0},
        ],
        "splits": {"train": 7, "test": 3},
    }
    np.testing.assert_array_equal(columns.array("train", "image"), IMAGES)
    np.testing.assert_array_equal(columns.array("test", "label"), LABELS[:3])


def test_a_pair_of_images_and_labels_is_enough(ingesting: Ingesting):
    content = zipped({"train-images": idx(IMAGES), "train-labels": idx(LABELS)})
    assert ingesting("idx.zip", content).meta["splits"] == {"train": 7}
    content = zipped({"images.idx": idx(IMAGES), "labels.idx": idx(LABELS)})
    assert ingesting("idx.zip", content).meta["splits"] == {"all": 7}


@pytest.mark.parametrize(
    ("members", "says"),
    [
        (
            {"train-images": idx(IMAGES), "train-labels": idx(LABELS[:6])},
            "'image' has 7, 'label' has 6",
        ),
        (
            {"train-images": idx(IMAGES), "train-labels": idx(LABELS), "test-images": idx(IMAGES)},
            "split 'test' has no column 'label'",
        ),
        ({"train-images": idx(IMAGES), "train-images-2": idx(IMAGES)}, "are both column 'image'"),
        ({"train-images": idx(IMAGES), "README": b"hello"}, "'README' begins with 68 65 6c 6c"),
        ({"train-images.gz": idx(IMAGES)}, "'train-images.gz' is not a gzip file"),
        (
            {"train-images": gzip.compress(idx(IMAGES), mtime=0)},
            "'train-images' is gzip-compressed",
        ),
        ({}, "holds no files"),
    ],
)
def test_files_that_do_not_fit_together_are_a_problem(
    ingesting: Ingesting, members: dict[str, bytes], says: str
):
    assert says in ingesting.problem("idx.zip", zipped(members))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x89PNG....", "begins with 89 50 4e 47"),
        (idx(LABELS, code=10), "begins with 00 00 0a 01"),
        (b"\0\0\x08", "begins with 00 00 08"),
        (b"\0\0\x08\x00", "declares 0 axes"),
        (b"\0\0\x08\xff" + b"\0\0\0\1" * 255, "declares 255 axes"),
        (b"\0\0\x08\x02\0\0", "ends inside its header"),
        (b"\0\0\x08\x02" + b"\0\0\0\0" * 2, "declares the shape [0, 0]"),
        (idx(IMAGES)[:-1], "[7, 28, 28] = 5,488 bytes, but 5,487 are there"),
        (idx(IMAGES) + b"x", "more data than the 5,488 bytes"),
        (b"\0\0\x0e\x04" + b"\xff" * 16, "larger than the limit"),
        (gzip.compress(idx(LABELS), mtime=0), "is gzip-compressed; use the format idx.gz"),
    ],
)
def test_a_wrong_file_is_a_problem_with_the_numbers(
    ingesting: Ingesting, content: bytes, says: str
):
    assert says in ingesting.problem("idx", content)


def test_a_truncated_gzip_is_a_problem(ingesting: Ingesting):
    content = gzip.compress(idx(IMAGES))
    for part in range(16):
        detail = ingesting.problem("idx.gz", content[: len(content) * part // 16])
        assert "cut short" in detail or "empty" in detail


def test_a_gzip_that_was_damaged_or_continues_is_a_problem(ingesting: Ingesting):
    content = bytearray(gzip.compress(idx(IMAGES)))
    content[-5] ^= 1  # in the checksum
    assert "damaged" in ingesting.problem("idx.gz", bytes(content))
    content[-5] ^= 1
    assert "damaged" in ingesting.problem("idx.gz", bytes(content) + b"rubbish")
    assert "not a gzip file" in ingesting.problem("idx.gz", idx(IMAGES))


def test_a_gzip_of_many_members_and_padding_is_one_file(ingesting: Ingesting):
    content = idx(IMAGES)
    parts = [gzip.compress(content[at : at + 2]) for at in range(0, len(content), 2)]
    columns = ingesting("idx.gz", b"".join(parts) + bytes(1000))
    np.testing.assert_array_equal(columns.array("all", "image"), IMAGES)
