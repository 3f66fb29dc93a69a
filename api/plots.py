"""Pictures of a job's series, for curl and chat. Drawn in a thread; matplotlib is loaded late."""

import io
import math
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from api import inside
from api.access import Read
from api.answers import etag, is_fresh, not_modified
from api.events import JobId
from api.resources import House
from glasshouse.errors import MetricNotFound
from models import jobs, metrics
from models.metrics import Point

router = APIRouter(prefix="/api/v1", tags=["inside"])
MAX_POINTS = 2000
MAX_SERIES = 12
MEDIA = {"png": "image/png", "svg": "image/svg+xml"}
_NAMES = {"loss": "loss", "lr": "lr", "throughput": "samples_per_s"}


@router.get(
    "/jobs/{id}/plots/{plot}",
    summary="A picture of a series",
    responses=inside.binary(*MEDIA.values(), others=inside.READ),
)
def get_plot(
    request: Request,
    *,
    house: House,
    caller: Read,
    job: JobId,
    plot: Literal["loss", "lr", "throughput"],
    format: Literal["png", "svg"] = "png",  # noqa: A002 (the public name)
) -> Response:
    """Each series of the kind over the steps; a red mark where a value is not finite."""
    with house.database.read() as tx:
        found = jobs.get(tx, job, caller.sees)
        tag = etag(job, found.version, plot, format)
        if is_fresh(request, tag):
            return not_modified(tag)
        names = [row.name for row in metrics.names(tx, job)]
        wanted = [name for name in names if name.rpartition("/")[2] == _NAMES[plot]][:MAX_SERIES]
        series = {name: metrics.thin(metrics.query(tx, job, name), MAX_POINTS) for name in wanted}
    if not series:
        raise MetricNotFound(f"The job has reported nothing to draw as {plot}.")
    picture = draw(found.name or job, plot, series, format)
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    return Response(picture, headers=headers, media_type=MEDIA[format])


def draw(title: str, label: str, series: Mapping[str, list[Point]], form: str) -> bytes:
    """Draw series over steps."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (half a second, and 40 MB, when asked)

    figure: Any = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for name, points in series.items():
        finite = [point for point in points if math.isfinite(point.value)]
        marker = "." if len(finite) < 60 else ""
        steps = [point.step for point in finite]
        axes.plot(steps, [point.value for point in finite], marker, ls="-", lw=1.2, label=name)
        for point in points:
            if not math.isfinite(point.value):
                axes.axvline(point.step, color="red", lw=0.8, alpha=0.6)
    axes.set_title(title.replace("$", r"\$"), fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.3)
    if any(name != label for name in series):
        axes.legend(fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format=form)
    return picture.getvalue()
