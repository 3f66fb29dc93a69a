"""The simulated accelerator's own tests run where it is registered: ``make test-accelerator``."""

import os
from collections.abc import Generator

import pytest
import torch

from tests.unit.engine.conftest import digits, server

__all__ = ("digits", "server")  # fixtures
IS_SIMULATED = os.environ.get("ENGINE_DEVICE") == "simulated"
collect_ignore_glob = [] if IS_SIMULATED else ["test_*.py"]


@pytest.fixture(autouse=True)
def as_it_was() -> Generator[None]:
    """Leave the device as it was: nothing queued, all of its memory, its own random numbers."""
    module = torch.get_device_module("simulated")
    module.draw_as_host(False)
    torch.set_num_threads(1)
    yield
    for index in range(torch.accelerator.device_count()):
        module.set_capacity(2**32, index)
        module.set_per_process_memory_fraction(1.0, index)
        torch.accelerator.synchronize(index)
    torch.accelerator.set_device_index(0)
    module.draw_as_host()
