"""Whether the service is well, for people, load balancers and Prometheus."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from api.http.access import Read
from api.http.answers import Json
from api.routes.prometheus import ProcessMetrics
from api.routes.readiness import Readiness
from api.schemas import documents

router = APIRouter(tags=["service"])


@router.get("/livez", summary="Whether this process answers")
async def get_livez() -> Response:
    """Always the same."""
    return Json({"status": "ok"})


@router.get(
    "/readyz",
    summary="Whether the service can work",
    responses={
        200: {"model": documents.Readiness, "description": "This process can serve."},
        503: {"model": documents.Readiness, "description": "It cannot; or, strictly, not all is."},
    },
)
def get_readyz(
    request: Request,
    strict: Annotated[bool, Query(description="503 also while something is missing.")] = False,
) -> Response:
    """Each part by itself: `ok`, or what is wrong.

    For load balancers as it is: 503 only while this process cannot read the database, or is about
    to end. With `strict=true`, for monitors: 503 unless everything is well.
    """
    readiness: Readiness = request.app.state.readiness
    report = readiness.report()
    well = report.status == "ok" if strict else report.status != "down"
    body = {"status": report.status, "checks": report.checks, "warnings": report.warnings}
    headers = {} if well else {"Retry-After": "2"}
    return Json(body, status_code=200 if well else 503, headers=headers)


@router.get("/metrics", summary="Figures for Prometheus", response_class=PlainTextResponse)
def get_metrics(request: Request, caller: Read) -> Response:
    """Figures of this process and of the ledger, in Prometheus' text format."""
    del caller
    meters: ProcessMetrics = request.app.state.meters
    return Response(meters.text(), media_type=CONTENT_TYPE_LATEST)
