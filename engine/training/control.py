"""Requests to a running job; with several processes, what process 0 decides for all of them.

The processes of a job add up the losses and counts of each step. The same message says whether
process 0 has news: commands, another list of probes, a number of threads, a stop, intervals of
probes. Only then is a second message sent. So all processes do the same thing at the same boundary,
and none looks at its own clock. The message travels during the backward pass.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.core.snapshot import Stateful
from engine.core.timing import Clock
from engine.data.columns.prepared import Prepared
from engine.distributed.group import Group
from engine.probes.watched.requested import RequestedProbes


class RunControl(Protocol):
    """Requests to a running job."""

    @property
    def cancel_requested(self) -> bool:
        """Whether the job should end at the next step boundary."""
        ...

    @property
    def ends_as(self) -> str:
        """The final state then: ``cancelled``; or, to resume later, ``paused``, ``interrupted``."""
        ...

    @property
    def wanted(self) -> RequestedProbes | None:
        """The probes from the next step on; None: those of the spec."""
        ...

    @property
    def threads(self) -> int | None:
        """The torch threads of each process from the next step on; None: as many as now."""
        ...

    @property
    def models(self) -> Sequence[Mapping[str, Any]] | None:
        """Of a serve job: the versions to serve from now on; None: those that it started with."""
        ...

    @property
    def listen(self) -> Mapping[str, Any] | None:
        """Of a training job: where to listen for requests for predictions; None: nobody asked."""
        ...

    @property
    def orders(self) -> deque[dict[str, Any]]:
        """Commands in the order of their requests; see ``engine.training.commands``."""
        ...


class Predictions(Protocol):
    """What answers requests for predictions between two steps."""

    def use(self, weights: Stateful, prepared: Prepared | None, clock: Clock) -> None:
        """Set where the weights are, and what training learned from its rows."""
        ...

    def turn(self, asked: Mapping[str, Any], step: int, *, is_last: bool = False) -> None:
        """Answer requests. ``asked``: `RunControl.listen`; ``step``: the updates so far."""
        ...


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message on its way."""

    sums: Sequence[Callable[[], Tensor]]
    """Each waits for a sum and returns it: the flags, then the numbers; or both as one."""
    num_flags: int
    dtypes: Sequence[torch.dtype]
    news: Mapping[str, Any]


class Decisions:
    """The requests to a job as process 0 has shared them: the same in all processes."""

    def __init__(self, control: RunControl, group: Group) -> None:
        """``control``: the requests to this process; only those to process 0 count."""
        self._control = control
        self._group = group
        self.cancel_requested = False
        self.ends_as = "cancelled"
        self.wanted: RequestedProbes | None = None
        self.threads: int | None = None
        self.models: Sequence[Mapping[str, Any]] | None = None
        self.orders: deque[dict[str, Any]] = deque()
        self._sent: _Sent | None = None
        self.elapsed_s = 0.0
        """The training time by the clock of process 0, seconds, as of the newest step."""

    @property
    def listen(self) -> Mapping[str, Any] | None:
        """Where to listen; not shared, because process 0 alone answers."""
        return self._control.listen

    def send(
        self,
        numbers: Sequence[Tensor],
        counts: Sequence[float],
        elapsed_s: float,
        more: Mapping[str, Any],
    ) -> None:
        """Start to sum scalars over the processes, and to share what process 0 has decided.

        ``numbers`` are on the device, ``counts`` on the host. ``more``: further news of process 0.
        """
        news = self._news(more) if self._group.is_first else {}
        own = [float(bool(news)), elapsed_s] if self._group.is_first else [0.0, 0.0]
        flags = torch.tensor([*own, *counts], dtype=torch.float64)
        joined = torch.stack([item.to(torch.float64) for item in numbers])
        # On the CPU one message; otherwise the host must not wait for the device.
        parts = [torch.cat([flags, joined])] if joined.is_cpu else [flags, joined]
        sums = [self._group.start_sum(part) for part in parts]
        self._sent = _Sent(sums, len(flags), [item.dtype for item in numbers], news)

    def receive(self) -> tuple[list[Tensor], list[float], Mapping[str, Any]]:
        """Return both sums of what was sent, and process 0's further news in every process."""
        sent = self._sent
        if sent is None:
            raise RuntimeError("nothing was sent")
        self._sent = None
        both = [wait() for wait in sent.sums]
        flags, joined = both[0].tensor_split([sent.num_flags]) if len(both) == 1 else both
        has_news, self.elapsed_s, *counted = flags.tolist()
        more = self._take(self._group.broadcast(sent.news)) if has_news else {}
        sums = zip(joined.unbind(), sent.dtypes, strict=True)
        return [item.to(dtype) for item, dtype in sums], counted, more

    def _news(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return what has changed in process 0 since the last call."""
        control, news = self._control, dict[str, Any]()
        if control.cancel_requested and (
            not self.cancel_requested or control.ends_as != self.ends_as
        ):
            news["ends_as"] = control.ends_as
        wanted = control.wanted
        if wanted is not None and (self.wanted is None or wanted.revision != self.wanted.revision):
            news["probes"] = wanted.document
        if control.threads != self.threads:
            news["threads"] = control.threads
        orders: list[dict[str, Any]] = []
        while control.orders:  # the lifeline appends meanwhile
            orders.append(control.orders.popleft())
        if orders:
            news["orders"] = orders
        if more:
            news["more"] = dict(more)
        return news

    def _take(self, news: Mapping[str, Any]) -> Mapping[str, Any]:
        if "ends_as" in news:
            self.ends_as, self.cancel_requested = str(news["ends_as"]), True
        if "probes" in news:
            self.wanted = RequestedProbes.read(news["probes"])
        self.threads = news.get("threads", self.threads)
        self.orders.extend(news.get("orders", ()))
        return news.get("more", {})
