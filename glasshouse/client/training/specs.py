"""Training specs from the arguments of `Client.train`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

import numpy as np
from pydantic import BaseModel, ValidationError

from glasshouse.client.data.arrays import as_array
from glasshouse.client.data.frames import columns_for, field_name, is_frame, read_dataset
from glasshouse.client.data.tensors import Array
from glasshouse.client.modules import is_dataset, is_module
from glasshouse.spec import AnyJob, Graph, Preset
from glasshouse.spec.error_messages import problems_in
from glasshouse.spec.metrics import ALONE

Document = dict[str, Any]
Network = Graph | Preset | Mapping[str, Any] | Sequence[Any] | str
Spec = AnyJob | Mapping[str, Any]
ResultField = Literal["value", "id", "prob", "top_k"]


class JobOptions(TypedDict, total=False):
    """Options of jobs of every kind, as in a spec."""

    name: str
    labels: dict[str, str]
    priority: int
    device: Any
    """A device name as in torch: ``"cuda"``, ``"cuda:1"``, ``"cpu"``, or ``"auto"``. Short for
    ``devices={"type": …, "ids": …}``."""
    devices: Any
    """``{"type", "count", "ids", "threads", "worker"}``, as in the spec."""
    retry: Any
    """``{"max_restarts": n}``."""
    timeout_s: float
    stall_timeout_s: float
    on_stall: Literal["warn", "restart", "fail"]


class InferOptions(JobOptions, total=False):
    """Options of `Client.infer`."""

    top_k: int
    """Number of classes of the field ``top_k``."""
    parallel: Any
    """``{"strategy": "data", "processes": n}``: processes that divide the rows of a dataset."""
    sequence_layout: Literal["padded", "packed"]
    """Layout of outputs with a value per step."""


class EvaluateOptions(JobOptions, total=False):
    """Options of `Client.evaluate`."""

    worst: int
    """Number of worst samples. Default: 20."""


class PredictOptions(TypedDict, total=False):
    """Options of `Client.predict`, `Job.predict`, `Model.predict` and `ModelVersion.predict`."""

    outputs: Sequence[str] | str | None
    """The layers to return. Default: the network's outputs."""
    fields: Sequence[ResultField] | ResultField | None
    """Any of ``value``, ``id`` (the argmax), ``prob`` (its probability) and ``top_k``. Default:
    ``value``; also ``id`` and ``prob`` for the scores of a classifier."""
    top_k: int | None
    """Number of classes of the field ``top_k``, which is then also returned."""
    timeout: float | None
    """Seconds for the whole request with its retries. Default: that of the service for each try."""
    priority: int | None
    """Requests with a higher priority are computed first. Default: 0."""


class ServeOptions(JobOptions, total=False):
    """Options of `Client.serve`, as in a spec."""

    replicas: Any
    """``{"min": 0, "max": 1}``. With ``min`` 0 the job is paused while no request comes."""
    max_queue: int
    """The most requests that wait. Default: 256."""
    max_batch_size: int
    """The most rows that are computed at once. Default: 64."""
    max_delay_ms: float
    """How long a batch that is not full waits for more requests. Default: 0."""
    idle_s: float
    """Seconds without a request after which the job is paused, with ``min`` 0. Default: 300."""
    drift: Any
    """How served rows are compared with training rows: ``{"window", "reference_rows", "min_psi",
    "layers", "max_overhead"}``. None: not at all."""
    request_log: Any
    """``{"share": 0.1, "redact": ["name"]}``: records requests; ``{}``: all, with all values.
    `Job.requests` reads them. Default: nothing of a request is stored."""


class TrainOptions(JobOptions, total=False):
    """Options of `Client.train`. Unless noted, an unset option has the default of the service."""

    loss: Any
    """``"CrossEntropyLoss"``, ``nn.CrossEntropyLoss(label_smoothing=0.1)``, a dict as in the spec,
    or a list of several. Default: ``CrossEntropyLoss`` for class targets, else ``MSELoss``."""
    optimizer: Any
    """``"Adam"``, ``{"type", "args"}``, a torch optimizer class, a ``functools.partial`` of one, or
    an instance over the module's parameters. Its parameter groups may differ in ``lr`` and
    ``weight_decay``. Default: ``Adam``."""
    scheduler: Any
    """``{"type", "args", "unit"}``, or a name if it needs no arguments. The type may be a torch
    scheduler object; then ``unit`` is required: ``"steps"`` or ``"epochs"``."""
    grad_clip: Any
    """``{"type": "value" | "norm" | "global_norm", "max"}``."""
    accumulate: int
    """Micro-batches per optimizer update. Default: 1."""
    precision: Literal["float32", "bfloat16", "float16", "auto"]
    matmul_precision: Literal["highest", "high", "medium"]
    grad_scaler: Any
    """For ``float16``: ``{"init_scale", "growth_factor", "growth_interval", "backoff_factor"}``."""
    activation_checkpointing: Any
    """``True``, or the names of the layers whose activations are kept."""
    memory_format: Literal["contiguous_format", "channels_last"]
    tune: bool
    deterministic: bool
    average: Any
    """Weight averaging: ``"ema"``, ``"swa"``, or a dict as in the spec."""
    epochs: int
    steps: int
    seconds: float
    early: Any
    """Early stopping: ``{"metric", "mode", "patience", "min_delta"}``."""
    parallel: Any
    """``{"strategy": "data", "processes"}``: several processes that train the network together."""
    batch_size: int
    """Rows per batch and process. Default: 32."""
    global_batch_size: int
    """Rows per batch of all processes, instead of ``batch_size``."""
    drop_last: bool
    shuffle: Any
    """``{"enabled", "buffer_size", "min_buffer_size"}``."""
    sequence: Any
    """``{"max_length", "overflow"}``."""
    normalize: Mapping[str, Any]
    """By field: ``{"type", "per"}``, ``"standard"``, ``"minmax"`` or ``"mean_normalization"``."""
    windows: Any
    """``{"type": "language_model" | "cbow", "tokens", …}``: each row is a window over a text."""
    on_bad_row: Literal["fail", "drop"]
    cache: Literal["none", "memory"]
    """``"memory"`` keeps the rows of a streamed dataset in memory once they are read."""
    workers: int
    """Threads that prefetch batches. Default: 0."""
    interleave: Literal["random", "sequential"]
    """How several datasets fill the shuffle buffer: all at once, or one after another."""
    bucket_by_length: Any
    """``{"field", "width", "max_tokens"}``: batch rows of similar length together."""
    label: str | int
    """The target column, by name. Required for a data frame."""
    validation: Any
    """An ``(x, y)`` pair, a dict of arrays, the name of a split, the fraction to hold out, or a
    source as in the spec. Several by name: ``{"clean": "test", "noisy": (x, y)}``."""
    split: str
    """The split to train on. Default: ``train`` if it exists, else the first one."""
    fields: Mapping[str, Any]
    """How the columns are read, by field, as in the spec. Default: inferred from the data."""
    inputs: Mapping[str, str]
    """For a module: the data field of each ``forward`` argument whose name is not a field."""
    init: Any
    """``{"checkpoint", "load", "missing"}``: the initial weights. Not allowed for a module."""
    metrics: Sequence[Any] | str
    """Names (``"accuracy"``) or dicts as in the spec. Without ``inputs``, a metric has those of the
    loss. Default: the accuracy, for class targets."""
    evaluate: Any
    """Default: after every epoch if there is validation data. None: never."""
    probes: Sequence[Any] | str
    """Probes as in the spec. A glob (``"*"``) observes the outputs of the layers at each step."""
    checkpoint: Any
    guards: Any
    """``{"nonfinite": {"check", "action": "fail" | "skip_step" | "warn"}}``."""
    seed: int


_UNCHANGED = (
    *(
        "name",
        "labels",
        "priority",
        "devices",
        "parallel",
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
_SIZES = ("batch_size", "global_batch_size")
_LIMITS = ("epochs", "steps", "seconds")
_TYPED = ("scheduler", "average")
_BATCHES = (
    *(
        "batch_size",
        "global_batch_size",
        "drop_last",
        "shuffle",
        "sequence",
        "windows",
        "on_bad_row",
    ),
    *("bucket_by_length", "cache", "workers", "interleave"),
)


def _sized(data: Document, options: TrainOptions) -> Document:
    """Add the default batch size, unless a size is given."""
    is_given = any(data.get(name) or options.get(name) for name in _SIZES)
    return data if is_given else {"batch_size": 32, **data}


def as_document(value: Any) -> Any:
    """Convert a spec to JSON types: from pydantic models, dicts, tuples and numpy scalars."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {str(key): as_document(item) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [as_document(item) for item in cast("Sequence[Any]", value)]
    return cast("Any", value).item() if isinstance(value, np.generic) else value


def network_of(network: Network) -> Document:
    """Read a network: a `Graph` or `Preset`, its dict, a list of layers, or a preset name."""
    value = as_document(network)
    if isinstance(value, str):
        return {"type": "preset", "preset": value}
    return {"type": "graph", "layers": value} if isinstance(value, list) else value


def graph_of(network: Document) -> Document:
    """The graph of a network; presets are expanded.

    Raises:
        ValueError: the preset or its arguments are invalid.
    """
    if network.get("type") != "preset":
        return network
    try:
        preset = Preset.model_validate_json(json.dumps(network))
    except ValidationError as error:
        problems = problems_in(error.errors(include_url=False), network, Preset)
        details = "; ".join(f"{item.pointer}: {item.detail}" for item in problems)
        raise ValueError(f"network{details}") from None
    return preset.graph().model_dump(mode="json", exclude_unset=True)


def check_options(network: Any, options: TrainOptions) -> None:
    """Validate the options before anything is uploaded.

    Raises:
        TypeError: there is no limit to stop at, or two options exclude each other.
    """
    if len(_given(options, _LIMITS)) != 1:
        raise TypeError("set exactly one of epochs, steps and seconds")
    if is_module(network) and "init" in options:
        raise TypeError(
            "init cannot be set for a module: load the weights into the module and remove init"
        )
    if "inputs" in options and not is_module(network):
        raise TypeError("inputs is only for modules: in a graph, set inputs of each layer")


def train_spec(network: Network, data: Document, options: TrainOptions) -> Document:
    """Build a training spec."""
    described = network_of(network)
    graph = graph_of(described)
    label = options.get("label")
    target = _target(graph, data["fields"]) if label is None else field_name(str(label))
    spec: Document = {
        "kind": "train",
        "network": described,
        "loss": _loss(options.get("loss"), graph, target, data["fields"]),
        "optimizer": _typed(options.get("optimizer", "Adam")),
        "data": {**_sized(data, options), **_given(options, _BATCHES), **_normalize(options)},
        "stop": _stop(options),
    }
    found: Any = spec["loss"]
    losses = cast("list[Document]", found if isinstance(found, list) else [found])
    spec["metrics"] = _metrics(options.get("metrics"), losses, data["fields"])
    spec.update(_given(options, _UNCHANGED))
    spec.update({name: _typed(given) for name, given in _given(options, _TYPED).items()})
    return as_document(spec)


def input_fields(graph: Document, fields: Mapping[str, Any]) -> list[str]:
    """The data fields that the network reads, in field order."""
    read: set[str] = set()
    for place, layer in enumerate(graph["layers"]):
        if layer.get("inputs"):
            read.update(name.partition(".")[0] for name in layer["inputs"])
        elif place == 0:
            read.add(next(iter(fields)))
    return [name for name in fields if name in read]


def result_names(tensors: dict[str, Array], fields: Sequence[str] | None) -> dict[str, Array]:
    """Remove the suffix of the only requested field (default: ``/value``) from tensor names.

    Tensors named by a layer alone come first.
    """
    if fields is not None and len(fields) != 1:
        return tensors
    suffix = f"/{fields[0] if fields else 'value'}"
    named = {name.removesuffix(suffix): array for name, array in tensors.items()}
    return dict(sorted(named.items(), key=lambda item: ("/" in item[0], item[0])))


def read_inputs(inputs: Any, spec: Document) -> dict[str, Array]:
    """Read the inputs of an inference: arrays by field, or one array for a single input.

    Raises:
        ValueError: the network reads several fields and the inputs are not named.
    """
    return {name: as_array(name, value) for name, value in _by_field(inputs, spec).items()}


def read_sequences(inputs: Any, spec: Document) -> dict[str, list[Any]] | None:
    """Read inputs as lists of rows if one of them is a sequence field; otherwise return None.

    Raises:
        ValueError: the network reads several fields and the inputs are not named.
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
        raise ValueError(f"the network has several inputs: pass a dict of {', '.join(names)}")
    return {names[0]: inputs}


def wanted_of(options: PredictOptions) -> Document:
    """``outputs``, ``fields`` and ``top_k`` of a prediction, those that are set.

    Raises:
        TypeError: an option is unknown.
    """
    unknown = sorted(set(options) - set(PredictOptions.__annotations__))
    if unknown:
        listed = ", ".join(PredictOptions.__annotations__)
        raise TypeError(f"predict() got unknown options {', '.join(unknown)}; there are: {listed}")
    found: Document = {}
    for name in ("outputs", "fields"):
        if (given := options.get(name)) is not None:
            found[name] = [given] if isinstance(given, str) else list(given)
    if (top_k := options.get("top_k")) is not None:
        found["top_k"] = int(top_k)
    return found


def _normalize(options: TrainOptions) -> Document:
    asked = options.get("normalize")
    if asked is None:
        return {}
    return {"normalize": {name: _typed(value) for name, value in asked.items()}}


def window_fields(windows: Any) -> Document:
    """The fields for all columns that windows produce."""
    kind = as_document(windows).get("type")
    if kind == "cbow":
        return {"context": {"type": "integer_sequence"}, "centre": {"type": "integer"}}
    return {name: {"type": "integer_sequence"} for name in ("input", "target")}


def _typed(value: Any) -> Document:
    document = as_document(value)
    return {"type": document} if isinstance(document, str) else document


def _target(graph: Document, fields: Mapping[str, Any]) -> str | None:
    """The only field that the network does not read; None if there is not exactly one."""
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
            f"the target is ambiguous: it may be any of {', '.join(fields)}. Set it in the loss: "
            f"loss={{'type': {document['type']!r}, 'inputs': [layer, field]}}"
        )
    output = (graph.get("outputs") or [graph["layers"][-1]["name"]])[0]
    return {**document, "inputs": [output, target]}


def _metrics(given: Any, losses: Sequence[Document], fields: Mapping[str, Any]) -> list[Any]:
    """Metrics with their inputs. Default: the inputs of the first loss."""
    if given is None:
        compared = [item["inputs"] for item in losses if _is_of_classes(item, fields)]
        return [{"type": "accuracy", "inputs": inputs} for inputs in compared]
    several: Any = [given] if isinstance(given, (str, Mapping, BaseModel)) else given
    return [_compared(_typed(item), losses[0]["inputs"]) for item in several]


def _compared(metric: Document, inputs: Sequence[str]) -> Document:
    if "inputs" in metric or len(inputs) != 2:
        return metric
    if metric.get("type") in ALONE:
        raise ValueError(
            f"metrics: {metric['type']} needs inputs: {{'type': {metric['type']!r}, "
            f"'inputs': [{inputs[0]!r}]}}"
        )
    return {**metric, "inputs": list(inputs)}


def _is_of_classes(loss: Document, fields: Mapping[str, Any]) -> bool:
    """Whether a loss compares scores with one class per row, so that it has an accuracy."""
    target = fields.get(loss["inputs"][-1], {})
    return loss["type"] == "CrossEntropyLoss" and target.get("type") == "integer"


def _stop(options: TrainOptions) -> Document:
    return _given(options, (*_LIMITS, "early"))


def _given(options: TrainOptions, keys: Sequence[str]) -> Document:
    return {key: value for key, value in options.items() if key in keys and value is not None}
