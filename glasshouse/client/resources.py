# Made from glasshouse/client/aio/resources.py by .ci/twins.py: change that file.
"""What the service keeps, by kind: ``client.jobs``, ``client.datasets`` and the others."""

import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from glasshouse.client.arrays import read_splits, write_splits
from glasshouse.client.events import AnyEvent
from glasshouse.client.files import format_of, pieces, sha256_of
from glasshouse.client.job import Job
from glasshouse.client.records import Checkpoint, Dataset, Record
from glasshouse.client.requests import API, Request, id_in_path
from glasshouse.client.running import in_thread
from glasshouse.client.training import Network, Spec, as_document, network_of
from glasshouse.client.transport import Transport
from glasshouse.client.weights import weights_file
from glasshouse.spec.data import BUILTINS, IMAGES, sources_in

_SAFETENSORS = "application/vnd.safetensors"


class Resource:
    """One kind of thing."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def _all(self, path: str) -> list[Record]:
        entries = self._transport.all(path)
        return [Record(self._transport, entry) for entry in entries]


class Jobs(Resource):
    """Jobs of all states."""

    def create(self, spec: Spec) -> Job:
        """Submit a job spec; it is queued when this returns.

        Its datasets are named by id or by name. A built-in one that is not there yet is created.
        """
        document = as_document(spec)
        for source in sources_in(document):
            if source["dataset"] in BUILTINS:
                source["dataset"] = (Datasets(self._transport).named(source["dataset"])).id
        return Job(self._transport, self._transport.create("/jobs", document))

    def get(self, job_id: str) -> Job:
        """Read one job."""
        return self._job(job_id).refresh()

    def list(self, *, limit: int | None = None, **filters: Any) -> Generator[Job]:
        """All jobs that match, newest first unless ``order`` says otherwise.

        Args:
            limit: how many to read per page, not how many to give.
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
        """Ask a job to stop."""
        return self._job(job_id).cancel(force=force)

    def pause(self, job_id: str) -> Job:
        """Ask a job to save a checkpoint and free its devices."""
        return self._job(job_id).pause()

    def resume(self, job_id: str) -> Job:
        """Queue a paused job again."""
        return self._job(job_id).resume()

    def retry(self, job_id: str) -> Job:
        """Submit the spec of a job that has ended again, as a new job."""
        return self._job(job_id).retry()

    def fork(self, job_id: str, spec: Mapping[str, Any] | None = None, **start: Any) -> Job:
        """Begin a new job where a checkpoint of this one ends; see `Job.fork`."""
        return self._job(job_id).fork(spec, **start)

    def patch(self, job_id: str, **fields: Any) -> Job:
        """Change a job's name, labels or priority."""
        return self._job(job_id).update(**fields)

    def delete(self, job_id: str) -> None:
        """Delete a job that has ended."""
        self._job(job_id).delete()

    def events(
        self, job_id: str, types: Iterable[str] | None = None, after: int = 0
    ) -> Generator[AnyEvent]:
        """The events of a job so far."""
        return self._job(job_id).events(types, after)

    def _job(self, job_id: str) -> Job:
        return Job(self._transport, {"id": job_id})


class Datasets(Resource):
    """Datasets."""

    def create(self, builtin: str, *, wait: bool = True) -> Dataset:
        """The dataset of a built-in name, such as ``digits``; created where it is not there yet."""
        data = self._transport.create("/datasets", {"builtin": builtin})
        return self._made(data, wait=wait)

    def upload(  # noqa: PLR0913 (how a file is read differs by format)
        self,
        source: str | Path | bytes | Mapping[str, Any] | Sequence[Any],
        *,
        name: str | None = None,
        format: str | None = None,  # noqa: A002 - the API's word
        resize: tuple[int, int] | None = None,
        header: bool | None = None,
        wait: bool = True,
        reuse: bool = False,
    ) -> Dataset:
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
            data = self._send(source, name, format, resize=resize, header=header)
            return self._made(data, wait=wait)
        if not isinstance(source, (str, Path)):
            return self._upload_arrays(source, name, wait=wait, reuse=reuse)
        path = Path(source)
        with in_thread(lambda: path.open("rb")) as file:
            form = format or (IMAGES if resize is not None else format_of(path.name))
            data = self._send(file, name or path.name, form, resize=resize, header=header)
        return self._made(data, wait=wait)

    def get(self, dataset_id: str) -> Dataset:
        """Read one dataset, by its id or its name."""
        return self._dataset(dataset_id).refresh()

    def named(self, reference: str) -> Dataset:
        """The dataset that a spec may name so: by id, by name, or a built-in one. Ready to be used.

        Raises:
            NotFoundError: there is none, or several with this name and different contents.
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
        """Some rows of a dataset; ``values``: so many of a row, else 1,000."""
        return self._dataset(dataset_id).rows(split, offset, limit, values=values)

    def list(self, *, limit: int | None = None) -> Generator[Dataset]:
        """All datasets."""
        for page in self._transport.pages("/datasets", {"limit": limit}):
            for entry in page:
                yield Dataset(self._transport, entry)

    def stats(self, dataset_id: str) -> dict[str, Any]:
        """Figures of each column of a dataset."""
        return self._dataset(dataset_id).stats()

    def delete(self, dataset_id: str) -> None:
        """Delete a dataset and its files."""
        self._dataset(dataset_id).delete()

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
            return self._made(data, wait=wait)

    def _uploaded_before(self, file: IO[bytes], form: str) -> dict[str, Any] | None:
        """The dataset that was made of a file with this content, unless it could not be read."""
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
        resize: tuple[int, int] | None = None,
        header: bool | None = None,
    ) -> dict[str, Any]:
        size = None if resize is None else f"{resize[0]}x{resize[1]}"
        params = {"name": name, "format": format, "resize": size, "header": header}
        media_type = "application/octet-stream"
        request = Request.creating(f"{API}/datasets", partial(pieces, content), media_type, params)
        return self._transport.decode(self._transport.send(request))

    def _made(self, data: dict[str, Any], *, wait: bool) -> Dataset:
        dataset = Dataset(self._transport, data)
        return dataset.wait() if wait else dataset

    def _dataset(self, dataset_id: str) -> Dataset:
        return Dataset(self._transport, {"id": quote(dataset_id, safe="")})


class Checkpoints(Resource):
    """Saved states of training, and weights that were sent."""

    def create(
        self,
        weights: Mapping[str, Any],
        network: Network,
        fields: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        reuse: bool = False,
    ) -> Checkpoint:
        """Send weights, which a job may begin with (``init``) and `Client.infer` can run.

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
        file = in_thread(lambda: weights_file(weights, graph, read))
        if reuse:
            known = self._sent_before(in_thread(file.sha256))
            if known is not None:
                return known
        request = Request.creating(f"{API}/checkpoints", file.chunks, _SAFETENSORS, {"name": name})
        data = self._transport.decode(self._transport.send(request))
        return Checkpoint(self._transport, data)

    def upload(self, path: str | Path, *, name: str | None = None) -> Checkpoint:
        """Send a safetensors file that says in its metadata which network its weights are of."""
        source = Path(path)
        with in_thread(lambda: source.open("rb")) as file:
            params = {"name": name or source.name}
            send = partial(pieces, file)
            request = Request.creating(f"{API}/checkpoints", send, _SAFETENSORS, params)
            data = self._transport.decode(self._transport.send(request))
        return Checkpoint(self._transport, data)

    def _sent_before(self, sha256: str) -> Checkpoint | None:
        for entry in (self._transport.get("/checkpoints", {"sha256": sha256}))["data"]:
            if entry["state"] == "complete":
                return Checkpoint(self._transport, entry)
        return None

    def get(self, checkpoint_id: str) -> Checkpoint:
        """Read one checkpoint."""
        data = self._transport.get(f"/checkpoints/{id_in_path(checkpoint_id, 'checkpoint')}")
        return Checkpoint(self._transport, data)

    def list(self, job_id: str | None = None) -> list[Checkpoint]:
        """The checkpoints of a job, in the order of their steps; of all jobs, newest first."""
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
        """Each device, what it can do, and who has it."""
        return self._all("/devices")


class Workers(Resource):
    """The machines that run jobs."""

    def list(self) -> list[Record]:
        """Each worker and its state."""
        return self._all("/workers")

    def drain(self, worker_id: str) -> Record:
        """Let a worker finish what it runs and take nothing new."""
        return Record(
            self._transport,
            self._transport.post(f"/workers/{quote(worker_id, safe='')}/drain"),
        )

    def delete(self, worker_id: str) -> None:
        """Remove a worker that was stopped or is lost, and its devices, from the lists."""
        self._transport.delete(f"/workers/{worker_id}")


class Keys(Resource):
    """API keys; needs the scope ``admin``."""

    def create(self, name: str, scopes: Sequence[str], owner: str) -> Record:
        """Make a key. Its text is in the answer, this once."""
        body = {"name": name, "scopes": list(scopes), "owner": owner}
        return Record(self._transport, self._transport.create("/keys", body))

    def list(self) -> list[Record]:
        """All keys, without their texts."""
        return self._all("/keys")

    def delete(self, key_id: str) -> None:
        """Revoke a key."""
        self._transport.delete(f"/keys/{id_in_path(key_id, 'key')}")


class Webhooks(Resource):
    """Addresses that are told when jobs move."""

    def create(
        self, url: str, events: Sequence[str] = (), labels: Mapping[str, str] | None = None
    ) -> Record:
        """Make one. The secret of its signatures is in the answer, this once.

        Args:
            url: where messages are posted to.
            events: types of message, such as ``job.failed``; empty: all.
            labels: only of jobs that have all of these.
        """
        body = {"url": url, "events": list(events), "labels": dict(labels or {})}
        return Record(self._transport, self._transport.create("/webhooks", body))

    def get(self, webhook_id: str) -> Record:
        """Read one webhook."""
        return Record(
            self._transport,
            self._transport.get(f"/webhooks/{id_in_path(webhook_id, 'webhook')}"),
        )

    def deliveries(self, webhook_id: str) -> list[Record]:
        """What was sent to a webhook, newest first."""
        return self._all(f"/webhooks/{id_in_path(webhook_id, 'webhook')}/deliveries")

    def list(self) -> list[Record]:
        """All webhooks, without their secrets."""
        return self._all("/webhooks")

    def delete(self, webhook_id: str) -> None:
        """Delete a webhook."""
        self._transport.delete(f"/webhooks/{id_in_path(webhook_id, 'webhook')}")


class Catalog(Resource):
    """What the engine knows."""

    def get(self, section: str) -> list[dict[str, Any]]:
        """The entries of ``layers``, ``losses``, ``optimizers``, ``metrics`` or ``datasets``."""
        return (self._transport.get(f"/catalog/{section}"))["entries"]


class Quotas(Resource):
    """What owners may use."""

    def get(self, owner: str | None = None) -> Record:
        """The limits and the use of an owner: one's own, or with the scope ``admin`` another's."""
        return Record(self._transport, self._transport.get("/quotas", {"owner": owner}))

    def put(self, owner: str, **limits: float | None) -> Record:
        """Replace an owner's limits; needs ``admin``. What is left out is the settings'.

        Args:
            owner: whose.
            limits: ``queued_jobs``, ``running_jobs``, ``devices``, ``storage_bytes``, ``uploads``,
                ``streams``, ``requests_per_s``.
        """
        return Record(self._transport, self._transport.put("/quotas", {"owner": owner, **limits}))
