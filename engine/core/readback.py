"""Read numbers back from the device without blocking training.

On the CPU a number is available immediately. On an accelerator it is copied to pinned memory,
queued behind the operations that compute it. Callbacks run in order, at the first step boundary
after the copy. Numbers from other processes wait in the same queue.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.core import device_groups

Then = Callable[[list[float]], None]
ThenTensor = Callable[[Tensor], None]
_MAX_WAITING = 1024


class Event(Protocol):
    """What a callback waits for, for example a ``torch.Event``."""

    def query(self) -> bool:
        """Whether it has happened."""
        ...

    def synchronize(self) -> None:
        """Wait until it has happened."""
        ...


class Readback:
    """Passes values of tensors to callbacks, in the order of the requests."""

    def __init__(self, device: torch.device, *, is_home: bool = False) -> None:
        """``is_home``: numbers may also come from other devices, and are copied to this one."""
        self.device = device
        self._is_home = is_home
        self._on_cpu = device.type == "cpu"
        self._waiting: deque[tuple[Event, Callable[[], None]]] = deque()

    def put(self, numbers: Sequence[Tensor], then: Then) -> None:
        """Request the values of zero- or one-dimensional tensors, joined, as float64."""
        if self._on_cpu:
            then([value for item in numbers for value in item.reshape(-1).tolist()])
            return
        self.put_many(numbers, lambda landed: then(landed.tolist()))

    def put_many(self, numbers: Sequence[Tensor], then: ThenTensor) -> None:
        """Request many values: the callback gets them as one float64 vector in CPU memory."""
        vectors = [item.detach().reshape(-1).to(torch.float64) for item in numbers]
        joined = device_groups.joined(self.device, vectors) if self._is_home else torch.cat(vectors)
        if self._on_cpu:
            then(joined)
            return
        landed = torch.empty(joined.shape, dtype=torch.float64, pin_memory=True)
        landed.copy_(joined, non_blocking=True)
        event = torch.accelerator.current_stream(self.device).record_event()
        self.put_event(event, lambda: then(landed))

    def put_event(self, event: Event, then: Callable[[], None]) -> None:
        """Request a call once ``event`` has happened."""
        self._waiting.append((event, then))
        if len(self._waiting) > _MAX_WAITING:
            self._hand_on(self._waiting.popleft())

    def poll(self) -> None:
        """Run the callbacks whose values have arrived."""
        while self._waiting and self._waiting[0][0].query():
            self._hand_on(self._waiting.popleft())

    def drain(self) -> None:
        """Wait for all values and run their callbacks."""
        while self._waiting:
            self._hand_on(self._waiting.popleft())

    def _hand_on(self, entry: tuple[Event, Callable[[], None]]) -> None:
        event, then = entry
        event.synchronize()
        then()
