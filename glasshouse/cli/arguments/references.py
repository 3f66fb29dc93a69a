"""Resolves an id, an id prefix, a name or ``last`` to a job, dataset or checkpoint."""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from glasshouse.client import Client
from glasshouse.errors import NotFoundError
from glasshouse.spec.model_names import parse_model_reference
from glasshouse.suggestions import did_you_mean

LAST = "last"
_WHOLE = re.compile(r"(job|ds|ckpt)_[0-9a-z]{26}")
_SHOWN = 10
_MOST = 10_000
"""The maximum number of datasets or checkpoints that are searched for a name."""


class _Kind(NamedTuple):
    prefix: str
    word: str
    path: str


_JOB = _Kind("job", "job", "/api/v1/jobs")
_DATASET = _Kind("ds", "dataset", "/api/v1/datasets")
_CHECKPOINT = _Kind("ckpt", "checkpoint", "/api/v1/checkpoints")


def job_id(client: Client, given: str) -> str:
    """The id of the job that the user named.

    Raises:
        NotFoundError: there is none.
        ValueError: several match; it lists them.
    """
    if _WHOLE.fullmatch(given):
        return given
    if given == LAST:
        return _last(client, _JOB)
    try:
        by_name = _page(client, _JOB, name=given)
        found = by_name or _beginning(_page(client, _JOB, q=given), _JOB, given)
    except NotFoundError:
        found = []
    return _only(found, _JOB, given, lambda: _page(client, _JOB))


def dataset_id(client: Client, given: str) -> str:
    """The id of the dataset that the user named; raises as `job_id` does."""
    return _looked_up(client, _DATASET, given)


def dataset_or_name(client: Client, given: str) -> str:
    """The same; a name that no dataset has is left to the service."""
    try:
        return dataset_id(client, given)
    except NotFoundError:
        return given


def checkpoint_id(client: Client, given: str) -> str:
    """The id of the checkpoint that the user named; raises as `job_id` does."""
    return _looked_up(client, _CHECKPOINT, given)


def trained_id(client: Client, given: str) -> str:
    """The id of the job, or of the checkpoint, that the user named; raises as `job_id` does.

    A version of a published model (``mnist``, ``mnist@production``, ``mnist:3``) is its checkpoint.
    """
    if given.startswith("ckpt_"):
        return checkpoint_id(client, given)
    wanted = parse_model_reference(given)
    if wanted is not None and wanted.version is not None:
        return client.models.version(given).checkpoint
    with suppress(NotFoundError):
        return job_id(client, given)
    with suppress(NotFoundError):
        return checkpoint_id(client, given)
    if wanted is not None:
        with suppress(NotFoundError):
            return client.models.version(given).checkpoint
    raise _missing(f"no job, checkpoint or model has the name or id prefix {given!r}")


def _looked_up(client: Client, kind: _Kind, given: str) -> str:
    if _WHOLE.fullmatch(given):
        return given
    if given == LAST:
        return _last(client, kind)
    try:
        entries = list(islice(_all(client, kind), _MOST))
    except NotFoundError:
        entries = []
    by_name = [entry for entry in entries if entry.get("name") == given]
    found = by_name or _beginning(entries, kind, given)
    return _only(found, kind, given, lambda: entries)


def _all(client: Client, kind: _Kind) -> Iterable[dict[str, Any]]:
    after = None
    while True:
        params = {"limit": 1000, "after": after}
        page = client.request("GET", kind.path, params=params).json()
        yield from page["data"]
        after = page.get("next")
        if after is None:
            return


def _page(client: Client, kind: _Kind, **params: str) -> list[dict[str, Any]]:
    page = client.request("GET", kind.path, params={"limit": 100, **params}).json()
    return page["data"]


def _last(client: Client, kind: _Kind) -> str:
    found = client.request("GET", kind.path, params={"limit": 1}).json()["data"]
    if not found:
        raise _missing(f"there is no {kind.word} yet")
    return found[0]["id"]


def _beginning(
    entries: Iterable[Mapping[str, Any]], kind: _Kind, given: str
) -> list[Mapping[str, Any]]:
    """Those whose id begins so, with or without ``job_``; one whose id is just that comes alone."""
    begins = (given, f"{kind.prefix}_{given}")
    found = [entry for entry in entries if entry["id"].startswith(begins)]
    return [entry for entry in found if entry["id"] == given] or found


def _only(found: list[Any], kind: _Kind, given: str, entries: Callable[[], Iterable[Any]]) -> str:
    if len(found) == 1:
        return found[0]["id"]
    if not found:
        if given.startswith(f"{kind.prefix}_"):
            return given  # the service reports that it does not exist
        meant = did_you_mean(given, (entry["name"] for entry in entries() if entry.get("name")))
        raise _missing(f"no {kind.word} has the name or id prefix {given!r}{meant}")
    lines = [f"{given!r} matches {len(found)} {kind.word}s; use a longer id prefix:"]
    for entry in found[:_SHOWN]:
        described = (entry.get(word) for word in ("state", "name", "created_at"))
        lines.append("  ".join(["", entry["id"], *(str(word) for word in described if word)]))
    lines += ["  …"] if len(found) > _SHOWN else []
    raise ValueError("\n".join(lines))


def _missing(detail: str) -> NotFoundError:
    return NotFoundError(detail, status_code=404, problem={"detail": detail})
