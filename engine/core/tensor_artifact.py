"""Write tensors that an evaluation outputs, as an artifact of the job."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from engine.core.safetensors_writer import save_tensors
from engine.core.spool import Emit, now, report_dropped

MEDIA_TYPE = "application/vnd.safetensors"


class Artifacts:
    """Keeps the tensors of one kind: ``<what>-<step>.safetensors`` in the job's directory."""

    def __init__(self, directory: Path, what: str, emit: Emit, label: str = "") -> None:
        """``label``: what they are called if they cannot be written; the default is ``what``."""
        self._directory = directory
        self._what = what
        self._label = label or what
        self._emit = emit
        self._step: int | None = None

    def keep(self, step: int, make: Callable[[], Mapping[str, Tensor]]) -> None:
        """Write what ``make`` returns, once per step; a failure does not stop training."""
        if step == self._step:
            return
        self._step = step
        name = f"{self._what}-{step}.safetensors"
        path = self._directory / "artifacts" / name
        try:
            tensors = make()
            path.parent.mkdir(parents=True, exist_ok=True)
            save_tensors(path, tensors)
        except Exception as error:  # for example a full disk
            report_dropped(self._emit, self._label, error)
            return
        self._emit(
            {
                "type": "artifact",
                "at": now(),
                "name": name,
                "file": f"artifacts/{name}",
                "media_type": MEDIA_TYPE,
                "size_bytes": path.stat().st_size,
                "step": step,
            }
        )
