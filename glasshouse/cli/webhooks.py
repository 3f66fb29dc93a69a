"""Commands for webhooks: list, add, remove, deliveries."""

from typing import Annotated

import typer

from glasshouse.cli import output
from glasshouse.cli.output import Json
from glasshouse.cli.shown import Command, Group
from glasshouse.client import Client

app = typer.Typer(help="Addresses that are told when jobs move.", cls=Group)


@app.callback(invoke_without_command=True)
def list_all(context: typer.Context, json: Json = False) -> None:
    """Addresses that are told when jobs move. Alone: list them."""
    if context.invoked_subcommand is None:
        list_webhooks(json=json)


@app.command("list", cls=Command)
def list_webhooks(json: Json = False) -> None:
    """List webhooks."""
    with Client() as client:
        rows = [row.data for row in client.webhooks.list()]
    if json:
        output.document(rows)
    else:
        columns = ["id", "url", "events", "failing_since", "disabled_reason"]
        cells = ([_cell(row[name]) for name in columns] for row in rows)
        output.table(columns, cells, short={"url", "events", "disabled_reason"})


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
    if json:
        output.document(rows)
    else:
        columns = ["id", "type", "state", "tries", "status", "problem", "created_at"]
        cells = ([_cell(row[name]) for name in columns] for row in rows)
        output.table(columns, cells, short={"type", "problem"}, numbers={"tries"})


def _cell(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
