"""The query parameter ``rank`` of statistics and tensors."""

from typing import Annotated

from fastapi import Query

from api.http.answers import bad_parameter
from models.jobs.needs import Need
from models.observations.ranks import MERGED
from models.tables import Job

_ONE = "a rank: the values of this process alone, which a probe with `ranks` records. `merged`"
_DEFAULT = "those of all processes together. Default: `merged`."
OfRank = Annotated[str | None, Query(max_length=20, description=f"{_ONE.capitalize()}: {_DEFAULT}")]
OfRanks = Annotated[
    str | None,
    Query(
        max_length=20,
        description=f"{_ONE.capitalize()}: {_DEFAULT} `all`: both, and those of every process.",
    ),
]


def of_one(job: Job, text: str | None) -> int:
    """Return the rank, or `MERGED`. Rank 0 of a job with one process has the merged values.

    Raises:
        InvalidRequest: The job has no such rank.
    """
    if text in (None, "merged"):
        return MERGED
    num = Need.of(job.wants, job.kind).processes
    ranks = "the rank 0" if num == 1 else f"the ranks 0 to {num - 1}"
    if not text.isascii() or not text.isdecimal():
        detail = f"{text[:20]!r} is no rank: give merged, or one of {ranks}."
        raise bad_parameter("rank", detail.replace("one of the rank 0", "0"))
    if int(text) >= num:
        processes = "one process" if num == 1 else f"{num} processes"
        raise bad_parameter("rank", f"the job has no rank {text}: it has {processes}, {ranks}.")
    return MERGED if num == 1 else int(text)


def of_any(job: Job, text: str | None) -> int | None:
    """Return the rank as `of_one` does; None for ``all``.

    Raises:
        InvalidRequest: The job has no such rank.
    """
    return None if text == "all" else of_one(job, text)
