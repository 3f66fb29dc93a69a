"""The built-in dataset ``digits``: 1,797 handwritten digits of 8 by 8 pixels from scikit-learn."""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from engine.datasets.writer import DatasetWriter

NUM_DIGITS = {"train": 1297, "validation": 250, "test": 250}


def write_digits(writer: DatasetWriter) -> None:
    """Write images in [0, 1] and labels, split by one fixed permutation."""
    with gzip.open(_file(), "rt") as lines:
        table = np.loadtxt(lines, delimiter=",")  # 64 pixels from 0 to 16, then the class
    images = (table[:, :-1] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = table[:, -1].astype(np.int64)
    # numpy guarantees that a RandomState's stream never changes; a Generator's may.
    order = np.random.RandomState(0).permutation(len(labels))
    start = 0
    for split, count in NUM_DIGITS.items():
        rows = order[start : start + count]
        writer.numbers(split, "image", images.dtype, images.shape[1:]).append(images[rows])
        writer.numbers(split, "label", labels.dtype).append(labels[rows])
        start += count


def _file() -> Path:
    """Find the file that ``sklearn.datasets.load_digits`` reads.

    scikit-learn itself is not imported: that takes two seconds, ten times as long as the rest.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("scikit-learn, which ships the digits, is not installed")
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
