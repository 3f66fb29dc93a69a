"""The help of commands and of groups of commands."""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from glasshouse.cli.terminal.output import Json


class Command(TyperCommand):
    """A command whose help shows no type for flags, which take no value."""

    def get_params(self, ctx: Any) -> Any:
        """The options and arguments."""
        return _flagged(super().get_params(ctx))


class Group(TyperGroup):
    """The same for a group of commands."""

    def get_params(self, ctx: Any) -> Any:
        """The options and arguments."""
        return _flagged(super().get_params(ctx))


def _flagged(params: Any) -> Any:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def group(about: str, listing: Callable[..., None]) -> typer.Typer:
    """Commands for one resource; without a command, the group runs ``listing``."""
    app = typer.Typer(help=about, cls=Group)

    def alone(context: typer.Context, json: Json = False) -> None:
        if context.invoked_subcommand is None:
            listing(json=json)

    alone.__doc__ = f"{about} Default: list."
    app.callback(invoke_without_command=True)(alone)
    app.command("list", cls=Command)(listing)
    return app
