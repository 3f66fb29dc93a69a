# Made from glasshouse/client/aio/results.py by .ci/twins.py: change that file.
"""How a job ended, and what came of it: outputs, samples, checkpoints, files."""

import re
from collections.abc import Sequence
from typing import Any, Literal, Self
from urllib.parse import quote

from glasshouse.client.records import Checkpoint, Record
from glasshouse.client.statistics import Phase, Step
from glasshouse.client.tensors import Array, read_outputs, read_tensors
from glasshouse.direction import direction_of
from glasshouse.errors import APIError, JobCancelled, JobFailed

ENDINGS = frozenset({"succeeded", "failed", "cancelled"})
_KEPT = re.compile(r"(samples|metrics)-(\d+)\.safetensors")


class Results(Record):
    """What a job ends with."""

    @property
    def state(self) -> str:
        """``queued``, ``starting``, ``running``, ``pausing``, ``paused``, ``cancelling``, or ended.

        Ended is ``succeeded``, ``failed``, ``cancelled``.
        """
        return self.data["state"]

    @property
    def has_ended(self) -> bool:
        """Whether it is succeeded, failed or cancelled."""
        return self.state in ENDINGS

    @property
    def error(self) -> dict[str, Any] | None:
        """Why it failed."""
        return self.data.get("error")

    def raise_if_unsuccessful(self) -> None:
        """Raise `JobFailed` or `JobCancelled` if that is how it ended."""
        if self.state == "failed":
            raise JobFailed(self.id, self.error or {})
        if self.state == "cancelled":
            raise JobCancelled(f"{self.id} was cancelled")

    def refresh(self) -> Self:
        """Read it anew."""
        self._fetch()
        return self

    def result(self) -> Any:
        """The small result of an inference job that has ended; None if it is only a file."""
        if not self.has_ended:
            self.refresh()
        self.raise_if_unsuccessful()
        return self.data.get("result")

    def outputs(self) -> dict[str, Array]:
        """The tensors of an inference job, named ``<layer>/<field>``.

        Beside ``<layer>/id`` there is ``<layer>/class`` where the classes have names.
        """
        return read_outputs(self.artifact("outputs.safetensors"))

    def artifact(self, name: str) -> bytes:
        """The bytes of one file it made."""
        return self._transport.download(f"{self.path}/artifacts/{quote(name, safe='')}")

    def sampled_steps(self) -> list[int]:
        """The steps after which an evaluation kept sample predictions."""
        return self._kept_steps("samples")

    def samples(self, step: int | None = None) -> dict[str, Array]:
        """What the network said of the sampled validation rows: outputs and targets by name.

        ``row`` has the rows' numbers. The job's ``evaluate`` says how many: ``{"samples": 8}``.

        Args:
            step: of the evaluation after this step; left out, of the newest.

        Raises:
            APIError: no evaluation has kept any.
        """
        return self._kept("samples", step)

    def metric_tensors(self, step: int | None = None) -> dict[str, Array]:
        """What the metrics of an evaluation gave that is no single number, by the metric's name.

        A confusion matrix of shape [classes, classes]; the curves of a ROC as ``roc/0``, ``roc/1``.

        Args:
            step: of the evaluation after this step; left out, of the newest.

        Raises:
            APIError: no evaluation has kept any.
        """
        return self._kept("metrics", step)

    def metric_tensor_steps(self) -> list[int]:
        """The steps after which an evaluation kept tensors of metrics."""
        return self._kept_steps("metrics")

    def _kept(self, what: str, step: int | None) -> dict[str, Array]:
        if step is None:
            steps = self._kept_steps(what)
            if not steps:
                raise APIError(f"{self.id} has kept no {what} yet")
            step = steps[-1]
        return read_tensors(self.artifact(f"{what}-{step}.safetensors"))

    def _kept_steps(self, what: str) -> list[int]:
        found = [_KEPT.fullmatch(item.data["name"]) for item in self.artifacts()]
        return sorted(int(name[2]) for name in found if name is not None and name[1] == what)

    def artifacts(self) -> list[Record]:
        """The files it made."""
        entries = self._transport.all(f"{self.path}/artifacts")
        return [Record(self._transport, entry) for entry in entries]

    def captures(
        self,
        layer: str | None = None,
        *,
        kind: str | None = None,
        step: int | None = None,
        phase: Phase | None = None,
    ) -> list[Record]:
        """Which tensors were kept whole or in part: layer, kind, step, shape, size.

        Args:
            layer: a glob over names.
            kind: ``output``, ``param`` …
            step: of this step only.
            phase: of training steps, or of evaluations.
        """
        params = {"layer": layer, "kind": kind, "step": step, "phase": phase}
        entries = self._transport.all(f"{self.path}/captures", params)
        return [Record(self._transport, entry) for entry in entries]

    def tensors(
        self, names: Sequence[str], *, step: Step = "latest", phase: Phase | None = None
    ) -> dict[str, Array]:
        """Several captured tensors of one step in one request.

        Args:
            names: as ``<layer>/<kind>``: ``conv1/output``, ``fc.weight/param_grad``.
            step: which one.
            phase: of a training step, or of an evaluation.

        Raises:
            NotFoundError: one was not captured at that step.
        """
        params = {"name": list(names), "step": step, "phase": phase}
        return read_tensors(self._transport.download(f"{self.path}/tensors", params))

    def best_checkpoint(
        self, metric: str = "validation/loss", mode: Literal["min", "max"] | None = None
    ) -> Checkpoint:
        """Of its complete checkpoints the one with the best value of a metric.

        Args:
            metric: one that it had reported by then.
            mode: whether less is better (``min``) or more (``max``). Default: what the name of the
                metric tells: less of a loss or an error, more of an accuracy or a score.

        Raises:
            ValueError: ``mode`` is unset, and the metric's name does not tell.
            APIError: none has this metric as a finite number.
        """
        mode = mode or direction_of(metric)
        if mode is None:
            detail = f"mode: the name of {metric!r} does not tell whether less or more is better;"
            raise ValueError(f"{detail} give mode='min' or mode='max'")
        best: tuple[float, Checkpoint] | None = None
        sign = 1 if mode == "min" else -1
        for one in self.checkpoints():
            value = one.metrics.get(metric)
            if not isinstance(value, (int, float)):  # none, or one that is no number
                continue
            if best is None or sign * value < best[0]:
                best = sign * value, one
        if best is None:
            raise APIError(f"{self.id} has no checkpoint with a value of {metric}")
        return best[1]

    def checkpoints(self) -> list[Checkpoint]:
        """Its checkpoints, in the order of their steps."""
        entries = self._transport.all(f"{self.path}/checkpoints")
        found = [Checkpoint(self._transport, entry) for entry in entries]
        return sorted(found, key=lambda checkpoint: checkpoint.data.get("step", 0))

    def weights(self) -> dict[str, Array]:
        """The weights of its newest checkpoint, by torch's parameter names."""
        return (self._newest()).weights()

    def state_dict(self) -> dict[str, Any]:
        """The weights of its newest checkpoint as torch tensors, by the trained module's names.

        ``module.load_state_dict(job.state_dict())``, for a module that uses all that it
        has; see `load_into`.
        """
        return (self._newest()).state_dict()

    def load_into(self, module: Any) -> None:
        """Put the weights of its newest checkpoint back into the torch module that was trained.

        What the module has and never uses stays as it is.

        Raises:
            ValueError: it is another module.
        """
        (self._newest()).load_into(module)

    def _newest(self) -> Checkpoint:
        found = self.checkpoints()
        if not found:
            raise APIError(f"{self.id} has no complete checkpoint yet")
        return found[-1]
