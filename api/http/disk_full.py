"""Refuse requests that need space while a disk is nearly full. All other requests work."""

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.http import problems
from api.http.middleware import drain
from glasshouse.errors import StorageFull
from models.storage.disk_space import Space

_FILLING = re.compile(
    r"/api/v1/(datasets|jobs|checkpoints|models|jobs/[^/]+/(fork|retry|resume|probes))"
)
"""Paths that upload bulk data or create jobs that do. Cancel, pause and delete must work."""


class DiskFullMiddleware:
    """Pure ASGI middleware, after authentication, so that others learn nothing about the disk."""

    def __init__(self, app: ASGIApp, space: Space) -> None:
        self._app = app
        self._space = space

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and fills(scope["method"], scope["path"]):
            try:
                self._space.check()
            except StorageFull as error:
                length = Headers(scope=scope).get("content-length", "")
                if length.isdigit():
                    await drain(receive, int(length))
                answer = problems.answer(error, scope)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def fills(method: str, path: str) -> bool:
    """Return whether a request creates something that needs disk space."""
    return method == "POST" and _FILLING.fullmatch(path) is not None
