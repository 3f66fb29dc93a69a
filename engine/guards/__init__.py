"""Guards that detect NaN or Inf in training."""
