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

    def on_dispatch(*_: Any, **__: Any) -> None:
        handle("dispatch", context.dispatch)

    def on_supervise(job_id: str, *_: Any, **__: Any) -> None:
        handle("supervise", lambda: context.supervise(job_id, supervise))

    def on_canary(*_: Any, **__: Any) -> None:
        handle("canary", canary.received)

    def on_read(*_: Any, **__: Any) -> None:
        readers.wake()

    app.task(on_canary, name="glasshouse.canary", shared=False)
    app.task(on_dispatch, name="glasshouse.dispatch", shared=False)
    app.task(on_read, name="glasshouse.read", shared=False)
    app.task(on_supervise, name="glasshouse.supervise", shared=False)


def handle(wakeup: str, act: Any) -> None:
    """Handle a wake-up. If it fails, the sweep tries again."""
    try:
        act()
    except AWAY as error:
        _log.warning("database_unavailable", wakeup=wakeup, error=str(error))
    except Exception:
        _log.exception("wakeup_failed", wakeup=wakeup)
