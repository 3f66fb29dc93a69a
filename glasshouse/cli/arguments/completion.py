"""Shell completion with names from the service. Offers nothing if the service does not respond."""

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import typer

from glasshouse.client import Client
from glasshouse.errors import GlasshouseError

WITHIN_S = 0.3
"""The timeout of a completion request, in seconds."""
MOST = 50

Offers = Generator[tuple[str, str]]


def named(
    metavar: str,
    complete: Callable[[str], Offers],
    about: str = "The id or an id prefix, the name, or 'last'.",
) -> Any:
    """An argument for one or several resources, resolved by `cli.arguments.references`."""
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


def models(incomplete: str) -> Offers:
    """Published models, newest first."""
    yield from _offers("/models", incomplete, "name")


def sources(incomplete: str) -> Offers:
    """Sources of an inference: jobs and checkpoints."""
    yield from checkpoints(incomplete) if incomplete.startswith("c") else jobs(incomplete)


def predictors(incomplete: str) -> Offers:
    """What predicts: published models and jobs."""
    yield from jobs(incomplete) if incomplete.startswith("job_") else models(incomplete)


def metrics(context: typer.Context, incomplete: str) -> Offers:
    """The metrics of the job in the preceding argument."""
    yield from _offers(f"/jobs/{context.params.get('job')}/metrics", incomplete, "name")


def layers(context: typer.Context, incomplete: str) -> Offers:
    """The layers of the job in the preceding argument."""
    yield from _offers(f"/jobs/{context.params.get('job')}/layers", incomplete, "name")


def formats(incomplete: str) -> Offers:
    """The file formats of datasets."""
    yield from _offers("/catalog/datasets", incomplete, "name", "entries")


def _offers(path: str, incomplete: str, key: str = "id", of: str = "data") -> Offers:
    """The entries of one page of a list, each with a description."""
    found: list[dict[str, Any]] = []
    with (
        suppress(GlasshouseError, OSError, ValueError),
        Client(timeout=WITHIN_S, max_retries=0) as client,
    ):
        found = client.request("GET", f"/api/v1{path}", params={"limit": MOST}).json()[of]
    for entry in found:
        if entry[key].startswith(incomplete) and entry.get("kind") != "builtin":
            words = (
                entry.get(word) for word in ("state", "type", "name", "summary") if word != key
            )
            yield entry[key], " ".join(str(word) for word in words if word)
