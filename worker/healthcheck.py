"""Health check for containers: ``python -m worker.healthcheck`` exits with 0 if all is well.

It reads from the database the last heartbeat of the worker named ``GLASSHOUSE_WORKER_NAME``.
"""

import sys

from glasshouse.errors import ServiceError
from models.database import Database
from models.fleet import workers
from models.settings import Settings


def main() -> int:
    """Check once."""
    settings = Settings()
    database = Database(settings.database)
    try:
        with database.read() as tx:
            found = workers.all_workers(tx, lease_ms=int(settings.lease_s * 1000))
    except ServiceError as error:
        sys.stderr.write(f"{error.detail}\n")
        return 1
    finally:
        database.close()
    state = next((state for row, state in found if row.id == settings.worker_name), "unknown")
    if state in ("active", "draining"):
        return 0
    sys.stderr.write(f"worker {settings.worker_name} is {state}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
