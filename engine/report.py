"""What a training job says about itself: metrics, progress, evaluations and checkpoints.

Keeps losses on the device until they have arrived by themselves; never makes a step wait.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine import checkpoint
from engine.data import Rows
from engine.metrics import Accuracies
from engine.readback import Readback
from engine.spool import now
from glasshouse.spec import TrainJob

Emit = Callable[[dict[str, Any]], None]
_PROGRESS_S = 0.25


class Reporter:
    """Turns steps into records."""

    def __init__(
        self, job: TrainJob, emit: Emit, readback: Readback, *, num_steps: int | None
    ) -> None:
        self._emit = emit
        self._readback = readback
        self._accuracies = Accuracies(job.metrics)
        self._batch_field = next(iter(job.data.fields))
        self._stop_s = job.stop.seconds
        self._num_steps = num_steps
        self._num_samples = 0
        self._started = time.monotonic()
        self._told = (self._started, 0)
        self.latest: dict[str, float] = {}
        """The newest value of each metric that has arrived."""

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far."""
        return time.monotonic() - self._started

    def step(self, step: int, epoch: int, loss: Tensor, values: dict[str, Tensor], lr: Any) -> None:
        """Say what a finished step gave: its loss before the update, and the batch's metrics."""
        num_rows = values[self._batch_field].shape[0]
        self._num_samples += num_rows
        at = now()
        numbers = [loss.detach(), *self._accuracies.correct(values)]

        def then(arrived: list[float]) -> None:
            figures = {"loss": arrived[0], "lr": float(lr)}
            for name, correct in zip(self._accuracies.names, arrived[1:], strict=True):
                figures[name] = correct / num_rows
            self._metrics(step, epoch, figures, at)

        self._readback.put(numbers, then)
        self._readback.poll()
        if time.monotonic() - self._told[0] >= _PROGRESS_S:
            self.progress(step, epoch)

    def progress(self, step: int, epoch: int) -> None:
        """Say how far training has come."""
        told_at, told_samples = self._told
        self._told = (time.monotonic(), self._num_samples)
        seconds = self._told[0] - told_at
        rate = (self._num_samples - told_samples) / seconds if seconds > 0 else None
        self._emit(
            {
                "type": "progress",
                "at": now(),
                "step": step,
                "num_steps": self._num_steps,
                "epoch": epoch,
                "samples": self._num_samples,
                "samples_per_s": None if rate is None else round(rate, 1),
                "eta_s": self._eta_s(step),
            }
        )

    def evaluated(self, step: int, epoch: int, figures: dict[str, float]) -> None:
        """Say what an evaluation gave, at the step that it follows."""
        self._readback.drain()
        self._metrics(step, epoch, figures, now())

    def drain(self) -> None:
        """Wait for every number that is still on the device."""
        self._readback.drain()

    def _metrics(self, step: int, epoch: int, values: dict[str, float], at: str) -> None:
        self.latest.update(values)
        self._emit({"type": "metrics", "at": at, "step": step, "epoch": epoch, "values": values})

    def _eta_s(self, step: int) -> float | None:
        if self._stop_s is not None:
            return round(max(0.0, self._stop_s - self.elapsed_s), 1)
        if self._num_steps is None:
            return None
        return round(self.elapsed_s / (step + 1) * (self._num_steps - step - 1), 1)


@torch.inference_mode()
def evaluate(
    job: TrainJob, network: nn.Module, loss_fn: nn.Module, rows: Rows
) -> dict[str, float]:
    """Run the validation rows once: loss and metrics over all of them, exactly.

    A mean loss is weighted by the rows of each batch, so that a smaller last one counts rightly.
    """
    was_training = network.training
    network.eval()
    accuracies = Accuracies(job.metrics)
    is_sum = getattr(loss_fn, "reduction", "mean") == "sum"
    totals = torch.zeros(1 + len(job.metrics), dtype=torch.float64, device=rows.device)
    for batch in rows.in_order(job.data.batch_size):
        values = network(batch)
        num_rows = next(iter(batch.values())).shape[0]
        loss = loss_fn(*[values[name] for name in job.loss.inputs])
        totals[0] += loss.to(torch.float64) * (1 if is_sum else num_rows)
        for number, correct in enumerate(accuracies.correct(values), start=1):
            totals[number] += correct
    network.train(was_training)
    loss, *correct = totals.tolist()
    names = ["loss", *accuracies.names]
    figures = [loss if is_sum else loss / rows.num_rows, *(n / rows.num_rows for n in correct)]
    return {f"validation/{name}": value for name, value in zip(names, figures, strict=True)}


def save_checkpoint(
    job: TrainJob,
    state: tuple[nn.Module, torch.optim.Optimizer],
    position: dict[str, int],
    out: tuple[Path, Emit],
    *,
    metrics: dict[str, float],
    final: bool,
) -> None:
    """Write a checkpoint and say so; ``position`` counts updates done and epochs begun."""
    out_dir, emit = out
    name = f"checkpoints/step-{position['step']}"
    whole = {**position, "seed": job.seed, "spec": job.model_dump(mode="json"), "metrics": metrics}
    files = checkpoint.save(out_dir / name, *state, whole)
    emit(
        {
            "type": "checkpoint",
            "at": now(),
            "step": position["step"],
            "epoch": position["epoch"],
            "dir": name,
            "files": files,
            "size_bytes": sum(item["size_bytes"] for item in files.values()),
            "final": final,
            "metrics": metrics,
        }
    )
