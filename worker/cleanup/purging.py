"""Runs the purge and the daily integrity check of SQLite's file, in one worker at a time."""

from typing import Any

import structlog

from models import marks
from models.database import Transaction
from models.purge import Purge
from models.storage import integrity, retention
from worker.context import WorkerContext

_log: Any = structlog.get_logger()
DELETED_EVERY_S = 5.0
"""How often a worker checks for deleted jobs: one query of an index that is usually empty."""
TURN_MS = 60_000
"""After this time without a deletion another worker may take over."""


class Purging:
    """Runs one pass per call, unless another worker is purging."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def __call__(self) -> None:
        """Delete what retention no longer keeps, after the integrity check if it is due."""
        context = self._context
        damage = integrity.check_if_due(context.database)
        if damage not in (None, integrity.WHOLE):
            _log.error("database_damaged", said=damage)
        with context.database.write() as tx:
            if not self._is_mine(tx, "purge"):
                return
        done = self._purge("purge").run().as_dict()
        if done["rows"] or done["files"] or done["orphans"]:
            _log.info("purged", **done)

    def deleted(self) -> None:
        """Delete the rows and files of deleted jobs, soon, because the space may be needed."""
        context = self._context
        with context.database.read() as tx:
            if not retention.deleted_jobs(tx, limit=1):
                return
        with context.database.write() as tx:
            if not self._is_mine(tx, "purge.deleted"):
                return
        done = self._purge("purge.deleted").run_deleted().as_dict()
        _log.info("deleted_jobs_purged", **done)

    def _purge(self, turn: str) -> Purge:
        context = self._context
        return Purge(
            context.settings,
            context.database,
            context.artifacts,
            stop=context.stopping,
            stays_mine=lambda tx: self._is_mine(tx, turn),
        )

    def _is_mine(self, tx: Transaction, turn: str) -> bool:
        return marks.take(tx, turn, self._context.name, every_ms=TURN_MS)
