"""What training begins with, if not from scratch: a checkpoint, and which parts of it.

``resume``: the same job resumes. ``all``: another job continues the run, under its own spec.
``model``: another job begins with the weights.
"""

import json
from dataclasses import dataclass
from typing import Literal

from engine.checkpoint.checkpoint import Saved
from engine.checkpoint.training_state import Weights, without_arguments
from engine.core.snapshot import Parts, State
from engine.data.batches.batch_counts import BatchCounts
from engine.data.columns.prepared import PART, Prepared
from glasshouse.errors import CheckpointMismatch
from glasshouse.spec import Data, TrainJob, parse_job

_OF_THE_RUN = (
    *("position", "model", "optimizer", "report", "generators", "newest", "averages", "scaler"),
)
"""Parts that another job takes over if both have them; probes and guards start anew."""


@dataclass(frozen=True)
class Start:
    """A checkpoint to begin with."""

    saved: Saved
    how: Literal["resume", "all", "model"] = "resume"
    missing: Literal["fail", "init", "zero"] = "fail"
    """For ``model``: what to do with parameters that the checkpoint does not have."""

    @property
    def step(self) -> int:
        """The first step to run."""
        return 0 if self.how == "model" else self.saved.step

    @property
    def has_said_all(self) -> bool:
        """Whether it is the job's own last checkpoint, after which nothing is left to report."""
        return self.how == "resume" and bool(self.saved.about["final"])

    def prepared(self, data: Data) -> Prepared:
        """Return what was learned of the data, if a job asks for the same; it is reused."""
        if PART not in self.saved.parts:  # for example of an uploaded network
            return Prepared()
        found = Prepared.read(self.saved.parts[PART])
        before = parse_job(json.dumps(self.saved.about["spec"]))
        return found if not isinstance(before, TrainJob) else found.alike(before.data, data)

    def restore(self, parts: Parts) -> None:
        """Restore the parts of a training run.

        Raises:
            CheckpointMismatch: the checkpoint is of something else.
        """
        if self.how == "resume":
            self.saved.restore(parts)
            return
        if self.how == "all" and "optimizer" not in self.saved.parts:
            raise CheckpointMismatch("The checkpoint has weights only: load 'model' of it.")
        kept = (
            self._of_the_run(parts) if self.how == "all" else {"model": self.saved.parts["model"]}
        )
        weights = parts["model"]
        if self.how == "model" and self.missing != "fail" and isinstance(weights, Weights):
            weights.fill(kept["model"], self.missing)
            return
        Saved(self.saved.about, kept).restore({name: parts[name] for name in kept})

    def _of_the_run(self, parts: Parts) -> dict[str, State]:
        """Return the state that the job continues with, under the arguments of its own spec."""
        saved = self.saved.parts
        kept = {name: dict(saved[name]) for name in _OF_THE_RUN if name in saved and name in parts}
        kept["optimizer"] = without_arguments(kept["optimizer"])
        for name in ("settled", "best"):  # its own log and its own checkpoints have none of it
            kept["report"].pop(name, None)
        if "averages" in kept and kept["averages"]["type"] != parts["averages"].state()["type"]:
            del kept["averages"]  # started anew, from the newest weights
        newest = saved["newest"] if "newest" in saved else kept["model"]
        if "averages" not in kept:
            kept["model"] = dict(newest)
        if "newest" in parts:
            kept["newest"] = dict(newest)
        if "scheduler" in parts:
            kept["scheduler"] = {"counts": _counts(saved["position"], saved["report"])}
        return kept


def _counts(position: State, report: State) -> dict[str, int]:
    """Return how far a run has come, in each unit that a scheduler may count in."""
    names = ("num_rows", "batch_size", "drop_last", "accumulate")
    pace = BatchCounts(
        **{name: position[name] for name in names}, num_batches=position.get("num_batches")
    )
    epochs = int(position["epoch"]) + (position["batch"] == pace.batches)
    return {"steps": int(position["step"]), "epochs": epochs, "samples": int(report["samples"])}
