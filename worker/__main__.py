"""One worker of the service: ``python -m worker [--name NAME]``.

The fork server takes longest to start, because it imports torch. So it is started first, and the
rest of the worker is imported meanwhile.
"""

import argparse
import fcntl
import gc
import logging
import re
import sys
from pathlib import Path
from typing import IO, Any

if __name__ == "__main__":
    gc.disable()  # there is no garbage yet, and looking for it takes a sixth of the import time

import structlog

from glasshouse.unpickling import refuse_unpickling
from models.settings import Settings
from worker.processes.fork_server import ForkServerClient

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def lock(path: Path) -> IO[str]:
    """Lock a file, so that a second worker of this name on this host does not start.

    The file names the process that held it last.
    """
    handle = path.open("a+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(
            f"A worker of this name runs on this host already and holds {path}. Start this one "
            "under another name (--name or GLASSHOUSE_WORKER_NAME), or stop the other one first."
        ) from None
    handle.seek(0)
    return handle


def configure_log() -> None:
    """Write the log of structlog and of all libraries to stderr: one JSON object per line."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.getLogger("celery.worker.strategy").setLevel(logging.WARNING)  # a line per wake-up
    logging.getLogger("celery.app.trace").setLevel(logging.WARNING)


def main(arguments: list[str] | None = None) -> int:
    """Run a worker until a signal ends it or its lifeline closes."""
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument("--name", help="unique among the workers of one service")
    name = parser.parse_args(arguments).name
    settings = Settings(worker_name=name) if name else Settings()
    if _NAME.fullmatch(settings.worker_name) is None:
        parser.error("a worker's name has letters, digits, dots, dashes and underlines")
    configure_log()
    refuse_unpickling()
    work = settings.work / settings.worker_name
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = lock(work / "lock")
    fork_server = ForkServerClient(log_path=work / "fork-server.log")
    fork_server.start()

    from worker.process import run  # noqa: PLC0415 (while the fork server imports torch)

    return run(settings, held, fork_server)


if __name__ == "__main__":
    sys.exit(main())
