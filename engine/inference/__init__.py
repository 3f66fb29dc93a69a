"""A trained network over rows, and the classes that it predicts."""
