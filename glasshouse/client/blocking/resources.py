# Made from glasshouse/client/aio/resources.py by .ci/twins.py: change that file.
"""The resource collections of the client: ``client.jobs``, ``client.datasets`` and the others."""

import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from glasshouse.client.blocking.job import Job
from glasshouse.client.blocking.records import Checkpoint, Dataset, Record
from glasshouse.client.blocking.running import in_thread
from glasshouse.client.blocking.transport import Transport
from glasshouse.client.connection.requests import API, Request, id_in_path
from glasshouse.client.data.arrays import read_splits, write_splits
from glasshouse.client.data.files import format_of, pieces, sha256_of, size_text
from glasshouse.client.data.weights import weights_file
from glasshouse.client.monitoring.events import AnyEvent
from glasshouse.client.training.specs import Network, Spec, as_document, network_of
from glasshouse.spec.data import BUILTINS, sources_in

_SAFETENSORS = "application/vnd.safetensors"


class Resource:
    """A collection of resources of one type."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def _all(self, path: str) -> list[Record]:
        entries = self._transport.all(path)
        return [Record(self._transport, entry) for entry in entries]


class Jobs(Resource):
    """The jobs."""

    def create(self, spec: Spec) -> Job:
        """Submit a job spec and return the queued job.

        The spec refers to datasets by id or name. Built-in datasets are created if needed.
        """
        document = as_document(spec)
        for source in sources_in(document):
            if source["dataset"] in BUILTINS:
                source["dataset"] = (Datasets(self._transport).named(source["dataset"])).id
        return Job(self._transport, self._transport.create("/jobs", document))

    def get(self, job_id: str) -> Job:
        """Fetch one job."""
        return self._job(job_id).refresh()

    def list(self, *, limit: int | None = None, **filters: Any) -> Generator[Job]:
        """Iterate over the matching jobs, newest first by default.

        Args:
            limit: the page size of the requests. Does not limit the number of jobs.
            filters: ``state``, ``kind``, ``parent``, ``q``, ``order``, and ``label`` as a dict.
        """
        label = filters.pop("label", None)
        if isinstance(label, Mapping):
            label = [f"{key}:{value}" for key, value in label.items()]  # pyright: ignore[reportUnknownVariableType]
        params = {**filters, "label": label, "limit": limit}
        for page in self._transport.pages("/jobs", params):
            for entry in page:
                yield Job(self._transport, entry)

    def cancel(self, job_id: str, *, force: bool = False) -> Job:
        """Cancel a job at the next step boundary; ``force`` kills its processes immediately."""
        return self._job(job_id).cancel(force=force)

    def pause(self, job_id: str) -> Job:
        """Pause a job: save a checkpoint and free its devices."""
        return self._job(job_id).pause()

    def resume(self, job_id: str) -> Job:
        """Queue a paused job again."""
        return self._job(job_id).resume()

    def retry(self, job_id: str) -> Job:
        """Submit the spec of an ended job as a new job."""
        return self._job(job_id).retry()

    def fork(self, job_id: str, spec: Mapping[str, Any] | None = None, **start: Any) -> Job:
        """Create a job that starts from a checkpoint of this one; see `Job.fork`."""
        return self._job(job_id).fork(spec, **start)

    def patch(self, job_id: str, **fields: Any) -> Job:
        """Change the ``name``, ``labels`` or ``priority`` of a job."""
        return self._job(job_id).update(**fields)

    def delete(self, job_id: str) -> None:
        """Delete an ended job and everything it created."""
        self._job(job_id).delete()

    def events(
        self, job_id: str, types: Iterable[str] | None = None, after: int = 0
    ) -> Generator[AnyEvent]:
        """Iterate over the existing events of a job."""
        return self._job(job_id).events(types, after)

    def _job(self, job_id: str) -> Job:
        return Job(self._transport, {"id": job_id})


class Datasets(Resource):
    """The datasets."""

    def create(self, builtin: str, *, wait: bool = True) -> Dataset:
        """Get or create a built-in dataset, such as ``digits``.

        Args:
            builtin: the name of the built-in dataset.
            wait: wait until the dataset is ready.
        """
        data = self._transport.create("/datasets", {"builtin": builtin})
        return self._created(data, wait=wait)

    def upload(  # noqa: PLR0913 (how a file is read differs by format)
        self,
        source: str | Path | bytes | Mapping[str, Any] | Sequence[Any],
        *,
        name: str | None = None,
        format: str | None = None,  # noqa: A002 - the API's word
        resize: tuple[int, int] | str | None = None,
        header: bool | None = None,
        wait: bool = True,
        reuse: bool = False,
    ) -> Dataset:
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
            data = self._send(source, name, format, resize=resize, header=header)
            return self._created(data, wait=wait)
        if not isinstance(source, (str, Path)):
            return self._upload_arrays(source, name, wait=wait, reuse=reuse)
        path = Path(source)
        with in_thread(lambda: path.open("rb")) as file:
            form = format or self._inferred(path.name, resizing=resize is not None)
            data = self._send(file, name or path.name, form, resize=resize, header=header)
        return self._created(data, wait=wait)

    def get(self, dataset_id: str) -> Dataset:
        """Fetch one dataset by id or name."""
        return self._dataset(dataset_id).refresh()

    def named(self, reference: str) -> Dataset:
        """Get a dataset by id, name or built-in name, and wait until it is ready.

        Raises:
            NotFoundError: no dataset matches, or several with different contents have this name.
        """
        if reference in BUILTINS:
            return self.create(reference)
        return (self.get(reference)).wait()

    def rows(
        self,
        dataset_id: str,
        split: str | None = None,
        offset: int = 0,
        limit: int | None = None,
        *,
        values: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return rows of a dataset, each as a dict by column; see `Dataset.rows`."""
        return self._dataset(dataset_id).rows(split, offset, limit, values=values)

    def list(self, *, limit: int | None = None) -> Generator[Dataset]:
        """Iterate over all datasets; ``limit`` is the page size of the requests."""
        for page in self._transport.pages("/datasets", {"limit": limit}):
            for entry in page:
                yield Dataset(self._transport, entry)

    def stats(self, dataset_id: str) -> dict[str, Any]:
        """Return statistics of each column of a dataset."""
        return self._dataset(dataset_id).stats()

    def delete(self, dataset_id: str) -> None:
        """Delete a dataset and its files."""
        self._dataset(dataset_id).delete()

    def _inferred(self, name: str, *, resizing: bool) -> str:
        entries = (self._transport.get("/catalog/datasets"))["entries"]
        return format_of(name, entries, resizing=resizing)

    def _upload_arrays(
        self,
        arrays: Mapping[str, Any] | Sequence[Any],
        name: str | None,
        *,
        wait: bool,
        reuse: bool,
    ) -> Dataset:
        splits = in_thread(lambda: read_splits(arrays))
        with tempfile.TemporaryFile() as file:
            form = in_thread(lambda: write_splits(splits, file))
            known = self._uploaded_before(file, form) if reuse else None
            data = known or self._send(file, name or "arrays", form)
            return self._created(data, wait=wait)

    def _uploaded_before(self, file: IO[bytes], form: str) -> dict[str, Any] | None:
        """An existing dataset with the content of this file that has not failed."""
        digest = in_thread(lambda: sha256_of(file))
        for entry in (self._transport.get("/datasets", {"sha256": digest}))["data"]:
            if entry["format"] == form and entry["state"] != "failed":
                return entry
        return None

    def _send(
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
        return self._transport.decode(self._transport.send(request))

    def _created(self, data: dict[str, Any], *, wait: bool) -> Dataset:
        dataset = Dataset(self._transport, data)
        return dataset.wait() if wait else dataset

    def _dataset(self, dataset_id: str) -> Dataset:
        return Dataset(self._transport, {"id": quote(dataset_id, safe="")})


class Checkpoints(Resource):
    """The checkpoints: saved training states and uploaded weights."""

    def create(
        self,
        weights: Mapping[str, Any],
        network: Network,
        fields: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        reuse: bool = False,
    ) -> Checkpoint:
        """Upload weights as a checkpoint, for ``init`` of a job or for `Client.infer`.

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
        file = in_thread(lambda: weights_file(weights, graph, read))
        if reuse:
            known = self._uploaded_before(in_thread(file.sha256))
            if known is not None:
                return known
        request = Request.creating(f"{API}/checkpoints", file.chunks, _SAFETENSORS, {"name": name})
        data = self._transport.decode(self._transport.send(request))
        return Checkpoint(self._transport, data)

    def upload(self, path: str | Path, *, name: str | None = None) -> Checkpoint:
        """Upload a safetensors file that has the network of its weights in the metadata."""
        source = Path(path)
        with in_thread(lambda: source.open("rb")) as file:
            params = {"name": name or source.name}
            send = partial(pieces, file)
            request = Request.creating(f"{API}/checkpoints", send, _SAFETENSORS, params)
            data = self._transport.decode(self._transport.send(request))
        return Checkpoint(self._transport, data)

    def _uploaded_before(self, sha256: str) -> Checkpoint | None:
        for entry in (self._transport.get("/checkpoints", {"sha256": sha256}))["data"]:
            if entry["state"] == "complete":
                return Checkpoint(self._transport, entry)
        return None

    def get(self, checkpoint_id: str) -> Checkpoint:
        """Fetch one checkpoint."""
        data = self._transport.get(f"/checkpoints/{id_in_path(checkpoint_id, 'checkpoint')}")
        return Checkpoint(self._transport, data)

    def list(self, job_id: str | None = None) -> list[Checkpoint]:
        """List the checkpoints of a job ordered by step, or of all jobs, newest first."""
        if job_id is not None:
            return Job(self._transport, {"id": job_id}).checkpoints()
        entries = self._transport.all("/checkpoints")
        return [Checkpoint(self._transport, entry) for entry in entries]

    def delete(self, checkpoint_id: str) -> None:
        """Delete a checkpoint and its files."""
        self._transport.delete(f"/checkpoints/{id_in_path(checkpoint_id, 'checkpoint')}")


class Devices(Resource):
    """The hardware of all workers."""

    def list(self) -> list[Record]:
        """List the devices with their capabilities and current job."""
        return self._all("/devices")


class Workers(Resource):
    """The machines that run jobs."""

    def list(self) -> list[Record]:
        """List the workers with their state."""
        return self._all("/workers")

    def drain(self, worker_id: str) -> Record:
        """Drain a worker: it finishes its running jobs and accepts no new ones."""
        return Record(
            self._transport,
            self._transport.post(f"/workers/{quote(worker_id, safe='')}/drain"),
        )

    def delete(self, worker_id: str) -> None:
        """Remove a stopped or lost worker and its devices from the lists."""
        self._transport.delete(f"/workers/{worker_id}")


class Keys(Resource):
    """The API keys. Requires the scope ``admin``."""

    def create(self, name: str, scopes: Sequence[str], owner: str) -> Record:
        """Create a key. Only this response contains the key itself."""
        body = {"name": name, "scopes": list(scopes), "owner": owner}
        return Record(self._transport, self._transport.create("/keys", body))

    def list(self) -> list[Record]:
        """List all keys, without the keys themselves."""
        return self._all("/keys")

    def delete(self, key_id: str) -> None:
        """Revoke a key."""
        self._transport.delete(f"/keys/{id_in_path(key_id, 'key')}")


class Webhooks(Resource):
    """The webhooks, which receive job events over HTTP."""

    def create(
        self, url: str, events: Sequence[str] = (), labels: Mapping[str, str] | None = None
    ) -> Record:
        """Create a webhook. Only this response contains the signing secret.

        Args:
            url: the URL to which messages are posted.
            events: message types, such as ``job.failed``. Empty: all.
            labels: only for jobs with all of these labels.
        """
        body = {"url": url, "events": list(events), "labels": dict(labels or {})}
        return Record(self._transport, self._transport.create("/webhooks", body))

    def get(self, webhook_id: str) -> Record:
        """Fetch one webhook."""
        return Record(
            self._transport,
            self._transport.get(f"/webhooks/{id_in_path(webhook_id, 'webhook')}"),
        )

    def deliveries(self, webhook_id: str) -> list[Record]:
        """List the deliveries of a webhook, newest first."""
        return self._all(f"/webhooks/{id_in_path(webhook_id, 'webhook')}/deliveries")

    def list(self) -> list[Record]:
        """List all webhooks, without their secrets."""
        return self._all("/webhooks")

    def delete(self, webhook_id: str) -> None:
        """Delete a webhook."""
        self._transport.delete(f"/webhooks/{id_in_path(webhook_id, 'webhook')}")


class Catalog(Resource):
    """The catalog of the engine: layers, losses, optimizers and more."""

    def get(self, section: str) -> list[dict[str, Any]]:
        """Return the entries of a section, such as ``layers``, ``losses`` or ``optimizers``."""
        return (self._transport.get(f"/catalog/{section}"))["entries"]


class Quotas(Resource):
    """The quotas of owners."""

    def get(self, owner: str | None = None) -> Record:
        """Fetch the limits and usage of an owner. Default: your own; others require ``admin``."""
        return Record(self._transport, self._transport.get("/quotas", {"owner": owner}))

    def put(self, owner: str, **limits: float | None) -> Record:
        """Replace the limits of an owner. Requires the scope ``admin``.

        Args:
            owner: the owner.
            limits: ``queued_jobs``, ``running_jobs``, ``devices``, ``storage_bytes``, ``uploads``,
                ``streams``, ``requests_per_s``. Unset limits have the default of the settings.
        """
        return Record(self._transport, self._transport.put("/quotas", {"owner": owner, **limits}))
