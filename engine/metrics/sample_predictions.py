"""Sample predictions: the network's outputs for the same few validation rows at each evaluation."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.core.precision import in_float32
from engine.core.problems import Findings
from engine.core.spool import Emit
from engine.core.tensor_artifact import Artifacts
from engine.data.batches.batch import Batch
from engine.data.batches.rows import Rows
from glasshouse.spec import TrainJob

Predict = Callable[[Batch, Sequence[str]], Mapping[str, Tensor]]
"""Returns some values of a batch, by name."""
MAX_BYTES = 64 * 2**20
"""Most bytes of the samples of one evaluation."""
ROW = "row"
"""The tensor of the rows' indices among the validation rows."""


def sampled(job: TrainJob) -> tuple[str, ...]:
    """Return what is kept of each row: the inputs of the loss and the outputs of the network."""
    return tuple(dict.fromkeys([*job.loss_inputs, *(job.network.outputs or ())]))


class Samples:
    """Keeps the predictions for a fixed set of rows; one file per evaluation."""

    def __init__(self, job: TrainJob, rows: Rows | None, directory: Path, emit: Emit) -> None:
        self._num = 0 if job.evaluate is None else job.evaluate.samples
        self._names = sampled(job)
        self._rows = rows
        self._artifacts = Artifacts(directory, "samples", emit)

    def keep(self, step: int, predict: Predict) -> None:
        """Predict the rows and write them to a file; a failure does not stop training.

        ``predict`` returns what is named of a batch.
        """
        rows = self._rows
        if self._num and rows is not None:
            self._artifacts.keep(step, lambda: self._predict(predict, rows))

    @torch.no_grad()
    def _predict(self, predict: Predict, rows: Rows) -> dict[str, Tensor]:
        numbers, batch = rows.spaced(self._num)
        values = predict(batch, self._names)
        return {ROW: numbers, **{name: in_float32(values[name]) for name in self._names}}


def check(spec: TrainJob, values: Mapping[str, Tensor], rows: int, findings: Findings) -> None:
    """Add findings for samples that cannot be kept; ``values`` are of a batch of ``rows`` rows."""
    if spec.evaluate is None or not spec.evaluate.samples:
        return
    names = sampled(spec)
    if ROW in names:
        detail = f"{ROW!r} is what the numbers of the sampled rows are called: rename the layer"
        findings.problem("/evaluate/samples", f"{detail} or the field, or sample nothing", "name")
    per_row = sum(values[name].nbytes for name in names) / rows
    if per_row * spec.evaluate.samples > MAX_BYTES:
        detail = f"a row's outputs take {per_row:.0f} bytes, and the samples of one evaluation may"
        most = int(MAX_BYTES // per_row)
        detail += f" take {MAX_BYTES}: sample at most {most} rows"
        findings.problem("/evaluate/samples", detail, "too_large")
