"""The resource collections of the client: ``client.jobs``, ``client.datasets`` and the others."""

import tempfile
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from glasshouse.client.aio.job import AsyncJob
from glasshouse.client.aio.records import AsyncCheckpoint, AsyncDataset, AsyncRecord
from glasshouse.client.aio.running import in_thread
from glasshouse.client.aio.transport import AsyncTransport
from glasshouse.client.connection.requests import API, Request, id_in_path
from glasshouse.client.data.arrays import read_splits, write_splits
from glasshouse.client.data.files import format_of, pieces, sha256_of, size_text
from glasshouse.client.data.weights import weights_file
from glasshouse.client.monitoring.events import AnyEvent
from glasshouse.client.training.specs import Network, Spec, as_document, network_of
from glasshouse.spec.data import BUILTINS, sources_in

_SAFETENSORS = "application/vnd.safetensors"


class AsyncResource:
    """A collection of resources of one type."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def _all(self, path: str) -> list[AsyncRecord]:
        entries = await self._transport.all(path)
        return [AsyncRecord(self._transport, entry) for entry in entries]


class AsyncJobs(AsyncResource):
    """The jobs."""

    async def create(self, spec: Spec) -> AsyncJob:
        """Submit a job spec and return the queued job.

        The spec refers to datasets by id or name. Built-in datasets are created if needed.
        """
        document = as_document(spec)
        for source in sources_in(document):
            if source["dataset"] in BUILTINS:
                source["dataset"] = (
                    await AsyncDatasets(self._transport).named(source["dataset"])
                ).id
        return AsyncJob(self._transport, await self._transport.create("/jobs", document))

    async def get(self, job_id: str) -> AsyncJob:
        """Fetch one job."""
        return await self._job(job_id).refresh()

    async def list(self, *, limit: int | None = None, **filters: Any) -> AsyncGenerator[AsyncJob]:
        """Iterate over the matching jobs, newest first by default.

        Args:
            limit: the page size of the requests. Does not limit the number of jobs.
            filters: ``state``, ``kind``, ``parent``, ``q``, ``order``, and ``label`` as a dict.
        """
        label = filters.pop("label", None)
        if isinstance(label, Mapping):
            label = [f"{key}:{value}" for key, value in label.items()]  # pyright: ignore[reportUnknownVariableType]
        params = {**filters, "label": label, "limit": limit}
        async for page in self._transport.pages("/jobs", params):
            for entry in page:
                yield AsyncJob(self._transport, entry)

    async def cancel(self, job_id: str, *, force: bool = False) -> AsyncJob:
        """Cancel a job at the next step boundary; ``force`` kills its processes immediately."""
        return await self._job(job_id).cancel(force=force)

    async def pause(self, job_id: str) -> AsyncJob:
        """Pause a job: save a checkpoint and free its devices."""
        return await self._job(job_id).pause()

    async def resume(self, job_id: str) -> AsyncJob:
        """Queue a paused job again."""
        return await self._job(job_id).resume()

    async def retry(self, job_id: str) -> AsyncJob:
        """Submit the spec of an ended job as a new job."""
        return await self._job(job_id).retry()

    async def fork(
        self, job_id: str, spec: Mapping[str, Any] | None = None, **start: Any
    ) -> AsyncJob:
        """Create a job that starts from a checkpoint of this one; see `AsyncJob.fork`."""
        return await self._job(job_id).fork(spec, **start)

    async def patch(self, job_id: str, **fields: Any) -> AsyncJob:
        """Change the ``name``, ``labels`` or ``priority`` of a job."""
        return await self._job(job_id).update(**fields)

    async def delete(self, job_id: str) -> None:
        """Delete an ended job and everything it created."""
        await self._job(job_id).delete()

    def events(
        self, job_id: str, types: Iterable[str] | None = None, after: int = 0
    ) -> AsyncGenerator[AnyEvent]:
        """Iterate over the existing events of a job."""
        return self._job(job_id).events(types, after)

    def _job(self, job_id: str) -> AsyncJob:
        return AsyncJob(self._transport, {"id": job_id})


class AsyncDatasets(AsyncResource):
    """The datasets."""

    async def create(self, builtin: str, *, wait: bool = True) -> AsyncDataset:
        """Get or create a built-in dataset, such as ``digits``.

        Args:
            builtin: the name of the built-in dataset.
            wait: wait until the dataset is ready.
        """
        data = await self._transport.create("/datasets", {"builtin": builtin})
        return await self._created(data, wait=wait)

    async def upload(  # noqa: PLR0913 (how a file is read differs by format)
        self,
        source: str | Path | bytes | Mapping[str, Any] | Sequence[Any],
        *,
        name: str | None = None,
        format: str | None = None,  # noqa: A002 - the API's word
        resize: tuple[int, int] | str | None = None,
        header: bool | None = None,
        wait: bool = True,
        reuse: bool = False,
    ) -> AsyncDataset:
        """Upload a dataset: a file, the bytes of a file, or arrays. Files are streamed.

        Args:
            source: a path, the bytes of a file, a dict of arrays by column, a dict of such dicts
                by split, or an ``(x, y)`` pair.
            name: the name of the dataset. Default: the file name, or ``arrays``.
            format: the file format; ``client.catalog.get("datasets")`` lists them. Default:
                inferred from the file name, or the one with ``resize`` if that is set. Required for
                bytes.
            resize: for an archive of images, the (height, width) to which all are resized; or
                ``"24x32"``.
            header: for csv and tsv, whether the first row has the column names. Default: detected
                by the service, which reports a guess in ``notes`` of the dataset.
            wait: wait until the dataset is ready.
            reuse: for arrays, return an existing dataset with the same content if there is one.

        Raises:
            ValueError: the format is unknown, or the arrays do not match each other.
            UnprocessableEntityError: the file could not be read.
        """
        if isinstance(source, bytes):
            if format is None:
                raise ValueError("format is required for bytes: set format='csv', 'npz', …")
            data = await self._send(source, name, format, resize=resize, header=header)
            return await self._created(data, wait=wait)
        if not isinstance(source, (str, Path)):
            return await self._upload_arrays(source, name, wait=wait, reuse=reuse)
        path = Path(source)
        with await in_thread(lambda: path.open("rb")) as file:
            form = format or await self._inferred(path.name, resizing=resize is not None)
            data = await self._send(file, name or path.name, form, resize=resize, header=header)
        return await self._created(data, wait=wait)

    async def get(self, dataset_id: str) -> AsyncDataset:
        """Fetch one dataset by id or name."""
        return await self._dataset(dataset_id).refresh()

    async def named(self, reference: str) -> AsyncDataset:
        """Get a dataset by id, name or built-in name, and wait until it is ready.

        Raises:
            NotFoundError: no dataset matches, or several with different contents have this name.
        """
        if reference in BUILTINS:
            return await self.create(reference)
        return await (await self.get(reference)).wait()

    async def rows(
        self,
        dataset_id: str,
        split: str | None = None,
        offset: int = 0,
        limit: int | None = None,
        *,
        values: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return rows of a dataset, each as a dict by column; see `AsyncDataset.rows`."""
        return await self._dataset(dataset_id).rows(split, offset, limit, values=values)

    async def list(self, *, limit: int | None = None) -> AsyncGenerator[AsyncDataset]:
        """Iterate over all datasets; ``limit`` is the page size of the requests."""
        async for page in self._transport.pages("/datasets", {"limit": limit}):
            for entry in page:
                yield AsyncDataset(self._transport, entry)

    async def stats(self, dataset_id: str) -> dict[str, Any]:
        """Return statistics of each column of a dataset."""
        return await self._dataset(dataset_id).stats()

    async def delete(self, dataset_id: str) -> None:
        """Delete a dataset and its files."""
        await self._dataset(dataset_id).delete()

    async def _inferred(self, name: str, *, resizing: bool) -> str:
        entries = (await self._transport.get("/catalog/datasets"))["entries"]
        return format_of(name, entries, resizing=resizing)

    async def _upload_arrays(
        self,
        arrays: Mapping[str, Any] | Sequence[Any],
        name: str | None,
        *,
        wait: bool,
        reuse: bool,
    ) -> AsyncDataset:
        splits = await in_thread(lambda: read_splits(arrays))
        with tempfile.TemporaryFile() as file:
            form = await in_thread(lambda: write_splits(splits, file))
            known = await self._uploaded_before(file, form) if reuse else None
            data = known or await self._send(file, name or "arrays", form)
            return await self._created(data, wait=wait)

    async def _uploaded_before(self, file: IO[bytes], form: str) -> dict[str, Any] | None:
        """An existing dataset with the content of this file that has not failed."""
        digest = await in_thread(lambda: sha256_of(file))
        for entry in (await self._transport.get("/datasets", {"sha256": digest}))["data"]:
            if entry["format"] == form and entry["state"] != "failed":
                return entry
        return None

    async def _send(
        self,
        content: bytes | IO[bytes],
        name: str | None,
        format: str,  # noqa: A002
        *,
        resize: tuple[int, int] | str | None = None,
        header: bool | None = None,
    ) -> dict[str, Any]:
        params = {"name": name, "format": format, "resize": size_text(resize), "header": header}
        media_type = "application/octet-stream"
        request = Request.creating(f"{API}/datasets", partial(pieces, content), media_type, params)
        return self._transport.decode(await self._transport.send(request))

    async def _created(self, data: dict[str, Any], *, wait: bool) -> AsyncDataset:
        dataset = AsyncDataset(self._transport, data)
        return await dataset.wait() if wait else dataset

    def _dataset(self, dataset_id: str) -> AsyncDataset:
        return AsyncDataset(self._transport, {"id": quote(dataset_id, safe="")})


class AsyncCheckpoints(AsyncResource):
    """The checkpoints: saved training states and uploaded weights."""

    async def create(
        self,
        weights: Mapping[str, Any],
        network: Network,
        fields: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        reuse: bool = False,
    ) -> AsyncCheckpoint:
        """Upload weights as a checkpoint, for ``init`` of a job or for `AsyncClient.infer`.

        Args:
            weights: arrays or tensors by parameter name: ``conv1.weight``.
            network: a preset, or a graph whose layers specify all sizes.
            fields: the data fields that the network reads, as in ``data`` of a spec. Required for
                inference.
            name: a display name.
            reuse: return an existing checkpoint with the same content if there is one.

        Raises:
            UnprocessableEntityError: the weights do not match the network.
        """
        graph, read = network_of(network), as_document(fields)
        file = await in_thread(lambda: weights_file(weights, graph, read))
        if reuse:
            known = await self._uploaded_before(await in_thread(file.sha256))
            if known is not None:
                return known
        request = Request.creating(f"{API}/checkpoints", file.chunks, _SAFETENSORS, {"name": name})
        data = self._transport.decode(await self._transport.send(request))
        return AsyncCheckpoint(self._transport, data)

    async def upload(self, path: str | Path, *, name: str | None = None) -> AsyncCheckpoint:
        """Upload a safetensors file that has the network of its weights in the metadata."""
        source = Path(path)
        with await in_thread(lambda: source.open("rb")) as file:
            params = {"name": name or source.name}
            send = partial(pieces, file)
            request = Request.creating(f"{API}/checkpoints", send, _SAFETENSORS, params)
            data = self._transport.decode(await self._transport.send(request))
        return AsyncCheckpoint(self._transport, data)

    async def _uploaded_before(self, sha256: str) -> AsyncCheckpoint | None:
        for entry in (await self._transport.get("/checkpoints", {"sha256": sha256}))["data"]:
            if entry["state"] == "complete":
                return AsyncCheckpoint(self._transport, entry)
        return None

    async def get(self, checkpoint_id: str) -> AsyncCheckpoint:
        """Fetch one checkpoint."""
        data = await self._transport.get(f"/checkpoints/{id_in_path(checkpoint_id, 'checkpoint')}")
        return AsyncCheckpoint(self._transport, data)

    async def list(self, job_id: str | None = None) -> list[AsyncCheckpoint]:
        """List the checkpoints of a job ordered by step, or of all jobs, newest first."""
        if job_id is not None:
            return await AsyncJob(self._transport, {"id": job_id}).checkpoints()
        entries = await self._transport.all("/checkpoints")
        return [AsyncCheckpoint(self._transport, entry) for entry in entries]

    async def delete(self, checkpoint_id: str) -> None:
        """Delete a checkpoint and its files."""
        await self._transport.delete(f"/checkpoints/{id_in_path(checkpoint_id, 'checkpoint')}")


class AsyncDevices(AsyncResource):
    """The hardware of all workers."""

    async def list(self) -> list[AsyncRecord]:
        """List the devices with their capabilities and current job."""
        return await self._all("/devices")


class AsyncWorkers(AsyncResource):
    """The machines that run jobs."""

    async def list(self) -> list[AsyncRecord]:
        """List the workers with their state."""
        return await self._all("/workers")

    async def drain(self, worker_id: str) -> AsyncRecord:
        """Drain a worker: it finishes its running jobs and accepts no new ones."""
        return AsyncRecord(
            self._transport,
            await self._transport.post(f"/workers/{quote(worker_id, safe='')}/drain"),
        )

    async def delete(self, worker_id: str) -> None:
        """Remove a stopped or lost worker and its devices from the lists."""
        await self._transport.delete(f"/workers/{worker_id}")


class AsyncKeys(AsyncResource):
    """The API keys. Requires the scope ``admin``."""

    async def create(self, name: str, scopes: Sequence[str], owner: str) -> AsyncRecord:
        """Create a key. Only this response contains the key itself."""
        body = {"name": name, "scopes": list(scopes), "owner": owner}
        return AsyncRecord(self._transport, await self._transport.create("/keys", body))

    async def list(self) -> list[AsyncRecord]:
        """List all keys, without the keys themselves."""
        return await self._all("/keys")

    async def delete(self, key_id: str) -> None:
        """Revoke a key."""
        await self._transport.delete(f"/keys/{id_in_path(key_id, 'key')}")


class AsyncWebhooks(AsyncResource):
    """The webhooks, which receive job events over HTTP."""

    async def create(
        self, url: str, events: Sequence[str] = (), labels: Mapping[str, str] | None = None
    ) -> AsyncRecord:
        """Create a webhook. Only this response contains the signing secret.

        Args:
            url: the URL to which messages are posted.
            events: message types, such as ``job.failed``. Empty: all.
            labels: only for jobs with all of these labels.
        """
        body = {"url": url, "events": list(events), "labels": dict(labels or {})}
        return AsyncRecord(self._transport, await self._transport.create("/webhooks", body))

    async def get(self, webhook_id: str) -> AsyncRecord:
        """Fetch one webhook."""
        return AsyncRecord(
            self._transport,
            await self._transport.get(f"/webhooks/{id_in_path(webhook_id, 'webhook')}"),
        )

    async def deliveries(self, webhook_id: str) -> list[AsyncRecord]:
        """List the deliveries of a webhook, newest first."""
        return await self._all(f"/webhooks/{id_in_path(webhook_id, 'webhook')}/deliveries")

    async def list(self) -> list[AsyncRecord]:
        """List all webhooks, without their secrets."""
        return await self._all("/webhooks")

    async def delete(self, webhook_id: str) -> None:
        """Delete a webhook."""
        await self._transport.delete(f"/webhooks/{id_in_path(webhook_id, 'webhook')}")


class AsyncCatalog(AsyncResource):
    """The catalog of the engine: layers, losses, optimizers and more."""

    async def get(self, section: str) -> list[dict[str, Any]]:
        """Return the entries of a section, such as ``layers``, ``losses`` or ``optimizers``."""
        return (await self._transport.get(f"/catalog/{section}"))["entries"]


class AsyncQuotas(AsyncResource):
    """The quotas of owners."""

    async def get(self, owner: str | None = None) -> AsyncRecord:
        """Fetch the limits and usage of an owner. Default: your own; others require ``admin``."""
        return AsyncRecord(self._transport, await self._transport.get("/quotas", {"owner": owner}))

    async def put(self, owner: str, **limits: float | None) -> AsyncRecord:
        """Replace the limits of an owner. Requires the scope ``admin``.

        Args:
            owner: the owner.
            limits: ``queued_jobs``, ``running_jobs``, ``devices``, ``storage_bytes``, ``uploads``,
                ``streams``, ``requests_per_s``. Unset limits have the default of the settings.
        """
        return AsyncRecord(
            self._transport, await self._transport.put("/quotas", {"owner": owner, **limits})
        )
