"""API keys: random, shown once, stored as a hash. Also browser sessions and their tickets.

``python -m models.keys create --name local --scopes read,submit,admin --owner local``
prints a new key as JSON.
"""

import argparse
import hashlib
import secrets
import sys
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

from sqlalchemy import or_, select, update
from sqlalchemy.orm import Session

from glasshouse import jsonio
from glasshouse.errors import KeyInvalid, KeyNotFound
from glasshouse.ids import new_id
from models.tables import Key, now

SCOPES = ("read", "submit", "admin")
PREFIX = "gh_"
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

Kind = Literal["key", "session", "ticket"]


def make_secret() -> str:
    """Return a new key: ``gh_``, 43 random characters (256 bits), ``_`` and a 6-character checksum.

    The checksum lets scanners, and this service, distinguish a key from a typo.
    """
    body = "".join(secrets.choice(_ALPHABET) for _ in range(43))
    return f"{PREFIX}{body}_{_checksum(body)}"


def is_well_formed(secret: str) -> bool:
    """Return whether a text has the form and the checksum of a key."""
    body, _, check = secret.removeprefix(PREFIX).partition("_")
    return (
        secret.startswith(PREFIX)
        and len(body) == 43
        and secrets.compare_digest(_checksum(body).encode(), check.encode())
    )


def create(
    tx: Session,
    *,
    name: str,
    owner: str,
    scopes: Sequence[str],
    lifetime: timedelta | None = None,
) -> tuple[Key, str]:
    """Store an API key. Return it with its secret, which cannot be read again."""
    scopes = [scope for scope in SCOPES if scope in scopes]
    return _add(tx, lifetime, kind="key", name=name, owner=owner, scopes=scopes)


def derive(tx: Session, key_id: str, kind: Literal["session", "ticket"], life: timedelta) -> str:
    """Store a session or a ticket with the rights of its API key. Return its secret.

    Raises:
        KeyInvalid: The key is revoked or expired, or retention has deleted it.
    """
    key = _parent(tx, key_id)
    columns = {"parent": key.id, "name": key.name, "owner": key.owner, "scopes": key.scopes}
    return _add(tx, life, kind=kind, **columns)[1]


def _add(tx: Session, lifetime: timedelta | None, **columns: Any) -> tuple[Key, str]:
    secret = make_secret()
    time = now()
    row = Key(
        id=new_id("key"),
        hint=secret[:7],
        sha256=hash_of(secret),
        created_at=time,
        expires_at=None if lifetime is None else time + lifetime,
        **columns,
    )
    tx.add(row)
    tx.flush()
    return row, secret


def check(tx: Session, secret: str, *, kind: Kind = "key") -> Key:
    """Return the key that a secret belongs to.

    Raises:
        KeyInvalid: It is malformed, unknown, expired or revoked, or of another kind.
    """
    row = None
    if is_well_formed(secret):
        row = tx.scalar(select(Key).where(Key.sha256 == hash_of(secret)))
    if row is None or row.kind != kind or not _is_valid(row):
        raise KeyInvalid
    return row


def valid_hashes(tx: Session) -> frozenset[str]:
    """Return the hashes of all keys, sessions and tickets that are neither revoked nor expired."""
    query = select(Key.sha256).where(Key.revoked_at.is_(None))
    return frozenset(tx.scalars(query.where(or_(Key.expires_at.is_(None), Key.expires_at > now()))))


def api_key_of(tx: Session, row: Key) -> Key:
    """Return the API key itself; for a session or ticket, the API key that opened it.

    A session may be opened while its key is being revoked, so the key is checked each time.

    Raises:
        KeyInvalid: That key is revoked or expired, or retention has deleted it.
    """
    return row if row.parent is None else _parent(tx, row.parent)


def _parent(tx: Session, key_id: str) -> Key:
    found = tx.get(Key, key_id, populate_existing=True)
    if found is None or not _is_valid(found):
        raise KeyInvalid
    return found


def is_good(tx: Session, sha256: str) -> bool:
    """Return whether the key with this hash, and the key that opened it, are still valid."""
    row = tx.scalar(select(Key).where(Key.sha256 == sha256))
    if row is None or not _is_valid(row):
        return False
    try:
        api_key_of(tx, row)
    except KeyInvalid:
        return False
    return True


def redeem(tx: Session, ticket: str) -> str:
    """Use up a one-time ticket. Return the id of the API key that opened it.

    Raises:
        KeyInvalid: It is unknown, expired or used.
    """
    row = check(tx, ticket, kind="ticket")
    key_id = tx.scalar(
        update(Key)
        .where(Key.id == row.id, Key.revoked_at.is_(None))
        .values(revoked_at=now())
        .returning(Key.parent)
    )
    if key_id is None:
        raise KeyInvalid
    return key_id


def find(tx: Session, *, after: str | None, limit: int) -> list[Key]:
    """List API keys, newest first, including revoked ones."""
    query = select(Key).where(Key.kind == "key").order_by(Key.id.desc()).limit(limit)
    if after is not None:
        query = query.where(Key.id < after)
    return list(tx.scalars(query))


def revoke(tx: Session, key_id: str) -> Key:
    """Revoke a key and the sessions and tickets that it opened.

    Raises:
        KeyNotFound: The key does not exist.
    """
    mine = or_(Key.id == key_id, Key.parent == key_id)
    tx.execute(update(Key).where(mine, Key.revoked_at.is_(None)).values(revoked_at=now()))
    row = tx.get(Key, key_id, populate_existing=True)
    if row is None or row.kind != "key":
        raise KeyNotFound(f"No API key has the id {key_id}.")
    return row


def _is_valid(row: Key) -> bool:
    """Return whether it is neither revoked nor expired."""
    return row.revoked_at is None and (row.expires_at is None or row.expires_at > now())


def hash_of(secret: str) -> str:
    """Return the hash that is stored of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _checksum(body: str) -> str:
    number = zlib.crc32(body.encode())
    digits = ""
    for _ in range(6):
        number, digit = divmod(number, len(_ALPHABET))
        digits = _ALPHABET[digit] + digits
    return digits


def main(arguments: Sequence[str]) -> int:
    """Create a key from the command line on the service's host."""
    from models.database import Database  # noqa: PLC0415 (the API imports this module, not these)
    from models.settings import Settings  # noqa: PLC0415

    parser = argparse.ArgumentParser(prog="python -m models.keys")
    parser.add_argument("action", choices=["create"])
    parser.add_argument("--name", required=True)
    parser.add_argument("--owner", required=True)
    parser.add_argument("--scopes", default="read,submit")
    given = parser.parse_args(arguments)
    scopes = str(given.scopes).split(",")
    if unknown := set(scopes) - set(SCOPES):
        parser.error(f"unknown scopes {sorted(unknown)}; there are {', '.join(SCOPES)}")
    database = Database(Settings().database)
    with database.write() as tx:
        row, secret = create(tx, name=given.name, owner=given.owner, scopes=scopes)
        answer = {"id": row.id, "key": secret, "owner": row.owner, "scopes": row.scopes}
    sys.stdout.write(jsonio.dumps(answer) + "\n")
    database.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
