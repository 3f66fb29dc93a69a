"""The versions of published models that a replica has in memory, and which one answers a request.

Shape suffixes: B = rows of a batch.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.checkpoint.checkpoint import load_model
from engine.data.batches.rows import Loaded, tensors_of
from engine.data.columns.loaded import LoadedField, LoadedSequence
from engine.data.columns.prepared import Prepared
from engine.inference.blocks import Column
from engine.inference.infer import columns_of
from engine.network.layers import work_out_of_place
from engine.network.network import Network
from engine.serving.redaction import Redaction
from engine.serving.requests import Asked, ModelInputs
from glasshouse.spec import Trained


@dataclass(frozen=True, slots=True)
class VersionName:
    """A version of a published model, and where its files are."""

    model: str
    version: int
    checkpoint: str
    directory: Path
    datasets: Mapping[str, Path | None] = field(
        default_factory=dict[str, Path | None], compare=False
    )
    """The directories of the datasets that it was trained on, by id. None: it was deleted."""
    references: Path | None = field(default=None, compare=False)
    """Where histograms of its training rows are kept. None: they are not."""


class LayerSample(Protocol):
    """Takes outputs of layers while a batch is computed."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The outputs to compute besides those that are requested."""
        ...

    def take(self, values: Mapping[str, Tensor], lengths: Mapping[str, Tensor]) -> None:
        """Take the outputs of a part of the batch, and the lengths of its sequences."""
        ...


class ServedNetwork(ABC):
    """A network that answers requests."""

    def __init__(
        self,
        inputs: ModelInputs,
        device: torch.device,
        max_rows: int,
        load: Callable[[Network], object],
    ) -> None:
        """Create the network.

        Args:
            inputs: what it reads.
            device: what computes it.
            max_rows: the most rows that are computed at once.
            load: loads the weights.
        """
        self.inputs = inputs
        self._device, self._max_rows = device, max_rows
        graph = inputs.trained_by.network
        self._types = {layer.name: layer.type for layer in graph.layers}
        network = Network(graph, inputs.default_outputs)
        load(network)
        network.to(device).eval()
        work_out_of_place(network)
        for parameter in network.parameters():
            parameter.requires_grad_(False)
        if device.type == "cpu" and any(
            isinstance(module, nn.Conv2d) for module in network.layers.values()
        ):
            network.lay_out(torch.channels_last)  # a batch of 64 images takes 0.6 of the time
        self.network = network
        """In evaluation mode. The weights of a `ServedVersion` do not change."""
        self._views: dict[tuple[str, ...], Network] = {}

    @property
    @abstractmethod
    def origin(self) -> dict[str, str | int]:
        """What answers say of the weights: ``model`` and ``version``, or ``job`` and ``step``."""

    @property
    def label(self) -> str:
        """The same as one text, ``mnist:3``."""
        return ":".join(map(str, self.origin.values()))

    def compute(
        self, requests: Sequence[Asked], sample: LayerSample | None = None
    ) -> list[dict[str, Column]]:
        """Return the outputs of each request, by ``<layer>/<field>``.

        ``requests``: for the same outputs and fields. ``sample``: takes outputs of layers, which
        changes no result.
        """
        whole = requests[0] if len(requests) == 1 else joined(requests)
        columns: dict[str, Column] = {}
        most = self._max_rows
        if self.inputs.depends_on_longest(whole.outputs):
            most = whole.num_rows
        for first in range(0, whole.num_rows, most):
            taken = slice(first, min(first + most, whole.num_rows))
            found = self._compute(whole, taken, sample)
            columns = found if not columns else _appended(columns, found)
        return _divided(columns, [asked.num_rows for asked in requests])

    def redaction(self, globs: Sequence[str]) -> Redaction:
        """Return what is not recorded of its requests; ``globs``: of ``request_log.redact``."""
        return Redaction(globs, self.inputs, self.network)

    def warm_up(self) -> None:
        """Compute one row of zeros, so that the first request does not wait for torch."""
        rows: dict[str, Loaded] = {}
        for name, shape in self.inputs.shapes.items():
            dtype = torch.int64 if shape.dim is not None else torch.float32
            if not shape.is_sequence:
                zeros = torch.zeros((1, *shape.shape), dtype=dtype)
                rows[name] = LoadedField(zeros, is_integer=shape.dim is not None)
                continue
            zeros = torch.zeros((1, *shape.shape[1:]), dtype=dtype)
            weights = torch.zeros(1, 1) if shape.has_values else None
            rows[name] = LoadedSequence(
                zeros,
                torch.zeros(1, dtype=torch.int64),
                torch.ones(1, dtype=torch.int64),
                is_integer=shape.dim is not None,
                weights=weights,
            )
        tensors, _ = tensors_of(rows, slice(0, 1), slice(0, 1), self._device)
        with torch.inference_mode():
            self._view(self.inputs.default_outputs)(tensors)

    def _compute(self, asked: Asked, taken: slice, sample: LayerSample | None) -> dict[str, Column]:
        tensors, lengths = tensors_of(asked.rows, taken, taken, self._device)
        more = () if sample is None else sample.layers
        outputs = (*asked.outputs, *(name for name in more if name not in asked.outputs))
        values = self._view(outputs)(tensors)
        if sample is not None:
            sample.take(values, lengths)
        return columns_of(
            values,
            lengths,
            {name: self.inputs.fields_of(asked, name) for name in asked.outputs},
            self.inputs.steps,
            self._types,
            asked.top_k,
        )

    def _view(self, outputs: tuple[str, ...]) -> Network:
        """Return the network for some outputs."""
        view = self._views.get(outputs)
        if view is None:
            if len(self._views) >= 100:  # clients choose the outputs
                self._views.clear()
            view = self._views[outputs] = self.network.with_outputs(outputs)
        return view


class ServedVersion(ServedNetwork):
    """A version of a published model with its weights in memory."""

    def __init__(
        self, name: VersionName, trained_by: Trained, device: torch.device, max_rows: int
    ) -> None:
        """Load the weights. ``max_rows``: the most rows that are computed at once.

        Raises:
            CheckpointDamaged, CheckpointMismatch: they are not those of the network.
        """
        self.name = name
        inputs = ModelInputs.of(trained_by, Prepared.of(name.directory))
        super().__init__(inputs, device, max_rows, partial(load_model, name.directory))

    @property
    def origin(self) -> dict[str, str | int]:
        """The model and the version."""
        return {"model": self.name.model, "version": self.name.version}


def joined(requests: Sequence[Asked]) -> Asked:
    """Return one request with the rows of several."""
    first = requests[0]
    rows: dict[str, Loaded] = {}
    for name, item in first.rows.items():
        others = [request.rows[name] for request in requests]
        values = torch.cat([other.values for other in others])
        if not isinstance(item, LoadedSequence):
            rows[name] = replace(item, values=values)
            continue
        starts: list[torch.Tensor] = []
        before = 0
        for other in others:
            assert isinstance(other, LoadedSequence)  # noqa: S101 (the same field)
            starts.append(other.starts + before)
            before += len(other.values)
        lengths = torch.cat(
            [other.lengths for other in others if isinstance(other, LoadedSequence)]
        )
        weights = None
        if item.weights is not None:
            weights = torch.cat(
                [
                    other.weights
                    for other in others
                    if isinstance(other, LoadedSequence) and other.weights is not None
                ]
            )
        rows[name] = replace(
            item, values=values, starts=torch.cat(starts), lengths=lengths, weights=weights
        )
    return replace(first, rows=rows, num_rows=sum(request.num_rows for request in requests))


def _appended(columns: Mapping[str, Column], more: Mapping[str, Column]) -> dict[str, Column]:
    found: dict[str, Column] = {}
    for name, column in columns.items():
        other = more[name]
        lengths = None
        if column.lengths is not None and other.lengths is not None:
            lengths = torch.cat([column.lengths, other.lengths])
        found[name] = Column(torch.cat([column.values, other.values]), lengths)
    return found


def _divided(columns: Mapping[str, Column], counts: Sequence[int]) -> list[dict[str, Column]]:
    """Divide the outputs of all rows among the requests that the rows are from."""
    if len(counts) == 1:
        return [dict(columns)]
    parts: list[dict[str, Column]] = [{} for _ in counts]
    for name, column in columns.items():
        if column.lengths is None:
            for part, values in zip(parts, column.values.split(list(counts)), strict=True):
                part[name] = Column(values)
            continue
        lengths = column.lengths.split(list(counts))
        steps = [int(item.sum()) for item in lengths]
        for part, values, own in zip(parts, column.values.split(steps), lengths, strict=True):
            part[name] = Column(values, own)
    return parts


@dataclass(frozen=True)
class ServedEntry:
    """What answers requests for one reference."""

    reference: str
    current: ServedVersion
    canary: ServedVersion | None = None
    canary_share: float = 0.0
    shadow: ServedVersion | None = None
    shadow_share: float = 0.0

    def choose(self) -> ServedVersion:
        """Return the version that answers a request."""
        if self.canary is not None and random.random() < self.canary_share:  # noqa: S311
            return self.canary
        return self.current

    def choose_shadow(self) -> ServedVersion | None:
        """Return the version that also computes a request, if any."""
        is_chosen = self.shadow is not None and random.random() < self.shadow_share  # noqa: S311
        return self.shadow if is_chosen else None

    @property
    def versions(self) -> tuple[ServedVersion, ...]:
        """All of them."""
        return tuple(one for one in (self.current, self.canary, self.shadow) if one is not None)
