"""What the shell may complete with: what the service knows. Silent when it does not answer."""

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import typer

from glasshouse.client import Client
from glasshouse.errors import GlasshouseError

WITHIN_S = 0.3
"""A key was pressed: rather nothing than a wait."""
MOST = 50

Offers = Generator[tuple[str, str]]


def named(
    metavar: str,
    complete: Callable[[str], Offers],
    about: str = "Its id or the beginning of it, its name, or 'last'.",
) -> Any:
    """An argument that names a thing, or several, as `glasshouse.cli.naming` finds them."""
    return typer.Argument(metavar=metavar, help=about, autocompletion=complete)


def jobs(incomplete: str) -> Offers:
    """Jobs, newest first, each with its state and name."""
    yield from _offers("/jobs", incomplete)


def datasets(incomplete: str) -> Offers:
    """Datasets, newest first."""
    yield from _offers("/datasets", incomplete)


def checkpoints(incomplete: str) -> Offers:
    """Checkpoints, newest first."""
    yield from _offers("/checkpoints", incomplete)


def sources(incomplete: str) -> Offers:
    """What outputs can be asked of: jobs and checkpoints."""
    yield from checkpoints(incomplete) if incomplete.startswith("c") else jobs(incomplete)


def metrics(context: typer.Context, incomplete: str) -> Offers:
    """The metrics of the job that stands before."""
    yield from _offers(f"/jobs/{context.params.get('job')}/metrics", incomplete, "name")


def layers(context: typer.Context, incomplete: str) -> Offers:
    """The layers of the job that stands before."""
    yield from _offers(f"/jobs/{context.params.get('job')}/layers", incomplete, "name")


def _offers(path: str, incomplete: str, key: str = "id") -> Offers:
    """One page of a list, and what to say of each entry."""
    found: list[dict[str, Any]] = []
    with (
        suppress(GlasshouseError, OSError, ValueError),
        Client(timeout=WITHIN_S, max_retries=0) as client,
    ):
        found = client.request("GET", f"/api/v1{path}", params={"limit": MOST}).json()["data"]
    for entry in found:
        if entry[key].startswith(incomplete):
            told = (entry.get(word) for word in ("state", "type", "name") if word != key)
            yield entry[key], " ".join(str(word) for word in told if word)
