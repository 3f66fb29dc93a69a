"""How a rank learns what to watch: a file with the whole list, and its name down the lifeline."""

import time
from pathlib import Path
from typing import Any

import structlog

from glasshouse import jsonio
from worker.ranks import Rank

_log: Any = structlog.get_logger()
_RETRY_S = 1.0


class Watching:
    """The list of probes that was asked for, and the one that the rank was told."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._told = 0
        self._retry_at = 0.0
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
        if time.monotonic() < self._retry_at:
            return
        name = f"probes-{wanted['revision']}.json"
        try:
            (self._directory / name).write_text(jsonio.dumps(wanted))
        except OSError as error:  # a full disk is no reason to stop training
            _log.warning("probes_not_told", error=str(error))
            self._retry_at = time.monotonic() + _RETRY_S
            return
        rank.tell({"do": "probes", "file": name})
        self._told = wanted["revision"]
