"""Probes: which tensors are watched, on which steps, and how the records leave the process."""
