"""Watch served rows: which batches, within a budget of time, and what their windows show.

Answers are sent before anything of their rows is counted. What a batch adds to its own computation
is that the outputs of some layers are kept; they are the same numbers with and without that.
"""

import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.core.spool import now
from engine.core.tensor_names import root
from engine.network.network import needed_layers
from engine.serving.asked import Asked
from engine.serving.drift.findings import finding
from engine.serving.drift.histograms import Counts, critical_psi, psi
from engine.serving.drift.reference import Reference, Sampler, TrainingRows, Unavailable
from engine.serving.drift.series import (
    FieldSeries,
    Series,
    Values,
    is_category,
    layer_values,
    watched_layers,
)
from engine.serving.served_models import ServedNetwork, ServedVersion, joined
from engine.training.report import Outputs
from glasshouse.errors import RunFailure
from glasshouse.spec import Drift

_BLOCK_ROWS = 256
"""Rows are counted together, because counting single rows takes longer than computing them."""
_BLOCK_BYTES = 16 << 20
_KEEP_BYTES = 1 << 16
"""Larger outputs are reduced to a value for each row after the answers, before they are counted."""
_HOLD_BYTES = 16 << 20
"""What is beyond that in one batch is reduced while the batch is computed."""
_MAX_CREDIT_S = 0.05
"""How much of the budget can be saved for later."""
_START_S = 0.25
"""References wait so long after the start, so that the first requests are answered first."""
_BUSY_S = 0.05
_DUTY = 9.0
"""While requests come, the thread that makes references sleeps for its time of work multiplied by
this."""
_STOP_S = 1.0


class _Stopped(Exception):
    """The replica ends."""


@dataclass
class _Count:
    """A series of the window so far."""

    counts: Counts
    num_finite: int = 0
    total: float = 0.0


class Sample:
    """Keeps the outputs of watched layers of one batch, while that is computed."""

    def __init__(self, version: "VersionWatch", layers: tuple[str, ...]) -> None:
        self.layers = layers
        """The outputs to compute besides those that are requested. None of them needs another
        layer."""
        self.cost_s = 0.0
        self._version = version
        self._held: list[tuple[str, Tensor, Tensor | None]] = []
        """Outputs to be reduced, with the lengths of their rows."""
        self._held_bytes = 0
        self._kept: list[tuple[str, Tensor]] = []
        self._done: list[Values] = []

    def take(self, values: Mapping[str, Tensor], lengths: Mapping[str, Tensor]) -> None:
        """Take the outputs of a part of the batch."""
        began = time.perf_counter()
        for name in self.layers:
            x, steps = values[name], self._version.steps.get(name)
            if steps is None and x.nbytes <= _KEEP_BYTES:
                self._kept.append((name, x))
                continue
            lengths_B = None if steps is None else lengths[steps]
            if self._held_bytes + x.nbytes > _HOLD_BYTES:
                self._reduce(name, x, lengths_B)
            else:
                self._held.append((name, x, lengths_B))
                self._held_bytes += x.nbytes
        self.cost_s += time.perf_counter() - began

    def settle(self) -> None:
        """Reduce what is held to a value for each row."""
        for held in self._held:
            self._reduce(*held)
        self._held.clear()

    def _reduce(self, name: str, x: Tensor, lengths_B: Tensor | None) -> None:
        is_scores = name in self._version.scores
        self._done.append(layer_values(name, x, lengths_B, is_scores=is_scores))

    @property
    def nbytes(self) -> int:
        """The memory that it keeps."""
        return sum(x.nbytes for _, x in self._kept)

    @staticmethod
    def values(samples: Sequence["Sample"]) -> Values:
        """Return the values of several batches, by series; in no particular order."""
        kept: dict[str, list[Tensor]] = {}
        parts: dict[Series, list[Any]] = {}
        for sample in samples:
            for name, x in sample._kept:
                kept.setdefault(name, []).append(x)
            for done in sample._done:
                for key, item in done.items():
                    parts.setdefault(key, []).append(item)
        for name, several in kept.items():
            is_scores = name in samples[0]._version.scores
            whole = several[0] if len(several) == 1 else torch.cat(several)
            for key, item in layer_values(name, whole, None, is_scores=is_scores).items():
                parts.setdefault(key, []).append(item)
        return {key: np.concatenate(items) for key, items in parts.items()}


class VersionWatch:
    """Compares the rows that one version is served with."""

    def __init__(self, version: ServedVersion, drift: Drift) -> None:
        inputs = version.inputs
        self.version = version
        self.layers = watched_layers(inputs, version.network, drift.layers)
        self.steps = {name: inputs.steps[name] for name in self.layers if name in inputs.steps}
        self.scores = {name for name in self.layers if name in inputs.classes}
        self.reference: Reference | None = None
        """None: it is not made yet."""
        self.problem: str | None = None
        """Why there is none."""
        self.num_rows = 0
        """Rows of the last complete window."""
        self.at: str | None = None
        self.results: list[dict[str, Any]] = []
        self._drift = drift
        self._fields = FieldSeries(inputs)
        self._covered: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._waiting: list[tuple[list[Asked], Sample]] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._counted_rows = 0
        self._counts: dict[Series, _Count] = {}
        self._drifted: set[Series] = set()

    def layers_of(self, outputs: tuple[str, ...]) -> tuple[str, ...]:
        """Return the watched layers that are computed for some outputs anyway."""
        found = self._covered.get(outputs)
        if found is None:
            graph = self.version.inputs.trained_by.network
            names = {layer.name for layer in needed_layers(graph, outputs)}
            found = tuple(name for name in self.layers if root(name) in names)
            if len(self._covered) >= 100:  # clients choose the outputs
                self._covered.clear()
            self._covered[outputs] = found
        return found

    def add(self, asked: Sequence[Asked], sample: Sample) -> bool:
        """Add a batch; return whether a block of rows is there to be counted."""
        sample.settle()
        self._waiting.append(([*asked], sample))
        self._waiting_rows += sum(one.num_rows for one in asked)
        self._waiting_bytes += sample.nbytes
        self._waiting_bytes += sum(item.nbytes for one in asked for item in one.rows.values())
        left = self._drift.window - self._counted_rows
        is_many = self._waiting_rows >= min(_BLOCK_ROWS, left)
        return is_many or self._waiting_bytes >= _BLOCK_BYTES

    def count(self) -> list[dict[str, Any]] | None:
        """Count the rows that wait.

        Return the findings of the window if it is complete; else None.
        """
        assert self.reference is not None  # noqa: S101 (nothing is watched before)
        waiting, self._waiting = self._waiting, []
        self._counted_rows += self._waiting_rows
        self._waiting_rows = self._waiting_bytes = 0
        by_fields: dict[tuple[str, ...], list[Asked]] = {}
        for asked, _ in waiting:
            for one in asked:
                by_fields.setdefault(tuple(one.rows), []).append(one)
        for several in by_fields.values():
            whole = several[0] if len(several) == 1 else joined(several)
            self._count(self._fields.values(whole.rows))
        self._count(Sample.values([sample for _, sample in waiting]))
        return self._compared() if self._counted_rows >= self._drift.window else None

    def _count(self, values: Values) -> None:
        assert self.reference is not None  # noqa: S101 (nothing is watched before)
        for key, item_N in values.items():
            if (known := self.reference.series.get(key)) is None:
                continue
            counts_B = known.bins.counts(item_N)
            entry = self._counts.get(key)
            if entry is None:
                entry = self._counts[key] = _Count(np.zeros_like(counts_B))
            entry.counts += counts_B
            if not is_category(key):
                finite = item_N[np.isfinite(item_N)]
                entry.num_finite += len(finite)
                entry.total += float(finite.sum())

    def _compared(self) -> list[dict[str, Any]]:
        """Compare the window with the reference, and begin the next one.

        A series that only some requests have is compared once it has a whole window.
        """
        assert self.reference is not None  # noqa: S101 (nothing is watched before)
        name = self.version.name
        known = {self._key(entry): entry for entry in self.results}
        findings: list[dict[str, Any]] = []
        for key in [*self._counts]:
            counted, reference = self._counts[key], self.reference.series[key]
            if counted.counts.sum() < self._drift.window:
                continue
            del self._counts[key]
            found = psi(reference.counts, counted.counts)
            critical = critical_psi(reference.counts, counted.counts, len(self.reference.series))
            threshold = max(self._drift.min_psi, critical)
            is_drifted = found > threshold
            known[key] = {
                "of": key.of,
                "name": key.name,
                "measure": key.measure,
                "psi": round(found, 6),
                "threshold": round(threshold, 6),
                "drifted": is_drifted,
            }
            if is_drifted and key not in self._drifted:
                mean = counted.total / counted.num_finite if counted.num_finite else None
                findings.append(
                    finding(
                        self.version.inputs,
                        (name.model, name.version),
                        key,
                        reference,
                        counted.counts,
                        mean=mean,
                        psi=round(found, 6),
                        threshold=round(threshold, 6),
                    )
                )
            (self._drifted.add if is_drifted else self._drifted.discard)(key)
        self.results = [known[key] for key in self.reference.series if key in known]
        self.num_rows, self._counted_rows = self._counted_rows, 0
        self.at = now()
        return findings

    @staticmethod
    def _key(entry: Mapping[str, Any]) -> Series:
        return Series(entry["of"], entry["name"], entry["measure"])

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of ``serving.drift``."""
        detail = self.problem
        if detail is None and self.reference is None:
            detail = "The histograms of the training rows are being computed."
        state = "watching" if self.at else "collecting"
        return {
            "model": self.version.name.model,
            "version": self.version.name.version,
            "state": state if self.problem is None else "unavailable",
            "detail": detail,
            "rows": self.num_rows,
            "at": self.at,
            "series": self.results,
        }


class Budget:
    """The time that watching may take.

    Half of ``max_overhead`` is for what delays answers, relative to the time in which the network
    computes. The other half is for what comes after the answers, relative to all time: a replica
    that waits for requests has time to count them.
    """

    def __init__(self, max_overhead: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.computed_s = self.delay_s = self.counting_s = 0.0
        """The time of the network, what was added to it, and the time after the answers."""
        self._share, self._clock = max_overhead / 2, clock
        self._delay_credit_s = self._counting_credit_s = 0.0
        self._credited_at = clock()

    def computed(self, seconds: float, delay_s: float = 0.0) -> None:
        """Note the time of a batch, without what watching added to it."""
        self.computed_s += seconds
        self.delay_s += delay_s
        credit_s = min(self._delay_credit_s + self._share * seconds, _MAX_CREDIT_S)
        self._delay_credit_s = credit_s - delay_s

    def counted(self, seconds: float) -> None:
        """Note the time after the answers of a batch."""
        self.counting_s += seconds
        self._counting_credit_s -= seconds

    @property
    def has_credit(self) -> bool:
        """Whether the next batch may be watched."""
        at = self._clock()
        saved_s = self._share * (at - self._credited_at)
        self._credited_at = at
        self._counting_credit_s = min(self._counting_credit_s + saved_s, _MAX_CREDIT_S)
        return self._delay_credit_s >= 0 and self._counting_credit_s >= 0


@dataclass
class DriftWatch:
    """Watches all versions of a replica that answer clients."""

    drift: Drift
    out: Outputs
    device: torch.device
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        self.budget = Budget(self.drift.max_overhead)
        self._versions: dict[int, VersionWatch] = {}
        self._used_at = 0.0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def use(self, versions: Iterable[ServedVersion]) -> None:
        """Watch these versions from now on."""
        known = self._versions
        self._versions = {
            id(version): known.get(id(version)) or VersionWatch(version, self.drift)
            for version in versions
        }
        self._changed.set()
        self._wake.set()

    def start(self) -> None:
        """Begin to make the references, in a thread."""
        self._thread = threading.Thread(target=self._make_all, name="drift", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    # --- batches -----------------------------------------------------------------------------

    def begin(self, version: ServedNetwork, outputs: tuple[str, ...]) -> Sample | None:
        """Return what takes the layers of a batch; None: it is not watched."""
        self._used_at = time.monotonic()
        if not self.budget.has_credit:
            return None
        watch = self._versions.get(id(version))
        if watch is None or watch.reference is None or watch.problem is not None:
            return None
        return Sample(watch, watch.layers_of(outputs))

    def end(
        self, version: ServedNetwork, asked: Sequence[Asked], sample: Sample | None, seconds: float
    ) -> None:
        """Take the rows of a batch that was answered; ``seconds``: its computation took."""
        if sample is None:
            self.budget.computed(seconds)
            return
        self.budget.computed(seconds - sample.cost_s, sample.cost_s)
        began = time.perf_counter()
        watch = self._versions.get(id(version))
        if watch is not None:
            try:
                found = watch.count() if watch.add(asked, sample) else None
            except Exception as error:  # watching must not end the service
                traceback.print_exc()
                watch.problem = f"Watching failed: {type(error).__name__}: {error}"[:500]
                found = []
            if found is not None:
                self._report(found)
        self.budget.counted(time.perf_counter() - began)

    def settle(self) -> None:
        """Report what the thread has changed."""
        if self._changed.is_set():
            self._changed.clear()
            self._report([])

    def _report(self, findings: Sequence[Mapping[str, Any]]) -> None:
        for one in findings:  # before the report, so that who sees that also sees the events
            self.out.emit({"type": "finding", "at": now(), **one})
        listed = [watch.as_dict() for watch in self._versions.values()]
        self.out.emit({"type": "drift", "at": now(), "versions": listed})
        self.out.flush()

    # --- references --------------------------------------------------------------------------

    def _make_all(self) -> None:
        try:
            self._pause(_START_S)
            while True:
                self._wake.clear()
                for watch in [*self._versions.values()]:
                    if watch.reference is None and watch.problem is None:
                        self._make(watch)
                        self._changed.set()
                self._wake.wait()
                self._pause(0.0)
        except _Stopped:
            pass

    def _make(self, watch: VersionWatch) -> None:
        version, name = watch.version, watch.version.name
        sampler = Sampler(
            name.checkpoint,
            version.inputs,
            version.network.with_outputs(watch.layers),
            watch.layers,
            self.device,
            self.drift.reference_rows,
            self.drift.window,
        )
        look = _Yielding(self._pause, lambda: time.monotonic() - self._used_at < _BUSY_S)
        try:
            made = sampler.reference(TrainingRows(name.datasets, name.references), look)
            watch.reference = made
        except Unavailable as error:
            watch.problem = str(error)
        except RunFailure as error:
            watch.problem = f"Its training rows cannot be read: {error}"[:500]
        except OSError as error:
            watch.problem = f"Its training rows cannot be read: {error.strerror}."
        except _Stopped:
            raise
        except Exception as error:  # drift must not end the service
            traceback.print_exc()
            watch.problem = f"The comparison failed: {type(error).__name__}: {error}"[:500]

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped


class _Yielding:
    """Lets requests go first: sleeps after each piece of work while they come."""

    def __init__(self, pause: Callable[[float], None], is_busy: Callable[[], bool]) -> None:
        self._pause, self._is_busy = pause, is_busy
        self._began = time.monotonic()

    def __call__(self, _num_rows: int) -> None:
        worked_s = time.monotonic() - self._began
        self._pause(_DUTY * worked_s if self._is_busy() else 0.0)
        self._began = time.monotonic()
