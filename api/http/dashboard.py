"""Serve the dashboard: the files that dashboard/ is built into.

The files are public because they hold no data; they call the API with the user's session. A file is
looked up by name in a table, never by path.
"""

import gzip
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

import api
from api.http.answers import etag, is_fresh
from glasshouse.errors import RouteNotFound

router = APIRouter(tags=["service"])
PATHS = (
    "/",
    "/jobs",
    "/jobs/{id}",
    "/jobs/{id}/{tab}",
    "/jobs/{id}/layers/{layer}",
    "/compare",
    "/datasets",
    "/datasets/{id}",
    "/models",
    "/models/{id}",
    "/devices",
    "/submit",
    "/settings",
)
"""Paths of the dashboard's views. All return the same file; its script shows the view."""
ASSETS = "/assets/{file}"
INDEX = "index.html"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_PACKAGE = Path(api.__path__[0])
# In a wheel the files are inside this package; in a checkout `make page` builds them.
_PLACES = (_PACKAGE / "page_files", _PACKAGE.parent / "dashboard" / "dist")
_KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".map": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
_OPEN = re.compile("|".join(re.sub(r"\{\w+\}", "[^/]+", path) for path in (*PATHS, ASSETS)))
_MISSING = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Glasshouse</title></head><body>
<h1>The page is not built</h1>
<p>The service runs; only this page is missing. It is built when Glasshouse is installed, if Node 20
or newer is there. In a checkout <code>make page</code> builds it now; then load this again.</p>
<p>The API has its documentation at <a href="/docs">/docs</a>.</p>
</body></html>
"""
_USED = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Glasshouse</title></head><body>
<h1>This link has been used, or is too old</h1>
<p>A link opens the page once, within a minute. Make a new one with <code>glasshouse open</code> on
the machine of the service.</p>
<p>Or <a href="/jobs">go to the page</a>: a browser that is still signed in shows it, another may
give an API key there.</p>
</body></html>
"""


@dataclass(frozen=True, slots=True)
class File:
    """One file of the dashboard, ready to send."""

    body: bytes
    zipped: bytes | None
    """None: compression does not make it smaller."""
    kind: str
    tag: str


class DashboardBuild:
    """The newest build that was found, in memory."""

    def __init__(self, *places: Path) -> None:
        self._places: Final = places
        self._stamp: tuple[int, int, int] | None = None
        self._files: dict[str, File] = {}

    def index(self) -> File | None:
        """Return the index file, or None without a build. Also load a new build."""
        for place in self._places:
            stamp = _stamp(place / INDEX)
            if stamp is not None:
                if stamp != self._stamp:
                    self._files, self._stamp = _read(place), stamp
                break
        return self._files.get(INDEX)

    def asset(self, name: str) -> File | None:
        """Return an asset of the dashboard."""
        return self._files.get(f"assets/{name}")


def find_page() -> DashboardBuild:
    """Return the dashboard that belongs to this installation, read once."""
    page = DashboardBuild(*_PLACES)
    page.index()
    return page


def is_public(path: str) -> bool:
    """Return whether a path belongs to the dashboard and needs no key."""
    return _OPEN.fullmatch(path) is not None


def get_page(request: Request) -> Response:
    """Serve the index file. Its script gets all data from the API."""
    found = request.app.state.page.index()
    headers = {"Content-Security-Policy": POLICY}
    if found is None:
        return Response(_MISSING, media_type="text/html", headers=headers)
    return _sent(request, found, headers | {"Cache-Control": "no-cache"})


def used_link() -> Response:
    """Respond to a one-time link that is used or expired."""
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store"}
    return Response(_USED, status_code=401, media_type="text/html", headers=headers)


for _path in PATHS:
    router.add_api_route(_path, get_page, methods=["GET"], include_in_schema=False)


@router.get(ASSETS, include_in_schema=False)
def get_asset(request: Request, file: str) -> Response:
    """Serve an asset. Its name changes with its content, so browsers may cache it forever."""
    found = request.app.state.page.asset(file)
    if found is None:
        raise RouteNotFound("No route matches this path.")
    return _sent(request, found, {"Cache-Control": "public, max-age=31536000, immutable"})


def _sent(request: Request, file: File, headers: dict[str, str]) -> Response:
    zipped = file.zipped if _takes_gzip(request.headers.get("accept-encoding", "")) else None
    tag = etag(file.tag) if zipped is None else etag(file.tag, "gzip")
    headers |= {"ETag": tag, "Vary": "Accept-Encoding"}
    if is_fresh(request, tag):
        return Response(status_code=304, headers=headers)
    if zipped is None:
        return Response(file.body, media_type=file.kind, headers=headers)
    headers["Content-Encoding"] = "gzip"
    return Response(zipped, media_type=file.kind, headers=headers)


def _takes_gzip(header: str) -> bool:
    for entry in header.lower().split(","):
        name, _, weight = entry.replace(" ", "").partition(";")
        if name == "gzip":
            return not re.fullmatch(r"q=0(\.0*)?", weight)
    return False


def _read(place: Path) -> dict[str, File]:
    """Return every file of a build by name, without symbolic links."""
    paths = (place / INDEX, *(place / "assets").glob("*"))
    return {
        path.relative_to(place).as_posix(): _file(path)
        for path in paths
        if path.is_file() and not path.is_symlink()
    }


def _file(path: Path) -> File:
    body = path.read_bytes()
    zipped = gzip.compress(body, 9, mtime=0)
    kind = _KINDS.get(path.suffix, "application/octet-stream")
    tag = hashlib.sha256(body).hexdigest()[:32]
    return File(body, zipped if len(zipped) < 0.9 * len(body) else None, kind, tag)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
