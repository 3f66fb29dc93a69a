"""Metrics of a job over steps."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasshouse.client.data.frames import Library, frame

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


@dataclass(frozen=True, slots=True, repr=False)
class Series:
    """The values of one metric over steps, oldest first. NaN and Inf are kept."""

    name: str
    steps: Steps
    """The step of each value. Steps are 0-based and count optimizer updates."""
    values: Floats
    epochs: Steps = field(default_factory=lambda: np.zeros(0, np.int64))
    """The epoch of each value."""

    @classmethod
    def read(cls, name: str, columns: dict[str, Any]) -> "Series":
        """Read one metric from the columns of ``metrics/query``; skip steps without a value."""
        values: list[Any] = columns["values"][name]
        kept = [place for place, value in enumerate(values) if value is not None]
        epochs: list[Any] | None = columns.get("epoch")
        return cls(
            name,
            np.array([columns["step"][place] for place in kept], np.int64),
            floats([values[place] for place in kept]),
            np.array([epochs[place] for place in kept] if epochs else [0] * len(kept), np.int64),
        )

    @classmethod
    def of_pages(cls, name: str, pages: Sequence[dict[str, Any]]) -> "Series":
        """Read one metric from several pages in ascending order of steps."""
        parts = [cls.read(name, page) for page in pages]
        if len(parts) == 1:
            return parts[0]
        columns = [(part.steps, part.values, part.epochs) for part in parts]
        return cls(name, *(np.concatenate(column) for column in zip(*columns, strict=True)))

    def numpy(self) -> Floats:
        """Return the values as float64, of shape [steps]. ``steps`` has the step of each."""
        return self.values

    def df(self, library: Library | None = None) -> Any:
        """Return a data frame with the columns ``step``, ``epoch`` and the metric's name.

        Args:
            library: ``pandas`` or ``polars``. Default: the one that is already imported, or else
                the one that is installed.

        Raises:
            ImportError: the library is not installed.
        """
        return frame({"step": self.steps, "epoch": self.epochs, self.name: self.values}, library)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.values, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.steps.tolist(), self.values.tolist(), strict=True)

    def __repr__(self) -> str:
        if not len(self):
            return f"Series({self.name!r}, empty)"
        last = f"{self.values[-1]:.6g} at step {self.steps[-1]}"
        return f"Series({self.name!r}, {len(self)} values, last {last})"


class SeriesTable(Mapping[str, Series]):
    """Several metrics of a job, by name."""

    def __init__(self, series: Sequence[Series]) -> None:
        self._series = {one.name: one for one in series}

    def __getitem__(self, name: str) -> Series:
        return self._series[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)

    def __repr__(self) -> str:
        return f"SeriesTable({', '.join(map(repr, self._series.values()))})"

    def df(self, library: Library | None = None) -> Any:
        """Return a data frame with a row per step; a missing value is NaN.

        The columns are ``step``, ``epoch`` and the names of the metrics. ``library`` is as in
        `Series.df`.
        """
        steps = np.unique(np.concatenate([one.steps for one in self._series.values()]))
        columns: dict[str, Any] = {"step": steps, "epoch": np.zeros(len(steps), np.int64)}
        for name, one in self._series.items():
            places = np.searchsorted(steps, one.steps)
            columns["epoch"][places] = one.epochs
            columns[name] = np.full(len(steps), np.nan)
            columns[name][places] = one.values
        return frame(columns, library)


def floats(values: list[Any]) -> Floats:
    """Convert JSON numbers, including "NaN" and "Infinity", to float64; null becomes NaN."""
    return np.array(values, np.float64)  # numpy parses the strings and reads None as NaN
