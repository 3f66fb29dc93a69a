"""Check which statistics wait to be folded.

Needs no numpy, so an idle worker does not import it.
"""

from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from models.tables import StatsBlock

MAX_BLOCKS = 1000
MAX_BYTES = 8 << 20
"""Limits of unfolded data, because every query of the job reads all of it."""


class StatsOwner(NamedTuple):
    """The attempt that has the job and folds its blocks."""

    job: str
    fence: int


def is_due(tx: Session, job: str) -> bool:
    """Return whether there are enough blocks to fold."""
    num, size = tx.execute(
        select(func.count(), func.sum(func.length(StatsBlock.data))).where(StatsBlock.job == job)
    ).one()
    return num >= MAX_BLOCKS or (size or 0) >= MAX_BYTES


def is_left(tx: Session, job: str) -> bool:
    """Return whether any block is not folded yet."""
    return tx.scalar(select(StatsBlock.id).where(StatsBlock.job == job).limit(1)) is not None
