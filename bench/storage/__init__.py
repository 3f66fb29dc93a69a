"""The size and speed of what is stored: checkpoints, events, statistics, and their purge."""
