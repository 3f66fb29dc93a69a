"""Commands for workers: list, drain, remove."""

from typing import Annotated

import typer

from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.help_text import Command, group
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Client

Name = Annotated[str, typer.Argument(help="The worker's name.")]


def list_workers(json: Json = False) -> None:
    """List workers: active, draining, stopped or lost."""
    with Client() as client:
        rows = [row.data for row in client.workers.list()]
    columns = ["id", "state", "host", "version", "last_seen_at"]
    output.listing(rows, columns, as_json=json, short={"host"})


app = group("Manage the workers that run jobs.", list_workers)


@app.command(cls=Command)
def drain(worker: Name, json: Json = False) -> None:
    """Drain a worker: its running jobs continue, but it accepts no new ones."""
    with Client() as client:
        drained = client.workers.drain(worker).data
    if json:
        output.document(drained)
    else:
        output.message(f"{worker} accepts no new jobs until it is restarted")


@app.command(cls=Command)
def remove(worker: Name, json: Json = False) -> None:
    """Remove a stopped or lost worker and its devices."""
    with Client() as client:
        client.workers.delete(worker)
    if json:
        output.document({"id": worker, "deleted": True})
    else:
        output.message(f"{worker} removed")
