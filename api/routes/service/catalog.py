"""Describe the service and list what its engine supports."""

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.app_state import AppStateDep
from api.http.access import Read
from api.http.answers import MAX_LIMIT, Json
from api.http.connections import MAX_HEAD_BYTES
from api.planning.planner import SECTIONS, UNFILLED
from api.schemas import documents
from api.schemas.views import BASE
from api.streaming.waiting import MAX_WAIT_S
from engine.datasets import formats
from glasshouse.events import EVENT_TYPES
from glasshouse.spec.data import BUILTINS
from glasshouse.spec.tensor_kinds import TENSOR_KINDS

router = APIRouter(prefix=BASE, tags=["service"])
VERSION = "0.1.0"


@router.get("", include_in_schema=False)
@router.get(
    "/",
    summary="Get the service's version, capabilities and limits",
    responses=documents.answers(200, documents.Service, 401),
)
async def get_service(app_state: AppStateDep, caller: Read) -> Response:
    """Version, capabilities and limits. Check them for features that an older server may lack."""
    del caller
    settings = app_state.settings
    return Json(
        {
            "object": "service",
            "version": VERSION,
            "capabilities": {
                "kinds": ["train", "infer", "evaluate", "serve", "diagnose"],
                "networks": ["graph", "preset"],
                "dataset_formats": list(formats.formats()),
                "builtin_datasets": list(BUILTINS),
                "catalog": [name for name in SECTIONS if name not in UNFILLED],
                "event_types": list(EVENT_TYPES),
                "tensor_kinds": list(TENSOR_KINDS),
            },
            "limits": {
                "max_json_bytes": settings.max_json_bytes,
                "max_upload_bytes": settings.max_upload_bytes,
                "max_page": MAX_LIMIT,
                "max_head_bytes": MAX_HEAD_BYTES,
                "head_timeout_s": settings.head_timeout_s,
                "body_timeout_s": settings.body_timeout_s,
                "max_wait_s": MAX_WAIT_S,
                "planner_timeout_s": settings.planner_timeout_s,
                "idempotency_kept_s": 24 * 3600,
                "keep_values_days": settings.keep_values_days,
                "keep_events_days": settings.keep_events_days,
                "keep_metrics_days": settings.keep_metrics_days,
                "keep_statistics_days": settings.keep_statistics_days,
                "keep_requests_days": settings.keep_requests_days,
                "keep_captures_days": settings.keep_captures_days,
                "keep_checkpoints_days": settings.keep_checkpoints_days,
                "keep_jobs_days": settings.keep_jobs_days,
            },
        }
    )


@router.get(
    "/catalog/{section}",
    summary="List what the engine supports",
    responses=documents.answers(200, documents.Catalog, 401, 404, 503),
)
async def get_catalog(app_state: AppStateDep, caller: Read, section: str) -> Response:
    """Layers, losses, optimizers and so on, each with a JSON Schema of its arguments.

    `datasets`: the built-in datasets, and the file formats with their `suffixes`, `media_types` and
    options of `POST /datasets`.
    """
    del caller
    if section == "datasets":  # needs no torch
        entries = await run_in_threadpool(formats.catalog)
    else:
        entries = await app_state.planner.catalog(section)
    return Json({"object": "catalog", "section": section, "entries": entries})
