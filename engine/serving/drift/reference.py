"""The reference: histograms of training rows, as a network sees them in evaluation.

Made of a sample of the rows that the version was trained on, drawn without replacement, and kept in
a file beside the checkpoint, so that no other replica has to compute them again.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.data.batches.rows import Loaded, tensors_of
from engine.data.columns.prepared import Preparing
from engine.data.columns.table import StoredTable, Table
from engine.data.sources.joined import JoinedStored, TablePart, name_of
from engine.data.sources.reading import SourceReader
from engine.network.network import Network
from engine.serving.drift.histograms import Bins, Counts, category_bins, quantile_bins
from engine.serving.drift.series import (
    FieldSeries,
    Floats,
    Series,
    Values,
    is_category,
    layer_values,
)
from engine.serving.model_inputs import ModelInputs
from glasshouse import jsonio
from glasshouse.spec import Source, TrainJob, UploadedNetwork

MIN_ROWS = 100
"""The fewest training rows that served ones are compared with."""
_BATCH = 64
_FORMAT = 1
_SEED = 0
Look = Callable[[int], None]


class Unavailable(Exception):
    """Why there is no reference for a version."""


@dataclass(frozen=True, eq=False)
class SeriesReference:
    """The histogram of a series over the training rows."""

    bins: Bins
    counts: Counts
    mean: float
    """Of the finite values."""
    std: float


@dataclass(frozen=True, eq=False)
class Reference:
    """The histograms of all series of a version."""

    num_rows: int
    series: Mapping[Series, SeriesReference]

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        listed = [
            {
                "of": key.of,
                "name": key.name,
                "measure": key.measure,
                **item.bins.as_dict(),
                "counts": item.counts.tolist(),
                "mean": item.mean,
                "std": item.std,
            }
            for key, item in self.series.items()
        ]
        return {"num_rows": self.num_rows, "series": listed}

    @staticmethod
    def read(found: Mapping[str, Any]) -> "Reference":
        """Read what `as_dict` returned.

        Raises:
            ValueError, TypeError, KeyError, OverflowError: it is something else.
        """
        series: dict[Series, SeriesReference] = {}
        for entry in found["series"]:
            if entry["of"] not in ("field", "layer"):
                raise ValueError(f"{entry['of']!r} has no series")
            bins, counts = Bins.read(entry), np.array(entry["counts"], np.int64)
            if counts.shape != (bins.num_bins,) or (counts < 0).any():
                raise ValueError("the counts are not those of the bins")
            key = Series(entry["of"], str(entry["name"]), str(entry["measure"]))
            mean, std = float(entry["mean"]), float(entry["std"])
            series[key] = SeriesReference(bins, counts, mean, std)
        return Reference(int(found["num_rows"]), series)

    @staticmethod
    def of(values: Mapping[Series, Floats], num_rows: int, window: int) -> "Reference":
        """Return the histograms of values; ``window``: the rows that are compared with them."""
        return Reference(
            num_rows, {key: _histogram(key, item_N, window) for key, item_N in values.items()}
        )


def _histogram(series: Series, values_N: Floats, window: int) -> SeriesReference:
    is_counted = is_category(series)
    bins = category_bins(values_N, window) if is_counted else quantile_bins(values_N)
    finite = values_N[np.isfinite(values_N)]
    mean, std = (float(finite.mean()), float(finite.std())) if len(finite) else (0.0, 0.0)
    return SeriesReference(bins, bins.counts(values_N), mean, std)


@dataclass(frozen=True)
class TrainingRows:
    """Where the rows that a version was trained on are."""

    datasets: Mapping[str, Path | None]
    """The directories of the datasets by id. None: it was deleted."""
    kept_at: Path | None
    """The directory of references that were computed before; None: they are not kept."""


@dataclass(frozen=True)
class Sampler:
    """Computes the reference of a version."""

    checkpoint: str
    inputs: ModelInputs
    network: Network
    """For the outputs in ``layers``."""
    layers: tuple[str, ...]
    device: torch.device
    num_rows: int
    window: int

    def reference(self, rows: TrainingRows, look: Look) -> Reference:
        """Return the reference, from its file if that is whole and was made for the same question.

        ``look`` is called with numbers of rows; it may wait, or raise to stop.

        Raises:
            Unavailable: the training rows are unknown or gone.
            DataFailed: they cannot be read.
        """
        path = None if rows.kept_at is None else rows.kept_at / f"{self._name()}.json"
        known = None if path is None else _read(path, self._question())
        if known is not None:
            return known
        sources = self._sources(rows)
        fields = FieldSeries(self.inputs, _SEED)
        parts: list[Values] = []
        count = 0
        for loaded, num_rows in self._batches(sources, rows, look):
            parts.append(self._values(fields, loaded, num_rows))
            count += num_rows
            look(num_rows)
        values = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        made = Reference.of(values, count, self.window)
        if path is not None:
            _write(path, self._question(), made)
        return made

    def _sources(self, rows: TrainingRows) -> Sequence[Source]:
        trained_by = self.inputs.trained_by
        if isinstance(trained_by, UploadedNetwork):
            raise Unavailable("Its weights were uploaded, so its training rows are not known.")
        if trained_by.data.windows is not None:
            detail = "It was trained on windows of a text, and requests have rows of other lengths."
            raise Unavailable(detail)
        gone = sorted({
            source.dataset
            for source in trained_by.data.sources
            if rows.datasets.get(source.dataset) is None
        })  # fmt: skip
        if gone:
            detail = f"Its training rows are gone: the dataset {gone[0]} was deleted."
            raise Unavailable(detail)
        return trained_by.data.sources

    def _batches(
        self, sources: Sequence[Source], rows: TrainingRows, look: Look
    ) -> Iterator[tuple[dict[str, Loaded], int]]:
        """Yield a sample of the rows."""
        job = self.inputs.trained_by
        assert isinstance(job, TrainJob)  # noqa: S101 (it has sources)
        found = {name: path for name, path in rows.datasets.items() if path is not None}
        table: StoredTable | JoinedStored = StoredTable(found[sources[0].dataset])
        source = sources[0]
        if len(sources) > 1:
            table = JoinedStored([TablePart(Table(found[one.dataset]), one) for one in sources])
            source = Source(dataset=source.dataset, split=name_of(sources))
        reader = SourceReader(
            source,
            self.inputs.fields,
            table,
            seed=job.seed,
            limit=job.data.sequence,
            preparing=Preparing.of(job.data, self.inputs.meaning.preparing.known),
            look=look,
        )
        if reader.num_rows < MIN_ROWS:
            detail = f"It was trained on {reader.num_rows} rows, and at least {MIN_ROWS} are needed"
            raise Unavailable(f"{detail} for a comparison.")
        count = min(self.num_rows, reader.num_rows)
        order = np.random.default_rng(_SEED).permutation(reader.num_rows)[:count]
        order.sort()
        for first in range(0, count, _BATCH):
            places = order[first : first + _BATCH].astype(np.int64)
            yield reader.read(places), len(places)

    @torch.inference_mode()
    def _values(self, fields: FieldSeries, loaded: Mapping[str, Loaded], num_rows: int) -> Values:
        found = fields.values(loaded)
        if not self.layers:
            return found
        taken = slice(0, num_rows)
        tensors, lengths = tensors_of(loaded, taken, taken, self.device)
        outputs = self.network(tensors)
        for name in self.layers:
            steps = self.inputs.steps.get(name)
            lengths_B = None if steps is None else lengths[steps]
            is_scores = name in self.inputs.classes
            found |= layer_values(name, outputs[name], lengths_B, is_scores=is_scores)
        return found

    def _question(self) -> dict[str, Any]:
        """Return what the reference depends on."""
        return {
            "format": _FORMAT,
            "checkpoint": self.checkpoint,
            "layers": list(self.layers),
            "reference_rows": self.num_rows,
            "window": self.window,
        }

    def _name(self) -> str:
        digest = hashlib.sha256(jsonio.dumps(self._question()).encode()).hexdigest()
        return f"{self.checkpoint}-{digest[:16]}"


def _read(path: Path, question: Mapping[str, Any]) -> Reference | None:
    """Read a file; None: there is none, it is torn, or it answers another question."""
    try:
        found = jsonio.loads(path.read_bytes())
        return Reference.read(found) if found["question"] == question else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None


def _write(path: Path, question: Mapping[str, Any], made: Reference) -> None:
    """Keep a reference. Without room for it, the next start computes it again."""
    text = jsonio.dumps({"question": question, **made.as_dict()})
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside.write_text(text)
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
