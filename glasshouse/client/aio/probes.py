"""What is watched of a running job, and how to change it."""

from typing import Any, Literal, Self

from glasshouse.client.aio.records import AsyncRecord


class AsyncProbe(AsyncRecord):
    """A probe of a job, as it was when it was last read; `refresh` reads it anew."""

    job: str
    layers: list[str]
    kinds: list[str]
    every: int | None
    at: list[int] | None
    on: Literal["nonfinite"] | None
    phase: str
    max_overhead: float | None
    start: int
    stop: int | None
    point: str
    want: list[str]
    slice: str | None
    max_bytes: int | None
    lossless: bool
    bytes_per_step: int
    """What it keeps of a step on which it looks."""
    estimated_cost_s: float | None
    """Before it is measured."""
    applied_step: int | None
    """The first step for which its last change holds."""
    position: int
    problem: dict[str, Any] | None
    created_at: str
    links: dict[str, str]

    @property
    def path(self) -> str:
        """Where it lives, under ``/api/v1``."""
        return f"/jobs/{self.data['job']}/probes/{self.id}"

    @property
    def state(self) -> str:
        """``pending`` until taken up, then ``active``; ``removed``, ``rejected``, ``failed``."""
        return self.data["state"]

    @property
    def matched(self) -> list[str]:
        """The layers, leaves and parameters that it looks at."""
        return self.data["matched"]

    @property
    def cost_s(self) -> float | None:
        """Seconds that a due step takes, as the job has measured it; None before."""
        return self.data["cost_s"]

    @property
    def every_now(self) -> int | None:
        """The interval in force; wider than ``every`` where watching took more than it may."""
        return self.data["every_now"]

    async def refresh(self) -> Self:
        """Read it anew."""
        await self._fetch()
        return self

    async def wait(self, timeout: float | None = 30.0) -> "AsyncProbe":
        """Wait until the job has taken up its last change; ``applied_step`` says from which step.

        Raises:
            WaitTimeout: no step has begun in time.
        """
        async for _ in self._changes(timeout, "take effect"):
            if self.data["applied_step"] is not None or self.state == "rejected":
                break
        return self

    async def update(self, **fields: Any) -> "AsyncProbe":
        """Change ``every``, ``at``, ``max_overhead``, ``want``, or any other of its fields."""
        self.data = await self._transport.patch(self.path, fields)
        return self

    async def remove(self) -> "AsyncProbe":
        """Stop looking, from the next step boundary on. What it has seen stays."""
        self.data = await self._transport.delete(self.path)
        return self
