import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from engine.datasets.readers.npz import place
from glasshouse.errors import InvalidDataset
from tests.unit.ingest.conftest import Ingesting

NUMBERS = ["u1", "i1", ">i2", "<i4", ">i8", "u8", "f2", ">f4", "<f8", "?"]


def npy(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(save: Callable[..., None] = np.savez, **arrays: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


def raw_npy(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_of_any_plain_dtype_and_order_is_read_exactly(
    ingesting: Ingesting, dtype: str, order: str
):
    values = np.arange(5 * 2 * 3).reshape(5, 2, 3).astype(dtype)
    columns = ingesting("npy", npy(np.asarray(values, order=order)))
    read = columns.array("all", "value")
    assert read.dtype.isnative
    assert read.dtype.name == columns.meta["columns"][0]["dtype"] == values.dtype.name
    np.testing.assert_array_equal(read, values)


def test_a_large_fortran_array_is_turned_block_by_block(ingesting: Ingesting):
    values = np.asfortranarray(np.random.default_rng(0).random((1_100_000, 2, 2)))
    np.testing.assert_array_equal(ingesting("npy", npy(values)).array("all", "value"), values)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_named_as_in_keras_become_splits(ingesting: Ingesting, save: Callable[..., None]):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (6, 4, 4), np.uint8),
        "y_train": rng.integers(0, 10, 6),
        "x_test": rng.integers(0, 256, (3, 4, 4), np.uint8),
        "y_test": rng.integers(0, 10, 3),
    }
    columns = ingesting("npz", npz(save, **arrays))
    assert columns.meta["splits"] == {"train": 6, "test": 3}
    for name, values in arrays.items():
        column, split = name.split("_")
        np.testing.assert_array_equal(columns.array(split, column), values)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x", ("all", "x")),
        ("x_train", ("train", "x")),
        ("train_x", ("train", "x")),
        ("X_Val", ("validation", "X")),
        ("valid_my_column", ("validation", "my_column")),
        ("my_column_validation", ("validation", "my_column")),
        ("test", ("test", "value")),
        ("testing", ("all", "testing")),
        ("contrast_x", ("all", "contrast_x")),
    ],
)
def test_the_name_of_an_array_says_its_split_and_column(name: str, expected: tuple[str, str]):
    assert place(name) == expected


def test_texts_of_fixed_width_become_a_string_column(ingesting: Ingesting):
    columns = ingesting(
        "npz", npz(u=np.array(["", "ä", "three"], ">U5"), s=np.array([b"a", "ö".encode(), b""]))
    )
    assert columns.texts("all", "u") == ["", "ä", "three"]
    assert columns.texts("all", "s") == ["a", "ö", ""]


def test_bytes_of_booleans_are_only_true_or_false(ingesting: Ingesting):
    header = "{'descr': '|b1', 'fortran_order': False, 'shape': (3,), }"
    read = ingesting("npy", raw_npy(header, b"\x00\x02\xff")).array("all", "value")
    assert read.view(np.uint8).tolist() == [0, 1, 1]


class Explodes:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.canary), "w"))


def test_pickled_objects_are_refused_and_never_run(ingesting: Ingesting, tmp_path: Path):
    canary = tmp_path / "canary"
    hostile = np.array([Explodes(canary)], dtype=object)
    assert "Python objects" in ingesting.problem("npy", npy(hostile))
    assert "Python objects" in ingesting.problem("npz", npz(x=hostile))
    only_pickle = npy(hostile)[128:]
    assert "does not begin like a .npy file" in ingesting.problem("npy", only_pickle)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (npy(np.zeros(3, complex)), "dtype complex128"),
        (npy(np.zeros(3, "M8[s]")), "dtype datetime64[s]"),
        (npy(np.zeros(3, [("a", "i4")])), "dtype [('a', '<i4')]"),
        (npy(np.zeros(3, np.longdouble)), "floats of at most 64 bits"),
        (npy(np.float64(3)), "shape []"),
        (npy(np.zeros((0, 3))), "shape [0, 3]"),
        (npy(np.zeros((3, 0))), "shape [3, 0]"),
        (npy(np.array([["a"]])), "one text per row"),
        (npy(np.array([b"\xff"])), "not valid Unicode in row 0"),
        (
            raw_npy(
                "{'descr': '<U1', 'fortran_order': False, 'shape': (2,), }",
                b"a\0\0\0" + b"\xff" * 4,
            ),
            "not valid Unicode in row 1",
        ),
        (npy(np.zeros(8))[:-1], "64 bytes, but 63 are there"),
        (npy(np.zeros(8)) + b"x", "more data than the 64 bytes"),
        (npy(np.zeros((1,) * 11)), "has 10 axes; 8 is the limit"),
        (raw_npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }"), "negative"),
        (raw_npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2**9,), }"), "header"),
        (raw_npy("{'descr': '<f8', 'shape': (1,), }"), "damaged header"),
        (raw_npy("(" * 9000), "damaged header"),
        (raw_npy(" " * 20_000), "damaged header"),
        (raw_npy("{'descr': '<U0', 'fortran_order': False, 'shape': (3,), }"), "texts"),
        (
            raw_npy(f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({10**15},), }}"),
            "larger than the limit",
        ),
        (raw_npy("{'descr': '<f8', 'fortran_order': True, 'shape': (3, 5), }"), "0 are there"),
    ],
)
def test_an_array_that_cannot_be_a_column_is_a_problem(
    ingesting: Ingesting, content: bytes, says: str
):
    assert says in ingesting.problem("npy", content)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (npz(x=np.zeros(3), y=np.zeros(4)), "'x' has 3, 'y' has 4"),
        (npz(x_train=np.zeros(3), x_test=np.zeros(3), y_test=np.zeros(3)), "no column 'y'"),
        (npz(x_train=np.zeros(3), names=np.zeros(3)), "array 'names' names no split"),
        (npz(x_val=np.zeros(3), x_valid=np.zeros(3)), "given twice"),
        (npz(x_train=np.zeros(3), x_test=np.zeros((3, 2))), "make them alike"),
        (npz(x_train=np.zeros(3), x_test=np.zeros(3, "f4")), "make them alike"),
        (npz(), "holds no arrays"),
        (npy(np.zeros(3)), "not a zip archive"),
        (npz(x=np.zeros(300))[:200], "not a zip archive"),
    ],
)
def test_arrays_that_do_not_fit_together_are_a_problem(
    ingesting: Ingesting, content: bytes, says: str
):
    assert says in ingesting.problem("npz", content)


@pytest.mark.long
def test_what_does_not_compress_like_data_is_refused_before_it_fills_the_disk(ingesting: Ingesting):
    bomb = npz(np.savez_compressed, x=np.zeros(100 << 20, np.uint8))
    assert len(bomb) < 1 << 20
    assert "more than 200 times its size" in ingesting.problem("npz", bomb)
    assert "the limit is 1,000,000" in ingesting.problem("npz", bomb, max_out_bytes=1_000_000)


def test_a_member_that_is_larger_than_it_declares_is_refused(ingesting: Ingesting):
    content = bytearray(npz(np.savez_compressed, x=np.zeros(1000)))
    size_at = content.index(b"PK\x01\x02") + 24  # in the archive's list of files
    content[size_at : size_at + 4] = struct.pack("<L", 500)
    assert "more bytes than the 500" in ingesting.problem("npz", bytes(content))


@settings(max_examples=40, deadline=None)
@given(hnp.arrays(st.sampled_from(NUMBERS), hnp.array_shapes(max_dims=4, max_side=4)))
def test_any_plain_array_survives(tmp_path_factory: pytest.TempPathFactory, values: NDArray[Any]):
    columns = Ingesting(tmp_path_factory.mktemp("any"))("npz", npz(v=values))
    np.testing.assert_array_equal(columns.array("all", "v"), values)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_archive_is_a_problem_or_right(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    values = np.arange(40)
    content = bytearray(npz(np.savez_compressed, x=values, y=values))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    ingesting = Ingesting(tmp_path_factory.mktemp("damaged"))
    try:
        columns = ingesting("npz", bytes(content), max_out_bytes=1 << 20)
    except InvalidDataset:
        return
    for column in columns.meta["columns"]:
        np.testing.assert_array_equal(columns.array("all", column["name"]), values)


def test_a_zip_with_something_else_in_it_is_no_npz(ingesting: Ingesting):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("notes.txt", "hello")
    assert "'notes.txt' in the npz file is not an array" in ingesting.problem(
        "npz", file.getvalue()
    )
