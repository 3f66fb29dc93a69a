"""The built-in dataset ``digits``: 1,797 handwritten digits of 8 by 8 pixels from scikit-learn."""

import numpy as np

from engine.datasets.writer import DatasetWriter

NUM_ROWS = {"train": 1297, "validation": 250, "test": 250}


def write_digits(writer: DatasetWriter) -> None:
    """Write images in [0, 1] and labels, split by one fixed permutation."""
    # Imported here, because it takes a second that an uploaded file should not wait for.
    from sklearn.datasets import load_digits  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    pixels, classes = load_digits(return_X_y=True)
    images = (np.asarray(pixels) / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = np.asarray(classes, np.int64)
    # numpy guarantees that a RandomState's stream never changes; a Generator's may.
    order = np.random.RandomState(0).permutation(len(labels))
    start = 0
    for split, count in NUM_ROWS.items():
        rows = order[start : start + count]
        writer.numbers(split, "image", images.dtype, images.shape[1:]).append(images[rows])
        writer.numbers(split, "label", labels.dtype).append(labels[rows])
        start += count
