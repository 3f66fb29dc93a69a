"""Commands for workers: list, drain, remove."""

from typing import Annotated

import typer

from glasshouse.cli import output
from glasshouse.cli.output import Json
from glasshouse.client import Client

app = typer.Typer(help="The machines that run jobs.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="The worker's name.")]


@app.command("list")
def list_workers(json: Json = False) -> None:
    """List workers: active, draining, stopped or lost."""
    with Client() as client:
        rows = [row.data for row in client.workers.list()]
    if json:
        output.document(rows)
    else:
        columns = ["id", "state", "host", "version", "last_seen_at"]
        output.table(columns, ([row[name] for name in columns] for row in rows), short={"host"})


@app.command()
def drain(worker: Name, json: Json = False) -> None:
    """Give a worker no new jobs; those that run on it continue."""
    with Client() as client:
        drained = client.workers.drain(worker).data
    if json:
        output.document(drained)
    else:
        output.tell(f"{worker} takes no new jobs until it is started again")


@app.command()
def remove(worker: Name, json: Json = False) -> None:
    """Remove a worker that was stopped or is lost, and its devices."""
    with Client() as client:
        client.workers.delete(worker)
    if json:
        output.document({"id": worker, "deleted": True})
    else:
        output.tell(f"{worker} is removed")
