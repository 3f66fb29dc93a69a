"""Named files that jobs created: predictions, exports."""

from collections.abc import Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from glasshouse.errors import ArtifactNotFound
from models.observations import lineage
from models.tables import JobArtifact

PART = "application/vnd.apache.arrow.file"
"""Media type of a part of a result that is not complete; removed when it is."""


def of_job(tx: Session, job_id: str) -> list[JobArtifact]:
    """List the artifacts of a job by name."""
    where = lineage.shown(tx, job_id, JobArtifact.attempt, JobArtifact.step)
    query = select(JobArtifact).where(JobArtifact.job == job_id, *where)
    return list(tx.scalars(query.order_by(JobArtifact.name)))


def get(tx: Session, job_id: str, name: str) -> JobArtifact:
    """Return one artifact of a job.

    Raises:
        ArtifactNotFound: The job has none with this name.
    """
    where = lineage.shown(tx, job_id, JobArtifact.attempt, JobArtifact.step)
    mine = (JobArtifact.job == job_id, JobArtifact.name == name)
    found = tx.scalar(select(JobArtifact).where(*mine, *where))
    if found is None:
        raise ArtifactNotFound(f"The job has no artifact {name[:200]!r}.")
    return found


def parts(tx: Session, job_id: str) -> list[JobArtifact]:
    """List the parts of a job's result that are stored before it is complete."""
    mine = (JobArtifact.job == job_id, JobArtifact.media_type == PART)
    return list(tx.scalars(select(JobArtifact).where(*mine).order_by(JobArtifact.name)))


def num_parts(tx: Session, job_id: str) -> int:
    """Return the number of `parts`."""
    mine = (JobArtifact.job == job_id, JobArtifact.media_type == PART)
    return tx.scalar(select(func.count()).where(*mine)) or 0


def remove(tx: Session, job_id: str, names: Sequence[str]) -> list[str]:
    """Delete the rows of files by name; return the keys of the files, which are deleted next."""
    if not names:
        return []
    mine = (JobArtifact.job == job_id, JobArtifact.name.in_(names))
    return list(tx.scalars(delete(JobArtifact).where(*mine).returning(JobArtifact.key)))
