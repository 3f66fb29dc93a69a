"""Explanations of a job's state: the reason, the first finding and the last log lines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explains the state of a job; ``print(job.explain())`` shows it as text."""

    job: str
    state: str
    reason: str
    """The reason, in one sentence."""
    code: str | None = None
    """The error code; ``docs`` links to its page."""
    hint: str | None = None
    """What to change."""
    rank: int | None = None
    """The rank that failed, if known."""
    layer: str | None = None
    """The layer of the failure or of the first NaN or Inf."""
    step: int | None = None
    """The step of the failure or of the first NaN or Inf. Steps count from 0."""
    finding: Mapping[str, Any] | None = None
    """The first event ``finding``: the layer, the rows of the batch, likely causes."""
    log: tuple[str, ...] = ()
    """The last log lines of the failed rank, or of all ranks if none failed."""
    docs: str | None = None
    """The URL of the page about the error code."""
    notes: tuple[str, ...] = field(default=())
    """Further information: warnings of the plan, restarts."""

    def __str__(self) -> str:
        lines = [f"{self.job} is {self.state}: {self.reason}"]
        places = {"layer": self.layer, "step": self.step, "rank": self.rank}
        where = [f"{name} {value}" for name, value in places.items() if value is not None]
        lines += [f"  where: {', '.join(where)}"] if where else []
        lines += [f"  {line}" for line in self._found()]
        lines += [f"  hint: {self.hint}"] if self.hint else []
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  see {self.docs}"] if self.docs else []
        if self.log:
            lines += ["", "last log lines:", *(f"  {line}" for line in self.log)]
        return "\n".join(lines)

    def _found(self) -> list[str]:
        if self.finding is None:
            return []
        causes = [f"likely cause: {cause}" for cause in self.finding.get("causes") or ()][:3]
        return [f"first finding: {self.finding['message']}", *causes]


def explain(
    job: Mapping[str, Any],
    *,
    url: str,
    finding: Mapping[str, Any] | None,
    log: str,
    waits_for: str | None,
) -> Explanation:
    """Build an explanation.

    Args:
        job: the job document.
        url: the address of the service.
        finding: the first event ``finding``, if there is one.
        log: the last log lines.
        waits_for: why the job is queued, if it is.
    """
    error: Mapping[str, Any] = job.get("error") or {}
    found = finding or {}
    code = error.get("code")
    layer = error.get("layer")
    return Explanation(
        job=job["id"],
        state=job["state"],
        reason=_reason(job, error, waits_for),
        code=code,
        hint=error.get("hint"),
        rank=error.get("rank"),
        layer=found.get("layer") if layer is None else layer,
        step=found.get("step") if error.get("step") is None else error.get("step"),
        finding=finding,
        log=tuple((log or error.get("log_tail") or "").splitlines()[-LOG_LINES:]),
        docs=None if code is None else f"{url}/errors/{code}",
        notes=tuple(_notes(job)),
    )


def _reason(job: Mapping[str, Any], error: Mapping[str, Any], waits_for: str | None) -> str:
    reason = error.get("message") or waits_for or job.get("state_reason")
    if reason:
        return str(reason)
    progress: Mapping[str, Any] = job.get("progress") or {}
    if progress.get("step") is None:
        return "no step has completed"
    total = progress.get("num_steps")
    return f"step {progress['step']}" + (f" of {total}" if total else "")


def _notes(job: Mapping[str, Any]) -> list[str]:
    notes = [str(warning["detail"]) for warning in job.get("warnings") or ()]
    attempt = job.get("attempt") or 0
    return [*notes, f"this is attempt {attempt}"] if attempt > 1 else notes
