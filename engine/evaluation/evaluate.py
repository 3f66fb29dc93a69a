"""Evaluate a trained network on rows of a dataset, in one pass over them.

The loss is that of an evaluation during training: the numerators of all batches over their
denominators. Everything else is added up beside it.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from engine.checkpoint.checkpoint import load_model
from engine.core.precision import chosen
from engine.core.spool import now
from engine.data.batches.batch import Batch
from engine.data.columns.table import StoredTable
from engine.evaluation.by_value import ByValue
from engine.evaluation.calibration import Calibration
from engine.evaluation.classification import Classification, classification_of
from engine.evaluation.curves import Confusion, ScoreCounts
from engine.evaluation.evaluated_job import evaluated, rows_of
from engine.evaluation.worst_samples import Shown, WorstSamples, row_losses
from engine.inference.classes import classified
from engine.inference.reporting import (
    BAD_ROWS,
    Ended,
    Look,
    Progress,
    report_bad_rows,
    report_dropped_rows,
    report_file,
)
from engine.inference.rows import Inputs
from engine.learner.tuning import Tuned
from engine.losses.loss_sums import LossSums
from engine.losses.losses import Losses
from engine.metrics.epoch_metrics import EpochMetrics
from engine.metrics.metrics import wanted
from engine.network.hidden_state import HiddenState
from engine.network.network import Network
from engine.training.control import RunControl
from engine.training.report import Outputs
from glasshouse import jsonio
from glasshouse.errors import DataFailed
from glasshouse.spec import EvaluateJob, TrainJob
from glasshouse.spec.jobs.evaluate_job import DEFAULT_WORST

EVALUATION = "evaluation.json"
WORST_SAMPLES = "worst_samples.csv"
CONFUSION = "confusion.csv"
RESULT_BYTES = 128 * 1024
"""A result that is longer as JSON loses its largest parts; the file has them."""
_CURVES = ("pr_curve", "roc_curve")
_POINTS = ("thresholds", "precision", "recall", "true_positive_rate", "false_positive_rate")
_LARGE = (*_CURVES, "by", "confusion", "worst_samples", "calibration")
"""What a result loses first."""


def run(
    job: EvaluateJob, trained: TrainJob, inputs: Inputs, *, control: RunControl, out: Outputs
) -> str:
    """Run an evaluation; return ``succeeded`` or ``cancelled``.

    Raises:
        DataFailed: the rows cannot be read, or do not fit the fields.
        CheckpointDamaged, CheckpointMismatch: the weights are not those of the network.
    """
    artifacts = out.directory / "artifacts"
    artifacts.mkdir(parents=True, exist_ok=True)
    with (artifacts / BAD_ROWS).open("w", encoding="utf-8") as bad_rows:
        try:
            return _run(job, evaluated(job, trained), inputs, Look(control), bad_rows, out)
        except Ended:
            return "cancelled"


def _run(
    job: EvaluateJob,
    whole: TrainJob,
    inputs: Inputs,
    look: Look,
    bad_rows: IO[str],
    out: Outputs,
) -> str:
    rows = rows_of(whole, inputs, look, bad_rows)
    bad_rows.flush()
    try:
        report_dropped_rows(rows, out)
        evaluation = Evaluation(job, whole, inputs, out)
        progress = Progress(rows.num_rows, job.data.batch_size, out)
        numbers = range(rows.num_batches(job.data.batch_size))
        with torch.inference_mode():
            for batch in rows.stored(job.data.batch_size, numbers):
                look(batch.num_rows)
                evaluation.add(batch)
                progress.reached(evaluation.num_rows)
            result = evaluation.result()
    finally:
        rows.close()
    progress.report(rows.num_rows)
    _write(result, out)
    return "succeeded"


class Evaluation:
    """Everything that is computed of a network's outputs, added up over batches."""

    def __init__(self, job: EvaluateJob, whole: TrainJob, inputs: Inputs, out: Outputs) -> None:
        """``whole``: the training job with the rows and metrics of the evaluation.

        Raises:
            CheckpointDamaged, CheckpointMismatch: the weights are not those of the network.
        """
        self._job, self._whole, self._device = job, whole, inputs.device
        self._network = Network(whole.network, wanted(whole), prune=True)
        self._step = int(load_model(inputs.checkpoint, self._network, partial=True)["step"])
        self._network.to(inputs.device).eval()
        self._network.low_precision = chosen(whole.precision, inputs.device)
        Tuned(whole.memory_format, self._network)
        HiddenState.of(whole.network, self._network)
        self._losses = Losses.of(whole).to(inputs.device)
        self._metrics = EpochMetrics(whole, out.directory, out.emit)
        self._sums: LossSums | None = None
        self.num_rows = 0
        """Rows so far."""
        self._parts: _Parts | None = None
        table = None if inputs.table is None else StoredTable(inputs.table.directory)
        if job.columns and table is None:
            raise DataFailed("The evaluation was handed no rows.")
        self._by = {
            name: ByValue(name, whole, self._losses, table)
            for name in job.columns
            if table is not None
        }

    def add(self, batch: Batch) -> None:
        """Add a batch."""
        values = self._network(batch.tensors)
        sums = self._losses.sums(values, batch.num_rows)
        self._sums = sums if self._sums is None else self._sums + sums
        self.num_rows += batch.num_rows
        self._metrics.update(values)
        numbers = batch.row_numbers.cpu()
        if self._parts is None:
            self._parts = _Parts(self._job, self._whole, self._losses, values, self._device)
        self._parts.add(values, numbers)
        for column in self._by.values():
            column.add(numbers, values)

    def result(self) -> dict[str, Any]:
        """Return everything, with non-finite numbers as such."""
        figures = {} if self._sums is None else self._losses.figures(self._sums)
        figures |= self._metrics.finish("validation")
        self._metrics.keep(self._step)
        found: dict[str, Any] = {"rows": self.num_rows, "step": self._step, "metrics": figures}
        found |= {} if self._parts is None else self._parts.result()
        if self._by:
            found["by"] = {name: column.result() for name, column in self._by.items()}
        return found


class _Parts:
    """The parts of a result that ``want`` names."""

    def __init__(
        self,
        job: EvaluateJob,
        whole: TrainJob,
        losses: Losses,
        values: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        """``values``: of the first batch."""
        want = job.want or ()  # the plan has filled it in
        self._want, self._losses = want, losses
        operands = [given for _, given in losses.split(losses.operands(values))]
        found = self._classification = classification_of(losses.terms, operands)
        number = 0 if found is None else found.number
        read = whole.losses[number].inputs
        self._classes = classified(whole).get(read[0])
        shown = Shown(read[0], read[-1], found, self._classes)
        self._worst = WorstSamples(job.worst or DEFAULT_WORST, shown)
        size = 0 if found is None else found.num_classes
        self._confusion = Confusion(size, device) if found and "confusion" in want else None
        scores = 1 if found and found.is_binary else size
        has_curves = not {*_CURVES}.isdisjoint(want)
        self._counts = ScoreCounts(scores, device) if found and has_curves else None
        self._calibration = Calibration(device) if found and "calibration" in want else None

    def add(self, values: Mapping[str, Tensor], numbers_B: Tensor) -> None:
        if "worst_samples" in self._want:
            self._worst.add(row_losses(self._losses, values), numbers_B, values)
        parts = (self._confusion, self._counts, self._calibration)
        if self._classification is None or all(part is None for part in parts):
            return
        self._add_classes(self._classification, values)

    def _add_classes(self, found: Classification, values: Mapping[str, Tensor]) -> None:
        term, given = self._losses.split(self._losses.operands(values))[found.number]
        prob_SC, predicted_S, target_S = found.compared(term, given)
        if self._confusion is not None:
            self._confusion.add(predicted_S, target_S)
        if self._counts is not None:
            self._counts.add(prob_SC, target_S)
        if self._calibration is not None:
            self._calibration.add(prob_SC, target_S)

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._classes is not None and self._classes.named is not None:
            found["classes"] = self._classes.values
        if self._confusion is not None:
            found["confusion"] = self._confusion.counts_CC.tolist()
        if self._counts is not None and "pr_curve" in self._want:
            found["pr_curve"] = self._counts.pr_curve()
        if self._counts is not None and "roc_curve" in self._want:
            found["roc_curve"] = self._counts.roc_curve()
        if self._calibration is not None:
            found["calibration"] = self._calibration.result()
        if "worst_samples" in self._want:
            found["worst_samples"] = self._worst.result()
        return found


def bounded(result: Mapping[str, Any], limit: int = RESULT_BYTES) -> dict[str, Any]:
    """Return a result of at most ``limit`` bytes of JSON, with what it lost as ``left_out``.

    Curves lose their points and keep their areas; other parts are removed as a whole.
    """
    found, left_out = dict(result), list[str]()
    for name in _LARGE:
        if len(jsonio.dumps(found)) <= limit:
            break
        if name not in found:
            continue
        whole = found.pop(name)
        left_out.append(name)
        if name in _CURVES:
            kept = {key: item for key, item in whole.items() if key not in _POINTS}
            found |= {name: kept} if len(jsonio.dumps(kept)) <= limit // 8 else {}
    return found if not left_out else {**found, "left_out": left_out}


def _write(result: Mapping[str, Any], out: Outputs) -> None:
    """Write the files; also emit the result as an event."""
    out.flush()
    directory = out.directory / "artifacts"
    (directory / EVALUATION).write_text(jsonio.dumps(result), encoding="utf-8")
    report_file(directory / EVALUATION, "application/json", out)
    if "worst_samples" in result:
        _write_worst(directory / WORST_SAMPLES, result["worst_samples"])
        report_file(directory / WORST_SAMPLES, "text/csv", out)
    if "confusion" in result:
        _write_confusion(directory / CONFUSION, result)
        report_file(directory / CONFUSION, "text/csv", out)
    report_bad_rows(directory, out)
    out.emit({"type": "result", "at": now(), "result": bounded(result)})


def _write_worst(path: Path, samples: list[dict[str, Any]]) -> None:
    """Write a line for each sample; a value that is a list is JSON."""
    columns = list(dict.fromkeys(name for sample in samples for name in sample))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns or ["row", "loss"])
        for sample in samples:
            writer.writerow([_cell(sample.get(name, "")) for name in columns])


def _cell(value: Any) -> Any:
    named = jsonio.named(value)
    return jsonio.dumps(named) if isinstance(named, list) else named


def _write_confusion(path: Path, result: Mapping[str, Any]) -> None:
    """Write a line for each true class, with a column for each predicted class."""
    counts = result["confusion"]
    names = result.get("classes") or range(len(counts))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["true class", *names])
        writer.writerows([name, *row] for name, row in zip(names, counts, strict=True))
