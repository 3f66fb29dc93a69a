"""The purge and the daily look at SQLite's file, done by one worker at a time, off the sweep."""

from typing import Any

import structlog

from models import marks
from models.database import Transaction
from models.purge import Purge
from models.storage import integrity, retention
from worker.context import WorkerContext

_log: Any = structlog.get_logger()
DELETED_EVERY_S = 5.0
"""How often a worker looks for deleted jobs: one query of an index that is empty as a rule."""
TURN_MS = 60_000
"""A worker that has not deleted anything for so long has given its turn away."""


class Purging:
    """Called again and again: one pass, if no other worker is at it."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context

    def __call__(self) -> None:
        """Delete what is kept no longer."""
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
        """Delete what deleted jobs have left: soon, for somebody may need the space."""
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
