"""The purge and the daily look at SQLite's file, done by one worker at a time, off the sweep."""

from typing import Any

import structlog

from models import integrity, marks
from models.database import Transaction
from models.purge import Purge
from worker.station import Station

_log: Any = structlog.get_logger()
TURN_MS = 60_000
"""A worker that has not deleted anything for so long has given its turn away."""


class Purging:
    """Called again and again: one pass, if no other worker is at it."""

    def __init__(self, station: Station) -> None:
        self._station = station

    def __call__(self) -> None:
        """Delete what is kept no longer."""
        station = self._station
        damage = integrity.check_if_due(station.database)
        if damage not in (None, integrity.WHOLE):
            _log.error("database_damaged", said=damage)
        with station.database.write() as tx:
            if not self._is_mine(tx):
                return
        purge = Purge(
            station.settings,
            station.database,
            station.artifacts,
            stop=station.stopping,
            stays_mine=self._is_mine,
        )
        done = purge.run().as_dict()
        if done["rows"] or done["files"] or done["orphans"]:
            _log.info("purged", **done)

    def _is_mine(self, tx: Transaction) -> bool:
        return marks.take(tx, "purge", self._station.name, every_ms=TURN_MS)
