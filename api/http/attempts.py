"""The parameter ``attempt``: whose rows of a job somebody wants to read."""

from typing import Annotated

from fastapi import Depends, Query

from models.observations.lineage import Asked


async def read_attempt(
    attempt: Annotated[
        str | None,
        Query(
            pattern=r"^(all|[1-9][0-9]{0,8})$",
            description="Left out, the record of one uninterrupted run: what a later attempt ran "
            "again is hidden. `all` shows everything, a number all of that attempt.",
        ),
    ] = None,
) -> Asked:
    """Read ``?attempt=``."""
    if attempt is None or attempt == "all":
        return "all" if attempt else None
    return int(attempt)


OfAttempt = Annotated[Asked, Depends(read_attempt)]
