"""The Celery worker: dispatch, supervision, devices. Serves no HTTP and imports no torch."""
