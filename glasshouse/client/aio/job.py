"""One job: wait for it, stream its events, and read its metrics and logs."""

import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Literal, Unpack, overload

from glasshouse import jsonio
from glasshouse.client.aio.control import AsyncControlled
from glasshouse.client.aio.job_log import AsyncJobLog
from glasshouse.client.aio.layers import AsyncLayers
from glasshouse.client.aio.prediction import predict_with_job
from glasshouse.client.aio.probes import AsyncProbe
from glasshouse.client.aio.running import card_html, in_background, resolved, sleep
from glasshouse.client.aio.stream import AsyncEventStream
from glasshouse.client.connection.requests import API
from glasshouse.client.data.predictions import JobPrediction
from glasshouse.client.data.series import Series, SeriesTable
from glasshouse.client.monitoring.callbacks import (
    Action,
    Call,
    Dispatcher,
    action_of,
    check_callbacks,
)
from glasshouse.client.monitoring.events import AnyEvent, read_event
from glasshouse.client.monitoring.explanations import LOG_LINES, Explanation, explain
from glasshouse.client.monitoring.job_card import MOST_POINTS, Card
from glasshouse.client.monitoring.progress import Bar
from glasshouse.client.training.probe_specs import as_probe
from glasshouse.client.training.specs import PredictOptions
from glasshouse.errors import APIError, AuthenticationError, ConflictError, NotFoundError

RETRY_S = 5.0
"""How long a notebook card waits before it retries while the service is unavailable."""
Names = list[str] | tuple[str, ...]
Attempts = int | Literal["all"] | None
"""Which attempts to read. None: each step once, from the latest attempt that ran it; ``"all"``:
every attempt; a number: that attempt."""


class AsyncJob(AsyncControlled, AsyncJobLog):
    """A job, as of the last `refresh`."""

    _PATH = "/jobs"

    kind: str
    """``train``, ``infer`` …"""
    name: str
    """The name from the spec, or one that the service generated: ``mlp-7``."""
    state_reason: str | None
    """Details about the state, if there are any."""
    created_at: str
    """All times are RFC 3339 in UTC."""
    created_by: str | None
    """The name of the API key that submitted the job. None for jobs older than this field."""
    queued_at: str
    started_at: str | None
    ended_at: str | None
    not_before: str | None
    """The earliest time at which a job that is retried may start."""
    paused_at: str | None
    paused_s: float
    """Total duration of earlier pauses, in seconds; excludes the current pause."""
    attempt: int
    """How many times a worker has claimed the job."""
    labels: dict[str, str]
    priority: int
    parent: str | None
    """The id of the job that this job was forked or retried from."""
    devices: list[dict[str, Any]]
    """``worker``, ``kind`` and ``id`` of each device."""
    ranks: list[dict[str, Any]]
    """The processes that train the network, by rank, with their workers and devices."""
    directions: dict[str, Literal["min", "max"]]
    """Whether the min or the max of a metric in ``summary`` is its best value. Has no entry for
    metrics whose name does not imply a direction."""
    serving: dict[str, Any] | None
    """What a serve job serves: ``models``, and its traffic: ``requests``, ``requests_per_s``,
    ``latency_ms``, ``queue_ms``, ``waiting``, ``answered``, ``refused``, ``failed``, ``shadows``;
    and ``drift``: how the rows differ from the training rows, by version. None for jobs of other
    kinds."""
    last_seq: int
    """The ``seq`` of the newest event."""
    warnings: list[dict[str, Any]]
    """Warnings of the plan: ``pointer``, ``detail``, ``code``."""
    links: dict[str, str]

    @property
    def progress(self) -> dict[str, Any]:
        """Step, epoch, samples per second and ETA. Empty before the first step."""
        return jsonio.numbers(self.data.get("progress") or {})

    @property
    def summary(self) -> dict[str, Any]:
        """The last, min and max value of each metric."""
        return jsonio.numbers(self.data.get("summary") or {})

    @property
    def probe_overhead(self) -> dict[str, Any] | None:
        """The cost of probes: ``fraction`` of the step time, and ``budget``. None if unknown."""
        overhead = self.data.get("probe_overhead")
        return None if overhead is None else jsonio.numbers(overhead)

    @property
    def layers(self) -> AsyncLayers:
        """The layers of the network: ``job.layers["conv1"].output(step=25)``."""
        return AsyncLayers(self._transport, self.id)

    async def wait(self, timeout: float | None = None, *, progress: bool = False) -> "AsyncJob":
        """Wait until the job has succeeded. Keeps waiting while the job is paused.

        Args:
            timeout: seconds to wait. Default: no limit.
            progress: show a progress bar on standard error, or a live card in a notebook.

        Raises:
            JobFailed: the job failed. The message has the reason.
            JobCancelled: the job was canceled.
            WaitTimeout: the job did not end in time. It is not canceled.
        """
        with Bar(self.id, shown=progress) as bar:
            async for _ in self._changes(timeout, "end"):
                bar.show(self.state, self.progress, self.summary)
                if bar.is_notebook:
                    bar.show_card(await self._card())
                if self.has_ended:
                    break
        self.raise_if_unsuccessful()
        return self

    async def wait_ready(self, timeout: float | None = None) -> "AsyncJob":
        """Wait until the serve job answers requests.

        Args:
            timeout: seconds to wait. Default: no limit.

        Raises:
            JobFailed: the job failed. The message has the reason.
            JobCancelled: the job was canceled.
            WaitTimeout: the job does not answer requests yet. It is not canceled.
            ValueError: the job is of another kind.
        """
        if self.kind != "serve":
            raise ValueError(f"{self.id} is a job of kind {self.kind}: only serve jobs get ready")
        async for _ in self._changes(timeout, "answer requests"):
            if self.has_ended or (self.serving and self.serving["models"]):
                break
        self.raise_if_unsuccessful()
        return self

    async def predict(
        self, inputs: Any = None, *, rows: Any = None, **options: Unpack[PredictOptions]
    ) -> JobPrediction:
        """Run the network of a running training job on some rows, with its current weights.

        The job answers between two steps, as a checkpoint of that step would. Training does not
        change. The arguments are those of `AsyncClient.predict`.

        Returns:
            What `AsyncClient.predict` returns, with ``job`` and ``step`` instead of the model and
            its version.

        Raises:
            ConflictError: the job is not running, has ended, or cannot answer. The message says
                what to do instead.
            UnprocessableEntityError: something does not fit the network; ``errors`` names it.
            GatewayTimeoutError: there was no answer in time.
        """
        return await predict_with_job(self._transport, self.path, inputs, rows, options)

    def stream(
        self,
        types: Iterable[str] | None = None,
        after: int = 0,
        *,
        attempt: Attempts = None,
        give_up_after_s: float = 120.0,
    ) -> AsyncEventStream:
        """Stream the events of the job as they happen, from the first event until the job ends.

        Args:
            types: only events of these types. Default: all.
            after: start after the event with this ``seq``.
            attempt: ``"all"`` includes events that a later attempt has superseded; a number
                selects the events of that attempt.
            give_up_after_s: raise an error if the service is unreachable for this many seconds.
        """
        return AsyncEventStream(
            self._transport,
            f"{API}{self.path}/stream",
            types=types,
            after=after,
            attempt=attempt,
            give_up_after_s=give_up_after_s,
        )

    async def watch(self, *callbacks: Any, after: int = 0) -> "AsyncJob":
        """Call callbacks for the events of the job until it ends, and apply what they return.

        Args:
            callbacks: objects with some of the methods of `Callback`: ``on_train_begin``,
                ``on_epoch_begin``, ``on_train_batch_end``, ``on_eval_end``, ``on_epoch_end``,
                ``on_train_end``, ``on_event``.
            after: skip events up to and including this ``seq``. Default: start with the first
                event of the job.

        Returns:
            The ended job.

        Raises:
            JobFailed: the job failed. No error is raised for a canceled job.
            TypeError: a callback has an unknown ``on_…`` method, or returned an unknown action.
        """
        check_callbacks(callbacks)
        dispatcher = Dispatcher()
        async with self.stream(after=after) as stream:
            async for event in stream:
                for call in dispatcher.calls(event):
                    await self._call(callbacks, call)
        await self.refresh()
        if self.state == "failed":
            self.raise_if_unsuccessful()
        return self

    async def _call(self, callbacks: tuple[Any, ...], call: Call) -> None:
        for callback in callbacks:
            method = getattr(callback, call.name, None)
            if method is None:
                continue
            action = action_of(await resolved(method(*call.arguments)))
            if action is not None:
                await self._apply(action)

    async def _apply(self, action: Action) -> None:
        try:
            if action.verb == "set":
                await self.set(action.settings)
            else:
                await getattr(self, action.verb)()
        except ConflictError as error:
            if error.code != "job_ended":  # the action came too late
                raise

    async def events(
        self, types: Iterable[str] | None = None, after: int = 0, *, attempt: Attempts = None
    ) -> AsyncGenerator[AnyEvent]:
        """Iterate over the existing events without waiting for new ones. See `stream`."""
        params = {"types": None if types is None else ",".join(types), "after": after}
        params["attempt"] = attempt
        async for page in self._transport.pages(f"{self.path}/events", params):
            for record in page:
                yield read_event(record)

    @overload
    async def metrics(
        self, name: str, *, max_points: int | None = None, attempt: Attempts = None
    ) -> Series: ...

    @overload
    async def metrics(
        self, name: Names, *, max_points: int | None = None, attempt: Attempts = None
    ) -> SeriesTable: ...

    @overload
    async def metrics(self) -> dict[str, dict[str, Any]]: ...

    async def metrics(
        self,
        name: str | Names | None = None,
        *,
        max_points: int | None = None,
        attempt: Attempts = None,
    ) -> Any:
        """Return one metric as a `Series`, or several as a `SeriesTable`.

        Without a name, return a summary of all metrics by name: last, min, max, count.

        Args:
            name: the name of a metric, or a list of names.
            max_points: the maximum number of points per metric. Default: all.
            attempt: which attempts of a restarted job to read. Default: one value per step, as if
                the job had not been interrupted. ``"all"``: the values of every attempt. A number:
                the values of that attempt.
        """
        if name is None:
            entries = await self._transport.all(f"{self.path}/metrics")
            return {entry["name"]: jsonio.numbers(entry) for entry in entries}
        names = [name] if isinstance(name, str) else list(name)
        found = await self.series(names, max_points=max_points, attempt=attempt)
        return found[0] if isinstance(name, str) else SeriesTable(found)

    async def series(
        self,
        names: list[str],
        *,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int | None = None,
        attempt: Attempts = None,
    ) -> list[Series]:
        """Return several metrics. Long series are fetched in several requests.

        Args:
            names: the names of the metrics.
            from_step: the first step, inclusive.
            to_step: the last step, inclusive.
            max_points: the maximum number of points per metric. The first, last, min, max, NaN and
                Inf values are always kept. Default: all.
            attempt: as in `metrics`.
        """
        params = {"name": names, "from_step": from_step, "to_step": to_step}
        params |= {"max_points": max_points, "attempt": attempt}
        pages = [await self._transport.get(f"{self.path}/metrics/query", params)]
        while pages[-1].get("has_more"):
            params["from_step"] = pages[-1]["next"]
            pages.append(await self._transport.get(f"{self.path}/metrics/query", params))
        return [Series.of_pages(name, pages) for name in names]

    async def card(self) -> Card:
        """Fetch the job and return it as a card with a loss curve, for display in a notebook."""
        await self.refresh()
        return await self._card()

    async def _card(self) -> Card:
        """A card of the last fetched state."""
        if "loss" not in self.summary:
            return Card(self.data, self._transport.address.url)
        (loss,) = await self.series(["loss"], max_points=MOST_POINTS)
        return Card(self.data, self._transport.address.url, list(loss))

    def _repr_html_(self) -> str:
        """The HTML for notebooks. The blocking client refreshes the job first."""
        return card_html(self.card, Card(self.data, self._transport.address.url))

    def show(self) -> None:
        """Show a card in a notebook that is updated in the background until the job ends.

        Notebooks call this for a job on the last line of a cell. Outside of a notebook, one line
        is printed.
        """
        bar = Bar(self.id, shown=True)
        if not bar.is_notebook:
            sys.stdout.write(f"{self!r}\n")
            return
        bar.show_card(Card(self.data, self._transport.address.url))
        mine = AsyncJob(self._transport, dict(self.data))
        in_background(lambda: mine._keep_shown(bar))

    _ipython_display_ = show

    async def _keep_shown(self, bar: Bar) -> None:
        """Update the card until the job has ended."""
        while True:
            try:
                async for _ in self._changes(None, "end"):
                    bar.show_card(await self._card())
                    if self.has_ended:
                        return
            except (NotFoundError, AuthenticationError, RuntimeError):
                return  # the job was deleted, or the client closed
            except APIError:
                await sleep(RETRY_S)

    async def explain(self) -> Explanation:
        """Explain the state of the job: the reason, the first finding and the last log lines.

        ``print(job.explain())`` shows it as text.
        """
        await self.refresh()
        rank = (self.error or {}).get("rank")
        waits_for = None
        if self.state == "queued":
            entries = await self._transport.all("/queue")
            waits_for = next((one["reason"] for one in entries if one["job"] == self.id), None)
        return explain(
            self.data,
            url=self._transport.address.url,
            finding=await self._first_finding(),
            log=await self.logs(rank, tail=LOG_LINES),
            waits_for=waits_for,
        )

    async def _first_finding(self) -> dict[str, Any] | None:
        found = await self._transport.get(f"{self.path}/events", {"types": "finding", "limit": 1})
        return found["data"][0] if found["data"] else None

    async def probe(
        self,
        layers: str | Sequence[str],
        kinds: str | Sequence[str] = ("output",),
        *,
        want: str | Sequence[str] = ("stats",),
        slice: str | None = None,  # noqa: A002 (the name of the field)
        max_bytes: int | None = None,
        **when: Any,
    ) -> AsyncProbe:
        """Attach a probe to the job at the next step boundary.

        Args:
            layers: globs over the names of layers and parameters.
            kinds: ``output``, ``input``, ``output_grad``, ``param``, ``param_grad``, ``update``,
                ``optim_state``.
            want: ``stats``, ``histogram``, ``quantiles``, ``full``, ``sample``.
            slice: the part of the tensor that ``full`` stores, in numpy syntax: ``0:4,:,::2``.
            max_bytes: the maximum size per tensor that ``full`` or ``sample`` stores, in bytes.
            when: one of ``every`` (default: 1), ``at`` and ``on="nonfinite"``; ``start``, ``stop``;
                ``phase="evaluate"``; ``max_overhead``, a fraction of the step time, or None for no
                limit; ``point``; ``ranks``: ``"all"`` or a list of processes whose own values to
                record, beside those of all together.
        """
        body = as_probe(layers, kinds, want, {"slice": slice, "max_bytes": max_bytes, **when})
        return AsyncProbe(
            self._transport, await self._transport.create(f"{self.path}/probes", body)
        )

    async def get_probe(self, probe_id: str) -> AsyncProbe:
        """Fetch one probe of the job."""
        probe = AsyncProbe(self._transport, {"id": probe_id, "job": self.id})
        return await probe.refresh()

    async def probes(self, *, removed: bool = False) -> list[AsyncProbe]:
        """List the probes of the job; with ``removed``, include removed ones."""
        entries = await self._transport.all(f"{self.path}/probes", {"removed": removed or None})
        return [AsyncProbe(self._transport, entry) for entry in entries]

    async def update(self, **fields: Any) -> "AsyncJob":
        """Change the ``name``, ``labels`` or ``priority`` of the job."""
        self.data = await self._transport.patch(self.path, fields)
        return self

    async def delete(self) -> None:
        """Delete the ended job and everything it created."""
        await self._transport.delete(self.path)

    async def spec(self, *, resolved: bool = True) -> dict[str, Any]:
        """Return the spec, with sizes, seeds and versions resolved, or else as submitted."""
        return await self._transport.get(f"{self.path}/spec", {"resolved": resolved})

    async def plot(
        self,
        name: str = "loss",
        *,
        layer: str | None = None,
        kind: str | None = None,
        format: Literal["png", "svg"] = "png",  # noqa: A002
    ) -> bytes:
        """Return a plot as an image that the server renders.

        Args:
            name: ``loss``, ``lr``, ``throughput``, ``gradient_flow`` or ``histogram``.
            layer: the layer of a ``histogram``, or a glob for ``gradient_flow``.
            kind: the tensor kind of a ``histogram``: ``output``, ``param`` …
            format: ``png`` or ``svg``.
        """
        params = {"layer": layer, "kind": kind, "format": format}
        return await self._transport.download(f"{self.path}/plots/{name}", params)
