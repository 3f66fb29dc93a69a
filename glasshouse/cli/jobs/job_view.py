"""The state of a watched job, and its rendering in a terminal of any width."""

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from glasshouse import jsonio
from glasshouse.cli.terminal.output import figure
from glasshouse.events import is_upkeep

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.-~=+*#"
"""For terminals without the block characters."""
KEPT_LOSSES = 4000
KEPT_TREND = 400
WIDEST_NAME, WIDEST_TREND, LEAST_TREND = 30, 40, 6
_FIGURES = {"mean": 9, "std": 9, "act. grad": 9, "weight grad": 11, "NaN/Inf": 7}
"""Columns of a layer's row, and their maximum widths."""
_STYLES = {
    "succeeded": "green",
    "failed": "red",
    **dict.fromkeys(("pausing", "paused", "cancelling", "cancelled"), "yellow"),
}


@dataclass
class Watched:
    """The newest statistics of one layer."""

    mean: float | None = None
    std: float | None = None
    grad_norm: float | None = None
    """Norm of the gradient of its output, the activation."""
    param_norms: dict[str, float] = field(default_factory=dict[str, float])
    bad: dict[str, int] = field(default_factory=dict[str, int])
    trend: deque[float] = field(default_factory=lambda: deque[float](maxlen=KEPT_TREND))
    """Standard deviation of its output over the steps."""
    step: int = -1

    @property
    def param_norm(self) -> float | None:
        """Norm of the gradients of all its watched parameters together."""
        return math.hypot(*self.param_norms.values()) if self.param_norms else None

    @property
    def num_bad(self) -> int:
        """The number of NaN and Inf among the newest values."""
        return sum(self.bad.values())

    def see(self, tensor: str, kind: str, figures: dict[str, Any]) -> None:
        """Take one row of a ``stats`` event."""
        self.bad[f"{tensor}/{kind}"] = int(figures["nan"] + figures["inf"])
        if kind == "output":
            self.mean, self.std = figures["mean"], figures["std"]
            self.trend.append(figures["std"])
        elif kind == "output_grad":
            self.grad_norm = figures["l2"]
        elif kind == "param_grad":
            self.param_norms[tensor] = figures["l2"]


_GRADIENTS: dict[str, Callable[[Watched], float | None]] = {
    "act. grad": lambda layer: layer.grad_norm,
    "weight grad": lambda layer: layer.param_norm,
}
"""Columns that are shown only if a probe watches these gradients."""


class JobView:
    """Receives a job's events and renders them. It can be rendered from another thread."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        self.job = job
        self.state: str = job["state"]
        self.step: int | None = None
        self.epoch = 0
        self.values: dict[str, float] = {}
        self.losses: deque[tuple[int, float]] = deque(maxlen=KEPT_LOSSES)
        """Steps and losses."""
        self.layers: dict[str, Watched] = {}
        self.notes: deque[str] = deque(maxlen=3)
        self.alerts: dict[str, int] = {}
        """The metrics and tensors with NaN or Inf, and the first such step."""
        self.findings: deque[str] = deque(maxlen=2)

    def refresh(self, job: dict[str, Any]) -> None:
        """Store the job's newest document, for its progress."""
        with self._lock:
            self.job = job

    def see(self, event: dict[str, Any]) -> list[str]:
        """Process one event as the service sent it; return the lines to print."""
        with self._lock:
            known = len(self.alerts)
            if event["type"] == "metrics":
                self._see_metrics(event)
            elif event["type"] == "stats":
                self._see_stats(event)
            elif event["type"] == "state":
                self.state = event["to"]
            elif event["type"] == "end":
                self.state = event["state"]
            elif event["type"] == "attempt":
                return self._see_attempt(event)
            elif (note := _note_of(event)) is not None:
                (self.findings if event["type"] == "finding" else self.notes).append(note)
                return [note]
            new = list(self.alerts.items())[known:]
            return [f"NaN or Inf from step {step} on: {name}" for name, step in new]

    def _see_attempt(self, event: dict[str, Any]) -> list[str]:
        """Drop the values of steps that the new attempt repeats."""
        first = event["resumed_from_step"]
        if first is None:
            return []
        self.step = None if first == 0 or self.step is None else min(self.step, first - 1)
        self.losses = deque((pair for pair in self.losses if pair[0] < first), KEPT_LOSSES)
        self.layers = {name: one for name, one in self.layers.items() if one.step < first}
        self.alerts = {name: step for name, step in self.alerts.items() if step < first}
        if self.losses:
            self.values["loss"] = self.losses[-1][1]
        else:
            self.values.clear()
        self.notes.append(f"attempt {event['n']} resumed from step {first}")
        return [self.notes[-1]]

    def _see_metrics(self, event: dict[str, Any]) -> None:
        self.step, self.epoch = event["step"], event["epoch"]
        values = {name: jsonio.number(value) for name, value in event["values"].items()}
        self.values |= {name: value for name, value in values.items() if not is_upkeep(name)}
        if "loss" in values:
            self.losses.append((event["step"], values["loss"]))
        for name, value in values.items():
            if not math.isfinite(value):
                self.alerts.setdefault(name, event["step"])

    def _see_stats(self, event: dict[str, Any]) -> None:
        for row in event["rows"]:
            figures = dict(zip(event["columns"], row, strict=True))
            tensor, kind = figures.pop("layer"), figures.pop("kind")
            is_parameter = kind in ("param", "param_grad", "update", "optim_state")
            layer = tensor.partition(".")[0] if is_parameter else tensor
            numbers = {name: jsonio.number(value) for name, value in figures.items()}
            watched = self.layers.setdefault(layer or tensor, Watched())
            watched.step = event["step"]
            watched.see(tensor, kind, numbers)
            if watched.bad[f"{tensor}/{kind}"]:
                self.alerts.setdefault(f"{tensor} {kind}", event["step"])

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Generator[RenderableType]:
        """The view, for terminals of 60 columns and more. It is not higher than the terminal."""
        bars = PLAIN_BARS if options.ascii_only else BARS
        with self._lock:
            above = [self._head(), self._bar(), *self._figures(bars), *self._alarm()]
            notes = [*self._watching(), *self.notes]
            below = [Text(note, style="dim", no_wrap=True, overflow="ellipsis") for note in notes]
            taken = len(above) + len(below) + sum(len(text) > options.max_width for text in notes)
            room = console.height - taken - 3 if console.is_terminal else None
            layers = self._layers(options.max_width, bars, room) if self.layers else []
            yield from [*above, *layers, *below]

    def line(self) -> str:
        """The newest figures in one line, for a pipe."""
        with self._lock:
            shown = [self._step()]
            shown += [f"{name} {figure(value)}" for name, value in self.values.items()]
            bad = sum(layer.num_bad for layer in self.layers.values())
            shown += [f"NaN/Inf {bad}"] if bad else []
            return "  ".join(shown + self._watching())

    def _step(self) -> str:
        """The newest step, counted from 0 as everywhere, and how many there will be."""
        step = "-" if self.step is None else self.step
        return f"step {step}" + (f" ({self._total} in all)" if self._total else "")

    @property
    def _total(self) -> int | None:
        return self._progress.get("num_steps")

    @property
    def _progress(self) -> dict[str, Any]:
        return self.job.get("progress") or {}

    def _head(self) -> Text:
        style = _STYLES.get(self.state, "cyan")
        text = Text(f"{self.job['id']}  ", no_wrap=True, overflow="ellipsis")
        text.append(self.state, style=f"bold {style}")
        return text.append(f"  {self.job.get('name') or ''}")

    def _bar(self) -> RenderableType:
        progress = self._progress
        done = 0 if self.step is None else self.step + 1
        text = f" {self._step()}  epoch {self.epoch}"
        if self.state == "running" and progress.get("eta_s") is not None:
            text += f"  ETA {_duration(jsonio.number(progress['eta_s']))}"
        if progress.get("samples_per_s") is not None:
            text += f"  {jsonio.number(progress['samples_per_s']):.0f}/s"
        grid = Table.grid(expand=False)
        grid.add_row(ProgressBar(total=self._total, completed=done, width=28), Text(text))
        return grid

    def _figures(self, bars: str) -> list[Text]:
        """The values of training, and below them those of evaluations."""
        first = Text(no_wrap=True, overflow="ellipsis")
        if "loss" in self.values:
            first.append(f"loss {figure(self.values['loss'])} ")
            first.append(sparkline([loss for _, loss in self.losses], 28, bars), style="cyan")
        of_training = {name: value for name, value in self.values.items() if "/" not in name}
        rest = [f"{name} {figure(value)}" for name, value in of_training.items() if name != "loss"]
        first.append("".join(f"  {text}" for text in rest))
        judged = [f"{name} {figure(value)}" for name, value in self.values.items() if "/" in name]
        second = Text("  ".join(judged), style="bold", no_wrap=True, overflow="ellipsis")
        return [first, second] if judged else [first]

    def _alarm(self) -> list[Text]:
        """The tensors and metrics with NaN or Inf, the earliest first, and the findings."""
        if not self.alerts:
            return [Text(text, style="bold") for text in self.findings]
        first = min(self.alerts.values())
        names = list(self.alerts)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        text = f"! NaN or Inf since step {first}: {', '.join(names[:3])}{more}"
        alarm = Text(text, style="bold red", no_wrap=True, overflow="ellipsis")
        return [alarm, *(Text(text, style="bold") for text in self.findings)]

    def _watching(self) -> list[str]:
        """The overhead of watching, if it is known."""
        overhead = self.job.get("probe_overhead")
        if overhead is None or overhead["fraction"] is None:
            return []
        return [f"watching {jsonio.number(overhead['fraction']):.1%}"]

    def _layers(self, width: int, bars: str, room: int | None) -> list[RenderableType]:
        """As many layers as fit. If not all do, those with NaN or Inf come first."""
        if room is None or len(self.layers) <= room:
            return [self.table(width, bars)]
        shown = sorted(self.layers, key=lambda name: not self.layers[name].num_bad)[: max(room, 1)]
        kept = {name: one for name, one in self.layers.items() if name in shown}
        more = f"… and {len(self.layers) - len(kept)} more layers: glasshouse open"
        return [self.table(width, bars, kept), Text(more, style="dim")]

    def table(
        self,
        width: int | None = None,
        bars: str = BARS,
        layers: Mapping[str, Watched] | None = None,
    ) -> Table:
        """The newest statistics of each watched layer; in a terminal also the trend of its std."""
        rows = self.layers if layers is None else layers
        table = Table(box=None, pad_edge=False, header_style="bold")
        widest = None if width is None else WIDEST_NAME
        table.add_column("layer", no_wrap=True, max_width=widest, overflow="ellipsis")
        gradients = [
            name
            for name, of in _GRADIENTS.items()
            if any(of(row) is not None for row in rows.values())
        ]
        wide = {name: size for name, size in _FIGURES.items() if name not in _GRADIENTS}
        wide |= {name: _FIGURES[name] for name in gradients}
        for name in sorted(wide, key=list(_FIGURES).index):
            table.add_column(name, justify="right", no_wrap=True)
        longest = min(max(map(len, rows)), WIDEST_NAME)
        left = (width or 0) - longest - sum(2 + size for size in wide.values()) - 2
        has_trend = left >= LEAST_TREND and any(len(layer.trend) > 1 for layer in rows.values())
        if has_trend:
            table.add_column("std so far", no_wrap=True, style="cyan", overflow="crop")
        for name, layer in rows.items():
            figures = (layer.mean, layer.std, *(_GRADIENTS[name](layer) for name in gradients))
            marked = Text(str(layer.num_bad), style="bold red") if layer.num_bad else Text("")
            cells = [Text(name), *(Text(_figure(value)) for value in figures), marked]
            if has_trend:
                cells.append(Text(sparkline(list(layer.trend), min(left, WIDEST_TREND), bars)))
            table.add_row(*cells)
        return table


def _note_of(event: dict[str, Any]) -> str | None:
    """The line to print for an event, or None."""
    note = _NOTES.get(event["type"])
    return None if note is None else note(event)


def _serving_line(event: dict[str, Any]) -> str:
    """What a serve job serves from now on, in one line."""
    if event.get("problem"):
        return f"another version cannot be loaded: {event['problem']}"
    return "serving " + ", ".join(f"{one['model']}:{one['version']}" for one in event["models"])


def _command_line(event: dict[str, Any]) -> str:
    """A command in one line."""
    if event["state"] == "rejected":
        settings: list[str] = list(event.get("set") or [event["do"]])
        why: dict[str, Any] = event["problem"] or {}
        return f"rejected at step {event['step']}: {', '.join(settings)}: {why.get('detail')}"
    if event.get("do"):
        return f"{event['do']} requested before step {event['step']}"
    old: dict[str, Any] = event["old"] or {}
    new: dict[str, Any] = event["new"] or {}
    changes = (f"{name} {old.get(name)} → {value}" for name, value in new.items())
    return f"from step {event['step']}: {', '.join(changes)}"


_NOTES: dict[str, Callable[[dict[str, Any]], str]] = {
    "checkpoint": lambda event: f"checkpoint after {event['step']} steps",
    "dropped": lambda event: f"dropped {event['count']} {event['what']}",
    "finding": lambda event: str(event["message"]),
    "adjusted": lambda event: f"{event['what']} changed from {event['from']} to {event['to']}",
    "command": _command_line,
    "serving": _serving_line,
}
"""The lines of events that have one."""


def sparkline(values: list[float], width: int, bars: str = BARS) -> str:
    """The trend of values in one line of characters; ``!`` marks NaN or Inf."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * place // count for place in range(count + 1)]
    buckets = [values[a:b] for a, b in pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    return "".join(_bar_of(bucket, low, high, bars) for bucket in buckets)


def _bar_of(bucket: list[float], low: float, high: float, bars: str) -> str:
    if not all(math.isfinite(value) for value in bucket):
        return "!"
    share = (sum(bucket) / len(bucket) - low) / (high - low) if high > low else 0.0
    return bars[min(int(share * len(bars)), len(bars) - 1)]


def _figure(value: float | None) -> str:
    return figure(value if value is None else float(f"{value:.3g}"))


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
