# Made from glasshouse/client/aio/layers.py by .ci/twins.py: change that file.
"""Looking into a job's network: its layers, what was captured of them, and their statistics."""

from collections.abc import Generator, Sequence
from typing import Any
from urllib.parse import quote

from glasshouse.client.requests import API, Request
from glasshouse.client.statistics import (
    Captured,
    History,
    Kind,
    LayerStats,
    Phase,
    Step,
    why_none,
)
from glasshouse.client.tensors import Array, read_tensors
from glasshouse.client.transport import Transport
from glasshouse.errors import APIError

ALL_POINTS = 1_000_000
"""The service gives about 1,000 points of a series unless it is asked for more."""


class Layer:
    """One layer of a job's network, or one parameter (``conv1.weight``)."""

    def __init__(self, transport: Transport, job_id: str, name: str) -> None:
        self.name = name
        self._transport = transport
        self._path = f"/jobs/{job_id}"

    def __repr__(self) -> str:
        return f"Layer({self.name!r})"

    def output(self, *, step: Step = "latest", slice: str | None = None) -> Array:  # noqa: A002
        """What the layer gave, captured by a probe that wants ``full``."""
        return (self.tensor("output", step=step, slice=slice)).values

    def input(self, *, step: Step = "latest", slice: str | None = None) -> Array:  # noqa: A002
        """What went into the layer; of several, the first (``layers["add.1"]`` is the second)."""
        return (self.tensor("input", step=step, slice=slice)).values

    def output_grad(self, *, step: Step = "latest", slice: str | None = None) -> Array:  # noqa: A002
        """The gradient of the loss with respect to what the layer gave."""
        return (self.tensor("output_grad", step=step, slice=slice)).values

    def param(self, name: str | None = None, *, step: Step = "latest") -> Array:
        """A parameter as it was used in that step's forward: ``param("weight")``."""
        captured = self._parameter(name).tensor("param", step=step)
        return captured.values

    def param_grad(self, name: str | None = None, *, step: Step = "latest") -> Array:
        """The gradient of a parameter: ``param_grad("weight")``."""
        captured = self._parameter(name).tensor("param_grad", step=step)
        return captured.values

    def update(self, name: str | None = None, *, step: Step = "latest") -> Array:
        """What the optimizer added to a parameter in that step: ``update("weight")``."""
        captured = self._parameter(name).tensor("update", step=step)
        return captured.values

    def optim_state(self, name: str | None = None, *, step: Step = "latest") -> Array:
        """What the optimizer keeps of a parameter: ``optim_state("weight.exp_avg")``."""
        captured = self._parameter(name).tensor("optim_state", step=step)
        return captured.values

    def tensor(
        self,
        kind: Kind | str,
        *,
        step: Step = "latest",
        phase: Phase | None = None,
        slice: str | None = None,  # noqa: A002 - the API's word
    ) -> Captured:
        """One captured tensor and the step it is of.

        Raises:
            NotFoundError: it was not captured at that step; the problem lists the nearest.
        """
        path = f"{API}{self._path}/layers/{quote(self.name, safe='')}/{quote(kind, safe='')}"
        params = {"step": step, "phase": phase, "slice": slice, "format": "safetensors"}
        response = self._transport.send(
            Request("GET", path, params, {"Accept": "application/vnd.safetensors, */*"})
        )
        tensors = list(read_tensors(response.content).values())
        if len(tensors) != 1:
            raise APIError(
                f"{self.name}/{kind}: expected one tensor, the answer has {len(tensors)}"
            )
        return Captured(int(response.headers.get("x-tensor-step", -1)), tensors[0])

    def stats(
        self,
        kind: Kind | str = "output",
        *,
        phase: Phase | None = None,
        max_points: int | None = None,
    ) -> LayerStats:
        """The figures and quantiles of one kind over all steps on which a probe looked.

        A figure that a step does not have is NaN.

        Where both training and evaluations were looked at and ``phase`` is left out: of training.

        Raises:
            APIError: no probe has looked yet, or the name is a layer's and the kind a
                parameter's; then ask for the parameter by its own name. Or the layer gives several
                tensors; then ask for one: ``lstm.0``.
        """
        found = list(self.all_stats(kind, phase=phase, max_points=max_points))
        if len(found) > 1 and phase is None:
            found = [entry for entry in found if entry.phase == "train"]
        if len(found) != 1:
            seen = found or self._leaves(kind)
            raise self._refusal(kind, "statistics", [entry.layer for entry in seen])
        return found[0]

    def _leaves(self, kind: str) -> list[LayerStats]:
        """What was seen of a layer that gives several tensors, each of which has a name."""
        leaves = Layer(self._transport, self._path.removeprefix("/jobs/"), f"{self.name}.*")
        return list(leaves.all_stats(kind))

    def all_stats(
        self,
        kind: str | None = None,
        *,
        phase: Phase | None = None,
        max_points: int | None = None,
    ) -> Generator[LayerStats]:
        """The statistics of each watched tensor of the layer."""
        params = {"layer": self.name, "kind": kind, "max_points": max_points or ALL_POINTS}
        for page in self._transport.pages(f"{self._path}/stats", params | {"phase": phase}):
            for entry in page:
                yield LayerStats.read(entry)

    def history(
        self,
        kind: Kind | str = "output",
        *,
        bins: int = 64,
        max_points: int | None = None,
        phase: Phase = "train",
    ) -> History:
        """How its values were spread over the steps on which a probe took a histogram.

        Args:
            kind: ``output``, ``param`` …; a parameter is asked for by its own name.
            bins: at most so many bars.
            max_points: at most so many steps, evenly apart; left out, 1,000.
            phase: ``train`` or ``evaluate``.

        Raises:
            APIError: no probe that wants ``histogram`` has looked yet.
        """
        params: dict[str, Any] = {"layer": self.name, "kind": kind, "stat": "histogram"}
        params |= {"bins": bins, "max_points": max_points, "phase": phase}
        found = self._transport.all(f"{self._path}/stats", params)
        if len(found) != 1:
            raise self._refusal(kind, "histogram", [entry["layer"] for entry in found])
        return History.read(found[0])

    def _refusal(self, kind: str, form: str, seen: Sequence[str]) -> APIError:
        """Why there is not one series of a kind: none was kept, or those of several tensors."""
        if seen:
            what = "histograms" if form == "histogram" else form
            return APIError(f"{self.name} has {what} of {kind} for: {', '.join(seen)}")
        probes = self._transport.all(f"{self._path}/probes", {"removed": True})
        layers = self._transport.all(f"{self._path}/layers")
        return APIError(why_none(self.name, kind, form, probes, layers))

    def image(
        self,
        kind: Kind | str = "output",
        *,
        step: Step = "latest",
        slice: str | None = None,  # noqa: A002 - the API's word
    ) -> bytes:
        """A captured tensor as a PNG: feature maps and filters as a grid, matrices, vectors."""
        path = f"{self._path}/layers/{quote(self.name, safe='')}/{quote(kind, safe='')}"
        return self._transport.download(path, {"step": step, "slice": slice, "format": "png"})

    def _parameter(self, name: str | None) -> "Layer":
        if name is None:
            return self
        return Layer(self._transport, self._path.removeprefix("/jobs/"), f"{self.name}.{name}")


class Layers:
    """The layers of a job's network, by name; iterating asks the service for the names."""

    def __init__(self, transport: Transport, job_id: str) -> None:
        self._transport = transport
        self._job_id = job_id

    def __getitem__(self, name: str) -> Layer:
        return Layer(self._transport, self._job_id, name)

    def __iter__(self) -> Generator[str]:
        for entry in self.table():
            yield entry["name"]

    def table(self) -> list[dict[str, Any]]:
        """Name, type, output shape, parameters and newest statistics of each layer."""
        return self._transport.all(f"/jobs/{self._job_id}/layers")
