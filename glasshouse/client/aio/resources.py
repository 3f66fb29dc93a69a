"""What the service keeps, by kind: ``client.jobs``, ``client.datasets`` and the others."""

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
from glasshouse.client.arrays import read_splits, write_splits
from glasshouse.client.events import AnyEvent
from glasshouse.client.files import format_of, pieces, sha256_of
from glasshouse.client.requests import API, Request, id_in_path
from glasshouse.client.training import Network, Spec, as_document, network_of
from glasshouse.client.weights import weights_file
from glasshouse.spec.data import BUILTINS, IMAGES, sources_in

_SAFETENSORS = "application/vnd.safetensors"


class AsyncResource:
    """One kind of thing."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def _all(self, path: str) -> list[AsyncRecord]:
        entries = await self._transport.all(path)
        return [AsyncRecord(self._transport, entry) for entry in entries]


class AsyncJobs(AsyncResource):
    """Jobs of all states."""

    async def create(self, spec: Spec) -> AsyncJob:
        """Submit a job spec; it is queued when this returns.

        Its datasets are named by id or by name. A built-in one that is not there yet is created.
        """
        document = as_document(spec)
        for source in sources_in(document):
            if source["dataset"] in BUILTINS:
                source["dataset"] = (
                    await AsyncDatasets(self._transport).named(source["dataset"])
                ).id
        return AsyncJob(self._transport, await self._transport.create("/jobs", document))

    async def get(self, job_id: str) -> AsyncJob:
        """Read one job."""
        return await self._job(job_id).refresh()

    async def list(self, *, limit: int | None = None, **filters: Any) -> AsyncGenerator[AsyncJob]:
        """All jobs that match, newest first unless ``order`` says otherwise.

        Args:
            limit: how many to read per page, not how many to give.
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
        """Ask a job to stop."""
        return await self._job(job_id).cancel(force=force)

    async def pause(self, job_id: str) -> AsyncJob:
        """Ask a job to save a checkpoint and free its devices."""
        return await self._job(job_id).pause()

    async def resume(self, job_id: str) -> AsyncJob:
        """Queue a paused job again."""
        return await self._job(job_id).resume()

    async def retry(self, job_id: str) -> AsyncJob:
        """Submit the spec of a job that has ended again, as a new job."""
        return await self._job(job_id).retry()

    async def fork(
        self, job_id: str, spec: Mapping[str, Any] | None = None, **start: Any
    ) -> AsyncJob:
        """Begin a new job where a checkpoint of this one ends; see `AsyncJob.fork`."""
        return await self._job(job_id).fork(spec, **start)

    async def patch(self, job_id: str, **fields: Any) -> AsyncJob:
        """Change a job's name, labels or priority."""
        return await self._job(job_id).update(**fields)

    async def delete(self, job_id: str) -> None:
        """Delete a job that has ended."""
        await self._job(job_id).delete()

    def events(
        self, job_id: str, types: Iterable[str] | None = None, after: int = 0
    ) -> AsyncGenerator[AnyEvent]:
        """The events of a job so far."""
        return self._job(job_id).events(types, after)

    def _job(self, job_id: str) -> AsyncJob:
        return AsyncJob(self._transport, {"id": job_id})


class AsyncDatasets(AsyncResource):
    """Datasets."""

    async def create(self, builtin: str, *, wait: bool = True) -> AsyncDataset:
        """The dataset of a built-in name, such as ``digits``; created where it is not there yet."""
        data = await self._transport.create("/datasets", {"builtin": builtin})
        return await self._made(data, wait=wait)

    async def upload(  # noqa: PLR0913 (how a file is read differs by format)
        self,
        source: str | Path | bytes | Mapping[str, Any] | Sequence[Any],
        *,
        name: str | None = None,
        format: str | None = None,  # noqa: A002 - the API's word
        resize: tuple[int, int] | None = None,
        header: bool | None = None,
        wait: bool = True,
        reuse: bool = False,
    ) -> AsyncDataset:
        """Upload a file (streamed), its bytes, or arrays, and wait until it is ready.

        Args:
            source: a path, the bytes of a file, a dict of arrays, a dict of splits of them,
                or an ``(x, y)`` pair.
            name: left out, the file's name.
            format: left out, it is told from the file's name, or from ``resize``.
            resize: of an archive of images, the height and width that all are brought to.
            header: of csv and tsv, whether the first row names the columns; left unset, the service
                finds out, and says in ``notes`` of the dataset where that is a guess.
            wait: return only when it is ready to be used.
            reuse: of arrays, give the dataset that was uploaded before with the same content.
        """
        if isinstance(source, bytes):
            if format is None:
                raise ValueError("say which format the bytes are in: format='csv', 'npz', …")
            data = await self._send(source, name, format, resize=resize, header=header)
            return await self._made(data, wait=wait)
        if not isinstance(source, (str, Path)):
            return await self._upload_arrays(source, name, wait=wait, reuse=reuse)
        path = Path(source)
        with await in_thread(lambda: path.open("rb")) as file:
            form = format or (IMAGES if resize is not None else format_of(path.name))
            data = await self._send(file, name or path.name, form, resize=resize, header=header)
        return await self._made(data, wait=wait)

    async def get(self, dataset_id: str) -> AsyncDataset:
        """Read one dataset, by its id or its name."""
        return await self._dataset(dataset_id).refresh()

    async def named(self, reference: str) -> AsyncDataset:
        """The dataset that a spec may name so: by id, by name, or a built-in one. Ready to be used.

        Raises:
            NotFoundError: there is none, or several with this name and different contents.
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
        """Some rows of a dataset; ``values``: so many of a row, else 1,000."""
        return await self._dataset(dataset_id).rows(split, offset, limit, values=values)

    async def list(self, *, limit: int | None = None) -> AsyncGenerator[AsyncDataset]:
        """All datasets."""
        async for page in self._transport.pages("/datasets", {"limit": limit}):
            for entry in page:
                yield AsyncDataset(self._transport, entry)

    async def stats(self, dataset_id: str) -> dict[str, Any]:
        """Figures of each column of a dataset."""
        return await self._dataset(dataset_id).stats()

    async def delete(self, dataset_id: str) -> None:
        """Delete a dataset and its files."""
        await self._dataset(dataset_id).delete()

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
            return await self._made(data, wait=wait)

    async def _uploaded_before(self, file: IO[bytes], form: str) -> dict[str, Any] | None:
        """The dataset that was made of a file with this content, unless it could not be read."""
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
        resize: tuple[int, int] | None = None,
        header: bool | None = None,
    ) -> dict[str, Any]:
        size = None if resize is None else f"{resize[0]}x{resize[1]}"
        params = {"name": name, "format": format, "resize": size, "header": header}
        media_type = "application/octet-stream"
        request = Request.creating(f"{API}/datasets", partial(pieces, content), media_type, params)
        return self._transport.decode(await self._transport.send(request))

    async def _made(self, data: dict[str, Any], *, wait: bool) -> AsyncDataset:
        dataset = AsyncDataset(self._transport, data)
        return await dataset.wait() if wait else dataset

    def _dataset(self, dataset_id: str) -> AsyncDataset:
        return AsyncDataset(self._transport, {"id": quote(dataset_id, safe="")})


class AsyncCheckpoints(AsyncResource):
    """Saved states of training, and weights that were sent."""

    async def create(
        self,
        weights: Mapping[str, Any],
        network: Network,
        fields: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        reuse: bool = False,
    ) -> AsyncCheckpoint:
        """Send weights, which a job may begin with (``init``) and `AsyncClient.infer` can run.

        Args:
            weights: arrays or tensors by the network's names: ``conv1.weight``.
            network: a graph whose layers give all their sizes, or a preset.
            fields: what the network reads, as in the ``data`` of a spec; an inference needs them.
            name: for people.
            reuse: give the one that was sent before with the same content, if there is one.

        Raises:
            UnprocessableEntityError: the weights are not the network's.
        """
        graph, read = network_of(network), as_document(fields)
        file = await in_thread(lambda: weights_file(weights, graph, read))
        if reuse:
            known = await self._sent_before(await in_thread(file.sha256))
            if known is not None:
                return known
        request = Request.creating(f"{API}/checkpoints", file.chunks, _SAFETENSORS, {"name": name})
        data = self._transport.decode(await self._transport.send(request))
        return AsyncCheckpoint(self._transport, data)

    async def upload(self, path: str | Path, *, name: str | None = None) -> AsyncCheckpoint:
        """Send a safetensors file that says in its metadata which network its weights are of."""
        source = Path(path)
        with await in_thread(lambda: source.open("rb")) as file:
            params = {"name": name or source.name}
            send = partial(pieces, file)
            request = Request.creating(f"{API}/checkpoints", send, _SAFETENSORS, params)
            data = self._transport.decode(await self._transport.send(request))
        return AsyncCheckpoint(self._transport, data)

    async def _sent_before(self, sha256: str) -> AsyncCheckpoint | None:
        for entry in (await self._transport.get("/checkpoints", {"sha256": sha256}))["data"]:
            if entry["state"] == "complete":
                return AsyncCheckpoint(self._transport, entry)
        return None

    async def get(self, checkpoint_id: str) -> AsyncCheckpoint:
        """Read one checkpoint."""
        data = await self._transport.get(f"/checkpoints/{id_in_path(checkpoint_id, 'checkpoint')}")
        return AsyncCheckpoint(self._transport, data)

    async def list(self, job_id: str | None = None) -> list[AsyncCheckpoint]:
        """The checkpoints of a job, in the order of their steps; of all jobs, newest first."""
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
        """Each device, what it can do, and who has it."""
        return await self._all("/devices")


class AsyncWorkers(AsyncResource):
    """The machines that run jobs."""

    async def list(self) -> list[AsyncRecord]:
        """Each worker and its state."""
        return await self._all("/workers")

    async def drain(self, worker_id: str) -> AsyncRecord:
        """Let a worker finish what it runs and take nothing new."""
        return AsyncRecord(
            self._transport,
            await self._transport.post(f"/workers/{quote(worker_id, safe='')}/drain"),
        )

    async def delete(self, worker_id: str) -> None:
        """Remove a worker that was stopped or is lost, and its devices, from the lists."""
        await self._transport.delete(f"/workers/{worker_id}")


class AsyncKeys(AsyncResource):
    """API keys; needs the scope ``admin``."""

    async def create(self, name: str, scopes: Sequence[str], owner: str) -> AsyncRecord:
        """Make a key. Its text is in the answer, this once."""
        body = {"name": name, "scopes": list(scopes), "owner": owner}
        return AsyncRecord(self._transport, await self._transport.create("/keys", body))

    async def list(self) -> list[AsyncRecord]:
        """All keys, without their texts."""
        return await self._all("/keys")

    async def delete(self, key_id: str) -> None:
        """Revoke a key."""
        await self._transport.delete(f"/keys/{id_in_path(key_id, 'key')}")


class AsyncWebhooks(AsyncResource):
    """Addresses that are told when jobs move."""

    async def create(
        self, url: str, events: Sequence[str] = (), labels: Mapping[str, str] | None = None
    ) -> AsyncRecord:
        """Make one. The secret of its signatures is in the answer, this once.

        Args:
            url: where messages are posted to.
            events: types of message, such as ``job.failed``; empty: all.
            labels: only of jobs that have all of these.
        """
        body = {"url": url, "events": list(events), "labels": dict(labels or {})}
        return AsyncRecord(self._transport, await self._transport.create("/webhooks", body))

    async def get(self, webhook_id: str) -> AsyncRecord:
        """Read one webhook."""
        return AsyncRecord(
            self._transport,
            await self._transport.get(f"/webhooks/{id_in_path(webhook_id, 'webhook')}"),
        )

    async def deliveries(self, webhook_id: str) -> list[AsyncRecord]:
        """What was sent to a webhook, newest first."""
        return await self._all(f"/webhooks/{id_in_path(webhook_id, 'webhook')}/deliveries")

    async def list(self) -> list[AsyncRecord]:
        """All webhooks, without their secrets."""
        return await self._all("/webhooks")

    async def delete(self, webhook_id: str) -> None:
        """Delete a webhook."""
        await self._transport.delete(f"/webhooks/{id_in_path(webhook_id, 'webhook')}")


class AsyncCatalog(AsyncResource):
    """What the engine knows."""

    async def get(self, section: str) -> list[dict[str, Any]]:
        """The entries of ``layers``, ``losses``, ``optimizers``, ``metrics`` or ``datasets``."""
        return (await self._transport.get(f"/catalog/{section}"))["entries"]


class AsyncQuotas(AsyncResource):
    """What owners may use."""

    async def get(self, owner: str | None = None) -> AsyncRecord:
        """The limits and the use of an owner: one's own, or with the scope ``admin`` another's."""
        return AsyncRecord(self._transport, await self._transport.get("/quotas", {"owner": owner}))

    async def put(self, owner: str, **limits: float | None) -> AsyncRecord:
        """Replace an owner's limits; needs ``admin``. What is left out is the settings'.

        Args:
            owner: whose.
            limits: ``queued_jobs``, ``running_jobs``, ``devices``, ``storage_bytes``, ``uploads``,
                ``streams``, ``requests_per_s``.
        """
        return AsyncRecord(
            self._transport, await self._transport.put("/quotas", {"owner": owner, **limits})
        )
