"""Where output goes: data to stdout, everything for people to stderr."""

import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from glasshouse import jsonio
from glasshouse.errors import APIStatusError, GlasshouseError, JobFailed

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def document(value: Any) -> None:
    """Print one JSON document."""
    sys.stdout.write(jsonio.dumps(value) + "\n")
    sys.stdout.flush()


def line(text: str) -> None:
    """Print a line of data."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def tell(text: str) -> None:
    """Tell the user something that is not data."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, fixed: int = 1) -> None:
    """Print a table; the first columns (``fixed`` of them) are never shortened."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    texts = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    for number, name in enumerate(columns):
        is_fixed = number < fixed
        width = max((len(row[number]) for row in texts), default=0) if is_fixed else None
        shown.add_column(
            name, no_wrap=True, overflow="fold" if is_fixed else "ellipsis", min_width=width
        )
    for row in texts:
        shown.add_row(*map(Text, row))
    Console(highlight=False).print(shown)


def figure(value: Any) -> str:
    """A number as people read it; also the name of one that is not finite."""
    number = jsonio.number(value)
    if number is None:
        return "-"
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def size(count: float) -> str:
    """A number of bytes as people read it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def failure(error: Exception, code: int, *, as_json: bool) -> None:
    """Tell why a command failed; with ``--json`` also as the document on stdout."""
    text = error.detail if isinstance(error, GlasshouseError) else str(error)
    if as_json:
        told: dict[str, Any] = {"kind": type(error).__name__, "detail": text, "exit_code": code}
        if isinstance(error, APIStatusError):
            told["problem"] = error.problem
        if isinstance(error, JobFailed):
            told |= {"job": error.job_id, "error": error.error}
        document({"error": told})
    tell(f"error: {text}")
