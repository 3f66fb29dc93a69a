"""Write tensors that an evaluation outputs, as an artifact of the job."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.core.safetensors_writer import save_tensors
from engine.core.spool import now

MEDIA_TYPE = "application/vnd.safetensors"


def write_artifact(
    directory: Path, what: str, step: int, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Write ``<what>-<step>.safetensors`` into a job's directory; return its record.

    Raises:
        OSError: the file cannot be written.
    """
    name = f"{what}-{step}.safetensors"
    path = directory / "artifacts" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(path, tensors)
    return {
        "type": "artifact",
        "at": now(),
        "name": name,
        "file": f"artifacts/{name}",
        "media_type": MEDIA_TYPE,
        "size_bytes": path.stat().st_size,
        "step": step,
    }
