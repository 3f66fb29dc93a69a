"""With what training begins, when not from scratch: a checkpoint, and how much of it.

``resume``: the same job goes on. ``all``: another job goes on with the run, under its own spec.
``model``: another job begins with the weights.
"""

from dataclasses import dataclass
from typing import Literal

from engine.checkpoint import Saved
from engine.snapshot import Parts
from engine.stateful import Weights

_OF_THE_RUN = ("position", "model", "optimizer", "report", "generators")
"""What another job takes over; what watches begins anew."""


@dataclass(frozen=True)
class Start:
    """A checkpoint to begin with."""

    saved: Saved
    how: Literal["resume", "all", "model"] = "resume"
    missing: Literal["fail", "init", "zero"] = "fail"
    """Of ``model``: what becomes of parameters that the checkpoint has not."""

    @property
    def step(self) -> int:
        """The first step to run."""
        return 0 if self.how == "model" else self.saved.step

    @property
    def has_said_all(self) -> bool:
        """Whether it is the job's own last one, after which there is nothing more to say."""
        return self.how == "resume" and bool(self.saved.about["final"])

    def restore(self, parts: Parts) -> None:
        """Make the parts of a training run what they were.

        Raises:
            CheckpointMismatch: the checkpoint is of something else.
        """
        if self.how == "resume":
            self.saved.restore(parts)
            return
        weights = parts["model"]
        if self.how == "model" and self.missing != "fail" and isinstance(weights, Weights):
            weights.fill(self.saved.parts["model"], self.missing)
            return
        names = _OF_THE_RUN if self.how == "all" else ("model",)
        kept = {name: dict(self.saved.parts[name]) for name in names if name in self.saved.parts}
        if "optimizer" in kept:
            del kept["optimizer"]["param_groups"]  # the arguments are those of the job's own spec
        Saved(self.saved.about, kept).restore({name: parts[name] for name in names})
