"""Find the files of an attempt that rows refer to."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from models.tables import Capture, Checkpoint, JobArtifact


def keys(tx: Session, job: str, attempt: int) -> set[str]:
    """Return the keys of all files of an attempt that a row still refers to."""
    found: set[str] = set()
    for table in (Checkpoint, Capture):
        mine = (table.job == job, table.attempt == attempt)
        found |= set(tx.scalars(select(table.key).where(*mine).distinct()))
    # a later attempt replaces an artifact's row, so its attempt says nothing about older ones
    return found | set(tx.scalars(select(JobArtifact.key).where(JobArtifact.job == job)))
