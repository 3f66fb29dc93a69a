"""Whole tensors or parts of them: from the probe through the ring to files."""
