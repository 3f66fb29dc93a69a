"""Data: columns of a dataset directory as tensors on the device, and the order of their rows."""
