"""One job: waiting for it, watching it, and what came of it."""

import re
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Literal, overload
from urllib.parse import quote

from glasshouse import jsonio
from glasshouse.client.control import Steered
from glasshouse.client.layers import Layers
from glasshouse.client.probes import Probe, as_probe
from glasshouse.client.progress import Bar
from glasshouse.client.records import Checkpoint, Record, download
from glasshouse.client.series import Series
from glasshouse.client.stream import AnyEvent, EventStream, read_event
from glasshouse.client.tensors import Array, read_tensors
from glasshouse.client.transport import API, Request
from glasshouse.errors import APIError, JobCancelled, JobFailed

_KEPT = re.compile(r"(samples|metrics)-(\d+)\.safetensors")
Attempts = int | Literal["all"] | None
"""Whose rows: None, those of one uninterrupted run; ``"all"``; or one attempt's."""
ENDINGS = frozenset({"succeeded", "failed", "cancelled"})


class Job(Steered):
    """A job, as it was when it was last read; `refresh` reads it anew."""

    _PATH = "/jobs"

    @property
    def state(self) -> str:
        """``queued``, ``starting``, ``running``, ``pausing``, ``paused``, ``cancelling``, or ended.

        Ended is ``succeeded``, ``failed``, ``cancelled``.
        """
        return self.data["state"]

    @property
    def has_ended(self) -> bool:
        """Whether it is succeeded, failed or cancelled."""
        return self.state in ENDINGS

    @property
    def progress(self) -> dict[str, Any]:
        """Step, epoch, samples per second and what is left; empty before the first step."""
        return _numbers(self.data.get("progress") or {})

    @property
    def summary(self) -> dict[str, Any]:
        """Last, lowest and highest value of each metric."""
        return _numbers(self.data.get("summary") or {})

    @property
    def probe_overhead(self) -> dict[str, Any] | None:
        """What watching costs: ``fraction`` of step time, and the ``budget``; None: unknown."""
        told = self.data.get("probe_overhead")
        return None if told is None else _numbers(told)

    @property
    def error(self) -> dict[str, Any] | None:
        """Why it failed."""
        return self.data.get("error")

    @property
    def layers(self) -> Layers:
        """The layers of its network: ``job.layers["conv1"].output(step=25)``."""
        return Layers(self._transport, self.id)

    def refresh(self) -> "Job":
        """Read it anew."""
        self._fetch()
        return self

    def wait(self, timeout: float | None = None, *, progress: bool = False) -> "Job":
        """Wait until it has succeeded; while it is paused too.

        Args:
            timeout: seconds; left out, as long as it takes.
            progress: draw a bar on standard error.

        Raises:
            JobFailed: it failed; says why.
            JobCancelled: it was cancelled.
            WaitTimeout: it has not ended in time. The job goes on.
        """
        with Bar(self.id, shown=progress) as bar:
            for _ in self._changes(timeout, "end"):
                bar.show(self.state, self.progress, self.summary)
                if self.has_ended:
                    break
        self.raise_if_unsuccessful()
        return self

    def raise_if_unsuccessful(self) -> None:
        """Raise `JobFailed` or `JobCancelled` if that is how it ended."""
        if self.state == "failed":
            raise JobFailed(self.id, self.error or {})
        if self.state == "cancelled":
            raise JobCancelled(f"{self.id} was cancelled")

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

    def events(
        self, types: Iterable[str] | None = None, after: int = 0, *, attempt: Attempts = None
    ) -> Generator[AnyEvent]:
        """Its events so far; does not wait for more. ``attempt`` as in ``stream``."""
        params = {"types": None if types is None else ",".join(types), "after": after}
        params["attempt"] = attempt
        for record in self._transport.pages(f"{self.path}/events", params):
            yield read_event(record)

    @overload
    def metrics(
        self, name: str, *, max_points: int | None = None, attempt: Attempts = None
    ) -> Series: ...

    @overload
    def metrics(self) -> dict[str, dict[str, Any]]: ...

    def metrics(
        self,
        name: str | None = None,
        *,
        max_points: int | None = None,
        attempt: Attempts = None,
    ) -> Any:
        """One metric as a `Series`; without a name, a table of all: last, min, max, count.

        A job that was begun again has one value for each step, as if it had not been;
        ``attempt="all"`` gives those of every attempt, a number those of one.
        """
        if name is None:
            entries = self._transport.pages(f"{self.path}/metrics")
            return {entry["name"]: _numbers(entry) for entry in entries}
        return self.series([name], max_points=max_points, attempt=attempt)[0]

    def series(
        self, names: list[str], *, max_points: int | None = None, attempt: Attempts = None
    ) -> list[Series]:
        """Several metrics in one request."""
        params = {"name": names, "max_points": max_points, "attempt": attempt}
        columns = self._transport.get(f"{self.path}/metrics/query", params)
        return [Series.read(name, columns) for name in names]

    def logs(self, rank: int | None = None, *, tail: int | None = None) -> str:
        """What its processes printed."""
        params = {"rank": rank, "tail": tail}
        request = Request("GET", f"{API}{self.path}/logs", params, {"Accept": "text/plain"})
        return self._transport.send(request).text

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
        return Probe(self._transport, {"id": probe_id, "job": self.id}).refresh()

    def probes(self, *, removed: bool = False) -> list[Probe]:
        """What of it is watched; with ``removed``, also what is no more."""
        entries = self._transport.pages(f"{self.path}/probes", {"removed": removed or None})
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

    def result(self) -> Any:
        """The small result of an inference job that has ended; None if it is only a file."""
        if not self.has_ended:
            self.refresh()
        self.raise_if_unsuccessful()
        return self.data.get("result")

    def outputs(self) -> dict[str, Array]:
        """The tensors of an inference job, named ``<layer>/<field>``."""
        return read_tensors(self.artifact("outputs.safetensors"))

    def artifact(self, name: str) -> bytes:
        """The bytes of one file it made."""
        return download(self._transport, f"{self.path}/artifacts/{quote(name, safe='')}")

    def sampled_steps(self) -> list[int]:
        """The steps after which an evaluation kept sample predictions."""
        return self._kept_steps("samples")

    def samples(self, step: int | None = None) -> dict[str, Array]:
        """What the network said of the sampled validation rows: outputs and targets by name.

        ``row`` has the rows' numbers. The job's ``evaluate`` says how many: ``{"samples": 8}``.

        Args:
            step: of the evaluation after this step; left out, of the newest.

        Raises:
            APIError: no evaluation has kept any.
        """
        return self._kept("samples", step)

    def metric_tensors(self, step: int | None = None) -> dict[str, Array]:
        """What the metrics of an evaluation gave that is no single number, by the metric's name.

        A confusion matrix of shape [classes, classes]; the curves of a ROC as ``roc/0``, ``roc/1``.

        Args:
            step: of the evaluation after this step; left out, of the newest.

        Raises:
            APIError: no evaluation has kept any.
        """
        return self._kept("metrics", step)

    def metric_tensor_steps(self) -> list[int]:
        """The steps after which an evaluation kept tensors of metrics."""
        return self._kept_steps("metrics")

    def _kept(self, what: str, step: int | None) -> dict[str, Array]:
        if step is None:
            steps = self._kept_steps(what)
            if not steps:
                raise APIError(f"{self.id} has kept no {what} yet")
            step = steps[-1]
        return read_tensors(self.artifact(f"{what}-{step}.safetensors"))

    def _kept_steps(self, what: str) -> list[int]:
        found = [_KEPT.fullmatch(item.data["name"]) for item in self.artifacts()]
        return sorted(int(name[2]) for name in found if name is not None and name[1] == what)

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
        return download(self._transport, f"{self.path}/plots/{name}", params)

    def artifacts(self) -> list[Record]:
        """The files it made."""
        entries = self._transport.pages(f"{self.path}/artifacts")
        return [Record(self._transport, entry) for entry in entries]

    def checkpoints(self) -> list[Checkpoint]:
        """Its checkpoints, in the order of their steps."""
        entries = self._transport.pages(f"{self.path}/checkpoints")
        found = [Checkpoint(self._transport, entry) for entry in entries]
        return sorted(found, key=lambda checkpoint: checkpoint.data.get("step", 0))

    def weights(self) -> dict[str, Array]:
        """The weights of its newest checkpoint, by torch's parameter names."""
        return self._newest().weights()

    def state_dict(self) -> dict[str, Any]:
        """The weights of its newest checkpoint as torch tensors, by the trained module's names.

        ``module.load_state_dict(job.state_dict())``, for a module that uses all that it has; see
        `load_into`.
        """
        return self._newest().state_dict()

    def load_into(self, module: Any) -> None:
        """Put the weights of its newest checkpoint back into the torch module that was trained.

        What the module has and never uses stays as it is.

        Raises:
            ValueError: it is another module.
        """
        self._newest().load_into(module)

    def _newest(self) -> Checkpoint:
        found = self.checkpoints()
        if not found:
            raise APIError(f"{self.id} has no complete checkpoint yet")
        return found[-1]


def _numbers(value: Any) -> Any:
    """The same document with the names of non-finite numbers turned into numbers."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return jsonio.number(value)
