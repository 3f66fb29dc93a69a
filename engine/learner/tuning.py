"""Settings that change only speed, chosen by a short trial before the first step."""

import time
from collections.abc import Callable, Sequence

import torch

from engine.core.device import synchronize
from engine.core.snapshot import State
from engine.core.spool import Emit, now
from engine.data.batches.batch import Batch
from engine.data.batches.rows import Rows
from engine.learner.side_effects import untouched
from engine.losses.losses import Losses, loss_of
from engine.network.network import Network
from glasshouse.spec import TrainJob

FORMATS = {item: getattr(torch, item) for item in ("contiguous_format", "channels_last")}
_WARM_UP, _ROUNDS, _PASSES = 2, 3, 3
_GAIN = 0.97
"""Another layout is used if it takes less than this fraction of the time."""


class Tuned:
    """The chosen settings of a job; part of its checkpoints, so that a resumed job keeps them."""

    def __init__(self, memory_format: str, network: Network) -> None:
        self._network = network
        self.memory_format = "contiguous_format"
        if memory_format != self.memory_format:
            self.take(memory_format)

    def state(self) -> State:
        """Return the names of the chosen settings."""
        return {"memory_format": self.memory_format}

    def restore(self, state: State) -> None:
        """Restore the chosen settings."""
        self.take(str(state["memory_format"]))

    def take(self, memory_format: str) -> None:
        """Set the memory format of the network."""
        self.memory_format = memory_format
        self._network.lay_out(FORMATS[memory_format])

    def choose(
        self,
        job: TrainJob,
        loss_fn: Losses,
        rows: Rows,
        emit: Emit,
        pass_size: int,
    ) -> None:
        """Time the layouts with the first ``pass_size`` rows; change nothing but the layout."""
        network = self._network
        if all(item.dim() != 4 for item in network.parameters()):
            return
        batch = next(rows.in_order(min(pass_size, rows.num_rows)))
        try:
            devices = network.devices(rows.device)
            with untouched(network, *devices):
                times = self._times(lambda: _pass(network, loss_fn, batch), devices)
        except Exception:  # the first step will fail too, and report where
            self.take("contiguous_format")
            return
        usual = times["contiguous_format"]
        best = min(times, key=lambda item: times[item])
        self.take(best if times[best] < _GAIN * usual else "contiguous_format")
        record = {"type": "adjusted", "at": now(), "what": "memory_format", "by": "tune"}
        emit(record | {"from": "contiguous_format", "to": self.memory_format, "step": 0})

    def _times(self, once: Callable[[], None], devices: Sequence[torch.device]) -> dict[str, float]:
        """Return the shortest seconds of several rounds by layout; the layouts take turns."""
        times = dict.fromkeys(FORMATS, float("inf"))
        for number in range(_WARM_UP + _ROUNDS):
            for name, memory_format in FORMATS.items():
                self._network.lay_out(memory_format)
                began = _clock(devices)
                for _ in range(_PASSES):
                    once()
                if number >= _WARM_UP:
                    times[name] = min(times[name], _clock(devices) - began)
        return times


def _pass(network: Network, loss_fn: Losses, batch: Batch) -> None:
    loss_of(loss_fn, network(batch.tensors)).total.backward()
    for parameter in network.parameters():
        parameter.grad = None


def _clock(devices: Sequence[torch.device]) -> float:
    for device in devices:
        synchronize(device)
    return time.perf_counter()
