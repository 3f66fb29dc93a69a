"""Build the OpenAPI 3.1 document of the app. ``python -m api.openapi`` prints it."""

import json
import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from api.http.access import OPEN_PATHS
from api.http.bodies import BODIES
from api.schemas.documents import Problem, answers

_TAGS = {
    "service": "The service itself, its catalog and its health.",
    "keys": "API keys and browser sessions.",
    "datasets": "Upload and inspect data.",
    "jobs": "Plan, submit and control jobs.",
    "events": "The event log of a job, as a list and as a stream.",
    "inside": "Inspect a job: metrics, layers, statistics, tensors, logs.",
    "checkpoints": "Saved and uploaded weights.",
    "inference": "Served models by the Open Inference Protocol (KServe v2, Triton).",
    "models": "Published checkpoints: versions under a name, and aliases.",
    "webhooks": "Notifications when jobs change state.",
    "quotas": "Limits and current use of an owner.",
    "machines": "Workers, devices and the queue.",
}
_DESCRIPTION = (
    "A self-hosted training service with full visibility. Errors are RFC 9457 problem documents; "
    "NaN and Inf are the strings `NaN`, `Infinity` and `-Infinity` everywhere."
)
_REF = "#/components/schemas/{model}"


def operation_name(route_name: str) -> str:
    """Convert ``list_jobs`` to ``listJobs``."""
    return re.sub(r"_([a-z0-9])", lambda match: match.group(1).upper(), route_name)


def install(app: FastAPI) -> None:
    """Make the app serve this document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = document(app)
        return app.openapi_schema

    app.openapi = openapi


def document(app: FastAPI) -> dict[str, Any]:
    """Return the document of all routes."""
    made = get_openapi(
        title="Glasshouse",
        version=app.version,
        summary="A self-hosted training service that lets you inspect networks while they train",
        description=_DESCRIPTION,
        routes=app.routes,
        servers=[{"url": "/", "description": "This service"}],
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    used = {tag for _, operation in _operations(made) for tag in operation.get("tags", [])}
    made["tags"] = [{"name": name, "description": _TAGS.get(name, name)} for name in sorted(used)]
    schemas: dict[str, Any] = made.setdefault("components", {}).setdefault("schemas", {})
    _add_bodies(schemas)
    for path, operation in _operations(made):
        _drop_fastapi_errors(operation)
        if path in OPEN_PATHS:
            operation["security"] = []
        else:
            operation["responses"].setdefault("429", answers(429, None, 429)[429])
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    made["components"]["schemas"] = dict(sorted(schemas.items()))
    made["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "An API key, `gh_…`"}
    }
    made["security"] = [{"key": []}]
    return made


def _operations(made: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (path, operation)
        for path, methods in made.get("paths", {}).items()
        for operation in methods.values()
    ]


def _add_bodies(schemas: dict[str, Any]) -> None:
    """Add the schemas of request bodies.

    A spec's ``Layer`` becomes ``LayerSpec``, because responses have a ``Layer`` too.
    """
    wanted = sorted({*BODIES, Problem}, key=lambda model: model.__name__)
    _, made = models_json_schema([(model, "validation") for model in wanted], ref_template=_REF)
    text = json.dumps(made["$defs"])
    found: dict[str, Any] = made["$defs"]
    names = {name: name for name in found}
    for name, schema in found.items():
        if schemas.get(name, schema) != schema:
            names[name] = f"{name}Spec"
            text = text.replace(
                f'"{_REF.format(model=name)}"', f'"{_REF.format(model=names[name])}"'
            )
    for name, schema in json.loads(text).items():
        schemas.setdefault(names[name], schema)


def _drop_fastapi_errors(operation: dict[str, Any]) -> None:
    wrong = operation["responses"].get("422", {}).get("content", {}).get("application/json")
    if wrong is not None and "HTTPValidationError" in json.dumps(wrong):
        operation["responses"]["422"] = {
            "description": "A parameter of the request is wrong.",
            "content": {
                "application/problem+json": {"schema": {"$ref": _REF.format(model="Problem")}}
            },
        }
