# Made from glasshouse/client/aio/job.py by .ci/twins.py: change that file.
"""One job: waiting for it, watching it, and what came of it."""

import sys
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Literal, overload

from glasshouse import jsonio
from glasshouse.client.asking import as_probe
from glasshouse.client.callbacks import Call, Director, Wish, check_callbacks, wish_of
from glasshouse.client.card import MOST_POINTS, Card
from glasshouse.client.control import Steered
from glasshouse.client.events import AnyEvent, read_event
from glasshouse.client.explaining import LOG_LINES, Explanation, explain
from glasshouse.client.layers import Layers
from glasshouse.client.probes import Probe
from glasshouse.client.progress import Bar
from glasshouse.client.requests import API, Request
from glasshouse.client.results import Results
from glasshouse.client.running import in_background, settled, show_at_once, sleep
from glasshouse.client.series import Series, SeriesTable
from glasshouse.client.stream import EventStream
from glasshouse.errors import APIError, AuthenticationError, ConflictError, NotFoundError

AGAIN_S = 5.0
"""How long a card waits for a service that is away before it asks again."""
Names = list[str] | tuple[str, ...]
Attempts = int | Literal["all"] | None
"""Whose rows: None, those of one uninterrupted run; ``"all"``; or one attempt's."""


class Job(Steered, Results):
    """A job, as it was when it was last read; `refresh` reads it anew."""

    _PATH = "/jobs"

    kind: str
    """``train``, ``infer`` …"""
    name: str
    """As its spec says, or made by the service: ``mlp-7``."""
    state_reason: str | None
    """Why it is in its state, where there is more to say than the state."""
    created_at: str
    """Times are in UTC as RFC 3339 writes them."""
    created_by: str | None
    """The name of the API key that submitted it; None: it was made before that was kept."""
    queued_at: str
    started_at: str | None
    ended_at: str | None
    not_before: str | None
    """Until when a job that is tried again waits."""
    paused_at: str | None
    paused_s: float
    """Of the pauses before."""
    attempt: int
    """How often a worker has taken it."""
    labels: dict[str, str]
    priority: int
    parent: str | None
    """The job that it is a fork or a retry of."""
    devices: list[dict[str, Any]]
    """``worker``, ``kind`` and ``id`` of each."""
    directions: dict[str, Literal["min", "max"]]
    """Which value of a metric in ``summary`` is its best; missing where its name does not tell."""
    last_seq: int
    """The newest event of its log."""
    warnings: list[dict[str, Any]]
    """What the plan says may not be meant: ``pointer``, ``detail``, ``code``."""
    links: dict[str, str]

    @property
    def progress(self) -> dict[str, Any]:
        """Step, epoch, samples per second and what is left; empty before the first step."""
        return jsonio.numbers(self.data.get("progress") or {})

    @property
    def summary(self) -> dict[str, Any]:
        """Last, lowest and highest value of each metric."""
        return jsonio.numbers(self.data.get("summary") or {})

    @property
    def probe_overhead(self) -> dict[str, Any] | None:
        """What watching costs: ``fraction`` of step time, and the ``budget``; None: unknown."""
        told = self.data.get("probe_overhead")
        return None if told is None else jsonio.numbers(told)

    @property
    def layers(self) -> Layers:
        """The layers of its network: ``job.layers["conv1"].output(step=25)``."""
        return Layers(self._transport, self.id)

    def wait(self, timeout: float | None = None, *, progress: bool = False) -> "Job":
        """Wait until it has succeeded; while it is paused too.

        Args:
            timeout: seconds; left out, as long as it takes.
            progress: draw a bar on standard error; in a notebook, a card that is kept up to date.

        Raises:
            JobFailed: it failed; says why.
            JobCancelled: it was cancelled.
            WaitTimeout: it has not ended in time. The job goes on.
        """
        with Bar(self.id, shown=progress) as bar:
            for _ in self._changes(timeout, "end"):
                bar.show(self.state, self.progress, self.summary)
                if bar.is_notebook:
                    bar.show_card(self._card())
                if self.has_ended:
                    break
        self.raise_if_unsuccessful()
        return self

    def stream(
        self,
        types: Iterable[str] | None = None,
        after: int = 0,
        *,
        attempt: Attempts = None,
        give_up_after_s: float = 120.0,
    ) -> EventStream:
        """Its events as they happen, from its first (or the one after ``after``) to its end.

        Args:
            types: only events of these types.
            after: ``seq`` of the last event that is known already.
            attempt: ``"all"``: also what gave way to a later attempt; a number: only that one's.
            give_up_after_s: raise after this long without reaching the service.
        """
        return EventStream(
            self._transport,
            f"{API}{self.path}/stream",
            types=types,
            after=after,
            attempt=attempt,
            give_up_after_s=give_up_after_s,
        )

    def watch(self, *callbacks: Any, after: int = 0) -> "Job":
        """Call callbacks as its events come, until it has ended; do what they answer.

        Args:
            callbacks: objects with some of the methods of `Callback`: ``on_train_begin``,
                ``on_epoch_begin``, ``on_train_batch_end``, ``on_eval_end``, ``on_epoch_end``,
                ``on_train_end``, ``on_event``.
            after: ``seq`` of the last event that is of no interest; left out, all that there was
                comes first.

        Returns:
            The job, ended.

        Raises:
            JobFailed: it failed; says why. One that was cancelled is returned like all others.
            TypeError: a callback has a method that is never called, or answers what nobody can do.
        """
        check_callbacks(callbacks)
        director = Director()
        with self.stream(after=after) as stream:
            for event in stream:
                for call in director.calls(event):
                    self._call(callbacks, call)
        self.refresh()
        if self.state == "failed":
            self.raise_if_unsuccessful()
        return self

    def _call(self, callbacks: tuple[Any, ...], call: Call) -> None:
        for callback in callbacks:
            method = getattr(callback, call.name, None)
            if method is None:
                continue
            wish = wish_of(settled(method(*call.arguments)))
            if wish is not None:
                self._grant(wish)

    def _grant(self, wish: Wish) -> None:
        try:
            if wish.verb == "set":
                self.set(wish.settings)
            else:
                getattr(self, wish.verb)()
        except ConflictError as error:
            if error.code != "job_ended":  # a wish that came too late
                raise

    def events(
        self, types: Iterable[str] | None = None, after: int = 0, *, attempt: Attempts = None
    ) -> Generator[AnyEvent]:
        """Its events so far; does not wait for more. ``attempt`` as in ``stream``."""
        params = {"types": None if types is None else ",".join(types), "after": after}
        params["attempt"] = attempt
        for page in self._transport.pages(f"{self.path}/events", params):
            for record in page:
                yield read_event(record)

    @overload
    def metrics(
        self, name: str, *, max_points: int | None = None, attempt: Attempts = None
    ) -> Series: ...

    @overload
    def metrics(
        self, name: Names, *, max_points: int | None = None, attempt: Attempts = None
    ) -> SeriesTable: ...

    @overload
    def metrics(self) -> dict[str, dict[str, Any]]: ...

    def metrics(
        self,
        name: str | Names | None = None,
        *,
        max_points: int | None = None,
        attempt: Attempts = None,
    ) -> Any:
        """One metric as a `Series`, several as a `SeriesTable`; both have ``df()``.

        Without a name, a table of all metrics that there are: last, min, max, count.

        A job that was begun again has one value for each step, as if it had not been;
        ``attempt="all"`` gives those of every attempt, a number those of one.
        """
        if name is None:
            entries = self._transport.all(f"{self.path}/metrics")
            return {entry["name"]: jsonio.numbers(entry) for entry in entries}
        names = [name] if isinstance(name, str) else list(name)
        found = self.series(names, max_points=max_points, attempt=attempt)
        return found[0] if isinstance(name, str) else SeriesTable(found)

    def series(
        self,
        names: list[str],
        *,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int | None = None,
        attempt: Attempts = None,
    ) -> list[Series]:
        """Several metrics at once. A long series comes in several answers, which are put together.

        Args:
            names: of the metrics.
            from_step: the first step, included.
            to_step: the last step, included.
            max_points: at most so many of each; first, last, extremes and bad values stay.
            attempt: as in `metrics`.
        """
        params = {"name": names, "from_step": from_step, "to_step": to_step}
        params |= {"max_points": max_points, "attempt": attempt}
        pages = [self._transport.get(f"{self.path}/metrics/query", params)]
        while pages[-1].get("has_more"):
            params["from_step"] = pages[-1]["next"]
            pages.append(self._transport.get(f"{self.path}/metrics/query", params))
        return [Series.of_pages(name, pages) for name in names]

    def card(self) -> Card:
        """Itself with the line of its loss, for a notebook to show; read anew."""
        self.refresh()
        return self._card()

    def _card(self) -> Card:
        """The line of its loss around what was read last."""
        if "loss" not in self.summary:
            return Card(self.data, self._transport.address.url)
        (loss,) = self.series(["loss"], max_points=MOST_POINTS)
        return Card(self.data, self._transport.address.url, list(loss))

    def _repr_html_(self) -> str:
        """What a notebook shows: read anew where the client blocks, else what it has."""
        return show_at_once(self.card, Card(self.data, self._transport.address.url))

    def show(self) -> None:
        """Show it in a notebook as a card that keeps itself up to date while other cells run.

        A job that is the last line of a cell is shown so, too. The card ends with the job. Where
        there is no notebook it is one line.
        """
        bar = Bar(self.id, shown=True)
        if not bar.is_notebook:
            sys.stdout.write(f"{self!r}\n")
            return
        bar.show_card(Card(self.data, self._transport.address.url))
        mine = Job(self._transport, dict(self.data))
        in_background(lambda: mine._keep_shown(bar))

    _ipython_display_ = show

    def _keep_shown(self, bar: Bar) -> None:
        """Put a new card in the place of the one before, until it has ended."""
        while True:
            try:
                for _ in self._changes(None, "end"):
                    bar.show_card(self._card())
                    if self.has_ended:
                        return
            except (NotFoundError, AuthenticationError, RuntimeError):
                return  # it is deleted, or the client is closed
            except APIError:
                sleep(AGAIN_S)

    def explain(self) -> Explanation:
        """Why it is where it is: the reason, where numbers first went bad, what was printed last.

        ``print(job.explain())`` shows it as text.
        """
        self.refresh()
        rank = (self.error or {}).get("rank")
        waits_for = None
        if self.state == "queued":
            entries = self._transport.all("/queue")
            waits_for = next((one["reason"] for one in entries if one["job"] == self.id), None)
        return explain(
            self.data,
            url=self._transport.address.url,
            finding=self._first_finding(),
            log=self.logs(rank, tail=LOG_LINES),
            waits_for=waits_for,
        )

    def _first_finding(self) -> dict[str, Any] | None:
        found = self._transport.get(f"{self.path}/events", {"types": "finding", "limit": 1})
        return found["data"][0] if found["data"] else None

    def follow(self, rank: int | None = None) -> Generator[str]:
        """The lines that its processes print, as they come, until it has ended.

        Args:
            rank: of this process only.
        """
        with self.stream(types=["log"]) as stream:
            for event in stream.records():
                if rank is None or event["rank"] == rank:
                    yield from event["lines"]

    def logs(
        self, rank: int | None = None, *, tail: int | None = None, grep: str | None = None
    ) -> str:
        """What its processes have printed so far; `follow` goes on from there.

        Args:
            rank: of this process only.
            tail: only so many lines, the last.
            grep: only lines that contain this text.
        """
        params = {"rank": rank, "tail": tail, "grep": grep}
        request = Request("GET", f"{API}{self.path}/logs", params, {"Accept": "text/plain"})
        return (self._transport.send(request)).text

    def probe(
        self,
        layers: str | Sequence[str],
        kinds: str | Sequence[str] = ("output",),
        *,
        want: str | Sequence[str] = ("stats",),
        slice: str | None = None,  # noqa: A002 (the name of the field)
        max_bytes: int | None = None,
        **when: Any,
    ) -> Probe:
        """Watch more of it, from its next step boundary on.

        Args:
            layers: globs over names of layers and parameters.
            kinds: ``output``, ``input``, ``output_grad``, ``param``, ``param_grad``, ``update``,
                ``optim_state``.
            want: ``stats``, ``histogram``, ``quantiles``, ``full``, ``sample``.
            slice: the part that ``full`` keeps, as numpy writes it.
            max_bytes: what ``full`` or ``sample`` may keep of one tensor.
            when: ``every`` (left out, 1), ``at``, or ``on="nonfinite"``; ``start``, ``stop``;
                ``phase="evaluate"``; ``max_overhead``, a fraction of step time, None for
                none; ``point``.
        """
        body = as_probe(layers, kinds, want, {"slice": slice, "max_bytes": max_bytes, **when})
        return Probe(self._transport, self._transport.create(f"{self.path}/probes", body))

    def get_probe(self, probe_id: str) -> Probe:
        """One of its probes."""
        probe = Probe(self._transport, {"id": probe_id, "job": self.id})
        return probe.refresh()

    def probes(self, *, removed: bool = False) -> list[Probe]:
        """What of it is watched; with ``removed``, also what is no more."""
        entries = self._transport.all(f"{self.path}/probes", {"removed": removed or None})
        return [Probe(self._transport, entry) for entry in entries]

    def update(self, **fields: Any) -> "Job":
        """Change its name, labels or priority."""
        self.data = self._transport.patch(self.path, fields)
        return self

    def delete(self) -> None:
        """Delete it with all it made; only after it has ended."""
        self._transport.delete(self.path)

    def spec(self, *, resolved: bool = True) -> dict[str, Any]:
        """What runs: with sizes, seeds and versions filled in, or as it was submitted."""
        return self._transport.get(f"{self.path}/spec", {"resolved": resolved})

    def plot(
        self,
        name: str = "loss",
        *,
        layer: str | None = None,
        kind: str | None = None,
        format: Literal["png", "svg"] = "png",  # noqa: A002
    ) -> bytes:
        """A picture drawn on the server, as PNG or SVG.

        Args:
            name: ``loss``, ``lr``, ``throughput``, ``gradient_flow`` or ``histogram``.
            layer: of ``histogram``, whose; of ``gradient_flow``, a glob.
            kind: of ``histogram``: ``output``, ``param`` …
            format: ``png`` or ``svg``.
        """
        params = {"layer": layer, "kind": kind, "format": format}
        return self._transport.download(f"{self.path}/plots/{name}", params)
