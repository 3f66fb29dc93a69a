"""The lease of an attempt: the right to write for it. Each write also returns the job's state.

Every write names the attempt's fence. The writes of a supervisor that was considered lost and wakes
up again match no row, so it stops.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from models.database import now_ms
from models.state import LIVE
from models.tables import Device, Job


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write for one attempt of one job."""

    job: str
    attempt: int
    fence: int


@dataclass(frozen=True, slots=True)
class LeaseState:
    """What a supervisor receives with every write."""

    state: str
    last_seq: int
    cancel_requested: bool
    num_commands: int
    devices: frozenset[str] = frozenset()
    """The ids of the devices that the attempt has; empty if it shares those of other jobs."""


def beat(
    tx: Session,
    claim: Claim,
    *,
    lease_ms: int,
    num_events: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> LeaseState | None:
    """Renew the lease and reserve numbers for events. None: this attempt has lost its job.

    ``changes``: new values of the job's columns.
    """
    held = select(func.aggregate_strings(Device.id, ",")).where(
        Device.job == claim.job, Device.fence == claim.fence
    )
    grown = {"version": Job.version + 1} if num_events or changes else {}
    row = tx.execute(
        update(Job)
        .where(Job.id == claim.job, Job.fence == claim.fence, Job.state.in_(LIVE))
        .values(
            last_seq=Job.last_seq + num_events,
            lease_expires_ms=now_ms() + lease_ms,
            **grown,
            **(changes or {}),
        )
        .returning(
            Job.state,
            Job.last_seq,
            Job.cancel_requested_at,
            Job.num_commands,
            held.scalar_subquery(),
        )
    ).one_or_none()
    if row is None:
        return None
    state, last_seq, cancelled_at, num_commands, ids = row
    devices = frozenset(ids.split(",") if ids else ())
    return LeaseState(state, last_seq, cancelled_at is not None, num_commands, devices)


def renew(tx: Session, claim: Claim, *, lease_ms: int) -> bool:
    """Restart the lease again at the end of a transaction that renewed it but took long."""
    fenced = update(Job).where(Job.id == claim.job, Job.fence == claim.fence, Job.state.in_(LIVE))
    renewed = fenced.values(lease_expires_ms=now_ms() + lease_ms).returning(Job.id)
    return tx.scalar(renewed) is not None


def expired(tx: Session) -> list[Claim]:
    """Return attempts with an expired lease, by the database's clock."""
    rows = tx.execute(
        select(Job.id, Job.attempt, Job.fence).where(
            Job.state.in_(LIVE), Job.lease_expires_ms < now_ms()
        )
    )
    return [Claim(*row) for row in rows]


def still_expired(tx: Session, claim: Claim) -> int | None:
    """Return the database's time if the lease is still expired inside this write transaction.

    Locks the job's row. If another transaction holds the lock, something, perhaps its supervisor,
    is writing: then the lease counts as valid, and nobody waits for a stalled writer.
    """
    query = select(now_ms()).where(
        Job.id == claim.job, Job.fence == claim.fence, Job.lease_expires_ms < now_ms()
    )
    return tx.scalar(query.with_for_update(skip_locked=True))


def holds(tx: Session, claim: Claim) -> bool:
    """Return whether this attempt still has the job. Locks the job's row."""
    held = select(Job.id).where(Job.id == claim.job, Job.fence == claim.fence, Job.state.in_(LIVE))
    return tx.scalar(held.with_for_update()) is not None
