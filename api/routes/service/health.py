"""Health checks for people and load balancers, and metrics for Prometheus."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from api.http.access import Read
from api.http.answers import Json
from api.routes.service.prometheus import ProcessMetrics
from api.routes.service.readiness import Readiness
from api.schemas import documents

router = APIRouter(tags=["service"])


@router.get("/livez", summary="Check that the process is alive")
async def get_livez() -> Response:
    """Always answers 200."""
    return Json({"status": "ok"})


@router.get(
    "/readyz",
    summary="Check that the service is ready",
    responses={
        200: {"model": documents.Readiness, "description": "This process can serve requests."},
        503: {"model": documents.Readiness, "description": "Not ready."},
    },
)
def get_readyz(
    request: Request,
    strict: Annotated[bool, Query(description="503 unless every check passes.")] = False,
) -> Response:
    """The result of each check: `ok`, or the problem.

    For load balancers, use it without `strict`: 503 only while this process cannot read the
    database, or is shutting down. For monitoring, use `strict=true`: 503 unless every check passes.
    """
    readiness: Readiness = request.app.state.readiness
    report = readiness.report()
    well = report.status == "ok" if strict else report.status != "down"
    body = {"status": report.status, "checks": report.checks, "warnings": report.warnings}
    headers = {} if well else {"Retry-After": "2"}
    return Json(body, status_code=200 if well else 503, headers=headers)


@router.get("/metrics", summary="Get Prometheus metrics", response_class=PlainTextResponse)
def get_metrics(request: Request, caller: Read) -> Response:
    """Metrics of this process and of the database, in Prometheus' text format."""
    del caller
    meters: ProcessMetrics = request.app.state.meters
    return Response(meters.text(), media_type=CONTENT_TYPE_LATEST)
