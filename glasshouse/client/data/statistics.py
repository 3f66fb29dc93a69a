"""Observations of a layer: captured tensors, statistics and histograms over steps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from glasshouse.client.data.frames import Library, frame
from glasshouse.client.data.series import Floats, Steps, floats
from glasshouse.client.data.tensors import Array, as_torch
from glasshouse.spec.tensor_kinds import TensorKind
from glasshouse.suggestions import did_you_mean

Kind = TensorKind
Step = int | Literal["latest"]
Phase = Literal["train", "evaluate"]


@dataclass(frozen=True, slots=True)
class Captured:
    """A tensor captured at one step."""

    step: int
    values: Array

    def numpy(self) -> Array:
        """Return the values as numpy; bfloat16 and 8-bit floats have the dtypes of ml_dtypes."""
        return self.values

    def torch(self) -> Any:
        """Return the values as a torch tensor of the captured dtype.

        Raises:
            ImportError: torch is not installed.
        """
        return as_torch(self.values)


@dataclass(frozen=True, slots=True, repr=False)
class LayerStats(Mapping[str, Floats]):
    """Statistics of one tensor over steps: ``stats["mean"]`` has one value per ``stats.steps``."""

    layer: str
    kind: str
    steps: Steps
    columns: Mapping[str, Floats]
    phase: str = "train"
    rank: int | None = None
    """The process whose own statistics these are. None: all processes together."""

    @classmethod
    def read(cls, entry: dict[str, Any]) -> "LayerStats":
        """Read one entry of ``GET /jobs/{id}/stats``."""
        columns = {name: floats(values) for name, values in entry["values"].items()}
        steps = np.array(entry["step"], np.int64)
        whose = entry["phase"], entry.get("rank")
        return cls(entry["layer"], entry["kind"], steps, columns, *whose)

    def df(self, library: Library | None = None) -> Any:
        """Return a data frame with the column ``step`` and one per statistic; see `Series.df`."""
        return frame({"step": self.steps, **self.columns}, library)

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def __repr__(self) -> str:
        figures = ", ".join(self.columns)
        return f"LayerStats({self.layer!r}, {self.kind!r}, {len(self.steps)} steps: {figures})"


@dataclass(frozen=True, slots=True, repr=False)
class History:
    """Histograms of one tensor over steps, all with the same bin edges."""

    layer: str
    kind: str
    phase: str
    steps: Steps
    edges: Floats
    """The bin edges, of shape [bins + 1], ascending. Bins differ in width: plot `density`."""
    counts: NDArray[np.int64]
    """The number of values per bin, of shape [steps, bins]. NaN and Inf are not counted."""
    rank: int | None = None
    """The process whose own values are counted. None: all processes together."""

    @classmethod
    def read(cls, entry: dict[str, Any]) -> "History":
        """Read one entry of ``GET /jobs/{id}/stats?stat=histogram``."""
        steps = np.array(entry["step"], np.int64)
        counts = np.array(entry["counts"], np.int64).reshape(len(steps), -1)
        edges = np.array(entry["edges"], np.float64)
        names = entry["layer"], entry["kind"], entry["phase"]
        return cls(*names, steps, edges, counts, entry.get("rank"))

    @property
    def widths(self) -> Floats:
        """The width of each bin, of shape [bins]."""
        return np.diff(self.edges)

    @property
    def density(self) -> Floats:
        """The fraction of values per bin divided by the bin width, of shape [steps, bins]."""
        totals = np.maximum(self.counts.sum(axis=1, keepdims=True), 1)
        return self.counts / totals / self.widths

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        shape = f"{len(self.steps)} steps, {self.counts.shape[1]} bins"
        return f"History({self.layer!r}, {self.kind!r}, {shape})"


def missing_reason(
    name: str,
    kind: str,
    form: str,
    probes: Sequence[Mapping[str, Any]],
    layers: Sequence[Mapping[str, Any]],
    rank: int | None = None,
) -> str:
    """Explain why a tensor has no statistics, and what to do about it.

    Args:
        name: the name of the layer or parameter.
        kind: ``output``, ``param`` …
        form: ``statistics`` or ``histogram``.
        probes: all probes of the job, including removed ones.
        layers: the layer table of the job.
        rank: the process whose own statistics are missing; None: those of all together.
    """
    known = [str(entry["name"]) for entry in layers]
    if name.partition(".")[0] not in known:
        return f"the network has no layer {name!r}{did_you_mean(name, known)}"
    parts = (f"{name}.", f"{name}:")
    matching = [
        entry
        for entry in probes
        if kind in entry["kinds"]
        and any(one == name or one.startswith(parts) for one in entry["matched"])
    ]
    want = "stats" if form == "statistics" else form
    if not matching:
        more = "" if want == "stats" else f', want="{want}"'
        return (
            f"no probe observes {kind} of {name!r}. Attach one to the running job with "
            f'job.probe("{name}", kinds="{kind}"{more}), or set probes= in the spec to observe it '
            "from the first step"
        )
    if not any(want in entry["want"] for entry in matching):
        return f'the probe of {kind} of {name!r} stores no {form}; add "{want}" to its want'
    if rank is not None and not any(_records(entry, rank) for entry in matching):
        detail = f"the probe of {kind} of {name!r} records the values of all processes together"
        return f"{detail}, and not those of rank {rank}; set its ranks to [{rank}]"
    return f"the probe of {kind} of {name!r} has no data yet: wait for its first observed step"


def _records(probe: Mapping[str, Any], rank: int) -> bool:
    """Return whether a probe records the values of a process."""
    ranks = probe.get("ranks", "merged")
    return ranks == "all" or (ranks != "merged" and rank in ranks)
