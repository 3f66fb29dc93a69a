"""The probes of jobs: those of the spec, and those added, changed and removed while a job runs.

Each change increments the job's ``num_commands`` under the lock of its row. That number is the
revision of the whole list: a rank that has applied a revision has every change up to it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from glasshouse.errors import (
    FieldProblem,
    InvalidRequest,
    JobEnded,
    ProbeNotFound,
)
from glasshouse.ids import new_id
from glasshouse.spec.probes import MAX_FULL_BYTES
from models.state import ENDED
from models.tables import Command, Job, Probe, now

_OPEN = ("queued", "starting", "running", "pausing", "paused")
_GONE = ("removed", "rejected")
_KEEPING = {"full", "sample"}
STATS_BYTES_PER_S = 4e9
"""Default estimate: bytes per second for computing statistics."""
FULL_BYTES_PER_S = 1e9
"""Default estimate: bytes per second for copying whole tensors."""
TENSOR_S = 20e-6
"""Default estimate: additional seconds per tensor of any size."""


@dataclass(frozen=True, slots=True)
class CheckedProbe:
    """A probe that the planner accepted."""

    body: dict[str, Any]
    matched: list[str]
    bytes_per_step: int


@dataclass(frozen=True, slots=True)
class ProbeChange:
    """A change of a probe that the engine reported."""

    probe: str
    values: dict[str, Any]
    """New values of columns."""
    revision: int
    """Revision of the engine's list. Ignored if the probe was changed after that."""


def add_those_of_spec(
    tx: Session, job: Job, resolved: Mapping[str, Any], plan: Mapping[str, Any]
) -> None:
    """Store the probes of the spec that a job was submitted with."""
    planned = plan.get("probes", [])
    for position, body in enumerate(resolved.get("probes", [])):
        found: Mapping[str, Any] = planned[position] if position < len(planned) else {}
        checked = CheckedProbe(body, found.get("matched", []), found.get("bytes_per_step", 0))
        row = _row(job.id, checked, position=position, by=job.owner)
        row.state, row.applied_step = "active", 0
        row.estimated_cost_s = estimate(checked, [])
        tx.add(row)


def add(tx: Session, job: Job, checked: CheckedProbe, *, by: str) -> Probe:
    """Add a probe. It is pending until the job has applied it.

    Raises:
        InvalidRequest: One step would store too many bytes, with probes added in the meantime.
        JobEnded: The job has ended or is being cancelled.
    """
    revision = _revise(tx, job, by)
    others = of_job(tx, job.id)
    _check_full(others, checked)
    last = tx.scalar(select(func.max(Probe.position)).where(Probe.job == job.id))
    row = _row(job.id, checked, position=0 if last is None else last + 1, by=by)
    row.revision = revision
    row.estimated_cost_s = estimate(checked, others)
    tx.add(row)
    tx.flush()
    return row


def change(
    tx: Session,
    job: Job,
    probe_id: str,
    checked: CheckedProbe,
    *,
    by: str,
    still: Callable[[Probe], None] = lambda _: None,
) -> Probe:
    """Change a probe. It is pending until the job has applied the change.

    ``still`` is called with the locked row, and may raise.

    Raises:
        InvalidRequest: One step would store too many bytes, with probes added in the meantime.
        JobEnded: The job has ended or is being cancelled.
        ProbeNotFound: The probe was removed or rejected.
    """
    revision = _revise(tx, job, by)
    row = get(tx, job, probe_id)
    if row.state in _GONE:
        raise ProbeNotFound(f"The probe {row.id} was {row.state}.")
    still(row)
    others = [other for other in of_job(tx, job.id) if other.id != row.id]
    _check_full(others, checked)
    row.estimated_cost_s = estimate(checked, others)
    row.cost_s = row.every_now = row.problem = None
    row.body, row.matched = checked.body, list(checked.matched)
    row.bytes_per_step = checked.bytes_per_step
    row.state, row.revision, row.applied_step = "pending", revision, None
    tx.flush()
    return row


def remove(tx: Session, job: Job, probe_id: str, *, by: str) -> Probe:
    """Remove a probe; ``applied_step`` will say from which step. A removed probe stays as it is.

    Raises:
        JobEnded: The job has ended or is being cancelled.
        ProbeNotFound: The probe does not exist.
    """
    tx.execute(select(Job.id).where(Job.id == job.id).with_for_update())
    row = get(tx, job, probe_id)
    if row.state in _GONE:
        return row
    revision = _revise(tx, job, by)
    row.state, row.revision, row.applied_step = "removed", revision, None
    tx.flush()
    return row


def get(tx: Session, job: Job, probe_id: str) -> Probe:
    """Return one probe of a job.

    Raises:
        ProbeNotFound: The job has none with this id.
    """
    row = tx.get(Probe, probe_id, populate_existing=True)
    if row is None or row.job != job.id:
        raise ProbeNotFound(f"The job has no probe {probe_id[:64]!r}.")
    return row


def of_job(tx: Session, job_id: str, *, gone: bool = False) -> list[Probe]:
    """List the probes of a job in order. ``gone`` includes removed and rejected ones."""
    query = select(Probe).where(Probe.job == job_id).order_by(Probe.position, Probe.id)
    if not gone:
        query = query.where(Probe.state.not_in(_GONE))
    return list(tx.scalars(query))


def wanted(tx: Session, job_id: str) -> dict[str, Any]:
    """Return the list of probes for a rank, with a revision that it contains."""
    revision = tx.scalars(select(Job.num_commands).where(Job.id == job_id)).one()
    rows = of_job(tx, job_id)  # read after the number, so it has every change up to it
    return {
        "revision": revision,
        "probes": [
            {
                "id": row.id,
                "probe": row.body,
                "new": row.state == "pending",
                "failed": row.state == "failed",
                "revision": row.revision,
            }
            for row in rows
        ],
    }


def applied(tx: Session, job_id: str, revision: int, step: int) -> None:
    """Note that a job has applied every change up to a revision, from a step on."""
    ours = (Probe.job == job_id, Probe.revision <= revision, Probe.applied_step.is_(None))
    tx.execute(
        update(Probe)
        .where(*ours, Probe.state == "pending")
        .values(state="active", applied_step=step)
    )
    tx.execute(update(Probe).where(*ours, Probe.state == "removed").values(applied_step=step))
    for command in _asked(tx, job_id):
        if command.body["revision"] <= revision:
            command.state, command.step = "applied", step
    tx.flush()


def note(tx: Session, job_id: str, change: ProbeChange) -> None:
    """Store what the engine reported about a probe. Unknown probes are ignored."""
    tx.execute(
        update(Probe)
        .where(
            Probe.job == job_id,
            Probe.id == change.probe,
            Probe.revision <= change.revision,
            Probe.state.not_in(_GONE),
        )
        .values(**change.values)
    )


def close(tx: Session, job_id: str) -> None:
    """Reject changes that a job did not apply before its end.

    If another attempt continues the job, reset the intervals to those requested and measure again.
    """
    if tx.scalar(select(Job.state).where(Job.id == job_id)) not in ENDED:
        tx.execute(update(Probe).where(Probe.job == job_id).values(every_now=None, cost_s=None))
        return
    problem = {"code": JobEnded().code, "detail": "The job ended before its next step."}
    tx.execute(
        update(Probe)
        .where(Probe.job == job_id, Probe.state == "pending")
        .values(state="rejected", problem=problem)
    )
    for command in _asked(tx, job_id):
        command.state, command.problem = "rejected", problem
    tx.flush()


def estimate(checked: CheckedProbe, others: Sequence[Probe]) -> float:
    """Estimate the seconds per due step of a probe.

    Uses the measured cost per byte of the job's other probes of the same form, or else default
    rates.
    """
    want = set(checked.body.get("want", ()))
    alike = [
        row for row in others if row.cost_s and row.bytes_per_step and set(row.body["want"]) == want
    ]
    size = checked.bytes_per_step
    if alike:
        return (
            size
            * sum(row.cost_s or 0.0 for row in alike)
            / sum(row.bytes_per_step for row in alike)
        )
    seconds = TENSOR_S * len(checked.matched) * len(checked.body["kinds"])
    seconds += size / STATS_BYTES_PER_S if want - _KEEPING else 0.0
    return seconds + (size / FULL_BYTES_PER_S if want & _KEEPING else 0.0)


def _check_full(others: Sequence[Probe], checked: CheckedProbe) -> None:
    """Check the size limit under the lock of the job's row, so concurrent requests respect it.

    Raises:
        InvalidRequest: The limit would be exceeded.
    """
    if _KEEPING.isdisjoint(checked.body["want"]):
        return
    taken = [
        row for row in others if not _KEEPING.isdisjoint(row.body["want"]) and row.state != "failed"
    ]
    size = checked.bytes_per_step + sum(row.bytes_per_step for row in taken)
    if size > MAX_FULL_BYTES:
        detail = f"whole tensors of one step would take {size} bytes with this probe; the limit is"
        detail += f" {MAX_FULL_BYTES}: name fewer layers, or want stats"
        raise InvalidRequest(detail, problems=[FieldProblem("/want", detail, "too_large")])


def _asked(tx: Session, job_id: str) -> list[Command]:
    query = select(Command).where(Command.job == job_id, Command.state == "pending")
    return [command for command in tx.scalars(query) if command.body.get("do") == "probes"]


def _revise(tx: Session, job: Job, by: str) -> int:
    """Reserve the next revision of a job's list, which also locks the job's row."""
    revision = tx.scalar(
        update(Job)
        .where(Job.id == job.id, Job.state.in_(_OPEN))
        .values(num_commands=Job.num_commands + 1, version=Job.version + 1)
        .returning(Job.num_commands)
    )
    if revision is None:
        state = tx.scalar(select(Job.state).where(Job.id == job.id))
        raise JobEnded(f"The job is {state}: nothing of it is watched any more.")
    body = {"do": "probes", "revision": revision}
    made = Command(
        id=new_id("cmd"), job=job.id, body=body, by=by, state="pending", created_at=now()
    )
    tx.add(made)
    return revision


def _row(job_id: str, checked: CheckedProbe, *, position: int, by: str) -> Probe:
    return Probe(
        id=new_id("prb"),
        job=job_id,
        body=checked.body,
        state="pending",
        problem=None,
        matched=list(checked.matched),
        bytes_per_step=checked.bytes_per_step,
        estimated_cost_s=None,
        cost_s=None,
        every_now=None,
        revision=0,
        applied_step=None,
        position=position,
        created_at=now(),
        by=by,
    )
