"""Networks, data, training, probes, inference, checkpoints. Imports nothing of the service."""
