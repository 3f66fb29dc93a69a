"""Routes of what a job records: events, logs, metrics, layers, tensors, probes, plots."""
