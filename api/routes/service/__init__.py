"""Routes of the service itself: health, metrics, catalog, devices, workers, queue."""
