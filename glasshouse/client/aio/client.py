"""The client object: the entry point to one service."""

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import httpx2

from glasshouse.client.aio.evaluation import AsyncEvaluating
from glasshouse.client.aio.inference import AsyncInferring
from glasshouse.client.aio.job import AsyncJob
from glasshouse.client.aio.models import (
    AsyncModel,
    AsyncModels,
    AsyncModelVersion,
    checkpoint_of,
)
from glasshouse.client.aio.prediction import predict
from glasshouse.client.aio.records import AsyncCheckpoint, AsyncRecord
from glasshouse.client.aio.resources import (
    AsyncCatalog,
    AsyncCheckpoints,
    AsyncDatasets,
    AsyncDevices,
    AsyncJobs,
    AsyncKeys,
    AsyncQuotas,
    AsyncWebhooks,
    AsyncWorkers,
)
from glasshouse.client.aio.running import in_process
from glasshouse.client.aio.stream import AsyncEventStream
from glasshouse.client.aio.trainer import AsyncTrainer
from glasshouse.client.aio.transport import AsyncTransport
from glasshouse.client.connection.address import find_service
from glasshouse.client.connection.requests import API, Request, with_json
from glasshouse.client.data.predictions import Prediction
from glasshouse.client.data.tensors import Array
from glasshouse.client.training.arguments import diagnose_spec, reference_of, serve_spec
from glasshouse.client.training.specs import (
    EvaluateOptions,
    InferOptions,
    JobOptions,
    PredictOptions,
    ResultField,
    ServeOptions,
    Spec,
    TrainOptions,
    as_document,
)

INPROC = "inproc://"


class AsyncClient:
    """A client of a Glasshouse service.

    Without arguments, it connects to the service given by ``GLASSHOUSE_URL`` and
    ``GLASSHOUSE_API_KEY``, or else to the one that ``glasshouse up`` runs on this machine.

    The blocking client is thread-safe. The async client has the same methods; use it from one
    event loop only.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = 60.0,
        max_retries: int = 2,
        http_client: httpx2.AsyncClient | None = None,
    ) -> None:
        """Find the address of the service. No request is sent yet.

        Args:
            url: the address of the service. ``inproc://`` runs a service in this process, for use
                with a debugger: see docs/how-to/debug.md.
            api_key: the API key.
            timeout: the read timeout, in seconds.
            max_retries: how many times to retry a request after a retryable error.
            http_client: a custom HTTP client, for example with your own proxies or certificates.
                You must close it yourself.

        Raises:
            APIConnectionError: no address is configured and no local service was found.
        """
        own = None
        if url == INPROC:
            address, own = in_process()
        else:
            address = find_service(url, api_key)
        self._transport = AsyncTransport(
            address,
            timeout_s=timeout,
            max_retries=max_retries,
            http=http_client or own,
            owns_http=http_client is None,
        )
        self._add_resources()

    def _add_resources(self) -> None:
        self.url = self._transport.address.url
        self.jobs = AsyncJobs(self._transport)
        self.datasets = AsyncDatasets(self._transport)
        self.checkpoints = AsyncCheckpoints(self._transport)
        self.models = AsyncModels(self._transport)
        self.devices = AsyncDevices(self._transport)
        self.workers = AsyncWorkers(self._transport)
        self.keys = AsyncKeys(self._transport)
        self.quotas = AsyncQuotas(self._transport)
        self.webhooks = AsyncWebhooks(self._transport)
        self.catalog = AsyncCatalog(self._transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    def with_options(self, *, timeout: float | None = None, max_retries: int | None = None) -> Self:
        """Return a copy of the client with other options, for example for a single call.

        The copy shares the connections of the original.

        Args:
            timeout: the read timeout, in seconds. Unchanged by default.
            max_retries: how many times to retry a request. Unchanged by default.
        """
        copy = object.__new__(type(self))
        copy._transport = self._transport.with_options(timeout, max_retries)
        copy._add_resources()
        return copy

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        """Send any API request, with the client's API key, retries and error handling.

        Args:
            method: ``GET``, ``POST`` …. Requests are retried, so send an ``Idempotency-Key`` header
                with a POST.
            path: the path, such as ``/api/v1/jobs``. May include a query: ``?force=true``.
            params: query parameters, in addition to those in the path. A list repeats a parameter.
            json: the body.
            headers: additional headers.

        Returns:
            The complete response: ``status_code``, ``headers``, ``content``.
        """
        request = with_json(Request(method, path, params or {}, headers or {}), json)
        return await self._transport.send(request)

    async def info(self) -> dict[str, Any]:
        """Return the service's version, capabilities and limits."""
        return await self._transport.get("/")

    async def ready(self) -> dict[str, Any]:
        """Return the readiness checks of the service. Raises if it is not ready."""
        return self._transport.decode(await self.request("GET", "/readyz")) or {}

    async def browser_link(self) -> str:
        """Create a link that opens the dashboard. It works once and expires after one minute."""
        return (await self._transport.post("/tickets"))["url"]

    async def queue(self) -> list[AsyncRecord]:
        """List the queued jobs and the reason that each waits, next to run first."""
        entries = await self._transport.all("/queue")
        return [AsyncRecord(self._transport, entry) for entry in entries]

    async def system(self) -> list[AsyncRecord]:
        """List the hardware and the library versions of each worker's host.

        Returns:
            One record per worker: ``versions``, ``cpu``, ``memory``, ``devices`` (the accelerators)
            and more. What a host does not report is None.
        """
        entries = await self._transport.all("/system")
        return [AsyncRecord(self._transport, entry) for entry in entries]

    def stream(
        self,
        jobs: Sequence[AsyncJob | str],
        types: Iterable[str] | None = None,
        after: Mapping[str, int] | None = None,
        *,
        give_up_after_s: float = 120.0,
    ) -> AsyncEventStream:
        """Stream the events of several jobs over one connection until all jobs have ended.

        Args:
            jobs: up to 32 jobs, or their ids.
            types: only events of these types. Default: all.
            after: by job id, the ``seq`` of the last event to skip. Default: 0 for each.
            give_up_after_s: raise an error if the service is unreachable for this many seconds.
        """
        ids = [job if isinstance(job, str) else job.id for job in jobs]
        return AsyncEventStream(
            self._transport,
            f"{API}/stream",
            types=types,
            after={job: (after or {}).get(job, 0) for job in ids},
            give_up_after_s=give_up_after_s,
        )

    async def plan(self, spec: Spec) -> dict[str, Any]:
        """Validate a job spec and return its layers, shapes, memory and devices. Stores nothing."""
        return await self._transport.post("/plan", as_document(spec))

    async def train(self, network: Any, data: Any, **options: Unpack[TrainOptions]) -> AsyncJob:
        """Train a network.

        Args:
            network: a `Graph`, its dict, or the list of its layers; a preset, by name or as
                ``{"type": "preset", "preset", "args"}``; or a torch ``nn.Module``. A module is
                traced to a graph, the graph is compared with the module, and its weights are
                uploaded.
            data: one of: a dataset or its id; a list of datasets, which are trained on as one;
                arrays, which are uploaded (a dict by column, a dict of such dicts by split, or an
                ``(x, y)`` pair); a data frame; a torch dataset; a ``DataLoader``, of which the
                dataset, batch size and order are used; or a dict as ``data`` in a spec.
            options: see `TrainOptions`: ``loss``, ``optimizer``, ``epochs`` …. You can pass torch
                losses and optimizers; their type and arguments are read from the object.

        Returns:
            The queued job.
        """
        trainer = AsyncTrainer(self.datasets, self.checkpoints)
        return await self.jobs.create(await trainer.spec(network, data, options))

    async def infer(
        self,
        source: AsyncJob | AsyncCheckpoint | str,
        inputs: Any = None,
        *,
        data: Any = None,
        outputs: Sequence[str] | None = None,
        fields: Sequence[ResultField] | ResultField | None = None,
        **options: Unpack[InferOptions],
    ) -> dict[str, Array]:
        """Run inference with a trained network and return the outputs of any of its layers.

        Blocks until the inference job has ended.

        Args:
            source: a training job (its newest checkpoint is used) or a checkpoint, or its id; or a
                version of a published model: ``"mnist"``, ``"mnist@production"``, ``"mnist:3"``.
            inputs: an array for the network's input, or a dict of arrays by field. For a sequence
                field, a list of rows of any length, or of texts if the field has tokens.
            data: instead of inputs: a dataset, its id or name, or ``{"dataset", "split"}``.
            outputs: the layers to return. Default: the network's outputs.
            fields: any of ``value``, ``id`` (the argmax), ``prob`` (its probability) and ``top_k``
                (the largest entries, with ``top_k_prob``). Default: ``value``; also ``id`` and
                ``prob`` for the scores of a classifier.
            options: ``top_k``, ``parallel``, ``sequence_layout``, ``name``, ``labels``,
                ``priority``, ``device``, ``devices``. For results that are larger than the memory,
                create a job with ``format`` and use `Job.save_outputs`.

        Returns:
            Arrays by layer name, with one entry per row. For a classifier, also ``<layer>/id``,
            ``<layer>/prob`` and, if the classes have names, ``<layer>/class``. With several
            ``fields``, all arrays are named ``<layer>/<field>``.
        """
        if isinstance(source, str) and not source.startswith(("ckpt_", "job_")):
            source = await checkpoint_of(self._transport, source)
        running = AsyncInferring(self.jobs, self.datasets, self.checkpoints)
        return await running.run(source, (inputs, data), outputs, fields, options)

    async def evaluate(
        self,
        source: AsyncJob | AsyncCheckpoint | str,
        data: Any,
        *,
        metrics: Sequence[Any] = (),
        want: Sequence[str] | None = None,
        by: Sequence[str] | str | None = None,
        **options: Unpack[EvaluateOptions],
    ) -> dict[str, Any]:
        """Evaluate a trained network on rows of a dataset.

        Blocks until the evaluation job has ended.

        Args:
            source: a training job (its newest checkpoint is used) or a checkpoint, or its id; or a
                version of a published model: ``"mnist"``, ``"mnist@production"``, ``"mnist:3"``.
            data: a dataset, its id or name, or ``{"dataset", "split"}``. Default split: ``test``.
            metrics: metrics in addition to those of the training job, as in a spec.
            want: any of ``confusion``, ``pr_curve``, ``roc_curve``, ``calibration`` and
                ``worst_samples``. Default: all that apply to the loss.
            by: columns of the dataset; losses and metrics are also computed for each value.
            options: ``worst``, ``name``, ``labels``, ``priority``, ``device``, ``devices``.

        Returns:
            The whole result: ``metrics`` with ``loss``, ``rows``, and what ``want`` and ``by`` ask
            for. Outside ``metrics``, NaN and infinite numbers are strings.
        """
        if isinstance(source, str) and not source.startswith(("ckpt_", "job_")):
            source = await checkpoint_of(self._transport, source)
        evaluating = AsyncEvaluating(self.jobs, self.datasets)
        return await evaluating.run(source, data, metrics, want, by, options)

    async def serve(self, models: Any, **options: Unpack[ServeOptions]) -> AsyncJob:
        """Serve published models: the returned job answers `predict` until it is canceled.

        Args:
            models: a reference (``"mnist"``, ``"mnist@production"``, ``"mnist:3"``), a model or a
                version, an entry as in a spec with ``canary`` or ``shadow``, or a list of them.
            options: see `ServeOptions`: ``replicas``, ``max_queue``, ``max_batch_size``,
                ``max_delay_ms``, ``idle_s``, ``name``, ``device`` …

        Returns:
            The queued job. Requests wait for it; `Job.wait_ready` returns when it answers them.

        Raises:
            UnprocessableEntityError: there is no such model or version.
        """
        return await self.jobs.create(serve_spec(models, options))

    async def predict(  # noqa: PLR0913 (each is a part of the request)
        self,
        model: AsyncModel | AsyncModelVersion | str,
        inputs: Any = None,
        *,
        rows: Any = None,
        outputs: Sequence[str] | str | None = None,
        fields: Sequence[ResultField] | ResultField | None = None,
        top_k: int | None = None,
        timeout: float | None = None,
        priority: int | None = None,
    ) -> Prediction:
        """Run a served model on some rows, and return the outputs of any of its layers.

        The rows are prepared as in training. `serve` must have started a job that serves the model.

        Args:
            model: ``"mnist"``, ``"mnist@production"``, ``"mnist:3"``, a model, or a version.
            inputs: values of the network's fields, whose first axis is the rows: a dict by field,
                or the value of the only field. Arrays are sent in binary form and are faster. For a
                sequence field, a list of rows of any length, or of texts if the field has tokens.
                Values are numbers as the field has them, before they are normalized; pixels of
                0 to 255 must be divided by 255 if training did so.
            rows: instead of inputs, rows as in the training data: a list of dicts by column, or a
                data frame. If the network has one input, also a list of its values. An image is
                bytes of a PNG or JPEG file, a `pathlib.Path`, or a PIL image.
            outputs: the layers to return. Default: the network's outputs.
            fields: any of ``value``, ``id`` (the argmax), ``prob`` (its probability) and ``top_k``
                (the largest entries, with ``top_k_prob``). Default: ``value``; also ``id`` and
                ``prob`` for the scores of a classifier.
            top_k: the number of entries of the field ``top_k``, which is then also returned.
            timeout: seconds for the request with all its retries. Default: the service's setting
                for each try.
            priority: requests with a higher priority are computed first. Default: 0.

        Returns:
            ``prediction["fc"]``, ``prediction["fc/class"]``, ``prediction.classes``: arrays with
            one entry per row.

        Raises:
            NotFoundError: no serve job serves the model, or there is no such model.
            UnprocessableEntityError: something does not fit the model; ``errors`` names it.
            RateLimitError: too many requests wait, also after retries.
            GatewayTimeoutError: there was no answer in time.
        """
        reference = model if isinstance(model, str) else reference_of(model)
        options: PredictOptions = {
            "outputs": outputs,
            "fields": fields,
            "top_k": top_k,
            "timeout": timeout,
            "priority": priority,
        }
        return await predict(self._transport, reference, inputs, rows, options)

    async def diagnose(
        self,
        processes: int | None = None,
        *,
        sizes_bytes: Sequence[int] | None = None,
        **options: Unpack[JobOptions],
    ) -> dict[str, Any]:
        """Measure and check the communication of processes, and the memory of their devices.

        Blocks until the diagnose job has ended.

        Args:
            processes: the number of processes. Default: one per device of ``devices``, else one,
                which does not communicate.
            sizes_bytes: sizes of the messages in bytes. Default: those of the service.
            options: ``name``, ``labels``, ``priority``, ``device``, ``devices``.

        Returns:
            The result of the job: ``verdict``, ``findings``, ``collectives``, ``latency_s``,
            ``memory``, ``versions`` and ``processes``.

        Raises:
            JobFailed: an operation failed. ``result`` of that job (its id: ``error.job_id``) has a
                finding that names the operation.
        """
        spec = diagnose_spec(processes, sizes_bytes, options)
        return await (await (await self.jobs.create(spec)).wait()).result()
