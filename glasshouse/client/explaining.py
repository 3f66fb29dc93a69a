"""Why a job is where it is, in words: the reason, the first bad number, the last lines printed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job is where it is; ``print(job.explain())`` shows it as text."""

    job: str
    state: str
    reason: str
    """In one sentence."""
    code: str | None = None
    """Of the failure; ``docs`` has its page."""
    hint: str | None = None
    """What to change."""
    rank: int | None = None
    """The process that failed, where it is known."""
    layer: str | None = None
    """Where the failure was, or the first number that is not finite."""
    step: int | None = None
    """Of the same; steps count from 0."""
    finding: Mapping[str, Any] | None = None
    """The first event ``finding``: the layer, the rows of the batch, likely causes."""
    log: tuple[str, ...] = ()
    """The last lines that the failing rank printed, or of all where none failed."""
    docs: str | None = None
    """The address of the page about the code."""
    notes: tuple[str, ...] = field(default=())
    """What else may matter: warnings of the plan, restarts."""

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
            lines += ["", "last lines of its log:", *(f"  {line}" for line in self.log)]
        return "\n".join(lines)

    def _found(self) -> list[str]:
        if self.finding is None:
            return []
        causes = [f"likely: {cause}" for cause in self.finding.get("causes") or ()][:3]
        return [f"first finding: {self.finding['message']}", *causes]


def explain(
    job: Mapping[str, Any],
    *,
    url: str,
    finding: Mapping[str, Any] | None,
    log: str,
    waits_for: str | None,
) -> Explanation:
    """Put together what is known.

    Args:
        job: as the service gives it.
        url: the service's address.
        finding: the first event ``finding``, if there is one.
        log: the last lines printed.
        waits_for: why it is in the queue, if it is.
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
    told = error.get("message") or waits_for or job.get("state_reason")
    if told:
        return str(told)
    progress: Mapping[str, Any] = job.get("progress") or {}
    if progress.get("step") is None:
        return "no step has been done"
    total = progress.get("num_steps")
    return f"step {progress['step']}" + (f" of {total}" if total else "")


def _notes(job: Mapping[str, Any]) -> list[str]:
    notes = [str(warning["detail"]) for warning in job.get("warnings") or ()]
    attempt = job.get("attempt") or 0
    return [*notes, f"it is at its attempt {attempt}"] if attempt > 1 else notes
