"""A container's health check: ``python -m worker.healthcheck`` ends with 0 if the worker is alive.

It asks the database for the last heartbeat of the worker of this name (``GLASSHOUSE_WORKER_NAME``).
"""

import sys

from glasshouse.errors import ServiceError
from models.database import Database
from models.fleet import workers
from models.settings import Settings


def main() -> int:
    """Look once."""
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
