"""The page of the command line, from its own commands."""

from collections.abc import Iterator
from typing import Any, get_args

import typer.main
from cells import cell

from glasshouse.cli import app

Command = Any
Parameter = Any
"""Of Typer, which has classes of its own for them, or click's, by its version."""


def page() -> str:
    """Every command with its arguments and options."""
    commands = list(_commands(typer.main.get_command(app), "glasshouse"))
    lines = [
        "# Commands",
        "",
        "Every command of `glasshouse`, generated from the program. For a guide, see",
        "[use the command line](../how-to/command-line.md), which also lists the",
        "[exit codes](../how-to/command-line.md#in-scripts). Every command takes `--help`;",
        "`glasshouse --version` prints the version.",
        "",
        "| | |",
        "|---|---|",
        *(
            f"| [{name}](#{name.replace(' ', '-')}) | {_first(command)} |"
            for name, command in commands
        ),
    ]
    for name, command in commands:
        lines += ["", f"## {name}", "", *_command(name, command)]
    return "\n".join(lines) + "\n"


def _commands(group: Command, name: str) -> Iterator[tuple[str, Command]]:
    """Leaves of the tree, in the program's own order."""
    if not hasattr(group, "commands"):
        yield name, group
        return
    for word, command in group.commands.items():
        yield from _commands(command, f"{name} {word}")


def _first(command: Command) -> str:
    return cell(command.help).split(". ")[0].rstrip(".")


def _command(name: str, command: Command) -> Iterator[str]:
    shown = [each for each in command.params if not each.hidden and each.name != "help"]
    arguments = [each for each in shown if each.param_type_name == "argument"]
    options = [each for each in shown if each.param_type_name == "option"]
    words = [name, *("[OPTIONS]" for _ in options[:1]), *(_place(each) for each in arguments)]
    yield from (cell(command.help), "", "```", " ".join(words), "```")
    if shown:
        yield from ("", "| | |", "|---|---|")
        yield from (f"| `{_place(each)}` | {_told(each)} |" for each in arguments)
        yield from (f"| {_flags(each)} | {_told(each)} |" for each in options)


def _place(argument: Parameter) -> str:
    name = (argument.metavar or argument.name).upper()
    name = f"{name.rstrip('…')} …" if argument.nargs == -1 else name
    return name if argument.required else f"[{name}]"


def _flags(option: Parameter) -> str:
    value = "" if option.is_flag else f" {option.metavar or option.name.rstrip('_').upper()}"
    return ", ".join(f"`{flag}{value}`" for flag in (*option.opts, *option.secondary_opts))


def _told(parameter: Parameter) -> str:
    told = [cell(parameter.help), *_limits(parameter)]
    default = parameter.default
    is_shown = isinstance(default, (str, int, float)) and not isinstance(default, bool)
    if is_shown and default != "" and "Default" not in told[0]:
        told.append(f"Default: `{default}`.")
    if getattr(parameter, "multiple", False) and "repeat" not in told[0]:
        told.append("May be given several times.")
    return " ".join(word for word in told if word)


def _limits(parameter: Parameter) -> Iterator[str]:
    low, high = getattr(parameter, "min", None), getattr(parameter, "max", None)
    if low is not None or high is not None:
        yield f"At least {low}." if high is None else f"{low} to {high}."
    described = getattr(parameter, "type_descriptor", None)
    choices = [
        each for each in get_args(getattr(described, "annotation", None)) if isinstance(each, str)
    ]
    if choices:
        yield f"One of {', '.join(f'`{choice}`' for choice in choices)}."
