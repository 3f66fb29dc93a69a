"""The Celery tasks: wake-ups. A message says only that there is work in the database."""

from typing import Any

import structlog

from worker.attempt.supervisor import supervise
from worker.context import AWAY, WorkerContext
from worker.ingest import Readers
from worker.wakeups.canary import Canary

_log: Any = structlog.get_logger()


def hang(app: Any, context: WorkerContext, canary: Canary, readers: Readers) -> None:
    """Register the tasks of a worker."""

    def ring_dispatch(*_: Any, **__: Any) -> None:
        heard("dispatch", context.dispatch)

    def ring_supervise(job_id: str, *_: Any, **__: Any) -> None:
        heard("supervise", lambda: context.supervise(job_id, supervise))

    def ring_canary(*_: Any, **__: Any) -> None:
        heard("canary", canary.heard)

    def ring_read(*_: Any, **__: Any) -> None:
        readers.wake()

    app.task(ring_canary, name="glasshouse.canary", shared=False)
    app.task(ring_dispatch, name="glasshouse.dispatch", shared=False)
    app.task(ring_read, name="glasshouse.read", shared=False)
    app.task(ring_supervise, name="glasshouse.supervise", shared=False)


def heard(bell: str, act: Any) -> None:
    """Handle a wake-up. If it fails, the sweep tries again."""
    try:
        act()
    except AWAY as error:
        _log.warning("database_unavailable", wakeup=bell, error=str(error))
    except Exception:
        _log.exception("wakeup_failed", wakeup=bell)
