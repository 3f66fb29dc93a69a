import threading
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from tests.unit.engine.processes import fork_server_in
from tests.unit.engine.runs import write_table
from worker.processes.fork_server import ForkServerClient


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of scikit-learn's digits as a dataset directory."""
    pixels, labels = load_digits(return_X_y=True)
    images = np.round(pixels[:397] * 255 / 16).astype(np.uint8).reshape(-1, 1, 8, 8)
    columns = {"image": images, "label": labels[:397].astype(np.int64)}
    splits = {"train": slice(0, 300), "test": slice(300, None)}
    return write_table(tmp_path_factory.mktemp("digits"), columns, splits)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ForkServerClient]:
    """One fork server for all tests: to start one takes three seconds of CPU time."""
    with fork_server_in(tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Generator[None]:
    """Limit torch to one thread, and check that no thread is left after a test."""
    torch.set_num_threads(1)
    before = set(threading.enumerate())
    yield
    left = [item for item in threading.enumerate() if item not in before]
    assert not left, left
