import gzip
import json
from typing import Any

import numpy as np
import pytest

from tests.unit.ingest.conftest import Ingesting

RNG = np.random.default_rng(0)
SIZES = {"train": 300, "validation": 5, "test": 4}  # train takes more than one block


def pairs(shape: tuple[int, ...]):
    images = {split: RNG.random((size, *shape)).round(3) for split, size in SIZES.items()}
    labels = {split: RNG.integers(0, 10, size) for split, size in SIZES.items()}
    return images, labels


def packed(value: Any, **how: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, **how)
    return gzip.compress(text.encode())


@pytest.mark.parametrize(
    ("stored", "read", "how"),
    [
        ((784,), (28, 28), {}),
        ((28, 28), (28, 28), {"separators": (",", ":")}),
        ((28, 28), (28, 28), {"indent": 1}),
        ((6,), (6,), {"indent": 1}),
    ],
)
@pytest.mark.long
def test_three_sets_become_three_splits(
    ingesting: Ingesting, stored: tuple[int, ...], read: tuple[int, ...], how: dict[str, Any]
):
    images, labels = pairs(stored)
    content = packed([[images[split].tolist(), labels[split].tolist()] for split in SIZES], **how)
    columns = ingesting("mnist.json.gz", content)
    assert columns.meta["splits"] == SIZES
    for split, size in SIZES.items():
        expected = images[split].astype(np.float32).reshape(size, *read)
        np.testing.assert_array_equal(columns.array(split, "image"), expected)
        np.testing.assert_array_equal(columns.array(split, "label"), labels[split])
    assert columns.array("train", "label").dtype == np.int64


def test_a_truncated_gzip_is_a_problem(ingesting: Ingesting):
    images, labels = pairs((20,))
    content = packed([[images[split].tolist(), labels[split].tolist()] for split in SIZES])
    for part in range(16):
        ingesting.problem("mnist.json.gz", content[: len(content) * part // 16])


GOOD = "[[[1,2]],[5]]"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"[{GOOD},{GOOD}]", "']' stands at byte"),
        (f"[{GOOD},{GOOD},{GOOD},{GOOD}]", "',' stands at byte"),
        (f"[{GOOD},{GOOD},{GOOD}] x", "more data follows"),
        (f"[{GOOD},{GOOD},{GOOD}", "the text ends at byte"),
        (f"[[[[1,2],[3,4]],[5]],{GOOD},{GOOD}]", "2 images but 1 labels"),
        (f"[[[[1,2],[3]],[5,6]],{GOOD},{GOOD}]", "images 0 to 1 of split 'train' are not alike"),
        (f"[[[],[]],{GOOD},{GOOD}]", "split 'train' has no images"),
        (f"[[[[]],[1]],{GOOD},{GOOD}]", "no pixels"),
        (f"[[[[1,2]],[5.5]],{GOOD},{GOOD}]", "label 0 of split 'train' is 5.5"),
        (f'[[[[1,2]],["5"]],{GOOD},{GOOD}]', "which is no number"),
        (f"[[[[1,true]],[5]],{GOOD},{GOOD}]", "which is no number"),
        (f"[[[[1,1e99]],[5]],{GOOD},{GOOD}]", "does not fit float32"),
        (f"[[[[1,,2]],[5]],{GOOD},{GOOD}]", "is not JSON"),
        (f"[[[[1,2]],[{2**63}]],{GOOD},{GOOD}]", "labels are integers"),
        ("[[[" + "[" * 100_000, "the text ends inside image 0"),
        ("[[[" + "[" * 3000 + "]" * 3000 + "],[1]]", "split 'train'"),
        ("[[[[" + "1," * 9_000_000, "takes more than 16,777,216 bytes"),
        ('{"a":1}', "'{' stands at byte 0"),
        ("", "the text ends at byte 0"),
    ],
)
def test_another_layout_is_a_problem_that_says_where(ingesting: Ingesting, text: str, says: str):
    assert says in ingesting.problem("mnist.json.gz", packed(text))


def test_a_file_that_is_not_compressed_says_so(ingesting: Ingesting):
    assert "not a gzip file" in ingesting.problem("mnist.json.gz", b"[[[1]]]")
