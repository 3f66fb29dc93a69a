"""How long an attempt may take, and how long it may be silent: its two clocks."""

from typing import Any, Literal

import structlog

from models.events import NewEvent
from models.settings import Settings
from models.tables import now
from worker.pulse import Pulse

_log: Any = structlog.get_logger()


class Patience:
    """The patience that a job's spec and the settings have with one rank."""

    def __init__(self, resolved: dict[str, Any], settings: Settings, *, spent_s: float) -> None:
        """``spent_s``: what earlier attempts of the job took."""
        self.timeout_s: float | None = resolved.get("timeout_s")
        self.on_stall: Literal["warn", "restart", "fail"] = resolved.get("on_stall", "warn")
        self.stalled_s: float | None = None
        """How long it had made no progress when that was too long to go on."""
        self._stall_s = resolved.get("stall_timeout_s") or settings.stall_timeout_s
        self._spent_s = spent_s

    def is_over(self, passed_s: float) -> bool:
        """Whether the job has taken longer than it may."""
        return self.timeout_s is not None and self._spent_s + passed_s > self.timeout_s

    def listen(self, pulse: Pulse, step: int | None) -> NewEvent | None:
        """Look at a rank's pulse; the event of a stall that is found now."""
        if not pulse.stalls(self._stall_s):
            return None
        _log.warning("job_stalled", step=step, seconds=pulse.silent_s, action=self.on_stall)
        if self.on_stall != "warn":
            self.stalled_s = pulse.silent_s
        told = {"step": step, "seconds": round(pulse.silent_s, 1), "action": self.on_stall}
        return NewEvent("stalled", now(), told)
