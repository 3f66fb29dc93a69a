"""Job cards for notebooks: self-contained HTML without scripts or external resources."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from glasshouse import jsonio

WIDTH, HEIGHT = 260.0, 48.0
MOST_POINTS = 200
_MARKS = {"succeeded": "✓", "failed": "✗", "cancelled": "⊘", "running": "▶", "paused": "⏸"}
_STYLE = (
    "font:13px/1.5 system-ui,sans-serif;border:1px solid rgba(128,128,128,.5);border-radius:6px;"
    "padding:10px 14px;max-width:34em"
)


@dataclass(frozen=True, slots=True)
class Card:
    """A snapshot of a job for display in a notebook."""

    job: Mapping[str, Any]
    """The job document."""
    url: str
    """The address of the service, for links."""
    loss: Sequence[tuple[int, float]] = ()
    """The loss curve as (step, value) pairs, oldest first."""

    def _repr_html_(self) -> str:
        parts = [self._head(), self._progress(), sparkline(self.loss), self._figures()]
        parts.append(self._error())
        return f'<div style="{_STYLE}">{"".join(parts)}</div>'

    def __repr__(self) -> str:
        return f"Card({self.job['id']}, {self.job['state']})"

    def _head(self) -> str:
        name, state = str(self.job.get("name") or self.job["id"]), str(self.job["state"])
        href = escape(f"{self.url}/jobs/{self.job['id']}", quote=True)
        link = f'<a href="{href}" target="_blank" rel="noopener">{escape(name)}</a>'
        return f"<div><b>{link}</b> · {_MARKS.get(state, '·')} {escape(state)}{self._badge()}</div>"

    def _badge(self) -> str:
        """A badge with the first NaN step of the loss, as text and not by color alone."""
        summary: Mapping[str, Any] = self.job.get("summary") or {}
        loss: Mapping[str, Any] = summary.get("loss") or {}
        since = loss.get("first_nonfinite_step")
        if since is None:
            return ""
        style = "background:#b3261e;color:#fff;border-radius:4px;padding:0 6px;margin-left:8px"
        return f'<span style="{style}">NaN since step {escape(str(since))}</span>'

    def _progress(self) -> str:
        progress: Mapping[str, Any] = self.job.get("progress") or {}
        step, total = progress.get("step"), progress.get("num_steps")
        if step is None:
            return ""
        text = f"step {step}" + (f" of {total}" if total else "")
        epoch = progress.get("epoch")
        text += "" if epoch is None else f", epoch {epoch}"
        left = progress.get("eta_s")
        text += "" if left is None or self.job["state"] != "running" else f", {left:.0f} s left"
        share = f' value="{min(1.0, step / total):.4f}"' if total else ""
        bar = f'<progress max="1"{share} style="width:100%"></progress>' if total else ""
        return f"<div>{bar}<br>{escape(text)}</div>"

    def _figures(self) -> str:
        summary: Mapping[str, Any] = self.job.get("summary") or {}
        parts = [
            f"{escape(name)} {escape(_figure(figures.get('last')))}"
            for name, figures in list(summary.items())[:6]
        ]
        devices = [f"{one['worker']}/{one['id']}" for one in self.job.get("devices") or ()]
        parts += [escape(f"on {', '.join(devices)}")] if devices else []
        return f"<div>{' · '.join(parts)}</div>" if parts else ""

    def _error(self) -> str:
        error: Mapping[str, Any] = self.job.get("error") or {}
        lines = [str(error[key]) for key in ("message", "hint") if error.get(key)]
        return f"<div>{'<br>'.join(map(escape, lines))}</div>" if lines else ""


def sparkline(points: Sequence[tuple[int, float]]) -> str:
    """A sparkline as SVG, with gaps and crosses at NaN and Inf."""
    kept = _thinned(points)
    finite = [value for _, value in kept if math.isfinite(value)]
    if len(kept) < 2 or not finite:
        return ""
    first, last = kept[0][0], kept[-1][0]
    low, high = min(finite), max(finite)
    lines: list[list[str]] = [[]]
    crosses: list[str] = []
    for step, value in kept:
        x = (step - first) / max(1, last - first) * (WIDTH - 8) + 4
        if math.isfinite(value):
            y = HEIGHT - 4 - (value - low) / ((high - low) or 1.0) * (HEIGHT - 8)
            lines[-1].append(f"{x:.1f},{y:.1f}")
        else:
            lines.append([])
            crosses.append(f"M{x - 3:.1f} 1l6 6m0-6l-6 6")
    drawn = [
        f'<polyline points="{" ".join(line)}" fill="none" stroke="#1a73e8" stroke-width="1.5"/>'
        for line in lines
        if line
    ]
    if crosses:
        drawn.append(f'<path d="{"".join(crosses)}" stroke="#b3261e" stroke-width="1.5"/>')
    label = f"loss from {_figure(finite[0])} to {_figure(finite[-1])}, min {_figure(low)}"
    label += f", {len(crosses)} NaN or Inf values" if crosses else ""
    size = f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}" width="{WIDTH:g}" height="{HEIGHT:g}"'
    return f'<svg {size} role="img" aria-label="{escape(label, quote=True)}">{"".join(drawn)}</svg>'


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    every = max(1, math.ceil(len(points) / MOST_POINTS))
    bad = {place for place, (_, value) in enumerate(points) if not math.isfinite(value)}
    shown = {*range(0, len(points), every), *sorted(bad)[:MOST_POINTS], len(points) - 1}
    return [points[place] for place in sorted(shown) if place >= 0]


def _figure(value: Any) -> str:
    number = jsonio.number(value)
    return f"{number:.4g}" if isinstance(number, (int, float)) else "-"
