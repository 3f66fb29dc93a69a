"""What a job begins with that takes its beginning from a checkpoint of another one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import checkpoint
from engine.checkpoint import Saved
from engine.snapshot import Stateful
from glasshouse.errors import CheckpointMismatch

_OWN = ("probes", "derived")
"""Parts of which each job has its own."""


@dataclass(frozen=True)
class Start:
    """What the ``init`` of a spec says, with the checkpoint's directory."""

    directory: Path
    load: str
    """``model`` or ``all``."""

    @staticmethod
    def read(raw: dict[str, Any] | None) -> "Start | None":
        """Read what ``job.json`` says; None: nothing."""
        return None if raw is None else Start(Path(raw["dir"]), str(raw["load"]))

    def saved(self) -> Saved:
        """The checkpoint, checked.

        Raises:
            CheckpointDamaged: it is not what was written.
            CheckpointMismatch: it was written by a version that kept less.
        """
        found = checkpoint.read(self.directory)
        kind = Run if self.load == "all" else Model
        return kind(found.about | {"final": False}, found.parts)


class Run(Saved):
    """The whole run of another job, which goes on; with the new job's own settings."""

    def restore(self, parts: Mapping[str, Stateful]) -> None:
        """Make the parts what they were, but for what is the new job's own.

        Raises:
            CheckpointMismatch: it is the checkpoint of something else.
        """
        shared = {name: part for name, part in parts.items() if name not in _OWN}
        arguments = {"param_groups": parts["optimizer"].state()["param_groups"]}
        saved = {name: state for name, state in self.parts.items() if name not in _OWN}
        saved["optimizer"] = saved["optimizer"] | arguments
        Saved(self.about, saved).restore(shared)


class Model(Saved):
    """The weights of another job; training begins with step 0."""

    @property
    def step(self) -> int:
        """The next step to run."""
        return 0

    def restore(self, parts: Mapping[str, Stateful]) -> None:
        """Fill the network.

        Raises:
            CheckpointMismatch: it is the checkpoint of another network.
        """
        if "model" not in self.parts:
            raise CheckpointMismatch("The checkpoint holds no network.")
        Saved(self.about, {"model": self.parts["model"]}).restore({"model": parts["model"]})
