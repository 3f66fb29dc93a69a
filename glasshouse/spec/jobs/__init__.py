"""The kinds of job."""

from typing import Annotated

from pydantic import Field as Constraint
from pydantic import TypeAdapter

from glasshouse.spec.jobs.diagnose_job import DiagnoseJob
from glasshouse.spec.jobs.evaluate_job import EvaluateJob
from glasshouse.spec.jobs.infer_job import InferJob
from glasshouse.spec.jobs.job import Job
from glasshouse.spec.jobs.serve_job import ServeJob
from glasshouse.spec.jobs.train_job import TrainJob

SPEC_VERSION = 1

AnyJob = TrainJob | InferJob | EvaluateJob | ServeJob | DiagnoseJob
"""A job of any kind."""
JobSpec = Annotated[AnyJob, Constraint(discriminator="kind")]
KINDS: tuple[type[Job], ...] = (TrainJob, InferJob, EvaluateJob, ServeJob, DiagnoseJob)
"""The models of all kinds of job."""
_JOB: TypeAdapter[AnyJob] = TypeAdapter(JobSpec)


def parse_job(body: bytes | str) -> AnyJob:
    """Read a job spec from JSON.

    Raises:
        pydantic.ValidationError: with one entry for each wrong field.
    """
    return _JOB.validate_json(body)
