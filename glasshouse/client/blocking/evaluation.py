# Made from glasshouse/client/aio/evaluation.py by .ci/twins.py: change that file.
"""The implementation of `Client.evaluate`: run a job, download its result."""

from collections.abc import Sequence
from typing import Any

from glasshouse import jsonio
from glasshouse.client.blocking.inference import Source, rows_of, source_of
from glasshouse.client.blocking.resources import Datasets, Jobs
from glasshouse.client.training.arguments import settle_device
from glasshouse.client.training.specs import Document, EvaluateOptions

FILE = "evaluation.json"


class Evaluating:
    """Runs evaluation jobs."""

    def __init__(self, jobs: Jobs, datasets: Datasets) -> None:
        self._jobs = jobs
        self._datasets = datasets

    def run(
        self,
        source: Source,
        data: Any,
        metrics: Sequence[Any],
        want: Sequence[str] | None,
        by: Sequence[str] | str | None,
        options: EvaluateOptions,
    ) -> Document:
        """Run the job and wait for it."""
        settled: Document = dict(options)
        settle_device(settled)
        spec: Document = {"kind": "evaluate", **source_of(source), **settled}
        spec["data"] = rows_of(self._datasets, data)
        if metrics:
            spec["metrics"] = list(metrics)
        if want is not None:
            spec["want"] = list(want)
        if by is not None:
            spec["by"] = by if isinstance(by, str) else list(by)
        job = (self._jobs.create(spec)).wait()
        found: Document = jsonio.loads(job.artifact(FILE))
        metrics_found = found["metrics"].items()
        return {**found, "metrics": {name: jsonio.number(value) for name, value in metrics_found}}
