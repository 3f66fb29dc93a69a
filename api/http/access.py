"""Authenticate and authorize requests. Only a few open paths need no key.

Middleware checks the keys, not the routes, so a route that forgets to check is still closed.
"""

import math
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.http import dashboard, problems
from api.http.rate_limit import RateLimiter
from glasshouse.errors import (
    DatabaseUnavailable,
    KeyInvalid,
    KeyMissing,
    OriginNotAllowed,
    QuotaExceeded,
    ScopeTooSmall,
    ServiceError,
    TooManyInvalidKeys,
)
from models import keys
from models.access import quotas
from models.access.quotas import QuotaLimits
from models.database import Database
from models.settings import Settings
from models.tables import Key

OPEN_PATHS = frozenset({"/livez", "/readyz", "/open", "/v2/health/live", "/v2/health/ready"})
OPEN_PREFIX = "/errors/"
COOKIE = "glasshouse_session"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
KEPT_S = 2.0
"""Keys are looked up again after this long, so a revoked key is soon refused."""
OUTAGE_S = 300.0
"""While the database is unavailable, a key that was valid so long ago is still accepted: requests
to replicas need no database."""
FAILURES_PER_S = 10.0
"""Unknown keys from one address. Above this rate they are refused without a database query."""
LISTED_S = 5.0
"""Above that rate, valid keys are recognized from a list that is at most this old."""
_IMPLIED = {
    "read": frozenset({"read"}),
    "submit": frozenset({"read", "submit"}),
    "admin": frozenset({"read", "submit", "admin"}),
}


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of the key that a request came with."""

    key: str
    """Id of the API key; for a browser session, of the key that opened it."""
    key_name: str
    """Name of the API key."""
    owner: str
    scopes: frozenset[str]
    """Including the scopes that they imply."""
    secret_sha256: str
    """Hash of the key or session itself, to look it up again during a long stream."""
    limits: QuotaLimits
    """The owner's quotas, at most two seconds old."""

    @property
    def sees(self) -> str | None:
        """Return the owner whose resources are visible; None: all owners."""
        return None if "admin" in self.scopes else self.owner


class Keyring:
    """Checks keys against the database and caches valid ones for two seconds."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._known: dict[tuple[str, str], tuple[float, Caller, float]] = {}
        """Until when a caller is known, and when its key was last looked up."""
        self._failures = RateLimiter()
        self._rates = RateLimiter()
        self._listing = threading.Lock()
        self._listed: frozenset[str] = frozenset()
        self._listed_until = 0.0

    async def check(self, secret: str, kind: keys.Kind, client: str = "") -> Caller:
        """Return the caller with this key.

        An address that sends many unknown keys is refused without a database query for each.
        Requests with a valid key still pass, even from the same address.

        Raises:
            KeyInvalid: The key is malformed, unknown, expired or revoked.
            TooManyInvalidKeys: The client sent too many invalid keys.
            DatabaseUnavailable: It was not valid within the last minutes, and cannot be looked up.
        """
        found = self._known.get((kind, secret))
        if found is not None and found[0] > time.monotonic():
            return found[1]
        checked_at = time.monotonic()
        if not keys.is_well_formed(secret):
            raise KeyInvalid
        pause_s = self._failures.look(client, FAILURES_PER_S)
        if pause_s and not await run_in_threadpool(self._is_listed, secret):
            raise TooManyInvalidKeys(retry_after_s=math.ceil(pause_s))
        try:
            caller = await run_in_threadpool(self._look_up, secret, kind)
        except KeyInvalid:
            self._known.pop((kind, secret), None)
            self._failures.take(client, FAILURES_PER_S)
            raise
        except DatabaseUnavailable:
            if found is None or time.monotonic() - found[2] > OUTAGE_S:
                raise
            _, caller, checked_at = found
        if len(self._known) >= 10_000:
            self._known.clear()
        self._known[kind, secret] = (time.monotonic() + KEPT_S, caller, checked_at)
        return caller

    def known(self, secret: str) -> Caller | None:
        """Return the caller with an API key that was checked lately; None: check it."""
        found = self._known.get(("key", secret))
        return found[1] if found is not None and found[0] > time.monotonic() else None

    def check_rate(self, caller: Caller) -> None:
        """Count a request of a caller.

        Raises:
            QuotaExceeded: it sends more than its quota allows.
        """
        rate = caller.limits.requests_per_s
        pause_s = self._rates.take(caller.key, rate)
        if pause_s:
            raise QuotaExceeded(
                f"This key may ask {rate:g} times a second.",
                quota="requests_per_s",
                limit=rate,
                retry_after_s=math.ceil(pause_s),
            )

    async def is_good(self, caller: Caller) -> bool:
        """Return whether the key that opened a long stream is still valid."""
        return await run_in_threadpool(self._still_good, caller)

    def forget(self) -> None:
        """Drop all cached keys and quotas; called after this process has changed one."""
        self._known.clear()
        self._listed_until = 0.0

    def _is_listed(self, secret: str) -> bool:
        """Return whether a key is valid, by a list that is read at most once per ``LISTED_S``."""
        with self._listing:
            if time.monotonic() >= self._listed_until:
                with self._database.read() as tx:
                    self._listed = keys.valid_hashes(tx)
                self._listed_until = time.monotonic() + LISTED_S
        return keys.hash_of(secret) in self._listed

    def _look_up(self, secret: str, kind: keys.Kind) -> Caller:
        with self._database.read() as tx:
            row = keys.check(tx, secret, kind=kind)
            opened_by = keys.api_key_of(tx, row)
            return _caller(row, opened_by, quotas.of(tx, row.owner, self._settings))

    def _still_good(self, caller: Caller) -> bool:
        with self._database.read() as tx:
            return keys.is_good(tx, caller.secret_sha256)


def _caller(row: Key, opened_by: Key, limits: QuotaLimits) -> Caller:
    scopes = frozenset[str]().union(
        *(_IMPLIED.get(str(scope), frozenset()) for scope in row.scopes)
    )
    return Caller(
        key=opened_by.id,
        key_name=opened_by.name,
        owner=row.owner,
        scopes=scopes,
        secret_sha256=row.sha256,
        limits=limits,
    )


class AccessMiddleware:
    """Pure ASGI middleware. Stores the caller in the request's state, or responds 401 or 429."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and not is_open(scope["path"]):
            try:
                caller = await self._caller(scope)
                self._keyring.check_rate(caller)
                scope["state"]["caller"] = caller
            except ServiceError as error:
                answer = problems.answer(error, scope)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _caller(self, scope: Scope) -> Caller:
        headers = Headers(scope=scope)
        authorization = headers.get("authorization")
        if authorization is not None:
            kind, _, secret = authorization.partition(" ")
            if kind.lower() != "bearer":
                raise KeyInvalid("The Authorization header must be 'Bearer gh_…'.")
            return await self._keyring.check(secret.strip(), "key", _address(scope))
        cookie = session_cookie(headers.get("cookie", ""))
        if cookie is None:
            raise KeyMissing
        # Browsers send a cookie with any request to this origin, so a request that changes
        # something must have an Origin header. RequestGuard has already checked its value.
        if scope["method"] not in SAFE_METHODS and "origin" not in headers:
            raise OriginNotAllowed("A request with a session cookie needs an Origin header.")
        return await self._keyring.check(cookie, "session", _address(scope))


def _address(scope: Scope) -> str:
    """Return the client's address: from a trusted proxy, or else of the connection."""
    client = scope.get("client")
    return client[0] if client else ""


def is_open(path: str) -> bool:
    """Return whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX) or dashboard.is_public(path)


def session_cookie(header: str) -> str | None:
    """Return the session in a Cookie header."""
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value


def needs(scope: str) -> Callable[[Request], Awaitable[Caller]]:
    """Return a dependency that returns the caller if its key has the scope."""

    async def check(request: Request) -> Caller:
        caller: Any = request.scope["state"].get("caller")
        if caller is None:
            raise KeyMissing
        if scope not in caller.scopes:
            raise ScopeTooSmall(
                f"This needs a key with the scope {scope!r}; this key has "
                f"{', '.join(sorted(caller.scopes)) or 'none'}."
            )
        return caller

    check.__name__ = f"needs_{scope}"
    return check


Read = Annotated[Caller, Depends(needs("read"))]
Submit = Annotated[Caller, Depends(needs("submit"))]
Admin = Annotated[Caller, Depends(needs("admin"))]
