"""A job spec from the few things a user says in Python."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

import numpy as np
from pydantic import BaseModel, ValidationError

from glasshouse.client.arrays import as_array
from glasshouse.client.frames import columns_for, field_name, is_frame, read_dataset
from glasshouse.client.modules import is_dataset, is_module
from glasshouse.client.tensors import Array
from glasshouse.spec import Graph, InferJob, Preset, TrainJob
from glasshouse.spec.metrics import ALONE
from glasshouse.spec.wording import problems_in

Document = dict[str, Any]
Network = Graph | Preset | Mapping[str, Any] | Sequence[Any] | str
Spec = TrainJob | InferJob | Mapping[str, Any]
ResultField = Literal["value", "id", "prob"]


class JobOptions(TypedDict, total=False):
    """What any job may say beside its work, as in its spec."""

    name: str
    labels: dict[str, str]
    priority: int
    device: Any
    """torch's name of a device: ``"cuda"``, ``"cuda:1"``, ``"cpu"``, ``"auto"``. Short for
    ``devices={"type": …, "ids": …}``."""
    devices: Any
    """``{"type", "count", "ids", "threads", "worker"}``, as in the spec."""
    retry: Any
    """``{"max_restarts": n}``."""
    timeout_s: float
    stall_timeout_s: float
    on_stall: Literal["warn", "restart", "fail"]


class TrainOptions(JobOptions, total=False):
    """What `Client.train` takes by name. Left out, each has the service's own default."""

    loss: Any
    """``"CrossEntropyLoss"``, ``nn.CrossEntropyLoss(label_smoothing=0.1)``, or as in the spec; or a
    list of several. Default: ``CrossEntropyLoss`` for classes, else ``MSELoss``."""
    optimizer: Any
    """``"Adam"``, ``{"type", "args"}``, or torch's own: the class, a ``functools.partial`` of it,
    or an optimizer of the module's parameters, whose groups may differ in ``lr`` and
    ``weight_decay``. Default: ``Adam``."""
    scheduler: Any
    """``{"type", "args", "unit"}``, or the name of one that needs no arguments. The type may be a
    scheduler of torch itself; then say its ``unit``, ``"steps"`` or ``"epochs"``."""
    grad_clip: Any
    """``{"type": "value" | "norm" | "global_norm", "max"}``."""
    accumulate: int
    """Batches of one update. Left out: 1."""
    precision: Literal["float32", "bfloat16", "float16", "auto"]
    matmul_precision: Literal["highest", "high", "medium"]
    grad_scaler: Any
    """Of ``float16``: ``{"init_scale", "growth_factor", "growth_interval", "backoff_factor"}``."""
    activation_checkpointing: Any
    """``True``, or the names of the layers at which activations are kept."""
    memory_format: Literal["contiguous_format", "channels_last"]
    tune: bool
    deterministic: bool
    average: Any
    """``"ema"``, ``"swa"``, or as in the spec."""
    epochs: int
    steps: int
    seconds: float
    early: Any
    """``{"metric", "mode", "patience", "min_delta"}``: end sooner."""
    batch_size: int
    """Left out: 32."""
    drop_last: bool
    shuffle: Any
    """``{"enabled", "buffer_size", "min_buffer_size"}``."""
    sequence: Any
    """``{"max_length", "overflow"}``."""
    normalize: Mapping[str, Any]
    """By field ``{"type", "per"}``, or ``"standard"``, ``"minmax"``, ``"mean_normalization"``."""
    windows: Any
    """``{"type": "language_model" | "cbow", "tokens", …}``: rows are windows over a text."""
    on_bad_row: Literal["fail", "drop"]
    cache: Literal["none", "memory"]
    """``"memory"``: rows that a pool has read stay."""
    workers: int
    """Threads that make batches ahead. Left out: 0."""
    interleave: Literal["random", "sequential"]
    """How a pool is filled from several datasets."""
    bucket_by_length: Any
    """``{"field", "width", "max_tokens"}``: batches of rows of like length."""
    label: str | int
    """The target's column: of a data frame, which needs it, and of other columns by name."""
    validation: Any
    """An ``(x, y)`` pair, a dict of arrays, a split's name, or the fraction to hold back."""
    split: str
    """The dataset's split to train on. Left out: ``train`` where there is one, else ``all``."""
    fields: Mapping[str, Any]
    inputs: Mapping[str, str]
    """Of a module: the data field of an argument of ``forward`` that is named otherwise."""
    init: Any
    """``{"checkpoint", "load", "missing"}``: what training begins with. A module brings its own."""
    metrics: Sequence[Any] | str
    """Names (``"accuracy"``), or as in the spec; without ``inputs`` of what the loss compares.
    Default: the accuracy, for classes."""
    evaluate: Any
    """Left out: after every epoch, where there is validation data. None: never."""
    probes: Sequence[Any] | str
    """As in the spec; a glob alone (``"*"``) watches the outputs of these layers on every step."""
    checkpoint: Any
    guards: Any
    """``{"nonfinite": {"check", "action": "fail" | "skip_step" | "warn"}}``."""
    seed: int


_AS_THEY_ARE = (
    *(
        "name",
        "labels",
        "priority",
        "devices",
        "probes",
        "checkpoint",
        "guards",
        "seed",
        "evaluate",
    ),
    *(
        "precision",
        "matmul_precision",
        "grad_scaler",
        "activation_checkpointing",
        "memory_format",
        "tune",
    ),
    *("deterministic", "grad_clip", "accumulate"),
    *("retry", "timeout_s", "stall_timeout_s", "on_stall", "init"),
)
_LIMITS = ("epochs", "steps", "seconds")
_TYPED = ("scheduler", "average")
_BATCHES = (
    *("batch_size", "drop_last", "shuffle", "sequence", "windows", "on_bad_row"),
    *("bucket_by_length", "cache", "workers", "interleave"),
)


def as_document(value: Any) -> Any:
    """The JSON form of a spec, however it was made: models, dicts, tuples, numpy numbers."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {str(key): as_document(item) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [as_document(item) for item in cast("Sequence[Any]", value)]
    return cast("Any", value).item() if isinstance(value, np.generic) else value


def network_of(network: Network) -> Document:
    """Read a network: a `Graph` or `Preset`, its dict, the list of its layers, a preset's name."""
    value = as_document(network)
    if isinstance(value, str):
        return {"type": "preset", "preset": value}
    return {"type": "graph", "layers": value} if isinstance(value, list) else value


def graph_of(network: Document) -> Document:
    """The graph of a network's dict.

    Raises:
        ValueError: there is no such preset, or it has no such sizes.
    """
    if network.get("type") != "preset":
        return network
    try:
        preset = Preset.model_validate_json(json.dumps(network))
    except ValidationError as error:
        problems = problems_in(error.errors(include_url=False), network, Preset)
        told = "; ".join(f"{item.pointer}: {item.detail}" for item in problems)
        raise ValueError(f"network{told}") from None
    return preset.graph().model_dump(mode="json", exclude_unset=True)


def check_options(network: Any, options: TrainOptions) -> None:
    """Find what is wrong with the options by themselves, before anything is uploaded.

    Raises:
        TypeError: nothing says when to stop, or two options exclude each other.
    """
    if len(_given(options, _LIMITS)) != 1:
        raise TypeError("say when to stop: exactly one of epochs, steps and seconds")
    if is_module(network) and "init" in options:
        raise TypeError("a module brings its own weights: load them into it, and leave init out")
    if "inputs" in options and not is_module(network):
        raise TypeError("inputs is of a module: a graph's layers say what they read")


def train_spec(network: Network, data: Document, options: TrainOptions) -> Document:
    """Write a training spec around a network and its data."""
    described = network_of(network)
    graph = graph_of(described)
    label = options.get("label")
    target = _target(graph, data["fields"]) if label is None else field_name(str(label))
    spec: Document = {
        "kind": "train",
        "network": described,
        "loss": _loss(options.get("loss"), graph, target, data["fields"]),
        "optimizer": _typed(options.get("optimizer", "Adam")),
        "data": {"batch_size": 32, **data, **_given(options, _BATCHES), **_normalize(options)},
        "stop": _stop(options),
    }
    found: Any = spec["loss"]
    losses = cast("list[Document]", found if isinstance(found, list) else [found])
    spec["metrics"] = _metrics(options.get("metrics"), losses, data["fields"])
    spec.update(_given(options, _AS_THEY_ARE))
    spec.update({name: _typed(given) for name, given in _given(options, _TYPED).items()})
    return as_document(spec)


def input_fields(graph: Document, fields: Mapping[str, Any]) -> list[str]:
    """The data fields that the network reads, in the order of the fields."""
    read: set[str] = set()
    for place, layer in enumerate(graph["layers"]):
        if layer.get("inputs"):
            read.update(name.partition(".")[0] for name in layer["inputs"])
        elif place == 0:
            read.add(next(iter(fields)))
    return [name for name in fields if name in read]


def result_names(tensors: dict[str, Array], fields: Sequence[str] | None) -> dict[str, Array]:
    """Name by layer alone the only field that was asked for, or what is given unasked.

    What has the name of a layer comes first.
    """
    if fields is not None and len(fields) != 1:
        return tensors
    suffix = f"/{fields[0] if fields else 'value'}"
    named = {name.removesuffix(suffix): array for name, array in tensors.items()}
    return dict(sorted(named.items(), key=lambda item: ("/" in item[0], item[0])))


def read_inputs(inputs: Any, spec: Document) -> dict[str, Array]:
    """Read the inputs of an inference: by field, or one array for a network with one input.

    Raises:
        ValueError: the network reads several fields and the inputs do not say which.
    """
    return {name: as_array(name, value) for name, value in _by_field(inputs, spec).items()}


def read_sequences(inputs: Any, spec: Document) -> dict[str, list[Any]] | None:
    """Read inputs among which there are rows of different lengths, as lists; None: there are none.

    Raises:
        ValueError: the network reads several fields and the inputs do not say which.
    """
    declared: Document = spec["data"]["fields"]
    given = _by_field(inputs, spec)
    kinds = [declared[name]["type"] for name in given if name in declared]
    if not any(kind.endswith("_sequence") for kind in kinds):
        return None
    return {name: [_row(name, row) for row in rows] for name, rows in given.items()}


def _row(name: str, row: Any) -> Any:
    return row if isinstance(row, str) else as_array(name, row).tolist()


def _by_field(inputs: Any, spec: Document) -> dict[str, Any]:
    if is_frame(inputs):
        return columns_for(inputs, spec["data"]["fields"])
    if is_dataset(inputs):
        names = input_fields(graph_of(spec["network"]), spec["data"]["fields"])
        found = read_dataset(inputs, names)
        return {name: item for name, item in found.items() if name in names}
    if isinstance(inputs, Mapping):
        return dict(cast("Mapping[str, Any]", inputs))
    names = input_fields(graph_of(spec["network"]), spec["data"]["fields"])
    if len(names) != 1:
        raise ValueError(f"the network reads {', '.join(names)}; give inputs as a dict of these")
    return {names[0]: inputs}


def _normalize(options: TrainOptions) -> Document:
    asked = options.get("normalize")
    if asked is None:
        return {}
    return {"normalize": {name: _typed(value) for name, value in asked.items()}}


def window_fields(windows: Any) -> Document:
    """Fields for all columns that windows give."""
    kind = as_document(windows).get("type")
    if kind == "cbow":
        return {"context": {"type": "integer_sequence"}, "centre": {"type": "integer"}}
    return {name: {"type": "integer_sequence"} for name in ("input", "target")}


def _typed(value: Any) -> Document:
    document = as_document(value)
    return {"type": document} if isinstance(document, str) else document


def _target(graph: Document, fields: Mapping[str, Any]) -> str | None:
    """The one field that the network does not read."""
    inputs = input_fields(graph, fields)
    others = [name for name in fields if name not in inputs]
    return others[0] if len(others) == 1 else None


def _loss(loss: Any, graph: Document, target: str | None, fields: Mapping[str, Any]) -> Any:
    if isinstance(loss, (list, tuple)):
        return [_loss(item, graph, target, fields) for item in cast("list[Any]", loss)]
    if loss is None:
        is_class = target is not None and fields[target]["type"] == "integer"
        loss = "CrossEntropyLoss" if is_class else "MSELoss"
    document = _typed(loss)
    if "inputs" in document:
        return document
    if target is None:
        raise ValueError(
            f"which of {', '.join(fields)} is the target? Say so in the loss: "
            f"loss={{'type': {document['type']!r}, 'inputs': [layer, field]}}"
        )
    output = (graph.get("outputs") or [graph["layers"][-1]["name"]])[0]
    return {**document, "inputs": [output, target]}


def _metrics(given: Any, losses: Sequence[Document], fields: Mapping[str, Any]) -> list[Any]:
    """Metrics with what they compare: by default, what the first loss compares."""
    if given is None:
        judged = [item["inputs"] for item in losses if _is_of_classes(item, fields)]
        return [{"type": "accuracy", "inputs": inputs} for inputs in judged]
    several: Any = [given] if isinstance(given, (str, Mapping, BaseModel)) else given
    return [_compared(_typed(item), losses[0]["inputs"]) for item in several]


def _compared(metric: Document, inputs: Sequence[str]) -> Document:
    if "inputs" in metric or len(inputs) != 2:
        return metric
    if metric.get("type") in ALONE:
        raise ValueError(
            f"metrics: say what {metric['type']} is of: {{'type': {metric['type']!r}, "
            f"'inputs': [{inputs[0]!r}]}}"
        )
    return {**metric, "inputs": list(inputs)}


def _is_of_classes(loss: Document, fields: Mapping[str, Any]) -> bool:
    """Whether a loss compares scores with one class per row, of which the accuracy is known."""
    target = fields.get(loss["inputs"][-1], {})
    return loss["type"] == "CrossEntropyLoss" and target.get("type") == "integer"


def _stop(options: TrainOptions) -> Document:
    return _given(options, (*_LIMITS, "early"))


def _given(options: TrainOptions, keys: Sequence[str]) -> Document:
    return {key: value for key, value in options.items() if key in keys and value is not None}
