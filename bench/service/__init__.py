"""The latency and throughput of the service: submission, start of a rank, event streams."""
