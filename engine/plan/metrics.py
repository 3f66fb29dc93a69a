"""Plan metrics: check that those of evaluations fit their inputs."""

from collections.abc import Mapping

import torch

from engine.core.problems import Findings
from engine.metrics.metrics import metric_names
from engine.network.shapes import FieldShape, Trace
from engine.plan.losses import operands_of
from glasshouse.spec import TrainJob


def check_accuracies(
    spec: TrainJob, shapes: Mapping[str, FieldShape], traced: Trace, findings: Findings
) -> None:
    """Check the inputs of each metric of evaluations, and the classes of accuracies."""
    for number, metric in enumerate(spec.metrics):
        if not metric.is_evaluated:
            continue
        pointer = f"/metrics/{number}"
        scores, target = operands_of(metric.inputs, f"{pointer}/inputs", traced, findings)
        if metric.is_of_torchmetrics:
            continue
        both = f"{list(scores.shape)} and {list(target.shape)}"
        field = shapes.get(metric.inputs[1])
        dim = (field.dim if field else None) or 0
        if scores.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64:
            detail = "accuracy compares scores of shape [rows, classes] with integers of shape"
            findings.problem(f"{pointer}/inputs", f"{detail} [rows], not {both}", "shape")
        elif metric.top_k > scores.shape[1]:
            detail = f"top_k is {metric.top_k}, and there are {scores.shape[1]} classes"
            findings.problem(f"{pointer}/top_k", detail, "top_k")
        elif dim > scores.shape[1]:
            detail = f"field {metric.inputs[1]!r} has {dim} classes, the scores {scores.shape[1]}"
            findings.problem(f"{pointer}/inputs/1", detail, "classes")
    names = metric_names(spec.metrics)
    if len(set(names)) < len(names):
        findings.problem(
            "/metrics", "two metrics have the same name; remove or name one", "duplicate"
        )
