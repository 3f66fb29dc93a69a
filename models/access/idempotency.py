"""Responses to creating requests, kept for a day, so that a retry gets the first response again.

The purge deletes older ones. Until then, a key with an older response counts as unused.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Delete, delete, tuple_, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from glasshouse.errors import IdempotencyKeyBusy, IdempotencyKeyReused
from models.tables import Idempotency, now

KEPT = timedelta(hours=24)
ABANDONED = timedelta(seconds=60)
"""A request without a response after this long died with its process; its key is free again."""


@dataclass(frozen=True, slots=True)
class IdempotencyUse:
    """One use of an idempotency key."""

    owner: str
    route: str
    key: str
    body_sha256: str

    @property
    def row(self) -> tuple[str, str, str]:
        """Return the primary key."""
        return self.owner, self.route, self.key


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to the first request."""

    status: int
    headers: dict[str, str]
    body: str


def find(tx: Session, token: IdempotencyUse) -> Answer | None:
    """Return the stored response of the key, without reserving the key.

    Raises:
        IdempotencyKeyReused: The key was used with another body.
    """
    found = tx.get(Idempotency, token.row, populate_existing=True)
    if found is None or found.status is None or found.created_at < now() - KEPT:
        return None
    _check_body(found, token)
    return Answer(found.status, found.headers or {}, found.body or "")


def begin(tx: Session, token: IdempotencyUse) -> Answer | None:
    """Reserve the key, or return its stored response.

    Raises:
        IdempotencyKeyReused: The key was used with another body.
        IdempotencyKeyBusy: Its first request is still being answered.
    """
    found = tx.get(Idempotency, token.row, populate_existing=True)
    if found is not None and _is_over(found):
        tx.execute(_row(token).where(Idempotency.created_at == found.created_at))
        tx.expunge(found)
        found = None
    if found is not None:
        _check_body(found, token)
        if found.status is None:
            raise IdempotencyKeyBusy(retry_after_s=1)
        return Answer(found.status, found.headers or {}, found.body or "")
    _insert(tx, token)
    return None


def finish(tx: Session, token: IdempotencyUse, answer: Answer) -> None:
    """Store the response. Called in the transaction that does what the request asked for."""
    tx.execute(
        update(Idempotency)
        .where(
            Idempotency.owner == token.owner,
            Idempotency.route == token.route,
            Idempotency.key == token.key,
        )
        .values(status=answer.status, headers=answer.headers, body=answer.body)
    )


def forget(tx: Session, token: IdempotencyUse) -> None:
    """Free the key, because the request changed nothing."""
    tx.execute(_row(token).where(Idempotency.status.is_(None)))


def _is_over(found: Idempotency) -> bool:
    """Return whether the key is free again. The purge deletes the rows of other keys."""
    longest = ABANDONED if found.status is None else KEPT
    return found.created_at < now() - longest


def _row(token: IdempotencyUse) -> Delete:
    """Return a statement that deletes the row of one key."""
    mine = tuple_(Idempotency.owner, Idempotency.route, Idempotency.key)
    return delete(Idempotency).where(mine == token.row)


def _check_body(found: Idempotency, token: IdempotencyUse) -> None:
    if found.body_sha256 != token.body_sha256:
        raise IdempotencyKeyReused(
            f"The idempotency key {token.key!r} was used with another body; use a new key."
        )


def _insert(tx: Session, token: IdempotencyUse) -> None:
    row: dict[str, Any] = {
        "owner": token.owner,
        "route": token.route,
        "key": token.key,
        "body_sha256": token.body_sha256,
        "created_at": now(),
    }
    try:
        with tx.begin_nested():
            tx.add(Idempotency(**row))
    except IntegrityError as error:  # on PostgreSQL, two requests can get here at once
        raise IdempotencyKeyBusy(retry_after_s=1) from error
