"""What jobs report: events, metrics, statistics, captures, outputs, and their rollups."""
