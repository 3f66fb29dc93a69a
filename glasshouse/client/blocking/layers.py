# Made from glasshouse/client/aio/layers.py by .ci/twins.py: change that file.
"""The layers of a job's network: captured tensors, statistics and histograms."""

from collections.abc import Generator, Sequence
from typing import Any, Literal
from urllib.parse import quote

from glasshouse.client.blocking.transport import Transport
from glasshouse.client.connection.requests import API, Request
from glasshouse.client.data.statistics import (
    Captured,
    History,
    Kind,
    LayerStats,
    Phase,
    Step,
    missing_reason,
)
from glasshouse.client.data.tensors import Array, read_tensors
from glasshouse.errors import APIError

ALL_POINTS = 1_000_000
"""Requests all points of a series; the service's default is about 1,000."""


class Layer:
    """One layer of a job's network, or one parameter (``conv1.weight``)."""

    def __init__(self, transport: Transport, job_id: str, name: str) -> None:
        self.name = name
        self._transport = transport
        self._path = f"/jobs/{job_id}"

    def __repr__(self) -> str:
        return f"Layer({self.name!r})"

    def output(
        self,
        *,
        step: Step = "latest",
        slice: str | None = None,  # noqa: A002 - the API's word
        rank: int | None = None,
    ) -> Array:
        """Return the layer's output, captured by a probe that wants ``full``."""
        return (self.tensor("output", step=step, slice=slice, rank=rank)).values

    def input(
        self,
        *,
        step: Step = "latest",
        slice: str | None = None,  # noqa: A002 - the API's word
        rank: int | None = None,
    ) -> Array:
        """Return the layer's first input. ``layers["add.1"]`` has the second."""
        return (self.tensor("input", step=step, slice=slice, rank=rank)).values

    def output_grad(
        self,
        *,
        step: Step = "latest",
        slice: str | None = None,  # noqa: A002 - the API's word
        rank: int | None = None,
    ) -> Array:
        """Return the gradient of the loss with respect to the layer's output."""
        return (self.tensor("output_grad", step=step, slice=slice, rank=rank)).values

    def param(
        self, name: str | None = None, *, step: Step = "latest", rank: int | None = None
    ) -> Array:
        """Return a parameter as used in the forward pass of the step: ``param("weight")``."""
        captured = self._parameter(name).tensor("param", step=step, rank=rank)
        return captured.values

    def param_grad(
        self, name: str | None = None, *, step: Step = "latest", rank: int | None = None
    ) -> Array:
        """Return the gradient of a parameter: ``param_grad("weight")``."""
        captured = self._parameter(name).tensor("param_grad", step=step, rank=rank)
        return captured.values

    def update(
        self, name: str | None = None, *, step: Step = "latest", rank: int | None = None
    ) -> Array:
        """Return the change of a parameter in the step: ``update("weight")``."""
        captured = self._parameter(name).tensor("update", step=step, rank=rank)
        return captured.values

    def optim_state(
        self, name: str | None = None, *, step: Step = "latest", rank: int | None = None
    ) -> Array:
        """Return the optimizer state of a parameter: ``optim_state("weight.exp_avg")``."""
        captured = self._parameter(name).tensor("optim_state", step=step, rank=rank)
        return captured.values

    def tensor(
        self,
        kind: Kind | str,
        *,
        step: Step = "latest",
        phase: Phase | None = None,
        slice: str | None = None,  # noqa: A002 - the API's word
        rank: int | None = None,
    ) -> Captured:
        """Return one captured tensor and its step.

        Args:
            kind: ``output``, ``param`` …
            step: the step, or ``"latest"``.
            phase: ``train`` or ``evaluate``.
            slice: the part to return, in numpy syntax: ``0:4,:,::2``.
            rank: the process whose tensor to return, captured by a probe with ``ranks``. Default:
                the tensor of all processes together.

        Raises:
            NotFoundError: the tensor was not captured at this step. The problem lists the nearest
                captured steps.
        """
        path = f"{API}{self._path}/layers/{quote(self.name, safe='')}/{quote(kind, safe='')}"
        params = {"step": step, "phase": phase, "rank": rank, "slice": slice}
        params["format"] = "safetensors"
        response = self._transport.send(
            Request("GET", path, params, {"Accept": "application/vnd.safetensors, */*"})
        )
        tensors = list(read_tensors(response.content).values())
        if len(tensors) != 1:
            raise APIError(
                f"{self.name}/{kind}: expected one tensor, the response has {len(tensors)}"
            )
        return Captured(int(response.headers.get("x-tensor-step", -1)), tensors[0])

    def stats(
        self,
        kind: Kind | str = "output",
        *,
        phase: Phase | None = None,
        rank: int | None = None,
        max_points: int | None = None,
    ) -> LayerStats:
        """Return statistics and quantiles of one kind of tensor, for each observed step.

        A statistic that was not computed at a step is NaN.

        Args:
            kind: ``output``, ``param`` …
            phase: ``train`` or ``evaluate``. Default: ``train`` if both were observed.
            rank: the process whose statistics to return, observed by a probe with ``ranks``.
                Default: those of all processes together.
            max_points: the maximum number of steps. Default: all.

        Raises:
            APIError: no probe has observed this kind yet; or this is a layer and the kind belongs
                to parameters (use the parameter's name); or the layer has several tensors (use
                the name of one: ``lstm.0``).
        """
        every = self.all_stats(kind, phase=phase, rank=rank, max_points=max_points)
        found = list(every)
        if len(found) > 1 and phase is None:
            found = [entry for entry in found if entry.phase == "train"]
        if len(found) != 1:
            seen = found or self._leaves(kind, rank)
            names = [entry.layer for entry in seen]
            raise self._missing_error(kind, "statistics", names, rank)
        return found[0]

    def _leaves(self, kind: str, rank: int | None) -> list[LayerStats]:
        """The statistics of each tensor of a layer that has several."""
        leaves = Layer(self._transport, self._path.removeprefix("/jobs/"), f"{self.name}.*")
        return list(leaves.all_stats(kind, rank=rank))

    def all_stats(
        self,
        kind: str | None = None,
        *,
        phase: Phase | None = None,
        rank: int | Literal["all"] | None = None,
        max_points: int | None = None,
    ) -> Generator[LayerStats]:
        """Iterate over the statistics of each observed tensor of the layer.

        ``rank``: only those of this process. ``all``: those of all processes together and of each.
        """
        params = {"layer": self.name, "kind": kind, "max_points": max_points or ALL_POINTS}
        params |= {"phase": phase, "rank": rank}
        for page in self._transport.pages(f"{self._path}/stats", params):
            for entry in page:
                yield LayerStats.read(entry)

    def history(
        self,
        kind: Kind | str = "output",
        *,
        bins: int = 64,
        max_points: int | None = None,
        phase: Phase = "train",
        rank: int | None = None,
    ) -> History:
        """Return the histograms of one kind of tensor, for each step that has one.

        Args:
            kind: ``output``, ``param`` …. For a parameter, use the layer of its own name.
            bins: the maximum number of bins.
            max_points: the maximum number of steps, evenly spaced. Default: 1,000.
            phase: ``train`` or ``evaluate``.
            rank: the process whose histograms to return. Default: those of all together.

        Raises:
            APIError: no probe that wants ``histogram`` has observed this kind yet.
        """
        params: dict[str, Any] = {"layer": self.name, "kind": kind, "stat": "histogram"}
        params |= {"bins": bins, "max_points": max_points, "phase": phase, "rank": rank}
        found = self._transport.all(f"{self._path}/stats", params)
        if len(found) != 1:
            names = [entry["layer"] for entry in found]
            raise self._missing_error(kind, "histogram", names, rank)
        return History.read(found[0])

    def _missing_error(
        self, kind: str, form: str, seen: Sequence[str], rank: int | None
    ) -> APIError:
        """The error when there is not exactly one series: there is none, or there are several."""
        if seen:
            what = "histograms" if form == "histogram" else form
            return APIError(f"{self.name} has {what} of {kind} for: {', '.join(seen)}")
        probes = self._transport.all(f"{self._path}/probes", {"removed": True})
        layers = self._transport.all(f"{self._path}/layers")
        return APIError(missing_reason(self.name, kind, form, probes, layers, rank))

    def image(
        self,
        kind: Kind | str = "output",
        *,
        step: Step = "latest",
        slice: str | None = None,  # noqa: A002 - the API's word
        rank: int | None = None,
    ) -> bytes:
        """Return a captured tensor as PNG bytes. Feature maps and filters are drawn as a grid."""
        path = f"{self._path}/layers/{quote(self.name, safe='')}/{quote(kind, safe='')}"
        params = {"step": step, "slice": slice, "rank": rank, "format": "png"}
        return self._transport.download(path, params)

    def _parameter(self, name: str | None) -> "Layer":
        if name is None:
            return self
        return Layer(self._transport, self._path.removeprefix("/jobs/"), f"{self.name}.{name}")


class Layers:
    """The layers of a job's network, by name. Iterating fetches the names from the service."""

    def __init__(self, transport: Transport, job_id: str) -> None:
        self._transport = transport
        self._job_id = job_id

    def __getitem__(self, name: str) -> Layer:
        return Layer(self._transport, self._job_id, name)

    def __iter__(self) -> Generator[str]:
        for entry in self.table():
            yield entry["name"]

    def table(self, *, rank: int | None = None) -> list[dict[str, Any]]:
        """Return name, type, output shape, parameters and newest statistics of each layer.

        ``rank``: the process whose statistics to return. Default: all processes together.
        """
        return self._transport.all(f"/jobs/{self._job_id}/layers", {"rank": rank})
