"""Idempotent creation: a request repeated with its idempotency key gets the first response."""

import hashlib
import re
import time
from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, Header
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.app_state import AppState
from api.http.access import Caller
from glasshouse.errors import IdempotencyKeyBusy, InvalidHeader, ServiceError
from models.access import idempotency
from models.access.idempotency import Answer, IdempotencyUse
from models.database import Database, Transaction

_PATIENCE_S = 10.0


async def read_key(
    idempotency_key: Annotated[
        str | None,
        Header(
            description="A text of at most 255 characters, unique per resource to create. "
            "A repeated request with the same key gets the first response."
        ),
    ] = None,
) -> str | None:
    """Read ``Idempotency-Key``, quoted or bare."""
    if idempotency_key is None:
        return None
    key = idempotency_key.strip()
    if len(key) >= 2 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not re.fullmatch(r"[\x21-\x7e]([\x20-\x7e]{0,253}[\x21-\x7e])?", key):
        raise InvalidHeader("Idempotency-Key must be 1 to 255 printable ASCII characters.")
    return key


OnceKey = Annotated[str | None, Depends(read_key)]


def token_of(
    caller: Caller, route: str, key: str | None, body: bytes | str
) -> IdempotencyUse | None:
    """Return the use of the key. ``body`` is the request's body, or its hexadecimal SHA-256."""
    if key is None:
        return None
    digest = body if isinstance(body, str) else hashlib.sha256(body).hexdigest()
    return IdempotencyUse(owner=caller.owner, route=route, key=key, body_sha256=digest)


def earlier(database: Database, token: IdempotencyUse | None) -> Answer | None:
    """Return the response that this request already got."""
    if token is None:
        return None
    with database.read() as tx:
        return idempotency.find(tx, token)


def once(
    database: Database, token: IdempotencyUse | None, make: Callable[[Transaction], Answer]
) -> tuple[Answer, bool]:
    """Create the resource and store the response in one transaction, or return the stored response.

    The second value says whether the response was already stored.
    """
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with database.write() as tx:
                if token is not None:
                    kept = idempotency.begin(tx, token)
                    if kept is not None:
                        return kept, True
                answer = make(tx)
                if token is not None:
                    idempotency.finish(tx, token, answer)
                return answer, False
        except IdempotencyKeyBusy:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


async def once_with_files(
    app_state: AppState,
    token: IdempotencyUse | None,
    make: Callable[[Transaction], Answer],
    key: str,
) -> tuple[Answer, bool]:
    """Do the same for a resource with files. Delete the files unless a row now refers to them."""
    try:
        answer, replayed = await run_in_threadpool(once, app_state.database, token, make)
    except ServiceError:  # before the commit
        await run_in_threadpool(app_state.artifacts.delete, key)
        raise
    if replayed:
        await run_in_threadpool(app_state.artifacts.delete, key)
    return answer, replayed


def sent(answer: Answer, *, replayed: bool = False) -> Response:
    """Return the stored response as an HTTP response."""
    headers = dict(answer.headers)
    if replayed:
        headers["Idempotency-Replayed"] = "true"
    return Response(
        answer.body, status_code=answer.status, headers=headers, media_type="application/json"
    )
