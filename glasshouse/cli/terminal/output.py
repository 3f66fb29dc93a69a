"""Output of commands: data to stdout, messages to stderr."""

import io
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, cast

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from glasshouse import jsonio
from glasshouse.cli.terminal import exit_codes
from glasshouse.errors import APIStatusError, GlasshouseError, JobFailed

_ID = re.compile(r"[a-z]+_[0-9a-z]{26}")
GAP = "  "
LEAST = 8
"""The minimum width of a shortened column."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def document(value: Any) -> None:
    """Print one JSON document."""
    sys.stdout.write(jsonio.dumps(value) + "\n")
    sys.stdout.flush()


def line(text: str) -> None:
    """Print a line of data."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def message(text: str) -> None:
    """Print a message to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    short: Collection[str] = (),
    numbers: Collection[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print a table.

    If a terminal is too narrow, the columns ``short`` are shortened, but no ids in them. If that is
    not enough, the columns ``optional`` are dropped, the first one first. The columns ``numbers``
    are right-aligned.
    """
    texts = [["-" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    console = Console(highlight=False, soft_wrap=True)
    widths = [max(map(cell_len, column)) for column in zip(columns, *texts, strict=True)]
    if console.is_terminal:
        least = [
            min(width, _least(column)) if column[0] in short else width
            for width, column in zip(widths, zip(columns, *texts, strict=True), strict=True)
        ]
        kept = _kept(columns, least, optional, console.width)
        columns = [columns[place] for place in kept]
        widths, least = ([sizes[place] for place in kept] for sizes in (widths, least))
        texts = [[row[place] for place in kept] for row in texts]
        _squeeze(widths, least, console.width)
    for number, row in enumerate([columns, *texts]):
        cells = (
            _fitted(text, width, right=name in numbers)
            for name, text, width in zip(columns, row, widths, strict=True)
        )
        shown = GAP.join(cells).rstrip()
        console.print(Text(shown, style="bold" if number == 0 else ""))


def listing(
    entries: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    *,
    as_json: bool,
    short: Collection[str] = (),
    numbers: Collection[str] = (),
) -> None:
    """Print entries as one JSON document, or these fields of them as a table."""
    if as_json:
        document(entries)
        return
    rows = ([_cell(entry[name]) for name in columns] for entry in entries)
    table(columns, rows, short=short, numbers=numbers)


def _cell(value: Any) -> Any:
    return ", ".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else value


def _least(cells: Iterable[str]) -> int:
    """The minimum width of a column: ids are never shortened."""
    return max([LEAST, *(len(cell) for cell in cells if _ID.fullmatch(cell))])


def _kept(
    columns: Sequence[str], least: Sequence[int], optional: Sequence[str], room: int
) -> list[int]:
    """The positions of the columns that fit once all have their minimum width."""
    kept = list(range(len(columns)))
    for name in optional:
        if sum(least[place] for place in kept) + len(GAP) * (len(kept) - 1) <= room:
            break
        kept.remove(columns.index(name))
    return kept


def _squeeze(widths: list[int], least: Sequence[int], room: int) -> None:
    """Shrink the widest column that can be shortened, until all columns fit."""
    while sum(widths) + len(GAP) * (len(widths) - 1) > room:
        able = [place for place, width in enumerate(widths) if width > least[place]]
        if not able:
            return
        widths[max(able, key=lambda place: widths[place])] -= 1


def _fitted(text: str, width: int, *, right: bool) -> str:
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…"
    filling = " " * (width - cell_len(text))
    return filling + text if right else text + filling


def facts(values: Mapping[str, Any]) -> None:
    """Print one resource, with a line for each value."""
    width = max(map(len, values), default=0)
    for name, value in values.items():
        line(f"{name:<{width}}  {printable(str(value))}")


def printable(text: str) -> str:
    """A text without control characters, which could move the cursor or change colors."""
    return "".join(char if char.isprintable() else "�" for char in text)


def figure(value: Any) -> str:
    """A number for people, also NaN and Inf."""
    number = jsonio.number(value)
    if number is None:
        return "-"
    if not isinstance(number, float):
        return str(number)
    text = f"{number:.4g}"
    if "e" not in text:
        return text
    digits, exponent = f"{number:.3g}".split("e")
    return f"{digits}e{int(exponent)}"


def size(count: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def never_fail_to_print() -> None:
    """Print ``?`` for characters that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def misused() -> None:
    """Print a usage error as JSON; the message for users is on stderr."""
    detail = "Invalid usage; see stderr."
    document({"error": {"kind": "UsageError", "detail": detail, "exit_code": exit_codes.USAGE}})


def failure(error: Exception, code: int, *, as_json: bool) -> None:
    """Print why a command failed; with ``--json``, also as a document on stdout."""
    text = error.detail if isinstance(error, GlasshouseError) else str(error)
    if as_json:
        report: dict[str, Any] = {"kind": type(error).__name__, "detail": text, "exit_code": code}
        if isinstance(error, APIStatusError):
            report["problem"] = error.problem
        if isinstance(error, JobFailed):
            report |= {"job": error.job_id, "error": error.error}
        document({"error": report})
    message(f"error: {text}")
