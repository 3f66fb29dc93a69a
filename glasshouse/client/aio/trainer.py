"""The implementation of `AsyncClient.train`: upload data and weights, then build the spec."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from glasshouse.client.aio.records import AsyncDataset
from glasshouse.client.aio.resources import AsyncCheckpoints, AsyncDatasets
from glasshouse.client.aio.running import in_thread
from glasshouse.client.data.arrays import (
    Split,
    Splits,
    derive_fields,
    is_arrays,
    is_ragged,
    read_splits,
)
from glasshouse.client.data.frames import as_columns, is_frame
from glasshouse.client.modules import is_dataset, is_module
from glasshouse.client.modules.weight_names import with_rates
from glasshouse.client.training.arguments import accept
from glasshouse.client.training.sources import (
    arguments_of,
    declared,
    first_split,
    for_all,
    has_uncounted,
    is_source,
    named_validations,
    sources,
    with_shapes,
)
from glasshouse.client.training.specs import (
    Document,
    TrainOptions,
    as_document,
    check_options,
    train_spec,
    window_fields,
)

if TYPE_CHECKING:
    from glasshouse.client.modules.tracing import Traced


class AsyncTrainer:
    """Builds training specs from networks and data of any supported type."""

    def __init__(self, datasets: AsyncDatasets, checkpoints: AsyncCheckpoints) -> None:
        self._datasets = datasets
        self._checkpoints = checkpoints

    async def spec(self, network: Any, data: Any, options: TrainOptions) -> Document:
        """Upload what the spec refers to and return the spec.

        Raises:
            TypeError: an option is unknown, missing or of a type that a spec cannot express.
            ValueError: the data is inconsistent.
            CannotTrace: the module cannot be expressed as a graph.
        """
        taken = accept(network, data, options)
        options = taken.options
        check_options(network, options)
        described = await self._described(taken.data, arguments_of(network), options)
        if is_module(network):
            traced, begin = await self._upload_module(network, described, options)
            network = with_rates(traced.graph, traced.weights, taken.rates)
            options["init"] = begin
        return train_spec(network, described, options)

    async def _upload_module(
        self, module: Any, data: Document, options: TrainOptions
    ) -> "tuple[Traced, Document]":
        """Trace a module and upload its weights; return the trace and ``init`` of the spec."""
        from glasshouse.client.modules.sample_batches import trace_for  # noqa: PLC0415 (imports torch)

        dataset = await self._datasets.get(data["train"]["dataset"])
        fields = with_shapes(data["fields"], dataset)
        limit = as_document(options.get("sequence") or data.get("sequence") or {})
        longest, asked = limit.get("max_length"), options.get("inputs")
        traced, inputs = await in_thread(lambda: trace_for(module, fields, longest, asked))
        read = {name.partition(".")[0] for name in inputs.values()}
        checkpoint = await self._checkpoints.create(
            traced.weights,
            traced.graph,
            {name: field for name, field in fields.items() if name in read},
            name=type(module).__name__,
            reuse=True,
        )
        return traced, {"checkpoint": checkpoint.id}

    async def _described(
        self, data: Any, arguments: Sequence[str], options: TrainOptions
    ) -> Document:
        """``data`` of the spec, with its validation sources."""
        validation = options.get("validation")
        named = named_validations(validation)
        if not named and not is_source(validation):
            return await self._data(data, arguments, options)
        rest = cast("TrainOptions", {**options, "validation": None})
        described = await self._data(data, arguments, rest)
        is_stored = isinstance(data, (str, AsyncDataset)) or _is_several(data)
        if "validation" in described and not is_stored:
            raise ValueError("data already has validation rows: remove validation")
        if not named:
            return {**described, "validation": as_document(validation)}
        sources: Document = {}
        infers = "fields" not in options and (is_stored or _is_in_memory(data))
        for name, rows in named.items():
            if isinstance(rows, (str, AsyncDataset)) or is_source(rows):
                sources[name] = await self._source(name, rows, described["train"])
                continue
            split = await in_thread(partial(_split_of, rows, arguments, options))
            if infers:
                own = derive_fields({"train": split}, arguments, options.get("label"))
                described = {**described, "fields": for_all([described, {"fields": own}])}
            dataset = await self._datasets.upload(
                {"train": split}, name=options.get("name"), reuse=True
            )
            sources[name] = {"dataset": dataset.id, "split": first_split(dataset, "train")}
        return {**described, "validation": sources}

    async def _source(self, name: str, rows: Any, train: Any) -> Document:
        """A named validation source that is stored; ``train``: that of the training rows."""
        if isinstance(rows, AsyncDataset):
            dataset = await rows.wait()
            return {"dataset": dataset.id, "split": first_split(dataset, "validation")}
        if not isinstance(rows, str):
            return as_document(rows)
        if isinstance(train, list):
            detail = f"validation: {name!r} is the split {rows!r} of one of several datasets"
            raise ValueError(f"{detail}: pass {{'dataset': …, 'split': {rows!r}}}")
        return {"dataset": train["dataset"], "split": rows}

    async def _data(self, data: Any, arguments: Sequence[str], options: TrainOptions) -> Document:
        if _is_several(data):
            return await self._several(data, arguments, options)
        if _is_in_memory(data):
            return await self._uploaded(data, arguments, options)
        if isinstance(data, (str, AsyncDataset)):
            return await self._stored(data, arguments, options)
        described = as_document(data)
        if options.get("validation") is not None:
            detail = "validation: data describes the rows already: set data['validation']"
            raise TypeError(f"{detail}, or pass sources by name: {{'held_out': (x, y)}}")
        if "fields" in options:
            described = {**described, "fields": as_document(options["fields"])}
        if "fields" not in described:
            raise ValueError("data has no fields: set fields={name: {'type': …}, …}")
        return described

    async def _stored(
        self, data: str | AsyncDataset, arguments: Sequence[str], options: TrainOptions
    ) -> Document:
        """``data`` of the spec for a dataset of the service."""
        if not isinstance(options.get("validation"), (float, str, type(None))):
            detail = "validation: the training data is a stored dataset: pass the name of a split,"
            raise TypeError(f"{detail} a fraction, or sources by name: {{'held_out': (x, y)}}")
        dataset = data if isinstance(data, AsyncDataset) else await self._datasets.named(data)
        dataset = await dataset.wait()
        fields: Document = {}
        if options.get("windows") is not None:
            fields = window_fields(options.get("windows"))
        elif "fields" not in options:
            stats = await dataset.stats() if has_uncounted(dataset) else None
            label = options.get("label")
            fields = declared(dataset, stats, arguments, None if label is None else str(label))
        return {
            **sources(dataset, options),
            "fields": as_document(options.get("fields", fields)),
        }

    async def _uploaded(
        self, data: Any, arguments: Sequence[str], options: TrainOptions
    ) -> Document:
        """``data`` of the spec for arrays, a frame or a torch dataset, which is uploaded once."""
        splits, fields = await in_thread(lambda: _read(data, arguments, options))
        name = options.get("name")
        if not is_ragged(splits) or len(splits) == 1:
            dataset = await self._datasets.upload(splits, name=name, reuse=True)
            return {**sources(dataset, options), "fields": fields}
        found: Document = {}
        for part, split in splits.items():
            dataset = await self._datasets.upload({"train": split}, name=name, reuse=True)
            found[part] = {"dataset": dataset.id, "split": first_split(dataset, "all")}
        return {**found, "fields": fields}

    async def _several(
        self, data: list[str | AsyncDataset], arguments: Sequence[str], options: TrainOptions
    ) -> Document:
        """``data`` of the spec for several datasets; the fields are those of the first."""
        validation = options.get("validation")
        first, *others = [await self._data(item, arguments, options) for item in data]
        if isinstance(validation, float):
            detail = "validation cannot be a fraction of several datasets"
            raise ValueError(f"{detail}: set a fraction for each in data={{'train': [...]}}")
        train = [first["train"], *(item["train"] for item in others)]
        return {**first, "train": train, "fields": for_all([first, *others])}


def _read(data: Any, arguments: Sequence[str], options: TrainOptions) -> tuple[Splits, Document]:
    """The columns of in-memory data, and the fields that read them."""
    label, validation = options.get("label"), options.get("validation")
    columns, fields = as_columns(data, label, arguments)
    held_back = validation is None or isinstance(validation, (float, str))
    validating = None if held_back else as_columns(validation, label, arguments)[0]
    splits = read_splits(columns, validating)
    derived = derive_fields(splits, arguments, label) if fields is None else fields
    return splits, as_document(options.get("fields", derived))


def _split_of(rows: Any, arguments: Sequence[str], options: TrainOptions) -> Split:
    """The columns of in-memory validation data."""
    columns, _ = as_columns(rows, options.get("label"), arguments)
    return read_splits({"validation": columns})["validation"]


def _is_in_memory(data: Any) -> bool:
    """Whether it is data to upload."""
    return is_frame(data) or is_dataset(data) or is_arrays(data)


def _is_several(data: Any) -> TypeGuard[list[str | AsyncDataset]]:
    """Whether it is a list of datasets."""
    several = isinstance(data, list) and bool(data)  # pyright: ignore[reportUnknownArgumentType]
    return several and all(
        isinstance(item, (str, AsyncDataset)) for item in cast("list[Any]", data)
    )
