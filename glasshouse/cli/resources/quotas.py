"""The command quota."""

from typing import Annotated

import typer

from glasshouse.cli.arguments import overrides
from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Client


def quota(
    owner: Annotated[str | None, typer.Argument(help="Default: the owner of the key.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="NAME=VALUE", help="Set a limit. null: the default."),
    ] = None,
    json: Json = False,
) -> None:
    """Show the quotas and usage of an owner; with -s, change limits (admins only)."""
    with Client() as client:
        found = client.quotas.get(owner)
        if changes:
            own = dict(found.data["own"])
            for change in changes:
                overrides.apply(own, change)
            found = client.quotas.put(found.data["owner"], **own)
    if json:
        output.document(found.data)
        return
    limits, used = found.data["limits"], found.data["used"]
    rows = ([name, _format(name, used.get(name)), _format(name, limits[name])] for name in limits)
    output.table(["quota", "used", "limit"], rows, numbers={"used", "limit"})


def _format(name: str, value: float | None) -> str | None:
    if value is None:
        return None
    return output.size(value) if name.endswith("_bytes") else f"{value:g}"
