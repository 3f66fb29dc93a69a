"""The page of the Python client, from the signatures and docstrings of its public names.

Signatures are shown as they are written, so they are read from the source: what Python itself
knows of them has every alias spelled out.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from cells import cell

import glasshouse
from glasshouse import client as public
from glasshouse import errors
from glasshouse.client.training import specs as training

WIDEST = 96
FIRST = ("Client", "Job", "Layer", "LayerStats", "History", "Series", "Probe", "Command")
"""Of the classes; others follow by name."""
Class = type[Any]
Defined = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """Every public name of the client."""
    lines = [
        "# Python",
        "",
        "The public names of `glasshouse`, generated from its code. For a guide, see",
        "[use it from Python](../how-to/client.md).",
        "",
    ]
    if _names("Async"):
        lines += [
            "`AsyncClient` and its objects have the same names and methods. Await the methods that",
            "send a request.",
            "",
        ]
    for name in _in_order(_names("")):
        value = getattr(glasshouse, name, None) or getattr(public, name)
        lines += _class(name, value) if inspect.isclass(value) else _function(name, value)
        if name == "Client":
            lines += [*_options(), *_resources()]
    return "\n".join([*lines, *_errors()]) + "\n"


def _names(prefix: str) -> list[str]:
    """Public names but errors; without a prefix those of blocking code."""
    of_client = {*public.__all__, *(set(glasshouse.__all__) - set(dir(errors)) - {"spec"})}
    if prefix:
        return [name for name in of_client if name.startswith(prefix)]
    return [name for name in of_client if not name.startswith("Async")]


def _in_order(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else 99, name))


def _class(name: str, cls: Class) -> Iterator[str]:
    yield from (f"## {name}", "", *_prose(inspect.getdoc(cls)))
    members = _members(cls)
    if "__init__" in members and name == "Client":
        yield from (*_signature(name, members["__init__"]), "")
    yield from _attributes(cls, members)
    for member, defined in members.items():
        if not member.startswith("_") and not _is_property(defined):
            yield from _method(f"{name}.{member}", member, defined)


def _resources() -> Iterator[str]:
    """The resources of a client: ``client.jobs`` and the others."""
    with public.Client("http://127.0.0.1:1", "gh_none") as client:
        kept = {name: value for name, value in vars(client).items() if not name.startswith("_")}
    for name, value in kept.items():
        if not isinstance(value, str):
            yield from (f"## client.{name}", "", *_prose(inspect.getdoc(type(value))))
            for member, defined in _members(type(value)).items():
                if not member.startswith("_"):
                    yield from _method(f"client.{name}.{member}", member, defined)


def _members(cls: Class) -> dict[str, Defined]:
    """Functions and properties as they are written, those of bases of our own first."""
    found: dict[str, Defined] = {}
    for owner in reversed(cls.__mro__):
        if owner.__module__.startswith("glasshouse"):
            body = _source(owner).body
            found |= {each.name: each for each in body if isinstance(each, Defined)}
    return found


def _source(value: Any) -> Any:
    """The definition of a class or a function, as it is written."""
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def _is_property(defined: Defined) -> bool:
    return any(ast.unparse(each).endswith("property") for each in defined.decorator_list)


def _attributes(cls: Class, members: dict[str, Defined]) -> Iterator[str]:
    rows = [*_fields(cls)]
    for name, defined in members.items():
        if _is_property(defined) and not name.startswith("_"):
            gives = ast.unparse(defined.returns) if defined.returns else ""
            rows.append((name, gives, ast.get_docstring(defined)))
    if rows:
        yield from ("| attribute | type | meaning |", "|---|---|---|")
        yield from (
            f"| `{name}` | {cell(f'`{kind}`')} | {cell(told)} |" for name, kind, told in rows
        )
        yield ""


def _fields(cls: Class) -> Iterator[tuple[str, str, str | None]]:
    """Annotated names of a class, each with the string under it."""
    body = _source(cls).body
    for here, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            told = None
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                told = str(below.value.value)
            if not here.target.id.startswith("_"):
                yield here.target.id, ast.unparse(here.annotation), told


def _options() -> Iterator[str]:
    """What ``Client.train`` and ``Client.serve`` take by name."""
    for options in (training.TrainOptions, training.ServeOptions):
        yield from (f"## {options.__name__}", "", *_prose(inspect.getdoc(options)))
        yield from ("| option | type | meaning |", "|---|---|---|")
        for cls in (options, training.JobOptions):
            for name, kind, told in _fields(cls):
                yield f"| `{name}` | {cell(f'`{kind}`')} | {cell(told)} |"
        yield ""


def _method(full_name: str, name: str, defined: Defined) -> Iterator[str]:
    yield from (f"### {full_name}", "", *_signature(name, defined), "")
    yield from _prose(ast.get_docstring(defined))


def _function(name: str, value: Any) -> Iterator[str]:
    defined = _source(value)
    yield from (f"## {name}", "", *_signature(name, defined), "")
    yield from _prose(ast.get_docstring(defined))


def _signature(name: str, defined: Defined) -> list[str]:
    """As a block of code, one parameter a line where it would be too wide."""
    arguments = defined.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args.pop(0)
    gives = f" -> {ast.unparse(defined.returns)}" if defined.returns and name != "Client" else ""
    parameters = [*_split(arguments)]
    one = f"{name}({', '.join(parameters)}){gives}"
    if len(one) <= WIDEST:
        return ["```", one, "```"]
    return ["```", f"{name}(", *(f"    {each}," for each in parameters), f"){gives}", "```"]


def _split(arguments: ast.arguments) -> Iterator[str]:
    """The parameters of a signature, one by one, as Python would write them."""
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    for argument, default in zip(arguments.args, defaults, strict=True):
        yield _written(argument, default)
    if arguments.vararg:
        yield f"*{ast.unparse(arguments.vararg)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _written(argument, default)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _written(argument: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(argument)
    sign = " = " if argument.annotation else "="
    return f"{ast.unparse(argument)}{sign}{ast.unparse(default)}"


def _prose(docstring: str | None) -> Iterator[str]:
    """A docstring as Markdown: paragraphs, then ``Args``, ``Returns`` and ``Raises`` as lists."""
    for part in re.split(
        r"\n\n(?=(?:Args|Returns|Yields|Raises):\n)|\n\n", inspect.cleandoc(docstring or "")
    ):
        title, _, rest = part.partition(":\n")
        if title == "Raises":
            yield from ("Raises:", "")
        if title in ("Args", "Raises"):
            yield from (f"- `{name}`: {_plain(told)}" for name, told in _entries(rest))
        elif title in ("Returns", "Yields"):
            yield f"Gives: {_plain(rest)}"
        else:
            yield _plain(part)
        yield ""


def _entries(listed: str) -> list[tuple[str, str]]:
    entries = re.split(r"\n(?! )", textwrap.dedent(listed))
    return [(name, told) for name, _, told in (entry.partition(":") for entry in entries)]


def _plain(told: str | None) -> str:
    return " ".join((told or "").replace("``", "`").split())


def _errors() -> Iterator[str]:
    """The exceptions, with the status that each is of."""
    yield from ("## Errors", "", "All are `glasshouse.GlasshouseError`.", "")
    yield from ("| | |", "|---|---|")
    for name in sorted(set(glasshouse.__all__) & set(dir(errors))):
        told = (inspect.getdoc(getattr(errors, name)) or "").split("\n\n")[0]
        yield f"| `{name}` | {cell(told)} |"
