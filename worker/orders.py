"""How a rank learns what is asked of it: a file with commands, and its name down the lifeline."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from glasshouse import jsonio
from worker.ranks import Rank

_log: Any = structlog.get_logger()
_RETRY_S = 1.0


class Orders:
    """The commands that wait for a rank, and those that it was told of."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._told: set[str] = set()
        self._waiting: list[dict[str, Any]] = []
        self._files = 0
        self._retry_at = 0.0

    def told(self, orders: Sequence[dict[str, Any]]) -> None:
        """Note what the rank's ``job.json`` says already."""
        self._told |= {order["id"] for order in orders}

    def want(self, orders: Sequence[dict[str, Any]]) -> None:
        """Take what waits now, in the order of asking."""
        self._waiting = [order for order in orders if order["id"] not in self._told]

    def tell(self, rank: Rank) -> None:
        """Tell the rank what is new, once. It takes it up at its next step boundary."""
        if not self._waiting or time.monotonic() < self._retry_at:
            return
        name = f"commands-{self._files}.json"
        try:
            (self._directory / name).write_text(jsonio.dumps(self._waiting))
        except OSError as error:  # a full disk is no reason to stop training
            _log.warning("commands_not_told", error=str(error))
            self._retry_at = time.monotonic() + _RETRY_S
            return
        rank.tell({"do": "commands", "file": name})
        self.told(self._waiting)
        self._files += 1
        self._waiting = []
