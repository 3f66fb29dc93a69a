"""Store the records of an attempt's ranks: a whole shipment once, or nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.orm import Session

from models.jobs import checkpoints, commands, leases, live_predictions, replicas
from models.jobs.commands import CommandChange
from models.jobs.leases import Claim, LeaseState
from models.observations import captures, events, metrics, probes, served_requests
from models.observations.events import NewEvent
from models.observations.probes import ProbeChange
from models.tables import Attempt, JobArtifact, now


@dataclass(slots=True)
class Batch:
    """The records of a rank since the last shipment, sorted by destination."""

    events: list[NewEvent] = field(default_factory=list[NewEvent])
    metrics: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Rows of ``step, epoch, name, value``."""
    stats: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """``stats`` records: step, phase, rows."""
    captures: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    checkpoints: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    artifacts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    removed_artifacts: list[str] = field(default_factory=list[str])
    """Names of artifacts whose rows are deleted."""
    probes: tuple[int, int] | None = None
    """The newest revision of the probes in effect, and its first step."""
    probe_changes: list[ProbeChange] = field(default_factory=list[ProbeChange])
    """Changes to probes that the engine reported."""
    commands: list[CommandChange] = field(default_factory=list[CommandChange])
    """Commands that the engine applied or rejected."""
    replica: dict[str, Any] = field(default_factory=dict[str, Any])
    """New values of the replica of a serve job: where it listens, what it serves, its traffic
    and drift."""
    live: dict[str, Any] = field(default_factory=dict[str, Any])
    """Where a training job listens for requests for predictions, or why it cannot."""
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Requests that the replica recorded."""
    job: dict[str, Any] = field(default_factory=dict[str, Any])
    """New values of the job's ``progress``, ``summary``, ``probe_overhead``, ``result``."""


def prepare(batch: Batch) -> None:
    """Import what storing needs before the transaction, to keep that short."""
    if batch.stats:
        from models.observations import stats as _  # noqa: F401, PLC0415


def ship(
    tx: Session, claim: Claim, batch: Batch, *, offsets: tuple[int, int], lease_ms: int
) -> LeaseState | None:
    """Store the records of a rank: all of them once, or nothing.

    None: this attempt has lost its job.

    One fenced statement renews the lease, reserves gapless numbers for the events and returns the
    pending commands. The spool's offset moves in the same transaction, so a record that is read
    again after a crash is not stored again. Every shipment is counted, even one without spool
    records.
    """
    num_events = len(batch.events)
    beat = leases.beat(tx, claim, lease_ms=lease_ms, num_events=num_events, changes=batch.job)
    if beat is None:
        return None
    moved = tx.scalar(
        update(Attempt)
        .where(
            Attempt.job == claim.job,
            Attempt.n == claim.attempt,
            Attempt.spool_offset == offsets[0],
        )
        .values(spool_offset=offsets[1], num_shipments=Attempt.num_shipments + 1)
        .returning(Attempt.n)
    )
    if moved is None:
        raise RuntimeError("the spool offset moved under its only writer")
    first = beat.last_seq - num_events
    events.write(tx, claim.job, claim.attempt, first, batch.events)
    metrics.add(tx, claim.job, claim.attempt, batch.metrics)
    if batch.stats:
        from models.observations import stats  # noqa: PLC0415 (numpy, once something is watched)

        stats.add(tx, claim.job, claim.attempt, batch.stats)
    captures.add(tx, claim.job, claim.attempt, batch.captures)
    checkpoints.add(tx, claim.job, claim.attempt, batch.checkpoints)
    if batch.probes is not None:
        probes.applied(tx, claim.job, *batch.probes)
    for change in batch.probe_changes:
        probes.note(tx, claim.job, change)
    commands.note(tx, claim.job, batch.commands)
    _add_artifacts(tx, claim, batch.artifacts)
    if batch.replica:
        replicas.store(tx, claim.job, claim.attempt, batch.replica)
    if batch.live:
        live_predictions.store(tx, claim.job, claim.attempt, batch.live)
    served_requests.add(tx, claim.job, batch.requests)
    return beat


def _add_artifacts(tx: Session, claim: Claim, rows: Sequence[dict[str, Any]]) -> None:
    """Add files that a job created; they replace those of earlier attempts."""
    if not rows:
        return
    names = [row["name"] for row in rows]
    tx.execute(delete(JobArtifact).where(JobArtifact.job == claim.job, JobArtifact.name.in_(names)))
    made = {"job": claim.job, "attempt": claim.attempt, "step": None, "created_at": now()}
    tx.execute(insert(JobArtifact), [made | row for row in rows])


def num_shipments(tx: Session, claim: Claim) -> int:
    """Return the number of stored shipments, to check whether an unconfirmed commit succeeded."""
    mine = (Attempt.job == claim.job, Attempt.n == claim.attempt)
    return tx.scalars(select(Attempt.num_shipments).where(*mine)).one()
