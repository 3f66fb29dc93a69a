"""The spec of an evaluation job."""

from typing import Annotated, Literal, Self

from pydantic import Field as Constraint
from pydantic import (
    model_validator,
)

from glasshouse.spec.data import Source, check_fraction
from glasshouse.spec.jobs.infer_job import InferData
from glasshouse.spec.jobs.job import Job
from glasshouse.spec.metrics import Metric
from glasshouse.spec.strict import (
    WrongAt,
    check_exactly_one,
    repeated,
)


class EvaluateData(InferData):
    """Rows of a dataset to evaluate, in their stored order."""

    fraction: tuple[float, float] | None = None
    """The part of the split to use, as ``[from, to]`` with 0 <= from < to <= 1, drawn as in the
    training job: the same fraction of the same split has the same rows. Default: the whole split.
    Example: ``[0.8, 1]``."""

    @model_validator(mode="after")
    def _check_fraction(self) -> Self:
        check_fraction(self.fraction)
        return self

    def source(self) -> Source:
        """Return the rows as a source of a training job."""
        return Source(dataset=self.dataset, split=self.split, fraction=self.fraction)


Want = Literal["confusion", "pr_curve", "roc_curve", "calibration", "worst_samples"]
Column = Annotated[str, Constraint(min_length=1, max_length=500)]
DEFAULT_WORST = 20
"""The number of worst samples that an evaluation lists by default."""


class EvaluateJob(Job):
    """Evaluates a trained network on rows of a dataset.

    The result has the loss and the metrics of the training job over all rows, and what ``want``
    and ``by`` ask for. Set exactly one of ``checkpoint`` and ``job``.
    """

    kind: Literal["evaluate"]
    """Selects an evaluation job."""
    checkpoint: str | None = Constraint(default=None, min_length=1, max_length=500)
    """The id of the checkpoint to evaluate, of a training job, or a version of a published model:
    ``mnist``, ``mnist@production``, ``mnist:3``. Example: ``"ckpt_019a7c4f2b6e"``."""
    job: str | None = Constraint(default=None, min_length=1, max_length=64)
    """The id of a training job, whose newest complete checkpoint is evaluated. Example:
    ``"job_019a7c4f2b6e"``."""
    data: EvaluateData
    """Rows of a dataset, with their targets. Example: ``{"dataset": "digits", "split": "test"}``.
    """
    metrics: tuple[Metric, ...] = Constraint(default=(), max_length=20)
    """Metrics to compute in addition to those of the training job: ``accuracy`` or classes of
    torchmetrics. Example: ``[{"type": "MulticlassF1Score", "args": {"num_classes": 10}, "inputs":
    ["fc", "label"]}]``."""
    want: tuple[Want, ...] | None = Constraint(default=None, max_length=5)
    """What to compute besides metrics. ``confusion``: the number of targets of each class by
    predicted class. ``pr_curve``: precision and recall of each class against the others, at 200
    thresholds. ``roc_curve``: true and false positive rates at the same thresholds.
    ``calibration``: accuracy by predicted probability in 15 bins, the expected calibration error,
    the Brier score. ``worst_samples``: the rows with the largest loss. Default: all that apply to
    the loss of the training job. Example: ``["confusion", "worst_samples"]``."""
    worst: int | None = Constraint(default=None, ge=1, le=1000)
    """Number of worst samples. Default: 20. Example: ``100``."""
    by: Column | Annotated[tuple[Column, ...], Constraint(min_length=1, max_length=8)] | None = None
    """One column of the dataset or several: the losses and scalar metrics are also computed for the
    rows of each value of the column, of which it may have at most 100. Example: ``"label"``."""

    @model_validator(mode="after")
    def _check_evaluation(self) -> Self:
        check_exactly_one(self, "checkpoint", "job")
        self.devices.check_one("an evaluation is one process with one device: ask for one")
        for number, metric in enumerate(self.metrics):
            if not metric.is_evaluated:
                detail = f"{metric.type} is computed for training batches only: name accuracy or a"
                raise WrongAt("metrics", number, "type", detail=f"{detail} class of torchmetrics")
            if metric.every is not None:
                detail = f"every ({metric.every}) is an interval of training steps: remove every"
                raise WrongAt("metrics", number, "every", detail=detail)
        if self.worst is not None and self.want is not None and "worst_samples" not in self.want:
            detail = f"worst ({self.worst}) is the number of worst_samples, which want does not"
            detail += ' name: add "worst_samples" to want, or remove worst'
            raise WrongAt("worst", detail=detail)
        for name, values in (("want", self.want or ()), ("by", self.columns)):
            if (again := repeated(values)) is not None:
                detail = f"{values[again]!r} is listed twice: list it once"
                raise WrongAt(name, again, detail=detail)
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of ``by``."""
        return (self.by,) if isinstance(self.by, str) else self.by or ()

    @property
    def processes(self) -> int:
        """The number of processes."""
        return 1
