"""Run a trained network over rows, and name the classes that it predicts."""
