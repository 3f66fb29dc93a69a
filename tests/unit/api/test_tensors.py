import asyncio
import io
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from api.rendering import tensors
from api.rendering.tensors import TensorBody


def collect(body: TensorBody) -> bytes:
    async def run() -> bytes:
        return b"".join([part async for part in body.stream()])

    data = asyncio.run(run())
    assert len(data) == body.size_bytes
    return data


ANY = arrays.arrays(
    st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_, np.float16]),
    arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6),
)


@given(ANY)
def test_npy_and_safetensors_are_read_back_by_their_own_libraries(array: np.ndarray) -> None:
    assert np.array_equal(
        np.load(io.BytesIO(collect(tensors.npy(array)))), array, equal_nan=array.dtype.kind == "f"
    )
    data = collect(tensors.safetensors({"a": array, "b": array.T}, {"a": "1"}))
    back = safetensors.numpy.load(data)
    assert back["a"].tobytes() == array.tobytes()
    assert np.array_equal(back["b"], array.T, equal_nan=array.dtype.kind == "f")


def test_a_view_is_written_in_pieces_and_in_order() -> None:
    array = np.arange(3 * 700 * 700, dtype=np.float32).reshape(3, 700, 700)
    for view in (array[:, ::2, ::-1], array.T, array[1:, 5], array[..., 3]):
        assert np.array_equal(np.load(io.BytesIO(collect(tensors.npy(view)))), view)


def test_bfloat16_stays_in_safetensors_and_becomes_float32_in_npy(tmp_path: Path) -> None:
    array = np.array([[1.5, np.nan], [-np.inf, 3e38]], ml_dtypes.bfloat16)
    data = collect(tensors.safetensors({"tensor": array}, {}))
    (tmp_path / "x").write_bytes(data)
    opened = tensors.open_tensor(tmp_path / "x")
    assert opened.dtype == array.dtype
    assert opened.tobytes() == array.tobytes()
    back = np.load(io.BytesIO(collect(tensors.npy(opened))))
    assert back.dtype == np.float32
    assert np.array_equal(back, array.astype(np.float32), equal_nan=True)
    assert safetensors.deserialize(data)[0][1]["dtype"] == "BF16"


def test_figures_are_over_the_finite_values() -> None:
    array = np.array([[1.0, -3.0, 0.0], [np.nan, np.inf, -np.inf]], np.float32)
    found = tensors.figures(array)
    finite = np.array([1.0, -3.0, 0.0])
    assert found["mean"] == pytest.approx(finite.mean())
    assert found["std"] == pytest.approx(finite.std())
    assert (found["min"], found["max"], found["absmax"]) == (-3.0, 1.0, 3.0)
    assert (found["nan"], found["inf"], found["zeros"]) == (1, 2, 1 / 6)
    assert tensors.figures(np.zeros((0, 3)))["mean"] is None


def test_at_most_a_thousand_values_are_given() -> None:
    assert tensors.values_of(np.arange(6).reshape(2, 3)) == ([[0, 1, 2], [3, 4, 5]], True)
    values, complete = tensors.values_of(np.arange(5000).reshape(50, 100).T)
    assert (len(values), complete, values[1]) == (1000, False, 100)


def test_a_tensor_without_axes_or_elements_is_opened(tmp_path: Path) -> None:
    for array in (np.array(2.5, np.float32), np.zeros((0, 3), np.int64)):
        (tmp_path / "x").write_bytes(safetensors.numpy.save({"tensor": array}))
        opened = tensors.open_tensor(tmp_path / "x")
        assert (opened.shape, opened.dtype) == (array.shape, array.dtype)
        assert tensors.values_of(opened) == (array.tolist(), True)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"\xff" * 8, b"\x02" + bytes(7) + b"{}", b"\x02" + bytes(7) + b"[]"],
)
def test_a_damaged_file_is_reported_as_damaged(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(tensors.TensorDamaged):
        tensors.open_tensor(tmp_path / "x")


def test_a_truncated_file_is_reported_as_truncated(tmp_path: Path) -> None:
    data = safetensors.numpy.save({"tensor": np.arange(100)})
    (tmp_path / "x").write_bytes(data[:-8])
    with pytest.raises(tensors.TensorDamaged):
        tensors.open_tensor(tmp_path / "x")
