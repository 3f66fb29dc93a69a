"""What was seen of a layer: a tensor of one step, figures and histograms over steps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from glasshouse.client.frames import Library, frame
from glasshouse.client.series import Floats, Steps, floats
from glasshouse.client.tensors import Array, as_torch
from glasshouse.nearest import did_you_mean

Kind = Literal["output", "input", "output_grad", "param", "param_grad", "update", "optim_state"]
Step = int | Literal["latest"]
Phase = Literal["train", "evaluate"]


@dataclass(frozen=True, slots=True)
class Captured:
    """A tensor as it was at one step."""

    step: int
    values: Array

    def numpy(self) -> Array:
        """It as numpy has it; bfloat16 and 8-bit floats in the dtypes of ml_dtypes."""
        return self.values

    def torch(self) -> Any:
        """It as a tensor of torch, in its own dtype.

        Raises:
            ImportError: there is no torch.
        """
        return as_torch(self.values)


@dataclass(frozen=True, slots=True, repr=False)
class LayerStats(Mapping[str, Floats]):
    """Figures of one watched tensor over steps: ``stats["mean"]`` beside ``stats.steps``."""

    layer: str
    kind: str
    steps: Steps
    columns: Mapping[str, Floats]
    phase: str = "train"

    @classmethod
    def read(cls, entry: dict[str, Any]) -> "LayerStats":
        """Read one entry of ``GET /jobs/{id}/stats``."""
        columns = {name: floats(values) for name, values in entry["values"].items()}
        steps = np.array(entry["step"], np.int64)
        return cls(entry["layer"], entry["kind"], steps, columns, entry["phase"])

    def df(self, library: Library | None = None) -> Any:
        """A data frame with the column ``step`` and one for each figure; see `Series.df`."""
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
    """Histograms of one watched tensor over steps, all with the same edges."""

    layer: str
    kind: str
    phase: str
    steps: Steps
    edges: Floats
    """One more than bars, ascending. Bars are not equally wide: divide by ``widths`` to draw."""
    counts: NDArray[np.int64]
    """(steps, bars): how many values lay between two edges. What is not finite is in none."""

    @classmethod
    def read(cls, entry: dict[str, Any]) -> "History":
        """Read one entry of ``GET /jobs/{id}/stats?stat=histogram``."""
        steps = np.array(entry["step"], np.int64)
        counts = np.array(entry["counts"], np.int64).reshape(len(steps), -1)
        edges = np.array(entry["edges"], np.float64)
        return cls(entry["layer"], entry["kind"], entry["phase"], steps, edges, counts)

    @property
    def widths(self) -> Floats:
        """How wide each bar is."""
        return np.diff(self.edges)

    @property
    def density(self) -> Floats:
        """The share of the values of each step in each bar, by the bar's width."""
        totals = np.maximum(self.counts.sum(axis=1, keepdims=True), 1)
        return self.counts / totals / self.widths

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        shape = f"{len(self.steps)} steps, {self.counts.shape[1]} bars"
        return f"History({self.layer!r}, {self.kind!r}, {shape})"


def why_none(
    name: str,
    kind: str,
    form: str,
    probes: Sequence[Mapping[str, Any]],
    layers: Sequence[Mapping[str, Any]],
) -> str:
    """Why there are no figures of a tensor, and what to do about it.

    Args:
        name: of the layer or parameter.
        kind: ``output``, ``param`` …
        form: what was asked for: ``statistics`` or ``histogram``.
        probes: all of the job, removed ones too.
        layers: its layer table.
    """
    known = [str(entry["name"]) for entry in layers]
    if name.partition(".")[0] not in known:
        return f"the network has no layer {name!r}{did_you_mean(name, known)}"
    parts = (f"{name}.", f"{name}:")
    looking = [
        entry
        for entry in probes
        if kind in entry["kinds"]
        and any(one == name or one.startswith(parts) for one in entry["matched"])
    ]
    want = "stats" if form == "statistics" else form
    if not looking:
        more = "" if want == "stats" else f', want="{want}"'
        return (
            f"no probe watches {kind} of {name!r}. Watch it while the job runs by "
            f'job.probe("{name}", kinds="{kind}"{more}), or from the first step on by probes= '
            "where the job is made"
        )
    if not any(want in entry["want"] for entry in looking):
        return f'the probe of {kind} of {name!r} keeps no {form}; add "{want}" to its want'
    return f"no probe of {kind} of {name!r} has looked yet; it does on the first step it is due"
