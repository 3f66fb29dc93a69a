"""Numbers from the device, without making training wait for them.

On the CPU a number is there at once. On CUDA it is copied to pinned memory behind the work that
makes it and handed on, in order, at the first step boundary at which it has arrived.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Then = Callable[[list[float]], None]
ThenTensor = Callable[[Tensor], None]
_MAX_WAITING = 1024


class Readback:
    """Hands numbers of tensors on in the order in which they were asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cpu = device.type == "cpu"
        self._waiting: deque[tuple[Tensor, torch.cuda.Event, ThenTensor]] = deque()

    def put(self, numbers: Sequence[Tensor], then: Then) -> None:
        """Ask for the values of zero- or one-dimensional tensors, joined, as float64."""
        if self._on_cpu:
            then([value for item in numbers for value in item.reshape(-1).tolist()])
            return
        self.put_many(numbers, lambda landed: then(landed.tolist()))

    def put_many(self, numbers: Sequence[Tensor], then: ThenTensor) -> None:
        """The same for many values: they are handed on as a vector in CPU memory."""
        joined = torch.cat([item.detach().reshape(-1).to(torch.float64) for item in numbers])
        if self._on_cpu:
            then(joined)
            return
        landed = torch.empty(joined.shape, dtype=torch.float64, pin_memory=True)
        landed.copy_(joined, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((landed, event, then))
        if len(self._waiting) > _MAX_WAITING:
            self._hand_on(self._waiting.popleft())

    def poll(self) -> None:
        """Hand on what has arrived."""
        while self._waiting and self._waiting[0][1].query():
            self._hand_on(self._waiting.popleft())

    def drain(self) -> None:
        """Wait for everything and hand it on."""
        while self._waiting:
            self._hand_on(self._waiting.popleft())

    def _hand_on(self, entry: tuple[Tensor, torch.cuda.Event, ThenTensor]) -> None:
        landed, event, then = entry
        event.synchronize()
        then(landed)
