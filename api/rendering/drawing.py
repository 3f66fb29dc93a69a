"""Draw series, gradient flow and histograms over steps. matplotlib is imported on first use.

Pure functions: from arrays to the bytes of a PNG or an SVG.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_LAYERS = 60
_MAX_TICKS = 40
_DPI = 120

Floats = NDArray[np.float64]


class Line(NamedTuple):
    """A series over steps."""

    steps: NDArray[np.int64]
    values: Floats


def lines(title: str, label: str, series: Mapping[str, Line], form: str) -> bytes:
    """Draw series over steps, with a red line at each NaN or Inf."""
    figure, axes = _sheet(title)
    for name, (steps, values) in series.items():
        finite = np.isfinite(values)
        marker = "." if finite.sum() < 60 else ""
        axes.plot(steps[finite], values[finite], marker=marker, ls="-", lw=1.2, label=name)
        for step in steps[~finite].tolist():
            axes.axvline(step, color="red", lw=0.8, alpha=0.6)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.3)
    if any(name != label for name in series):
        axes.legend(fontsize=8)
    return _saved(figure, form)


def flow(title: str, series: Mapping[str, Line], form: str) -> bytes:
    """Draw the L2 norm of each parameter's gradient: at the newest step, and over the steps."""
    from matplotlib.colors import LogNorm  # noqa: PLC0415

    series = dict(list(series.items())[:MAX_LAYERS])
    names = list(series)
    steps = np.unique(np.concatenate([line.steps for line in series.values()]))
    table = np.full((len(names), len(steps)), np.nan)
    for row, (at, values) in enumerate(series.values()):
        table[row, np.searchsorted(steps, at)] = values
    figure, (now, over) = _sheet(
        title, columns=(1, 2.2), height=max(3.5, min(14, 1.2 + 0.24 * len(names)))
    )
    _newest_bars(now, names, series)
    positive = table[np.isfinite(table) & (table > 0)]
    if positive.size:
        low, high = float(positive.min()), float(positive.max())
        norm = LogNorm(max(low, high * 1e-12), high if high > low else low * 10)
        over.set_facecolor("#dddddd")
        edges = _edges(steps)
        shown = np.ma.masked_invalid(table)
        mesh = over.pcolormesh(edges, np.arange(len(names) + 1) - 0.5, shown, norm=norm)
        mesh.cmap.set_under("black")
        figure.colorbar(mesh, ax=over, label="l2 of the gradient")
    for row, column in np.argwhere(np.isposinf(table)).tolist():
        over.plot(steps[column], row, "rx", ms=4)
    over.invert_yaxis()
    over.set_yticks([])
    over.set_ylim(len(names) - 0.5, -0.5)
    over.set_xlabel("step")
    return _saved(figure, form)


def _newest_bars(axes: Any, names: Sequence[str], series: Mapping[str, Line]) -> None:
    last = np.array([line.values[-1] for line in series.values()])
    seen = np.where(np.isfinite(last), last, 0.0)
    axes.barh(np.arange(len(names)), seen, color="#3b6fb6")
    for row in np.flatnonzero(~np.isfinite(last)).tolist():
        axes.text(0.02, row, "not finite", color="red", va="center", fontsize=7,
                  transform=axes.get_yaxis_transform())  # fmt: skip
    if (seen > 0).any():
        axes.set_xscale("log")
        least, most = seen[seen > 0].min(), seen.max()
        axes.set_xlim(max(least, most * 1e-12) / 3, most * 2)
    every = max(1, -(-len(names) // _MAX_TICKS))
    axes.set_yticks(np.arange(len(names))[::every], names[::every], fontsize=7)
    axes.set_ylim(len(names) - 0.5, -0.5)
    newest = max(int(line.steps[-1]) for line in series.values())
    axes.set_xlabel(f"l2 of the gradient, step {newest}")
    axes.grid(visible=True, axis="x", alpha=0.3)


class HistogramSeries(NamedTuple):
    """Histograms over steps: counts are (steps, bins)."""

    steps: NDArray[np.int64]
    edges: Floats
    counts: NDArray[np.int64]
    linear_within: float | None = None
    """Beyond this magnitude the axis is logarithmic. None: it is linear."""


def histograms(title: str, spread: HistogramSeries, form: str) -> bytes:
    """Draw the distribution of values over steps: density, or fraction on a logarithmic axis."""
    from matplotlib.colors import LogNorm  # noqa: PLC0415

    steps, edges, counts, linear_within = spread
    figure, axes = _sheet(title)
    if linear_within is not None:
        axes.set_yscale("symlog", linthresh=linear_within, linscale=3)
        axes.axhspan(-linear_within, linear_within, color="#eeeeee", zorder=0)
    label = "density" if linear_within is None else "share"
    density = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    if linear_within is None:
        density = density / np.diff(edges)
    some = density[density > 0]
    if some.size:
        top = float(some.max())
        norm = LogNorm(max(float(some.min()), top * 1e-4), top * 1.0001)
        shown = np.ma.masked_less_equal(density, 0)
        mesh = axes.pcolormesh(_edges(steps), edges, shown.T, norm=norm, cmap="viridis")
        figure.colorbar(mesh, ax=axes, label=label)
        low, high = _bulk(edges, counts.sum(axis=0))
        axes.set_ylim(low, high)
    axes.set_xlabel("step")
    axes.set_ylabel("value")
    return _saved(figure, form)


def _bulk(edges: Floats, totals: NDArray[np.int64]) -> tuple[float, float]:
    """Return the range of edges that contains all values."""
    held = np.flatnonzero(totals)
    return float(edges[held[0]]), float(edges[held[-1] + 1])


def _edges(steps: NDArray[np.int64]) -> Floats:
    """Return the edges of a heat map's cells: half way between the steps."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (steps[1:] + steps[:-1]) / 2
    first, last = 2 * steps[0] - middles[0], 2 * steps[-1] - middles[-1]
    return np.concatenate([[first], middles, [last]])


def _sheet(title: str, *, columns: Sequence[float] = (1,), height: float = 4.5) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # noqa: PLC0415 (half a second, and 40 MB, when asked)

    width = 8 if len(columns) == 1 else 10
    figure: Any = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    shares = {"width_ratios": list(columns)}
    axes = figure.subplots(1, len(columns), gridspec_kw=shares)
    figure.suptitle(title.replace("$", r"\$"), fontsize=10)
    return figure, axes


def _saved(figure: Any, form: str) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format=form)
    return picture.getvalue()
