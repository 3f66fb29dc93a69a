"""Webhooks: which state changes and findings of jobs they receive, and the messages to send.

A message is written in the transaction of the event, so it exists if and only if the event does.
The worker sends them (``worker/delivery/webhooks.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, func, insert, select, update
from sqlalchemy import delete as sql_delete
from sqlalchemy.orm import Session

from glasshouse import jsonio
from glasshouse.errors import Conflict, WebhookNotFound
from glasshouse.ids import new_id
from glasshouse.webhooks import new_secret
from models.access import quotas
from models.database import now_ms
from models.state import STATES
from models.tables import Delivery, Job, Webhook, now

TYPES = (*(f"job.{state}" for state in STATES), "job.finding")
MAX_PER_OWNER = 20
PER_TURN = 4
"""Messages of one webhook per turn, so that a slow receiver does not delay others."""


def add(
    tx: Session, *, owner: str, url: str, events: Sequence[str], labels: dict[str, str]
) -> Webhook:
    """Store a webhook with a new secret.

    Raises:
        Conflict: The owner has the maximum number of webhooks.
    """
    quotas.lock(tx, owner)
    count = select(func.count()).select_from(Webhook).where(Webhook.owner == owner)
    if tx.scalars(count).one() >= MAX_PER_OWNER:
        raise Conflict(f"An owner may have {MAX_PER_OWNER} webhooks; delete one first.")
    row = Webhook(
        id=new_id("whk"),
        owner=owner,
        url=url,
        events=list(events),
        labels=dict(labels),
        secret=new_secret(),
        created_at=now(),
    )
    tx.add(row)
    tx.flush()
    return row


def get(tx: Session, webhook_id: str, owner: str | None) -> Webhook:
    """Return one webhook. ``owner`` None sees those of all owners.

    Raises:
        WebhookNotFound: It does not exist, or belongs to someone else.
    """
    found = tx.get(Webhook, webhook_id)
    if found is None or (owner is not None and found.owner != owner):
        raise WebhookNotFound(f"No webhook has the id {webhook_id[:64]}.")
    return found


def find(tx: Session, *, owner: str | None, after: str | None, limit: int) -> list[Webhook]:
    """List webhooks, newest first."""
    query = select(Webhook).order_by(Webhook.id.desc()).limit(limit)
    if owner is not None:
        query = query.where(Webhook.owner == owner)
    if after is not None:
        query = query.where(Webhook.id < after)
    return list(tx.scalars(query))


def delete(tx: Session, webhook: Webhook) -> None:
    """Delete a webhook and its messages."""
    tx.execute(sql_delete(Webhook).where(Webhook.id == webhook.id))


def deliveries(tx: Session, webhook_id: str, *, after: str | None, limit: int) -> list[Delivery]:
    """List sent and pending messages of a webhook, newest first."""
    query = select(Delivery).where(Delivery.webhook == webhook_id)
    if after is not None:
        query = query.where(Delivery.id < after)
    return list(tx.scalars(query.order_by(Delivery.id.desc()).limit(limit)))


class News(NamedTuple):
    """An event of a job that webhooks are notified of."""

    seq: int
    at: str
    type: str
    """One of ``TYPES``."""
    payload: dict[str, Any]
    """What the message has besides the facts of the job."""


def announce(tx: Session, job_id: str, news: Sequence[News]) -> None:
    """Write the messages about events of a job, in the transaction of the events.

    Args:
        tx: That transaction.
        job_id: The job, in its new state.
        news: The events.
    """
    wanted = (
        select(Webhook.id, Webhook.events, Webhook.labels)
        .join(Job, Job.owner == Webhook.owner)
        .where(Job.id == job_id, Webhook.disabled_at.is_(None))
    )
    hooks = tx.execute(wanted).all()
    if not hooks:
        return
    parts = (Job.name, Job.kind, Job.labels, Job.attempt, Job.error)
    job = tx.execute(select(*parts).where(Job.id == job_id)).one()
    rows: list[dict[str, Any]] = []
    for seq, at, kind, own in news:
        payload = {"job": job_id, "seq": seq, "name": job.name, "kind": job.kind}
        payload |= {
            "labels": job.labels,
            "attempt": job.attempt,
            **own,
            "error": _short(job.error),
        }
        body = jsonio.dumps({"type": kind, "timestamp": at, "data": payload})
        rows += [
            _row(hook.id, kind, body)
            for hook in hooks
            if kind in (hook.events or TYPES) and hook.labels.items() <= job.labels.items()
        ]
    if rows:
        tx.execute(insert(Delivery), rows)


def _short(error: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return an error without the tail of its log."""
    return error and {key: value for key, value in error.items() if key != "log_tail"}


def _row(webhook: str, kind: str, body: str) -> dict[str, Any]:
    made = {"id": new_id("msg"), "webhook": webhook, "type": kind, "body": body}
    return made | {"state": "pending", "tries": 0, "next_ms": 0, "created_at": now()}


# --- sending ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sending:
    """A message to send now."""

    id: str
    webhook: str
    url: str
    secret: str
    body: str
    tries: int
    """Including this one."""

    def __repr__(self) -> str:
        return f"Sending({self.id!r}, {self.webhook!r})"  # never log a secret


def due(tx: Session, *, limit: int = 64) -> list[str]:
    """List webhooks with a due message; the one that has waited longest comes first."""
    query = (
        select(Delivery.webhook)
        .where(*_is_due())
        .group_by(Delivery.webhook)
        .order_by(func.min(Delivery.next_ms))
        .limit(limit)
    )
    return list(tx.scalars(query))


def take(tx: Session, webhook: str, *, hold_ms: int) -> Sending | None:
    """Take the next due message of a webhook. Nobody else takes it for ``hold_ms``.

    Call it right before sending: the message must be sent, and the result stored, in that time.
    """
    query = (
        select(Delivery, Webhook.url, Webhook.secret)
        .join(Webhook, Webhook.id == Delivery.webhook)
        .where(Delivery.webhook == webhook, *_is_due())
        .order_by(Delivery.next_ms, Delivery.id)
        .limit(1)
        .with_for_update(skip_locked=True, of=Delivery)
    )
    found = tx.execute(query).one_or_none()
    if found is None:
        return None
    row, url, secret = found
    sending = Sending(row.id, webhook, url, secret, row.body, row.tries + 1)
    held = {"tries": sending.tries, "next_ms": now_ms() + hold_ms}
    tx.execute(update(Delivery).where(Delivery.id == row.id).values(held))
    return sending


def _is_due() -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return Delivery.state == "pending", Delivery.next_ms <= now_ms()


def delivered(tx: Session, sending: Sending, status: int) -> None:
    """Note that the receiver accepted a message."""
    values = {"state": "delivered", "status": status, "problem": None, "ended_at": now()}
    tx.execute(update(Delivery).where(Delivery.id == sending.id).values(values))
    well = update(Webhook).where(Webhook.id == sending.webhook, Webhook.failing_since.is_not(None))
    tx.execute(well.values(failing_since=None))


def missed(
    tx: Session,
    sending: Sending,
    *,
    status: int | None,
    problem: str,
    retry_in_s: float | None,
    disable_after_s: float,
) -> bool:
    """Note that a delivery failed. True: the webhook was disabled because of it.

    With ``retry_in_s`` None, the message is not retried. A response of 410 disables the webhook.
    """
    values: dict[str, Any] = {"status": status, "problem": problem[:500]}
    if retry_in_s is None:
        values |= {"state": "failed", "ended_at": now()}
    else:
        values["next_ms"] = now_ms() + round(retry_in_s * 1000)
    tx.execute(update(Delivery).where(Delivery.id == sending.id).values(values))
    hook = tx.get(Webhook, sending.webhook, with_for_update=True)
    if hook is None or hook.disabled_at is not None:
        return False
    since = hook.failing_since = hook.failing_since or now()
    if status == 410:
        reason = "the receiver answered 410: it wants no more"
    elif since < now() - timedelta(seconds=disable_after_s):
        reason = f"it has taken nothing since {since:%Y-%m-%d %H:%M} UTC"
    else:
        tx.flush()
        return False
    hook.disabled_at, hook.disabled_reason = now(), reason
    tx.flush()
    left = update(Delivery).where(Delivery.webhook == hook.id, Delivery.state == "pending")
    given_up = {"state": "failed", "problem": "the webhook was switched off", "ended_at": now()}
    tx.execute(left.values(given_up))
    return True
