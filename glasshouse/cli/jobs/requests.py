"""The command that lists the requests that a serve job has recorded."""

from typing import Annotated, Any

import typer

from glasshouse import jsonio
from glasshouse.cli.arguments import references
from glasshouse.cli.jobs.jobs import JobId
from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.output import Json, figure
from glasshouse.client import Client

_COLUMNS = ("at", "model", "status", "rows", "queue ms", "compute ms", "inputs", "outputs")
_SHOWN = 60
"""The most characters of the values in the table."""


def requests(
    job: JobId,
    *,
    model: Annotated[str | None, typer.Option(help="Only requests to this model.")] = None,
    status: Annotated[
        list[int] | None,
        typer.Option(min=100, max=599, help="Only requests with this HTTP status. Repeatable."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of requests.")] = 20,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete all recorded requests instead.")
    ] = False,
    json: Json = False,
) -> None:
    """List the requests that a serve job has recorded (request_log), newest first."""
    if delete and (model is not None or status):
        detail = "it deletes all recorded requests: remove --model and --status"
        raise typer.BadParameter(detail, param_hint="--delete")
    with Client() as client:
        job = references.job_id(client, job)
        found = client.jobs.get(job)
        if delete:
            found.delete_requests()
            if json:
                output.document({"job": job, "deleted": True})
            else:
                output.message(f"the recorded requests of {job} are deleted")
            return
        entries = [
            one.data for one in found.requests(model=model, status=status or None, limit=limit)
        ]
    if json:
        output.document({"job": job, "requests": entries})
        return
    if not entries:
        output.message("no recorded requests")
        return
    rows = [_row(entry) for entry in entries]
    output.table(_COLUMNS, rows, numbers={"rows", "queue ms", "compute ms"})


def _row(entry: dict[str, Any]) -> list[str]:
    status = str(entry["status"])
    return [
        entry["at"],
        f"{entry['model']}:{entry['version']}",
        status if entry["code"] is None else f"{status} {entry['code']}",
        figure(entry["num_rows"]),
        figure(entry["queue_ms"]),
        figure(entry["compute_ms"]),
        _values(entry, "inputs"),
        _values(entry, "outputs"),
    ]


def _values(entry: dict[str, Any], part: str) -> str:
    """The beginning of the values as JSON."""
    if entry[part] is None:
        return "(too large)" if part in entry["too_large"] else "-"
    text = jsonio.dumps(entry[part])
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
