"""Routes of what is stored as files: datasets, checkpoints, artifacts."""
