"""A training job as it is evaluated on other rows: its fields, its metrics, how rows are read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from engine.data.augmentation.augmenting import unchanged
from engine.data.columns.prepared import Prepared, Preparing
from engine.data.sources.streamed import StreamedRows
from engine.inference.rows import READ_AHEAD, Inputs, like_trained, streamed
from engine.metrics.metrics import metric_names
from engine.training.training_rows import fields_read
from glasshouse.spec import Evaluate, EvaluateJob, Metric, Shuffle, TrainJob


@dataclass(frozen=True)
class Metrics:
    """The metrics of an evaluation: those that it names, then the others of the training job."""

    all: tuple[Metric, ...]
    num_named: int
    """The number of those that the evaluation names."""

    @staticmethod
    def of(job: EvaluateJob, trained: TrainJob) -> "Metrics":
        """Return the metrics; one that both name is computed once, under its name in training."""
        names = metric_names(trained.metrics)
        before = {
            name: item.model_copy(update={"name": name, "every": None})
            for name, item in zip(names, trained.metrics, strict=True)
            if item.is_evaluated
        }
        named: list[Metric] = []
        for item in job.metrics:
            same = [name for name, known in before.items() if _is_same(item, known)]
            named.append(before.pop(same[0]) if same else item)
        return Metrics((*named, *before.values()), len(named))


def _is_same(mine: Metric, known: Metric) -> bool:
    return mine.model_copy(update={"name": mine.name or known.name}) == known


def evaluated(job: EvaluateJob, trained: TrainJob) -> TrainJob:
    """Return the training job as if its validation data were the rows of an evaluation."""
    source = job.data.source()
    whole = trained.model_copy(
        update={"metrics": Metrics.of(job, trained).all, "evaluate": Evaluate(every_epochs=1)}
    )
    given = job.data.fields or {}
    fields = {
        name: like_trained(given[name], field) if name in given else unchanged(field)
        for name, field in fields_read(whole).items()
    }
    update = {
        "train": source,
        "validation": source,
        "fields": fields,
        "batch_size": job.data.batch_size,
        "on_bad_row": job.data.on_bad_row,
        "shuffle": Shuffle(),
        "cache": "none",
        "workers": READ_AHEAD,
        "interleave": None,
        "bucket_by_length": None,
    }
    return whole.model_copy(update={"data": trained.data.model_copy(update=update)})


def rows_of(
    whole: TrainJob, inputs: Inputs, look: Callable[[int], None], bad_rows: IO[str]
) -> StreamedRows:
    """Return the rows of an evaluation in their stored order, prepared as in training.

    ``whole``: what `evaluated` returned. The rest as in `streamed`.

    Raises:
        DataFailed: they cannot be read, or do not fit the fields.
    """
    data = whole.data
    return streamed(
        data.whole,
        dict(data.fields),
        inputs,
        Preparing.of(data, Prepared.of(inputs.checkpoint)),
        data.sequence,
        seed=whole.seed,
        look=look,
        bad_rows=bad_rows,
    )
