"""Plan a diagnose job: its memory."""

from typing import Any

from engine.diagnose.memory import COPY_BYTES
from glasshouse.spec import DiagnoseJob

_COPIES_OF_MESSAGE = 4
"""At most this many tensors of a message's size exist at once: its parts, what is expected, what is
received, and the comparison."""


def plan_diagnosis(spec: DiagnoseJob) -> dict[str, Any]:
    """Plan a job that measures messages and memory. It has no network."""
    sent = _COPIES_OF_MESSAGE * max(spec.sizes_bytes) if spec.processes > 1 else 0
    buffers = max(sent, 3 * COPY_BYTES)
    return {
        "spec": spec.model_dump(mode="json"),
        "layers": [],
        "parameters": 0,
        "flops": None,
        "memory": {"buffers_bytes": buffers, "checkpoint_bytes": 0, "total_bytes": buffers},
        "parallel": None,
        "probes": [],
        "num_steps": None,
        "warnings": [],
    }
