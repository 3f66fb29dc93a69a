"""A file that ends in the middle, in each format: never fewer rows without a word."""

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from engine.datasets.formats import formats
from tests.unit.ingest.conftest import Ingesting

NUM = 40


def _written(write: Callable[[io.BytesIO], Any]) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def _zip(names: list[str], content: bytes) -> bytes:
    def write(buffer: io.BytesIO) -> None:
        with zipfile.ZipFile(buffer, "w") as archive:
            for name in names:
                archive.writestr(name, content)

    return _written(write)


ARRAY = np.arange(NUM * 6, dtype=np.float32).reshape(NUM, 6)
LABELS = b"\0\0\x08\x01" + NUM.to_bytes(4, "big") + bytes(NUM)
IMAGE = _written(lambda b: Image.new("RGB", (5, 4)).save(b, "PNG"))
WHOLE: dict[str, bytes] = {
    "csv": b"a,b\n" + b"1.25,22\n" * NUM,
    "tsv": b"a\tb\n" + b"1.25\t22\n" * NUM,
    "jsonl": b'{"a": 1.25, "b": [1, 2]}\n' * NUM,
    "parquet": _written(lambda b: pq.write_table(pa.table({"a": [*range(NUM)]}), b)),
    "npz": _written(lambda b: np.savez(b, a=ARRAY)),
    "npy": _written(lambda b: np.save(b, ARRAY)),
    "idx": LABELS,
    "idx.gz": gzip.compress(LABELS),
    "idx.zip": _zip(["train-labels-idx1-ubyte"], LABELS),
    "mnist.json.gz": gzip.compress(json.dumps([[[[0.0] * 784], [1]]] * 3).encode()),
    "images.zip": _zip(["hat/1.png", "shoe/2.png"], IMAGE),
}
SAID = {
    "csv": "has 1",
    "tsv": "has 1",
    "jsonl": "line",
    "parquet": "cannot be read as parquet",
    "npz": "not a zip archive",
    "npy": "are there",
    "idx": "are there",
    "idx.gz": "cut short",
    "idx.zip": "not a zip archive",
    "mnist.json.gz": "cut short",
    "images.zip": "not a zip archive",
}


def test_every_format_is_here():
    """A text may end anywhere: what is there is what it says."""
    assert {*WHOLE} == {*formats()} - {"text"}


@pytest.mark.parametrize("name", WHOLE)
def test_a_file_that_ends_in_the_middle_is_a_problem(ingesting: Ingesting, name: str):
    content = WHOLE[name]
    assert ingesting(name, content).meta["splits"]
    at = len(content) // 2
    if name in {"csv", "tsv"}:  # in the middle of a line, of which half is there
        at = content.index(b"1.25", at) + 2
    if name == "jsonl":
        at = content.index(b"[1", at) + 1
    assert SAID[name] in ingesting.problem(name, content[:at])
