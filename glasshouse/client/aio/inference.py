"""The implementation of `AsyncClient.infer`: upload inputs, run a job, download its outputs."""

from collections.abc import Sequence
from typing import Any, cast

from glasshouse.client.aio.job import AsyncJob
from glasshouse.client.aio.records import AsyncCheckpoint, AsyncDataset
from glasshouse.client.aio.resources import AsyncCheckpoints, AsyncDatasets, AsyncJobs
from glasshouse.client.aio.running import in_thread
from glasshouse.client.data.tensors import Array
from glasshouse.client.training.arguments import inputs_of, settle_device
from glasshouse.client.training.sources import first_split
from glasshouse.client.training.specs import (
    Document,
    InferOptions,
    ResultField,
    as_document,
    read_inputs,
    read_sequences,
    result_names,
)
from glasshouse.errors import ConflictError

INLINE_VALUES = 20_000
"""Inputs with more values than this are uploaded as a dataset, because JSON is slow for numbers."""
Source = AsyncJob | AsyncCheckpoint | str


class AsyncInferring:
    """Runs inference jobs."""

    def __init__(
        self, jobs: AsyncJobs, datasets: AsyncDatasets, checkpoints: AsyncCheckpoints
    ) -> None:
        self._jobs = jobs
        self._datasets = datasets
        self._checkpoints = checkpoints

    async def run(
        self,
        source: Source,
        given: tuple[Any, Any],
        outputs: Sequence[str] | None,
        fields: Sequence[ResultField] | ResultField | None,
        options: InferOptions,
    ) -> dict[str, Array]:
        """Run the job and wait for it; ``given`` is (inputs, data), one of which is None."""
        inputs, data = inputs_of(given[0]), given[1]
        if (inputs is None) == (data is None):
            raise TypeError("give exactly one of inputs and data")
        wanted = [fields] if isinstance(fields, str) else fields
        settled: Document = dict(options)
        settle_device(settled)
        spec: Document = {"kind": "infer", **source_of(source), **settled}
        if wanted is not None:
            spec["fields"] = list(wanted)
        if outputs is not None:
            spec["outputs"] = list(outputs)
        uploaded: AsyncDataset | None = None
        if inputs is None:
            spec["data"] = await rows_of(self._datasets, data)
        else:
            uploaded = await self._add_inputs(spec, source, inputs)
        try:
            job = await (await self._jobs.create(spec)).wait()
            return result_names(await job.outputs(), wanted)
        finally:
            if uploaded is not None:
                await _discard(uploaded)

    async def _add_inputs(self, spec: Document, source: Source, inputs: Any) -> AsyncDataset | None:
        """Put inputs into the spec, or into a dataset if they are large or need its dtypes."""
        trained = await self._trained_by(source)
        sequences = await in_thread(lambda: read_sequences(inputs, trained))
        if sequences is not None:
            spec["inputs"] = sequences
            return None
        arrays = await in_thread(lambda: read_inputs(inputs, trained))
        is_small = sum(array.size for array in arrays.values()) <= INLINE_VALUES
        # a uint8 column is scaled to [0, 1] as in training; numbers in JSON would not be
        if is_small and not any(array.dtype.name == "uint8" for array in arrays.values()):
            spec["inputs"] = {name: array.tolist() for name, array in arrays.items()}
            return None
        declared = trained["data"]["fields"]
        dataset = await self._datasets.upload({"test": arrays}, name="inputs")
        fields = {name: {**declared[name], "column": name} for name in arrays if name in declared}
        for field in fields.values():
            field.pop("columns", None)
        spec["data"] = {"dataset": dataset.id, "split": "test", "fields": fields}
        return dataset

    async def _trained_by(self, source: Source) -> Document:
        """The spec of the job that trained a network, or the network uploaded with its weights."""
        if isinstance(source, AsyncJob):
            return await source.spec()
        if isinstance(source, str) and source.startswith("ckpt_"):
            source = await self._checkpoints.get(source)
        if isinstance(source, AsyncCheckpoint) and source.data["job"] is None:
            found = await source.network()
            return {"network": found["network"], "data": {"fields": found["fields"]}}
        job_id = source if isinstance(source, str) else source.data["job"]
        return await (await self._jobs.get(job_id)).spec()


async def _discard(dataset: AsyncDataset) -> None:
    try:
        await dataset.delete()
    except ConflictError:  # the job still reads it, because waiting for it was interrupted
        return


def source_of(source: Source) -> Document:
    """The part of a spec that names a trained network."""
    name = source if isinstance(source, str) else source.id
    return {"checkpoint" if name.startswith("ckpt_") else "job": name}


async def rows_of(datasets: AsyncDatasets, data: Any) -> Document:
    """The data source of a dataset. The default split is ``test``."""
    if isinstance(data, str):
        data = await datasets.named(data)
    if isinstance(data, AsyncDataset):
        return {"dataset": data.id, "split": first_split(data, "test")}
    return cast("Document", as_document(data))
