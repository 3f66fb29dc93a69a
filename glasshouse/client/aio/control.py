"""Steering a job that runs: pause, resume, change its settings; and its successors."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from glasshouse.client.accepting import moved
from glasshouse.client.aio.records import AsyncRecord
from glasshouse.client.stopping import StopLimit


class AsyncCommand(AsyncRecord):
    """Something asked of a running job, as it was when it was last read."""

    job: str
    body: dict[str, Any]
    """What was asked: ``set`` or ``do``."""
    by: str
    """The owner of the key that asked."""
    old: dict[str, Any] | None
    """The settings that it changed, as they were."""
    new: dict[str, Any] | None
    created_at: str
    links: dict[str, str]

    @property
    def path(self) -> str:
        """Where it lives, under ``/api/v1``."""
        return f"/jobs/{self.data['job']}/commands/{self.id}"

    @property
    def state(self) -> str:
        """``pending`` until a step boundary, then ``applied`` or ``rejected``."""
        return self.data["state"]

    @property
    def step(self) -> int | None:
        """The first step for which it holds; None before."""
        return self.data["step"]

    @property
    def problem(self) -> dict[str, Any] | None:
        """Why it was rejected."""
        return self.data["problem"]

    async def refresh(self) -> Self:
        """Read it anew."""
        await self._fetch()
        return self

    async def wait(self, timeout: float | None = 30.0) -> "AsyncCommand":
        """Wait until it is applied or rejected.

        Raises:
            WaitTimeout: no step has ended in time; a job that is queued or paused makes none.
        """
        async for _ in self._changes(timeout, "take effect"):
            if self.state != "pending":
                break
        return self


class AsyncSteered(AsyncRecord):
    """What can be asked of a job."""

    async def cancel(self, *, force: bool = False) -> Self:
        """Ask it to stop at the next step boundary; ``force`` ends its processes at once."""
        self.data = await self._transport.post(
            f"{self.path}/cancel", params={"force": force or None}
        )
        return self

    async def pause(self) -> Self:
        """Ask it to save a checkpoint and free its devices; ``pausing``, then ``paused``.

        Raises:
            ConflictError: it has ended, is being cancelled, or is an inference that runs.
        """
        self.data = await self._transport.post(f"{self.path}/pause")
        return self

    async def resume(self) -> Self:
        """Queue it again; one that is still pausing, as soon as it is paused.

        Raises:
            ConflictError: it is not paused.
        """
        self.data = await self._transport.post(f"{self.path}/resume")
        return self

    async def retry(self) -> Self:
        """Submit the same spec again as a new job, whose parent this one is. It must have ended."""
        return type(self)(self._transport, await self._transport.create(f"{self.path}/retry", {}))

    async def fork(
        self,
        spec: Mapping[str, Any] | None = None,
        *,
        checkpoint: str | None = None,
        step: int | None = None,
        load: Literal["all", "model"] | None = None,
        device: Any = None,
    ) -> Self:
        """A new job that begins where a checkpoint of this one ends, with another spec.

        Args:
            spec: the changes, as a merge patch: ``{"optimizer": {"args": {"lr": 0.001}}}``.
            checkpoint: id of the checkpoint; left out, its newest.
            step: instead, the step of the checkpoint.
            load: ``all`` goes on with the run, ``model`` takes the weights only; left out, ``all``
                where the patch allows it.
            device: the device to run on, as in `AsyncClient.train`: ``"cpu"``, ``"cuda:1"``.
        """
        if device is not None:
            spec = moved(spec or {}, str(device))
        asked = {"spec": spec, "checkpoint": checkpoint, "step": step, "load": load}
        body = {key: value for key, value in asked.items() if value is not None}
        return type(self)(self._transport, await self._transport.create(f"{self.path}/fork", body))

    async def stop(self, timeout: float | None = 60.0) -> Self:
        """Have its training end well and soon, as if its spec had said so, and wait for that word.

        The last evaluation and the last checkpoint are made, and it has succeeded. Where the spec
        counts epochs, the one under way is finished.

        Args:
            timeout: seconds to wait for a step boundary; a job that is paused makes none.

        Raises:
            WaitTimeout: there was none in time.
            ConflictError: it has ended.
        """
        limit = StopLimit(await self._transport.get(f"{self.path}/spec", {"resolved": True}))
        while True:
            await self._fetch()
            progress: dict[str, Any] = self.data.get("progress") or {}
            command = await self.set({limit.path: limit.soonest(progress)})
            if (await command.wait(timeout)).state == "applied":
                return self
            limit.widen(command.step)  # it has gone on meanwhile

    async def set(
        self, settings: Mapping[str, Any] | None = None, **of_optimizer: Any
    ) -> AsyncCommand:
        """Change settings from its next step boundary on; all of them or none.

        Args:
            settings: by their paths: ``{"grad_clip.max": 1.0, "stop.steps": 2000}``.
            of_optimizer: by their names: ``lr=1e-4``, ``momentum=0.8``.

        Raises:
            UnprocessableEntityError: one cannot be changed, or not to this value.
        """
        named = {f"optimizer.{name}": value for name, value in of_optimizer.items()}
        return await self._command({"set": {**(settings or {}), **named}})

    async def checkpoint(self) -> AsyncCommand:
        """Have it save a checkpoint after the step that is under way."""
        return await self._command({"do": "checkpoint"})

    async def evaluate(self) -> AsyncCommand:
        """Have it run the validation rows after the step that is under way."""
        return await self._command({"do": "evaluate"})

    async def get_command(self, command_id: str) -> AsyncCommand:
        """One thing that was asked of it."""
        asked = AsyncCommand(self._transport, {"id": command_id, "job": self.id})
        return await asked.refresh()

    async def commands(self, *, state: str | None = None) -> list[AsyncCommand]:
        """All that was asked of it, oldest first; cancellations and changes of probes too."""
        entries = await self._transport.all(f"{self.path}/commands", {"state": state})
        return [AsyncCommand(self._transport, entry) for entry in entries]

    async def _command(self, body: dict[str, Any]) -> AsyncCommand:
        return AsyncCommand(
            self._transport, await self._transport.create(f"{self.path}/commands", body)
        )
