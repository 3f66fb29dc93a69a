"""The results of a job: state, outputs, samples, checkpoints and artifacts."""

import re
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

from glasshouse.client.aio.records import AsyncCheckpoint, AsyncRecord
from glasshouse.client.data.statistics import Phase, Step
from glasshouse.client.data.tensors import Array, read_outputs, read_tensors
from glasshouse.errors import APIError, JobCancelled, JobFailed, NotFoundError
from glasshouse.metric_direction import direction_of, sources_of
from glasshouse.suggestions import did_you_mean

ENDINGS = frozenset({"succeeded", "failed", "cancelled"})
OUTPUTS = tuple(f"outputs.{kind}" for kind in ("safetensors", "npz", "jsonl", "csv", "parquet"))
_KEPT = re.compile(r"(samples|metrics)-(\d+)\.safetensors")


class AsyncResults(AsyncRecord):
    """The result methods of a job."""

    @property
    def state(self) -> str:
        """The state of the job.

        One of ``queued``, ``starting``, ``running``, ``pausing``, ``paused``, ``cancelling``, or a
        final state: ``succeeded``, ``failed``, ``cancelled``.
        """
        return self.data["state"]

    @property
    def has_ended(self) -> bool:
        """Whether the job has succeeded, failed or been canceled."""
        return self.state in ENDINGS

    @property
    def error(self) -> dict[str, Any] | None:
        """Why the job failed. None if it has not failed."""
        return self.data.get("error")

    def raise_if_unsuccessful(self) -> None:
        """Raise `JobFailed` or `JobCancelled` if the job ended that way."""
        if self.state == "failed":
            raise JobFailed(self.id, self.error or {})
        if self.state == "cancelled":
            raise JobCancelled(f"{self.id} was canceled")

    async def refresh(self) -> Self:
        """Fetch the current state of the job."""
        await self._fetch()
        return self

    async def result(self) -> Any:
        """Return the ``result`` of an ended job. None if the result is only in the artifacts.

        Raises:
            JobFailed: the job failed.
            JobCancelled: the job was canceled.
        """
        if not self.has_ended:
            await self.refresh()
        self.raise_if_unsuccessful()
        return self.data.get("result")

    async def outputs(self) -> dict[str, Array]:
        """Return the outputs of an inference job, named ``<layer>/<field>``.

        If the classes have names, ``<layer>/class`` is added to ``<layer>/id``, and
        ``<layer>/top_k_class`` to ``<layer>/top_k``.

        Raises:
            ValueError: the job has written another format than ``safetensors``.
        """
        try:
            return read_outputs(await self.artifact("outputs.safetensors"))
        except NotFoundError:
            written = await self._outputs()
            if written is None:
                raise
            detail = f"{self.id} has written {written}: use save_outputs(path)"
            raise ValueError(detail) from None

    async def save_outputs(self, path: str | Path) -> None:
        """Download the outputs of an inference job into a file, in the format of the job.

        The file is downloaded in pieces, so that it may be larger than the memory.
        """
        found = await self._outputs()
        if found is None:
            raise APIError(f"{self.id} has no outputs: it is {self.state}")
        await self.save_artifact(found, path)

    async def _outputs(self) -> str | None:
        """Return the name of the file with the outputs; None: there is none."""
        names = {item.data["name"] for item in await self.artifacts()}
        return next((name for name in OUTPUTS if name in names), None)

    async def save_artifact(self, name: str, path: str | Path) -> None:
        """Download one artifact into a file, in pieces."""
        await self._transport.save(f"{self.path}/artifacts/{quote(name, safe='')}", Path(path))

    async def artifact(self, name: str) -> bytes:
        """Return the bytes of one artifact."""
        return await self._transport.download(f"{self.path}/artifacts/{quote(name, safe='')}")

    async def sampled_steps(self) -> list[int]:
        """Return the steps whose evaluation stored sample predictions."""
        return await self._kept_steps("samples")

    async def samples(self, step: int | None = None) -> dict[str, Array]:
        """Return sample predictions on validation rows: outputs and targets by name.

        ``row`` has the row numbers. Set the number of samples in the spec:
        ``"evaluate": {"samples": 8}``.

        Args:
            step: the step of the evaluation. Default: the newest evaluation.

        Raises:
            APIError: no evaluation has stored samples.
        """
        return await self._kept("samples", step)

    async def metric_tensors(self, step: int | None = None) -> dict[str, Array]:
        """Return the non-scalar metrics of an evaluation, by metric name.

        For example, a confusion matrix of shape [classes, classes], or the curves of a ROC as
        ``roc/0``, ``roc/1``.

        Args:
            step: the step of the evaluation. Default: the newest evaluation.

        Raises:
            APIError: no evaluation has stored metric tensors.
        """
        return await self._kept("metrics", step)

    async def metric_tensor_steps(self) -> list[int]:
        """Return the steps whose evaluation stored metric tensors."""
        return await self._kept_steps("metrics")

    async def _kept(self, what: str, step: int | None) -> dict[str, Array]:
        if step is None:
            steps = await self._kept_steps(what)
            if not steps:
                raise APIError(f"{self.id} has stored no {what} yet")
            step = steps[-1]
        return read_tensors(await self.artifact(f"{what}-{step}.safetensors"))

    async def _kept_steps(self, what: str) -> list[int]:
        found = [_KEPT.fullmatch(item.data["name"]) for item in await self.artifacts()]
        return sorted(int(name[2]) for name in found if name is not None and name[1] == what)

    async def requests(
        self,
        *,
        model: str | None = None,
        status: int | Sequence[int] | None = None,
        limit: int | None = None,
    ) -> AsyncGenerator[AsyncRecord]:
        """Iterate over the requests that a serve job has recorded, newest first.

        Empty unless the spec has ``request_log``.

        Args:
            model: only requests to the model with this name.
            status: only requests that were answered with this HTTP status, or one of several.
            limit: the most requests. Default: all.
        """
        statuses = [status] if isinstance(status, int) else status
        params = {"model": model, "limit": min(limit or 100, 100)}
        params["status"] = None if statuses is None else ",".join(map(str, statuses))
        left = limit
        async for page in self._transport.pages(f"{self.path}/requests", params):
            for entry in page[:left]:
                yield AsyncRecord(self._transport, entry)
            if left is not None and (left := left - len(page)) <= 0:
                return

    async def delete_requests(self) -> None:
        """Delete the requests that a serve job has recorded. It continues to record."""
        await self._transport.delete(f"{self.path}/requests")

    async def artifacts(self) -> list[AsyncRecord]:
        """List the artifacts of the job."""
        entries = await self._transport.all(f"{self.path}/artifacts")
        return [AsyncRecord(self._transport, entry) for entry in entries]

    async def captures(
        self,
        layer: str | None = None,
        *,
        kind: str | None = None,
        step: int | None = None,
        phase: Phase | None = None,
        rank: int | Literal["all"] | None = None,
    ) -> list[AsyncRecord]:
        """List the captured tensors: layer, kind, step, shape and size in bytes.

        Args:
            layer: a glob over names.
            kind: ``output``, ``param`` …
            step: only this step.
            phase: only ``train`` or only ``evaluate``.
            rank: only those of this process; ``all``: those of all processes together and of each.
                Default: only those of all together.
        """
        params = {"layer": layer, "kind": kind, "step": step, "phase": phase, "rank": rank}
        entries = await self._transport.all(f"{self.path}/captures", params)
        return [AsyncRecord(self._transport, entry) for entry in entries]

    async def tensors(
        self,
        names: Sequence[str],
        *,
        step: Step = "latest",
        phase: Phase | None = None,
        rank: int | None = None,
    ) -> dict[str, Array]:
        """Fetch several captured tensors of one step in one request.

        Args:
            names: names of the form ``<layer>/<kind>``: ``conv1/output``, ``fc.weight/param_grad``.
            step: the step, or ``"latest"``.
            phase: ``train`` or ``evaluate``.
            rank: the process whose tensors to fetch. Default: those of all processes together.

        Raises:
            NotFoundError: one of the tensors was not captured at this step.
        """
        params = {"name": list(names), "step": step, "phase": phase, "rank": rank}
        return read_tensors(await self._transport.download(f"{self.path}/tensors", params))

    async def best_checkpoint(
        self, metric: str = "validation/loss", mode: Literal["min", "max"] | None = None
    ) -> AsyncCheckpoint:
        """Return the complete checkpoint with the best value of a metric.

        Args:
            metric: the name of the metric; with several validation sources for example
                ``validation/clean/loss``.
            mode: ``min`` if lower is better, ``max`` if higher is better. Default: inferred from
                the metric's name: ``min`` for a loss or an error, ``max`` for an accuracy or a
                score.

        Raises:
            ValueError: ``mode`` is unset and cannot be inferred from the metric's name.
            APIError: no checkpoint has a finite value of this metric.
        """
        saved = await self.checkpoints()
        known = {name for one in saved for name in one.metrics}
        mode = mode or direction_of(metric, sources_of(known))
        if mode is None:
            detail = f"mode cannot be inferred from the metric name {metric!r}"
            raise ValueError(f"{detail}: set mode='min' or mode='max'")
        best: tuple[float, AsyncCheckpoint] | None = None
        sign = 1 if mode == "min" else -1
        for one in saved:
            value = one.metrics.get(metric)
            if not isinstance(value, (int, float)):  # missing, NaN or Inf
                continue
            if best is None or sign * value < best[0]:
                best = sign * value, one
        if best is None:
            near = did_you_mean(metric, sorted(known - {metric}))
            raise APIError(f"{self.id} has no checkpoint with a value of {metric}{near}")
        return best[1]

    async def checkpoints(self) -> list[AsyncCheckpoint]:
        """List the checkpoints of the job, ordered by step."""
        entries = await self._transport.all(f"{self.path}/checkpoints")
        found = [AsyncCheckpoint(self._transport, entry) for entry in entries]
        return sorted(found, key=lambda checkpoint: checkpoint.data.get("step", 0))

    async def weights(self) -> dict[str, Array]:
        """Return the weights of the newest checkpoint, by torch parameter name."""
        return await (await self._newest()).weights()

    async def state_dict(self) -> dict[str, Any]:
        """Return the weights of the newest checkpoint as torch tensors, by module parameter name.

        Use as ``module.load_state_dict(await job.state_dict())``. If the module has parameters
        that ``forward`` never uses, use `load_into` instead.
        """
        return await (await self._newest()).state_dict()

    async def load_into(self, module: Any) -> None:
        """Load the weights of the newest checkpoint into the torch module that was trained.

        Parameters that ``forward`` never uses are left unchanged.

        Raises:
            ValueError: the module lacks a parameter or has another shape.
        """
        await (await self._newest()).load_into(module)

    async def _newest(self) -> AsyncCheckpoint:
        found = await self.checkpoints()
        if not found:
            raise APIError(f"{self.id} has no complete checkpoint yet")
        return found[-1]
