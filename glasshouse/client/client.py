"""The client: one object for one service."""

import inspect
from collections.abc import Sequence
from math import prod
from types import TracebackType
from typing import Any, Self, TypeGuard, Unpack, cast

from glasshouse.client.address import find_service
from glasshouse.client.arrays import derive_fields, is_arrays, is_ragged, read_splits
from glasshouse.client.frames import as_columns, is_frame
from glasshouse.client.job import Job
from glasshouse.client.modules import is_dataset, is_module
from glasshouse.client.records import Checkpoint, Dataset
from glasshouse.client.resources import (
    Catalog,
    Checkpoints,
    Datasets,
    Devices,
    Jobs,
    Keys,
    Quotas,
    Webhooks,
    Workers,
)
from glasshouse.client.tensors import Array
from glasshouse.client.training import (
    Document,
    JobOptions,
    ResultField,
    Spec,
    TrainOptions,
    as_document,
    check_options,
    network_of,
    read_inputs,
    read_sequences,
    result_names,
    train_spec,
    window_fields,
)
from glasshouse.client.transport import Request, Transport
from glasshouse.errors import ConflictError

INLINE_VALUES = 20_000
"""Inputs with more values than this travel as a dataset; JSON is slow for numbers."""


class Client:
    """Speaks to a Glasshouse service.

    Without arguments it finds the one that ``glasshouse up`` runs on this machine, or the one
    that ``GLASSHOUSE_URL`` and ``GLASSHOUSE_API_KEY`` name. May be used from several threads.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = 60.0,
        max_retries: int = 2,
    ) -> None:
        address = find_service(url, api_key)
        self.url = address.url
        self._transport = Transport(address, timeout_s=timeout, max_retries=max_retries)
        self.jobs = Jobs(self._transport)
        self.datasets = Datasets(self._transport)
        self.checkpoints = Checkpoints(self._transport)
        self.devices = Devices(self._transport)
        self.workers = Workers(self._transport)
        self.keys = Keys(self._transport)
        self.quotas = Quotas(self._transport)
        self.webhooks = Webhooks(self._transport)
        self.catalog = Catalog(self._transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def info(self) -> dict[str, Any]:
        """The service's version, capabilities and limits."""
        return self._transport.get("/")

    def ready(self) -> dict[str, Any]:
        """What the service says of its health; raises when it is not ready."""
        return self._transport.decode(self._transport.send(Request("GET", "/readyz"))) or {}

    def browser_link(self) -> str:
        """Make a link that opens the service in a browser: once, within a minute."""
        return self._transport.post("/tickets")["url"]

    def plan(self, spec: Spec) -> dict[str, Any]:
        """Check a job spec and see its layers, shapes, memory and devices; stores nothing."""
        return self._transport.post("/plan", as_document(spec))

    def train(self, network: Any, data: Any, **options: Unpack[TrainOptions]) -> Job:
        """Train a network.

        Args:
            network: a `Graph`, its dict, or the list of its layers; or a preset: its name, or
                ``{"type": "preset", "preset", "args"}``; or a torch ``nn.Module``, which is read as
                a graph, compared with it, and sent with its weights.
            data: a dataset or its id, a list of such to train on as one, arrays (a dict by column,
                a dict of splits of them, an ``(x, y)`` pair; they are uploaded), a data frame, a
                torch dataset, or a dict as ``data`` in a spec.
            options: see `TrainOptions`: ``loss``, ``optimizer``, ``epochs`` …

        Returns:
            The job, queued.
        """
        check_options(network, options)
        described = self._training_data(data, _arguments(network), options)
        if is_module(network):
            network, options["init"] = self._send(network, described, options)
        return self.jobs.create(train_spec(network, described, options))

    def _send(
        self, module: Any, data: Document, options: TrainOptions
    ) -> tuple[Document, Document]:
        """Read a module as a graph and send its weights; gives the graph and what to begin with.

        Raises:
            CannotTrace: no graph can say what it does.
        """
        from glasshouse.client.modules.preparing import trace_for  # noqa: PLC0415 (imports torch)

        dataset = self.datasets.get(data["train"]["dataset"])
        fields = with_shapes(data["fields"], dataset)
        limit = as_document(options.get("sequence") or data.get("sequence") or {})
        traced, inputs = trace_for(module, fields, limit.get("max_length"), options.get("inputs"))
        read = {name.partition(".")[0] for name in inputs.values()}
        sent = self.checkpoints.create(
            traced.weights,
            traced.graph,
            {name: field for name, field in fields.items() if name in read},
            name=type(module).__name__,
            reuse=True,
        )
        return traced.graph, {"checkpoint": sent.id}

    def infer(
        self,
        source: Job | Checkpoint | str,
        inputs: Any = None,
        *,
        data: Any = None,
        outputs: Sequence[str] | None = None,
        fields: Sequence[ResultField] | ResultField = ("value",),
        **options: Unpack[JobOptions],
    ) -> dict[str, Array]:
        """Run a trained network and wait for the outputs of any of its layers.

        Args:
            source: a training job (its newest checkpoint) or a checkpoint, or the id of one.
            inputs: an array for the network's input, or a dict of them by field; for a sequence
                a list of rows, each with its own length, or of texts where it is made of tokens.
            data: instead of inputs: a dataset, its id, or ``{"dataset", "split"}``.
            outputs: the layers to return; left out, the network's own outputs.
            fields: ``value``, ``id`` (of the largest) and ``prob`` (its probability).
            options: name, labels, priority, devices.

        Returns:
            Arrays by layer; by ``<layer>/<field>`` when there are several fields.
        """
        if (inputs is None) == (data is None):
            raise TypeError("give exactly one of inputs and data")
        wanted: list[ResultField] = [fields] if isinstance(fields, str) else list(fields)  # pyright: ignore[reportAssignmentType]
        spec: Document = {"kind": "infer", **_source(source), "fields": wanted, **options}
        if outputs is not None:
            spec["outputs"] = list(outputs)
        uploaded: Dataset | None = None
        if inputs is None:
            spec["data"] = _rows(data)
        else:
            uploaded = self._add_inputs(spec, source, inputs)
        try:
            job = self.jobs.create(spec).wait()
            return result_names(job.outputs(), wanted)
        finally:
            if uploaded is not None:
                self._discard(uploaded)

    def _add_inputs(self, spec: Document, source: Job | Checkpoint | str, inputs: Any) -> Any:
        """Put inputs into a spec, or into a dataset when they are many or need its dtypes."""
        trained = self._trained_by(source)
        if (sequences := read_sequences(inputs, trained)) is not None:
            spec["inputs"] = sequences
            return None
        arrays = read_inputs(inputs, trained)
        is_small = sum(array.size for array in arrays.values()) <= INLINE_VALUES
        # a uint8 column is scaled to [0, 1] as in training; plain numbers in JSON would not be
        if is_small and not any(array.dtype.name == "uint8" for array in arrays.values()):
            spec["inputs"] = {name: array.tolist() for name, array in arrays.items()}
            return None
        declared = trained["data"]["fields"]
        dataset = self.datasets.upload({"test": arrays}, name="inputs")
        fields = {name: {**declared[name], "column": name} for name in arrays if name in declared}
        for field in fields.values():
            field.pop("columns", None)
        spec["data"] = {"dataset": dataset.id, "split": "test", "fields": fields}
        return dataset

    def _trained_by(self, source: Job | Checkpoint | str) -> Document:
        """The spec of the job that trained a network, or what was sent with its weights."""
        if isinstance(source, Job):
            return source.spec()
        if isinstance(source, str) and source.startswith("ckpt_"):
            source = self.checkpoints.get(source)
        if isinstance(source, Checkpoint) and source.data["job"] is None:
            found = source.network()
            return {"network": found["network"], "data": {"fields": found["fields"]}}
        job_id = source if isinstance(source, str) else source.data["job"]
        return self.jobs.get(job_id).spec()

    def _discard(self, dataset: Dataset) -> None:
        try:
            dataset.delete()
        except ConflictError:  # the job that was given up on still reads it
            return

    def _training_data(
        self, data: Any, arguments: Sequence[str], options: TrainOptions
    ) -> Document:
        if _is_several(data):
            return self._several(data, arguments, options)
        if is_frame(data) or is_dataset(data) or is_arrays(data):
            return self._uploaded(data, arguments, options)
        if isinstance(data, (str, Dataset)):
            dataset = (self.datasets.get(data) if isinstance(data, str) else data).wait()
            fields = {}
            if options.get("windows") is not None:
                fields = window_fields(options.get("windows"))
            elif "fields" not in options:
                fields = _declared(dataset)
        else:
            described = as_document(data)
            if "fields" in options:
                described = {**described, "fields": as_document(options["fields"])}
            if "fields" not in described:
                raise ValueError("say how the columns are read: fields={name: {'type': …}, …}")
            return described
        fields = as_document(options.get("fields", fields))
        return {**_sources(dataset, options), "fields": fields}

    def _uploaded(self, data: Any, arguments: Sequence[str], options: TrainOptions) -> Document:
        """Arrays, a frame or a torch dataset as datasets of the service, uploaded once."""
        label, validation = options.get("label"), options.get("validation")
        columns, fields = as_columns(data, label, arguments)
        held_back = validation is None or isinstance(validation, (float, str))
        judged = None if held_back else as_columns(validation, label, arguments)[0]
        splits = read_splits(columns, judged)
        if fields is None:
            fields = derive_fields(splits)
        fields = as_document(options.get("fields", fields))
        if not is_ragged(splits) or len(splits) == 1:
            dataset = self.datasets.upload(splits, name=options.get("name"), reuse=True)
            return {**_sources(dataset, options), "fields": fields}
        sources: Document = {}
        for name, split in splits.items():
            dataset = self.datasets.upload({"train": split}, name=options.get("name"), reuse=True)
            sources[name] = {"dataset": dataset.id, "split": _first_split(dataset, "all")}
        return {**sources, "fields": fields}

    def _several(
        self, data: list[str | Dataset], arguments: Sequence[str], options: TrainOptions
    ) -> Document:
        """Several datasets to train on as one; the first says how columns are read."""
        validation = options.get("validation")
        first, *others = [self._training_data(item, arguments, options) for item in data]
        if isinstance(validation, float):
            detail = "of several datasets no fraction can be held back"
            raise ValueError(f"{detail}: give each a fraction in data={{'train': [...]}}")
        train = [first["train"], *(item["train"] for item in others)]
        return {**first, "train": train, "fields": _for_all([first, *others])}


def _arguments(network: Any) -> list[str]:
    """What a module's ``forward`` takes, or a graph's layers read of the data."""
    if is_module(network):
        known = inspect.signature(network.forward).parameters.values()
        return [item.name for item in known if item.default is item.empty]
    described = network_of(network)
    layers = described.get("layers", ())
    made = {layer["name"] for layer in layers}
    read = [name for layer in layers for name in layer.get("inputs") or ()]
    return [name for name in dict.fromkeys(read) if name.partition(".")[0] not in made]


def _for_all(described: list[Document]) -> Document:
    """The fields of the first of several datasets, with room for the values of all."""
    fields: Document = {}
    for name, item in described[0]["fields"].items():
        dims = [other["fields"].get(name, {}).get("dim") for other in described]
        known = [dim for dim in dims if dim is not None]
        fields[name] = {**item, "dim": max(known)} if known else item
    return fields


def _is_several(data: Any) -> TypeGuard[list[str | Dataset]]:
    """Whether it is a list of datasets."""
    several = isinstance(data, list) and bool(data)  # pyright: ignore[reportUnknownArgumentType]
    return several and all(isinstance(item, (str, Dataset)) for item in cast("list[Any]", data))


def _source(source: Job | Checkpoint | str) -> Document:
    name = source if isinstance(source, str) else source.id
    return {"checkpoint" if name.startswith("ckpt_") else "job": name}


def _rows(data: Any) -> Document:
    if isinstance(data, Dataset):
        return {"dataset": data.id, "split": _first_split(data, "test")}
    return {"dataset": data} if isinstance(data, str) else cast("Document", as_document(data))


def _first_split(dataset: Dataset, wanted: str) -> str:
    return wanted if wanted in dataset.splits else next(iter(dataset.splits), "all")


def _sources(dataset: Dataset, options: TrainOptions) -> Document:
    """Which rows train and which ones judge."""
    train = options.get("split") or _first_split(dataset, "train")
    validation = options.get("validation")
    if isinstance(validation, float):
        kept = 1 - validation
        return {
            "train": {"dataset": dataset.id, "split": train, "fraction": [0.0, kept]},
            "validation": {"dataset": dataset.id, "split": train, "fraction": [kept, 1.0]},
        }
    sources: Document = {"train": {"dataset": dataset.id, "split": train}}
    held = validation if isinstance(validation, str) else "validation"
    if isinstance(validation, str) or held in dataset.splits:
        sources["validation"] = {"dataset": dataset.id, "split": held}
    return sources


def _declared(dataset: Dataset) -> Document:
    """Fields for the columns of a stored dataset: whole numbers per row are classes."""
    highest: dict[str, int] = {}
    fields: Document = {}
    for column in dataset.columns:
        name, dtype, shape = column["name"], column["dtype"], column["shape"]
        if dtype == "string":
            continue
        is_whole = dtype.lstrip("u").startswith("int")
        if is_whole and shape in ([], [None]):
            highest = highest or _highest(dataset)
            kind = "integer_sequence" if shape else "integer"
            classes: list[str] | None = column.get("classes")
            dim = highest[name] + 1 if classes is None else len(classes)
            fields[name] = {"type": kind, "dim": dim}
        elif None in shape:
            fields[name] = {"type": "dense_sequence", "dim": prod(shape[1:])}
        else:
            fields[name] = {"type": "dense", "shape": shape or [1]}
    return fields


def with_shapes(fields: Document, dataset: Dataset) -> Document:
    """The fields, dense ones with the shape of a row."""
    shapes = {column["name"]: column["shape"] for column in dataset.columns}
    made: Document = {}
    for name, field in fields.items():
        made[name] = as_document(field)
        if field["type"] == "dense" and field.get("shape") is None:
            columns = field.get("columns") or [field.get("column") or name]
            known = [shapes.get(column, []) for column in columns]
            is_one = len(known) == 1 and "columns" not in field
            made[name]["shape"] = known[0] if is_one else [sum(map(prod, known))]
    return made


def _highest(dataset: Dataset) -> dict[str, int]:
    """The largest value of each column over all splits."""
    highest: dict[str, int] = {}
    for columns in dataset.stats()["splits"].values():
        for name, figures in columns.items():
            if isinstance(figures.get("max"), (int, float)):
                highest[name] = max(highest.get(name, 0), int(figures["max"]))
    return highest
