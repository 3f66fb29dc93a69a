"""Folds the statistics of a running job in small pieces, between the supervisor's other work.

Each turn is one short piece: a read, or some series compressed and stored in one transaction of
some tens of milliseconds. An interrupted fold starts over. Nothing is lost, because only the
transaction that completes a fold deletes its blocks.
"""

import time
from collections.abc import Callable, Generator
from typing import Any

import structlog

from glasshouse.failpoints import failpoint
from models.database import Database, Transaction
from models.jobs.leases import Claim
from models.observations import unfolded_stats
from models.observations.unfolded_stats import StatsOwner
from worker.context import AWAY

_log: Any = structlog.get_logger()

LOOK_EVERY_S = 2.0


class Folding:
    """The folding of one attempt's job."""

    def __init__(self, database: Database, claim: Claim) -> None:
        self._database = database
        self._owner = StatsOwner(claim.job, claim.fence)
        self._work: Generator[None] | None = None
        self._looked_at = time.monotonic()
        self._over = False

    def turn(self) -> None:
        """Do one piece of work if one is due. Never raise: training and its records come first."""
        if self._work is None:
            if time.monotonic() - self._looked_at < LOOK_EVERY_S:
                return
            self._looked_at = time.monotonic()
        self._advance(unfolded_stats.is_due)

    def finish(self) -> None:
        """Fold what is left after the job has ended; give up if the database is unavailable."""
        while self._advance(unfolded_stats.is_left):
            pass

    def _advance(self, begins: Callable[[Transaction, str], bool]) -> bool:
        """Continue the fold by one piece, or begin one. Return False if nothing was done."""
        if self._over:
            return False
        try:
            if self._work is None:
                with self._database.read() as tx:
                    if not begins(tx, self._owner.job):
                        return False
                self._work = self._fold()
            next(self._work)
        except StopIteration:
            self._work = None
        except AWAY as error:
            _log.warning("database_unavailable", error=str(error))
            self._work = None
            self._looked_at = time.monotonic()
            return False
        except Exception:
            _log.exception("fold_failed")  # the blocks stay readable without the fold
            self._work, self._over = None, True
            return False
        return True

    def _fold(self) -> Generator[None]:
        from models.observations import stats_folding  # noqa: PLC0415 (numpy, once something was watched)

        owner = self._owner
        with self._database.read() as tx:
            fold = stats_folding.read(tx, owner.job)
        if fold is None:
            return
        yield
        with self._database.write() as tx:
            number = stats_folding.begin(tx, owner)
        if number is None:
            self._over = True
            return
        for portion in fold.portions():
            yield
            with self._database.write() as tx:
                if not stats_folding.store(tx, owner, number, portion):
                    self._over = True
                    return
                failpoint("fold.store")
        yield
        with self._database.write() as tx:
            self._over = not stats_folding.finish(tx, owner, number, fold.blocks)
            failpoint("fold.commit")
        failpoint("fold.committed")
