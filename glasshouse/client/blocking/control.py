# Made from glasshouse/client/aio/control.py by .ci/twins.py: change that file.
"""Live control of a job: pause, resume, change settings, fork and retry."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from glasshouse.client.blocking.records import Record
from glasshouse.client.training.arguments import moved
from glasshouse.client.training.early_stop import StopLimit


class Command(Record):
    """A command to a running job, as of the last `refresh`."""

    job: str
    body: dict[str, Any]
    """The command: ``{"set": …}`` or ``{"do": …}``."""
    by: str
    """The owner of the API key that created it."""
    old: dict[str, Any] | None
    """The changed settings with their previous values."""
    new: dict[str, Any] | None
    """The changed settings with their new values."""
    created_at: str
    links: dict[str, str]

    @property
    def path(self) -> str:
        """The path of the command under ``/api/v1``."""
        return f"/jobs/{self.data['job']}/commands/{self.id}"

    @property
    def state(self) -> str:
        """``pending`` until the next step boundary, then ``applied`` or ``rejected``."""
        return self.data["state"]

    @property
    def step(self) -> int | None:
        """The first step that the command applies to; None until it is applied."""
        return self.data["step"]

    @property
    def problem(self) -> dict[str, Any] | None:
        """Why the command was rejected, as a problem document."""
        return self.data["problem"]

    def refresh(self) -> Self:
        """Fetch the current state of the command."""
        self._fetch()
        return self

    def wait(self, timeout: float | None = 30.0) -> "Command":
        """Wait until the command is applied or rejected.

        Args:
            timeout: seconds to wait. None: no limit.

        Raises:
            WaitTimeout: no step ended in time. A queued or paused job runs no steps.
        """
        for _ in self._changes(timeout, "take effect"):
            if self.state != "pending":
                break
        return self


class Controlled(Record):
    """The live control methods of a job."""

    def cancel(self, *, force: bool = False) -> Self:
        """Cancel the job at the next step boundary; ``force`` kills its processes immediately."""
        self.data = self._transport.post(f"{self.path}/cancel", params={"force": force or None})
        return self

    def pause(self) -> Self:
        """Save a checkpoint and free the devices. The state is ``pausing``, then ``paused``.

        Raises:
            ConflictError: the job has ended, is being canceled, or is a running inference job.
        """
        self.data = self._transport.post(f"{self.path}/pause")
        return self

    def resume(self) -> Self:
        """Queue the paused job again. A job that is still pausing is queued once it is paused.

        Raises:
            ConflictError: the job is neither paused nor pausing.
        """
        self.data = self._transport.post(f"{self.path}/resume")
        return self

    def retry(self) -> Self:
        """Submit the spec of this ended job as a new job, with this job as its parent."""
        return type(self)(self._transport, self._transport.create(f"{self.path}/retry", {}))

    def fork(
        self,
        spec: Mapping[str, Any] | None = None,
        *,
        checkpoint: str | None = None,
        step: int | None = None,
        load: Literal["all", "model"] | None = None,
        device: Any = None,
    ) -> Self:
        """Create a job that starts from a checkpoint of this one, with a modified spec.

        Args:
            spec: the changes, as a merge patch: ``{"optimizer": {"args": {"lr": 0.001}}}``.
            checkpoint: the id of the checkpoint. Default: the newest.
            step: instead of ``checkpoint``, the step of the checkpoint.
            load: ``all`` resumes the run, ``model`` loads the weights only. Default: ``all`` if the
                patch allows it.
            device: the device to run on, as in `Client.train`: ``"cpu"``, ``"cuda:1"``.
        """
        if device is not None:
            spec = moved(spec or {}, str(device))
        asked = {"spec": spec, "checkpoint": checkpoint, "step": step, "load": load}
        body = {key: value for key, value in asked.items() if value is not None}
        return type(self)(self._transport, self._transport.create(f"{self.path}/fork", body))

    def stop(self, timeout: float | None = 60.0) -> Self:
        """End the training early, as a success, and wait until the job has accepted the new limit.

        The job still runs its last evaluation and saves its last checkpoint. If the spec's limit
        is in epochs, the current epoch is finished.

        Args:
            timeout: seconds to wait for a step boundary. A paused job has none.

        Raises:
            WaitTimeout: there was no step boundary in time.
            ConflictError: the job has ended.
        """
        limit = StopLimit(self._transport.get(f"{self.path}/spec", {"resolved": True}))
        while True:
            self._fetch()
            progress: dict[str, Any] = self.data.get("progress") or {}
            command = self.set({limit.path: limit.soonest(progress)})
            if (command.wait(timeout)).state == "applied":
                return self
            limit.widen(command.step)  # the job has passed the limit meanwhile

    def set(self, settings: Mapping[str, Any] | None = None, **of_optimizer: Any) -> Command:
        """Change settings at the next step boundary. Either all are changed or none.

        Args:
            settings: values by path: ``{"grad_clip.max": 1.0, "stop.steps": 2000}``.
            of_optimizer: optimizer arguments by name: ``lr=1e-4``, ``momentum=0.8``.

        Raises:
            UnprocessableEntityError: a setting cannot be changed, or not to this value.
        """
        named = {f"optimizer.{name}": value for name, value in of_optimizer.items()}
        return self._command({"set": {**(settings or {}), **named}})

    def checkpoint(self) -> Command:
        """Save a checkpoint after the current step."""
        return self._command({"do": "checkpoint"})

    def evaluate(self) -> Command:
        """Run an evaluation on the validation data after the current step."""
        return self._command({"do": "evaluate"})

    def get_command(self, command_id: str) -> Command:
        """Fetch one command of the job."""
        command = Command(self._transport, {"id": command_id, "job": self.id})
        return command.refresh()

    def commands(self, *, state: str | None = None) -> list[Command]:
        """List the commands of the job, oldest first, with cancellations and probe changes.

        Args:
            state: only those in this state: ``pending``, ``applied`` or ``rejected``.
        """
        entries = self._transport.all(f"{self.path}/commands", {"state": state})
        return [Command(self._transport, entry) for entry in entries]

    def _command(self, body: dict[str, Any]) -> Command:
        return Command(self._transport, self._transport.create(f"{self.path}/commands", body))
