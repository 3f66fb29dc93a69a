"""Named files that jobs created: predictions, exports."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from glasshouse.errors import ArtifactNotFound
from models.observations import lineage
from models.tables import JobArtifact


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
