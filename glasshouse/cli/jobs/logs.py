"""The command that prints the log of a job."""

import sys
from typing import Annotated, Any, cast

import typer

from glasshouse.cli.arguments import references
from glasshouse.cli.jobs.jobs import JobId
from glasshouse.cli.jobs.watch import detaching
from glasshouse.cli.terminal import output
from glasshouse.cli.terminal.output import Json
from glasshouse.client import Client
from glasshouse.events import LOG_LEVELS, LogLevel


def _checked_level(given: str | None) -> str | None:
    if given is not None and given not in LOG_LEVELS:
        raise typer.BadParameter(f"{given!r} is none of {', '.join(LOG_LEVELS)}.")
    return given


def logs(  # noqa: PLR0913 (each is an option)
    job: JobId,
    *,
    follow_: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new lines.")] = False,
    rank: Annotated[list[int] | None, typer.Option(min=0, help="Only lines of this rank.")] = None,
    level: Annotated[
        str | None,
        typer.Option(
            metavar="LEVEL",
            help=f"Only lines of this level and above: {', '.join(LOG_LEVELS)}.",
            callback=_checked_level,
        ),
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option(metavar="RE", help="Only lines that match this regular expression (RE2)."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only lines since: ISO 8601, or 10m, 2h30m, 1d ago."),
    ] = None,
    tail: Annotated[int | None, typer.Option(min=1, help="Only the last n lines.")] = None,
    json: Json = False,
) -> None:
    """Print the log of a job. With -f and --json: one JSON document per event."""
    with Client() as client:
        job = references.job_id(client, job)
        found = client.jobs.get(job)
        least = cast("LogLevel | None", level)
        if not follow_:
            text = found.logs(rank or None, tail=tail, level=least, grep=grep, since=since)
            if json:
                output.document({"job": job, "lines": text.split("\n")[:-1]})
            else:
                sys.stdout.write(text)
            return
        records = found.follow_records(rank or None, tail=tail, level=least, grep=grep, since=since)
        with detaching(job):
            for record in records:
                _print_log(record, as_json=json)


def _print_log(record: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.document(record)
    else:
        for text in record["lines"]:
            output.line(text)
