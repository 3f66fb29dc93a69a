"""How commands explain themselves."""

from typing import Any

from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command whose flags say no type: there is nothing to give them."""

    def get_params(self, ctx: Any) -> Any:
        """The options and arguments."""
        return _flagged(super().get_params(ctx))


class Group(TyperGroup):
    """The same of a group of commands."""

    def get_params(self, ctx: Any) -> Any:
        """The options and arguments."""
        return _flagged(super().get_params(ctx))


def _flagged(params: Any) -> Any:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params
