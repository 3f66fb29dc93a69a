"""How a rank learns what to watch: a file with the whole list, and its name down the lifeline."""

from pathlib import Path
from typing import Any

from glasshouse import jsonio
from worker.ranks import Rank


class Watching:
    """The list of probes that was asked for, and the one that the rank was told."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._told = 0
        self.wanted: dict[str, Any] | None = None
        """The newest list, with its revision."""

    def told(self, document: dict[str, Any] | None) -> None:
        """Note what the rank's ``job.json`` says already."""
        self._told = 0 if document is None else document["revision"]

    def tell(self, rank: Rank) -> None:
        """Tell the rank the newest list, once. It takes it up at its next step boundary."""
        wanted = self.wanted
        if wanted is None or wanted["revision"] <= self._told:
            return
        name = f"probes-{wanted['revision']}.json"
        (self._directory / name).write_text(jsonio.dumps(wanted))
        rank.tell({"do": "probes", "file": name})
        self._told = wanted["revision"]
