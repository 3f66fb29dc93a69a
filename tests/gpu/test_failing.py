"""How failures of a CUDA device are reported: ``python -m pytest tests/gpu -m gpu``."""

import pytest
import torch

from engine.network.layers import LayerFailed
from engine.training.failures import StepFailed, classify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_all_memory_values_of_a_device_are_read():
    held = torch.empty(2**26, device="cuda")
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    failure = classify(StepFailed(3, LayerFailed("fc", raised.value)))
    memory = failure.as_dict()["memory"]
    assert (failure.code, failure.layer, failure.step) == ("out_of_memory", "fc", 3)
    assert memory["where"] == "device"
    assert abs(memory["requested_bytes"] - 2 * total) < 0.01 * total
    assert abs(memory["limit_bytes"] - total) < 0.01 * total
    assert 0 < memory["free_bytes"] < total
    assert memory["peak_bytes"] >= held.nbytes
