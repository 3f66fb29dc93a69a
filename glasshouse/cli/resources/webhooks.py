"""Commands for webhooks: list, add, remove, deliveries."""

from typing import Annotated

import typer

from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.help_text import Command, group
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Client


def list_webhooks(json: Json = False) -> None:
    """List webhooks."""
    with Client() as client:
        rows = [row.data for row in client.webhooks.list()]
    columns = ["id", "url", "events", "failing_since", "disabled_reason"]
    output.listing(rows, columns, as_json=json, short={"url", "events", "disabled_reason"})


app = group("Manage webhooks, which receive a message when a job changes state.", list_webhooks)


@app.command(cls=Command)
def add(
    url: Annotated[str, typer.Argument(help="The URL to which messages are posted.")],
    event: Annotated[
        list[str] | None, typer.Option("--event", help="An event such as job.failed; repeatable.")
    ] = None,
    json: Json = False,
) -> None:
    """Create a webhook and print its signing secret, which is not shown again."""
    with Client() as client:
        made = client.webhooks.create(url, event or ()).data
    if json:
        output.document(made)
    else:
        output.line(f"{made['id']} {made['secret']}")


@app.command(cls=Command)
def remove(
    webhook: Annotated[str, typer.Argument(help="The webhook id.")], json: Json = False
) -> None:
    """Delete a webhook."""
    with Client() as client:
        client.webhooks.delete(webhook)
    if json:
        output.document({"id": webhook, "deleted": True})
    else:
        output.message(f"{webhook} deleted")


@app.command(cls=Command)
def deliveries(
    webhook: Annotated[str, typer.Argument(help="The webhook id.")], json: Json = False
) -> None:
    """List the deliveries of a webhook, newest first."""
    with Client() as client:
        rows = [row.data for row in client.webhooks.deliveries(webhook)]
    columns = ["id", "type", "state", "tries", "status", "problem", "created_at"]
    output.listing(rows, columns, as_json=json, short={"type", "problem"}, numbers={"tries"})
