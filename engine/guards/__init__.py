"""Guards over the numbers of training."""
