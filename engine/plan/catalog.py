"""The engine's catalog for the API: each entry with a JSON Schema of its arguments."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from engine.core import arguments
from engine.datasets import formats
from engine.losses.losses import loss_classes, other_losses
from engine.metrics.torch_metrics import metric_classes, metric_parameters
from engine.network.functions import FUNCTIONS, num_inputs
from engine.network.layer_types import layer_classes, layer_parameters, other_layers
from engine.network.shapes import INFERRED
from engine.optim.lr_schedulers import scheduler_classes, scheduler_parameters
from engine.optim.optimizers import optimizer_classes
from glasshouse.spec.metrics import ALONE
from glasshouse.spec.presets import PRESETS


class UnknownSection(KeyError):
    """The catalog has no such section."""


@cache
def section(name: str) -> list[dict[str, Any]]:
    """Return the entries of one section, by name.

    Raises:
        UnknownSection: there is no such section.
    """
    makers: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "layers": _layers,
        "presets": _presets,
        "losses": _losses,
        "optimizers": _optimizers,
        "schedulers": _schedulers,
        "metrics": _metrics,
        "datasets": formats.catalog,
        "rules": list,
    }
    if name not in makers:
        raise UnknownSection(name)
    return makers[name]()


def _layers() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in [*layer_classes(), *FUNCTIONS]:
        known = layer_parameters(name)
        if name in FUNCTIONS:
            least, most = num_inputs(name)
            summary = (FUNCTIONS[name].__doc__ or "").splitlines()[0]
            inputs = {"min": least, "max": most}
        else:
            summary = _summary(name, known, other_layers().get(name))
            inputs = _module_inputs(layer_classes()[name])
        found.append(_entry(name, summary, known, inputs))
    return found


def _presets() -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "summary": (known.args.__doc__ or "").splitlines()[0],
            "schema": {"required": []} | known.args.model_json_schema(),
            "inputs": None,
            "outputs": list(graph.outputs or (graph.layers[-1].name,)),
        }
        for name, known in PRESETS.items()
        for graph in [known.graph(known.args())]
    ]


def _module_inputs(cls: type[nn.Module]) -> dict[str, int | None]:
    accepted = arguments.call_inputs(cls.forward)
    return {"min": accepted[0], "max": accepted[1]}


def _losses() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, cls in loss_classes().items():
        known = arguments.parameters(cls)
        summary = _summary(name, known, other_losses().get(name))
        found.append(_entry(name, summary, known, _module_inputs(cls)))
    return found


def _optimizers() -> list[dict[str, Any]]:
    known = {name: arguments.parameters(cls) for name, cls in optimizer_classes().items()}
    return [_entry(name, _in_words(name, item), item, None) for name, item in known.items()]


def _schedulers() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in scheduler_classes():
        known = scheduler_parameters(name)
        owner = "our" if name == "InverseTimeLR" else "torch's"
        found.append(_entry(name, _in_words(name, known, owner), known, None))
    return found


_METRICS = {
    "accuracy": "The share of rows whose target is among the top_k highest scores.",
    "mean_abs_diff": "The mean of the absolute differences of two tensors of one shape.",
    "mean_squared_diff": "The mean of the squared differences of two tensors of one shape.",
    "cosine_similarity": "The cosine of the angle between two tensors, each as one long vector.",
    "l2_ratio": "The l2 norm of the first tensor over that of the second.",
    "correct_fraction": "The share of integer targets that are the index of the highest score.",
    "mean": "The mean of a tensor.",
    "l2": "The l2 norm of a tensor.",
}


def _metrics() -> list[dict[str, Any]]:
    """Return our metrics and torchmetrics' classes, whose arguments are those of ``args``."""
    top_k = {"type": "integer", "minimum": 1, "default": 1}
    others = [
        _entry(name, _in_words(name, known, "torchmetrics'"), known, {"min": 2, "max": 2})
        for name in metric_classes()
        for known in [metric_parameters(name)]
    ]
    return others + [
        {
            "name": name,
            "summary": summary,
            "schema": {
                "type": "object",
                "properties": {"top_k": top_k} if name == "accuracy" else {},
                "required": [],
            },
            "inputs": dict.fromkeys(("min", "max"), 1 if name in ALONE else 2),
        }
        for name, summary in _METRICS.items()
    ]


def _summary(
    name: str, known: dict[str, arguments.Parameter], other: type[nn.Module] | None
) -> str:
    """Return the first line of the docstring of a class that torch does not have, or its name."""
    lines = [] if other is None else (other.__doc__ or name).strip().splitlines()
    return lines[0] if lines else _in_words(name, known)


def _in_words(name: str, known: dict[str, arguments.Parameter], owner: str = "torch's") -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    given = ", ".join(
        item.name if item.required else f"{item.name}={item.default!r}" for item in known.values()
    )
    return f"{words}: {owner} {name}({given})"


def _entry(
    name: str,
    summary: str,
    known: dict[str, arguments.Parameter],
    inputs: dict[str, int | None] | None,
) -> dict[str, Any]:
    inferred = frozenset(INFERRED)
    return {
        "name": name,
        "summary": summary,
        "schema": arguments.schema(known, inferred),
        "inputs": inputs,
    }
