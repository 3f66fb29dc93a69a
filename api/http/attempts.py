"""The query parameter ``attempt``, which selects rows of a job by attempt."""

from typing import Annotated

from fastapi import Depends, Query

from models.observations.lineage import AttemptFilter


async def read_attempt(
    attempt: Annotated[
        str | None,
        Query(
            pattern=r"^(all|[1-9][0-9]{0,8})$",
            description="Default: one continuous run; values that a later attempt "
            "replaced are hidden. `all`: all attempts. A number: only that attempt.",
        ),
    ] = None,
) -> AttemptFilter:
    """Read ``?attempt=``."""
    if attempt is None or attempt == "all":
        return "all" if attempt else None
    return int(attempt)


OfAttempt = Annotated[AttemptFilter, Depends(read_attempt)]
