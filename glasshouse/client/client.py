# Made from glasshouse/client/aio/client.py by .ci/twins.py: change that file.
"""The client: one object for one service."""

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import httpx2

from glasshouse.client.address import find_service
from glasshouse.client.inferring import Inferring
from glasshouse.client.job import Job
from glasshouse.client.records import Checkpoint, Record
from glasshouse.client.requests import API, Request, with_json
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
from glasshouse.client.running import in_process
from glasshouse.client.stream import EventStream
from glasshouse.client.tensors import Array
from glasshouse.client.trainer import Trainer
from glasshouse.client.training import JobOptions, ResultField, Spec, TrainOptions, as_document
from glasshouse.client.transport import Transport

INPROC = "inproc://"


class Client:
    """Speaks to a Glasshouse service.

    Without arguments it finds the one that ``glasshouse up`` runs on this machine, or the one
    that ``GLASSHOUSE_URL`` and ``GLASSHOUSE_API_KEY`` name.

    The blocking client may be used from several threads. The awaited one has the same methods and
    belongs to one event loop.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = 60.0,
        max_retries: int = 2,
        http_client: httpx2.Client | None = None,
    ) -> None:
        """Find the service; nothing is sent yet.

        Args:
            url: its address; ``inproc://`` runs one in this process, for a debugger: see
                docs/how-to/debug.md.
            api_key: the key to use there.
            timeout: seconds to wait for bytes of an answer.
            max_retries: how often what may help is tried again.
            http_client: what sends requests, with proxies and certificates of your own. It stays
                yours to close.

        Raises:
            APIConnectionError: nothing says where a service is.
        """
        own = None
        if url == INPROC:
            address, own = in_process()
        else:
            address = find_service(url, api_key)
        self._transport = Transport(
            address,
            timeout_s=timeout,
            max_retries=max_retries,
            http=http_client or own,
            owns_http=http_client is None,
        )
        self._furnish()

    def _furnish(self) -> None:
        self.url = self._transport.address.url
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
        return f"{type(self).__name__}({self.url!r})"

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def with_options(self, *, timeout: float | None = None, max_retries: int | None = None) -> Self:
        """The same client with other options, over the same connections: for one call, say.

        Args:
            timeout: seconds to wait for bytes of an answer; left out, as it is.
            max_retries: how often what may help is tried again; left out, as it is.
        """
        made = object.__new__(type(self))
        made._transport = self._transport.with_options(timeout, max_retries)
        made._furnish()
        return made

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        """Any request of the API, with the key, the retries and the errors of all others.

        Args:
            method: ``GET``, ``POST`` …; retried as all are, so a POST needs an ``Idempotency-Key``.
            path: under the address: ``/api/v1/jobs``. It may bring a query along: ``?force=true``.
            params: the query, beside that of the path; a list gives a parameter several times.
            json: the body.
            headers: further headers.

        Returns:
            The whole answer: ``status_code``, ``headers``, ``content``.
        """
        request = with_json(Request(method, path, params or {}, headers or {}), json)
        return self._transport.send(request)

    def info(self) -> dict[str, Any]:
        """The service's version, capabilities and limits."""
        return self._transport.get("/")

    def ready(self) -> dict[str, Any]:
        """What the service says of its health; raises when it is not ready."""
        return self._transport.decode(self.request("GET", "/readyz")) or {}

    def browser_link(self) -> str:
        """Make a link that opens the service in a browser: once, within a minute."""
        return (self._transport.post("/tickets"))["url"]

    def queue(self) -> list[Record]:
        """The jobs that wait, the next one first, and why each does."""
        entries = self._transport.all("/queue")
        return [Record(self._transport, entry) for entry in entries]

    def stream(
        self,
        jobs: Sequence[Job | str],
        types: Iterable[str] | None = None,
        after: Mapping[str, int] | None = None,
        *,
        give_up_after_s: float = 120.0,
    ) -> EventStream:
        """The events of several jobs over one connection, until all have ended.

        Args:
            jobs: up to 32 jobs, or their ids.
            types: only events of these types.
            after: for each job's id the ``seq`` of the last event that is known already.
            give_up_after_s: raise after this long without reaching the service.
        """
        ids = [job if isinstance(job, str) else job.id for job in jobs]
        return EventStream(
            self._transport,
            f"{API}/stream",
            types=types,
            after={job: (after or {}).get(job, 0) for job in ids},
            give_up_after_s=give_up_after_s,
        )

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
                torch dataset, a ``DataLoader`` (its dataset, batch size and order), or a dict as
                ``data`` in a spec.
            options: see `TrainOptions`: ``loss``, ``optimizer``, ``epochs`` … The type and
                arguments of torch's own losses and optimizers are read off them.

        Returns:
            The job, queued.
        """
        trainer = Trainer(self.datasets, self.checkpoints)
        return self.jobs.create(trainer.spec(network, data, options))

    def infer(
        self,
        source: Job | Checkpoint | str,
        inputs: Any = None,
        *,
        data: Any = None,
        outputs: Sequence[str] | None = None,
        fields: Sequence[ResultField] | ResultField | None = None,
        **options: Unpack[JobOptions],
    ) -> dict[str, Array]:
        """Run a trained network and wait for the outputs of any of its layers.

        Args:
            source: a training job (its newest checkpoint) or a checkpoint, or the id of one.
            inputs: an array for the network's input, or a dict of them by field; for a sequence
                a list of rows, each with its own length, or of texts where it is made of tokens.
            data: instead of inputs: a dataset, its id or name, or ``{"dataset", "split"}``.
            outputs: the layers to return; left unset, the network's own outputs.
            fields: ``value``, ``id`` (of the largest) and ``prob`` (its probability); left unset,
                ``value``, and all three for scores that the loss compared with classes.
            options: ``name``, ``labels``, ``priority``, ``device``, ``devices``.

        Returns:
            Arrays by layer, and of a classifier ``<layer>/id``, ``<layer>/prob`` and, where the
            classes have names, ``<layer>/class``, one for each row. With several ``fields`` by
            ``<layer>/<field>``.
        """
        running = Inferring(self.jobs, self.datasets, self.checkpoints)
        return running.run(source, (inputs, data), outputs, fields, options)
