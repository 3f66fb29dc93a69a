"""Whole tensors, or parts of them: from the look through the ring to files."""
