"""The probes of a job."""

from typing import Any, Literal, Self

from glasshouse.client.aio.records import AsyncRecord


class AsyncProbe(AsyncRecord):
    """A probe of a job, as of the last `refresh`."""

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
    ranks: Literal["merged", "all"] | list[int]
    """The processes whose own values it records, beside those of all together."""
    bytes_per_step: int
    """Bytes stored per observed step."""
    estimated_cost_s: float | None
    """The estimated cost per observed step, in seconds, before it is measured."""
    applied_step: int | None
    """The first step that the last change applies to."""
    position: int
    problem: dict[str, Any] | None
    created_at: str
    links: dict[str, str]

    @property
    def path(self) -> str:
        """The path of the probe under ``/api/v1``."""
        return f"/jobs/{self.data['job']}/probes/{self.id}"

    @property
    def state(self) -> str:
        """``pending``, ``active``, ``removed``, ``rejected`` or ``failed``."""
        return self.data["state"]

    @property
    def matched(self) -> list[str]:
        """The names of the matching layers, leaves of layer outputs, and parameters."""
        return self.data["matched"]

    @property
    def cost_s(self) -> float | None:
        """The measured cost per observed step, in seconds. None until it is measured."""
        return self.data["cost_s"]

    @property
    def every_now(self) -> int | None:
        """The current interval in steps. Larger than ``every`` if the overhead was too high."""
        return self.data["every_now"]

    async def refresh(self) -> Self:
        """Fetch the current state of the probe."""
        await self._fetch()
        return self

    async def wait(self, timeout: float | None = 30.0) -> "AsyncProbe":
        """Wait until the job has applied or rejected the last change; see ``applied_step``.

        Args:
            timeout: seconds to wait. None: no limit.

        Raises:
            WaitTimeout: no step began in time.
        """
        async for _ in self._changes(timeout, "take effect"):
            if self.data["applied_step"] is not None or self.state == "rejected":
                break
        return self

    async def update(self, **fields: Any) -> "AsyncProbe":
        """Change ``every``, ``at``, ``max_overhead``, ``want``, or any other field of the probe."""
        self.data = await self._transport.patch(self.path, fields)
        return self

    async def remove(self) -> "AsyncProbe":
        """Detach the probe at the next step boundary. Its data is kept."""
        self.data = await self._transport.delete(self.path)
        return self
