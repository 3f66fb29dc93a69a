"""Serve the pages of error codes and the API's documentation."""

import html
import mimetypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

import api
from api.http.access import Read
from api.http.answers import Json
from glasshouse import errors
from glasshouse.errors import GlasshouseError, RouteNotFound, RunFailure, ServiceError

router = APIRouter(tags=["service"])
_PACKAGE = Path(api.__path__[0])
# In a wheel the pages are inside this package; in a checkout they are in docs/errors.
_TEXTS = next(
    (
        path
        for path in (_PACKAGE / "error_pages", _PACKAGE.parent / "docs" / "errors")
        if path.is_dir()
    ),
    _PACKAGE,
)
_FILES = ("swagger-ui.css", "swagger-ui-bundle.js", "favicon.png")
_PAGE_POLICY = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_DOCS = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Glasshouse API</title>
<link rel="stylesheet" href="/docs/swagger-ui.css">
<link rel="icon" href="/docs/favicon.png"></head>
<body><div id="page"></div>
<script src="/docs/swagger-ui-bundle.js"></script><script src="/docs/start.js"></script>
</body></html>
"""
_START = """SwaggerUIBundle({
  url: "/openapi.json", dom_id: "#page", deepLinking: true, validatorUrl: null
});
"""


@router.get("/errors/{code}", include_in_schema=False)
def get_error_page(code: str) -> Response:
    """Explain an error code and what to do."""
    known = _codes()
    if code not in known:
        raise RouteNotFound("There is no error of this code.")
    path = _TEXTS / f"{code}.md"
    text = path.read_text("utf-8") if path.is_file() else _from_class(known[code])
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{code}</title></head>'
        f"<body><pre>{html.escape(text)}</pre></body></html>"
    )
    return Response(page, media_type="text/html", headers={"Cache-Control": "max-age=3600"})


def _codes() -> dict[str, type[GlasshouseError]]:
    found: dict[str, type[GlasshouseError]] = {}
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, (ServiceError, RunFailure)):
            found[value().code] = value
    return found


def _from_class(cls: type[GlasshouseError]) -> str:
    return f"# {cls.__name__}\n\n{(cls.__doc__ or '').strip()}\n"


@router.get("/openapi.json", include_in_schema=False)
def get_openapi(request: Request, caller: Read) -> Response:
    """Return the OpenAPI document."""
    del caller
    return Json(request.app.openapi())


@router.get("/docs", include_in_schema=False)
def get_docs(caller: Read) -> Response:
    """Return the interactive documentation of the API."""
    del caller
    return _page(_DOCS, "text/html")


@router.get("/docs/{file}", include_in_schema=False)
def get_docs_file(caller: Read, file: str) -> Response:
    """Return an asset of the documentation page. Nothing is loaded from another server."""
    del caller
    if file == "start.js":
        return _page(_START, "text/javascript")
    if file not in _FILES:
        raise RouteNotFound("No route matches this path.")
    kind: Any = mimetypes.guess_type(file)[0]
    return FileResponse(
        _swagger_ui() / file, media_type=kind, headers={"Cache-Control": "no-cache"}
    )


def _swagger_ui() -> Path:
    """Return the directory of fastapi-offline's Swagger UI.

    Only its files are used, so it is not imported.
    """
    package = find_spec("fastapi_offline")
    if package is None or not package.submodule_search_locations:
        raise RouteNotFound("Swagger UI is not installed; /openapi.json has the same facts.")
    return Path(package.submodule_search_locations[0]) / "static"


def _page(text: str, media_type: str) -> Response:
    return Response(text, media_type=media_type, headers={"Content-Security-Policy": _PAGE_POLICY})
