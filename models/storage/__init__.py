"""Bulk data and how long it is kept: artifacts, datasets, retention, deletions, disk space."""
