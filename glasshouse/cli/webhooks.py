"""Commands for webhooks: list, add, remove, deliveries."""

from typing import Annotated

import typer

from glasshouse.cli import output
from glasshouse.cli.output import Json
from glasshouse.cli.shown import Command, group
from glasshouse.client import Client


def list_webhooks(json: Json = False) -> None:
    """List webhooks."""
    with Client() as client:
        rows = [row.data for row in client.webhooks.list()]
    columns = ["id", "url", "events", "failing_since", "disabled_reason"]
    output.listing(rows, columns, as_json=json, short={"url", "events", "disabled_reason"})


app = group("Addresses that get a message when a job changes its state.", list_webhooks)


@app.command(cls=Command)
def add(
    url: Annotated[str, typer.Argument(help="Where messages are posted to.")],
    event: Annotated[
        list[str] | None, typer.Option("--event", help="Such as job.failed; several may be given.")
    ] = None,
    json: Json = False,
) -> None:
    """Make a webhook. The secret of its signatures is printed, this once."""
    with Client() as client:
        made = client.webhooks.create(url, event or ()).data
    if json:
        output.document(made)
    else:
        output.line(f"{made['id']} {made['secret']}")


@app.command(cls=Command)
def remove(webhook: Annotated[str, typer.Argument(help="Its id.")], json: Json = False) -> None:
    """Delete a webhook."""
    with Client() as client:
        client.webhooks.delete(webhook)
    if json:
        output.document({"id": webhook, "deleted": True})
    else:
        output.tell(f"{webhook} is deleted")


@app.command(cls=Command)
def deliveries(webhook: Annotated[str, typer.Argument(help="Its id.")], json: Json = False) -> None:
    """Show what was sent to a webhook, newest first."""
    with Client() as client:
        rows = [row.data for row in client.webhooks.deliveries(webhook)]
    columns = ["id", "type", "state", "tries", "status", "problem", "created_at"]
    output.listing(rows, columns, as_json=json, short={"type", "problem"}, numbers={"tries"})
