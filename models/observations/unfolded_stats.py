"""Which statistics wait to be folded. Needs no numpy, so that an idle worker does without."""

from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from models.tables import StatsBlock

MAX_BLOCKS = 1000
MAX_BYTES = 8 << 20
"""So much is left unfolded at most; every query of the job has to look through it."""


class StatsOwner(NamedTuple):
    """Whose blocks are folded: the attempt that has the job."""

    job: str
    fence: int


def is_due(tx: Session, job: str) -> bool:
    """Whether enough blocks have gathered to fold them."""
    num, size = tx.execute(
        select(func.count(), func.sum(func.length(StatsBlock.data))).where(StatsBlock.job == job)
    ).one()
    return num >= MAX_BLOCKS or (size or 0) >= MAX_BYTES


def is_left(tx: Session, job: str) -> bool:
    """Whether anything is not folded yet."""
    return tx.scalar(select(StatsBlock.id).where(StatsBlock.job == job).limit(1)) is not None
