"""Which files of an attempt the rows name."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from models.tables import Capture, Checkpoint, JobArtifact


def keys(tx: Session, job: str, attempt: int) -> set[str]:
    """The keys of everything that an attempt stored and a row still names."""
    found: set[str] = set()
    for table in (Checkpoint, Capture):
        mine = (table.job == job, table.attempt == attempt)
        found |= set(tx.scalars(select(table.key).where(*mine).distinct()))
    # a file's row is replaced by that of a later attempt, and says nothing of old ones' attempts
    return found | set(tx.scalars(select(JobArtifact.key).where(JobArtifact.job == job)))
