"""Metrics counted on the device, exact over an epoch for any batch size.

Shape suffixes: B = rows, C = classes, K = the best k.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from glasshouse.spec import Metric, TrainJob


def metric_names(metrics: Sequence[Metric]) -> list[str]:
    """Return the names under which metrics are reported: their own, or a default.

    Defaults are ``accuracy``, ``accuracy_top5``, ``MulticlassF1Score``; if two would be the same,
    the scores' layer is appended. Derived metrics include their operands:
    ``mean_abs_diff(fc1,fc2)``.
    """
    names = [item.name or _default_name(item) for item in metrics]
    twice = {name for name, count in Counter(names).items() if count > 1}
    return [
        f"{name}/{item.inputs[0]}"
        if name in twice and item.is_evaluated and item.name is None
        else name
        for name, item in zip(names, metrics, strict=True)
    ]


def _default_name(metric: Metric) -> str:
    if not metric.is_evaluated:
        return f"{metric.type}({','.join(metric.inputs)})"
    return metric.type if metric.top_k == 1 else f"accuracy_top{metric.top_k}"


def reported(job: TrainJob, series: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of all metrics of a job that measure its quality.

    ``series``: the series of each torchmetrics metric, by its name.
    """
    named = list(zip(metric_names(job.metrics), job.metrics, strict=True))
    losses = ["loss", *(f"loss/{name}" for name in job.loss_names)]
    found = [*losses]
    for name, item in named:
        found += series.get(name, [name]) if item.interval else []
    if job.grad_clip is not None and job.grad_clip.type == "global_norm":
        found.append("grad_norm")
    found += ["clipped_steps"] if job.clips else []
    clipped = [layer for layer in job.network.layers if layer.output_grad_clip is not None]
    found += [f"output_grad_clip/{layer.name}" for layer in clipped]
    if job.evaluate is not None:
        judged = [
            part for name, item in named if item.is_evaluated for part in series.get(name, [name])
        ]
        prefixes = job.data.validations
        found += [f"{prefix}/{name}" for prefix in prefixes for name in (*losses, *judged)]
    return found


def num_correct(scores_BC: Tensor, target_B: Tensor, top_k: int = 1) -> Tensor:
    """Count the rows whose target is in the k highest scores, except rows with NaN."""
    scores_BC = scores_BC.detach()
    if top_k == 1:
        best_B, index_B = scores_BC.max(dim=-1)
        return ((index_B == target_B) & (best_B == best_B)).sum()  # noqa: PLR0124 - false for NaN
    best_BK, index_BK = scores_BC.topk(top_k, dim=-1)
    sane_B1 = ~torch.isnan(best_BK[:, :1])  # topk ranks a NaN highest
    return ((index_BK == target_B[:, None]) & sane_B1).any(dim=-1).sum()


class Accuracies:
    """The accuracy metrics of a job for a training batch."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        named = zip(metric_names(metrics), metrics, strict=True)
        self._metrics = {name: item for name, item in named if item.type == "accuracy"}

    def correct(self, values: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Return the number of correct rows for each metric that is due, on the device."""
        return {
            name: num_correct(values[item.inputs[0]], values[item.inputs[1]], item.top_k)
            for name, item in self.due(step).items()
        }

    def due(self, step: int) -> dict[str, Metric]:
        """Return the metrics that are due in a step, by name."""
        due = self._metrics.items()
        return {name: item for name, item in due if step % (item.interval or 1) == 0}


def wanted(job: TrainJob) -> tuple[str, ...]:
    """Return the layer outputs that are needed after the forward pass."""
    judged = [metric for metric in job.metrics if metric.is_evaluated]
    names = [*job.loss_reads, *(name for metric in judged for name in metric.inputs)]
    return tuple(dict.fromkeys([*names, *(job.network.outputs or ())]))
